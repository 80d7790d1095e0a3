"""Where the time went, from files written by hand; and the page and the terminal that show it."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from moestro.errors import MoestroError
from moestro.report.faults import fault_figures, faults
from moestro.resilience.goodput import Goodput, is_watched_run, measure_goodput
from moestro.train.incidents import Incident, record

STEP_S, DATA_S, SAVE_S = 1.0, 0.1, 0.5


def lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(one) + "\n" for one in records))


def step(number: int) -> dict[str, Any]:
    return {"kind": "train", "step": number, "step_s": STEP_S, "data_s": DATA_S, "tokens_per_s": 100.0}


def attempt(number: int, started: float, ended: float, first: int, last: int, end: str) -> dict[str, Any]:
    return {
        "number": number, "ranks": 2, "started": started, "ended": ended, "first_step": first, "last_step": last,
        "moved": ended - 5.0, "slow": {}, "end": end,
    }  # fmt: skip


def write_run(folder: Path) -> Path:
    """Twelve steps, saved after every fifth; killed after step 7, so that two are done again."""
    lines(folder / "metrics.jsonl", [step(n) for n in (*range(1, 8), *range(6, 13))])
    saves = [{"event": "checkpoint", "step": n, "stall_s": SAVE_S} for n in (5, 10, 12)]
    lines(folder / "events.jsonl", [{"event": "start", "step": 0}, *saves])
    lines(
        folder / "attempts.jsonl",
        [attempt(0, 1000.0, 1012.0, 0, 7, "killed"), attempt(1, 1014.0, 1040.0, 5, 12, "done")],
    )
    record(folder, Incident("killed", "restart", 7, {"status": "SIGKILL"}, 1, "host", 9.0, "2026-12-01T10:00:00+0000"))
    record(folder, Incident("slow_rank", "flag", 9, {"own_time_over_others": 1.31}, 0, "host"))
    record(folder, Incident("node_lost", "shrink", 7, {}, None, "host"))
    return folder


def test_parts_add_up(tmp_path: Path) -> None:
    of = measure_goodput(write_run(tmp_path))
    assert (of.wall_s, of.steps, of.redone_steps, of.redone_tokens) == (40.0, 12, 2, 200)
    assert of.useful_s == pytest.approx(12 * STEP_S)
    assert of.data_s == pytest.approx(12 * DATA_S)
    assert of.redone_s == pytest.approx(2 * (STEP_S + DATA_S))
    assert (of.checkpoint_s, of.down_s, of.faults, of.flagged) == (1.5, 9.0, 1, 2)
    parts = of.useful_s + of.data_s + of.checkpoint_s + of.evaluate_s + of.redone_s + of.down_s + of.rest_s
    assert parts == pytest.approx(of.wall_s)
    assert of.goodput == pytest.approx(12 / 40)
    assert (of.mttf_s, of.mttr_s) == (31.0, 9.0)
    assert of.interval_s == pytest.approx(5 * (STEP_S + DATA_S))


def test_a_run_that_was_supervised_twice(tmp_path: Path) -> None:
    """The night between is not counted."""
    write_run(tmp_path)
    with (tmp_path / "attempts.jsonl").open("a") as file:
        file.write(json.dumps(attempt(0, 90_000.0, 90_010.0, 12, 20, "done")) + "\n")
    assert measure_goodput(tmp_path).wall_s == 50.0


def test_logged_now_and_then(tmp_path: Path) -> None:
    lines(tmp_path / "metrics.jsonl", [step(n) for n in (10, 20, 30)])
    of = measure_goodput(tmp_path)
    assert of.useful_s == pytest.approx(30 * STEP_S)
    assert of.faults == 0
    assert of.mttf_s == math.inf
    assert math.isnan(of.predicted)


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(MoestroError, match="holds no training step"):
        measure_goodput(tmp_path)


def test_the_model_says_the_same_of_a_run_that_follows_it(tmp_path: Path) -> None:
    """Faults at random times over a long run, played here step by step: within a tenth of the closed form."""
    rng, mtbf_s, down_s, every = random.Random(3), 60.0, 7.0, 10
    metrics: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    clock, saved, failure = 0.0, 0, rng.expovariate(1 / mtbf_s)
    while saved < 4000:
        for number in range(saved + 1, saved + every + 1):
            clock += STEP_S + DATA_S
            if clock > failure:
                break
            metrics.append(step(number))
        else:
            clock += SAVE_S
            saved += every
            events.append({"event": "checkpoint", "step": saved, "stall_s": SAVE_S})
        while clock > failure:  # a restart may fail, too
            begin, failure = failure, failure + rng.expovariate(1 / mtbf_s)
            clock = min(begin + down_s, failure + 1e-9)
            record(tmp_path, Incident("killed", "restart", saved, downtime_s=clock - begin))
    lines(tmp_path / "metrics.jsonl", metrics)
    lines(tmp_path / "events.jsonl", events)
    lines(tmp_path / "attempts.jsonl", [attempt(0, 0.0, clock, 0, saved, "done")])
    of = measure_goodput(tmp_path)
    assert of.faults > 50
    assert of.training == pytest.approx(of.predicted, rel=0.1)


def test_what_the_page_shows(tmp_path: Path) -> None:
    shown = faults(write_run(tmp_path))
    assert shown is not None
    assert [row["signal"] for row in shown["rows"]] == ["killed", "slow rank", "node lost"]
    assert shown["rows"][0]["downtime"] == "9.00 s"
    assert shown["rows"][0]["where"] == "rank 1, host"
    assert [part.name for part in shown["parts"]][:2] == ["useful steps", "batches"]
    (plot,) = shown["plots"]
    assert len(plot.figure.data) == 2 + len({row["category"] for row in shown["rows"]})
    assert "<" not in "".join(str(trace.hovertext) for trace in plot.figure.data)


def test_nothing_to_show_of_a_run_that_nobody_watched(tmp_path: Path) -> None:
    lines(tmp_path / "metrics.jsonl", [step(1)])
    assert not is_watched_run(tmp_path)
    assert faults(tmp_path) is None


def test_key_figures_without_faults() -> None:
    of = Goodput(100.0, 90.0, 0, 1, 0, 0, 0, 9, 50, 0, 0, 0, 0, 0, math.nan)
    labels = [figure.label for figure in fault_figures(of)]
    assert labels == ["Goodput", "Faults"]
    assert "nan" not in "".join(figure.detail for figure in fault_figures(of))


def test_the_whole_page(tmp_path: Path) -> None:
    from moestro.report import write_report

    record(write_run(tmp_path), Incident("disk_full", "flag", 3, {"error": "<script>"}))
    page = write_report(tmp_path).read_text()
    body = page[page.index("<body>") : page.index("<script>")]
    for text in ('id="faults"', "Goodput", "Time line", "killed", "disk full", "&lt;script&gt;", "30.0"):
        assert text in body
