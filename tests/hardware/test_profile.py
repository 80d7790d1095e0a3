"""What a profile on disk must hold."""

import json
from pathlib import Path
from typing import Any

import pytest
from report.profiles import machine_profile

from moestro.errors import MoestroError
from moestro.hardware.profile import load_profile, save_profile


def _changed(folder: Path, op: str, **changes: Any) -> Path:
    """The file of a whole profile whose first sample of `op` has these entries in its case; None takes one out."""
    save_profile(machine_profile(), folder / "profile.json")
    tree = json.loads((folder / "profile.json").read_text())
    case = next(sample for sample in tree["samples"] if sample["op"] == op)["case"]
    case |= changes
    for name in [name for name, value in changes.items() if value is None]:
        del case[name]
    (folder / "profile.json").write_text(json.dumps(tree))
    return folder


def test_a_whole_profile_reads_back(tmp_path: Path) -> None:
    save_profile(machine_profile(), tmp_path / "profile.json")
    assert load_profile(tmp_path) == load_profile(tmp_path / "profile.json") == machine_profile()
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]


@pytest.mark.parametrize(
    ("op", "changes", "message"),
    [
        ("gemm", {"m": None}, "samples.0, of gemm: its case has no 'm'"),
        ("gemm", {"m": "large"}, "'m' is a number, not 'large'"),
        ("gemm", {"dtype": 32}, "'dtype' is a word, not 32"),
        ("all_reduce", {"ranks": None}, "of all_reduce: its case has no 'ranks'"),
        ("storage_read", {"block_bytes": None}, "of storage_read: its case has no 'block_bytes'"),
    ],
)
def test_a_case_has_what_its_operation_needs(tmp_path: Path, op: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(MoestroError, match=message):
        load_profile(_changed(tmp_path, op, **changes))


def test_further_entries_are_no_fault(tmp_path: Path) -> None:
    assert load_profile(_changed(tmp_path, "gemm", layout="nt")).samples[0].case["layout"] == "nt"


def test_a_path_below_a_file_is_no_profile(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MoestroError, match="no profile at"):
        load_profile(tmp_path / "file" / "profile.json")
