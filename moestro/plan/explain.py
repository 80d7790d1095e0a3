"""Two steps side by side: where their time differs, and whether by more work, by a lower rate, or by what is hidden.

The rows add up to the difference, and change their sign when the sides change places.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from moestro.errors import MoestroError
from moestro.plan.explain_side import LEVELS, SMALLEST, Level, Part, Side
from moestro.predict.comparability import Difference, compare

PER = 1_000_000  # tokens, where steps of unlike size are compared
UNEVEN = 0.1  # by which two runs' machines differ in speed before it is told
COMMON = ("model", "batch", "plan")  # settings that a prediction and a run both have


@dataclass(frozen=True)
class Row:
    """Seconds of a part on both sides, and the difference by cause: more work, a lower rate, less of it hidden. The
    causes add up to the difference; None where the work is not known. noise_s: below it the difference may be chance.
    """

    name: str
    first: Part
    second: Part
    noise_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.second.seconds - self.first.seconds

    @property
    def hidden(self) -> tuple[float, float] | None:
        """Of what takes time beside computation, the share that computation hides."""
        shares = [1 - part.seconds / part.busy_s for part in (self.first, self.second) if part.busy_s]
        return (shares[0], shares[1]) if len(shares) == 2 else None

    @property
    def is_noise(self) -> bool:
        return abs(self.seconds) < self.noise_s

    @property
    def work(self) -> float | None:
        """The second's work over the first's, less 1."""
        return _change(self.first.work, self.second.work) if self._alike else None

    @property
    def rate(self) -> float | None:
        """The same of what is done a second while it is done, hidden or not."""
        return _change(_rate(self.first), _rate(self.second)) if self._rated else None

    @property
    def causes(self) -> dict[str, float] | None:
        """Seconds of the difference by more work, lower rate and less hiding: the additive log-mean decomposition of
        a product of factors (Ang, Energy Policy 32 (2004) 1131)."""
        if not self._rated:
            return None
        one, two = self.first, self.second
        if min(one.work, two.work) <= 0:
            return {"work": self.seconds, "rate": 0.0, "hidden": 0.0}
        if min(one.seconds, two.seconds, _rate(one), _rate(two)) <= 0:  # wholly hidden on one side
            return {"work": 0.0, "rate": 0.0, "hidden": self.seconds}
        mean = _log_mean(one.seconds, two.seconds)
        by_work = mean * math.log(two.work / one.work)
        by_rate = mean * math.log(_rate(one) / _rate(two))
        return {"work": by_work, "rate": by_rate, "hidden": self.seconds - by_work - by_rate}

    @property
    def _alike(self) -> bool:
        return self.first.unit == self.second.unit != "" and bool(self.first.work or self.second.work)

    @property
    def _rated(self) -> bool:
        return self._alike and self.first.unit != "launches"  # of which only those that the device waits for take time


@dataclass(frozen=True)
class Explanation:
    """per: tokens that all seconds are of; None: those of a step, which both sides have alike. level: how finely both
    sides tell their time apart. rows: by size; around: what a run spends outside of steps, not in the difference.
    bearing: settings that differ and bear on speed; other: those that do not. predicted: the same of the predictions
    of two runs."""

    first: Side
    second: Side
    per: int | None
    level: Level
    rows: tuple[Row, ...]
    around: tuple[Row, ...]
    noise_s: float
    bearing: tuple[Difference, ...]
    other: tuple[Difference, ...]
    notes: tuple[str, ...]
    predicted: "Explanation | None" = None

    @property
    def first_s(self) -> float:
        return self.first.step_s * _scale(self.first, self.per)

    @property
    def second_s(self) -> float:
        return self.second.step_s * _scale(self.second, self.per)

    @property
    def seconds(self) -> float:
        return self.second_s - self.first_s

    @property
    def is_noise(self) -> bool:
        return abs(self.seconds) < self.noise_s

    @property
    def same(self) -> bool:
        return not self.bearing and self.first.kind == self.second.kind and not any(row.seconds for row in self.rows)


def explain(first: Side, second: Side) -> Explanation:
    """Where the second takes longer than the first, or less long.

    Raises:
        MoestroError: one of them took no time.
    """
    for side in (first, second):
        if not side.step_s > 0:
            raise MoestroError(f"{side.name}: a step of {side.step_s:g} s cannot be compared")
    per = None if first.tokens == second.tokens else PER
    scales = _scale(first, per), _scale(second, per)
    level = next(level for level in LEVELS if level in first.levels and level in second.levels)
    rows = _rows(first.levels[level], second.levels[level], scales)
    whole = _rows(first.levels["whole"], second.levels["whole"], scales)[0]
    common = [name for name in first.around if name in second.around]
    one, two = ({name: side.around[name] for name in common} for side in (first, second))
    around = _rows(one, two, scales)
    bearing, other = _settings(first, second)
    return Explanation(
        first, second, per, level, rows, around, whole.noise_s, bearing, other, _notes(first, second, per, common)
    )


def as_tree(found: Explanation) -> dict[str, Any]:
    """For machines: seconds of a step, or of so many tokens as `per` says."""
    sides = {
        name: {
            **{key: value for key, value in vars(side).items() if key not in ("levels", "settings", "around")},
            "seconds": seconds,
            "tokens_per_s": side.tokens / side.step_s,
        }
        for name, side, seconds in (
            ("first", found.first, found.first_s),
            ("second", found.second, found.second_s),
        )
    }
    return {
        **sides,
        "per_tokens": found.per,
        "difference_s": found.seconds,
        "noise_s": found.noise_s,
        "level": found.level,
        "rows": [_row_tree(row) for row in found.rows],
        "around": [_row_tree(row) for row in found.around],
        "bearing": [asdict(one) for one in found.bearing],
        "other": [asdict(one) for one in found.other],
        "notes": found.notes,
        "predicted": None if found.predicted is None else as_tree(found.predicted),
    }


def _row_tree(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "first": asdict(row.first),
        "second": asdict(row.second),
        "difference_s": row.seconds,
        "noise_s": row.noise_s,
        "work": row.work,
        "rate": row.rate,
        "causes_s": row.causes,
    }


def _rows(first: Mapping[str, Part], second: Mapping[str, Part], scales: tuple[float, float]) -> tuple[Row, ...]:
    rows = []
    for name in dict.fromkeys((*first, *second)):
        one, two = (_scaled(side.get(name), scale) for side, scale in zip((first, second), scales, strict=True))
        one, two = (replace(part, unit=part.unit or one.unit or two.unit) for part in (one, two))
        rows.append(Row(name, one, two, max(one.spread_s or 0.0, two.spread_s or 0.0)))
    return tuple(sorted(rows, key=lambda row: -abs(row.seconds)))


def _scaled(part: Part | None, scale: float) -> Part:
    if part is None:
        return Part(0.0)
    busy, spread = (None if value is None else value * scale for value in (part.busy_s, part.spread_s))
    return Part(part.seconds * scale, part.work * scale, part.unit, busy, spread)


def _scale(side: Side, per: int | None) -> float:
    return 1.0 if per is None else per / side.tokens


def _rate(part: Part) -> float:
    busy_s = part.seconds if part.busy_s is None else part.busy_s
    return part.work / busy_s if busy_s > 0 else 0.0


def _change(first: float, second: float) -> float | None:
    """None: there is nothing on one side."""
    return second / first - 1 if first > 0 and second > 0 else None


def _log_mean(first: float, second: float) -> float:
    if abs(second - first) <= SMALLEST * first:
        return (first + second) / 2
    return (second - first) / math.log(second / first)


def _settings(first: Side, second: Side) -> tuple[tuple[Difference, ...], tuple[Difference, ...]]:
    """What differs: that bears on speed, and that does not. Of unlike kinds of sides only what both have."""
    sections = [name for name in first.settings if name in second.settings]
    if first.kind != second.kind:
        sections = [name for name in sections if name in COMMON]
    one, two = ({name: side.settings[name] for name in sections} for side in (first, second))
    found = compare(one, two, "speed")
    order = {name: number for number, name in enumerate(sections)}

    def place(difference: Difference) -> int:
        return order[difference.key.partition(".")[0]]

    return tuple(sorted(found.bearing, key=place)), tuple(sorted(found.other, key=place))


def _notes(first: Side, second: Side, per: int | None, common: Sequence[str]) -> tuple[str, ...]:
    notes = []
    if per is not None:
        sizes = " and ".join(f"{side.tokens:,}" for side in (first, second))
        notes.append(f"steps of {sizes} tokens: all seconds are of {per:,} tokens")
    if first.devices != second.devices:
        notes.append(f"{first.devices:,} and {second.devices:,} devices: seconds are of all of them together")
    rates = [(side.peak_flops or 0.0) / 1e9 for side in (first, second)]
    if min(rates) > 0 and max(rates) > (1 + UNEVEN) * min(rates):
        notes.append(
            f"before the steps, A's devices multiplied matrices at {rates[0]:,.3g} GFLOP/s and B's at {rates[1]:,.3g}: "
            f"the machine itself differed by {rates[1] / rates[0] - 1:+.0%}"
        )
    left = sorted({*first.around, *second.around} - set(common))
    if left:
        spent = [sum(side.around[name].seconds for name in left if name in side.around) for side in (first, second)]
        which = first if spent[0] else second
        notes.append(
            f"outside of steps {which.name} spent {1e3 * max(spent):.3g} ms for each ({', '.join(left)}), of which the "
            "other does not tell"
        )
    for note in dict.fromkeys((*first.notes, *second.notes)):
        whose = [label for label, side in (("A", first), ("B", second)) if note in side.notes]
        notes.append(f"{', '.join(whose)}: {note}")
    return tuple(notes)
