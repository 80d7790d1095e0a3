"""Training Report of TeleChat3-MoE (Liu, Wang, Yang and others; arXiv 2512.24157).

The claim: models of 105 billion to over a trillion parameters were trained on thousands of NPUs, with layouts that a
planner found: it measures a pipeline's memory in dry runs, simulates the pipeline, and solves an integer program.

What is reproduced here, all by arithmetic:

* the planner's model of memory, on the 16 peaks of its worked example (175 billion parameters, 16 pipeline stages):
  how well it fits, and what becomes of it when there are no more equations than unknowns;
* its simulator, on the outputs that its documentation prints;
* its integer program for layers and recomputation, on that example and against every placement of small ones;
* the whole loop (dry runs proposed, taken, fitted) on the 105-billion model, by counted memory.

All were read in the repository that comes with the paper, not in the paper. What is not: the scheduling of data by
their attention's cost (in a later version), throughput on NPUs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

import numpy as np

from moestro.config import load_config
from moestro.config.plan import Plan
from moestro.errors import MoestroError
from moestro.graph.convert import workload_of
from moestro.predict.dry_run import (
    MOST_CONDITION,
    Probe,
    StageMemory,
    conditioning,
    equations,
    fit_dry_run,
    kinds_of,
    probes_to_add,
)
from moestro.predict.probe_peaks import counted, counted_numbers, take
from moestro.predict.probe_rounds import design
from papers.result import Check, PaperResult, Progress, verdict_of
from papers.telechat3_pipeline import (
    check_ideal,
    check_interleaved_peaks,
    check_peaks,
    check_totals,
    pipeline_figures,
)
from papers.telechat3_planner import check_exact as check_program
from papers.telechat3_planner import check_example

MB = 1e6
STAGES, MICRO_BATCHES, EVEN_LAYERS = 16, 8, 6
OFFSET = (0, 0, -4, -2, 2, -2, -2, 10, -2, -2, -2, 0, 2, 2, 0, 0)
SELECTIVE = (5, 5, 2, 1, 4, 3, 2, 14, 4, 4, 4, 6, 1, 5, 5, 6)
COMMUNICATION = (0, 5, 0, 1, 1, 4, 2, 2, 1, 3, 2, 6, 4, 5, 5, 1)
PEAKS_MB = (
    96643, 60854, 27620, 54533, 100631, 31713, 38874, 146986, 31713, 24553, 24553, 28484, 45016, 33763, 20463, 23531,
)  # fmt: skip
EXACT, SPARE, MORE = 6, 7, 8  # middle stages: as many as unknowns, one more and two more
GOOD, USUAL = 0.05, 0.015  # worst and median residual of a model that fits


def run(progress: Progress) -> PaperResult:
    """Everything; half a minute, most of it the integer program's."""
    probes = dry_run(STAGES)
    fitted = fit_dry_run(probes, [peak * MB for peak in PEAKS_MB], comes_back=False)
    exact, spare, more = (subsets(probes, size) for size in (EXACT, SPARE, MORE))
    progress(1, 2, "memory")
    checks = (
        check_fit(fitted),
        check_exact(exact),
        check_refusal(spare, more),
        check_equal_offsets(),
        check_in_flight(fitted),
        check_comes_back(fitted),
        check_loop(),
        check_ideal(),
        check_peaks(),
        check_interleaved_peaks(),
        check_totals(),
        check_program(),
        check_example(fitted),
    )
    progress(2, 2, "pipeline and placements")
    figures = {f"activations MB: {kind}": round(v / MB, 1) for kind, v in fitted.activation_bytes.items()}
    figures |= {"constant MB": round(fitted.constant_bytes / MB, 1), "layer MB": round(fitted.layer_bytes / MB, 1)}
    figures |= {f"residual of stage {i}": round(value, 4) for i, value in enumerate(fitted.residuals)}
    return PaperResult(checks, figures | pipeline_figures())


def dry_run(most_in_flight: int) -> list[Probe]:
    """The worked example's stages. Lists of the tool overlap: a layer in both recomputes both, as many as can."""
    probes = []
    for stage, (offset, selective, communication) in enumerate(zip(OFFSET, SELECTIVE, COMMUNICATION, strict=True)):
        both = min(selective, communication)
        kinds = {"selective": selective - both, "comm": communication - both, "both": both}
        layers = {"none": EVEN_LAYERS + offset - sum(kinds.values()), **kinds}
        end = "first" if stage == 0 else "last" if stage == STAGES - 1 else "middle"
        probes.append(Probe(layers, min(STAGES - stage, most_in_flight), end))
    return probes


