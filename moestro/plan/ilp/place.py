"""Places layers and recomputation on pipeline stages: the integer program of TeleChat3's planner (arXiv 2512.24157),
with the step's time as our own closed form has it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from moestro.errors import MoestroError
from moestro.plan.ilp.program import Program
from moestro.plan.ilp.stages import By, Placement, Stages, closed_form_s, slowest_weight


@dataclass(frozen=True)
class Placed:
    """step_s: by the closed form. bound_s: no placement is below it; lower than step_s where time ran out."""

    placement: Placement
    step_s: float
    bound_s: float


def place(stages: Stages, by: By = "rank", limit_s: float = 20.0) -> Placed:
    """The placement of least closed_form_s that fits, at least a layer on each stage.

    Raises:
        MoestroError: none fits (it says by how many bytes the least does not), or none was found in time.
    """
    found = _solve(stages, by, limit_s)
    if found is None:
        raise MoestroError(_short_of(stages, limit_s))
    return found


def recomputed(stages: Stages, like: Placement, limit_s: float = 20.0) -> Placed | None:
    """The best of those with as many layers on each stage as `like`; None: none of them fits. Much the smaller program:
    ranks have nothing to do with each other but the slowest's time."""
    return _solve(stages, "rank", limit_s, like)


def _solve(stages: Stages, by: By, limit_s: float, like: Placement | None = None) -> Placed | None:
    program, unit = Program(), _unit(stages)
    x = _layers(program, stages)
    for runs, sizes in zip(x, like or (), strict=like is not None):
        for variables, counts in zip(runs, sizes, strict=True):
            program.row([(v, 1) for v in variables], sum(counts), sum(counts))
    if stages.in_order:
        _recompute_first(program, stages, x)
    _memory(program, stages, x)
    fixed = _times(program, stages, x, by, unit)
    found = program.solve(limit_s)
    if found is None:
        return None
    placement = tuple(tuple(tuple(found.count(v) for v in counts) for counts in runs) for runs in x)
    return Placed(placement, closed_form_s(stages, placement, by), (found.bound + fixed) * unit)


Variables = list[list[list[int]]]  # [stage][run][kind]


def _layers(program: Program, stages: Stages) -> Variables:
    """Layers in their order: a run starts no earlier than on the stage where the one before it ends."""
    last = len(stages.ranks) - 1
    x = [
        [
            [program.integer(0 if run.at_end and stage < last else run.count) for _ in range(stages.kinds)]
            for run in stages.layers
        ]
        for stage in range(last + 1)
    ]
    for number, run in enumerate(stages.layers):
        program.row(((v, 1) for runs in x for v in runs[number]), run.count, run.count)
    free = [number for number, run in enumerate(stages.layers) if not run.at_end]
    for runs in x:
        program.row(((v, 1) for number in free for v in runs[number]), 1)
    for number, following in pairwise(free):
        count, after = stages.layers[number].count, stages.layers[following].count
        for stage in range(last + 1):
            ended = program.integer(1)
            program.row([*((v, 1) for runs in x[: stage + 1] for v in runs[number]), (ended, -count)], 0)
            program.row([*((v, 1) for v in x[stage][following]), (ended, -after)], most=0)
    return x


def _recompute_first(program: Program, stages: Stages, x: Variables) -> None:
    """Layers of a stage are recomputed up to one, and not from there."""
    assert stages.kinds == 2
    for runs in x:
        before = None
        for number, run in enumerate(stages.layers):
            all_of_it = program.integer(1)
            program.row([(runs[number][0], 1), (all_of_it, run.count)], most=run.count)
            if before is not None:
                program.row([(runs[number][1], 1), (before, -run.count)], most=0)
                program.row([(all_of_it, 1), (before, -1)], most=0)
            before = all_of_it


def _memory(program: Program, stages: Stages, x: Variables) -> None:
    unit = max(stages.limits_bytes)
    for rank, moments in enumerate(stages.moments):
        members = stages.members(rank)
        brief = _brief(program, stages, x, members, unit)
        held = [
            (v, run.held_bytes / unit)
            for stage in members
            for run, counts in zip(stages.layers, x[stage], strict=True)
            for v in counts
        ]
        extra = sum(stages.extras[stage].held_bytes for stage in members)
        for moment in moments:
            terms, there = list(held), extra
            for number, flying in moment:
                stage = number % len(stages.ranks)
                there += flying * stages.extras[stage].kept_bytes
                for run, counts in zip(stages.layers, x[stage], strict=True):
                    terms += [(v, flying * size / unit) for v, size in zip(counts, run.kept_bytes, strict=True) if size]
            if brief is not None:
                terms.append((brief, 1))
            program.row(terms, most=(stages.limits_bytes[rank] - there) / unit)


