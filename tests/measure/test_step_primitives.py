"""Events made by hand: which of them are calls, where they are, and that no time is lost or counted twice."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.measure.primitives import (
    HOST,
    NODE,
    PART,
    PHASE,
    Account,
    Call,
    Event,
    Timed,
    account,
    account_on_device,
    find_calls,
    places,
    primitives,
)

WHOLE = Event("step", 0, 1000)


def is_call(name: str) -> bool:
    return name.startswith("aten::") and name not in ("aten::linear", "aten::matmul")


def test_a_call_is_found_inside_what_is_made_of_it_and_keeps_what_is_inside_it():
    events = [
        Event("aten::linear", 100, 300),
        Event("aten::matmul", 110, 290),
        Event("aten::mm", 120, 280),
        Event("aten::resolve_conj", 130, 140),
        Event("aten::add", 400, 450),
        Event("aten::outside", 1200, 1300),
        WHOLE,
    ]
    spans = find_calls(events, WHOLE, is_call)
    assert spans.ops == ["aten::mm", "aten::add"]
    product, add = spans.calls
    assert [event.name for event in product.around] == ["aten::linear", "aten::matmul"]
    assert (product.inside, product.between) == (1, 2)
    assert (add.around, add.inside, add.between, spans.after) == ((), 0, 0, 0)
    assert spans.events == 5


def test_the_profilers_cost_is_taken_off_where_it_fell():
    events = [Event("aten::linear", 100, 300), Event("aten::mm", 120, 280), Event("aten::view", 130, 150)]
    spans = find_calls([*events, Event("after", 500, 600)], WHOLE, is_call)
    found = account(spans, cost_s=10e-9)
    # 160 ns less 1.5 events; 120 ns before less 1.5; 720 ns after less 1.
    assert found.calls == [pytest.approx(Timed(145e-9, 105e-9))]
    assert found.rest_s == pytest.approx(710e-9)
    assert found.profiler_s == pytest.approx(40e-9)
    assert account(spans, cost_s=1.0) == ([Timed(0.0, 0.0)], 0.0, pytest.approx(1e-6), 1e-6)


@st.composite
def nested(draw: st.DrawFn, low: int = 0, high: int = 10_000, depth: int = 0) -> list[Event]:
    """Events inside each other or side by side, as one thread has them."""
    count = draw(st.integers(0, 4 if depth else 6))
    bounds = sorted(draw(st.lists(st.integers(low, high), min_size=2 * count, max_size=2 * count)))
    found = []
    for start, end in zip(bounds[::2], bounds[1::2], strict=True):
        found.append(Event(draw(st.sampled_from(["aten::mm", "aten::linear", "aten::add", "node"])), start, end))
        if depth < 3 and end > start + 1:
            found += draw(nested(start, end, depth + 1))
    return found


@settings(max_examples=60, deadline=None)
@given(nested(), st.floats(0, 1e-6))
def test_all_time_is_in_calls_gaps_or_the_profiler(events: list[Event], cost_s: float):
    whole = Event("step", 0, 10_000)
    spans = find_calls([whole, *events], whole, is_call)
    found = account(spans, cost_s)
    assert found.calls_s + found.gaps_s + found.profiler_s == pytest.approx(found.wall_s, rel=1e-9)
    assert min([t.seconds for t in found.calls] + [t.gap_s for t in found.calls] + [found.rest_s]) >= 0
    assert spans.events == len(events)
    if cost_s == 0:
        assert found.profiler_s == 0


def test_on_a_device_calls_take_the_time_of_their_kernels():
    events = [Event("aten::mm", 0, 100, device_ns=600), Event("aten::add", 100, 120, device_ns=50)]
    found = account_on_device(find_calls(events, WHOLE, is_call))
    assert found.calls == [Timed(600e-9, 0.0), Timed(50e-9, 0.0)]
    assert found.gaps_s == pytest.approx(350e-9)


def test_places_come_from_markers_and_a_backward_call_goes_where_its_node_was_made():
    events = [
        Event("aten::index", 0, 5),  # the step's own, before the model
        Event(f"{PART}rest of the model", 10, 200),
        Event(f"{PART}attention", 20, 60),
        Event("aten::linear", 30, 50, sequence=7),
        Event("aten::mm", 31, 49, sequence=7),
        Event("aten::add", 60, 65),  # begins as attention ends
        Event(f"{PART}rest of the model", 70, 150),  # a module that is no part by itself
        Event(f"{PART}experts", 80, 140),
        Event("SegmentedExperts", 90, 130, sequence=8),
        Event("aten::mul", 91, 129),
        Event("aten::add", 160, 170, sequence=9),
        Event(f"{NODE}AddBackward0", 210, 220, sequence=9),
        Event("aten::add", 211, 219),
        Event(f"{NODE}SegmentedExpertsBackward", 220, 300, sequence=8),
        Event("aten::mul", 230, 240),
        Event(f"{NODE}MmBackward0", 300, 400, sequence=7),
        Event(f"{PART}router", 310, 330),  # recomputed
        Event("aten::mm", 311, 329),
        Event("aten::mm", 340, 390),
        Event(f"{NODE}torch::autograd::AccumulateGrad", 400, 450, sequence=-1),
        Event("aten::add_", 410, 420),
        Event(f"{PHASE}optimizer", 500, 600),
        Event("aten::_fused_adamw_", 510, 590),
        Event("aten::sign", 700, 710),
    ]
    assert places(find_calls(events, WHOLE, is_call)) == [
        ("step", "step"),
        ("forward", "attention"),
        ("forward", "rest of the model"),
        ("forward", "experts"),
        ("forward", "rest of the model"),
        ("backward", "rest of the model"),
        ("backward", "experts"),
        ("backward", "router"),
        ("backward", "attention"),
        ("backward", "attention"),
        ("optimizer", "optimizer"),
        ("step", "step"),
    ]


def call(phase: str, kind: str, part: str = "experts", flops: float = 0.0) -> Call:
    return Call("aten::mm", f"{phase}{kind}", phase, part, kind, (), None, flops, 8.0)


def test_primitives_add_up_calls_of_a_kind_and_the_largest_gap_is_first():
    calls = [call("forward", "gemm", flops=10), call("forward", "gemm", flops=20), call("backward", "gemm", flops=5)]
    accounted = Account([Timed(1.0, 0.5), Timed(2.0, 0.25), Timed(4.0, 0.0)], 0.125, 0.0, 7.875)
    rows = primitives(calls, accounted, [1.0, 1.0, 1.0], [0.5, 0.5, 0.5])
    assert [(r.kind, r.phase, r.calls, r.in_step_s, r.gap_s) for r in rows] == [
        ("gemm", "backward", 1, 4.0, 3.0),
        ("gemm", "forward", 2, 3.0, 1.0),
        (HOST, "forward", 2, 0.75, 0.75),
        (HOST, "step", 0, 0.125, 0.125),
        (HOST, "backward", 1, 0.0, 0.0),
    ]
    forward = rows[1]
    assert (forward.ratio, forward.flops, forward.bytes_moved, forward.floor_s) == (1.5, 30, 16.0, 1.0)
    assert rows[2].ratio is None
    assert sum(r.in_step_s for r in rows) == accounted.wall_s
