"""Printing the catalog: the table of all papers, one paper's record, one paper run."""

import json
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from papers.catalog import PAPERS, find_paper
from papers.result import Check, Paper, Record
from papers.store import RESULTS_DIR, read_record, run_paper, write_record

FOOTNOTE = """
Nothing was run just now: figures are those recorded when a paper was last run.
`moestro papers show SLUG` prints its checks, `moestro papers run SLUG` runs it."""

STYLES = {
    "holds": "green",
    "holds in part": "yellow",
    "does not hold": "red",
    "arithmetic does not close": "magenta",
    "not reproducible here": "cyan",
}


def print_table(as_json: bool) -> None:
    """Every paper with its recorded headline."""
    papers = sorted(PAPERS.values(), key=lambda paper: paper.number)
    rows = [(paper, read_record(paper.slug)) for paper in papers]
    if as_json:
        _print_json([_plain(paper, record) for paper, record in rows])
        return
    console = Console()
    console.print(_table(rows))
    console.print(FOOTNOTE, style="dim", highlight=False)


def print_record(slug: str, as_json: bool) -> None:
    """All recorded checks of one paper."""
    paper = find_paper(slug)
    _print_paper(paper, read_record(slug), as_json)


def run_and_print(slug: str, as_json: bool) -> None:
    """Reproduce one paper, print its checks, and record them where the results folder can be written."""
    paper = find_paper(slug)
    err = Console(stderr=True)
    with _bar(err) as bar:
        task = bar.add_task(paper.system, total=None)

        def progress(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=f"{paper.system}: {what}")
            if not err.is_terminal and (done == total or done % max(total // 10, 1) == 0):
                err.print(f"{paper.system}: {done}/{total} {what}", highlight=False)

        record = run_paper(paper, progress)
    _print_paper(paper, record, as_json)
    try:
        where = f"recorded in {write_record(record)}"
    except OSError as error:
        where = f"not recorded: {RESULTS_DIR} cannot be written ({error.strerror}); --json prints all of it"
    err.print(where, highlight=False, soft_wrap=True, style="dim")


def _print_paper(paper: Paper, record: Record | None, as_json: bool) -> None:
    if as_json:
        _print_json(_plain(paper, record))
    else:
        Console().print(_report(paper, record))


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def _plain(paper: Paper, record: Record | None) -> dict[str, Any]:
    about = {key: getattr(paper, key) for key in ("slug", "number", "system", "title", "arxiv", "feature")}
    return {**about, "record": None if record is None else asdict(record)}


def _table(rows: list[tuple[Paper, Record | None]]) -> Group:
    """A heading the whole width for each paper, so that the figures below it have room at 80 columns."""
    parts: list[Any] = [_row("in Moestro", "published", "ours", "how", "verdict", style="bold")]
    for paper, record in rows:
        parts += [Text(), Text.assemble((paper.system, "bold"), f"  arXiv {paper.arxiv}  ", (paper.slug, "dim"))]
        if record is None:
            parts.append(_row(paper.feature, "", Text("not recorded", "dim"), "", ""))
            continue
        checks = record.result.checks
        holding = sum(check.verdict == "holds" for check in checks)
        how = Text.assemble(checks[0].how, (f"\nrecorded {record.recorded[:10]}", "dim"))
        verdict = Text.assemble(_verdict(checks[0]), (f"\n{holding} of {len(checks)} checks hold", "dim"))
        parts.append(_row(paper.feature, checks[0].published, checks[0].ours, how, verdict))
    return Group(*parts)


def _row(*cells: str | Text, style: str = "") -> Table:
    row = Table.grid(padding=(0, 2, 0, 0), expand=True)
    for ratio in (4, 4, 5, 3, 4):
        row.add_column(ratio=ratio, overflow="fold")
    row.add_row(*(Text(cell, style) if isinstance(cell, str) else cell for cell in cells))
    return row


def _report(paper: Paper, record: Record | None) -> Group:
    parts: list[Any] = [Text.assemble((paper.title, "bold"), f"\narXiv {paper.arxiv}; in Moestro: {paper.feature}")]
    if record is None:
        return Group(*parts, Text(f"Not recorded; `moestro papers run {paper.slug}` runs it."))
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    parts.append(Text(f"{record.recorded}, {record.seconds:.0f} s on {record.machine}; {versions}", "dim"))
    for check in record.result.checks:
        parts += [
            Text(),
            Text.assemble(_verdict(check), "  ", (check.claim, "bold")),
            Padding(_lines(check), (0, 0, 0, 2)),
        ]
    return Group(*parts)


def _verdict(check: Check) -> Text:
    return Text(check.verdict, STYLES[check.verdict])


def _lines(check: Check) -> Table:
    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="dim", no_wrap=True)
    lines.add_column(overflow="fold")
    lines.add_row("published", Text(check.published))
    lines.add_row(check.how, Text(check.ours))
    if check.note:
        lines.add_row("note", Text(check.note, "dim"))
    return lines


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("eta"), TimeRemainingColumn(elapsed_when_finished=False))  # fmt: skip
    return Progress(*columns, console=console, disable=not console.is_terminal)
