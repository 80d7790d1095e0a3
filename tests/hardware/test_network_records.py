import lzma

import pytest

from moestro.errors import MoestroError
from moestro.hardware.published.collectives import REQUIRED, read_collectives

HEADER = [*REQUIRED, "nodes", "interconnect", "algorithm", "software", "notes"]


def row(**cells):
    plain = {"source": "s", "hardware": "H100 SXM", "collective": "all_reduce", "gpus": "8", "size_bytes": "1048576"}
    return {**plain, **{key: str(value) for key, value in cells.items()}}


def read(tmp_path, *rows, header=HEADER):
    path = tmp_path / "collectives.csv"
    lines = [",".join(header), *(",".join(f'"{r.get(column, "")}"' for column in header) for r in rows)]
    path.write_text("\n".join(lines))
    return read_collectives(path)


def test_time_is_taken_as_it_stands(tmp_path):
    samples, unusable = read(tmp_path, row(time_us=50, algbw_gbps=1, software="NCCL 2.27.3", notes="dtype half; rest"))
    assert unusable == {}
    assert samples[0].op == "all_reduce"
    assert samples[0].median_s == pytest.approx(50e-6)
    assert samples[0].case == {"device": "h100-sxm", "bytes": 2**20, "ranks": 8, "nodes": 1, "dtype": "fp16"}
    assert (samples[0].source, samples[0].software) == ("s", "NCCL 2.27.3")


def test_time_comes_from_the_finer_rate(tmp_path):
    samples, _ = read(tmp_path, row(busbw_gbps=175.00), row(algbw_gbps=100), row(algbw_gbps=0.2, busbw_gbps=0.35))
    assert samples[0].median_s == pytest.approx(2**20 / 100e9)
    assert samples[1].median_s == pytest.approx(2**20 / 100e9)
    assert samples[2].median_s == pytest.approx(2**20 * 1.75 / 0.35e9)


def test_names_of_operations(tmp_path):
    names = {
        "alltoall": "all_to_all",
        "all-reduce, NVLS on": "all_reduce",
        "p2p": "send_recv",
        "broadcast": "broadcast",
    }
    samples, _ = read(tmp_path, *(row(collective=name, time_us=1) for name in names))
    assert [sample.op for sample in samples] == list(names.values())


def test_rows_of_no_use_are_counted_by_reason(tmp_path):
    samples, unusable = read(
        tmp_path,
        row(time_us=1, size_bytes=""),
        row(time_us=1, gpus=""),
        row(time_us=1, gpus=1),
        row(time_us=1, gpus=16),
        row(),
        row(algbw_gbps="320-323"),
        row(busbw_gbps="0.04"),
        row(time_us=-3),
        row(collective="MoE dispatch (fp8)", time_us=1),
        row(time_us=1, notes="model parameters, not a measurement row"),
    )
    assert samples == []
    assert unusable == {
        "no size": 1,
        "number of ranks not stated": 1,
        "one rank alone": 1,
        "number of nodes not stated": 1,
        "neither time nor rate": 3,
        "rate printed with too few digits": 1,
        "not a collective": 1,
        "parameters of a fitted model, not a measurement": 1,
    }


def test_ranks_that_are_not_stated_can_be_worked_out(tmp_path):
    samples, _ = read(
        tmp_path,
        row(gpus="", nodes=2, algbw_gbps=240, busbw_gbps=450, time_us=9),
        row(gpus="", nodes=1, collective="all_gather", interconnect="ICI 2x2x2", algbw_gbps=9),
    )
    assert [sample.case["ranks"] for sample in samples] == [16, 8]


def test_sizes_printed_short_are_powers_of_two(tmp_path):
    note = "size as printed with decimal-like suffix: 65K"
    samples, _ = read(
        tmp_path, row(size_bytes=65e3, busbw_gbps=2.72, notes=note), row(size_bytes=65e3, busbw_gbps=2.72)
    )
    assert [sample.case["bytes"] for sample in samples] == [65536, 65000]


def test_a_device_that_nobody_knows_keeps_its_words(tmp_path):
    samples, _ = read(tmp_path, row(hardware="see source (4 nodes x 8)", time_us=1))
    assert samples[0].case["device"] == "see source (4 nodes x 8)"


def test_a_missing_column_is_named(tmp_path):
    with pytest.raises(MoestroError, match="no column size_bytes"):
        read(tmp_path, row(), header=[column for column in HEADER if column != "size_bytes"])


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(MoestroError, match="no file"):
        read_collectives(tmp_path / "none.csv")
    broken = tmp_path / "broken.csv.xz"
    broken.write_bytes(b"not xz")
    with pytest.raises(MoestroError, match="not a CSV"):
        read_collectives(broken)
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MoestroError, match="not a CSV"):
        read_collectives(binary)


def test_a_packed_file_is_read_like_a_plain_one(tmp_path):
    read(tmp_path, row(time_us=5))
    packed = tmp_path / "collectives.csv.xz"
    packed.write_bytes(lzma.compress((tmp_path / "collectives.csv").read_bytes()))
    assert read_collectives(packed) == read_collectives(tmp_path / "collectives.csv")
