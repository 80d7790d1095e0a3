"""The figures of a machine profile that a reader looks for first, for the terminal and for the page."""

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moestro.hardware.curves.busbw import bus_factor
from moestro.hardware.curves.fusion import Bucket
from moestro.hardware.devices import DTYPE_BYTES
from moestro.hardware.profile import MachineProfile, Sample
from moestro.measure.compare import FEWEST_TIMINGS, has_spread
from moestro.measure.curves import full_device
from moestro.measure.sections import COLLECTIVES, SECTIONS, section_of
from moestro.report.profile_points import seconds, size
from moestro.report.text import MISSING, percent, plural, si

WIDTH = 120  # that the table takes
_SHOWN_NOTES = 12


@dataclass(frozen=True)
class Row:
    """A figure with its spread (10th to 90th percentile, where repeats were timed) and what it was measured on."""

    section: str
    what: str
    value: str
    spread: str = ""
    detail: str = ""


def summary_rows(profile: MachineProfile) -> list[Row]:
    """Empty for a section that the profile does not hold."""
    return [
        *_gemm(profile),
        *_memory(profile),
        *_attention(profile),
        *_host(profile),
        *_storage(profile),
        *_collectives(profile),
    ]


def wide_console() -> Console:
    """As wide as the tables of measurements need, also where nobody says how wide the terminal is."""
    return Console(width=max(WIDTH, Console().width) if sys.stdout.isatty() else WIDTH)


def print_profile(profile: MachineProfile, console: Console | None = None) -> None:
    console = console or wide_console()
    console.print(f"[bold]{escape(profile.name)}[/]  [dim]{escape(about_machine(profile))}[/]", highlight=False)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("section", style="dim", no_wrap=True)
    table.add_column("figure", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True, style="bold")
    table.add_column("10–90 %", justify="right", no_wrap=True)
    table.add_column("of", style="dim", overflow="fold")
    before = ""
    for row in summary_rows(profile):
        section = row.section if row.section != before else ""
        table.add_row(section, *(escape(cell) for cell in (row.what, row.value, row.spread, row.detail)))
        before = row.section
    console.print(table)
    console.print(counts(profile), style="dim", highlight=False)
    for note in profile.notes[:_SHOWN_NOTES]:
        console.print(f"[yellow]note[/] {escape(note)}", highlight=False, soft_wrap=True)
    if len(profile.notes) > _SHOWN_NOTES:
        console.print(f"[yellow]note[/] {len(profile.notes) - _SHOWN_NOTES} more in the profile", highlight=False)


def print_buckets(buckets: Mapping[int, Bucket], params: float, console: Console | None = None) -> None:
    """Fusion buffers for a model, and what a step waits for them: as recommended, a quarter and four times as large."""
    console = console or wide_console()
    console.print(f"\nfusion buffers for {si(params)} parameters, predicted by the curves of this profile")
    if not buckets:
        console.print("none: no collective's bandwidth levels off in the sizes measured; measure larger messages")
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    columns = ("ranks", "parameters", "buffer", "buffers", "exposed\nat a quarter", "exposed", "exposed\nat four times")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("as large as", style="dim")
    reasons = {
        "knee": "90 % of the bandwidth asks for",
        "overlap": "the last one may be, which nothing hides",
        "model": "the model is",
    }
    for ranks, bucket in sorted(buckets.items()):
        exposed = [seconds(bucket.exposed_s[scale]) for scale in sorted(bucket.exposed_s)]
        cells = (f"{ranks}", si(bucket.params), size(bucket.bytes), f"{bucket.count or 1:.3g}", *exposed)
        table.add_row(*cells, reasons[bucket.limited_by])
    console.print(table)
    console.print("Exposed: start-ups and the last buffer, with none of the start-ups hidden.", style="dim")


def about_machine(profile: MachineProfile) -> str:
    """One line: how it was obtained, when, on what."""
    machine = profile.machine
    devices = f"{machine.num_devices} × " if machine.num_devices > 1 else ""
    if profile.mode == "published":
        return f"made of public records; {devices}{machine.device_name}"
    load = "" if machine.load_average is None else f"; load {machine.load_average:.2f} before"
    took = f"{profile.mode}, {profile.seconds:.0f} s" if profile.seconds else profile.mode
    return f"measured {profile.created_at[:16].replace('T', ' ')} UTC ({took}); {devices}{machine.device_name}{load}"


