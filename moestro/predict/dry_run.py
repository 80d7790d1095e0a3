"""Memory of pipeline stages from dry runs: what a layer, each kind of recomputation and the ends of a model cost.

The decomposition of TeleChat3's planner (arXiv 2512.24157). A stage that holds `in_flight` micro-batches needs

    constant + layers · layer + in_flight · Σ (layers of a kind · activations of that kind)      (+ first, + last)

Every stage of a dry run with deliberately uneven layers and recomputation is one equation. As many equations as
unknowns can be solved and are worth nothing: measured peaks stray by a percent or so, and a system that hardly tells
two unknowns apart makes multiples of it. So there must be one probe to spare, and a bounded condition number, before
anything is fitted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moestro.errors import MoestroError

# Of the matrix with columns of length 1. Of the planner's published dry run, sets with one stage to spare miss the
# others by 22 % at worst below this, and by up to 294 % above.
MOST_CONDITION = 25.0
MOST_PROBES = 8  # that are proposed

End = Literal["middle", "first", "last"]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Probe:
    """A pipeline stage of a dry run. layers: how many by kind of recomputation ("none" is one). in_flight:
    micro-batches whose activations it holds at its peak, with 1F1B pp - stage. end: whether the embedding or the head
    is on it."""

    layers: Mapping[str, int]
    in_flight: int
    end: End = "middle"

    def __str__(self) -> str:
        layers = " and ".join(f"{count} of '{kind}'" for kind, count in self.layers.items() if count) or "no layer"
        return f"a middle stage with {self.in_flight} in flight and {layers}"


@dataclass(frozen=True)
class StageMemory:
    """The fitted numbers, in bytes. first_bytes, last_bytes: what the embedding and the head add; None: no such probe.

    rank, condition: of the equations of middle stages. residuals: predicted ÷ measured - 1 of each probe, in order.
    """

    constant_bytes: float
    layer_bytes: float
    activation_bytes: Mapping[str, float]  # of a layer and micro-batch, by kind
    first_bytes: float | None
    last_bytes: float | None
    rank: int
    condition: float
    residuals: tuple[float, ...] = ()

    def peak_bytes(self, probe: Probe) -> float:
        """Of any stage. Raises MoestroError for an end or a kind of recomputation that was not probed."""
        unknown = [kind for kind, count in probe.layers.items() if count and kind not in self.activation_bytes]
        if unknown:
            raise MoestroError(f"no probe had layers of '{unknown[0]}': add a stage with some to the dry run")
        end = {"middle": 0.0, "first": self.first_bytes, "last": self.last_bytes}[probe.end]
        if end is None:
            raise MoestroError(f"no {probe.end} stage was probed: add it to the dry run")
        held = sum(count * self.activation_bytes.get(kind, 0.0) for kind, count in probe.layers.items())
        return self.constant_bytes + sum(probe.layers.values()) * self.layer_bytes + probe.in_flight * held + end


def fit_dry_run(
    probes: Sequence[Probe], peaks_bytes: Sequence[float], most_condition: float = MOST_CONDITION
) -> StageMemory:
    """Least squares over the middle stages; the ends from what theirs need beyond it.

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
    inner = [i for i, probe in enumerate(probes) if probe.end == "middle"]
    rows = equations([probes[i] for i in inner], kinds)
    rank, condition = conditioning(rows)
    if len(inner) <= rows.shape[1] or rank < rows.shape[1] or condition > most_condition:
        raise MoestroError(_refusal(probes, kinds, rank, condition, most_condition))
    constant, layer, *activations = (float(v) for v in np.linalg.lstsq(rows, peaks[inner], rcond=None)[0])
    bare = StageMemory(constant, layer, dict(zip(kinds, activations, strict=True)), 0.0, 0.0, rank, condition)
    beyond: dict[str, list[float]] = {"middle": [], "first": [], "last": []}
    for probe, peak in zip(probes, peaks, strict=True):
        beyond[probe.end].append(float(peak) - bare.peak_bytes(probe))
    ends = {end: float(np.mean(values)) if values else None for end, values in beyond.items()}
    fitted = replace(bare, first_bytes=ends["first"], last_bytes=ends["last"])
    residuals = tuple(fitted.peak_bytes(p) / float(peak) - 1 for p, peak in zip(probes, peaks, strict=True))
    return replace(fitted, residuals=residuals)


def kinds_of(probes: Sequence[Probe]) -> tuple[str, ...]:
    """Kinds of recomputation that some probe has a layer of, in order of appearance."""
    return tuple(dict.fromkeys(kind for probe in probes for kind, count in probe.layers.items() if count))


def equations(probes: Sequence[Probe], kinds: Sequence[str]) -> Floats:
    """[probes, 2 + kinds]: what a stage's peak has of the constant, of a layer, and of each kind's activations."""
    rows = [
        [1, sum(probe.layers.values()), *(probe.in_flight * probe.layers.get(kind, 0) for kind in kinds)]
        for probe in probes
    ]
    return np.asarray(rows, dtype=float).reshape(len(rows), 2 + len(kinds))


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
    middle, kinds = [probe for probe in probes if probe.end == "middle"], kinds_of(probes)
    most_layers = max([2, *(sum(probe.layers.values()) for probe in probes)])
    flights = (2, max([4, *(probe.in_flight for probe in middle)]))  # of one value, layers and activations are alike
    candidates = [
        Probe({kind: count}, in_flight) for kind, count, in_flight in product(kinds, (1, most_layers), flights)
    ]
    added: list[Probe] = []
    while candidates and len(added) < MOST_PROBES:
        rank, condition = conditioning(equations([*middle, *added], kinds))
        if rank == 2 + len(kinds) and condition <= most_condition and len(middle) + len(added) > rank:
            break
        added.append(min(candidates, key=lambda probe: _rating([*middle, *added, probe], kinds)))
    return added


def _rating(probes: Sequence[Probe], kinds: Sequence[str]) -> tuple[int, float]:
    rank, condition = conditioning(equations(probes, kinds))
    return -rank, condition


def _refusal(probes: Sequence[Probe], kinds: Sequence[str], rank: int, condition: float, most: float) -> str:
    middle, unknowns = [probe for probe in probes if probe.end == "middle"], 2 + len(kinds)
    if rank < unknowns:
        loose = _mixed(middle, kinds)
        why = f"{rank} of {unknowns} unknowns are determined by the middle stages ({len(middle)}), not {loose}"
    elif condition > most:
        why = f"the condition number of the middle stages ({len(middle)}) is {condition:.0f}, more than {most:.0f}"
    else:
        why = f"the middle stages ({len(middle)}) are too few for {unknowns} unknowns and one to check them by"
    added = "; ".join(map(str, probes_to_add(probes, most)))
    return f"{why}. Add to the dry run: {added or 'stages with layers'}."


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
