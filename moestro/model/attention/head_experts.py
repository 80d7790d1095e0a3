"""Groups of query heads as experts (DS-MoE, arXiv 2404.05567): trained densely, weighted by a softmax over all groups.

The mutual-information loss -H(mean over tokens of S) + mean over tokens of H(S) makes the groups even over the batch
and each token decided. Its first term looks at the whole global batch, which no micro-batch has seen. As with the
auxiliary loss of `moe/balance.py`, the mean of the *previous* step stands in for it: Σ_i S_i ln mean_i, averaged over
tokens, has the gradient of -H at that mean, is a plain sum over tokens, and so does not depend on how a batch is cut.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moestro.config import ModelConfig
from moestro.model.attention.cache import LayerCache
from moestro.model.attention.gqa import GroupedQueryAttention
from moestro.model.attention.mask import Positions
from moestro.model.moe.balance import masked_mean
from moestro.model.moe.router import TokenGroups
from moestro.model.ops import Linear
from moestro.model.shards import TensorShard


@dataclass(frozen=True)
class HeadStats:
    """Over the valid tokens of a micro-batch in one layer; the loss carries gradients.

    When sequences are cut over ranks, both are this rank's part: the ranks' values add up.
    """

    mi_loss: Tensor  # [] mean over tokens, without its coefficient
    shares: Tensor  # [groups] sum of the tokens' shares


class HeadExpertAttention(nn.Module):
    """Σ_i S_i O_i(heads of group i) with S = softmax(head_router(x)); the output projection O is cut by groups."""

    mean_shares: Tensor  # [groups] fp32, the previous step's mean shares over the whole global batch

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        experts = config.attention_experts
        assert experts is not None
        self.config = experts
        self.gqa = GroupedQueryAttention(config, layer)
        self.head_router = Linear(config.hidden_size, experts.num_experts)
        self.tp: TensorShard | None = None  # layouts with tp > 1 are refused: every rank would need all shares
        self.reset_shares(self.head_router.weight.device)

    def reset_shares(self, device: torch.device) -> None:
        """As if all groups had been used alike so far."""
        groups = self.config.num_experts
        self.register_buffer("mean_shares", torch.full((groups,), 1 / groups, device=device))

    def update_shares(self, total: Tensor) -> None:
        """Once per step. total: [groups] `HeadStats.shares` of the whole global batch."""
        if total.sum() > 0:
            self.mean_shares.copy_(total / total.sum())

    def forward(
        self, x: Tensor, positions: Positions, groups: TokenGroups, cache: LayerCache | None = None
    ) -> tuple[Tensor, HeadStats | None]:
        """x: [batch, seq, hidden]; returns the same shape, and in training what the mutual-information loss needs."""
        router_input = x if x.dtype == torch.float64 else x.float()
        shares = self.head_router(router_input).softmax(-1)
        stats = self._stats(shares.flatten(0, 1), groups) if self.training else None
        threshold = self.config.eval_threshold
        if not self.training and threshold is not None:
            shares = shares * (shares * self.config.num_experts > threshold)
        out = self.gqa.attended(x, positions, cache).unflatten(2, (self.config.num_experts, -1))
        return self.gqa.o_proj((out * shares.unsqueeze(-1).to(out.dtype)).flatten(2)), stats

    def _stats(self, shares: Tensor, groups: TokenGroups) -> HeadStats:
        """shares: [tokens, groups]."""
        valid = groups.valid_here()
        entropy = torch.special.entr(shares).sum(-1)
        toward_even = shares @ self.mean_shares.to(shares.dtype).clamp_min(1e-20).log()
        loss = masked_mean(entropy + toward_even, valid, groups.count(len(shares)))
        counted = shares.detach() if valid is None else shares.detach() * valid.unsqueeze(1)
        return HeadStats(loss, counted.sum(0).float())

    def new_cache(self, batch: int, max_len: int, device: torch.device | str, dtype: torch.dtype) -> LayerCache:
        return self.gqa.new_cache(batch, max_len, device, dtype)
