"""Latent and convolutional attention and experts among the heads on two ranks equal one process, alone and in a step.

Everything runs in one start of the ranks, which costs more than the checks.
"""

import itertools
from typing import Any

import torch
from distributed import run_ranks
from model.attention.kinds import fill
from model.helpers import error, model_config, normal
from torch import Tensor

from moestro.config import Config, ModelConfig
from moestro.model.attention.head_experts import HeadExpertAttention
from moestro.model.attention.mask import Positions, positions_of
from moestro.model.block import _attention
from moestro.model.moe.router import TokenGroups
from moestro.parallel.build import buffers
from moestro.parallel.comm import all_reduce
from moestro.parallel.context import SequenceSlices
from moestro.parallel.mesh import Mesh
from moestro.parallel.parts import Part, part_of
from moestro.parallel.tensor import TensorRanks
from parallel.cases import make_config
from parallel.test_context import CPU, KINDS, documents, mesh_of
from parallel.test_equal import figures, is_moment, one_step, trainer, unlike

MLA = {"q_rank": 10, "kv_rank": 8, "nope_head_dim": 4, "rope_head_dim": 6, "v_head_dim": 5}
LATENT: list[dict[str, Any]] = [{"mla": MLA}, {"mla": MLA | {"q_rank": None}, "sliding_window": 5}]
OTHERS: list[dict[str, Any]] = [
    {"cca": {}, "head_dim": 8, "rope": {"fraction": 0.5}},
    {"cca": {"depthwise_taps": 3, "grouped_taps": 3}, "sliding_window": 6},
    {"cca": {"depthwise_taps": 1, "grouped_taps": 1}},
    {"attention_experts": {"num_experts": 2}},
]


def test_two_ranks_compute_what_one_does() -> None:
    run_ranks(check_all, 2)


def check_all(rank: int) -> None:
    cp, tp = mesh_of(cp=2, tp=1), mesh_of(cp=1, tp=2)
    for settings, kind, packed in itertools.product(LATENT + OTHERS, KINDS, (False, True)):
        check_module(cp, settings, kind, packed)
    for settings, packed in itertools.product(LATENT, (False, True)):
        check_module(tp, settings, "all_gather", packed)
    check_short_halo(cp)
    check_steps(2, {"attention_experts": {"num_experts": 2, "mi_coef": 0.3}}, {"cp": 2})
    check_steps(1, {"cca": {}, "qk_norm": "none"}, {"cp": 2})
    check_steps(1, {"mla": MLA, "qk_norm": "none", "num_kv_heads": 4}, {"tp": 2})


def config_of(settings: dict[str, Any]) -> ModelConfig:
    return model_config(**{"qk_norm": "none", "num_kv_heads": 4 if "mla" in settings else 2} | settings)


