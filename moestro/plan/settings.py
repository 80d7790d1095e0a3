"""What goes with a plan once it is chosen: sizes of buckets, intervals of checkpoints, and what uneven experts cost."""

from typing import NamedTuple

import numpy as np

from moestro.config.plan import Plan, RoutingConfig, Workload
from moestro.errors import MoestroError
from moestro.graph.count import count_step
from moestro.graph.tape import weight_bytes
from moestro.graph.words import Collective, CollectiveOp
from moestro.hardware.curves.busbw import bus_factor
from moestro.hardware.curves.fusion import Bucket, recommend_bucket
from moestro.hardware.curves.transfer import fit_transfer
from moestro.plan.objective import Goal, Outcome, numbers_of, outcome
from moestro.predict.predict import predict_step, target_pricer
from moestro.predict.target import Target
from moestro.predict.traffic import rank_shares
from moestro.predict.words import Prediction

SIZES = 2.0 ** np.arange(12, 33)  # bytes
# What routing may be like where it was taken as balanced: the busiest expert of a run that is balanced well, and shares
# of experts that nothing balances.
UNEVEN = {
    "if the busiest expert gets 1.5 times the mean": RoutingConfig(kind="measured", max_over_mean=1.5),
    "if loads fall as rank^-1.2": RoutingConfig(kind="power_law", alpha=1.2),
}


class Uneven(NamedTuple):
    """By which share of the balanced step a step is longer under a routing."""

    routing: str
    share: float


def run_of(workload: Workload, plan: Plan, one: Prediction, goal: Goal) -> Outcome:
    """What a run of such steps comes to."""
    return outcome(numbers_of(workload, plan, one), goal, plan.world_size)


def checkpoint_every(found: Outcome, step_s: float) -> int | None:
    """Steps between checkpoints. None: failures are not known, or checkpoints cost nothing."""
    if found.interval_s is None or found.checkpoint_s is None or not float(found.checkpoint_s) > 0:
        return None
    return max(1, round(float(found.interval_s) / step_s))


def bucket_of(workload: Workload, plan: Plan, target: Target) -> Bucket | None:
    """For gradients and weights of what all data ranks share. None: they are not sent in buckets (one rank, or ZeRO-3,
    which sends layers), or nobody knows how fast."""
    ranks = plan.dp * plan.cp
    if ranks == 1 or plan.zero == 3 or target.parts or target.host_computes:
        return None
    network, width = target_pricer(workload, plan, target).network, 4.0 if plan.gradient_dtype == "fp32" else 2.0
    sizes: dict[CollectiveOp, float] = {"all_reduce": width}
    if plan.zero:
        sizes = {"reduce_scatter": width, "all_gather": float(weight_bytes(workload))}
    constants = target.constants_for(workload, plan.world_size)
    curves = {}
    for op in sizes:
        sent = [network.of(Collective(op, "gradients", "bucket", "dp", ranks, size, "bf16")) for size in SIZES.tolist()]
        seconds = [one.seconds * (constants.between if one.between else constants.inside) for one in sent]
        curves[str(op)] = fit_transfer(SIZES, seconds, bus_factor(op, ranks), ("piecewise",))
    held = [0.0] * plan.pp
    for stage in count_step(workload, plan).stages:
        held[stage.rank] += stage.parameters.dense
    each = {str(op): size for op, size in sizes.items()}
    try:
        return recommend_bucket(curves, each, ranks, params=max(held), hidden=min(0.99, constants.hidden))
    except MoestroError:  # a bandwidth that only grows: no size is enough
        return None


def uneven_of(workload: Workload, plan: Plan, target: Target, step_s: float) -> list[Uneven]:
    """What uneven experts cost a plan that was made for balanced ones; where the workload says how uneven they are,
    what that costs. step_s: of the workload as it is."""
    if workload.model.moe is None:
        return []

    def step_s_with(routing: RoutingConfig) -> float:
        return predict_step(workload.model_copy(update={"routing": routing}), plan, target, exact=True).step_s.value

    if workload.routing.kind != "balanced":
        return [Uneven("as the workload says, against balanced ones", step_s / step_s_with(RoutingConfig()) - 1)]
    found = []
    for text, routing in UNEVEN.items():
        experts = workload.model.moe.resolved_num_experts
        loads = rank_shares(routing, experts, workload.model.largest_top_k, experts)  # of every expert, by layer
        drawn = RoutingConfig(kind="measured", loads=tuple(map(tuple, loads.tolist())))
        found.append(Uneven(text, step_s_with(drawn) / step_s - 1))
    return found
