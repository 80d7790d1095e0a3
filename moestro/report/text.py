"""Numbers as people read them. A missing number is an en dash, never a zero."""

import math

MISSING = "–"
_SPACE = "\u00a0"  # a unit must not fall onto the next line


def si(value: float, unit: str = "") -> str:
    """1234567 → `1.23 M`; the unit follows the prefix."""
    if not math.isfinite(value):
        return MISSING
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        # 999 999 must round up to 1.00 M, not to 1000 k.
        if abs(value) >= scale * 0.9995:
            return f"{_three_digits(value / scale)}{_SPACE}{prefix}{unit}"
    digits = f"{value:.0f}" if float(value).is_integer() else _three_digits(value)
    return f"{digits}{_SPACE}{unit}".rstrip()


def _three_digits(value: float) -> str:
    size = abs(value)
    return f"{value:.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"


def fixed(value: float, digits: int = 3) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else MISSING


def percent(value: float) -> str:
    """A share in per cent; a share that is small but not zero never reads as zero."""
    if not math.isfinite(value):
        return MISSING
    if value == 0:
        return f"0{_SPACE}%"
    if abs(value) < 1e-4:
        return f"<{_SPACE}0.01{_SPACE}%"
    return f"{100 * value:.2f}{_SPACE}%" if abs(value) < 0.01 else f"{100 * value:.1f}{_SPACE}%"


def duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return MISSING
    if seconds < 60:
        return f"{_three_digits(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    return f"{hours // 24} d {hours % 24:02d} h"


def grouped(value: float) -> str:
    """12345678 → `12 345 678`, with spaces that do not break."""
    return f"{int(value):,}".replace(",", "\u202f") if math.isfinite(value) else MISSING


def plural(count: int, noun: str) -> str:
    return f"{grouped(count)} {noun}" if count == 1 else f"{grouped(count)} {noun}s"
