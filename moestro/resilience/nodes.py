"""The life of a node as a state machine: every transition is checked against the allowed ones and logged.

The states and the arrows between them are those of the Lucia Training Platform (SIGMA, arXiv 2512.13488).
"""

import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, get_args

from moestro.errors import MoestroError
from moestro.resilience.taxonomy import Category

State = Literal[
    "new", "validating", "available", "cordoned", "triaged_hardware", "triaged_user", "triaged_platform",
    "triaged_unknown", "ua", "deallocated_ua", "allocated_ua", "deallocated_capacity",
]  # fmt: skip
TRIAGED: tuple[State, ...] = ("triaged_hardware", "triaged_user", "triaged_platform", "triaged_unknown")
# ua: unallocatable, out for repair.
ALLOWED: dict[State, tuple[State, ...]] = {
    "new": ("validating",),
    "validating": ("available", "cordoned", *TRIAGED, "deallocated_capacity"),
    "available": ("cordoned", *TRIAGED),
    "cordoned": ("available", *TRIAGED),
    "triaged_hardware": ("ua",),
    "triaged_user": ("validating", "available"),
    "triaged_platform": ("validating", "available"),
    "triaged_unknown": ("validating", "cordoned", "triaged_hardware", "triaged_user", "triaged_platform"),
    "ua": ("deallocated_ua",),
    "deallocated_ua": ("allocated_ua",),
    "allocated_ua": ("validating",),
    "deallocated_capacity": (),
}
TRIAGE_OF: dict[Category, State] = {
    "hardware": "triaged_hardware",
    "user": "triaged_user",
    "platform": "triaged_platform",
    "numeric": "triaged_unknown",
    "unknown": "triaged_unknown",
}


@dataclass(frozen=True)
class Transition:
    host: str
    before: State
    after: State
    reason: str
    detail: str = ""
    time: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%S%z"))


class Nodes:
    """The state of each host, with a log of JSON lines from which it can be made again. log: None keeps none."""

    def __init__(self, log: Path | None = None) -> None:
        self._log, self._states = log, dict[str, State]()
        if log is not None and log.is_file():
            for one in read_log(log):
                self._states[one.host] = one.after

    def state(self, host: str) -> State:
        return self._states.get(host, "new")

    def hosts(self, state: State) -> list[str]:
        return [host for host, own in self._states.items() if own == state]

    def move(self, host: str, after: State, reason: str, detail: str = "") -> Transition:
        """Take a host to another state.

        Raises:
            MoestroError: there is no such transition, or the log cannot be written; the state is as before.
        """
        before = self.state(host)
        if after not in ALLOWED[before]:
            ways = ", ".join(ALLOWED[before]) or "nowhere"
            raise MoestroError(f"{host} is {before} and cannot become {after}; from there it goes to {ways}")
        made = Transition(host, before, after, reason, detail)
        if self._log is not None:
            _append(self._log, made)
        self._states[host] = after
        return made

    def waiting(self) -> list[str]:
        """Hosts that somebody must still decide about: all but those at work and those given up."""
        done = ("available", "deallocated_capacity")
        return [host for host, state in self._states.items() if state not in done]


def way(before: State, goals: Iterable[State]) -> list[State]:
    """The shortest way from a state to one of `goals`, without the first; [] if it is one, or there is none."""
    goals, ways, seen = set(goals), [[before]], {before}
    while ways:
        here = ways.pop(0)
        if here[-1] in goals:
            return here[1:]
        for state in ALLOWED[here[-1]]:
            if state not in seen:
                seen.add(state)
                ways.append([*here, state])
    return []


def read_log(path: Path) -> list[Transition]:
    """Transitions as they were logged; a torn last line is passed over.

    Raises:
        MoestroError: it is not such a log, or holds a transition that is not allowed.
    """
    found: list[Transition] = []
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        try:
            one = Transition(**json.loads(line))
        except (ValueError, TypeError):
            continue
        if one.before not in get_args(State) or one.after not in ALLOWED[one.before]:
            raise MoestroError(f"{path}:{number}: {one.before} to {one.after} is no transition of a node")
        found.append(one)
    return found


def _append(path: Path, made: Transition) -> None:
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, (json.dumps(asdict(made)) + "\n").encode())
        finally:
            os.close(file)
    except OSError as error:
        raise MoestroError(f"cannot write {path}: {error.strerror}") from error
