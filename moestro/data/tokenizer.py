"""Text to token ids and back, over Hugging Face `tokenizers`."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from moestro.errors import MoestroError

END_OF_TEXT = "<|endoftext|>"
# Names under which published tokenizers keep their end-of-text token, tried in this order.
END_OF_TEXT_NAMES = (
    END_OF_TEXT,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "[SEP]",
    "<｜end▁of▁sentence｜>",
)

# Measured on 3 MB of prose: pieces of 1-4 thousand characters encode 1.4 times faster than whole 50 KB documents.
_PIECE_CHARS = 4000
# Pieces in one call: bounds the memory of the library's per-token records when a document has gigabytes.
_PIECES_PER_CALL = 1024
# GPT-2's pre-tokenizer always ends a word before a single space between two other characters, so cutting there
# cannot change the tokens. (Python's \S is a subset of the library's, so no cut falls inside its white space.)
_SAFE_CUT = re.compile(r"(?<=\S)(?= \S)")

# Threads are wanted, but a forked child must not use the parent's thread pool; saying so in both places also silences
# the library's warning about forks.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: os.environ.__setitem__("TOKENIZERS_PARALLELISM", "false"))


class Tokenizer:
    """A tokenizer.json with an end-of-text token. Encoding never adds or recognises special tokens."""

    def __init__(self, json_text: str, origin: str = "tokenizer.json") -> None:
        """Build from the text of a tokenizer.json; `origin` names it in errors.

        Raises:
            MoestroError: not a tokenizer.json, or no end-of-text token under any of the usual names.
        """
        try:
            self._inner = tokenizers.Tokenizer.from_str(json_text)
        except Exception as error:  # the library raises bare Exception
            raise MoestroError(
                f"{origin} is not a tokenizer.json that this tokenizers version reads: {error}"
            ) from error
        # A published file may carry its model's truncation and padding, which would silently cut documents.
        self._inner.no_truncation()
        self._inner.no_padding()
        # Text that spells a special token stays text; the property is not part of the JSON.
        self._inner.encode_special_tokens = True
        self._json_text = json_text
        vocab = self._inner.get_vocab(with_added_tokens=True)
        name = next((n for n in END_OF_TEXT_NAMES if n in vocab), None)
        if name is None:
            tried = ", ".join(END_OF_TEXT_NAMES)
            raise MoestroError(f"{origin} has no end-of-text token; add one of these as a special token: {tried}")
        # Some files list it as an ordinary added token, which text could then spell.
        self._inner.add_special_tokens([name])
        self.eot_name, self.eot_id = name, vocab[name]
        # Not the number of tokens: ids may have gaps, and an embedding needs a row for the highest.
        self.vocab_size: int = max(vocab.values()) + 1
        self.fingerprint: str = hashlib.sha256(json_text.encode()).hexdigest()
        spec = json.loads(json_text)
        self._is_byte = vocab == _byte_vocab() and spec.get("normalizer") is None
        self._may_cut = _is_gpt2_style(spec)

    @classmethod
    def byte(cls) -> Self:
        """One token per UTF-8 byte: ids 0..255 are the bytes, 256 is end of text."""
        inner = tokenizers.Tokenizer(models.BPE(vocab=_byte_vocab(), merges=[]))
        inner.pre_tokenizer = cast(Any, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        inner.decoder = cast(Any, decoders.ByteLevel())
        inner.add_special_tokens([END_OF_TEXT])
        return cls(inner.to_str(pretty=True))

    @classmethod
    def train_bpe(cls, texts: Iterable[str], vocab_size: int) -> Self:
        """Byte-level BPE with GPT-2's pre-tokenizer, of exactly `vocab_size` tokens; the same texts give the same one.

        Raises:
            MoestroError: the texts are too small for that many tokens.
        """
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = cast(Any, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
        inner.decoder = cast(Any, decoders.ByteLevel())
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        inner.train_from_iterator((piece for text in texts for piece in _pieces(text)), trainer)
        if (found := inner.get_vocab_size()) != vocab_size:
            raise MoestroError(
                f"the training text is too small for a vocabulary of {vocab_size}: it yields {found} tokens. "
                f'Set data.tokenizer.vocab_size={found} or data.tokenizer.kind="byte", or add text'
            )
        return cls(inner.to_str(pretty=True))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise MoestroError(f"cannot read tokenizer {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise MoestroError(f"{path} is not a tokenizer.json: not valid UTF-8") from error
        return cls(text, origin=str(path))

    def save(self, path: str | Path) -> None:
        """Write the tokenizer.json, byte for byte what `fingerprint` was taken from."""
        temporary = Path(f"{path}.{os.getpid()}.tmp")
        temporary.write_text(self._json_text, encoding="utf-8")
        temporary.replace(path)

    def encode(self, text: str) -> NDArray[np.uint32]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Token ids of each text, without any special token: arrays of shape [tokens]."""
        if self._is_byte:
            return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32) for text in texts]
        pieces = [list(_pieces(text)) if self._may_cut else [text] for text in texts]
        flat = [piece for group in pieces for piece in group]
        ids: list[NDArray[np.uint32]] = []
        for first in range(0, len(flat), _PIECES_PER_CALL):
            encoded = self._inner.encode_batch_fast(flat[first : first + _PIECES_PER_CALL], add_special_tokens=False)
            ids.extend(np.array(item.ids, dtype=np.uint32) for item in encoded)
        ends = np.cumsum([len(group) for group in pieces]).tolist()
        return [np.concatenate(ids[end - len(group) : end]) for end, group in zip(ends, pieces, strict=True)]

    def decode(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> str:
        """Text of the ids; special tokens are shown by name, and incomplete UTF-8 as U+FFFD."""
        return self._inner.decode(np.asarray(ids, dtype=np.int64).tolist(), skip_special_tokens=False)


def _pieces(text: str) -> Iterator[str]:
    """Cut a text into pieces of about _PIECE_CHARS whose GPT-2 pre-tokens are those of the whole."""
    first = 0
    while len(text) - first > _PIECE_CHARS:
        cut = _SAFE_CUT.search(text, first + _PIECE_CHARS)
        if cut is None:
            break
        yield text[first : cut.start()]
        first = cut.start()
    yield text[first:]


def _is_gpt2_style(spec: dict[str, Any]) -> bool:
    """Whether the only step before the model is GPT-2's pre-tokenizer, which is what makes `_pieces` exact."""
    before = spec.get("pre_tokenizer") or {}
    wanted = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    plain_tokens = all(token["special"] for token in spec.get("added_tokens") or [])
    return spec.get("normalizer") is None and plain_tokens and wanted.items() <= before.items()


def _byte_vocab() -> dict[str, int]:
    """GPT-2's printable character for each byte (Radford et al. 2019, encoder.py), numbered by the byte itself."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return {characters[byte]: byte for byte in range(256)} | {END_OF_TEXT: 256}
