"""`moestro analyze routers`: every router in a tiny model, the figures by hand, and what a user may get wrong."""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from cli.helpers import config_file, moestro
from train.helpers import config

from moestro.analyze import routers
from moestro.analyze.routers import (
    KINDS,
    VARIANTS,
    RouterFigures,
    compare_routers,
    fitting,
    forward_times,
    gini,
    router_of,
    router_params,
    variant,
)
from moestro.config import Config, count, load_config
from moestro.errors import MoestroError
from moestro.model.transformer import Transformer

SMALL = {
    "model": {"vocab_size": 257, "moe": {"num_experts": 8, "router": {"hidden_size": 8, "score": "sigmoid"}}},
    "train": {"global_batch_size": 2},
}


@pytest.fixture(scope="module", autouse=True)
def short_timing() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routers, "LATENCY_ROUNDS", 1)
        patch.setattr(routers, "LATENCY_TOKENS", 256)
        yield


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return config(tmp_path_factory.mktemp("routers"), SMALL)


@pytest.fixture(scope="module")
def figures(settings: Config) -> dict[str, RouterFigures]:
    return {f.name: f for f in compare_routers(settings, list(VARIANTS), [0], steps=2)}


class TestVariants:
    def test_all_fit_the_demo(self) -> None:
        demo = load_config("sotu-tiny").config
        assert fitting(demo) == (list(VARIANTS), [])

    @pytest.mark.parametrize("name", VARIANTS)
    def test_counted_parameters_are_the_built_ones(self, settings: Config, name: str) -> None:
        model = variant(settings, name).model
        built = router_of(model)
        assert router_params(model) == sum(p.numel() for p in built.parameters())
        if name != "zaya":  # whose first layer has no state to carry
            parts = count(model, settings.data.seq_len)
            counted = parts.part("router").total + parts.part("auxiliary router").total
            assert counted == model.num_layers * router_params(model)

    def test_weights_are_those_of_the_model(self, settings: Config) -> None:
        model = variant(settings, "hybrid").model
        whole = Transformer(model)
        whole.init_weights(0)
        expected = whole.moe_layers()[-1].router.state_dict()
        found = router_of(model).state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)

    def test_a_kind_keeps_the_rest_and_a_design_starts_from_defaults(self, tmp_path: Path) -> None:
        dense = {"selection": "dense", "eval_top_k": 2, "renormalize": False, "hidden_size": 8}
        changed = config(tmp_path, {"model": {"moe": {"router": dense, "balance": {"mi_coef": 0.1}}}})
        kept, fresh = (variant(changed, name).model.moe for name in ("mlp", "switch"))
        assert kept is not None
        assert fresh is not None
        assert (kept.router.kind, kept.router.selection, kept.router.eval_top_k) == ("mlp", "dense", 2)
        assert (fresh.router.selection, fresh.router.eval_top_k, fresh.router.jitter) == ("top_k", None, 0.01)
        assert fresh.router.hidden_size == 8

    def test_kinds_are_variants_that_change_only_how_logits_are_made(self) -> None:
        assert set(KINDS) < set(VARIANTS)
        assert all(VARIANTS[name]["router"] == {"kind": name} for name in KINDS)


