"""The left side of the page: what is picked. A control says what it is set to, and under it what is wrong with that."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from nicegui import ui
from nicegui.events import ValueChangeEventArguments

from moestro.ui.goal import OBJECTIVES
from moestro.ui.ladders import ladder, nearest_place
from moestro.ui.offer import Offer, described
from moestro.ui.picked import FINER, LAYOUT, OPTIMIZERS, PRECISIONS, TRAINERS, Picked
from moestro.ui.state import View, in_force, offered, shown
from moestro.ui.words import HELP, LABELS

NUMBERED = ("pp", "vpp", "tp", "cp", "ep", "etp", "zero", "micro_batch_size", "expert_chunks")

Pick = Callable[[Picked, str], None]


class Controls:
    """picks: called with what is now picked and the field that was moved. best: with a field whose best value is
    wanted."""

    def __init__(self, offer: Offer, picked: Picked, picks: Pick, best: Callable[[str], None]) -> None:
        self.offer, self.picked, self._picks, self._best = offer, picked, picks, best
        self._quiet = False  # while values are set by the page itself
        self._numbers: dict[str, tuple[Any, Any]] = {}
        self._lists: dict[str, Any] = {}
        self._fields: dict[str, Field] = {}
        self._problems: dict[str, ui.label] = {}
        with _card("Run"):
            self._list("run", offer.runs)
            self._number("seq_len")
            self._number("global_batch_size")
            with ui.element("div").classes("three"):
                self._list("precision", PRECISIONS)
                self._list("optimizer", OPTIMIZERS)
                self._list("trainer", TRAINERS)
            self._number("tokens")
        with _card("Machine"):
            self._list("hardware", {name: described(name) for name in offer.machines})
            self._number("devices")
            self._number("usd_per_hour")
        with _card("Plan"):
            self.dp = ui.label().classes("derived")
            self._problem("")
            for name in LAYOUT:
                self._field(name)
            with ui.expansion("more").classes("more").props("dense"):
                for name in FINER:
                    self._field(name)

    def show(self, view: View) -> None:
        """Of a pick, all values; without telling anybody."""
        self._quiet, self.picked = True, view.picked
        try:
            for name, control in self._lists.items():
                control.set_value(getattr(view.picked, name))
            for name, (slider, number) in self._numbers.items():
                _set_number(slider, number, name, view, self.offer)
            for row in self._fields.values():
                row.show(view)
            plan = view.plan
            self.dp.set_text("" if plan is None else f"dp = {plan.dp:,}: what pp · cp · tp leave of the devices")
            for name, label in self._problems.items():
                label.set_text(view.problems.get(name, ""))
        finally:
            self._quiet = False

    def _tell(self, picked: Picked, name: str) -> None:
        if not self._quiet:
            self.picked = picked
            self._picks(picked, name)

    def _list(self, name: str, options: Any) -> None:
        def changed(event: ValueChangeEventArguments[Any]) -> None:
            self._tell(replace(self.picked, **{name: event.value}), name)

        with ui.element("div").classes("control").mark(name):
            wide = name in ("run", "hardware")
            chosen = ui.select(
                list(options) if not isinstance(options, dict) else options,
                label=LABELS[name], value=getattr(self.picked, name), on_change=changed, with_input=wide,
            ).classes("list").props(f'dense options-dense outlined data-name="{name}"')  # fmt: skip
            _help(chosen, name)
            self._lists[name] = chosen
            self._problem(name)

    def _number(self, name: str) -> None:
        """A slider over round values beside a number that takes any."""

        def slid(event: ValueChangeEventArguments[float | None]) -> None:
            if event.value is not None:
                self._tell(self.picked.changed(**{name: ladder(name, self.picked, self.offer)[int(event.value)]}), name)

        def typed(event: ValueChangeEventArguments[float | None]) -> None:
            self._tell(_with_number(self.picked, name, event.value), name)

        with ui.element("div").classes("control").mark(name):
            with ui.element("div").classes("line"):
                _help(ui.label(LABELS[name]).classes("name"), name)
                slider = ui.slider(min=0, max=1, value=0, on_change=slid).props(
                    f'dense aria-label="{LABELS[name]}" data-name="{name}"'
                )
                number = ui.number(value=None, on_change=typed).classes("number")
                number.props(f'dense outlined debounce=500 hide-bottom-space data-name="{name}-number"')
            self._problem(name)
        self._numbers[name] = slider, number

    def _field(self, name: str) -> None:
        def changed(value: Any) -> None:
            self._tell(self.picked.with_field(name, value), name)

        def pinned(fixed: bool) -> None:
            self._tell(self.picked.pinned(name, fixed), "")

        def best() -> None:
            self._best(name)

        with ui.element("div").classes("control").mark(name):
            self._fields[name] = Field(name, changed, pinned, best)
            self._problem(name)

    def _problem(self, name: str) -> None:
        self._problems[name] = ui.label().classes("problem").props(f'data-name="{name or "plan"}-problem"')


class Field:
    """A field of the plan: a slider over its values, a list of its words or a switch; its best value; a pin."""

    def __init__(
        self, name: str, changed: Callable[[Any], None], pinned: Callable[[bool], None], best: Callable[[], None]
    ) -> None:  # fmt: skip
        self.name, self._changed, self._pinned = name, changed, pinned
        self._values: Sequence[Any] = ()
        self._fixed = False
        with ui.element("div").classes("line") as self._line:
            _help(ui.label(LABELS[name]).classes("name"), name)
            # Only one of them: the browser works through every element of the page at every change.
            self._slider: ui.slider | None = None
            self._list: ui.select | None = None
            if name in NUMBERED:
                self._slider = ui.slider(min=0, max=1, value=0, on_change=self._slid)
                self._slider.props(f'dense markers snap aria-label="{LABELS[name]}" data-name="{name}"')
                self._value = ui.label().classes("value").props(f'data-name="{name}-value"')
            else:
                self._list = ui.select([], on_change=self._listed).classes("list")
                self._list.props(f'dense options-dense outlined data-name="{name}"')
            self._best = ui.button("best", on_click=best).props("flat dense no-caps size=sm").classes("best")
            self._best.props["title"] = "the value of this field that makes the step shortest, all else as it is"
            self._pin = ui.button(icon="lock_open", on_click=lambda: self._pinned(not self._fixed))
            self._pin.props(f'flat dense round size=sm data-name="{name}-pin"').classes("pin")
            self._pin.props["title"] = "keep this value when a plan is searched for or mended"

    def show(self, view: View) -> None:
        value, moot = in_force(view, self.name)
        self._values = offered(view, self.name, value)
        few = moot or len(self._values) < 2
        self._line.set_visibility(not (few and self.name in FINER))
        if self._list is not None:
            self._list.set_options({one: shown(self.name, one) for one in self._values}, value=value)
            self._list.set_enabled(not few)
        elif self._slider is not None:
            self._slider.props["max"] = max(1, len(self._values) - 1)
            self._slider.set_value(self._values.index(value))
            self._slider.set_enabled(not few)
            self._value.set_text(shown(self.name, value))
        self._best.set_enabled(not few)
        self._fixed = self.name in view.picked.pins
        self._pin.props(f"icon={'lock' if self._fixed else 'lock_open'}")
        self._pin.classes(add="kept" if self._fixed else "", remove="" if self._fixed else "kept")

    def _slid(self, event: ValueChangeEventArguments[float | None]) -> None:
        if event.value is not None and int(event.value) < len(self._values):
            self._changed(self._values[int(event.value)])

    def _listed(self, event: ValueChangeEventArguments[Any]) -> None:
        self._changed(event.value)


class Wishes:
    """What a search is for: its objective and its limits."""

    def __init__(self, picked: Picked, picks: Callable[[dict[str, Any]], None]) -> None:
        self._picks, self._quiet = picks, False
        with ui.element("div").classes("three"):
            self._objective = ui.select(list(OBJECTIVES), label="best is least", on_change=self._chosen)
            self._objective.classes("list").props('dense options-dense outlined data-name="objective"')
            _help(self._objective, "objective")
            self._numbers = {name: self._limit(name) for name in ("deadline_days", "budget_usd")}
        with ui.element("div").classes("three"):
            self._numbers |= {name: self._limit(name) for name in ("headroom", "mtbf_hours")}
        self.show(picked)

    def show(self, picked: Picked) -> None:
        self._quiet = True
        try:
            self._objective.set_value(picked.wish.objective)
            for name, number in self._numbers.items():
                number.set_value(picked.number(name) or None)
        finally:
            self._quiet = False

    def _limit(self, name: str) -> ui.number:
        number = ui.number(label=LABELS[name], on_change=lambda event: self._tell(name, event.value)).classes("list")
        number.props(f'dense outlined debounce=500 hide-bottom-space data-name="{name}"')
        _help(number, name)
        return number

    def _chosen(self, event: ValueChangeEventArguments[Any]) -> None:
        self._tell("objective", event.value)

    def _tell(self, name: str, value: Any) -> None:
        if not self._quiet:
            self._picks({name: (value or 0.0) if name == "headroom" else value})


def _with_number(picked: Picked, name: str, value: float | None) -> Picked:
    """A price that is taken away is the catalog's again; of what must be there the old value stays."""
    if value is None:
        return picked.changed(usd_per_hour=None) if name == "usd_per_hour" else picked
    scaled = value * 1e9 if name == "tokens" else value
    return picked.changed(**{name: int(scaled) if name in ("devices", "seq_len", "global_batch_size") else scaled})


def _set_number(slider: ui.slider, number: ui.number, name: str, view: View, offer: Offer) -> None:
    steps = ladder(name, view.picked, offer)
    value = view.picked.number(name)
    if name == "usd_per_hour" and value is None and view.setting is not None:
        value = view.usd_per_hour
    slider.props(f"max={max(1, len(steps) - 1)}")
    slider.set_enabled(len(steps) > 1)
    slider.set_value(0 if value is None else nearest_place(steps, value))
    if value is None:
        number.set_value(None)
    else:
        number.set_value(float(f"{value / 1e9:.5g}") if name == "tokens" else round(value, 2))


def _card(title: str) -> ui.element:
    card = ui.element("section").classes("card")
    with card:
        ui.label(title).classes("title")
    return card


def _help(element: ui.element, name: str) -> None:
    """Where the pointer rests on it, by the browser's own means: a component for each would slow every change."""
    if name in HELP:
        element.props["title"] = HELP[name]
