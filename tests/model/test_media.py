"""Encoders and connectors against naive loops, and vectors in the place of tokens."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel.cases import make_config
from torch import Tensor
from torch.nn import functional as F

from moestro.config import EncoderConfig, ModelConfig, count
from moestro.errors import MoestroError
from moestro.model.media import Encoder, Media, insert, placeholder, pooling, resize_positions
from moestro.model.transformer import Transformer
from moestro.parallel.layout import resolve_layout

from .helpers import build, error, model_config, normal, token_ids

GRID: dict[str, Any] = {
    "name": "image", "input_size": 6, "max_patches": 16, "hidden_size": 8, "num_layers": 2, "num_heads": 2,
    "num_tokens": 4,
}  # fmt: skip
LINE: dict[str, Any] = GRID | {"name": "sound", "max_patches": 7, "shape": "line", "num_tokens": 3}
KINDS = [
    GRID,
    GRID | {"connector": "attention_pool", "num_tokens": 3},
    GRID | {"connector": "c_abstractor", "max_patches": 25},
    GRID | {"connector": "mlp", "num_tokens": 16},
    GRID | {"max_patches": 25, "position_patches": 9},
    LINE,
    LINE | {"connector": "attention_pool", "num_layers": 0},
    LINE | {"connector": "c_abstractor", "intermediate_size": 5},
    LINE | {"position_patches": 4, "num_tokens": 5},
]


def media_config(*encoders: dict[str, Any], **more: Any) -> ModelConfig:
    return model_config(encoders=encoders, **more)


def shaken(config: dict[str, Any]) -> Encoder:
    """An encoder in fp64 whose every weight, norms included, is its own."""
    encoder = build(media_config(config), dtype=torch.float64).encoders[config["name"]]
    assert isinstance(encoder, Encoder)
    for i, parameter in enumerate(encoder.parameters()):
        parameter.data = parameter.data.double() + 0.3 * normal(*parameter.shape, seed=i, dtype=torch.float64)
    return encoder


def items(config: dict[str, Any], lengths: list[int]) -> tuple[Tensor, Tensor]:
    patches = normal(len(lengths), config["max_patches"], config["input_size"], seed=9, dtype=torch.float64)
    return patches, torch.tensor(lengths)  # what lies beyond an item's own patches is not 0 here


# The reference: one item, loops


def rms(x: Tensor, norm: Any) -> Tensor:
    return torch.stack([row / (row.square().mean() + norm.eps).sqrt() * norm.weight for row in x])


def look(attention: Any, x: Tensor, seen: Tensor) -> Tensor:
    out, size = [], x.shape[1] // attention.heads
    for row in x:
        query, heads = attention.q_proj.weight @ row, []
        for h in range(attention.heads):
            part = slice(h * size, (h + 1) * size)
            keys, values = (seen @ w.weight.t() for w in (attention.k_proj, attention.v_proj))
            heads.append((keys[:, part] @ query[part] / size**0.5).softmax(0) @ values[:, part])
        out.append(attention.o_proj.weight @ torch.cat(heads))
    return torch.stack(out)


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    """Rows of x are the places of a line or of a square."""
    if weight.dim() == 3:
        weight, rows, columns = weight.unsqueeze(2), 1, len(x)
    else:
        rows = columns = math.isqrt(len(x))
    high = weight.shape[2] // 2
    out = []
    for r in range(rows):
        for c in range(columns):
            total = torch.zeros(len(weight), dtype=x.dtype)
            for i in range(weight.shape[2]):
                for j in range(3):
                    y, z = r + i - high, c + j - 1
                    if 0 <= y < rows and 0 <= z < columns:
                        total = total + weight[:, :, i, j] @ x[y * columns + z]
            out.append(total)
    return torch.stack(out)


def residual(x: Tensor, block: Any) -> Tensor:
    inner = F.silu(convolve(rms(x, block.norm), block.conv_in))
    return x + convolve(inner, block.conv_out)


def mean_of(x: Tensor, tokens: int, grid: bool) -> Tensor:
    def spans(n: int, k: int) -> list[range]:
        return [range(i * n // k, -(-(i + 1) * n // k)) for i in range(k)]

    if not grid:
        return torch.stack([x[list(span)].mean(0) for span in spans(len(x), tokens)])
    n, k = math.isqrt(len(x)), math.isqrt(tokens)
    return torch.stack(
        [x[[r * n + c for r in rows for c in columns]].mean(0) for rows in spans(n, k) for columns in spans(n, k)]
    )


def naive(encoder: Encoder, patches: Tensor) -> Tensor:
    config, connector = encoder.config, encoder.connector
    positions = resize_positions(encoder.position_embed, config.max_patches, config.shape)
    x = patches @ encoder.patch_proj.weight.t() + positions[: len(patches)]
    for block in encoder.blocks:
        normed = rms(x, block.attention_norm)
        x = x + look(block.attention, normed, normed)
        hidden = F.gelu(rms(x, block.mlp_norm) @ block.mlp.up_proj.weight.t())
        x = x + hidden @ block.mlp.down_proj.weight.t()
    x = rms(x, encoder.norm)
    if config.connector == "mlp":
        return F.gelu(x @ connector.fc1.weight.t()) @ connector.fc2.weight.t()
    if config.connector == "attention_pool":
        return look(connector.attention, connector.queries, x) @ connector.proj.weight.t()
    if config.connector == "c_abstractor":
        x = residual(x, connector.before)
    x = mean_of(x, config.num_tokens, config.shape == "grid")
    if config.connector == "c_abstractor":
        x = residual(x, connector.after)
    return x @ connector.proj.weight.t()


@pytest.mark.parametrize("config", KINDS)
def test_encoder_and_gradients_equal_one_item_after_another(config: dict[str, Any]) -> None:
    encoder = shaken(config)
    full = config["max_patches"]
    patches, numbers = items(config, [full, full] if config is not LINE and "shape" not in config else [5, full, 1])
    found = encoder(patches, numbers)
    expected = torch.stack([naive(encoder, p[:n]) for p, n in zip(patches, numbers.tolist(), strict=True)])
    assert found.shape == (len(patches), config["num_tokens"], 16)
    assert error(found, expected) < 1e-10
    weight = normal(*found.shape, dtype=torch.float64)
    names, parameters = zip(*encoder.named_parameters(), strict=True)
    got = torch.autograd.grad((found * weight).sum(), parameters)
    wanted = torch.autograd.grad((expected * weight).sum(), parameters)
    for name, a, b in zip(names, got, wanted, strict=True):
        assert error(a, b) < 1e-9, name


@pytest.mark.parametrize("config", KINDS)
def test_parameters_are_counted(config: dict[str, Any]) -> None:
    model = Transformer(media_config(config))
    assert count(model.config, 8).total_params == sum(p.numel() for p in model.parameters())


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.booleans())
def test_pooling_is_a_mean_that_leaves_no_patch_out(patches: int, tokens: int, grid: bool) -> None:
    shape = "grid" if grid else "line"
    n, k = (patches**2, tokens**2) if grid else (patches, tokens)
    weights = pooling(torch.tensor([n]), n, k, shape, torch.float32)[0]
    assert weights.shape == (k, n)
    torch.testing.assert_close(weights.sum(1), torch.ones(k))
    assert (weights.sum(0) > 0).all()
    assert n != k or torch.equal(weights, torch.eye(n))
    if n % k == 0 and not grid:
        torch.testing.assert_close(weights.sum(0), torch.full((n,), k / n))


def test_positions_at_another_resolution() -> None:
    ramp = torch.arange(16.0).view(4, 4)  # rises by 4 a row and 1 a column
    table = torch.stack([ramp.flatten(), torch.ones(16)], 1)
    assert resize_positions(table, 16, "grid") is table
    large = resize_positions(table, 64, "grid")
    assert torch.equal(large[:, 1], torch.ones(64))
    inside = large[:, 0].view(8, 8)[1:-1, 1:-1]
    torch.testing.assert_close(inside.diff(dim=0), torch.full((5, 6), 2.0))
    torch.testing.assert_close(inside.diff(dim=1), torch.full((6, 5), 0.5))
    line = resize_positions(torch.arange(4.0).unsqueeze(1), 8, "line")[:, 0]
    torch.testing.assert_close(line[1:-1], torch.arange(0.25, 3, 0.5))


# Among tokens


def example() -> tuple[ModelConfig, Tensor, list[Media]]:
    """Two rows: a sound and text and an image; an image between texts."""
    config = media_config(GRID, LINE, token_types=[30])
    ids = token_ids(2, 12)
    ids[0, 1:4], ids[0, 7:11], ids[1, 5:9] = placeholder(1), placeholder(0), placeholder(0)
    images = Media(0, normal(2, 16, 6), torch.tensor([16, 16]))
    sounds = Media(1, normal(1, 7, 6, seed=1), torch.tensor([5]))
    return config, ids, [images, sounds]


def test_vectors_stand_at_their_places() -> None:
    config, ids, media = example()
    model = build(config)
    x = model._embed(ids, media)
    images, sounds = (model.encoders[e.name](m.patches, m.numbers) for e, m in zip(config.encoders, media, strict=True))
    assert torch.equal(x[0, 1:4], sounds[0])
    assert torch.equal(x[0, 7:11], images[0])
    assert torch.equal(x[1, 5:9], images[1])
    text = ids >= 0
    assert torch.equal(x[text], model.embed_tokens.weight[ids[text]])


def test_routers_are_told_what_stands_where() -> None:
    config, ids, _ = example()
    model = build(config)
    groups = model._groups(12, ids, None, None, None)
    wanted = torch.where(ids >= 30, 1, 0)
    wanted[ids == placeholder(0)], wanted[ids == placeholder(1)] = 2, 3
    assert torch.equal(groups.token_types, wanted.flatten())
    assert torch.equal(groups.token_ids, ids.clamp_min(-1).flatten())
    without_borders = build(media_config(GRID))._groups(12, ids.clamp_min(-1), None, None, None)
    assert torch.equal(without_borders.token_types, (ids < 0).long().flatten())
    assert build(model_config())._groups(12, ids, None, None, None).token_types is None


def test_gradients_reach_every_weight_and_text_alone_gives_zeros() -> None:
    config, ids, media = example()
    model = build(config)
    model(ids, labels=ids.clamp_min(0), media=media).loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in model.encoders.parameters())
    model.zero_grad()
    text = token_ids(2, 12)
    model(text, labels=text).loss.backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.encoders.parameters())


def test_text_alone_is_as_without_encoders() -> None:
    text = token_ids(2, 12)
    with_encoders, without = build(media_config(GRID, LINE)), build(model_config())
    assert torch.equal(with_encoders(text).hidden, without(text).hidden)
    with torch.no_grad():
        assert torch.equal(with_encoders.eval()(text).hidden, without.eval()(text).hidden)


def test_order_of_items_is_that_of_their_places() -> None:
    vectors = torch.arange(12.0).view(3, 2, 2)
    places = torch.tensor([[0, 1, 1, 0, 1, 1], [1, 1, 0, 0, 0, 0]], dtype=torch.bool)
    x = insert(torch.full((2, 6, 2), -1.0), places, vectors)
    assert torch.equal(x[places], vectors.flatten(0, 1))
    assert (x[~places] == -1).all()


def test_stages_of_a_pipeline_equal_the_whole() -> None:
    config, ids, media = example()
    whole, first, last = (build(config, layers=layers) for layers in (None, [0], [1]))
    assert len(first.encoders) == 2
    assert len(last.encoders) == 0
    hidden = last(first(ids, media=media).hidden, token_ids=ids).hidden
    assert torch.equal(hidden, whole(ids, media=media).hidden)


def test_low_precision() -> None:
    config, ids, media = example()
    low, full = (build(config, dtype=dtype)(ids, media=media).hidden for dtype in (torch.bfloat16, torch.float32))
    assert low.dtype == torch.bfloat16
    assert error(low, full) < 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_patches": 15}, 'max_patches = 15 is no square, which shape = "grid" needs'),
        ({"num_tokens": 3}, "num_tokens = 3 is no square"),
        ({"position_patches": 8}, "position_patches = 8 is no square"),
        ({"connector": "mlp"}, "makes a token of every patch"),
        ({"num_heads": 3}, "num_heads = 3 does not divide 8"),
        ({"name": "an image"}, "should match pattern"),
        ({"name": "router"}, "an encoder's name may not contain one of"),
    ],
)
def test_bad_settings(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EncoderConfig.model_validate(GRID | change)


@pytest.mark.parametrize("size", ["tp", "cp"])
@pytest.mark.parametrize(("part", "value"), [("encoders", [GRID]), ("depth", {})])
def test_whole_sequences_are_needed(part: str, value: Any, size: str) -> None:
    config = make_config("lagged", "adamw", parallel={size: 2})
    model = ModelConfig.model_validate(config.model.model_dump() | {part: value})
    with pytest.raises(MoestroError, match=f"model.{part} needs whole sequences"):
        resolve_layout(config.model_copy(update={"model": model}), 2)
