"""Layers and recomputation on stages: the program against all placements, times and bytes against a count by hand."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.errors import MoestroError
from moestro.plan.ilp.improve import best_placement, improved
from moestro.plan.ilp.place import place
from moestro.plan.ilp.stages import (
    By,
    Extra,
    Layers,
    Placement,
    Stages,
    closed_form_s,
    even,
    fits,
    rank_bytes,
    simulated_s,
    stage_seconds,
)

DENSE = Layers(2, 0.8, (1.5, 2.3), (4.0, 1.0), held_bytes=1.0, brief_bytes=(0.0, 3.0))
MIXED = Layers(3, 1.1, (2.4, 3.4), (3.0, 0.5), held_bytes=2.0, brief_bytes=(0.5, 2.5))
FIRST, LAST = Extra(0.1, 0.2, 1.0, 0.1), Extra(0.5, 1.0, 1.5, 0.5)


def stages(pp: int = 2, vpp: int = 1, micro_batches: int = 4, limit: float = 1e9, in_order: bool = False) -> Stages:
    schedule = "1f1b" if vpp == 1 else "interleaved"
    found = Stages.of(schedule, pp, vpp, micro_batches, [DENSE, MIXED], limit, FIRST, LAST)
    return replace(found, in_order=in_order)


def every(some: Stages) -> Iterator[Placement]:
    """All placements that fit, by brute force: where each layer lies and whether it is recomputed."""
    order = [n for n, run in enumerate(some.layers) for _ in range(run.count)]
    count = len(some.ranks)
    seen = set()
    for where in product(range(count), repeat=len(order)):
        if list(where) != sorted(where) or set(where) != set(range(count)):
            continue
        for again in product((0, 1), repeat=len(order)):
            if some.in_order and any(a < b and where[i] == where[i + 1] for i, (a, b) in enumerate(pairwise(again))):
                continue
            found = [[[0, 0] for _ in some.layers] for _ in range(count)]
            for layer, stage in enumerate(where):
                found[stage][order[layer]][again[layer]] += 1
            one = tuple(tuple(tuple(counts) for counts in runs) for runs in found)
            if one not in seen and fits(some, one):
                seen.add(one)
                yield one


def between(some: Stages, share: float) -> Stages:
    """With a limit so far from what recomputing all needs to what recomputing nothing does."""
    low, high = (max(rank_bytes(some, even(some, kind))) for kind in (1, 0))
    return replace(some, limits_bytes=(low + share * (high - low),) * some.pp)


@pytest.mark.parametrize(("pp", "vpp", "m", "share"), [(2, 1, 4, 0.1), (3, 1, 2, 0.6), (2, 2, 2, 0.1), (2, 2, 4, 0.6)])
@pytest.mark.parametrize("in_order", [False, True])
def test_no_placement_is_better(pp: int, vpp: int, m: int, in_order: bool, share: float) -> None:
    some = between(stages(pp, vpp, m, in_order=in_order), share)
    others = list(every(some))
    forms: tuple[By, ...] = ("rank", "chunk", "slot") if vpp > 1 else ("rank",)
    for by in forms:
        found = place(some, by)
        assert found.placement in others
        assert found.step_s == pytest.approx(min(closed_form_s(some, one, by) for one in others), rel=1e-5)
        assert found.bound_s == pytest.approx(found.step_s, rel=1e-5)
    best = best_placement(some, tries=60)
    assert simulated_s(some, best) <= 1.06 * min(simulated_s(some, one) for one in others)


@given(st.integers(0, 10**6))
@settings(max_examples=8, deadline=None)
def test_random_instances(seed: int) -> None:
    """Unlike limits and paces, a run that stays at the end, three kinds of recomputation."""
    rng = random.Random(seed)
    runs = [
        Layers(rng.randint(1, 2), rng.uniform(0.5, 2), tuple(sorted(rng.uniform(1, 4) for _ in range(3))),
               tuple(sorted((rng.uniform(0.1, 4) for _ in range(3)), reverse=True)), rng.uniform(0, 2),
               at_end=number == 2)
        for number in range(3)
    ]  # fmt: skip
    some = Stages.of("1f1b", 2, 1, rng.randint(1, 5), runs, 0.0, FIRST, LAST)
    limits = [max(rank_bytes(some, even(some, 1))) * rng.uniform(0.9, 1.3) for _ in range(2)]
    some = replace(some, limits_bytes=tuple(limits), pace=(1.0, rng.uniform(0.5, 2)))
    others = [one for one in _three_kinds(some) if fits(some, one)]
    if not others:
        with pytest.raises(MoestroError, match="fits"):
            place(some)
        return
    found = place(some)
    assert found.placement in others
    assert found.step_s == pytest.approx(min(closed_form_s(some, one) for one in others), rel=1e-5)


def _three_kinds(some: Stages) -> Iterator[Placement]:
    def shared(count: int) -> list[tuple[int, ...]]:
        return [(a, b, count - a - b) for a in range(count + 1) for b in range(count + 1 - a)]

    first, second, ahead = (run.count for run in some.layers)
    for cut in range(1, first + second):
        left = (min(cut, first), max(0, cut - first))
        sizes = [(*left, 0), (first - left[0], second - left[1], ahead)]
        choices = [list(product(*(shared(count) for count in counts))) for counts in sizes]
        yield from (tuple(one) for one in product(*choices))


def test_times_and_bytes_by_hand() -> None:
    some = stages()
    one: Placement = (((1, 1), (0, 0)), ((0, 0), (2, 1)))
    assert stage_seconds(some, one)[0] == pytest.approx([0.1 + 1.6, 0.5 + 3.3])
    assert stage_seconds(some, one)[1] == pytest.approx([0.2 + 1.5 + 2.3, 1.0 + 2.4 * 2 + 3.4])
    # Two micro-batches in flight on the first rank, one on the last; the largest that comes and goes once.
    assert rank_bytes(some, one) == pytest.approx([1 + 2 + 2 * (0.1 + 5) + 3, 1.5 + 6 + (0.5 + 6.5) + 2.5])
    first, last = 1.7 + 4.0, 3.8 + 9.2
    assert closed_form_s(some, one) == pytest.approx(3 * last + first + last)
    slower = replace(some, pace=(2.0, 1.0))
    assert closed_form_s(slower, one) == pytest.approx(3 * last + 2 * first + last)


def test_equal_layers_and_room_stay_even() -> None:
    layer = Layers(8, 1.0, (2.0, 3.0), (1.0, 0.1))
    some = Stages.of("1f1b", 4, 1, 8, [layer], 1e9)
    assert place(some).placement == even(some)
    assert closed_form_s(some, even(some)) == pytest.approx(simulated_s(some, even(some)))


def test_a_head_takes_layers_away() -> None:
    layer = Layers(8, 1.0, (2.0,), (1.0,))
    some = Stages.of("1f1b", 2, 1, 8, [layer], 1e9, last=Extra(2.0, 4.0))
    assert place(some).placement == (((5,),), ((3,),))


def test_the_first_rank_recomputes_more() -> None:
    """It holds more micro-batches."""
    layer = Layers(8, 1.0, (2.0, 3.0), (1.0, 0.1))
    some = between(Stages.of("1f1b", 4, 1, 8, [layer], 0.0), 0.5)
    again = [runs[0][1] for runs in place(some).placement]
    assert again[0] > again[-1] == 0


def test_no_room_says_how_much() -> None:
    layer = Layers(4, 1.0, (2.0, 3.0), (2e9, 1e9), held_bytes=1e9)
    some = Stages.of("1f1b", 2, 1, 4, [layer], 2e9)
    with pytest.raises(MoestroError, match=r"about 6(\.0\d)? GB and has 2") as error:
        place(some)  # one layer and three: 1 + 2 and 3 + 3 GB; two and two: 2 + 4 and 2 + 2
    assert "smaller micro-batch" in str(error.value)


def test_more_stages_than_layers() -> None:
    some = Stages.of("1f1b", 4, 1, 4, [Layers(3, 1.0, (2.0,), (1.0,))], 1e9)
    with pytest.raises(MoestroError, match="4 stages for fewer layers"):
        place(some)


def test_improving_never_makes_it_longer_or_larger() -> None:
    some = between(stages(2, 2, 4, in_order=True), 0.5)
    start = next(one for one in every(some))
    found = improved(some, start)
    assert fits(some, found)
    assert simulated_s(some, found) <= simulated_s(some, start)
