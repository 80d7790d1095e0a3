"""Generation: the text of a plain loop over whole forwards, streamed in pieces that never split a character."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from train.helpers import WORDS, model_config

from moestro.data.tokenizer import Tokenizer
from moestro.errors import MoestroError
from moestro.model.attention.cache import LayerCache
from moestro.model.transformer import Transformer
from moestro.serve import generate as generate_module
from moestro.serve.generate import generate, sample

PROMPT = "peace of the année"


def make(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Transformer:
    model = Transformer(model_config(**{"init_scale": 4.0, **changes}), dtype)
    model.init_weights(seed)
    return model.eval()


@pytest.fixture(scope="module")
def model() -> Transformer:
    return make()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.byte()


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return Tokenizer.train_bpe([" ".join(WORDS) + " ünïcode £5 " * 3] * 20, 270)


@torch.no_grad()
def naive(model: Transformer, tokenizer: Tokenizer, prompt: str, new: int) -> list[int]:
    """Greedy continuation by whole forwards, without a cache."""
    ids = [tokenizer.eot_id, *tokenizer.encode(prompt).tolist()]
    written: list[int] = []
    while len(written) < new and len(ids) + len(written) < model.config.max_seq_len:
        hidden = model(torch.tensor([ids + written])).hidden[0, -1]
        token = int(model.logits(hidden).argmax())
        if token == tokenizer.eot_id:
            break
        written.append(token)
    return written


def scripted(tokens: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler replaced by a list of tokens, so that a test knows what is written."""
    script: Iterator[int] = iter(tokens)
    monkeypatch.setattr(generate_module, "sample", lambda *_: next(script))


def printable(text: str) -> str:
    """Text without a trailing character whose bytes are incomplete."""
    return text.rstrip("\ufffd")


class TestGreedy:
    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"num_kv_heads": 1, "qk_norm": "head"},
            {"moe": {"router": {"score": "sigmoid"}, "balance": {"bias_rule": "sign"}, "num_shared_experts": 1}},
            {"moe": {"router": {"jitter": 0.5}}},
            {"moe": None, "intermediate_size": 24, "tie_embeddings": True},
        ],
        ids=str,
    )
    @pytest.mark.parametrize("seed", [0, 1])
    def test_equals_whole_forwards(self, changes: dict[str, Any], seed: int, bpe: Tokenizer) -> None:
        model = make(seed, vocab_size=bpe.vocab_size, **changes)
        expected = naive(model, bpe, PROMPT, 25)
        pieces = list(generate(model, bpe, PROMPT, 25, temperature=0))
        assert len(expected) > 3
        assert len(set(expected)) > 2
        assert printable("".join(pieces)) == printable(bpe.decode(expected))
        assert all(pieces)  # no empty ones

    def test_a_wrong_cache_would_be_caught(self, bpe: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        model = make(vocab_size=bpe.vocab_size)
        expected = bpe.decode(naive(model, bpe, PROMPT, 25))
        real = LayerCache.append

        def forgetful(cache: LayerCache, **new: torch.Tensor) -> dict[str, torch.Tensor]:
            return {name: entries[..., :-1, :] for name, entries in real(cache, **new).items()}

        monkeypatch.setattr(LayerCache, "append", forgetful)
        with pytest.raises((AssertionError, RuntimeError)):
            assert printable("".join(generate(model, bpe, PROMPT, 25, temperature=0))) == printable(expected)

    def test_tiny_top_p_is_greedy(self, model: Transformer, tokenizer: Tokenizer) -> None:
        greedy = list(generate(model, tokenizer, PROMPT, 20, temperature=0))
        assert list(generate(model, tokenizer, PROMPT, 20, temperature=1.0, top_p=1e-9, seed=3)) == greedy

    @pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-40])
    def test_a_tiny_temperature_is_greedy(self, temperature: float, model: Transformer, tokenizer: Tokenizer) -> None:
        greedy = list(generate(model, tokenizer, PROMPT, 20, temperature=0))
        assert list(generate(model, tokenizer, PROMPT, 20, temperature=temperature)) == greedy

    def test_ignores_the_seed(self, model: Transformer, tokenizer: Tokenizer) -> None:
        texts = {"".join(generate(model, tokenizer, PROMPT, 20, temperature=0, seed=seed)) for seed in range(3)}
        assert len(texts) == 1


