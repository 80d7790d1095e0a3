"""Compares two runs' manifests before anyone compares their numbers.

A manifest is whatever describes a run: settings, versions, hardware, how quality was scored. The caller says what the
comparison is about (`varied`); any other difference that bears on the number makes the two incomparable.
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moestro.errors import MoestroError

Figure = Literal["speed", "quality", "cost"]
# Parts of a key (whole words, "_" and "." alike between them), and on which figures a difference in it bears. The first
# line that matches decides; a key that none matches bears on all.
BEARING: tuple[tuple[tuple[str, ...], tuple[Figure, ...]], ...] = (
    (("run_name", "run_dir", "description", "trackers", "log_every", "cache_dir", "notices", "hostname"), ()),
    (("started_at", "command", "peak_flops_measured", "keep_checkpoints"), ()),
    (("price", "usd"), ("cost",)),
    (("useful", "padding", "padded", "packing"), ("speed", "quality", "cost")),
    (("loss_mask", "clip", "seed", "decay", "lr", "betas", "warmup", "sampling", "prompts", "score"), ("quality",)),
    (("compile", "compiled", "eager", "recompute", "overlap", "kv_cache", "parallel", "layout"), ("speed", "cost")),
    (("world_size", "device", "device_name", "devices", "hardware", "gpus", "num_threads"), ("speed", "cost")),
)
ALL: tuple[Figure, ...] = ("speed", "quality", "cost")
MISSING = "not told"


@dataclass(frozen=True)
class Difference:
    key: str
    first: str
    second: str
    varied: bool  # what the comparison is about

    @property
    def told(self) -> bool:
        """Whether both manifests speak of it."""
        return MISSING not in (self.first, self.second)


@dataclass(frozen=True)
class Comparison:
    """bearing: differences that bear on the figure, the varied ones among them. other: all that do not."""

    figure: Figure
    bearing: tuple[Difference, ...]
    other: tuple[Difference, ...]

    @property
    def against(self) -> tuple[Difference, ...]:
        """What makes the two incomparable."""
        return tuple(difference for difference in self.bearing if not difference.varied)

    @property
    def comparable(self) -> bool:
        return not self.against


def read_manifest(path: Path) -> dict[str, Any]:
    """From a TOML or JSON file, or a run's folder (its config.toml and environment.json).

    Raises:
        MoestroError: there is nothing to read, or it is no table.
    """
    if path.is_dir():
        found = [path / name for name in ("config.toml", "environment.json") if (path / name).is_file()]
        if not found:
            raise MoestroError(f"{path} has neither config.toml nor environment.json; is it a run's folder?")
        return {key: value for file in found for key, value in read_manifest(file).items()}
    try:
        text = path.read_text(encoding="utf-8")
        tree = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise MoestroError(f"cannot read the manifest {path}: {error}") from error
    if not isinstance(tree, dict):
        raise MoestroError(f"the manifest {path} is not a table of names and values")
    return tree


def compare(
    first: Mapping[str, Any], second: Mapping[str, Any], figure: Figure = "speed", varied: Sequence[str] = ()
) -> Comparison:
    """varied: keys, or beginnings of keys up to a dot, that are meant to differ.

    Raises:
        MoestroError: a varied key is in neither manifest.
    """
    one, two = _flat(first), _flat(second)
    keys = sorted(one.keys() | two.keys())
    for wanted in varied:
        if not any(_under(key, wanted) for key in keys):
            raise MoestroError(
                f"'{wanted}' is in neither manifest; a varied key looks like '{keys[0] if keys else ''}'"
            )
    bearing: list[Difference] = []
    other: list[Difference] = []
    for key in keys:
        left, right = one.get(key, MISSING), two.get(key, MISSING)
        if left == right:
            continue
        difference = Difference(key, left, right, any(_under(key, wanted) for wanted in varied))
        (bearing if figure in _bears(key) or difference.varied else other).append(difference)
    return Comparison(figure, tuple(bearing), tuple(other))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= _flat(value, f"{name}.")
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            found |= _flat({str(i): item for i, item in enumerate(value)}, f"{name}.")
        else:
            found[name] = _text(value)
    return found


def _text(value: Any) -> str:
    """Numbers that are equal read the same: 1 and 1.0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:.12g}"


def _under(key: str, wanted: str) -> bool:
    return key == wanted or key.startswith(f"{wanted}.")


def _bears(key: str) -> tuple[Figure, ...]:
    padded = f"_{key.lower().replace('.', '_').replace('-', '_').replace(' ', '_')}_"
    return next((figures for words, figures in BEARING if any(f"_{word}_" in padded for word in words)), ALL)