def counts(profile: MachineProfile) -> str:
    """How many samples each section has, and how many stayed noisy."""
    parts = []
    for section in SECTIONS:
        samples = [s for s in profile.samples if section_of(s) == section]
        if samples:
            noisy = sum(s.noisy for s in samples)
            parts.append(f"{section} {len(samples)}" + (f" ({noisy} noisy)" if noisy else ""))
    fits = [fit.held_out_median for fit in profile.fits if fit.held_out_median is not None]
    held = (
        f"; {len(profile.fits)} curves, median held-out error {percent(sorted(fits)[len(fits) // 2])}" if fits else ""
    )
    source = "public record" if profile.mode == "published" else "measured sample"
    return f"{plural(len(profile.samples), source)}: {', '.join(parts)}{held}" if parts else "no samples"


def _dtypes(profile: MachineProfile, op: str) -> list[str]:
    found = {str(s.case.get("dtype")) for s in profile.of(op) if s.flops}
    return sorted(found, key=lambda name: (-DTYPE_BYTES.get(name, 0), name))


def _gemm(profile: MachineProfile) -> list[Row]:
    rows = []
    for dtype in _dtypes(profile, "gemm"):
        best = max(profile.of("gemm", dtype=dtype), key=lambda s: s.flops_per_s or 0)
        shape = "×".join(str(best.case.get(name, "?")) for name in ("m", "n", "k"))
        rate = best.flops_per_s or 0.0
        rows.append(
            Row(
                "gemm",
                f"best {dtype}",
                si(rate, "FLOP/s"),
                _rates(best, best.flops),
                shape + _share(profile, dtype, rate),
            )
        )
        constants = profile.constants
        if (knee := constants.get(f"knee_gflop_{dtype}")) is not None:
            rows.append(
                Row(
                    "gemm",
                    f"knee {dtype}",
                    si(knee * 1e9, "FLOP"),
                    "",
                    "from here on 90 % of the best, by the fit",
                )
            )
        if (ridge := constants.get(f"ridge_flop_per_byte_{dtype}")) is not None:
            rows.append(Row("gemm", f"ridge {dtype}", f"{ridge:.3g} FLOP/B", "", "best rate over memory bandwidth"))
        names = (
            ("gemm_n", "n"),
            ("gemm_k", "k"),
            ("hidden", "hidden"),
            ("vocab", "vocabulary"),
            ("ffn", "expert width"),
            ("head_dim", "head dim"),
        )
        aligned = [
            f"{label} {constants[key]:.0f}" for name, label in names if (key := f"align_{name}_{dtype}") in constants
        ]
        if aligned:
            rows.append(Row("gemm", f"alignment {dtype}", "", "", f"{', '.join(aligned)} (98 % of the best)"))
    return rows


def _share(profile: MachineProfile, dtype: str, rate: float) -> str:
    """The share of the vendor's figure, where the catalog knows the device and the machine has all of it."""
    nominal = _nominal(profile, dtype)
    return "" if nominal is None else f"; {percent(rate / nominal)} of {si(nominal, 'FLOP/s')} nominal"


def _nominal(profile: MachineProfile, dtype: str) -> float | None:
    device = full_device(profile.machine)
    return device.peak_flops(dtype) if device else None


def _memory(profile: MachineProfile) -> list[Row]:
    rows = []
    for op in ("copy", "triad"):
        samples = [s for s in profile.of(op) if s.bytes_per_s and "bytes" in s.case]
        if samples:
            largest = max(samples, key=lambda s: s.number("bytes"))
            rows.append(
                Row(
                    "memory",
                    op,
                    si(largest.bytes_per_s or 0, "B/s"),
                    _rates(largest, largest.bytes_moved),
                    f"arrays of {size(largest.number('bytes'))}",
                )
            )
    if (value := profile.constants.get("memory_gbps")) is not None:
        at = profile.constants.get("memory_saturation_bytes")
        rows.append(
            Row("memory", "saturation", si(value * 1e9, "B/s"), "", f"from arrays of {size(at)} on" if at else "")
        )
    return rows


def _attention(profile: MachineProfile) -> list[Row]:
    rows = []
    for phase in ("fwd", "bwd"):
        samples = [s for s in profile.of("attention", phase=phase) if s.flops]
        if samples:
            best = max(samples, key=lambda s: s.flops_per_s or 0)
            detail = ", ".join(f"{k} {best.case[k]}" for k in ("dtype", "seq", "heads", "head_dim") if k in best.case)
            rows.append(
                Row(
                    "attention",
                    f"best {phase}",
                    si(best.flops_per_s or 0, "FLOP/s"),
                    _rates(best, best.flops),
                    detail,
                )
            )
    return rows


