"""`moestro explain`: two steps side by side, predicted or measured, and where the second loses time."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moestro.cli.shown import print_json
from moestro.errors import MoestroError

if TYPE_CHECKING:
    from moestro.plan.explain import Explanation
    from moestro.plan.explain_side import Side
    from moestro.report.explain import MeasuredRun


def explain(
    sides: Annotated[
        list[str],
        typer.Argument(
            metavar="A B",
            help="A run's folder, a plan or preset (with --hardware or --profile), or a saved `predict --json`. "
            "section.key=value behind a side is that side's, before A both sides'. A run alone stands against its "
            "own prediction.",
        ),
    ],
    hardware: Annotated[
        list[str] | None,
        typer.Option("--hardware", help="What plans are predicted for, as for `predict`; twice: A's, then B's."),
    ] = None,
    profile: Annotated[
        list[Path] | None, typer.Option(help="A machine measured by `moestro measure`, instead; also twice.")
    ] = None,
    devices: Annotated[list[int] | None, typer.Option(min=1, help="How many; also twice.")] = None,
    steps: Annotated[
        str, typer.Option(metavar="FIRST:LAST", help="Of runs, the steps to compare; by default all but the first 2.")
    ] = "",
    exact: Annotated[bool, typer.Option("--exact", help="Simulate pipelines pass by pass.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write the picture of the differences as an HTML file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Say where B's step takes longer than A's, or less long: by part, and by more work, lower rate or less hidden.

    docs/explaining.md tells more.
    """
    from moestro.cli.asked import check_folder
    from moestro.plan.explain import as_tree

    if plot is not None:
        check_folder("--plot", plot)
        if plot.suffix != ".html":
            raise MoestroError(f"--plot {plot}: the picture is a page; give a name that ends in .html")
    asked = _Asked(hardware or [], profile or [], devices or [], _range(steps), exact)
    named = split_sides(sides)
    found = asked.explained(named)
    if plot is not None:
        from moestro.report.explain_plot import write_waterfall

        write_waterfall(found, plot)
    if as_json:
        print_json(as_tree(found))
        return
    from moestro.cli.explain_tables import print_explanation

    print_explanation(found)
    if plot is not None:
        typer.echo(f"\npicture  {plot}")


@dataclass(frozen=True)
class Named:
    """What a side was called, and its overrides."""

    name: str
    overrides: tuple[str, ...]

    @property
    def is_folder(self) -> bool:
        return Path(self.name).is_dir()

    @property
    def is_saved(self) -> bool:
        return self.name.endswith(".json")


def split_sides(words: Sequence[str]) -> list[Named]:
    """One or two sides with their overrides.

    Raises:
        MoestroError: there are none, or more than two.
    """
    common: list[str] = []
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if "=" not in word or Path(word).exists():
            found.append((word, []))
        elif found:
            found[-1][1].append(word)
        else:
            common.append(word)
    if not found:
        raise MoestroError("name two sides: runs, plans or presets; overrides go behind the side that they are for")
    if len(found) > 2:
        raise MoestroError(f"two sides are compared, not {len(found)}: {', '.join(name for name, _ in found)}")
    return [Named(name, (*common, *own)) for name, own in found]


@dataclass(frozen=True)
class _Asked:
    hardware: list[str]
    profile: list[Path]
    devices: list[int]
    steps: tuple[int, int] | None
    exact: bool

    def explained(self, named: list[Named]) -> "Explanation":
        from dataclasses import replace

        from moestro.plan.explain import explain

        first, second = named[0], named[-1]
        if len(named) == 1:
            if not first.is_folder:
                raise MoestroError(
                    f"what is {first.name} compared with? Only a run may stand alone, against its prediction"
                )
            run = self._run(first)
            return explain(self._prediction_of(run, 0), run.side)
        if first == second and not self._twice:
            return explain(*(self._side(first, 0),) * 2)
        if first.is_folder and second.is_folder:
            one, two = self._run(first), self._run(second)
            found = explain(one.side, two.side)
            if self.hardware or self.profile:
                predicted = explain(self._prediction_of(one, 0), self._prediction_of(two, 1))
                found = replace(found, predicted=predicted)
            return found
        return explain(self._side(first, 0), self._side(second, 1))

    @property
    def _twice(self) -> bool:
        return max(len(self.hardware), len(self.profile), len(self.devices)) > 1

    def _side(self, named: Named, place: int) -> "Side":
        if named.is_folder:
            return self._run(named).side
        if named.is_saved:
            from moestro.plan.explain_saved import saved_side

            self._no_overrides(named, "a saved prediction")
            return saved_side(Path(named.name))
        return self._plan(named, place)

    def _run(self, named: Named) -> "MeasuredRun":
        from moestro.report.explain import measured_run

        self._no_overrides(named, "a run")
        return measured_run(Path(named.name), self.steps)

    def _no_overrides(self, named: Named, what: str) -> None:
        if named.overrides:
            raise MoestroError(f"{named.name} is {what}, which {named.overrides[0]} cannot change; leave it out")

    def _plan(self, named: Named, place: int) -> "Side":
        from moestro.cli.asked import keep_curves, plan_asked, read_workload, target_asked
        from moestro.plan.explain_side import predicted_side
        from moestro.predict.predict import predict_step

        hardware, profile, devices = self._place(place)
        config, workload, values = read_workload(named.name, named.overrides)
        target = target_asked(hardware, profile, devices)
        plan = plan_asked(config, values, target, devices)
        found = predict_step(workload, plan, target, exact=self.exact)
        keep_curves(target)
        return predicted_side(" ".join((named.name, *named.overrides)), workload, plan, found, target)

    def _prediction_of(self, run: "MeasuredRun", place: int) -> "Side":
        from moestro.cli.asked import keep_curves, plan_asked, target_asked
        from moestro.graph.convert import workload_of
        from moestro.plan.explain_side import predicted_side
        from moestro.predict.predict import predict_step

        hardware, profile, devices = self._place(place)
        devices = devices or run.ranks
        target = target_asked(hardware, profile, devices)
        workload, plan = workload_of(run.config), plan_asked(run.config, {}, target, devices)
        found = predict_step(workload, plan, target, exact=self.exact)
        keep_curves(target)
        return predicted_side(f"{run.side.name}, predicted", workload, plan, found, target)

    def _place(self, number: int) -> tuple[str, Path | None, int | None]:
        """Of side A (0) or B (1)."""
        for flag, values in (("hardware", self.hardware), ("profile", self.profile), ("devices", self.devices)):
            if len(values) > 2:
                raise MoestroError(f"--{flag} is given {len(values)} times, and there are two sides")
        hardware = self.hardware[min(number, len(self.hardware) - 1)] if self.hardware else ""
        profile = self.profile[min(number, len(self.profile) - 1)] if self.profile else None
        devices = self.devices[min(number, len(self.devices) - 1)] if self.devices else None
        return hardware, profile, devices


def _range(text: str) -> tuple[int, int] | None:
    """Raises MoestroError where it is not FIRST:LAST."""
    if not text:
        return None
    first, colon, last = text.partition(":")
    if not colon or not first.isdecimal() or not last.isdecimal() or int(first) > int(last):
        raise MoestroError(f"--steps {text}: write FIRST:LAST, for example 20:100")
    return int(first), int(last)
