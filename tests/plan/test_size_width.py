"""Widths of experts and laws of learning rates."""

from math import exp, log
from pathlib import Path

import numpy as np
import pytest
from predict.test_predict import h100

from moestro.config.model import ModelConfig
from moestro.config.moe import MoEConfig, RouterConfig
from moestro.config.plan import Plan, Workload
from moestro.errors import MoestroError
from moestro.plan.rates import MM1, best_rates, fit_rates, read_rates
from moestro.plan.width import Widths, choose_width, decode

TARGET = h100()
MODEL = ModelConfig(
    vocab_size=32_000,
    hidden_size=1024,
    num_layers=4,
    num_heads=8,
    max_seq_len=2048,
    moe=MoEConfig(num_experts=8, top_k=1, expert_hidden_size=4096, router=RouterConfig(renormalize=False)),
)
WORK = Workload(model=MODEL, seq_len=2048, global_batch_size=4)


def widths(limit: float | None = None) -> Widths:
    return choose_width(WORK, Plan(), TARGET, batch=16, context=2048, most_decode_s=limit)


class TestWidths:
    def test_active_parameters_stay(self) -> None:
        """But for the routers."""
        found = widths().choices
        assert len({(one.experts, one.top_k, one.width) for one in found}) == len(found)
        for one in found:
            assert one.top_k * one.width == 4096
            assert one.active_params == pytest.approx(found[0].active_params, rel=0.02)

    def test_granularity_costs_what_the_paper_computes(self) -> None:
        """Ranks of 8 that a token reaches: 1 for 8 experts top-1, 5.43 for 64 top-8 (arXiv 2506.02890)."""
        reached = {(one.experts, one.top_k): one.ranks_reached for one in widths().choices if one.total_params}
        assert reached[8, 1] == pytest.approx(1.0)
        assert {(one.experts, one.top_k): one for one in widths().choices}[8, 1].dispatch_bytes == 2 * 2 * 1024
        two = choose_width(_with(num_experts=16, top_k=2, expert_hidden_size=2048), Plan(), TARGET).choices
        fine = {(one.experts, one.top_k): one.ranks_reached for one in two}
        assert fine[64, 8] == pytest.approx(5.43, abs=0.01)

    def test_finer_experts_train_slower_and_more_parameters_decode_later(self) -> None:
        by_size = {(one.experts, one.top_k): one for one in widths().choices}
        assert by_size[8, 1].tokens_per_s > by_size[32, 4].tokens_per_s
        assert by_size[4, 1].decode_s < by_size[8, 1].decode_s < by_size[16, 1].decode_s

    def test_best_are_beaten_by_none(self) -> None:
        found = widths().choices
        assert any(one.best for one in found)
        assert not all(one.best for one in found)
        for one in (choice for choice in found if choice.best):
            for other in found:
                better = (
                    other.total_params > 1.01 * one.total_params
                    or other.tokens_per_s > 1.01 * one.tokens_per_s
                    or other.decode_s < one.decode_s / 1.01
                )
                worse = (
                    other.total_params < 0.99 * one.total_params
                    or other.tokens_per_s < 0.99 * one.tokens_per_s
                    or other.decode_s > one.decode_s / 0.99
                )
                assert worse or not better

    def test_a_limit_that_nothing_meets(self) -> None:
        found = widths(1e-9)
        assert found.chosen is None
        assert "the soonest takes" in found.why
        assert widths(1.0).chosen == widths().chosen

    def test_decoding_is_above_the_floor_and_touches_few(self) -> None:
        seconds, touched = decode(WORK, TARGET, 1, 2048)
        assert touched == pytest.approx(1.0)
        assert seconds < decode(WORK, TARGET, 256, 2048)[0]
        gbps = TARGET.place.device.memory.gbps.nominal
        assert gbps is not None
        experts = 2.0 * 4 * 3 * 1024 * 4096
        assert seconds > experts / (gbps * 1e9)

    @pytest.mark.parametrize("moe", [None, MoEConfig(num_experts=8, top_k=(2, 3, 2, 3), expert_hidden_size=512)])
    def test_refuses(self, moe: MoEConfig | None) -> None:
        model = ModelConfig(**{**dict(MODEL), "moe": moe, "intermediate_size": 4096})
        with pytest.raises(MoestroError, match="widths are chosen for"):
            choose_width(WORK.model_copy(update={"model": model}), Plan(), TARGET)


