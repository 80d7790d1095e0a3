"""Choices among published layouts: what belongs together, and what a wrong choice costs."""

from dataclasses import replace

import pytest

from moestro.config import load_config
from moestro.config.plan import Plan
from moestro.graph.convert import workload_of
from moestro.plan.regret import choices, kendall, regrets, regrets_by, spearman
from moestro.predict.public import PublicRun
from moestro.predict.validate import Row

WORKLOAD = workload_of(load_config("olmoe-1b-7b").config)
RUN = PublicRun(
    row=2, source="somebody", model="olmoe", workload=WORKLOAD, plan=Plan(dp=8), device="h100-sxm", num_devices=8,
    devices_per_node=8, interconnect="", quantity="step_s", measured=1.0, metric="step_time_s", complete=True,
    is_moe=True, year=2025, assumed=(), notes="",
)  # fmt: skip


def row(predicted: float, measured: float, plan: Plan, **changes: object) -> Row:
    return Row(replace(RUN, plan=plan, measured=measured, **changes), predicted, None)


FIRST, SECOND, THIRD = Plan(dp=8), Plan(tp=2, dp=4), Plan(pp=2, dp=4)


def test_the_regret_of_a_choice() -> None:
    (one,) = choices([row(3.0, 5.0, FIRST), row(1.0, 6.0, SECOND), row(2.0, 4.0, THIRD)])
    assert [layout.plan for layout in one.layouts] == [SECOND, THIRD, FIRST]
    assert one.regret == pytest.approx(6.0 / 4.0 - 1)
    assert one.blind == pytest.approx(5.0 / 4.0 - 1)
    assert one.spread == pytest.approx(6.0 / 4.0 - 1)
    assert one.kendall == pytest.approx(-1 / 3)
    assert one.spearman == pytest.approx(-0.5)


def test_repeated_runs_of_a_layout_count_as_one() -> None:
    (one,) = choices([row(1.0, t, FIRST) for t in (2.0, 3.0, 100.0)] + [row(2.0, 2.5, SECOND)])
    assert [(layout.measured_s, layout.runs) for layout in one.layouts] == [(3.0, 3), (2.5, 1)]
    assert one.regret == pytest.approx(3.0 / 2.5 - 1)
    assert not choices([row(1.0, 2.0, FIRST), row(1.0, 3.0, FIRST)]), "one layout is no choice"


@pytest.mark.parametrize(
    "changes",
    [
        {"source": "arXiv 1"},
        {"model": "other"},
        {"device": "a100-sxm-80gb"},
        {"num_devices": 16},
        {"workload": WORKLOAD.model_copy(update={"global_batch_size": 512})},
        {"workload": WORKLOAD.model_copy(update={"precision": "fp8"})},
        {"workload": WORKLOAD.model_copy(update={"software": "2023"})},
    ],
)
def test_runs_that_differ_in_more_than_their_layout_are_no_choice(changes: dict[str, object]) -> None:
    assert not choices([row(1.0, 2.0, FIRST), row(2.0, 3.0, SECOND, **changes)])


def test_several_choices_together() -> None:
    right = [row(1.0, 2.0, FIRST), row(2.0, 3.0, SECOND)]
    wrong = [row(1.0, 2.2, FIRST, device="a100-sxm-80gb"), row(2.0, 2.0, SECOND, device="a100-sxm-80gb")]
    some = choices([*right, *wrong])
    whole = regrets("all", some)
    assert (whole.choices, whole.layouts, whole.right) == (2, 4, 1)
    assert whole.median == pytest.approx(0.05)
    assert whole.p90 == pytest.approx(0.09)
    assert whole.kendall == pytest.approx(0.0)
    by_device = {one.name: one.median for one in regrets_by(some, lambda one: one.device)}
    assert by_device == {"h100-sxm": 0.0, "a100-sxm-80gb": pytest.approx(0.1)}


@pytest.mark.parametrize(
    ("one", "other", "tau", "rho"),
    [
        ([1, 2, 3, 4], [1, 3, 2, 9], 2 / 3, 0.8),
        ([1, 1, 2, 3, 5], [2, 1, 2, 2, 0], -0.25197631533948484, -0.34412360080584264),
        ([3, 1], [1, 2], -1.0, -1.0),
    ],
)
def test_rank_correlations(one: list[float], other: list[float], tau: float, rho: float) -> None:
    """The numbers are scipy's."""
    assert kendall(one, other) == pytest.approx(tau)
    assert spearman(one, other) == pytest.approx(rho)


def test_what_is_all_equal_has_no_order() -> None:
    assert kendall([1, 1], [1, 2]) is None
    assert spearman([1, 2], [1, 1]) is None
