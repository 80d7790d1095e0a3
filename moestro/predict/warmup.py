"""1F1B with more micro-batches in flight, so that slow links between stages do not make ranks wait.

While a micro-batch is on its way to the next rank and back, this one has to have others to work on (the setting is that
of pipelines over regions, DeepCEE, arXiv 2505.15536).
"""

import math
from collections.abc import Sequence

from moestro.config.plan import Plan
from moestro.predict.orders import Order, one_f_one_b


def in_flight_over_links(
    forward_s: Sequence[float], backward_s: Sequence[float], link_s: Sequence[float]
) -> tuple[int, ...]:  # fmt: skip
    """Micro-batches that each rank holds: one more than the next rank, and ceil(2 · link / (forward + backward)).

    It has to be rounded up at every link: ranks that run forward and backward passes in turns wait for each other in a
    circle that goes once over the link and back, in which there are as many micro-batches as the two counts differ, and
    one. With fast links this is 1F1B's own.

    Args:
        forward_s, backward_s: of each stage, one micro-batch, weight gradients included; the slowest paces all.
        link_s: from each stage to its next, one way; the last stage's is not used.
    """
    pace = max(f + b for f, b in zip(forward_s, backward_s, strict=True))
    counts = [1]
    for way in reversed(list(link_s)[: len(forward_s) - 1]):
        counts.append(counts[-1] + 1 + math.ceil(2 * way / pace - 1e-9))
    return tuple(reversed(counts))


def orders_of(plan: Plan, micro_batches: int) -> list[Order] | None:
    """None: those of the plan's schedule."""
    return None if plan.in_flight is None else deep_orders(plan.in_flight, micro_batches)


def deep_orders(in_flight: Sequence[int], micro_batches: int) -> list[Order]:
    """1F1B's passes where rank r holds in_flight[r] micro-batches at most."""
    return [one_f_one_b(rank, held, micro_batches) for rank, held in enumerate(in_flight)]
