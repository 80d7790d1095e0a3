"""What `moestro plan` is to look for, from its options; and each mistake, told."""

import re
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moestro.errors import MoestroError, nearest

if TYPE_CHECKING:
    from moestro.plan.objective import Failures, Goal
    from moestro.predict.target import Target

SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
BYTES = {"GB": 1e9, "GiB": 2.0**30, "MB": 1e6, "MiB": 2.0**20}
MOST_DEVICES = 1_000_000  # beyond which a number is a slip, and its divisors take long
# The trainer's settings that a search chooses, by their name in `plan` ("": what the others leave of the devices).
CHOSEN = {
    **{f"parallel.{name}": name for name in ("pp", "cp", "tp", "ep", "zero", "context", "schedule", "dispatch")},
    **{f"train.{name}": name for name in ("micro_batch_size", "recompute", "expert_chunks", "expert_recompute")},
    "parallel.dp": "",
    "parallel.fsdp": "",
    "parallel.stages_per_rank": "vpp",
    "train.expert_overlap": "overlap_dispatch",
}
CHECKPOINT_S, RESTART_S = 30.0, 600.0  # as `moestro predict` takes them


@dataclass(frozen=True)
class Asked:
    """The options as they were given; None or "": not."""

    objective: str = "time"
    tokens: float | None = None
    usd_per_hour: float | None = None
    mtbf_hours: float | None = None
    checkpoint_s: float | None = None
    restart_s: float = RESTART_S
    storage_gbps: float | None = None
    deadline: str = ""
    budget: float | None = None
    headroom: str = ""


def check_searched(overrides: Sequence[str]) -> None:
    """Raises MoestroError where an override is of what the search chooses, which would not heed it."""
    for text in overrides:
        key = text.partition("=")[0].strip()
        if key in CHOSEN:
            instead = f"plan.{CHOSEN[key]}=… fixes it" if CHOSEN[key] else "give --devices, and fix others of plan.*"
            raise MoestroError(f"{text}: the search chooses {key}; {instead}")


def check_together(given: Set[str]) -> None:
    """given: names of the options that the command line has. Raises MoestroError where one has no say."""
    alone = given & {"checkpoint_s", "restart_s", "storage_gbps"}
    if alone and "mtbf_hours" not in given:
        flags = " and ".join(sorted(f"--{name.replace('_', '-')}" for name in alone))
        raise MoestroError(f"without --mtbf-hours there are no failures; leave {flags} out")


def goal_of(asked: Asked, target: "Target", run_tokens: float, step_tokens: int) -> "Goal":
    """run_tokens: of the whole run, where --tokens does not say; step_tokens: of a step.

    Raises:
        MoestroError: a value that cannot be read, or what the goal needs is not known.
    """
    from moestro.plan.objective import OBJECTIVES, Goal

    if asked.objective not in OBJECTIVES:
        hint = nearest(asked.objective, list(OBJECTIVES))
        raise MoestroError(f"--objective is one of {', '.join(OBJECTIVES)}, not '{asked.objective}'.{hint}")
    tokens = run_tokens if asked.tokens is None else asked.tokens
    if not 0 < tokens < float("inf"):
        raise MoestroError(f"cannot train on {tokens:g} tokens")
    free_share, free_bytes = parse_headroom(asked.headroom)
    device = target.place.device
    known = device.tdp_w.nominal is not None and not target.measured and not target.parts
    return Goal(
        objective=next(name for name in OBJECTIVES if name == asked.objective),
        steps=tokens / step_tokens,
        usd_per_hour=_price(asked.usd_per_hour, target),
        watts=device.tdp_w.nominal if known else None,
        failures=_failures(asked, target),
        deadline_s=parse_time(asked.deadline) if asked.deadline else None,
        budget_usd=asked.budget,
        free_share=free_share,
        free_bytes=free_bytes,
    )


def parse_time(text: str) -> float:
    """Seconds of "30d", "12h" … Raises MoestroError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([smhdw])\s*", text)
    if found is None or not float(found[1]) > 0:
        raise MoestroError(f"--deadline {text}: give a number with s, m, h, d or w, as 30d")
    return float(found[1]) * SECONDS[found[2]]


def parse_headroom(text: str) -> tuple[float, float]:
    """A share and bytes, one of them 0. Raises MoestroError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*(%|GB|GiB|MB|MiB)\s*", text) if text else None
    if text and (found is None or (found[2] == "%" and float(found[1]) >= 100)):
        raise MoestroError(f"--headroom {text}: give a share of a device's memory below 100% or a size, as 10% or 8GB")
    if found is None:
        return 0.0, 0.0
    number = float(found[1])
    return (number / 100, 0.0) if found[2] == "%" else (0.0, number * BYTES[found[2]])


def parse_counts(text: str) -> tuple[int, ...]:
    """Numbers of devices, in the order given. Raises MoestroError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise MoestroError(f"--devices {text}: give a number above 0, or several, as 64,128,256")
    if max(map(int, parts)) > MOST_DEVICES:
        raise MoestroError(f"--devices {text}: {MOST_DEVICES:,} are the most to search for")
    return tuple(dict.fromkeys(int(part) for part in parts))


def _price(usd_per_hour: float | None, target: "Target") -> float | None:
    """Given, or the catalog's; None: neither, or of unlike devices, which have no one price."""
    from moestro.predict.cost import rented

    price = target.place.device.price
    if usd_per_hour is None and (target.parts or not (price.usd_per_hour_low or price.usd_per_hour_high)):
        return None
    return rented(target.place.device, usd_per_hour).usd_per_hour


def _failures(asked: Asked, target: "Target") -> "Failures | None":
    from math import inf

    from moestro.plan.objective import Failures
    from moestro.predict.recovery import Storage

    if asked.mtbf_hours is None:
        return None
    storage = target.storage
    if asked.storage_gbps is not None:
        if not asked.storage_gbps > 0:
            raise MoestroError("--storage-gbps must be above 0")
        nic = target.place.device.nic.per_device_gbit.best
        storage = Storage(asked.storage_gbps * 1e9, nic / 8 * 1e9 if nic else inf)
    checkpoint_s = CHECKPOINT_S if asked.checkpoint_s is None and storage is None else asked.checkpoint_s
    return Failures(asked.mtbf_hours * 3600, asked.restart_s, checkpoint_s, storage)
