"""`moestro probe`: proposed, taken, fitted, placed; and every mistake in a line or two."""

import json
from pathlib import Path

import pytest

from moestro.config import load_config
from moestro.predict import probe_peaks

from .helpers import Outcome, moestro

RUN = ("olmoe-1b-7b", "parallel.pp=4", "train.micro_batch_size=1", "train.global_batch_size=64")


pytestmark = pytest.mark.usefixtures("own_cache")


def probe(*arguments: str) -> Outcome:
    return moestro("probe", *arguments)


@pytest.fixture
def table(tmp_path: Path) -> str:
    path = str(tmp_path / "probes.csv")
    done = probe("run", *RUN, "--by", "counted", "--out", path)
    assert (done.code, "12 stages of 3 dry runs, counted" in done.out) == (0, True)
    return path


class TestPlan:
    def test_commands_are_configurations(self, tmp_path: Path) -> None:
        done = probe("plan", *RUN, "--out", str(tmp_path / "p.csv"))
        assert (done.code, done.err) == (0, "")
        assert "in flight        4        3        2        1" in done.out
        (line,) = {text for text in done.out.splitlines() if text.startswith("1  moestro train ")}
        preset, *overrides = line.replace("'", "").split()[3:]
        config = load_config(preset, overrides).config
        assert config.train.recompute == "block"
        assert sum(config.parallel.layers_per_stage or ()) == 16
        refused = probe("fit", str(tmp_path / "p.csv"))
        assert (refused.code, "run that stage and fill it in" in refused.err) == (2, True)

    def test_for_machines(self) -> None:
        tree = json.loads(probe("plan", *RUN, "--json").out)
        assert len(tree["rounds"]) == len(tree["commands"]) == 3
        assert tree["condition"] <= 25

    def test_another_trainer(self) -> None:
        done = probe(
            "plan", "olmoe-1b-7b", "plan.pp=4", "workload.trainer=megatron", "--hardware", "h100-sxm", "--devices", "32"
        )
        assert done.code == 0, done.err
        assert "0  layers of each stage" in done.out

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (("olmoe-1b-7b",), "pp = 1: stages between"),
            (("olmoe-1b-7b", "plan.pp=4"), "plan.… goes with --hardware"),
            ((*RUN, "--kinds", "none,selective"), "--kinds none,selective: none, and others of none, block"),
            ((*RUN, "--kinds", "block"), "--kinds block: none, and others"),
            ((*RUN, "--devices", "6"), "6"),
            ((*RUN, "--hardware", "rtx-4090"), "does not fit in memory"),
        ],
    )
    def test_mistakes(self, arguments: tuple[str, ...], text: str) -> None:
        done = probe("plan", *arguments)
        assert (done.code, done.out) == (2, "")
        assert text in done.err
        assert len(done.err.splitlines()) <= 2


class TestRun:
    def test_traced_by_default(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[tuple[object, ...]] = []

        def traced(*arguments: object) -> probe_peaks.Peak:
            asked.append(arguments)
            return lambda one, stage: 1e9 * (1 + sum(one.layers[: stage + 1]))

        monkeypatch.setattr(probe_peaks, "traced", traced)
        done = probe("run", *RUN, "--out", str(tmp_path / "t.csv"))
        assert done.code == 0, done.err
        assert "stages: 12/12" in done.err
        assert asked[0][:2] == (RUN[0], list(RUN[1:]))
        assert len((tmp_path / "t.csv").read_text().splitlines()) == 13

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            ((*RUN, "--by", "guess"), "--by guess: traced or counted"),
            ((*RUN, "--out", "/nowhere/p.csv"), "there is no folder /nowhere"),
            ((*RUN, "workload.trainer=megatron"), "only our trainer's step can be traced"),
        ],
    )
    def test_mistakes(self, arguments: tuple[str, ...], text: str) -> None:
        done = probe("run", *arguments)
        assert (done.code, text in done.err) == (2, True), done.err


class TestFit:
    def test_beside_what_is_counted(self, table: str) -> None:
        done = probe("fit", table, *RUN)
        assert (done.code, done.err) == (0, "")
        assert "rank 4 of 4, condition number" in done.out
        assert "fitted ÷ counted" in done.out
        (layer,) = [line.split() for line in done.out.splitlines() if line.startswith("a layer")]
        assert float(layer[-1]) == pytest.approx(1, abs=0.01)

    def test_for_machines(self, table: str) -> None:
        tree = json.loads(probe("fit", table, "--json").out)
        assert set(tree["activation_bytes"]) == {"none", "block"}
        assert len(tree["left_out"]) == len(tree["residuals"]) == 12

    def test_what_is_missing_is_named(self, table: str, tmp_path: Path) -> None:
        """A round less: refused; with the stages it asks for, taken."""
        path, lines = tmp_path / "less.csv", Path(table).read_text().splitlines()
        path.write_text("\n".join(lines[:9]) + "\n")
        done = probe("fit", str(path))
        assert (done.code, done.out) == (2, "")
        assert "Add to the dry run: a middle stage with" in done.err
        assert len(done.err.splitlines()) <= 2
        path.write_text("\n".join(lines[:2]) + "\n")
        assert "unknowns" in probe("fit", str(path)).err

    @pytest.mark.parametrize(
        ("old", "new", "text"),
        [("peak_bytes", "peak", "needs one column of peaks"), (",middle,3,", ",middle,-3,", "in_flight = '-3'")],
    )
    def test_mistakes(self, table: str, old: str, new: str, text: str) -> None:
        path = Path(table)
        path.write_text(path.read_text().replace(old, new, 1))
        done = probe("fit", table)
        assert (done.code, text in done.err, len(done.err.splitlines())) == (2, True, 1), done.err


class TestPlace:
    def test_the_plan_is_one_that_trains(self, table: str, tmp_path: Path) -> None:
        out = tmp_path / "plan.toml"
        on = ("--hardware", "h100-sxm", "--devices", "4", "--limit-gb", "60")
        done = probe("place", table, *RUN, *on, "--out", str(out))
        assert (done.code, done.err) == (0, "")
        assert "these dry runs" in done.out
        assert "counted memory" in done.out
        config = load_config(str(out)).config
        assert (config.parallel.pp, sum(config.parallel.layers_per_stage or ())) == (4, 16)

    @pytest.mark.parametrize(
        ("more", "text"),
        [
            ((), "say for what"),
            (("--hardware", "h100-sxm", "--devices", "4", "--limit-gb", "0"), "above zero"),
            (("--hardware", "h100-sxm", "--devices", "4", "--limit-gb", "9"), "no placement of the layers fits"),
        ],
    )
    def test_mistakes(self, table: str, more: tuple[str, ...], text: str) -> None:
        done = probe("place", table, *RUN, *more)
        assert (done.code, text in done.err) == (2, True), done.err
