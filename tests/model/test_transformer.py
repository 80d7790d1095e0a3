from typing import Any

import pytest
import torch
from torch import Tensor

from moestro.model.loss import IGNORE, linear_cross_entropy
from moestro.model.mlp import FeedForward
from moestro.model.moe.layer import MoELayer
from moestro.model.moe.router import TokenGroups
from moestro.model.transformer import Block, ModelOutput, Transformer

from .helpers import build, model_config, normal, relative, token_ids

MOE: list[Any] = [None, {}, {"num_shared_experts": 1, "first_k_dense": 1, "router": {"jitter": 0.2}}]


def step(model: Transformer, ids: Tensor, **inputs: Any) -> tuple[Tensor, ModelOutput]:
    """Loss of predicting the next token, balance losses included, with gradients in place."""
    out = model(ids, **inputs)
    labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], IGNORE)], dim=1)
    documents = inputs.get("document_ids")
    if documents is not None:
        last = torch.cat([documents[:, 1:] != documents[:, :-1], torch.ones_like(documents[:, :1]) > 0], dim=1)
        labels = labels.masked_fill(last | (documents < 0), IGNORE)
    loss = linear_cross_entropy(out.hidden, model.head_weight, labels, 1 / int((labels != IGNORE).sum()))
    total = loss + sum(0.01 * s.aux_loss + 0.001 * s.z_loss for s in out.router_stats)
    total.backward()
    return loss.detach(), out


def grads(model: Transformer) -> dict[str, Tensor]:
    out = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        out[name] = parameter.grad.clone()
    model.zero_grad()
    return out


def close(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert one.keys() == other.keys()
    for name in one:
        bound = tolerance * max(1.0, one[name].abs().max().item())
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=bound, msg=lambda m, name=name: f"{name}: {m}")


# Structure


@pytest.mark.parametrize(
    ("moe", "expected"),
    [
        (None, "dddd"),
        ({}, "mmmm"),
        ({"first_k_dense": 1}, "dmmm"),
        ({"every_n_layers": 2}, "dmdm"),
        ({"first_k_dense": 1, "every_n_layers": 2}, "ddmd"),
    ],
)
def test_which_layers_are_moe(moe: dict[str, Any] | None, expected: str) -> None:
    model = build(model_config(moe, num_layers=4))
    assert "".join("m" if isinstance(layer.mlp, MoELayer) else "d" for layer in model.blocks()) == expected
    assert [layer.layer for layer in model.moe_layers()] == [i for i, kind in enumerate(expected) if kind == "m"]
    assert all(isinstance(layer.mlp, MoELayer | FeedForward) for layer in model.blocks())
    assert len(model(token_ids(1, 3)).router_stats) == expected.count("m")


def test_top_k_of_each_layer() -> None:
    model = build(model_config({"top_k": [1, 3], "first_k_dense": 1}, num_layers=3))
    stats = model(token_ids(2, 5)).router_stats
    assert [s.load.sum().item() for s in stats] == [10, 30]


def test_tied_embeddings() -> None:
    tied, untied = (build(model_config(tie_embeddings=tie)) for tie in (True, False))
    assert tied.head_weight is tied.embed_tokens.weight
    assert untied.head_weight is not untied.embed_tokens.weight
    assert "lm_head.weight" not in dict(tied.named_parameters())


@pytest.mark.parametrize("moe", MOE)
def test_shapes_and_logits(moe: dict[str, Any] | None) -> None:
    model = build(model_config(moe))
    out = model(token_ids(3, 5))
    assert out.hidden.shape == (3, 5, 16)
    logits = model.logits(out.hidden)
    assert (logits.shape, logits.dtype) == ((3, 5, 40), torch.float32)
    torch.testing.assert_close(logits, out.hidden @ model.head_weight.t())


# Initial weights


