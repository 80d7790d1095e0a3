"""`moestro size`: what is printed, for people and machines, and every mistake answered."""

import json
from pathlib import Path

import pytest
from predict.test_predict import profile

from moestro.config import load_config
from moestro.hardware.profile import save_profile

from .helpers import Outcome, moestro

ON = ("--hardware", "h100-sxm")


pytestmark = pytest.mark.usefixtures("own_cache")


def size(*arguments: str) -> Outcome:
    return moestro("size", *arguments)


class TestLint:
    def test_findings_are_status_1(self) -> None:
        done = size("lint", "mixtral-8x7b", *ON, "model.vocab_size=50257", "model.num_layers=2")
        assert done.code == 1
        assert "vocab_size = 50,257" in done.out
        assert "vocab_size = 50,304" in done.out

    def test_none_are_status_0(self) -> None:
        done = size("lint", "mixtral-8x7b", *ON, "model.num_layers=2")
        assert (done.code, done.err) == (0, "")
        assert "nothing to find fault with" in done.out
        assert "experts: up" in done.out

    def test_for_machines(self) -> None:
        done = size("lint", "mixtral-8x7b", *ON, "model.vocab_size=50257", "model.num_layers=2", "--json")
        tree = json.loads(done.out)
        assert [finding["rule"] for finding in tree["findings"] if finding["kind"] == "shape"] == ["vocabulary"]

    def test_on_a_measured_machine(self, tmp_path: Path) -> None:
        save_profile(profile(), tmp_path / "here")
        done = size("lint", "olmoe-tiny", "--profile", str(tmp_path / "here"))
        assert done.code in (0, 1), done.err
        assert "olmoe-tiny on 1 ×" in done.out

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (("olmoe-tiny",), "say for what"),
            (("olmoe-tinny", *ON), "olmoe-tiny"),
            (("olmoe-tiny", "--hardware", "h10"), "no device or cluster"),
            (("olmoe-tiny", *ON, "plan.tp=3"), "tp"),
        ],
    )
    def test_mistakes(self, arguments: tuple[str, ...], text: str) -> None:
        done = size("lint", *arguments)
        assert (done.code, done.out) == (2, "")
        assert text in done.err


class TestSearch:
    def test_best_shape_is_written(self, tmp_path: Path) -> None:
        out = tmp_path / "best.toml"
        done = size("search", "mixtral-8x7b", *ON, "--params", "4e8", "--out", str(out))
        assert done.code == 0, done.err
        assert "and rounded" in done.out
        tree = json.loads(size("search", "mixtral-8x7b", *ON, "--params", "4e8", "--json").out)
        assert load_config(str(out)).config.model.hidden_size == tree["best"][0]["model"]["hidden_size"]
        assert tree["best"][0]["total_params"] == pytest.approx(4e8, rel=0.06)

    @pytest.mark.parametrize("budget", [(), ("--params", "1e9", "--flops", "1e9"), ("--params", "-1")])
    def test_one_budget(self, budget: tuple[str, ...]) -> None:
        done = size("search", "mixtral-8x7b", *ON, *budget)
        assert done.code == 2
        assert done.err.startswith("error: ")


class TestWidth:
    def test_table_and_picture(self, tmp_path: Path) -> None:
        plot = tmp_path / "new" / "width.html"
        done = size("width", "mixtral-8x7b", *ON, "model.num_layers=2", "--plot", str(plot))
        assert done.code == 0, done.err
        assert "2 of 8 × 14,336" in done.out
        page = plot.read_text()
        assert "mixtral-8x7b on NVIDIA H100 SXM" in page
        assert "2 of 8" in page

    def test_for_machines(self) -> None:
        tree = json.loads(size("width", "mixtral-8x7b", *ON, "model.num_layers=2", "--json").out)
        assert len(tree["choices"]) > 5
        assert tree["chosen"]["width"] * tree["chosen"]["top_k"] == 2 * 14_336

    def test_a_model_without_experts(self) -> None:
        done = size("width", "mixtral-8x7b", *ON, "model.moe=none", "model.intermediate_size=1024")
        assert done.code == 2


class TestGrowth:
    STAGES = ("--stage", "4:0.5", "--stage", "8:0.5")
    ONE_PLAN = ("model.num_layers=2", "train.global_batch_size=8", "plan.tp=1", "plan.pp=1", "plan.zero=1",
                "plan.ep=1", "plan.micro_batch_size=1", "plan.expert_chunks=1", "plan.recompute=none")  # fmt: skip

    def test_table_and_tree(self) -> None:
        asked = ("grow", "mixtral-8x7b", *ON, "--devices", "2", *self.ONE_PLAN, *self.STAGES)
        done = size(*asked)
        assert done.code == 0, done.err
        assert "growing saves" in done.out
        tree = json.loads(size(*asked, "--json").out)
        assert [stage["experts"] for stage in tree["stages"]] == [4, 8]
        assert tree["saving"] == pytest.approx(1 - tree["device_hours"] / tree["whole_device_hours"])

    @pytest.mark.parametrize(
        ("stages", "text"), [((), "two stages or more"), (("--stage", "eight:0.5"), "'eight:0.5' is no stage")]
    )
    def test_mistakes(self, stages: tuple[str, ...], text: str) -> None:
        done = size("grow", "mixtral-8x7b", *ON, *stages)
        assert (done.code, done.out) == (2, "")
        assert text in done.err


class TestRates:
    def test_points(self) -> None:
        done = size("lr", "9e6:6.7e-4", "84e6:2.6e-4", "1.2e9:8.6e-5", "--params", "3e9", "--params", "30e9")
        assert done.code == 0, done.err
        assert "3 B" in done.out.replace("\u00a0", " ")
        assert "e-05" in done.out

    def test_a_table(self, tmp_path: Path) -> None:
        path = tmp_path / "rates.csv"
        path.write_text("params,lr\n1e7,1e-3\n1e8,4e-4\n1e9,1.6e-4\n")
        tree = json.loads(size("lr", str(path), "--params", "1e10", "--json").out)
        assert tree["rates"][0]["lr"] == pytest.approx(6.4e-5)

    @pytest.mark.parametrize(
        ("points", "text"),
        [(("9e6:6e-4", "84e6:3e-4"), "too few"), (("9e6:6e-4", "x"), "no point"), (("no.csv",), "cannot read")],
    )
    def test_mistakes(self, points: tuple[str, ...], text: str) -> None:
        done = size("lr", *points, "--params", "1e9")
        assert done.code == 2
        assert text in done.err


class TestBudget:
    def test_what_fits(self) -> None:
        done = size("budget", "mixtral-8x7b", *ON, "model.num_layers=2")
        assert done.code == 0, done.err
        for text in ("largest micro-batch", "longest context", "largest model", "smallest that holds", "cheapest"):
            assert text in done.out

    def test_for_machines(self) -> None:
        tree = json.loads(size("budget", "olmoe-tiny", *ON, "--memory-gb", "8", "--json").out)
        assert tree["limit_bytes"] == pytest.approx(0.98 * 8e9)
        assert len(tree["rows"]) == 9
        prices = [one["usd_per_hour"] for one in tree["devices_that_hold_it"] if one["usd_per_hour"] is not None]
        assert prices == sorted(prices)
        assert min(one["usable_bytes"] for one in tree["devices_that_hold_it"]) >= tree["needed_bytes"]

    def test_no_memory(self) -> None:
        assert size("budget", "olmoe-tiny", *ON, "--memory-gb", "0").code == 2