class TestSampling:
    def test_the_seed_decides(self, model: Transformer, tokenizer: Tokenizer) -> None:
        def text(seed: int) -> str:
            return "".join(generate(model, tokenizer, PROMPT, 30, temperature=1.5, top_p=1.0, seed=seed))

        state = torch.get_rng_state()
        assert text(1) == text(1)
        assert text(1) != text(2)
        assert torch.equal(torch.get_rng_state(), state)  # its own generator

    def test_frequencies_are_the_probabilities(self) -> None:
        logits = torch.tensor([0.5, 2.0, -1.0, 1.0])
        generator = torch.Generator().manual_seed(0)
        for temperature in (0.7, 1.0, 2.0):
            drawn = torch.tensor([sample(logits, temperature, 1.0, generator) for _ in range(1500)])
            share = torch.bincount(drawn, minlength=4) / 1500
            torch.testing.assert_close(share, (logits / temperature).softmax(-1), rtol=0, atol=0.04)

    @pytest.mark.parametrize(
        ("top_p", "kept"), [(0.4, {1}), (0.5, {1}), (0.75, {1, 3}), (0.85, {0, 1, 3}), (1.0, {0, 1, 2, 3})]
    )
    def test_top_p_keeps_the_smallest_sufficient_set(self, top_p: float, kept: set[int]) -> None:
        logits = torch.tensor([0.15, 0.5, 0.1, 0.25]).log()
        generator = torch.Generator().manual_seed(0)
        assert {sample(logits, 1.0, top_p - 1e-6, generator) for _ in range(300)} == kept

    def test_of_bf16_activations(self, tokenizer: Tokenizer) -> None:
        model = make(dtype=torch.bfloat16)
        pieces = list(generate(model, tokenizer, PROMPT, 10, temperature=0))
        assert pieces == list(generate(model, tokenizer, PROMPT, 10, temperature=0))