def test_initial_weights_depend_on_the_seed_and_the_name_alone() -> None:
    config = model_config({})
    torch.manual_seed(1)
    one = dict(build(config, seed=3).named_parameters())
    torch.manual_seed(2)
    state = torch.get_rng_state()
    model = Transformer(config)
    torch.set_rng_state(state)
    model.init_weights(3)
    assert torch.equal(torch.get_rng_state(), state), "initialisation consumed the global generator"
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, one[name]), name
    # More layers, another kind of layer, another head: what is common stays, up to the residual scale.
    longer = model_config({"first_k_dense": 1}, num_layers=3, tie_embeddings=True)
    other = dict(build(longer, seed=3).named_parameters())
    assert torch.equal(other["layers.1.self_attn.q_proj.weight"], one["layers.1.self_attn.q_proj.weight"])
    assert torch.equal(other["layers.1.mlp.router.weight"], one["layers.1.mlp.router.weight"])
    assert torch.equal(other["embed_tokens.weight"], one["embed_tokens.weight"])
    for name in ("layers.1.self_attn.o_proj.weight", "layers.1.mlp.experts.down_proj"):
        torch.testing.assert_close(other[name] * 6**0.5, one[name] * 4**0.5)


def test_seeds_and_names_give_different_weights() -> None:
    one, other = (dict(build(model_config({}), seed=s).named_parameters()) for s in (0, 1))
    matrices = [name for name, p in one.items() if p.dim() > 1]
    for name in matrices:
        assert not torch.equal(one[name], other[name]), name
    assert not torch.equal(one["layers.0.self_attn.q_proj.weight"], one["layers.1.self_attn.q_proj.weight"])
    experts = one["layers.0.mlp.experts.gate_up_proj"]
    assert not torch.equal(experts[0], experts[1])
    assert not torch.equal(experts[0, 0], experts[0, 1])


@pytest.mark.parametrize(("scale", "router_scale"), [(1.0, 1.0), (0.1, 0.5)])
def test_the_spread_of_initial_weights(scale: float, router_scale: float) -> None:
    moe = {"router": {"init_scale": router_scale}, "num_experts": 64, "expert_hidden_size": 32}
    model = build(model_config(moe, hidden_size=64, head_dim=8, init_scale=scale, num_layers=2, vocab_size=400))
    residual = (2 * 2) ** -0.5
    expected = {
        "embed_tokens.weight": (scale / 64) ** 0.5,
        "lm_head.weight": (scale / 64) ** 0.5,
        "layers.0.self_attn.q_proj.weight": (scale / 64) ** 0.5,
        "layers.0.self_attn.o_proj.weight": (scale / 32) ** 0.5 * residual,
        "layers.0.mlp.router.weight": (router_scale / 64) ** 0.5,
        "layers.0.mlp.experts.gate_up_proj": (scale / 64) ** 0.5,
        "layers.0.mlp.experts.down_proj": (scale / 32) ** 0.5 * residual,
    }
    parameters = dict(model.named_parameters())
    for name, sigma in expected.items():
        value = parameters[name].detach()
        assert value.abs().max() <= 2 * sigma * 1.0001, name
        # A normal cut at two sigma has standard deviation 0.8796 sigma.
        assert value.std().item() == pytest.approx(0.8796 * sigma, rel=0.05), name
        assert abs(value.mean().item()) < 0.1 * sigma, name
    assert (model.norm.weight == 1).all()
    assert (parameters["layers.0.self_attn.q_norm.weight"] == 1).all()


# Recomputation


