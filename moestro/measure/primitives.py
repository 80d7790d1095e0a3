"""A training step as primitives: which call of which operation took how long, and the time between calls.

Pure functions over the profiler's events of a step. A call is an outermost event of an operation that does its own
work; what is around it (`aten::linear` around `aten::mm`, autograd's nodes, markers) says where in the step it is, and
what is inside it is a part of it. So all time of the step is either inside a call or in a gap before one, and nothing
is left over (the primitives of ProfileDNN; the gaps are T1 of arXiv 2201.07821 and Python's time with it).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moestro.measure.step_work import Gemm, Operand

HOST = "host"  # the kind of the gaps
PHASE, PART = "moestro.phase ", "moestro.part "  # names of markers begin so
NODE = "autograd::engine::evaluate_function: "  # and those of autograd's nodes so
REST = "rest of the model"


@dataclass(frozen=True)
class Event:
    """What the profiler saw on the host. device_ns: of all kernels launched inside it.

    key, operands: see `step_calls`; not every profile has them. sequence: of the autograd node that is made or run in
    it, or -1.
    """

    name: str
    start_ns: int
    end_ns: int
    device_ns: int = 0
    key: str = ""
    sequence: int = -1
    operands: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Call:
    """One call of an operation in a step. key: equal for calls that do the same work on operands of the same shapes."""

    op: str  # "aten::mm"
    key: str
    phase: str  # forward, backward, optimizer, step (the step's own sums, and the routers' balance)
    part: str  # of the model, named as `moestro.config.count` does where it has the part
    kind: str
    operands: tuple[Operand, ...]
    gemm: Gemm | None
    flops: float
    bytes_moved: float

    @property
    def dtype(self) -> str:
        """Of the first operand that is not an index."""
        return next((o.dtype for o in self.operands if not o.dtype.startswith(("int", "bool"))), "")

    @property
    def shapes(self) -> str:
        return " ".join("×".join(map(str, operand.shape)) or "1" for operand in self.operands[:4])


class Span(NamedTuple):
    """A call among the events of a step: what is open around it, outermost first, and how many events are inside it
    and between it and the call before."""

    event: Event
    around: tuple[Event, ...]
    inside: int
    between: int


class Spans(NamedTuple):
    step: Event
    calls: list[Span]
    after: int  # events after the last call

    @property
    def ops(self) -> list[str]:
        return [span.event.name for span in self.calls]

    @property
    def events(self) -> int:
        return sum(1 + span.inside + span.between for span in self.calls) + self.after


def find_calls(events: Sequence[Event], step: Event, is_call: Callable[[str], bool]) -> Spans:
    """The calls inside `step`, in order. is_call: of an event's name."""
    inside = [e for e in events if e is not step and step.start_ns <= e.start_ns and e.end_ns <= step.end_ns]
    inside.sort(key=lambda e: (e.start_ns, -e.end_ns))
    found: list[Span] = []
    opened: list[Event] = []
    position, between = 0, 0
    while position < len(inside):
        event = inside[position]
        position += 1
        while opened and opened[-1].end_ns <= event.start_ns:
            opened.pop()
        if not is_call(event.name):
            opened.append(event)
            between += 1
            continue
        first = position
        while position < len(inside) and inside[position].start_ns < event.end_ns:
            position += 1
        found.append(Span(event, tuple(opened), position - first, between))
        between = 0
    return Spans(step, found, between)


def places(spans: Spans) -> list[tuple[str, str]]:
    """(phase, part) of each call, from the markers and autograd's nodes around it.

    A call in backward belongs to the part in which its node was made: the last forward event with the node's number.
    The sum of a parameter's gradient has no number; it belongs with the call before.
    """
    made: dict[int, str] = {}
    found: list[tuple[str, str]] = []
    for event, around, _, _ in spans.calls:
        node = max((i for i, e in enumerate(around) if e.name.startswith(NODE)), default=-1)
        parts = [e.name.removeprefix(PART) for e in around[node + 1 :] if e.name.startswith(PART)]
        phases = [e.name.removeprefix(PHASE) for e in around if e.name.startswith(PHASE)]
        named = next((part for part in reversed(parts) if part != REST), REST)
        if node >= 0:
            number = around[node].sequence
            before = found[-1][1] if found else REST
            part = named if parts else made.get(number, REST) if number >= 0 else before
            found.append(("backward", part))
        elif parts:
            found.append(("forward", named))
            made |= {e.sequence: named for e in (*around, event) if e.sequence >= 0}
        else:
            phase = phases[-1] if phases else "step"
            found.append((phase, phase))
    return found