_HOST = (
    ("host_launch", "add", "one small operation", "called from Python"),
    ("host_sync", "item", "one value read back", ""),
    ("host_t1", "mean", "T1", "between operations: Python, autograd"),
    ("host_t2", "mean", "T2", "an operation's start to its first launch"),
    ("host_t3", "mean", "T3", "its last launch to its end"),
    ("host_t4", "mean", "T4", "a launch"),
    ("host_t5", "mean", "T5", "between the launches of one operation"),
)


def _host(profile: MachineProfile) -> list[Row]:
    return [
        Row("host", label, seconds(sample.median_s), _times(sample), detail)
        for op, what, label, detail in _HOST
        for sample in profile.of(op, what=what)[:1]
    ]


_ALPHA = re.compile(r"alpha_us_(\w+?)_(\d+)(?:_x(\d+))?")


def _collectives(profile: MachineProfile) -> list[Row]:
    """The bus bandwidth of the largest message, and where the fitted curve of each series has half and 90 % of it."""
    rows, constants = [], profile.constants
    series = [found for name in constants if (found := _ALPHA.fullmatch(name))]
    for found in sorted(series, key=lambda one: (COLLECTIVES.index(one[1]), int(one[2]))):
        op, ranks, nodes = found[1], int(found[2]), int(found[3] or 1)
        samples = [s for s in profile.of(op, ranks=ranks) if s.case.get("nodes", 1) == nodes and "pair" not in s.case]
        if not samples:
            continue
        largest = max(samples, key=lambda s: (s.number("bytes"), s.case.get("groups") != "all"))
        amount, key = largest.number("bytes") * bus_factor(op, ranks), found[0].removeprefix("alpha_us_")
        half, ninety = (constants.get(f"s{share}_bytes_{key}") for share in (50, 90))
        name = f"{op}, {ranks} ranks" + (f" on {nodes} nodes" if nodes > 1 else "")
        start = seconds(constants[f"alpha_us_{key}"] / 1e6)
        detail = f"{size(largest.number('bytes'))}; start-up {start}; half at {_size(half)}, 90 % at {_size(ninety)}"
        rows.append(Row("collectives", name, si(amount / largest.median_s, "B/s"), _rates(largest, amount), detail))
    return [*rows, *_buckets(profile)]


def _buckets(profile: MachineProfile) -> list[Row]:
    rows = []
    for key, value in profile.constants.items():
        if key.startswith("bucket_bytes_"):
            ranks = key.removeprefix("bucket_bytes_")
            params = profile.constants.get(f"bucket_params_{ranks}", math.nan)
            detail = f"{si(params)} parameters, for 90 % of the bandwidth"
            rows.append(Row("collectives", f"bucket, {ranks} ranks", size(value), "", detail))
    return rows


def _storage(profile: MachineProfile) -> list[Row]:
    rows = []
    for op, what, detail in (("storage_write", "write", "with fsync"), ("storage_read", "read", "not from memory")):
        for sample in profile.of(op)[:1]:
            amount = sample.number("bytes")
            rate = si(amount / sample.median_s, "B/s")
            rows.append(Row("storage", what, rate, _rates(sample, amount), f"one after the other, {detail}"))
    if reads := profile.of("storage_random_read"):
        best = min(reads, key=lambda s: s.median_s)
        detail = f"of {size(best.number('block_bytes'))}, {best.case.get('depth', 1)} under way"
        rows.append(Row("storage", "random reads", f"{si(1 / best.median_s)}/s", _rates(best, 1.0), detail))
    shuffled = "pages read per page of data, shuffled"
    scatter = (("random", "scatter factor", shuffled), ("normal", "with read-ahead", "the same as the kernel does it"))
    for advice, what, detail in scatter:
        if (value := profile.constants.get(f"storage_scatter_{advice}")) is not None:
            rows.append(Row("storage", what, f"{value:.2f}", "", detail))
    return rows


def _size(value: float | None) -> str:
    return MISSING if value is None else size(value)


def _rates(sample: Sample, amount: float | None) -> str:
    if not has_spread(sample) or not (amount and sample.low_s and sample.high_s):
        return _few(sample)
    return f"{si(amount / sample.high_s)} – {si(amount / sample.low_s)}" + (" noisy" if sample.noisy else "")


def _times(sample: Sample) -> str:
    if not has_spread(sample) or not (sample.low_s and sample.high_s):
        return ""
    return f"{seconds(sample.low_s)} – {seconds(sample.high_s)}" + (" noisy" if sample.noisy else "")


def _few(sample: Sample) -> str:
    """In the place of a spread."""
    return f"timed {'once' if sample.repeats == 1 else 'twice'}" if 0 < sample.repeats < FEWEST_TIMINGS else ""