class TestStops:
    def test_at_end_of_text(self, model: Transformer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        scripted([*b"ab", tokenizer.eot_id, *b"cd"], monkeypatch)
        assert "".join(generate(model, tokenizer, "x", 10)) == "ab"

    def test_at_once(self, model: Transformer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        scripted([tokenizer.eot_id], monkeypatch)
        assert list(generate(model, tokenizer, "x", 10)) == []

    def test_at_max_new_tokens(self, model: Transformer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        scripted([97] * 100, monkeypatch)
        assert "".join(generate(model, tokenizer, "x", 7)) == "a" * 7

    def test_at_max_seq_len(self, model: Transformer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        scripted([97] * 100, monkeypatch)
        assert "".join(generate(model, tokenizer, "x" * 50, 1000)) == "a" * (64 - 51)

    def test_the_longest_prompt(
        self, model: Transformer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        scripted([97] * 100, monkeypatch)
        assert "".join(generate(model, tokenizer, "x" * 62, 5)) == "a"
        with pytest.raises(MoestroError, match=r"the prompt has 64 tokens and model\.max_seq_len is 64; shorten it"):
            generate(model, tokenizer, "x" * 63, 5)

    def test_an_empty_prompt_starts_a_document(self, bpe: Tokenizer) -> None:
        model = make(vocab_size=bpe.vocab_size)
        expected = bpe.decode(naive(model, bpe, "", 10))
        assert printable("".join(generate(model, bpe, "", 10, temperature=0))) == printable(expected)

    def test_a_prompt_that_spells_end_of_text_is_text(self, bpe: Tokenizer) -> None:
        model = make(vocab_size=bpe.vocab_size)
        prompt = "a<|endoftext|>b"
        assert bpe.eot_id not in bpe.encode(prompt)
        expected = bpe.decode(naive(model, bpe, prompt, 5))
        assert printable("".join(generate(model, bpe, prompt, 5, temperature=0))) == printable(expected)


class TestCharacters:
    @pytest.mark.parametrize("text", ["é", "aé", "日本語", "🙂 ok 🙂", "naïve café — “quoted”", "e\u0301"])
    def test_are_never_split(
        self, text: str, model: Transformer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        scripted([*text.encode(), tokenizer.eot_id], monkeypatch)
        pieces = list(generate(model, tokenizer, "x", 60))
        assert pieces == list(text)

    def test_bytes_that_are_no_character_do_not_stop_the_stream(
        self, model: Transformer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        written = [97, 0xFF, 98, 0xC3, 0x28, 99]
        scripted([*written, tokenizer.eot_id], monkeypatch)
        assert "".join(generate(model, tokenizer, "x", 60)) == tokenizer.decode(written)

    def test_a_cut_character_at_the_end(
        self, model: Transformer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        scripted([97, 0xE6, 0x97], monkeypatch)
        assert printable("".join(generate(model, tokenizer, "x", 3))) == "a"

    def test_tokens_of_several_bytes(self, bpe: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        model = make(vocab_size=bpe.vocab_size)
        text = "congress of the ünïted £ states"
        ids = bpe.encode(text).tolist()
        assert len(ids) < len(text.encode())
        scripted([*ids, bpe.eot_id], monkeypatch)
        pieces = list(generate(model, bpe, "x", 60))
        assert "".join(pieces) == text
        assert "\ufffd" not in "".join(pieces)


class TestBadSettings:
    @pytest.mark.parametrize(
        "settings",
        [
            {"temperature": -0.1},
            {"temperature": math.nan},
            {"top_p": 0.0},
            {"top_p": 1.1},
            {"top_p": math.nan},
            {"max_new_tokens": 0},
            {"max_new_tokens": -5},
        ],
        ids=str,
    )
    def test_are_refused_at_once(self, settings: dict[str, Any], model: Transformer, tokenizer: Tokenizer) -> None:
        with pytest.raises(MoestroError, match="temperature must be >= 0"):
            generate(model, tokenizer, PROMPT, **settings)

    @pytest.mark.parametrize("seed", [2**64, -(2**64)])
    def test_a_seed_beyond_64_bits(self, seed: int, model: Transformer, tokenizer: Tokenizer) -> None:
        with pytest.raises(MoestroError, match="seed"):
            list(generate(model, tokenizer, PROMPT, 3, seed=seed))

    def test_a_prompt_that_is_not_unicode(self, model: Transformer, tokenizer: Tokenizer) -> None:
        """What a shell hands over when the bytes typed are not UTF-8."""
        prompt = b"caf\xe9".decode("utf-8", "surrogateescape")
        with pytest.raises(MoestroError, match=r"prompt|UTF-8"):
            list(generate(model, tokenizer, prompt, 3))


def test_leaves_the_model_as_it_was(model: Transformer, tokenizer: Tokenizer) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    list(generate(model, tokenizer, PROMPT, 5))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    model.logits(model(torch.tensor([[1, 2]])).hidden).sum().backward()  # still trainable
    model.zero_grad()


def test_two_streams_in_turns(model: Transformer, tokenizer: Tokenizer) -> None:
    alone = list(generate(model, tokenizer, PROMPT, 12, seed=1))
    first, second = (generate(model, tokenizer, PROMPT, 12, seed=1) for _ in range(2))
    taken: tuple[list[str], list[str]] = ([], [])
    for _ in range(12):
        for stream, out in zip((first, second), taken, strict=True):
            if (piece := next(stream, None)) is not None:
                out.append(piece)
    assert taken == (alone, alone)
