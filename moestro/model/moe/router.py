"""A layer's router: the parameters that make logits, and the state of balancing. `route.py` does the rest."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moestro.config import ModelConfig
from moestro.model.moe.balance import update_balance
from moestro.model.moe.groups import TokenGroups
from moestro.model.moe.memory import Memory, chosen_fractions, num_mean_shares, num_sums, share_targets
from moestro.model.moe.noise import jitter_noise, logit_noise
from moestro.model.moe.quantile import quantile_step
from moestro.model.moe.route import RouterStats, Routing, route, route_by_hash
from moestro.model.norms import RMSNorm
from moestro.model.ops import linear

__all__ = ["Router", "RouterStats", "Routing", "TokenGroups", "num_sums"]


class Router(nn.Module):
    """Its buffers are moved only by `update_balance`, once per step; a forward changes nothing.

    What each kind has (D hidden size, R router.hidden_size, C choices):

    * linear: weight [C, D], and logit_bias [C] with router.bias
    * mlp: out_proj(gelu(in_proj(x))), D → R → C
    * attention: query(x) · keys / sqrt(R), keys [C, R]
    * hybrid: g · linear + (1 - g) · attention, g = σ(mix_bias)
    * mlp_hadamard: out_proj(in_proj(x) * factor_proj(x)), D → R → C
    * zaya: out_proj(gelu(fc2(gelu(fc1(norm(r)))))), r = in_proj(x) + state_scale * r of the MoE layer before
    * hash: nothing
    """

    bias: Tensor  # [C] fp32, added to the selection scores
    bias_moments: Tensor  # [3, C] fp32: AdamW's first and second moment and its step count
    global_load: Tensor  # [C] fp32, share of the previous step's pairs, over the whole global batch
    mean_shares: Tensor | None  # see `memory.Memory`
    temperature: Tensor | None  # [1] fp32, of the softmax of "dense_to_sparse"

    def __init__(self, model: ModelConfig, layer: int) -> None:
        super().__init__()
        assert model.moe is not None
        self.moe, self.top_k, self.layer = model.moe, model.top_k_of_layer(layer), layer
        self.config, self.balance = model.moe.router, model.moe.balance
        self._num_mean_shares = num_mean_shares(model)
        self._add_parameters(model, is_first=True not in model.moe_blocks[:layer])
        if self.config.selection == "expert_choice":
            # A causal router that learns to foresee the choice: σ(aux_out(silu(aux_in(x)))) (arXiv 2407.21770).
            self.aux_in = nn.Linear(model.hidden_size, max(model.hidden_size // 2, 1), bias=False)
            self.aux_out = nn.Linear(self.aux_in.out_features, model.moe.num_choices, bias=False)
        self.reset_balance(torch.empty(0).device)

    def _add_parameters(self, model: ModelConfig, is_first: bool) -> None:
        config, hidden, choices = self.config, model.hidden_size, self.moe.num_choices
        kind, width = config.kind, config.hidden_size
        if kind in ("linear", "hybrid"):
            self.weight = nn.Parameter(torch.empty(choices, hidden))
        if kind == "linear" and config.bias:
            self.logit_bias = nn.Parameter(torch.empty(choices))
        if kind in ("attention", "hybrid"):
            self.query = nn.Linear(hidden, width, bias=False)
            self.keys = nn.Parameter(torch.empty(choices, width))
        if kind == "hybrid":
            self.mix_bias = nn.Parameter(torch.empty(1))
        if kind in ("mlp", "mlp_hadamard", "zaya"):
            self.in_proj = nn.Linear(hidden, width, bias=kind == "zaya")
            self.out_proj = nn.Linear(width, choices, bias=False)
        if kind == "mlp_hadamard":
            self.factor_proj = nn.Linear(hidden, width, bias=False)
        if kind == "zaya":
            if config.carry_state and not is_first:
                self.state_scale = nn.Parameter(torch.empty(width))
            self.norm = RMSNorm(width, model.norm_eps)
            self.fc1 = nn.Linear(width, width)
            self.fc2 = nn.Linear(width, width)

    def reset_balance(self, device: torch.device) -> None:
        """Null experts' initial bias, no other; and a load as if it had been even so far."""
        choices, rows = self.moe.num_choices, self._num_mean_shares
        bias = torch.zeros(choices, device=device)
        bias[self.moe.resolved_num_experts :] = self.moe.null_bias
        self.register_buffer("bias", bias)
        self.register_buffer("bias_moments", torch.zeros(3, choices, device=device))
        self.register_buffer("global_load", torch.full((choices,), 1 / choices, device=device))
        even = torch.full((rows, choices), 1 / (rows * choices), device=device) if rows else None
        self.register_buffer("mean_shares", even)
        cools = self.config.selection == "dense_to_sparse"
        self.register_buffer("temperature", torch.tensor([self.config.temperature], device=device) if cools else None)

    def forward(self, x: Tensor, groups: TokenGroups, state: Tensor | None = None) -> tuple[Routing, Tensor | None]:
        """x: [T, D]; state: [T, R] of the MoE layer before, or None in the first. Returns this one's."""
        memory = Memory(self.bias, self.global_load, self.mean_shares)
        if self.config.kind == "hash":
            return route_by_hash(self.moe, self.layer, self.top_k, groups, memory, self.training), None
        x = x.to(torch.float32 if self.config.fp32 and x.dtype != torch.float64 else x.dtype)
        causal = self._causal_logits(x.detach()) if self.config.selection == "expert_choice" else None
        if self.training and self.config.jitter > 0 and groups.noise_seeds is not None:
            noise = jitter_noise(groups.noise_seeds, self.layer, groups.seq_len, x.shape[1], self.config.jitter, x)
            x = x * groups.mine(noise)
        logits, state = self._logits(x, state)
        logits = self._disturb(logits.to(torch.promote_types(logits.dtype, torch.float32)), groups)
        return route(logits, self.moe, self.top_k, groups, memory, self.training, causal), state

    def _logits(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        kind = self.config.kind
        if kind == "mlp":
            return self._product(F.gelu(self._through(self.in_proj, x)), self.out_proj.weight), None
        if kind == "mlp_hadamard":
            product = self._through(self.in_proj, x) * self._through(self.factor_proj, x)
            return self._through(self.out_proj, product), None
        if kind == "zaya":
            return self._zaya(x, state)
        logits = self._product(x, self.weight) if kind in ("linear", "hybrid") else None
        if kind == "linear":
            assert logits is not None
            return logits + self.logit_bias.to(x.dtype) if self.config.bias else logits, None
        attended = self._product(self._through(self.query, x), self.keys) * self.keys.shape[1] ** -0.5
        if logits is None:
            return attended, None
        share = self.mix_bias.to(x.dtype).sigmoid()
        return share * logits + (1 - share) * attended, None

    def _zaya(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """ZAYA1's network and depth averaging (arXiv 2511.17127); the state goes on as it is before the norm."""
        here = self._through(self.in_proj, x)
        if state is not None and hasattr(self, "state_scale"):
            here = here + state.to(x.dtype) * self.state_scale.to(x.dtype)
        hidden = F.gelu(self._through(self.fc1, self.norm(here)))
        logits = self._through(self.out_proj, F.gelu(self._through(self.fc2, hidden)))
        return logits, here if self.config.carry_state else None

    def _causal_logits(self, x: Tensor) -> Tensor:
        """[T, E] fp32; x without gradient, so that this router learns and nothing else does."""
        logits = self._through(self.aux_out, F.silu(self._through(self.aux_in, x)))
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _through(self, module: nn.Linear, x: Tensor) -> Tensor:
        product = self._product(x, module.weight)
        return product if module.bias is None else product + module.bias.to(x.dtype)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight.to(x.dtype)) if self.config.fp32 else linear(x, weight)

    def _disturb(self, logits: Tensor, groups: TokenGroups) -> Tensor:
        """Noise while training, and the temperature."""
        config, seeds = self.config, groups.noise_seeds if self.training else None
        size = groups.seq_len, logits.shape[1]
        if seeds is not None and config.noise_scale > 0:
            noise = logit_noise(seeds, self.layer, *size, config.noise, logits)
            logits = logits + config.noise_scale * groups.mine(noise)
        if self.temperature is None:
            return logits
        if seeds is not None:
            logits = logits + groups.mine(logit_noise(seeds, self.layer, *size, "one_gumbel", logits))
        return logits / self.temperature.to(logits.dtype)

    @torch.no_grad()
    def update_balance(self, load: Tensor, sums: Tensor) -> None:
        """Once per step. load: [C] pairs of this step's whole global batch; sums: [C, W] of the same."""
        if load.sum() == 0:
            return
        target = share_targets(load, self.moe)
        update_balance(self.bias, self.bias_moments, self.global_load, load, self.balance, target)
        margins, shares = sums.split([sums.shape[1] - self._num_mean_shares, self._num_mean_shares], 1)
        if self.balance.bias_rule == "quantile":
            step = quantile_step(margins, torch.tensor(chosen_fractions(self.top_k, self.moe), device=sums.device))
            self.bias.add_(step - step.mean())
        if self.mean_shares is not None:
            self.mean_shares.copy_(shares.t() / shares.sum().clamp_min(1e-20))
        if self.temperature is not None:
            self.temperature.mul_(self.config.temperature_decay).clamp_(min=self.config.min_temperature)