def _brief(program: Program, stages: Stages, x: Variables, members: Sequence[int], unit: float) -> int | None:
    """Bytes that come and go on a rank: the most of any layer that it has."""
    there = max(stages.extras[stage].brief_bytes for stage in members)
    if not there and not any(size for run in stages.layers for size in run.brief_bytes):
        return None
    most = program.number()
    program.row([(most, 1)], there / unit)
    for stage in members:
        for run, counts in zip(stages.layers, x[stage], strict=True):
            for v, size in zip(counts, run.brief_bytes, strict=False):
                if size:
                    present = program.integer(1)
                    program.row([(v, 1), (present, -run.count)], most=0)
                    program.row([(most, 1), (present, -size / unit)], 0)
    return most


def _times(program: Program, stages: Stages, x: Variables, by: By, unit: float) -> float:
    """Rows of the slowest, costs of it and of all stages once; returns what no choice changes of these."""
    weight, fixed = slowest_weight(stages, by), 0.0
    chunks = [program.number(cost=weight) for _ in range(stages.vpp if by == "chunk" else 1)]
    for rank in range(stages.pp):
        own = [stage for stage, other in enumerate(stages.ranks) if other == rank]
        whole: list[tuple[int, float]] = []
        there = 0.0
        longest = [program.number(), program.number()] if by == "slot" else []
        for chunk, stage in enumerate(own):
            terms, extra = _pass_terms(stages, stage, x[stage], unit)
            for one, seconds, rest in zip(longest, terms, extra, strict=False):
                program.row([(one, 1), *seconds], rest)
            for v, negative_s in (*terms[0], *terms[1]):
                program.add_cost(v, -negative_s / stages.vpp)
            if by == "chunk":
                program.row([(chunks[chunk], 1), *terms[0], *terms[1]], sum(extra))
            whole += terms[0] + terms[1]
            there += sum(extra)
        fixed += there / stages.vpp
        if by == "slot":
            program.row([(chunks[0], 1), *((one, -1.0) for one in longest)], 0)
        elif by == "rank":
            program.row([(chunks[0], 1), *whole], there)
    return fixed


def _pass_terms(
    stages: Stages, stage: int, runs: list[list[int]], unit: float
) -> tuple[tuple[list[tuple[int, float]], list[tuple[int, float]]], tuple[float, float]]:
    """Of a forward and of a backward pass: seconds of each layer of each kind, negative, and of what else is there."""
    pace, extra = stages.pace[stages.ranks[stage]] / unit, stages.extras[stage]
    pairs = list(zip(stages.layers, runs, strict=True))
    forward = [(v, -pace * run.forward_s) for run, counts in pairs for v in counts]
    backward = [(v, -pace * s) for run, counts in pairs for v, s in zip(counts, run.backward_s, strict=True)]
    return (forward, backward), (pace * extra.forward_s, pace * extra.backward_s)


def _unit(stages: Stages) -> float:
    """Seconds of a mean stage, so that the program's numbers are near one."""
    whole = sum(run.count * (run.forward_s + run.backward_s[0]) for run in stages.layers)
    whole += sum(extra.forward_s + extra.backward_s for extra in stages.extras)
    return max(whole / len(stages.ranks), 1e-30)


def _short_of(stages: Stages, limit_s: float) -> str:
    """Bisects the factor on all limits with which something fits."""
    if len(stages.ranks) > sum(run.count for run in stages.layers if not run.at_end):
        return f"{len(stages.ranks)} stages for fewer layers: take a smaller pp or vpp"
    low, high = 1.0, 2.0
    while not _any_fits(stages, high, limit_s) and high < 1024:
        low, high = high, 2 * high
    while high - low > 0.005 * low:
        middle = (low + high) / 2
        low, high = (low, middle) if _any_fits(stages, middle, limit_s) else (middle, high)
    there = max(stages.limits_bytes) * high
    return (
        f"no placement of the layers fits, however much is recomputed: the fullest rank would need about "
        f"{there / 1e9:.3g} GB and has {max(stages.limits_bytes) / 1e9:.3g}; take more stages, a smaller micro-batch "
        "or more ranks that split the optimizer's state"
    )


def _any_fits(stages: Stages, factor: float, limit_s: float) -> bool:
    """Whatever it takes."""
    wider = replace(stages, limits_bytes=tuple(factor * limit for limit in stages.limits_bytes))
    program = Program()
    x = _layers(program, wider)
    if wider.in_order:
        _recompute_first(program, wider, x)
    _memory(program, wider, x)
    return program.solve(limit_s) is not None
