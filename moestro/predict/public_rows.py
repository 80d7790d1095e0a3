"""A row of a table of public runs, and why one may be of no use."""

from math import isfinite

Row = dict[str, str]


class Unusable(Exception):
    """The reason why a row says nothing that can be predicted."""


def number(row: Row, name: str) -> float | None:
    """A finite number that is not below zero; None where the cell holds none."""
    try:
        value = float(row.get(name, "").replace(",", ""))
    except ValueError:
        return None
    return value if isfinite(value) and value >= 0 else None


def whole(row: Row, name: str) -> int | None:
    value = number(row, name)
    return None if value is None else int(value)
