"""The page and the summary of a machine profile: complete, safe, honest about what is missing."""

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from moestro.errors import MoestroError
from moestro.hardware.profile import Machine, MachineProfile, Sample, load_profile
from moestro.measure.constants import with_curves
from moestro.measure.curves import Curves
from moestro.report.profile_page import render, rewrite_folder, write_folder, write_page, write_samples
from moestro.report.profile_plots import profile_plots
from moestro.report.profile_points import seconds, size
from moestro.report.profile_summary import counts, print_profile, summary_rows
from report.profiles import collectives, complete_profile, machine_profile, pairs, product, products, sample


@pytest.fixture(scope="module")
def complete() -> tuple[MachineProfile, Curves]:
    return complete_profile()


@pytest.fixture(scope="module")
def page(complete: tuple[MachineProfile, Curves]) -> str:
    return render(*complete).replace("\u00a0", " ")


@pytest.fixture(scope="module")
def figures(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    assert found
    drawn: dict[str, Any] = json.loads(found[1])
    return drawn


def _values(array: Any) -> Any:
    import base64

    if isinstance(array, dict):
        return np.frombuffer(base64.b64decode(array["bdata"]), dtype=array["dtype"])
    return np.array(array)


def _rendered(*samples: Sample, **changes: object) -> str:
    return render(*with_curves(machine_profile(list(samples), **changes)))


def test_all_six_plots_are_drawn(figures: dict[str, Any], page: str) -> None:
    keys = {"gemm", "memory", "attention", "busbw-all_reduce", "busbw-all_gather", "pairs-bandwidth", "pairs-latency",
            "width-gemm_n-fp32", "width-gemm_k-fp32", "width-hidden-fp32", "width-vocab-fp32"}  # fmt: skip
    assert set(figures) == {f"plot-{key}" for key in keys}
    for key in figures:
        assert f'id="{key}"' in page


def test_page_names_machine_figures_curves_and_constants(page: str) -> None:
    for text in ("box-1", "measured 2026-03-04 05:06 UTC (quick, 41 s)", "load 0.10 before", "120 GFLOP/s", "16.0 GB/s",
                 "2048×2048×2048", "all_reduce, 4 ranks", "start-up 200 µs", "half at", "align_gemm_n_fp32",
                 "alpha beta", "(98 % of the best)", "elementwise: no room", "134 MB/s"):  # fmt: skip
        assert text in page, text


def test_bus_bandwidth_has_a_colour_and_a_curve_for_each_number_of_ranks(figures: dict[str, Any]) -> None:
    traces = figures["plot-busbw-all_reduce"]["data"]
    assert [(t["name"], t["mode"]) for t in traces] == [
        (f"{ranks} ranks", mode) for ranks in (2, 4) for mode in ("markers", "lines")
    ]
    assert traces[0]["marker"]["color"] == traces[1]["line"]["color"] != traces[2]["marker"]["color"]
    # 2 ranks: factor 1; 64 MiB in 200 µs and 67.1 ms
    assert max(_values(traces[0]["y"])) == pytest.approx(2**26 / (200e-6 + 2**26 / 1e9) / 1e9, rel=1e-6)
    assert max(_values(traces[1]["y"])) == pytest.approx(max(_values(traces[0]["y"])), rel=0.02)


def test_noisy_points_are_hollow_and_bars_show_the_spread(figures: dict[str, Any]) -> None:
    trace = figures["plot-busbw-all_reduce"]["data"][0]
    symbols = trace["marker"]["symbol"]
    assert [symbols[i] for i in range(3)] == ["circle", "circle-open", "circle"]  # 4 KiB is noisy
    y, above, below = (
        _values(part) for part in (trace["y"], trace["error_y"]["array"], trace["error_y"]["arrayminus"])
    )
    assert above[0] == pytest.approx(y[0] / 0.95 - y[0])
    assert below[0] == pytest.approx(y[0] - y[0] / 1.05)


def test_knee_is_marked_where_the_logarithmic_axis_has_it(
    figures: dict[str, Any], complete: tuple[MachineProfile, Curves]
) -> None:
    layout, knee = figures["plot-gemm"]["layout"], complete[0].constants["knee_gflop_bf16"] * 1e9
    assert layout["shapes"][0]["x0"] == pytest.approx(knee)
    assert layout["annotations"][0]["x"] == pytest.approx(np.log10(knee))


def test_widths_are_coloured_by_alignment(figures: dict[str, Any]) -> None:
    names = [trace.get("name") for trace in figures["plot-width-gemm_n-fp32"]["data"]]
    assert names == [None, "odd", "2", "4", "8", "16", "64", "128+"]


def test_pairs_are_shown_in_both_directions(figures: dict[str, Any]) -> None:
    grid = _values(figures["plot-pairs-bandwidth"]["data"][0]["z"]).reshape(4, 4)
    assert np.isnan(grid.diagonal()).all()
    assert grid[0, 1] == grid[1, 0] > 5 * grid[0, 2]


def test_links_at_which_one_direction_only_was_measured_keep_their_own_value() -> None:
    both = [*pairs(2), sample("send_recv", 1.0, bytes=2**22, ranks=2, pair="1-0")]
    plots, _ = profile_plots(machine_profile(both), Curves())
    grid = np.array(plots[0].figure.data[0].z)
    assert grid[0, 1] != grid[1, 0]


@pytest.mark.parametrize(
    ("samples", "notes", "line"),
    [
        (
            [product(256, 256, 256)],
            ("skipped on request: host, memory",),
            "No memory bandwidth over size: skipped on request.",
        ),
        ([product(256, 256, 256)], (), "No map of links between pairs: this profile holds no such samples."),
        (list(collectives()), ("gemm: out of memory.",), "No GEMM rate over size: out of memory."),
    ],
)
def test_a_plot_without_data_is_replaced_by_the_reason(
    samples: list[Sample], notes: tuple[str, ...], line: str
) -> None:
    assert line in _rendered(*samples, notes=notes)


def test_a_profile_of_one_sample_of_each_kind_still_has_a_page() -> None:
    whole = machine_profile()
    single = list({s.op: s for s in whole.samples}.values())
    text = _rendered(*single)
    assert 'id="plot-gemm"' in text
    assert 'id="plot-busbw-all_gather"' in text


def test_public_records_are_called_that_and_never_measured() -> None:
    records = [s.model_copy(update={"source": "a table <b>", "low_s": None, "high_s": None}) for s in products()]
    machine = Machine(device_id="h100-sxm", device_name="NVIDIA H100 SXM", device_type="cuda")
    text = _rendered(*records, mode="published", created_at="", seconds=0, machine=machine)
    assert "Nothing on this page was measured here" in text
    assert "made of public records; NVIDIA H100 SXM" in text
    assert "a table \\u003cb" not in text  # a hover text that plotly would read as bold
    assert "a table &lt;b" in text
    assert 'class="badge finished"' not in text


def test_names_cannot_break_out_of_the_page() -> None:
    hostile = "</script><script>alert(1)</script>"
    text = _rendered(sample("gemm", 1e-3, 1e6, m=64, n=64, k=64, dtype=hostile), name=hostile)
    assert hostile not in text


def test_folder_is_written_whole_and_reads_back(tmp_path: Path, complete: tuple[MachineProfile, Curves]) -> None:
    profile, curves = complete
    paths = write_folder(profile, curves, tmp_path / "new" / "one")
    assert [path.name for path in paths] == ["profile.json", "samples.csv", "samples.jsonl", "profile.html"]
    assert all(path.stat().st_size for path in paths)
    assert load_profile(tmp_path / "new" / "one") == profile
    with paths[1].open() as file:
        rows = list(csv.DictReader(file))
    lines = [Sample.model_validate_json(line) for line in paths[2].read_text().splitlines()]
    assert tuple(lines) == profile.samples
    assert [float(row["median_s"]) for row in rows] == [s.median_s for s in profile.samples]
    assert rows[0]["m"] == str(profile.samples[0].case["m"])
    assert rows[0]["bytes"] == ""
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["one"]
    with pytest.raises(MoestroError, match="is there already; name another folder with --out"):
        write_folder(profile, curves, tmp_path / "new" / "one")


def test_a_failure_while_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("moestro.report.profile_page.render", full)
    with pytest.raises(OSError, match="No space"):
        write_folder(machine_profile(), Curves(), tmp_path / "one")
    assert not list(tmp_path.iterdir())


def test_page_is_replaced_in_one_step(tmp_path: Path, complete: tuple[MachineProfile, Curves]) -> None:
    target = tmp_path / "profile.html"
    target.write_text("old")
    write_page(*complete, target)
    assert target.read_text().startswith("<!doctype html>")
    assert list(tmp_path.iterdir()) == [target]


def test_samples_join_a_profile_on_disk(tmp_path: Path) -> None:
    first = [product(2**e, 2**e, 2**e) for e in range(6, 11)]
    write_folder(*with_curves(machine_profile(first)), tmp_path / "p")
    new = list(collectives((2,)))
    rewrite_folder(tmp_path / "p", new, ["collectives: gloo"])
    profile = load_profile(tmp_path / "p")
    assert profile.samples == (*first, *new)
    assert "collectives: gloo" in profile.notes
    assert "alpha_us_all_reduce_2" in profile.constants
    assert 'id="plot-busbw-all_reduce"' in (tmp_path / "p" / "profile.html").read_text()
    assert len((tmp_path / "p" / "samples.jsonl").read_text().splitlines()) == len(profile.samples)


def test_no_samples_make_empty_files(tmp_path: Path) -> None:
    write_samples([], tmp_path)
    assert (
        tmp_path / "samples.csv"
    ).read_text() == "op,median_s,low_s,high_s,repeats,noisy,flops,bytes_moved,source,software\n"
    assert (tmp_path / "samples.jsonl").read_text() == ""


def test_summary_gives_values_with_spreads(complete: tuple[MachineProfile, Curves]) -> None:
    rows = {(row.section, row.what): row for row in summary_rows(complete[0])}
    best = rows["gemm", "best fp32"]
    assert best.value.replace("\u00a0", " ") == "120 GFLOP/s"
    assert best.spread.replace("\u00a0", " ") == "114 G – 126 G"
    assert "nominal" not in best.detail  # the catalog does not know this machine
    assert rows["collectives", "all_reduce, 4 ranks"].detail.startswith("64 MiB; start-up 200 µs; half at 130 KiB")
    assert rows["host", "T1"].value == "4 µs"
    assert rows["storage", "random reads"].value.replace("\u00a0", " ") == "50.0 k/s"


def test_share_of_the_nominal_rate_of_a_known_device() -> None:
    machine = Machine(device_id="h100-sxm", device_name="NVIDIA H100", device_type="cuda")
    fast = sample("gemm", 1e-3, 500e9, m=1, n=1, k=1, dtype="bf16")
    (row, *_) = summary_rows(machine_profile([fast], machine=machine))
    assert re.search(r"50\.\d % of 9\d\d TFLOP/s nominal", row.detail.replace("\u00a0", " "))


def test_terminal_shows_sections_notes_and_noisy_counts(complete: tuple[MachineProfile, Curves]) -> None:
    out = io.StringIO()
    print_profile(complete[0], Console(width=116, file=out))
    text = out.getvalue().replace("\u00a0", " ")
    for wanted in ("best fp32", "T1", "all_gather, 2 ranks", "collectives 36 (4 noisy)", "note elementwise: no room"):
        assert wanted in text, wanted


def test_a_spread_needs_three_timings() -> None:
    few = product(64, 64, 64).model_copy(update={"repeats": 2})
    (row, *_) = summary_rows(machine_profile([few]))
    assert row.spread == "timed twice"


def test_series_between_nodes_are_told_apart_and_dashed() -> None:
    far = [s.model_copy(update={"case": {**s.case, "nodes": 2}, "median_s": 2 * s.median_s}) for s in collectives((4,))]
    profile, curves = with_curves(machine_profile([*collectives((4,)), *far]))
    rows = {row.what: row.value for row in summary_rows(profile)}
    assert rows["all_reduce, 4 ranks"] != rows["all_reduce, 4 ranks on 2 nodes"]
    traces = profile_plots(profile, curves)[0][0].figure.data
    dashes = [(trace.name, trace.line.dash) for trace in traces if trace.mode == "lines"]
    assert dashes == [("4 ranks", "solid"), ("4 ranks on 2 nodes", "dash")]


def test_counts_name_no_section_that_is_empty() -> None:
    assert counts(machine_profile([product(64, 64, 64)])) == "1 measured sample: gemm 1"
    assert counts(machine_profile([])) == "no samples"


@pytest.mark.parametrize(("value", "text"), [(1.5, "1.5 s"), (2e-3, "2 ms"), (3.456e-5, "34.6 µs"), (5e-9, "5 ns")])
def test_seconds(value: float, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(8, "8 B"), (2**10, "1 KiB"), (1.5 * 2**20, "1.5 MiB"), (2**40, "1 TiB"), (1023 * 2**10, "1023 KiB")],
)
def test_size(value: float, text: str) -> None:
    assert size(value) == text