@dataclass(frozen=True)
class Subset:
    """Some of the middle stages, fitted alone. error: the worst |predicted ÷ measured - 1| of those left out."""

    condition: float
    error: float


def subsets(probes: Sequence[Probe], size: int) -> list[Subset]:
    """Every choice of `size` middle stages whose equations determine all unknowns."""
    rows = equations(probes, kinds_of(probes), comes_back=False)[1:-1]
    peaks = np.asarray(PEAKS_MB[1:-1], dtype=float)
    found = []
    for chosen in combinations(range(len(rows)), size):
        inside = list(chosen)
        rank, condition = conditioning(rows[inside])
        if rank < rows.shape[1]:
            continue
        numbers = np.linalg.lstsq(rows[inside], peaks[inside], rcond=None)[0]
        outside = [i for i in range(len(rows)) if i not in chosen]
        found.append(Subset(condition, float(np.abs(rows[outside] @ numbers / peaks[outside] - 1).max())))
    return found


def check_fit(fitted: StageMemory) -> Check:
    misses = [abs(value) for value in fitted.residuals[1:-1]]
    worst, usual = max(misses), median(misses)
    activations = " / ".join(f"{value / MB:.0f}" for value in fitted.activation_bytes.values())
    return Check(
        claim="A constant, a number for a layer and one for each kind of recomputation give every stage's peak memory",
        published=f"peaks of {STAGES} stages, {min(PEAKS_MB):,} to {max(PEAKS_MB):,} MB (in the tool's repository)",
        ours=f"residuals of the {len(misses)} middle stages: {worst:.1%} at worst, {usual:.1%} median",
        how="computed",
        verdict=verdict_of((worst <= GOOD, usual <= USUAL)),
        note=f"Least squares, rank {fitted.rank}, condition number {fitted.condition:.0f} (columns of length 1). "
        f"Constant {fitted.constant_bytes / MB:.0f} MB, layer {fitted.layer_bytes / MB:.1f}, activations of a layer "
        f"and micro-batch {activations} ({', '.join(fitted.activation_bytes)}); embedding "
        f"{fitted.end_bytes['first'] / MB:+.0f}, head {fitted.end_bytes['last'] / MB:+.0f}, each from its one stage. "
        f"Fits when the worst is within {GOOD:.0%} and the median within {USUAL:.1%}.",
    )


def check_exact(exact: Sequence[Subset]) -> Check:
    errors = [subset.error for subset in exact]
    return Check(
        claim="One stage for each unknown is enough to solve for them",
        published="the tool solves a linear system of as many stages as it needs",
        ours=f"{len(exact):,} solvable choices of {EXACT} of {STAGES - 2} stages: worst error of the others "
        f"{median(errors):.0%} in the median choice, {max(errors):.0%} in the worst",
        how="computed",
        verdict=verdict_of((median(errors) <= GOOD, max(errors) <= 2 * GOOD)),
        note=f"Of each choice, the largest error on the {STAGES - 2 - EXACT} stages left out. Enough when it is within "
        f"{GOOD:.0%} in the median and {2 * GOOD:.0%} in all. The peaks stray from the model by a percent or so, and "
        "such systems multiply it.",
    )


def check_refusal(spare: Sequence[Subset], more: Sequence[Subset]) -> Check:
    """The limit is on shapes alone: no peak is looked at."""
    lines, held = [], []
    for size, choices in ((SPARE, spare), (MORE, more)):
        taken = [subset.error for subset in choices if subset.condition <= MOST_CONDITION]
        refused = [subset.error for subset in choices if subset.condition > MOST_CONDITION]
        held += [max(taken) < 0.75 * max(refused), median(taken) < median(refused)]
        lines.append(
            f"{size} stages: {len(taken):,} choices taken, worst error {max(taken):.0%} (median {median(taken):.1%}), "
            f"{len(refused):,} refused, {max(refused):.0%} ({median(refused):.1%})"
        )
    return Check(
        claim="A bound on the condition number, with stages to spare, keeps the worst choices out",
        published="not in the tool",
        ours="; ".join(lines),
        how="computed",
        verdict=verdict_of(held),
        note=f"moestro.predict.dry_run refuses above {MOST_CONDITION:.0f}, and any set without a stage to spare. The "
        f"limit was chosen on the choices of {SPARE}. Holds when the worst taken is at most three quarters of the "
        "worst refused, and the medians are in order. What remains is single stages' misfit, which no shape tells.",
    )


