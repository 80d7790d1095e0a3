"""A prediction that `moestro predict --json` wrote, as a side of a comparison."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from moestro.config.plan import Plan, Workload
from moestro.errors import MoestroError
from moestro.plan.explain_side import Side, predicted_side
from moestro.predict.words import Interval, MemoryBreakdown, Prediction, TimeBreakdown

HOW = "save one with `moestro predict PRESET … --json > FILE.json`"


def saved_side(path: Path) -> Side:
    """Raises MoestroError for a file that holds no prediction of a preset's step."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MoestroError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(tree, dict) or "time" not in tree:
        several = " holds several plans" if isinstance(tree, dict) and "ranked" in tree else " holds no prediction"
        raise MoestroError(f"{path}{several}; {HOW}")
    if "workload" not in tree or "plan" not in tree:
        raise MoestroError(f"{path} is a prediction of a program or a net, without a plan and its tokens; {HOW}")
    try:
        workload, plan = Workload.model_validate(tree["workload"]), Plan.model_validate(tree["plan"])
        found = Prediction(
            step_s=_of(Interval, tree["step_s"]),
            time=_of(TimeBreakdown, tree["time"]),
            memory=_of(MemoryBreakdown, tree["memory"]),
            memory_by_rank=tuple(tree["memory_by_rank"]),
            tokens_per_s=tree["tokens_per_s"],
            tokens_per_s_per_device=tree["tokens_per_s_per_device"],
            mfu=tree["mfu"],
            profile=tree["profile"],
            notes=tuple(tree["notes"]),
        )
        return predicted_side(str(path), workload, plan, found)
    except (ValidationError, TypeError, KeyError, AttributeError) as error:
        raise MoestroError(f"{path} was written by another version ({_first(error)}); {HOW}") from error


def _of(kind: type[Any], values: Mapping[str, Any]) -> Any:
    known = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in known})


def _first(error: Exception) -> str:
    if isinstance(error, ValidationError):
        one = error.errors()[0]
        return f"{'.'.join(str(part) for part in one['loc'])}: {one['msg']}"
    return f"{type(error).__name__}: {error}"
