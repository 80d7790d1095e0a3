"""Tables of the hardware catalog for the terminal. `~` marks a figure that was recalled, second-hand or announced."""

from collections.abc import Sequence
from typing import Any, get_args

from rich.markup import escape
from rich.table import Table

from moestro.hardware.compare import (
    DTYPES,
    balance,
    compute_bound_ratio,
    is_native,
    link_figure,
    native_dtypes,
    peak_figure,
)
from moestro.hardware.compare import memory_bound_ratio as memory_ratio
from moestro.hardware.devices import Cluster, Device, Dtype, Kind, Price
from moestro.hardware.figures import Figure
from moestro.hardware.fits import Fit

MISSING = "–"
LEGEND = (
    "~ recalled, second-hand or announced; e emulated or cast to another dtype; u one pool for host and device; "
    "– unknown. Rates are dense and of one device; links count one direction."
)
KINDS: tuple[Kind, ...] = get_args(Kind)
WIDE, MIDDLE = 120, 96  # columns from which the list has all it knows; all but names


def number(value: float | None) -> str:
    """Up to four digits, no exponent."""
    if value is None:
        return MISSING
    if abs(value) >= 999.95:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}".removesuffix(".0")
    return f"{value:.3g}"


def nominal(figure: Figure) -> str:
    return ("~" if figure.unsourced else "") + number(figure.nominal)


def achieved(figure: Figure) -> str:
    return ("~" if figure.unsourced_achieved else "") + number(figure.achieved)


def rate(device: Device, dtype: Dtype, best: bool = False) -> str:
    """TFLOP/s in a dtype, or an en dash; a dtype that is emulated or cast is marked `e`."""
    figure = peak_figure(device, dtype)
    if best and figure.achieved is None:
        return MISSING
    flops = device.peak_flops(dtype, achieved=best)
    if flops is None:
        return MISSING
    doubtful = figure.unsourced_achieved if best else figure.unsourced
    return ("~" if doubtful else "") + number(flops / 1e12) + ("" if is_native(device, dtype) else "e")


def device_list(devices: Sequence[Device], width: int) -> Table:
    """One device a line. A narrow table leaves out names, then the year and how devices are joined."""
    ordered = sorted(devices, key=lambda d: (d.vendor, KINDS.index(d.kind), d.year, d.id))
    table = Table(box=None, pad_edge=False)
    columns: dict[str, list[str]] = {
        "id": [d.id for d in ordered],
        "kind": [d.kind for d in ordered],
        "year": [str(d.year) for d in ordered],
        "memory\nGB": [nominal(d.memory.gb) + ("u" if d.memory.unified else "") for d in ordered],
        "memory\nGB/s": [nominal(d.memory.gbps) for d in ordered],
        "bf16\nTFLOP/s": [rate(d, "bf16") for d in ordered],
        "bf16\nachieved": [rate(d, "bf16", best=True) for d in ordered],
        "link\nGB/s": [nominal(link_figure(d)) for d in ordered],
        "joined by": [d.links[0].topology.replace("_", " ") if d.links else MISSING for d in ordered],
        "name": [escape(d.name) for d in ordered],
    }
    left_out = {"name"} if width < WIDE else set()
    left_out |= {"year", "joined by"} if width < MIDDLE else set()
    kept = {header: cells for header, cells in columns.items() if header not in left_out}
    for header in kept:
        words = header in ("id", "kind", "joined by", "name")
        table.add_column(header, justify="left" if words else "right", no_wrap=True, overflow="ellipsis")
    for row in zip(*kept.values(), strict=True):
        table.add_row(*row)
    return table


