"""One optimizer step is one step of the global batch, however it is cut into micro-batches."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moestro.config import OptimConfig
from moestro.data.batches import IGNORE, Batch
from moestro.errors import MoestroError
from moestro.model import transformer as transformer_module
from moestro.model.moe.router import Router
from moestro.model.transformer import Transformer
from moestro.optim.build import build_optimizers
from moestro.train.step import NonFiniteError, StepResult

from .helpers import SEQ_LEN, config, flat_state, model_config, train_step

# Lengths of the documents of each sequence; the rest is padding. Predicted tokens: 32, 25, 23 and 4.
LAYOUT = ((32,), (20, 5), (9, 3, 11), (4,))
TOKENS = 84
SCOPES = ("sequence", "group", "global_batch")


class Recorder:
    """Stands where an optimizer stands and keeps the gradients it is given."""

    def __init__(self, model: Transformer) -> None:
        self.model, self.steps = model, 0
        self.grads: dict[str, Tensor] = {}

    def step(self) -> None:
        self.steps += 1
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None, f"{name} has no gradient"
            self.grads[name] = parameter.grad.clone()

    def zero_grad(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None


@dataclass
class Outcome:
    result: StepResult
    grads: dict[str, Tensor]
    buffers: dict[str, Tensor]


def packed(layout: tuple[tuple[int, ...], ...] = LAYOUT, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    shape = (len(layout), SEQ_LEN)
    inputs, labels = (torch.randint(0, 256, shape, generator=generator) for _ in range(2))
    documents, positions = torch.full(shape, -1, dtype=torch.int32), torch.zeros(shape, dtype=torch.int64)
    for row, lengths in enumerate(layout):
        start = 0
        for number, length in enumerate(lengths):
            documents[row, start : start + length] = number
            positions[row, start : start + length] = torch.arange(length)
            start += length
        labels[row, start:] = IGNORE
        inputs[row, start:] = 256
    return Batch(inputs, labels, documents, positions, torch.arange(len(layout)))


def cut(batch: Batch, micro_batch_size: int) -> list[Batch]:
    parts = [getattr(batch, f.name).split(micro_batch_size) for f in fields(batch) if f.name != "media"]
    return [Batch(*part) for part in zip(*parts, strict=True)]


def make_model(recompute: bool = False, double: bool = True, **moe: Any) -> Transformer:
    model = Transformer(model_config(moe=moe), torch.float64 if double else torch.float32, recompute=recompute)
    model.init_weights(0)
    if double:  # the balance buffers stay in fp32
        for parameter in model.parameters():
            parameter.data = parameter.data.double()
    for i, layer in enumerate(model.moe_layers()):  # as after a skewed step; else the lagged loss has no gradient yet
        layer.router.global_load.copy_(torch.tensor([0.55, 0.25, 0.15, 0.05]).roll(i))
    return model


def moe_settings(scope: str, **router: Any) -> dict[str, Any]:
    balance = {"aux_coef": 0.3, "aux_scope": scope, "z_loss_coef": 0.05}
    return {"balance": balance, "router": {"group_size": 8 if scope == "group" else None, **router}}


def one_step(
    micro: int,
    step: Callable[..., StepResult] = train_step,
    grad_clip: float | None = None,
    seed: int = 7,
    **model: Any,
) -> Outcome:
    network = make_model(**model)
    recorder = Recorder(network)
    balance = network.config.moe.balance if network.config.moe else None
    result = step(network, [recorder], cut(packed(), micro), balance, grad_clip, seed)
    assert recorder.steps == 1
    return Outcome(result, recorder.grads, dict(network.named_buffers()))


def assert_same(got: Outcome, expected: Outcome, tolerance: float = 1e-9) -> None:
    """Gradients of every parameter to `tolerance` of their largest entry; figures kept in fp32 to 1e-6."""
    assert got.grads.keys() == expected.grads.keys()
    for name, grad in expected.grads.items():
        assert grad.abs().max() > 0, f"{name} has a zero gradient, which shows nothing"
        error = (got.grads[name] - grad).abs().max() / grad.abs().max()
        assert error < tolerance, f"gradient of {name} differs by {error:.1e}"
    for name in ("loss", "aux_loss", "z_loss", "grad_norm"):
        a, b = float(getattr(got.result, name)), float(getattr(expected.result, name))
        assert a == pytest.approx(b, rel=max(1e-6, tolerance)), name
    assert got.result.tokens == expected.result.tokens
    for a, b in zip(got.result.layers, expected.result.layers, strict=True):
        for f in fields(a):
            torch.testing.assert_close(getattr(a, f.name), getattr(b, f.name), rtol=1e-6, atol=1e-7, msg=f.name)
    for name, buffer in expected.buffers.items():
        torch.testing.assert_close(got.buffers[name], buffer, rtol=1e-6, atol=1e-7, msg=name)


def assert_cut_does_not_matter(
    step: Callable[..., StepResult] = train_step, tolerance: float = 1e-9, **model: Any
) -> None:
    whole = one_step(4, **model)
    for micro in (1, 2):
        assert_same(one_step(micro, step, **model), whole, tolerance)


def refused(folder: Path, settings: dict[str, Any], key: str) -> bool:
    """Whether the configuration itself says no, naming the key."""
    try:
        config(folder, settings)
    except MoestroError as error:
        return key in str(error)
    return False


class TestMicroBatches:
    @pytest.mark.parametrize("scope", SCOPES)
    def test_gradients_and_figures_do_not_depend_on_the_cut(self, scope: str) -> None:
        assert_cut_does_not_matter(**moe_settings(scope))

    @pytest.mark.parametrize("scope", SCOPES)
    def test_in_fp32(self, scope: str) -> None:
        assert_cut_does_not_matter(double=False, tolerance=1e-5, **moe_settings(scope))

    @pytest.mark.parametrize(
        "settings",
        [
            {"router": {"score": "sigmoid"}},
            {"router": {"top_k_before_score": True}},
            {"router": {"jitter": 0.1}},
            {"router": {"capacity_factor": 0.75}},
            {"router": {"capacity_factor": 0.75, "group_size": 8}},
            {"recompute": True, "router": {"jitter": 0.1}},
            {"num_shared_experts": 1},
            {"first_k_dense": 1, "top_k": 1, "router": {"renormalize": False}},
        ],
        ids=str,
    )
    def test_with_other_routers(self, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        if "first_k_dense" in settings:
            monkeypatch.setitem(model_config.__globals__["MODEL"], "intermediate_size", 24)
        base = moe_settings("sequence")
        assert_cut_does_not_matter(**{**base, **settings, "router": settings.get("router", {})})

    def test_capacity_drops_are_counted_alike(self) -> None:
        settings = moe_settings("sequence", capacity_factor=0.75)
        dropped = [one_step(micro, **settings).result.layers[0].dropped for micro in (1, 2, 4)]
        assert dropped[0] > 0.05
        assert torch.equal(dropped[0], dropped[1])
        assert torch.equal(dropped[0], dropped[2])

    @pytest.mark.parametrize("group_size", [24, 64])
    def test_groups_that_straddle_sequences_are_refused_or_harmless(self, group_size: int, tmp_path: Path) -> None:
        settings = moe_settings("group") | {"router": {"group_size": group_size}}
        if not refused(tmp_path, {"model": {"moe": settings}}, "group_size"):
            assert_cut_does_not_matter(**settings)

    @pytest.mark.parametrize(("rule", "optimizer"), [("none", "adamw"), ("sign", "adamw"), ("adamw", "muon")])
    def test_whole_steps_with_bias_and_optimizer(self, rule: str, optimizer: str) -> None:
        after = []
        for micro in (4, 2, 1):
            model = make_model(
                balance={"aux_coef": 0.1, "z_loss_coef": 0.01, "bias_rule": rule, "bias_lr": 0.02},
                router={"jitter": 0.05},
            )
            optimizers = build_optimizers(model, OptimConfig(name=optimizer, eps=1e-6))
            assert model.config.moe is not None
            for number in range(3):
                train_step(model, optimizers, cut(packed(seed=number), micro), model.config.moe.balance, 1.0, 0)
            after.append(flat_state(model, optimizers))
        biases = [v for k, v in after[0].items() if k.endswith("router.bias")]
        assert all((bias.abs().max() > 0) == (rule != "none") for bias in biases)
        # Muon's iteration runs in fp32 and magnifies what is small.
        tolerance = 1e-9 if optimizer == "adamw" else 1e-4
        for other in after[1:]:
            for name, value in after[0].items():
                if isinstance(value, Tensor):
                    torch.testing.assert_close(other[name], value, rtol=tolerance, atol=tolerance, msg=name)

    def test_a_mean_of_micro_batch_means_would_be_caught(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The classic mistake: every micro-batch weighs the same, whatever it predicts."""
        real = transformer_module.linear_cross_entropy

        def mean_of_means(hidden: Tensor, weight: Tensor, labels: Tensor, scale: float) -> Tensor:
            micro_batches = 4 // len(labels)
            return real(hidden, weight, labels, scale=1 / (int((labels != IGNORE).sum()) * micro_batches))

        monkeypatch.setattr(transformer_module, "linear_cross_entropy", mean_of_means)
        with pytest.raises(AssertionError, match="gradient of embed_tokens"):
            assert_cut_does_not_matter(**moe_settings("sequence"))

    @pytest.mark.parametrize("scope", SCOPES)
    def test_equal_weights_of_balance_losses_would_be_caught(self, scope: str) -> None:
        """A balance loss averaged over micro-batches instead of tokens moves the router's gradient."""

        def equally_weighted(model: Transformer, optimizers: Any, batches: list[Batch], *rest: Any) -> StepResult:
            forward = model.forward

            def scaled(
                input_ids: Tensor, positions: Tensor, documents: Tensor | None, seeds: Tensor, **rest: Any
            ) -> Any:
                out = forward(input_ids, positions, documents, seeds, **rest)
                valid = input_ids.numel() if documents is None else int((documents >= 0).sum())
                factor = TOKENS / valid / len(batches)
                stats = [replace(s, aux_loss=s.aux_loss * factor) for s in out.router_stats]
                return replace(out, router_stats=stats)

            model.forward = scaled  # type: ignore[method-assign]
            return train_step(model, optimizers, batches, *rest)

        with pytest.raises(AssertionError, match=r"gradient of .* differs"):
            assert_cut_does_not_matter(equally_weighted, **moe_settings(scope))