@pytest.mark.parametrize("moe", MOE)
def test_recomputation_changes_nothing(moe: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    forward = Block.forward

    def counted(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        return forward(*arguments, **keywords)

    monkeypatch.setattr(Block, "forward", counted)
    ids, seeds = token_ids(2, 9), torch.tensor([4, 5])
    found = []
    for recompute, expected_calls in ((False, 2), (True, 4)):
        calls = 0
        model = build(model_config(moe), recompute=recompute)
        loss, out = step(model, ids, noise_seeds=seeds)
        assert calls == expected_calls
        found.append((loss, out, grads(model), dict(model.named_buffers())))
    assert torch.equal(found[0][0], found[1][0])
    close(found[0][2], found[1][2], 1e-6)
    assert len(found[0][1].router_stats) == len(found[1][1].router_stats)
    for one, other in zip(found[0][1].router_stats, found[1][1].router_stats, strict=True):
        for field, value in vars(one).items():
            assert torch.equal(value, getattr(other, field)), field
        assert one.load.sum() == 2 * 9 * 2  # counted once
    for name, buffer in found[0][3].items():
        assert torch.equal(buffer, found[1][3][name])


def test_recomputation_keeps_less() -> None:
    def held(recompute: bool) -> int:
        model = build(model_config(None, num_layers=4), recompute=recompute)
        kept: dict[int, Tensor] = {}
        weights = {p.data_ptr() for p in model.parameters()}

        def pack(t: Tensor) -> Tensor:
            if t.data_ptr() not in weights:
                kept[t.data_ptr()] = t
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(token_ids(2, 16))
        return sum(t.numel() for t in kept.values())

    assert held(True) < held(False) / 3


def test_no_recomputation_without_gradients() -> None:
    model = build(model_config({}), recompute=True)
    ids = token_ids(1, 5)
    with torch.no_grad():
        out = model(ids)
    assert not out.hidden.requires_grad
    torch.testing.assert_close(out.hidden, model(ids).hidden)


# Packing and padding


def packed(lengths: list[int], padding: int) -> tuple[Tensor, Tensor]:
    """document_ids and position_ids of one row."""
    documents = [i for i, n in enumerate(lengths) for _ in range(n)] + [-1] * padding
    positions = [p for n in lengths for p in range(n)] + [0] * padding
    return torch.tensor([documents]), torch.tensor([positions])


@pytest.mark.parametrize("moe", [None, {}, {"num_shared_experts": 1}])
@pytest.mark.parametrize("padding", [0, 5])
def test_packed_documents_equal_each_document_alone(moe: dict[str, Any] | None, padding: int) -> None:
    model = build(model_config(moe))
    lengths = [4, 1, 7]
    ids = token_ids(1, sum(lengths) + padding)
    documents, positions = packed(lengths, padding)
    hidden = model(ids, positions, documents).hidden
    start = 0
    for length in lengths:
        alone = model(ids[:, start : start + length]).hidden
        torch.testing.assert_close(hidden[:, start : start + length], alone, rtol=1e-5, atol=1e-5)
        start += length


def test_gradients_of_packed_documents_add_up() -> None:
    model = build(model_config({}))
    ids = token_ids(1, 16)
    documents, positions = packed([5, 8], 3)

    def nll(hidden: Tensor, labels: Tensor) -> Tensor:
        return linear_cross_entropy(hidden[:, :-1], model.head_weight, labels[:, 1:])

    labels = torch.where((documents >= 0) & (positions > 0), ids, IGNORE)
    nll(model(ids, positions, documents).hidden, labels).backward()
    together = grads(model)
    for part in (ids[:, :5], ids[:, 5:13]):
        nll(model(part).hidden, part).backward()
    close(together, grads(model), 2e-5)


@pytest.mark.parametrize(
    "moe",
    [None, {}, {"router": {"capacity_factor": 1.0, "group_size": 6}}, {"balance": {"aux_scope": "sequence"}}],
    ids=str,
)
def test_padding_does_not_reach_real_tokens(moe: dict[str, Any] | None) -> None:
    """Other ids at padded positions: same hidden states, statistics and gradients, bit for bit."""
    documents, positions = packed([5, 4], 3)
    ids = token_ids(1, 12)
    other = torch.where(documents < 0, (ids + 7) % 40, ids)
    assert not torch.equal(ids, other)
    found = []
    for tokens in (ids, other):
        model = build(model_config(moe))
        loss, out = step(model, tokens, document_ids=documents, position_ids=positions)
        found.append((loss, out, grads(model)))
    (loss, out, one), (other_loss, other_out, two) = found
    assert torch.equal(loss, other_loss)
    assert torch.equal(out.hidden[documents >= 0], other_out.hidden[documents >= 0])
    for a, b in zip(out.router_stats, other_out.router_stats, strict=True):
        for field, value in vars(a).items():
            assert torch.equal(value, getattr(b, field)), field
        assert a.tokens == 9
    close(one, two, 1e-6)


def test_no_token_looks_ahead() -> None:
    model = build(model_config({}))
    ids = token_ids(1, 10)
    changed = ids.clone()
    changed[0, 6] = (changed[0, 6] + 1) % 40
    one, other = model(ids).hidden, model(changed).hidden
    torch.testing.assert_close(one[:, :6], other[:, :6], rtol=1e-6, atol=1e-6)
    assert (one[:, 6:] - other[:, 6:]).abs().amax(-1).min() > 1e-4


# Noise and precision


def test_noise_follows_the_seeds() -> None:
    model = build(model_config({"router": {"jitter": 0.3}}))
    ids = token_ids(3, 8)
    seeds = torch.tensor([1, 2, 3])
    whole = model(ids, noise_seeds=seeds).hidden
    assert torch.equal(whole, model(ids, noise_seeds=seeds).hidden)
    for i in range(3):
        alone = model(ids[i : i + 1], noise_seeds=seeds[i : i + 1]).hidden
        torch.testing.assert_close(whole[i : i + 1], alone, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(whole[1:], model(ids, noise_seeds=torch.tensor([1, 7, 8])).hidden[1:])
    assert not torch.allclose(whole, model(ids).hidden)
    model.eval()
    assert torch.equal(model(ids, noise_seeds=seeds).hidden, model(ids).hidden)


def test_layers_have_noise_of_their_own() -> None:
    model = build(model_config({"router": {"jitter": 0.3}}))
    first, second = model.moe_layers()
    second.load_state_dict(first.state_dict())
    x, groups = normal(1, 6, 16), TokenGroups(6, noise_seeds=torch.tensor([9]))
    assert not torch.allclose(first(x, groups)[0], second(x, groups)[0])
    model.eval()
    assert torch.equal(first(x, groups)[0], second(x, groups)[0])


@pytest.mark.parametrize("moe", [None, {}, {"router": {"score": "sigmoid"}, "num_shared_experts": 1}])
def test_bf16_is_close_to_fp32(moe: dict[str, Any] | None) -> None:
    ids = token_ids(4, 16)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = build(model_config(moe), dtype=dtype)
        loss, out = step(model, ids)
        assert out.hidden.dtype == dtype
        assert loss.dtype == torch.float32
        assert all(p.dtype == torch.float32 for p in model.parameters())
        found[dtype] = loss, grads(model)
    assert found[torch.bfloat16][0].item() == pytest.approx(found[torch.float32][0].item(), rel=5e-3)
    for name in ("embed_tokens.weight", "layers.0.self_attn.q_proj.weight", "norm.weight"):
        assert relative(found[torch.bfloat16][1][name], found[torch.float32][1][name]) < 0.1, name


@pytest.mark.parametrize("experts", ["reference", "segmented", "grouped"])
def test_the_kind_of_experts_changes_nothing(experts: str) -> None:
    ids = token_ids(2, 9)
    found = []
    for kind in ("auto", experts):
        model = build(model_config({"experts": kind}))
        loss, _ = step(model, ids)
        found.append((loss, grads(model)))
    torch.testing.assert_close(found[0][0], found[1][0])
    close(found[0][1], found[1][1])


def test_weights_survive_a_state_dict() -> None:
    model = build(model_config({"balance": {"bias_rule": "sign"}}))
    model.moe_layers()[0].router.bias[1] = 3.0
    other = build(model_config({"balance": {"bias_rule": "sign"}}), seed=1)
    other.load_state_dict(model.state_dict())
    ids = token_ids(1, 6)
    assert torch.equal(model(ids).hidden, other(ids).hidden)
