"""TeleChat3: the published dry run and pipeline outputs, checks that can fail, and (slow) the whole row."""

from dataclasses import replace

import pytest

from moestro.predict.dry_run import fit_dry_run
from papers import telechat3, telechat3_pipeline
from papers.telechat3 import MB, PEAKS_MB, STAGES, Subset
from papers.telechat3_pipeline import CASES


class TestMemory:
    def test_the_worked_example(self) -> None:
        found = fit_dry_run(telechat3.dry_run(STAGES), [peak * MB for peak in PEAKS_MB], comes_back=False)
        kinds = [found.activation_bytes[kind] for kind in ("none", "selective", "comm", "both")]
        numbers = (found.constant_bytes, found.layer_bytes, *kinds)
        assert [round(value / MB) for value in numbers] == pytest.approx([1207, 2218, 1003, 783, 696, 423], abs=1)
        assert found.end_bytes["first"] == pytest.approx(3408 * MB, rel=0.001)
        assert found.end_bytes["last"] == pytest.approx(4679 * MB, rel=0.001)
        assert max(map(abs, found.residuals)) == pytest.approx(0.045, abs=0.001)
        assert telechat3.check_fit(found).verdict == "holds"
        assert telechat3.check_fit(replace(found, residuals=(0.03,) * 16)).verdict == "holds in part"
        assert telechat3.check_in_flight(found).verdict == "arithmetic does not close"

    def test_what_comes_back(self) -> None:
        found = fit_dry_run(telechat3.dry_run(STAGES), [peak * MB for peak in PEAKS_MB], comes_back=False)
        check = telechat3.check_comes_back(found)
        assert (check.verdict, "3.2% at worst" in check.ours) == ("holds in part", True)
        assert telechat3.check_comes_back(replace(found, residuals=(0.03,) * 16)).verdict == "holds in part"
        assert telechat3.check_comes_back(replace(found, residuals=(0.001,) * 16)).verdict == "does not hold"

    def test_the_loop(self) -> None:
        assert telechat3.check_loop().verdict == "holds"

    def test_layers_of_the_example(self) -> None:
        probes = telechat3.dry_run(STAGES)
        assert sum(sum(probe.layers.values()) for probe in probes) == 96
        assert min(min(probe.layers.values()) for probe in probes) >= 0

    def test_too_few_stages(self, monkeypatch: pytest.MonkeyPatch) -> None:
        poor = [Subset(1e3, 0.09), Subset(1e5, 41.6), Subset(10, 0.03)]
        good = [Subset(10, 0.03), Subset(20, 0.02)]
        assert telechat3.check_exact(poor).verdict == "does not hold"
        assert telechat3.check_exact(good).verdict == "holds"
        told_apart, not_told = [*good, *poor[:2]], [Subset(10, 50.0), *poor[:2]]
        assert telechat3.check_refusal(told_apart, told_apart).verdict == "holds"
        assert telechat3.check_refusal(told_apart, not_told).verdict == "holds in part"
        assert telechat3.check_refusal(not_told, not_told).verdict == "does not hold"

    def test_equal_offsets(self) -> None:
        assert telechat3.check_equal_offsets().verdict == "holds"


class TestPipeline:
    def test_published_outputs(self) -> None:
        assert telechat3_pipeline.check_ideal().verdict == "holds"
        assert telechat3_pipeline.check_peaks().verdict == "holds"
        assert telechat3_pipeline.check_interleaved_peaks().verdict == "holds in part"
        assert "19, 18, 17, 11.2 in Megatron's order; 18, 18, 17, 11.2" in (
            telechat3_pipeline.check_interleaved_peaks().ours
        )
        assert "The published ones are those" in telechat3_pipeline.check_interleaved_peaks().note
        assert telechat3_pipeline.check_totals().verdict == "holds"

    def test_total_by_hand(self) -> None:
        """The last stage is busy throughout, and the first micro-batch comes and goes through the others."""
        case = CASES["4 stages"]
        assert telechat3_pipeline.bubble(case, case.stages) == pytest.approx((16 * 8.8 + 3 * 8) / (16 * 8.2) - 1)

    @pytest.mark.parametrize(
        ("check", "change"),
        [
            ("check_ideal", {"ideal": 0.2}),
            ("check_peaks", {"peaks": (32, 24, 16, 9)}),
            ("check_totals", {"total": 0.5}),
        ],
    )
    def test_other_outputs_do_not_hold(
        self, check: str, change: dict[str, object], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        name = "4 stages"
        for cases in (CASES, telechat3_pipeline.GIVEN):
            monkeypatch.setitem(cases, name, replace(CASES[name], **change))  # type: ignore[arg-type]
        assert getattr(telechat3_pipeline, check)().verdict != "holds"


@pytest.mark.slow
def test_whole_row() -> None:
    result = telechat3.run(lambda done, total, what: None)
    assert result.checks[0].verdict == "holds"
    assert result.checks[1].verdict == "does not hold"
    assert result.checks[2].verdict == "holds"
