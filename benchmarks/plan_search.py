"""How many plans a second the search evaluates, and how long a space of three million takes.

`python benchmarks/plan_search.py [--workers N]`: the space that Calculon's authors searched, GPT-3 175B on 64 A100 of
80 GB, with all of our choices that have a counterpart there: degrees of tensor, pipeline and data parallelism,
micro-batches, interleaving, three kinds of recomputation and of how many layers, sequence parallelism, overlap of
tensor, data and weight traffic, sharded optimizer, buckets. Then what `moestro plan` searches for a mixture of experts.
"""

import argparse
import time

from moestro.config import load_config
from moestro.config.model import ModelConfig
from moestro.config.plan import Workload
from moestro.graph.convert import workload_of
from moestro.plan.search import search
from moestro.plan.space import Space, space_of
from moestro.plan.workers import default_workers
from moestro.predict.target import Target, target_of

GPT3 = ModelConfig(
    vocab_size=51200, hidden_size=12288, num_layers=96, num_heads=96, max_seq_len=2048, intermediate_size=4 * 12288,
    activation="gelu", tie_embeddings=True,
)  # fmt: skip
BATCH = 3072


def calculons_space(workload: Workload, devices: int) -> Space:
    sizes = tuple(n for n in range(1, 97) if 96 % n == 0)
    given = {
        "tp": tuple(n for n in (1, 2, 4, 8, 16, 32, 64) if 96 % n == 0),
        "pp": sizes,
        "vpp": sizes,
        "schedule": ("1f1b", "interleaved"),
        "micro_batch_size": tuple(n for n in range(1, BATCH + 1) if BATCH % n == 0),
        "recompute": ("none", "selective", "block"),
        "recompute_layers": (None, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48),
        "sequence_parallel": (False, True),
        "overlap_tensor": (False, True),
        "zero": (0, 1),
        "overlap_gradients": (False, True),
        "overlap_parameters": (False, True),
        "bucket_bytes": (None, 2.5e7, 1e8),
    }
    return space_of(workload, devices, 8, given)


def run(name: str, workload: Workload, target: Target, devices: int, space: Space, workers: int) -> None:
    start = time.perf_counter()
    found = search(workload, target, devices, space, exact=3, workers=workers)
    seconds = time.perf_counter() - start
    tally = found.tally
    plan, best = found.exact[0]
    left_out = ", ".join(f"{plans:,} by {rule}" for rule, plans in tally.skipped.items()) or "none"
    print(
        f"{name}: {tally.plans:,} plans in {seconds:.1f} s: {tally.plans / seconds:,.0f}/s; {tally.families:,} families"
    )
    print(f"  evaluated: {tally.evaluated:,}, {tally.evaluated / seconds:,.0f}/s; left out by rule: {left_out}")
    print(f"  too big for memory: {tally.too_big:,}")
    print(
        f"  best: {best.step_s.value:.3g} s, {best.memory.total / 1e9:.1f} GB, {plan.model_dump(exclude_defaults=True)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=default_workers())
    workers = parser.parse_args().workers
    gpt3 = Workload(model=GPT3, seq_len=2048, global_batch_size=BATCH, precision="bf16")
    run("GPT-3 175B, 64 A100", gpt3, target_of("a100-sxm-80gb", 64), 64, calculons_space(gpt3, 64), workers)
    for preset, hardware, devices in (("olmoe-1b-7b", "h100-8", 8), ("mixtral-8x7b", "h100-sxm", 64)):
        workload, target = workload_of(load_config(preset).config), target_of(hardware, devices)
        space = space_of(workload, devices, target.place.node_size)
        run(f"{preset}, {devices} {hardware}", workload, target, devices, space, workers)


if __name__ == "__main__":
    main()
