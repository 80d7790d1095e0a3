"""The step's time: one formula and its vectorised twin, limits that can be worked out by hand, bad plans."""

import pytest

from moestro.config import load_config, resolved_model
from moestro.config.plan import Plan, RoutingConfig, Workload
from moestro.errors import MoestroError
from moestro.hardware.catalog import load_device
from moestro.predict.constants import Constants, load_calibration
from moestro.predict.costs import Cost, StageCost, StepCost
from moestro.predict.many import many_step_times, table
from moestro.predict.network import span
from moestro.predict.step import Place, cost_step, step_time

PERFECT = Constants(
    gemm=1, gemm_low=1, grouped=1, grouped_low=1, attention=1, memory=1, optimizer=1, inside=1, between=1,
    launch_s=0, collective_host_s=0, step_s=0, hidden=1, contention=0,
)  # fmt: skip


def cost(seconds: float = 0.0, *, launches: float = 0, blocks: float = 0.0, hides: float = 0.0) -> Cost:
    collectives = {("tp", False, False): blocks, ("dp", True, True): hides}
    return Cost({"gemm": seconds}, {("dense", "gemm"): seconds}, collectives, launches, 0)


def step(*stages: tuple[float, float, float], m: int = 4, once: Cost | None = None) -> StepCost:
    empty = Cost()
    made = tuple(StageCost(i, cost(f), cost(b), cost(w), 0.0) for i, (f, b, w) in enumerate(stages))
    return StepCost(made, tuple((empty, once or empty, empty) for _ in stages), m)


class TestByHand:
    def test_one_rank_adds_up(self) -> None:
        assert step_time(step((1, 2, 1)), Plan(), PERFECT).total == pytest.approx(4 * 4)

    def test_the_host_decides_where_it_is_slower(self) -> None:
        slow = Constants.model_validate({**PERFECT.model_dump(), "launch_s": 1e-3})
        assert cost(0.5, launches=1000).seconds(slow) == pytest.approx(1.0)
        assert cost(2.0, launches=1000).seconds(slow) == pytest.approx(2.0)

    def test_what_blocks_adds_and_what_hides_does_not(self) -> None:
        assert cost(1.0, blocks=0.3).seconds(PERFECT) == pytest.approx(1.3)
        assert cost(1.0, hides=0.8).seconds(PERFECT) == pytest.approx(1.0)
        assert cost(1.0, hides=1.5).seconds(PERFECT) == pytest.approx(1.5)

    def test_gradients_hide_behind_the_last_backward(self) -> None:
        plan = Plan(dp=2)
        assert step_time(step((1, 1, 1), once=cost(hides=1.5)), plan, PERFECT).total == pytest.approx(12)
        assert step_time(step((1, 1, 1), once=cost(hides=2.5)), plan, PERFECT).total == pytest.approx(12.5)

    def test_closed_form_is_the_simulation_for_even_stages(self) -> None:
        plan, stages = Plan(pp=4), [(1.0, 1.0, 1.0)] * 4
        closed = step_time(step(*stages, m=8), plan, PERFECT).total
        assert closed == pytest.approx(step_time(step(*stages, m=8), plan, PERFECT, exact=True).total)
        assert closed == pytest.approx((8 + 3) * 3)

    def test_closed_form_is_near_it_for_uneven_ones(self) -> None:
        plan, stages = Plan(pp=4), [(1.0, 1.0, 1.0), (1.2, 1.1, 1.0), (0.9, 1.0, 1.1), (1.5, 1.4, 1.3)]
        closed = step_time(step(*stages, m=16), plan, PERFECT).total
        assert closed == pytest.approx(step_time(step(*stages, m=16), plan, PERFECT, exact=True).total, rel=0.03)

    def test_parts_add_up_to_the_step(self) -> None:
        time = step_time(step((1, 2, 1), (1, 1, 1), once=cost(blocks=0.5)), Plan(pp=2), PERFECT)
        assert time.compute + time.host + time.communication + time.bubble + time.optimizer == time.total
        assert time.communication == pytest.approx(0.5)
        assert time.compute == pytest.approx(16)


class TestOnDevices:
    workload = Workload(model=resolved_model(load_config("mixtral-8x7b").config), seq_len=4096, global_batch_size=256)
    plans = (
        Plan(dp=32, ep=8, zero=1),
        Plan(pp=4, dp=8, ep=8, zero=1, schedule="zero_bubble"),
        Plan(pp=4, vpp=2, dp=2, tp=4, ep=8, zero=1, schedule="interleaved"),
        Plan(pp=2, vpp=2, dp=16, ep=8, zero=1, schedule="zbv"),
        Plan(dp=32, ep=8, zero=3, recompute="block"),
        Plan(pp=4, dp=4, cp=2, ep=8, schedule="gpipe"),
    )

    def test_many_at_once_are_the_same(self) -> None:
        place = Place.of(load_device("h100-sxm"), 8)
        costs = [cost_step(self.workload, plan, place) for plan in self.plans]
        constants = load_calibration().of("h100-sxm", "fused")
        one_by_one = [step_time(c, plan, constants).total for c, plan in zip(costs, self.plans, strict=True)]
        assert many_step_times(table(costs, self.plans), constants) == pytest.approx(one_by_one, rel=1e-12)

    def test_physics_of_directions(self) -> None:
        place = Place.of(load_device("h100-sxm"), 8)

        def seconds(**changes: object) -> float:
            plan = Plan(dp=32, ep=8, zero=1)
            workload = self.workload.model_copy(update=changes)
            return step_time(cost_step(workload, plan, place), plan, PERFECT).total

        base = seconds()
        assert seconds(global_batch_size=512) > 1.8 * base
        assert seconds(seq_len=8192, global_batch_size=128) > base  # the same tokens, more attention
        assert seconds(routing=RoutingConfig(kind="measured", max_over_mean=2.0)) > 1.1 * base
        again = step_time(
            cost_step(self.workload, Plan(dp=32, ep=8, zero=1, recompute="block"), place), Plan(), PERFECT
        )
        assert 1.2 * base < again.total < 1.45 * base

    def test_a_plan_that_does_not_fit_says_why(self) -> None:
        with pytest.raises(MoestroError, match="tp = 3 does not divide num_heads = 32"):
            cost_step(self.workload, Plan(tp=3), Place.of(load_device("h100-sxm"), 8))


class TestSpan:
    def test_inner_dimensions_stay_in_the_node(self) -> None:
        plan = Plan(tp=4, cp=2, dp=8, pp=2)
        assert span(plan, "tp", 4, 8) == (4, 1)
        assert span(plan, "cp", 2, 8) == (2, 1)
        assert span(plan, "dp", 16, 8) == (16, 8)  # data ranks count cp: two in each node
        assert span(plan, "pp", 2, 8).nodes == 2

    def test_experts_of_a_large_domain(self) -> None:
        assert span(Plan(dp=64, ep=64), "ep", 64, 72) == (64, 1)
        assert span(Plan(dp=64, ep=64), "ep", 64, 8) == (64, 8)
