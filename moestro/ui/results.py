"""The right side of the page: what follows from what was picked."""

from dataclasses import dataclass

from nicegui import ui

from moestro.ui.charts import gantt_chart, memory_chart, step_chart
from moestro.ui.figures import KEYS, key_figures
from moestro.ui.gantt import Gantt
from moestro.ui.state import View, told

ROW_HEIGHT, LEAST_HEIGHT = 26, 190  # of a timeline, in pixels


@dataclass
class Figure:
    value: ui.label
    detail: ui.label


class Results:
    def __init__(self) -> None:
        self._good: View | None = None  # the last that could be predicted
        with ui.element("div").classes("banner") as self._banner:
            self._wrong = ui.label().props('data-name="wrong"')
            self.mend = ui.button("mend it").props('flat dense no-caps data-name="mend"')
        self._banner.set_visibility(False)
        with ui.element("div").classes("results") as self._body:
            with ui.element("div").classes("keys"):
                self._keys = {name: _figure(name) for name in KEYS}
            self._change = ui.label("").classes("change").props('data-name="change"')
            with _card("A step", "of the slowest pipeline rank"):
                self._step = ui.echart({}).classes("chart step")
            with _card("Memory", "of a device of each pipeline rank, at its fullest moment"):
                self._memory = ui.echart({}).classes("chart memory")

    def show(self, view: View) -> None:
        """What cannot be predicted leaves the last that could, pale."""
        wrong = "; ".join(view.problems.values())
        self._banner.set_visibility(bool(wrong))
        self._wrong.set_text(f"{wrong}. Shown is the last plan that could be predicted." if wrong else "")
        self.mend.set_visibility(view.setting is not None)
        self._body.classes(add="pale" if wrong else "", remove="" if wrong else "pale")
        if view.prediction is None:
            return
        before, self._good = self._good, view
        for name, (value, detail, bad) in key_figures(view).items():
            self._keys[name].value.set_text(value)
            self._keys[name].value.classes(add="bad" if bad else "", remove="" if bad else "bad")
            self._keys[name].detail.set_text(detail)
        self._change.set_text(told(before, view) if before is not None else "")
        earlier = before.prediction.time if before is not None and before.prediction is not None else None
        _draw(self._step, step_chart(view.prediction.time, earlier))
        limit = view.setting.limit_bytes if view.setting is not None else None
        _draw(self._memory, memory_chart(view.memory, limit))


class TimelineCard:
    """wanted: "pipeline" or "kernels"."""

    def __init__(self) -> None:
        with _card("Timeline", "") as self.card:
            with ui.element("div").classes("line spread"):
                self.wanted = ui.toggle({"pipeline": "all passes", "kernels": "one micro-batch"}, value="pipeline")
                self.wanted.props('dense no-caps unelevated toggle-color=primary data-name="timeline"')
                self._note = ui.label().classes("quiet").props('data-name="timeline-note"')
            self._chart = ui.echart({}).classes("chart timeline")

    def waits(self) -> None:
        self._chart.classes(add="pale")

    def show(self, gantt: Gantt | None, why: str = "") -> None:
        """None: there is nothing to draw; why, in words."""
        self._chart.classes(remove="pale")
        self._chart.set_visibility(gantt is not None)
        self._note.set_text(why if gantt is None else gantt.note)
        if gantt is not None:
            height = max(LEAST_HEIGHT, 110 + ROW_HEIGHT * len(gantt.rows))
            self._chart.style(f"height: {height}px")
            _draw(self._chart, gantt_chart(gantt))


class Notes:
    """What a prediction rests on and leaves out."""

    def __init__(self) -> None:
        with _card("Rests on", ""):
            self._sure = ui.label().classes("quiet")
            self._list = ui.element("ul").classes("list-of-notes")

    def show(self, view: View) -> None:
        if view.prediction is None:
            return
        step = view.prediction.step_s
        self._sure.set_text(f"priced by {view.prediction.profile}; interval by {step.basis}")
        self._list.clear()
        with self._list:
            for note in view.prediction.notes:
                item = ui.element("li").classes("bad" if note.startswith("does not fit") else "")
                with item:
                    ui.label(note)
            for text in view.prediction.memory.excluded:
                with ui.element("li"):
                    ui.label(f"not in the memory: {text}")


def _figure(name: str) -> Figure:
    with ui.element("div").classes("key"):
        ui.label(name).classes("quiet")
        value = ui.label("–").classes("big").props(f'data-name="key-{name}"')
        return Figure(value, ui.label("").classes("detail"))


def _draw(chart: ui.echart, options: dict[str, object]) -> None:
    chart.options.clear()
    chart.options.update(options)


def _card(title: str, more: str) -> ui.element:
    card = ui.element("section").classes("card")
    with card, ui.element("div").classes("line"):
        ui.label(title).classes("title")
        if more:
            ui.label(more).classes("quiet")
    return card
