"""One optimizer step: micro-batches forward and backward, clip, update, move the balance."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from moestro.data.batches import IGNORE, Batch
from moestro.model.moe.router import num_sums
from moestro.parallel.comm import all_reduce
from moestro.train.engine import Engine
from moestro.train.incidents import Signal
from moestro.train.stage import MicroBatch


@dataclass(frozen=True)
class LayerLoad:
    """What one MoE layer's router did over a global batch."""

    load: Tensor  # [E] share of the (token, expert) pairs chosen, before drops
    dropped: Tensor  # [] share of pairs that found no room
    token_entropy: Tensor  # [] mean entropy of a token's scores over ln E


@dataclass(frozen=True)
class StepResult:
    """The same on every rank. Tensors stay on the device: reading one waits for the step to finish."""

    loss: Tensor  # mean negative log likelihood of the predicted tokens, in nats
    aux_loss: Tensor  # mean over MoE layers, before its coefficient; 1 at uniform routing
    z_loss: Tensor  # mean over MoE layers, before its coefficient
    # The other balance losses, mean over MoE layers (of attention experts over all), coefficients included; and that of
    # a mixture of depths.
    other_loss: Tensor
    mtp_loss: Tensor  # of multi-token prediction, mean over its depths, before its coefficient
    grad_norm: Tensor  # before clipping
    tokens: int  # predicted tokens
    layers: list[LayerLoad]  # of all MoE blocks of the model


class BadStepError(RuntimeError):
    """A step that must not change the weights, and has not. signal: what is wrong with it; evidence: its figures."""

    def __init__(self, signal: Signal, text: str, evidence: dict[str, Any]) -> None:
        super().__init__(text)
        self.signal, self.evidence = signal, evidence


class NonFiniteError(BadStepError):
    """The loss or the gradient of a step is NaN or infinite; nothing was updated."""

    def __init__(self, loss: float, grad_norm: float) -> None:
        text = f"gradient norm {grad_norm:.6g}, loss {loss:.6g}"
        super().__init__("non_finite", text, {"loss": str(loss), "grad_norm": str(grad_norm)})


class Updates(Protocol):
    """What happens between backward and the next forward; see `moestro.optim.update.Update`."""

    def reduce_gradients(self) -> None: ...
    def clip(self, max_norm: float) -> Tensor: ...
    def step(self) -> None: ...
    def zero_grad(self) -> None: ...


def train_step(
    engine: Engine,
    update: Updates,
    batches: list[Batch],
    grad_clip: float | None,
    mark: Callable[[str], None] = lambda part: None,
    check: Callable[[Tensor, Tensor], None] = lambda loss, grad_norm: None,
) -> StepResult:
    """Run one step over `batches`, this rank's micro-batches of one global batch. mark: called at the end of each part
    of the step ("passes", "reduce", "update") with its name. check: called before the update with the step's loss and
    gradient norm, which are finite; raises BadStepError on every rank where there must be no update.

    The gradient is that of Σ nll / (predicted tokens of the global batch) + balance losses averaged over its valid
    tokens, so that it does not depend on how the batch is cut into micro-batches, nor over which ranks.

    Raises:
        BadStepError: on every rank, before the weights are touched.
    """
    valid = [int((batch.document_ids >= 0).sum()) for batch in batches]
    predicted = sum(int((batch.labels != IGNORE).sum()) for batch in batches)
    tokens, routed = _global_counts(engine, predicted, sum(valid))
    micro_batches = engine.micro_batches(batches, [n / routed for n in valid], 1 / tokens)
    engine.run(micro_batches, backward=True)
    mark("passes")
    figures = _figures(engine, micro_batches)
    update.reduce_gradients()
    mark("reduce")
    grad_norm = update.clip(float("inf") if grad_clip is None else grad_clip)
    try:
        if not torch.isfinite(grad_norm + figures.loss):
            raise NonFiniteError(figures.loss.item(), grad_norm.item())
        check(figures.loss, grad_norm)
    except BadStepError:
        update.zero_grad()
        raise
    update.step()
    update.zero_grad()
    for model in engine.models:
        for layer in model.moe_layers():
            layer.router.update_balance(figures.load[layer.layer], figures.sums[layer.layer])
        for number, attention in model.head_experts().items():
            attention.update_shares(figures.head_shares[number])
    mark("update")
    return figures.result(grad_norm, tokens)


