"""A yardstick for bits per byte: what a general-purpose compressor makes of the same held-out text."""

import lzma

from moestro.data.prepare import PreparedData
from moestro.data.shards import Shard
from moestro.data.tokenizer import Tokenizer

MAX_BYTES = 4_000_000  # a few seconds of xz; a longer held-out text is judged by its beginning


def xz_bits_per_byte(prepared: PreparedData) -> float:
    """Bits per byte of `xz -9` on the held-out text, all documents in one stream."""
    text = bytearray()
    for shard in prepared.validation:
        for index in range(shard.num_documents):
            if len(text) < MAX_BYTES:
                text += _bytes(shard, index, prepared.tokenizer)
    return 8 * len(lzma.compress(bytes(text), preset=9)) / len(text)


def _bytes(shard: Shard, index: int, tokenizer: Tokenizer) -> bytes:
    """A document as `Shard.bytes` counts it: its text without media, or ready-made ids as they are stored."""
    tokens = shard.document(index)
    if "highest_id" in shard.meta:
        return tokens.tobytes()
    if shard.media is not None:
        tokens = tokens[tokens < shard.media.first_id]
    return tokenizer.decode(tokens).encode()
