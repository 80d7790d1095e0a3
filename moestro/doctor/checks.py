"""What the doctor finds: one check, one node's report, and the verdict that a scheduler reads."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from moestro.config.base import Section

Status = Literal["passed", "warned", "failed", "skipped", "error"]
Verdict = Literal["fit", "unfit", "undecided"]

# Exit statuses of `moestro doctor`. 1 stays a crash of the program, 2 a user error.
EXIT_CODES: dict[Verdict, int] = {"fit": 0, "unfit": 3, "undecided": 4}

GIB = 2**30


class Check(Section):
    """One finding.

    passed: within its limit. warned: worth mending, no reason to refuse work. failed: the node is unfit. skipped: does
    not apply here, or may not be looked at. error: it should have been decided but could not be.
    value and limit are in `unit`; both are None for a check that is not of a number.
    """

    name: str
    status: Status
    reason: str
    remedy: str = ""
    value: float | None = None
    limit: float | None = None
    unit: str = ""
    seconds: float = 0.0


class NodeReport(Section):
    """The checks of one node, with what rank 0 compares between nodes.

    rates: of tier 2, by the names of their checks and in their units. clock_s: this node's clock minus that of rank
    0's node, ± the uncertainty; None for a single node. met_nobody: rank 0 could not be told.
    """

    node: str
    rank: int = 0
    device: str = ""
    tier: int
    started_at: str
    seconds: float
    checks: tuple[Check, ...]
    versions: dict[str, str]
    rates: dict[str, float]
    clock_s: float | None = None
    clock_uncertainty_s: float | None = None
    met_nobody: bool = False

    def having(self, *statuses: Status) -> list[Check]:
        return [check for check in self.checks if check.status in statuses]

    @property
    def verdict(self) -> Verdict:
        """unfit: a check failed. undecided: none failed, but one could not be decided. Warnings leave a node fit."""
        if self.having("failed"):
            return "unfit"
        return "undecided" if self.having("error") or not self.checks else "fit"


def overall(reports: list[NodeReport]) -> Verdict:
    """fit only when every node is."""
    verdicts = {report.verdict for report in reports}
    return "unfit" if "unfit" in verdicts else "undecided" if "undecided" in verdicts or not verdicts else "fit"


def passed(name: str, reason: str, **figures: Any) -> Check:
    return Check(name=name, status="passed", reason=reason, **figures)


def warned(name: str, reason: str, remedy: str, **figures: Any) -> Check:
    return Check(name=name, status="warned", reason=reason, remedy=remedy, **figures)


def failed(name: str, reason: str, remedy: str, **figures: Any) -> Check:
    return Check(name=name, status="failed", reason=reason, remedy=remedy, **figures)


def skipped(name: str, reason: str, remedy: str = "") -> Check:
    return Check(name=name, status="skipped", reason=reason, remedy=remedy)


def three_digits(value: float) -> str:
    """1234.5 → `1,234`; 12.345 → `12.3`; never with an exponent where a person would not write one."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


Found = Check | list[Check]


def run_bounded(checks: Mapping[str, Callable[[], Found]], limit_s: float) -> list[Check]:
    """Run all `checks` at once, each in a thread of its own; returns their findings in the order given.

    A check that has not returned after `limit_s` has failed: its thread is left behind, since a call that hangs in the
    kernel (a dead network file system, a dead driver) cannot be ended. One that raises is an "error".
    """
    found: dict[str, list[Check]] = {}
    threads = []
    for name, check in checks.items():
        thread = threading.Thread(target=_run, args=(name, check, found), name=f"doctor: {name}", daemon=True)
        threads.append(thread)
        thread.start()
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    hung = "a call into the system hangs: look for a dead file system or driver in the kernel log, or restart the node"
    return [
        check
        for name in checks
        for check in found.get(name, [failed(name, f"no answer within {limit_s:g} s", hung, seconds=limit_s)])
    ]


def hung() -> bool:
    """Whether a check is still under way: then the process must not wait for its threads or children to end."""
    return any(thread.name.startswith("doctor: ") for thread in threading.enumerate())


def _run(name: str, check: Callable[[], Found], found: dict[str, list[Check]]) -> None:
    start = time.monotonic()
    try:
        result = check()
        checks = result if isinstance(result, list) else [result]
    except Exception as error:
        reason = f"could not be decided: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        checks = [Check(name=name, status="error", reason=reason.rstrip(": "), remedy="decide this one by hand")]
    seconds = round(time.monotonic() - start, 3)
    found[name] = [check.model_copy(update={"seconds": check.seconds or seconds}) for check in checks]
