"""Small encoders of images in PyTorch for `affmae.py`: a plain one, and one that attends near and merges tokens."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moestro.graph.tokens import Level, TokenNet, kept_tokens

CLUSTER, NEAR = 8, 8  # tokens of a cluster, and clusters that a token attends to


@dataclass(frozen=True)
class Tokens:
    """x: [B, N, C]; place: [B, N, 2] rows and columns, neighbours on a space-filling curve following each other."""

    x: Tensor
    place: Tensor


@lru_cache(maxsize=8)
def curve_order(side: int) -> Tensor:
    """[side²] patches of a square along the Z-shaped curve: the bits of row and column interleaved."""
    codes = [
        sum(((v >> i & 1) << 2 * i + 1) | ((u >> i & 1) << 2 * i) for i in range(16))
        for v in range(side)
        for u in range(side)
    ]
    return torch.tensor(codes).argsort()


def random_mask(side: int, share: float, batch: int, seed: int) -> Tensor:
    """[B, side²] of which exactly int(share · side²) are True: masked."""
    draw = torch.rand(batch, side**2, generator=torch.Generator().manual_seed(seed))
    return draw.argsort(1).argsort(1) < int(share * side**2)


def visible_places(mask: Tensor, side: int) -> Tensor:
    """[B, N] indices of visible patches along the curve. mask: [B, side²]."""
    order = curve_order(side)
    return torch.stack([order[~row[order]] for row in mask])


def near_tokens(place: Tensor, cluster: int, near: int) -> tuple[Tensor, Tensor]:
    """([B, N, K] tokens of each token's nearest clusters, [B, N, K] whether they are there: the last may be short)."""
    batch, count = place.shape[:2]
    clusters = -(-count // cluster)
    padded = F.pad(place, (0, 0, 0, clusters * cluster - count)).view(batch, clusters, cluster, 2)
    there = (torch.arange(clusters * cluster) < count).view(clusters, cluster)
    centre = padded.sum(2) / there.sum(1)[:, None]
    apart = (place[:, :, None] - centre[:, None]).square().sum(-1)
    nearest = apart.topk(min(near, clusters), largest=False).indices
    found = (nearest[..., None] * cluster + torch.arange(cluster)).flatten(2)
    return found.clamp(max=count - 1), found < count


def gather(x: Tensor, index: Tensor) -> Tensor:
    """[B, N, K, C]: for each of [B, N, K] the row of x: [B, M, C]."""
    return torch.stack([rows[which] for rows, which in zip(x, index, strict=True)])


class NearAttention(nn.Module):
    """Each token attends to its nearest clusters, less to what is farther away. cluster None: to all tokens."""

    def __init__(self, width: int, heads: int, cluster: int | None) -> None:
        super().__init__()
        self.heads, self.cluster = heads, cluster
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.slope = nn.Parameter(torch.linspace(0.0, 0.1, heads))

    def forward(self, tokens: Tokens) -> Tensor:
        batch, count, width = tokens.x.shape
        q, k, v = self.qkv(tokens.x).chunk(3, -1)
        if self.cluster is None:
            return self._all(q, k, v, tokens.place)
        index, there = near_tokens(tokens.place, self.cluster, NEAR)
        keys, values = (self._heads(gather(each, index)) for each in (k, v))  # [B, N, H, K, D]
        scores = q.view(batch, count, self.heads, 1, -1) @ keys.transpose(-1, -2) * (width // self.heads) ** -0.5
        apart = (tokens.place[:, :, None] - gather(tokens.place, index)).norm(dim=-1)
        scores = scores - (self.slope[:, None] * apart[:, :, None])[..., None, :]
        scores = scores.masked_fill(~there[:, :, None, None], -torch.inf)
        mixed: Tensor = self.out((scores.softmax(-1) @ values).reshape(batch, count, width))
        return mixed

    def _all(self, q: Tensor, k: Tensor, v: Tensor, place: Tensor) -> Tensor:
        batch, count, width = q.shape
        q, k, v = (each.view(batch, count, self.heads, -1).transpose(1, 2) for each in (q, k, v))
        apart = (place[:, :, None] - place[:, None]).norm(dim=-1)
        scores = q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5 - self.slope[:, None, None] * apart[:, None]
        mixed: Tensor = self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, count, width))
        return mixed

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(2, 3)


class Layer(nn.Module):
    def __init__(self, level: Level, cluster: int | None) -> None:
        super().__init__()
        inner = round(level.width * level.mlp_ratio)
        self.norm, self.norm_2 = nn.LayerNorm(level.width), nn.LayerNorm(level.width)
        self.attention = NearAttention(level.width, level.heads, cluster)
        self.mlp = nn.Sequential(nn.Linear(level.width, inner), nn.GELU(), nn.Linear(inner, level.width))

    def forward(self, tokens: Tokens) -> Tokens:
        x = tokens.x + self.attention(Tokens(self.norm(tokens.x), tokens.place))
        return Tokens(x + self.mlp(self.norm_2(x)), tokens.place)


class Merge(nn.Module):
    """The tokens of the highest scores go on, each as the mean of those near it, weighted by score and distance."""

    def __init__(self, width: int, out: int, merged: int) -> None:
        super().__init__()
        self.merged = merged
        self.score, self.norm, self.widen = nn.Linear(width, 1), nn.LayerNorm(width), nn.Linear(width, out)

    def forward(self, tokens: Tokens, kept: int) -> Tokens:
        scores = self.score(tokens.x).sigmoid().squeeze(-1)
        chosen = scores.topk(kept).indices.sort().values  # stays in the order of the curve
        place = tokens.place.take_along_dim(chosen[..., None], 1)
        apart = (place[:, :, None] - tokens.place[:, None]).square().sum(-1)
        near = apart.topk(self.merged, largest=False)
        weights = (-near.values).exp() * gather(scores[..., None], near.indices).squeeze(-1)
        weights = weights / weights.sum(-1, keepdim=True)
        mean = (weights[:, :, None] @ gather(tokens.x, near.indices)).squeeze(2)
        return Tokens(self.widen(self.norm(mean)), place)


class Encoder(nn.Module):
    """Of a TokenNet. Masking takes pixels away before patches are made, since these may overlap."""

    def __init__(self, net: TokenNet, patch: int) -> None:
        super().__init__()
        self.net, self.patch, self.side = net, patch, round(net.patch**0.5)  # pixels of a patch's square
        self.embed = nn.Linear(net.patch, net.levels[0].width)
        self.levels = nn.ModuleList(
            nn.ModuleList(Layer(level, None if level.keys is None else CLUSTER) for _ in range(level.layers))
            for level in net.levels
        )
        self.merges = nn.ModuleList(Merge(a.width, b.width, net.merged) for a, b in pairwise(net.levels))

    def forward(self, image: Tensor, mask: Tensor) -> Tokens:
        """image: [B, 1, S, S]; mask: [B, patches], True where hidden. Returns the last level's tokens."""
        tokens = self.patches(image, mask)
        for index, layers in enumerate(self.levels):
            assert isinstance(layers, nn.ModuleList)
            if index:
                tokens = self.merges[index - 1](tokens, self.net.levels[index].tokens)
            for layer in layers:
                tokens = layer(tokens)
        return tokens

    def patches(self, image: Tensor, mask: Tensor) -> Tokens:
        """Visible ones alone, along the curve."""
        side = image.shape[-1] // self.patch
        hidden = mask.view(-1, 1, side, side).repeat_interleave(self.patch, 2).repeat_interleave(self.patch, 3)
        pad = (self.side - self.patch) // 2
        squares = F.unfold(image.masked_fill(hidden, 0.0), self.side, padding=pad, stride=self.patch).transpose(1, 2)
        seen = visible_places(mask, side)
        place = torch.stack((seen // side, seen % side), -1).float()
        return Tokens(self.embed(squares.take_along_dim(seen[..., None], 1)), place)


def kept_by_level(net: TokenNet, share: float) -> bool:
    """Whether every level has exactly int(share · n) tokens of the one before."""
    return all(b.tokens == kept_tokens(a.tokens, share) for a, b in pairwise(net.levels))