def places_of(document_ids: Tensor | None, batch: int, seq: int) -> Tensor:
    """[batch, seq] positions inside documents, which are consecutive."""
    places = torch.arange(seq).expand(batch, -1)
    if document_ids is None:
        return places
    starts = torch.ones(batch, seq, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return places - torch.where(starts, places, 0).cummax(1).values


def call(module: Any, x: Tensor, positions: Positions) -> Tensor:
    if isinstance(module, HeadExpertAttention):
        return module.eval()(x, positions, TokenGroups(x.shape[1]))[0]  # type: ignore[no-any-return]
    return module(x, positions)  # type: ignore[no-any-return]


def check_module(mesh: Mesh, settings: dict[str, Any], kind: Any, packed: bool) -> None:
    batch, seq, case = 2, 16, (settings, mesh.layout.describe(), kind, packed)
    config, slices = config_of(settings), SequenceSlices(mesh, seq, kind, CPU)
    document_ids = documents(batch, seq, seed=1) if packed else None
    places = places_of(document_ids, batch, seq)
    x, grad = (normal(batch, seq, 16, seed=seed, dtype=torch.float64) for seed in (8, 9))

    whole, module = x.clone().requires_grad_(), fill(_attention(config, 0), torch.float64)
    expected = call(module, whole, positions_of(config.layer_type(0), config, places, document_ids, None, None))
    (expected * grad).sum().backward()

    part, parts = fill(_attention(config, 0), torch.float64), dict[str, Part]()
    for name, p in part.named_parameters():
        parts[name] = part_of(f"layers.0.self_attn.{name}", p.shape, mesh.layout, mesh.place)
        p.data = parts[name].of(p.data)
    part.tp = TensorRanks(mesh.tp) if mesh.layout.tp > 1 else None
    mine, here = slices.take(x).requires_grad_(), slices.take_context(places)
    found = call(part, mine, positions_of(config.layer_type(0), config, here, document_ids, None, slices))
    (found * slices.take(grad)).sum().backward()
    # Rotations are computed in fp32 from the same angles, so that the rest may agree to fp64.
    assert whole.grad is not None
    assert mine.grad is not None
    assert error(found, slices.take(expected)) < 1e-10, case
    assert error(mine.grad, slices.take(whole.grad)) < 1e-10, case
    wanted = {name: p.grad for name, p in module.named_parameters()}
    for name, p in part.named_parameters():
        assert p.grad is not None
        all_reduce(p.grad, mesh.data if parts[name].group == "data" else mesh.tokens)
        assert error(p.grad, parts[name].of(wanted[name])) < 1e-10, (*case, name)


def check_short_halo(mesh: Mesh) -> None:
    """With one latent from before each chunk instead of two, the result is another."""
    config, slices = config_of(OTHERS[0]), SequenceSlices(mesh, 16, "all_gather", CPU)
    module, x = fill(_attention(config, 0), torch.float64), normal(2, 16, 16, dtype=torch.float64)
    positions = positions_of("full", config, torch.arange(16).expand(2, -1), None, None, None)
    expected = slices.take(module(x, positions))
    here = positions_of("full", config, slices.take_context(positions.position_ids), None, None, slices)
    assert error(module(slices.take(x), here), expected) < 1e-10
    real = slices.before

    def short(y: Tensor, n: int) -> Tensor:
        return torch.cat((torch.zeros_like(real(y, n)[:, :, 1:]), real(y, 1)), 2)

    slices.before = short  # type: ignore[method-assign]
    assert error(module(slices.take(x), here), expected) > 1e-2


def check_steps(steps: int, attention: dict[str, Any], parallel: dict[str, int]) -> None:
    """Optimizer steps: loss, gradients, balance and the mean shares of attention experts."""
    runs = [trainer(config_with(attention, sizes), ranks) for sizes, ranks in (({}, 1), (parallel, 2))]
    for step in range(steps):
        results = [figures(one_step(engine, update, step)) for engine, update in runs]
        for name in ("loss", "grad_norm", "aux_loss"):
            assert abs(results[1][name] / results[0][name] - 1) < 1e-4, (parallel, name, results)
        if step == 0:
            moments = {n: t.chunks[0].tensor for n, t in runs[0][1].state().items() if is_moment(n)}
            differences = unlike(runs[1][1], moments, f"{parallel}: ")
            assert not differences, differences
    shares = [
        {name: b.chunks[0].tensor for name, b in buffers(engine.models).items() if "mean_shares" in name}
        for engine, _ in runs
    ]
    assert len(shares[0]) == (4 if "attention_experts" in attention else 0)
    for name, found in shares[1].items():
        assert error(found, shares[0][name]) < 1e-5, name
        assert error(found, torch.full((2,), 0.5)) > 1e-3, name  # it moved


def config_with(attention: dict[str, Any], parallel: dict[str, int]) -> Config:
    settings = make_config("lagged", "adamw", parallel=parallel).model_dump(exclude_unset=True)
    return Config.model_validate(settings | {"model": settings["model"] | attention})
