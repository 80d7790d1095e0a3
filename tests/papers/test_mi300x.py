"""MI300X: the checks hold or not as the figures say, and (slow) the whole row with the curves of collectives."""

from dataclasses import replace

import pytest

from moestro.hardware.catalog import load_device
from moestro.hardware.figures import Figure
from papers import mi300x, mi300x_links
from papers.mi300x import PUBLISHED, Shares

TIMES = {"mi300x": {2: 26.0, 4: 14.0, 8: 7.5}, "h100-sxm": {2: 3.7, 4: 5.1, 8: 5.3}}


class TestShares:
    def test_order(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert mi300x.check_order().verdict == "holds"
        real = mi300x.other_shares
        monkeypatch.setattr(mi300x, "other_shares", lambda name: replace(real(name), memory=0.85))
        assert mi300x.check_order().verdict == "holds in part"

    def test_matrix_rate_is_not_the_papers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        check = mi300x.check_own_shares()
        assert check.verdict == "holds in part"
        assert check.ours.startswith("51% / 82% / 70%; +13.6%")
        monkeypatch.setitem(PUBLISHED, "mi300x", Shares(0.51, 0.81, 0.70))
        assert mi300x.check_own_shares().verdict == "holds"

    def test_the_papers_own_figures_do_not_confirm_it(self) -> None:
        with pytest.raises(ValueError, match="besides the paper's"):
            mi300x.share_of(load_device("mi300x").peak_tflops["fp16"])


class TestSteps:
    def test_compute_and_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert mi300x.step_ratios() == pytest.approx((0.661, 1.424), abs=1e-3)
        assert mi300x.check_bound_steps().verdict == "holds"
        monkeypatch.setitem(PUBLISHED, "mi300x", Shares(0.9, 0.81, 0.70))
        assert mi300x.check_bound_steps().verdict == "holds in part"

    def test_serving_is_not_explained(self, monkeypatch: pytest.MonkeyPatch) -> None:
        check = mi300x.check_unexplained()
        assert check.verdict == "holds in part"
        assert "2.2 to 3.8 times slower" in check.note
        monkeypatch.setattr(mi300x, "SERVING", (0.37, 0.60))
        assert mi300x.check_unexplained().verdict == "does not hold"
        monkeypatch.setattr(mi300x, "SERVING", (0.7, 1.4))
        assert mi300x.check_unexplained().verdict == "holds"

    def test_roofline_of_a_node(self) -> None:
        device = load_device("mi300x")
        assert mi300x.roofline_tokens_per_s(device, 1) == pytest.approx(8 * 4330 / 405)
        assert mi300x.roofline_tokens_per_s(device, 10_000) == pytest.approx(8 * 1176.8e12 / 810e9)

    @pytest.mark.parametrize("rates", [{1: 90}, {1: 50}, {256: 1700}])
    def test_rates_that_cannot_be(self, rates: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
        assert mi300x.check_served().verdict == "holds"
        monkeypatch.setattr(mi300x, "SERVED", mi300x.SERVED | rates)
        assert mi300x.check_served().verdict == "holds in part"


class TestLinks:
    def test_ceilings(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert mi300x_links.check_ceilings().verdict == "holds"
        monkeypatch.setattr(mi300x_links, "EXPECTED", 0.9)
        assert mi300x_links.check_ceilings().verdict == "holds in part"

    def test_sums_of_links_are_not_measurements(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert mi300x_links.check_not_measured().verdict == "arithmetic does not close"
        monkeypatch.setattr(mi300x_links, "ALL_REDUCE_GBPS", {2: 47.9, 4: 140.0, 8: 315.0})
        assert mi300x_links.check_not_measured().verdict == "holds"

    def test_repository(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert mi300x_links.check_repository().verdict == "arithmetic does not close"
        monkeypatch.setattr(mi300x_links, "REPOSITORY_GBPS", (178.8, 312.9))
        assert mi300x_links.check_repository().verdict == "holds"

    @pytest.mark.parametrize(
        ("device", "times"), [("mi300x", {2: 7.0, 4: 14.0, 8: 7.5}), ("h100-sxm", {2: 6.0, 4: 5.1, 8: 5.3})]
    )
    def test_groups(self, device: str, times: dict[int, float]) -> None:
        assert mi300x_links.check_groups(TIMES).verdict == "holds"
        assert mi300x_links.check_groups(TIMES | {device: times}).verdict == "holds in part"


class TestCatalog:
    def test_holds(self) -> None:
        check = mi300x.check_catalog()
        assert check.verdict == "holds"
        assert "refused" in check.note

    def test_figures_are_found_however_deep(self) -> None:
        device = load_device("mi300x")
        found = list(mi300x.figures_in(device))
        assert any(f is device.links[0].peer_gbps for f in found)
        assert any(f is device.peak_tflops["bf16"] for f in found)

    def test_a_figure_above_its_nominal_is_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        wrong = Figure.model_construct(nominal=448.0, achieved=3468.0)
        monkeypatch.setattr(mi300x, "figures_in", lambda entry: iter([wrong]))
        assert mi300x.check_catalog().verdict == "holds in part"


@pytest.mark.slow
def test_whole_row() -> None:
    result = mi300x.run(lambda done, total, what: None)
    verdicts = [check.verdict for check in result.checks]
    assert verdicts.count("arithmetic does not close") == 2
    assert verdicts.count("holds in part") == 2
    assert verdicts.count("holds") == 6
    assert len(result.figures) == 6
