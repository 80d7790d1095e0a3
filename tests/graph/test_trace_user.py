"""Programs of others: DistributedDataParallel, autocast, loaders, `torch.cuda`; calls and memory."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from moestro.cli.predict_traced import read_routing
from moestro.config.plan import RoutingConfig
from moestro.errors import MoestroError
from moestro.graph.trace import trace_program
from moestro.graph.trace.allocator import LARGE_SEGMENT, SMALL_SEGMENT, Allocator, reserved_bytes
from moestro.graph.trace.ddp import TracedDDP
from moestro.graph.trace.program import Traced
from moestro.graph.trace.session import recording
from moestro.graph.words import Collective
from moestro.predict.perfetto import stage_trace
from moestro.predict.replay import replay
from moestro.predict.target import target_of

WIDTH = 512
NUMBERS = 2 * (WIDTH * WIDTH + WIDTH)


def traced(function: object, world: int = 8, **values: object) -> Traced:
    return trace_program(f"{__name__}:{function.__name__}", world, **values)  # type: ignore[attr-defined, arg-type]


def ddp_step() -> None:
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", 0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)).to(device)
    model = nn.parallel.DistributedDataParallel(model, device_ids=[0], bucket_cap_mb=1)  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        with model.no_sync():  # type: ignore[operator]
            model(torch.randn(8, WIDTH).cuda()).square().mean().backward()
        loss = model(torch.randn(8, WIDTH, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert loss.item() == 1.0
    dist.destroy_process_group()


def amp_step() -> None:
    from torch.utils.data import DataLoader, TensorDataset

    model = torch.compile(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10)).cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda")
    data = TensorDataset(torch.randn(16, 16), torch.randint(0, 10, (16,)))
    for x, y in DataLoader(data, batch_size=8, shuffle=True, num_workers=2, pin_memory=True):
        with torch.autocast("cuda", dtype=torch.float16):
            scores = model(x.to("cuda", non_blocking=True))
            loss = F.cross_entropy(scores, y.cuda())
        assert (scores.dtype, loss.dtype) == (torch.float16, torch.float32)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert not torch.isnan(loss)


def two_streams() -> None:
    model = nn.Linear(64, 64, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = torch.ones(64, 64, device="cuda").exp()
    torch.cuda.current_stream().wait_stream(side)
    model(x)
    with torch.cuda.stream(side):
        y = x.exp()
        done = torch.cuda.Event()
        done.record()
    done.wait()
    model(y).sum().backward()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() > 0


def routed_step() -> None:
    """Experts in a loop, whose rows are counted on the host."""
    router, experts = nn.Linear(16, 8).cuda(), nn.ModuleList(nn.Linear(16, 16) for _ in range(8)).cuda()

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts = router, experts

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ids = self.router(x).topk(1).indices.flatten()
            rows = x[ids.argsort()].split(torch.bincount(ids, minlength=8).tolist())
            return torch.cat([expert(part) for expert, part in zip(self.experts, rows, strict=True)])

    Layer()(torch.zeros(512, 16, device="cuda")).sum().backward()


def no_such_call() -> None:
    torch.cuda.get_sync_debug_mode()


def reductions(found: Traced) -> list[float]:
    nodes = [call.node for call in found.calls]
    return [node.bytes for node in nodes if isinstance(node, Collective) and node.op == "all_reduce"]


@pytest.fixture(scope="module")
def of_ddp() -> Traced:
    return traced(ddp_step)


def test_gradients_go_in_buckets_once_a_step(of_ddp: Traced) -> None:
    """The last layer fills the first bucket of 1 MiB with its weight; nothing is reduced under no_sync."""
    sizes = reductions(of_ddp)
    assert sum(sizes) == NUMBERS * 4
    assert len(sizes) == 2
    assert of_ddp.steps == 2
    assert any("are not known" in note for note in of_ddp.graph.notes)


def test_buckets_are_waited_for_after_backward(of_ddp: Traced) -> None:
    place = [n for n, call in enumerate(of_ddp.calls) if isinstance(call.node, Collective)]
    after = of_ddp.calls[place[-1] + 1 :]
    assert any(place[0] in call.needs for call in after)
    between = of_ddp.calls[place[0] + 1 : place[1]]
    assert not any(place[0] in call.needs for call in between if call.stream == "compute")
    assert all(of_ddp.calls[at].needs for at in place)


def test_memory_is_what_the_program_holds(of_ddp: Traced) -> None:
    held = of_ddp.memory.by_kind
    assert held["parameters"] == NUMBERS * 4
    assert 0 <= held["optimizer"] - 2 * NUMBERS * 4 <= 64  # AdamW's counts of steps
    assert sum(held.values()) == of_ddp.memory.steady
    assert of_ddp.memory.init < of_ddp.memory.first_step <= of_ddp.memory.steady <= of_ddp.memory.allocated
    assert of_ddp.memory.allocated <= of_ddp.memory.reserved


def test_a_replay_has_host_compute_and_communication(of_ddp: Traced) -> None:
    line = replay(of_ddp, target_of("h100-sxm", 8))
    assert {event.row for event in line.events} == {"host", "compute", "dp"}
    assert line.total_s >= line.busy_s("host") > 0
    names = {event["args"]["name"] for event in stage_trace(line)["traceEvents"] if event["ph"] == "M"}
    assert names == {"host", "compute", "dp"}
    with pytest.raises(MoestroError, match="no streams beside its host"):
        replay(of_ddp, SimpleNamespace(host_computes=True))  # type: ignore[arg-type]


def test_autocast_scaler_loader_and_compile() -> None:
    found = traced(amp_step, 1)
    assert found.steps == 2
    assert any("torch.compile" in note for note in found.graph.notes)
    products = {call.node.dtype for call in found.calls if call.node is not None and call.node.op == "gemm"}
    assert products == {"fp16"}


def test_streams_wait_for_each_other() -> None:
    calls = traced(two_streams, 1).calls
    exps = [n for n, call in enumerate(calls) if call.name == "exp"]
    products = [n for n, call in enumerate(calls) if call.name in ("addmm", "_addmm_activation") and n > min(exps)]
    assert calls[exps[-1]].stream.startswith("stream")
    assert any(exps[-1] in calls[n].needs for n in products)
    assert calls[-1].blocks
    assert calls[-1].name == "synchronize"


def test_the_routing_model_answers_the_host() -> None:
    def rows(found: Traced) -> list[int]:
        products = [call.node for call in found.calls if call.node is not None and call.node.op == "gemm"]
        return [node.dims[1] for node in products if node.dims[2:] == (16, 16)]  # type: ignore[union-attr]

    even = traced(routed_step, 1)
    assert even.is_routed
    assert set(rows(even)[:8]) == {64}
    skewed = [max(rows(traced(routed_step, 1, routing=RoutingConfig(kind="power_law"), seed=seed))) for seed in (0, 9)]
    assert min(skewed) > 64
    assert skewed[0] != skewed[1]


def test_what_is_not_there_is_said() -> None:
    with pytest.raises(MoestroError, match=r"torch.cuda.get_sync_debug_mode is not there"):
        traced(no_such_call, 1)


def test_hooks_and_joins_are_refused() -> None:
    with recording(2, 0) as (_, device):
        model = TracedDDP(nn.Linear(2, 2, device=device))
        with pytest.raises(NotImplementedError, match="communication hook"):
            model.register_comm_hook(None, None)
        with pytest.raises(NotImplementedError, match="as many batches"):
            model.join()


def test_blocks_are_rounded_and_joined() -> None:
    allocator = Allocator()
    one, two, three = (allocator.take(size) for size in (1, 513, 2**20))
    assert (one.bytes, two.bytes, three.bytes) == (512, 1024, 2**20)
    assert allocator.reserved == SMALL_SEGMENT
    for block in (two, one, three):
        allocator.give(block)
    assert allocator.allocated == 0
    assert allocator.take(2**20).at == one.at  # all of it is one block again
    assert allocator.reserved == SMALL_SEGMENT
    allocator.take(2 * 2**20)
    assert allocator.reserved == SMALL_SEGMENT + LARGE_SEGMENT
    allocator.take(11 * 2**20)  # in what the segment has left
    assert allocator.reserved == SMALL_SEGMENT + LARGE_SEGMENT
    allocator.take(11 * 2**20)
    assert allocator.reserved == SMALL_SEGMENT + LARGE_SEGMENT + 12 * 2**20


def test_freed_memory_is_used_again() -> None:
    changes = [("a", 30 * 2**20), ("a", 0), ("b", 29 * 2**20), ("c", 2**20)]
    assert reserved_bytes(changes) == (31 * 2**20, 32 * 2**20)


def test_routing_is_read(tmp_path: Path) -> None:
    assert read_routing("")[0] == RoutingConfig()
    assert read_routing("power_law:1.5")[0] == RoutingConfig(kind="power_law", alpha=1.5)
    np.savez(tmp_path / "good.npz", np.array([[0, 1], [2, 3]]))
    assert read_routing(str(tmp_path / "good.npz"))[1][0].tolist() == [[0, 1], [2, 3]]
    np.savez(tmp_path / "bad.npz", np.zeros(3))
    (tmp_path / "text.npz").write_text(json.dumps({}))
    for text in ("power_law:x", "power_law:-1", "nothing", str(tmp_path / "bad.npz"), str(tmp_path / "text.npz")):
        with pytest.raises(MoestroError, match=r"--routing|no choices"):
            read_routing(text)
