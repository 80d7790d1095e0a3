"""Versions against a profile and between nodes."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doctor.helpers import write
from moestro.doctor.versions import host_versions, usual_versions, versions_check

HERE = {"torch": "2.13.0", "nccl": "2.29.3", "python": "3.11.9", "kernel": "6.8"}


@pytest.mark.parametrize(
    ("reference", "status", "said"),
    [
        (None, "passed", "torch 2.13.0, nccl 2.29.3, python 3.11.9"),
        (HERE, "passed", "as in the profile"),
        ({"torch": "2.13.0", "rocm": "6.4"}, "passed", "as in the profile"),
        ({"torch": "2.12.1"}, "failed", "torch 2.13.0, 2.12.1 in the profile"),
        (HERE | {"nccl": "2.27.0", "python": "3.12"}, "failed", "nccl 2.29.3, 2.27.0 in the profile"),
        (HERE | {"kernel": "6.6"}, "warned", "kernel 6.8"),
        ({}, "skipped", "names no versions"),
    ],
)
def test_against_a_profile(reference: dict[str, str] | None, status: str, said: str) -> None:
    check = versions_check(HERE, reference)
    assert (check.name, check.status) == ("versions", status)
    assert said in check.reason


def test_driver(tmp_path: Path) -> None:
    assert "driver" not in host_versions(tmp_path, {})
    write(tmp_path, {"sys/module/amdgpu/version": "6.12.12\n"})
    assert host_versions(tmp_path, {"torch": "2"})["driver"] == "6.12.12"
    nvidia = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build\nGCC version: gcc 13.3.0\n"
    )
    write(tmp_path, {"proc/driver/nvidia/version": nvidia})
    assert host_versions(tmp_path, {})["driver"] == "570.124.06"


@given(st.lists(st.fixed_dictionaries({}, optional={"torch": st.sampled_from("ABC")}), min_size=1, max_size=9))
def test_usual_is_what_more_than_half_have(nodes: list[dict[str, str]]) -> None:
    usual = usual_versions(nodes)
    counts = {version: sum(node.get("torch") == version for node in nodes) for version in "ABC"}
    expected = {version for version, count in counts.items() if 2 * count > len(nodes)}
    assert {usual["torch"]} == expected if expected else "torch" not in usual
