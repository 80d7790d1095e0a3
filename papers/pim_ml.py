"""An Experimental Evaluation of Machine Learning Training on a Real Processing-in-Memory System (Gómez-Luna, Guo,
Brocard and others; arXiv 2207.07886).

The claim: on a UPMEM machine of more than 2,500 cores in DRAM, training that is bound by memory is fast where the
operations and number types are native: decision trees 27 times an 8-core Xeon and 1.34 times an A100, K-means 2.8 and
3.2 times.

What is reproduced here:

* computed, from the vendor's public records (`papers/pim_ml_records.py`): speed-ups end to end and of the kernel
  alone, kernels by the number of cores, totals that rise again, with `moestro.hardware.phases`;
* simulated: logistic regression in fixed-point numbers with a table for the sigmoid (`papers/pim_ml_fixed_point.py`),
  the sum over cores through the host, and what the types cost by the catalog's entry `upmem`.

What is not: the published times, which need that machine, and the comparison with a GPU, of which no record was found.
"""

from statistics import mean

import torch

from moestro.hardware.catalog import device_ids, load_device
from moestro.hardware.devices import DTYPE_BYTES, Device, Dtype
from moestro.hardware.phases import Phase, PhasedJob, fit_phase
from papers.pim_ml_fixed_point import (
    FLOAT,
    INTEGERS,
    RATE,
    STEPS,
    Numbers,
    SigmoidTable,
    accuracy,
    gradient,
    make_rows,
    table_error,
    train,
)
from papers.pim_ml_records import KMEANS, KMEANS_CPU, SCALED_TREES, TREES, TREES_CPU, KMeansTimes, TreeTimes
from papers.result import Check, PaperResult, Progress, verdict_of

SEEDS = (0, 1, 2)
ROWS = 16_384
CORES = 8  # of the simulated training
CUTS = (1, 64, 2048)  # over how many cores the same rows are cut


