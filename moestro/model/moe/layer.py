"""The mixture-of-experts feed-forward: route → dispatch → experts → combine."""

from typing import Protocol

from torch import Tensor, nn

from moestro.config import ModelConfig
from moestro.model.mlp import FeedForward
from moestro.model.moe.dispatch import combine, dispatch
from moestro.model.moe.experts import Experts
from moestro.model.moe.router import Router, RouterStats, Routing, TokenGroups
from moestro.model.ops import Linear


class Mix(Protocol):
    """The three stages after routing: x [T, D] to the experts' weighted sum [T, D]."""

    def __call__(self, x: Tensor, routing: Routing, experts: Experts) -> Tensor: ...


def mix(x: Tensor, routing: Routing, experts: Experts) -> Tensor:
    """With all experts here and all tokens at once."""
    plan = dispatch(routing, len(experts.down_proj))
    return combine(experts(x, plan), plan, len(x))


class MoELayer(nn.Module):
    """Each token visits top_k of num_experts experts, and all shared ones.

    With moe.latent_size the routed experts work on a projection of their tokens, and so do the exchanges between ranks;
    router and shared experts see the hidden state (LatentMoE).
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        moe = config.moe
        assert moe is not None
        self.layer = layer
        self.router = Router(config, layer)
        size = moe.latent_size or config.hidden_size
        self.latent_in = Linear(config.hidden_size, size) if moe.latent_size else None
        self.experts = Experts(
            moe.resolved_num_experts,
            size,
            moe.resolved_expert_hidden_size,
            moe.experts,
            moe.activation,
            moe.activation_limit,
            moe.expert_bias,
        )
        self.latent_out = Linear(size, config.hidden_size) if moe.latent_size else None
        # Granularity splits the routed experts alone.
        shared = moe.num_shared_experts * moe.expert_hidden_size
        self.shared_experts = (
            FeedForward(config.hidden_size, shared, moe.activation, moe.activation_limit) if shared else None
        )
        self.mix: Mix = mix  # `moestro.parallel` sets one for experts on several ranks

    def forward(
        self, x: Tensor, groups: TokenGroups, router_state: Tensor | None = None
    ) -> tuple[Tensor, RouterStats, Tensor | None]:
        """x: [batch, seq, hidden]; returns the same shape, the layer's routing statistics, and the router's state for
        the next MoE layer [batch, seq, router hidden], if it keeps one."""
        tokens = x.flatten(0, -2)
        routing, state = self.router(tokens, groups, None if router_state is None else router_state.flatten(0, -2))
        seen = tokens if self.latent_in is None else self.latent_in(tokens)
        out = self.mix(seen, routing, self.experts)
        if self.latent_out is not None:
            out = self.latent_out(out)
        if routing.input_weight is not None:
            out = out + routing.input_weight.unsqueeze(1).to(x.dtype) * tokens
        out = out.view_as(x)
        if self.shared_experts is not None:
            out = out + self.shared_experts(x)
        return out, routing.stats, None if state is None else state.unflatten(0, x.shape[:-1])
