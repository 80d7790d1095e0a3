"""The page: controls on the left, what follows on the right, one state of its own for every browser window."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nicegui import background_tasks, run, ui

from moestro.config.plan import Plan
from moestro.errors import MoestroError
from moestro.report.style import BLUE
from moestro.ui.commands import plan_command, plan_file, predict_command
from moestro.ui.controls import Controls
from moestro.ui.finding import Search
from moestro.ui.gantt import Gantt, kernel_gantt, pipeline_gantt
from moestro.ui.link import from_query, to_query
from moestro.ui.near import best_value, guessed, mended
from moestro.ui.offer import Offer
from moestro.ui.picked import FIELDS, Picked, start
from moestro.ui.plans import Plans
from moestro.ui.results import Notes, Results, TimelineCard
from moestro.ui.state import View, view_of

CSS = Path(__file__).with_name("page.css")
PAUSE_S = 0.25  # without a change, after which the timeline is drawn


class Explorer:
    """One browser window's page. What was picked last is worked on in a thread; what was picked meanwhile waits."""

    def __init__(self, offer: Offer, query: Mapping[str, str]) -> None:
        self.offer = offer
        self.picked, wrong = from_query(query, offer)
        self.view: View | None = None
        self.client = ui.context.client
        self._wanted: Callable[[], View | None] | None = None
        self._working = False
        self._tell = self._moved = ""  # what to say of the work that is done; the control that was moved last
        self._build()
        for text in wrong:
            ui.notify(text, type="warning", timeout=8000)
        picked = self.picked
        planned = any(name in query for name in FIELDS)
        self._ask(lambda: view_of(picked if planned else guessed(picked, offer), offer))

    def _build(self) -> None:
        ui.colors(primary=BLUE)
        ui.add_css(CSS)
        with ui.element("header").classes("top"):
            ui.label("Moestro plan explorer").classes("heading")
            with ui.element("div").classes("line"):
                self._busy = ui.spinner(size="18px").classes("busy")
                for text, does, name in (
                    ("copy link", self._copy_link, "link"),
                    ("save plan.toml", self._save, "save"),
                ):
                    ui.button(text, on_click=does).props(f'outline dense no-caps data-name="{name}"')
        with ui.element("div").classes("columns"):
            with ui.element("div").classes("left"):
                self.controls = Controls(self.offer, self.picked, self._pick, self._best)
            with ui.element("div").classes("right"):
                self.results = Results()
                self.results.mend.on_click(self._mend)
                self.timeline = TimelineCard()
                self.timeline.wanted.on_value_change(lambda: self._later())
                self.plans = Plans(self.picked, self._search, self._take, self._wish)
                self._commands()
                self.notes = Notes()
        self._pause = ui.timer(PAUSE_S, self._draw_timeline, active=False, immediate=False)
        self.client.on_delete(self.plans.stop)

    def _commands(self) -> None:
        with ui.element("section").classes("card"):
            ui.label("On the command line").classes("title")
            self._lines = {name: self._command(name) for name in ("predict", "plan")}

    def _command(self, name: str) -> ui.label:
        with ui.element("div").classes("line command"):
            line = ui.label().classes("code").props(f'data-name="command-{name}"')
            ui.button(icon="content_copy", on_click=lambda: self._copy(line.text)).props("flat dense round size=sm")
        return line

    # What a person does.

    def _pick(self, picked: Picked, changed: str) -> None:
        self.picked, self._moved = picked, changed
        if changed in ("run", "hardware"):
            self._ask(lambda: self._anew(picked, changed))
        else:
            self._ask(lambda: view_of(picked, self.offer, changed))

    def _anew(self, picked: Picked, changed: str) -> View:
        """On another machine, or with another model, all that depends on it starts anew."""
        try:
            fresh = start(self.offer, picked.run, picked.hardware)
        except MoestroError as error:
            return View(picked, {changed: str(error)})
        if changed == "hardware":
            kept = {name: getattr(picked, name) for name in ("seq_len", "global_batch_size", "precision", "optimizer")}
            fresh = fresh.changed(**kept, trainer=picked.trainer, tokens=picked.tokens)
        else:
            fresh = fresh.changed(devices=picked.devices, usd_per_hour=picked.usd_per_hour)
        fresh = fresh.changed(wish=picked.wish)
        return view_of(guessed(fresh, self.offer), self.offer, changed)

    def _take(self, plan: Plan) -> None:
        self._pick(self.picked.with_plan(plan), "")

    def _wish(self, values: dict[str, Any]) -> None:
        self.picked = self.picked.changed(**values)
        self._said()

    def _best(self, name: str) -> None:
        picked = self.picked
        self._ask(lambda: best_value(picked, name, self.offer), f"no value of {name} makes a plan that fits")

    def _mend(self) -> None:
        picked, moved = self.picked, self._moved
        self._ask(
            lambda: mended(picked, self.offer, (moved,)) or mended(picked, self.offer),
            "no plan near this one fits; search for the best, or open a lock",
        )

    def _search(self) -> Search:
        return Search(self.picked, self.offer)

    def _save(self) -> None:
        if self.view is None or self.view.prediction is None or self.view.plan is None:
            ui.notify("there is no plan to save: mend what is wrong first", type="warning")
            return
        try:
            text = plan_file(self.view.picked, self.view.plan, self.view.prediction, self.offer)
        except MoestroError as error:
            ui.notify(str(error), type="negative", timeout=8000)
            return
        ui.download.content(text, "plan.toml", "application/toml")

    async def _copy_link(self) -> None:
        origin = await ui.run_javascript("location.origin + location.pathname")
        self._copy(f"{origin}?{to_query(self.picked, self.offer)}")

    def _copy(self, text: str) -> None:
        ui.clipboard.write(text)
        ui.notify("copied", timeout=1200)

    # What the page does.

    def _ask(self, work: Callable[[], View | None], otherwise: str = "") -> None:
        """Show what comes of `work`, or say `otherwise`. What waits already is not done any more."""

        def answered() -> View | None:
            try:
                found = work()
            except MoestroError as error:
                found = View(self.picked, {"": str(error)})
            if found is None:
                self._tell = otherwise
            return found

        self._wanted = answered
        if not self._working:
            self._working = True
            background_tasks.create(self._work(), name="explorer")

    async def _work(self) -> None:
        try:
            self._busy.set_visibility(True)
            while self._wanted is not None:
                work, self._wanted = self._wanted, None
                self._tell = ""
                view = await run.io_bound(work)
                with self.client:
                    if self._tell:
                        ui.notify(self._tell, type="warning")
                    if view is not None and self._wanted is None:
                        self._show(view)
        finally:
            self._working = False
            self._busy.set_visibility(False)

    def _show(self, view: View) -> None:
        self.view, self.picked = view, view.picked
        self.controls.show(view)
        self.results.show(view)
        self.notes.show(view)
        self.plans.wishes.show(view.picked)
        if view.plan is not None:
            self._lines["predict"].set_text(predict_command(view.picked, view.plan, self.offer))
        self._said()
        self._later()

    def _said(self) -> None:
        """In the address, so that it can be kept and shared, and as a search."""
        ui.navigate.history.replace(f"?{to_query(self.picked, self.offer)}")
        self._lines["plan"].set_text(plan_command(self.picked, self.offer))

    def _later(self) -> None:
        """Draw the timeline when nothing changes for a moment: it takes longer than the rest."""
        self.timeline.waits()
        self._pause.deactivate()
        self._pause.activate()

    async def _draw_timeline(self) -> None:
        self._pause.deactivate()
        view = self.view
        if view is None or view.plan is None or view.setting is None:
            return
        gantt, why = await run.io_bound(_gantt, view, self.timeline.wanted.value) or (None, "")
        if view is self.view:
            self.timeline.show(gantt, why)


def _gantt(view: View, wanted: str) -> tuple[Gantt | None, str]:
    draw = pipeline_gantt if wanted == "pipeline" else kernel_gantt
    assert view.setting is not None
    assert view.plan is not None
    try:
        return draw(view.setting.workload, view.plan, view.setting.target), ""
    except MoestroError as error:
        return None, str(error)
