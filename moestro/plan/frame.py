"""How layers lie on pipeline ranks in many pipelines at once, as index arrays: what families of plans share.

A *signature* is a stage's make-up: how often it has each kind of piece, and how often recomputed. Stages of equal
signature cost the same, wherever they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from moestro.config.plan import Plan, Workload
from moestro.graph.count import rank_of, split_layers
from moestro.graph.pieces import Pieces
from moestro.graph.words import Piece
from moestro.plan.space import Pipeline
from moestro.predict.memory import most_held

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]


class Kinds:
    """The kinds of pieces of a model: its layers', those of multi-token prediction, embedding and heads.

    In this order: layers and blocks ahead by kind, then the embedding, the head with and without another rank holding
    the embedding, and the head of the tokens ahead.
    """

    def __init__(self, workload: Workload, pieces: Pieces) -> None:
        self.num_layers = workload.model.num_layers
        self.num_ahead = workload.model.num_blocks - self.num_layers
        first: dict[object, int] = {}
        self.layers = np.array([first.setdefault(kind, len(first)) for kind in pieces.kinds[: self.num_layers]])
        self.example = [int(np.flatnonzero(self.layers == kind)[0]) for kind in range(len(first))]
        self.num_kinds = len(first)
        self.ahead, self.embedding, self.head_cut, self.head, self.ahead_head = range(len(first), len(first) + 5)
        self.num_pieces = len(first) + 5

    def whole(self, cut: bool) -> tuple[Floats, Floats]:
        """How often the model has each kind of piece, and how often it is recomputed where all layers are. cut: there
        are several pipeline ranks."""
        again = np.bincount(self.layers, minlength=self.num_pieces).astype(np.float64)
        again[self.ahead] = self.num_ahead
        counts = again.copy()
        counts[[self.embedding, self.head_cut if cut else self.head]] = 1
        counts[self.ahead_head] = self.num_ahead
        return counts, again

    def pieces(self, of: Pieces) -> list[Piece | None]:
        """Those of a family, in this order; None: the model has none."""
        last = self.num_layers - 1
        found: list[Piece | None] = [of.stage(range(i, i + 1), False, False, True, 0)[0][0].piece for i in self.example]
        first = of.stage(range(1), True, False, True, 0)[0][0].piece
        cut = [run.piece for run in of.stage(range(last, last + 1), False, True, True, 0)[0]]
        whole = [run.piece for run in of.stage(range(last, last + 1), False, True, False, 0)[0]]
        ahead = cut[2:4] if self.num_ahead else [None, None]
        return [*found, ahead[0], first, cut[1], whole[1], ahead[1]]


class Signatures:
    """Numbered as they are asked for: counts[s] of each kind of piece, again[s] of those recomputed."""

    def __init__(self, kinds: Kinds) -> None:
        self.kinds = kinds
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        self._made = np.zeros((0, kinds.num_pieces)), np.zeros((0, kinds.num_pieces))

    def of(self, layers: range, first: bool, last: bool, cut: bool, again: int) -> int:
        kinds = self.kinds
        counts = np.bincount(kinds.layers[layers.start : layers.stop], minlength=kinds.num_pieces)
        twice = np.bincount(kinds.layers[layers.start : layers.stop][:again], minlength=kinds.num_pieces)
        counts[kinds.embedding] = first
        counts[kinds.head_cut if cut else kinds.head] = last
        if last:
            counts[[kinds.ahead, kinds.ahead_head]] = kinds.num_ahead
            twice[kinds.ahead] = min(kinds.num_ahead, max(0, again - len(layers)))
        return self._known.setdefault((tuple(counts.tolist()), tuple(twice.tolist())), len(self._known))

    @property
    def counts(self) -> Floats:
        return self._arrays()[0]

    @property
    def again(self) -> Floats:
        return self._arrays()[1]

    def _arrays(self) -> tuple[Floats, Floats]:
        """Made again when there are new ones."""
        if len(self._made[0]) != len(self._known):
            counts, again = zip(*self._known, strict=True)
            self._made = np.array(counts, dtype=np.float64), np.array(again, dtype=np.float64)
        return self._made

    def besides(self, of: Pieces) -> Floats:
        """Bytes that a stage of each signature keeps besides its pieces."""
        kinds, (counts, again) = self.kinds, self._arrays()
        whole = counts[:, kinds.head] > 0
        last = whole | (counts[:, kinds.head_cut] > 0)
        case = 8 * (counts[:, kinds.embedding] > 0) + 4 * last + 2 * whole + again.any(axis=1)
        cases = product((False, True), repeat=4)
        of_case = np.array([of.besides(first, last, not whole, twice) for first, last, whole, twice in cases])
        return np.asarray(of_case[case], dtype=np.float64)


@dataclass(frozen=True)
class Part:
    """One pipeline of a frame, its ranks and entries numbered from 0; the fields are those of Frame."""

    pp: int
    stage_signature: Whole
    stage_rank: Whole
    member_signature: Whole
    member_first: Whole
    held_signature: Whole
    held_count: Floats
    held_first: Whole
    moment_first: Whole
    ends: NDArray[np.bool_]


def part_of(pipeline: Pipeline, recomputes: bool, signatures: Signatures) -> Part:
    kinds = signatures.kinds
    plan = Plan.model_construct(**pipeline._asdict())
    num_stages = pipeline.pp * pipeline.vpp
    own = []
    for index, layers in enumerate(split_layers(kinds.num_layers, plan)):
        last = index == num_stages - 1
        again = len(layers) + kinds.num_ahead * last if recomputes else 0
        if pipeline.recompute_layers is not None:
            again = min(again, pipeline.recompute_layers)
        own.append(signatures.of(layers, index == 0, last, pipeline.pp > 1, again))
    ranks = np.array([rank_of(index, plan) for index in range(num_stages)])
    member, member_first, held, count, held_first, moment_first = (list[int]() for _ in range(6))
    for moments in _moments(pipeline, num_stages):
        member_first.append(len(member))
        member += [own[stage % num_stages] for stage, _ in moments[0]]
        moment_first.append(len(held_first))
        for counts in moments:
            held_first.append(len(held))
            held += [own[stage % num_stages] for stage, _ in counts]
            count += [number for _, number in counts]
    places = np.arange(pipeline.pp)
    ends = (ranks[0] != ranks[-1]) & ((places == ranks[0]) | (places == ranks[-1]))
    whole = (np.array(values) for values in (own, member, member_first, held))
    stage_signature, member_signature, first, held_signature = whole
    return Part(
        pipeline.pp, stage_signature, ranks, member_signature, first, held_signature,
        np.array(count, dtype=np.float64), np.array(held_first), np.array(moment_first), ends,
    )  # fmt: skip


@dataclass(frozen=True)
class Frame:
    """Pipelines side by side. Ranks of all of them are numbered through; those of one lie next to each other.

    stage_*: an entry for a stage. member_*: one for a stage that a rank holds. held_*: one for such a stage at a moment
    at which the rank may hold most, with the micro-batches in flight.
    """

    pipelines: tuple[Pipeline, ...]
    first_rank: Whole  # [pipelines]
    rank_pipeline: Whole  # [ranks]
    stage_signature: Whole
    stage_rank: Whole
    member_signature: Whole
    member_first: Whole  # [ranks]: the first entry of a rank
    held_signature: Whole
    held_count: Floats
    held_first: Whole  # [moments]: the first entry of a moment
    moment_first: Whole  # [ranks]: the first moment of a rank
    last_signature: Whole  # [pipelines]: of the stage with the head
    ends: NDArray[np.bool_]  # [ranks]: the embedding or the head is here, and the other is on another rank
    micro_batches: Floats
    vpp: Floats

    def member_size(self, sizes: Sequence[int]) -> Whole:
        """Of each member, the place of its pipeline's pp in `sizes`."""
        place = {pp: number for number, pp in enumerate(sizes)}
        of_rank = np.array([place[pipeline.pp] for pipeline in self.pipelines])[self.rank_pipeline]
        return np.repeat(of_rank, np.diff(np.append(self.member_first, len(self.member_signature))))


