"""The experts of a layer on several ranks, and a layer's tokens in several chunks.

`ExpertMix` takes the place of `moestro.model.moe.layer.mix`. Its tokens are those of this rank; they are gathered from
the tp ranks (each of which holds a slice of every expert's width and returns a partial sum), exchanged among the ep
ranks, computed, and returned the same way. Gradients of weights are sums over the tokens computed here.

Chunks (MemFine, arXiv 2511.21431) pass through all of this one after the other. With recompute only a chunk's inputs
and results outlive it, so that memory is A + B / chunks.
"""

from dataclasses import replace
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

from moestro.config import Config, TrainConfig
from moestro.config.moe import Activation
from moestro.model.moe.dispatch import combine, dispatch
from moestro.model.moe.experts import Experts
from moestro.model.moe.router import Routing
from moestro.model.ops import product_dtype
from moestro.parallel import comm
from moestro.parallel.comm import Group
from moestro.parallel.exchange import AllGatherExchange, Exchange, TokenExchange, build_exchange
from moestro.parallel.mesh import Mesh

FINEST = 8  # chunks; "auto" chooses among its divisors
# Activations of the experts' width that a row takes at the worst moment: its products, as many gradients, and what the
# activation and its backward make.
WIDTHS: dict[Activation, int] = {"swiglu": 7, "geglu": 7, "clamped_swiglu": 9, "relu2": 5, "gelu": 5}


