"""Saving in the background: training goes on with the tensors, and a failed save is told of and harms nothing."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks

from checkpoint.cuts import assert_same, blank, layout
from moestro.checkpoint import saver as saver_module
from moestro.checkpoint.saver import AsyncSaver
from moestro.checkpoint.store import Progress, checkpoints, load_checkpoint, newest_good
from moestro.errors import MoestroError
from moestro.parallel.logical import LogicalTensor


def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "model.w": torch.randn(9, 7, generator=generator),
        "optimizer.state.w.step": torch.tensor(2.0),
    }


def held() -> dict[str, LogicalTensor]:
    return layout(state(), "replicas", 1)[0]


def change(tensors: dict[str, LogicalTensor]) -> None:
    for tensor in tensors.values():
        for chunk in tensor.chunks:
            chunk.tensor.add_(1000)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Saves wait for it before they write."""
    event, real = threading.Event(), saver_module.save_checkpoint

    def held_up(*arguments: object) -> Path:
        assert event.wait(20)
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(saver_module, "save_checkpoint", held_up)
    return event


class TestOneProcess:
    def test_saves_what_was_there_when_it_was_called(self, gate: threading.Event, tmp_path: Path) -> None:
        saver, tensors, expected = AsyncSaver(None), held(), held()
        assert saver.save(tmp_path, tensors, Progress(1, 2, 3.0), keep=2) is None
        assert saver.poll() is None
        assert checkpoints(tmp_path) == []  # training has gone on before anything was written
        change(tensors)
        gate.set()
        saved = saver.wait()
        assert saved is not None
        assert (saved.path, saved.error, saved.progress) == (tmp_path / "step_00000001", None, Progress(1, 2, 3.0))
        got = blank(expected)
        load_checkpoint(saved.path, got)
        assert_same(got, expected)
        assert saver.wait() is None

    def test_the_next_save_waits_and_tells_of_the_one_before(self, tmp_path: Path) -> None:
        saver, tensors = AsyncSaver(None), held()
        for step in (1, 2, 3):
            before = saver.save(tmp_path, tensors, Progress(step, 2, 3.0), keep=2)
            assert (before.path.name if before and before.path else None) == (
                f"step_{step - 1:08d}" if step > 1 else None
            )
            change(tensors)
        assert saver.wait() is not None
        assert [p.name for p in checkpoints(tmp_path)] == ["step_00000002", "step_00000003"]
        got = held()
        load_checkpoint(tmp_path / "step_00000003", got)  # the host's memory was used again, not mixed up
        assert torch.equal(got["model.w"].chunks[0].tensor, state()["model.w"] + 1000 + 1000)

    def test_poll_tells_once_when_it_is_done(self, gate: threading.Event, tmp_path: Path) -> None:
        saver = AsyncSaver(None)
        assert saver.poll() is None
        saver.save(tmp_path, held(), Progress(1, 2, 3.0), keep=2)
        assert saver.poll() is None
        gate.set()
        for _ in range(1000):
            if saved := saver.poll():
                break
            time.sleep(0.01)
        assert saved is not None
        assert saved.path == tmp_path / "step_00000001"
        assert saver.poll() is None
        assert saver.wait() is None

    def test_a_failed_save_is_told_of_and_the_good_one_stays(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        saver, tensors = AsyncSaver(None), held()
        saver.save(tmp_path, tensors, Progress(1, 2, 3.0), keep=1)
        saver.wait()
        with monkeypatch.context() as patch:
            patch.setattr("moestro.checkpoint.write._Counting.write", full_disk)
            saver.save(tmp_path, tensors, Progress(2, 2, 3.0), keep=1)
            saved = saver.wait()
        assert saved is not None
        assert saved.path is None
        assert isinstance(saved.error, MoestroError)
        assert "No space left" in str(saved.error)
        assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]
        saver.save(tmp_path, tensors, Progress(3, 2, 3.0), keep=1)
        assert saver.wait() is not None
        assert [p.name for p in tmp_path.iterdir()] == ["step_00000003"]

    def test_a_defect_is_raised_where_training_waits(self, tmp_path: Path) -> None:
        saver = AsyncSaver(None)
        saver.save(tmp_path, {"model.w": LogicalTensor((2,), [])}, Progress(1, 2, 3.0), keep=1)
        with pytest.raises(ValueError, match=r"model\.w: the ranks' boxes"):
            saver.wait()
        assert saver.wait() is None


