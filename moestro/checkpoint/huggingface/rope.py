"""Rotary positions in config.json: `rope_parameters` of transformers 5, `rope_theta` and `rope_scaling` before it."""

import math
from typing import Any

from moestro.checkpoint.huggingface.settings import Settings
from moestro.config import RopeConfig

KINDS = {"default": "none", "linear": "linear", "yarn": "yarn", "llama3": "llama3"}
PLAIN = {  # their names of numbers that mean the same
    "factor": "factor",
    "original_max_position_embeddings": "original_max_seq_len",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "attention_factor": "attention_factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
}
OF_KIND: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": ("factor",),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "truncate",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
    ),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}


def read_rope(settings: Settings, theta: float, label: str | None = None) -> dict[str, Any]:
    """RopeConfig's settings. theta: the family's default base; label: the type of layer, where each has its own.

    Raises:
        MoestroError: a kind or a number that RopeConfig has no place for.
    """
    max_len = settings.peek("max_position_embeddings")
    default = settings.take("rope_theta", default=theta)
    old, given = settings.take("rope_scaling", default=None), settings.take("rope_parameters", default=None)
    given = given or old or {}
    if label is not None:
        given = given.get(label) or {}
    given = {key: value for key, value in given.items() if value is not None}
    kind = given.pop("rope_type", given.pop("type", "default"))
    given.pop("type", None)
    if kind not in KINDS:
        raise settings.refusal("rope_type", kind, f"known are {', '.join(KINDS)}")
    fraction = given.pop("partial_rotary_factor", settings.take("partial_rotary_factor", default=1.0))
    rope: dict[str, Any] = {
        "theta": given.pop("rope_theta", default),
        "fraction": 1.0 if fraction is None else fraction,
        "scaling": KINDS[kind],
    }
    for key in sorted(given):
        if key not in OF_KIND[KINDS[kind]] and KINDS[kind] != "none":
            raise settings.refusal(f"rope_parameters.{key}", given[key], f'rope_type "{kind}" has no such number')
    if KINDS[kind] != "none" and "factor" not in given:
        raise settings.refusal("rope_type", kind, "it needs a factor beside it")
    rope |= {PLAIN[key]: given[key] for key in OF_KIND[KINDS[kind]] if key in given and key in PLAIN}
    if kind in ("yarn", "llama3"):
        rope.setdefault("original_max_seq_len", max_len)
    return rope | (_magnitudes(given) if kind == "yarn" else {})


def _magnitudes(given: dict[str, Any]) -> dict[str, Any]:
    """transformers takes mscale only together with mscale_all_dim, and otherwise m(1) for the tables."""
    mscale, all_dim = given.get("mscale", 0), given.get("mscale_all_dim", 0)
    if mscale and all_dim:
        return {"mscale": mscale, "mscale_all_dim": all_dim}
    if all_dim:
        return {"mscale_all_dim": all_dim, "attention_factor": given.get("attention_factor", _m(given["factor"], 1.0))}
    return {}


def write_rope(rope: RopeConfig) -> dict[str, Any]:
    """`rope_parameters` of one type of layer."""
    kind = next(theirs for theirs, ours in KINDS.items() if ours == rope.scaling)
    found: dict[str, Any] = {"rope_type": kind, "rope_theta": rope.theta}
    if rope.fraction != 1:
        found["partial_rotary_factor"] = rope.fraction
    for key in OF_KIND[rope.scaling]:
        if key in PLAIN and (value := getattr(rope, PLAIN[key])) is not None:
            found[key] = value
    if rope.scaling == "yarn" and rope.mscale_all_dim and rope.mscale:
        found |= {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim}
    elif rope.scaling == "yarn" and (rope.mscale != 1 or rope.mscale_all_dim):
        found["attention_factor"] = table_factor(rope)
        found |= {"mscale_all_dim": rope.mscale_all_dim} if rope.mscale_all_dim else {}
    return found


def older_names(rope: dict[str, Any]) -> dict[str, Any]:
    """The same for readers of before transformers 5."""
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
    return {"rope_theta": rope["rope_theta"], "rope_scaling": None if rope["rope_type"] == "default" else scaling}


def table_factor(rope: RopeConfig) -> float:
    """What yarn multiplies cosines and sines by."""
    if rope.scaling != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    return _m(rope.factor, rope.mscale) / _m(rope.factor, rope.mscale_all_dim)


def _m(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0
