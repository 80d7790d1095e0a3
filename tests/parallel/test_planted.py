"""The bugs that come back in every framework, planted: the comparison with one process must see each of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from torch import Tensor

from moestro.optim.update import Update
from moestro.parallel import comm
from moestro.train import step as step_module
from moestro.train.stage import Stage
from parallel.cases import CHOICES, MESH, Case
from parallel.test_equal import differences


def case(model: str = "lagged", **sizes: int) -> Case:
    choices = {name: values[0] for name, values in CHOICES.items()} | {"model": model, "zero": 0}
    return Case(2, tuple((name, sizes.get(name, 1)) for name in MESH), tuple(choices.items()))


def expert_gradients_times_ep(patch: pytest.MonkeyPatch) -> None:
    """Every ep rank's loss is averaged over data ranks, but an expert has already seen the tokens of all."""
    reduce = Update.reduce_gradients

    def too_large(self: Update) -> None:
        reduce(self)
        for name, parameter in self._named:
            if ".experts." in name:
                assert parameter.grad is not None
                parameter.grad.mul_(2)

    patch.setattr(Update, "reduce_gradients", too_large)


def norm_of_the_own_experts(patch: pytest.MonkeyPatch) -> None:
    """Each rank clips by the norm of what it holds."""

    def local(self: Update, max_norm: float) -> Tensor:
        return torch.nn.utils.clip_grad_norm_([p for _, p in self._named], max_norm)

    patch.setattr(Update, "clip", local)


def balance_over_the_own_layers(patch: pytest.MonkeyPatch) -> None:
    """Under a pipeline each stage takes the mean over its own layers."""
    penalty = Stage._penalty

    def of_the_layers_here(self: Stage, out: Any, share: float) -> Any:
        layers, here = sum(self.model.config.moe_blocks), len(out.router_stats)
        return penalty(self, out, share * layers / here) if here else penalty(self, out, share)

    patch.setattr(Stage, "_penalty", of_the_layers_here)


def balance_of_every_part(patch: pytest.MonkeyPatch) -> None:
    """Each of the ranks that share sequences takes its own tokens' mean for that of all."""
    penalty = Stage._penalty

    def own_mean(self: Stage, stats: Any, share: float) -> Tensor | None:
        return penalty(self, stats, share * 2)

    patch.setattr(Stage, "_penalty", own_mean)


def reduced_load_thrown_away(patch: pytest.MonkeyPatch) -> None:
    """The collective returns a new tensor, and the old one is used."""

    def discarded(x: Tensor, *rest: Any) -> Tensor:
        if not x.is_floating_point():
            return comm.all_reduce(x, *rest)
        comm.all_reduce(x.clone(), *rest)
        return x

    patch.setattr(step_module, "all_reduce", discarded)


def gradients_averaged(patch: pytest.MonkeyPatch) -> None:
    reduce = Update.reduce_gradients

    def averaged(self: Update) -> None:
        reduce(self)
        for _, parameter in self._named:
            assert parameter.grad is not None
            parameter.grad.div_(2)

    patch.setattr(Update, "reduce_gradients", averaged)


def tokens_counted_here(patch: pytest.MonkeyPatch) -> None:
    """Every rank divides by its own tokens and the ranks take the mean."""
    count = step_module._global_counts

    def own(engine: Any, predicted: int, valid: int) -> tuple[int, int]:
        _, routed = count(engine, predicted, valid)
        return predicted * 2, routed

    patch.setattr(step_module, "_global_counts", own)


PLANTED: list[tuple[Callable[[pytest.MonkeyPatch], None], Case, str]] = [
    (expert_gradients_times_ep, case(dp=2, ep=2), "experts"),
    (norm_of_the_own_experts, case(dp=2, ep=2), "grad_norm"),
    (balance_over_the_own_layers, case(pp=2), "router.weight"),
    (balance_of_every_part, case(cp=2), "router.weight"),
    (balance_of_every_part, case(tp=2), "router.weight"),
    (reduced_load_thrown_away, case("bias", dp=2), "load"),
    (gradients_averaged, case(dp=2), "grad_norm"),
    (tokens_counted_here, case(dp=2), "loss"),
]


def check_planted(rank: int, file: str) -> None:
    references = torch.load(file)
    missed = []
    for plant, layout, expected in PLANTED:
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            found = differences(layout, references[layout.reference], steps=2)
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, found)
        if not any(expected in line for lines in everywhere for line in lines):
            missed.append(f"{plant.__name__} on {layout.name}: {found}")
    for layout in {layout for _, layout, _ in PLANTED}:  # without a bug the same comparison is content
        assert differences(layout, references[layout.reference], steps=2) == []
    assert not missed, missed


def test_planted_bugs_are_seen(references: Path) -> None:
    run_ranks(check_planted, 2, str(references), timeout_s=900)
