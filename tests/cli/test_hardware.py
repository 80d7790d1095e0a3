"""`moestro hardware`: what is printed, for people and machines, and every mistake answered in a line or two."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from moestro.cli.hardware import KINDS
from moestro.cli.hardware_tables import KINDS as KINDS_OF_SCHEMA
from moestro.cli.hardware_tables import device_list, number
from moestro.hardware.catalog import CLUSTERS_DIR, DEVICES_DIR, cluster_ids, device_ids, load_device

from .helpers import Outcome, moestro


def hardware(*arguments: str) -> Outcome:
    return moestro("hardware", *arguments)


def line_of(text: str, start: str) -> list[str]:
    """The words of the line that starts with `start`."""
    return next(line for line in text.splitlines() if line.startswith(start)).split()


class TestList:
    def test_names_every_device_and_cluster(self) -> None:
        done = hardware("list")
        assert done.code == 0
        first_words = {line.split()[0] for line in done.out.splitlines() if line.strip()}
        assert set(device_ids()) | set(cluster_ids()) <= first_words

    def test_marks_what_was_recalled_and_what_is_emulated(self) -> None:
        out = hardware("list").out
        assert line_of(out, "mi300x ")[3:7] == ["192", "5,300", "1,307", "668.4"]
        assert line_of(out, "rtx-4090 ")[3:7] == ["~24", "~1,008", "~165.2", "–"]
        assert line_of(out, "v100-sxm-32gb ")[5] == "~15.7e"
        assert line_of(out, "apple-m1-ultra ")[3] == "128u"
        assert "~ recalled" in out

    def test_one_kind(self) -> None:
        out = hardware("list", "--kind", "tpu").out
        assert "tpu-v5p" in out
        assert "h100-sxm" not in out
        assert "zaya1" not in out

    @pytest.mark.parametrize(("width", "names", "years"), [(80, False, False), (96, False, True), (140, True, True)])
    def test_a_narrow_terminal_loses_whole_columns_only(self, width: int, names: bool, years: bool) -> None:
        console = Console(width=width, file=io.StringIO())
        console.print(device_list([load_device(device_id) for device_id in device_ids()], console.width))
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert "…" not in text
        assert ("AMD Instinct" in text, " 2023 " in text) == (names, years)

    def test_json(self) -> None:
        tree = json.loads(hardware("list", "--json").out)
        assert [d["id"] for d in tree["devices"]] == list(device_ids())
        assert [c["id"] for c in tree["clusters"]] == list(cluster_ids())

    def test_kinds_are_those_of_the_schema(self) -> None:
        assert KINDS == KINDS_OF_SCHEMA


class TestShow:
    def test_every_figure_with_its_source(self) -> None:
        out = hardware("show", "mi300x").out
        assert line_of(out, "bf16 TFLOP/s")[2:4] == ["1,307", "668.4"]
        assert line_of(out, "memory GB/s")[2:4] == ["5,300", "~4,330"]
        assert line_of(out, "knee GFLOP")[2:4] == ["–", "~200"]
        assert "achieved, secondary: arXiv 2511.17127" in out
        assert "recalled: vendor datasheet, not read again" in out
        assert "mesh among 8 devices" in out
        assert "price: unknown" in out

    @pytest.mark.parametrize("device_id", ["upmem", "apple-m1-ultra", "mi455x", "epyc-9654", "tpu-v7"])
    def test_odd_ones(self, device_id: str) -> None:
        done = hardware("show", device_id)
        assert done.code == 0
        assert "None" not in done.out

    def test_price_has_a_date(self) -> None:
        assert "price: 1.99 to 5.00 USD an hour, as of May 2026 (read: " in hardware("show", "h100-sxm").out
        assert "price: ~4,000 USD to buy, as of 2025 (recalled: " in hardware("show", "gb10").out

    def test_what_is_emulated_and_by_how_much(self) -> None:
        out = hardware("show", "upmem").out
        assert line_of(out, "fp32 ")[:9] == [
            "fp32",
            "emulated",
            "int32",
            "21,",
            "add",
            "11.9,",
            "multiply",
            "30.7,",
            "divide",
        ]
        assert "exchanges go through the host" in out
        assert line_of(hardware("show", "epyc-9654").out, "fp16 ")[:4] == ["fp16", "emulated", "fp32", "unknown"]

    def test_by_the_name_that_a_driver_says(self) -> None:
        assert "h100-sxm: gpu of 2022" in hardware("show", "NVIDIA H100 80GB HBM3").out

    def test_cluster(self) -> None:
        out = hardware("show", "zaya1").out
        assert "in all: 1,024 devices, memory 196,608 GB, bf16 1,338 PFLOP/s nominal and 684.4" in out
        assert "128 × (8 mi300x), joined by xGMI, host xeon-8570" in out
        assert "the size of a slice is weak" in out

    @pytest.mark.parametrize("cluster_id", cluster_ids())
    def test_every_cluster(self, cluster_id: str) -> None:
        done = hardware("show", cluster_id)
        assert done.code == 0
        assert "None" not in done.out

    def test_unknown_totals_stay_unknown(self) -> None:
        assert json.loads(hardware("show", "m1-ultra-1", "--json").out)["totals"]["bf16_pflops_nominal"] is None
        mixed = json.loads(hardware("show", "two-regions", "--json").out)["totals"]
        assert mixed["devices"] == {"h100-sxm": 16, "a100-sxm-80gb": 16}
        assert mixed["usd_per_hour_low"] == pytest.approx(16 * (1.99 + 0.8))

    def test_own_files(self, tmp_path: Path) -> None:
        for folder, name, text in (
            (DEVICES_DIR, "h100-sxm", "mine: gpu"),
            (CLUSTERS_DIR, "dgx-2", "in all: 16 devices"),
        ):
            path = tmp_path / "mine.toml"
            path.write_bytes((folder / f"{name}.toml").read_bytes())
            assert text in hardware("show", str(path)).out

    def test_json_leaves_out_what_is_unknown(self) -> None:
        tree = json.loads(hardware("show", "mi455x", "--json").out)
        assert tree["id"] == "mi455x"
        assert tree["memory"]["gb"]["confidence"] == "announced"
        assert "price" not in tree


class TestCompare:
    def test_side_by_side_with_ratios_to_the_first(self) -> None:
        out = hardware("compare", "h100-sxm", "mi300x").out
        assert line_of(out, "bf16 TFLOP/s achieved")[3:] == ["794.5", "668.4", "(0.84×)"]
        assert line_of(out, "memory GB/s achieved")[3:] == ["~3,036", "~4,330", "(1.43×)"]
        assert line_of(out, "fp16 TFLOP/s achieved")[3:] == ["–", "~588.1"]  # no ratio to a rate that nobody measured
        assert line_of(out, "ridge bf16 FLOP/B")[3:] == ["295.2", "246.6"]
        assert line_of(out, "ridge bf16 achieved")[3:] == ["261.7", "154.4"]
        assert line_of(out, "speed, compute binds")[3:] == ["1.00×", "0.84×"]
        assert line_of(out, "USD a PFLOP/s and hour")[5:] == ["2.5", "–"]

    def test_differences_in_dtypes(self) -> None:
        out = hardware("compare", "a100", "h100").out
        assert "fp8: a100-sxm-80gb storage via bf16, h100-sxm native" in out
        assert "bf16: " not in out

    def test_unlike_devices(self) -> None:
        done = hardware("compare", "upmem", "h100-sxm", "apple-m1-ultra", "mi455x")
        assert done.code == 0
        assert "None" not in done.out

    def test_json(self) -> None:
        first, second = json.loads(hardware("compare", "h100-sxm", "mi300x", "--json").out)
        assert first["compute_bound_speed"] == 1.0
        assert second["memory_bound_speed"] == pytest.approx(4330 / 3036)
        assert second["usd_per_pflop_hour"] is None


class TestFits:
    def test_cheapest_and_smallest(self) -> None:
        out = hardware("fits", "100").out
        assert line_of(out, "apple-m1-ultra ")[2:4] == ["120", "0.19"]
        assert line_of(out, "mi300x ")[2:4] == ["192", "–"]
        assert "cheapest with a known price: " in out
        assert out.index("h200-sxm") < out.index("mi300x")  # a known price before an unknown one

    def test_json(self) -> None:
        (fit,) = json.loads(hardware("fits", "5000", "--cpus", "--host-gb", "1000", "--json").out)[:1]
        assert fit == {"id": "epyc-9654", "usable_bytes": 5144e9, "usd_per_hour": None, "basis": ""}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "h1000"), "no device or cluster 'h1000'. Did you mean 'h100-"),
        (("show", "nothing.toml"), "cannot read nothing.toml: No such file or directory"),
        (("compare", "h100-sxm"), "give two devices or more"),
        (("compare", "h100-sxm", "zaya1"), "'zaya1' is a cluster; a device is wanted"),
        (("compare", "h100-sxm", "mi300"), "no device 'mi300' in the catalog. Did you mean 'mi300"),
        (("list", "--kind", "gpus"), "no kind 'gpus'. Did you mean 'gpu'?"),
        (("fits", "1e9"), "1e+09 GB fit on no single device of the catalog"),
        (("fits", "0"), "give a number above zero"),
        (("fits", "nan"), "give a number above zero"),
        (("fits", "10", "--host-gb", "-1"), "give zero or more"),
    ],
)
def test_mistakes(arguments: tuple[str, ...], message: str) -> None:
    done = hardware(*arguments)
    assert done.code == 2
    assert message in done.err
    assert done.err.startswith("error: ")
    assert len(done.err.splitlines()) == 1
    assert done.out == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0075, "0.0075"),
        (9.34, "9.34"),
        (13.0, "13"),
        (494.5, "494.5"),
        (999.96, "1,000"),
        (23300, "23,300"),
    ],
)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text
