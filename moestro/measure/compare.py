"""Two profiles side by side: first what differs about the machines, then how far the figures lie apart.

A difference of two medians means little by itself. It is held against the spread that the profiles print: the larger
of the two distances between the 10th and the 90th percentile.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from moestro.errors import MoestroError
from moestro.hardware.profile import MachineProfile, Sample, Value
from moestro.measure.sections import SECTIONS, section_of

FEWEST_TIMINGS = 3  # below which a sample has no spread
BUSY = 0.5  # load average per core from which a machine counts as busy

# Whether two profiles are of one machine; where one of these differs, their ratio compares machines, not moments.
_IDENTITY = ("device_name", "device_type", "num_devices", "cpu", "cores", "memory_bytes", "topology")


@dataclass(frozen=True)
class Difference:
    """Something about the machine or the way of measuring that is not the same in both profiles."""

    what: str
    a: str
    b: str
    identity: bool  # another machine, and not only another moment or version


@dataclass(frozen=True)
class Entry:
    """A case that both profiles hold."""

    section: str
    op: str
    case: dict[str, Value]
    a_s: float
    b_s: float
    spread_s: float | None  # the larger of the two; None: neither profile knows one

    @property
    def ratio(self) -> float:
        """Time in b over time in a: above one, b is slower."""
        return self.b_s / self.a_s

    @property
    def within(self) -> bool | None:
        """Whether the medians differ by no more than the larger spread; None without a spread."""
        return None if self.spread_s is None else abs(self.b_s - self.a_s) <= self.spread_s


@dataclass(frozen=True)
class Total:
    """Of one section, or of all."""

    section: str
    entries: int
    judged: int  # those with a spread
    within: int
    median_ratio: float
    worst: Entry


@dataclass(frozen=True)
class Comparison:
    differences: tuple[Difference, ...]  # those that make another machine first
    entries: tuple[Entry, ...]
    only_a: int
    only_b: int

    @property
    def same_machine(self) -> bool:
        return not any(difference.identity for difference in self.differences)

    def totals(self) -> list[Total]:
        """A line for every section that both profiles hold, and one for all together."""
        parts = [[e for e in self.entries if e.section == name] for name in SECTIONS]
        totals = [_total(part[0].section, part) for part in parts if part]
        return [*totals, _total("all", list(self.entries))]


def compare_profiles(a: MachineProfile, b: MachineProfile) -> Comparison:
    """Raises MoestroError when the profiles have no case in common."""
    ours, theirs = _by_case(a.samples), _by_case(b.samples)
    common = [key for key in ours if key in theirs]
    if not common:
        raise MoestroError(f"profiles '{a.name}' and '{b.name}' have no case in common: nothing can be compared")
    return Comparison(
        differences=tuple(_differences(a, b)),
        entries=tuple(_entry(ours[key], theirs[key]) for key in common),
        only_a=len(ours) - len(common),
        only_b=len(theirs) - len(common),
    )


def _by_case(samples: Iterable[Sample]) -> dict[tuple[object, ...], list[Sample]]:
    groups = defaultdict[tuple[object, ...], list[Sample]](list)
    for sample in samples:
        groups[(sample.op, *sorted(sample.case.items()))].append(sample)
    return groups


def _entry(ours: list[Sample], theirs: list[Sample]) -> Entry:
    # Public records may hold a case several times, with other software: their medians stand for it.
    spreads = [s.high_s - s.low_s for s in (*ours, *theirs) if has_spread(s) and s.high_s and s.low_s]
    return Entry(
        section=section_of(ours[0]),
        op=ours[0].op,
        case=ours[0].case,
        a_s=median(s.median_s for s in ours),
        b_s=median(s.median_s for s in theirs),
        spread_s=max(spreads, default=None),
    )


def has_spread(sample: Sample) -> bool:
    """Whether there were enough timings for percentiles to say something."""
    return sample.repeats >= FEWEST_TIMINGS and sample.low_s is not None and sample.high_s is not None


def _total(section: str, entries: list[Entry]) -> Total:
    judged = [entry for entry in entries if entry.within is not None]
    return Total(
        section=section,
        entries=len(entries),
        judged=len(judged),
        within=sum(bool(entry.within) for entry in judged),
        median_ratio=median(entry.ratio for entry in entries),
        worst=max(entries, key=lambda entry: max(entry.ratio, 1 / entry.ratio)),
    )


def _differences(a: MachineProfile, b: MachineProfile) -> list[Difference]:
    ours, theirs = _manifest(a), _manifest(b)
    found = [
        Difference(what, ours.get(what, "–"), theirs.get(what, "–"), what in _IDENTITY)
        for what in dict.fromkeys((*ours, *theirs))
        if what != "load_average" and ours.get(what) != theirs.get(what)
    ]
    found += [Difference("load_average", _load(a), _load(b), False)] if _busy(a) != _busy(b) else []
    return sorted(found, key=lambda difference: not difference.identity)


def _manifest(profile: MachineProfile) -> dict[str, str]:
    """What a profile says of its machine, flat."""
    flat: dict[str, str] = {"mode": profile.mode}
    for key, value in profile.machine.model_dump(mode="json", exclude_none=True).items():
        if isinstance(value, dict):
            flat |= {f"{key}.{name}": str(inner) for name, inner in value.items()}
        elif isinstance(value, list):
            flat[key] = ", ".join(map(str, value))
        else:
            flat[key] = f"{value:g}" if isinstance(value, float) else str(value)
    return flat


def _busy(profile: MachineProfile) -> bool:
    load = profile.machine.load_average
    return load is not None and load > BUSY * (profile.machine.cores or 1)


def _load(profile: MachineProfile) -> str:
    load = profile.machine.load_average
    return "–" if load is None else f"{load:.2f} {'(busy)' if _busy(profile) else '(quiet)'}"
