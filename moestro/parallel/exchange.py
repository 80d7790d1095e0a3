"""Tokens to the ranks that hold their experts, and the experts' results back.

An exchange sends every token once to each rank that holds one of its experts, with its expert ids and gate weights. The
receiver runs the ordinary dispatch → experts → combine of `moestro.model.moe` on what it got; its result, one row a
received token, goes back and is added to the token. Both ways carry gradients, which are sums. Ranks may have different
numbers of tokens, or none; every rank of the group must make the same calls.

all_to_all, leader and two_hop send only what is needed; all_gather sends everything to all and suits small groups.

A library such as DeepEP is added as one more class with `dispatch` and `combine` and a line in `build_exchange`: it
gets [T, D], [T, K], [T, K] and returns what it received with the ids made local, which is what its kernels do.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import record_function

from moestro.config import ParallelConfig
from moestro.parallel import comm
from moestro.parallel.mesh import Groups, Mesh
from moestro.parallel.transport import Flat, Pending, Route, Traffic, Transport, ViaLeaders

Ticket = Any  # what an exchange remembers between dispatch and combine
Received = tuple[Tensor, Tensor, Tensor, Ticket]


class Exchange(Protocol):
    traffic: Traffic  # of this rank so far, gradients included

    def dispatch(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Received:
        """x: [T, D], expert_ids: [T, K] int64 with num_experts for nowhere, weights: [T, K].

        Returns the N received tokens [N, D], their ids [N, K] counted from this rank's first expert (the number of
        experts here for those elsewhere), their weights [N, K], and the ticket for `combine`.
        """

    def combine(self, y: Tensor, ticket: Ticket) -> Tensor:
        """y: [N, D], a row for each received token; returns [T, D], the sum of what came back for each token."""


class TokenExchange:
    """Each token goes once to every rank that holds one of its experts."""

    def __init__(self, transport: Transport, experts_per_rank: int, traffic: Traffic) -> None:
        self.transport, self.experts_per_rank, self.traffic = transport, experts_per_rank, traffic

    def dispatch(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Received:
        (trip,) = self.plan([expert_ids])
        received = self.finish(self.start(x, expert_ids, weights, trip), trip)
        return *received, trip

    def combine(self, y: Tensor, ticket: Ticket) -> Tensor:
        return self.finish_back(self.start_back(y, ticket), ticket)

    # The same in steps, for several chunks under way at once. The gradient's transfer is launched in the backward of a
    # `finish` and waited for in the backward of its `start`, so it overlaps what the forward transfer overlapped.

    def plan(self, chunks: list[Tensor]) -> list["Trip"]:
        """The trips of several chunks' expert ids [T, K]; their counts travel together."""
        pairs = [_pairs_of(ids // self.experts_per_rank, self.transport.group.size()) for ids in chunks]
        routes = self.transport.routes(torch.stack([torch.stack(((p > 0).sum(1), p.sum(1)), 1) for p in pairs]))
        return [
            Trip(route, p.nonzero()[:, 1], p.shape[1], expert_rows, str(number))
            for number, ((route, expert_rows), p) in enumerate(zip(routes, pairs, strict=True))
        ]

    def start(self, x: Tensor, expert_ids: Tensor, weights: Tensor, trip: "Trip") -> Tensor:
        """Send a chunk; the result is for `finish` only."""
        handle: Tensor = _Start.apply(x, weights, expert_ids, trip)
        return handle

    def finish(self, handle: Tensor, trip: "Trip") -> tuple[Tensor, Tensor, Tensor]:
        x, weights, ids = _Finish.apply(handle, trip)
        return x, _local(ids, self.transport.group.rank() * self.experts_per_rank, self.experts_per_rank), weights

    def start_back(self, y: Tensor, trip: "Trip") -> Tensor:
        handle: Tensor = _StartBack.apply(y, trip)
        return handle

    def finish_back(self, handle: Tensor, trip: "Trip") -> Tensor:
        out: Tensor = _FinishBack.apply(handle, trip)
        return out


@dataclass
class Trip:
    """A chunk's way to its experts and back, in forward and again in backward. One transfer at a time is under way."""

    route: Route
    rows: Tensor  # [sent] the token of each sent row
    tokens: int
    expert_rows: int  # (token, expert) pairs wanted from this rank
    name: str  # in a profiler's trace
    packing: "Packing" = field(init=False)
    _pending: Pending | None = None

    def launch(self, rows: Tensor, back: bool, what: str) -> None:
        assert self._pending is None
        with record_function(f"moe.{what}.start {self.name}"):
            self._pending = self.route.start(rows, back)

    def land(self, what: str) -> Tensor:
        assert self._pending is not None
        with record_function(f"moe.{what}.wait {self.name}"):
            rows, self._pending = self._pending.wait(), None
        return rows


@dataclass(frozen=True)
class Packing:
    """A row of bytes: a token [D], its weights [K], its ids [K] as int32. Gradients have no ids."""

    hidden: int
    top_k: int
    dtype: torch.dtype
    weight_dtype: torch.dtype

    @property
    def weights_at(self) -> int:
        return _aligned(self.hidden * self.dtype.itemsize, 8)

    @property
    def ids_at(self) -> int:
        return self.weights_at + self.top_k * self.weight_dtype.itemsize

    @property
    def row_bytes(self) -> int:
        return _aligned(self.ids_at + self.top_k * 4, 16)

    @property
    def gradient_bytes(self) -> int:
        return _aligned(self.ids_at, 16)

    def views(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens and the weights in rows [n, row_bytes or gradient_bytes]."""
        x = rows[:, : self.hidden * self.dtype.itemsize].view(self.dtype)
        return x, rows[:, self.weights_at : self.ids_at].view(self.weight_dtype)

    def ids(self, rows: Tensor) -> Tensor:
        return rows[:, self.ids_at : self.ids_at + self.top_k * 4].view(torch.int32)


def _aligned(size: int, to: int) -> int:
    return -(-size // to) * to


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, ids: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        packing = trip.packing = Packing(x.shape[1], ids.shape[1], x.dtype, weights.dtype)
        sent = x.new_empty((len(trip.rows), packing.row_bytes), dtype=torch.uint8)
        x_rows, weight_rows = packing.views(sent)
        torch.index_select(x, 0, trip.rows, out=x_rows)
        torch.index_select(weights, 0, trip.rows, out=weight_rows)
        packing.ids(sent).copy_(ids.index_select(0, trip.rows))
        trip.launch(sent, back=False, what="dispatch")
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        trip = ctx.trip
        packing = trip.packing
        x_rows, weight_rows = packing.views(trip.land("dispatch.backward"))
        grad_x = x_rows.new_zeros(trip.tokens, packing.hidden).index_add_(0, trip.rows, x_rows)
        grad_weights = weight_rows.new_zeros(trip.tokens, packing.top_k).index_add_(0, trip.rows, weight_rows)
        return grad_x, grad_weights, None, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle: Tensor, trip: Trip) -> tuple[Tensor, Tensor, Tensor]:
        ctx.trip = trip
        rows = trip.land("dispatch")
        x, weights = trip.packing.views(rows)
        ids = trip.packing.ids(rows).long()
        ctx.mark_non_differentiable(ids)
        return x, weights, ids

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor, grad_weights: Tensor, _: Tensor) -> tuple[Tensor, None]:
        packing = ctx.trip.packing
        rows = grad_x.new_empty((len(grad_x), packing.gradient_bytes), dtype=torch.uint8)
        for part, grad in zip(packing.views(rows), (grad_x, grad_weights), strict=True):
            part.copy_(grad)
        ctx.trip.launch(rows, back=True, what="dispatch.backward")
        return grad_x.new_empty(0), None


class _StartBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        trip.launch(y.contiguous(), back=True, what="combine")
        return y.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.trip.land("combine.backward"), None


class _FinishBack(torch.autograd.Function):
    # Nothing is saved through autograd: when a chunk is recomputed, its results need not travel once more.
    @staticmethod
    def forward(ctx: Any, handle: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        rows = trip.land("combine")
        return rows.new_zeros(trip.tokens, rows.shape[1]).index_add_(0, trip.rows, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.trip.launch(grad.index_select(0, ctx.trip.rows), back=False, what="combine.backward")
        return grad.new_empty(0), None


class TwoHopExchange:
    """Between nodes first, one copy of a token for each node, to the rank of the same local number; then inside.

    The sums associate by node, so results differ from `TokenExchange` in the last bits (about 1e-6 in fp32).
    """

    def __init__(self, between: TokenExchange, inside: TokenExchange, traffic: Traffic) -> None:
        self.between, self.inside, self.traffic = between, inside, traffic

    def dispatch(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Received:
        x, expert_ids, weights, first = self.between.dispatch(x, expert_ids, weights)
        x, expert_ids, weights, second = self.inside.dispatch(x, expert_ids, weights)
        return x, expert_ids, weights, (first, second)

    def combine(self, y: Tensor, ticket: Ticket) -> Tensor:
        first, second = ticket
        return self.between.combine(self.inside.combine(y, second), first)


class AllGatherExchange:
    """All tokens to all ranks, padded to the longest; the results are added by a reduce-scatter, in y's dtype.

    `traffic` has what forward sends, as if each rank wrote to each other one; backward sends the same without the ids.
    """

    def __init__(self, group: dist.ProcessGroup, node_of: list[int], experts_per_rank: int, traffic: Traffic) -> None:
        self.group, self.node_of, self.experts_per_rank, self.traffic = group, node_of, experts_per_rank, traffic

    def dispatch(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Received:
        tokens = torch.tensor([max(len(x), 1)], device=x.device)
        missing = int(comm.all_reduce(tokens, self.group, dist.ReduceOp.MAX)) - len(x)
        per_rank, ranks = self.experts_per_rank, self.group.size()
        x, weights = (F.pad(part, (0, 0, 0, missing)) for part in (x, weights))
        expert_ids = F.pad(expert_ids, (0, 0, 0, missing), value=ranks * per_rank)
        self._count(x, weights, expert_ids)
        x, weights = (comm.all_gather(part, 0, self.group) for part in (x, weights))
        every = torch.cat(comm.gather_list(expert_ids, self.group))
        return x, _local(every, self.group.rank() * per_rank, per_rank), weights, len(expert_ids) - missing

    def combine(self, y: Tensor, ticket: Ticket) -> Tensor:
        out = comm.reduce_scatter(y, 0, self.group)
        self._count(out)
        return out[:ticket]

    def _count(self, *parts: Tensor) -> None:
        for part in parts:
            size = part.numel() * part.element_size()
            self.traffic.add([size] * self.group.size(), self.node_of, self.group.rank())


def _pairs_of(owners: Tensor, ranks: int) -> Tensor:
    """owners: [T, K], `ranks` for nobody; returns [ranks, T], how many experts of a rank a token wants."""
    pairs = owners.new_zeros(len(owners), ranks + 1)
    return pairs.scatter_add_(1, owners, torch.ones_like(owners))[:, :ranks].t()


def _local(ids: Tensor, first: int, count: int) -> Tensor:
    """Ids counted from `first`; `count` for those that are not among the `count` experts from there on."""
    return torch.where((ids >= first) & (ids < first + count), ids - first, count)


def build_exchange(mesh: Mesh, parallel: ParallelConfig, num_experts: int) -> Exchange | None:
    """The exchange that `parallel.dispatch` names, None when a rank holds all experts.

    Every rank of the world must call it, as it creates groups; call it once and share it between layers.
    """
    group = mesh.ep
    if group is None:
        return None
    layout, traffic = mesh.layout, Traffic()
    per_rank, per_node = num_experts // layout.ep, max(1, layout.ranks_per_node // layout.tp)
    node_of = [rank // layout.ranks_per_node for rank in dist.get_process_group_ranks(group)]

    def all_to_all() -> Exchange:
        return TokenExchange(Flat(group, node_of, traffic), per_rank, traffic)

    def all_gather() -> Exchange:
        return AllGatherExchange(group, node_of, per_rank, traffic)

    def leader() -> Exchange:
        node, across = _nodes(mesh, per_node)
        return TokenExchange(ViaLeaders(group, node, across, traffic), per_rank, traffic)

    def two_hop() -> Exchange:
        node, across = _nodes(mesh, per_node)
        between = TokenExchange(Flat(across, range(across.size()), traffic), per_rank * per_node, traffic)
        inside = TokenExchange(Flat(node, [0] * per_node, traffic), per_rank, traffic)
        return TwoHopExchange(between, inside, traffic)

    makers: dict[str, Callable[[], Exchange]] = {
        "all_to_all": all_to_all,
        "all_gather": all_gather,
        "leader": leader,
        "two_hop": two_hop,
    }
    return makers[parallel.dispatch]()


def _nodes(mesh: Mesh, per_node: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's node within its ep group, and the ranks of its local number on all nodes of the group."""
    layout = mesh.layout
    grid = torch.arange(layout.world_size).view(-1, layout.ep // per_node, per_node, layout.tp)
    groups = Groups()
    node, across = groups.along(grid, 2), groups.along(grid, 1)
    assert node is not None
    assert across is not None
    return node, across
