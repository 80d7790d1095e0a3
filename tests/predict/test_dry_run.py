"""Memory from dry runs: numbers come back, and probe sets that cannot give them are refused with what they lack."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.errors import MoestroError
from moestro.predict.dry_run import (
    MOST_CONDITION,
    Probe,
    StageMemory,
    conditioning,
    equations,
    fit_dry_run,
    kinds_of,
    leave_one_out,
    probes_to_add,
)

TRUTH = StageMemory(1200e6, 2200e6, {"none": 1000e6, "full": 400e6}, {"first": 3400e6, "last": 4700e6}, 4, 1.0)
PROBES = [
    Probe({"none": 4}, 8, "first"),
    Probe({"none": 6}, 7),
    Probe({"none": 1, "full": 1}, 6),
    Probe({"full": 6}, 5),
    Probe({"none": 2}, 4),
    Probe({"none": 3, "full": 5}, 3),
    Probe({"none": 8}, 2),
    Probe({"none": 4}, 1, "last"),
]


def peaks(probes: list[Probe], truth: StageMemory = TRUTH) -> list[float]:
    return [truth.peak_bytes(probe) for probe in probes]


class TestFit:
    def test_numbers_come_back(self) -> None:
        found = fit_dry_run(PROBES, peaks(PROBES))
        assert found.constant_bytes == pytest.approx(TRUTH.constant_bytes)
        assert found.layer_bytes == pytest.approx(TRUTH.layer_bytes)
        assert found.activation_bytes == pytest.approx(TRUTH.activation_bytes)
        assert found.end_bytes == pytest.approx({"first": 3400e6, "last": 4700e6})
        assert found.residuals == pytest.approx([0] * len(PROBES), abs=1e-9)
        assert found.rank == 4
        assert 1 < found.condition <= MOST_CONDITION

    def test_by_hand(self) -> None:
        """1.2 GB, four layers of 2.2 and of 8 micro-batches of 1, and the embedding."""
        assert TRUTH.peak_bytes(PROBES[0]) == pytest.approx((1.2 + 4 * 2.2 + 8 * 4 * 1.0 + 3.4) * 1e9)

    def test_equations_by_hand(self) -> None:
        """A stage that recomputes all three layers has one of them back; one with a whole layer has room."""
        stages = [Probe({"full": 3}, 4), Probe({"none": 1, "full": 3}, 4)]
        assert equations(stages, ("none", "full")).tolist() == [[1, 3, 1, 11], [1, 4, 4, 12]]
        assert equations(stages, ("none", "full"), comes_back=False).tolist() == [[1, 3, 0, 12], [1, 4, 4, 12]]
        assert equations(stages[:1], ("full",)).tolist() == [[1, 3, 12]]

    def test_repeats_are_no_spare(self) -> None:
        """Five stages for four unknowns, of which two are the same."""
        enough = [*PROBES[1:5], PROBES[5]]
        fit_dry_run(enough, peaks(enough), most_condition=100)
        with pytest.raises(MoestroError, match="too few for 4 unknowns"):
            fit_dry_run([*PROBES[1:5], PROBES[1]], peaks([*PROBES[1:5], PROBES[1]]), most_condition=100)

    def test_left_out(self) -> None:
        """Exact peaks leave nothing; a wrong one is seen most where it is itself left out; a lone end is not known."""
        found = leave_one_out(PROBES, peaks(PROBES))
        assert [value is None for value in found] == [True, *[False] * 6, True]
        assert max(abs(value) for value in found if value is not None) < 1e-9
        wrong = peaks(PROBES)
        wrong[3] *= 1.1
        errors = [abs(value or 0.0) for value in leave_one_out(PROBES, wrong)]
        assert errors[3] > max(map(abs, fit_dry_run(PROBES, wrong).residuals))

    def test_noise_stays_where_it_is_small(self) -> None:
        noisy = np.array(peaks(PROBES)) * (1 + 0.01 * np.random.default_rng(0).standard_normal(len(PROBES)))
        found = fit_dry_run(PROBES, noisy.tolist())
        other = Probe({"none": 3, "full": 2}, 5)
        assert found.peak_bytes(other) == pytest.approx(TRUTH.peak_bytes(other), rel=0.03)

    def test_what_was_not_probed_is_not_told(self) -> None:
        found = fit_dry_run(PROBES[1:], peaks(PROBES[1:]))
        assert "first" not in found.end_bytes
        with pytest.raises(MoestroError, match="no first stage was probed"):
            found.peak_bytes(PROBES[0])
        with pytest.raises(MoestroError, match="no probe had layers of 'comm'"):
            found.peak_bytes(Probe({"comm": 1}, 2))


class TestRefusal:
    def test_no_spare(self) -> None:
        with pytest.raises(
            MoestroError, match=r"too few for 4 unknowns and one to check them by\. Add to the dry run: a middle stage"
        ):
            fit_dry_run(PROBES[1:5], peaks(PROBES[1:5]), most_condition=100)

    def test_equal_layers_hide_the_constant(self) -> None:
        even = [Probe({"none": 3, "full": 1}, flight) for flight in range(9, 1, -1)]
        with pytest.raises(MoestroError, match=r"2 of 4 unknowns are .* \(8\), not the constant, a layer") as refused:
            fit_dry_run(even, peaks(even))
        assert "Add to the dry run" in str(refused.value)

    def test_hardly_told_apart(self) -> None:
        """Recomputation almost in proportion to the layers: full rank, and no use."""
        close = [Probe({"none": 50, "full": 50 + {3: 1, 5: 2}.get(i, 0)}, 20 - i) for i in range(8)]
        assert conditioning(equations(close, kinds_of(close)))[0] == 4
        with pytest.raises(MoestroError, match=r"the condition number of the middle stages \(8\) is"):
            fit_dry_run(close, peaks(close))

    @pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
    def test_peaks_that_are_none(self, wrong: float) -> None:
        with pytest.raises(MoestroError, match="positive numbers"):
            fit_dry_run(PROBES, [*peaks(PROBES)[:-1], wrong])

    def test_numbers_of_both(self) -> None:
        with pytest.raises(MoestroError, match="8 probes and 7 peaks"):
            fit_dry_run(PROBES, peaks(PROBES)[1:])

    @pytest.mark.parametrize("probes", [[], PROBES[:1], [Probe({}, 3)]])
    def test_next_to_nothing(self, probes: list[Probe]) -> None:
        with pytest.raises(MoestroError, match="unknowns"):
            fit_dry_run(probes, [1e9] * len(probes))


KINDS = st.dictionaries(st.sampled_from(["none", "full", "comm"]), st.integers(1, 12), min_size=1)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.builds(Probe, KINDS, st.integers(2, 16)), min_size=1, max_size=8))
def test_proposed_probes_make_any_set_good(probes: list[Probe]) -> None:
    mended = [*probes, *probes_to_add(probes)]
    kept = {kind: size for kind, size in (("none", 1e9), ("full", 4e8), ("comm", 7e8)) if kind in kinds_of(probes)}
    truth = StageMemory(1e9, 2e9, kept, {}, 5, 1.0)
    found = fit_dry_run(mended, peaks(mended, truth))
    assert found.constant_bytes == pytest.approx(1e9, rel=1e-6)
    assert found.condition <= MOST_CONDITION
    assert probes_to_add(mended) == []
