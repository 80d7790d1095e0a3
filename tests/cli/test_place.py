"""`moestro place`, as a user calls it."""

import json
from pathlib import Path

import pytest

from moestro.config import load_config
from papers.deepseek_v3_eplb import LOADS, PLACED

from .helpers import Outcome, moestro

TINY = ("olmoe-tiny", "train.dtype=bf16", "train.global_batch_size=8")


pytestmark = pytest.mark.usefixtures("own_cache")


def place(*arguments: str) -> Outcome:
    return moestro("place", *arguments)


def written(folder: Path, text: str, name: str = "table.csv") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def csv(rows: tuple[tuple[float, ...], ...], heading: str = "") -> str:
    return heading + "".join(",".join(map(str, row)) + "\n" for row in rows)


class TestExperts:
    def test_the_public_example(self, tmp_path: Path) -> None:
        path, out = written(tmp_path, csv(LOADS)), tmp_path / "placement.json"
        sizes = ("--devices", "8", "--places", "16", "--nodes", "2", "--groups", "4")
        done = place("experts", path, *sizes, "--out", str(out))
        assert done.code == 0, done.err
        assert "2 layers of 12 experts in 16 places on 8 devices in 2 nodes" in done.out
        assert "not proven the best" in done.out
        tree = json.loads(out.read_text())
        assert [tuple(layer) for layer in tree["experts"]] == list(PLACED)
        assert tree["max_over_mean"][0]["balanced"] == pytest.approx(1.2081, abs=1e-4)
        same = json.loads(place("experts", path, *sizes, "--json").out)
        assert same == {**tree, "step_s": {}}

    def test_other_ways_to_write_loads(self, tmp_path: Path) -> None:
        plain = json.loads(place("experts", written(tmp_path, csv(LOADS)), "--devices", "4", "--json").out)
        named = "layer," + ",".join(f"e{n}" for n in range(12)) + "\n" + f"0,{csv(LOADS[:1])}1,{csv(LOADS[1:])}"
        for text, name in (
            (named, "named.csv"), (json.dumps(LOADS), "bare.json"), (json.dumps({"loads": LOADS}), "named.json"),
        ):  # fmt: skip
            path = written(tmp_path, text, name)
            assert json.loads(place("experts", path, "--devices", "4", "--json").out) == plain, name
        assert plain["places"] == 16

    def test_of_a_run_with_what_a_step_gains(self, tmp_path: Path) -> None:
        """The second half of its records counts: all to the first rank's two experts."""
        from moestro.config import to_toml

        (tmp_path / "config.toml").write_text(to_toml(load_config("olmoe-tiny", list(TINY[1:])).config))
        loads = [[1 / 16] * 16, [1 / 16] * 16, *[[0.5, 0.5] + [0.0] * 14] * 2]
        steps = [{"kind": "train", "step": n, "loss": 1.0, "layers": [{"layer": i, "load": load} for i in (0, 1)]}
                 for n, load in enumerate(loads)]  # fmt: skip
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
        done = place("experts", str(tmp_path), "--devices", "8", "--hardware", "h100-8", "--json")
        assert done.code == 0, done.err
        tree = json.loads(done.out)
        assert tree["max_over_mean"][0]["in_order"] == pytest.approx(8.0)
        assert tree["max_over_mean"][0]["placed"] == pytest.approx(1.6)  # ten replicas on eight devices
        seconds = tree["step_s"]
        assert seconds["even loads"] <= seconds["placed"] < seconds["in order"]
        said = place("experts", str(tmp_path), "--devices", "8", "--hardware", "h100-8").out
        assert "even loads" in said
        assert "replicas are priced as further experts" in said

    @pytest.mark.parametrize(
        ("text", "options", "words"),
        [
            ("1,nan\n", (), "the load of expert 1 in layer 0 is nan"),
            ("1,2\n-3,4\n", (), "the load of expert 0 in layer 1 is -3"),
            ("0,0\n", (), "layer 0 has no load"),
            ("1,2\n3\n", (), "is no table"),
            ("", (), "is no table"),
            ("a,b\nc,d\n", (), "could not convert"),
            ("1,2,3\n", ("--devices", "2", "--places", "2"), "2 places for 3 experts"),
            ("1,2,3\n", ("--devices", "2", "--places", "5"), "multiples of the devices"),
            ("1,2,3,4\n", ("--devices", "4", "--nodes", "2", "--groups", "3"), "3 groups of experts do not share out"),
            ("1,2\n", ("--devices", "2", "--hardware", "h100-8"), "give --preset too"),
            ("1,2\n", ("--devices", "8", "--hardware", "h100-8", "--preset", "olmoe-tiny"), "a model with 16"),
        ],
    )
    def test_mistakes(self, tmp_path: Path, text: str, options: tuple[str, ...], words: str) -> None:
        done = place("experts", written(tmp_path, text), *options)
        assert done.code == 2
        assert words in done.err
        assert done.err.count("\n") <= 2

    def test_files_that_are_none(self, tmp_path: Path) -> None:
        assert "cannot read" in place("experts", str(tmp_path / "nowhere.csv")).err
        assert "is no JSON" in place("experts", written(tmp_path, "{", "bad.json")).err
        assert "list of lists" in place("experts", written(tmp_path, '{"loads": 3}', "odd.json")).err
        out = place("experts", written(tmp_path, "1,2\n"), "--devices", "2", "--out", str(tmp_path / "no" / "p.json"))
        assert (out.code, "cannot write" in out.err) == (2, True)


