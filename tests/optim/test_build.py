import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.config import ModelConfig, OptimConfig
from moestro.model.transformer import Transformer
from moestro.optim.build import build_optimizers, lr_factor, set_learning_rate
from moestro.optim.muon import Muon


def tiny(**settings: Any) -> Transformer:
    sizes = {
        "vocab_size": 12, "hidden_size": 8, "num_layers": 2, "num_heads": 2, "intermediate_size": 8, "qk_norm": "head",
        "moe": {"num_experts": 3, "expert_hidden_size": 4, "first_k_dense": 1, "num_shared_experts": 1},
    }  # fmt: skip
    model = Transformer(ModelConfig.model_validate(sizes | settings))
    model.init_weights(0)
    return model


def groups(model: Transformer, config: OptimConfig) -> dict[str, tuple[type, dict[str, Any]]]:
    """For each parameter, its optimizer's class and its group, after checking that it has just one."""
    names = {id(p): name for name, p in model.named_parameters()}
    out: dict[str, tuple[type, dict[str, Any]]] = {}
    for optimizer in build_optimizers(model, config):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names[id(parameter)]
                assert name not in out, f"{name} is in two groups"
                out[name] = type(optimizer), group
    assert out.keys() == set(names.values())
    return out


CONFIG = OptimConfig(name="muon", lr=0.1, muon_lr=0.2, weight_decay=0.3, eps=1e-6, betas=(0.8, 0.9), momentum=0.7,
                     newton_schulz_steps=4)  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
def test_muon_takes_the_matrices_inside_the_layers(tied: bool) -> None:
    model = tiny(tie_embeddings=tied)
    for name, (kind, group) in groups(model, CONFIG).items():
        outside = name in ("embed_tokens.weight", "lm_head.weight")
        vector = dict(model.named_parameters())[name].dim() == 1
        assert kind is (torch.optim.AdamW if outside or vector else Muon), name
        assert group["weight_decay"] == (0.0 if vector else 0.3), name
        if kind is Muon:
            assert (group["lr"], group["momentum"], group["steps"]) == (0.2, 0.7, 4)
        else:
            assert (group["lr"], group["betas"], group["eps"]) == (0.1, (0.8, 0.9), 1e-6)
        assert group["peak_lr"] == group["lr"]


def test_packed_experts_and_routers_are_matrices() -> None:
    found = groups(tiny(), CONFIG)
    for name in ("experts.gate_up_proj", "experts.down_proj", "router.weight", "shared_experts.up_proj.weight"):
        assert found[f"layers.1.mlp.{name}"][0] is Muon


@pytest.mark.parametrize("tied", [False, True])
def test_adamw_takes_everything(tied: bool) -> None:
    model = tiny(tie_embeddings=tied)
    config = CONFIG.model_copy(update={"name": "adamw"})
    assert len(build_optimizers(model, config)) == 1
    for name, (kind, group) in groups(model, config).items():
        assert kind is torch.optim.AdamW
        assert group["lr"] == 0.1
        vector = dict(model.named_parameters())[name].dim() == 1
        assert group["weight_decay"] == (0.0 if vector else 0.3), name


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_step_moves_every_parameter_and_norms_do_not_decay(name: Any) -> None:
    model = tiny()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizers = build_optimizers(model, OptimConfig(name=name, lr=0.1, muon_lr=0.2, weight_decay=0.5))
    for optimizer in optimizers:
        optimizer.step()
    for n, parameter in model.named_parameters():
        inside = parameter.dim() > 1 and n not in ("embed_tokens.weight", "lm_head.weight")
        lr = 0.2 if name == "muon" and inside else 0.1
        kept = 1.0 if parameter.dim() == 1 else 1 - lr * 0.5
        torch.testing.assert_close(parameter.detach(), before[n] * kept, msg=n)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    for n, parameter in model.named_parameters():
        assert not torch.equal(parameter.detach(), before[n]), n


def test_the_learning_rate_of_every_group_follows_its_own_peak() -> None:
    optimizers = build_optimizers(tiny(), CONFIG)
    for factor in (0.5, 0.25, 1.0):
        set_learning_rate(optimizers, factor)
        rates = [{group["lr"] for group in optimizer.param_groups} for optimizer in optimizers]
        assert rates == [{0.1 * factor}, {0.2 * factor}]


# Schedules


def schedule(steps: int, **settings: Any) -> list[float]:
    config = OptimConfig(**settings)
    return [lr_factor(step, steps, config) for step in range(steps)]


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_warm_up_is_linear_and_never_zero(kind: Any) -> None:
    assert schedule(100, schedule=kind, warmup_steps=4)[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


@pytest.mark.parametrize("low", [0.0, 0.1])
def test_cosine(low: float) -> None:
    found = schedule(14, schedule="cosine", warmup_steps=4, min_lr_ratio=low)
    expected = [low + (1 - low) * (1 + math.cos(math.pi * i / 10)) / 2 for i in range(10)]
    assert found[4:] == pytest.approx(expected)
    assert found[4] == 1.0
    assert lr_factor(14, 14, OptimConfig(schedule="cosine", warmup_steps=4, min_lr_ratio=low)) == pytest.approx(low)
    assert lr_factor(99, 14, OptimConfig(schedule="cosine", warmup_steps=4, min_lr_ratio=low)) == pytest.approx(low)


def test_wsd() -> None:
    found = schedule(10, schedule="wsd", decay_fraction=0.4, min_lr_ratio=0.2, warmup_steps=2)
    assert found == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4])
    config = OptimConfig(schedule="wsd", decay_fraction=0.4, min_lr_ratio=0.2)
    assert lr_factor(10, 10, config) == pytest.approx(0.2)
    assert lr_factor(99, 10, config) == pytest.approx(0.2)


def test_wsd_without_and_with_nothing_but_decay() -> None:
    assert schedule(5, schedule="wsd", decay_fraction=0.0) == [1.0] * 5
    assert schedule(5, schedule="wsd", decay_fraction=1.0) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_constant() -> None:
    assert schedule(5, schedule="constant", min_lr_ratio=0.3) == [1.0] * 5


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_a_run_of_one_step(kind: Any) -> None:
    assert schedule(1, schedule=kind) == [1.0]
    assert schedule(1, schedule=kind, warmup_steps=1) == [1.0]


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("warmup", [3, 6])
def test_a_warm_up_as_long_as_the_run_or_longer(kind: Any, warmup: int) -> None:
    assert schedule(3, schedule=kind, warmup_steps=warmup) == pytest.approx([(i + 1) / warmup for i in range(3)])


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 50),
    st.integers(0, 60),
    st.sampled_from(["cosine", "wsd", "constant"]),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_factors_stay_in_bounds_and_only_fall_after_the_warm_up(
    steps: int, warmup: int, kind: Any, decay: float, low: float
) -> None:
    settings_ = {"schedule": kind, "warmup_steps": warmup, "decay_fraction": decay, "min_lr_ratio": low}
    found = schedule(steps, **settings_)
    assert all(0 < f <= 1 + 1e-12 for f in found)
    after = found[warmup:]
    assert all(f >= low - 1e-12 for f in after)
    assert all(b <= a + 1e-12 for a, b in pairwise(after))
