"""Layers and kinds of recomputation on the stages of a pipeline: what there is to place, and what a placement takes.

Whole layers stand in their order on pp · vpp stages, each recomputed in one of several ways or not at all. A rank holds
its layers' weights and states, and of each stage the activations of as many micro-batches as the schedule keeps in
flight at its worst moments. The step is as long as its slowest rank makes it, and the way through all stages once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from moestro.predict.memory import most_held
from moestro.predict.orders import stage_ranks
from moestro.predict.schedule import simulate_pipeline

# What holds all ranks up. rank: the slowest one's passes of a micro-batch. chunk: of each chunk the slowest rank's,
# since ranks go through their chunks together. slot: the longest forward and backward pass of a rank, run in turns.
By = Literal["rank", "chunk", "slot"]
Moment = tuple[tuple[int, int], ...]  # (stage, micro-batches in flight)
Placement = tuple[tuple[tuple[int, ...], ...], ...]  # [stage][run][kind]: so many layers


@dataclass(frozen=True)
class Layers:
    """A run of equal layers, of one micro-batch on one rank.

    By kind of recomputation, of which the first is none: backward_s with what is computed again; kept_bytes of
    activations; brief_bytes that come and go while such a layer is worked on. at_end: they stay with the head.
    """

    count: int
    forward_s: float
    backward_s: tuple[float, ...]
    kept_bytes: tuple[float, ...]
    held_bytes: float = 0.0
    brief_bytes: tuple[float, ...] = ()
    at_end: bool = False


@dataclass(frozen=True)
class Extra:
    """What a stage does and holds besides its layers."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    held_bytes: float = 0.0
    kept_bytes: float = 0.0
    brief_bytes: float = 0.0


NO_EXTRA = Extra()


@dataclass(frozen=True)
class Stages:
    """What there is to place, and where.

    ranks: of each stage. moments: of each rank, those at which it may hold most. limits_bytes: of each rank.
    pace: of each rank, a factor on all its times. in_order: a stage recomputes its first layers (two kinds only).
    """

    schedule: str
    vpp: int
    micro_batches: int
    layers: tuple[Layers, ...]
    limits_bytes: tuple[float, ...]
    extras: tuple[Extra, ...]
    ranks: tuple[int, ...]
    moments: tuple[tuple[Moment, ...], ...]
    pace: tuple[float, ...]
    in_order: bool = False

    @staticmethod
    def of(
        schedule: str,
        pp: int,
        vpp: int,
        micro_batches: int,
        layers: Sequence[Layers],
        limit_bytes: float,
        first: Extra = NO_EXTRA,
        last: Extra = NO_EXTRA,
    ) -> "Stages":
        """On equal ranks."""
        extras = [NO_EXTRA] * (pp * vpp)
        extras[0] = first
        extras[-1] = _both(extras[-1], last)
        ranks = tuple(stage_ranks(schedule, pp, vpp)[: pp * vpp])
        moments = tuple(tuple(of_rank) for of_rank in most_held(schedule, pp, vpp, micro_batches))
        return Stages(schedule, vpp, micro_batches, tuple(layers), (limit_bytes,) * pp, tuple(extras), ranks, moments,
                      (1.0,) * pp)  # fmt: skip

    @property
    def pp(self) -> int:
        return len(self.limits_bytes)

    @property
    def kinds(self) -> int:
        return len(self.layers[0].backward_s)

    def members(self, rank: int) -> list[int]:
        """Stages whose weights a rank holds."""
        return [stage % len(self.ranks) for stage, _ in self.moments[rank][0]]


def _both(one: Extra, other: Extra) -> Extra:
    return Extra(
        one.forward_s + other.forward_s, one.backward_s + other.backward_s, one.held_bytes + other.held_bytes,
        one.kept_bytes + other.kept_bytes, max(one.brief_bytes, other.brief_bytes),
    )  # fmt: skip


# What a placement takes and needs.


