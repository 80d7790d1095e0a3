"""How layers lie on pipeline ranks in many pipelines at once, as index arrays: what families of plans share.

A *signature* is a stage's make-up: how often it has each kind of piece, and how often recomputed. Stages of equal
signature cost the same, wherever they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moestro.config.plan import Plan, Workload
from moestro.graph.count import V_SHAPED, rank_of, split_layers
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
        return np.array([counts for counts, _ in self._known], dtype=np.float64)

    def besides(self, of: Pieces) -> Floats:
        """Bytes that a stage of each signature keeps besides its pieces."""
        kinds = self.kinds
        return np.array(
            [
                of.besides(bool(c[kinds.embedding]), bool(c[kinds.head] + c[kinds.head_cut]), not c[kinds.head], any(a))
                for c, a in self._known
            ]
        )

    @property
    def again(self) -> Floats:
        return np.array([again for _, again in self._known], dtype=np.float64)


@dataclass(frozen=True)
class Split:
    """Layers on the ranks of a pipeline: of each stage its signature and its rank."""

    pp: int
    signatures: Whole
    ranks: Whole


def split_of(pipeline: Pipeline, recomputes: bool, signatures: Signatures) -> Split:
    kinds = signatures.kinds
    plan = Plan.model_construct(**pipeline._asdict())
    last = pipeline.pp * pipeline.vpp - 1
    found = []
    for index, layers in enumerate(split_layers(kinds.num_layers, plan)):
        again = len(layers) + kinds.num_ahead * (index == last) if recomputes else 0
        if pipeline.recompute_layers is not None:
            again = min(again, pipeline.recompute_layers)
        found.append(signatures.of(layers, index == 0, index == last, pipeline.pp > 1, again))
    return Split(pipeline.pp, np.array(found), np.array([rank_of(index, plan) for index in range(last + 1)]))


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


def frame_of(pipelines: Sequence[Pipeline], recomputes: bool, signatures: Signatures) -> Frame:
    splits: dict[tuple[int, int, bool, int | None], Split] = {}
    stage_signature, stage_rank, last, ends = list[int](), list[int](), list[int](), list[bool]()
    member_signature, member_first = list[int](), list[int]()
    held_signature, held_count, held_first, moment_first = list[int](), list[int](), list[int](), list[int]()
    first_rank, rank_pipeline, ranks = list[int](), list[int](), 0
    for number, pipeline in enumerate(pipelines):
        key = pipeline.pp, pipeline.vpp, pipeline.schedule in V_SHAPED, pipeline.recompute_layers
        if key not in splits:
            splits[key] = split_of(pipeline, recomputes, signatures)
        split = splits[key]
        first_rank.append(ranks)
        rank_pipeline += [number] * pipeline.pp
        stage_signature += split.signatures.tolist()
        stage_rank += (split.ranks + ranks).tolist()
        last.append(split.signatures[-1])
        apart = split.ranks[0] != split.ranks[-1]
        ends += [bool(apart and rank in (split.ranks[0], split.ranks[-1])) for rank in range(pipeline.pp)]
        num_stages = len(split.signatures)
        for moments in _moments(pipeline, num_stages):
            member_first.append(len(member_signature))
            member_signature += [split.signatures[stage % num_stages] for stage, _ in moments[0]]
            moment_first.append(len(held_first))
            for counts in moments:
                held_first.append(len(held_signature))
                held_signature += [split.signatures[stage % num_stages] for stage, _ in counts]
                held_count += [held for _, held in counts]
        ranks += pipeline.pp
    return Frame(
        tuple(pipelines), np.array(first_rank), np.array(rank_pipeline), np.array(stage_signature),
        np.array(stage_rank), np.array(member_signature), np.array(member_first), np.array(held_signature),
        np.array(held_count, dtype=np.float64), np.array(held_first), np.array(moment_first),
        np.array(last), np.array(ends), np.array([p.micro_batches for p in pipelines], dtype=np.float64),
        np.array([p.vpp for p in pipelines], dtype=np.float64),
    )  # fmt: skip


def _moments(pipeline: Pipeline, num_stages: int) -> Sequence[Sequence[Sequence[tuple[int, int]]]]:
    """Of each rank, as predict.memory.most_held."""
    if pipeline.pp == 1:
        return [[[(stage, 1) for stage in range(num_stages)]]]
    return most_held(pipeline.schedule, pipeline.pp, pipeline.vpp, pipeline.micro_batches)
