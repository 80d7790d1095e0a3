"""A whole step, simulated: every pass of every pipeline rank on its host, its computation and its streams.

The ranks of a stage do the same, so one of them stands for all; where they differ it is the slowest, for which the
others wait in every collective. Passes run in the order of the schedule. What runs together on a rank is walked link
by link once (`blocks.py`) and then placed, as often as it comes, by when its inputs are there, its streams are free and
the host has launched it (`clock.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from moestro.config.plan import Plan, Workload
from moestro.errors import MoestroError
from moestro.graph.count import count_step
from moestro.graph.words import Collective, Kernel, Node, Stage, StepGraph
from moestro.predict.blocks import Block, run_block
from moestro.predict.chains import Chain, Writer
from moestro.predict.clock import RankClock, RankTime, of_all
from moestro.predict.constants import Constants
from moestro.predict.costs import REACHED, Pricer, kernel_class
from moestro.predict.orders import SPLIT_BACKWARD, Order, Pass, next_stage, pipeline_orders, stage_ranks
from moestro.predict.predict import target_pricer
from moestro.predict.schedule import deadlock, together
from moestro.predict.target import Target
from moestro.predict.timeline import Event
from moestro.predict.warmup import orders_of

NAMES = {"F": "forward", "B": "backward", "W": "weight gradients"}
PASSES = "passes"  # a row of a rank's timeline


@dataclass(frozen=True)
class Simulation:
    total_s: float
    ranks: tuple[RankTime, ...]  # of the pipeline
    _clocks: tuple[RankClock, ...]

    @property
    def slowest(self) -> int:
        """The rank that waits least for the others."""
        return min(range(len(self.ranks)), key=lambda rank: self.ranks[rank].bubble_s)

    def timeline(self, rank: int) -> Iterator[Event]:
        """All that runs on a rank: its passes, and what they do on each stream."""
        for name, block, start, end in self._clocks[rank].placed:
            yield Event(PASSES, name, start, end)
            # What the host, or contention with gradients, adds to a block is spread over it.
            stretch = (end - start) / block.length_s if block.length_s else 1.0
            for ran in block.ran:
                stream, name = ran.link.stream, ran.link.name
                yield Event(stream, name, start + stretch * ran.start_s, start + stretch * ran.end_s)
        yield from self._clocks[rank].others


def simulate_on(
    workload: Workload, plan: Plan, target: Target, slow: Mapping[int, float] | None = None
) -> Simulation:  # fmt: skip
    """As simulate_step, on a target.

    Raises:
        MoestroError: as simulate_step; the target is a CPU, or pools of unlike devices or several regions; the plan
            offloads.
    """
    if target.host_computes:
        raise MoestroError("a CPU has no streams beside its host: there is nothing that --simulate could show")
    if plan.offload != "none":
        raise MoestroError("--simulate does not follow copies to the host; leave plan.offload out")
    if target.parts:
        raise MoestroError("--simulate takes equal devices in one region; use --exact for pools and regions")
    pricer, constants = target_pricer(workload, plan, target), target.constants_for(workload, plan.world_size)
    return simulate_step(count_step(workload, plan), plan, pricer, constants, slow)


def simulate_step(
    graph: StepGraph, plan: Plan, pricer: Pricer, constants: Constants, slow: Mapping[int, float] | None = None
) -> Simulation:
    """slow: factors on the computation of pipeline ranks, of all their devices or of one: others wait for it.

    Constants.hidden is not used: what hides behind what comes out.

    Raises:
        MoestroError: no such rank, the schedule does not fit, or ranks wait for each other in a circle (it names them).
    """
    return simulate_passes(graph, plan, node_price(graph, pricer, constants), pricer.network.send_s, constants, slow)


def simulate_passes(
    graph: StepGraph,
    plan: Plan,
    price: Callable[[Node], float],
    send_s: Callable[[float], float],
    constants: Constants,
    slow: Mapping[int, float] | None = None,
) -> Simulation:
    """As simulate_step, with any seconds for a node (all its `times`) and for bytes sent to the next stage."""
    for rank, factor in (slow or {}).items():
        if not 0 <= rank < plan.pp:
            raise MoestroError(f"there is no pipeline rank {rank} that could be slow; they are 0 to {plan.pp - 1}")
        if not 0 < factor < float("inf"):
            raise MoestroError(f"pipeline rank {rank} cannot be {factor:g} times as slow: give a factor above 0")
    run = _Run(graph, plan, Writer(price, constants, plan.expert_chunks), slow or {})
    run.sends = [constants.between * send_s(stage.send_bytes) for stage in graph.stages]
    run.passes()
    return run.finish()


def node_price(graph: StepGraph, pricer: Pricer, constants: Constants) -> Callable[[Node], float]:
    """Seconds of all `times` of a node, by a machine's curves and with the constants of training."""
    windows: dict[int, float] = {}
    if pricer.network.around.optical is not None:  # circuits are laid behind the computation before an exchange
        for piece in {id(run.piece): run.piece for stage in graph.stages for run in stage.pieces}.values():
            # A node that is computed again is in several: then what is before it in the forward pass counts.
            for nodes in (piece.weight, piece.backward, piece.recompute, piece.forward):
                kernels = [n for n in nodes if isinstance(n, Kernel) and n.part not in REACHED]
                behind = sum(pricer.kernels.seconds(kernel) * kernel.times for kernel in kernels)
                windows |= {id(node): behind for node in nodes if isinstance(node, Collective)}

    def price(node: Node) -> float:
        if isinstance(node, Collective):
            sent = pricer.network.of(node, windows.get(id(node), 0.0))
            return sent.seconds * node.times * (constants.between if sent.between else constants.inside)
        return pricer.kernels.seconds(node) * node.times * float(getattr(constants, kernel_class(node)))

    return price


