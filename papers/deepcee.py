"""DeepCEE (Wang, Liao, Liu and others; arXiv 2505.15536; first called SpanTrain).

The claim: training over regions is 1.3 to 2.8 times as fast as other systems when the slow network between regions is
planned for first: collectives inside a region, a pipeline between them, and micro-batches in flight by the links.

What is reproduced here, as far as prediction goes (the paper's body is not public; the rule is of a reconstruction):

* simulated: a pipeline over slow links, with plain 1F1B and with more micro-batches in flight by the rule
  (S - s) + ceil(2 · later links / (forward + backward)), and what Moestro's own count makes of it;
* simulated: links that change their pace, and the count followed; planted groups of devices found by their links;
* computed: a step of OLMoE over two regions, the memory that micro-batches in flight take, and what a planner makes of
  order, layers and micro-batches together.

What is not: the testbed and its baselines.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from moestro.config import load_config
from moestro.config.plan import Plan
from moestro.graph.convert import workload_of
from moestro.hardware.grouping import group_devices
from moestro.plan.regions import Choice, place_regions
from moestro.predict.orders import Order, Pass
from moestro.predict.predict import predict_step
from moestro.predict.schedule import PipelineResult, simulate_pipeline
from moestro.predict.target import target_of
from moestro.predict.warmup import deep_orders, in_flight_over_links
from moestro.predict.words import Prediction
from papers.result import Check, PaperResult, Progress, verdict_of

STAGES, MICRO_BATCHES, FORWARD, BACKWARD = 4, 64, 1.0, 2.0
LINKS = (0.0, 0.5, 1.0, 2.0, 4.0)  # seconds of each, one way; a forward pass takes one
IDEAL = MICRO_BATCHES * (FORWARD + BACKWARD)
PLAN = Plan(pp=4, dp=8, ep=8, zero=1, recompute="block")
GROUPS, GAP, NOISE, DRAWS = (3, 5), 10.0, 0.2, 100  # planted: devices of each, bandwidth inside over between
RESTORED = 0.9  # of the best utilisation, after a change


def run(progress: Progress) -> PaperResult:
    """Seconds, and those of fitting curves of H100 and A100 where nobody has."""
    cases = [Case.of(link) for link in LINKS]
    progress(1, 3, "pipelines")
    plain, deep = regions()
    progress(2, 3, "a step over two regions")
    planned = place_regions(workload_of(load_config("olmoe-1b-7b").config), PLAN, target_of("two-regions"), [PLAN.pp])
    progress(3, 3, "planned over two regions")
    checks = (
        check_speed(cases),
        check_rule(cases),
        check_order(cases),
        check_memory(cases),
        check_regions(plain, deep),
        check_planned(planned),
        check_change(cases),
        check_groups(),
        PUBLISHED,
    )
    figures = {}
    for case in cases:
        for name, result in case.results.items():
            figures[f"utilisation, link {case.link}, {name}"] = IDEAL / result.total_s
    figures |= {"two regions, planned, s": planned.best.step_s}
    return PaperResult(checks, figures | {"two regions, 1F1B, s": plain.time.total, "deeper, s": deep.time.total})


@dataclass(frozen=True)
class Case:
    """One link time. results: "1F1B"; the rule's counts, with passes run as they become ready, and in 1F1B's fixed
    order; "ours" in fixed order."""

    link: float
    rule: tuple[int, ...]
    ours: tuple[int, ...]
    results: dict[str, PipelineResult]

    @staticmethod
    def of(link: float) -> "Case":
        rule = counts(link)
        ours = in_flight_over_links([FORWARD] * STAGES, [BACKWARD] * STAGES, [link] * STAGES)
        orders = {
            "1F1B": None,
            "rule": ready_orders(rule, link),
            "rule, fixed order": deep_orders(rule, MICRO_BATCHES),
            "ours": deep_orders(ours, MICRO_BATCHES),
        }
        return Case(link, rule, ours, {name: pipeline(link, order) for name, order in orders.items()})

    def share(self, name: str) -> float:
        """Utilisation of the ranks."""
        return IDEAL / self.results[name].total_s


def counts(link: float) -> tuple[int, ...]:
    """Micro-batches in flight on each stage, by the rule."""
    ways = [2 * link * (STAGES - 1 - stage) / (FORWARD + BACKWARD) for stage in range(STAGES)]
    return tuple(STAGES - stage + math.ceil(way - 1e-9) for stage, way in enumerate(ways))


def pipeline(link: float, orders: Sequence[Order] | None) -> PipelineResult:
    times = [FORWARD] * STAGES, [BACKWARD] * STAGES, [0.0] * STAGES
    return simulate_pipeline("1f1b", STAGES, 1, MICRO_BATCHES, *times, link, orders=orders)


def ready_orders(in_flight: Sequence[int], link: float) -> list[Order]:
    """What ranks run if each takes a backward pass that is ready, else a forward pass while it holds fewer."""
    orders: list[Order] = [[] for _ in in_flight]
    free = [0.0] * STAGES
    arrived: dict[tuple[str, int, int], float] = {("F", 0, number): 0.0 for number in range(MICRO_BATCHES)}
    while any(len(order) < 2 * MICRO_BATCHES for order in orders):
        start, _, rank, work = min(_next(orders[r], r, held, free[r], arrived) for r, held in enumerate(in_flight))
        end = start + (FORWARD if work.kind == "F" else BACKWARD)
        orders[rank].append(work)
        free[rank] = end
        number = work.micro_batch
        if work.kind == "F" and rank < STAGES - 1:
            arrived["F", rank + 1, number] = end + link
        elif work.kind == "F":
            arrived["B", rank, number] = end
        elif rank:
            arrived["B", rank - 1, number] = end + link
    return orders


def _next(
    order: Order, rank: int, held: int, free: float, arrived: dict[tuple[str, int, int], float]
) -> tuple[float, bool, int, Pass]:  # fmt: skip
    """When a rank can start its next pass, and which; a backward pass where both can start by then."""
    done = {kind: sum(work.kind == kind for work in order) for kind in "FB"}
    choices = []
    for kind in "BF":
        ready = arrived.get((kind, rank, done[kind]), math.inf)
        if kind == "F" and done["F"] - done["B"] >= held:
            ready = math.inf
        choices.append((max(free, ready), kind == "F", rank, Pass(kind, rank, done[kind])))
    return min(choices)


def check_speed(cases: Sequence[Case]) -> Check:
    """Of the rule over plain 1F1B."""
    gains = {case.link: case.share("rule") / case.share("1F1B") for case in cases}
    rising = all(later > earlier for earlier, later in zip(gains.values(), list(gains.values())[1:], strict=False))
    return Check(
        claim="Planning for slow links makes training over regions 1.3 to 2.8 times as fast",
        published="1.3 to 2.8 times other systems",
        ours=f"{_list(gains.values())} times plain 1F1B with links of {_list(gains, 1)} forward passes",
        how="simulated",
        verdict=verdict_of([abs(gains[0.0] - 1) < 1e-9, gains[1.0] >= 1.3, gains[4.0] >= 2.0, rising]),
        note=f"{STAGES} equal stages, {MICRO_BATCHES} micro-batches, backward passes twice as long as forward ones: "
        "more micro-batches in flight alone cover most of the published range. Which baselines the figures are against "
        "is not known.",
    )


def check_rule(cases: Sequence[Case]) -> Check:
    """Within 15 % of what links that take no time leave."""
    best = cases[0].share("1F1B")
    shares = [case.share("rule") for case in cases]
    return Check(
        claim="With micro-batches in flight by the links ranks stay busy",
        published="not described",
        ours=f"utilisation {_list(shares, 3)} against {_list([c.share('1F1B') for c in cases], 3)} of 1F1B",
        how="simulated",
        verdict=verdict_of([share > 0.85 * best for share in shares]),
        note=f"Links of {_list([c.link for c in cases], 1)} forward passes; a rank takes a backward pass that is "
        "ready, else a forward pass while it holds fewer than its count.",
    )


def check_order(cases: Sequence[Case]) -> Check:
    slow = [case for case in cases if case.link]
    fixed, ours = ([case.share(name) for case in slow] for name in ("rule, fixed order", "ours"))
    ready = [case.share("rule") for case in slow]
    return Check(
        claim="In 1F1B's fixed order the count has to be rounded up at every link, and is then better",
        published="not described",
        ours=f"utilisation {_list(fixed, 3)} with the rule's counts, {_list(ours, 3)} with ours",
        how="simulated",
        verdict=verdict_of([*(o > f for o, f in zip(ours, fixed, strict=True)),
                            *(o > r for o, r in zip(ours, ready, strict=True))]),
        note="Trainers run passes in a fixed order. Neighbours then wait for each other in a circle once over their "
        "link and back, which the sum over later links does not see. First stage: "
        f"{', '.join(f'{c.ours[0]} instead of {c.rule[0]}' for c in slow)} in flight.",
    )  # fmt: skip


def check_memory(cases: Sequence[Case]) -> Check:
    first = {case.link: case.results["rule"].peak_in_flight[0] for case in cases}
    kept = all(
        peak <= count for c in cases for peak, count in zip(c.results["rule"].peak_in_flight, c.rule, strict=True)
    )
    return Check(
        claim="The price is activations of more micro-batches on the first stages",
        published="not described",
        ours=f"{_list(first.values(), 0)} micro-batches held on the first stage",
        how="simulated",
        verdict=verdict_of([first[0.0] == STAGES, first[4.0] == 3 * STAGES, kept]),
        note=f"Links of {_list(first, 1)} forward passes. `plan.in_flight` is what the memory of a prediction counts.",
    )


def regions() -> tuple[Prediction, Prediction]:
    """A step on two regions 30 ms apart, by 1F1B and with as many micro-batches in flight as its notes say."""
    workload, target = workload_of(load_config("olmoe-1b-7b").config), target_of("two-regions")
    plain = predict_step(workload, PLAN, target)
    hint = next(note for note in plain.notes if note.startswith("plan.in_flight"))
    held = tuple(int(number) for number in hint.partition("[")[2].partition("]")[0].split(","))
    return plain, predict_step(workload, PLAN.model_copy(update={"in_flight": held}), target)


def check_regions(plain: Prediction, deep: Prediction) -> Check:
    gain = plain.time.total / deep.time.total
    more = deep.memory_by_rank[0] / plain.memory_by_rank[0] - 1
    return Check(
        claim="A mixture of experts over two regions gains as much",
        published="1.3 to 2.8 times other systems",
        ours=f"{plain.time.total:.1f} s with 1F1B, {deep.time.total:.1f} s with more in flight: {gain:.2f} times",
        how="computed",
        verdict=verdict_of([gain >= 1.3]),
        note="OLMoE, 16 H100 and 16 A100 in two regions, 10 Gbit/s and 30 ms between them (an example, not a machine); "
        f"each stage by its own device's curves. Memory of the first rank grows by {more:.0%}.",
    )


def check_planned(found: Choice) -> Check:
    assert found.naive is not None
    assert found.deeper is not None
    best, sizes = found.best, found.best.plan.layers_per_stage or ()
    gain = found.naive.step_s / best.step_s
    layers = dict(zip(best.stages(), (sum(sizes[: PLAN.pp // 2]), sum(sizes[PLAN.pp // 2 :])), strict=True))
    return Check(
        claim="Order, layers and micro-batches in flight planned for the network give 1.3 to 2.8 times",
        published="1.3 to 2.8 times other systems",
        ours=f"{found.naive.step_s:.1f} s even and 1F1B, {found.deeper.step_s:.1f} s with more in flight, "
        f"{best.step_s:.1f} s planned: {gain:.2f} times",
        how="computed",
        verdict=verdict_of(
            [gain >= 1.3, best.fits, best.step_s < found.deeper.step_s, layers["east"] > layers["west"]]
        ),
        note=f"`moestro place regions` on the same two regions: {' then '.join(best.regions)}, "
        + ", ".join(f"{count} layers in {region}" for region, count in layers.items())
        + f" (H100 in east, A100 in west), recomputation {best.plan.recompute}, the fullest device "
        f"{max(best.prediction.memory_by_rank) / 1e9:.0f} GB instead of "
        f"{max(found.naive.prediction.memory_by_rank) / 1e9:.0f}.",
    )


def check_change(cases: Sequence[Case]) -> Check:
    """Counts for one link under another, and made anew for it."""
    stale, anew = [], []
    for before in cases:
        for after in cases:
            if before.link < after.link:
                most = deep_orders((*(MICRO_BATCHES,) * (STAGES - 1), 1), MICRO_BATCHES)
                best = pipeline(after.link, most).total_s
                stale.append(best / pipeline(after.link, deep_orders(before.ours, MICRO_BATCHES)).total_s)
                anew.append(best / after.results["ours"].total_s)
    return Check(
        claim="When a link becomes slower, adapting the micro-batches in flight restores the throughput",
        published="the adapter watches links and changes micro-batches",
        ours=f"{min(stale):.0%} to {max(stale):.0%} of the best with old counts, {min(anew):.0%} or more with new ones",
        how="simulated",
        verdict=verdict_of([min(anew) >= RESTORED, min(stale) < RESTORED]),
        note=f"Every change to a slower link among {_list([c.link for c in cases], 1)} forward passes; the best has "
        "all micro-batches in flight. The count follows from the link's time: one new measurement is enough.",
    )


def check_groups() -> Check:
    """Of the profiler: devices in two places, known by the bandwidths of their pairs."""
    draw, found = np.random.default_rng(0), 0
    place = np.repeat(range(len(GROUPS)), GROUPS)
    for _ in range(DRAWS):
        order = draw.permutation(len(place))
        gbps = np.where(place[order][:, None] == place[order], GAP, 1.0) * draw.normal(1.0, NOISE, (8, 8)).clip(0.4)
        groups = {frozenset(group) for group in group_devices(gbps).groups}
        found += groups == {frozenset(np.flatnonzero(place[order] == n).tolist()) for n in range(len(GROUPS))}
    return Check(
        claim="Devices that fast links join are found from the bandwidths of their pairs",
        published="hierarchical clustering of probed links",
        ours=f"{found} of {DRAWS} planted groupings found",
        how="simulated",
        verdict=verdict_of([found == DRAWS]),
        note=f"Groups of {GROUPS[0]} and {GROUPS[1]} in any order, {GAP:g} times the bandwidth inside, {NOISE:.0%} "
        "noise in either direction of a pair. `moestro measure` groups devices so.",
    )


PUBLISHED = Check(
    claim="1.3 to 2.8 times the throughput of common and recent systems",
    published="1.3 to 2.8 times",
    ours="testbed, models and baselines are not public",
    how="computed",
    verdict="not reproducible here",
)


def _list(values: Iterable[float], digits: int = 2) -> str:
    return " / ".join(f"{value:.{digits}f}" for value in values)