def check_equal_offsets() -> Check:
    """Layers and recomputation alike on all stages."""
    even = [Probe({"none": 2, "selective": 4}, in_flight) for in_flight in range(STAGES - 1, 1, -1)]
    truth = StageMemory(1207 * MB, 2218 * MB, {"none": 1003 * MB, "selective": 783 * MB}, {}, 4, 1.0)
    refused = ""
    try:
        fit_dry_run(even, [truth.peak_bytes(probe) for probe in even])
    except MoestroError as error:
        refused = str(error)
    mended = [*even, *probes_to_add(even)]
    fitted = fit_dry_run(mended, [truth.peak_bytes(probe) for probe in mended])
    off = max(
        abs(fitted.constant_bytes / truth.constant_bytes - 1),
        abs(fitted.layer_bytes / truth.layer_bytes - 1),
        *(abs(fitted.activation_bytes[kind] / size - 1) for kind, size in truth.activation_bytes.items()),
    )
    return Check(
        claim="Equal stages do not determine the constant; the stages that are missing can be named",
        published="equal offsets make the constant unidentifiable (the tool's documentation)",
        ours=f"{len(even)} equal stages refused; with {len(mended) - len(even)} proposed ones all numbers come back "
        f"within {off:.0e}",
        how="computed",
        verdict=verdict_of(("the constant" in refused, off < 1e-6)),
        note=refused or "Equal stages were not refused.",
    )


def check_in_flight(fitted: StageMemory) -> Check:
    """The stated number of micro-batches bounds how many a stage can hold."""
    capped = fit_dry_run(dry_run(MICRO_BATCHES), [peak * MB for peak in PEAKS_MB], np.inf, comes_back=False)
    ours, theirs = (max(map(abs, fit.residuals[1:-1])) for fit in (fitted, capped))
    return Check(
        claim="The peaks were profiled with 8 micro-batches",
        published=f"{MICRO_BATCHES} micro-batches on {STAGES} stages",
        ours=f"worst residual {theirs:.0%} with at most {MICRO_BATCHES} in flight, {ours:.1%} with up to {STAGES}",
        how="computed",
        verdict="arithmetic does not close" if theirs > 2 * ours else "holds",
        note=f"1F1B holds no more than there are micro-batches, so stages 0 to {STAGES - MICRO_BATCHES} would all hold "
        f"{MICRO_BATCHES}. The peaks are those of stages that hold {STAGES} less their number.",
    )


def check_comes_back(fitted: StageMemory) -> Check:
    """A term of ours that needs no further unknown."""
    ours = fit_dry_run(dry_run(STAGES), [peak * MB for peak in PEAKS_MB])
    misses, theirs = ([abs(value) for value in one.residuals[1:-1]] for one in (ours, fitted))
    return Check(
        claim="While a stage that recomputes all its layers computes one again, that one has all its activations",
        published="not in the tool",
        ours=f"residuals {max(misses):.1%} at worst, {median(misses):.2%} median with it; "
        f"{max(theirs):.1%} and {median(theirs):.2%} without",
        how="computed",
        verdict=verdict_of((max(misses) < max(theirs), median(misses) < median(theirs))),
        note=f"No unknown more. The constant becomes {ours.constant_bytes / MB:.0f} MB instead of "
        f"{fitted.constant_bytes / MB:.0f}: some of it was activations. Recomputed layers keep much here; where "
        "they keep their input only, it is most of what a small stage holds (docs/planning-memory.md).",
    )


def check_loop() -> Check:
    """Proposed rounds of the 105B model on 8 stages, each peak counted as predictions do, fitted."""
    workload = workload_of(load_config("telechat3-105b").config)
    plan = Plan(pp=8, dp=64, ep=64, zero=1)
    rounds = design(workload, plan, ("none", "block"))
    peaks = take(rounds, counted(workload, plan))
    found = fit_dry_run(rounds.flat, [peaks[place] for place in sorted(peaks)])
    numbers = counted_numbers(workload, plan, ("none", "block"))
    layer = found.layer_bytes / numbers["layer"] - 1
    kept = found.activation_bytes["none"] / numbers["none"] - 1
    worst = max(map(abs, found.residuals))
    return Check(
        claim="A few uneven dry runs tell what a layer and its activations take",
        published="kinds of recomputation + 3 stages between the first and the last",
        ours=f"105B: {len(rounds.rounds)} dry runs of {plan.pp} stages, condition number {found.condition:.0f}; layer "
        f"{layer:+.1%}, its activations {kept:+.1%} off what is counted of one, stages {worst:.1%} at worst",
        how="computed",
        verdict=verdict_of((abs(layer) < 0.03, abs(kept) < 0.03, worst < 0.03)),
        note="45 layers, the first of them dense, on 512 devices with 64 ranks of experts. The peaks are those of our "
        "memory model, so this holds the method, not the model: `moestro probe run` takes them from a traced step.",
    )