class TestLayers:
    def test_a_plan_for_the_trainer(self, tmp_path: Path) -> None:
        out = tmp_path / "plan.toml"
        ask = ("layers", *TINY, "model.num_layers=6", "--hardware", "h100-8", "plan.pp=4", "--limit", "1")
        done = place(*ask, "--out", str(out))
        assert done.code == 0, done.err
        assert "4 pipeline ranks" in done.out
        assert "needed on the fullest device" in done.out
        parallel = load_config(str(out)).config.parallel
        assert parallel.pp == 4
        assert sum(parallel.layers_per_stage or ()) == 6
        tree = json.loads(place(*ask, "--json").out)
        assert tree["placed"]["step_s"] <= tree["even"]["step_s"]
        assert len(tree["placed"]["memory_by_rank"]) == 4

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (("--hardware", "h100-8"), "one pipeline rank"),
            (
                ("--hardware", "h100-8", "plan.pp=4", "--memory-gb", "0.001"),
                "no placement of the layers fits: what comes beside them",
            ),
            (("--hardware", "h100-8", "plan.pp=4", "--out", "no/such/plan.toml"), "there is no folder"),
            (("plan.pp=2",), "say for what"),
        ],
    )
    def test_mistakes(self, options: tuple[str, ...], words: str) -> None:
        done = place("layers", *TINY, "model.num_layers=4", *options)
        assert (done.code, words in done.err) == (2, True), done.err


class TestMixed:
    ASK = ("mixed", *TINY, "workload.precision=fp16", "train.global_batch_size=24", "model.moe.num_experts=12")

    def test_against_its_rivals(self) -> None:
        done = place(*self.ASK, "--hardware", "a40-v100-mixed", "--top", "2")
        assert done.code == 0, done.err
        assert done.out.count("attention on ") == 2
        for words in ("experts over all devices", "a pipeline, layers", "a40 alone", "gives over"):
            assert words in done.out
        tree = json.loads(place(*self.ASK, "--hardware", "a40-v100-mixed", "--top", "2", "--json").out)
        assert len(tree["apart"]) == 2
        assert tree["apart"][0]["step_s"] <= tree["apart"][1]["step_s"]

    def test_mistakes(self) -> None:
        assert "two pools of unlike devices" in place(*self.ASK, "--hardware", "h100-8").err


