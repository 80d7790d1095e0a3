"""Memory of pipeline stages from dry runs: what a layer, each kind of recomputation and the ends of a model cost.

The decomposition of TeleChat3's planner (arXiv 2512.24157). A stage that holds `in_flight` micro-batches needs

    constant + layers · layer + in_flight · Σ (layers of a kind · activations of that kind)      (+ first, + last)

Every stage of a dry run with deliberately uneven layers and recomputation is one equation. As many equations as
unknowns can be solved and are worth nothing: measured peaks stray by a percent or so, and a system that hardly tells
two unknowns apart makes multiples of it. So there must be one probe to spare, and a bounded condition number, before
anything is fitted.

One thing is added to it. A stage that recomputes all of its layers does so one at a time, and while it does, that
layer has all of its activations back: `none` once more and its own kind once less. Where a layer keeps but its input
that is most of what a stage with few layers holds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from moestro.errors import MoestroError

# Of the matrix with columns of length 1. Of the planner's published dry run, sets with one stage to spare miss the
# others by 22 % at worst below this, and by up to 294 % above.
MOST_CONDITION = 25.0
MOST_PROBES = 8  # that are proposed

PLAIN = "none"  # the kind of layers that are not recomputed
MIDDLE = "middle"

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Probe:
    """A pipeline stage of a dry run. layers: how many by kind of recomputation ("none" is one). in_flight:
    micro-batches whose activations it holds at its peak, with 1F1B pp - stage. end: "middle", or a name for what else
    is on it, as "first" for the embedding and "last" for the head; stages of one name have the same besides."""

    layers: Mapping[str, int]
    in_flight: int
    end: str = MIDDLE

    def __str__(self) -> str:
        some = [f"{n} layer{'s' * (n != 1)} of '{kind}'" for kind, n in self.layers.items() if n]
        return f"a {self.end} stage with {self.in_flight} in flight and {' and '.join(some) or 'no layer'}"


@dataclass(frozen=True)
class StageMemory:
    """The fitted numbers, in bytes. end_bytes: what stages with the embedding, the head … need besides, by their names.

    end_in_flight: micro-batches of the probes that these are of, on average. rank, condition: of the equations of
    middle stages. residuals: predicted ÷ measured - 1 of each probe, in
    order. comes_back: whether a recomputed layer's activations count while it is computed again.
    """

    constant_bytes: float
    layer_bytes: float
    activation_bytes: Mapping[str, float]  # of a layer and micro-batch, by kind
    end_bytes: Mapping[str, float]
    rank: int
    condition: float
    residuals: tuple[float, ...] = ()
    comes_back: bool = True
    end_in_flight: Mapping[str, float] = field(default_factory=dict)

    def peak_bytes(self, probe: Probe) -> float:
        """Of any stage. Raises MoestroError for an end or a kind of recomputation that was not probed."""
        unknown = [kind for kind, count in probe.layers.items() if count and kind not in self.activation_bytes]
        if unknown:
            raise MoestroError(f"no probe had layers of '{unknown[0]}': add a stage with some to the dry run")
        if probe.end != MIDDLE and probe.end not in self.end_bytes:
            raise MoestroError(f"no {probe.end} stage was probed: add it to the dry run")
        numbers = (self.constant_bytes, self.layer_bytes, *self.activation_bytes.values())
        inner = float(equations([probe], list(self.activation_bytes), self.comes_back)[0] @ np.asarray(numbers))
        return inner + self.end_bytes.get(probe.end, 0.0)


def fit_dry_run(
    probes: Sequence[Probe],
    peaks_bytes: Sequence[float],
    most_condition: float = MOST_CONDITION,
    comes_back: bool = True,
) -> StageMemory:
    """Least squares over the middle stages; the ends from what theirs need beyond it, the mean of each name.

    comes_back: False leaves out what a recomputed layer has while it is computed again, as TeleChat3's planner does.

    Raises:
        MoestroError: the middle stages cannot tell the unknowns apart, or hardly can; the message says which, and
            which stages to add to the dry run.
    """
    if len(probes) != len(peaks_bytes):
        raise MoestroError(f"{len(probes)} probes and {len(peaks_bytes)} peaks: each probe needs its own")
    peaks = np.asarray(peaks_bytes, dtype=float)
    if not np.isfinite(peaks).all() or (peaks <= 0).any():
        raise MoestroError("peaks must be positive numbers of bytes: leave out the stages that ran out of memory")
    kinds = kinds_of(probes)
    inner = [i for i, probe in enumerate(probes) if probe.end == MIDDLE]
    middle = [probes[i] for i in inner]
    rows = equations(middle, kinds, comes_back)
    rank, condition = conditioning(rows)
    if not is_enough(middle, kinds, most_condition, comes_back):
        raise MoestroError(_refusal(probes, kinds, rank, condition, most_condition))
    return replace(_solved(probes, peaks, kinds, rows, inner, comes_back), rank=rank, condition=condition)


def leave_one_out(probes: Sequence[Probe], peaks_bytes: Sequence[float], comes_back: bool = True) -> list[float | None]:
    """Predicted ÷ measured - 1 of each probe by a fit to the others; None where they do not determine it."""
    kinds, peaks, found = kinds_of(probes), np.asarray(peaks_bytes, dtype=float), list[float | None]()
    for out, probe in enumerate(probes):
        others = [other for i, other in enumerate(probes) if i != out]
        inner = [i for i, other in enumerate(others) if other.end == MIDDLE]
        rows = equations([others[i] for i in inner], kinds, comes_back)
        fitted = None
        if conditioning(rows)[0] == rows.shape[1]:
            fitted = _solved(others, np.delete(peaks, out), kinds, rows, inner, comes_back)
        if fitted is None or probe.end not in (MIDDLE, *fitted.end_bytes):
            found.append(None)
        else:
            found.append(fitted.peak_bytes(probe) / float(peaks[out]) - 1)
    return found


def _solved(
    probes: Sequence[Probe], peaks: Floats, kinds: Sequence[str], rows: Floats, inner: list[int], comes_back: bool
) -> StageMemory:
    """inner: which of the probes `rows` are of."""
    constant, layer, *activations = (float(v) for v in np.linalg.lstsq(rows, peaks[inner], rcond=None)[0])
    by_kind = dict(zip(kinds, activations, strict=True))
    bare = StageMemory(constant, layer, by_kind, {}, rows.shape[1], float("nan"), comes_back=comes_back)
    beyond, flights = dict[str, list[float]](), dict[str, list[int]]()
    for probe, peak in zip(probes, peaks, strict=True):
        if probe.end != MIDDLE:
            beyond.setdefault(probe.end, []).append(float(peak) - bare.peak_bytes(replace(probe, end=MIDDLE)))
            flights.setdefault(probe.end, []).append(probe.in_flight)
    ends, in_flight = ({end: float(np.mean(some)) for end, some in found.items()} for found in (beyond, flights))
    fitted = replace(bare, end_bytes=ends, end_in_flight=in_flight)
    residuals = tuple(fitted.peak_bytes(p) / float(peak) - 1 for p, peak in zip(probes, peaks, strict=True))
    return replace(fitted, residuals=residuals)


def kinds_of(probes: Sequence[Probe]) -> tuple[str, ...]:
    """Kinds of recomputation that some probe has a layer of, in order of appearance."""
    return tuple(dict.fromkeys(kind for probe in probes for kind, count in probe.layers.items() if count))


def equations(probes: Sequence[Probe], kinds: Sequence[str], comes_back: bool = True) -> Floats:
    """[probes, 2 + kinds]: what a stage's peak has of the constant, of a layer, and of each kind's activations."""
    rows = np.zeros((len(probes), 2 + len(kinds)))
    for row, probe in zip(rows, probes, strict=True):
        row[0], row[1] = 1, sum(probe.layers.values())
        row[2:] = [probe.in_flight * probe.layers.get(kind, 0) for kind in kinds]
        if comes_back and PLAIN in kinds and row[1] and not probe.layers.get(PLAIN):
            most = max(kinds, key=lambda kind: (probe.layers.get(kind, 0), kind))  # in whatever order kinds come
            row[2 + kinds.index(PLAIN)] += 1
            row[2 + kinds.index(most)] -= 1
    return rows


def is_enough(
    middle: Sequence[Probe], kinds: Sequence[str], most_condition: float = MOST_CONDITION, comes_back: bool = True
) -> bool:
    """Whether middle stages determine all unknowns, well, with one stage to check them by. One that was run twice
    counts once."""
    rows = equations(middle, kinds, comes_back)
    rank, condition = conditioning(rows)
    return rank == rows.shape[1] and condition <= most_condition and len(np.unique(rows, axis=0)) > rank


def conditioning(rows: Floats) -> tuple[int, float]:
    """Rank, and condition number, of equations whose columns are scaled to length 1; inf where the rank is short."""
    lengths = np.linalg.norm(rows, axis=0)
    if not rows.size:
        return 0, float("inf")
    values = np.linalg.svd(rows / np.where(lengths > 0, lengths, 1), compute_uv=False)
    rank = int((values > values[0] * max(rows.shape) * np.finfo(float).eps).sum())
    return rank, float(values[0] / values[-1]) if rank == rows.shape[1] else float("inf")


def probes_to_add(probes: Sequence[Probe], most_condition: float = MOST_CONDITION) -> list[Probe]:
    """Middle stages that make the set fit to be solved, the most telling first; [] when it is already.

    Each is what lowers the condition number most, or raises the rank, of stages with one kind of layers (one, or as
    many as the largest stage has) and few or most in flight.
    """
    middle, kinds = [probe for probe in probes if probe.end == MIDDLE], kinds_of(probes)
    most_layers = max([2, *(sum(probe.layers.values()) for probe in probes)])
    flights = (2, max([4, *(probe.in_flight for probe in middle)]))  # of one value, layers and activations are alike
    candidates = [
        Probe({kind: count}, in_flight) for kind, count, in_flight in product(kinds, (1, most_layers), flights)
    ]
    added: list[Probe] = []
    while len(added) < MOST_PROBES and not is_enough([*middle, *added], kinds, most_condition):
        new = [probe for probe in candidates if probe not in middle and probe not in added]
        if not new:
            break
        added.append(min(new, key=lambda probe: rating([*middle, *added, probe], kinds)))
    return added


def rating(probes: Sequence[Probe], kinds: Sequence[str]) -> tuple[int, float]:
    """Of middle stages; smaller is better: those that determine more, then those that do so better."""
    rank, condition = conditioning(equations(probes, kinds))
    return -rank, condition


def _refusal(probes: Sequence[Probe], kinds: Sequence[str], rank: int, condition: float, most: float) -> str:
    middle, unknowns = [probe for probe in probes if probe.end == MIDDLE], 2 + len(kinds)
    if rank < unknowns:
        loose = _mixed(middle, kinds)
        why = f"{rank} of {unknowns} unknowns are determined by the middle stages ({len(middle)}), not {loose}"
    elif condition > most:
        why = f"the condition number of the middle stages ({len(middle)}) is {condition:.0f}, more than {most:.0f}"
    else:
        why = f"the middle stages ({len(middle)}) are too few for {unknowns} unknowns and one to check them by"
    added = "; ".join(map(str, probes_to_add(probes, most)))
    return f"{why}. Add to the dry run: {added or 'stages with layers'} (with 1F1B, N in flight is stage pp - N)."


def _mixed(probes: Sequence[Probe], kinds: Sequence[str]) -> str:
    """Unknowns that some change of all of them leaves no trace of in the peaks."""
    names = ("the constant", "a layer", *(f"activations of '{kind}'" for kind in kinds))
    rows = equations(probes, kinds)
    if not rows.size:
        return ", ".join(names)
    _, values, directions = np.linalg.svd(rows, full_matrices=True)
    rank = int((values > values[0] * max(rows.shape) * np.finfo(float).eps).sum())
    loose = np.abs(directions[rank:]).max(axis=0) > 1e-6
    return ", ".join(name for name, is_loose in zip(names, loose, strict=True) if is_loose)
