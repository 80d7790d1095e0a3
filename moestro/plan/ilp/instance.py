"""A plan as an instance of the program: what its pieces cost on the target, and keep; and an answer as a plan."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

from moestro.config.plan import Plan, Workload
from moestro.errors import MoestroError
from moestro.graph.count import count_step, rank_of, split_layers
from moestro.graph.pieces import Pieces, pieces_of
from moestro.graph.tape import stream_bytes
from moestro.graph.words import Piece, StepGraph
from moestro.plan.ilp.stages import Extra, Layers, Moment, Placement, Stages
from moestro.predict.memory import kept_bytes, moments_of, outside_bytes, passing_bytes
from moestro.predict.offload import needed_rate
from moestro.predict.pools import Part, part_constants, part_pricer, parts_of_ranks
from moestro.predict.predict import target_pricer
from moestro.predict.target import Target

Seconds = Callable[[Piece], tuple[float, float, float]]  # of a pass forward, of what is recomputed, of all of backward


def stages_of(
    workload: Workload, plan: Plan, target: Target, limits_bytes: Sequence[float], kinds: Sequence[str]
) -> tuple[Stages, float]:  # fmt: skip
    """With the seconds that a message between stages takes.

    kinds: of recomputation that a layer may have, one or two; the last is what the plan then says.

    Raises:
        MoestroError: the plan does not fit the workload or the target, or nothing is left for layers.
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
    if min(limits) <= 0:
        raise MoestroError(
            f"no placement of the layers fits: what comes beside them takes {-min(limits) / 1e9:.3g} GB more than the "
            "limit; take a smaller micro-batch, or a larger limit"
        )
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
    return _with_copies(stages, plan, target), send_s


def plan_of(plan: Plan, stages: Stages, placement: Placement, kinds: Sequence[str]) -> Plan:
    """The plan with this placement."""
    own = [n for n, run in enumerate(stages.layers) if not run.at_end]
    sizes = tuple(sum(sum(runs[n]) for n in own) for runs in placement)
    again = tuple(sum(counts[-1] for counts in runs) for runs in placement)
    found: dict[str, object] = {"recompute": kinds[-1] if any(again) else kinds[0], "recompute_layers": None}
    found["recompute_per_stage"] = again if len(kinds) == 2 and any(again) else None
    found["layers_per_stage"] = sizes if plan.pp > 1 else None
    return plan.model_copy(update=found)


def placement_of(plan: Plan, stages: Stages, kinds: Sequence[str]) -> Placement:
    """Of a plan's layers and recomputation, as far as `kinds` can say it: the inverse of plan_of."""
    order = [n for n, run in enumerate(stages.layers) if not run.at_end for _ in range(run.count)]
    found = []
    for stage, layers in enumerate(split_layers(len(order), plan)):
        own = [order[layers.start : layers.stop].count(n) for n in range(len(stages.layers))]
        if stage == len(stages.ranks) - 1:
            own = [run.count if run.at_end else n for n, run in zip(own, stages.layers, strict=True)]
        again = sum(own) if plan.recompute == kinds[-1] else 0
        most = plan.recompute_layers if plan.recompute_per_stage is None else plan.recompute_per_stage[stage]
        again = again if most is None else min(again, most)
        runs = []
        for n in own:
            twice = min(again, n)
            again -= twice
            runs.append((n,) if len(kinds) == 1 else (n - twice, twice))
        found.append(tuple(runs))
    return tuple(found)


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


def _with_copies(stages: Stages, plan: Plan, target: Target) -> Stages:
    """Where activations go to the host and come back: each layer is as long as its copy, which is no shorter than the
    stage's pass being as long as all its copies. What a forward pass is longer by counts with the backward one, since
    it differs by the kind of recomputation."""
    if plan.offload != "activations":
        return stages
    rate = needed_rate(target.place.device)

    def longer(forward_s: float, backward_s: float, kept_bytes: float) -> float:
        return max(backward_s, kept_bytes / rate) + max(0.0, kept_bytes / rate - forward_s)

    layers, extras = [], []
    for layer in stages.layers:
        pairs = zip(layer.backward_s, layer.kept_bytes, strict=True)
        layers.append(replace(layer, backward_s=tuple(longer(layer.forward_s, *pair) for pair in pairs)))
    for extra in stages.extras:
        extras.append(replace(extra, backward_s=longer(extra.forward_s, extra.backward_s, extra.kept_bytes)))
    return replace(stages, layers=tuple(layers), extras=tuple(extras))


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
    found = moments_of(graph, plan)
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
