"""Checkpoints: whole or absent, every byte verified, every moment restored, and never the wrong model."""

import errno
import json
import os
import re
import resource
import shutil
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict
from train.helpers import assert_equal_state, flat_state

from checkpoint.state import Optimizers, make, tensors, work
from moestro.checkpoint import store, write
from moestro.checkpoint.store import (
    MANIFEST,
    Progress,
    checkpoints,
    load_checkpoint,
    newest_good,
    save_checkpoint,
)
from moestro.checkpoint.write import Written
from moestro.config import OptimConfig
from moestro.errors import MoestroError
from moestro.model.transformer import Transformer
from moestro.optim.build import build_optimizers
from moestro.parallel.logical import whole


def save(folder: Path, step: int, keep: int = 10, pair: tuple[Transformer, Optimizers] | None = None) -> Path:
    return save_checkpoint(folder, tensors(*(pair or make())), Progress(step, 100 * step, 0.5 * step), keep)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints, of steps 1 and 2; copied by whoever damages them."""
    folder = tmp_path_factory.mktemp("saved")
    pair = make()
    for step in (1, 2):
        work(*pair, steps=1)
        save(folder, step, pair=pair)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


class TestRoundTrip:
    @pytest.mark.parametrize("optimizer", ["adamw", "muon"])
    def test_everything_comes_back(self, optimizer: str, tmp_path: Path) -> None:
        model, optimizers = make(optimizer)
        work(model, optimizers)
        expected = flat_state(model, optimizers)
        assert {name.rsplit(".", 1)[1] for name in expected} >= (
            {"exp_avg", "exp_avg_sq", "step", "bias", "bias_moments", "global_load"}
            | ({"momentum_buffer"} if optimizer == "muon" else set())
        )
        path = save_checkpoint(tmp_path, tensors(model, optimizers), Progress(7, 70, 1.25), keep=2)
        assert path == tmp_path / "step_00000007"
        assert_equal_state(flat_state(model, optimizers), expected)  # saving disturbs nothing

        other, other_optimizers = make(optimizer, seed=1)
        assert load_checkpoint(path, tensors(other, other_optimizers)) == Progress(7, 70, 1.25)
        assert_equal_state(flat_state(other, other_optimizers), expected)

    def test_the_next_step_is_the_same(self, tmp_path: Path) -> None:
        model, optimizers = make()
        work(model, optimizers)
        path = save(tmp_path, 1, pair=(model, optimizers))
        other, other_optimizers = make(seed=1)
        load_checkpoint(path, tensors(other, other_optimizers))
        for pair in ((model, optimizers), (other, other_optimizers)):
            work(*pair)
        assert_equal_state(flat_state(other, other_optimizers), flat_state(model, optimizers))

    @pytest.mark.parametrize("optimizer", ["adamw", "muon"])
    def test_of_a_run_not_yet_begun(self, optimizer: str, tmp_path: Path) -> None:
        """No moments exist yet; saving must not invent a step that was never taken."""
        path = save(tmp_path, 0, pair=make(optimizer))
        fresh, loaded = make(optimizer), make(optimizer, seed=1)
        load_checkpoint(path, tensors(*loaded))
        for pair in (fresh, loaded):
            work(*pair)
        assert_equal_state(flat_state(*loaded), flat_state(*fresh))

    def test_without_optimizers(self, saved: Path) -> None:
        trained, trained_optimizers = make()
        load_checkpoint(saved / "step_00000002", tensors(trained, trained_optimizers))
        model, optimizers = make(seed=1)
        before = flat_state(model, optimizers)
        assert load_checkpoint(saved / "step_00000002", tensors(model, [])).step == 2
        after = flat_state(model, optimizers)
        for name, value in trained.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name
        assert {k: v for k, v in after.items() if not k.startswith("model.")} == {
            k: v for k, v in before.items() if not k.startswith("model.")
        }

    def test_keeps_the_settings_of_the_optimizers_it_is_given(self, saved: Path) -> None:
        """Moments come from the checkpoint, the learning rate and its like from the configuration."""
        model = make()[0]
        optimizers = build_optimizers(model, OptimConfig(name="muon", lr=1e-5, muon_lr=1e-6, weight_decay=0.3))
        expected = [{k: v for k, v in g.items() if k != "params"} for o in optimizers for g in o.param_groups]
        load_checkpoint(saved / "step_00000002", tensors(model, optimizers))
        got = [{k: v for k, v in g.items() if k != "params"} for o in optimizers for g in o.param_groups]
        assert got == expected


class TestKeeping:
    def test_the_newest(self, tmp_path: Path) -> None:
        pair = make()
        for step in (1, 2, 9, 10, 11):
            save(tmp_path, step, keep=2, pair=pair)
        assert [p.name for p in checkpoints(tmp_path)] == ["step_00000010", "step_00000011"]
        assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000010", "step_00000011"]

    def test_order_is_by_number(self, tmp_path: Path) -> None:
        for name in ("step_100000000", "step_00000009", "step_99999999"):
            (tmp_path / name).mkdir()
        assert [p.name for p in checkpoints(tmp_path)] == ["step_00000009", "step_99999999", "step_100000000"]

    @pytest.mark.parametrize("keep", [1, 2])
    def test_a_good_checkpoint_outlives_damaged_newer_ones(self, keep: int, tmp_path: Path) -> None:
        """After a fall-back the damaged ones have higher numbers, and must not push the good ones out."""
        pair = make()
        for step in (4, 5, 6):
            save(tmp_path, step, pair=pair)
        for step in (5, 6):
            (tmp_path / f"step_0000000{step}" / MANIFEST).write_text("{")
        assert newest_good(tmp_path)[0] == tmp_path / "step_00000004"
        work(*pair)
        path = save(tmp_path, 5, keep=keep, pair=pair)  # done again after the fall-back
        assert newest_good(tmp_path)[0] == path

    def test_the_same_step_twice_is_written_once(self, folder: Path) -> None:
        manifest = folder / "step_00000002" / MANIFEST
        written = manifest.stat().st_mtime_ns
        assert save(folder, 2) == folder / "step_00000002"
        assert manifest.stat().st_mtime_ns == written

    def test_a_damaged_one_of_the_same_step_is_replaced(self, folder: Path) -> None:
        (folder / "step_00000002" / MANIFEST).unlink()
        save(folder, 2)
        assert newest_good(folder) == (folder / "step_00000002", [])


class TestLeftovers:
    def test_of_a_killed_save_are_ignored_and_replaced(self, folder: Path) -> None:
        half = folder / ".step_00000003.tmp"
        half.mkdir()
        (half / "__0_0.distcp").write_bytes(b"half")
        assert [p.name for p in checkpoints(folder)] == ["step_00000001", "step_00000002"]
        assert newest_good(folder)[0] == folder / "step_00000002"
        save(folder, 3)
        assert newest_good(folder) == (folder / "step_00000003", [])
        assert not half.exists()

    @pytest.mark.parametrize("name", ["step_best", "step_00000002.bak", "notes.txt"])
    def test_other_names_are_not_checkpoints(self, name: str, folder: Path) -> None:
        (folder / name).mkdir()
        assert newest_good(folder)[0] == folder / "step_00000002"
        save(folder, 3, keep=1)
        assert (folder / name).exists()

    def test_no_folder(self, tmp_path: Path) -> None:
        assert newest_good(tmp_path / "none") == (None, [])


def damages(path: Path) -> Iterator[tuple[str, Any]]:
    """Every way to damage one file of a checkpoint."""
    content = path.read_bytes()
    middle = len(content) // 2

    def flipped(at: int, mask: int) -> bytes:
        changed = bytearray(content)
        changed[at] ^= mask
        return bytes(changed)

    yield "cut by one byte", lambda: path.write_bytes(content[:-1])
    yield "cut in half", lambda: path.write_bytes(content[:middle])
    yield "emptied", lambda: path.write_bytes(b"")
    yield "grown", lambda: path.write_bytes(content + b"\0")
    for at in (0, middle, len(content) - 1):
        yield f"byte {at} flipped", lambda at=at: path.write_bytes(flipped(at, 0xFF))
        yield f"bit of byte {at} flipped", lambda at=at: path.write_bytes(flipped(at, 1))
    yield "removed", path.unlink
    yield "replaced by a folder", lambda: (path.unlink(), path.mkdir())


class TestDamage:
    def test_of_any_data_file_is_found(self, folder: Path) -> None:
        newest = folder / "step_00000002"
        names = sorted(p.name for p in newest.iterdir() if p.name != MANIFEST)
        assert len(names) >= 2
        pristine = folder.parent / "pristine"
        shutil.copytree(newest, pristine)
        for name in names:
            for what, damage in damages(newest / name):
                damage()
                found, notes = newest_good(folder)
                assert found == folder / "step_00000001", f"{name} {what}"
                assert len(notes) == 1
                assert f"{newest} is damaged ({name}" in notes[0]
                with pytest.raises(MoestroError, match=r"is damaged: .*Delete it to use the one before it"):
                    load_checkpoint(newest, tensors(*make()))
                shutil.rmtree(newest)
                shutil.copytree(pristine, newest)
        assert newest_good(folder) == (newest, [])

    @pytest.mark.parametrize(
        "text",
        [
            "", "{", "null", "[]", "3", "{}", '{"format_version": 2}', '{"format_version": 1}',
            '{"format_version": 1, "files": []}', '{"format_version": 1, "files": {"a": 3}}',
            '{"format_version": 1, "files": null}', '{"format_version": 1, "files": {}}', "\0" * 100,
        ],
    )  # fmt: skip
    def test_a_garbled_manifest(self, text: str, folder: Path) -> None:
        newest = folder / "step_00000002"
        (newest / MANIFEST).write_text(text)
        assert newest_good(folder)[0] == folder / "step_00000001"
        with pytest.raises(MoestroError, match="is damaged"):
            load_checkpoint(newest, tensors(*make()))

    def test_a_manifest_that_is_not_text(self, folder: Path) -> None:
        (folder / "step_00000002" / MANIFEST).write_bytes(b"\xff\xfe\xfd")
        assert newest_good(folder)[0] == folder / "step_00000001"

    def test_any_byte_of_the_manifest(self, folder: Path) -> None:
        """What a flipped bit changes is found; else the checkpoint still says the same."""
        newest = folder / "step_00000002"
        manifest = newest / MANIFEST
        content, expected = manifest.read_bytes(), json.loads(manifest.read_text())
        wrong = []
        for at in range(len(content)):
            changed = bytearray(content)
            changed[at] ^= 1
            manifest.write_bytes(changed)
            found, _ = newest_good(folder)
            if found == newest and json.loads(manifest.read_text()) != expected:
                wrong.append(content[max(at - 12, 0) : at + 1])
        assert wrong == []

    def test_all_damaged(self, folder: Path) -> None:
        for path in folder.iterdir():
            (path / MANIFEST).unlink()
        found, notes = newest_good(folder)
        assert found is None
        assert [str(folder / f"step_0000000{n}") in note for n, note in zip((2, 1), notes, strict=True)] == [True] * 2

    def test_a_path_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(MoestroError, match="step_00000009"):
            load_checkpoint(tmp_path / "step_00000009", tensors(*make()))


class TestDiskFull:
    def assert_clean(self, folder: Path) -> None:
        assert sorted(p.name for p in folder.iterdir()) == ["step_00000001", "step_00000002"]
        assert newest_good(folder) == (folder / "step_00000002", [])

    @pytest.mark.parametrize(
        "error",
        [
            OSError(errno.ENOSPC, "No space left on device"),
            CheckpointException("save", {0: (OSError(errno.ENOSPC, "No space left on device"), None)}),
            RuntimeError("PytorchStreamWriter failed writing file data/1: No space left on device"),
        ],
        ids=lambda error: type(error).__name__,
    )
    def test_reported_with_a_remedy(self, error: Exception, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(writer: FileSystemWriter, *_: Any) -> None:
            (Path(writer.path) / "__0_0.distcp").write_bytes(b"half")
            raise error

        monkeypatch.setattr(FileSystemWriter, "write_data", full)
        with pytest.raises(
            MoestroError, match=r"cannot write checkpoint .*step_00000003: .*No space left.*run\.resume=auto"
        ):
            save(folder, 3, keep=1)
        self.assert_clean(folder)

    @pytest.mark.parametrize("limit", [0, 1000, 60_000])
    def test_a_write_that_really_fails(self, limit: int, folder: Path) -> None:
        """A limit on the size of a file stops the writer somewhere in the middle."""
        pair = make()
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            with pytest.raises(MoestroError, match="cannot write checkpoint"):
                save(folder, 3, keep=1, pair=pair)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        self.assert_clean(folder)

    def test_a_folder_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(MoestroError, match="cannot write checkpoint"):
            save(tmp_path / "file" / "checkpoints", 1)

    def test_another_fault_is_not_dressed_up(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(FileSystemWriter, "write_data", lambda *a: (_ for _ in ()).throw(ValueError("a defect")))
        with pytest.raises(ValueError, match="a defect"):
            save(folder, 3)
        self.assert_clean(folder)

    def test_an_interrupted_save_leaves_the_old_ones(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(FileSystemWriter, "write_data", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            save(folder, 3, keep=1)
        assert newest_good(folder) == (folder / "step_00000002", [])


class TestWriting:
    def test_what_reads_back_differently_is_not_a_checkpoint(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The disk, or what lies between, changes a byte without a word."""
        real = write._Counting.write

        def careless(self: write._Counting, data: Any) -> int:
            content = bytearray(memoryview(data).cast("B"))
            crc = zlib.crc32(content, self.crc)
            content[-1] ^= 1
            written = real(self, bytes(content))
            self.crc = crc
            return written

        monkeypatch.setattr(write._Counting, "write", careless)
        with pytest.raises(MoestroError, match=r"cannot write checkpoint .* reads back differently"):
            save(folder, 3, keep=1)
        assert newest_good(folder) == (folder / "step_00000002", [])
        assert not (folder / ".step_00000003.tmp").exists()

    def test_every_byte_is_on_the_disk_before_the_name_is(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        flushed: dict[int, int] = {}  # bytes of a file when it was last flushed
        named: list[dict[int, int]] = []
        real_sync, real_rename = os.fsync, Path.rename

        def fsync(file: int) -> None:
            real_sync(file)
            flushed[os.fstat(file).st_ino] = os.fstat(file).st_size

        def rename(path: Path, target: Path) -> Path:
            if target.name.startswith("step_"):
                named.append(dict(flushed))
            return real_rename(path, target)

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(Path, "rename", rename)
        path = save_checkpoint(tmp_path, {"model.w": whole(torch.ones(3))}, Progress(3, 2, 1.0), keep=1)
        assert len(named) == 1
        for file in (*path.iterdir(), path):
            assert named[0][file.stat().st_ino] == file.stat().st_size, file.name
        assert tmp_path.stat().st_ino in flushed

    def test_a_file_of_another_node_that_cannot_be_seen(self, tmp_path: Path) -> None:
        written = [Written({}, []), Written({"__1_0.distcp": {"bytes": 5, "crc32": 0}}, [])]
        with pytest.raises(MoestroError, match=r"written by rank 1, cannot be seen .*set run\.dir to a folder"):
            store._check_visible(tmp_path, written)
        (tmp_path / "__1_0.distcp").write_bytes(b"12345")
        store._check_visible(tmp_path, written)


class TestAnotherModel:
    @pytest.mark.parametrize(
        "changes",
        [
            {"hidden_size": 32},
            {"num_layers": 3},
            {"num_layers": 1},
            {"vocab_size": 300},
            {"moe": {"num_experts": 8}},
            {"moe": {"expert_hidden_size": 8}},
            {"moe": {"num_shared_experts": 1}},
            {"qk_norm": "head"},
            {"tie_embeddings": True},
            {"moe": None, "intermediate_size": 16},
        ],
        ids=str,
    )
    @pytest.mark.parametrize("with_optimizers", [True, False])
    def test_is_refused_and_left_alone(self, changes: dict[str, Any], with_optimizers: bool, saved: Path) -> None:
        model, optimizers = make(seed=5, **changes)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(MoestroError, match=r"does not fit this configuration: .*config\.toml"):
            load_checkpoint(saved / "step_00000002", tensors(model, optimizers if with_optimizers else []))
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), f"{name} was changed"

    @pytest.mark.parametrize(("old", "new"), [("adamw", "muon"), ("muon", "adamw")])
    def test_another_optimizer_is_refused(self, old: str, new: str, tmp_path: Path) -> None:
        pair = make(old)
        work(*pair)
        path = save(tmp_path, 1, pair=pair)
        with pytest.raises(MoestroError, match="does not fit this configuration"):
            load_checkpoint(path, tensors(*make(new)))


