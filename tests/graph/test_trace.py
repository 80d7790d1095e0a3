"""Tracing: the trainer's step and others' agree with what is counted, and data-dependent programs get their answers."""

import pytest
import torch
from torch import nn

from moestro.config.load import load_config
from moestro.config.plan import RoutingConfig
from moestro.errors import MoestroError
from moestro.graph.convert import plan_of, workload_of
from moestro.graph.count import count_step
from moestro.graph.trace import trace_function, trace_step
from moestro.graph.trace.ours import trace_rank, unique_ranks
from moestro.graph.trace.recorder import Exchange
from moestro.graph.trace.routing import Routing, power_law, skew
from moestro.graph.trace.session import recording
from moestro.graph.trace.to_graph import totals
from moestro.parallel.layout import resolve_layout

SMALL = (
    "data.seq_len=64", "train.global_batch_size=8", "train.micro_batch_size=1", "model.vocab_size=320",
    "model.max_seq_len=256", "train.dtype=bf16",
)  # fmt: skip
LAYOUTS = {
    "dp": (),
    "ep": ("parallel.ep=4",),
    "tp": ("parallel.tp=2",),
    "cp": ("parallel.cp=2",),
    "fsdp": ("parallel.fsdp=4", "parallel.ep=2"),
    "pp": ("parallel.pp=2",),
    "recompute": ("train.recompute=block",),
    "chunks": ("parallel.ep=2", "train.expert_chunks=2", "train.expert_recompute=true"),
    "two_hop": ("parallel.ep=8", "parallel.dispatch=two_hop", "parallel.ranks_per_node=4"),
    "all_gather": ("parallel.ep=4", "parallel.dispatch=all_gather"),
}
FAST = ("ep", "tp", "fsdp", "pp", "recompute")


def agree(preset: str, layout: tuple[str, ...], world: int = 8) -> None:
    config = load_config(preset, [*SMALL, *layout]).config
    traced = trace_step(config, world)
    counted = count_step(workload_of(config), plan_of(config, world, world))
    for ours, theirs in zip(traced.stages, counted.stages, strict=True):
        assert ours.layers == theirs.layers
        assert (ours.parameters.dense, ours.parameters.expert) == (theirs.parameters.dense, theirs.parameters.expert)
        assert ours.send_bytes == theirs.send_bytes
    one, other = totals(traced), totals(counted)
    for op in ("attention", "attention_backward"):
        assert one[op] == other[op]
    # The loss makes its gradients in forward, so only sums over the passes can be compared.
    assert one["gemm"] + one["grouped_gemm"] == other["gemm"] + other["grouped_gemm"]


@pytest.mark.parametrize("layout", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in LAYOUTS])
def test_what_is_traced_is_what_is_counted(layout: str) -> None:
    agree("olmoe-tiny", LAYOUTS[layout])


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["deepseek-v3-tiny", "qwen3-moe-tiny", "mixtral-tiny"])
def test_other_presets_agree(preset: str) -> None:
    agree(preset, ("parallel.ep=2",))


def test_a_rank_stands_for_each_pipeline_place() -> None:
    config = load_config("olmoe-tiny", [*SMALL, "parallel.pp=2", "parallel.tp=2", "parallel.ep=2"]).config
    assert unique_ranks(resolve_layout(config, 16)) == [0, 8]


def test_token_rows_follow_the_routing() -> None:
    """A power law sends unevenly, balanced routing evenly to within what two experts of a token share."""
    config = load_config("olmoe-tiny", [*SMALL, "parallel.ep=4"]).config

    def busiest(routing: RoutingConfig) -> float:
        events = trace_rank(config, 8, 0, routing).events
        sent = [e.message.sent for e in events if isinstance(e, Exchange) and e.message.sent]
        return max(max(rows) / (sum(rows) / len(rows)) for rows in sent if sum(rows))

    assert busiest(RoutingConfig()) < 1.15 < busiest(RoutingConfig(kind="power_law", alpha=2.0))


