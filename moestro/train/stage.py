"""A pipeline stage at work: micro-batches by number in, hidden states or the loss out, statistics kept for the step.

A run without a pipeline has one stage, which is first and last.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moestro.data.batches import IGNORE, Batch
from moestro.model.attention.head_experts import HeadStats
from moestro.model.media import Media
from moestro.model.moe.router import RouterStats
from moestro.model.shards import SequenceShard
from moestro.model.transformer import ModelOutput, Transformer
from moestro.parallel.context import SequenceSlices


@dataclass(frozen=True)
class MicroBatch:
    """What one forward needs, on the device; of cut sequences only the positions here."""

    input_ids: Tensor  # [batch, positions here]
    labels: Tensor  # [batch, positions here]
    position_ids: Tensor  # [batch, positions that attention has here]
    document_ids: Tensor | None  # [batch, seq]; None when every row is one document
    noise_seeds: Tensor  # [batch]
    ahead: Tensor | None  # [depth, batch, positions here] labels of multi-token prediction
    share: float  # its valid tokens over those of the global batch
    loss_scale: float  # 1 over the predicted tokens of the global batch
    media: tuple[Media, ...] = ()  # for the first stage


def micro_batch(
    batch: Batch,
    slices: SequenceSlices | None,
    device: torch.device,
    seed: int,
    share: float,
    loss_scale: float,
    depth: int = 0,
) -> MicroBatch:
    """depth: of multi-token prediction."""
    packed = bool((batch.document_ids != 0).any())  # several documents in a row, or padding
    noise_seeds = batch.sample_ids + ((seed % 2**31) << 32)  # fits an int64
    batch = batch.to(device)
    inputs, labels, positions = batch.input_ids, batch.labels, batch.position_ids
    ahead = labels_ahead(labels, batch.document_ids, depth) if depth else None
    if slices is not None:
        inputs, labels, positions = slices.take(inputs), slices.take(labels), slices.take_context(positions)
        ahead = None if ahead is None else torch.stack([slices.take(part) for part in ahead])
    documents = batch.document_ids if packed else None
    return MicroBatch(
        inputs, labels, positions, documents, noise_seeds.to(device), ahead, share, loss_scale, batch.media
    )


def labels_ahead(labels: Tensor, document_ids: Tensor, depth: int) -> Tensor:
    """[depth, batch, seq]: at position i the labels of i + 1, i + 2 … in the same document, IGNORE where one of the
    labels from i up to there is missing."""
    ahead = [labels]
    for step in range(1, depth + 1):
        target = torch.full_like(labels, IGNORE)
        target[:, :-step] = labels[:, step:]
        inside = torch.zeros_like(target, dtype=torch.bool)
        inside[:, :-step] = document_ids[:, step:] == document_ids[:, :-step]
        ahead.append(torch.where(inside & (ahead[-1] != IGNORE), target, IGNORE))
    return torch.stack(ahead[1:])


@dataclass(frozen=True)
class Outcome:
    """Of one micro-batch in one stage, without gradients."""

    nll: Tensor | None  # loss_scale · Σ nll, in the last stage
    mtp_nll: Tensor | None  # the same of multi-token prediction, the mean of its depths
    router_stats: list[RouterStats]
    head_stats: list[HeadStats]  # of the blocks with attention experts, in their order
    depth_loss: Tensor | None  # see `ModelOutput`


class Stage(nn.Module):
    """Calls its layers with the micro-batch of a number. Set `micro_batches` first; read `outcomes` after."""

    def __init__(self, model: Transformer, slices: SequenceShard | None) -> None:
        super().__init__()
        self.model, self.slices = model, slices
        self.micro_batches: list[MicroBatch] = []
        self.outcomes: dict[int, Outcome] = {}

    def forward(self, inputs: Tensor, number: Tensor) -> Tensor:
        """inputs: token ids or hidden states; number: [1]. Returns hidden states, or in the last stage the loss [1].

        In training the loss includes this stage's other losses; a stage before the last ties theirs to its output,
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
            shard=self.slices,
            labels=micro.labels if last else None,
            loss_scale=micro.loss_scale,
            token_ids=micro.input_ids,
            ahead=micro.ahead if last and self.training else None,
            media=micro.media if self.model.is_first else (),
        )
        self.outcomes[index] = Outcome(
            _detached(out.loss),
            _detached(out.mtp_loss),
            _detached_stats(out.router_stats),
            [HeadStats(s.mi_loss.detach(), s.shares) for s in out.head_stats],
            _detached(out.depth_loss),
        )
        penalty = self._penalty(out, micro.share) if self.training else None
        if last:
            # Stacked, since FSDP2 warns of a stage that puts out a view.
            return torch.stack([out.loss if penalty is None else out.loss + penalty])
        hidden: Tensor = out.hidden if penalty is None else _Attach.apply(out.hidden, penalty)
        return hidden

    def _penalty(self, out: ModelOutput, share: float) -> Tensor | None:
        """All losses but the language model's. Those of balance are means over all MoE blocks of the model (that of
        attention experts over all its blocks), of which some are here."""
        config, stats, penalty = self.model.config, out.router_stats, None
        if config.moe is not None and stats:
            balance, layers = config.moe.balance, sum(config.moe_blocks)
            aux = torch.stack([s.aux_loss for s in stats]).sum() / layers
            z = torch.stack([s.z_loss for s in stats]).sum() / layers
            other = torch.stack([s.other_loss for s in stats]).sum() / layers
            penalty = share * (balance.aux_coef * aux + balance.z_loss_coef * z + other)
        if config.attention_experts is not None and out.head_stats:
            mutual = torch.stack([s.mi_loss for s in out.head_stats]).sum() / config.num_blocks
            mutual = share * config.attention_experts.mi_coef * mutual
            penalty = mutual if penalty is None else penalty + mutual
        if config.mtp is not None and out.mtp_loss is not None:
            ahead = config.mtp.loss_coef * out.mtp_loss
            penalty = ahead if penalty is None else penalty + ahead
        if out.depth_loss is not None:
            depth = share * out.depth_loss
            penalty = depth if penalty is None else penalty + depth
        return penalty


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


def _detached(loss: Tensor | None) -> Tensor | None:
    return None if loss is None else loss.detach()


def _detached_stats(stats: list[RouterStats]) -> list[RouterStats]:
    return [RouterStats(**{name: value.detach() for name, value in vars(s).items()}) for s in stats]
