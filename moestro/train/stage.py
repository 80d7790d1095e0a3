"""A pipeline stage at work: micro-batches by number in, hidden states or the loss out, statistics kept for the step.

A run without a pipeline has one stage, which is first and last.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moestro.config import BalanceConfig
from moestro.data.batches import Batch
from moestro.model.moe.router import RouterStats
from moestro.model.shards import SequenceShard
from moestro.model.transformer import Transformer
from moestro.parallel.context import SequenceSlices


@dataclass(frozen=True)
class MicroBatch:
    """What one forward needs, on the device; of cut sequences only the positions here."""

    input_ids: Tensor  # [batch, positions here]
    labels: Tensor  # [batch, positions here]
    position_ids: Tensor  # [batch, positions that attention has here]
    document_ids: Tensor | None  # [batch, seq]; None when every row is one document
    noise_seeds: Tensor  # [batch]
    share: float  # its valid tokens over those of the global batch
    loss_scale: float  # 1 over the predicted tokens of the global batch


def micro_batch(
    batch: Batch, slices: SequenceSlices | None, device: torch.device, seed: int, share: float, loss_scale: float
) -> MicroBatch:
    packed = bool((batch.document_ids != 0).any())  # several documents in a row, or padding
    noise_seeds = batch.sample_ids + ((seed % 2**31) << 32)  # fits an int64
    batch = batch.to(device)
    inputs, labels, positions = batch.input_ids, batch.labels, batch.position_ids
    if slices is not None:
        inputs, labels, positions = slices.take(inputs), slices.take(labels), slices.take_context(positions)
    documents = batch.document_ids if packed else None
    return MicroBatch(inputs, labels, positions, documents, noise_seeds.to(device), share, loss_scale)


@dataclass(frozen=True)
class Outcome:
    """Of one micro-batch in one stage, without gradients."""

    nll: Tensor | None  # loss_scale · Σ nll, in the last stage
    router_stats: list[RouterStats]


class Stage(nn.Module):
    """Calls its layers with the micro-batch of a number. Set `micro_batches` first; read `outcomes` after."""

    def __init__(self, model: Transformer, balance: BalanceConfig | None, slices: SequenceShard | None) -> None:
        super().__init__()
        self.model, self._balance, self._slices = model, balance, slices
        # The balance losses are means over all MoE layers of the model, of which some are here.
        self._moe_layers = sum(model.config.moe_layers)
        self.micro_batches: list[MicroBatch] = []
        self.outcomes: dict[int, Outcome] = {}

    def forward(self, inputs: Tensor, number: Tensor) -> Tensor:
        """inputs: token ids or hidden states; number: [1]. Returns hidden states, or in the last stage the loss [1].

        In training the loss includes this stage's balance losses; a stage before the last ties theirs to its output,
        so that backward finds them.
        """
        index = int(number)
        micro = self.micro_batches[index]
        last = self.model.is_last
        out = self.model(
            inputs,
            micro.position_ids,
            micro.document_ids,
            micro.noise_seeds,
            shard=self._slices,
            labels=micro.labels if last else None,
            loss_scale=micro.loss_scale,
        )
        self.outcomes[index] = Outcome(None if out.loss is None else out.loss.detach(), _detached(out.router_stats))
        penalty = self._penalty(out.router_stats, micro.share) if self.training else None
        if last:
            # Stacked, since FSDP2 warns of a stage that puts out a view.
            return torch.stack([out.loss if penalty is None else out.loss + penalty])
        hidden: Tensor = out.hidden if penalty is None else _Attach.apply(out.hidden, penalty)
        return hidden

    def _penalty(self, stats: list[RouterStats], share: float) -> Tensor | None:
        balance = self._balance
        if balance is None or not stats:
            return None
        aux = torch.stack([s.aux_loss for s in stats]).sum() / self._moe_layers
        z = torch.stack([s.z_loss for s in stats]).sum() / self._moe_layers
        return share * (balance.aux_coef * aux + balance.z_loss_coef * z)


class _Attach(torch.autograd.Function):
    """x, with a loss hung on: whoever runs backward from x runs it from the loss too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.clone()  # not a view: schedules that split backward detach a stage's output in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss)


def _detached(stats: list[RouterStats]) -> list[RouterStats]:
    return [RouterStats(**{name: value.detach() for name, value in vars(s).items()}) for s in stats]
