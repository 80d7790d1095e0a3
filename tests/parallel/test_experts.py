"""Experts on several ranks and in chunks, against one process that takes all tokens at once."""

from itertools import pairwise
from typing import Any, get_args

import pytest
import torch
import torch._dynamo  # checkpoint() imports it when first called: seconds, paid here once for all ranks
from distributed import run_ranks
from torch import Tensor

from moestro.config import Config, ParallelConfig, TrainConfig
from moestro.config.moe import Activation
from moestro.model.moe.dispatch import Dispatch
from moestro.model.moe.experts import Experts
from moestro.model.moe.layer import mix
from moestro.model.moe.router import Routing, TokenGroups
from moestro.parallel import comm
from moestro.parallel.build import build_model, build_stages, fill_stage
from moestro.parallel.exchange import Exchange, build_exchange
from moestro.parallel.experts import ExpertMix, boundaries, chunk_bytes, worst_rows
from moestro.parallel.layout import resolve_layout
from moestro.parallel.mesh import Mesh, build_mesh
from papers.live_bytes import LiveBytes
from parallel.cases import make_config
from parallel.test_exchange import (
    BACKENDS,
    NO_STATS,
    Case,
    Result,
    assert_close,
    cases,
    layout,
    make_world,
    random_ids,
    run_mix,
)

CPU = torch.device("cpu")


