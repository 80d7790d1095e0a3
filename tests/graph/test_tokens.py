"""Encoders whose sequences change with depth: counted as PyTorch counts them, and what `--net` refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from moestro.errors import MoestroError
from moestro.graph.nets import ENCODERS, NETS, named_net
from moestro.graph.tokens import Level, TokenNet, affmae, kept_tokens, near_keys, token_graph, vit_mae
from moestro.graph.words import Kernel, StepGraph

TINY = TokenNet(
    levels=(
        Level(tokens=24, width=8, heads=2, layers=2, keys=16, mlp_ratio=2),
        Level(tokens=9, width=12, heads=3, layers=1),
    ),
    patch=4,
    merged=3,
)


class Layer(nn.Module):
    def __init__(self, level: Level) -> None:
        super().__init__()
        self.level, width = level, level.width
        inner = round(width * level.mlp_ratio)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.level.heads, -1)) for part in self.qkv(self.norm(x)).chunk(3, -1))
        if self.level.keys is None:
            mixed = (q.transpose(1, 2) @ k.permute(0, 2, 3, 1)).softmax(-1) @ v.transpose(1, 2)
            mixed = mixed.transpose(1, 2)
        else:
            index = torch.arange(x.shape[1] * self.level.keys).view(x.shape[1], -1) % x.shape[1]
            near_k, near_v = (part[:, index].transpose(2, 3) for part in (k, v))  # [B, N, H, K, D]
            mixed = ((q[..., None, :] @ near_k.transpose(-1, -2)).softmax(-1) @ near_v).squeeze(-2)
        x = x + self.out(mixed.flatten(2))
        out: Tensor = x + self.mlp(self.norm_2(x))
        return out


class Encoder(nn.Module):
    def __init__(self, net: TokenNet) -> None:
        super().__init__()
        self.net, (first, second) = net, net.levels
        self.embed = nn.Linear(net.patch, first.width)
        self.first = nn.Sequential(*(Layer(first) for _ in range(first.layers)))
        self.second = nn.Sequential(*(Layer(second) for _ in range(second.layers)))
        self.score, self.norm = nn.Linear(first.width, 1), nn.LayerNorm(first.width)
        self.widen = nn.Linear(first.width, second.width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.embed(x))
        kept, merged = self.net.levels[1].tokens, self.net.merged
        near = torch.arange(kept)[:, None] + torch.arange(merged)
        weights = self.score(x).sigmoid()[:, near].transpose(2, 3)  # [B, kept, 1, merged]
        out: Tensor = self.second(self.widen(self.norm((weights @ x[:, near]).squeeze(2))))
        return out


def torch_flops(net: TokenNet, batch: int) -> tuple[int, int]:
    """FLOPs of forward and backward, and parameters."""
    model = Encoder(net)
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(batch, net.levels[0].tokens, net.patch)).sum().backward()
    return counter.get_total_flops(), sum(p.numel() for p in model.parameters())


def kernels(graph: StepGraph) -> list[Kernel]:
    return [n for n in graph.stages[0].forward if isinstance(n, Kernel)]


def test_flops_and_parameters_are_those_of_pytorch() -> None:
    graph = token_graph(TINY, 3)
    assert (graph.model_flops, graph.stages[0].parameters.dense) == torch_flops(TINY, 3)


def test_fused_attention_computes_the_same_and_moves_and_keeps_less() -> None:
    plain, fused = (token_graph(TINY.model_copy(update={"fused": f}), 3) for f in (False, True))
    assert plain.model_flops == fused.model_flops
    assert sum(k.bytes_moved for k in kernels(fused)) < sum(k.bytes_moved for k in kernels(plain))
    assert fused.stages[0].saved.kept < plain.stages[0].saved.kept


def test_levels_have_the_published_flops() -> None:
    def layers(net: TokenNet) -> float:
        return sum(k.flops for k in kernels(token_graph(net, 1)) if k.name.startswith("level"))

    assert layers(vit_mae(mask=0)) == pytest.approx(322e9, rel=0.002)
    assert layers(affmae(mask=0)) == pytest.approx(16.8e9, rel=0.005)
    assert layers(affmae(mask=0, share=0.4)) == pytest.approx(21.3e9, rel=0.005)


def test_tokens_by_level() -> None:
    assert [level.tokens for level in affmae().levels] == [2048, 716, 250, 87]
    assert vit_mae().levels[0].tokens == 4096 - int(0.6 * 4096)
    assert kept_tokens(2048, 0.35) == 716
    assert [near_keys(n) for n in (1, 8, 9, 63, 65, 4096)] == [8, 8, 16, 64, 64, 64]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"levels": (Level(tokens=4, width=8, heads=3, layers=1),)}, "do not divide"),
        ({"levels": TINY.levels[::-1]}, "merging makes fewer"),
        ({"merged": 25}, "merged = 25"),
        ({"levels": ()}, "at least 1 item"),
    ],
)
def test_wrong_nets(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        TokenNet(**{**dict(TINY), **change})


@pytest.mark.parametrize("name", [*NETS, *ENCODERS])
def test_each_name_is_a_net(name: str) -> None:
    graph = named_net(name, {"batch": 2, "ranks": 2, "dtype": "fp32"})
    assert graph.world_size == 2
    assert graph.tokens == 4  # samples
    assert graph.model_flops > 0


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "net.toml"
    path.write_text(
        "patch = 4\nmerged = 3\n[[levels]]\ntokens = 24\nwidth = 8\nheads = 2\nlayers = 2\nkeys = 16\nmlp_ratio = 2\n"
        "[[levels]]\ntokens = 9\nwidth = 12\nheads = 3\nlayers = 1\n"
    )
    assert named_net(str(path), {"batch": 3}).model_flops == token_graph(TINY, 3).model_flops
    with pytest.raises(MoestroError, match="merged"):
        named_net(str(path), {"merged": 30})


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("affma", {}, "Did you mean 'affmae'"),
        ("affmae", {"batch": 0}, "whole number"),
        ("affmae", {"batch": True}, "whole number"),
        ("affmae", {"imge": 64}, "Did you mean 'image'"),
        ("affmae", {"share": "much"}, "like 0.35"),
        ("affmae", {"share": 2.0}, "merging makes fewer"),
        ("affmae", {"image": 4}, "greater than or equal to 1"),
        ("affmae", {"fused": 1}, "like False"),
        ("resnet50", {"dtype": "fp3"}, "there are fp32"),
        ("resnet50", {"image": 0}, "like 224"),
        ("unet", {"image": 24}, "no multiple of 16"),
        ("none.toml", {}, "cannot read"),
    ],
)
def test_refused(name: str, values: dict[str, Any], says: str) -> None:
    with pytest.raises(MoestroError, match=says):
        named_net(name, values)
