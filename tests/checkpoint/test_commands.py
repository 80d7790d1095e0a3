"""`moestro checkpoint`: what it says of good and damaged checkpoints, and what it makes of them."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from cli.helpers import moestro
from safetensors.torch import load_file
from train.helpers import config

from checkpoint.state import make, tensors, work
from moestro.checkpoint.inspect import _meaning
from moestro.checkpoint.manifest import MANIFEST, problem
from moestro.checkpoint.store import Progress, load_checkpoint, save_checkpoint
from moestro.config import to_toml
from moestro.parallel.logical import Chunk, LogicalTensor


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with checkpoints of steps 1 and 2; the experts of the second in two boxes each."""
    run = tmp_path_factory.mktemp("made") / "run"
    run.mkdir()
    (run / "config.toml").write_text(to_toml(config(run.parent)))
    (run / "tokenizer.json").write_text('{"kind": "byte"}')
    pair = make()
    for step in (1, 2):
        work(*pair, steps=1)
        held = tensors(*pair)
        if step == 2:
            held = {name: halved(tensor) if ".experts." in name else tensor for name, tensor in held.items()}
        save_checkpoint(run / "checkpoints", held, Progress(step, 1000 * step, 2.0), keep=2)
    return run


def halved(tensor: LogicalTensor) -> LogicalTensor:
    whole = tensor.chunks[0].tensor
    halves = [Chunk((2 * i, *(0,) * (whole.dim() - 1)), half) for i, half in enumerate(whole.split(2))]
    return LogicalTensor(tensor.shape, halves)


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def newest(run: Path) -> Path:
    return run / "checkpoints" / "step_00000002"


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def values(checkpoint: Path) -> dict[str, torch.Tensor]:
    held = tensors(*make(seed=9))
    load_checkpoint(checkpoint, held)
    return {name: tensor.chunks[0].tensor for name, tensor in held.items()}


class TestInspect:
    @pytest.mark.parametrize("which", ["", "checkpoints", "checkpoints/step_00000002"])
    def test_text(self, which: str, run: Path) -> None:
        done = moestro("checkpoint", "inspect", str(run / which))
        assert (done.code, done.err) == (0, "")
        assert f"{newest(run)}  format 2" in done.out
        assert "step 2 · 2,000 tokens · 2 s of training · written by 1 rank" in done.out
        rows = [line.split() for line in done.out.splitlines()]
        assert ["embed_tokens.weight", "[257,", "16]", "float32", "1", "16.4", "kB", "32.9", "kB"] in rows
        experts = ["layers.*.mlp.experts.gate_up_proj", "2", "[4,", "2,", "16,", "16]", "float32", "4", "16.4", "kB"]
        assert [*experts, "16.4", "kB"] in rows
        assert "exp_avg of 7 tensors" in done.out
        assert "[e, 0] is the gate and [e, 1] the up projection of expert e, each 16 × 16" in done.out

    def test_json(self, run: Path) -> None:
        done = moestro("checkpoint", "inspect", str(run), "--json")
        held = json.loads(done.out)
        assert held["progress"] == {"step": 2, "tokens": 2000, "train_time_s": 2.0, "skipped": [], "recent": []}
        assert held["world_size"] == 1
        assert {t["name"]: t["shape"] for t in held["tensors"]} == {
            name: list(value.shape) for name, value in values(newest(run)).items()
        }
        boxes = {t["name"]: t["boxes"] for t in held["tensors"]}
        assert boxes["model.layers.1.mlp.experts.down_proj"] == 2
        assert boxes["model.norm.weight"] == 1
        assert sum(t["bytes"] for t in held["tensors"]) == sum(v.nbytes for v in values(newest(run)).values())
        assert held["files"]["__0_0.distcp"] == (newest(run) / "__0_0.distcp").stat().st_size

    def test_of_a_run_passes_over_the_damaged(self, run: Path) -> None:
        flip(newest(run) / "__0_0.distcp", 5000)
        done = moestro("checkpoint", "inspect", str(run))
        assert done.code == 0
        assert "step 1 ·" in done.out
        assert "step_00000002 is damaged (__0_0.distcp has a wrong checksum) and was passed over" in done.err

    def test_garbled_contents(self, run: Path) -> None:
        (newest(run) / ".metadata").write_bytes(b"\x80\x04nonsense")
        done = moestro("checkpoint", "inspect", str(newest(run)))
        assert done.code == 2
        assert f"error: checkpoint {newest(run)} is damaged" in done.err
        assert done.err.count("\n") <= 2


class TestVerify:
    def test_good(self, run: Path) -> None:
        done = moestro("checkpoint", "verify", str(run))
        assert (done.code, done.err) == (0, "")
        assert [line.split("  ")[1] for line in done.out.splitlines()] == ["good", "good"]
        assert moestro("checkpoint", "verify", str(newest(run))).out.count("  good  ") == 1

    def test_a_flipped_bit_in_a_tensor_names_it(self, run: Path) -> None:
        data = newest(run) / "__0_0.distcp"
        value = values(newest(run))["model.layers.1.mlp.router.weight"]
        at = data.read_bytes().index(value.numpy().tobytes())
        flip(data, at + 10)
        done = moestro("checkpoint", "verify", str(run))
        assert done.code == 2
        assert (
            f"{newest(run)}: __0_0.distcp has a wrong checksum (damaged: model.layers.1.mlp.router.weight)" in done.err
        )
        assert "step_00000001  good" in done.out

    def test_a_missing_file_names_what_it_held(self, run: Path) -> None:
        (newest(run) / "__0_0.distcp").unlink()
        done = moestro("checkpoint", "verify", str(newest(run)))
        assert done.code == 2
        assert "__0_0.distcp is missing (damaged: model.embed_tokens.weight" in done.err
        assert " more)" in done.err

    @pytest.mark.parametrize("file", [MANIFEST, ".metadata"])
    def test_damage_of_the_lists_themselves(self, file: str, run: Path) -> None:
        flip(newest(run) / file, 100)
        done = moestro("checkpoint", "verify", str(newest(run)))
        assert done.code == 2
        assert file in done.err


