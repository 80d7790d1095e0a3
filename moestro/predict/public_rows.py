"""A row of a table of public runs, and why one may be of no use."""

Row = dict[str, str]


class Unusable(Exception):
    """The reason why a row says nothing that can be predicted."""


def number(row: Row, name: str) -> float | None:
    try:
        return float(row.get(name, "").replace(",", ""))
    except ValueError:
        return None


def whole(row: Row, name: str) -> int | None:
    value = number(row, name)
    return None if value is None else int(value)
