"""Answer-preserving trimming (ZAYA1-8B, arXiv 2605.05365): records longer than a sequence lose reasoning, not answers.

For a budget of tokens a record
  1. stays as it is if it fits; else
  2. loses the tail of its last reasoning, if that is enough; else
  3. loses the reasoning of all turns before, and 2 is tried again; else
  4. loses all reasoning, with the tags around it; and if prompts and answers alone are too long, it is left out.
"""

import shutil
import uuid
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moestro.config import DataConfig
from moestro.data.prepare import PreparedData
from moestro.data.shards import Shard, ShardWriter
from moestro.data.tokenizer import Tokenizer
from moestro.data.turns import SEGMENTS
from moestro.errors import MoestroError

_OPEN, _REASONING, _CLOSE = (SEGMENTS.index(name) for name in ("open", "reasoning", "close"))
_THOUGHT = [_OPEN, _REASONING, _CLOSE]


def trim(lengths: NDArray[np.int64], budget: int) -> NDArray[np.int64] | None:
    """How many tokens to keep of each segment of a record, each from its start; None: leave the record out.

    Args:
        lengths: [turns, segments] tokens of the segments (see `turns.SEGMENTS`).
        budget: the most tokens that the result may have together.
    """
    if lengths.sum() <= budget:
        return lengths
    reasoned = np.flatnonzero(lengths[:, _REASONING])
    if len(reasoned):
        last, kept = reasoned[-1], lengths.copy()
        for _ in ("with the reasoning of earlier turns", "without"):
            over = kept.sum() - budget
            if over < lengths[last, _REASONING]:
                kept[last, _REASONING] -= max(0, over)
                return kept
            kept[:last, _THOUGHT] = 0
    bare = lengths.copy()
    bare[:, _THOUGHT] = 0
    return bare if bare.sum() <= budget else None


@dataclass(frozen=True)
class Trimmed:
    """What trimming did to a source's training records."""

    whole: int
    cut: int
    dropped: int

    def describe(self, source: str, seq_len: int) -> str:
        return (
            f"{source}, trimmed to sequences of {seq_len}: {self.whole} records whole, {self.cut} with less reasoning, "
            f"{self.dropped} left out"
        )


def trim_sources(prepared: PreparedData, config: DataConfig) -> tuple[PreparedData, list[str]]:
    """The data with the training shards that `config` wants trimmed to its seq_len, and a note on each.

    Trimmed shards are kept beside the whole ones. Held-out text stays as it is, so that figures on it compare.

    Raises:
        MoestroError: no record of a source fits.
    """
    shards, notes = list(prepared.train), []
    for j, source in enumerate(config.sources):
        if not source.trim or not source.weight:
            continue
        shards[j], counts = trim_shard(prepared.train[j], config.seq_len - 1, prepared.tokenizer)
        if counts.whole + counts.cut == 0:
            raise MoestroError(
                f"source '{source.path}' has no record whose prompts and answers fit into sequences of "
                f"{config.seq_len}; use longer ones or leave the source out"
            )
        notes.append(counts.describe(source.path, config.seq_len))
    return replace(prepared, train=shards), notes


def trim_shard(shard: Shard, budget: int, tokenizer: Tokenizer) -> tuple[Shard, Trimmed]:
    """The shard with every document trimmed to `budget` tokens (its end of text not counted), written once.

    Documents keep their numbers; one that is left out has no tokens, not even an end of text.
    """
    folder = shard.folder.with_name(f"{shard.folder.name}-{budget}")
    if not folder.exists():
        temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp")
        try:
            _write(shard, budget, tokenizer, temporary)
            temporary.rename(folder)
        except OSError as error:
            if not folder.exists():  # else another process came first, with the same result
                raise MoestroError(
                    f"cannot write trimmed data to {folder}: {error}. Set data.cache_dir elsewhere"
                ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    trimmed = Shard.open(folder)
    return trimmed, Trimmed(**trimmed.meta["trimmed"])


def _write(shard: Shard, budget: int, tokenizer: Tokenizer, folder: Path) -> None:
    assert shard.turns is not None
    counts = {"whole": 0, "cut": 0, "dropped": 0}
    meta = {key: shard.meta[key] for key in ("source", "notice", "tokenizer")} | {"trimmed": counts}
    border = np.searchsorted(shard.turns[:, 0], np.arange(shard.num_documents + 1))
    with ShardWriter(folder, tokenizer.vocab_size, tokenizer.eot_id, meta) as writer:
        for document in range(shard.num_documents):
            lengths = shard.turns[border[document] : border[document + 1], 1:]
            kept = trim(lengths, budget)
            tokens = shard.document(document)
            if kept is None:
                counts["dropped"] += 1
                writer.leave_out()
            elif kept is lengths:
                counts["whole"] += 1
                writer.add(tokens, int(shard.bytes[document]))
            else:
                counts["cut"] += 1
                tokens = tokens[_kept_places(lengths, kept)]
                writer.add(tokens, len(tokenizer.decode(tokens).encode()))


def _kept_places(lengths: NDArray[np.int64], kept: NDArray[np.int64]) -> NDArray[np.int64]:
    """Places in the document of the tokens that stay."""
    length = lengths.ravel()
    end = np.cumsum(length)
    inside = np.arange(length.sum()) - np.repeat(end - length, length)
    return np.flatnonzero(inside < np.repeat(kept.ravel(), length))