class _Run:
    """The passes in order of time, and what has been sent to whom."""

    def __init__(self, graph: StepGraph, plan: Plan, writer: Writer, slow: Mapping[int, float]) -> None:
        self.graph, self.writer = graph, writer
        self.orders = orders_of(plan, graph.micro_batches) or pipeline_orders(
            plan.schedule, plan.pp, plan.vpp, graph.micro_batches
        )
        self.split = plan.schedule in SPLIT_BACKWARD
        self.where = stage_ranks(plan.schedule, plan.pp, plan.vpp)
        self.after = [next_stage(plan.schedule, plan.pp, plan.vpp, stage) for stage in range(len(self.where))]
        self.before = {follower: stage for stage, follower in enumerate(self.after) if follower is not None}
        # DualPipe has its pairs in its orders. Other schedules overlap a forward with a backward pass that follows it,
        # or the other way round, where the inputs of both are there in time.
        dual = plan.schedule.startswith("dualpipe")
        self.opportune = plan.overlap_dispatch and plan.ep > 1 and not dual
        self.sends: list[float] = []
        self.clocks = [
            RankClock(graph.ranks[rank], self._shares(order), writer.price, writer.constants, slow.get(rank, 1.0))
            for rank, order in enumerate(self.orders)
        ]
        self.place = [0] * plan.pp
        self.first = [_first(order) for order in self.orders]
        self.last = [_last(order, self.split) for order in self.orders]
        self.there: dict[tuple[str, int, int], float] = {}  # when outputs and inputs of passes are there
        self.events: list[tuple[float, int]] = [(clock.now_s, rank) for rank, clock in enumerate(self.clocks)]
        self.chains: dict[tuple[object, ...], Chain] = {}
        self.blocks: dict[tuple[object, ...], Block] = {}

    def passes(self) -> None:
        """Raises MoestroError where ranks wait for each other."""
        remaining = sum(len(order) for order in self.orders)
        while self.events:
            now, rank = heappop(self.events)
            if now >= self.clocks[rank].now_s and (works := self._next(rank, now)):
                remaining -= len(works)
                self._run(rank, now, works)
        if remaining:
            raise MoestroError(deadlock(self.orders, self.place))

    def _next(self, rank: int, now: float) -> list[Pass]:
        """The passes that start now: none, one, or several together."""
        order, at = self.orders[rank], self.place[rank]
        if at == len(order):
            return []
        works = together(order, at)
        if not all(self._ready(work, now) for work in works[:2]):  # a third needs nothing but the second
            return []
        if self.opportune and len(works) == 1 and at + 1 < len(order):
            one, other = works[0], order[at + 1]
            pair = {one.kind, other.kind} == {"F", "B"}
            return [one, other] if pair and self._ready(other, now) else works
        return works

    def _ready(self, work: Pass, now: float) -> bool:
        def there(what: str) -> bool:
            return self.there.get((what, work.stage, work.micro_batch), float("inf")) <= now

        if work.kind == "W":
            return there("B")
        if work.kind == "F":
            return work.stage not in self.before or there("into F")
        return there("F") and (self.after[work.stage] is None or there("into B"))

    def _run(self, rank: int, now: float, works: list[Pass]) -> None:
        block, at = self._block(rank, works), self.place[rank]
        places = range(at, at + len(works))
        first = [self.first[rank][place] for place in places if place in self.first[rank]]
        last = [self.last[rank][place] for place in places if place in self.last[rank]]
        start, end = self.clocks[rank].run(_label(works), block, now, first, last)
        self.place[rank] += len(works)
        heappush(self.events, (end, rank))
        stretch = (end - start) / block.length_s if block.length_s else 1.0
        for work in works:
            own = end  # of DualPipe's pairs both are sent on when all has ended
            if len(works) == 2 and self.opportune:
                own = min(end, start + stretch * block.ends_s[0 if work.kind == "B" else 1])
            self.there[work.kind, work.stage, work.micro_batch] = own
            self._hand_on(rank, work, own)

    def _hand_on(self, rank: int, work: Pass, end: float) -> None:
        """The output, to the stage that waits for it."""
        to = {"F": self.after[work.stage], "B": self.before.get(work.stage)}.get(work.kind)
        if to is None:
            return
        if self.where[to] != rank:
            seconds = self.sends[min(work.stage, to) % len(self.graph.stages)]
            self.clocks[rank].sends("activations" if work.kind == "F" else "gradients", end, seconds)
            end += seconds
        self.there[f"into {work.kind}", to, work.micro_batch] = end
        heappush(self.events, (end, self.where[to]))

    def _stage(self, stage: int) -> Stage:
        """DualPipe has each twice."""
        return self.graph.stages[stage % len(self.graph.stages)]

    def _shares(self, order: Order) -> dict[int, float]:
        sizes = {work.stage: self._stage(work.stage).parameters.total for work in order}
        total = sum(sizes.values())
        return {stage: size / total if total else 1 / len(sizes) for stage, size in sizes.items()}

    def _block(self, rank: int, works: list[Pass]) -> Block:
        """Backward first, whose gradients others wait for longer; gradients of weights go with it."""
        full = not self.split or (works[-1].kind == "W" and len(works) > 1)
        wanted = sorted((w for w in works if w.kind != "W" or len(works) == 1), key=lambda work: work.kind)
        slow = self.clocks[rank].slow
        key = (slow, full, *((work.kind, self._stage(work.stage).pieces) for work in wanted))
        if key not in self.blocks:
            chains = [self._chain(work.kind, self._stage(work.stage), full) for work in wanted]
            self.blocks[key] = run_block(chains, self.writer.constants.contention, slow)
        return self.blocks[key]

    def _chain(self, kind: str, stage: Stage, full: bool) -> Chain:
        key = (kind, stage.pieces, full)
        if key not in self.chains:
            if kind == "F":
                self.chains[key] = self.writer.forward(stage)
            elif kind == "B":
                self.chains[key] = self.writer.backward(stage, split=not full)
            else:
                self.chains[key] = self.writer.weight(stage)
        return self.chains[key]

    def finish(self) -> Simulation:
        """What gradients still need, then the optimizer, which waits for the norm over all ranks."""
        clocks, step_s = self.clocks, self.writer.constants.step_s
        for clock in clocks:
            clock.drain()
        shared = [(clock, node) for clock in clocks for node in clock.step.gradients if _of_pipeline(node)]
        start = max((clock.now_s for clock, _ in shared), default=0.0)
        for clock, node in shared:
            assert isinstance(node, Collective)
            clock.join(node, start)
        for place in range(max(len(clock.step.update) for clock in clocks)):
            some = [(clock, clock.step.update[place]) for clock in clocks if place < len(clock.step.update)]
            joined = max((clock.now_s for clock, node in some if of_all(node)), default=0.0)
            for clock, node in some:
                clock.update(node, joined)
        end = max(clock.now_s for clock in clocks)
        for clock in clocks:
            clock.time.bubble_s += end - clock.now_s
            clock.time.host_s += step_s
        return Simulation(end + step_s, tuple(clock.time for clock in clocks), tuple(clocks))


def _of_pipeline(node: Node) -> bool:
    return isinstance(node, Collective) and not node.overlap and node.dimension == "pp"


def _first(order: Order) -> dict[int, int]:
    """Places of passes that are their stage's first: place -> stage."""
    found = {work.stage: place for place, work in reversed(list(enumerate(order))) if work.kind == "F"}
    return {place: stage for stage, place in found.items()}


def _last(order: Order, split: bool) -> dict[int, int]:
    """Places of passes that end their stage's gradients: place -> stage."""
    found = {work.stage: place for place, work in enumerate(order) if work.kind == ("W" if split else "B")}
    return {place: stage for stage, place in found.items()}


def _label(works: Sequence[Pass]) -> str:
    kinds = [work for work in works if work.kind != "W" or len(works) == 1]
    return " + ".join(f"{NAMES[work.kind]} {work.micro_batch}, stage {work.stage}" for work in kinds)
