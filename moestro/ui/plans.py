"""The search for the best plans: what for, how far it is, and what it found."""

from collections.abc import Callable
from typing import Any

from nicegui import ui
from nicegui.events import EChartPointClickEventArguments

from moestro.config.plan import Plan
from moestro.plan.candidates import Found
from moestro.plan.why import changes
from moestro.report.text import duration, grouped, percent, si
from moestro.ui.charts import front_chart
from moestro.ui.controls import Wishes
from moestro.ui.finding import TOP, Search
from moestro.ui.picked import Picked

LOOK_S = 0.15


class Plans:
    """starts: makes a search of what is picked. takes: called with a plan that was clicked on. wishes: with what a
    search is for, where that changes."""

    def __init__(
        self, picked: Picked, starts: Callable[[], Search], takes: Callable[[Plan], None],
        wishes: Callable[[dict[str, Any]], None],
    ) -> None:  # fmt: skip
        self._starts, self._takes = starts, takes
        self._search: Search | None = None
        self._found: Found | None = None
        with ui.element("section").classes("card"):
            with ui.element("div").classes("line"):
                ui.label("Best plans").classes("title")
                ui.label("of all layouts that fit, those with a lock kept").classes("quiet")
            self.wishes = Wishes(picked, wishes)
            with ui.element("div").classes("line"):
                self._start = ui.button("find the best plan", on_click=self.start).props("unelevated no-caps dense")
                self._start.props('data-name="find"').classes("main-button")
                self._stop = ui.button("stop", on_click=self.stop).props('flat no-caps dense data-name="stop"')
                self._bar = ui.linear_progress(value=0, show_value=False, size="6px").classes("bar")
                self._says = ui.label().classes("quiet").props('data-name="search"')
            self._table = ui.element("div").classes("sideways")
            with ui.element("div").classes("front") as self._front:
                ui.label("With less memory: the fastest plan of each size").classes("quiet")
                self._chart = ui.echart({}, on_point_click=self._clicked).classes("chart pareto")
        self._front.set_visibility(False)
        self._running(False)
        self._timer = ui.timer(LOOK_S, self._look, active=False)

    def start(self) -> None:
        self.stop()
        self._search = self._starts()
        self._says.set_text("counting the plans …")
        self._bar.set_value(0)
        self._running(True)
        self._timer.activate()

    def stop(self) -> None:
        """Also when the page goes."""
        if self._search is not None:
            self._search.cancel()
            self._search = None
            self._says.set_text("stopped")
        self._timer.deactivate()
        self._running(False)

    def _running(self, runs: bool) -> None:
        self._start.set_enabled(not runs)
        self._stop.set_visibility(runs)
        self._bar.set_visibility(runs)

    def _look(self) -> None:
        if self._search is None:
            return
        now = self._search.progress()
        if now.over:
            self._end(now.found, now.error)
        elif now.total:
            self._bar.set_value(now.done / now.total)
            self._says.set_text(f"{grouped(now.done)} of {grouped(now.total)} kinds of plans")

    def _end(self, found: Found | None, error: str) -> None:
        search, self._search = self._search, None
        assert search is not None
        seconds = search.seconds
        search.cancel()
        self._timer.deactivate()
        self._running(False)
        self._found = found
        if found is None:
            self._says.set_text(error)
            return
        tally = found.tally
        self._says.set_text(
            f"{grouped(tally.plans)} plans in {duration(seconds)}; {grouped(tally.too_big)} too big for memory"
        )
        self._rank(found)
        self._front.set_visibility(len(found.front) > 1)
        self._draw_front(None)
        self._takes(found.exact[0][0])

    def _rank(self, found: Found) -> None:
        best, first = found.exact[0]
        self._table.clear()
        with self._table, ui.element("table").props('data-name="ranking"'):
            with ui.element("tr"):
                for name in ("", "step", "tokens/s", "MFU", "memory", "plan"):
                    with ui.element("th").classes("" if name == "plan" else "number-cell"):
                        ui.label(name)
            for number, (plan, one) in enumerate(found.exact[:TOP], 1):
                more = "" if number == 1 else f" ({one.step_s.value / first.step_s.value - 1:+.1%})"
                words = changes(Plan() if number == 1 else best, plan)
                cells = (
                    str(number), duration(one.step_s.value) + more, si(one.tokens_per_s),
                    percent(one.mfu) if one.mfu else "", f"{one.memory.total / 1e9:.1f} GB",
                    " ".join(words) or "one device",
                )  # fmt: skip
                row = ui.element("tr").classes("row-of-plan").on("click", lambda plan=plan: self._takes(plan))
                with row:
                    for place, text in enumerate(cells):
                        with ui.element("td").classes("" if place == len(cells) - 1 else "number-cell"):
                            ui.label(text)

    def _draw_front(self, chosen: int | None) -> None:
        if self._found is not None:
            self._chart.options.clear()
            self._chart.options.update(front_chart(self._found.front, chosen))

    def _clicked(self, event: EChartPointClickEventArguments) -> None:
        if self._found is not None:
            self._draw_front(event.data_index)
            self._takes(self._found.front[event.data_index].plan)
