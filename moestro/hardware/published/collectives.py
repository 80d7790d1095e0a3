"""Public measurements of collectives as samples: `collectives.csv.xz`, or another file with its columns.

What a row's size counts. Most sources follow the convention of the NCCL tests, which is that of curves.busbw. One large
set of rows (4 operations on 10 devices) says neither whether a size is of one rank or of all, nor in which unit.
It is read as in curves.busbw, since only then do the operations agree: its largest H200 messages over 4 ranks, read as
totals, run at a busbw of 348 (all_reduce), 316 (all_gather), 311 (reduce_scatter) and 319 GB/s (all_to_all) on a link
of 450. Read as parts of one rank, the last three would run at four times that, far above the link.
"""

import math
import re
from collections import Counter
from pathlib import Path

from moestro.hardware.catalog import find_device
from moestro.hardware.curves.busbw import OPS, bus_factor
from moestro.hardware.profile import Sample, Value
from moestro.hardware.published.table import read_table

SHIPPED = Path(__file__).parent / "collectives.csv.xz"
REQUIRED = ("source", "hardware", "collective", "gpus", "size_bytes", "time_us", "algbw_gbps", "busbw_gbps")
ONE_NODE = 8  # ranks that fit one node of every source; for more of them the row must say over how many nodes they were
COARSEST = 0.1  # half of the last digit of a printed rate, relative to it, up to which the row is of use

_OPS = {"alltoall": "all_to_all", "alltoallv": "all_to_all_uneven", "p2p": "send_recv", "sendrecv": "send_recv"}
_DTYPES = {"half": "fp16", "float": "fp32", "bfloat16": "bf16"}
_PARAMETERS = "parameters of a fitted model, not a measurement"


def read_collectives(path: Path | None = None) -> tuple[list[Sample], dict[str, int]]:
    """The rows of a file (the shipped one by default) as samples, and why others are of no use: reason → rows.

    A sample's case holds device (an id of the catalog, else the source's own words), bytes, ranks, nodes, and where
    they are known dtype and algorithm.

    Raises:
        MoestroError: no such file, or a column of REQUIRED is missing.
    """
    samples: list[Sample] = []
    unusable = Counter[str]()
    for row in read_table(path or SHIPPED, REQUIRED, "collectives"):
        sample = _sample(row)
        if isinstance(sample, Sample):
            samples.append(sample)
        else:
            unusable[sample] += 1
    return samples, dict(unusable)


def _sample(row: dict[str, str]) -> Sample | str:
    """The row as a sample, or why it is none."""
    if "model parameters" in row.get("notes", "") or row.get("algorithm", "").startswith("fitted"):
        return _PARAMETERS
    op = _op(row["collective"])
    if op is None:
        return "not a collective"
    size, ranks, nodes = _size(row), _ranks(row, op), _number(row.get("nodes", ""))
    if size is None:
        return "no size"
    if ranks is None:
        return "number of ranks not stated"
    if ranks < 2:
        return "one rank alone"
    if nodes is None and ranks > ONE_NODE:
        return "number of nodes not stated"
    seconds = _seconds(row, op, ranks, size)
    if isinstance(seconds, str):
        return seconds
    device = find_device(row["hardware"])
    case: dict[str, Value] = {
        "device": row["hardware"] if device is None else device.id,
        "bytes": size,
        "ranks": ranks,
        "nodes": round(nodes or 1),
    }
    case |= {key: value for key, value in (("dtype", _dtype(row)), ("algorithm", row.get("algorithm", ""))) if value}
    return Sample(
        op=op, case=case, median_s=seconds, bytes_moved=size, source=row["source"], software=row.get("software", "")
    )


def _op(text: str) -> str | None:
    """`all-reduce, NVLS on` → all_reduce; None for what is not in busbw.OPS."""
    words = re.match(r"[a-z0-9_]+", text.lower().replace("-", "_"))
    name = words.group() if words else ""
    name = _OPS.get(name, name)
    return name if name in OPS else None


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None


def _size(row: dict[str, str]) -> int | None:
    """Bytes. Powers of two that the source printed with a decimal suffix (65536 as 65K) become powers of two again."""
    size = _number(row["size_bytes"])
    if size is None:
        return None
    if "decimal-like suffix" in row.get("notes", ""):
        return int(2 ** round(math.log2(size)))
    return max(1, round(size))


def _ranks(row: dict[str, str], op: str) -> int | None:
    """As stated; else the product of a torus (`2x2x1`); else of an all_reduce from busbw ÷ algbw = 2(n-1)/n."""
    stated = _number(row["gpus"])
    if stated is not None:
        return round(stated)
    torus = re.search(r"\b\d+(?:x\d+)+\b", row.get("interconnect", ""))
    if torus:
        return math.prod(int(side) for side in torus.group().split("x"))
    bus, alg = _number(row["busbw_gbps"]), _number(row["algbw_gbps"])
    if op == "all_reduce" and bus is not None and alg is not None and 1 <= bus / alg < 1.99:
        return round(2 / (2 - bus / alg))
    return None


def _seconds(row: dict[str, str], op: str, ranks: int, size: float) -> float | str:
    """The time stated, or that of the rates, the finer printed first; else why there is none."""
    time_us = _number(row["time_us"])
    if time_us is not None:
        return time_us * 1e-6
    factors = {"algbw_gbps": 1.0, "busbw_gbps": bus_factor(op, ranks)}
    rates = {column: rate for column in factors if (rate := _number(row[column])) is not None}
    if not rates:
        return "neither time nor rate"
    column = min(rates, key=lambda name: _rounding(row[name], rates[name]))
    if _rounding(row[column], rates[column]) >= COARSEST:
        return "rate printed with too few digits"
    return size * factors[column] / (rates[column] * 1e9)


def _rounding(printed: str, rate: float) -> float:
    """Largest relative error of a number through its printed digits: 0.04 may be anything from 0.035 to 0.045."""
    decimals = len(printed.partition(".")[2])
    return 0.5 * 10.0**-decimals / rate


def _dtype(row: dict[str, str]) -> str:
    """From `dtype half; ...` or `float; ...` of the notes."""
    for part in re.split(r"[;,]", row.get("notes", "")):
        name = part.strip().removeprefix("dtype ").strip()
        if name in ("int8", "fp32", "fp16", "bf16", *_DTYPES):
            return _DTYPES.get(name, name)
    return ""
