"""What a paper is to us, and what running it yields."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

How = Literal["measured", "simulated", "computed"]
Verdict = Literal["holds", "holds in part", "does not hold", "arithmetic does not close", "not reproducible here"]
# Called as progress(done, total, what) whenever a part of a reproduction is finished.
Progress = Callable[[int, int, str], None]


def verdict_of(parts: Iterable[bool]) -> Verdict:
    """Of a claim that several facts (or seeds) must bear out."""
    parts = list(parts)
    return "holds" if all(parts) else "holds in part" if any(parts) else "does not hold"


def majority_of(parts: Iterable[bool]) -> Verdict:
    """Of a trend over seeds: one that half of them or more go against does not hold."""
    parts = list(parts)
    return "holds" if all(parts) else "holds in part" if 2 * sum(parts) > len(parts) else "does not hold"


@dataclass(frozen=True)
class Check:
    """One claim, the published figure, and ours."""

    claim: str
    published: str
    ours: str
    how: How
    verdict: Verdict
    note: str = ""


@dataclass(frozen=True)
class PaperResult:
    """checks: the first is the headline that stands for the paper in the table. figures: the numbers behind them."""

    checks: tuple[Check, ...]
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """A result with when, where and with what it was obtained; kept in results/<slug>.json."""

    slug: str
    recorded: str  # UTC, ISO 8601
    seconds: float  # of wall time
    machine: str
    versions: Mapping[str, str]
    result: PaperResult


@dataclass(frozen=True)
class Paper:
    """A catalog entry. number: the paper's place in the project's list of systems."""

    slug: str
    number: int
    system: str
    title: str
    arxiv: str
    feature: str  # what it is in Moestro: a feature or a command
    run: Callable[[Progress], PaperResult]
