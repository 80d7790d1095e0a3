"""Shapes under a budget: as many parameters, within the budget, aligned, and faster than what scaling gives."""

import pytest
from predict.test_predict import h100

from moestro.config.counts import count
from moestro.config.model import ModelConfig
from moestro.config.moe import MoEConfig
from moestro.config.plan import Plan, Workload
from moestro.errors import MoestroError
from moestro.plan.alignment import price_shape
from moestro.plan.budget import needed, within
from moestro.plan.shape_search import TOLERANCE, Budget, Found, search_shapes
from moestro.plan.size import lint_shape

TARGET = h100()
PLAN = Plan()
MODEL = ModelConfig(
    vocab_size=32_000,
    hidden_size=1024,
    num_layers=6,
    num_heads=16,
    num_kv_heads=4,
    max_seq_len=2048,
    moe=MoEConfig(num_experts=16, top_k=2, expert_hidden_size=1024),
)
WORK = Workload(model=MODEL, seq_len=2048, global_batch_size=4)
BUDGETS = {"params": 6e8, "flops": 1.3e9, "latency": 1e-4, "memory": 20e9}


@pytest.fixture(scope="module", params=BUDGETS)
def found(request: pytest.FixtureRequest) -> tuple[Budget, Found]:
    budget = Budget(request.param, BUDGETS[request.param])
    return budget, search_shapes(WORK, PLAN, TARGET, budget)


class TestSearch:
    def test_the_preset_is_scaled_to_the_budget(self, found: tuple[Budget, Found]) -> None:
        budget, shapes = found
        assert 0.9 * budget.limit < shapes.naive.spent <= budget.limit

    def test_shapes_hold_as_much_within_the_budget(self, found: tuple[Budget, Found]) -> None:
        budget, shapes = found
        assert shapes.best
        slack = 1 + TOLERANCE if budget.kind in ("params", "flops") else 1
        for shape in shapes.best:
            counts = count(shape.model, WORK.seq_len)
            assert counts.total_params == pytest.approx(shapes.naive.counts.total_params, rel=TOLERANCE)
            assert counts.active_params == pytest.approx(shapes.naive.counts.active_params, rel=TOLERANCE)
            assert shape.spent <= budget.limit * slack
            assert shape.model.moe is not None
            assert shape.model.moe.num_experts >= 16  # never coarser

    def test_shapes_are_aligned_and_faster(self, found: tuple[Budget, Found]) -> None:
        shapes = found[1]
        rates = [shape.priced.tokens_per_s_per_device for shape in shapes.best]
        assert rates == sorted(rates, reverse=True)
        assert (
            rates[0] >= shapes.rounded.priced.tokens_per_s_per_device * (1 - 1e-9) or shapes.rounded not in shapes.best
        )
        assert rates[0] > shapes.naive.priced.tokens_per_s_per_device
        best = WORK.model_copy(update={"model": shapes.best[0].model})
        assert lint_shape(best, PLAN, TARGET).of("shape") == []
        assert price_shape(best, PLAN, TARGET).step_s == pytest.approx(shapes.best[0].priced.step_s)

    def test_a_dense_model_has_shapes_too(self) -> None:
        dense = WORK.model_copy(
            update={"model": ModelConfig(**{**dict(MODEL), "moe": None, "intermediate_size": 4096})}
        )
        shapes = search_shapes(dense, PLAN, TARGET, Budget("params", 3e8))
        assert shapes.best[0].counts.total_params == pytest.approx(3e8, rel=2 * TOLERANCE)

    def test_ratios_bound_depth_against_width(self) -> None:
        budget = Budget("params", 6e8)
        tight = search_shapes(WORK, PLAN, TARGET, budget, ratios=1.1).best
        aspect = MODEL.hidden_size / MODEL.num_layers
        assert all(0.85 < s.model.hidden_size / s.model.num_layers / aspect < 1.2 for s in tight)

    @pytest.mark.parametrize("limit", [0.0, -1.0, float("inf")])
    def test_no_budget(self, limit: float) -> None:
        with pytest.raises(MoestroError, match="above zero"):
            Budget("params", limit)

    @pytest.mark.parametrize("limit", [10.0, 1e18])
    def test_out_of_reach(self, limit: float) -> None:
        with pytest.raises(MoestroError, match="beyond the"):
            search_shapes(WORK, PLAN, TARGET, Budget("params", limit))


class TestBudget:
    def test_the_largest_fits_and_the_next_does_not(self) -> None:
        plan = Plan(micro_batch_size=2)
        found = within(WORK, plan, TARGET, memory_gb=24)
        assert {(row.what, row.recompute) for row in found.rows} == {
            (what, again) for what in ("batch", "context", "model") for again in ("none", "selective", "block")
        }
        for row in found.rows:
            assert row.size
            assert needed(row.workload, row.plan, TARGET) <= found.limit_bytes
            if row.what == "batch":
                more = row.plan.model_copy(update={"micro_batch_size": row.size + 1})
                work = row.workload.model_copy(update={"global_batch_size": row.size + 1})
                assert needed(work, more, TARGET) > found.limit_bytes
            if row.what == "context":
                model = row.workload.model.model_copy(update={"max_seq_len": row.size + 128})
                work = row.workload.model_copy(update={"seq_len": row.size + 128, "model": model})
                assert needed(work, row.plan, TARGET) > found.limit_bytes

    def test_more_memory_holds_more(self) -> None:
        small, large = (within(WORK, PLAN, TARGET, memory_gb=gb).rows for gb in (20, 40))
        assert all(a.size < b.size for a, b in zip(small, large, strict=True))

    def test_recomputation_makes_room(self) -> None:
        sizes = {(row.what, row.recompute): row.size for row in within(WORK, PLAN, TARGET, memory_gb=24).rows}
        assert all(sizes[what, "block"] > sizes[what, "none"] for what in ("batch", "context"))
        assert sizes["model", "block"] >= sizes["model", "none"]

    def test_nothing_fits(self) -> None:
        found = within(WORK, PLAN, TARGET, memory_gb=1)
        assert [row.size for row in found.rows if row.what == "batch"] == [0, 0, 0]

    def test_by_default_the_devices_memory(self) -> None:
        assert within(WORK, PLAN, TARGET).limit_bytes == pytest.approx(0.98 * 80e9)

    def test_a_plan_that_does_not_fit(self) -> None:
        with pytest.raises(MoestroError, match="does not divide"):
            within(WORK, Plan(tp=3), TARGET)
