"""SIGMA's pruned tuning by prediction: layouts of a few layers on two nodes, and whether the best of them stay the best
with all layers on many. `sigma.py` runs it.

The shape of the 200B model and the accelerator's name did not reach us: Qwen3-235B stands in, on MI300X.
"""

from dataclasses import dataclass

from moestro.config import load_config
from moestro.config.plan import Workload
from moestro.graph.convert import workload_of
from moestro.plan.search import search
from moestro.plan.space import space_of
from moestro.predict.target import target_of
from papers.result import Check, verdict_of

MODEL, CLUSTER, NODE = "qwen3-235b-a22b", "zaya1", 8
FEW_DEVICES, FEW_LAYERS, FEW_SEQUENCES = 16, 12, 256
DEVICES, SEQUENCES = 256, 2048
WON = (1, 8)  # tensor and expert ranks
NEAR = 0.05  # of the best step: what is kept for the large run
KEEP = 400  # plans, so that each pair of degrees is among them
# What the paper enumerates: TP, EP, PP, VPP and micro-batches.
SPACE: dict[str, tuple[object, ...]] = {
    "tp": (1, 2, 4), "ep": (1, 2, 4, 8, 16), "etp": (1,), "cp": (1,), "vpp": (1, 2, 4), "zero": (1,),
    "schedule": ("1f1b", "interleaved"), "micro_batch_size": (1, 2, 4), "recompute": ("none", "block"),
    "expert_chunks": (1,), "expert_recompute": (False,), "dispatch": ("deduplicated",), "overlap_dispatch": (True,),
}  # fmt: skip

Degrees = tuple[int, int]


@dataclass(frozen=True)
class Tuned:
    """Seconds of the fastest step that fits for each (tp, ep), the fastest first; plans gone through."""

    step_s: dict[Degrees, float]
    plans: int

    @property
    def best(self) -> Degrees:
        return next(iter(self.step_s))

    def near(self, share: float) -> list[Degrees]:
        least = self.step_s[self.best]
        return [degrees for degrees, step in self.step_s.items() if step <= (1 + share) * least]


def tuned(devices: int, layers: int | None, sequences: int, pipelines: tuple[int, ...]) -> Tuned:
    base = workload_of(load_config(MODEL).config)
    model = base.model if layers is None else base.model.model_copy(update={"num_layers": layers})
    changes = {"model": model, "global_batch_size": sequences, "trainer": "megatron"}
    work: Workload = base.model_copy(update=changes)
    space = space_of(work, devices, NODE, {**SPACE, "pp": pipelines})
    found = search(work, target_of(CLUSTER, devices), devices, space, keep=KEEP, exact=1)
    steps: dict[Degrees, float] = {}
    for one in found.best:  # the fastest first
        steps.setdefault((one.plan.tp, one.plan.ep), one.step_s)
    return Tuned(steps, found.tally.plans)


def check_tuning(small: Tuned, large: Tuned) -> Check:
    kept = small.near(NEAR)
    rows = ", ".join(f"TP {tp} EP {ep} {step / small.step_s[small.best] - 1:+.1%}"
                     for (tp, ep), step in list(small.step_s.items())[1:4])  # fmt: skip
    return Check(
        claim="Layouts tuned on 16 accelerators serve at scale; on a fully connected node TP 1 with EP 8 wins",
        published="TP, EP, PP, VPP and micro-batches enumerated on 16 accelerators, survivors kept; TP 1, EP 8",
        ours=f"{FEW_DEVICES} devices: TP {small.best[0]} EP {small.best[1]} ({rows}); {DEVICES} devices: TP "
        f"{large.best[0]} EP {large.best[1]}, among the {len(kept)} of {len(small.step_s)} pairs kept",
        how="simulated",
        verdict=verdict_of([small.best == WON, large.best in kept]),
        note=f"{FEW_LAYERS} layers of Qwen3-235B on {FEW_DEVICES} MI300X, {small.plans:,} plans, and all of it on "
        f"{DEVICES}, {large.plans:,} plans; kept is what lies within {NEAR:.0%}. How many layers the small run has "
        "matters: where all experts fit on every device EP 1 wins, which with all layers is "
        f"{large.step_s.get((1, 1), float('inf')) / large.step_s[large.best] - 1:.0%} behind.",
    )


def check() -> Check:
    """Some 10 s of CPU time."""
    small = tuned(FEW_DEVICES, FEW_LAYERS, FEW_SEQUENCES, (1, 2, 4))
    return check_tuning(small, tuned(DEVICES, None, SEQUENCES, (4, 8, 16)))