class TestFigures:
    def test_every_router_has_them_in_range(self, figures: dict[str, RouterFigures]) -> None:
        assert list(figures) == list(VARIANTS)
        for name, f in figures.items():
            values = asdict(f)
            assert all(len(values[key]) == 1 for key in ("loss", "token_entropy", "load_entropy", "gini")), name
            assert f.loss[0] == pytest.approx(math.log(257), rel=0.2), name
            for share in (f.token_entropy[0], f.load_entropy[0], f.active_share[0], f.dropped[0]):
                assert -1e-6 <= share <= 1 + 1e-6, name
            assert 1 - 1e-6 <= f.max_over_mean[0] <= 9, name
            assert all(0 < us < 1e7 for us in f.forward_us), name

    def test_even_by_construction(self, figures: dict[str, RouterFigures]) -> None:
        """BASE to a token, expert choice where the text has no padding, and a layer that uses all."""
        assert figures["base"].load_entropy[0] > 0.98
        assert figures["dense"].load_entropy[0] == pytest.approx(1)
        assert figures["dense"].gini[0] == pytest.approx(0, abs=1e-6)

    def test_hash_has_no_parameter_and_even_scores_of_its_choices(self, figures: dict[str, RouterFigures]) -> None:
        assert figures["hash"].params_per_layer == 0
        assert figures["hash"].token_entropy[0] == pytest.approx(math.log(2) / math.log(8), abs=1e-5)

    def test_seeds_differ_and_repeat(self, settings: Config, figures: dict[str, RouterFigures]) -> None:
        (two,) = compare_routers(settings, ["linear"], [0, 1], steps=2)
        assert two.loss[0] == figures["linear"].loss[0]
        assert two.loss[1] != two.loss[0]

    def test_times_take_turns(self, settings: Config, monkeypatch: pytest.MonkeyPatch) -> None:
        """A clock that a call moves by one second: as many tokens as asked for, so a million microseconds."""
        ticks = iter(range(100))
        monkeypatch.setattr(time, "process_time", lambda: float(next(ticks)))
        variants = {name: variant(settings, name) for name in ("hash", "linear")}
        times = forward_times(variants, torch.device("cpu"), rounds=3)
        assert times == {"hash": [1e6] * 3, "linear": [1e6] * 3}
        assert next(ticks) == 14  # two readings a call, of two routers in three rounds, and one each before

    def test_gini(self) -> None:
        assert gini(torch.full((5,), 0.2)).item() == pytest.approx(0, abs=1e-6)
        assert gini(torch.tensor([0.0, 1.0, 0.0, 0.0])).item() == pytest.approx(3 / 4)
        assert gini(torch.tensor([1.0, 3.0])).item() == pytest.approx(1 / 4)  # mean |difference| / (2 · mean)
        assert gini(torch.ones(1)).item() == 0


class TestCommand:
    def test_table_and_json(self, tmp_path: Path) -> None:
        file = config_file(tmp_path, SMALL)
        told = moestro("analyze", "routers", file, "--routers", "linear, hash", "--seeds", "2", "--steps", "1")
        assert told.code == 0, told.err
        assert "linear" in told.out
        assert "±" in told.out
        assert "switch" not in told.out
        told = moestro("analyze", "routers", file, "--routers", "hash", "--seeds", "1", "--steps", "1", "--json")
        (figures,) = json.loads(told.out)
        assert (figures["name"], len(figures["loss"])) == ("hash", 1)

    def test_left_out_by_default_and_refused_by_name(self, tmp_path: Path) -> None:
        """Six experts make no four groups."""
        file = config_file(tmp_path, SMALL, {"model": {"moe": {"num_experts": 6}}})
        names, reasons = fitting(load_config(file).config)
        assert names == [name for name in VARIANTS if name != "deepseek"]
        assert len(reasons) == 1
        assert "does not divide the 6 experts" in reasons[0]
        refused = moestro("analyze", "routers", file, "--routers", "linear,deepseek")
        assert (refused.code, refused.out) == (2, "")
        assert "router 'deepseek'" in refused.err
        assert "does not divide the 6 experts" in refused.err

    @pytest.mark.parametrize(
        ("arguments", "cause"),
        [
            (("--routers", "liner"), "no router 'liner'. Did you mean 'linear'?"),
            (("model.moe=none", "model.intermediate_size=16"), "no [model.moe], so there is no router to compare"),
            (("model.vocab_size=100", "--routers", "linear"), "model.vocab_size = 100 is smaller than the tokenizer's"),
        ],
    )
    def test_bad_input_is_told_in_a_line(self, tmp_path: Path, arguments: tuple[str, ...], cause: str) -> None:
        told = moestro("analyze", "routers", config_file(tmp_path, SMALL), *arguments)
        assert (told.code, told.out) == (2, "")
        assert cause in told.err
        assert len(told.err.splitlines()) <= 2

    def test_divergence_is_named(self, settings: Config) -> None:
        wild = settings.model_copy(update={"optim": settings.optim.model_copy(update={"lr": 1e30, "warmup_steps": 0})})
        with pytest.raises(MoestroError, match=r"router 'linear' diverged at step \d of seed 0 .*lower optim.lr"):
            compare_routers(wild, ["linear"], [0], steps=4)
