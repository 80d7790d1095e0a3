"""Jobs in phases: sums, maxima, the best number of units, and fits."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.errors import MoestroError
from moestro.hardware.phases import TERMS, Phase, PhasedJob, Term, fit_phase

KERNEL = Phase("kernel", divided_s=100.0)
TRANSFER = Phase("transfer", fixed_s=1.0, per_unit_s=0.25)


class TestPhase:
    def test_each_term_counts(self) -> None:
        assert Phase("all", 2.0, 12.0, 0.5).seconds(4) == 2 + 3 + 2

    @pytest.mark.parametrize("units", [0, -1])
    def test_no_units(self, units: int) -> None:
        with pytest.raises(MoestroError, match=f"kernel: a job needs at least one unit, not {units}"):
            KERNEL.seconds(units)


class TestPhasedJob:
    def test_one_after_the_other(self) -> None:
        assert PhasedJob((KERNEL, TRANSFER)).seconds(10) == 10 + 3.5

    def test_at_once(self) -> None:
        assert PhasedJob((KERNEL, TRANSFER), overlapped=True).seconds(10) == 10
        assert PhasedJob((KERNEL, TRANSFER), overlapped=True).seconds(100) == 26

    def test_phases_by_name(self) -> None:
        assert PhasedJob((KERNEL, TRANSFER)).phase_seconds(10) == {"kernel": 10, "transfer": 3.5}

    def test_more_units_do_not_always_help(self) -> None:
        job = PhasedJob((KERNEL, TRANSFER))  # the sum is smallest at the root of 100 / 0.25
        assert job.best_units(1000) == 20
        assert job.best_units(7) == 7
        assert PhasedJob((KERNEL,)).best_units(50) == 50
        assert PhasedJob((Phase("host", fixed_s=1.0),)).best_units(50) == 1


class TestFit:
    @given(st.tuples(*[st.floats(0.01, 100)] * 3), st.sampled_from([TERMS, ("divided",), ("fixed", "per_unit")]))
    def test_recovers_what_it_was_made_of(self, values: tuple[float, ...], terms: Sequence[Term]) -> None:
        kept = dict(zip(TERMS, values, strict=True))
        truth = Phase("p", *(kept[term] if term in terms else 0.0 for term in TERMS))
        units = [1, 3, 10, 30, 100]
        fitted = fit_phase("p", units, [truth.seconds(n) for n in units], terms)
        assert [fitted.seconds(n) for n in (2, 50, 400)] == pytest.approx([truth.seconds(n) for n in (2, 50, 400)])

    def test_no_term_is_negative(self) -> None:
        fitted = fit_phase("p", [1, 2, 4], [10.0, 5.0, 1.0])
        assert min(fitted.fixed_s, fitted.divided_s, fitted.per_unit_s) >= 0

    @pytest.mark.parametrize(
        ("units", "seconds"),
        [([1, 2], [1.0, 2.0]), ([1, 2, 3], [1.0, 2.0]), ([1, 2, 3], [1.0, 0.0, 2.0]), ([0, 2, 3], [1.0, 1.0, 2.0]),
         ([1, 2, 3], [1.0, float("nan"), 2.0]), ([1, 2, 3], [1.0, float("inf"), 2.0])],
    )  # fmt: skip
    def test_samples_that_fix_nothing(self, units: list[int], seconds: list[float]) -> None:
        with pytest.raises(MoestroError, match="p: "):
            fit_phase("p", units, seconds)
