"""Exchanges on gloo ranks against one process that has all experts and all tokens."""

import functools
import gc
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from torch import Tensor

from moestro.config import ParallelConfig
from moestro.model.moe.dispatch import combine, dispatch
from moestro.model.moe.experts import Experts
from moestro.model.moe.layer import mix
from moestro.model.moe.router import RouterStats, Routing
from moestro.parallel import comm
from moestro.parallel.exchange import Exchange, Received, Ticket, build_exchange
from moestro.parallel.layout import Layout
from moestro.parallel.mesh import build_mesh
from moestro.parallel.transport import Traffic
from papers.live_bytes import LiveBytes

HIDDEN, WIDTH = 6, 4
BACKENDS = ("all_to_all", "all_gather", "leader", "two_hop")
NO_STATS = RouterStats(*(torch.zeros(()),) * 8)


def layout(ep: int, tp: int = 1, dp: int | None = None, ranks_per_node: int = 2) -> Layout:
    return Layout(
        pp=1,
        dp=dp or ep,
        fsdp=1,
        cp=1,
        tp=tp,
        ep=ep,
        zero=0,
        micro_batch_size=1,
        micro_batches=1,
        stages=((0,),),
        schedule="1f1b",
        ranks_per_node=ranks_per_node,
    )


@dataclass(frozen=True)
class Case:
    """What each rank routes: expert_ids[r] is [T_r, K], with num_experts for nowhere."""

    num_experts: int
    expert_ids: list[Tensor]

    @property
    def sizes(self) -> list[int]:
        return [len(ids) for ids in self.expert_ids]


