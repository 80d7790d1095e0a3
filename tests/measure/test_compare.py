"""Comparing profiles: what counts as the same, and what the totals say."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report.profiles import machine_profile, sample

from moestro.errors import MoestroError
from moestro.hardware.profile import Machine, MachineProfile, Sample
from moestro.measure.compare import compare_profiles
from moestro.measure.sections import SECTIONS, check_skipped, section_of


def _profile(*samples: Sample, **machine: object) -> MachineProfile:
    fields = {"device_name": "Test CPU", "device_type": "cpu", "cores": 4, "load_average": 0.1, **machine}
    return machine_profile(list(samples), machine=Machine.model_validate(fields))


def test_a_profile_equals_itself() -> None:
    profile = machine_profile()
    found = compare_profiles(profile, profile)
    assert not found.differences
    assert found.same_machine
    assert found.only_a == found.only_b == 0
    everything = found.totals()[-1]
    assert everything.section == "all"
    assert everything.entries == everything.judged == everything.within == len(found.entries)
    assert everything.median_ratio == 1


@given(st.floats(0.5, 2.0), st.floats(0.01, 0.8), st.floats(0.01, 0.8))
def test_the_larger_spread_decides(ratio: float, ours: float, theirs: float) -> None:
    a = _profile(sample("copy", 1e-3, spread=ours, bytes=1024))
    b = _profile(sample("copy", ratio * 1e-3, spread=theirs, bytes=1024))
    (entry,) = compare_profiles(a, b).entries
    larger = max(ours, ratio * theirs)
    if not math.isclose(abs(ratio - 1), larger, rel_tol=1e-6):
        assert entry.within == (abs(ratio - 1) < larger)
    assert entry.ratio == pytest.approx(ratio)


def test_totals_by_section_name_the_largest_difference_in_either_direction() -> None:
    a = _profile(*(sample("copy", 1e-3, bytes=2**i) for i in range(10)), sample("gemm", 1e-3, m=1, n=1, k=1))
    b = _profile(
        *(sample("copy", 1e-3 / (4 if i == 7 else 1.2), bytes=2**i) for i in range(10)),
        sample("gemm", 1.02e-3, m=1, n=1, k=1),
    )
    gemm, memory, everything = compare_profiles(a, b).totals()
    assert (gemm.section, memory.section, everything.section) == ("gemm", "memory", "all")
    assert (memory.entries, memory.within) == (10, 0)
    assert memory.worst.case == {"bytes": 2**7}
    assert memory.worst.ratio == pytest.approx(0.25)
    assert memory.median_ratio == pytest.approx(1 / 1.2)
    assert (everything.entries, everything.within) == (11, 1)


def test_cases_of_one_profile_only_are_counted_and_not_compared() -> None:
    a = _profile(sample("copy", 1.0, bytes=1), sample("copy", 1.0, bytes=2))
    b = _profile(sample("copy", 1.0, bytes=2), sample("copy", 1.0, bytes=3), sample("scale", 1.0, bytes=2))
    found = compare_profiles(a, b)
    assert [e.case for e in found.entries] == [{"bytes": 2}]
    assert (found.only_a, found.only_b) == (1, 2)


def test_figures_without_spread_are_not_judged() -> None:
    a = _profile(Sample(op="copy", case={"bytes": 1}, median_s=1.0, source="a table"))
    found = compare_profiles(a, a)
    assert found.entries[0].within is None
    assert found.totals()[-1].judged == 0


def test_one_or_two_timings_have_no_spread() -> None:
    once = sample("copy", 1.0, bytes=1).model_copy(update={"repeats": 2})
    assert compare_profiles(_profile(once), _profile(once)).entries[0].within is None


def test_repeated_public_records_count_as_their_median() -> None:
    a = _profile(*(Sample(op="copy", case={"bytes": 1}, median_s=t, software=str(t)) for t in (1.0, 2.0, 9.0)))
    b = _profile(Sample(op="copy", case={"bytes": 1}, median_s=4.0))
    assert compare_profiles(a, b).entries[0].ratio == 2


def test_another_machine_is_said_before_another_version() -> None:
    a = _profile(sample("copy", 1.0, bytes=1), versions={"torch": "2.11"}, environment={"OMP_NUM_THREADS": "1"})
    b = _profile(sample("copy", 1.0, bytes=1), versions={"torch": "2.12"}, cores=8, hostname="other")
    found = compare_profiles(a, b)
    assert {(d.what, d.a, d.b, d.identity) for d in found.differences} == {
        ("cores", "4", "8", True),
        ("versions.torch", "2.11", "2.12", False),
        ("environment.OMP_NUM_THREADS", "1", "–", False),
        ("hostname", "", "other", False),
    }
    assert found.differences[0].what == "cores"
    assert not found.same_machine


def test_load_counts_only_when_it_makes_one_of_them_busy() -> None:
    quiet, calm, busy = (_profile(sample("copy", 1.0, bytes=1), load_average=load) for load in (0.1, 1.9, 2.1))
    assert not compare_profiles(quiet, calm).differences
    (difference,) = compare_profiles(quiet, busy).differences
    assert (difference.what, difference.a, difference.b) == ("load_average", "0.10 (quiet)", "2.10 (busy)")


def test_nothing_in_common_is_an_error_that_names_both() -> None:
    with pytest.raises(MoestroError, match="'box-1' and 'box-1' have no case in common"):
        compare_profiles(_profile(sample("copy", 1.0, bytes=1)), _profile(sample("copy", 1.0, bytes=2)))


@pytest.mark.parametrize(
    ("op", "section"),
    [("gemm", "gemm"), ("moe_experts", "gemm"), ("triad", "memory"), ("attention", "attention"), ("host_t1", "host"),
     ("swiglu", "elementwise"), ("storage_read", "storage"), ("all_to_all_uneven", "collectives"),
     ("send_recv", "collectives")],
)  # fmt: skip
def test_every_operation_has_its_section(op: str, section: str) -> None:
    assert section_of(Sample(op=op, case={}, median_s=1.0)) == section
    assert section in SECTIONS


def test_links_of_pairs_are_a_section_of_their_own() -> None:
    assert section_of(Sample(op="send_recv", case={"pair": "0-1"}, median_s=1.0)) == "pairs"


def test_sections_to_skip_are_checked() -> None:
    assert set(check_skipped(["gemm", "gemm", "host"])) == {"gemm", "host"}
    with pytest.raises(MoestroError, match=r"no section 'gem' to skip\. Did you mean 'gemm'"):
        check_skipped(["gem"])
    with pytest.raises(MoestroError, match="nothing is left to measure"):
        check_skipped(SECTIONS)
