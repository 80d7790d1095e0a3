"""Every layout equals one process: losses, gradients, routing, clip norm and balance losses, over up to ten steps."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks

from moestro.config import Config
from moestro.optim.update import Update
from moestro.parallel.layout import resolve_layout
from moestro.train.engine import Engine, build_engine, build_update
from moestro.train.step import StepResult, train_step
from parallel.cases import STEPS, Case, generate, global_batch, make_config

CPU = torch.device("cpu")
# Of each world size, the layouts that cover most pairs of choices. The first two of them make all steps, the others as
# many as show that an update is wrong, or a second one. All layouts in all steps are marked slow.
QUICK = {2: 22, 4: 14, 8: 6}
WHOLE, FEW_STEPS = 2, 3


def trainer(config: Config, world_size: int) -> tuple[Engine, Update]:
    engine, parts = build_engine(config, resolve_layout(config, world_size), CPU)
    engine.train()
    return engine, build_update(config, engine, parts)


def one_step(engine: Engine, update: Update, step: int) -> StepResult:
    layout, place = engine.mesh.layout, engine.mesh.place
    whole, size = global_batch(step), layout.micro_batch_size
    first = place.batch * size * layout.micro_batches
    parts = [
        type(whole)(*(value[i : i + size] for value in vars(whole).values()))
        for i in range(first, first + size * layout.micro_batches, size)
    ]
    return train_step(engine, update, parts, grad_clip=0.5)


def figures(result: StepResult) -> dict[str, Any]:
    return {
        "loss": float(result.loss),
        "aux_loss": float(result.aux_loss),
        "z_loss": float(result.z_loss),
        "other_loss": float(result.other_loss),
        "mtp_loss": float(result.mtp_loss),
        "grad_norm": float(result.grad_norm),
        "tokens": result.tokens,
        "load": torch.stack([layer.load for layer in result.layers]),
        "dropped": torch.stack([layer.dropped for layer in result.layers]),
        "entropy": torch.stack([layer.token_entropy for layer in result.layers]),
    }


def train_alone(model: str, optimizer: str) -> dict[str, Any]:
    """The reference: what one process computes. The first moments after one step are the clipped gradients, scaled."""
    return reference_of(make_config(model, optimizer), STEPS)


def reference_of(config: Config, count: int) -> dict[str, Any]:
    engine, update = trainer(config, 1)
    steps, moments = [], {}
    for step in range(count):
        steps.append(figures(one_step(engine, update, step)))
        if step == 0:
            moments = {n: t.chunks[0].tensor.clone() for n, t in update.state().items() if is_moment(n)}
    weights = {n: t.chunks[0].tensor.clone() for n, t in update.parameters_state().items()}
    return {"steps": steps, "moments": moments, "weights": weights}


def is_moment(name: str) -> bool:
    return name.endswith((".exp_avg", ".momentum_buffer"))


def differences(case: Any, reference: dict[str, Any], steps: int = STEPS, limit: float = 1e-5) -> list[str]:
    """What this rank sees that one process does not. Never raises, so that ranks stay in step."""
    found = []
    config = case.config()
    engine, update = trainer(config, case.world_size)
    for step in range(steps):
        got, expected = figures(one_step(engine, update, step)), reference["steps"][step]
        where = f"{case.name}, step {step + 1}: "
        for name in ("tokens", "loss", "aux_loss", "z_loss", "other_loss", "mtp_loss", "grad_norm"):
            allowed = 1e-5 if step == 0 or name == "loss" else 1e-4
            if got[name] != pytest.approx(expected[name], rel=allowed, abs=1e-7):
                found.append(f"{where}{name} {got[name]} instead of {expected[name]}")
        for name in ("load", "dropped", "entropy"):
            if not torch.allclose(got[name], expected[name], rtol=1e-5, atol=1e-6):
                found.append(where + name)
        if step == 0:
            found += unlike(update, reference["moments"], where, limit)
    return found


def unlike(update: Update, moments: dict[str, torch.Tensor], where: str, limit: float = 1e-5) -> list[str]:
    """First moments of which a box differs from its place in the whole by `limit` of the whole's largest entry."""
    found = []
    for name, logical in update.state().items():
        if not is_moment(name):
            continue
        whole = moments[name]
        for chunk in logical.chunks:
            place = tuple(slice(s, s + n) for s, n in zip(chunk.start, chunk.tensor.shape, strict=True))
            error = (chunk.tensor - whole[place]).abs().max() / whole.abs().max()
            if logical.shape != whole.shape or not error < limit:
                found.append(f"{where}{name} differs by {error:.1e}")
    return found


def check_all(rank: int, cases: list[tuple[Case, int]], file: str) -> None:
    """cases: with the number of steps of each."""
    references = torch.load(file)
    failures = [line for case, steps in cases for line in differences(case, references[case.reference], steps)]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, failures)
    failures = sorted({line for lines in everywhere for line in lines})
    assert not failures, f"{len(failures)} differences:\n" + "\n".join(failures[:20])


@pytest.mark.parametrize("world_size", QUICK)
def test_layouts(world_size: int, references: Path) -> None:
    cases = [
        (case, STEPS if i < WHOLE else FEW_STEPS) for i, case in enumerate(generate(world_size)[: QUICK[world_size]])
    ]
    run_ranks(check_all, world_size, cases, str(references), timeout_s=900)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", QUICK)
def test_all_layouts(world_size: int, references: Path) -> None:
    cases = [(case, STEPS) for case in generate(world_size)]
    run_ranks(check_all, world_size, cases, str(references), timeout_s=3600)


def test_every_pair_of_dimensions_occurs() -> None:
    cases = [case for size, count in QUICK.items() for case in generate(size)[:count]]
    assert len(cases) >= 40
    split = [{name for name, size in case.sizes if size > 1} for case in cases]
    dimensions = sorted(set().union(*split))
    assert dimensions == sorted(("pp", "dp", "fsdp", "cp", "tp", "ep"))
    for a in dimensions:
        for b in dimensions:
            assert any({a, b} <= names for names in split), f"{a} with {b}"