def frame_of(pipelines: Sequence[Pipeline], parts: Sequence[Part]) -> Frame:
    """parts: of each pipeline."""
    first_rank, stage_rank, member_first, held_first, moment_first = (list[Whole]() for _ in range(5))
    ranks = members = entries = moments = 0
    for part in parts:
        first_rank.append(np.array([ranks]))
        stage_rank.append(part.stage_rank + ranks)
        member_first.append(part.member_first + members)
        held_first.append(part.held_first + entries)
        moment_first.append(part.moment_first + moments)
        ranks += part.pp
        members += len(part.member_signature)
        entries += len(part.held_signature)
        moments += len(part.held_first)
    return Frame(
        pipelines=tuple(pipelines),
        first_rank=np.concatenate(first_rank),
        rank_pipeline=np.repeat(np.arange(len(parts)), [part.pp for part in parts]),
        stage_signature=np.concatenate([part.stage_signature for part in parts]),
        stage_rank=np.concatenate(stage_rank),
        member_signature=np.concatenate([part.member_signature for part in parts]),
        member_first=np.concatenate(member_first),
        held_signature=np.concatenate([part.held_signature for part in parts]),
        held_count=np.concatenate([part.held_count for part in parts]),
        held_first=np.concatenate(held_first),
        moment_first=np.concatenate(moment_first),
        last_signature=np.array([part.stage_signature[-1] for part in parts]),
        ends=np.concatenate([part.ends for part in parts]),
        micro_batches=np.array([p.micro_batches for p in pipelines], dtype=np.float64),
        vpp=np.array([p.vpp for p in pipelines], dtype=np.float64),
    )


def _moments(pipeline: Pipeline, num_stages: int) -> Sequence[Sequence[Sequence[tuple[int, int]]]]:
    """Of each rank, as predict.memory.most_held."""
    if pipeline.pp == 1:
        return [[[(stage, 1) for stage in range(num_stages)]]]
    return most_held(pipeline.schedule, pipeline.pp, pipeline.vpp, pipeline.micro_batches)