def build_expert_mix(mesh: Mesh, config: Config) -> "ExpertMix":
    """For the MoE layers of a model on `mesh`. Every rank of the world must call it once; the layers share it."""
    moe, layout = config.model.moe, mesh.layout
    assert moe is not None
    exchange = build_exchange(mesh, config.parallel, moe.resolved_num_experts)
    # FSDP gathers the experts' weights at each call, so the ranks that share them must make equally many.
    agree = mesh.tokens if layout.fsdp > 1 else mesh.ep
    return ExpertMix(exchange, moe.resolved_num_experts // layout.ep, mesh.ep, mesh.tp, agree, config.train)


class ExpertMix:
    """x [T, D] to the experts' weighted sum [T, D]. All ranks of the ep and tp groups must call it together."""

    def __init__(
        self, exchange: Exchange | None, num_experts: int, ep: Group, tp: Group, agree: Group, train: TrainConfig
    ) -> None:
        """num_experts: here. agree: the ranks that must cut their tokens into equally many chunks."""
        self.exchange, self.num_experts, self.ep, self.tp, self.agree = exchange, num_experts, ep, tp, agree
        self.chunks: int | str = train.expert_chunks
        self.budget_bytes = None if train.expert_memory_mib is None else train.expert_memory_mib * 2**20
        self.recompute, self.overlap = train.expert_recompute, train.expert_overlap
        self.chosen = 0  # chunks of the last call
        self.over_budget = 0  # calls of "auto" in which even the finest cut did not fit this rank's budget

    def __call__(self, x: Tensor, routing: Routing, experts: Experts) -> Tensor:
        chunks = self.chosen = self._choose(x, routing.expert_ids, experts)
        ends = boundaries(len(x), chunks)
        sizes = [end - start for start, end in pairwise(ends)]
        parts = zip(x.split(sizes), routing.expert_ids.split(sizes), routing.weights.split(sizes), strict=True)
        routings = [(tokens, replace(routing, expert_ids=ids, weights=weights)) for tokens, ids, weights in parts]
        if self.overlap and isinstance(self.exchange, TokenExchange):
            out = self._overlapped(self.exchange, routings, experts)
        elif self.recompute and torch.is_grad_enabled():
            out = [
                checkpoint(self._chunk, *part, experts, use_reentrant=False, preserve_rng_state=False)
                for part in routings
            ]
        else:
            out = [self._chunk(*part, experts) for part in routings]
        return out[0] if chunks == 1 else torch.cat(out)

    def _chunk(self, x: Tensor, routing: Routing, experts: Experts) -> Tensor:
        tokens, routing = self._gather(x, routing)
        if self.exchange is None:
            y = self._compute(tokens, routing, experts)
        else:
            tokens, ids, weights, ticket = self.exchange.dispatch(tokens, routing.expert_ids, routing.weights)
            here = replace(routing, expert_ids=ids, weights=weights)
            y = self.exchange.combine(self._compute(tokens, here, experts), ticket)
        return comm.reduce_scatter(y, 0, self.tp)

    def _overlapped(
        self, exchange: TokenExchange, parts: list[tuple[Tensor, Routing]], experts: Experts
    ) -> list[Tensor]:
        """Dispatch of chunk i + 1 and combine of chunk i - 1 travel while the experts compute chunk i.

        Autograd runs the youngest node first, which makes backward the mirror image. Only the transport of all_to_all
        really is asynchronous; through leaders the same steps run in order.
        """
        trips = exchange.plan([self._gather_ids(routing.expert_ids) for _, routing in parts])

        def start(number: int) -> Tensor:
            tokens, routing = self._gather(*parts[number])
            return exchange.start(tokens, routing.expert_ids, routing.weights, trips[number])

        def finish_back(number: int) -> Tensor:
            return comm.reduce_scatter(exchange.finish_back(going_back[number], trips[number]), 0, self.tp)

        going, going_back, out = [start(0)], [], []
        for number, trip in enumerate(trips):
            if number + 1 < len(trips):
                going.append(start(number + 1))
            tokens, ids, weights = exchange.finish(going[number], trip)
            here = replace(parts[number][1], expert_ids=ids, weights=weights)
            with record_function(f"moe.experts {number}"):
                y = self._compute(tokens, here, experts, trip.expert_rows)
            going_back.append(exchange.start_back(y, trip))
            if number > 0:
                out.append(finish_back(number - 1))
        return [*out, finish_back(len(trips) - 1)]

    def _compute(self, x: Tensor, routing: Routing, experts: Experts, rows: int | None = None) -> Tensor:
        plan = dispatch(routing, self.num_experts, rows)
        return combine(experts(x, plan), plan, len(x))

    def _gather(self, x: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
        """The tokens of all tp ranks. Each computes with its slice of the experts, so gradients are added."""
        if self.tp is None:
            return x, routing
        weights = comm.all_gather(routing.weights, 0, self.tp)
        ids = self._gather_ids(routing.expert_ids)
        return comm.all_gather(x, 0, self.tp), replace(routing, expert_ids=ids, weights=weights)

    def _gather_ids(self, expert_ids: Tensor) -> Tensor:
        return torch.cat(comm.gather_list(expert_ids, self.tp))

    def _choose(self, x: Tensor, expert_ids: Tensor, experts: Experts) -> int:
        """The number of chunks, the same on all ranks of `agree`."""
        if isinstance(self.chunks, int):
            return self.chunks
        assert self.budget_bytes is not None
        (hidden, width), element = experts.down_proj.shape[1:], product_dtype(x).itemsize
        loads = self._loads(expert_ids).tolist()
        chosen, fits = FINEST, False
        for chunks in (c for c in range(1, FINEST + 1) if FINEST % c == 0):
            size = FINEST // chunks
            parts = [[sum(column) for column in zip(*loads[i : i + size], strict=True)] for i in range(0, FINEST, size)]
            kind = experts.activation
            need = [chunk_bytes(h, s, r, rows, hidden, width, element, kind) for h, s, r, rows in parts]
            if max(need) <= self.budget_bytes:
                chosen, fits = chunks, True
                break
        self.over_budget += not fits
        # A finer cut than a rank needs fits it as well: its chunks are parts of the coarser ones.
        return int(comm.all_reduce(torch.tensor([chosen], device=x.device), self.agree, dist.ReduceOp.MAX))

    def _loads(self, expert_ids: Tensor) -> Tensor:
        """[FINEST, 4] of each chunk: tokens here, copies sent, copies received, expert rows to compute."""
        ranks, everything = comm.size_of(self.ep), isinstance(self.exchange, AllGatherExchange)
        tokens = len(expert_ids)
        ends = torch.tensor(boundaries(tokens, FINEST)[1:], device=expert_ids.device)
        chunk = torch.searchsorted(ends, torch.arange(tokens, device=expert_ids.device), right=True)
        owner = expert_ids // self.num_experts
        visits = owner.new_zeros(tokens, ranks + 1).scatter_(1, owner, 1)
        copies = owner.new_zeros(FINEST, ranks + 1).index_add_(0, chunk, visits.fill_(1) if everything else visits)
        pairs = torch.bincount((chunk.unsqueeze(1) * (ranks + 1) + owner).flatten(), minlength=copies.numel())
        out = torch.stack((copies, pairs.view_as(copies)), -1)[:, :ranks].transpose(0, 1).contiguous()
        out = comm.all_reduce(out, self.tp)  # [to, FINEST, 2]
        arriving = comm.all_to_all(out, [1] * ranks, [1] * ranks, self.ep)
        received, rows = arriving.sum(0).unbind(1)
        if everything:  # padded to the longest
            received = arriving[..., 0].amax(0) * ranks
        here = torch.bincount(chunk, minlength=FINEST) * comm.size_of(self.tp)
        sent = out[..., 0].sum(0) if self.exchange is not None else torch.zeros_like(here)
        return torch.stack((here, sent, received, rows), 1)


def boundaries(tokens: int, chunks: int) -> list[int]:
    """Where the chunks of `tokens` consecutive tokens start and end; each cut is one of any multiple of `chunks`."""
    return [tokens * number // chunks for number in range(chunks + 1)]


def worst_rows(tokens: int, ep: int, top_k: int, experts_here: int) -> int:
    """The most expert rows a rank can have to compute when each of `ep` ranks routes `tokens`."""
    return tokens * ep * min(top_k, experts_here)


def chunk_bytes(
    here: int,
    sent: int,
    received: int,
    rows: int,
    hidden: int,
    width: int,
    element: int,
    activation: Activation = "swiglu",
) -> int:
    """An upper bound on what a chunk takes at its worst moment, in the backward of its experts.

    Kept since forward: the received tokens, the products of its rows. Made in backward: gradients of as many, further
    activations of `width` (see WIDTHS), three of `hidden` a row, the gradients of tokens at both ends.
    Copies that `two_hop` and `leader` only pass on are not in it, nor are weights and their gradients. Without
    recompute the chunks' kept parts add up.

    Args:
        here, sent, received: tokens of this rank, copies it sends, copies it gets. rows: expert rows it computes.
        hidden, width: of an expert on this rank. element: bytes of a number in the experts' products.
    """
    per_row = 3 * hidden + WIDTHS[activation] * width
    return element * (hidden * (2 * here + 2 * sent + 4 * received) + rows * per_row) + 32 * rows
