"""Host overheads, from traces made by hand and from a real step."""

import pytest
import torch

from moestro.measure.host import LAUNCH, LONGEST_S, Event, Trace, host_overheads, measure_host, nest

US = 1e-6


def event(name: str, start: float, end: float, thread: int = 0) -> Event:
    """Start and end in µs."""
    return Event(name, start * US, end * US, thread)


def found(events: list[Event], cost: float = 0.0, launches: bool = True) -> dict[tuple[str, str], list[float]]:
    """In µs, of one phase "forward" from 0 to 1000 µs."""
    trace = Trace(events, [("forward", 0.0, 1000 * US)], cost * US)
    return {
        key: [round(value / US, 6) for value in values]
        for key, values in host_overheads(trace, launches=launches).items()
    }


ACCELERATOR = [
    event("aten::linear", 10, 50),
    event("aten::addmm", 13, 48),
    event("cudaLaunchKernel", 20, 26),
    event("cudaMemsetAsync", 30, 33),
    event("aten::view", 60, 64),
    event("aten::add", 70, 90),
    event("cudaLaunchKernel", 75, 80),
]


def test_the_five_overheads_of_a_trace() -> None:
    assert found(ACCELERATOR) == {
        ("host_t1", "forward"): [10, 6],
        ("host_t2", "forward"): [10, 5],
        ("host_t3", "forward"): [17, 10],
        ("host_t4", "cudaLaunchKernel"): [6, 5],
        ("host_t4", "cudaMemsetAsync"): [3],
        ("host_t5", "forward"): [4, 4],  # between the launches of linear; all of view, which launches nothing
    }


def test_what_tracing_costs_is_taken_off_where_calls_start() -> None:
    assert found(ACCELERATOR, cost=1.0) == {
        ("host_t1", "forward"): [9, 5],
        ("host_t2", "forward"): [8, 4],  # addmm and the launch start in linear's, only the launch in add's
        ("host_t3", "forward"): [17, 10],
        ("host_t4", "cudaLaunchKernel"): [6, 5],
        ("host_t4", "cudaMemsetAsync"): [3],
        ("host_t5", "forward"): [3, 4],
    }
    assert found(ACCELERATOR, cost=100.0)["host_t1", "forward"] == [0, 0]


def test_all_of_the_time_is_accounted_for() -> None:
    everything = [event("aten::linear", 0, 50), *ACCELERATOR[1:], event("aten::add", 990, 1000)]
    overheads = found(everything)
    # That the last operation computes by itself is its whole time; LONGEST_S hides the gap before it.
    assert sum(sum(values) for values in overheads.values()) == 90 + 10


def test_on_a_cpu_the_innermost_calls_take_the_place_of_launches() -> None:
    events = [
        event("aten::linear", 10, 50),
        event("aten::t", 12, 15),
        event("aten::addmm", 18, 48),
        event("aten::add", 55, 60),
    ]
    assert found(events, launches=False) == {
        ("host_t1", "forward"): [5],
        ("host_t2", "forward"): [2],
        ("host_t3", "forward"): [2],
        ("host_t5", "forward"): [3],
    }  # add, which calls nothing, is its own kernel


def test_threads_and_phases_are_kept_apart() -> None:
    events = [
        event("a", 10, 20),
        event("b", 12, 18, thread=1),
        event("c", 30, 40),
        event("d", 25, 35, thread=1),
        event("e", 1010, 1020),
        event("f", 1030, 1040),
        event("before all", -20, -10),
    ]
    trace = Trace(events, [("forward", 0.0, 1000 * US), ("backward", 1000 * US, 2000 * US)], 0.0)
    overheads = host_overheads(trace, launches=False)
    assert sorted(overheads["host_t1", "forward"]) == pytest.approx([7 * US, 10 * US])
    assert overheads["host_t1", "backward"] == pytest.approx([10 * US])


def test_what_takes_too_long_is_left_out() -> None:
    longest = LONGEST_S / US
    events = [event("a", 0, 10), event("b", 11 + longest, 20 + longest), event("c", 25 + longest, 30 + longest)]
    assert found(events, launches=False) == {("host_t1", "forward"): [5]}


def test_nothing_traced_nothing_found() -> None:
    assert found([]) == {}
    assert found([event("a", 5, 6)], launches=False) == {}


def test_events_are_nested_by_time() -> None:
    roots = nest([event("c", 3, 4), event("a", 0, 10), event("b", 2, 5), event("d", 5, 10), event("e", 10, 12)])
    assert [root.name for root in roots] == ["a", "e"]
    assert [child.name for child in roots[0].children] == ["b", "d"]
    assert [child.name for child in roots[0].children[0].children] == ["c"]


@pytest.mark.parametrize(
    "name",
    ["cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx", "cudaMemcpyAsync", "cudaMemsetAsync",
     "hipLaunchKernel", "hipExtModuleLaunchKernel", "hipMemcpyWithStream", "urEnqueueKernelLaunch"],
)  # fmt: skip
def test_launches_of_the_vendors(name: str) -> None:
    assert LAUNCH.match(name)


@pytest.mark.parametrize(
    "name", ["aten::copy_", "cudaStreamSynchronize", "cudaMalloc", "autograd::engine", "custom::Launch"]
)
def test_what_is_no_launch(name: str) -> None:
    assert not LAUNCH.match(name)


def test_a_real_step(capfd: pytest.CaptureFixture[str]) -> None:
    samples = measure_host(torch.device("cpu"), quick=True)
    assert capfd.readouterr().err == ""  # the profiler is quiet
    by_case = {(s.op, s.case["what"]): s for s in samples}
    for phase in ("forward", "backward", "optimizer"):
        assert 0 < by_case["host_t1", phase].median_s < LONGEST_S
    for op in ("host_t1", "host_t2", "host_t3", "host_t4", "host_t5"):
        assert 0 < by_case[op, "mean"].median_s < LONGEST_S
    assert by_case["host_t1", "forward"].repeats > 100
    assert by_case["host_launch", "python call"].median_s < by_case["host_launch", "add"].median_s
    assert by_case["host_sync", "item"].median_s < 1e-3
    assert len(by_case) == len(samples)
