"""MixNet (Liao, Sun, Tian and others; arXiv 2501.03905, SIGCOMM 2025).

The claim: expert all-to-all is local to a few servers and differs from pair to pair, so optical circuits that are laid
anew for it, between the servers of a region, train as fast as a fat-tree that never blocks, at half the network's cost.

What is reproduced here:

* simulated: exchanges of uneven demand among 8 servers over circuits laid greedily, against even ones that stay and
  against a network that never blocks; what becomes of equal demand, and of demand that all servers share;
* computed: a step of the paper's example (Mixtral 8x22B on 1,024 devices), on the predictor's cost of everything else,
  and whether the time in which circuits are laid hides behind its computation.

What is not: prices of networks, which we have no figures for, and packets (the paper's simulator follows each).
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from moestro.config.model import ModelConfig
from moestro.config.moe import MoEConfig
from moestro.config.plan import Plan, Workload
from moestro.graph.count import count_step
from moestro.hardware.catalog import load_cluster
from moestro.hardware.curves.optical import (
    Floats,
    OpticalTier,
    circuit_s,
    circuits,
    even_circuits,
    exchange,
    packet_s,
)
from moestro.plan.ilp.circuits import lay_circuits
from moestro.predict.costs import REACHED, Cost, StepCost
from moestro.predict.predict import price_step, target_pricer
from moestro.predict.step import step_time
from moestro.predict.target import Target, target_of_cluster
from papers.result import Check, PaperResult, Progress, verdict_of

SERVERS, OCS, EPS = 8, 6, 2
SKEWS = (0.5, 1.0, 1.5, 2.0, 3.0)  # σ of log-normal demand
DRAWS = 200
BEST_DRAWS = 10  # for each skew: an integer program each
NEAR = 1.15  # times a fat-tree's step, that count as comparable
TIER = OpticalTier(SERVERS, OCS, EPS, 1.0, 0.0)
MODEL = ModelConfig(
    num_layers=56, hidden_size=6144, num_heads=48, num_kv_heads=8, vocab_size=32768, max_seq_len=4096,
    moe=MoEConfig(num_experts=8, top_k=2, expert_hidden_size=16384),
)  # fmt: skip
WORKLOAD = Workload(model=MODEL, seq_len=4096, global_batch_size=1024)
PLAN = Plan(pp=8, dp=16, tp=8, ep=8, etp=8, micro_batch_size=8, zero=1, recompute="block")


def run(progress: Progress) -> PaperResult:
    """A few seconds, and those of fitting an A100's curves where nobody has."""
    times = {skew: mean_times(skew) for skew in SKEWS}
    progress(1, 3, "exchanges")
    steps = {skew: step_seconds(skew) for skew in (0.0, *SKEWS)}
    progress(2, 3, "steps")
    checks = (
        check_steps(steps),
        check_skew(times),
        check_delay(*windows_ms()),
        check_best(),
        check_ties(),
        check_alike(),
        check_limits(),
        DOLLARS,
    )
    progress(3, 3, "checks")
    figures = {f"exchange, σ = {skew}, {how}": value for skew, pair in times.items() for how, value in pair.items()}
    figures |= {f"step s, σ = {skew}, {how}": value for skew, pair in steps.items() for how, value in pair.items()}
    return PaperResult(checks, figures)


# Exchanges.


def drawn(skew: float, draw: np.random.Generator) -> Floats:
    """[servers, servers] log-normal demand; nothing to oneself."""
    found = draw.lognormal(0.0, skew, (SERVERS, SERVERS))
    np.fill_diagonal(found, 0.0)
    return found


def mean_times(skew: float) -> dict[str, float]:
    """Of exchanges, over those of a network that never blocks with as many ports, on average."""
    draw = np.random.default_rng(0)
    greedy, even = [], []
    for _ in range(DRAWS):
        demand = drawn(skew, draw)
        least = packet_s(demand, OCS + EPS)
        greedy.append(circuit_s(demand, circuits(demand, OCS), TIER) / least)
        even.append(circuit_s(demand, even_circuits(SERVERS, OCS), TIER) / least)
    return {"greedy": float(np.mean(greedy)), "even": float(np.mean(even))}


def check_skew(times: dict[float, dict[str, float]]) -> Check:
    ratios = [pair["greedy"] / pair["even"] for pair in times.values()]
    falls = all(later < earlier for earlier, later in itertools.pairwise(ratios))
    return Check(
        claim="Circuits laid for the demand beat ones that stay, the more so the more uneven it is",
        published="circuits are laid for each demand; how uneven it is decides",
        ours=f"time against even circuits {_list(ratios)} at σ = {_list(SKEWS, 1)}",
        how="simulated",
        verdict=verdict_of([falls, all(ratio < 1 for ratio in ratios)]),
        note=f"{SERVERS} servers, {OCS} optical and {EPS} packet ports, log-normal demand, {DRAWS} draws. Over a "
        f"network that never blocks greedy takes {_list([p['greedy'] for p in times.values()])}, even "
        f"{_list([p['even'] for p in times.values()])}.",
    )


