"""A plan as an instance of the program: what its pieces cost on the target, and keep; and an answer as a plan."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

from moestro.config.plan import Plan, Workload
from moestro.graph.count import count_step, rank_of
from moestro.graph.pieces import Pieces, pieces_of
from moestro.graph.tape import stream_bytes
from moestro.graph.words import Piece, StepGraph
from moestro.plan.ilp.stages import Extra, Layers, Moment, Placement, Stages
from moestro.predict.memory import kept_bytes, most_held, outside_bytes, passing_bytes
from moestro.predict.pools import Part, part_constants, part_pricer, parts_of_ranks
from moestro.predict.predict import target_pricer
from moestro.predict.target import Target

Seconds = Callable[[Piece], tuple[float, float, float]]  # of a pass forward, of what is recomputed, of all of backward


def stages_of(
    workload: Workload, plan: Plan, target: Target, limits_bytes: Sequence[float], kinds: Sequence[str]
) -> tuple[Stages, float]:  # fmt: skip
    """With the seconds that a message between stages takes.

    kinds: of recomputation that a layer may have, one or two; the last is what the plan then says.
    """
    plan = plan.model_copy(
        update={"recompute": kinds[-1], "layers_per_stage": None, "recompute_layers": None, "recompute_per_stage": None}
    )
    pieces, graph = pieces_of(workload, plan), count_step(workload, plan)
    seconds, pace, send_s = _priced(workload, plan, target, pieces)
    moments = _moments(graph, plan)
    outside = sum(outside_bytes(plan, workload, target.place.device))
    brief = _brief_bytes(workload, plan, graph)
    limits = []
    for rank, limit in enumerate(limits_bytes):
        members = [number % len(graph.stages) for number, _ in moments[rank][0]]
        limits.append(limit - outside - max(brief[stage] for stage in members))
    stages = Stages(
        schedule=plan.schedule if plan.pp > 1 else "1f1b",
        vpp=plan.vpp,
        micro_batches=graph.micro_batches,
        layers=_layers(workload, plan, pieces, seconds, len(kinds)),
        limits_bytes=tuple(limits),
        extras=_extras(workload, plan, graph, pieces, seconds),
        ranks=tuple(rank_of(stage, plan) for stage in range(len(graph.stages))),
        moments=moments,
        pace=pace,
        in_order=len(kinds) == 2,
    )
    return stages, send_s


def plan_of(plan: Plan, stages: Stages, placement: Placement, kinds: Sequence[str]) -> Plan:
    """The plan with this placement."""
    own = [n for n, run in enumerate(stages.layers) if not run.at_end]
    sizes = tuple(sum(sum(runs[n]) for n in own) for runs in placement)
    again = tuple(sum(counts[-1] for counts in runs) for runs in placement)
    found: dict[str, object] = {"recompute": kinds[-1] if any(again) else kinds[0], "recompute_layers": None}
    found["recompute_per_stage"] = again if len(kinds) == 2 and any(again) else None
    found["layers_per_stage"] = sizes if plan.pp > 1 else None
    return plan.model_copy(update=found)


def _priced(
    workload: Workload, plan: Plan, target: Target, pieces: Pieces
) -> tuple[Seconds, tuple[float, ...], float]:  # fmt: skip
    """Of the first rank's device; of each rank, how many times as long all layers take there; of a message."""
    own = parts_of_ranks(plan, target.parts) if target.parts else [None] * plan.pp
    priced = {part: _prices(workload, plan, target, part) for part in dict.fromkeys(own)}
    layers = [_piece(pieces, layer) for layer in range(workload.model.num_layers)]
    whole = {
        part: sum(forward + backward for forward, _, backward in map(seconds, layers))
        for part, (seconds, _) in priced.items()
    }
    sent = float(pieces.local * stream_bytes(workload)) if plan.pp > 1 else 0.0
    seconds, send_s = priced[own[0]]
    return seconds, tuple(whole[part] / whole[own[0]] for part in own), send_s(sent)


def _prices(
    workload: Workload, plan: Plan, target: Target, part: Part | None
) -> tuple[Seconds, Callable[[float], float]]:  # fmt: skip
    """On the target, or on one of its pools: of a piece, and of so many bytes to the next stage."""
    if part is None:
        pricer, constants = target_pricer(workload, plan, target), target.constants_for(workload, plan.world_size)
    else:
        pricer, constants = part_pricer(part, workload, plan), part_constants(part, workload)

    def seconds(piece: Piece) -> tuple[float, float, float]:
        forward, again, backward, weight = (cost.seconds(constants) for cost in pricer.piece(piece))
        return forward, again, backward + weight

    return seconds, lambda sent: pricer.network.send_s(sent) * constants.between


