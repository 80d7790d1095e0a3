"""How rows of bytes travel between the ranks of a group: straight, or through the first rank of each node.

A transport turns counts into routes. A route moves rows [n, width] from the ranks that have them to the ranks that want
them (`back=False`), and rows of any width the same way back. It copies rows, nothing else: which transport is used
cannot be seen in what arrives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moestro.parallel import comm


@dataclass
class Traffic:
    """What this rank sent: messages that carried something to another rank, and their bytes. Counts are left out."""

    messages_inside: int = 0  # to ranks of the same node
    bytes_inside: int = 0
    messages_between: int = 0  # to other nodes
    bytes_between: int = 0

    def add(self, sizes: Sequence[int], node_of: Sequence[int], me: int) -> None:
        """sizes: bytes sent to each rank of a group; node_of: the node of each; me: this rank's number in it."""
        for rank, size in enumerate(sizes):
            if size == 0 or rank == me:
                continue
            if node_of[rank] == node_of[me]:
                self.messages_inside += 1
                self.bytes_inside += size
            else:
                self.messages_between += 1
                self.bytes_between += size


@dataclass
class Pending:
    """Rows under way. Both buffers are kept until `wait`, after which the current stream may use and free them."""

    out: Tensor
    sent: Tensor
    work: Any  # None: already here

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.out


class Route(Protocol):
    def start(self, rows: Tensor, back: bool) -> Pending:
        """Begin to move contiguous rows [n, width]."""


class Transport(Protocol):
    group: dist.ProcessGroup

    def routes(self, counts: Tensor) -> list[tuple[Route, int]]:
        """The routes of several transfers, each with the sum of the ranks' notes to this one.

        counts: [transfers, ranks, 2] int64, rows that this rank sends to each, and a number to note for each.
        """


class Flat:
    """One all-to-all with uneven splits; the rows travel while the caller does other work."""

    def __init__(self, group: dist.ProcessGroup, node_of: Sequence[int], traffic: Traffic) -> None:
        self.group, self.node_of, self.traffic = group, node_of, traffic

    def routes(self, counts: Tensor) -> list[tuple[Route, int]]:
        send = counts.transpose(0, 1).contiguous()
        receive = torch.empty_like(send)
        dist.all_to_all_single(receive, send, group=self.group)
        lists = torch.stack((send[..., 0], receive[..., 0], receive[..., 1])).permute(2, 0, 1).tolist()
        return [(_FlatRoute(self, sends, receives), sum(notes)) for sends, receives, notes in lists]


@dataclass
class _FlatRoute:
    transport: Flat
    send: list[int]
    receive: list[int]

    def start(self, rows: Tensor, back: bool) -> Pending:
        group, traffic = self.transport.group, self.transport.traffic
        send, receive = (self.receive, self.send) if back else (self.send, self.receive)
        traffic.add([n * _row_bytes(rows) for n in send], self.transport.node_of, group.rank())
        out = rows.new_empty(sum(receive), rows.shape[1])
        work = dist.all_to_all_single(out, rows, receive, send, group=group, async_op=True)
        return Pending(out, rows, work)


class ViaLeaders:
    """Gather on the node's first rank, all-to-all among those, scatter (HetuMoE, arXiv 2203.14685).

    With G ranks on each of N nodes a node sends N - 1 messages to others instead of G²(N - 1), with the same bytes.
    A leader holds the rows of its whole node twice over. The rows are there when `start` returns.
    """

    def __init__(
        self, group: dist.ProcessGroup, node: dist.ProcessGroup, leaders: dist.ProcessGroup, traffic: Traffic
    ) -> None:
        """leaders: on a node's first rank the group of all first ranks; elsewhere it is not used."""
        self.group, self.node, self.leaders, self.traffic = group, node, leaders, traffic

    def routes(self, counts: Tensor) -> list[tuple[Route, int]]:
        every = torch.stack(comm.gather_list(counts, self.group), 1)  # [transfers, from, to, 2]
        notes = every[:, :, self.group.rank(), 1].sum(1).tolist()
        return [(_LeaderRoute(self, matrix), note) for matrix, note in zip(every[..., 0].tolist(), notes, strict=True)]


@dataclass
class _LeaderRoute:
    transport: ViaLeaders
    matrix: list[list[int]]  # rows from each rank to each

    def start(self, rows: Tensor, back: bool) -> Pending:
        transport = self.transport
        node, local = transport.node, transport.node.rank()
        size, me = node.size(), transport.group.rank()
        first = me - local  # the leader's number in the group
        counts = [list(column) for column in zip(*self.matrix, strict=True)] if back else self.matrix
        nothing = [0] * size
        gathered = self._inside(rows, nothing if local else [sum(c) for c in counts[first : first + size]], 0)
        to_each = nothing
        if local == 0:
            gathered, to_each = self._between(gathered, counts, first)
        arriving = [sum(row[me] for row in counts), *nothing[1:]]
        return Pending(self._inside(gathered, arriving, None, to_each), rows, None)

    def _inside(self, rows: Tensor, receive: list[int], to: int | None, send: list[int] | None = None) -> Tensor:
        """Inside the node: all rows to rank `to`, or `send` rows to each."""
        node = self.transport.node
        if send is None:
            send = [len(rows) if rank == to else 0 for rank in range(node.size())]
        self.transport.traffic.add([n * _row_bytes(rows) for n in send], [0] * node.size(), node.rank())
        return comm.all_to_all(rows, receive, send, node)

    def _between(self, rows: Tensor, counts: list[list[int]], first: int) -> tuple[Tensor, list[int]]:
        """A leader's part: its node's rows in order (from, to); returns what its node gets, in order (to, from)."""
        leaders, size = self.transport.leaders, self.transport.node.size()
        here, ranks = range(first, first + size), range(len(counts))
        # (from, to) → (node of to, from, to)
        order = sorted(((source, to) for source in here for to in ranks), key=lambda pair: pair[1] // size)
        rows = _reorder(rows, [(s, t) for s in here for t in ranks], order, counts)
        send = [sum(counts[s][t] for s in here for t in ranks if t // size == n) for n in range(leaders.size())]
        receive = [sum(counts[s][t] for s in ranks if s // size == n for t in here) for n in range(leaders.size())]
        self.transport.traffic.add([n * _row_bytes(rows) for n in send], range(leaders.size()), leaders.rank())
        rows = comm.all_to_all(rows, receive, send, leaders)
        # (node of from, from, to) → (to, from)
        rows = _reorder(rows, [(s, t) for s in ranks for t in here], [(s, t) for t in here for s in ranks], counts)
        return rows, [sum(counts[s][t] for s in ranks) for t in here]


def _reorder(
    rows: Tensor, now: list[tuple[int, int]], wanted: list[tuple[int, int]], counts: list[list[int]]
) -> Tensor:
    """Bring the blocks of rows, one a (from, to) pair in the order `now`, into the order `wanted`."""
    sizes = [counts[source][to] for source, to in now]
    starts = dict(zip(now, accumulate(sizes, initial=0), strict=False))
    return torch.cat([rows.narrow(0, starts[pair], counts[pair[0]][pair[1]]) for pair in wanted])


def _row_bytes(rows: Tensor) -> int:
    return rows.shape[1] * rows.element_size()