def run(progress: Progress) -> PaperResult:
    """Everything; about 15 s of CPU time in one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the products are small
    total = len(SEEDS) + 2
    try:
        trained = []
        for number, seed in enumerate(SEEDS, 1):
            trained.append(trained_accuracies(seed))
            progress(number, total, "trainings")
        moved = {numbers.name: moved_by_cuts(numbers) for numbers in (FLOAT, *INTEGERS)}
    finally:
        torch.set_num_threads(threads)
    progress(total - 1, total, "sums over cores")
    checks = (
        check_speed_ups(KMEANS[2040], TREES[2524]),
        check_decision(KMEANS[2040]),
        check_kernel(KMEANS),
        check_total(TREES, SCALED_TREES),
        check_types(load_device("upmem")),
        check_accuracy(trained),
        check_table(),
        check_host_sum(moved),
    )
    progress(total, total, "checks")
    figures = {
        f"accuracy: {name} seed={seed}": round(value, 5)
        for seed, row in zip(SEEDS, trained, strict=True)
        for name, value in row.items()
    }
    return PaperResult(checks, figures)


# From the vendor's records.


def check_speed_ups(kmeans: KMeansTimes, trees: TreeTimes) -> Check:
    """The headline, on what can be read."""
    fit, whole = KMEANS_CPU.fit_s / kmeans.fit_s, _whole(KMEANS_CPU) / _whole(kmeans)
    build, total = TREES_CPU.build_s / trees.build_s, TREES_CPU.total_s / trees.total_s
    scaled, scaled_cpu = SCALED_TREES[2524]
    return Check(
        claim="Memory-bound training is faster on cores in memory than on a CPU",
        published="trees 27 × an 8-core Xeon and 1.34 × an A100; K-means 2.8 × and 3.2 ×",
        ours=f"the vendor's records: K-means {fit:.2f} × fit, {whole:.2f} × with preparation; trees {build:.1f} × "
        f"build, {total:.1f} × in all",
        how="computed",
        verdict=verdict_of((whole > 1, total > 1)),
        note="Counted end to end. Other runs than the paper's tables: 25.6 M × 16 points in 16 clusters on 2,040 cores "
        f"({KMEANS_CPU.total_s / kmeans.total_s:.2f} × by the file's total times), Higgs trees on 2,524 with accuracy "
        f"{trees.accuracy:.3f} against the CPU's {TREES_CPU.accuracy:.3f}. Synthetic trees, 100,000 points a core: "
        f"{scaled_cpu.build_s / scaled.build_s:.0f} × build, {scaled_cpu.total_s / scaled.total_s:.1f} × in all, "
        f"accuracy {scaled.accuracy:.3f} against {scaled_cpu.accuracy:.3f}. No record with a GPU was found.",
    )


def _whole(times: KMeansTimes) -> float:
    """Preparation of the data and all ten fits."""
    return times.preparation_s + times.fit_s


def check_decision(times: KMeansTimes) -> Check:
    """Which machine one would choose."""
    pim = PhasedJob((Phase("fit", fixed_s=times.fit_s), Phase("preparation", fixed_s=times.preparation_s)))
    cpu = PhasedJob((Phase("fit", fixed_s=KMEANS_CPU.fit_s), Phase("preparation", fixed_s=KMEANS_CPU.preparation_s)))
    kernel = KMEANS_CPU.single_s / times.kernel_s
    end_to_end = cpu.seconds(1) / pim.seconds(1)
    at_once = PhasedJob(cpu.phases, overlapped=True).seconds(1) / PhasedJob(pim.phases, overlapped=True).seconds(1)
    return Check(
        claim="Kernel alone and end to end lead to different machines",
        published="kernel 1.57 s, fit 17.5 s, preparation 21.1 s; CPU 29.4 s and 6.4 s (vendor's record, 2,040 cores)",
        ours=f"in memory is {kernel:.2f} × the CPU by the kernel, {end_to_end:.2f} × end to end",
        how="computed",
        verdict=verdict_of((kernel > 1 > end_to_end,)),
        note="`PhasedJob.seconds` is the time of all phases; a phase alone must be asked for by name. The kernel is "
        f"that of one of the ten fits and stands against one fit of the CPU ({KMEANS_CPU.single_s:.2f} s). Would "
        f"preparation run at the same time as the fits, which that software does not do, it would be {at_once:.2f} ×.",
    )


def check_kernel(rows: dict[int, KMeansTimes]) -> Check:
    """One row predicts the others."""
    first, *others = sorted(rows)
    kernel = fit_phase("kernel", [first], [rows[first].kernel_s], ("divided",))
    misses = {n: kernel.seconds(n) / rows[n].kernel_s - 1 for n in others}
    limits = {512: 0.01, 1024: 0.01, 2040: 0.20}
    exchange = [rows[n].exchange_s / (rows[n].kernel_s + rows[n].exchange_s) for n in (first, others[-1])]
    return Check(
        claim="The kernel's time falls as 1 / cores",
        published=" / ".join(f"{rows[n].kernel_s:.2f}" for n in (first, *others))
        + f" s on {first} / {' / '.join(f'{n:,}' for n in others)} cores (vendor's record)",
        ours=", ".join(f"{miss:+.1%} at {n:,}" for n, miss in misses.items()),
        how="computed",
        verdict=verdict_of(abs(miss) <= limits[n] for n, miss in misses.items()),
        note=f"Predicted over recorded, fitted to {first} cores alone; at most 1 % off counts, 20 % at the last. "
        "The exchange through the host grows from "
        f"{exchange[0]:.1%} to {exchange[1]:.1%} of kernel and exchange.",
    )


def check_total(trees: dict[int, TreeTimes], scaled: dict[int, tuple[TreeTimes, TreeTimes]]) -> Check:
    """1,000 → 2,524 cores: fixed + divided + per core."""
    units, totals = list(trees), [row.total_s for row in trees.values()]
    phase, flat = fit_phase("trees", units, totals), fit_phase("trees", units, totals, ("fixed", "divided"))
    worst, worst_flat = (
        max(abs(p.seconds(n) / t - 1) for n, t in zip(units, totals, strict=True)) for p in (phase, flat)
    )
    rises = totals[-1] > totals[-2] and phase.seconds(units[-1]) > phase.seconds(units[-2])
    ahead = fit_phase("trees", units[:-1], totals[:-1]).seconds(units[-1]) / totals[-1] - 1
    waits = {n: pim.total_s - pim.build_s for n, (pim, _) in scaled.items()}
    *small, last = sorted(waits)
    linear = fit_phase("transfer", small, [waits[n] for n in small], ("fixed", "per_unit"))
    miss = linear.seconds(last) / waits[last] - 1
    return Check(
        claim="More cores can take longer: what the host does for each core grows with their number",
        published="Higgs trees 25.4 / 9.74 / 6.34 / 7.13 s on 100 / 300 / 1,000 / 2,524 cores (vendor's record)",
        ours=" / ".join(f"{phase.seconds(n):.2f}" for n in units)
        + f" s; best at {PhasedJob((phase,)).best_units(4000):,} cores",
        how="computed",
        verdict=verdict_of((rises, worst <= 0.05 < worst_flat, abs(miss) <= 0.10)),
        note=f"{phase.fixed_s:.1f} s + {phase.divided_s:,.0f} s / cores + {phase.per_unit_s * 1e3:.1f} ms × cores, at "
        f"most {worst:.1%} off; without the last term {worst_flat:.0%}. Three terms on four points prove little, and "
        f"fitted to the first three they are {ahead:+.0%} off at the fourth. On the synthetic trees, 100,000 points a "
        f"core, a line through what {small[0]} to {small[-1]:,} cores take beside the build is {miss:+.1%} off at "
        f"{last:,} (10 % would count as linear).",
    )


# By the catalog.

# Of one feature of one row in a gradient of logistic regression: two products, two sums.
PRODUCTS, SUMS = 2, 2
MACHINE_CORES = 2040


def check_types(device: Device) -> Check:
    """Features a second of the whole machine, by the table of operations, against reading them on a processor."""
    types: tuple[Dtype, ...] = ("fp32", "int32", "int8")
    rates = {dtype: MACHINE_CORES * core_rate(device, dtype) for dtype in types}
    bandwidths = [d.memory.gbps.best for d in map(load_device, device_ids()) if d.kind == "cpu"]
    processors = sorted(value * 1e9 / DTYPE_BYTES["fp32"] for value in bandwidths if value is not None)
    beaten = {dtype: sum(rate > p for p in processors) for dtype, rate in rates.items()}
    bank_bytes = (device.memory.bank_mbps.best or 0.0) * 1e6
    busy = {dtype: bank_bytes / DTYPE_BYTES[dtype] / core_rate(device, dtype) for dtype in types}
    return Check(
        claim="Speed there depends on native operations: emulated floats are slow",
        published="fast “when the necessary operations and datatypes are natively supported”",
        ours=", ".join(f"{dtype} {rate / 1e9:.1f}" for dtype, rate in rates.items())
        + f" G features/s on {MACHINE_CORES:,} cores",
        how="simulated",
        verdict=verdict_of((rates["int8"] >= 10 * rates["fp32"], beaten["fp32"] == 0)),
        note="Two products and two sums a feature at the catalog's rates (recalled from the PrIM paper). A processor "
        f"that reads fp32 features once is level with int8 at {4 * rates['int8'] / 1e9:.0f} GB/s, with fp32 at "
        f"{4 * rates['fp32'] / 1e9:.0f} GB/s. Of the {len(processors)} processors in the catalog, all larger than the "
        f"paper's, which is not in it, int8 is ahead of {beaten['int8']}, fp32 of {beaten['fp32']}. The banks could "
        f"give {busy['int8']:.0f} (int8) to {busy['fp32']:.0f} (fp32) times what a core can use: what memory binds "
        "on a processor is bound by arithmetic here.",
    )


def core_rate(device: Device, dtype: Dtype) -> float:
    """Features a second of one core: its native rate of sums, divided by what each operation costs more."""
    support = device.support[dtype]
    native = device.peak_flops("int32", achieved=True)
    banks = device.memory.banks
    assert native is not None
    assert banks is not None
    cost = PRODUCTS * support.by_operation.get("multiply", 1.0) + SUMS * support.by_operation.get("add", 1.0)
    return native / banks / cost


# Simulated.


def trained_accuracies(seed: int) -> dict[str, float]:
    rows, test = make_rows(seed, ROWS)
    return {numbers.name: accuracy(train(rows, numbers, CORES), test) for numbers in (FLOAT, *INTEGERS)}


def check_accuracy(trained: list[dict[str, float]]) -> Check:
    gaps = {n.name: [row[n.name] - row[FLOAT.name] for row in trained] for n in INTEGERS}
    worst = {name: 100 * max(values, key=abs) for name, values in gaps.items()}
    return Check(
        claim="Fixed-point training with a table for the sigmoid is as accurate as fp32",
        published="within 1 point of fp32 (our limit; the paper's accuracies could not be read)",
        ours=", ".join(f"{name} {gap:+.2f}" for name, gap in worst.items()) + " points at worst",
        how="simulated",
        verdict=verdict_of(abs(value) <= 0.01 for values in gaps.values() for value in values),
        note=f"fp32 {mean(row[FLOAT.name] for row in trained):.1%} on average; {len(trained)} seeds, {ROWS:,} rows of "
        f"16 features, {STEPS} steps at rate {RATE:g}; the host keeps the model in fp32. int8: 8-bit features, 16-bit "
        "weights, and as released each product of feature and error is cut to the feature's step before the sum, "
        "always downwards: half a step too low in every row. Whole products in the same 32-bit sum avoid it.",
    )


def check_table() -> Check:
    errors = {shift: table_error(shift) for shift in (10, 11)}
    sizes = {shift: SigmoidTable(shift).bytes / 1024 for shift in errors}
    return Check(
        claim="A table up to ± 20 is as good as the sigmoid",
        published="± 20, 1,024 steps a unit in the code (a comment there says 2,048); at most 2^-10 off (our limit)",
        ours=", ".join(f"{errors[s]:.1e} off with {2**s:,} steps ({sizes[s]:.0f} KiB)" for s in errors),
        how="simulated",
        verdict=verdict_of(error <= 2**-10 for error in errors.values()),
        note=f"2^-10 is {2**-10:.1e}. A million inputs between ± 30, rounded to the table's step; 16-bit entries for "
        f"one half, mirrored. Cut off at ± 4 it is {table_error(10, 4):.1e} off.",
    )


def moved_by_cuts(numbers: Numbers) -> float:
    """The largest change of a gradient when the same rows are cut over more cores."""
    rows, _ = make_rows(SEEDS[0], ROWS)
    model = torch.linspace(-1, 1, rows.x.shape[1])
    first, *others = (gradient(rows, model, numbers, cores) for cores in CUTS)
    return max((other - first).abs().max().item() for other in others)


def check_host_sum(moved: dict[str, float]) -> Check:
    integers = [moved[numbers.name] for numbers in INTEGERS]
    return Check(
        claim="A sum of integers through the host does not depend on the number of cores",
        published="a consequence of the design",
        ours=f"gradients of integers move by {max(integers):g}, of fp32 by {moved[FLOAT.name]:.0e}",
        how="simulated",
        verdict=verdict_of((max(integers) == 0, moved[FLOAT.name] > 0)),
        note=f"The same {ROWS:,} rows cut over {', '.join(f'{cores:,}' for cores in CUTS)} cores.",
    )
