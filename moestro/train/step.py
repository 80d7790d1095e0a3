"""One optimizer step: micro-batches forward and backward, clip, update, move the balance."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from moestro.config import BalanceConfig
from moestro.data.batches import Batch
from moestro.model.loss import IGNORE, linear_cross_entropy
from moestro.model.moe.balance import update_balance
from moestro.model.moe.router import RouterStats
from moestro.model.transformer import Transformer


@dataclass(frozen=True)
class LayerLoad:
    """What one MoE layer's router did over a global batch."""

    load: Tensor  # [E] share of the (token, expert) pairs chosen, before drops
    dropped: Tensor  # [] share of pairs that found no room
    token_entropy: Tensor  # [] mean entropy of a token's scores over ln E


@dataclass(frozen=True)
class StepResult:
    """Tensors stay on the device until someone asks: reading one waits for the step to finish."""

    loss: Tensor  # mean negative log likelihood of the predicted tokens, in nats
    aux_loss: Tensor  # mean over MoE layers, before its coefficient; 1 at uniform routing
    z_loss: Tensor  # mean over MoE layers, before its coefficient
    grad_norm: Tensor  # before clipping
    tokens: int  # predicted tokens
    layers: list[LayerLoad]


class NonFiniteError(RuntimeError):
    """The gradient of a step is NaN or infinite; nothing was updated."""


def train_step(
    model: Transformer,
    optimizers: list[torch.optim.Optimizer],
    batches: list[Batch],
    balance: BalanceConfig | None,
    grad_clip: float | None,
    seed: int,
) -> StepResult:
    """Run one step over `batches`, the micro-batches of one global batch (on any device).

    The gradient is that of Σ nll / (predicted tokens of the global batch) + balance losses averaged over its valid
    tokens, so that it does not depend on how the batch is cut into micro-batches.

    Raises:
        NonFiniteError: before the weights are touched.
    """
    device = next(model.parameters()).device
    tokens = sum(int((batch.labels != IGNORE).sum()) for batch in batches)
    routed = sum(int((batch.document_ids >= 0).sum()) for batch in batches)
    totals = _Totals(device)
    for batch in batches:
        share = int((batch.document_ids >= 0).sum()) / routed
        packed = bool((batch.document_ids != 0).any())  # several documents in a row, or padding
        noise_seeds = batch.sample_ids + ((seed % 2**31) << 32)  # fits an int64
        batch = batch.to(device)
        out = model(batch.input_ids, batch.position_ids, batch.document_ids if packed else None, noise_seeds)
        loss = linear_cross_entropy(out.hidden, model.head_weight, batch.labels, scale=1 / tokens)
        totals.add(loss, out.router_stats, share)
        if balance is not None and out.router_stats:
            aux = torch.stack([stats.aux_loss for stats in out.router_stats]).mean()
            z = torch.stack([stats.z_loss for stats in out.router_stats]).mean()
            loss = loss + share * (balance.aux_coef * aux + balance.z_loss_coef * z)
        loss.backward()
    grad_norm = clip_grad_norm_(model.parameters(), float("inf") if grad_clip is None else grad_clip)
    if not torch.isfinite(grad_norm):
        for optimizer in optimizers:
            optimizer.zero_grad()
        raise NonFiniteError(f"gradient norm {grad_norm.item()}, loss {totals.loss.item()}")
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    if balance is not None:
        for layer, load in zip(model.moe_layers(), totals.loads(), strict=True):
            router = layer.router
            update_balance(router.bias, router.bias_moments, router.global_load, load, balance)
    return totals.result(grad_norm, tokens)


class _Totals:
    """Sums over the micro-batches of a step."""

    def __init__(self, device: torch.device) -> None:
        self.loss = torch.zeros((), device=device)
        self._aux = torch.zeros((), device=device)
        self._z = torch.zeros((), device=device)
        self._load: list[Tensor] = []
        self._dropped: list[Tensor] = []
        self._entropy: list[Tensor] = []

    def add(self, loss: Tensor, stats: list[RouterStats], share: float) -> None:
        self.loss += loss.detach()
        if not stats:
            return
        if not self._load:
            self._load = [torch.zeros_like(s.load) for s in stats]
            self._dropped = [torch.zeros_like(s.dropped) for s in stats]
            self._entropy = [torch.zeros_like(s.token_entropy) for s in stats]
        for i, s in enumerate(stats):
            self._load[i] += s.load
            self._dropped[i] += s.dropped
            self._entropy[i] += share * s.token_entropy
            self._aux += share * s.aux_loss.detach() / len(stats)
            self._z += share * s.z_loss.detach() / len(stats)

    def loads(self) -> list[Tensor]:
        return self._load

    def result(self, grad_norm: Tensor, tokens: int) -> StepResult:
        layers = []
        for load, dropped, entropy in zip(self._load, self._dropped, self._entropy, strict=True):
            pairs = load.sum().clamp_min(1)
            layers.append(LayerLoad(load / pairs, dropped / pairs, entropy))
        return StepResult(self.loss, self._aux, self._z, grad_norm, tokens, layers)