def stage_seconds(stages: Stages, placement: Placement) -> tuple[list[float], list[float]]:
    """Of each stage, one micro-batch: forward; backward with what is recomputed."""
    forward, backward = [], []
    for stage, (extra, runs) in enumerate(zip(stages.extras, placement, strict=True)):
        pace = stages.pace[stages.ranks[stage]]
        pairs = list(zip(stages.layers, runs, strict=True))
        forward.append(pace * (extra.forward_s + sum(run.forward_s * sum(counts) for run, counts in pairs)))
        passes = (s * n for run, counts in pairs for s, n in zip(run.backward_s, counts, strict=True))
        backward.append(pace * (extra.backward_s + sum(passes)))
    return forward, backward


def closed_form_s(stages: Stages, placement: Placement, by: By = "rank") -> float:
    """The step: what the program minimises."""
    forward, backward = stage_seconds(stages, placement)
    own = [[s for s, r in enumerate(stages.ranks) if r == rank] for rank in range(stages.pp)]
    if by == "rank":
        slowest = max(sum(forward[s] + backward[s] for s in some) for some in own)
    elif by == "chunk":
        slowest = sum(max(forward[s] + backward[s] for s in chunk) for chunk in zip(*own, strict=True))
    else:
        slowest = max(max(forward[s] for s in some) + max(backward[s] for s in some) for some in own)
    return slowest_weight(stages, by) * slowest + (sum(forward) + sum(backward)) / stages.vpp


def simulated_s(stages: Stages, placement: Placement, send_s: float = 0.0) -> float:
    """The step, pass by pass; backward passes are not split, in schedules that would.

    Raises:
        MoestroError: the schedule has no order for so many micro-batches.
    """
    forward, backward = stage_seconds(stages, placement)
    nothing = [0.0] * len(forward)
    return simulate_pipeline(
        stages.schedule, stages.pp, stages.vpp, stages.micro_batches, forward, backward, nothing, send_s
    ).total_s


def rank_bytes(stages: Stages, placement: Placement) -> list[float]:
    """Of each rank at its worst moment."""
    held, kept, brief = [], [], []
    for extra, runs in zip(stages.extras, placement, strict=True):
        pairs = list(zip(stages.layers, runs, strict=True))
        held.append(extra.held_bytes + sum(run.held_bytes * sum(counts) for run, counts in pairs))
        saved = (size * n for run, counts in pairs for size, n in zip(run.kept_bytes, counts, strict=True))
        kept.append(extra.kept_bytes + sum(saved))
        there = (b for run, counts in pairs for b, n in zip(run.brief_bytes, counts, strict=False) if n)
        brief.append(max(there, default=0.0))
        brief[-1] = max(brief[-1], extra.brief_bytes)
    count = len(stages.ranks)
    found = []
    for rank, moments in enumerate(stages.moments):
        members = stages.members(rank)
        most = max(sum(n * kept[stage % count] for stage, n in moment) for moment in moments)
        found.append(sum(held[stage] for stage in members) + most + max(brief[stage] for stage in members))
    return found


def fits(stages: Stages, placement: Placement) -> bool:
    needs = zip(rank_bytes(stages, placement), stages.limits_bytes, strict=True)
    return all(need <= limit * (1 + 1e-9) for need, limit in needs)


def even(stages: Stages, kind: int = 0) -> Placement:
    """As many layers on each stage as come out, the first ones larger, all recomputed alike."""
    order = [run for run, layers in enumerate(stages.layers) for _ in range(layers.count) if not layers.at_end]
    size, more = divmod(len(order), len(stages.ranks))
    found, start = [], 0
    for stage in range(len(stages.ranks)):
        own = order[start : start + size + (stage < more)]
        start += len(own)
        last = stage == len(stages.ranks) - 1
        sizes = [
            (layers.count if last else 0) if layers.at_end else own.count(run)
            for run, layers in enumerate(stages.layers)
        ]
        found.append(tuple(tuple(n if k == kind else 0 for k in range(stages.kinds)) for n in sizes))
    return tuple(found)


def slowest_weight(stages: Stages, by: By) -> float:
    """Of the slowest rank in the step, beside 1 / vpp of all stages once."""
    once = stages.micro_batches - 1 / stages.vpp
    return once * stages.vpp if by == "slot" else once
