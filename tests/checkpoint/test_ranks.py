"""Saves and loads by several ranks: any layout from any other, and what fails on one rank fails on all, cleanly."""

import errno
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks

from checkpoint.cuts import assert_same, blank, layout
from moestro.checkpoint import write
from moestro.checkpoint.inspect import contents
from moestro.checkpoint.manifest import problem, read_manifest
from moestro.checkpoint.store import Progress, checkpoints, load_checkpoint, newest_good, save_checkpoint
from moestro.errors import MoestroError
from moestro.parallel.comm import Group
from moestro.parallel.ranks import RankFailure, together

KINDS = ("replicas", "slices", "rows", "columns")


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    """Shapes that no number of ranks divides, and merged experts with their moments."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.embed.weight": torch.randn(13, 5, generator=generator),
        "model.experts.gate_up_proj": torch.randn(4, 2, 6, 8, generator=generator),
        "model.norm.weight": torch.randn(11, generator=generator).bfloat16(),
        "optimizer.state.experts.gate_up_proj.momentum_buffer": torch.randn(4, 2, 6, 8, generator=generator),
        "optimizer.state.norm.weight.step": torch.tensor(3.0 + seed),
    }


def groups(rank: int) -> dict[int, Group]:
    """The first n of four ranks, for n = 1 … 4. (Every rank must make every group.)"""
    made: dict[int, Group] = {n: dist.new_group(list(range(n))) for n in (2, 3)}
    return {1: None, **made, 4: dist.group.WORLD}


def save_and_load_everywhere(rank: int, folder: str) -> None:
    of = groups(rank)
    for number, kind in enumerate(KINDS):
        value = state(number)
        path = Path(folder) / f"step_{number:08d}"
        saved = save_checkpoint(path.parent, layout(value, kind, 4)[rank], Progress(number, 2, 3.0), 9, of[4])
        assert saved == path
        assert newest_good(path.parent, of[4]) == (path, [])
        for ranks, group in of.items():
            for other in KINDS if rank < ranks else ():
                expected = layout(value, other, ranks)[rank]
                got = blank(expected)
                assert load_checkpoint(path, got, group) == Progress(number, 2, 3.0)
                assert_same(got, expected)


def replicas(rank: int, folder: str) -> None:
    """What all hold is written once, and by all alike."""
    write.SMALLEST_PIECE = 1 << 12
    value = {"model.w": torch.randn(64, 3000), "model.b": torch.zeros(3)}
    world = dist.group.WORLD
    path = save_checkpoint(Path(folder), layout(value, "replicas", 4)[rank], Progress(1, 2, 3.0), 1, world)
    sizes = [path.joinpath(f"__{r}_0.distcp").stat().st_size for r in range(4)]
    assert sum(sizes) < 1.5 * value["model.w"].nbytes, sizes
    assert max(sizes) < 1.2 * sum(sizes) / 4, sizes


def four_ranks(rank: int, folder: str) -> None:
    save_and_load_everywhere(rank, folder)
    replicas(rank, f"{folder}/replicas")


def test_four_ranks_to_any_other(tmp_path: Path) -> None:
    run_ranks(four_ranks, 4, str(tmp_path))
    for number, path in enumerate(checkpoints(tmp_path)):
        manifest = read_manifest(path)
        assert manifest["world_size"] == contents(path).world_size == 4
        assert sorted(manifest["files"]) == [".metadata", *(f"__{rank}_0.distcp" for rank in range(4))]
        assert not any("rank" in t.name or t.name.endswith(".0") for t in contents(path).tensors)
        whole = layout(state(number), "replicas", 1)[0]
        got = blank(whole)
        load_checkpoint(path, got)  # and by a process without any group
        assert_same(got, whole)


def stages(rank: int, folder: str) -> None:
    """Pipeline ranks have different names; each loads its own, and no one misses the others'."""
    value = state()
    names = sorted(value)
    parts = [{n: layout(value, "replicas", 1)[0][n] for n in names[r::2]} for r in range(2)]
    world = dist.group.WORLD
    path = save_checkpoint(Path(folder), parts[rank], Progress(1, 2, 3.0), 1, world)
    got = blank(parts[1 - rank])
    load_checkpoint(path, got, world)
    assert_same(got, parts[1 - rank])
    with pytest.raises(MoestroError, match=r"it also holds optimizer\.state\.norm\.weight\.step"):
        load_checkpoint(path, {n: t for n, t in got.items() if not n.endswith("step")}, world)


