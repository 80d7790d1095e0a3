"""Encoders whose sequences change length with depth, as step graphs: some of the tokens go on, the others are merged.

A masked auto-encoder reads the visible patches alone; a hierarchical one (AFFMAE, arXiv 2602.16249) also attends to
near tokens only, and between levels keeps a share of them. No attention here is causal. Unless it is fused, scores are
written to memory and near tokens gathered first, as a plain PyTorch program does.
"""

from itertools import pairwise
from typing import Self

from pydantic import Field, model_validator

from moestro.config.base import Section
from moestro.config.plan import Size
from moestro.graph.classic import Net, net_graph
from moestro.graph.words import StepGraph


class Level(Section):
    """Layers that see sequences of one length."""

    tokens: Size  # of one sequence
    width: Size
    heads: Size
    layers: Size
    keys: Size | None = None  # that a token attends to; None: all tokens
    mlp_ratio: float = Field(4.0, gt=0)


class TokenNet(Section):
    """levels: in order; between them the first tokens · share of the last level's tokens go on, each merged of `merged`
    tokens around it. patch: numbers that a token is made of by a linear map; 0: tokens come as they are."""

    levels: tuple[Level, ...] = Field(min_length=1)
    patch: int = Field(0, ge=0)
    merged: Size = 8
    fused: bool = False  # attention is one kernel, which reads near keys in place and keeps no scores

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for level in self.levels:
            if level.width % level.heads:
                raise ValueError(f"heads = {level.heads} do not divide width = {level.width}")
        for before, after in pairwise(self.levels):
            if after.tokens > before.tokens:
                raise ValueError(f"a level of {after.tokens} tokens after one of {before.tokens}: merging makes fewer")
            if before.tokens < self.merged:
                raise ValueError(f"merged = {self.merged} of the {before.tokens} tokens of a level")
        return self


def kept_tokens(tokens: int, share: float) -> int:
    """Of merging: int(share · tokens)."""
    return int(share * tokens)


def near_keys(tokens: int, cluster: int = 8, near: int = 8) -> int:
    """Keys of a token that attends to its `near` nearest clusters of tokens; of all, where there are no more."""
    return min(near, -(-tokens // cluster)) * cluster


def vit_mae(image: int = 512, patch: int = 8, mask: float = 0.6, fused: bool = False) -> TokenNet:
    """The plain encoder that AFFMAE is held against: 8 layers of width 384 on the visible patches."""
    tokens = (image // patch) ** 2
    level = Level(tokens=tokens - int(mask * tokens), width=384, heads=6, layers=8)
    return TokenNet(levels=(level,), patch=patch**2, fused=fused)


def affmae(
    image: int = 512, patch: int = 8, mask: float = 0.5, share: float = 0.35, fused: bool = False
) -> TokenNet:  # fmt: skip
    """AFFMAE's small encoder: four levels, each of int(share · n) tokens of the last, and 64 near keys a token.

    A token is made of a square of twice the patch's side, so that squares overlap.
    """
    tokens = (image // patch) ** 2
    tokens, levels = tokens - int(mask * tokens), list[Level]()
    for width, layers, heads in ((96, 2, 3), (192, 3, 6), (384, 9, 12), (512, 2, 16)):
        keys = near_keys(tokens)
        levels.append(Level(tokens=tokens, width=width, heads=heads, layers=layers, keys=keys, mlp_ratio=2))
        tokens = max(1, kept_tokens(tokens, share))
    return TokenNet(levels=tuple(levels), patch=(2 * patch) ** 2, fused=fused)


def token_graph(net: TokenNet, batch: int, *, ranks: int = 1, dtype: str = "bf16") -> StepGraph:
    """batch: sequences of one rank. The loss is left out: an encoder alone has none."""
    tape = Net(batch, dtype)
    first, last = net.levels[0], len(net.levels) - 1
    if net.patch:
        tape.rows_linear("patches", batch * first.tokens, net.patch, first.width, first=True)
    for index, level in enumerate(net.levels):
        for layer in range(level.layers):
            _layer(tape, f"level {index + 1} layer {layer + 1}", level, net.fused)
        if index < last:
            _merge(tape, f"merge {index + 1}", level, net.levels[index + 1], net.merged)
    return net_graph(tape, ranks)


def _layer(tape: Net, name: str, level: Level, fused: bool) -> None:
    """Attention and a feed-forward network of two linear maps, each after a norm and added to its input."""
    rows, width = tape.batch * level.tokens, level.width
    inner = round(width * level.mlp_ratio)
    _norm(tape, f"{name} norm", rows, width)
    tape.rows_linear(f"{name} qkv", rows, width, 3 * width, part="attention")
    (_attend_fused if fused else _attend)(tape, name, level)
    tape.rows_linear(f"{name} out", rows, width, width, part="attention")
    tape.pass_over(f"{name} sum", rows * width, 3, 2)
    _norm(tape, f"{name} norm 2", rows, width)
    tape.rows_linear(f"{name} up", rows, width, inner, part="dense")
    tape.pass_over(f"{name} gelu", rows * inner, 2, 3, kept=rows * inner, part="dense")
    tape.rows_linear(f"{name} down", rows, inner, width, part="dense")
    tape.pass_over(f"{name} sum 2", rows * width, 3, 2)


def _attend(tape: Net, name: str, level: Level) -> None:
    """All to all are one product a head and sequence; near ones are gathered, and are one small product a token."""
    keys, head = level.keys or level.tokens, level.width // level.heads
    groups, rows = tape.batch * level.heads, level.tokens
    if level.keys is not None:
        copies = tape.batch * level.tokens * keys * 2 * level.width  # of keys and values
        tape.pass_over(f"{name} gather", copies, 2, 2, kept=copies, part="attention")
        groups, rows = groups * level.tokens, 1
    scores = tape.batch * level.heads * level.tokens * keys
    tape.products(f"{name} scores", groups, rows, keys, head, part="attention")
    tape.pass_over(f"{name} softmax", scores, 2, 3, kept=scores, part="attention")
    tape.products(f"{name} values", groups, rows, head, keys, part="attention")


def _attend_fused(tape: Net, name: str, level: Level) -> None:
    """Queries, keys, values and outputs cross the memory once."""
    keys, head, groups = level.keys or level.tokens, level.width // level.heads, tape.batch * level.heads
    moved = 2.0 * tape.batch * level.tokens * level.width * tape.width  # by each of the two products
    tape.products(f"{name} scores", groups, level.tokens, keys, head, moved=moved, part="attention")
    tape.products(f"{name} values", groups, level.tokens, head, keys, moved=moved, part="attention")
    tape.saved += tape.batch * level.tokens * level.heads * tape.width  # the sums of the softmax


def _merge(tape: Net, name: str, before: Level, after: Level, merged: int) -> None:
    """A score for each token, those with the highest go on; each is the weighted sum of `merged` near it."""
    rows, kept = tape.batch * before.tokens, tape.batch * after.tokens
    tape.rows_linear(f"{name} score", rows, before.width, 1, part="merge")
    tape.pass_over(f"{name} choose", rows, 4, 2, part="merge")
    copies = kept * merged * before.width
    tape.pass_over(f"{name} gather", copies, 2, 2, kept=copies, part="merge")
    tape.products(f"{name} sum", kept, 1, before.width, merged, part="merge")
    _norm(tape, f"{name} norm", kept, before.width)
    tape.rows_linear(f"{name} widen", kept, before.width, after.width, part="merge")


def _norm(tape: Net, name: str, rows: int, width: int) -> None:
    tape.pass_over(name, rows * width, 2, 3, kept=rows * width, part="norms")
    tape.parameters += 2 * width