def _global_counts(engine: Engine, predicted: int, valid: int) -> tuple[int, int]:
    """Predicted and valid tokens of the global batch. Ranks that share sequences count the same ones."""
    layout = engine.mesh.layout
    counts = all_reduce(torch.tensor([predicted, valid]), engine.mesh.world)
    tokens, routed = (counts // (layout.pp * layout.sequence_ranks)).tolist()
    return tokens, routed


@dataclass(frozen=True)
class _Figures:
    """Sums over the micro-batches and ranks of a step. The rows of a layer are at its number, dense ones included."""

    loss: Tensor
    aux: Tensor
    z: Tensor
    other: Tensor
    mtp: Tensor
    load: Tensor  # [blocks, E] pairs
    dropped: Tensor  # [blocks] pairs
    entropy: Tensor  # [blocks]
    sums: Tensor  # [blocks, E, W], see `RouterStats`
    head_shares: Tensor  # [blocks, groups of attention experts], see `HeadStats`
    moe_layers: list[int]

    def result(self, grad_norm: Tensor, tokens: int) -> StepResult:
        layers = []
        for i in self.moe_layers:
            pairs = self.load[i].sum().clamp_min(1)
            layers.append(LayerLoad(self.load[i] / pairs, self.dropped[i] / pairs, self.entropy[i]))
        return StepResult(self.loss, self.aux, self.z, self.other, self.mtp, grad_norm, tokens, layers)


def _figures(engine: Engine, micro_batches: list[MicroBatch]) -> _Figures:
    """Everything that the step reports and that balancing needs, added over all ranks in one collective.

    Every token is on exactly one rank of each stage, so plain sums are right: of the loss, which only last stages
    have, of the loads, and of means that each rank has divided by the global count.
    """
    config = engine.models[0].config
    blocks, moe_layers = config.num_blocks, [i for i, is_moe in enumerate(config.moe_blocks) if is_moe]
    experts = config.moe.num_choices if config.moe else 0
    width = num_sums(config) if config.moe else 0
    heads, mi_coef = 0, 0.0
    if config.attention_experts is not None:
        heads, mi_coef = config.attention_experts.num_experts, config.attention_experts.mi_coef
    everything = torch.zeros(5 + blocks * (experts * (1 + width) + 2 + heads), device=engine.device)
    loss, aux, z, other, mtp = everything[:5].unbind(0)
    sizes = (experts, 1, 1, experts * width, heads)
    load, dropped, entropy, sums, head_shares = everything[5:].split([blocks * n for n in sizes])
    load, sums = load.view(blocks, experts), sums.view(blocks, experts, width)
    head_shares = head_shares.view(blocks, heads)
    for stage in engine.stages:
        layers = [layer.layer for layer in stage.model.moe_layers()]
        for number, outcome in stage.outcomes.items():
            share = micro_batches[number].share
            if outcome.nll is not None:
                loss += outcome.nll
            if outcome.mtp_nll is not None:
                mtp += outcome.mtp_nll
            if outcome.depth_loss is not None:
                other += share * outcome.depth_loss
            for i, stats in zip(layers, outcome.router_stats, strict=True):
                load[i] += stats.load
                sums[i] += stats.sums
                dropped[i] += stats.dropped
                entropy[i] += share * stats.token_entropy
                aux += share * stats.aux_loss / len(moe_layers)
                z += share * stats.z_loss / len(moe_layers)
                other += share * stats.other_loss / len(moe_layers)
            for i, head_stats in zip(stage.model.head_experts(), outcome.head_stats, strict=True):
                head_shares[i] += head_stats.shares
                other += share * mi_coef * head_stats.mi_loss / blocks
    all_reduce(everything, engine.mesh.world)
    return _Figures(loss, aux, z, other, mtp, load, dropped, entropy, sums, head_shares, moe_layers)
