"""A comparison of two steps in words: what a row's difference comes from, and the whole in a paragraph."""

from collections.abc import Sequence

from moestro.plan.explain import Explanation, Row
from moestro.plan.explain_side import WHOLE

TOLD = 0.9  # of all that is lost, and of all that is gained, the parts that the paragraph names
FEW = 3
LEAST = 0.001  # of a step: smaller differences are not told
UNLIKE = ("model", "batch", "software", "machine", "run")  # sections whose settings are not the plan's


def seconds(value: float, signed: bool = False) -> str:
    """Three digits in s, ms or µs."""
    size = abs(value)
    unit, factor = next(
        ((unit, factor) for unit, factor, least in (("s", 1.0, 0.9995), ("ms", 1e3, 0.9995e-3)) if size >= least),
        ("µs", 1e6),
    )
    scaled = value * factor
    digits = max(0, 2 - (len(f"{abs(scaled):.0f}") - 1)) if scaled else 0
    return f"{scaled:{'+' if signed else ''}.{digits}f} {unit}"


def cause(row: Row) -> str:
    """How work, rate and hiding differ: "FLOPs ±0 %, rate -8 %"."""
    if row.work is None:
        there = [(part.work, side) for part, side in ((row.first, "A"), (row.second, "B"))]
        only = [side for work, side in there if work]
        return f"only {only[0]} has it" if len(only) == 1 else ""
    words = [f"{row.first.unit} {_percent(row.work)}"]
    if row.rate is not None:
        words.append(f"rate {_percent(row.rate)}")
    if row.hidden is not None and max(row.hidden) > 0.005:
        words.append(f"hidden {row.hidden[0]:.0%} → {row.hidden[1]:.0%}")
    return ", ".join(words)


def verdict(found: Explanation) -> str:
    """One paragraph for who reads nothing else."""
    if found.same:
        return "A and B are the same: nothing differs."
    sentences = [_headline(found)]
    if found.is_noise:
        return " ".join([*sentences, *_unlike(found)])
    sentences += _where(found)
    sentences += _why(found)
    if found.predicted is not None:
        sentences.append(_against(found))
    return " ".join([*sentences, *_unlike(found)])


def _headline(found: Explanation) -> str:
    share = found.seconds / found.first_s
    per = "a step" if found.per is None else f"{found.per:,} tokens"
    against = f"{seconds(found.second_s)} against {seconds(found.first_s)} for {per}"
    if found.first.kind == "predicted" and found.second.kind == "measured":
        return f"Measured {against} predicted: {_longer(share)} than predicted{_inside(found)}."
    text = f"B takes {_longer(share)} than A ({against})"
    if found.is_noise:
        spread = f"half of one side's own steps lie within ±{seconds(found.noise_s)}"
        return f"{text}, which is within the spread: {spread}. These steps show no difference."
    return f"{text}."


def _inside(found: Explanation) -> str:
    low, high = found.first.low_s, found.first.high_s
    if low is None or high is None or not low < high:
        return ""
    inside = low <= found.second.step_s <= high
    return f", {'within' if inside else 'outside of'} its interval of {seconds(low)} to {seconds(high)}"


def _where(found: Explanation) -> list[str]:
    """The rows that make up most of what is lost and won."""
    rows = [row for row in found.rows if row.name != WHOLE]
    lost, won = ([row for row in rows if sign * row.seconds > LEAST * found.first_s] for sign in (1, -1))
    parts = [_listed(word, some) for word, some in (("loses", lost), ("gains", won)) if some]
    return [f"It {' and '.join(parts)}."] if parts else []


def _listed(word: str, rows: Sequence[Row]) -> str:
    whole, told, names = sum(abs(row.seconds) for row in rows), 0.0, list[str]()
    for row in rows[:FEW]:
        if told >= TOLD * whole:
            break
        chance = " (within the spread)" if row.is_noise else ""
        names.append(f"{seconds(abs(row.seconds))} in {row.name}{chance}")
        told += abs(row.seconds)
    rest = f", {seconds(whole - told)} elsewhere" if whole - told > (1 - TOLD) * whole else ""
    return f"{word} {', '.join(names)}{rest}"


def _why(found: Explanation) -> list[str]:
    """Of all rows together, what comes of more work, of a lower rate and of less that is hidden."""
    causes = [row.causes for row in found.rows if row.causes is not None]
    sums = {name: sum(cause[name] for cause in causes) for name in ("work", "rate", "hidden")}
    labels = {
        "work": ("more", "less", "work"),
        "rate": ("lower", "higher", "rates"),
        "hidden": ("less", "more", "hidden"),
    }
    words = [
        f"{seconds(value, signed=True)} by {labels[name][value < 0]} {labels[name][2]}"
        for name, value in sorted(sums.items(), key=lambda item: -abs(item[1]))
        if abs(value) > LEAST * found.first_s
    ]
    return [f"By cause: {', '.join(words)}."] if words else []


def _against(found: Explanation) -> str:
    predicted = found.predicted
    assert predicted is not None
    shares = (predicted.seconds / predicted.first_s, found.seconds / found.first_s)
    return f"Predicted was {shares[0]:+.1%}, measured {shares[1]:+.1%}."


def _unlike(found: Explanation) -> list[str]:
    """A warning, where more than the plan differs."""
    keys = [one.key for one in found.bearing if one.key.partition(".")[0] in UNLIKE]
    if not keys:
        return []
    shown = ", ".join(keys[:FEW]) + (f" and {len(keys) - FEW} more" if keys[FEW:] else "")
    planned = any(one.key.startswith("plan.") for one in found.bearing)
    return [f"More than the plan differs: {shown}." if planned else f"It is not the plan that differs: {shown}."]


def _longer(share: float) -> str:
    return f"{abs(share):.1%} {'longer' if share >= 0 else 'less time'}"


def _percent(value: float) -> str:
    text = f"{value:+.1%}" if abs(value) < 0.0995 else f"{value:+.0%}"
    return "±0%" if text in ("+0.0%", "-0.0%") else text