class TestNames:
    """Every tensor is looked for by name: nothing is lost in silence, whichever side lacks it."""

    @pytest.mark.parametrize("lost", ["optimizer.state.layers.0.self_attn.q_proj.weight.exp_avg", "model.norm.weight"])
    def test_what_the_checkpoint_lacks_is_named(self, lost: str, tmp_path: Path) -> None:
        held = tensors(*make("adamw"))
        held.pop(lost)
        path = save_checkpoint(tmp_path, held, Progress(1, 2, 3.0), keep=1)
        wanted = tensors(*make("adamw", seed=1))
        before = {name: t.chunks[0].tensor.clone() for name, t in wanted.items()}
        with pytest.raises(MoestroError, match=f"it does not hold {re.escape(lost)}"):
            load_checkpoint(path, wanted)
        for name, value in before.items():
            assert torch.equal(wanted[name].chunks[0].tensor, value), f"{name} was changed"

    def test_what_is_not_asked_for_is_named(self, saved: Path) -> None:
        wanted = tensors(*make())
        wanted.pop("optimizer.state.layers.0.mlp.experts.down_proj.momentum_buffer")
        with pytest.raises(MoestroError, match=r"it also holds optimizer\.state\.layers\.0\.mlp\.experts\.down_proj"):
            load_checkpoint(saved / "step_00000002", wanted)

    def test_a_narrower_type_is_refused_and_a_wider_one_filled(self, tmp_path: Path) -> None:
        value = torch.tensor([1.0, 1.5], dtype=torch.bfloat16)
        path = save_checkpoint(tmp_path, {"model.w": whole(value)}, Progress(1, 2, 3.0), keep=1)
        wider = torch.zeros(2)
        load_checkpoint(path, {"model.w": whole(wider)})
        assert wider.tolist() == [1.0, 1.5]
        path = save_checkpoint(tmp_path, {"model.w": whole(wider)}, Progress(2, 2, 3.0), keep=1)
        with pytest.raises(MoestroError, match=r"model\.w is torch\.float32 there and would lose digits"):
            load_checkpoint(path, {"model.w": whole(value)})

    def test_memory_order_does_not_matter(self, tmp_path: Path) -> None:
        value = torch.arange(24.0).view(2, 3, 4)
        path = save_checkpoint(tmp_path, {"model.w": whole(value.permute(2, 0, 1))}, Progress(1, 2, 3.0), keep=1)
        loaded = torch.zeros(3, 2, 4).permute(2, 1, 0)
        load_checkpoint(path, {"model.w": whole(loaded)})
        assert torch.equal(loaded, value.permute(2, 0, 1))

    def test_torch_makes_nested_dictionaries_of_it(self, saved: Path, tmp_path: Path) -> None:
        expected = make(seed=1)
        load_checkpoint(saved / "step_00000002", tensors(*expected))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp_to_torch_save(saved / "step_00000002", tmp_path / "all.pt")
        found = torch.load(tmp_path / "all.pt")
        assert found["model"].keys() == expected[0].state_dict().keys()
        moments = found["optimizer"]["state"]["norm.weight"]
        assert moments.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert torch.equal(moments["exp_avg"], expected[1][0].state[expected[0].norm.weight]["exp_avg"])

    def test_torch_reads_it_too(self, saved: Path) -> None:
        model = make(seed=1)[0]
        expected = make(seed=1)
        load_checkpoint(saved / "step_00000002", tensors(*expected))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load({"model": model.state_dict()}, checkpoint_id=saved / "step_00000002", no_dist=True)
        for name, value in expected[0].state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name