class TestAgainstPlainPyTorch:
    """The whole batch at once, with logits, cross entropy and the balance loss written out."""

    @pytest.mark.parametrize("micro", [1, 2, 4])
    def test_loss_and_gradients(self, micro: int) -> None:
        got = one_step(micro, **moe_settings("global_batch"))
        model, batch = make_model(**moe_settings("global_batch")), packed()
        out = model(batch.input_ids, batch.position_ids, batch.document_ids, batch.sample_ids)
        logits = out.hidden @ model.head_weight.t()
        nll = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE)
        aux = sum(stats.aux_loss for stats in out.router_stats) / 2
        z = sum(stats.z_loss for stats in out.router_stats) / 2
        (nll + 0.3 * aux + 0.05 * z).backward()
        assert float(got.result.loss) == pytest.approx(nll.item(), rel=1e-6)
        assert float(got.result.aux_loss) == pytest.approx(aux.item(), rel=1e-6)
        assert float(got.result.z_loss) == pytest.approx(z.item(), rel=1e-6)
        assert got.result.tokens == TOKENS
        total = torch.zeros((), dtype=torch.float64)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(got.grads[name], parameter.grad, rtol=1e-9, atol=1e-12, msg=name)
            total += parameter.grad.square().sum()
        assert float(got.result.grad_norm) == pytest.approx(float(total.sqrt()), rel=1e-9)

    def test_loads_are_shares_of_the_valid_pairs(self) -> None:
        got = one_step(2, **moe_settings("sequence"))
        for layer in got.result.layers:
            assert float(layer.load.sum()) == pytest.approx(1)
            pairs = layer.load * TOKENS * 2
            torch.testing.assert_close(pairs, pairs.round(), rtol=0, atol=1e-4)
            assert 0 < layer.token_entropy <= 1
            assert layer.dropped == 0

    def test_padding_has_no_influence(self) -> None:
        batch = packed()
        other = replace(batch, input_ids=torch.where(batch.labels == IGNORE, 17, batch.input_ids))
        outcomes = []
        for tokens in (batch, other):
            model = make_model(**moe_settings("sequence"))
            recorder = Recorder(model)
            assert model.config.moe is not None
            result = train_step(model, [recorder], cut(tokens, 2), model.config.moe.balance, None, 7)
            outcomes.append(Outcome(result, recorder.grads, dict(model.named_buffers())))
        assert_same(outcomes[1], outcomes[0])