class TestRegions:
    ASK = ("regions", *TINY, "model.num_layers=4", "train.global_batch_size=32", "--hardware", "two-regions")

    def test_against_plain_1f1b(self) -> None:
        done = place(*self.ASK, "plan.pp=2", "--json")
        assert done.code == 0, done.err
        tree = json.loads(done.out)
        assert tree["best"]["step_s"] <= tree["deeper"]["step_s"] <= tree["naive"]["step_s"]
        assert sum(tree["best"]["regions"].values()) == 2
        said = place(*self.ASK, "plan.pp=[2]").out
        assert "even layers, plain 1F1B" in said
        assert "placed" in said

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (("plan.pp=3",), "does not divide"),
            (("plan.pp=8",), "8 stages for 4 layers"),
            (("plan.pp=x",), "give a number of stages"),
            (("plan.pp=[2,0]",), "give a number of stages"),
            (("plan.ep=3", "plan.pp=2"), "does not divide"),
        ],
    )
    def test_mistakes(self, options: tuple[str, ...], words: str) -> None:
        done = place(*self.ASK, *options)
        assert (done.code, words in done.err) == (2, True), done.err

    def test_one_region(self) -> None:
        done = place("regions", *TINY, "--hardware", "h100-8")
        assert (done.code, "all devices are in one region" in done.err) == (2, True)


class TestCircuits:
    DEMAND = ((0.0, 8.0, 1.0, 0.0), (8.0, 0.0, 0.0, 1.0), (1.0, 0.0, 0.0, 8.0), (0.0, 1.0, 8.0, 0.0))

    def test_of_a_file(self, tmp_path: Path) -> None:
        path = written(tmp_path, csv(self.DEMAND))
        options = ("--ocs-ports", "2", "--eps-ports", "1", "--port-gbit", "8")
        tree = json.loads(place("circuits", path, *options, "--json").out)
        assert tree["seconds"] <= min(tree["even_s"], tree["greedy_s"])
        assert tree["seconds"] == pytest.approx(4e-9)  # two circuits each for the pairs with eight
        assert tree["counts"][0][1] == tree["counts"][2][3] == 2
        done = place("circuits", path, *options)
        assert "greedy circuits" in done.out
        assert "·" in done.out

    def test_of_a_prediction(self) -> None:
        ask = ("circuits", *TINY, "model.moe.num_experts=64", "train.global_batch_size=1024", "--hardware",
               "mixnet-1024", "plan.ep=64")  # fmt: skip
        tree = json.loads(place(*ask, "workload.routing.kind=power_law", "--json").out)
        assert len(tree["counts"]) == 8
        assert tree["seconds"] <= tree["even_s"]
        assert "drawn order of experts 3 of 32" in place(*ask, "workload.routing.kind=power_law", "--layer", "3").out
        assert "of 32 layers" in place(*ask, "workload.routing.kind=power_law", "--layer", "32").err
        assert "inside a server" in place(*ask[:-1], "plan.ep=8").err

    @pytest.mark.parametrize(
        ("text", "words"),
        [("0,0\n0,0\n", "nothing to lay circuits for"), ("1,2,3\n4,5,6\n", "a demand is square"),
         ("0,nan\n1,0\n", "a demand is square"), ("5\n", "nothing to lay circuits for")],
    )  # fmt: skip
    def test_mistakes(self, tmp_path: Path, text: str, words: str) -> None:
        done = place("circuits", written(tmp_path, text))
        assert (done.code, words in done.err) == (2, True), done.err

    def test_no_optical_tier(self, tmp_path: Path) -> None:
        path = written(tmp_path, csv(self.DEMAND))
        assert "has no [optical]" in place("circuits", path, "--hardware", "h100-8").err
        assert "has no [optical]" in place("circuits", *TINY, "--hardware", "h100-8", "plan.ep=8").err


def test_help_points_to_disaggregation() -> None:
    assert "moestro predict --disaggregate" in " ".join(place("--help").out.split()).replace("│ │", "")