def check_best() -> Check:
    """Of the integer program of `moestro place circuits`."""
    greedy, over, proven = [], [], []
    for skew in SKEWS:
        draw = np.random.default_rng(1)
        found = [lay_circuits(drawn(skew, draw), TIER, limit_s=5.0) for _ in range(BEST_DRAWS)]
        greedy.append(float(np.mean([one.greedy_s / one.seconds for one in found])))
        over.append(float(np.mean([one.seconds / one.unblocked_s for one in found])))
        proven += [one.gap < 1e-4 for one in found]
    return Check(
        claim="The greedy controller lays circuits that are near the best",
        published="not told",
        ours=f"{_list(greedy)} times as long as the best at σ = {_list(SKEWS, 1)}",
        how="computed",
        verdict=verdict_of([ratio < NEAR for ratio in greedy]),
        note=f"{BEST_DRAWS} draws of each skew against an integer program, proven the best in {sum(proven)} of "
        f"{len(proven)}. Over a network that never blocks the best take {_list(over)}: much of what keeps circuits "
        "from a fat-tree's time is the controller, not the switch.",
    )


def check_ties() -> Check:
    demand = 1 - np.eye(SERVERS)
    least = packet_s(demand, OCS + EPS)
    greedy = circuit_s(demand, circuits(demand, OCS), TIER) / least
    found = exchange(demand, TIER, 0.0)
    alone = int((circuits(demand, OCS).sum(axis=1) == 0).sum())
    return Check(
        claim="Greedy circuits lose to even ones where all pairs ask for the same",
        published="not described",
        ours=f"{greedy:.2f} times a network that never blocks, even circuits {found.seconds / least:.2f}",
        how="simulated",
        verdict="holds" if greedy > found.seconds / least else "does not hold",
        note=f"Ties leave {alone} server without a circuit. Moestro takes the faster of greedy and even ones, which is "
        "what balanced routing comes to.",
    )


def check_alike() -> Check:
    """Shares that all servers send by, so that only receivers differ."""
    draw = np.random.default_rng(0)
    gains, over = [], []
    for _ in range(DRAWS):
        shares = draw.lognormal(0.0, 1.0, SERVERS)
        demand = np.tile(shares, (SERVERS, 1)) * (1 - np.eye(SERVERS))
        found = exchange(demand, TIER, 0.0).seconds
        gains.append(found / circuit_s(demand, even_circuits(SERVERS, OCS), TIER))
        over.append(found / packet_s(demand, OCS + EPS))
    return Check(
        claim="Skewed experts alone are not enough for laid circuits to pay: pairs of servers have to differ",
        published="not described",
        ours=f"time against even circuits {np.mean(gains):.2f}, against a network that never blocks "
        f"{np.mean(over):.2f}",
        how="simulated",
        verdict="holds" if np.mean(gains) > 0.95 else "does not hold",
        note="All servers send by the same shares (tokens that are alike): the busiest receiver asks for as many "
        "circuits from each. The predictor's routing is of this kind, so it credits laid circuits with nothing.",
    )


def check_limits() -> Check:
    """Of ports, of delay, and on every draw."""
    draw, many = np.random.default_rng(0), 1000
    never_worse, degrees, full = True, True, []
    for skew in SKEWS:
        demand = drawn(skew, draw)
        both = demand + demand.T
        laid = circuits(demand, OCS)
        degrees &= bool((laid == laid.T).all()) and int(laid.sum(axis=1).max()) <= OCS
        even_s = circuit_s(demand, even_circuits(SERVERS, OCS), TIER)
        never_worse &= exchange(demand, TIER, 0.0).seconds <= even_s
        if skew <= 1.5:  # beyond it single circuits are too coarse even then
            wide = replace(TIER, port_bytes_per_s=1 / many)
            full.append(circuit_s(both, circuits(both, many), wide) / packet_s(both, 1.0))
    slow = replace(TIER, delay_s=0.025)
    off = exchange(demand, slow, 0.024).how == "fixed" and exchange(demand, slow, 0.026).how != "fixed"
    return Check(
        claim="With many ports circuits are a network that never blocks; where laying is slow they stay as they are",
        published="not described",
        ours=f"{_list(full, 3)} of that network's time with {many} ports; ports kept to, never slower than even ones",
        how="simulated",
        verdict=verdict_of([never_worse, degrees, max(full) < 1.03, off]),
        note="σ = 0.5 / 1.0 / 1.5, demand alike both ways, as circuits are. With a delay of 25 ms and 24 ms of "
        "computation before an exchange circuits are not laid, with 26 ms they are.",
    )


# Steps.


