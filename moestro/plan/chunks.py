"""How many chunks a layer's tokens must pass in for uneven routing to fit (MemFine, arXiv 2511.21431)."""

from collections.abc import Sequence

from moestro.config.plan import Plan, Workload
from moestro.graph.count import count_step
from moestro.hardware.devices import Device
from moestro.predict.memory import memory_of, routing_margin

BINS = (1, 2, 4, 8)  # that MemFine's tuner and our trainer's "auto" choose from


def chunks_that_fit(
    workload: Workload,
    plan: Plan,
    limit_bytes: float,
    max_over_mean: float | None = None,
    bins: Sequence[int] = BINS,
    device: Device | None = None,
) -> int | None:
    """The fewest chunks with which a device needs at most `limit_bytes`, experts computed again chunk by chunk where
    there are several; None: none of `bins` is enough.

    Args:
        max_over_mean: tokens of the busiest rank over the mean; None: all that can reach one.

    Raises:
        MoestroError: the plan does not fit the workload.
    """
    for chunks in sorted(bins):
        again = plan.expert_recompute or chunks > 1
        tried = plan.model_copy(update={"expert_chunks": chunks, "expert_recompute": again})
        memory, _ = memory_of(count_step(workload, tried), workload, tried, device)
        whole = tried.model_copy(update={"expert_recompute": False})  # a chunk that is computed again has all of it
        if memory.needed + routing_margin(workload, whole, max_over_mean) <= limit_bytes:
            return chunks
    return None
