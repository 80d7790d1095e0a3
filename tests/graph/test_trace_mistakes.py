"""What a program that cannot be traced is answered: a line with its place, and nothing of PyTorch's own."""

from pathlib import Path

import pytest
import torch

from moestro.errors import MoestroError
from moestro.graph.trace.user import find, trace


def modules(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "moestro_broken_syntax.py").write_text("def f(:\n")
    (folder / "moestro_broken_import.py").write_text("import sys\nsys.missing_attribute\n")
    (folder / "moestro_leaves.py").write_text("raise SystemExit(3)\n")
    (folder / "moestro_holds.py").write_text("number = 3\n")
    monkeypatch.chdir(folder)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("moestro_broken_syntax:f", "cannot be imported: SyntaxError: invalid syntax"),
        ("moestro_broken_import:f", "cannot be imported: AttributeError"),
        ("moestro_leaves:f", "cannot be imported: SystemExit: 3"),
        ("moestro_holds:number", "'number' of module 'moestro_holds' is no function"),
        ("moestro_holds:other", "has no function 'other'"),
        ("moestro_missing:f", "there is no module 'moestro_missing'"),
        ("moestro_holds", "names no function"),
    ],
)  # fmt: skip
def test_a_name_that_leads_nowhere(name: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules(tmp_path, monkeypatch)
    with pytest.raises(MoestroError, match=error) as failed:
        find(name)
    assert "\n" not in str(failed.value)


def unequal() -> None:
    torch.randn(8, 4, device="cuda") @ torch.randn(8, 4, device="cuda")


def leaves() -> None:
    raise SystemExit(3)


def test_a_function_that_fails(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MoestroError, match=r"tracing failed at .*test_trace_mistakes.py:\d+: RuntimeError: .*8, 4"):
        trace(unequal, 1)
    with pytest.raises(MoestroError, match=r"test_trace_mistakes.py:\d+: SystemExit: 3"):
        trace(leaves, 1)
    with pytest.raises(MoestroError, match=r"^tracing failed: TypeError: abs"):
        trace(abs, 1)
    assert capfd.readouterr().err == ""
