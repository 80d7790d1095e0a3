"""How commands print: tables on a terminal or into a pipe, and trees for machines."""

import json
import math
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def console_of(width: int) -> "Console":
    """As wide as the terminal; a pipe or a file gets `width`, room for whole lines."""
    from rich.console import Console

    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=width)


def print_json(tree: Any) -> None:
    """Plain data; JSON has no infinity, which becomes null as what is not known does."""
    print(json.dumps(finite(tree), indent=1, ensure_ascii=False, allow_nan=False))


def finite(tree: Any) -> Any:
    """The same with None for every number that is infinite or none, and with the names of named tuples."""
    if isinstance(tree, float):
        return tree if math.isfinite(tree) else None
    if isinstance(tree, tuple) and hasattr(tree, "_asdict"):
        tree = tree._asdict()
    if isinstance(tree, Mapping):
        return {key: finite(value) for key, value in tree.items()}
    return [finite(value) for value in tree] if isinstance(tree, list | tuple) else tree
