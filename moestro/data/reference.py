"""A yardstick for bits per byte: what a general-purpose compressor makes of the same held-out text."""

import lzma

from moestro.data.prepare import PreparedData

MAX_BYTES = 4_000_000  # a few seconds of xz; a longer held-out text is judged by its beginning


def xz_bits_per_byte(prepared: PreparedData) -> float:
    """Bits per byte of `xz -9` on the held-out text, all documents in one stream."""
    text = bytearray()
    for shard in prepared.validation:
        for index in range(shard.num_documents):
            if len(text) < MAX_BYTES:
                text += prepared.tokenizer.decode(shard.document(index)).encode()
    return 8 * len(lzma.compress(bytes(text), preset=9)) / len(text)
