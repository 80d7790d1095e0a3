from pathlib import Path

import numpy as np
import pytest

from moestro.hardware.curves.tiles import TileModel
from moestro.hardware.profile import Sample
from papers import microbench_exact as exact
from papers import microbench_models as models
from papers.microbench_models import Roofline

TRUE = Roofline(30e9, 15e9, 3e-6)
SHEET = Roofline(60e9, 200e9)


def products(law: Roofline = TRUE, noisy: float = 0.0) -> list[Sample]:
    """The measured products with times by a law; a share of them noisy."""
    made = []
    for i, (m, n, k) in enumerate(models.shapes()):
        case = {"m": m, "n": n, "k": k, "dtype": "fp32"}
        sample = Sample(
            op="gemm", case=case, median_s=1.0, flops=2.0 * m * n * k, bytes_moved=4.0 * (m * k + k * n + m * n)
        )
        seconds = float(law.seconds([sample])[0])
        made.append(sample.model_copy(update={"median_s": 2 * seconds, "low_s": seconds, "noisy": i < noisy * 48}))
    return made


def copies(seconds, noisy: bool = False) -> list[Sample]:  # type: ignore[no-untyped-def]
    return [
        Sample(op="copy", case={"bytes": size}, median_s=seconds(2.0 * size), bytes_moved=2.0 * size, noisy=noisy)
        for size in models.COPIES
    ]


class TestHeldOut:
    def test_a_law_of_its_form_is_found(self) -> None:
        found = models.fit_calibrated(models.halves(products())[0])
        assert found.flops_per_s == pytest.approx(30e9, rel=0.05)
        assert found.bytes_per_s == pytest.approx(15e9, rel=0.05)
        assert found.fixed_s == pytest.approx(3e-6, rel=0.05)
        assert models.check_held_out(products(), SHEET, 0.0).verdict == "holds"
        assert models.check_classes(products()).verdict == "holds"

    def test_halves_share_no_product(self) -> None:
        seen, unseen = models.halves(products())
        cases = [str(s.case) for s in (*seen, *unseen)]
        assert len(seen) == len(unseen) == 24
        assert len(set(cases)) == 48
        assert all(s.median_s == s.low_s for s in seen)

    def test_nothing_is_claimed_on_a_busy_machine(self) -> None:
        check = models.check_held_out(products(noisy=0.5), SHEET, 5.0)
        assert check.verdict == "not reproducible here"
        assert "busy" in check.note
        assert models.check_held_out(products(noisy=0.1), SHEET, 5.0).verdict == "holds"

    def test_a_data_sheet_that_is_right_is_not_beaten(self) -> None:
        assert models.check_held_out(products(), TRUE, 0.0).verdict == "holds in part"

    def test_times_without_a_law(self) -> None:
        scatter = np.exp(np.random.default_rng(0).normal(0, 2, 48))
        samples = [s.model_copy(update={"low_s": 1e-4 * x}) for s, x in zip(products(), scatter, strict=True)]
        assert models.check_held_out(samples, Roofline(1e5, 1e9), 0.0).verdict != "holds"
        assert models.check_classes(samples).verdict == "does not hold"

    def test_classes(self) -> None:
        samples = [
            Sample(op="gemm", case={}, median_s=1.0, flops=flops, bytes_moved=moved)
            for flops, moved in ((300.0, 1.0), (1.0, 300.0), (30.0, 15.0))
        ]
        assert Roofline(30.0, 15.0).classes(samples) == ["compute", "memory", "balanced"]


class TestDataSheet:
    def test_clock_times_operations(self, tmp_path: Path) -> None:
        path = tmp_path / "cpuinfo"
        path.write_text("cpu MHz\t\t: 1500.0\ncpu MHz\t\t: 2000.0\nflags\t\t: fma avx2\n")
        assert models.data_sheet(path) == Roofline(64e9, 204.8e9)
        path.write_text("cpu MHz\t\t: 2000.0\nflags\t\t: avx2 avx512f\n")
        assert models.data_sheet(path).flops_per_s == 128e9

    def test_without_cpuinfo(self, tmp_path: Path) -> None:
        assert models.data_sheet(tmp_path / "none").flops_per_s == pytest.approx(2450e6 * 32)