class FullDisk:
    """The writes of a rank fail after so many bytes, or kill it."""

    def __init__(self, after: int, kill: bool = False) -> None:
        self.left, self.kill, self.write = after, kill, write._Counting.write

    def __enter__(self) -> None:
        def limited(counting: write._Counting, data: bytes) -> int:
            self.left -= memoryview(data).nbytes
            if self.left >= 0:
                return self.write(counting, data)
            if self.kill:
                counting._stream.write(bytes(memoryview(data).cast("B"))[: self.left])
                counting.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            counting.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise counting.error

        write._Counting.write = limited  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        write._Counting.write = self.write  # type: ignore[method-assign]


def one_disk_is_full(rank: int, folder: str) -> None:
    world, path = dist.group.WORLD, Path(folder)
    value = layout(state(), "slices", 3)[rank]
    good = save_checkpoint(path, value, Progress(1, 2, 3.0), 1, world)
    for full_rank, after in ((0, 0), (1, 0), (2, 700), (1, 1500)):
        patient = FullDisk(after) if rank == full_rank else FullDisk(1 << 40)
        expected = rf"cannot write checkpoint .*step_00000002: rank {full_rank}: No space left.*run\.resume=auto"
        with patient, pytest.raises(MoestroError, match=expected):
            save_checkpoint(path, value, Progress(2, 2, 3.0), 1, world)
        dist.barrier()
        assert [p.name for p in path.iterdir()] == [good.name]
        assert newest_good(path, world) == (good, [])
    assert save_checkpoint(path, value, Progress(2, 2, 3.0), 1, world) == path / "step_00000002"
    dist.barrier()
    assert [p.name for p in path.iterdir()] == ["step_00000002"]


def killed_while_writing(rank: int, folder: str, after: int) -> None:
    world, value = dist.group.WORLD, layout(state(), "slices", 2)[rank]
    save_checkpoint(Path(folder), value, Progress(1, 2, 3.0), 1, world)
    with FullDisk(after, kill=True) if rank == 1 else FullDisk(1 << 40):
        save_checkpoint(Path(folder), value, Progress(2, 2, 3.0), 1, world)


