"""Which dry runs to make: a few pipelines of uneven layers and recomputation whose stages' peaks tell what memory is
made of (TeleChat3's planner, arXiv 2512.24157; `dry_run` has the equations)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from moestro.config.plan import Plan, Workload
from moestro.errors import MoestroError
from moestro.graph.pieces import pieces_of
from moestro.predict.dry_run import MIDDLE, MOST_CONDITION, PLAIN, Probe, is_enough, kinds_of, rating
from moestro.predict.memory import kept_bytes

MOST_ROUNDS, DRAWS, LOOKED_AT = 6, 120, 25


@dataclass(frozen=True)
class Round:
    """A dry run of the pipeline, with 1F1B. Of each stage: its layers, and how many of them, the first ones, `kind`
    recomputes."""

    layers: tuple[int, ...]
    kind: str
    recomputed: tuple[int, ...]

    def plan(self, plan: Plan) -> Plan:
        """The plan with these layers."""
        again = {"recompute": self.kind if any(self.recomputed) else PLAIN, "recompute_layers": None}
        partly = any(self.recomputed) and self.recomputed != self.layers
        return plan.model_copy(
            update={
                "schedule": "1f1b",
                "vpp": 1,
                "in_flight": None,
                "layers_per_stage": self.layers,
                **again,
                "recompute_per_stage": self.recomputed if partly else None,
            }
        )


@dataclass(frozen=True)
class Rounds:
    """rounds, and the probe that each stage of each is, [round][stage]. condition: of all middle stages together."""

    rounds: tuple[Round, ...]
    probes: tuple[tuple[Probe, ...], ...]
    condition: float

    @property
    def flat(self) -> list[Probe]:
        return [probe for stages in self.probes for probe in stages]


def unlike_layers(workload: Workload, plan: Plan) -> int:
    """How many of the first layers are unlike those after them: they hold or keep another number of bytes. A dry run
    has them all on its first stage.

    Raises:
        MoestroError: unlike layers take turns, so that no one number is a layer's.
    """
    pieces, model = pieces_of(workload, plan), workload.model
    sizes = []
    for layer in range(model.num_layers):
        piece = pieces.stage(range(layer, layer + 1), False, False, True, 0)[0][0].piece
        sizes.append((round(sum(kept_bytes(workload, plan, piece.parameters))), round(piece.saved)))
    runs = [len(list(alike)) for _, alike in groupby(sizes)]
    before = sum(runs[:-1])
    if before >= model.num_layers / 2:
        raise MoestroError(
            f"{len(runs)} runs of unlike layers take turns in this model, so that no one number is a layer's memory; "
            "plan it by counted memory (`moestro plan --balance`)"
        )
    return before


def design(
    workload: Workload,
    plan: Plan,
    kinds: Sequence[str],
    too_big: Callable[[Round], Sequence[bool]] | None = None,
    seed: int = 0,
) -> Rounds:
    """The fewest rounds that determine all numbers well, of as many as are drawn.

    Args:
        kinds: of recomputation to tell apart, "none" and others. A round of our trainer has one of them on all layers;
            one of Megatron's has layers of "none" and of one other.
        too_big: which stages of a round cannot be run; None: all can.

    Raises:
        MoestroError: there are too few stages, layers or micro-batches, unlike layers take turns, or nothing fits.
    """
    case = _Case(workload, plan, unlike_layers(workload, plan), tuple(kinds))
    if plan.pp < 4:
        raise MoestroError(
            f"pp = {plan.pp}: stages between the first and the last must differ in how many micro-batches they hold; "
            "probe with pp = 4 or more"
        )
    if case.bulk < plan.pp:
        raise MoestroError(f"{case.bulk} like layers for {plan.pp} stages: probe with a smaller pp or more layers")
    rng, refused = np.random.default_rng(seed), 0
    for count in range(1, MOST_ROUNDS + 1):
        if count * (plan.pp - 2) <= 2 + len(kinds):  # too few equations, however they are
            continue
        good = [one for one in (case.drawn(rng, count) for _ in range(DRAWS)) if case.is_enough(one)]
        for one in sorted(good, key=_unevenness)[:LOOKED_AT]:
            fitting = one if too_big is None else case.mended(one, too_big)
            if fitting is not None and case.is_enough(fitting):
                return fitting
            refused += 1
        if refused >= 2 * LOOKED_AT:  # more dry runs would be no smaller
            break
    if refused:
        raise MoestroError(
            "every set of dry runs has a stage that does not fit in memory; probe with fewer stages and layers (as "
            f"pp = 4 and model.num_layers={case.unlike + 8}: what a layer takes stays the same), or without --hardware"
        )
    raise MoestroError(
        f"no {MOST_ROUNDS} dry runs of {plan.pp} stages tell {case.bulk} layers' memory apart; probe with more stages, "
        "more layers, or more micro-batches (train.global_batch_size)"
    )


def probes_of(round_: Round, workload: Workload, plan: Plan, unlike: int) -> tuple[Probe, ...]:
    """Of each stage. Unlike layers count to the first stage's end, whose name tells how they are recomputed. The last
    stage's tells it too: multi-token prediction is there, and what comes back there comes after the head's peak."""
    micro_batches, last, found = plan.micro_batches(workload), len(round_.layers) - 1, []
    for stage, (count, again) in enumerate(zip(round_.layers, round_.recomputed, strict=True)):
        own = unlike if stage == 0 else 0
        twice = max(0, again - own)
        end = MIDDLE if 0 < stage < last else "first" if stage == 0 else "last"
        if own or stage == last:
            whole = again >= own if stage == 0 else again == count
            end += f" ({round_.kind if again and whole else PLAIN})"
        layers = {PLAIN: count - own - twice} | ({round_.kind: twice} if round_.kind != PLAIN else {})
        found.append(Probe(layers, min(micro_batches, plan.pp - stage), end))
    return tuple(found)


@dataclass(frozen=True)
class _Case:
    """What rounds are drawn for."""

    workload: Workload
    plan: Plan
    unlike: int
    kinds: tuple[str, ...]

    @property
    def bulk(self) -> int:
        """Layers that are alike."""
        return self.workload.model.num_layers - self.unlike

    def drawn(self, rng: np.random.Generator, count: int) -> Rounds:
        """Some rounds are more uneven than others; of Megatron's, any number of a stage's layers is recomputed."""
        others = [kind for kind in self.kinds if kind != PLAIN]
        whole, found = self.workload.trainer == "moestro", []
        for number in range(count):
            weights = rng.dirichlet([rng.choice((1.0, 3.0, 10.0))] * self.plan.pp)
            own = 1 + rng.multinomial(self.bulk - self.plan.pp, weights)
            if whole or not others:
                kind = self.kinds[number % len(self.kinds)]
                again = own * (kind != PLAIN)
            else:
                kind = others[number % len(others)]
                again = rng.integers(0, own + 1)
            own[0] += self.unlike
            again[0] += self.unlike * (again[0] > 0)
            found.append(Round(tuple(map(int, own)), kind, tuple(map(int, again))))
        return self.rounds(found)

    def rounds(self, rounds: Sequence[Round]) -> Rounds:
        probes = tuple(probes_of(one, self.workload, self.plan, self.unlike) for one in rounds)
        return Rounds(tuple(rounds), probes, rating(_middle(probes), self.kinds)[1])

    def mended(self, rounds: Rounds, too_big: Callable[[Round], Sequence[bool]]) -> Rounds | None:
        """With all layers recomputed on stages that are too big otherwise; None where that is not enough."""
        found = []
        for one in rounds.rounds:
            over = too_big(one)
            if any(over) and self.workload.trainer != "moestro" and one.kind != PLAIN:
                again = (n if big else few for n, few, big in zip(one.layers, one.recomputed, over, strict=True))
                one = Round(one.layers, one.kind, tuple(again))
                over = too_big(one)
            if any(over):
                return None
            found.append(one)
        return self.rounds(found)

    def is_enough(self, rounds: Rounds) -> bool:
        if rounds.condition > MOST_CONDITION:
            return False
        middle = _middle(rounds.probes)
        return set(kinds_of(middle)) == set(self.kinds) and is_enough(middle, self.kinds, MOST_CONDITION)


def _middle(probes: Sequence[Sequence[Probe]]) -> list[Probe]:
    return [probe for stages in probes for probe in stages if probe.end == MIDDLE]


def _unevenness(rounds: Rounds) -> float:
    """Uneven layers tell more apart, and the largest stage takes the most memory and time to run."""
    return rounds.condition * max(max(one.layers) for one in rounds.rounds)
