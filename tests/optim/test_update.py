"""Whatever stores the parameters, three training steps leave the weights and the state that one process has."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from distributed import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn.utils import clip_grad_norm_

from moestro.config import OptimConfig
from moestro.optim import muon as muon_module
from moestro.optim import update as update_module
from moestro.optim.build import build_optimizers, set_learning_rate
from moestro.optim.update import SHARED, Update
from moestro.parallel.comm import Group
from moestro.parallel.mesh import Mesh, build_mesh
from optim.fakes import ADAMW, MUON, SHAPES, Bag, backward, gathered, layout, parts_on, steps

CPU = torch.device("cpu")
CLIP = 0.7  # less than the norms
Shapes = dict[str, tuple[int, ...]]


@pytest.fixture(autouse=True)
def _fp32_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon_module, "cpu_has_bf16_units", lambda: False)


def shard(bag: nn.Module, mesh: Mesh) -> None:
    """FSDP2, with experts on their own mesh: whole ones, and without ep rows of gate and up and columns of down."""
    if mesh.shard is None:
        return
    assert mesh.expert_shard is not None
    ranks, ep = mesh.layout.efsdp, mesh.layout.ep

    def place(parameter: nn.Parameter) -> Shard:
        return Shard(2 if ep == 1 and parameter.shape[2] % ranks == 0 else 0)

    for name, module in list(bag.named_modules()):
        if name.endswith("experts") and "shared" not in name:
            fully_shard(module, mesh=mesh.expert_shard, shard_placement_fn=place)
    fully_shard(bag, mesh=mesh.shard)


def train(
    mesh: Mesh, config: OptimConfig, stage_shapes: list[Shapes], tied: Group = None
) -> tuple[Update, list[nn.Module], list[float]]:
    """Three steps; also returns the stages and the gradient norms."""
    parts = parts_on(mesh, {name: shape for shapes in stage_shapes for name, shape in shapes.items()})
    stages: list[nn.Module] = [Bag(shapes, parts) for shapes in stage_shapes]
    for stage in stages:
        shard(stage, mesh)
    update = Update(stages, config, mesh, parts, "auto", tied)
    return update, stages, steps(update, stages, mesh, parts, CLIP, tied=tied)


def check(where: object, update: Update, norms: list[float], config: OptimConfig, shapes: Shapes) -> None:
    """Compare this run with one process."""
    alone, _, expected_norms = train(build_mesh(layout(), CPU), config, [shapes])
    assert min(expected_norms) > CLIP
    assert norms == pytest.approx(expected_norms, rel=1e-6), where
    found = gathered(update)
    expected = gathered(alone, alone=True)
    assert found.keys() == expected.keys(), where
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=f"{where} {name}")


def check_layouts(rank: int, layouts: list[dict[str, int]]) -> None:
    muon_module.cpu_has_bf16_units = lambda: False  # as the fixture, in the rank's process
    for sizes in layouts:
        mesh = build_mesh(layout(**sizes), CPU)
        for config in (ADAMW, MUON):
            update, _, norms = train(mesh, config, [SHAPES])
            check((sizes, config.name), update, norms, config, SHAPES)


FIRST: Shapes = {name: SHAPES[name] for name in (SHARED, "layers.0.self_attn.q_proj.weight", "norm.weight")}
LAST: Shapes = {name: SHAPES[name] for name in ("layers.0.mlp.shared_experts.up_proj.weight", SHARED)}


def check_pipeline_with_tied_embeddings(rank: int, layouts: list[dict[str, int]]) -> None:
    for sizes, config in product(layouts, (ADAMW, MUON)):
        mesh = build_mesh(layout(pp=2, **sizes), CPU)
        update, _, norms = train(mesh, config, [LAST if mesh.place.pp else FIRST], tied=mesh.ends)
        check((sizes, config.name), update, norms, config, FIRST | LAST)


def check_both_ends_on_one_rank(rank: int, layouts: list[dict[str, int]]) -> None:
    for sizes in layouts:
        mesh = build_mesh(layout(**sizes), CPU)
        update, stages, norms = train(mesh, ADAMW, [FIRST, {SHARED: SHAPES[SHARED]}])
        check(sizes, update, norms, ADAMW, FIRST)
        copies = [stage.get_parameter(SHARED) for stage in stages]
        assert torch.equal(local(copies[0]), local(copies[1]))
        for tensor in (update.parameters_state() | update.state()).values():  # a load
            for chunk in tensor.chunks:
                chunk.tensor.fill_(3)
        update.after_load()
        assert (local(copies[1]) == 3).all()
        steps(update, stages, mesh, parts_on(mesh, FIRST), None, first=3)
        assert torch.equal(local(copies[0]), local(copies[1])), sizes


def local(parameter: Any) -> Tensor:
    values: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return values.detach()


def check_resuming(rank: int, layouts: list[dict[str, int]]) -> None:
    """State written into a fresh Update continues the run to the last bit; asking for it first changes nothing."""
    for sizes, config in product(layouts, (ADAMW, MUON)):
        mesh = build_mesh(layout(**sizes), CPU)
        parts = parts_on(mesh)
        old, stages, _ = train(mesh, config, [SHAPES])
        fresh: list[nn.Module] = [Bag(SHAPES, parts)]
        shard(fresh[0], mesh)
        new = Update(fresh, config, mesh, parts, "auto")
        before = gathered(new)
        for name, tensor in before.items():
            assert not name.startswith("optimizer") or (tensor == 0).all(), name
        source, target = (update.parameters_state() | update.state() for update in (old, new))
        assert source.keys() == target.keys()
        for name, tensor in target.items():
            for chunk, other in zip(tensor.chunks, source[name].chunks, strict=True):
                assert chunk.start == other.start
                chunk.tensor.copy_(other.tensor)
        new.after_load()
        for update, modules in ((old, stages), (new, fresh)):
            steps(update, modules, mesh, parts, CLIP, first=3)
        found, expected = gathered(new), gathered(old)
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), (sizes, name)


TWO = [
    *({"dp": 2, "zero": z, "ep": e} for z in (0, 1) for e in (1, 2)),
    *({"tp": 2, "zero": z} for z in (0, 1)),
    *({"fsdp": 2, "zero": 3, "ep": e} for e in (1, 2)),
]
FOUR = [
    *({"dp": 2, "tp": 2, "zero": z, "ep": e} for z, e in ((0, 2), (1, 1), (1, 2))),
    *({"fsdp": 4, "zero": 3, "ep": e} for e in (2, 4)),
    *({"fsdp": 2, "tp": 2, "zero": 3, "ep": e} for e in (1, 2)),
    *({"fsdp": 2, "dp": 2, "zero": 2, "ep": e} for e in (1, 2, 4)),
]


def check_two(rank: int) -> None:
    check_layouts(rank, TWO)
    check_pipeline_with_tied_embeddings(rank, [{}])
    check_both_ends_on_one_rank(rank, [{"dp": 2, "zero": 0}, {"dp": 2, "zero": 1}, {"fsdp": 2, "zero": 3}])
    check_resuming(rank, [{"dp": 2, "zero": 1}, {"fsdp": 2, "zero": 3}, {"dp": 2, "ep": 2, "zero": 0}])


def check_four(rank: int) -> None:
    check_layouts(rank, FOUR)
    check_pipeline_with_tied_embeddings(rank, [{"dp": 2, "zero": 1}, {"fsdp": 2, "zero": 3}])


def test_two_ranks_update_as_one_process_does() -> None:
    run_ranks(check_two, 2, timeout_s=400)


def test_three_ranks_and_sizes_that_they_do_not_divide() -> None:
    run_ranks(check_layouts, 3, [{"dp": 3, "zero": 1}, {"fsdp": 3, "zero": 3}], timeout_s=400)


def test_four_ranks_update_as_one_process_does() -> None:
    run_ranks(check_four, 4, timeout_s=400)


def check_planted_bugs(rank: int) -> None:
    """With a bug planted, the check of a layout must fail."""
    whole_slot, get_total_norm = update_module.whole_slot, update_module.get_total_norm
    all_reduce_buckets = update_module.all_reduce_buckets

    def average(tensors: list[Tensor], group: Any) -> None:
        all_reduce_buckets(tensors, group)
        torch._foreach_div_(tensors, group.size())

    plants: dict[str, dict[str, Any]] = {
        "the norm counts every rank": {"whole_slot": lambda *args: replace(whole_slot(*args), holders=1)},
        "the norm leaves out experts": {"get_total_norm": lambda g: get_total_norm([x for x in g if x.dim() < 3])},
        "each rank clips with its own norm": {"all_reduce": lambda x, group: x},
        "gradients are averaged": {"all_reduce_buckets": average},
        "gradients are not added up": {"all_reduce_buckets": lambda tensors, group: None},
    }
    sizes = {"dp": 2, "ep": 2, "zero": 0}
    originals = {name: getattr(update_module, name) for plant in plants.values() for name in plant}
    for bug, plant in plants.items():
        vars(update_module).update(plant)
        assert fails(lambda: check_layouts(rank, [sizes])), bug
        vars(update_module).update(originals)
    check_layouts(rank, [sizes])


def fails(function: Callable[[], None]) -> bool:
    try:
        function()
    except AssertionError:
        return True
    return False


def test_planted_bugs_are_found() -> None:
    run_ranks(check_planted_bugs, 2, timeout_s=400)


# One process


@pytest.mark.parametrize("config", [ADAMW, MUON])
def test_one_process_is_the_plain_loop_to_the_last_bit(config: OptimConfig) -> None:
    mesh = build_mesh(layout(), CPU)
    parts = parts_on(mesh)
    update, (bag,), norms = train(mesh, config, [SHAPES])
    plain: nn.Module = Bag(SHAPES, parts)
    optimizers = build_optimizers(plain, config)
    for step in range(3):
        set_learning_rate(optimizers, 1 / (1 + step))
        backward([plain], mesh, parts, step, None)
        assert clip_grad_norm_(plain.parameters(), CLIP).item() == norms[step]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, mine), other in zip(bag.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, other), name
    assert all(parameter.grad is None for parameter in bag.parameters())
    assert update.exchange_bytes == 0


@pytest.mark.parametrize("config", [ADAMW, MUON])
def test_names_and_keys_of_the_state(config: OptimConfig) -> None:
    update, _, _ = train(build_mesh(layout(), CPU), config, [SHAPES])
    keys: dict[str, set[str]] = {name: set() for name in SHAPES}
    for name in update.state():
        parameter, key = name.removeprefix("optimizer.state.").rsplit(".", 1)
        keys[parameter].add(key)
    for parameter, found in keys.items():
        muon = config.name == "muon" and len(SHAPES[parameter]) > 1 and parameter not in (SHARED, "lm_head.weight")
        assert found == ({"momentum_buffer"} if muon else {"step", "exp_avg", "exp_avg_sq"}), parameter
    assert update.parameters_state().keys() == {f"model.{name}" for name in SHAPES}
