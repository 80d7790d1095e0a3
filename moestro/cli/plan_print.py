"""How `moestro plan` shows what it has found: tables for people, a tree for machines."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from moestro.cli.shown import console_of, print_json
from moestro.config.plan import Plan, Workload
from moestro.plan.objective import Goal, Outcome
from moestro.plan.settings import bucket_of, checkpoint_every, run_of, uneven_of
from moestro.plan.why import LEAST, binding, changes, differences
from moestro.report.text import duration, percent, si

if TYPE_CHECKING:
    from moestro.plan.candidates import Found, Tally
    from moestro.plan.counts import Counts
    from moestro.predict.target import Target
    from moestro.predict.words import Prediction

    Lean = Sequence[tuple[Plan, Prediction]]

WIDTH = 130
REASONS = 3  # told for a plan that comes second or later
# Of each objective but time, the column that it is ranked by.
COLUMNS = {"goodput": "useful", "money": "cost", "energy": "energy", "memory": ""}
LIMITED = {
    "knee": "as small as 90 % of the bandwidth allows",
    "overlap": "so that the last, which nothing hides, is short",
    "model": "all of them at once",
}


def print_counts(counts: "Counts", workload: Workload, goal: Goal) -> None:
    """A line for each number of devices, the best of them bold."""
    console = console_of(WIDTH)
    table = _table("devices", "step", "tokens/s", "MFU", "memory", "run", "cost", "energy")
    table.add_column("plan", overflow="fold")
    for count, found in sorted(counts.found.items()):
        plan, one = found.exact[0]
        table.add_row(
            f"{count:,}", *_figures(one), *_of_run(run_of(workload, plan, one, goal)), _words(plan),
            style="bold" if count == counts.best else "",
        )  # fmt: skip
    console.print(table)
    for count, why in sorted(counts.missed.items()):
        console.print(f"{count:,} devices: {why}", style="dim", markup=False)
    console.print()


def print_found(
    name: str, found: "Found", lean: "Lean", workload: Workload, target: "Target", devices: int, goal: Goal
) -> None:
    """lean: of plan.search.leaner."""
    console = console_of(WIDTH)
    console.print(f"{name} on {devices:,} × {target.place.device.name}", style="bold", markup=False)
    console.print(f"priced by: {target.profile}; {_went_through(found.tally)}", style="dim", markup=False)
    wanted = _wanted(goal)
    if wanted:
        console.print(f"wanted: {wanted}", style="dim", markup=False)
    console.print()
    _print_ranking(console, found, workload, goal)
    console.print()
    plan, one = found.exact[0]
    _print_lines(console, "what binds", binding(found, workload, target))
    step = one.step_s
    _print_lines(console, "how sure", [f"{step.low:.4g} to {step.high:.4g} s: {step.basis}"])
    _print_lines(console, "rests on", list(one.notes))
    _print_lines(console, "uneven experts", _uneven(workload, plan, one, target))
    _print_lines(console, "the run", _run(workload, plan, one, goal))
    _print_lines(console, "buckets", _bucket(workload, plan, target))
    console.print()
    _print_lean(console, found, lean)


def print_plan_json(
    counts: "Counts", lean: "Lean", workload: Workload, targets: Mapping[int, "Target"], goal: Goal
) -> None:
    """Of the best number of devices all, of the others the best plan."""

    def tree(plan: Plan, one: "Prediction") -> dict[str, Any]:
        run = {name: _number(value) for name, value in run_of(workload, plan, one, goal)._asdict().items()}
        return {"plan": plan.model_dump(mode="json"), "prediction": asdict(one), "run": run}

    found, target = counts.found[counts.best], targets[counts.best]
    plan, one = found.exact[0]
    bucket = bucket_of(workload, plan, target)
    whole: dict[str, Any] = {
        "ranked": [tree(*pair) for pair in found.exact],
        "front": [
            {"plan": o.plan.model_dump(mode="json"), "step_s": o.step_s, "total_bytes": o.total_bytes}
            for o in found.front
        ],
        "leaner": [tree(*pair) for pair in lean],
        "searched": asdict(found.tally),
        "devices": counts.best,
        "counts": {str(count): tree(*other.exact[0]) for count, other in sorted(counts.found.items())},
        "missed": {str(count): why for count, why in counts.missed.items()},
        "goal": asdict(goal),
        "checkpoint_every": checkpoint_every(run_of(workload, plan, one, goal), one.step_s.value),
        "bucket": None if bucket is None else asdict(bucket),
        "uneven": [u._asdict() for u in uneven_of(workload, plan, target, one.step_s.value)],
        "workload": workload.model_dump(mode="json", exclude_defaults=True),
    }
    print_json(whole)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _print_lines(console: Console, label: str, lines: list[str]) -> None:
    for number, line in enumerate(lines):
        console.print(f"{'' if number else label + ':':<16}{line}", style="dim", markup=False)


def _wanted(goal: Goal) -> str:
    """In words; nothing where it is the shortest step."""
    best = {
        "time": "the shortest step", "goodput": "the most useful work, failures and restarts counted",
        "money": "the cheapest run", "energy": "the least energy", "memory": "the least memory",
    }[goal.objective]  # fmt: skip
    limits = []
    if goal.deadline_s is not None:
        limits.append(f"within {duration(goal.deadline_s)}")
    if goal.budget_usd is not None:
        limits.append(f"for at most ${goal.budget_usd:,.0f}")
    if goal.free_share or goal.free_bytes:
        left = percent(goal.free_share) if goal.free_share else f"{goal.free_bytes / 1e9:.3g} GB"
        limits.append(f"{left} of each device's memory left free")
    return "" if goal.objective == "time" and not limits else ", ".join([best, *limits])


def _went_through(tally: "Tally") -> str:
    """Of plans that a rule left out nobody knows all that are too big."""
    left_out = sum(tally.skipped.values())
    skipped = f", {left_out:,} of them left out by rule; at least" if left_out else ","
    return f"{tally.plans:,} plans{skipped} {tally.too_big:,} too big for memory"


def _figures(one: "Prediction") -> tuple[str, ...]:
    mfu = percent(one.mfu) if one.mfu else ""
    return duration(one.step_s.value), si(one.tokens_per_s), mfu, f"{one.memory.total / 1e9:.1f} GB"


def _of_run(run: Outcome) -> tuple[str, str, str]:
    """Its length, dollars and energy."""
    usd = "" if run.usd is None else f"${float(run.usd):,.0f}"
    return duration(float(run.run_s)), usd, "" if run.joules is None else si(float(run.joules) / 3600, "Wh")


def _print_ranking(console: Console, found: "Found", workload: Workload, goal: Goal) -> None:
    column = COLUMNS.get(goal.objective, "")
    table = _table("", "step", "tokens/s", "MFU", "memory", *([column] if column else []))
    table.add_column("plan", overflow="fold")
    table.add_column("loses", overflow="fold")
    first_plan = found.exact[0][0]
    runs = [run_of(workload, plan, one, goal) for plan, one in found.exact]
    for number, ((plan, one), run) in enumerate(zip(found.exact, runs, strict=True)):
        shown = {
            "goodput": percent(float(run.goodput if run.goodput is not None else 1)),
            "money": _of_run(run)[1],
            "energy": _of_run(run)[2],
        }.get(goal.objective, "")
        table.add_row(
            str(number + 1), *_figures(one), *([shown] if column else []),
            _words(plan) if number == 0 else " ".join(changes(first_plan, plan)),
            _loses(found, number, runs, goal) if number else "",
            style="" if number else "bold",
        )  # fmt: skip
    console.print(table)


def _loses(found: "Found", number: int, runs: list[Outcome], goal: Goal) -> str:
    """Against the first: in what the goal ranks by, and where the step's time differs."""
    (_, first), (_, one) = found.exact[0], found.exact[number]
    if goal.objective == "memory":
        return f"{(one.memory.total - first.memory.total) / 1e9:.1f} GB"
    parts = [d for d in differences(first.time, one.time) if abs(d.seconds) > 0.002 * first.time.total]
    reasons = ", ".join(f"{d.what} {d.seconds / first.time.total:+.1%}" for d in parts[:REASONS])
    ours, best = ((run.usd, run.joules, run.useful_s) for run in (runs[number], runs[0]))
    place = {"money": 0, "energy": 1}.get(goal.objective, 2)
    mine, least = ours[place], best[place]
    assert mine is not None
    assert least is not None
    longer = one.step_s.value / first.step_s.value if goal.objective == "time" else float(mine) / float(least)
    return f"{longer - 1:.1%}" + (f": {reasons}" if reasons else "")


