"""Operations timed in several processes of one CPU at once, as its ranks run them: they share cores, caches and memory.

There are as many processes as cores at most. Of more, each waits for its turn, which short timings do not see.
"""

import statistics
import time
from collections import defaultdict

import torch
import torch.distributed as dist

from moestro.config import load_config
from moestro.hardware.profile import Sample, Value
from moestro.measure.attention import attention_cases
from moestro.measure.elementwise import elementwise_cases
from moestro.measure.gemm import gemm_cases
from moestro.measure.memory import memory_cases
from moestro.measure.step_ranks import measure_on_ranks
from moestro.measure.timing import Case, measure_cases
from moestro.parallel.local import run_on_ranks

START_S = 60.0  # beyond the time of measuring, after which processes are taken to hang
ROUNDS = 2
STEP_PRESET, STEP_BATCH, STEPS = "mixtral-tiny", 4, 5  # the batch of each process
LEFT_OUT = ("moe_experts", "grouped_gemm", "batched_gemm", "triad", "scale", "add", "dot", "read", "muon")


def processes_at_once(ranks: int, cores: int) -> list[int]:
    """Numbers of processes that are measured for who may run up to `ranks`: powers of two up to the cores."""
    return [2**i for i in range(1, 16) if 2**i <= min(ranks, cores)]


def threads_each(processes: int, cores: int) -> int:
    """As `moestro train --nproc` starts them."""
    return max(1, cores // processes)


def measure_steps(processes: int) -> list[Sample]:
    """Ops train_step: seconds of a small preset's step on so many processes that share its batch, "operations" and
    "host" apart. What operations take in a step beyond what they take alone is known from it.

    Raises:
        MoestroError: a process failed.
    """
    overrides = (f"train.global_batch_size={STEP_BATCH * processes}",)
    found = measure_on_ranks(load_config(STEP_PRESET, overrides).config, processes, STEPS, limit_s=START_S)
    each = {
        "operations": [rank.passes_s + rank.update_s for rank in found.ranks],
        "host": [rank.host_s for rank in found.ranks],
    }
    return [
        Sample(
            op="train_step",
            case={"preset": STEP_PRESET, "batch": STEP_BATCH * processes, "what": what, "processes": processes},
            median_s=statistics.mean(seconds),
            low_s=min(seconds),
            high_s=max(seconds),
            repeats=STEPS,
        )
        for what, seconds in each.items()
    ]


def measure_together(processes: int, cores: int, limit_s: float) -> list[Sample]:
    """Samples with "processes" in their case; of each case the median process.

    Raises:
        RuntimeError: a process failed or hangs.
    """
    threads = threads_each(processes, cores)
    found = run_on_ranks(_in_process, processes, threads, limit_s, limit_s=limit_s + START_S)
    same = defaultdict[tuple[str, tuple[tuple[str, Value], ...]], list[Sample]](list)
    for samples in found:
        for sample in samples:
            same[sample.op, tuple(sample.case.items())].append(sample)
    return [
        some[0].model_copy(
            update={
                "case": {**some[0].case, "processes": processes},
                "median_s": statistics.median(s.median_s for s in some),
                "low_s": min((s.low_s for s in some if s.low_s is not None), default=None),
                "high_s": max((s.high_s for s in some if s.high_s is not None), default=None),
            }
        )
        for some in same.values()
        if len(some) == processes
    ]


def _in_process(rank: int, threads: int, limit_s: float) -> list[Sample]:
    deadline = time.perf_counter() + limit_s
    torch.set_num_threads(threads)
    device = torch.device("cpu")
    cases = _cases(device)
    dist.barrier()
    left_s = deadline - time.perf_counter()
    # Not to the end: a process that is through leaves the others the machine.
    measured = measure_cases(
        cases, device, seconds_per_case=0.4 * left_s / len(cases), rounds=ROUNDS, deadline=deadline
    )
    return measured.samples


def _cases(device: torch.device) -> list[Case]:
    """What a step is made of, in few sizes: products without the sweeps for a size's alignment."""
    everything = [
        case
        for cases in (gemm_cases, memory_cases, attention_cases, elementwise_cases)
        for case in cases(device, True)
        if case.op not in LEFT_OUT
    ]
    main = next(case.case["dtype"] for case in everything if case.op == "gemm")
    return [case for case in everything if _wanted(case, str(main))]


def _wanted(case: Case, dtype: str) -> bool:
    if case.op == "attention":
        return case.case["phase"] != "decode" and case.case["heads"] == case.case["kv_heads"] == 4
    if case.op != "gemm":
        return True
    sizes = [value for name in ("n", "k") if isinstance(value := case.case[name], int)]
    whole = all(size & (size - 1) == 0 or size % 192 == 0 for size in sizes)
    return case.case["dtype"] == dtype and "layout" not in case.case and whole