class TestReshape:
    @pytest.mark.parametrize("files", [1, 3])
    def test_every_tensor_stays_the_same(
        self, files: int, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("moestro.checkpoint.write.SMALLEST_PIECE", 2048)
        done = moestro("checkpoint", "reshape", str(run), str(tmp_path / "new"), "--files", str(files))
        assert done.code == 0, done.err
        data = sorted(p.name for p in (tmp_path / "new").glob("*.distcp"))
        assert data == [f"__{i}_0.distcp" for i in range(files)]
        sizes = [(tmp_path / "new" / name).stat().st_size for name in data]
        assert max(sizes) < 1.3 * sum(sizes) / files
        assert problem(tmp_path / "new") is None
        expected, got = values(newest(run)), values(tmp_path / "new")
        for name, value in expected.items():
            assert torch.equal(got[name], value), name

    def test_there_already(self, run: Path) -> None:
        done = moestro("checkpoint", "reshape", str(run), str(run / "checkpoints"))
        assert done.code == 2
        assert done.err == f"error: {run / 'checkpoints'} is there already; choose another name or remove it\n"

    def test_of_a_damaged_one(self, run: Path, tmp_path: Path) -> None:
        flip(newest(run) / "__0_0.distcp", 5000)
        done = moestro("checkpoint", "reshape", str(newest(run)), str(tmp_path / "new"))
        assert done.code == 2
        assert "is damaged: __0_0.distcp has a wrong checksum" in done.err
        assert [p.name for p in tmp_path.iterdir()] == ["run"]

    def test_nothing_is_left_of_one_that_fails(
        self, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("moestro.checkpoint.write._Counting.write", full)
        done = moestro("checkpoint", "reshape", str(run), str(tmp_path / "new"))
        assert done.code == 2
        assert "No space left on device" in done.err
        assert [p.name for p in tmp_path.iterdir()] == ["run"]


class TestExport:
    def test_one_file(self, run: Path, tmp_path: Path) -> None:
        done = moestro("checkpoint", "export", str(run), str(tmp_path / "out"), "--format", "moestro")
        assert done.code == 0, done.err
        names = ["config.toml", "model.safetensors", "tokenizer.json"]
        assert sorted(p.name for p in (tmp_path / "out").iterdir()) == names
        assert (tmp_path / "out" / "config.toml").read_text() == (run / "config.toml").read_text()
        model, _ = make(seed=4)
        model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
        for name, value in model.state_dict().items():
            assert torch.equal(value, values(newest(run))[f"model.{name}"]), name

    def test_several_files_and_an_index(self, run: Path, tmp_path: Path) -> None:
        limit = 20_000
        size = str(limit / 2**30)
        form = ("--format", "moestro", "--max-shard-gib", size)
        done = moestro("checkpoint", "export", str(newest(run)), str(tmp_path / "out"), *form)
        assert done.code == 0, done.err
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        files = sorted(set(index["weight_map"].values()))
        assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
        assert len(files) > 1
        found = {}
        for file in files:
            part = load_file(tmp_path / "out" / file)
            assert sum(v.nbytes for v in part.values()) <= limit or len(part) == 1
            assert {index["weight_map"][name] for name in part} == {file}
            found |= part
        expected = {n.removeprefix("model."): v for n, v in values(newest(run)).items() if n.startswith("model.")}
        assert found.keys() == expected.keys() == index["weight_map"].keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert index["metadata"]["total_size"] == sum(v.nbytes for v in expected.values())


class TestWrongPaths:
    @pytest.mark.parametrize(
        ("path", "message"),
        [
            ("nowhere", "holds no checkpoint; give a step_… folder, or a run's folder for its newest"),
            ("step_00000009", "there is no checkpoint"),
            ("empty", "holds no checkpoint"),
            ("begun", "no "),
            ("hf", "holds no checkpoint; if it is a Hugging Face model, `moestro checkpoint import` it first"),
        ],
    )
    @pytest.mark.parametrize("command", [("inspect",), ("verify",), ("reshape", "new"), ("export", "new")])
    def test_is_one_line(self, command: tuple[str, ...], path: str, message: str, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "hf").mkdir()
        (tmp_path / "hf" / "config.json").write_text("{}")
        (tmp_path / "begun" / "checkpoints").mkdir(parents=True)
        name, *destination = command
        done = moestro("checkpoint", name, str(tmp_path / path), *(str(tmp_path / d) for d in destination))
        assert done.code == 2
        assert done.err.startswith("error: ")
        assert message in done.err
        assert done.err.count("\n") == 1
        assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("products", "said"), [(2, r"\[e, 0\] is the gate and \[e, 1\] the up"), (1, "without gate")])
def test_inspect_says_what_packed_experts_are(products: int, said: str) -> None:
    text = _meaning("layers.0.mlp.experts.gate_up_proj", (4, products, 16, 8))
    assert text is not None
    assert re.search(rf"^4 experts.*{said}.* projection of expert e.*16 × 8", text)
