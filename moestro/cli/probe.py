"""`moestro probe`: what a pipeline's memory is made of, from a few dry runs, and layers placed by it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moestro.cli.shown import print_json

if TYPE_CHECKING:
    from moestro.config import Config
    from moestro.config.plan import Plan
    from moestro.plan.measured import MeasuredPlan
    from moestro.predict.dry_run import StageMemory
    from moestro.predict.probe_rounds import Round, Rounds
    from moestro.predict.probe_table import ProbeTable
    from moestro.predict.target import Target

app = typer.Typer(no_args_is_help=True, help="Memory of pipeline stages from a few dry runs, and layers placed by it.")

Preset = Annotated[str, typer.Argument(help="A preset's name or a TOML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="section.key=value …; parallel.pp=8 of the trainer, or plan.pp=8 workload.trainer=megatron."),
]
Table = Annotated[Path, typer.Argument(help="A CSV of dry runs, as `probe plan` or `probe run` writes it.")]
Hardware = Annotated[
    str, typer.Option("--hardware", help="A device or cluster of `moestro hardware list`, or a TOML file of one.")
]
Profile = Annotated[Path | None, typer.Option(help="A machine measured by `moestro measure`, instead.")]
Devices = Annotated[int | None, typer.Option(min=1, help="How many; by default those of the layout.")]
Kinds = Annotated[str, typer.Option(help="Kinds of recomputation to tell apart: none, selective, block.")]
Out = Annotated[Path | None, typer.Option(help="Write the table of stages as a CSV file.")]
Json = Annotated[bool, typer.Option("--json", help="For machines.")]


@app.command("plan", no_args_is_help=True)
def plan(
    preset: Preset,
    overrides: Overrides = None,
    hardware: Hardware = "",
    profile: Profile = None,
    devices: Devices = None,
    kinds: Kinds = "none,block",
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Propose dry runs with uneven layers and recomputation, as few as tell the numbers apart, and how to start them.

    With --hardware, none of them needs more than the device has, by counted memory.
    """
    from moestro.cli.probe_tables import print_rounds, rounds_tree
    from moestro.predict.probe_table import write_probes

    asked = _Asked(preset, overrides, hardware, profile, devices)
    rounds = asked.rounds(kinds)
    if out is not None:
        write_probes(out, rounds.probes, {})
    if as_json:
        print_json({**rounds_tree(rounds), "commands": asked.commands(rounds)})
        return
    print_rounds(asked.name, rounds, asked.plan, asked.commands(rounds))
    if out is not None:
        typer.echo(f"\ntable  {out}: fill in peak_bytes of each stage, then `moestro probe fit {out}`")


@app.command("run", no_args_is_help=True)
def run(
    preset: Preset,
    overrides: Overrides = None,
    hardware: Hardware = "",
    profile: Profile = None,
    devices: Devices = None,
    kinds: Kinds = "none,block",
    by: Annotated[
        str, typer.Option(help="traced: the trainer's step without a device. counted: in closed form.")
    ] = "traced",
    out: Annotated[Path, typer.Option(help="The table to write.")] = Path("probes.csv"),
) -> None:
    """Take the dry runs that `probe plan` proposes without a device: each stage's step on tensors without values.

    A stage takes seconds for each of its layers, whatever their size.
    """
    from moestro.cli.asked import check_folder
    from moestro.cli.probe_tables import progress
    from moestro.errors import MoestroError
    from moestro.predict.probe_peaks import counted, take, traced
    from moestro.predict.probe_table import write_probes

    if by not in ("traced", "counted"):
        raise MoestroError(f"--by {by}: traced or counted")
    check_folder("--out", out)
    asked = _Asked(preset, overrides, hardware, profile, devices)
    if by == "traced" and asked.workload.trainer != "moestro":
        raise MoestroError("only our trainer's step can be traced; take --by counted, or run it and fill in the table")
    rounds = asked.rounds(kinds)
    peak = counted(asked.workload, asked.plan)
    if by == "traced":
        peak = traced(preset, asked.trained, asked.plan, asked.node)
    with progress("stages") as told:
        peaks = take(rounds, peak, told)
    write_probes(out, rounds.probes, peaks)
    typer.echo(f"{len(rounds.flat)} stages of {len(rounds.rounds)} dry runs, {by}  {out}: `moestro probe fit {out}`")


