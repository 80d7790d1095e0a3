"""MemFine's rule for the number of chunks, and its table of what trains, by arithmetic (arXiv 2511.21431)."""

from collections.abc import Callable
from math import ceil

import numpy as np

from moestro.config import load_config
from moestro.config.plan import Plan, Workload
from moestro.graph.convert import workload_of
from moestro.graph.count import count_step
from moestro.plan.chunks import BINS, chunks_that_fit
from moestro.predict.memory import memory_of, routed_row_bytes
from papers.result import Check, verdict_of

GB = 1e9
DEVICE_GB = 64.0
STATIC_GB = {"I": 43.0, "II": 39.5}  # published
# Of the three methods (one chunk, always 8, chosen): chunks, and whether models I and II train.
METHODS = {1: (False, True), 8: (True, True), 2: (True, True)}
SEQ_LEN, HIDDEN, HEADS, HEAD_DIM, WIDTH, EXPERTS, TOP_K = 4096, 7168, 128, 192, 2048, 256, 8  # q and k have 192 each
ROW_BYTES = 2 * (2 * HIDDEN + 2 * WIDTH)  # of a received copy, by the paper's equation
SHARES = np.linspace(0.80, 1.0, 41)  # alpha: of the device's memory, that may be used


def outside_gb() -> float:
    """The first term of the paper's equation for one layer in flight: what does not depend on where tokens go."""
    per_token = 5 * HIDDEN + HEADS * HEAD_DIM + 2 * HEADS * HEAD_DIM + EXPERTS
    return 2 * SEQ_LEN * per_token / GB


def rule(static_gb: float, share: float, outside: float, rows_gb: float) -> int | None:
    """c* = ceil(s'' / s'_max), then the next of the bins. rows_gb: of all copies at once."""
    room = share * DEVICE_GB - static_gb - outside
    wanted = ceil(rows_gb / room) if room > 0 else BINS[-1] + 1
    return next((chunks for chunks in BINS if chunks >= wanted), None)


def check_trains(a: float, b: float) -> Check:
    """a, b: of the published active memory, GB."""
    agree, rows = [], []
    for chunks, trains in METHODS.items():
        for (model, static), did in zip(STATIC_GB.items(), trains, strict=True):
            total = static + a + b / chunks
            agree.append((total <= DEVICE_GB) == did)
            rows.append(f"{model} c = {chunks}: {total:.1f}")
    return Check(
        claim="What trains on 64 GB: all but model I in one chunk",
        published="65.9 (out of memory) / 46.7 / 54.9 GB of model I, 62.4 / 43.2 / 51.4 of II",
        ours=f"static + A + B / c: {', '.join(rows)} GB; {sum(agree)} of {len(agree)} as published",
        how="computed",
        verdict=verdict_of(agree),
        note="Fits when it is at most 64 GB. Static memory is the published one, which the layout does not explain.",
    )


def check_rule(a: float, b: float) -> Check:
    whole = {model: rule(static, 1.0, a, b) for model, static in STATIC_GB.items()}
    both = [x for x in SHARES if all(rule(static, x, a, b) == 2 for static in STATIC_GB.values())]
    span = f"{both[0]:.3f} to {both[-1]:.3f}" if both else "none"
    return Check(
        claim="The memory rule gives two chunks in both models",
        published="c = 2 (54.9 and 51.4 GB); alpha, the share of the memory that may be used, is not told",
        ours=f"c = {whole['I']} and {whole['II']} with all 64 GB; 2 in both for a share of {span}",
        how="computed",
        verdict=verdict_of((bool(both), whole["I"] == 2, whole["II"] == 2)),
        note="c* = ceil(s'' / s'_max), then the next of 1, 2, 4, 8, with the copies that B holds. Model II fits in one "
        "chunk, and trained so, 4 % slower: there the rule chose more chunks than were needed, or kept memory back.",
    )


def shape(layers: int) -> tuple[Workload, Plan]:
    """DeepSeek-V3's layers on 4 stages with 32 ranks of experts, which takes 128 devices."""
    overrides = [f"model.num_layers={layers}", f"data.seq_len={SEQ_LEN}", "train.global_batch_size=960"]
    workload = workload_of(load_config("deepseek-v3", overrides).config).model_copy(update={"trainer": "megatron"})
    # 960 sequences are no multiple of 32 ranks times more than one.
    return workload, Plan(pp=4, dp=32, ep=32, zero=1, recompute="block")


def check_equation(a: float) -> Check:
    workload, plan = shape(16)
    ours = routed_row_bytes(workload, plan)
    return Check(
        claim="The equation of activation memory",
        published=f"A = {a:.2f} GB (fitted), {ROW_BYTES:,} bytes a received copy: 2 (2 h + 2 g)",
        ours=f"A = {outside_gb():.2f} GB by the equation; {ours:,.0f} bytes a copy in our memory model",
        how="computed",
        verdict=verdict_of((abs(outside_gb() / a - 1) < 0.1, abs(ours / ROW_BYTES - 1) < 0.02)),
        note=f"With queries and keys of {HEAD_DIM}. A gated expert has three inner tensors (gate, up, their product); "
        "the paper counts two.",
    )


def check_planner(a: float, b: float) -> Check:
    """The same room for activations on ours: static memory is not the paper's."""
    mean = TOP_K * SEQ_LEN
    copies = b * GB / ROW_BYTES
    same, seen, whole = 0, 0, list[str]()
    for (model, static), layers in zip(STATIC_GB.items(), (16, 8), strict=True):
        workload, plan = shape(layers)
        choose = _chooser(workload, plan, copies / mean)
        for share in SHARES:
            room = share * DEVICE_GB - static
            ours, theirs = choose(room), rule(static, float(share), a, b)
            seen, same = seen + 1, same + (ours == theirs)
        whole.append(f"{model} {choose(DEVICE_GB - static)}")
    return Check(
        claim="Our planner's number of chunks is the rule's",
        published="the rule, for shares of the memory from 0.80 to 1",
        ours=f"the same in {same} of {seen} cases; with all 64 GB {' and '.join(whole)}",
        how="computed",
        verdict=verdict_of((same == seen, same >= 0.75 * seen)),
        note=f"moestro.plan.chunks.chunks_that_fit, with the busiest rank at {copies / mean:.1f} times the mean (the "
        "copies that B holds) and, beyond even routing's need, as much room as the rule has. Ours has one more inner "
        "tensor for each copy.",
    )


def _chooser(workload: Workload, plan: Plan, max_over_mean: float) -> Callable[[float], int | None]:
    """By GB of room for activations beyond what even routing holds besides one layer's experts."""
    memory, _ = memory_of(count_step(workload, plan), workload, plan)
    even = TOP_K * SEQ_LEN * routed_row_bytes(workload, plan)
    fixed = memory.needed - even - outside_gb() * GB
    return lambda room: chunks_that_fit(workload, plan, fixed + room * GB, max_over_mean)


def planner_checks(a: float, b: float) -> tuple[Check, ...]:
    return check_trains(a, b), check_rule(a, b), check_equation(a), check_planner(a, b)