class TestWorkingSet:
    def test_its_own_form_holds(self) -> None:
        law = (5e9, 30e9, 2.0**22, 2e-6)
        samples = copies(lambda moved: float(models.working_set_seconds(law, np.array(moved))))
        assert models.check_working_set(samples).verdict == "holds"
        busy = [s.model_copy(update={"noisy": True}) for s in samples]
        assert models.check_working_set(busy).verdict == "not reproducible here"

    def test_another_form_does_not(self) -> None:
        def seconds(moved: float) -> float:
            return moved / (20e9 if int(np.log2(moved)) % 4 < 2 else 2e9)

        assert models.check_working_set(copies(seconds)).verdict != "holds"


class TestArithmetic:
    @pytest.mark.parametrize(
        "check", [exact.check_sustained, exact.check_sheet_of_row, exact.check_overall, exact.check_units]
    )
    def test_does_not_close(self, check) -> None:  # type: ignore[no-untyped-def]
        assert check().verdict == "arithmetic does not close"

    def test_the_figures_are_those_of_the_card(self) -> None:
        assert "2,145 TFLOP/s" in exact.check_sustained().ours
        assert "4.6% if it is FP16 or 52.3% if it is FP8" in exact.check_sheet_of_row().ours

    def test_figures_that_would_close(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(exact, "OVERALL", 0.07)
        assert exact.check_overall().verdict == "holds"
        monkeypatch.setattr(exact, "SIDE_S", 7e-3)
        assert exact.check_sustained().verdict == "holds"
        monkeypatch.setattr(exact, "SIDE_S", 0.1)
        assert exact.check_sheet_of_row().verdict == "holds"
        monkeypatch.setattr(exact, "B200_UNITS", 148)
        monkeypatch.setattr(exact, "B200_CACHE_MB", 126)
        assert exact.check_units().verdict == "holds"


class TestPublicRecords:
    def test_sheet(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert exact.check_sheet().verdict == "does not hold"
        slow = tuple(s.model_copy(update={"median_s": 100 * s.median_s}) for s in exact.records("b200", "bf16"))
        monkeypatch.setattr(exact, "records", lambda device, dtype: slow)
        assert exact.check_sheet().verdict == "holds"

    def test_ported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(exact, "DTYPES", ("bf16",))
        assert exact.check_ported().verdict == "holds in part"

    def test_ported_needs_errors_that_are_small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(exact, "DTYPES", ("bf16",))
        few = {device: exact.records(device, "bf16")[:40] for device in ("h200-sxm", "b200")}
        monkeypatch.setattr(exact, "records", lambda device, dtype: few[device])
        monkeypatch.setattr(exact, "errors", lambda predicted, samples: np.full(3, 0.2))
        assert exact.check_ported().verdict == "does not hold"
        monkeypatch.setattr(exact, "errors", lambda predicted, samples: np.full(3, 0.05))
        assert exact.check_ported().verdict == "holds"

    @pytest.mark.parametrize(("with_waves", "verdict"), [(0.05, "holds"), (0.2, "does not hold")])
    def test_waves(self, monkeypatch: pytest.MonkeyPatch, with_waves: float, verdict: str) -> None:
        monkeypatch.setattr(exact, "tile_error", lambda device, dtype, waves: with_waves if waves else 0.1)
        assert exact.check_waves().verdict == verdict

    def test_waves_are_seen_where_there_are_some(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Times that are made with waves are predicted better with them."""
        law = TileModel(8e14, 3e-6, 4e12, 0.01, 1.0, "128x128", 132, 2)
        sizes = np.exp(np.random.default_rng(0).uniform(np.log(256), np.log(4096), (80, 3))).round()
        rows = tuple(
            Sample(op="gemm", case={"m": m, "n": n, "k": k}, median_s=law.seconds(m, n, k))
            for m, n, k in sizes.tolist()
        )
        monkeypatch.setattr(exact, "records", lambda device, dtype: rows)
        with_waves, without = (exact.tile_error("h100-sxm", "bf16", waves) for waves in (True, False))
        assert with_waves < 0.02 < without


@pytest.mark.slow
def test_whole_paper() -> None:
    result = models.run(lambda done, total, what: None)
    assert [check.verdict for check in result.checks[-4:]] == ["arithmetic does not close"] * 4
    assert result.checks[3].verdict == "does not hold"
    assert all(
        check.verdict in ("holds", "holds in part", "does not hold", "not reproducible here")
        for check in result.checks[:3]
    )
    assert 0 < result.figures["fitted GFLOP/s"] < 1e4
