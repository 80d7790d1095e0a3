"""Experts among the heads against one attention for each expert; their loss, whatever the cut into micro-batches."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from train.helpers import PlainUpdate, alone, step_module

from moestro.config import ModelConfig
from moestro.data.batches import Batch
from moestro.errors import MoestroError
from moestro.model.attention.gqa import GroupedQueryAttention
from moestro.model.attention.head_experts import HeadExpertAttention, HeadStats
from moestro.model.attention.mask import Positions
from moestro.model.moe.router import TokenGroups
from moestro.model.transformer import Transformer

from ..helpers import build, error, model_config, normal, token_ids
from .kinds import fill, positions_at


def config_of(num_experts: int = 2, experts: dict[str, Any] | None = None, **settings: Any) -> ModelConfig:
    return model_config(attention_experts={"num_experts": num_experts} | (experts or {}), **settings)


def call(module: HeadExpertAttention, x: Tensor, positions: Positions) -> Tensor:
    out: Tensor = module(x, positions, TokenGroups(x.shape[1]))[0]
    return out


def reference(module: HeadExpertAttention, x: Tensor, positions: Positions, config: ModelConfig) -> Tensor:
    """Σ_i S_i · (an attention that has the query heads and the output projection of group i only)."""
    groups = module.config.num_experts
    shares = (x @ module.head_router.weight.t()).softmax(-1)
    repeat = config.num_heads // config.resolved_num_kv_heads
    out = torch.zeros_like(x)
    for i, rows in enumerate(torch.arange(config.num_heads).tensor_split(groups)):
        single = model_config(num_heads=len(rows), num_kv_heads=len(rows), head_dim=config.resolved_head_dim)
        one = GroupedQueryAttention(single, 0).to(x.dtype)
        heads = {"q_proj": rows, "k_proj": rows // repeat, "v_proj": rows // repeat}
        for name, numbers in heads.items():
            weight = getattr(module.gqa, name).weight.unflatten(0, (-1, config.resolved_head_dim))
            substitute(getattr(one, name), weight[numbers].flatten(0, 1))
        weight = module.gqa.o_proj.weight.unflatten(1, (-1, config.resolved_head_dim))
        substitute(one.o_proj, weight[:, rows].flatten(1))
        for name in ("q_norm", "k_norm"):
            substitute(getattr(one, name), getattr(module.gqa, name).weight)
        out = out + shares[..., i : i + 1] * one(x, positions)
    return out


def substitute(module: Any, weight: Tensor) -> None:
    del module.weight
    module.weight = weight  # a tensor with a history, so that gradients reach what it was made of


@settings(max_examples=10, deadline=None)
@given(
    heads=st.sampled_from([(4, 2, 2), (4, 2, 4), (6, 3, 2), (6, 1, 3), (4, 4, 1), (1, 1, 1)]),
    lengths=st.sampled_from([[[1]], [[5]], [[2, 3], [1, 4]]]),
    training=st.booleans(),
)
def test_equals_an_attention_for_each_expert(
    heads: tuple[int, int, int], lengths: list[list[int]], training: bool
) -> None:
    config = config_of(heads[2], num_heads=heads[0], num_kv_heads=heads[1], head_dim=4)
    module = fill(HeadExpertAttention(config, 0), torch.float64).train(training)
    positions = positions_at(config, lengths)
    x, grad = (normal(len(lengths), sum(lengths[0]), 16, seed=s, dtype=torch.float64) for s in (1, 2))
    x.requires_grad_()
    results = []
    for function in (lambda: call(module, x, positions), lambda: reference(module, x, positions, config)):
        out = function()
        results.append((out, *torch.autograd.grad((out * grad).sum(), [x, *module.parameters()])))
    for found, expected in zip(*results, strict=True):
        assert (found - expected).abs().max() < 1e-9 * max(1, float(expected.detach().abs().max()))


def test_one_expert_is_plain_attention() -> None:
    config = config_of(1)
    module = fill(HeadExpertAttention(config, 0))
    x, positions = normal(2, 7, 16), positions_at(config, [[7], [3, 4]])
    assert torch.equal(call(module, x, positions), module.gqa(x, positions, None))


def test_threshold_leaves_out_groups_when_not_training() -> None:
    config = config_of(4, {"eval_threshold": 0.9})
    module = fill(HeadExpertAttention(config, 0))
    x, positions = normal(1, 9, 16), positions_at(config, [[9]])
    dense = call(module, x, positions)
    shares = module.head_router(x).softmax(-1)
    assert 0 < (4 * shares > 0.9).sum() < shares.numel()
    heads = module.gqa.attended(x, positions, None).unflatten(2, (4, -1))
    kept = torch.where(4 * shares > 0.9, shares, 0.0)  # as they are: not renormalised
    expected = module.gqa.o_proj((heads * kept.unsqueeze(-1)).flatten(2))
    module.eval()
    assert error(call(module, x, positions), expected) < 1e-6
    assert error(dense, expected) > 1e-2
    module.config = replace_threshold(config, 0.0)
    assert error(call(module, x, positions), dense) < 1e-6


def replace_threshold(config: ModelConfig, threshold: float) -> Any:
    assert config.attention_experts is not None
    return config.attention_experts.model_copy(update={"eval_threshold": threshold})


def test_decoding_equals_the_whole_sequence() -> None:
    model = fill(build(config_of(num_layers=1, experts={"eval_threshold": 0.6}))).eval()
    ids = token_ids(2, 40)
    with torch.no_grad():
        expected = model.logits(model(ids).hidden)
        cache = model.new_cache(2, 40, "cpu", torch.float32)
        parts = ids.split([10, 3, *[1] * 27], 1)
        found = torch.cat([model.logits(model(part, cache=cache).hidden) for part in parts], 1)
    assert error(found, expected) < 1e-5


# --- the mutual-information loss -------------------------------------------------------------------------------------


def stats_of(module: HeadExpertAttention, x: Tensor, valid: Tensor | None = None) -> HeadStats:
    config = config_of(module.config.num_experts)
    groups = TokenGroups(x.shape[1], None if valid is None else valid.flatten())
    stats = module(x, positions_at(config, [[x.shape[1]]] * len(x)), groups)[1]
    assert stats is not None
    return stats


def test_gradient_is_that_of_mutual_information() -> None:
    """When the previous step's mean is this one's: of -H(mean of S) + mean of H(S), over valid tokens."""
    module = fill(HeadExpertAttention(config_of(4), 0), torch.float64)
    x, valid = normal(3, 6, 16, dtype=torch.float64), torch.ones(3, 6, dtype=torch.bool)
    valid[0, 4:] = False
    shares = module.head_router(x).softmax(-1)[valid]
    mean = shares.mean(0)
    loss = (mean * mean.log()).sum() - (shares * shares.log()).sum(-1).mean()
    (expected,) = torch.autograd.grad(loss, module.head_router.weight)

    module.mean_shares = mean.detach()
    stats = stats_of(module, x, valid)
    (found,) = torch.autograd.grad(stats.mi_loss, module.head_router.weight)
    assert error(stats.mi_loss, loss) < 1e-12
    assert error(found, expected) < 1e-12
    assert error(stats.shares, shares.sum(0)) < 1e-6
    module.reset_shares(torch.device("cpu"))  # without a step before: only the second term has a gradient
    (found,) = torch.autograd.grad(stats_of(module, x, valid).mi_loss, module.head_router.weight)
    (entropy,) = torch.autograd.grad(
        -(module.head_router(x).softmax(-1)[valid] * module.head_router(x).log_softmax(-1)[valid]).sum(-1).mean(),
        module.head_router.weight,
    )
    assert error(found, entropy) < 1e-6


def test_no_statistics_when_not_training() -> None:
    module = fill(HeadExpertAttention(config_of(2), 0)).eval()
    x = normal(1, 3, 16)
    assert module(x, positions_at(config_of(2), [[3]]), TokenGroups(3))[1] is None


def batch_of(seed: int, rows: int = 4, seq: int = 12) -> Batch:
    """Rows of one document, of other lengths, and padding."""
    ids = token_ids(rows, seq + 1, seed=seed)
    documents = torch.zeros(rows, seq, dtype=torch.int32)
    labels = ids[:, 1:].clone()
    for row in range(rows):
        documents[row, seq - 2 * row :] = -1
        labels[row, seq - 2 * row :] = -100
    return Batch(ids[:, :-1], labels, documents, torch.arange(seq).expand(rows, -1), torch.arange(rows))


def train(micro_batch_size: int, mi_coef: float) -> tuple[Transformer, list[dict[str, Tensor]]]:
    """Two steps; gradients, buffers and the reported loss of each."""
    experts = {"mi_coef": mi_coef}
    model = build(config_of(2, experts), dtype=torch.float64).double().train()
    update, states = PlainUpdate(model, [torch.optim.SGD(model.parameters(), 0.5)]), []
    for step in range(2):
        batch = batch_of(step)
        fields = [value.split(micro_batch_size) for name, value in vars(batch).items() if name != "media"]
        grads: dict[str, Tensor] = {}
        update.step = lambda g=grads: keep(model, update, g)  # type: ignore[method-assign]
        batches = [Batch(*part) for part in zip(*fields, strict=True)]
        result = step_module.train_step(alone(model, 0), update, batches, None)
        shares = {name: b.clone() for name, b in model.named_buffers() if name.endswith("mean_shares")}
        states.append(grads | shares | {"other_loss": result.other_loss})
    return model, states


def keep(model: Transformer, update: PlainUpdate, grads: dict[str, Tensor]) -> None:
    grads.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    for optimizer in update.optimizers:
        optimizer.step()


def test_steps_do_not_depend_on_micro_batches() -> None:
    _, whole = train(4, 0.5)
    assert sum(name.endswith("mean_shares") for name in whole[0]) == 2
    for size in (1, 2):
        for found, expected in zip(train(size, 0.5)[1], whole, strict=True):
            for name, value in expected.items():
                assert error(found[name], value) < 1e-6, (size, name)
    without = train(4, 0.0)[1]
    name = "layers.0.self_attn.head_router.weight"
    assert error(without[0][name], whole[0][name]) > 1e-3  # the loss is there, and weighs what it should
    assert error(without[1][name], whole[1][name]) > 1e-3


def test_mean_shares_are_those_of_valid_tokens() -> None:
    model, states = train(2, 0.5)
    fresh = build(config_of(2, {"mi_coef": 0.5}), dtype=torch.float64).double().train()
    batch = batch_of(0)
    stats = fresh(batch.input_ids, batch.position_ids, batch.document_ids).head_stats
    assert len(stats) == model.config.num_layers
    assert error(states[0]["other_loss"], 0.5 * torch.stack([found.mi_loss for found in stats]).mean()) < 1e-6
    for layer, found in enumerate(stats):
        expected = found.shares / (batch.document_ids >= 0).sum()
        assert error(states[0][f"layers.{layer}.self_attn.mean_shares"], expected) < 1e-6


def test_tensor_parallelism_is_refused() -> None:
    from moestro.config import Config
    from moestro.parallel.layout import resolve_layout

    for attention in ({"attention_experts": {"num_experts": 2}}, {"cca": {}}):
        model = {
            "vocab_size": 40, "hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 16, **attention
        }  # fmt: skip
        config = Config.model_validate({
            "model": model, "data": {"sources": [{"path": "unused"}], "seq_len": 8}, "parallel": {"tp": 2},
            "train": {"steps": 1, "global_batch_size": 2},
        })  # fmt: skip
        with pytest.raises(MoestroError, match=f"model.{next(iter(attention))} needs all heads on every rank"):
            resolve_layout(config, 2)
