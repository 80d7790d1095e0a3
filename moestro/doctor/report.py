"""The doctor's findings for people and for machines."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from moestro.config.files import write_whole
from moestro.doctor.checks import EXIT_CODES, NodeReport, Status, overall

MARKS: dict[Status, tuple[str, str]] = {
    "passed": ("✓", "green"),
    "warned": ("!", "yellow"),
    "failed": ("✗", "red"),
    "skipped": ("–", "dim"),
    "error": ("?", "magenta"),
}


def as_data(reports: Sequence[NodeReport]) -> dict[str, Any]:
    """The verdict, the passing and the failing nodes, and every check of every node; as JSON would hold it."""
    verdict = overall(list(reports))
    return {
        "verdict": verdict,
        "exit_code": EXIT_CODES[verdict],
        "passing": [report.node for report in reports if report.verdict == "fit"],
        "failing": [
            {
                "node": report.node,
                "rank": report.rank,
                "verdict": report.verdict,
                "reasons": [f"{check.name}: {check.reason}" for check in report.having("failed", "error")],
            }
            for report in reports
            if report.verdict != "fit"
        ],
        "nodes": [{**report.model_dump(mode="json"), "verdict": report.verdict} for report in reports],
    }


def write_json(reports: Sequence[NodeReport], path: Path) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(as_data(reports), indent=1) + "\n")


def page(reports: Sequence[NodeReport]) -> Group:
    """What the terminal shows: every check of a single node; of several, what is wrong with each, and the lists."""
    if len(reports) == 1:
        report = reports[0]
        head = Text(f"{report.node}, {report.device or 'no device'}, tier {report.tier}", style="bold")
        return Group(head, _table(report, everything=True), Text(), Text(last_line(report)))
    parts = list[Table | Text]()
    for report in reports:
        if report.having("failed", "error", "warned"):
            title = Text(f"{report.node} (rank {report.rank}), {report.device or 'no device'}", style="bold")
            parts += [title, _table(report, everything=False), Text()]
    fit = [report.node for report in reports if report.verdict == "fit"]
    parts.append(Text(f"passing, {len(fit)} of {len(reports)}: {', '.join(fit) or '–'}"))
    failing = [report for report in reports if report.verdict != "fit"]
    parts.append(Text(f"failing, {len(failing)} of {len(reports)}:" + ("" if failing else " –")))
    parts += [Text(f"  {report.node} (rank {report.rank}): {last_line(report)}") for report in failing]
    verdict = overall(list(reports))
    parts.append(
        Text(verdict if verdict == "fit" else f"{verdict}: {', '.join(f'{r.node} (rank {r.rank})' for r in failing)}")
    )
    return Group(*parts)


def last_line(report: NodeReport) -> str:
    """`fit (19 checks, 2 warnings, 8.1 s)`, or `unfit: disk, nics`."""
    count = f"{len(report.checks)} checks"
    if warnings := len(report.having("warned")):
        count += f", {warnings} warning{'s' if warnings > 1 else ''}"
    if report.verdict == "fit":
        return f"fit ({count}, {report.seconds:.1f} s)"
    wrong = report.having("failed") or report.having("error")
    return f"{report.verdict}: {', '.join(dict.fromkeys(check.name for check in wrong))}"


def _table(report: NodeReport, everything: bool) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in report.checks:
        if not everything and check.status in ("passed", "skipped"):
            continue
        mark, colour = MARKS[check.status]
        found = escape(check.reason)
        if check.remedy and check.status != "passed":
            found += f"\n[dim]→ {escape(check.remedy)}[/dim]"
        table.add_row(f"[{colour}]{mark}[/{colour}]", check.name, found)
    return table
