"""Step time and memory of many plans at once: the closed forms of predict.step and predict.memory over arrays.

A family's pieces are counted and priced once; then all its pipelines and variants are a few array operations. Equal to
`predict_step`, which a test holds it to.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from moestro.config.plan import Plan, Workload
from moestro.graph.pieces import Pieces, add_parameters, pieces_of, sharded_passes
from moestro.graph.step import rank_step
from moestro.graph.tape import stream_bytes
from moestro.graph.words import Piece
from moestro.plan.frame import Floats, Frame, Kinds, Part, Signatures, Whole, frame_of, part_of
from moestro.plan.held import held_bytes, passing_bytes
from moestro.plan.more import More, states, working
from moestro.plan.space import Family, Pipeline, Space, Variant, values_of
from moestro.predict.constants import Constants
from moestro.predict.costs import Cost, Pricer
from moestro.predict.many import bubbles
from moestro.predict.memory import enough, kept_bytes, outside_bytes
from moestro.predict.offload import needed_rate, optimizer_bytes
from moestro.predict.orders import SPLIT_BACKWARD
from moestro.predict.predict import target_pricer
from moestro.predict.recovery import rank_state
from moestro.predict.step import joins
from moestro.predict.target import Target

# Of a pass: what its kernels take, the host, collectives that nothing hides, and those that may hide.
COMPUTE, HOST, BLOCKS, HIDES = range(4)
PLAIN = Plan()
WHOLE = Variant(0, None, "none", None, True, True)


@dataclass(frozen=True)
class Batch:
    """Plans of one family: pipelines × variants, as arrays of that shape.

    step_s: seconds; needed_bytes: what the fullest device must have; total_bytes: what it holds where there is room.
    more: where it was asked for.
    """

    family: Family
    pipelines: tuple[Pipeline, ...]
    variants: tuple[Variant, ...]
    step_s: Floats
    needed_bytes: Floats
    total_bytes: Floats
    more: More | None = None


class Base(NamedTuple):
    """A family before weights are split. own: its pieces by kind. rows: [4, kinds, 4], seconds of forward, what is
    recomputed, backward and weight of one of each. pricers: by pp."""

    family: Family
    pieces: Pieces
    own: list[Piece | None]
    rows: Floats
    pricers: dict[int, Pricer]


class Group(NamedTuple):
    """Plans that are evaluated together: pipelines × variants of a family. splits_weights: its passes gather them."""

    base: Base
    pipelines: tuple[Pipeline, ...]
    variants: tuple[Variant, ...]
    splits_weights: bool

    @property
    def plans(self) -> int:
        return len(self.pipelines) * len(self.variants)


@dataclass
class Evaluator:
    """Of one workload on so many devices of a target whose host does not compute. details: batches tell more."""

    workload: Workload
    target: Target
    devices: int
    details: bool = False
    constants: Constants = field(init=False)
    kinds: Kinds | None = None  # known with the first family
    _signatures: Signatures | None = None
    _frames: dict[tuple[Any, ...], Frame] = field(default_factory=dict)
    _parts: dict[tuple[Pipeline, bool], Part] = field(default_factory=dict)
    _once: dict[tuple[Any, ...], tuple[float, ...]] = field(default_factory=dict)
    _kept: dict[tuple[Any, ...], Floats] = field(default_factory=dict)
    _shards: dict[tuple[Any, ...], Floats] = field(default_factory=dict)
    _flags: dict[tuple[Any, ...], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.constants = self.target.constants_for(self.workload, self.devices)

    def batches(self, family: Family, space: Space) -> list[Batch]:
        """All plans of a family."""
        return [self.batch(group) for group in self.groups(family, space)]

    def groups(self, family: Family, space: Space) -> list[Group]:
        """All plans of a family, not evaluated yet. Variants that split weights send them within the passes, so those
        stand apart for each number of data ranks; those that offload activations copy within the passes, and stand
        apart too."""
        pipelines = list(space.pipelines(family, self.workload, self.devices))
        if not pipelines:
            return []
        alike: dict[tuple[Any, ...], tuple[list[Pipeline], list[Variant], bool]] = {}
        alone: dict[tuple[int, bool], list[Pipeline]] = {}  # of as many data ranks, whose variants are the same
        for pipeline in pipelines:
            alone.setdefault((pipeline.dp, pipeline.schedule in SPLIT_BACKWARD), []).append(pipeline)
        for (dp, _), here in alone.items():
            apart: dict[tuple[Variant | None, bool], list[Variant]] = {}
            for variant in space.variants(family, self.workload, here[0]):
                own = self._sharded(family, here[0], variant) or variant.zero == 3
                apart.setdefault((variant if own else None, variant.offload == "activations"), []).append(variant)
            for (own_variant, _), variants in apart.items():
                key = (own_variant, dp) if own_variant else tuple(variants)
                alike.setdefault(key, ([], variants, own_variant is not None))[0].extend(here)
        base = self._base(family, pipelines)
        return [Group(base, tuple(some), tuple(variants), splits) for some, variants, splits in alike.values()]

    def _base(self, family: Family, pipelines: Sequence[Pipeline]) -> Base:
        plan = self._plan(family, pipelines[0], WHOLE)
        pieces = pieces_of(self.workload, plan)
        if self._signatures is None:
            self.kinds = Kinds(self.workload, pieces)
            self._signatures = Signatures(self.kinds)
        own = self._signatures.kinds.pieces(pieces)
        pricers = self._pricers(family, pipelines)
        rows = np.zeros((4, len(own), 4))
        pricer = next(iter(pricers.values()))  # what is sent inside a layer stays between neighbours with all of them
        for number, piece in enumerate(own):
            if piece is not None:
                for which, cost in enumerate(pricer.piece(piece)):
                    rows[which, number] = _row(cost, self.constants)
        return Base(family, pieces, own, rows, pricers)

    def batch(self, group: Group) -> Batch:
        assert self._signatures is not None
        base, pipelines, variants, splits_weights = group
        family, own = base.family, base.own
        frame = self._frame(pipelines, family.recompute != "none")
        counts, again = self._signatures.counts, self._signatures.again
        forward, recompute, backward, last = base.rows
        if splits_weights:
            more = self._shard_rows(base, pipelines[0], variants[0])
            forward, backward = forward + more[0], backward + more[1]
        passes = np.stack([counts @ forward, again @ recompute + counts @ backward, counts @ last], axis=1)
        plan, mirror = self._plan(family, pipelines[0], variants[0]), _mirror(frame)
        besides = self._signatures.besides(base.pieces)
        passing = passing_bytes(self.workload, plan, frame, own, counts, again, besides)
        copies = np.zeros(len(counts))
        if variants[0].offload == "activations":
            copies = passing.activations / needed_rate(self.target.place.device)
        per_rank, back, weight = (
            (values + values[mirror]) / 2
            for values in (
                _by_rank(frame, seconds) for seconds in _unit_seconds(frame, passes, plan, self.constants, copies)
            )
        )
        slowest = _first_largest(per_rank, frame.first_rank, frame.rank_pipeline)
        sent = float(base.pieces.local * stream_bytes(self.workload))
        send = [(p.pp - 1) * base.pricers[p.pp].network.send_s(sent if p.pp > 1 else 0.0) for p in pipelines]
        waits = bubbles(
            [p.schedule if p.pp > 1 else "1f1b" for p in pipelines],
            np.array([p.pp for p in pipelines], dtype=np.float64),
            frame.vpp,
            *(np.add.reduceat(ranks, frame.first_rank) - ranks[slowest] for ranks in (per_rank, back, weight)),
        )
        step = frame.micro_batches * per_rank[slowest] + waits + 2 * np.array(send) * self.constants.between
        compute = passes[:, :, COMPUTE]
        hiding = [_by_rank(frame, c[frame.stage_signature]) for c in (compute[:, 1:].sum(1), compute[:, 0])]
        behind = [((ranks + ranks[mirror]) / 2)[slowest] for ranks in hiding]
        once, update = self._once_s(base, frame, variants, counts, slowest, behind)
        sizes = {p.pp: p for p in pipelines}
        kept = {pp: [self.kept_bytes(base, p, variant) for variant in variants] for pp, p in sizes.items()}
        outside = {pp: self.outside_bytes(family, p, variants[0]) for pp, p in sizes.items()}
        offload = [variant.offload == "activations" for variant in variants]
        needed, total = held_bytes(frame, counts, passing, kept, outside, offload)
        seconds = step[:, None] + once + self.constants.step_s
        if not self.details:
            return Batch(family, pipelines, variants, seconds, needed, total)
        computing, waiting = working(frame, passes, plan, self.constants, mirror, slowest)
        waiting += self.constants.step_s + waits + 2 * np.array(send) * self.constants.between
        state = {pp: [self._state(base, p, variant) for variant in variants] for pp, p in sizes.items()}
        details = More(
            computing[:, None] + update, waiting[:, None] + 0 * update, *states(frame, counts, state, self.devices)
        )
        return Batch(family, pipelines, variants, seconds, needed, total, details)

    def _plan(self, family: Family, pipeline: Pipeline, variant: Variant) -> Plan:
        """Not checked: the space holds valid ones only."""
        return PLAIN.model_copy(update=values_of(family, pipeline, variant, self.target.place.node_size))

    def _sharded(self, family: Family, pipeline: Pipeline, variant: Variant) -> bool:
        key = "sharded", family.cp, pipeline.dp, pipeline.pp, variant
        if key not in self._flags:
            self._flags[key] = 1.0 * sharded_passes(self.workload, self._plan(family, pipeline, variant))
        return bool(self._flags[key])

    def _frame(self, pipelines: tuple[Pipeline, ...], recomputes: bool) -> Frame:
        key = pipelines, recomputes
        if key not in self._frames:
            self._frames[key] = frame_of(pipelines, [self._part(pipeline, recomputes) for pipeline in pipelines])
        return self._frames[key]

    def _part(self, pipeline: Pipeline, recomputes: bool) -> Part:
        """More micro-batches than show the peak of memory change nothing in it."""
        assert self._signatures is not None
        few = enough(pipeline.schedule, pipeline.micro_batches, pipeline.pp, pipeline.vpp)
        if pipeline.schedule == "interleaved":
            few -= few % pipeline.pp
        key = pipeline._replace(dp=1, micro_batches=few), recomputes
        if key not in self._parts:
            self._parts[key] = part_of(pipeline, recomputes, self._signatures)
        return self._parts[key]

    def _pricers(self, family: Family, pipelines: Sequence[Pipeline]) -> dict[int, Pricer]:
        """By pp. Pieces cost the same with all of them: what is sent inside a layer stays between neighbours."""
        plans = {p.pp: PLAIN.model_copy(update={**family._asdict(), "pp": p.pp, "dp": p.dp}) for p in pipelines}
        return {pp: target_pricer(self.workload, plan, self.target) for pp, plan in plans.items()}

    def _shard_rows(self, base: Base, pipeline: Pipeline, variant: Variant) -> Floats:
        """[2, kinds, 4]: what gathers of weights and scatters of gradients add to forward and backward."""
        key = _layout(base.family), pipeline.pp, pipeline.dp, variant
        if key not in self._shards:
            assert self._signatures is not None
            plan, pricer = self._plan(base.family, pipeline, variant), base.pricers[pipeline.pp]
            found = np.zeros((2, len(base.own), 4))
            for number, piece in enumerate(self._signatures.kinds.pieces(pieces_of(self.workload, plan))):
                for which, nodes in enumerate(() if piece is None else (piece.forward, piece.backward)):
                    cost = pricer.nodes(node for node in nodes if node.part == "sharding")
                    found[which, number] = _row(cost, self.constants)
            self._shards[key] = found
        return self._shards[key]

    def kept_bytes(self, base: Base, pipeline: Pipeline, variant: Variant) -> Floats:
        """Of each kind of piece: weights, gradients, optimizer state."""
        key = _layout(base.family), pipeline.pp, pipeline.dp, variant
        if key not in self._kept:
            plan = self._plan(base.family, pipeline, variant)
            found = [0.0 if p is None else sum(kept_bytes(self.workload, plan, p.parameters)) for p in base.own]
            self._kept[key] = np.array(found)
        return self._kept[key]

    def _state(self, base: Base, pipeline: Pipeline, variant: Variant) -> Floats:
        """[2, kinds]: bytes of a checkpoint that a rank writes, and that it reads, of each kind of piece."""
        key = "state", _layout(base.family), pipeline.pp, pipeline.dp, variant
        if key not in self._kept:
            plan = self._plan(base.family, pipeline, variant)
            found = [(0.0, 0.0) if p is None else rank_state(self.workload, plan, p.parameters) for p in base.own]
            self._kept[key] = np.array(found).T
        return self._kept[key]

    def outside_bytes(self, family: Family, pipeline: Pipeline, variant: Variant) -> float:
        key = "outside", _layout(family), pipeline.pp, pipeline.dp
        if key not in self._flags:
            plan = self._plan(family, pipeline, variant)
            self._flags[key] = sum(outside_bytes(plan, self.workload, self.target.place.device))
        return self._flags[key]

    def _once_s(
        self, base: Base, frame: Frame, variants: Sequence[Variant], counts: Floats, slowest: Whole,
        behind: Sequence[Floats],
    ) -> tuple[Floats, Floats]:  # fmt: skip
        """[pipelines, variants]: gather, reduction and update of the slowest rank, less what its passes hide; and the
        update alone."""
        held = np.zeros((len(frame.rank_pipeline), counts.shape[1]))
        np.add.at(held, frame.stage_rank, counts[frame.stage_signature])
        model, rows = self.workload.model, []
        tied = model.tie_embeddings or model.mtp is not None
        layout = _layout(base.family)
        for number, pipeline in enumerate(frame.pipelines):
            own = tuple(held[slowest[number]].tolist())
            shared = bool(tied and frame.ends[slowest[number]])
            for variant in variants:
                key = (own, shared, layout, pipeline.pp, pipeline.dp, variant)
                if key not in self._once:
                    plan = self._plan(base.family, pipeline, variant)
                    parts = [(p.parameters, int(n)) for p, n in zip(base.own, own, strict=True) if p is not None and n]
                    numbers = add_parameters(parts)
                    step = rank_step(self.workload, plan, 0, numbers, shared)
                    costs = [
                        base.pricers[pipeline.pp].nodes(nodes) for nodes in (step.before, step.gradients, step.update)
                    ]
                    gather, reduce = (_row(cost, self.constants)[BLOCKS:] for cost in costs[:2])
                    update_s = costs[2].seconds(self.constants)
                    if variant.offload == "optimizer":
                        moved = optimizer_bytes(self.workload, plan, numbers)
                        update_s = max(update_s, moved / needed_rate(self.target.place.device))
                    self._once[key] = (*gather, *reduce, update_s)
                rows.append(self._once[key])
        found = np.array(rows).reshape(len(frame.pipelines), len(variants), 5)
        after, before = (self.constants.hidden * seconds[:, None] for seconds in behind)
        gather_s = found[..., 0] + np.maximum(0.0, found[..., 1] - before)
        reduce_s = found[..., 2] + np.maximum(0.0, found[..., 3] - after)
        update: Floats = found[..., 4]
        return np.asarray(gather_s + reduce_s + update, dtype=np.float64), update


def _layout(family: Family) -> tuple[Any, ...]:
    """All of a family that the number of parameters on a rank, and who else has them, depends on."""
    return family.tp, family.cp, family.ep, family.etp, family.sequence_parallel, family.gradient_dtype


def _row(cost: Cost, constants: Constants) -> tuple[float, float, float, float]:
    blocks = hides = 0.0
    for (_, between, may_hide), seconds in cost.collectives.items():
        factor = constants.between if between else constants.inside
        blocks += 0.0 if may_hide else seconds * factor
        hides += seconds * factor if may_hide else 0.0
    return cost.compute_s(constants), cost.host_s(constants), blocks, hides


def seconds_of(rows: Floats, constants: Constants) -> Floats:
    """Cost.seconds of rows [..., 4]."""
    hidden = np.minimum(rows[..., HIDES], constants.hidden * rows[..., COMPUTE])
    working = np.maximum(rows[..., COMPUTE] + constants.contention * hidden, rows[..., HOST])
    found: Floats = working + rows[..., BLOCKS] + rows[..., HIDES] - hidden
    return found


def _unit_seconds(
    frame: Frame, passes: Floats, plan: Plan, constants: Constants, copies: Floats
) -> tuple[Floats, Floats, Floats]:
    """Of each stage: all that its rank runs (step.units), gradients of inputs, and of weights. copies: [signatures],
    seconds of copies to the host beside forward passes, and from it beside backward passes."""
    apart = seconds_of(passes, constants)  # [signatures, 3]
    apart[:, :2] = np.maximum(apart[:, :2], copies[:, None])
    joined = np.maximum(seconds_of(passes.sum(axis=1), constants), copies)
    join = np.array([joins(p.schedule, plan) for p in frame.pipelines])[frame.rank_pipeline[frame.stage_rank]]
    signature = frame.stage_signature
    busy = np.where(join, joined[signature], apart.sum(axis=1)[signature])
    return busy, apart[signature, 1], apart[signature, 2]


def _mirror(frame: Frame) -> Whole:
    """Of each rank, the one that shares its stages (DualPipe), or itself."""
    own = np.arange(len(frame.rank_pipeline))
    first = frame.first_rank[frame.rank_pipeline]
    two = np.array([p.pp if p.schedule == "dualpipe" else 0 for p in frame.pipelines])[frame.rank_pipeline]
    return np.where(two > 0, 2 * first + two - 1 - own, own)


def _by_rank(frame: Frame, values: Floats) -> Floats:
    """Of stages, added up by rank."""
    return np.bincount(frame.stage_rank, values, len(frame.rank_pipeline)).astype(np.float64)


def _first_largest(values: Floats, first: Whole, group: Whole) -> Whole:
    """Of each group of neighbours, the place of the first that is largest."""
    places = np.where(values >= np.maximum.reduceat(values, first)[group], np.arange(len(values)), len(values))
    return np.minimum.reduceat(places, first)