@app.command("fit", no_args_is_help=True)
def fit(
    table: Table,
    preset: Annotated[str, typer.Argument(help="A preset or TOML file: what is counted stands beside.")] = "",
    overrides: Overrides = None,
    hardware: Hardware = "",
    profile: Profile = None,
    devices: Devices = None,
    as_json: Json = False,
) -> None:
    """Fit what a layer, its activations and the ends take, with residuals and the error of leaving each stage out.

    Sets of stages that cannot tell these apart are refused, and it says which stages to add.
    """
    from dataclasses import asdict

    from moestro.cli.probe_tables import print_fit
    from moestro.predict.dry_run import fit_dry_run, leave_one_out

    read = _read(table)
    fitted = fit_dry_run(read.probes, read.peaks_bytes)
    left_out = leave_one_out(read.probes, read.peaks_bytes)
    beside: dict[str, float] = {}
    if preset:
        from moestro.predict.probe_peaks import counted_numbers

        asked = _Asked(preset, overrides, hardware, profile, devices)
        beside = counted_numbers(asked.workload, asked.plan, list(fitted.activation_bytes))
    if as_json:
        print_json({**asdict(fitted), "left_out": left_out, "counted_bytes": beside})
        return
    print_fit(table, read, fitted, left_out, beside)


@app.command("place", no_args_is_help=True)
def place(
    table: Table,
    preset: Preset,
    overrides: Overrides = None,
    hardware: Hardware = "",
    profile: Profile = None,
    devices: Devices = None,
    limit_gb: Annotated[
        float | None, typer.Option(help="What tensors may take of a device; by default 0.98 of it less libraries.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan as a TOML file for `moestro train`.")] = None,
    as_json: Json = False,
) -> None:
    """Share out layers and recomputation over stages by fitted memory, beside the plan that counted memory leads to."""
    from moestro.cli.asked import keep_curves
    from moestro.cli.probe_tables import placed_tree, print_placed
    from moestro.errors import MoestroError
    from moestro.plan.measured import balance_measured, room_bytes
    from moestro.predict.dry_run import fit_dry_run

    if limit_gb is not None and not limit_gb > 0:
        raise MoestroError("--limit-gb takes a number above zero")
    read = _read(table)
    fitted = fit_dry_run(read.probes, read.peaks_bytes)
    asked = _Asked(preset, overrides, hardware, profile, devices)
    target = asked.known_target()
    limit = room_bytes(asked.workload, asked.plan, target) if limit_gb is None else limit_gb * 1e9
    found = balance_measured(asked.workload, asked.plan, target, fitted, limit)
    counted = asked.counted_plan(target, fitted, limit)
    keep_curves(target)
    if out is not None:
        asked.write(out, found.plan, target)
    if as_json:
        print_json(placed_tree(found, counted, limit))
        return
    print_placed(asked.name, found, counted, limit, target, table)
    if out is not None:
        typer.echo(f"\nplan  {out}: `moestro train {out}`")


def _read(table: Path) -> "ProbeTable":
    from moestro.predict.probe_table import read_probes

    return read_probes(table)


