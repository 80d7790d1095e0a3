import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models

from moestro.data import tokenizer as tokenizer_module
from moestro.data.tokenizer import Tokenizer
from moestro.errors import MoestroError

CORPUS = [
    "The people of the United States, in order to form a more perfect Union. " * 20,
    "naïve café 你好\r\n\tx" * 20,
]
# Runs of white space that become single tokens, so that a cut inside one would show.
CORPUS.append("if a:\n\n    b   \n\t\tc\r\n\r\n" * 40)
BYTE = Tokenizer.byte()
BPE = Tokenizer.train_bpe(CORPUS, 300)
SPECIAL = "a <|endoftext|> b"
any_text = st.text(max_size=200)
prose = st.text(alphabet=" \n\t\r\x1c\x85\u3000ab'sé1!", max_size=400)


@given(any_text)
@example(SPECIAL)
@example("nul\x00 and \r\n and 🧪")
def test_round_trip(text: str) -> None:
    assert BYTE.decode(BYTE.encode(text)) == text
    assert BPE.decode(BPE.encode(text)) == text
    assert BYTE.encode(text).tolist() == list(text.encode())


@pytest.mark.parametrize("tokenizer", [BYTE, BPE])
def test_text_never_becomes_the_special_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(SPECIAL)
    assert tokenizer.eot_id not in ids
    assert tokenizer.decode([*ids, tokenizer.eot_id]) == SPECIAL + "<|endoftext|>"


def test_sizes_and_ids() -> None:
    assert (BYTE.vocab_size, BYTE.eot_id) == (257, 256)
    assert (BPE.vocab_size, BPE.eot_id) == (300, 0)
    assert any(len(BPE.decode([i])) > 2 and BPE.decode([i]).isspace() for i in range(1, 300))
    assert BPE.encode("").tolist() == []
    assert len(BPE.encode(CORPUS[0])) < 0.6 * len(CORPUS[0])


@settings(deadline=None)
@given(prose, st.integers(1, 8))
@example(CORPUS[2], 1)
@example(CORPUS[2], 3)
@example("word" + " " * 12 + "word", 5)
def test_cutting_long_texts_does_not_change_the_tokens(text: str, piece_chars: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "_PIECE_CHARS", 10**9)
        whole = BPE.encode(text).tolist()
        patch.setattr(tokenizer_module, "_PIECE_CHARS", piece_chars)
        patch.setattr(tokenizer_module, "_PIECES_PER_CALL", 3)
        assert [ids.tolist() for ids in BPE.encode_batch([text, "x", text])] == [whole, BPE.encode("x").tolist(), whole]


def test_long_text_is_cut() -> None:
    assert len(list(tokenizer_module._pieces("word " * 10_000))) > 10


@pytest.mark.parametrize("tokenizer", [BYTE, BPE])
def test_save_and_load(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    loaded = Tokenizer.load(path)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.encode(CORPUS[1]).tolist() == tokenizer.encode(CORPUS[1]).tolist()
    assert tokenizers.Tokenizer.from_file(str(path)).encode("abc").ids == tokenizer.encode("abc").tolist()
    assert [p.name for p in tmp_path.iterdir()] == ["tokenizer.json"]


def test_training_is_deterministic_and_exact() -> None:
    assert Tokenizer.train_bpe(CORPUS, 300).fingerprint == BPE.fingerprint
    with pytest.raises(MoestroError, match=r"too small for a vocabulary of 5000.*vocab_size=\d+"):
        Tokenizer.train_bpe(["ab ab"], 5000)


def foreign(end: str | None, special: bool) -> tokenizers.Tokenizer:
    vocab = {character: i for i, character in enumerate("abcdefghij</s>")}
    vocab = {character: i for i, character in enumerate(vocab)}
    if end is not None:
        vocab[end] = 100  # a gap in the ids
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    if end is not None:
        inner.add_tokens([AddedToken(end, special=special, normalized=False)])
    return inner


@pytest.mark.parametrize("special", [True, False])
def test_foreign_file_without_truncation_padding_or_spelled_specials(special: bool, tmp_path: Path) -> None:
    inner = foreign("</s>", special)
    inner.enable_truncation(3)
    inner.enable_padding(length=64)
    inner.save(str(tmp_path / "t.json"))
    loaded = Tokenizer.load(tmp_path / "t.json")
    assert (loaded.eot_id, loaded.vocab_size) == (100, 101)
    assert loaded.encode("ab</s>ab").tolist() == [0, 1, 10, 11, 12, 13, 0, 1]


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(MoestroError, match=r"cannot read tokenizer .*none\.json"):
        Tokenizer.load(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(MoestroError, match=r"bad\.json is not a tokenizer\.json"):
        Tokenizer.load(tmp_path / "bad.json")
    foreign(None, special=True).save(str(tmp_path / "noend.json"))
    with pytest.raises(MoestroError, match=r"noend\.json has no end-of-text token.*</s>"):
        Tokenizer.load(tmp_path / "noend.json")


def test_byte_is_a_plain_tokenizer_json(tmp_path: Path) -> None:
    BYTE.save(tmp_path / "t.json")
    vocab = json.loads((tmp_path / "t.json").read_text())["model"]["vocab"]
    assert len(vocab) == 257
    # The shortcut for bytes and the library agree.
    text = bytes(range(128)).decode() + "é你"
    assert BYTE._inner.encode(text).ids == BYTE.encode(text).tolist()
    assert BYTE.encode(text).dtype == np.uint32
