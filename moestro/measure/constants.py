"""From samples and curves to the constants that a reader and a planner look up.

Nothing here is typed in for a device: alignment, knee, saturation and start-up times come out of the samples.
"""

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from statistics import median

from moestro.errors import MoestroError
from moestro.hardware.curves.alignment import alignment
from moestro.hardware.curves.fusion import Bucket, recommend_bucket
from moestro.hardware.curves.mesh import detect_derate
from moestro.hardware.profile import MachineProfile, Sample
from moestro.measure.curves import FEWEST_SIZES, Curves, fit_curves, full_device
from moestro.measure.sweeps import find_sweeps

PLATEAU = 0.1  # how far a bandwidth may lie from the plateau and still count as on it
# Of one parameter: its gradient summed in fp32, its value gathered in bf16.
BYTES_PER_PARAM = {"reduce_scatter": 4.0, "all_gather": 2.0, "all_reduce": 4.0}


def with_curves(profile: MachineProfile) -> tuple[MachineProfile, Curves]:
    """The profile with the curves fitted to its samples and the constants derived from them.

    A curve that cannot be fitted is noted; the others stay. On accelerators of unknown links the collectives of small
    groups tell whether they are a mesh or hang on a switch.
    """
    curves, notes = fit_curves(profile.samples, full_device(profile.machine))
    machine = profile.machine
    # A public profile knows more than its samples: what the catalog says of the device.
    known = profile.constants if profile.mode == "published" else {}
    constants = known | derive_constants(profile.samples, curves)
    if machine.device_type != "cpu":
        derate = detect_derate(profile.samples)
        constants |= {f"group_share_{ranks}": share for ranks, share in derate.share.items()}
        if derate.topology != "unknown":
            notes.append(f"links look like a {derate.topology}: {derate.reason}. {derate.warning}".rstrip())
            if machine.topology == "unknown":
                machine = machine.model_copy(update={"topology": derate.topology})
    kept = (note for note in profile.notes if note not in notes)
    changes = {"machine": machine, "fits": curves.reports(), "constants": constants, "notes": (*kept, *notes)}
    return profile.model_copy(update=changes), curves


def with_samples(profile: MachineProfile, samples: Iterable[Sample], notes: Iterable[str] = ()) -> MachineProfile:
    """The profile with further samples; a sample of a case that it holds takes the old one's place."""
    merged = {(s.op, *sorted(s.case.items())): s for s in (*profile.samples, *samples)}
    return profile.model_copy(
        update={"samples": tuple(merged.values()), "notes": tuple(dict.fromkeys((*profile.notes, *notes)))}
    )


def derive_constants(samples: Sequence[Sample], curves: Curves) -> dict[str, float]:
    """Those that the samples support, by these names (OP: an operation of hardware.profile).

    best_gflops_DTYPE, knee_gflop_DTYPE, ridge_flop_per_byte_DTYPE, align_WIDTH_DTYPE (WIDTH: a name of a sweep);
    memory_gbps, memory_saturation_bytes; launch_us, sync_us, host_t1_us … host_t5_us; alpha_us_OP_RANKS,
    busbw_gbps_OP_RANKS, s50_bytes_OP_RANKS, s90_bytes_OP_RANKS, each with _xNODES behind it for several nodes;
    bucket_bytes_RANKS, bucket_params_RANKS; storage_write_mbps, storage_read_mbps, storage_iops,
    storage_scatter_ADVICE. `with_curves` adds group_share_RANKS on accelerators.
    """
    memory = _memory(samples)
    return {
        **_gemm(samples, curves, memory.get("memory_gbps")),
        **memory,
        **_host(samples),
        **_collectives(curves),
        **_bucket_sizes(curves),
        **_storage(samples),
    }


def _gemm(samples: Sequence[Sample], curves: Curves, memory_gbps: float | None) -> dict[str, float]:
    constants = dict[str, float]()
    for dtype in sorted({str(s.case["dtype"]) for s in samples if s.op == "gemm" and s.flops}):
        best = max(s.flops_per_s or 0.0 for s in samples if s.op == "gemm" and s.case["dtype"] == dtype)
        constants[f"best_gflops_{dtype}"] = best / 1e9
        if memory_gbps is not None:
            constants[f"ridge_flop_per_byte_{dtype}"] = best / (memory_gbps * 1e9)
        if dtype in curves.gemm:
            constants[f"knee_gflop_{dtype}"] = curves.gemm[dtype].knee_flops() / 1e9
    for sweep in find_sweeps(samples):
        # The widths under one name, as a hidden size changes two entries of the case at once.
        cases = [{"width": sweep.width(s), **sweep.fixed} for s in sweep.samples]
        swept = [s.model_copy(update={"case": case}) for s, case in zip(sweep.samples, cases, strict=True)]
        with suppress(MoestroError):  # no two of the widths are close enough to be compared
            constants[f"align_{sweep.name}_{sweep.dtype}"] = float(alignment(swept, "width"))
    return constants


