"""Orthogonalising matrices whose elements lie on several ranks: each on one of them, its owner.

Every rank of a group knows who holds what, so no one has to ask: pieces go to the owners, and pieces of the results
come back. Ranks of a tensor-parallel group hold the same elements of their parts of each matrix; so they come by the
same matrices in the same order, and gather each whole over that group on the way.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from moestro.optim.muon import orthogonalize_part, working_dtype
from moestro.parallel.comm import Group, all_to_all, gather_list, rank_in, size_of
from moestro.parallel.flat import Span

Mode = Literal["auto", "gather", "all_gather"]
ROUND_ELEMENTS = 64 << 20  # a rank's share of the matrices gathered at a time: bounds the memory, and fills a link
Transfers = list[tuple[int, Tensor]]  # the other rank, and flat memory to send or to fill


@dataclass(frozen=True)
class Matrix:
    """A matrix (under tensor parallelism a rank's part of one) and where its elements are."""

    tensor: int  # which of the tensors that a rank brings to the exchange holds its elements
    rows: int
    columns: int
    tp_axis: int | None
    scale: float  # of the orthogonal matrix in the update
    spans: tuple[Span, ...]  # together all elements, in order
    turned: bool = False  # the columns are cut: spans count the elements of the transpose

    @property
    def cost(self) -> int:
        """Of Newton–Schulz, in multiplications (but for a factor)."""
        m, n = sorted((self.rows, self.columns))
        return 4 * m * m * n + 2 * m**3

    def piece(self, tensor: Tensor, span: Span) -> Tensor:
        """The view of `span` in the tensor that holds it; its elements are in the order of the span."""
        flat = tensor.view(-1)[span.offset : span.offset + span.last - span.first]
        return flat.view(self.rows, -1).mT if self.turned else flat

    def orthogonalize(self, whole: Tensor, steps: int, tp: Group) -> Tensor:
        """From and to all elements, flat, in the order of the spans."""
        if not self.turned:
            return orthogonalize_part(whole.view(self.rows, self.columns), steps, self.tp_axis, tp).reshape(-1)
        return orthogonalize_part(whole.view(self.columns, self.rows).mT, steps, self.tp_axis, tp).mT.reshape(-1)


class MatrixExchange:
    """How the ranks of `group` orthogonalise `matrices` together, with the same result to the last bit in each mode.

    auto: a matrix on two ranks is sent from one to the other, and one on more ranks is gathered by its owner.
    gather: every cut matrix is gathered by its owner, in two collectives for as many as a round may hold.
    all_gather: every rank gets everything, and orthogonalises what it holds elements of.
    """

    def __init__(self, matrices: Sequence[Matrix], group: Group, tp: Group, mode: Mode, steps: int) -> None:
        self.matrices, self.group, self.tp, self.mode, self.steps = list(matrices), group, tp, mode, steps
        self.rank = rank_in(group)
        self.owners = choose_owners(self.matrices)
        self.mine = {i: span for i, m in enumerate(self.matrices) for span in m.spans if span.rank == self.rank}
        cut = [i for i, m in enumerate(self.matrices) if len(m.spans) > 1]
        self._near = [i for i in cut if mode == "auto" and len(self.matrices[i].spans) == 2]
        self._rounds = self._cut_into_rounds([i for i in cut if i not in set(self._near)])

    def _cut_into_rounds(self, numbers: list[int]) -> list[list[int]]:
        limit = ROUND_ELEMENTS * size_of(self.group)
        rounds: list[list[int]] = []
        filled = limit
        for i in numbers:
            elements = self.matrices[i].rows * self.matrices[i].columns
            if filled + elements > limit:
                rounds.append([])
                filled = 0
            rounds[-1].append(i)
            filled += elements
        return rounds

    def orthogonalize(self, tensors: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """For each matrix of which this rank holds elements in `tensors`: its number, and the result for them, flat.

        The iterator must be used up, as the ranks meet in it. `tensors` may be overwritten.
        """
        if self.mode == "all_gather":
            yield from self._orthogonalize_everything(tensors)
            return
        yield from self._orthogonalize_pairwise(tensors)
        for numbers in self._rounds:
            yield from self._orthogonalize_together(numbers, tensors)

    def _orthogonalize_pairwise(self, tensors: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """The matrices that are on two ranks; and while their pieces travel, those that this rank has whole."""
        wholes, pieces = self._buffers(self._near, tensors)
        pending = self._swap_pairwise(self._pieces(pieces), self._parts(wholes))
        for i, span in self.mine.items():
            matrix = self.matrices[i]
            if len(matrix.spans) == 1:
                yield i, matrix.orthogonalize(matrix.piece(tensors[matrix.tensor], span), self.steps, self.tp)
        _wait(pending)
        for i, whole in wholes.items():
            wholes[i] = self.matrices[i].orthogonalize(whole, self.steps, self.tp)
        _wait(self._swap_pairwise(self._parts(wholes), self._pieces(pieces)))
        yield from self._results(wholes, pieces)

    def _orthogonalize_together(self, numbers: list[int], tensors: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """These matrices, gathered by their owners. All ranks of the group take part."""
        wholes, pieces = self._buffers(numbers, tensors)
        self._swap_together(self._pieces(pieces), self._parts(wholes), tensors[0])
        for i, whole in wholes.items():
            wholes[i] = self.matrices[i].orthogonalize(whole, self.steps, self.tp)
        self._swap_together(self._parts(wholes), self._pieces(pieces), tensors[0])
        yield from self._results(wholes, pieces)

    def extra_bytes(self, device: torch.device) -> int:
        """What `orthogonalize` takes on this rank for elements of other ranks, and for sending its own."""
        dtype = working_dtype(device)
        if self.mode == "all_gather":
            cut = max((m.rows * m.columns for m in self.matrices if len(m.spans) > 1), default=0)
            return (max(self._held()) * (size_of(self.group) + 1) + cut) * dtype.itemsize
        most = 0
        for numbers in (self._near, *self._rounds):
            elements = 0
            for i in numbers:
                matrix = self.matrices[i]
                held = self.mine[i].last - self.mine[i].first if i in self.mine else 0
                whole = matrix.rows * matrix.columns if self.owners[i] == self.rank else 0
                if whole or matrix.turned or dtype != torch.float32:  # else sent from where it lies
                    elements += whole or held
                if numbers is not self._near:  # packed for the collective
                    elements += whole - held if whole else held
            most = max(most, elements)
        return most * dtype.itemsize

    def _buffers(self, numbers: list[int], tensors: Sequence[Tensor]) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Of these matrices those that this rank owns, its own elements filled in; and its pieces of others'. Flat."""
        wholes, pieces = {}, {}
        dtype = working_dtype(tensors[0].device)
        for i in numbers:
            if i not in self.mine:
                continue
            matrix, span = self.matrices[i], self.mine[i]
            piece = matrix.piece(tensors[matrix.tensor], span)
            if self.owners[i] == self.rank:
                wholes[i] = piece.new_empty(matrix.rows * matrix.columns, dtype=dtype)
                wholes[i][span.first : span.last].view(piece.shape).copy_(piece)
            else:
                pieces[i] = piece.to(dtype).reshape(-1)
        return wholes, pieces

    def _pieces(self, pieces: dict[int, Tensor]) -> Transfers:
        """Between this rank's pieces and their owners."""
        return [(self.owners[i], piece) for i, piece in pieces.items()]

    def _parts(self, wholes: dict[int, Tensor]) -> Transfers:
        """Between this rank's whole matrices and the other ranks that hold pieces of them."""
        return [
            (span.rank, whole[span.first : span.last])
            for i, whole in wholes.items()
            for span in self.matrices[i].spans
            if span.rank != self.rank
        ]

    def _results(self, wholes: dict[int, Tensor], pieces: dict[int, Tensor]) -> Iterator[tuple[int, Tensor]]:
        for i, whole in wholes.items():
            yield i, whole[self.mine[i].first : self.mine[i].last]
        yield from pieces.items()

    def _swap_pairwise(self, send: Transfers, receive: Transfers) -> list[dist.Work]:
        """Start sending and receiving; even ranks send first, so that a ring of waiting ranks cannot close."""
        if not send and not receive:
            return []
        sends = [dist.P2POp(dist.isend, x, group=self.group, group_peer=rank) for rank, x in send]
        receives = [dist.P2POp(dist.irecv, x, group=self.group, group_peer=rank) for rank, x in receive]
        order = [*sends, *receives] if self.rank % 2 == 0 else [*receives, *sends]
        works: list[dist.Work] = dist.batch_isend_irecv(order)
        return works

    def _swap_together(self, send: Transfers, receive: Transfers, like: Tensor) -> None:
        """Send and receive in one collective of the group."""
        send, receive = (sorted(side, key=lambda transfer: transfer[0]) for side in (send, receive))
        packed = torch.cat([x for _, x in send]) if send else like.new_empty(0, dtype=working_dtype(like.device))
        got = all_to_all(packed, self._counts(receive), self._counts(send), self.group)
        for (_, x), part in zip(receive, got.split([x.numel() for _, x in receive]), strict=True):
            x.copy_(part)

    def _counts(self, transfers: Transfers) -> list[int]:
        """Elements for each rank of the group."""
        counts = [0] * size_of(self.group)
        for rank, x in transfers:
            counts[rank] += x.numel()
        return counts

    def _orthogonalize_everything(self, tensors: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        dtype, starts, held = working_dtype(tensors[0].device), self._starts(), self._held()
        mine = tensors[0].new_zeros(max(held), dtype=dtype)
        for i, span in self.mine.items():
            matrix, start = self.matrices[i], starts[i, self.rank]
            piece = matrix.piece(tensors[matrix.tensor], span)
            mine[start : start + piece.numel()].view(piece.shape).copy_(piece)
        everything = gather_list(mine, self.group)
        for i, span in self.mine.items():
            places = [(s.rank, starts[i, s.rank], s.last - s.first) for s in self.matrices[i].spans]
            whole = torch.cat([everything[rank][start : start + n] for rank, start, n in places])
            yield i, self.matrices[i].orthogonalize(whole, self.steps, self.tp)[span.first : span.last]

    def _starts(self) -> dict[tuple[int, int], int]:
        """Where each rank's elements of each matrix start when it lays all it holds end to end."""
        ends: dict[int, int] = defaultdict(int)
        starts = {}
        for i, matrix in enumerate(self.matrices):
            for span in matrix.spans:
                starts[i, span.rank] = ends[span.rank]
                ends[span.rank] += span.last - span.first
        return starts

    def _held(self) -> list[int]:
        """Elements of matrices on each rank of the group."""
        held = [0] * size_of(self.group)
        for matrix in self.matrices:
            for span in matrix.spans:
                held[span.rank] += span.last - span.first
        return held


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def choose_owners(matrices: Sequence[Matrix]) -> list[int]:
    """For each matrix a rank that holds some of it; the costliest first, to whoever has least to do so far."""
    load: dict[int, int] = defaultdict(int)
    owners = [matrix.spans[0].rank for matrix in matrices]
    for matrix in matrices:
        if len(matrix.spans) == 1:
            load[matrix.spans[0].rank] += matrix.cost
    cut = [i for i, matrix in enumerate(matrices) if len(matrix.spans) > 1]
    for i in sorted(cut, key=lambda i: -matrices[i].cost):
        owners[i] = min((span.rank for span in matrices[i].spans), key=lambda rank: (load[rank], rank))
        load[owners[i]] += matrices[i].cost
    return owners
