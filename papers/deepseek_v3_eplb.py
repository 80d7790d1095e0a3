"""DeepSeek-V3's balancing of experts by replicas (EPLB), on the example in its repository and against the best."""

import numpy as np

from moestro.plan.ilp.experts import Experts, balanced_experts, exact_experts
from papers.result import Check, verdict_of

# The example of the public repository: 12 experts in 4 groups, 16 places on 8 devices of 2 nodes.
LOADS = (
    (90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86),
    (20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27),
)
PLACED = (
    (5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1),
    (7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1),
)
PLACES, DEVICES, GROUPS, NODES = 16, 8, 4, 2
INSTANCES, EXPERTS, SMALL_PLACES, SMALL_DEVICES = 20, 5, 8, 4


def check_example() -> Check:
    ours = [balanced_experts(loads, PLACES, DEVICES, GROUPS, NODES) for loads in LOADS]
    whole = [balanced_experts(loads, PLACES, DEVICES) for loads in LOADS]
    bare = [Experts(np.arange(12), 4).imbalance(loads) for loads in LOADS]

    def told(values: list[float]) -> str:
        return " and ".join(f"{value:.2f}" for value in values)

    same = [one.experts.tolist() == list(placed) for one, placed in zip(ours, PLACED, strict=True)]
    return Check(
        claim="Replicas of busy experts even the load out: the balancer's example",
        published="; ".join(" ".join(map(str, placed)) for placed in PLACED),
        ours=f"{'the same' if all(same) else '; '.join(' '.join(map(str, one.experts)) for one in ours)}",
        how="computed",
        verdict=verdict_of(same),
        note="Experts by place, two layers. The busiest device has "
        f"{told([one.imbalance(loads) for one, loads in zip(ours, LOADS, strict=True)])} times the mean, "
        f"{told([one.imbalance(loads) for one, loads in zip(whole, LOADS, strict=True)])} where groups need not stay "
        f"in a node; 12 experts on 4 devices without replicas have {told(bare)}.",
    )


def check_best() -> Check:
    """Small instances of skewed loads: the greedy placement against the integer program's."""
    over = []
    for seed in range(INSTANCES):
        loads = np.random.default_rng(seed).lognormal(sigma=1.0, size=EXPERTS)
        greedy = balanced_experts(loads, SMALL_PLACES, SMALL_DEVICES).load(loads).max()
        over.append(greedy / exact_experts(loads, SMALL_PLACES, SMALL_DEVICES)[0].load(loads).max() - 1)
    return Check(
        claim="The balancer's greedy placement is near the best",
        published="not told",
        ours=f"the best in {sum(o < 1e-6 for o in over)} of {len(over)}, {np.mean(over):.1%} above it on average, "
        f"{max(over):.0%} at worst",
        how="computed",
        verdict=verdict_of([min(over) > -1e-6, float(np.mean(over)) < 0.05]),
        note=f"Load of the busiest device, {EXPERTS} experts of log-normal load in {SMALL_PLACES} places on "
        f"{SMALL_DEVICES} devices, against an integer program over replicas and places.",
    )