def _memory(samples: Sequence[Sample]) -> dict[str, float]:
    """The plateau on the side of large arrays: smaller ones lie in a CPU's cache, or are over before a GPU is busy."""
    plateaus = list[tuple[float, float]]()
    for op in ("copy", "scale", "add", "triad"):
        rates = sorted((s.number("bytes"), s.bytes_per_s) for s in samples if s.op == op and s.bytes_per_s)
        if len(rates) < FEWEST_SIZES:
            continue
        plateau = median(rate for _, rate in rates[-FEWEST_SIZES:])
        off = [size for size, rate in rates if abs(rate / plateau - 1) > PLATEAU]
        start = min((size for size, _ in rates if not off or size > max(off)), default=rates[-1][0])
        plateaus.append((plateau, start))
    if not plateaus:
        return {}
    best, start = max(plateaus)
    return {"memory_gbps": best / 1e9, "memory_saturation_bytes": start}


def _host(samples: Sequence[Sample]) -> dict[str, float]:
    """µs: the five overheads as means over a step's operations, and one call of each kind."""
    wanted = {f"host_t{number}": ("mean", f"host_t{number}_us") for number in range(1, 6)}
    wanted |= {"host_launch": ("add", "launch_us"), "host_sync": ("item", "sync_us")}
    return {
        wanted[s.op][1]: s.median_s * 1e6 for s in samples if s.op in wanted and s.case.get("what") == wanted[s.op][0]
    }


def _collectives(curves: Curves) -> dict[str, float]:
    constants = dict[str, float]()
    for series, curve in curves.collectives.items():
        op, ranks, nodes = series
        name = f"{op}_{ranks}" + (f"_x{nodes}" if nodes > 1 else "")
        simple = curves.start_up[series].parameters
        constants[f"alpha_us_{name}"] = simple["alpha_s"] * 1e6
        constants[f"busbw_gbps_{name}"] = simple["bandwidth"] / 1e9
        for share in (50, 90):
            if math.isfinite(size := curve.size_at(share / 100)):
                constants[f"s{share}_bytes_{name}"] = size
    return constants


def buckets(curves: Curves, params: float | None = None) -> dict[int, Bucket]:
    """Fusion buffers for each number of ranks in one node: reduce-scatter and all-gather, or else all-reduce.

    Numbers of ranks whose bandwidth does not level off in the sizes measured are left out.

    Args:
        params: that one step reduces, for the time that the buckets leave exposed; None: the bandwidth alone counts.

    Raises:
        MoestroError: params that are not above zero.
    """
    if params is not None and not 0 < params < math.inf:
        raise MoestroError(f"a step reduces more than {params:g} parameters; give for example 1.5e9")
    found = dict[int, Bucket]()
    for ranks in sorted({ranks for _, ranks, nodes in curves.collectives if nodes == 1}):
        one_node = {op: curve for (op, n, nodes), curve in curves.collectives.items() if (n, nodes) == (ranks, 1)}
        used: list[str] = [op for op in ("reduce_scatter", "all_gather") if op in one_node] or ["all_reduce"]
        with suppress(MoestroError):  # the bandwidth does not level off in the sizes measured
            curves_used = {op: one_node[op] for op in used if op in one_node}
            found[ranks] = recommend_bucket(curves_used, BYTES_PER_PARAM, ranks, params=params)
    return found


def _bucket_sizes(curves: Curves) -> dict[str, float]:
    constants = dict[str, float]()
    for ranks, bucket in buckets(curves).items():
        constants[f"bucket_bytes_{ranks}"] = bucket.bytes
        constants[f"bucket_params_{ranks}"] = bucket.params
    return constants


def _storage(samples: Sequence[Sample]) -> dict[str, float]:
    """Rates of passes over a file; random reads at the depth that gives most; pages read for each page of data."""
    constants = dict[str, float]()
    for sample in samples:
        if sample.op in ("storage_write", "storage_read"):
            constants[f"{sample.op}_mbps"] = sample.number("bytes") / sample.median_s / 1e6
        elif sample.op == "storage_random_read":
            constants["storage_iops"] = max(constants.get("storage_iops", 0.0), 1 / sample.median_s)
        elif sample.op == "storage_scatter" and sample.bytes_moved:
            advice = sample.case.get("advice", "random")
            constants[f"storage_scatter_{advice}"] = sample.bytes_moved / sample.number("bytes")
    return constants