def targets() -> tuple[Target, Target]:
    """The example with circuits, and with all ports on packets."""
    cluster = load_cluster("mixnet-1024")
    return target_of_cluster(cluster), target_of_cluster(cluster.model_copy(update={"optical": None}))


def step_seconds(skew: float) -> dict[str, float]:
    """Of the example with such demand in every exchange, on circuits whose laying hides, and on a fat-tree."""
    graph = count_step(WORKLOAD, PLAN)
    mixed, tree = targets()
    constants = tree.constants_for(WORKLOAD, PLAN.world_size)
    draw = np.random.default_rng(0)
    even = packet_s(1 - np.eye(SERVERS), OCS + EPS) / SERVERS
    demands = [drawn(skew, draw) for _ in range(DRAWS)]
    each = [demand / demand.sum() for demand in demands]  # as many bytes in all
    circuit = float(np.mean([exchange(d, TIER, 0.0).seconds for d in each])) / even * (SERVERS - 1)
    packets = float(np.mean([packet_s(d, OCS + EPS) for d in each])) / even * (SERVERS - 1)
    own = price_step(graph, WORKLOAD, PLAN, tree)
    return {
        "circuits": step_time(
            with_exchanges(price_step(graph, WORKLOAD, PLAN, mixed), own, circuit), PLAN, constants
        ).total,
        "fat-tree": step_time(with_exchanges(own, own, packets), PLAN, constants).total,
    }


def with_exchanges(costs: StepCost, of: StepCost, times: float) -> StepCost:
    """`costs`, whose expert exchanges take `times` as long as those in `of`."""

    def one(cost: Cost, other: Cost) -> Cost:
        found = {key: seconds for key, seconds in cost.collectives.items() if key[0] != "ep"}
        found |= {key: seconds * times for key, seconds in other.collectives.items() if key[0] == "ep"}
        return replace(cost, collectives=found)

    stages = tuple(
        replace(
            stage,
            forward=one(stage.forward, other.forward),
            backward=one(stage.backward, other.backward),
            weight=one(stage.weight, other.weight),
        )
        for stage, other in zip(costs.stages, of.stages, strict=True)
    )
    return replace(costs, stages=stages)


def check_steps(steps: dict[float, dict[str, float]]) -> Check:
    ratios = {skew: pair["circuits"] / pair["fat-tree"] for skew, pair in steps.items()}
    return Check(
        claim="Iterations take about as long as on a fat-tree that never blocks",
        published="comparable, four MoE models, packet-level simulation",
        ours=f"step {_list(list(ratios.values()))} times the fat-tree's at σ = {_list(list(ratios), 1)}",
        how="computed",
        verdict=verdict_of([ratio < NEAR for ratio in ratios.values()]),
        note=f"Mixtral 8x22B, dp 2 · tp 8 · pp 8 · ep 8, micro-batches of 8, 1,024 A100 (assumed), 100 Gbit/s a NIC; "
        f"circuits without delay. Steps on the fat-tree: {_list([p['fat-tree'] for p in steps.values()], 1)} s. Other "
        f"traffic has the {EPS} packet ports alone. Up to {NEAR - 1:.0%} longer counts as comparable.",
    )


def windows_ms() -> tuple[float, float]:
    """Of a middle layer's forward pass: computation between exchanges of two layers, and that of the experts."""
    mixed, _ = targets()
    piece = count_step(WORKLOAD, PLAN).stages[PLAN.pp // 2].pieces[0].piece
    parts = target_pricer(WORKLOAD, PLAN, mixed).piece(piece)[0].parts
    between = sum(seconds for (part, _), seconds in parts.items() if part not in REACHED)
    experts = sum(seconds for (part, _), seconds in parts.items() if part == "experts")
    return between * 1e3, experts * 1e3


def check_delay(between_ms: float, experts_ms: float) -> Check:
    optical = load_cluster("mixnet-1024").optical
    assert optical is not None
    assert optical.delay_ms.nominal is not None
    delay = optical.delay_ms.nominal
    return Check(
        claim="Laying circuits hides behind the computation",
        published=f"about {delay:g} ms, behind attention and experts of large micro-batches",
        ours=f"{between_ms:.1f} ms between the exchanges of two layers, {experts_ms:.1f} ms of experts",
        how="computed",
        verdict=verdict_of([delay <= between_ms, delay <= between_ms + experts_ms]),
        note="A layer's forward pass at micro-batches of 8, cut by tp = 8, on A100. Dispatch and combine ask for the "
        "same circuits, so they are laid between layers; if that is too short the predictor leaves them as they are.",
    )


DOLLARS = Check(
    claim="More performance for each dollar of network",
    published="1.2 to 1.5 times at 100 Gbit/s, 1.9 to 2.3 times at 400 Gbit/s",
    ours="no prices of switches, optics and circuits at hand",
    how="computed",
    verdict="not reproducible here",
)


def _list(values: Sequence[float], digits: int = 2) -> str:
    return " / ".join(f"{value:.{digits}f}" for value in values)
