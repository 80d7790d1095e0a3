"""The page of a run: complete, safe, small, offline, and honest about damage."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from moestro.errors import MoestroError
from moestro.report import print_summary, write_report
from moestro.report.curves import bin_means, heatmap_columns, layer_points, smooth, thin
from moestro.report.keyfigures import key_figures, run_status
from moestro.report.read import read_run
from moestro.report.text import duration, percent, si

from .synthetic import train_record, write_lines, write_run

_SCRIPT = re.compile(r"<script[^>]*>.*?</script>", re.DOTALL)


def _page(folder: Path) -> str:
    return write_report(folder).read_text(encoding="utf-8").replace("\u00a0", " ")


def _figures(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    assert found
    figures: dict[str, Any] = json.loads(found[1])
    return figures


def _values(array: dict[str, str]) -> np.ndarray:
    import base64

    return np.frombuffer(base64.b64decode(array["bdata"]), dtype=array["dtype"])


def _figure(folder: Path, label: str) -> Any:
    return next(figure for figure in key_figures(read_run(folder)) if figure.label == label)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "full")


@pytest.fixture(scope="module")
def page(run: Path) -> str:
    return _page(run)


def test_page_holds_what_the_run_recorded(page: str) -> None:
    for text in (
        "tales-8x2", "does bias balancing hold", "finished", "AMD EPYC 9654, 2 threads", "be486ae0c1d2", "2.11.0",
        "2025-03-04 09:12:44 UTC", "of 300 planned", "12.9 M", "5.87 M active", "118 GFLOP/s measured in fp32",
        "xz -9", "there was a king", "Grimm&#39;s Fairy Tales", "CC BY 4.0", "expert_hidden_size",
        "checkpoints/step-000100", "10–90", "uncommitted changes", "38.2 MFLOPs per token",
    ):  # fmt: skip
        assert text in page, text


def test_page_draws_every_plot(page: str) -> None:
    figures = _figures(page)
    assert set(figures) == {
        "plot-" + key
        for key in ("loss", "bits", "lr", "grad", "router-loss", "rate", "mfu", "load", "load-end", "imbalance",
                    "load-entropy", "token-entropy")
    }  # fmt: skip
    for key in figures:
        assert f'id="{key}"' in page
    assert len(figures["plot-load"]["data"]) == 4  # one map per MoE layer
    references = [trace["name"] for trace in figures["plot-bits"]["data"] if trace["line"]["dash"] != "solid"]
    assert references == ["zstd -19 (2.42)", "xz -9 (2.31)", "5-gram Kneser-Ney (2.07)"]


def test_load_map_shows_multiples_of_the_uniform_share(run: Path, page: str) -> None:
    trace = _figures(page)["plot-load-end"]["data"][0]
    shown = _values(trace["z"]).reshape(4, 8)
    last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-2]
    assert shown == pytest.approx(np.array([layer["load"] for layer in last["layers"]]) * 8, abs=1e-5)
    even = next(place for place, colour in trace["colorscale"] if colour == "rgb(247, 247, 245)")
    assert even * trace["zmax"] == pytest.approx(1)


def test_user_text_is_escaped(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", 3)
    evil = "</script><script>alert('x')</script><img src=x onerror=alert(1)>"
    config = (folder / "config.toml").read_text().replace("tales-8x2", evil.replace('"', ""))
    (folder / "config.toml").write_text(config + f"# {evil}\n")
    (folder / "references.json").write_text(json.dumps({evil: 2.0}))
    write_lines(folder / "samples.jsonl", [{"step": 3, "prompt": evil, "text": evil}])
    write_lines(folder / "events.jsonl", [{"time": 0, "event": evil, "step": 1, "note": evil}])
    environment = {"device_name": evil, "hostname": evil, "data": {"notices": [evil], "skipped": {evil: 1}}}
    (folder / "environment.json").write_text(json.dumps(environment))
    page = _page(folder)
    assert "<script>alert" not in page
    assert "<img src=x" not in page
    assert page.count("<script") == page.count("</script>") == 3
    assert "&lt;img src=x" in page


def test_page_loads_nothing_from_the_network(page: str) -> None:
    outside_scripts = _SCRIPT.sub("", page)
    assert not re.search(r"""(src|href|url)\s*[=(]\s*["']?\s*(https?:|//)""", outside_scripts)
    assert not re.search(r"<script[^>]*\ssrc=|<link\b|@import", page[: page.index("<script")])
    # The browser itself refuses every load, whatever plotly or a sample would ask for.
    assert "default-src 'none'" in page
    assert "connect-src" not in page


def test_torn_line_is_counted_not_fatal(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", 5, layers=0)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind":"train","step":6,"lo')
    assert "metrics.jsonl: skipped 1 unreadable line" in _page(folder)
    assert read_run(folder).train.step[-1] == 5


def test_resume_replaces_the_steps_it_runs_again(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", 10, layers=0, eval_every=None)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    again = [train_record(step, 10, seed=1) | {"time_s": 1.0 * step} for step in (7, 8, 9, 10)]
    write_lines(folder / "metrics.jsonl", [*records, *again])
    run = read_run(folder)
    assert run.train.step.tolist() == list(range(1, 11))
    assert run.train.loss[6:].tolist() == [record["loss"] for record in again]
    assert run.train.loss[:6].tolist() == [record["loss"] for record in records[:6]]
    assert run.redone_steps == 4
    # Both stretches count: the time of the discarded steps was spent.
    assert run.wall_time_s == pytest.approx(records[0]["step_s"] + 9 * 0.34 + again[0]["step_s"] + 3.0)
    assert "4 logged steps ran again after a resume" in _page(folder)


def test_steps_behind_a_resume_do_not_outlive_it(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", 10, eval_every=5)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    write_lines(folder / "metrics.jsonl", [*records, train_record(6, 10, seed=1)])
    run = read_run(folder)
    assert run.train.step[-1] == 6
    assert run.evals.step.tolist() == [5]


def test_dense_model_has_no_expert_plots(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", 20, layers=0)
    page = _page(folder)
    assert "This model is dense" in page
    assert not {"plot-load", "plot-imbalance", "plot-token-entropy"} & set(_figures(page))
    assert "no router, nothing to drop" in page


def test_single_step_without_evaluation(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", 1, layers=2, eval_every=None)
    page = _page(folder)
    assert "This run has no evaluation" in page
    figures = _figures(page)
    assert "plot-bits" not in figures
    assert "markers" in figures["plot-loss"]["data"][0]["mode"]  # a line of one point would be invisible


def test_losses_that_are_not_numbers_are_gaps_with_a_note(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", 60, layers=0, eval_every=20)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        if record["step"] in (20, 21):
            record["loss"] = math.nan if record["kind"] == "train" else -math.inf
        elif record["step"] == 22:
            record["loss"] = None
    write_lines(folder / "metrics.jsonl", records)
    page = _page(folder)
    assert "training loss is NaN or infinite at 3 steps (first: step 20)" in page
    assert "validation loss is NaN or infinite at 1 evaluation" in page
    drawn = _values(_figures(page)["plot-loss"]["data"][0]["y"])
    assert np.flatnonzero(np.isnan(drawn)).tolist() == [19, 20, 21]


def test_long_wide_run_stays_small(tmp_path: Path) -> None:
    wide = json.dumps(train_record(0, 50, 24, 64))
    narrow = json.dumps({key: value for key, value in json.loads(wide).items() if key != "layers"})
    # Every fourth step has its layers: enough for the size, and three times faster to read.
    lines = [(narrow if step % 4 else wide).replace('"step": 0', f'"step": {step}') for step in range(1, 1601)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    page = write_report(tmp_path)
    assert page.stat().st_size < 8_000_000
    figures = _figures(page.read_text(encoding="utf-8"))
    assert len(_values(figures["plot-loss"]["data"][0]["y"])) <= 1000
    assert len(_values(figures["plot-load"]["data"][0]["x"])) <= 300
    assert len(figures["plot-load"]["layout"]["updatemenus"][0]["buttons"]) == 24


@pytest.mark.parametrize(("layers", "experts"), [(1, 8), (4, 8), (12, 64), (60, 256), (100, 1024)])
def test_points_stay_within_their_budget_at_any_size(layers: int, experts: int) -> None:
    assert heatmap_columns(layers, experts) <= 300
    assert heatmap_columns(layers, experts) * layers * experts <= 300_000
    assert 30 <= layer_points(layers) <= 1000
    assert layer_points(layers) * layers <= 20_000


def test_dropped_share_is_printed_also_when_zero(run: Path, tmp_path: Path) -> None:
    assert _figure(run, "Dropped assignments").value == "0\u00a0%"
    folder = write_run(tmp_path / "r", 4, layers=1)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        for layer in record.get("layers", []):
            layer["dropped"] = 0.04 if record["step"] == 2 else 0.0
    write_lines(folder / "metrics.jsonl", records)
    assert _figure(folder, "Dropped assignments").value == "1.0\u00a0%"
    assert "plot-dropped" in _figures(_page(folder))


@pytest.mark.parametrize(
    ("events", "word"),
    [
        (["start", "checkpoint", "finish"], "finished"),
        (["start", "interrupt"], "interrupted"),
        (["start", "finish", "resume", "checkpoint"], "running"),
        ([], "running"),
    ],
)
def test_status_is_that_of_the_last_telling_event(tmp_path: Path, events: list[str], word: str) -> None:
    folder = write_run(tmp_path / "r", 2)
    write_lines(folder / "events.jsonl", [{"time": 0, "event": event, "step": 2} for event in events])
    assert run_status(read_run(folder)).word == word


def test_only_metrics_is_enough(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [{"kind": "train", "step": 1, "loss": 2.0}])
    page = _page(tmp_path)
    assert tmp_path.name in page
    assert "config.toml is missing" in page


@pytest.mark.parametrize("prepare", ["absent", "empty", "blank"])
def test_no_run_is_a_user_error_with_a_remedy(tmp_path: Path, prepare: str) -> None:
    folder = tmp_path / "r"
    if prepare != "absent":
        folder.mkdir()
    if prepare == "blank":
        (folder / "metrics.jsonl").write_text("")
    with pytest.raises(MoestroError, match=r"moestro train|events\.jsonl"):
        write_report(folder)
    assert not list(folder.glob("*report*"))


def test_failed_write_keeps_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "r", 1, layers=0, eval_every=None)
    (folder / "report.html").write_text("old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_report(folder)
    assert (folder / "report.html").read_text() == "old"
    assert sorted(p.name for p in folder.iterdir() if "report" in p.name) == ["report.html"]


def test_summary_prints_the_key_figures(run: Path) -> None:
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_summary(run, console)
    text = console.export_text().replace("\u00a0", " ")
    for label in ("tales-8x2", "finished", "Validation bits / byte", "Tokens / s", "MFU", "Dropped assignments", "0 %"):
        assert label in text


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (si(999_999), "1.00 M"),
        (si(1234, "FLOP/s"), "1.23 kFLOP/s"),
        (si(12), "12"),
        (si(math.nan), "–"),
        (percent(0.0), "0 %"),
        (percent(3e-6), "< 0.01 %"),
        (percent(0.125), "12.5 %"),
        (duration(59.99), "60.0 s"),
        (duration(3600), "1 h 00 min"),
    ],
)
def test_numbers_read_well(shown: str, expected: str) -> None:
    assert shown.replace("\u00a0", " ") == expected


def test_thinning_keeps_spikes_gaps_and_ends() -> None:
    step = np.arange(10_000)
    values = np.zeros(10_000)
    values[1234], values[5678], values[777] = 9.0, -9.0, np.nan
    kept, thinned = thin(step, values, 300)
    assert len(kept) <= 302
    assert {0, 1234, 5678, 777, 9999} <= set(kept.tolist())
    assert np.nanmax(thinned) == 9
    assert (np.diff(kept) > 0).all()


def test_smoothing_does_not_bend_a_straight_line() -> None:
    line = np.arange(400, dtype=np.float64)
    smoothed, window = smooth(line)
    assert window == 11
    assert smoothed == pytest.approx(line)


def test_bins_average_within_and_ignore_gaps() -> None:
    step, means = bin_means(np.arange(1, 5), np.array([[1.0], [3.0], [np.nan], [5.0]]), 2)
    assert step.tolist() == [2, 4]
    assert means.tolist() == [[2.0], [5.0]]
