"""Cores in memory: fixed-point numbers by hand, checks that can fail, and (slow) the whole row."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from moestro.hardware.catalog import load_device
from papers import pim_ml, pim_ml_fixed_point
from papers.pim_ml_fixed_point import FLOAT, INT8, INT8_WIDE, INT32, SigmoidTable, gradient, make_rows, quantized
from papers.pim_ml_records import KMEANS, SCALED_TREES, TREES


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class TestSigmoidTable:
    def test_middle_ends_and_mirror(self) -> None:
        table = SigmoidTable(10, 20)
        x = torch.tensor([0, 1024, -1024, 20 * 1024, 10**6, -(10**6)], dtype=torch.int32)
        assert table(x).tolist() == [512, 749, 275, 1024, 1024, 0]  # 1024 / (1 + 1/e) = 748.6
        assert table.bytes == 2 * (20 * 1024 + 1)

    @pytest.mark.parametrize(("shift", "boundary"), [(8, 20), (10, 4)])
    def test_coarse_or_short_tables_are_worse(self, shift: int, boundary: int) -> None:
        assert pim_ml_fixed_point.table_error(shift, boundary) > 2**-10


class TestGradient:
    def test_one_row_by_hand(self) -> None:
        rows, _ = make_rows(0, 1)
        rows = replace(rows, x=torch.ones_like(rows.x), y=torch.ones(1, dtype=torch.int32))
        found = gradient(rows, torch.zeros(16), INT32, 1)  # sigmoid(0) - 1 = -1/2 for each feature
        assert found.tolist() == [-0.5] * 16

    def test_cut_products_are_low_by_half_a_step(self) -> None:
        rows, _ = make_rows(1, 4096)
        model = torch.linspace(-1, 1, 16)
        exact = gradient(rows, model, FLOAT, 1).double()
        bias = (gradient(rows, model, INT8, 8).double() - exact).mean().item()
        assert bias == pytest.approx(-0.5 / 2**INT8.feature_shift, rel=0.1)
        assert gradient(rows, model, INT8_WIDE, 8).double() == pytest.approx(exact, abs=2e-3)

    def test_quantized_is_clamped(self) -> None:
        assert quantized(torch.tensor([-9.0, 0.26, 9.0]), 5, 8).tolist() == [-128, 8, 127]


class TestRecords:
    def test_speed_ups_hold_in_part(self) -> None:
        check = pim_ml.check_speed_ups(KMEANS[2040], TREES[2524])
        assert check.verdict == "holds in part"
        assert "1.68 × fit, 0.93 × with preparation" in check.ours
        assert pim_ml.check_speed_ups(KMEANS[256], TREES[2524]).verdict == "holds in part"
        quick = replace(KMEANS[2040], preparation_s=6.4)
        assert pim_ml.check_speed_ups(quick, TREES[2524]).verdict == "holds"

    def test_decision_needs_the_preparation(self) -> None:
        assert pim_ml.check_decision(KMEANS[2040]).verdict == "holds"
        assert pim_ml.check_decision(replace(KMEANS[2040], preparation_s=6.4)).verdict == "does not hold"
        assert pim_ml.check_decision(KMEANS[1024]).verdict == "holds"
        assert pim_ml.check_decision(KMEANS[256]).verdict == "does not hold"  # slower by the kernel too

    def test_kernel(self) -> None:
        assert pim_ml.check_kernel(KMEANS).verdict == "holds"
        slow = KMEANS | {1024: replace(KMEANS[1024], kernel_s=2.6)}
        assert pim_ml.check_kernel(slow).verdict == "holds in part"

    def test_total_turns(self) -> None:
        check = pim_ml.check_total(TREES, SCALED_TREES)
        assert check.verdict == "holds in part"  # the line of the synthetic trees is 14 % off
        assert "best at 1,182 cores" in check.ours
        falling = TREES | {2524: replace(TREES[2524], total_s=5.0)}
        assert pim_ml.check_total(falling, SCALED_TREES).verdict == "does not hold"


class TestCatalog:
    def test_types(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert pim_ml.check_types(load_device("upmem")).verdict == "holds"
        monkeypatch.setattr(pim_ml, "core_rate", lambda device, dtype: 1e9)
        assert pim_ml.check_types(load_device("upmem")).verdict == "does not hold"

    def test_rate_of_a_core(self) -> None:
        device = load_device("upmem")
        assert pim_ml.core_rate(device, "int8") == pytest.approx(0.0075e12 / 128 / 4)
        assert pim_ml.core_rate(device, "int8") / pim_ml.core_rate(device, "fp32") == pytest.approx(
            (2 * 11.9 + 2 * 30.7) / 4
        )


class TestSimulated:
    def test_table(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert pim_ml.check_table().verdict == "holds"
        monkeypatch.setattr(pim_ml, "table_error", lambda shift, boundary=20: 2**-9)
        assert pim_ml.check_table().verdict == "does not hold"

    def test_host_sum(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pim_ml, "CUTS", (1, 64))
        moved = {numbers.name: pim_ml.moved_by_cuts(numbers) for numbers in (FLOAT, *pim_ml_fixed_point.INTEGERS)}
        assert pim_ml.check_host_sum(moved).verdict == "holds"
        assert pim_ml.check_host_sum(moved | {"int8": 1e-6}).verdict == "holds in part"

    def test_accuracy(self) -> None:
        rows = [{"fp32": 0.8, "int32": 0.801, "int8": 0.78, "int8, whole sums": 0.795}]
        assert pim_ml.check_accuracy(rows).verdict == "holds in part"
        assert pim_ml.check_accuracy([rows[0] | {"int8": 0.805}]).verdict == "holds"

    def test_training_learns_and_overflow_shows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pim_ml_fixed_point, "STEPS", 60)
        rows, test = make_rows(0, 2048)
        score = {}
        for numbers in (FLOAT, INT32, INT8_WIDE, replace(INT32, name="overflow", feature_shift=15, weight_shift=15)):
            score[numbers.name] = pim_ml_fixed_point.accuracy(pim_ml_fixed_point.train(rows, numbers), test)
        assert score["fp32"] > 0.75
        assert abs(score["int32"] - score["fp32"]) <= 0.01
        assert abs(score["int8, whole sums"] - score["fp32"]) <= 0.01
        assert score["overflow"] < score["fp32"] - 0.02


@pytest.mark.slow
def test_whole_row() -> None:
    result = pim_ml.run(lambda done, total, what: None)
    part = {0, 3, 5}
    assert [c.verdict for c in result.checks] == ["holds in part" if i in part else "holds" for i in range(8)]
    assert len(result.figures) == 12