def _with(**changes: int) -> Workload:
    model = ModelConfig(**{**dict(MODEL), "moe": MoEConfig(**changes)})
    return WORK.model_copy(update={"model": model})


class TestRates:
    def test_a_line_is_found_again(self) -> None:
        slope, intercept = MM1
        points = [(size, exp(slope * log(size) + intercept)) for size in (9e6, 85e6, 302e6, 1.2e9)]
        law = fit_rates(points)
        assert (law.slope, law.intercept) == pytest.approx(MM1)
        for size, used in ((3e9, 6e-5), (7e9, 4e-5), (30e9, 2e-5)):
            rate = law.at(size)
            assert rate.lr == pytest.approx(used, rel=0.15)
            assert rate.low == pytest.approx(rate.lr)
            assert rate.weight_decay == pytest.approx(0.1 * rate.lr)
            assert rate.beyond == pytest.approx(size / 1.2e9)

    def test_the_interval_holds_four_of_five(self) -> None:
        rng, sizes = np.random.default_rng(0), (1e7, 3e7, 1e8, 3e8, 1e9)
        inside = 0
        for _ in range(400):
            points = [(n, n**-0.4 * exp(rng.normal(0, 0.1))) for n in sizes]
            rate = fit_rates(points).at(1e10)
            inside += rate.low <= 1e10**-0.4 * exp(rng.normal(0, 0.1)) <= rate.high
        assert inside / 400 == pytest.approx(0.8, abs=0.06)

    def test_farther_is_wider(self) -> None:
        law = fit_rates([(1e7, 1e-3), (1e8, 5e-4), (1e9, 1.5e-4)])
        assert law.at(1e11).high / law.at(1e11).low > law.at(1e9).high / law.at(1e9).low > 1

    @pytest.mark.parametrize("points", [[], [(1e7, 1e-3)], [(1e7, 1e-3), (1e8, 5e-4)], [(1e7, 1e-3)] * 5])
    def test_two_sizes_are_no_law(self, points: list[tuple[float, float]]) -> None:
        with pytest.raises(MoestroError, match="too few"):
            fit_rates(points)

    @pytest.mark.parametrize("bad", [(0.0, 1e-3), (1e7, -1e-3), (1e7, float("nan"))])
    def test_numbers_that_are_none(self, bad: tuple[float, float]) -> None:
        with pytest.raises(MoestroError, match="above zero"):
            fit_rates([bad, (1e8, 1e-3), (1e9, 1e-3), (1e10, 1e-3)])

    def test_a_grids_best_is_between_its_rates(self) -> None:
        best = 3e-4
        rates = [best * 2.0 ** (step + 0.3) for step in range(-3, 4)]
        grid = {1e8: [(rate, 2.0 + 0.05 * log(rate / best) ** 2) for rate in rates]}
        (point,), notes = best_rates(grid)
        assert point == (1e8, pytest.approx(best))
        assert notes == []

    def test_a_lowest_loss_at_the_end_is_left_out(self) -> None:
        points, (note,) = best_rates({1e8: [(1e-4, 3.0), (2e-4, 2.9), (4e-4, 2.8)]})
        assert points == []
        assert "at the end" in note

    def test_reads_a_table(self, tmp_path: Path) -> None:
        path = tmp_path / "rates.csv"
        path.write_text("params,lr\n1e7,1e-3\n1e8,4e-4\n")
        assert read_rates(path) == ([(1e7, 1e-3), (1e8, 4e-4)], [])
        path.write_text("params,lr,loss\n1e7,1e-3,3\n1e7,2e-3,2.9\n1e7,4e-3,3\n")
        assert read_rates(path)[0] == [(1e7, pytest.approx(2e-3))]

    @pytest.mark.parametrize(("text", "match"), [("size,lr\n1,2\n", "line of names"), ("params,lr\n1,x\n", "line 2")])
    def test_a_table_that_is_none(self, tmp_path: Path, text: str, match: str) -> None:
        path = tmp_path / "rates.csv"
        path.write_text(text)
        with pytest.raises(MoestroError, match=match):
            read_rates(path)