def make_mix(mesh: Mesh, exchange: Exchange | None, num_experts: int, **train: Any) -> ExpertMix:
    """num_experts: of the whole layer."""
    config = TrainConfig.model_validate({"steps": 1, "global_batch_size": 1, **train})
    return ExpertMix(exchange, num_experts // mesh.layout.ep, mesh.ep, mesh.tp, mesh.ep, config)


WAYS: dict[str, dict[str, Any]] = {
    "at once": {},
    "3 chunks": {"expert_chunks": 3},
    "1 chunk, recompute": {"expert_recompute": True},
    "4 chunks, recompute": {"expert_chunks": 4, "expert_recompute": True},
    "2 chunks, overlap": {"expert_chunks": 2, "expert_overlap": True},
    "5 chunks, overlap": {"expert_chunks": 5, "expert_overlap": True},
    "auto": {"expert_chunks": "auto", "expert_memory_mib": 1e-3, "expert_recompute": True},
}


def exchanges(mesh: Mesh, num_experts: int, backends: tuple[str, ...]) -> dict[str, Exchange | None]:
    """Made once, as making groups takes long."""
    parallel = {name: ParallelConfig.model_validate({"dispatch": name}) for name in backends}
    return {name: build_exchange(mesh, config, num_experts) for name, config in parallel.items()}


def check_ways(rank: int, ranks: int, backends: tuple[str, ...]) -> None:
    mesh = build_mesh(layout(ranks, ranks_per_node=2), CPU)
    made = exchanges(mesh, 2 * ranks, backends)
    for name in ("random", "idle experts", "holes", "all to one expert", "one token", "no tokens"):
        world = make_world(cases(ranks)[name])
        for backend, exchange in made.items():
            for way, train in WAYS.items():
                if backend != "all_to_all" and name != "holes":
                    continue
                mixing = make_mix(mesh, exchange, 2 * ranks, **train)
                ours = run_mix(mixing, *world.mine(rank), world.experts_of(ranks, rank))
                assert_close(ours, world.expected(rank, ranks), f"{name}, {backend}, {way}, rank {rank}")


def check_tensor_parallel(rank: int, ep: int, tp: int, ranks_per_node: int) -> None:
    """Each tp rank has its own tokens; those of a data rank hold slices of the same experts."""
    ranks, experts = ep * tp, 4
    mesh = build_mesh(layout(ep, tp, ranks_per_node=ranks_per_node), CPU)
    ep_rank, tp_rank = divmod(rank, tp)
    case = Case(experts, [random_ids(3 + 4 * (r // tp), 2, experts, r) for r in range(ranks)])  # equal within tp
    world = make_world(case)
    whole = world.whole
    count, width = experts // ep, whole.grad_down.shape[2] // tp
    mine, columns = slice(ep_rank * count, (ep_rank + 1) * count), slice(tp_rank * width, (tp_rank + 1) * width)
    tokens = [part.split(case.sizes)[rank] for part in (whole.out, whole.grad_x, whole.grad_weights)]
    expected = Result(*tokens, whole.grad_gate_up[mine][:, :, columns], whole.grad_down[mine][:, :, columns])
    for backend, exchange in exchanges(mesh, experts, BACKENDS if ep > 2 else BACKENDS[:2]).items():
        for way, train in WAYS.items():
            mixing = make_mix(mesh, exchange, experts, **train)
            ours = run_mix(mixing, *world.mine(rank), world.experts_of(ep, ep_rank, tp, tp_rank))
            assert_close(ours, expected, f"{backend}, {way}, rank {rank}")


def check_order(rank: int) -> None:
    """The trace of an overlapped step, forward and backward: what is launched before what is waited for."""
    mesh = build_mesh(layout(2), CPU)
    world = make_world(cases(2)["random"])
    (exchange,) = exchanges(mesh, 4, BACKENDS[:1]).values()
    mixing = make_mix(mesh, exchange, 4, expert_chunks=3, expert_overlap=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run_mix(mixing, *world.mine(rank), world.experts_of(2, rank))
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    names = [e.name for e in events if e.name.startswith("moe.") or e.name == "SegmentedExpertsBackward"]
    assert names == ORDER, "\n".join(names)


ORDER = """
moe.dispatch.start 0
moe.dispatch.start 1
moe.dispatch.wait 0
moe.experts 0
moe.combine.start 0
moe.dispatch.start 2
moe.dispatch.wait 1
moe.experts 1
moe.combine.start 1
moe.combine.wait 0
moe.dispatch.wait 2
moe.experts 2
moe.combine.start 2
moe.combine.wait 1
moe.combine.wait 2
moe.combine.backward.start 2
moe.combine.backward.start 1
moe.combine.backward.wait 2
SegmentedExpertsBackward
moe.dispatch.backward.start 2
moe.combine.backward.start 0
moe.combine.backward.wait 1
SegmentedExpertsBackward
moe.dispatch.backward.start 1
moe.dispatch.backward.wait 2
moe.combine.backward.wait 0
SegmentedExpertsBackward
moe.dispatch.backward.start 0
moe.dispatch.backward.wait 1
moe.dispatch.backward.wait 0
""".strip().splitlines()


def check_auto_agrees(rank: int, ranks: int) -> None:
    """All tokens to the last rank's experts: the others would not cut, but must."""
    mesh = build_mesh(layout(ranks, ranks_per_node=2), CPU)
    experts, tokens = 2 * ranks, 64
    ids = torch.tensor([experts - 1, experts - 2]).expand(tokens, 2)
    world = make_world(Case(experts, [ids] * ranks))
    busy = [
        chunk_bytes(tokens // c, tokens // c, ranks * tokens // c, 2 * ranks * tokens // c, 6, 4, 4) for c in (1, 2, 4)
    ]
    idle = chunk_bytes(tokens, tokens, 0, 0, 6, 4, 4)
    assert worst_rows(tokens, ranks, 2, 2) == 2 * ranks * tokens
    assert idle < busy[1]
    (exchange,) = exchanges(mesh, experts, BACKENDS[:1]).values()
    for budget, expected, over in ((busy[0], 1, 0), (busy[1], 2, 0), (busy[2], 4, 0), (busy[2] - 1, 8, 0), (9, 8, 1)):
        mixing = make_mix(mesh, exchange, experts, expert_chunks="auto", expert_memory_mib=budget / 2**20)
        ours = run_mix(mixing, *world.mine(rank), world.experts_of(ranks, rank))
        assert (mixing.chosen, mixing.over_budget) == (expected, over), f"{budget} bytes on rank {rank}"
        assert_close(ours, world.expected(rank, ranks), f"{expected} chunks")


def check_memory(rank: int, ranks: int) -> None:
    """The peak of the worst route is within the budget with "auto", and beyond it without chunks."""
    mesh = build_mesh(layout(ranks), CPU)
    tokens, hidden, width = 1024, 32, 64
    (exchange,) = exchanges(mesh, 2 * ranks, BACKENDS[:1]).values()
    torch.manual_seed(rank)
    ids = torch.tensor([0, 1]).expand(tokens, 2)
    x, weights = torch.randn(tokens, hidden, requires_grad=True), torch.rand(tokens, 2, requires_grad=True)
    grad = torch.randn(tokens, hidden)
    budget = 2**21
    for implementation in ("segmented", "grouped"):
        experts = Experts(2, hidden, width, implementation)  # type: ignore[arg-type]
        for weight in experts.parameters():
            torch.nn.init.normal_(weight)
        peaks = {}
        for chunks in (1, "auto"):
            train = {"expert_chunks": chunks, "expert_memory_mib": budget / 2**20, "expert_recompute": True}
            mixing = make_mix(mesh, exchange, 2 * ranks, **train)
            with LiveBytes() as live:
                mixing(x, Routing(ids, weights, NO_STATS), experts).backward(grad)
            # Outside of the chunks: the result, x's gradient, and up to three gradients of the weights.
            outside = 2 * x.numel() * 4 + 3 * sum(weight.numel() * 4 for weight in experts.parameters())
            peaks[chunks] = live.peak - outside
            assert mixing.over_budget == 0
        assert peaks["auto"] <= budget, f"{implementation}: {peaks} on rank {rank}"
        assert rank > 0 or peaks[1] > budget, f"{implementation}: {peaks}"


# Of a layer with 8 experts of width 16 on a hidden size of 32.
LAYERS: dict[str, dict[str, Any]] = {
    "biases": {"activation": "clamped_swiglu", "activation_limit": 1.0, "expert_bias": True},
    "latent": {
        "activation": "relu2",
        "expert_bias": True,
        "latent_size": 12,
        "granularity": 4,
        "num_shared_experts": 1,
    },
    "nothing here": {"activation": "geglu", "expert_bias": True, "top_k": 1, "router": {"renormalize": False}},
}


def check_layers(rank: int, sizes: dict[str, int]) -> None:
    """A layer as training builds it on these ranks, and the same in one process: outputs and all gradients."""
    for name, moe in LAYERS.items():
        settings = make_config("bias", "adamw", parallel=sizes).model_dump()
        settings["model"]["moe"] |= {"balance": {}, "router": {}, "top_k": 2} | moe
        config = Config.model_validate(settings)
        mesh = build_mesh(resolve_layout(config, 2, ranks_per_node=2), CPU)
        whole, ((stage,), parts) = build_model(config, CPU), build_stages(config, mesh)
        fill_stage(stage, parts, config, CPU)
        prefix, theirs, ours = "layers.2.mlp.", whole.layers["2"].mlp, stage.layers["2"].mlp
        with torch.no_grad():
            for i, (parameter, value) in enumerate(theirs.named_parameters()):
                value.copy_(torch.randn(value.shape, generator=torch.Generator().manual_seed(i)) / 2)
                ours.get_parameter(parameter).copy_(parts[prefix + parameter].of(value))
        x, upstream = torch.randn(2, 2, 6, 32, generator=torch.Generator().manual_seed(0))
        if name == "nothing here":
            x[1] = x[0, 0]  # all tokens of rank 1 are one, so that most experts get none
        mine = x[rank : rank + 1].clone().requires_grad_()
        x.requires_grad_()
        expected, *_ = theirs(x, TokenGroups(6))
        out, *_ = ours(mine, TokenGroups(6))
        expected.backward(upstream)
        out.backward(upstream[rank : rank + 1])
        assert x.grad is not None
        found = {"out": (out, expected[rank : rank + 1]), "x": (mine.grad, x.grad[rank : rank + 1])}
        for parameter, value in ours.named_parameters():
            part, grad = parts[prefix + parameter], theirs.get_parameter(parameter).grad
            assert grad is not None
            assert value.grad is not None, f"{name}, {sizes}: {parameter} has no gradient"
            found[parameter] = comm.all_reduce(value.grad, getattr(mesh, part.group)), part.of(grad)
        for what, (one, other) in found.items():
            torch.testing.assert_close(
                one, other, rtol=1e-5, atol=1e-5, msg=lambda m, at=f"{name}, {sizes}, {what}": f"{at}: {m}"
            )


class Counting(Experts):
    """Knows how often it was called: FSDP gathers the weights at each call, so all ranks must make as many."""

    calls = 0

    def forward(self, x: Tensor, plan: Dispatch) -> Tensor:
        self.calls += 1
        return super().forward(x, plan)


def check_calls(rank: int) -> None:
    mesh = build_mesh(layout(2), CPU)
    (exchange,) = exchanges(mesh, 4, BACKENDS[:1]).values()
    experts = Counting(2, 6, 4, "segmented")
    for way in ({"expert_chunks": 4}, {"expert_chunks": 4, "expert_overlap": True}):
        experts.calls = 0
        tokens = 3 * rank  # fewer than chunks, and none
        routing = Routing(random_ids(tokens, 2, 4, rank), torch.rand(tokens, 2), NO_STATS)
        make_mix(mesh, exchange, 4, **way)(torch.randn(tokens, 6), routing, experts)
        assert experts.calls == 4


def check_recompute_sends_once_more(rank: int) -> None:
    """In backward the dispatch travels again, the results do not: 4 transfers become 5."""
    mesh = build_mesh(layout(2), CPU)
    world = make_world(cases(2)["every expert"])
    (exchange,) = exchanges(mesh, 4, BACKENDS[:1]).values()
    assert exchange is not None
    messages = []
    for recompute in (False, True):
        before = exchange.traffic.messages_between + exchange.traffic.messages_inside
        mixing = make_mix(mesh, exchange, 4, expert_recompute=recompute)
        run_mix(mixing, *world.mine(rank), world.experts_of(2, rank))
        messages.append(exchange.traffic.messages_between + exchange.traffic.messages_inside - before)
    dispatches = int(rank == 0)  # rank 1 has no tokens
    assert messages == [2, 2 + dispatches]


def check_2_ranks(rank: int) -> None:
    check_ways(rank, 2, BACKENDS[:2])
    check_tensor_parallel(rank, 1, 2, 2)
    check_order(rank)
    check_auto_agrees(rank, 2)
    check_memory(rank, 2)
    check_calls(rank)
    check_recompute_sends_once_more(rank)
    for sizes in ({"dp": 2, "ep": 2}, {"tp": 2}):
        check_layers(rank, sizes)


def check_4_ranks(rank: int) -> None:
    check_ways(rank, 4, BACKENDS)
    check_tensor_parallel(rank, 2, 2, 2)
    check_auto_agrees(rank, 4)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_one_process(way: dict[str, Any]) -> None:
    world = make_world(cases(1)["holes"])
    mixing = make_mix(build_mesh(layout(1), CPU), None, 2, **way)
    assert_close(run_mix(mixing, *world.mine(0), world.experts_of(1, 0)), world.whole, "chunks")


@pytest.mark.parametrize("hidden", [4, 32])
@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize("implementation", ["segmented", "grouped"])
def test_chunk_bytes_is_a_bound(implementation: Any, activation: Activation, hidden: int) -> None:
    """Also where a row's activations are all that counts, because the hidden size is small beside the width."""
    tokens, width = 512, 64
    x, weights = torch.randn(tokens, hidden, requires_grad=True), torch.rand(tokens, 2, requires_grad=True)
    ids, grad = random_ids(tokens, 2, 2, 0), torch.randn(tokens, hidden)
    experts = Experts(2, hidden, width, implementation, activation, bias=True)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight)
    with LiveBytes() as live:
        mix(x, Routing(ids, weights, NO_STATS), experts).backward(grad)
    # The result, the gradients of x and of the weights, one of them also while it is cast.
    outside = 2 * x.numel() * 4 + 2 * sum(weight.numel() * 4 for weight in experts.parameters())
    bound = chunk_bytes(tokens, 0, 0, 2 * tokens, hidden, width, 4, activation)
    assert live.peak - outside <= bound
    assert live.peak > bound / 2


@pytest.mark.parametrize("tokens", [0, 1, 7, 8, 1000])
def test_boundaries_of_a_coarser_cut_are_among_those_of_a_finer_one(tokens: int) -> None:
    finest = boundaries(tokens, 8)
    assert finest[0] == 0
    assert finest[-1] == tokens
    assert max(b - a for a, b in pairwise(finest)) - min(b - a for a, b in pairwise(finest)) <= 1
    for chunks in (1, 2, 4):
        assert boundaries(tokens, chunks) == finest[:: 8 // chunks]


def test_2_ranks() -> None:
    run_ranks(check_2_ranks, 2, timeout_s=400)


def test_4_ranks_on_2_nodes() -> None:
    run_ranks(check_4_ranks, 4, timeout_s=400)


@pytest.mark.slow
def test_8_ranks() -> None:
    run_ranks(check_tensor_parallel, 8, 4, 2, 4, timeout_s=600)