def test_a_rank_killed_while_it_writes(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        run_ranks(killed_while_writing, 2, str(tmp_path), 1000)
    assert newest_good(tmp_path) == (tmp_path / "step_00000001", [])
    assert (tmp_path / ".step_00000002.tmp").exists()
    whole = layout(state(), "replicas", 1)[0]
    got = blank(whole)
    load_checkpoint(tmp_path / "step_00000001", got)
    assert_same(got, whole)
    save_checkpoint(tmp_path, whole, Progress(3, 2, 3.0), 2)  # the next save clears what the killed one left
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000001", "step_00000003"]


def killed_at_every_byte(rank: int, folder: str) -> None:
    """A process dies at byte n of all that a save writes, for many n; each in a fork of this one."""
    path, value = Path(folder), layout(state(), "replicas", 1)[0]
    good = save_checkpoint(path, value, Progress(1, 2, 3.0), 1)
    total = sum(p.stat().st_size for p in good.iterdir() if p.name != "manifest.json")
    for after in [*range(0, total, total // 15), total - 1]:
        child = os.fork()
        if child == 0:
            with FullDisk(after, kill=True):
                save_checkpoint(path, value, Progress(2, 2, 3.0), 1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, f"byte {after}: not killed"
        assert newest_good(path) == (good, []), f"byte {after}"
    got = blank(value)
    load_checkpoint(good, got)
    assert_same(got, value)


def test_killed_at_any_byte(tmp_path: Path) -> None:
    run_ranks(killed_at_every_byte, 1, str(tmp_path))


def damage(rank: int, folder: str) -> None:
    """Whoever checks the bad file, all ranks hear of it and pass over the same checkpoint."""
    world, path = dist.group.WORLD, Path(folder)
    for step in (1, 2):
        save_checkpoint(path, layout(state(), "slices", 3)[rank], Progress(step, 2, 3.0), 2, world)
    bad = path / "step_00000002"
    for file in sorted(p.name for p in bad.iterdir() if p.name != "manifest.json"):
        content = (bad / file).read_bytes()
        dist.barrier()
        if rank == 0:
            (bad / file).write_bytes(content[:77] + bytes([content[77] ^ 1]) + content[78:])
        dist.barrier()
        assert problem(bad, world) == f"{file} has a wrong checksum"
        assert newest_good(path, world) == (
            path / "step_00000001",
            [f"{bad} is damaged ({file} has a wrong checksum) and was passed over"],
        )
        with pytest.raises(MoestroError, match=f"damaged: {file}"):
            load_checkpoint(bad, blank(layout(state(), "slices", 3)[rank]), world)
        dist.barrier()
        if rank == 0:
            (bad / file).write_bytes(content)
        dist.barrier()
    assert problem(bad, world) is None


def three_ranks(rank: int, folder: str) -> None:
    one_disk_is_full(rank, f"{folder}/full")
    damage(rank, f"{folder}/damage")


def test_a_fault_of_one_rank_is_one_of_all(tmp_path: Path) -> None:
    run_ranks(three_ranks, 3, str(tmp_path))


def one_rank_misfits(rank: int, folder: str) -> None:
    """A rank with another shape stops the load on all, before any tensor is touched."""
    world = dist.group.WORLD
    value = layout(state(), "replicas", 2)[rank]
    path = save_checkpoint(Path(folder), value, Progress(1, 2, 3.0), 1, world)
    got = blank(value)
    if rank == 1:
        got |= layout({"model.norm.weight": torch.zeros(12).bfloat16()}, "replicas", 1)[0]
    with pytest.raises(
        MoestroError, match=r"does not fit this configuration: model\.norm\.weight is \[11\] there and \[12\]"
    ):
        load_checkpoint(path, got, world)
    assert (got["model.embed.weight"].chunks[0].tensor == 77).all()


def forgotten_box(rank: int, folder: str) -> None:
    """A rank that gives no part of its experts: refused on all ranks, nothing is left."""
    value = layout(state(), "rows", 2)[rank]
    if rank == 1:
        value.pop("optimizer.state.experts.gate_up_proj.momentum_buffer")
    with pytest.raises(ValueError, match="momentum_buffer: the ranks' boxes are not the whole tensor"):
        save_checkpoint(Path(folder), value, Progress(1, 2, 3.0), 1, dist.group.WORLD)
    dist.barrier()
    assert list(Path(folder).iterdir()) == []


def agreement(rank: int) -> None:
    world = dist.group.WORLD
    assert together(world, lambda: rank * 10) == [0, 10]

    def fail() -> None:
        if rank == 1:
            raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(RankFailure, match="rank 1: OSError") as caught:
        together(world, fail)
    assert caught.value.rank == 1
    assert isinstance(caught.value.error, OSError)


def small_checks(rank: int, folder: str) -> None:
    for check in (stages, one_rank_misfits, forgotten_box):
        part = Path(folder) / check.__name__
        part.mkdir(exist_ok=True)
        check(rank, str(part))
    agreement(rank)


def test_two_ranks_of_different_opinions(tmp_path: Path) -> None:
    run_ranks(small_checks, 2, str(tmp_path))
