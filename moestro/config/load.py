"""From a preset or a file, plus overrides, to a checked Config, remembering where each value came from."""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import tomli_w
from pydantic import BaseModel, ValidationError

from moestro.config.root import Config
from moestro.config.supervise import SuperviseConfig
from moestro.errors import MoestroError, nearest

UNION_TAGS = ("one", "many")  # of `top_k`: pydantic puts them into the location of an error
PRESETS_DIR = Path(__file__).parent / "presets"


@dataclass(frozen=True)
class LoadedConfig:
    """A checked config and, for each dotted key, its origin: a file, the command line, or `default`."""

    config: Config
    origins: Mapping[str, str]


def preset_names() -> list[str]:
    return sorted(p.stem for p in PRESETS_DIR.glob("*.toml"))


def load_config(name_or_path: str, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read a preset (by name) or a TOML file and apply `section.key=value` overrides.

    Raises:
        MoestroError: unknown preset, missing or malformed file, unknown key, wrong type, impossible combination.
    """
    path, label = _find(name_or_path)
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise MoestroError(f"{path} is not valid TOML: {error}") from error
    except OSError as error:
        raise MoestroError(f"cannot read {path}: {error.strerror}") from error
    changed = []
    for override in overrides:
        key, value = _parse_override(override)
        _insert(tree, key, value)
        changed.append(key)
    origins = {leaf: "command line" if _touches(changed, leaf) else label for leaf, _ in _leaves(tree)}
    source = f"{label}, command line" if overrides else label
    return LoadedConfig(parse_config(tree, source, origins), origins)


def parse_config(tree: Mapping[str, Any], source: str, origins: Mapping[str, str] | None = None) -> Config:
    """Check a plain dictionary against the schema; errors name a key's origin, or else `source`."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise MoestroError("\n".join(_explain(error, source, origins or {})[:2])) from error


def parse_supervise(overrides: Sequence[str]) -> SuperviseConfig:
    """`[supervise]` alone, with `key=value` overrides.

    Raises:
        MoestroError: an unknown key or a bad value.
    """
    tree: dict[str, Any] = {}
    for override in overrides:
        key, value = _parse_override(override.removeprefix("supervise."))
        tree[key] = value
    try:
        return SuperviseConfig.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            known = nearest(key, list(SuperviseConfig.model_fields))
            raise MoestroError(f"supervise has no setting '{key}'.{known}") from error
        raise MoestroError(f"supervise.{key}: {first['msg']}, got {first['input']!r}") from error


def to_toml(config: Config) -> str:
    """The config as TOML that `load_config` reads back to an equal object; "none" stands for unset."""
    return tomli_w.dumps(_none_as_text(config.model_dump(mode="json")))


def _none_as_text(tree: Any) -> Any:
    """TOML has no null; "none" is read back as unset."""
    if isinstance(tree, dict):
        return {key: _none_as_text(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_none_as_text(value) for value in tree]
    return "none" if tree is None else tree


def describe(loaded: LoadedConfig) -> list[tuple[str, str, str]]:
    """Rows of (dotted key, value, origin) for every setting, defaults included."""
    rows = []
    for key, value in _leaves(loaded.config.model_dump(mode="json")):
        text = "(unset)" if value is None else json.dumps(value, ensure_ascii=False)
        rows.append((key, text, loaded.origins.get(key, "default")))
    return rows


def _find(name_or_path: str) -> tuple[Path, str]:
    if name_or_path in preset_names():
        return PRESETS_DIR / f"{name_or_path}.toml", f"preset {name_or_path}"
    path = Path(name_or_path)
    if path.is_file():
        return path, str(path)
    if path.is_dir():
        raise MoestroError(f"{name_or_path} is a folder; give a TOML file or a preset: {', '.join(preset_names())}")
    if path.suffix == ".toml" or "/" in name_or_path:
        raise MoestroError(f"no such config file: {name_or_path}")
    raise MoestroError(
        f"no preset '{name_or_path}'.{nearest(name_or_path, preset_names())} Presets: {', '.join(preset_names())}"
    )


def _parse_override(text: str) -> tuple[str, Any]:
    """Split `a.b=value`; the value is TOML, and a bare word is a string."""
    key, equals, raw = text.partition("=")
    if not equals or not key:
        raise MoestroError(f"'{text}' is not an override; write section.key=value, for example train.steps=100")
    try:
        return key, tomllib.loads(f"v = {raw}")["v"]
    except tomllib.TOMLDecodeError:
        return key, raw


def _touches(changed: Sequence[str], leaf: str) -> bool:
    """Whether one of the changed keys is the leaf, holds it, or lies inside its list."""
    return any(f"{leaf}.".startswith(f"{key}.") or key.startswith(f"{leaf}.") for key in changed)


def _insert(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, leaf = dotted.split(".")
    node: Any = tree
    for part in parents:
        node = node[_index(node, part, dotted)] if isinstance(node, list) else node.setdefault(part, {})
        if not isinstance(node, dict | list):
            raise MoestroError(f"unknown key '{dotted}' (command line): '{part}' is a value, not a section")
    if isinstance(node, list):
        node[_index(node, leaf, dotted)] = value
    else:
        node[leaf] = value


def _index(node: list[Any], part: str, dotted: str) -> int:
    if not part.isdecimal() or int(part) >= len(node):
        raise MoestroError(f"bad key '{dotted}' (command line): '{part}' is not an index below {len(node)}")
    return int(part)


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted (key, value) pairs; lists of tables are numbered, other lists are values."""
    items: Any = None
    if isinstance(tree, dict):
        items = tree.items()
    elif isinstance(tree, list) and tree and all(isinstance(x, dict) for x in tree):
        items = enumerate(tree)
    if items is None:
        yield prefix, tree
        return
    for key, value in items:
        yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))


def _explain(error: ValidationError, source: str, origins: Mapping[str, str]) -> list[str]:
    """One line for each problem: what, where, and the nearest valid name."""
    lines = []
    whole = source
    errors = error.errors()
    for item in errors:
        depth = len(item["loc"])
        if any(len(other["loc"]) > depth and other["loc"][:depth] == item["loc"] for other in errors):
            continue  # follows from the problem inside it
        where = ".".join(str(part) for part in item["loc"] if part not in UNION_TAGS)
        source = origins.get(where, whole)
        if item["type"] == "extra_forbidden":
            parents = [str(part) for part in item["loc"][:-1]]
            hint = nearest(str(item["loc"][-1]), _fields_at(parents))
            hint = hint.replace(" '", f" '{'.'.join(parents)}." if parents else " '", 1)
            lines.append(f"unknown key '{where}' ({source}).{hint}")
        elif item["type"] == "missing":
            lines.append(f"missing key '{where}' ({source})")
        elif item["type"] == "value_error":
            message = item["msg"].removeprefix("Value error, ")
            lines.append(f"{where + ': ' if where else ''}{message} ({source})")
        else:
            hint = nearest(str(item["input"]), _choices(item)) if item["type"] == "literal_error" else ""
            lines.append(f"bad value for '{where}': {item['input']!r}. {item['msg']} ({source}).{hint}")
    return lines


def _choices(item: Any) -> list[str]:
    return str(item.get("ctx", {}).get("expected", "")).replace("'", "").replace(" or ", ", ").split(", ")


def _fields_at(parents: Sequence[str]) -> list[str]:
    """Names of the fields of the section found by walking the schema along `parents`."""
    section: type[BaseModel] = Config
    for part in parents:
        if part.isdecimal():
            continue
        field = section.model_fields.get(part)
        found = _section_in(field.annotation) if field else None
        if found is None:
            return []
        section = found
    return list(section.model_fields)


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The config section inside an annotation such as `MoEConfig | None` or `tuple[SourceConfig, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        found = _section_in(argument)
        if found is not None:
            return found
    return None
