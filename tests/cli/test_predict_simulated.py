"""`moestro predict --simulate` and `--slow`: what is printed, for people and machines, and mistakes."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from moestro.predict import cache

from .helpers import moestro

STEP = ("predict", "olmoe-1b-7b", "--hardware", "h100-8", "plan.ep=2", "plan.pp=2", "plan.overlap_dispatch=true",
        "train.global_batch_size=32")  # fmt: skip


@pytest.fixture(autouse=True)
def no_public_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.FOLDER, str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_known", {})
    monkeypatch.setattr(cache, "_as_read", {})
    monkeypatch.setattr(cache, "_shipped", lambda device_id: ())


def test_the_simulation_is_printed_below_the_step() -> None:
    done = moestro(*STEP, "--slow", "1=1.5")
    assert done.code == 0, done.err
    for text in (
        "simulated, pass by pass and stream by stream, pipeline rank 1 × 1.5 as slow", "to the step above",
        "paced by pipeline rank 1", "computation  ep exposed", "share", "exposed there, of all that is sent: ep ",
    ):  # fmt: skip
        assert text in done.out, text
    assert "simulated" not in moestro(*STEP).out


def test_json_and_trace(tmp_path: Path) -> None:
    path = tmp_path / "there" / "step.json"
    done = moestro(*STEP, "--simulate", "--perfetto", str(path), "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)["simulated"]
    assert found["paced_by"] in (0, 1)
    assert [rank["total_s"] for rank in found["ranks"]] == pytest.approx([found["step_s"]] * 2)
    assert found["step_s"] == pytest.approx(found["composed_s"], rel=0.2)
    events = json.loads(path.read_text())["traceEvents"]
    names = {(e["pid"], e["args"]["name"]) for e in events if e["ph"] == "M"}
    assert names >= {(rank, name) for rank in (0, 1) for name in (f"pipeline rank {rank}", "passes", "compute", "ep")}
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            rows.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for row in rows.values():
        assert all(later[0] >= earlier[1] - 1e-3 for earlier, later in pairwise(sorted(row)))
    assert max(end for row in rows.values() for _, end in row) <= 1e6 * found["step_s"] + 1


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([*STEP, "--slow", "1"], "--slow 1: write RANK=FACTOR"),
        ([*STEP, "--slow", "2=2"], "no pipeline rank 2 that could be slow; they are 0 to 1"),
        ([*STEP, "--slow", "1=0"], "cannot be 0 times as slow"),
        (["predict", "--trace", "a:b", "--simulate"], "--simulate and --slow take a preset"),
        ([*STEP, "plan.schedule=dualpipe", "--simulate"], "needs 4 micro-batches"),
    ],
)  # fmt: skip
def test_mistakes(arguments: list[str], error: str) -> None:
    done = moestro(*arguments)
    assert done.code == 2
    assert error in " ".join(done.err.split())


def test_kernels_drawn_as_one_are_named_by_first_and_last(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    done = moestro(*STEP, "--simulate", "--perfetto", str(path))
    assert done.code == 0, done.err
    names = {event["name"] for event in json.loads(path.read_text())["traceEvents"] if event.get("tid") == 1}
    assert any(name.startswith("look-up … ") for name in names)
    assert not any(name.count(" … ") > 1 for name in names)