class TestBalanceGradient:
    @pytest.mark.parametrize("scope", [*SCOPES, "micro_batch"])
    def test_reaches_every_router_in_proportion_to_its_coefficient(self, scope: str) -> None:
        def router_grads(coefficient: float) -> list[Tensor]:
            moe = moe_settings(scope)
            moe["balance"] = {"aux_coef": coefficient, "aux_scope": scope}
            outcome = one_step(2, **moe)
            return [grad for name, grad in outcome.grads.items() if name.endswith("router.weight")]

        without, once, twice = router_grads(0.0), router_grads(1.0), router_grads(2.0)
        assert len(without) == 2
        for none, one, two in zip(without, once, twice, strict=True):
            assert (one - none).abs().max() > 1e-4
            torch.testing.assert_close(two - none, 2 * (one - none), rtol=1e-8, atol=1e-12)

    def test_descends_towards_an_even_load(self) -> None:
        """The routers of a collapsed model, trained alone, leave the expert they all prefer."""
        imbalance = {}
        for coefficient in (0.0, 1.0):
            model = make_model(balance={"aux_coef": coefficient, "aux_scope": "global_batch"})
            routers = [layer.router for layer in model.moe_layers()]
            with torch.no_grad():
                model.embed_tokens.weight[:, 0] = 1.0  # a feature of every token
                for router in routers:
                    router.weight[0, 0] += 1.0
            optimizer = torch.optim.SGD([router.weight for router in routers], lr=0.2)
            assert model.config.moe is not None
            for _ in range(12):
                result = train_step(model, [optimizer], cut(packed(), 2), model.config.moe.balance, None, 0)
            imbalance[coefficient] = float(result.aux_loss)
        assert imbalance[0.0] > 1.8
        assert imbalance[1.0] < 1.6

    def test_z_loss_shrinks_the_logits(self) -> None:
        with_z, without = (
            one_step(4, balance={"aux_coef": 0.0, "z_loss_coef": c}, router={}).grads for c in (1.0, 0.0)
        )
        name = "layers.0.mlp.router.weight"
        assert (with_z[name] - without[name]).abs().max() > 1e-3

    def test_a_dense_model_has_no_balance(self) -> None:
        model = Transformer(model_config(moe=None, intermediate_size=24))
        model.init_weights(0)
        result = train_step(model, [Recorder(model)], cut(packed(), 2), None, 1.0, 0)
        assert result.layers == []
        assert result.aux_loss == 0