class _Asked:
    """A run and its pipeline: the trainer's layout, or a plan of `plan.…`; the machine only where one is given."""

    def __init__(
        self, preset: str, overrides: list[str] | None, hardware: str, profile: Path | None, devices: int | None
    ) -> None:
        from moestro.cli.asked import plan_asked, read_workload, target_asked, trainer_overrides
        from moestro.errors import MoestroError

        self.config, self.workload, values = read_workload(preset, overrides or ())
        self.preset, self.name = preset, Path(preset).name
        self.trained = trainer_overrides(overrides or ())
        self.target: Target | None = None
        if hardware or profile is not None:
            self.target = target_asked(hardware, profile, devices)
        node = self.target.place.device.devices_per_node if self.target is not None else None
        self.node: int | None = self.config.parallel.ranks_per_node or node
        if values:
            if self.target is None:
                raise MoestroError(
                    "plan.… goes with --hardware NAME; without it give the trainer's own parallel.pp=8 …"
                )
            self.plan: Plan = plan_asked(self.config, values, self.target, devices)
        else:
            self.plan = _trained_plan(self.config, devices, self.node)

    def known_target(self) -> "Target":
        from moestro.cli.asked import target_asked

        return self.target or target_asked("", None, None)

    def rounds(self, kinds: str) -> "Rounds":
        from moestro.errors import MoestroError
        from moestro.plan.measured import room_bytes
        from moestro.predict.probe_peaks import counted_peaks
        from moestro.predict.probe_rounds import design

        names = [kind.strip() for kind in kinds.split(",")]
        known = ("none", "block") if self.workload.trainer == "moestro" else ("none", "selective", "block")
        if "none" not in names or len(set(names)) < len(names) or not set(names) <= set(known):
            raise MoestroError(f"--kinds {kinds}: none, and others of {', '.join(known)}, once each")
        if self.target is None:
            return design(self.workload, self.plan, names)
        room = room_bytes(self.workload, self.plan, self.target)

        def too_big(round_: "Round") -> list[bool]:
            return [size > room for size in counted_peaks(self.workload, self.plan, round_)]

        return design(self.workload, self.plan, names, too_big)

    def commands(self, rounds: "Rounds") -> list[str]:
        """What starts each dry run; of another trainer than ours its layers and how many are recomputed."""
        found = []
        for one in rounds.rounds:
            layers = ",".join(map(str, one.layers))
            if self.workload.trainer == "moestro":
                given = " ".join([self.preset, *self.trained])
                cut = f"'parallel.layers_per_stage=[{layers}]' parallel.schedule=1f1b train.recompute={one.kind}"
                found.append(f"moestro train {given} {cut} train.steps=2")
            else:
                again = ",".join(map(str, one.recomputed))
                found.append(f"layers of each stage {layers}; of them recomputed ({one.kind}) {again}")
        return found

    def counted_plan(self, target: "Target", fitted: "StageMemory", limit_bytes: float) -> "MeasuredPlan | None":
        """The plan that counted memory leads to, with what it takes by the fitted numbers; None: nothing fits by it."""
        from moestro.errors import MoestroError
        from moestro.plan.ilp.balance import balance
        from moestro.plan.measured import measured_of
        from moestro.predict.memory import outside_bytes

        outside = sum(outside_bytes(self.plan, self.workload, target.place.device))
        try:
            plan = balance(self.workload, self.plan, target, limit_bytes + outside)
        except MoestroError:
            return None
        return measured_of(self.workload, plan, target, fitted)

    def write(self, out: Path, plan: "Plan", target: "Target") -> None:
        from moestro.plan.file import write_plan
        from moestro.predict.predict import predict_step

        write_plan(out, self.preset, self.trained, plan, predict_step(self.workload, plan, target, exact=plan.pp > 1))


def _trained_plan(config: "Config", devices: int | None, node: int | None) -> "Plan":
    """The trainer's layout, on as many ranks as it takes where no number is given."""
    from moestro.graph.convert import plan_of

    parallel = config.parallel
    replicas = parallel.dp or max(1, parallel.ep // (parallel.fsdp * parallel.cp))
    world = devices or parallel.pp * replicas * parallel.fsdp * parallel.cp * parallel.tp
    return plan_of(config, world, min(world, node) if node else world)
