"""Looks at weights and replicas, alone and on three ranks of which one is sick."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks

from moestro.config.guard import GuardConfig
from moestro.optim.update import Update
from moestro.parallel.build import build_model, whole_parts
from moestro.parallel.layout import ONE
from moestro.parallel.mesh import build_mesh
from moestro.train import loop, probes
from moestro.train.incidents import incidents
from moestro.train.loop import train
from moestro.train.probes import UpdateSizes, differing_products, differing_weights, layer_norms
from moestro.train.step import LayerLoad, StepResult
from moestro.train.watch import Watch

from .helpers import assert_equal_state, config, state

CPU = torch.device("cpu")


@pytest.fixture
def update(tmp_path: Path) -> Update:
    settings = config(tmp_path, {"model": {"num_layers": 4, "vocab_size": 257}})
    model = build_model(settings, CPU)
    return Update([model], settings.optim, build_mesh(ONE, CPU), whole_parts(model), "auto")


def scale(update: Update, layer: int, factor: float) -> None:
    for name, tensor in update.parameters_state().items():
        if name.startswith(f"model.layers.{layer}."):
            tensor.chunks[0].tensor.mul_(factor)


class TestLayerNorms:
    def test_are_root_mean_squares_over_matrices(self, update: Update) -> None:
        matrices = [
            tensor.chunks[0].tensor.flatten()
            for name, tensor in update.parameters_state().items()
            if name.startswith("model.layers.1.") and len(tensor.shape) > 1
        ]
        norms = layer_norms(update)
        assert len(norms) == 4
        assert norms[1] == pytest.approx(float(torch.cat(matrices).square().mean().sqrt()), rel=1e-5)

    def test_scale_with_the_weights(self, update: Update) -> None:
        before = layer_norms(update)
        scale(update, 2, 0.5)
        after = layer_norms(update)
        assert after[2] == pytest.approx(before[2] / 2, rel=1e-5)
        assert after[:2] == before[:2]


def test_update_sizes_are_in_learning_rates(update: Update) -> None:
    before = UpdateSizes(update)
    for tensor, lr in update.stepped().values():
        tensor.add_(2 * lr)
    sizes, lrs = before.measure(update)
    assert sizes.keys() == update.stepped().keys()
    assert all(sizes[name] == pytest.approx(2 * lrs[name], rel=1e-3) for name in sizes)


def result(loads: list[list[float]]) -> StepResult:
    zero = torch.zeros(())
    layers = [LayerLoad(torch.tensor(load), zero, zero) for load in loads]
    return StepResult(zero, zero, zero, zero, zero, zero, 1, layers)


class TestWatch:
    def watch(self, folder: Path, **guard: Any) -> Watch:
        return Watch(config(folder, {"guard": {"probe_every": 2, "recompute_every": None, **guard}}))

    def test_a_valley_is_noted_once_when_it_lasts(self, tmp_path: Path, update: Update) -> None:
        watch, seen = self.watch(tmp_path), []
        for step in range(1, 11):
            if step == 4:
                scale(update, 1, 0.8)
            for finding in watch.findings(step, result([]), update):
                seen.append((step, finding.signal, finding.evidence["layer"]))
        assert seen == [(6, "collapse", 1)]

    def test_experts_by_their_mean_load(self, tmp_path: Path, update: Update) -> None:
        """One step without tokens is not death."""
        watch, seen = self.watch(tmp_path), []
        even, one_out = [0.25] * 4, [0.0, 1 / 3, 1 / 3, 1 / 3]
        for step, load in enumerate([even, one_out, one_out, one_out, one_out, one_out], 1):
            for finding in watch.findings(step, result([even, load]), update):
                seen.append((step, finding.signal, finding.evidence))
        assert seen == [(4, "dead_experts", {"dead": {"1": [0]}, "hot": {}, "steps": 2})]

    def test_sizes_of_updates(self, tmp_path: Path, update: Update) -> None:
        watch = self.watch(tmp_path)
        watch.before_update(2, update)
        update.stepped()["norm.weight"][0].fill_(math.nan)
        (finding,) = watch.findings(2, result([]), update)
        assert finding.signal == "update_anomaly"
        assert finding.evidence == {"update_rms_over_lr": {"norm.weight": "nan"}}

    def test_healthy_seeds_are_quiet(self, tmp_path: Path) -> None:
        for seed in range(10):
            settings = config(tmp_path, {"model": {"num_layers": 6, "vocab_size": 257}, "run": {"seed": seed}})
            model = build_model(settings, CPU)
            update = Update([model], settings.optim, build_mesh(ONE, CPU), whole_parts(model), "auto")
            watch = self.watch(tmp_path)
            assert [f for step in range(1, 7) for f in watch.findings(step, result([]), update)] == []


class TestAlone:
    def test_nothing_to_compare_weights_with(self, update: Update) -> None:
        assert differing_weights(update) == []

    def test_the_same_product_twice(self, update: Update, monkeypatch: pytest.MonkeyPatch) -> None:
        assert [differing_products(update, number) for number in range(8)] == [[]] * 8
        real, calls = probes._product, [0]

        def sick(weight: torch.Tensor, seed: int) -> torch.Tensor:
            calls[0] += 1
            out = real(weight, seed)
            out[3, 5] += 1e-6 * (calls[0] == 2)
            return out

        monkeypatch.setattr(probes, "_product", sick)
        (found,) = differing_products(update, 0)
        assert found.ranks == [0]


def flip(weight: torch.Tensor) -> None:
    """The lowest bit of one element."""
    weight.detach().view(torch.int32).view(-1)[7] ^= 1


THREE: dict[str, Any] = {
    "train": {"steps": 6, "global_batch_size": 3, "micro_batch_size": 1, "checkpoint_every": 2},
    "guard": {"checksums_every": 1, "recompute_every": 3},
}


def with_a_sick_rank(rank: int, folder: str, healthy: str, zero: int) -> None:
    layout = {"parallel": {"zero": zero}}
    train(config(Path(healthy), THREE, layout))
    real, calls = loop.train_step, [0]

    def flipped(engine: Any, *args: Any) -> Any:
        calls[0] += 1
        out = real(engine, *args)
        if rank == 1 and calls[0] == 4:  # after the update of step 4, which is to be saved
            flip(engine.models[0].lm_head.weight)
        return out

    loop.train_step = flipped
    product = probes._product
    if rank == 2:
        probes._product = lambda weight, seed: product(weight, seed) * (1 + 1e-5)
    train(config(Path(folder), THREE, layout))
    loop.train_step, probes._product = real, product


@pytest.mark.parametrize("zero", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_flipped_bit_and_a_sick_core_are_named(tmp_path: Path, zero: int) -> None:
    folder, healthy = tmp_path / "sick", tmp_path / "healthy"
    for path in (folder, healthy):
        path.mkdir()
        config(path)
    run_ranks(with_a_sick_rank, 3, str(folder), str(healthy), zero)
    run = folder / "runs" / "tiny"
    found = [(i.signal, i.action, i.rank, i.step) for i in incidents(run)]
    assert found == [
        ("corrupt_compute", "flag", 2, 3),
        ("corrupt_weights", "roll_back", 1, 3),
        ("corrupt_compute", "flag", 2, 3),
        ("corrupt_compute", "flag", 2, 6),
    ]
    weights = incidents(run)[1].evidence
    assert (weights["tensors"], weights["among"]) == (["lm_head.weight"], [0, 1, 2])
    assert_equal_state(state(run), state(healthy / "runs" / "tiny"))
    assert incidents(healthy / "runs" / "tiny") == []


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="counted from 1"):
        GuardConfig(skip_steps=(0,))
