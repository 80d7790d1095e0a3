"""The best of several placements by simulation, and from there layer by layer.

The program's times are closed forms, of which none is right for every pipeline whose chunks differ. So it is solved by
each, the pipelines that come out are run pass by pass, and the fastest is changed by a layer as long as that helps.
"""

from collections.abc import Iterator
from itertools import islice

from moestro.errors import MoestroError
from moestro.plan.ilp.place import place, recomputed
from moestro.plan.ilp.stages import By, Placement, Stages, closed_form_s, even, fits, simulated_s

TRIES = 400  # placements that are simulated on the way, at most
PASSES = 200_000  # that are simulated on the way, at most
LOOKED_AT = 20  # placements for each of these that may turn out not to fit


def best_placement(stages: Stages, send_s: float = 0.0, limit_s: float = 5.0, tries: int = TRIES) -> Placement:
    """Never slower than an even split that fits, however that recomputes. limit_s: for each program.

    Raises:
        MoestroError: nothing fits, or nothing was found in time.
    """
    forms: tuple[By, ...] = ("rank", "chunk", "slot") if stages.vpp > 1 else ("rank",)
    candidates = [place(stages, by, limit_s).placement for by in forms]
    same = recomputed(stages, even(stages), limit_s)
    candidates += [same.placement] if same is not None else []
    candidates += [placement for kind in range(stages.kinds) if fits(stages, placement := even(stages, kind))]
    seconds = {placement: step_s(stages, placement, send_s) for placement in candidates}
    tries = min(tries, PASSES // (2 * len(stages.ranks) * stages.micro_batches))
    first, *others = sorted(seconds, key=seconds.__getitem__)
    ends = [improved(stages, first, send_s, tries), *(improved(stages, one, send_s, tries // 4) for one in others)]
    return min(ends, key=lambda placement: step_s(stages, placement, send_s))


def improved(stages: Stages, placement: Placement, send_s: float = 0.0, tries: int = TRIES) -> Placement:
    """Changed by one layer, or by two where no one does it, as long as the step gets shorter and it fits."""
    now, left = step_s(stages, placement, send_s), tries
    while True:
        better = None
        for other in islice(_one_or_two(stages, placement), LOOKED_AT * tries):
            if not fits(stages, other):
                continue
            if not left:
                return placement
            left -= 1
            then = step_s(stages, other, send_s)
            if then < now * (1 - 1e-9):
                better, now = other, then
                break
        if better is None:
            return placement
        placement = better


def _one_or_two(stages: Stages, placement: Placement) -> Iterator[Placement]:
    yield from neighbours(stages, placement)
    seen = {placement}
    for one in neighbours(stages, placement):
        for other in neighbours(stages, one):
            if other not in seen:
                seen.add(other)
                yield other


def step_s(stages: Stages, placement: Placement, send_s: float) -> float:
    """Simulated; where the schedule has no order that we know, by the closed form."""
    try:
        return simulated_s(stages, placement, send_s)
    except MoestroError:
        return closed_form_s(stages, placement)


def neighbours(stages: Stages, placement: Placement) -> Iterator[Placement]:
    """A layer on the stage before or after, or recomputed in another way."""
    free = [number for number, run in enumerate(stages.layers) if not run.at_end]
    for stage, runs in enumerate(placement):
        own = [number for number in free if sum(runs[number])]
        for kind in range(stages.kinds):
            if sum(sum(runs[number]) for number in own) > 1:
                if stage + 1 < len(placement):
                    yield _changed(stages, placement, own[-1], (stage, None), (stage + 1, kind))
                if stage:
                    yield _changed(stages, placement, own[0], (stage, None), (stage - 1, kind))
            for number, counts in enumerate(runs):
                for other, count in enumerate(counts):
                    if count and other != kind:
                        yield _changed(stages, placement, number, (stage, other), (stage, kind))


def _changed(
    stages: Stages, placement: Placement, run: int, taken: tuple[int, int | None], put: tuple[int, int]
) -> Placement:  # fmt: skip
    """A layer of a run taken from (stage, kind; None: whichever is recomputed least) and put there."""
    found = [[list(counts) for counts in runs] for runs in placement]
    stage, kind = taken
    counts = found[stage][run]
    counts[next(k for k, n in enumerate(counts) if n) if kind is None else kind] -= 1
    found[put[0]][run][put[1]] += 1
    if stages.in_order:
        for touched in {stage, put[0]}:
            found[touched] = _first_again(found[touched])
    return tuple(tuple(tuple(counts) for counts in runs) for runs in found)


def _first_again(runs: list[list[int]]) -> list[list[int]]:
    """As many recomputed, the first ones."""
    again, found = sum(counts[1] for counts in runs), []
    for counts in runs:
        twice = min(again, sum(counts))
        again -= twice
        found.append([sum(counts) - twice, twice])
    return found
