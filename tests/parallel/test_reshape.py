"""Every layout loads the checkpoint of every other, to the last bit, and computes the same next loss."""

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks

from moestro.checkpoint.store import Progress, load_checkpoint, save_checkpoint
from moestro.optim.update import Update
from moestro.parallel.build import buffers
from moestro.parallel.logical import LogicalTensor
from moestro.train.engine import Engine
from parallel.cases import CHOICES, MESH, Case
from parallel.test_equal import one_step, trainer

STEPS_BEFORE = 2


def case(world_size: int, **settings: Any) -> Case:
    """Muon and AdamW, a selection bias with moments: all there is to save."""
    choices = {name: values[0] for name, values in CHOICES.items()} | {"model": "bias", "optimizer": "muon"}
    sizes = tuple((name, settings.pop(name, 1)) for name in MESH)
    return Case(world_size, sizes, tuple((choices | settings).items()))


LAYOUTS = [
    case(1),
    case(2, dp=2, ep=2),  # ZeRO-1
    case(2, pp=2, schedule="zbv"),
    case(4, fsdp=4),
    case(4, dp=2, fsdp=2, ep=4),
    case(4, dp=2, tp=2, ep=2),
    case(4, pp=2, dp=2, ep=2, zero=0, schedule="interleaved"),
    case(4, cp=2, tp=2),
    case(4, fsdp=2, cp=2, ep=2, zero=2),
]


def state(engine: Engine, update: Update) -> dict[str, LogicalTensor]:
    return update.parameters_state() | buffers(engine.models) | update.state()


def save_all(rank: int, world_size: int, folder: str) -> None:
    for layout in LAYOUTS:
        if layout.world_size != world_size:
            continue
        engine, update = trainer(layout.config(), world_size)
        for step in range(STEPS_BEFORE):
            one_step(engine, update, step)
        path = Path(folder) / layout.name
        save_checkpoint(path, state(engine, update), Progress(STEPS_BEFORE, 0, 0.0), 1, engine.mesh.world)
        loss = float(one_step(engine, update, STEPS_BEFORE).loss)
        if rank == 0:
            (path / "next_loss").write_text(repr(loss))


def load_all(rank: int, world_size: int, folder: str, distances: range, stepping: range) -> None:
    """Each layout loads from those so many places on in the list, and makes a step from those of `stepping`."""
    for i, layout in enumerate(LAYOUTS):
        if layout.world_size != world_size:
            continue
        engine, update = trainer(layout.config(), world_size)
        one_step(engine, update, 99)  # something to overwrite
        for distance in distances:
            source = LAYOUTS[(i + distance) % len(LAYOUTS)]
            path = Path(folder) / source.name
            tensors = state(engine, update)
            load_checkpoint(path / f"step_{STEPS_BEFORE:08d}", tensors, engine.mesh.world)
            update.after_load()
            pair = f"{source.name} → {layout.name}"
            assert_same_bits(state(engine, update), torch.load(path / "wholes.pt"), pair)
            if distance in stepping:
                loss, expected = one_step(engine, update, STEPS_BEFORE).loss, float((path / "next_loss").read_text())
                assert float(loss) == pytest.approx(expected, rel=1e-6), pair


def assert_same_bits(tensors: dict[str, LogicalTensor], wholes: dict[str, torch.Tensor], pair: str) -> None:
    for name, logical in tensors.items():
        for chunk in logical.chunks:
            place = tuple(slice(s, s + n) for s, n in zip(chunk.start, chunk.tensor.shape, strict=True))
            assert torch.equal(chunk.tensor, wholes[name][place]), f"{pair}: {name}"


def write_wholes(folder: Path) -> None:
    """What each checkpoint holds, read back in one piece."""
    engine, update = trainer(LAYOUTS[0].config(), 1)
    tensors = state(engine, update)
    for layout in LAYOUTS:
        load_checkpoint(folder / layout.name / f"step_{STEPS_BEFORE:08d}", tensors)
        wholes = {name: logical.chunks[0].tensor.clone() for name, logical in tensors.items()}
        assert all(value.any() for name, value in wholes.items() if not name.endswith(".bias")), "nothing was saved"
        torch.save(wholes, folder / layout.name / "wholes.pt")


def save_and_load(folder: Path, distances: range, stepping: range) -> None:
    sizes = sorted({layout.world_size for layout in LAYOUTS})
    for size in sizes:
        run_ranks(save_all, size, size, str(folder), timeout_s=400)
    write_wholes(folder)
    reference = float((folder / LAYOUTS[0].name / "next_loss").read_text())
    for layout in LAYOUTS:
        assert float((folder / layout.name / "next_loss").read_text()) == pytest.approx(reference, rel=1e-5)
    for size in sizes:
        run_ranks(load_all, size, size, str(folder), distances, stepping, timeout_s=600)


def test_every_pair(tmp_path: Path) -> None:
    """Of each pair one loads what the other saved, and each makes a step from one of them."""
    save_and_load(tmp_path, range(1, len(LAYOUTS) // 2 + 1), range(1, 2))


@pytest.mark.slow
def test_all_ordered_pairs(tmp_path: Path) -> None:
    save_and_load(tmp_path, range(len(LAYOUTS)), range(len(LAYOUTS)))