class Timed(NamedTuple):
    """A call in one profiled step: seconds inside it, and seconds since the call before it ended."""

    seconds: float
    gap_s: float


class Account(NamedTuple):
    """All time of one profiled step: Σ seconds + Σ gaps + rest_s + profiler_s = wall_s."""

    calls: list[Timed]
    rest_s: float  # after the last call; on an accelerator all the time in which it had nothing to do
    profiler_s: float  # taken off the rest
    wall_s: float

    @property
    def calls_s(self) -> float:
        return sum(timed.seconds for timed in self.calls)

    @property
    def gaps_s(self) -> float:
        return sum(timed.gap_s for timed in self.calls) + self.rest_s


def account(spans: Spans, cost_s: float = 0.0) -> Account:
    """Share out the time of a step on a CPU.

    cost_s: that recording one event takes. It is taken off where it fell, half of a call's own inside it and half
    before it, but never more than there is.
    """
    timed, last_end, profiler_s = [], spans.step.start_ns, 0.0
    for event, _, inside, between in spans.calls:
        seconds, own = _less((event.end_ns - event.start_ns) / 1e9, cost_s * (inside + 0.5))
        gap_s, before = _less((event.start_ns - last_end) / 1e9, cost_s * (between + 0.5))
        profiler_s += own + before
        timed.append(Timed(seconds, gap_s))
        last_end = event.end_ns
    rest_s, after = _less((spans.step.end_ns - last_end) / 1e9, cost_s * spans.after)
    return Account(timed, rest_s, profiler_s + after, (spans.step.end_ns - spans.step.start_ns) / 1e9)


def _less(seconds: float, cost_s: float) -> tuple[float, float]:
    taken = min(max(seconds, 0.0), cost_s)
    return seconds - taken, taken


def account_on_device(spans: Spans) -> Account:
    """The same for an accelerator: calls take the time of their kernels, and what is left of the step is idle.

    Kernels that run at the same time are counted beside each other, so that idle time may come out too small.
    """
    timed = [Timed(span.event.device_ns / 1e9, 0.0) for span in spans.calls]
    wall_s = (spans.step.end_ns - spans.step.start_ns) / 1e9
    return Account(timed, wall_s - sum(t.seconds for t in timed), 0.0, wall_s)


@dataclass(frozen=True)
class Primitive:
    """All calls of one kind in one part and phase, and what they could take."""

    kind: str
    part: str
    phase: str
    calls: int
    in_step_s: float
    alone_s: float | None  # None for the gaps, which nothing can be measured against
    floor_s: float
    flops: float
    bytes_moved: float

    @property
    def gap_s(self) -> float:
        """What the step loses here against the same calls alone; of a gap between calls all of it."""
        return self.in_step_s - (self.alone_s or 0.0)

    @property
    def ratio(self) -> float | None:
        return self.in_step_s / self.alone_s if self.alone_s else None


def primitives(
    calls: Sequence[Call], accounted: Account, alone_s: Sequence[float], floor_s: Sequence[float]
) -> list[Primitive]:
    """Calls of a kind, part and phase added up, and the gaps of each phase; the largest gap first."""
    sums: dict[tuple[str, str, str], list[float]] = {}
    gaps: dict[str, list[float]] = {"step": [0, accounted.rest_s]}
    for call, timed, alone, floor in zip(calls, accounted.calls, alone_s, floor_s, strict=True):
        row = sums.setdefault((call.kind, call.part, call.phase), [0.0] * 6)
        for i, value in enumerate((1, timed.seconds, alone, floor, call.flops, call.bytes_moved)):
            row[i] += value
        before = gaps.setdefault(call.phase, [0, 0.0])
        before[0] += 1
        before[1] += timed.gap_s
    rows = [
        Primitive(kind, part, phase, int(count), seconds, alone, floor, flops, moved)
        for (kind, part, phase), (count, seconds, alone, floor, flops, moved) in sums.items()
    ]
    rows += [
        Primitive(HOST, "between calls", phase, int(count), seconds, None, 0.0, 0.0, 0.0)
        for phase, (count, seconds) in gaps.items()
    ]
    return sorted(rows, key=lambda row: row.gap_s, reverse=True)