def cluster_list(clusters: Sequence[Cluster]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("cluster", style="bold", no_wrap=True)
    table.add_column("devices", justify="right", no_wrap=True)
    table.add_column("what it is", overflow="ellipsis", no_wrap=True)
    for cluster in clusters:
        table.add_row(cluster.id, f"{cluster.num_devices:,}", escape(cluster.name))
    return table


def figure_table(rows: Sequence[tuple[str, Figure]]) -> Table:
    """One figure a row with what is nominal, what is achieved, and where both come from."""
    table = Table(box=None, pad_edge=False)
    table.add_column("figure", no_wrap=True)
    table.add_column("nominal", justify="right", no_wrap=True)
    table.add_column("achieved", justify="right", no_wrap=True)
    table.add_column("source", overflow="fold")
    for name, figure in rows:
        if figure.known or figure.note:
            table.add_row(escape(name), nominal(figure), achieved(figure), escape(provenance(figure)))
    return table


def provenance(figure: Figure) -> str:
    """The source of each value with its confidence, and the note, a line each."""
    lines = []
    if figure.nominal is not None:
        lines.append(f"{figure.confidence}: {figure.source}" if figure.source else f"{figure.confidence}, no source")
    if figure.achieved is not None:
        lines.append(f"achieved, {figure.achieved_confidence}: {figure.achieved_source}")
    if figure.note:
        lines.append(f"note: {figure.note}")
    return "\n".join(lines)


def device_figures(device: Device) -> list[tuple[str, Figure]]:
    """Every figure of a device with its name and unit, in the order in which they are shown."""
    memory = device.memory
    peaks, vector = device.peak_tflops, device.vector_tflops
    rows = [(f"{dtype} T{_op(dtype)}/s", peaks[dtype]) for dtype in DTYPES if dtype in peaks]
    rows += [(f"{dtype} vector T{_op(dtype)}/s", vector[dtype]) for dtype in DTYPES if dtype in vector]
    rows += [
        ("knee GFLOP", device.knee_gflop),
        ("compute units", device.compute_units),
        ("clock MHz", device.clock_mhz),
        ("cache MB", device.cache_mb),
        ("memory GB", memory.gb),
        ("memory GB/s", memory.gbps),
        ("a bank MB/s", memory.bank_mbps),
        ("to the host GB/s", device.host_link_gbps),
    ]
    for link in device.links:
        rows += [(f"{link.name} GB/s", link.gbps), (f"{link.name} to a peer GB/s", link.peer_gbps)]
        rows += [(f"{link.name} latency µs", link.latency_us)]
    rows += [("NIC Gbit/s a device", device.nic.per_device_gbit), ("NIC latency µs", device.nic.latency_us)]
    return [*rows, ("power W", device.tdp_w)]


def _op(dtype: Dtype) -> str:
    return "OP" if dtype.startswith("int") else "FLOP"


def support_table(device: Device) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("dtype", "support", "via"):
        table.add_column(column, no_wrap=True)
    table.add_column("times slower", justify="right")
    table.add_column("source and note", overflow="fold")
    for dtype in (dtype for dtype in DTYPES if dtype in device.support):
        support = device.support[dtype]
        parts = [f"{operation} {number(times)}" for operation, times in support.by_operation.items()]
        slower = number(support.penalty) if support.penalty is not None else "unknown"
        if support.how != "emulated":
            slower = ""
        said = "; ".join(part for part in (support.source, support.note) if part)
        table.add_row(dtype, support.how, support.via or "", ", ".join(filter(None, (slower, *parts))), escape(said))
    return table


def price_line(price: Price) -> str:
    if not price.known:
        return "price: unknown"
    parts = []
    low, high = price.usd_per_hour_low, price.usd_per_hour_high
    if low is not None:
        parts.append(f"{low:.2f}" + (f" to {high:.2f}" if high is not None and high != low else "") + " USD an hour")
    if price.usd_to_buy is not None:
        parts.append(f"{price.usd_to_buy:,.0f} USD to buy")
    mark = "~" if price.confidence != "read" else ""
    when = price.as_of or "an unknown date"
    return f"price: {mark}{', '.join(parts)}, as of {when} ({price.confidence}: {price.source})"


def comparison(devices: Sequence[Device]) -> Table:
    """Side by side; after the first device, each value with its ratio to the first."""
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for device in devices:
        table.add_column(device.id, justify="right")
    for name, cells in comparison_rows(devices):
        table.add_row(name, *cells)
    return table


def comparison_rows(devices: Sequence[Device]) -> list[tuple[str, list[str]]]:
    first, balances = devices[0], [balance(device) for device in devices]
    rows = []
    for dtype in native_dtypes(devices):
        for best in (False, True):
            values = [d.peak_flops(dtype, achieved=best) for d in devices]
            cells = [rate(device, dtype, best) for device in devices]
            if any(cell != MISSING for cell in cells):
                unit = f"{dtype} T{_op(dtype)}/s" + (" achieved" if best else "")
                rows.append((unit, _with_ratios(cells, values)))
    for name, figures in (
        ("memory GB", [d.memory.gb for d in devices]),
        ("memory GB/s", [d.memory.gbps for d in devices]),
        ("link GB/s", [link_figure(d) for d in devices]),
        ("power W", [d.tdp_w for d in devices]),
    ):
        rows.append((name, _with_ratios([nominal(f) for f in figures], [f.nominal for f in figures])))
        if any(figure.achieved is not None for figure in figures):
            cells = [achieved(f) for f in figures]
            rows.append((f"{name} achieved", _with_ratios(cells, [f.achieved for f in figures])))
    rows += [
        ("ridge bf16 FLOP/B", [number(b.nominal_ridge) for b in balances]),
        ("ridge bf16 achieved", [number(b.achieved_ridge) for b in balances]),
        ("USD a PFLOP/s and hour", [number(b.usd_per_pflop_hour) for b in balances]),
        ("speed, compute binds", [_ratio(compute_bound_ratio(d, first)) for d in devices]),
        ("speed, memory binds", [_ratio(memory_ratio(d, first)) for d in devices]),
    ]
    return rows


def _with_ratios(cells: list[str], values: Sequence[float | None]) -> list[str]:
    base = values[0]
    return [
        cell if index == 0 or MISSING in (cell, cells[0]) or not base or value is None
        else f"{cell} ({_ratio(value / base)})"
        for index, (cell, value) in enumerate(zip(cells, values, strict=True))
    ]  # fmt: skip


def _ratio(value: float | None) -> str:
    if value is None:
        return MISSING
    return f"{value:.2f}×" if value >= 0.1 else f"{value:.2g}×"


def dtype_differences(devices: Sequence[Device]) -> list[str]:
    """A line for each dtype that not all of the devices treat alike."""
    lines = []
    for dtype in native_dtypes(devices):
        how = [_how(device, dtype) for device in devices]
        if len(set(how)) > 1:
            lines.append(f"{dtype}: " + ", ".join(f"{d.id} {word}" for d, word in zip(devices, how, strict=True)))
    return lines


def _how(device: Device, dtype: Dtype) -> str:
    support = device.support.get(dtype)
    if support is None:
        return "native" if peak_figure(device, dtype).known else "unknown"
    return support.how + (f" via {support.via}" if support.via else "")


def fit_table(fits: Sequence[Fit]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("device", "kind"):
        table.add_column(column, no_wrap=True, style="bold" if column == "device" else "")
    for column in ("usable GB", "USD an hour", "memory GB/s", "bf16 TFLOP/s"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("price", no_wrap=True)
    for fit in fits:
        device, price = fit.device, fit.device.price
        told = f"{fit.basis}, as of {price.as_of} ({price.confidence})" if fit.basis else "unknown"
        mark = "~" if fit.basis and price.confidence != "read" else ""
        table.add_row(
            device.id,
            device.kind,
            number(fit.usable_bytes / 1e9),
            mark + (f"{fit.usd_per_hour:.2f}" if fit.usd_per_hour is not None else MISSING),
            nominal(device.memory.gbps),
            rate(device, "bf16"),
            escape(told),
        )
    return table


def cluster_totals(cluster: Cluster, devices: dict[str, Device]) -> dict[str, Any]:
    """Sums over all devices; None where a figure of one of them is unknown. Keys carry the units."""
    counts: dict[str, int] = {}
    for pool in cluster.pools:
        for device_id, count in pool.node.devices.items():
            counts[device_id] = counts.get(device_id, 0) + pool.nodes * count

    def total(values: dict[str, float | None]) -> float | None:
        known = [value * counts[key] for key, value in values.items() if value is not None]
        return sum(known) if len(known) == len(values) else None

    return {
        "devices": counts,
        "memory_gb": total({key: devices[key].memory.gb.nominal for key in counts}),
        "bf16_pflops_nominal": total({key: _peta(devices[key].peak_flops("bf16")) for key in counts}),
        "bf16_pflops_achieved": total({key: _peta(devices[key].peak_flops("bf16", achieved=True)) for key in counts}),
        "usd_per_hour_low": total({key: devices[key].price.usd_per_hour_low for key in counts}),
    }


def _peta(flops: float | None) -> float | None:
    return None if flops is None else flops / 1e15
