"""A pick as the part of a link behind "?", and back."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

from pydantic import ValidationError

from moestro.config.plan import Plan
from moestro.ui.goal import OBJECTIVES
from moestro.ui.offer import Offer
from moestro.ui.picked import (
    FIELDS,
    NUMBERS,
    OPTIMIZERS,
    PRECISIONS,
    TRAINERS,
    WISHES,
    WORKLOAD,
    Picked,
    clamped,
    start,
    usual,
)

SAID = ("devices", *WORKLOAD, "tokens", "usd_per_hour", *WISHES)  # in a link, where it is not the usual value


def to_query(picked: Picked, offer: Offer) -> str:
    """The link's part behind "?": the run, the machine, and what is not their usual value."""
    usual_one = start(offer, picked.run, picked.hardware)
    said: dict[str, Any] = {"run": picked.run, "hardware": picked.hardware}
    said |= {name: picked.number(name) for name in SAID if picked.number(name) != usual_one.number(name)}
    said |= {name: str(value).lower() if isinstance(value, bool) else value for name, value in picked.layout.items()}
    if picked.pins:
        said["pin"] = ",".join(name for name in FIELDS if name in picked.pins)
    return urlencode({name: f"{value:.10g}" if isinstance(value, float) else value for name, value in said.items()})


def from_query(query: Mapping[str, str], offer: Offer) -> tuple[Picked, list[str]]:
    """What a link says, and in words what of it was left out because it is not a value or there is no such thing."""
    wrong: list[str] = []

    def named(name: str, known: tuple[str, ...], otherwise: str) -> str:
        value = query.get(name, otherwise)
        if value in known:
            return value
        wrong.append(f"{name} = {value}: there is no such; taken as {otherwise}")
        return otherwise

    run = named("run", offer.runs, offer.first_run)
    first = start(offer, run, named("hardware", offer.machines, offer.first_hardware))
    changes: dict[str, Any] = {}
    for name, read in READERS.items():
        try:
            if name in query:
                changes[name] = read(query[name])
        except ValueError:
            wrong.append(f"{name} = {query[name]}: not a value; taken as {_told(first.number(name))}")
    picked = first.changed(**changes)
    for name in FIELDS:
        try:
            if name in query:
                picked = picked.with_field(name, _field(name, query[name]))
        except ValueError:
            wrong.append(f"{name} = {query[name]}: not a value; taken as {usual(name)}")
    pins = frozenset(query.get("pin", "").split(",")) & frozenset(FIELDS)
    whole = clamped(replace(picked, pins=pins), offer)
    for name in ("devices", "seq_len", "global_batch_size", *NUMBERS):
        if whole.number(name) != picked.number(name):
            wrong.append(f"{name} = {_told(picked.number(name))}: taken as {_told(whole.number(name))}")
    return whole, wrong


def _number(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError(text)
    return value


def _whole(text: str) -> int:
    return int(_number(text))


def _one_of(known: tuple[str, ...]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in known:
            raise ValueError(text)
        return text

    return read


READERS: dict[str, Callable[[str], Any]] = {
    "devices": _whole, "seq_len": _whole, "global_batch_size": _whole, **dict.fromkeys(NUMBERS, _number),
    "precision": _one_of(PRECISIONS), "optimizer": _one_of(OPTIMIZERS), "trainer": _one_of(TRAINERS),
    "objective": _one_of(OBJECTIVES),
}  # fmt: skip


def _field(name: str, text: str) -> Any:
    """The text as a value of this field of Plan. Raises ValueError where it is none."""
    words = {"None": None, "true": True, "false": False}
    value: Any = words[text] if text in words else int(text) if text.isdecimal() else text
    if name == "etp" and value == 0:
        return 0
    try:
        Plan.model_validate({name: value})
    except ValidationError as error:
        if any(problem["loc"] for problem in error.errors()):  # others say what it does not go together with
            raise ValueError(text) from error
    return value


def _told(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else "none" if value is None else str(value)
