"""`moestro hardware fit`: tables and JSON of errors on rows that curves have not seen."""

import json
from pathlib import Path

import pytest

from moestro.hardware.curves.tiles import TileModel
from moestro.hardware.published.gemm import REQUIRED

from .helpers import moestro

TRUE = TileModel(600e12, 6e-6, 2.7e12, 0.06, 1.0, "128x256", 132, 2)
SIZES = (512, 1024, 2048, 4096, 8192)


def csv_of(path: Path, sizes: list[tuple[int, int, int]], hardware: str = "H100 SXM", extra: str = "") -> str:
    rows = [f"made,{hardware},gemm,bf16,{m},{n},{k},,{TRUE.seconds(m, n, k) * 1e6}" for m, n, k in sizes]
    path.write_text("\n".join([",".join(REQUIRED), *rows, extra]))
    return str(path)


@pytest.fixture
def all_sizes() -> list[tuple[int, int, int]]:
    return [(m, n, k) for m in SIZES for n in SIZES for k in SIZES]


def test_errors_in_fifths_and_from_another_device(tmp_path: Path, all_sizes: list[tuple[int, int, int]]) -> None:
    both = tmp_path / "both.csv"
    csv_of(both, all_sizes)
    both.write_text(both.read_text() + "\n".join(f"made,H200 SXM,gemm,bf16,{m},512,512,,9" for m in (512, 1024)))
    done = moestro("hardware", "fit", "--gemm", str(both))
    assert done.code == 0
    assert "127 rows" in done.out
    line = next(line for line in done.out.splitlines() if line.startswith("h100-sxm gemm bf16"))
    assert "h200-sxm" in line
    assert "125 samples" in line
    assert "collective" not in done.out


def test_other_rows_are_predicted_and_known_ones_left_out(
    tmp_path: Path, all_sizes: list[tuple[int, int, int]]
) -> None:
    odd = "made,H100 SXM,gemm,bf16,8,,8,,5"
    path = csv_of(tmp_path / "a.csv", all_sizes[::2])
    other = csv_of(tmp_path / "b.csv", [*all_sizes[1::2], all_sizes[0]], extra=odd)
    done = moestro("hardware", "fit", "--gemm", path, "--against-gemm", other, "--json")
    assert done.code == 0
    tree = json.loads(done.out)["compute"]
    assert tree["unusable"] == {"size missing": 1}
    assert tree["unpredicted"] == {"also among the rows that were fitted": 1}
    assert [row["what"] for row in tree["rows"]] == ["h100-sxm gemm bf16", "all gemm"]
    assert tree["rows"][0]["rows"] == 62
    assert tree["rows"][0]["basis"] == "own samples"
    assert tree["rows"][0]["median"] < 0.03 < tree["rows"][0]["sheet"]


def test_devices_without_samples_get_another_ones_or_none(
    tmp_path: Path, all_sizes: list[tuple[int, int, int]]
) -> None:
    path = csv_of(tmp_path / "a.csv", all_sizes)
    there = csv_of(tmp_path / "b.csv", all_sizes[:20], "MI300X")
    nowhere = csv_of(tmp_path / "c.csv", all_sizes[:20], "Abacus")
    tree = json.loads(moestro("hardware", "fit", "--gemm", path, "--against-gemm", there, "--json").out)
    assert tree["compute"]["rows"][0]["basis"] == "shares of h100-sxm"
    tree = json.loads(moestro("hardware", "fit", "--gemm", path, "--against-gemm", nowhere, "--json").out)
    assert tree["compute"]["rows"] == []
    assert list(tree["compute"]["unpredicted"].values()) == [20]


def test_one_device_of_the_published_records() -> None:
    done = moestro("hardware", "fit", "--collectives", "", "--device", "nonsense")
    assert done.code == 2
    done = moestro("hardware", "fit", "--device", "h800-sxm")
    assert done.code == 0
    assert "h800-sxm grouped_gemm fp8" in done.out
    assert "h100-sxm gemm" not in done.out


def test_a_wrong_file_is_one_line(tmp_path: Path) -> None:
    done = moestro("hardware", "fit", "--gemm", str(tmp_path / "none.csv"))
    assert done.code == 2
    assert "no file of products" in done.err
    assert len(done.err.strip().splitlines()) <= 2
    short = tmp_path / "short.csv"
    short.write_text("hardware,m,n,k\n")
    done = moestro("hardware", "fit", "--gemm", str(short))
    assert done.code == 2
    assert "has no column source, op, dtype, tflops, time_us" in done.err