def random_ids(tokens: int, top_k: int, num_experts: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if tokens == 0:
        return torch.empty(0, top_k, dtype=torch.int64)
    return torch.stack([torch.randperm(num_experts, generator=generator)[:top_k] for _ in range(tokens)])


def cases(ranks: int) -> dict[str, Case]:
    """Routes that have broken such code before: nothing for an expert, a rank, or everybody but one."""
    sizes = [7, 0, 5, 1, 4, 3, 9, 2][:ranks]
    experts = 2 * ranks

    def case(top_k: int, change=lambda ids, rank: ids, num_experts: int = experts) -> Case:  # type: ignore[no-untyped-def]
        return Case(
            num_experts, [change(random_ids(n, top_k, num_experts, rank), rank) for rank, n in enumerate(sizes)]
        )

    def holes(ids: Tensor, rank: int) -> Tensor:  # dropped pairs, and every third token padding
        ids = ids.clone()
        ids[::2, 1] = experts
        ids[::3] = experts
        return ids

    return {
        "random": case(3),
        "idle experts": case(2, lambda ids, rank: ids.clamp_max(1)[:, :1].expand(-1, 2) + torch.tensor([0, 2])),
        "all to one expert": case(1, lambda ids, rank: torch.full_like(ids, experts - 1)),
        "holes": case(2, holes),
        "nowhere": case(2, lambda ids, rank: torch.full_like(ids, experts)),
        "every expert": case(experts),
        "one expert a rank": case(2, num_experts=ranks),
        "one token": Case(experts, [random_ids(int(rank == 1), 2, experts, 9) for rank in range(ranks)]),
        "one rank has none": case(2, lambda ids, rank: ids[: 0 if rank == ranks - 1 else None]),
        "no tokens": Case(experts, [torch.empty(0, 2, dtype=torch.int64)] * ranks),
    }


@dataclass
class Result:
    out: Tensor
    grad_x: Tensor
    grad_weights: Tensor
    grad_gate_up: Tensor
    grad_down: Tensor

    def parts(self) -> list[Tensor]:
        return [self.out, self.grad_x, self.grad_weights, self.grad_gate_up, self.grad_down]


def run_mix(mixing, x: Tensor, ids: Tensor, weights: Tensor, out_grad: Tensor, experts: Experts) -> Result:  # type: ignore[no-untyped-def]
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    experts.zero_grad()
    out = mixing(x, Routing(ids, weights, NO_STATS), experts)
    (out * out_grad).sum().backward()
    gate_up, down = experts.gate_up_proj, experts.down_proj
    return Result(out.detach(), *(p.grad.detach().clone() for p in (x, weights, gate_up, down)))


@dataclass
class World:
    """All ranks' inputs, the same on each, and what one process makes of them."""

    case: Case
    x: Tensor
    weights: Tensor
    out_grad: Tensor
    experts: Experts
    whole: Result

    def mine(self, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x, ids, weights, output gradient of a rank."""
        parts = (part.split(self.case.sizes)[rank] for part in (self.x, self.weights, self.out_grad))
        x, weights, grad = parts
        return x, self.case.expert_ids[rank], weights, grad

    def experts_of(self, ep: int, rank: int, tp: int = 1, tp_rank: int = 0) -> Experts:
        return slice_experts(self.experts, ep, rank, tp, tp_rank)

    def expected(self, rank: int, ep: int) -> Result:
        """The whole's part of a rank: its tokens, and the gradients of its experts from everybody's tokens."""
        count, whole = self.case.num_experts // ep, self.whole
        tokens = [part.split(self.case.sizes)[rank] for part in (whole.out, whole.grad_x, whole.grad_weights)]
        mine = slice(rank * count, (rank + 1) * count)
        return Result(*tokens, whole.grad_gate_up[mine], whole.grad_down[mine])


def slice_experts(experts: Experts, ep: int, rank: int, tp: int = 1, tp_rank: int = 0) -> Experts:
    number, hidden, width = experts.down_proj.shape
    count, part = number // ep, width // tp
    mine, columns = slice(rank * count, (rank + 1) * count), slice(tp_rank * part, (tp_rank + 1) * part)
    result = Experts(count, hidden, part, "segmented")
    result.gate_up_proj.data = experts.gate_up_proj.data[mine, :, columns].clone()
    result.down_proj.data = experts.down_proj.data[mine][:, :, columns].clone()
    return result


def make_world(case: Case, seed: int = 0, dtype: torch.dtype = torch.float32) -> World:
    torch.manual_seed(seed)
    total, top_k = sum(case.sizes), case.expert_ids[0].shape[1]
    experts = Experts(case.num_experts, HIDDEN, WIDTH, "segmented")
    for weight in experts.parameters():
        torch.nn.init.normal_(weight)
    x, weights = torch.randn(total, HIDDEN, dtype=dtype), torch.rand(total, top_k)
    ids = torch.cat(case.expert_ids)
    weights = weights * (ids < case.num_experts)
    out_grad = torch.randn(total, HIDDEN, dtype=dtype)
    return World(case, x, weights, out_grad, experts, run_mix(mix, x, ids, weights, out_grad, experts))


def assert_close(ours: Result, expected: Result, what: str) -> None:
    for part, wanted, name in zip(ours.parts(), expected.parts(), vars(expected), strict=True):
        assert part.shape == wanted.shape, f"{what}: {name}: {part.shape}"
        if part.numel():
            error, largest = (part - wanted).abs().max().item(), wanted.abs().max().item()
            assert error <= 1e-6 * max(1.0, largest), f"{what}: {name}: {error}, the largest is {largest}"


def through(exchange: Exchange, count: int):  # type: ignore[no-untyped-def]
    """A Mix that sends everything at once."""

    def mixing(x: Tensor, routing: Routing, experts: Experts) -> Tensor:
        x, ids, weights, ticket = exchange.dispatch(x, routing.expert_ids, routing.weights)
        plan = dispatch(Routing(ids, weights, NO_STATS), count)
        return exchange.combine(combine(experts(x, plan), plan, len(x)), ticket)

    return mixing


@functools.cache
def every_exchange(ranks: int, per_node: int, num_experts: int) -> dict[str, Exchange]:
    """Kept, as making groups takes long."""
    mesh = build_mesh(layout(ranks, ranks_per_node=per_node), torch.device("cpu"))
    result = {}
    for name in BACKENDS if 1 < per_node < ranks else BACKENDS[:2]:
        exchange = build_exchange(mesh, ParallelConfig.model_validate({"dispatch": name}), num_experts)
        assert exchange is not None
        result[name] = exchange
    return result


def check_equal(rank: int, ranks: int, per_node: int) -> None:
    for name, case in cases(ranks).items():
        world = make_world(case)
        results = {}
        for backend, exchange in every_exchange(ranks, per_node, case.num_experts).items():
            mixing = through(exchange, case.num_experts // ranks)
            results[backend] = run_mix(mixing, *world.mine(rank), world.experts_of(ranks, rank))
            assert_close(results[backend], world.expected(rank, ranks), f"{name}, {backend}, rank {rank}")
        if "leader" in results:
            for flat, led in zip(results["all_to_all"].parts(), results["leader"].parts(), strict=True):
                assert torch.equal(flat, led), f"{name}: leader differs from all_to_all on rank {rank}"


def check_bf16(rank: int, ranks: int, per_node: int) -> None:
    """Tokens in bf16 travel as such; gate weights stay fp32."""
    world = make_world(cases(ranks)["holes"], dtype=torch.bfloat16)
    for backend, exchange in every_exchange(ranks, per_node, 2 * ranks).items():
        ours = run_mix(through(exchange, 2), *world.mine(rank), world.experts_of(ranks, rank))
        assert (ours.out.dtype, ours.grad_x.dtype) == (torch.bfloat16, torch.bfloat16)
        assert ours.grad_weights.dtype == torch.float32
        for part, wanted in zip(ours.parts(), world.expected(rank, ranks).parts(), strict=True):
            torch.testing.assert_close(part, wanted, rtol=5e-2, atol=0.3, msg=lambda m, b=backend: f"{b}: {m}")


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


@dataclass
class Planted:
    """An exchange whose gradients are off by a factor: the bug that such code has had again and again."""

    good: Exchange
    factor: float
    traffic: Traffic = field(default_factory=Traffic)

    def dispatch(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Received:
        return self.good.dispatch(x, expert_ids, weights)

    def combine(self, y: Tensor, ticket: Ticket) -> Tensor:
        scaled: Tensor = _Scale.apply(y, self.factor)
        return self.good.combine(scaled, ticket)


def check_planted_bug(rank: int, ranks: int, per_node: int) -> None:
    world = make_world(cases(ranks)["every expert"])
    for exchange in every_exchange(ranks, per_node, 2 * ranks).values():
        for factor in (ranks, 1 / ranks):
            bad = through(Planted(exchange, factor), 2)
            ours = run_mix(bad, *world.mine(rank), world.experts_of(ranks, rank))
            with pytest.raises(AssertionError, match="grad"):
                assert_close(ours, world.expected(rank, ranks), "planted")


def check_no_leak(rank: int, ranks: int, per_node: int) -> None:
    """What is alive after a step does not grow, without the help of the garbage collector."""
    world = make_world(cases(ranks)["random"])
    for backend, exchange in every_exchange(ranks, per_node, 2 * ranks).items():
        mixing, experts = through(exchange, 2), world.experts_of(ranks, rank)
        gc.collect()
        gc.disable()
        alive = []
        with LiveBytes() as live:
            for _ in range(6):
                run_mix(mixing, *world.mine(rank), experts)
                alive.append(live.now)
        gc.enable()
        # Not each step alike: gloo's threads may hold on to a step's last buffers for a moment.
        assert min(alive[3:]) == min(alive[:3]), f"{backend}: {alive}"


def check_traffic(rank: int, ranks: int, per_node: int) -> None:
    """Every token to every expert: each rank sends all its tokens to each other one."""
    nodes, experts, tokens = ranks // per_node, 2 * ranks, 5
    ids = torch.arange(experts).expand(tokens, -1)
    x, weights = torch.randn(tokens, HIDDEN), torch.rand(tokens, experts)
    sent = {}
    for backend, exchange in every_exchange(ranks, per_node, experts).items():
        before, now = replace(exchange.traffic), exchange.traffic
        exchange.dispatch(x, ids, weights)
        messages = now.messages_between - before.messages_between
        mine = torch.tensor([messages, now.bytes_between - before.bytes_between])
        both = torch.stack(comm.gather_list(mine, dist.group.WORLD)).view(nodes, per_node, 2).sum(1)
        sent[backend] = [tuple(node.tolist()) for node in both]
    row = 96  # 6 numbers, 8 weights, 8 ids of 4 bytes, to a multiple of 16
    flat = per_node * tokens * (ranks - per_node) * row
    assert sent["all_to_all"] == [(per_node**2 * (nodes - 1), flat)] * nodes
    assert sent["leader"] == [(nodes - 1, flat)] * nodes
    assert sent["two_hop"] == [(per_node * (nodes - 1), flat // per_node)] * nodes


def check_without_gradient(rank: int, ranks: int, per_node: int) -> None:
    world = make_world(cases(ranks)["random"])
    x, ids, weights, _ = world.mine(rank)
    for exchange in every_exchange(ranks, per_node, 2 * ranks).values():
        with torch.no_grad():
            out = through(exchange, 2)(x, Routing(ids, weights, NO_STATS), world.experts_of(ranks, rank))
        torch.testing.assert_close(out, world.expected(rank, ranks).out)


def check_2_ranks(rank: int) -> None:
    check_equal(rank, 2, 1)
    check_planted_bug(rank, 2, 1)


def check_4_ranks(rank: int) -> None:
    for check in (
        check_equal,
        check_planted_bug,
        check_bf16,
        check_no_leak,
        check_traffic,
        check_without_gradient,
    ):
        check(rank, 4, 2)


def test_2_ranks() -> None:
    run_ranks(check_2_ranks, 2)


def test_4_ranks_on_2_nodes() -> None:
    run_ranks(check_4_ranks, 4, timeout_s=400)


@pytest.mark.slow
@pytest.mark.parametrize("per_node", [2, 4])
def test_8_ranks(per_node: int) -> None:
    run_ranks(check_equal, 8, 8, per_node, timeout_s=400)