def test_balanced_choices_are_even_and_distinct() -> None:
    order = Routing(RoutingConfig()).order(48, 16)
    assert torch.equal(order.sort(1).values, torch.arange(16).expand(48, 16))
    for column in order[:, :4].t():
        assert torch.equal(column.bincount(minlength=16), torch.full((16,), 3))


def test_recorded_choices_come_back_first() -> None:
    chosen = torch.tensor([[3, 1], [0, 2]])
    order = Routing(RoutingConfig(), [chosen]).order(4, 4)
    assert torch.equal(order[:, :2], chosen.repeat(2, 1))
    assert torch.equal(order.sort(1).values, torch.arange(4).expand(4, 4))


def test_a_measured_skew_gives_that_load() -> None:
    alpha = skew(3.0, 32, 4)
    load = 1 - (1 - power_law(32, alpha)) ** 4
    assert float(load.max() / load.mean()) == pytest.approx(3.0, rel=1e-3)


def test_counts_are_known_and_scores_are_not() -> None:
    with recording(4, 0) as (recorder, device):
        scores = torch.empty(32, 8, device=device)
        ids = scores.topk(2, 1).indices
        counts = torch.bincount(ids.flatten(), minlength=8)
        assert counts.tolist() == [8] * 8
        received = torch.empty_like(counts)
        torch.distributed.all_to_all_single(received, counts)
        assert int(received.sum()) == 64
        rows = scores[(ids == 3).any(1)]
        assert rows.shape == (8, 8)
        assert recorder.values.of(scores) is None
        scores.fill_(1.0)
        ids.copy_(scores[:, :2])  # overwritten by what nobody knows
        assert recorder.values.of(ids) is None


def test_a_size_that_nobody_knows_is_refused() -> None:
    with recording(2, 0) as (_, device), pytest.raises(MoestroError, match="depends on values"):
        torch.empty(4, device=device).nonzero()


def test_maximum_is_not_a_sum() -> None:
    with recording(4, 0):
        number = torch.tensor([3])
        torch.distributed.all_reduce(number, op=torch.distributed.ReduceOp.MAX)
        assert number.item() == 3
        torch.distributed.all_reduce(number)
        assert number.item() == 12


def test_memory_has_its_ends() -> None:
    with recording(2, 0) as (recorder, device):
        kept = torch.zeros(100, device=device)
        gone = kept + 1
        del gone
    assert recorder.memory.alive == kept.untyped_storage().nbytes() == 400
    assert recorder.memory.peak == 800
    assert [bytes_ for _, bytes_ in recorder.memory.timeline()][-1] == 400


def test_outside_of_a_trace_there_is_no_accelerator() -> None:
    with recording(2, 0):
        assert torch.accelerator.is_available()
    assert not torch.accelerator.is_available() or torch.accelerator.current_accelerator().type != "virtual"  # type: ignore[union-attr]
    assert not torch.distributed.is_initialized()


def sharded_step() -> None:
    """A user's program: FSDP2 and tensor parallelism by PyTorch's own means, on what it takes for CUDA."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size() // 4, 4), mesh_dim_names=("dp", "tp"))
    with torch.device("cuda"):
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(2):
        model(torch.zeros(8, 64, device="cuda")).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


def broken_step() -> None:
    raise ValueError("no such thing")


def test_a_program_of_sharded_and_tensor_parallel_layers() -> None:
    found = totals(trace_function(f"{__name__}:sharded_step", 64))
    assert found["gemm"] == 5 * 2 * 8 * 64 * 64 * 1  # forward 2, backward 4 products but the input's gradient
    weights = 4 * (64 * 64 + 64 + 64 * 64 + 64)
    assert found["all_gather dp"] in (weights, 2 * weights)
    assert found["reduce_scatter dp"] == weights


def test_errors_say_where() -> None:
    with pytest.raises(MoestroError, match=r"test_trace.py:\d+: ValueError: no such thing"):
        trace_function(f"{__name__}:broken_step", 2)
    with pytest.raises(MoestroError, match="names no function"):
        trace_function("nothing", 2)
    with pytest.raises(MoestroError, match="no module 'nowhere'"):
        trace_function("nowhere:step", 2)
