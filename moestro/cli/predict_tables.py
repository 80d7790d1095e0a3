"""How a prediction is shown: what comes of the step (days, dollars, energy), tables for people, a tree for machines."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from moestro.cli.shown import console_of
from moestro.errors import MoestroError
from moestro.report.text import MISSING, duration, grouped, percent, si

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from moestro.config.plan import Plan, Workload
    from moestro.graph.words import StepGraph
    from moestro.predict.cost import Cost
    from moestro.predict.energy import Energy
    from moestro.predict.target import Target
    from moestro.predict.words import MemoryBreakdown, Prediction, TimeBreakdown

WIDTH = 110
DIMENSIONS = ("pp", "dp", "cp", "tp", "ep", "etp")


@dataclass(frozen=True)
class Outlook:
    """What a step's time means for a whole training. None: not known, or not asked for.

    training_s: with failures, if any were given. checkpoint_every_s: the best interval then.
    """

    tokens: float
    steps: float
    training_s: float
    goodput: float | None
    checkpoint_every_s: float | None
    cost: "Cost | None"
    energy: "Energy | None"  # of one step
    device_bytes: float | None
    peak_flops: float | None
    measured_s: float | None  # of a step of the run that was asked about

    @staticmethod
    def of(
        found: "Prediction",
        workload: "Workload",
        plan: "Plan",
        target: "Target",
        tokens: float,
        usd_per_hour: float | None = None,
        faults: tuple[float, float, float] | None = None,
        measured_s: float | None = None,
    ) -> "Outlook":
        """faults: mean seconds between failures of one device, seconds of a checkpoint and of a restart."""
        from moestro.predict.cost import cost, rented
        from moestro.predict.energy import step_energy
        from moestro.predict.goodput import Reliability, best_interval, goodput, job_mtbf
        from moestro.predict.predict import device_bytes, peak_flops

        if not tokens > 0:
            raise MoestroError(f"cannot train on {tokens:g} tokens")
        device, devices, step_s = target.place.device, plan.world_size, found.step_s.value
        steps = tokens / workload.tokens
        share = every = price = energy = None
        if faults is not None:
            job = Reliability(job_mtbf(faults[0], devices), faults[1], faults[2])
            every = best_interval(job)
            share = goodput(every, job)
            if not share > 0:
                raise MoestroError("with so many failures the job never ends; give a longer --mtbf-hours")
        alike = not target.parts  # prices and watts of unlike devices are not one figure
        if usd_per_hour is not None or (alike and (device.price.usd_per_hour_low or device.price.usd_per_hour_high)):
            price = cost(step_s * steps, devices, rented(device, usd_per_hour), tokens, share or 1.0)
        if device.tdp_w.nominal is not None and not target.measured and alike:
            energy = step_energy(found.time, device, devices)
        return Outlook(
            tokens=tokens,
            steps=steps,
            training_s=step_s * steps / (share or 1.0),
            goodput=share,
            checkpoint_every_s=every,
            cost=price,
            energy=energy,
            device_bytes=device_bytes(target, devices),
            peak_flops=peak_flops(workload, target),
            measured_s=measured_s,
        )


def print_prediction(
    name: str, found: "Prediction", outlook: Outlook, workload: "Workload", plan: "Plan", target: "Target"
) -> None:
    console = console_of(WIDTH)
    kinds = dict.fromkeys(part.place.device.name for part in target.parts) or [target.place.device.name]
    console.print(f"[bold]{name}[/] on {plan.world_size:,} × {' and '.join(kinds)}", markup=True)
    console.print(_setting(workload, plan), style="dim", markup=False)
    console.print(f"priced by: {found.profile}\n", style="dim", markup=False)
    console.print(_summary(found, outlook, workload))
    console.print()
    console.print(_time_table(found.time))
    _print_communication(console, found.time)
    console.print()
    console.print(_memory_table(found.memory))
    if plan.pp > 1:
        ranks = " ".join(f"{size / 1e9:.1f}" for size in found.memory_by_rank)
        console.print(f"GB of each pipeline rank: {ranks}", style="dim")
    _print_list(console, "rests on", found.notes)
    _print_list(console, "not included", found.memory.excluded)


def print_traced(
    name: str, graph: "StepGraph", time: "TimeBreakdown", target: "Target", how: str = "traced"
) -> None:  # fmt: skip
    """how: the graph came about."""
    console = console_of(WIDTH)
    console.print(f"{name} on {graph.world_size:,} × {target.place.device.name}", style="bold", markup=False)
    console.print(f"{how}; priced by: {target.profile}\n", style="dim", markup=False)
    console.print(_time_table(time))
    _print_communication(console, time)
    if graph.model_flops:
        console.print(f"matrix products: {si(graph.model_flops, 'FLOPs')} on all ranks", style="dim", markup=False)
    _print_list(console, "rests on", (*target.notes, *graph.notes))


def _print_list(console: "Console", title: str, lines: tuple[str, ...]) -> None:
    for index, line in enumerate(lines):
        label = f"{title}:" if index == 0 else ""
        style = "yellow" if line.startswith("does not fit") else "dim"
        console.print(f"{label:<14}{line}", style=style, markup=False)


def _setting(workload: "Workload", plan: "Plan") -> str:
    sizes = [f"{name}={getattr(plan, name)}" for name in DIMENSIONS if getattr(plan, name) > 1] or ["one device"]
    if plan.world_size > 1:
        sizes.append(f"zero={plan.zero}")
    if plan.pp > 1:
        sizes.append(plan.schedule + (f" vpp={plan.vpp}" if plan.vpp > 1 else ""))
    batch = f"{grouped(workload.global_batch_size)} × {grouped(workload.seq_len)} tokens"
    kept = "" if plan.recompute == "none" else f", recompute {plan.recompute}"
    return f"{' '.join(sizes)}; {batch} a step, micro-batches of {plan.micro_batch_size}, {workload.precision}{kept}"


def _summary(found: "Prediction", outlook: Outlook, workload: "Workload") -> "Table":
    from rich.table import Table

    step = found.step_s
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("step", duration(step.value), f"{duration(step.low)} to {duration(step.high)}: {step.basis}")
    if outlook.measured_s is not None:
        error = step.value / outlook.measured_s - 1
        table.add_row("measured", duration(outlook.measured_s), f"median of the run; predicted {error:+.1%}")
    each = f"{si(found.tokens_per_s_per_device)} a device"
    table.add_row("tokens/s", si(found.tokens_per_s), each)
    if found.mfu is not None and outlook.peak_flops is not None:
        table.add_row("MFU", percent(found.mfu), f"of {si(outlook.peak_flops, 'FLOP/s')} a device")
    there = outlook.device_bytes
    fits = (
        "" if there is None else f"of {there / 1e9:.1f} GB: {'fits' if found.memory.total <= there else 'DOES NOT FIT'}"
    )
    table.add_row("memory", f"{found.memory.total / 1e9:.1f} GB", f"{fits}, on the fullest device".lstrip(", "))
    rows = f"{si(outlook.tokens)} tokens in {grouped(outlook.steps)} steps"
    if outlook.goodput is not None and outlook.checkpoint_every_s is not None:
        rows += (
            f"; {percent(outlook.goodput)} of it useful work, a checkpoint every {duration(outlook.checkpoint_every_s)}"
        )
    table.add_row("training", duration(outlook.training_s), rows)
    if outlook.cost is not None:
        rate = outlook.cost.rate
        source = rate.source.partition(":")[0]  # the whole of it is long: `moestro hardware show` has it
        table.add_row("cost", f"${outlook.cost.usd:,.0f}", f"${rate.usd_per_hour:,.2f} a device and hour ({source})")
    if outlook.energy is not None:
        kwh = outlook.energy.kwh * outlook.steps
        watts = f"{outlook.energy.wall_w:,.0f} W a device from the wall"
        table.add_row("energy", f"{si(kwh * 1e3, 'Wh')}", f"{watts}: {outlook.energy.source}")
    return table


def _time_table(time: "TimeBreakdown") -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("a step's time")
    for column in ("seconds", "share"):
        table.add_column(column, justify="right")

    def add(name: str, seconds: float, style: str = "") -> None:
        table.add_row(name, _seconds(seconds), percent(seconds / time.total), style=style)

    add("computation", time.compute)
    for part, seconds in sorted(time.by_part.items(), key=lambda item: -item[1]):
        add(f"  {part}", seconds, "dim")
    add("host, waited for", time.host)
    add("communication, exposed", time.communication)
    add("pipeline bubble", time.bubble)
    add("optimizer", time.optimizer)
    add("all", time.total, "bold")
    return table


def _print_communication(console: "Console", time: "TimeBreakdown") -> None:
    """By dimension, hidden or not: what a faster network could save at most."""
    if not time.by_dimension:
        return
    items = sorted(time.by_dimension.items(), key=lambda item: -item[1])
    text = ", ".join(f"{name} {_seconds(seconds)} s" for name, seconds in items)
    console.print(f"all communication, hidden or not: {text}", style="dim", markup=False)


def _memory_table(memory: "MemoryBreakdown") -> "Table":
    from rich.table import Table

    unit, factor = ("GB", 1e9) if memory.total >= 2e9 else ("MB", 1e6)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("memory of the fullest device")
    table.add_column(unit, justify="right")
    table.add_column("share", justify="right")
    rows = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
        "comes and goes": memory.transient,
        "fragmentation": memory.fragmentation,
        "communicators": memory.communication,
        "framework": memory.framework,
    }
    for name, size in rows.items():
        if size > 0:
            table.add_row(name, f"{size / factor:.2f}", percent(size / memory.total))
    table.add_row("all", f"{memory.total / factor:.2f}", percent(1.0), style="bold")
    return table


def _seconds(seconds: float) -> str:
    if seconds == 0:
        return MISSING
    digits = 0 if seconds >= 999.5 else 1 if seconds >= 99.95 else 2 if seconds >= 9.995 else 3 if seconds >= 0.1 else 5
    return f"{seconds:.{digits}f}"


def as_tree(found: "Prediction", outlook: Outlook, workload: "Workload", plan: "Plan") -> dict[str, Any]:
    """Plain data: seconds, bytes, dollars."""
    time, memory = found.time, found.memory
    return {
        **asdict(found),
        "time": {**asdict(time), "total": time.total},
        "memory": {**asdict(memory), "allocated": memory.allocated, "reserved": memory.reserved, "total": memory.total},
        "devices": plan.world_size,
        "outlook": asdict(outlook),
        "plan": plan.model_dump(mode="json"),
        "workload": workload.model_dump(mode="json", exclude_defaults=True),
    }
