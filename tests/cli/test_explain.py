"""`moestro explain`: sides of all kinds, what is compared of a run, and mistakes answered in a line."""

import json
from pathlib import Path
from typing import Any

import pytest

from moestro.cli.explain import split_sides
from moestro.config import load_config, to_toml
from moestro.errors import MoestroError

from .helpers import moestro

PASSES, REDUCE, UPDATE = 0.8, 0.05, 0.1  # shares of a step


def write_run(
    folder: Path,
    times: list[float],
    overrides: tuple[str, ...] = (),
    *,
    split: bool = True,
    events: tuple[dict[str, Any], ...] = ({"event": "start", "step": 0}, {"event": "finish", "step": 99}),
    environment: dict[str, Any] | None = None,
) -> str:
    """A run whose steps took `times`, of which every step is logged."""
    folder.mkdir(parents=True)
    own = ["model.vocab_size=512", "train.dtype=bf16", f"train.steps={len(times)}"]
    config = load_config("sotu-tiny", [*own, *overrides]).config
    (folder / "config.toml").write_text(to_toml(config))
    told = {"device_name": "a CPU", "num_threads": 1, "world_size": 1, "torch": "2.11.0", "peak_flops_measured": 1e11}
    (folder / "environment.json").write_text(json.dumps({**told, **(environment or {})}))
    records = []
    for step, step_s in enumerate(times, 1):
        parts = {"passes_s": PASSES * step_s, "reduce_s": REDUCE * step_s, "update_s": UPDATE * step_s, "data_s": 1e-3}
        record = {"kind": "train", "step": step, "loss": 1.0, "step_s": step_s, "mfu": 0.5}
        records.append(json.dumps(record | parts if split else record))
    for step, eval_s in ((len(times) // 2, 2.0), (len(times), 50.0)):  # on the way, and of all held-out text at the end
        records.append(json.dumps({"kind": "eval", "step": step, "loss": 1.0, "eval_s": eval_s}))
    (folder / "metrics.jsonl").write_text("\n".join(records) + "\n")
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return str(folder)


def tree(*arguments: str) -> dict[str, Any]:
    done = moestro("explain", *arguments, "--json")
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


class TestRuns:
    def test_two_runs_by_their_phases(self, tmp_path: Path) -> None:
        one = write_run(tmp_path / "one", [9.0, 9.0, *[1.0] * 20])
        two = write_run(tmp_path / "two", [9.0, 9.0, *[1.5] * 20], ("train.recompute=block", "optim.lr=1e-3"))
        found = tree(one, two)
        assert found["difference_s"] == pytest.approx(0.5)  # the first two steps are warming up
        assert [row["name"] for row in found["rows"]] == [
            "forward and backward", "optimizer", "gradients exchanged", "rest",
        ]  # fmt: skip
        assert sum(row["difference_s"] for row in found["rows"]) == pytest.approx(0.5)
        passes = found["rows"][0]
        assert passes["difference_s"] == pytest.approx(0.4)
        assert 0.2 < passes["work"] < 0.34  # block recomputes the forward pass of all but the head
        assert passes["rate"] == pytest.approx((1 + passes["work"]) / 1.5 - 1)
        assert {one["key"] for one in found["bearing"]} == {"plan.recompute"}
        assert {one["key"] for one in found["other"]} == {"run.optim.lr"}
        assert [row["name"] for row in found["around"]] == ["data", "evaluations"]
        assert [row["first"]["seconds"] for row in found["around"]] == pytest.approx([1e-3, 2.0 / 20])
        said = moestro("explain", one, two).out
        assert "B takes 50.0% longer than A (1.50 s against 1.00 s for a step)." in said
        assert "20 of them, 3 to 22" in said

    def test_a_difference_within_the_spread(self, tmp_path: Path) -> None:
        steps = [1.0, 1.1, 1.2, 1.3, 1.4] * 8
        one, two = write_run(tmp_path / "one", steps), write_run(tmp_path / "two", [1.01 * step for step in steps])
        assert "These steps show no difference" in moestro("explain", one, two).out
        assert tree(one, two)["noise_s"] == pytest.approx(0.1, rel=0.05)

    def test_only_steps_after_the_last_resume_count(self, tmp_path: Path) -> None:
        resumed = ({"event": "start", "step": 0}, {"event": "resume", "step": 10}, {"event": "finish", "step": 20})
        one = write_run(tmp_path / "one", [5.0] * 10 + [8.0, 8.0] + [1.0] * 8, events=resumed)
        two = write_run(tmp_path / "two", [2.0] * 20, split=False, events=resumed[:1])
        found = tree(one, two)
        assert found["first"]["step_s"] == pytest.approx(1.0)
        assert found["level"] == "whole"  # of the second no more is known
        assert any(
            "after the last resume, at 10, without the first 2; 8 of them, 13 to 20" in n for n in found["notes"]
        )
        assert any("running or killed" in note for note in found["notes"])
        assert tree(one, two, "--steps", "3:10")["first"]["step_s"] == pytest.approx(5.0)

    def test_a_machine_that_had_become_slower_is_told(self, tmp_path: Path) -> None:
        one = write_run(tmp_path / "one", [1.0] * 9)
        two = write_run(tmp_path / "two", [2.0] * 9, environment={"peak_flops_measured": 5e10, "torch": "2.12.0"})
        said = moestro("explain", one, two).out
        assert "differed by -50%" in " ".join(said.split())
        assert "It is not the plan that differs: software.torch." in " ".join(said.split())

    def test_against_its_prediction(self, tmp_path: Path) -> None:
        run = write_run(tmp_path / "one", [1.0] * 9)
        found = tree(run, "--hardware", "h100-8")
        assert (found["first"]["kind"], found["second"]["kind"]) == ("predicted", "measured")
        assert found["level"] == "phases"
        assert found["first"]["devices"] == found["second"]["devices"] == 1
        assert found["bearing"] == []
        assert sum(row["difference_s"] for row in found["rows"]) == pytest.approx(found["difference_s"])
        assert found["around"] == []
        assert any("outside of steps" in note for note in found["notes"])
        both = tree(run, run, "--hardware", "h100-8")
        assert both["predicted"] is None  # it is one run

    def test_two_runs_beside_their_predictions(self, tmp_path: Path) -> None:
        one = write_run(tmp_path / "one", [1.0] * 9)
        two = write_run(tmp_path / "two", [1.5] * 9, ("train.recompute=block",))
        found = tree(one, two, "--hardware", "h100-8")
        assert found["predicted"]["difference_s"] > 0
        assert "measured +50.0%." in " ".join(moestro("explain", one, two, "--hardware", "h100-8").out.split())

    @pytest.mark.parametrize("arguments", [("--steps", "90:99"), ("--steps", "9"), ("--steps", "5:4")])
    def test_steps_that_are_not_there(self, tmp_path: Path, arguments: tuple[str, str]) -> None:
        run = write_run(tmp_path / "one", [1.0] * 9)
        done = moestro("explain", run, run, *arguments)
        assert done.code == 2
        assert "steps" in done.err

    def test_a_run_without_steps(self, tmp_path: Path) -> None:
        run = Path(write_run(tmp_path / "one", [1.0]))
        (run / "metrics.jsonl").write_text("")
        assert "no training step yet" in moestro("explain", str(run), str(run)).err


class TestPlans:
    def test_overrides_go_to_their_sides(self) -> None:
        one, two = split_sides(["train.global_batch_size=64", "a", "plan.tp=2", "b", "plan.tp=4", "plan.pp=2"])
        assert (one.name, one.overrides) == ("a", ("train.global_batch_size=64", "plan.tp=2"))
        assert (two.name, two.overrides) == ("b", ("train.global_batch_size=64", "plan.tp=4", "plan.pp=2"))
        with pytest.raises(MoestroError, match="two sides are compared, not 3"):
            split_sides(["a", "b", "c"])

    def test_two_plans_with_a_picture(self, tmp_path: Path) -> None:
        picture = tmp_path / "a.html"
        sides = ("olmoe-1b-7b", "plan.ep=8", "olmoe-1b-7b", "plan.ep=4", "plan.pp=2")
        done = moestro("explain", *sides, "--hardware", "h100-8", "--plot", str(picture))
        assert done.code == 0
        assert any(line.split() == ["plan.pp", "1", "2"] for line in done.out.splitlines())
        assert "communication ep" in done.out
        assert "waterfall" not in done.out
        assert picture.read_text().startswith("<!doctype html>")
        assert "communication ep" in picture.read_text()

    def test_one_plan_on_two_machines(self) -> None:
        hardware = ("--hardware", "h100-8", "--hardware", "h100-sxm")
        found = tree("olmoe-1b-7b", "olmoe-1b-7b", *hardware, "--devices", "8", "--devices", "4")
        assert found["difference_s"] > 0.9 * found["first"]["step_s"]
        assert [one["key"] for one in found["bearing"]] == ["plan.dp", "machine.priced by"]
        assert any("8 and 4 devices" in note for note in found["notes"])

    def test_a_saved_prediction_is_the_plan(self, tmp_path: Path) -> None:
        saved = tmp_path / "saved.json"
        saved.write_text(moestro("predict", "olmoe-1b-7b", "--hardware", "h100-8", "--json").out)
        found = tree(str(saved), "olmoe-1b-7b", "--hardware", "h100-8")
        assert found["difference_s"] == pytest.approx(0, abs=1e-9)
        again = moestro("explain", str(saved), str(saved))
        assert "A and B are the same" in again.out

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("olmoe-1b-7b", "olmoe-1b-7b", "plan.ep=8"), "--hardware NAME"),
            (("olmoe-1b-7b", "--hardware", "h100-8"), "Only a run may stand alone"),
            (("olmoe-1b-7c", "olmoe-1b-7b", "--hardware", "h100-8"), "Did you mean 'olmoe-1b-7b'?"),
            (("plan.ep=8",), "name two sides"),
            (("no/run", "olmoe-1b-7b", "--hardware", "h100-8"), "no such"),
            (("a.json", "b.json"), "cannot read a.json"),
            (("a.json", "plan.tp=2", "b.json"), "saved prediction, which plan.tp=2 cannot change"),
            (("olmoe-1b-7b", "olmoe-1b-7b", "--hardware", "a", "--hardware", "b", "--hardware", "c"), "3 times"),
            (("olmoe-1b-7b", "olmoe-1b-7b", "--hardware", "h100-8", "--plot", "no/a.html"), "there is no folder"),
            (("olmoe-1b-7b", "olmoe-1b-7b", "--hardware", "h100-8", "--plot", "a.png"), "a name that ends in .html"),
        ],
    )
    def test_mistakes(self, arguments: tuple[str, ...], message: str) -> None:
        done = moestro("explain", *arguments)
        assert done.code == 2
        assert message in done.err
        assert len(done.err.splitlines()) <= 2
