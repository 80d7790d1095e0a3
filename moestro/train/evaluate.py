"""Loss on held-out text, in nats per token and in bits per byte."""

import math
from dataclasses import dataclass

import torch

from moestro.data.batches import ValidationStream
from moestro.model.loss import IGNORE, linear_cross_entropy
from moestro.model.transformer import Transformer


@dataclass(frozen=True)
class EvalResult:
    loss: float  # mean negative log likelihood of a token, in nats
    bits_per_byte: float  # comparable across tokenizers: all bits spent over the UTF-8 bytes of the text
    tokens: int
    bytes: float  # exact over the whole held-out text, in proportion to the tokens over a part of it


@torch.no_grad()
def evaluate(
    model: Transformer, stream: ValidationStream, micro_batch_size: int, max_batches: int | None = None
) -> EvalResult:
    """Evaluate `model` on the held-out text, or on its first `max_batches` batches."""
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    nll, tokens = 0.0, 0
    for batch in stream.batches(micro_batch_size, max_batches):
        tokens += int((batch.labels != IGNORE).sum())
        packed = bool((batch.document_ids != 0).any())
        batch = batch.to(device)
        out = model(batch.input_ids, batch.position_ids, batch.document_ids if packed else None)
        nll += float(linear_cross_entropy(out.hidden, model.head_weight, batch.labels))
    model.train(was_training)
    seen_bytes = stream.bytes * tokens / stream.predictions
    return EvalResult(nll / tokens, nll / math.log(2) / seen_bytes, tokens, seen_bytes)
