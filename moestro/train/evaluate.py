"""Loss on held-out text, in nats per token and in bits per byte."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import torch

from moestro.data.batches import IGNORE, Batch, ValidationStream
from moestro.parallel.comm import all_reduce
from moestro.train.engine import Engine


@dataclass(frozen=True)
class EvalResult:
    loss: float  # mean negative log likelihood of a token, in nats
    bits_per_byte: float  # comparable across tokenizers: all bits spent over the UTF-8 bytes of the text
    tokens: int
    bytes: float  # exact over the whole held-out text, in proportion to the tokens over a part of it


@torch.no_grad()
def evaluate(
    engine: Engine, stream: ValidationStream, micro_batch_size: int, max_batches: int | None = None
) -> EvalResult:
    """Evaluate on the held-out text, or on its first `max_batches` batches; every rank gets the same result."""
    layout, place = engine.mesh.layout, engine.mesh.place
    was_training = engine.stages[0].training
    engine.train(False)
    at_once = layout.micro_batches if engine.pipeline is not None else 1
    nll, tokens = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64)
    for batches in _rounds(stream.batches(micro_batch_size, max_batches), layout.batch_ranks * at_once):
        mine = batches[place.batch * at_once : (place.batch + 1) * at_once]
        tokens += sum(int((batch.labels != IGNORE).sum()) for batch in mine)
        if engine.pipeline is not None:
            mine = [_full(batch, layout.micro_batch_size) for batch in mine]
        engine.run(engine.micro_batches(mine, [0.0] * at_once, 1.0), backward=False)
        for stage in engine.stages:
            nll += sum(outcome.nll.double().cpu() for outcome in stage.outcomes.values() if outcome.nll is not None)
    engine.train(was_training)
    total = float(all_reduce(nll, engine.mesh.world))
    count = int(all_reduce(tokens, engine.mesh.world)) // (layout.pp * layout.sequence_ranks)
    seen_bytes = stream.bytes * count / stream.predictions
    return EvalResult(total / count, total / math.log(2) / seen_bytes, count, seen_bytes)


def _rounds(batches: Iterator[Batch], size: int) -> Iterator[list[Batch]]:
    """Lists of `size` batches. Experts and stages need all ranks at work, so the last list is filled up."""
    while found := list(islice(batches, size)):
        blank = replace(found[-1], labels=torch.full_like(found[-1].labels, IGNORE))
        yield found + [blank] * (size - len(found))


def _full(batch: Batch, rows: int) -> Batch:
    """With `rows` sequences, as a pipeline's buffers expect; those added predict nothing."""
    missing = rows - len(batch.labels)
    if missing == 0:
        return batch
    padded = {}
    for name, value in vars(batch).items():
        if name != "media":
            padded[name] = torch.cat([value, value[:1].expand(missing, *value.shape[1:])])
    padded["labels"][-missing:] = IGNORE
    padded["input_ids"][-missing:] = padded["input_ids"][-missing:].clamp_min(0)  # without the first one's media
    return Batch(**padded, media=batch.media)