def _piece(pieces: Pieces, layer: int) -> Piece:
    return pieces.stage(range(layer, layer + 1), False, False, True, 0)[0][0].piece


def _layers(workload: Workload, plan: Plan, pieces: Pieces, seconds: Seconds, kinds: int) -> tuple[Layers, ...]:
    """Runs of equal pieces, in the model's order, then the blocks of multi-token prediction."""
    every = [_piece(pieces, layer) for layer in range(workload.model.num_layers)]
    alone = [_layer(workload, plan, piece, seconds, kinds) for piece in every]
    alone += [_layer(workload, plan, piece, seconds, kinds, at_end=True) for piece in _ahead(workload, plan, pieces)]
    return tuple(replace(layer, count=len(list(some))) for layer, some in groupby(alone))


def _layer(
    workload: Workload, plan: Plan, piece: Piece, seconds: Seconds, kinds: int, at_end: bool = False
) -> Layers:  # fmt: skip
    forward, again, backward = seconds(piece)
    brief = piece.saved - piece.kept + piece.transient * (workload.trainer == "moestro")
    by_kind = [(backward, piece.saved, piece.transient), (backward + again, piece.kept, max(brief, piece.transient))]
    if plan.recompute == "none":
        by_kind = by_kind[:1]
    passes, kept, briefs = zip(*by_kind[-kinds:], strict=True)
    return Layers(1, forward, passes, kept, sum(kept_bytes(workload, plan, piece.parameters)), briefs, at_end)


def _ends(workload: Workload, plan: Plan, pieces: Pieces) -> tuple[Piece, list[Piece]]:
    """The embedding, and all that comes after the last layer."""
    last = workload.model.num_layers - 1
    first = pieces.stage(range(1), True, False, plan.pp > 1, 0)[0][0].piece
    runs = pieces.stage(range(last, last + 1), False, True, plan.pp > 1, 0)[0][1:]
    return first, [run.piece for run in runs for _ in range(run.times)]


def _ahead(workload: Workload, plan: Plan, pieces: Pieces) -> list[Piece]:
    """After the head a block ahead and its own head, in turns."""
    return _ends(workload, plan, pieces)[1][1::2]


def _extras(
    workload: Workload, plan: Plan, graph: StepGraph, pieces: Pieces, seconds: Seconds
) -> tuple[Extra, ...]:  # fmt: skip
    """Embedding, heads, and what a stage keeps besides its pieces. What a prediction spares of a stage's activations
    (logits that are whole in memory) is spared here."""
    embedding, after = _ends(workload, plan, pieces)
    last, found = len(graph.stages) - 1, []
    for stage in graph.stages:
        own = ([embedding] if stage.index == 0 else []) + (after[::2] if stage.index == last else [])
        times = [seconds(piece) for piece in own]
        spared = stage.saved.kept - passing_bytes(workload, plan, stage, last + 1)[0]
        kept = pieces.besides(stage.index == 0, stage.index == last, plan.pp > 1, False) - spared
        found.append(
            Extra(
                sum(forward for forward, _, _ in times),
                sum(backward for _, _, backward in times),
                sum(sum(kept_bytes(workload, plan, piece.parameters)) for piece in own),
                kept + sum(piece.saved for piece in own),
                max((piece.transient for piece in own), default=0.0),
            )
        )
    return tuple(found)


def _moments(graph: StepGraph, plan: Plan) -> tuple[tuple[Moment, ...], ...]:
    """As predict.memory: what each rank may hold; activations that go to the host leave one micro-batch's."""
    if plan.pp == 1:
        found: Sequence[tuple[Moment, ...]] = ((tuple((stage.index, 1) for stage in graph.stages),),)
    elif plan.in_flight is not None:
        found = [(((rank, min(graph.micro_batches, held)),),) for rank, held in enumerate(plan.in_flight)]
    else:
        found = most_held(plan.schedule, plan.pp, plan.vpp, graph.micro_batches)
    if plan.offload != "activations":
        return tuple(found)
    alone = []
    for moments in found:
        members = [stage for stage, _ in moments[0]]
        alone.append(tuple(tuple((stage, int(stage == one)) for stage in members) for one in members))
    return tuple(alone)


def _brief_bytes(workload: Workload, plan: Plan, graph: StepGraph) -> list[float]:
    """Of each stage, what comes and goes in a pass besides the layer that is worked on."""
    count = len(graph.stages)
    return [passing_bytes(workload, plan, stage, count)[1] - stage.saved.transient for stage in graph.stages]
