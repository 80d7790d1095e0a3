"""What a ranking by energy or goodput asks of plans beside their time and memory, over arrays: what the slowest rank
does meanwhile (predict.step), and the bytes of a checkpoint (predict.recovery).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from moestro.config.plan import Plan
from moestro.plan.frame import Floats, Frame, Whole
from moestro.predict.constants import Constants
from moestro.predict.step import joins

COMPUTE, HOST = 0, 1  # columns of passes


class More(NamedTuple):
    """[pipelines, variants]. computing_s: kernels and the optimizer; waiting_s: for the host and other stages; both of
    the slowest rank. The others as predict.recovery.StateBytes."""

    computing_s: Floats
    waiting_s: Floats
    written: Floats
    most_written: Floats
    read: Floats
    most_read: Floats


def working(
    frame: Frame, passes: Floats, plan: Plan, constants: Constants, mirror: Whole, slowest: Whole
) -> tuple[Floats, Floats]:
    """[pipelines]: seconds of kernels in all passes of a step on the slowest rank, and of waiting for the host.

    passes: [signatures, 3, …] of a micro-batch; mirror: of each rank, the one that shares its stages.
    """
    compute, launched = passes[:, :, COMPUTE], passes[:, :, HOST]
    apart = np.maximum(0.0, launched - compute).sum(axis=1)
    joined = np.maximum(0.0, launched.sum(axis=1) - compute.sum(axis=1))
    signature = frame.stage_signature
    join = np.array([joins(p.schedule, plan) for p in frame.pipelines])[frame.rank_pipeline[frame.stage_rank]]
    waits = np.where(join, joined[signature], apart[signature])
    ranks = len(frame.rank_pipeline)
    found = [np.bincount(frame.stage_rank, values, ranks) for values in (compute.sum(axis=1)[signature], waits)]
    working_s, waiting_s = (frame.micro_batches * ((one + one[mirror]) / 2)[slowest] for one in found)
    return working_s, waiting_s


def states(
    frame: Frame, counts: Floats, state: Mapping[int, Sequence[Floats]], devices: int
) -> tuple[Floats, Floats, Floats, Floats]:
    """[pipelines, variants] each: StateBytes. state: by pp, of each variant, [2, kinds] bytes that a rank writes and
    reads of each kind of piece."""
    sizes = list(state)
    table = np.array([state[pp] for pp in sizes])  # [sizes, variants, 2, kinds]
    by_signature = np.einsum("svwk,nk->wsnv", table, counts)
    place = {pp: number for number, pp in enumerate(sizes)}
    of_rank = np.array([place[pipeline.pp] for pipeline in frame.pipelines])[frame.rank_pipeline]
    order = np.argsort(frame.stage_rank, kind="stable")
    ranks = frame.stage_rank[order]
    each = by_signature[0][of_rank[ranks], frame.stage_signature[order]]
    written = np.add.reduceat(each, np.searchsorted(ranks, np.arange(len(frame.rank_pipeline))))
    each = by_signature[1][frame.member_size(sizes), frame.member_signature]
    read = np.add.reduceat(each, frame.member_first)
    alike = np.array([devices // pipeline.pp for pipeline in frame.pipelines])[:, None]
    whole = [alike * np.add.reduceat(one, frame.first_rank) for one in (written, read)]
    most = [np.maximum.reduceat(one, frame.first_rank) for one in (written, read)]
    return whole[0], most[0], whole[1], most[1]