def full_disk(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def train_on(rank: int, folder: str) -> None:
    """Two ranks, whose training talks while the savers do; then a full disk on one of them."""
    from moestro.checkpoint import write

    world, path = dist.group.WORLD, Path(folder)
    saver, tensors = AsyncSaver(world), layout(state(), "slices", 2)[rank]
    for step in range(1, 6):
        saver.save(path, tensors, Progress(step, 2, 3.0), 2)
        for _ in range(20):
            number = torch.tensor(float(rank))
            dist.all_reduce(number)
            assert number == 1
        change(tensors)
    saved = saver.wait()
    assert saved is not None
    assert saved.path == path / "step_00000005"
    got = layout(state(), "rows", 2)[rank]
    load_checkpoint(saved.path, got, world)
    expected = layout(state(), "rows", 2)[rank]
    for _ in range(4):
        change(expected)
    assert_same(got, expected)

    real = write._Counting.write
    if rank == 1:
        write._Counting.write = full_disk  # type: ignore[method-assign,assignment]
    saver.save(path, tensors, Progress(6, 2, 3.0), 2)
    saved = saver.wait()
    write._Counting.write = real  # type: ignore[method-assign]
    assert saved is not None
    assert "rank 1: No space left" in str(saved.error)
    assert newest_good(path, world) == (path / "step_00000005", [])
    saver.save(path, tensors, Progress(7, 2, 3.0), 2)
    saved = saver.wait()
    assert saved is not None
    assert saved.path == path / "step_00000007"


def test_two_ranks_train_on(tmp_path: Path) -> None:
    run_ranks(train_on, 2, str(tmp_path))
    assert [p.name for p in checkpoints(tmp_path)] == ["step_00000005", "step_00000007"]


PROGRAM = """
    import signal, sys, time
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background inherits as ignored
    from pathlib import Path
    import torch
    from moestro.checkpoint import write
    from moestro.checkpoint.saver import AsyncSaver
    from moestro.checkpoint.store import Progress
    from moestro.parallel.logical import whole

    real = write._Counting.write
    def slow(self, data):
        time.sleep(float(sys.argv[2]))
        return real(self, data)
    saver = AsyncSaver(None)
    tensors = {f"model.{i}": whole(torch.full((5,), float(i))) for i in range(8)}
    saver.save(Path(sys.argv[1]), tensors, Progress(1, 2, 3.0), 1)
    saver.wait()
    write._Counting.write = slow
    saver.save(Path(sys.argv[1]), tensors, Progress(2, 2, 3.0), 1)
    print("saving", flush=True)
"""


def program(tmp_path: Path, *ending: str, pause_s: float = 0.005) -> subprocess.Popen[str]:
    text = "\n".join([textwrap.dedent(PROGRAM), *ending])
    return subprocess.Popen(
        [sys.executable, "-c", text, str(tmp_path), str(pause_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class TestEnding:
    def test_the_interpreter_waits_for_the_save(self, tmp_path: Path) -> None:
        process = program(tmp_path)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err) == (0, "saving\n", "")
        assert newest_good(tmp_path) == (tmp_path / "step_00000002", [])

    @pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGKILL])
    def test_a_signal_in_the_middle_leaves_the_one_before(self, signal_number: int, tmp_path: Path) -> None:
        process = program(
            tmp_path, "saver.wait()", pause_s=0.02
        )  # long enough for any test machine to be in its middle
        assert process.stdout is not None
        assert process.stdout.readline() == "saving\n"
        process.send_signal(signal_number)
        process.communicate(timeout=60)
        assert process.returncode != 0
        found, damaged = newest_good(tmp_path)
        assert found is not None  # after SIGINT the save may still have ended
        assert damaged == []
        if signal_number == signal.SIGKILL:
            assert found.name == "step_00000001"
