"""A TOML file as a checked section; what is wrong with it is said with its file and key."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from moestro.config.base import Section
from moestro.errors import MoestroError, nearest

Kind = TypeVar("Kind", bound=Section)


def read_section(kind: type[Kind], path: Path) -> Kind:
    """Read `path` as a section. Raises MoestroError that names the file and the key."""
    try:
        return kind.model_validate(read_tree(path))
    except ValidationError as error:
        raise MoestroError(f"{path}: {_explain(error, kind)}") from error


def read_tree(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise MoestroError(f"{path} is not valid TOML: {error}") from error
    except OSError as error:
        raise MoestroError(f"cannot read {path}: {error.strerror}") from error


def _explain(error: ValidationError, kind: type[BaseModel]) -> str:
    """The innermost of the problems in one line, with the nearest valid name of an unknown key or word."""
    # A misspelt key is also a missing one: the spelling is what to mend.
    item = max(error.errors(), key=lambda problem: (len(problem["loc"]), problem["type"] == "extra_forbidden"))
    parts = [str(part) for part in item["loc"] if part != "[key]"]
    where = ".".join(parts)
    if item["type"] == "extra_forbidden":
        return f"unknown key '{where}'.{nearest(parts[-1], _fields_at(kind, parts[:-1]))}"
    if item["type"] == "missing":
        return f"missing key '{where}'"
    if item["type"] == "value_error":
        return f"{where + ': ' if where else ''}{item['msg'].removeprefix('Value error, ')}"
    expected = str(item.get("ctx", {}).get("expected", "")).replace("'", "").replace(" or ", ", ").split(", ")
    hint = nearest(str(item["input"]), expected) if item["type"] == "literal_error" else ""
    return f"bad value for '{where}': {item['input']!r}. {item['msg']}.{hint}"


def _fields_at(kind: type[BaseModel], parents: Sequence[str]) -> list[str]:
    """The fields of the section that the keys `parents` lead to; keys of tables and list indices lead nowhere new."""
    for part in parents:
        field = kind.model_fields.get(part)
        if field is not None:
            kind = _section_in(field.annotation) or kind
    return list(kind.model_fields)


def _section_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _section_in(part))), None)
