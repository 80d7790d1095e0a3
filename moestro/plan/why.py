"""Why one plan is faster than another: where their steps' time differs, and what holds the best one up."""

from typing import NamedTuple

from moestro.config.plan import Plan, Workload
from moestro.plan.candidates import Found
from moestro.predict.predict import predict_step
from moestro.predict.target import Target
from moestro.predict.words import TimeBreakdown

LEAST = 0.002  # of a step: smaller differences are not told
# Fields of a plan that are told apart, in this order; all others would be noise in a table.
TOLD = (
    "pp", "dp", "cp", "tp", "ep", "etp", "zero", "shard", "schedule", "vpp", "layers_per_stage", "micro_batch_size",
    "recompute", "recompute_layers", "recompute_per_stage", "expert_chunks", "expert_recompute", "dispatch",
    "overlap_dispatch", "overlap_tensor", "context", "sequence_parallel", "offload", "bucket_bytes",
    "overlap_gradients", "overlap_parameters", "gradient_dtype",
)  # fmt: skip


class Difference(NamedTuple):
    """seconds: how much longer the other takes there."""

    what: str
    seconds: float


def differences(first: TimeBreakdown, other: TimeBreakdown) -> list[Difference]:
    """Where the time of two steps differs, the largest first; they add up to the difference of the totals."""
    found = [
        Difference(part, other.by_part.get(part, 0.0) - first.by_part.get(part, 0.0))
        for part in dict.fromkeys((*first.by_part, *other.by_part))
    ]
    rest = other.compute - first.compute - sum(one.seconds for one in found)
    found += [
        Difference("other computation", rest),
        Difference("host", other.host - first.host),
        Difference("communication", other.communication - first.communication),
        Difference("bubble", other.bubble - first.bubble),
        Difference("optimizer", other.optimizer - first.optimizer),
    ]
    return sorted((one for one in found if abs(one.seconds) > 1e-12), key=lambda one: -abs(one.seconds))


def changes(first: Plan, other: Plan) -> list[str]:
    """Fields in which `other` is another plan, as name=value of it."""
    return [f"{name}={getattr(other, name)}" for name in TOLD if getattr(first, name) != getattr(other, name)]


def binding(found: Found, workload: Workload, target: Target) -> list[str]:
    """What keeps the choice from being faster: the largest losses of its step, and memory."""
    plan, chosen = found.exact[0]
    time = chosen.time
    losses = {
        "communication that nothing hides": time.communication,
        "the pipeline's bubble": time.bubble,
        "waiting for the host": time.host,
        "the optimizer": time.optimizer,
    }
    if plan.recompute != "none":
        without = predict_step(workload, plan.model_copy(update={"recompute": "none"}), target)
        losses["recomputation"] = time.compute - without.time.compute
    lines = [
        f"{seconds / time.total:.0%} of the step is {name}"
        for name, seconds in sorted(losses.items(), key=lambda item: -item[1])
        if seconds > 0.02 * time.total
    ]
    best, faster = found.best[0], found.faster
    if faster is not None and faster.step_s < best.step_s * (1 - LEAST):
        gain = best.step_s / faster.step_s - 1
        text = " ".join(changes(best.plan, faster.plan))
        lines.append(f"memory: a plan {gain:.1%} faster takes {faster.total_bytes / 1e9:.1f} GB ({text})")
    return lines