class TestOncePerStep:
    @pytest.mark.parametrize("rule", ["sign", "adamw"])
    @pytest.mark.parametrize("recompute", [False, True])
    @pytest.mark.parametrize("micro", [1, 4])
    def test_bias_and_load_move_once(
        self, rule: str, recompute: bool, micro: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls = []
        real = Router.update_balance

        def noted(router: Router, load: Tensor, sums: Tensor) -> None:
            calls.append(load.clone())
            real(router, load, sums)

        monkeypatch.setattr(Router, "update_balance", noted)
        got = one_step(micro, recompute=recompute, balance={"bias_rule": rule, "bias_lr": 0.01}, router={})
        assert len(calls) == 2  # one a layer
        for pairs, layer in zip(calls, got.result.layers, strict=True):
            assert pairs.sum() == TOKENS * 2  # padding is not counted, and no token twice
            torch.testing.assert_close(pairs / pairs.sum(), layer.load)
        for i, layer in enumerate(got.result.layers):
            prefix = f"layers.{i}.mlp.router."
            torch.testing.assert_close(got.buffers[prefix + "global_load"], layer.load)
            bias = got.buffers[prefix + "bias"]
            assert float(bias.sum()) == pytest.approx(0, abs=1e-7)
            assert bias.abs().max() > 0
            assert bias.abs().max() <= 0.02
            assert bias.argmin() == layer.load.argmax() or rule == "sign"
            if rule == "adamw":
                assert (got.buffers[prefix + "bias_moments"][2] == 1).all()

    def test_recompute_gives_the_same_step(self) -> None:
        settings = {"balance": {"bias_rule": "sign", "aux_coef": 0.1}, "router": {"jitter": 0.1}}
        assert_same(one_step(2, recompute=True, **settings), one_step(2, recompute=False, **settings), 1e-12)

    def test_jitter_depends_on_the_run_seed(self) -> None:
        settings = {"router": {"jitter": 0.1}, "balance": {"aux_coef": 0.1}}
        a, b, c = (one_step(2, seed=seed, **settings) for seed in (1, 1, 2))
        assert a.result.loss == b.result.loss
        assert a.result.loss != c.result.loss

    @pytest.mark.parametrize("seed", [2**31, 2**40])
    def test_large_seeds_are_refused_or_work(self, seed: int, tmp_path: Path) -> None:
        settings = {"router": {"jitter": 0.1}, "balance": {"aux_coef": 0.1}}
        if not refused(tmp_path, {"run": {"seed": seed}}, "seed"):
            assert math.isfinite(float(one_step(2, seed=seed, **settings).result.loss))


class TestClipping:
    def test_scales_all_gradients_by_one_factor(self) -> None:
        settings = moe_settings("sequence")
        free = one_step(2, **settings)
        norm = float(free.result.grad_norm)
        clipped = one_step(2, grad_clip=norm / 4, **settings)
        assert float(clipped.result.grad_norm) == pytest.approx(norm)  # reported as it was
        for name, grad in free.grads.items():
            torch.testing.assert_close(clipped.grads[name], grad / 4, rtol=1e-4, atol=1e-12, msg=name)

    def test_leaves_small_gradients_alone(self) -> None:
        settings = moe_settings("sequence")
        free, clipped = one_step(2, **settings), one_step(2, grad_clip=1e4, **settings)
        for name, grad in free.grads.items():
            assert torch.equal(clipped.grads[name], grad)


class TestNonFinite:
    @pytest.mark.parametrize(
        ("where", "value", "grad_clip"),
        [
            ("embed_tokens.weight", math.nan, 1.0),
            ("embed_tokens.weight", math.inf, None),
            ("layers.1.mlp.router.weight", math.nan, None),
            ("norm.weight", math.inf, 1.0),
        ],
    )
    def test_nothing_is_touched(self, where: str, value: float, grad_clip: float | None) -> None:
        model = make_model(balance={"bias_rule": "sign"}, router={})
        assert model.config.moe is not None
        optimizers = build_optimizers(model, OptimConfig(name="muon"))
        train_step(model, optimizers, cut(packed(), 2), model.config.moe.balance, grad_clip, 0)
        with torch.no_grad():
            model.get_parameter(where).view(-1)[0:17] = value
        before = flat_state(model, optimizers)
        with pytest.raises(NonFiniteError):
            train_step(model, optimizers, cut(packed(), 2), model.config.moe.balance, grad_clip, 0)
        for name, old in before.items():
            new = flat_state(model, optimizers)[name]
            same = torch.equal(new.nan_to_num(), old.nan_to_num()) if isinstance(old, Tensor) else new == old
            assert same, name
        assert all(parameter.grad is None for parameter in model.parameters())

    def test_a_loss_that_is_nan_in_one_micro_batch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = make_model()
        recorder = Recorder(model)
        real, calls = transformer_module.linear_cross_entropy, []

        def planted(*args: Any, **kwargs: Any) -> Tensor:
            calls.append(1)
            return real(*args, **kwargs) * (math.nan if len(calls) == 2 else 1)

        monkeypatch.setattr(transformer_module, "linear_cross_entropy", planted)
        with pytest.raises(NonFiniteError, match="nan"):
            train_step(model, [recorder], cut(packed(), 1), None, 1.0, 0)
        assert recorder.steps == 0