def _words(plan: Plan) -> str:
    """Of the choice all that is not the usual value; of others what is different."""
    return " ".join(changes(Plan(), plan)) or "one device"


def _uneven(workload: Workload, plan: Plan, one: "Prediction", target: "Target") -> list[str]:
    found = uneven_of(workload, plan, target, one.step_s.value)
    if found and all(abs(u.share) < LEAST for u in found):
        return ["cost nothing here: each device has all of them" if plan.ep == 1 else "cost next to nothing here"]
    return [", ".join(f"{u.share:+.1%} {u.routing}" for u in found)] if found else []


def _run(workload: Workload, plan: Plan, one: "Prediction", goal: Goal) -> list[str]:
    """What all steps together come to."""
    run = run_of(workload, plan, one, goal)
    length, usd, energy = _of_run(run)
    tokens = si(goal.steps * workload.tokens)
    lines = [", ".join(part for part in (f"{tokens} tokens in {goal.steps:,.0f} steps: {length}", usd, energy) if part)]
    if run.goodput is None or run.interval_s is None or run.checkpoint_s is None or run.restart_s is None:
        return lines
    every = checkpoint_every(run, one.step_s.value)
    saves = f"a checkpoint of {duration(float(run.checkpoint_s))} every {duration(float(run.interval_s))}"
    steps = f" ({every:,} steps)" if every else ""
    lines.append(
        f"{percent(float(run.goodput))} of it useful work: {saves}{steps}, restarts of {duration(float(run.restart_s))}"
    )
    return lines


def _bucket(workload: Workload, plan: Plan, target: "Target") -> list[str]:
    found = bucket_of(workload, plan, target)
    if found is None:
        return []
    megatron = f"; Megatron's own: {si(found.megatron_params)}" if workload.trainer == "megatron" else ""
    return [
        f"{si(found.bytes, 'B')} ({si(found.params)} parameters{megatron}) over {plan.dp * plan.cp} data ranks, "
        f"{LIMITED[found.limited_by]}"
    ]


def _print_lean(console: Console, found: "Found", lean: "Lean") -> None:
    plan, one = found.exact[0]
    smaller = [pair for pair in lean if pair[1].memory.total < one.memory.total]
    if not smaller:
        return
    table = _table("with less memory", "step")
    table.add_column("what changes", overflow="fold")
    for other, its in smaller:
        text = " ".join(changes(plan, other))
        table.add_row(f"{its.memory.total / 1e9:.1f} GB", duration(its.step_s.value), text)
    console.print(table)


def title(preset: str) -> str:
    return Path(preset).name
