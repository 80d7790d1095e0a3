"""`moestro predict --serving` and `--disaggregate`: what is printed, for people and machines, and mistakes."""

import json
from pathlib import Path

import pytest

from moestro.predict import cache

from .helpers import moestro

STEP = ("predict", "olmoe-1b-7b", "--hardware", "h100-8", "plan.ep=8")


@pytest.fixture(autouse=True)
def no_public_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.FOLDER, str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_known", {})
    monkeypatch.setattr(cache, "_as_read", {})
    monkeypatch.setattr(cache, "_shipped", lambda device_id: ())


def test_both_are_printed_below_the_step() -> None:
    done = moestro(*STEP, "--serving", "4:4096:512", "--disaggregate", "auto")
    assert done.code == 0, done.err
    out = done.out.replace("\u00a0", " ").replace("\u202f", " ")
    for text in (
        "serving 4 requests/s, prompts of 4 096 tokens, answers of 512: 8 replicas of 1 device\n",
        "first token", "next token", "experts of a layer touched", "at most", "a million tokens of answers", "room for",
        "4 of 32 experts of 2 048", "16 of 128 experts of 512", "decoding step, at the least",
        "attention on ", "apart (AF-Pipe)", "forward beside backward (DualPipe)",
    ):  # fmt: skip
        assert text in out, text
    assert "serving" not in moestro(*STEP).out


def test_json() -> None:
    done = moestro(*STEP, "--serving", "4:4096:512:2", "--disaggregate", "3:5", "--usd-per-hour", "2", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    serving, apart = found["serving"], found["disaggregate"]
    assert (serving["tp"], serving["replicas"], serving["demand"]["prompt"]) == (2, 4, 4096)
    assert serving["request_s"] > serving["load"]["first_token_s"] > serving["prefill_s"] > 0
    assert serving["usd_per_million"] == pytest.approx(8 * 2 / 3600 / (4 * 512) * 1e6)
    assert [width["top_k"] for width in serving["widths"]] == [4, 8, 16]
    assert (apart["attention"], apart["experts"]) == (3, 5)
    assert apart["seconds"]["apart (AF-Pipe)"] > 0
    parts = found["time"]["by_part"]
    assert apart["work"]["experts_s"] == pytest.approx(parts["experts"] + parts["dispatch"])


def test_more_than_it_can_serve() -> None:
    done = moestro(*STEP, "--serving", "1e6:4096:512")
    assert done.code == 0
    assert "more than it can serve: at most" in done.out
    assert "first token" not in done.out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--serving", "4:4096"), "as in 4:4096:512"),
        (("--serving", "4:4096:512:3"), "3 devices do not share out 8"),
        (("--disaggregate", "5:5"), "10 does not divide the plan's 8 devices"),
        (("--disaggregate", "5"), "as M:N, or auto"),
        (("plan.ep=1", "--disaggregate", "auto"), "plan.ep"),
    ],
)
def test_mistakes(options: tuple[str, ...], says: str) -> None:
    done = moestro(*STEP, *options)
    assert done.code == 2
    assert says in done.err
    assert done.out == ""
