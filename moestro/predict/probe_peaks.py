"""Peaks of dry runs, without a device: each stage's step traced on tensors without values, or counted."""

from collections.abc import Callable, Sequence

from moestro.config import Config, load_config
from moestro.config.plan import Plan, Workload
from moestro.errors import MoestroError
from moestro.graph.convert import overrides_of
from moestro.graph.count import count_step
from moestro.graph.pieces import pieces_of
from moestro.predict.dry_run import PLAIN, Probe
from moestro.predict.memory import allocated_by_rank, kept_bytes
from moestro.predict.probe_rounds import Round, Rounds

Peak = Callable[[Round, int], float]  # of a stage of a round, bytes


def counted(workload: Workload, plan: Plan) -> Peak:
    """As predictions count them: tensors, with nothing of the allocator's or of libraries."""

    return lambda round_, stage: counted_peaks(workload, plan, round_)[stage]


def counted_peaks(workload: Workload, plan: Plan, round_: Round) -> tuple[float, ...]:
    """Of all stages."""
    own = round_.plan(plan)
    return allocated_by_rank(count_step(workload, own), workload, own)


def counted_numbers(workload: Workload, plan: Plan, kinds: Sequence[str]) -> dict[str, float]:
    """As predictions count them: bytes of a layer (as "layer") and of its activations by kind of recomputation."""
    found: dict[str, float] = {}
    middle = workload.model.num_layers - 1
    for kind in kinds:
        own = plan.model_copy(update={"recompute": kind, "recompute_layers": None, "recompute_per_stage": None})
        again = 0 if kind == PLAIN else 1
        piece = pieces_of(workload, own).stage(range(middle, middle + 1), False, False, True, again)[0][0].piece
        found["layer"] = sum(kept_bytes(workload, own, piece.parameters))
        found[kind] = piece.kept if again else piece.saved
    return found


def traced(preset: str, overrides: list[str], plan: Plan, ranks_per_node: int | None = None) -> Peak:
    """Of our trainer's own step, as one rank of each stage allocates and frees. overrides: of the run.

    Raises:
        MoestroError: the trainer cannot do what the plan says.
    """

    def peak(round_: Round, stage: int) -> float:
        from moestro.graph.trace.held import held
        from moestro.graph.trace.ours import trace_rank, unique_ranks
        from moestro.parallel.layout import resolve_layout

        config: Config = load_config(preset, [*overrides, *overrides_of(round_.plan(plan))]).config
        layout = resolve_layout(config.in_phase(0), plan.world_size, ranks_per_node or plan.world_size)
        rank = unique_ranks(layout)[stage]
        # Gradients come with the first backward pass, so the first stage is fullest when a micro-batch follows it.
        trace = trace_rank(config, plan.world_size, rank, ranks_per_node=ranks_per_node, more=int(stage == 0))
        return float(held(trace.memory, [0]).steady)

    return peak


def take(
    rounds: Rounds, peak: Peak, told: Callable[[int, int], None] = lambda *_: None
) -> dict[tuple[int, int], float]:
    """The peak of every (round, stage); stages that are alike are run once. told: is called with how many are done, of
    how many.

    Raises:
        MoestroError: a peak could not be had.
    """
    places: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    for number, probes in enumerate(rounds.probes):
        for stage, probe in enumerate(probes):
            places.setdefault(_likeness(probe, stage), []).append((number, stage))
    found: dict[tuple[int, int], float] = {}
    for done, alike in enumerate(places.values()):
        told(done, len(places))
        number, stage = alike[0]
        size = peak(rounds.rounds[number], stage)
        if not size > 0:
            raise MoestroError(f"stage {stage} of round {number} holds nothing: not a training step")
        found |= dict.fromkeys(alike, size)
    told(len(places), len(places))
    return found


def _likeness(probe: Probe, stage: int) -> tuple[object, ...]:
    return stage, probe.end, probe.in_flight, *sorted((kind, n) for kind, n in probe.layers.items() if n)
