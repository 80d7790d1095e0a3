"""Pipelines: published bubbles and peaks, orders that cannot run, slow ranks."""

import pytest

from moestro.errors import MoestroError
from moestro.predict.orders import Pass, pipeline_orders
from moestro.predict.schedule import PipelineResult, simulate_pipeline


def even(schedule: str, pp: int, vpp: int, m: int, f: float = 1.0, b: float = 1.0, w: float = 1.0) -> PipelineResult:
    """All stages alike; f, b, w: of all of a rank's chunks together."""
    stages = pp * vpp
    return simulate_pipeline(schedule, pp, vpp, m, [f / vpp] * stages, [b / vpp] * stages, [w / vpp] * stages)


class TestBubbles:
    """Of a step of m micro-batches on p ranks; B is the full backward pass in the published formulas."""

    @pytest.mark.parametrize(("pp", "m"), [(2, 4), (4, 8), (8, 32)])
    def test_one_forward_one_backward(self, pp: int, m: int) -> None:
        result = even("1f1b", pp, 1, m, 1.0, 1.3, 0.7)
        assert result.bubble_s == pytest.approx([(pp - 1) * 3.0] * pp)  # (p - 1)(F + B)
        assert result.peak_in_flight == tuple(float(pp - rank) for rank in range(pp))

    def test_gpipe_waits_as_long_and_holds_all(self) -> None:
        result = even("gpipe", 4, 1, 8)
        assert max(result.bubble_s) == pytest.approx(3 * 3.0)
        assert result.peak_in_flight == (8.0,) * 4

    @pytest.mark.parametrize(("pp", "vpp", "m"), [(2, 2, 8), (4, 2, 8), (4, 4, 16), (8, 2, 16)])
    def test_interleaved_divides_by_the_chunks(self, pp: int, vpp: int, m: int) -> None:
        result = even("interleaved", pp, vpp, m, 1.0, 1.3, 0.7)
        assert result.bubble_s == pytest.approx([(pp - 1) * 3.0 / vpp] * pp)

    @pytest.mark.parametrize(("pp", "m"), [(2, 4), (4, 8), (8, 32)])
    def test_zero_bubble_h1(self, pp: int, m: int) -> None:
        result = even("zero_bubble", pp, 1, m, 1.0, 1.3, 0.7)
        assert result.bubble_s == pytest.approx([(pp - 1) * (1.0 + 2.0 - 2 * 0.7)] * pp)  # (p - 1)(F + B - 2W)

    @pytest.mark.parametrize(("schedule", "vpp", "factor"), [("dualpipe", 1, 1.0), ("dualpipev", 2, 1.0)])
    @pytest.mark.parametrize("pp", [4, 8])
    def test_dual_pipes(self, schedule: str, vpp: int, factor: float, pp: int) -> None:
        """(p/2 - 1)(F&B + B - 3W), p counting stages: pp of DualPipe, 2 pp half ones of DualPipeV."""
        overlapped = 0.9 * 3.0
        stages = pp * vpp
        times = [1.0 / vpp] * stages
        result = simulate_pipeline(schedule, pp, vpp, 4 * pp, times, times, times, pair_s=[overlapped / vpp] * stages)
        assert max(result.bubble_s) == pytest.approx((stages / 2 - 1) * (overlapped + 2.0 - 3.0) / vpp)
        assert set(result.peak_in_flight) == {float(stages + 1)}

    def test_zbv_is_shorter_than_half_of_1f1b(self) -> None:
        assert max(even("zbv", 4, 2, 16).bubble_s) < max(even("1f1b", 4, 1, 16).bubble_s) / 2


class TestPublishedOutputs:
    """TeleChat3's planner (2512.24157): stages of 8, 8, 8 and 8.8 with their activations."""

    def test_peaks(self) -> None:
        forward = [8 / 3] * 3 + [8.8 / 3]
        backward = [16 / 3] * 3 + [17.6 / 3]
        result = simulate_pipeline("1f1b", 4, 1, 16, forward, backward, [0.0] * 4, held=[8, 8, 8, 8.8])
        assert result.peak_in_flight == pytest.approx((32, 24, 16, 8.8))


class TestSimulation:
    def test_every_pass_runs_once_and_in_order(self) -> None:
        for schedule, pp, vpp, m in (("interleaved", 4, 2, 8), ("zbv", 4, 2, 6), ("dualpipev", 4, 2, 8)):
            events = even(schedule, pp, vpp, m).events
            assert len({event.work[:3] for event in events}) == len(events)
            ends = {event.work[:3]: event.end_s for event in events}
            starts = {event.work[:3]: event.start_s for event in events}
            for stage in range(1, pp * vpp):
                for i in range(m):
                    assert starts["F", stage, i] >= ends["F", stage - 1, i] - 1e-9
                    assert starts["B", stage - 1, i] >= ends["B", stage, i] - 1e-9

    def test_a_slow_rank_holds_up_all(self) -> None:
        quick, slow = even("1f1b", 4, 1, 8), None
        times = [1.0] * 4
        slow = simulate_pipeline("1f1b", 4, 1, 8, times, times, times, slow=[1, 1, 2, 1])
        assert slow.total_s >= quick.total_s + 8 * 3.0 * 0.9

    def test_sending_takes_time_between_ranks_only(self) -> None:
        times = [1.0] * 2
        free = simulate_pipeline("1f1b", 2, 1, 1, times, times, times)
        late = simulate_pipeline("1f1b", 2, 1, 1, times, times, times, 0.5)
        assert late.total_s == pytest.approx(free.total_s + 2 * 0.5)

    def test_a_deadlock_is_named(self) -> None:
        orders = [
            [Pass("F", 0, 0), Pass("B", 0, 0), Pass("F", 0, 1), Pass("B", 0, 1)],
            [Pass("F", 1, 0), Pass("F", 1, 1), Pass("B", 1, 0), Pass("B", 1, 1)],
        ]
        times = [1.0] * 2
        with pytest.raises(
            MoestroError, match=r"deadlock: rank 0 waits to run B of micro-batch 0.*rank 1 waits to run F"
        ):
            simulate_pipeline("1f1b", 2, 1, 2, times, times, times, orders=orders)


@pytest.mark.parametrize(
    ("schedule", "pp", "vpp", "m", "words"),
    [
        ("1f2b", 2, 1, 4, "no schedule"),
        ("zbv", 2, 1, 4, "2 chunks"),
        ("interleaved", 4, 2, 6, "multiples of pp = 4"),
        ("dualpipe", 4, 1, 6, "8 micro-batches or more"),
        ("dualpipe", 3, 1, 8, "even number"),
    ],
)
def test_what_a_schedule_needs_is_said(schedule: str, pp: int, vpp: int, m: int, words: str) -> None:
    with pytest.raises(MoestroError, match=words):
        pipeline_orders(schedule, pp, vpp, m)