class TestFormatOne:
    """What one process wrote before there were boxes: torch's state dictionaries, saved and listed by themselves."""

    @pytest.fixture(params=["adamw", "muon"])
    def old(self, request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, tuple[Transformer, Optimizers]]:
        pair = make(request.param)
        work(*pair)
        model_state, optimizer_state = get_state_dict(*pair)
        path = tmp_path / "checkpoints" / "step_00000003"
        path.mkdir(parents=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path, no_dist=True)
        files = {
            p.name: {"bytes": p.stat().st_size, "crc32": zlib.crc32(p.read_bytes())} for p in sorted(path.iterdir())
        }
        progress = {"step": 3, "tokens": 30, "train_time_s": 0.5}
        manifest: dict[str, Any] = {"format_version": 1, "progress": progress, "files": files}
        manifest["crc32"] = zlib.crc32(json.dumps(manifest, sort_keys=True).encode())
        (path / MANIFEST).write_text(json.dumps(manifest, indent=1))
        return path, pair

    def test_loads(self, old: tuple[Path, tuple[Transformer, Optimizers]]) -> None:
        path, pair = old
        assert newest_good(path.parent) == (path, [])
        name = "adamw" if len(pair[1]) == 1 else "muon"
        other = make(name, seed=1)
        assert load_checkpoint(path, tensors(*other)) == Progress(3, 30, 0.5)
        assert_equal_state(flat_state(*other), flat_state(*pair))

    def test_loads_without_optimizers(self, old: tuple[Path, tuple[Transformer, Optimizers]]) -> None:
        path, pair = old
        model = make(seed=1)[0]
        load_checkpoint(path, tensors(model, []))
        assert_equal_state(flat_state(model, []), flat_state(pair[0], []))

    def test_a_lost_moment_is_still_named(self, old: tuple[Path, tuple[Transformer, Optimizers]]) -> None:
        path, pair = old
        wanted = tensors(*pair)
        surplus = next(name for name in wanted if name.startswith("optimizer.state."))
        wanted[f"{surplus}_more"] = wanted[surplus]
        with pytest.raises(MoestroError, match=f"it does not hold {re.escape(surplus)}_more"):
            load_checkpoint(path, wanted)
