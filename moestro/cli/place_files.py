"""Tables of numbers that `moestro place` reads, and placements that it writes."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moestro.errors import MoestroError

if TYPE_CHECKING:
    from moestro.plan.ilp.replicas import Layer


def read_loads(source: Path) -> list[list[float]]:
    """[layers, experts] of a CSV or JSON file, or of a run's folder: means over the second half of its records.

    Raises:
        MoestroError: no such file, or no table of numbers in it.
    """
    from moestro.cli.asked import loads_of_run

    return loads_of_run(source) if source.is_dir() else read_table(source, "loads")


def read_table(path: Path, key: str) -> list[list[float]]:
    """Rows of numbers, equally many in each: of JSON a list of lists, alone or under `key`; of CSV after a heading,
    if there is one, and without a column named "layer" or "server".

    Raises:
        MoestroError: no such file, or no such table in it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MoestroError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'not a text file'}") from error
    rows = _of_json(path, text, key) if path.suffix == ".json" else _of_csv(text)
    try:
        found = [[float(cell) for cell in row] for row in rows]
    except (TypeError, ValueError) as error:
        raise MoestroError(f"{path}: {error}; give a table of numbers, a row a line") from error
    if not found or not found[0] or len({len(row) for row in found}) > 1:
        raise MoestroError(f"{path} is no table: give rows of equally many numbers, as CSV or as a JSON list of lists")
    return found


def _of_json(path: Path, text: str, key: str) -> list[Any]:
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise MoestroError(f"{path} is no JSON: {error}") from error
    rows = tree.get(key) if isinstance(tree, dict) else tree
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise MoestroError(f"{path}: give a list of lists of numbers, alone or as '{key}'")
    return rows


def _of_csv(text: str) -> list[list[str]]:
    rows = [row for row in csv.reader(text.splitlines()) if any(cell.strip() for cell in row)]
    if rows and any(not _is_number(cell) for cell in rows[0]):
        named = rows[0][0].strip().lower() in ("layer", "server")
        rows = [row[1:] if named else row for row in rows[1:]]
    return rows


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def placement_tree(layers: "Sequence[Layer]", devices: int, nodes: int) -> dict[str, Any]:
    """experts: of each layer the expert of each place, those of a device side by side, devices of a node likewise."""
    return {
        "devices": devices,
        "nodes": nodes,
        "places": len(layers[0].experts.experts),
        "experts": [one.experts.experts.tolist() for one in layers],
        "max_over_mean": [
            {"in_order": one.before, "balanced": one.balanced, "placed": one.after, "at_least": one.bound}
            for one in layers
        ],
    }


def write_json(path: Path, tree: dict[str, Any]) -> None:
    """Raises MoestroError where it cannot be written."""
    from moestro.config.files import write_whole

    try:
        write_whole(path, json.dumps(tree) + "\n")
    except OSError as error:
        raise MoestroError(f"cannot write {path}: {error.strerror}") from error
