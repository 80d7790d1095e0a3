"""Which device a free text means: the name that a driver reports, or that a public table uses."""

import re
from collections.abc import Iterable, Mapping

# A text with such a word means a variant of its own: it matches only the names that have the word too.
VARIANTS = frozenset(
    ("pcie", "sxm", "nvl", "ti", "super", "ultra", "max", "pro", "laptop", "mobile", "lite", "mig", "d", "q")
)
_MEMORY = re.compile(r"\d+gb")
_SERIES = re.compile(r"(sxm|pcie)\d")  # SXM2, SXM4, SXM5: the catalog says SXM


def words(text: str) -> frozenset[str]:
    """Lower-case words without trade marks: "Intel(R) Xeon(R) Platinum 8480+" → intel, xeon, platinum, 8480+."""
    plain = re.sub(r"\((r|tm|c)\)|®|™", " ", text.lower())
    plain = re.sub(r"\b(\d+) ?gb?\b", r"\1gb", plain)  # 80 GB, 80GB, 80g
    return frozenset(_SERIES.sub(r"\1", word) for word in re.findall(r"[a-z0-9.+]+", plain))


def match(text: str, names: Mapping[str, Iterable[frozenset[str]]]) -> str | None:
    """The id whose name has the most words in common with `text`, all of them in it.

    None: no name is contained in the text, or the names of two devices are, and neither holds the other's words.
    """
    there = words(text)
    special = {word for word in there if word in VARIANTS or _MEMORY.fullmatch(word)}
    best: dict[str, frozenset[str]] = {}
    for device_id, called in names.items():
        fitting = [name for name in called if name and name <= there and special <= name]
        if fitting:
            best[device_id] = max(fitting, key=len)
    if not best:
        return None
    first = max(best, key=lambda device_id: len(best[device_id]))
    rivals = [name for device_id, name in best.items() if device_id != first]
    return None if any(not name < best[first] for name in rivals) else first
