"""The mixture-of-experts feed-forward: route → dispatch → experts → combine."""

from typing import Protocol

from torch import Tensor, nn

from moestro.config import ModelConfig
from moestro.model.mlp import SwiGLU
from moestro.model.moe.dispatch import combine, dispatch
from moestro.model.moe.experts import Experts
from moestro.model.moe.router import Router, RouterStats, Routing, TokenGroups


class Mix(Protocol):
    """The three stages after routing: x [T, D] to the experts' weighted sum [T, D]."""

    def __call__(self, x: Tensor, routing: Routing, experts: Experts) -> Tensor: ...


def mix(x: Tensor, routing: Routing, experts: Experts) -> Tensor:
    """With all experts here and all tokens at once."""
    plan = dispatch(routing, len(experts.down_proj))
    return combine(experts(x, plan), plan, len(x))


class MoELayer(nn.Module):
    """Each token visits top_k of num_experts SwiGLU experts, and all shared ones."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        moe = config.moe
        assert moe is not None
        self.layer = layer
        self.router = Router(config.hidden_size, moe.num_experts, config.top_k_of_layer(layer), moe.router, moe.balance)
        self.experts = Experts(moe.num_experts, config.hidden_size, moe.expert_hidden_size, moe.experts)
        shared = moe.num_shared_experts * moe.expert_hidden_size
        self.shared_experts = SwiGLU(config.hidden_size, shared) if shared else None
        self.mix: Mix = mix  # `moestro.parallel` sets one for experts on several ranks

    def forward(self, x: Tensor, groups: TokenGroups) -> tuple[Tensor, RouterStats]:
        """x: [batch, seq, hidden]; returns the same shape and the layer's routing statistics."""
        tokens = x.flatten(0, -2)
        routing = self.router(tokens, groups, self.layer)
        out = self.mix(tokens, routing, self.experts).view_as(x)
        if self.shared_experts is not None:
            out = out + self.shared_experts(x)
        return out, routing.stats
