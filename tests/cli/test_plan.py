"""`moestro plan`, as a user calls it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moestro.cli.main import app
from moestro.config import load_config
from moestro.errors import MoestroError

SMALL = ("plan.pp=1", "plan.cp=1", "plan.tp=[1,2]", "plan.expert_chunks=1", "plan.micro_batch_size=[1,2]")


def plan(*args: str) -> str:
    done = CliRunner().invoke(app, ["plan", "olmoe-1b-7b", "--hardware", "h100-8", "--workers", "1", *args])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def test_a_ranking_with_reasons_and_a_file_for_the_trainer(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    said = plan(*SMALL, "--top", "3", "--out", str(path))
    assert "olmoe-1b-7b on 8 × NVIDIA H100 SXM" in said
    assert "what binds:" in said
    assert "too big for memory" in said
    assert f"moestro train {path}" in said
    assert path.read_text().startswith("# planned for 8 devices")
    config = load_config(str(path)).config
    found = json.loads(plan(*SMALL, "--top", "1", "--json"))
    best = found["ranked"][0]["plan"]
    assert config.parallel.ep == best["ep"]
    assert config.train.micro_batch_size == best["micro_batch_size"]
    assert best["pp"] == 1
    assert found["searched"]["plans"] > 50
    memory = [one["total_bytes"] for one in found["front"]]
    assert memory == sorted(memory, reverse=True)


def test_several_numbers_of_devices_and_what_the_run_comes_to() -> None:
    few = (*SMALL, "plan.ep=1", "plan.zero=1", "plan.recompute=none", "--top", "1", "--hardware", "h100-sxm")
    fails = ("--mtbf-hours", "50000", "--storage-gbps", "20", "--headroom", "10%", "--tokens", "1e11")
    said = plan(*few, *fails, "--devices", "8,16,48", "--objective", "money")
    assert "wanted: the cheapest run, 10.0 % of each device's memory left free" in said.replace("\u202f", " ").replace(
        "\xa0", " "
    )
    assert "48 devices: no plan of the search uses 48 devices" in said
    assert "useful work: a checkpoint of" in said
    found = json.loads(plan(*few, *fails, "--devices", "8,16", "--objective", "goodput", "--json"))
    assert found["devices"] == 16
    assert set(found["counts"]) == {"8", "16"}
    run = found["ranked"][0]["run"]
    assert 0.9 < run["goodput"] < 1
    assert run["run_s"] == pytest.approx(run["useful_s"] * found["goal"]["steps"])
    assert found["checkpoint_every"] == round(run["interval_s"] / found["ranked"][0]["prediction"]["step_s"]["value"])
    assert found["bucket"]["bytes"] > 1e6


def test_the_file_is_taken_by_the_trainer_as_it_is(tmp_path: Path) -> None:
    """A tiny preset on one process: it is read, and its layout is that of the plan."""
    from moestro.train.phases import resolve_stretches

    path, run = tmp_path / "plan.toml", tmp_path / "runs"
    preset = ("sotu-tiny", "train.steps=2", f"run.dir={run}")
    fails = ("--mtbf-hours", "1", "--checkpoint-s", "1e-6")
    where = ("--hardware", "h100-sxm", "--devices", "1", "--top", "1", "--out", str(path))
    CliRunner().invoke(app, ["plan", *preset, *SMALL, *fails, *where], catch_exceptions=False)
    config = load_config(str(path)).config
    assert config.train.checkpoint_every is not None
    (stretch,) = resolve_stretches(config, 1)
    assert stretch.layout.world_size == 1


def test_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "front.html"
    assert f"plot  {path}" in plan(*SMALL, "--top", "1", "--plot", str(path))
    page = path.read_text()
    assert "memory of the fullest device, GB" in page
    assert "the choice, simulated" in page


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("plan.dp=8",), "no plan.dp"),
        (("plan.pp=3",), "no plan of the search uses 8 devices"),
        (("--devices", "16"), "has 8 devices, not 16"),
        (("plan.nonsense=1",), "no plan.nonsense"),
        (("plan.micro_batch=1",), "Did you mean 'micro_batch_size'"),
        (("plan.dp=8",), "no plan.dp, which is what pp, cp and tp leave"),
        (
            ("train.micro_batch_size=2",),
            r"the search chooses train.micro_batch_size; plan\.micro_batch_size=… fixes it",
        ),
        (("parallel.stages_per_rank=2",), r"plan\.vpp=… fixes it"),
        (("parallel.fsdp=2",), "give --devices"),
        (("--devices", "10000000000"), "1,000,000 are the most"),
        (("--budget", "inf"), "--budget must be above 0 and finite"),
        (("--out", "a.toml", "workload.precision=fp8"), "the trainer computes in bf16"),
        (("--headroom", "90GB"), "a device has 80.0 GB, and 90.0 GB of it cannot stay free"),
        (("plan.pp=abc",), r"plan\.pp = abc: Input should be a valid integer"),
        (("plan.pp=[1,0]",), r"plan\.pp = 0: Input should be greater"),
        (("plan.pp=[]",), r"plan\.pp: nothing to try"),
        (("plan.zero=7",), r"plan\.zero = 7: Input should be"),
        (("plan.schedule=foo",), r"plan\.schedule = foo"),
        (("--out", "no/such/plan.toml"), "there is no folder"),
        (("--plot", "front.jpg"), "ends in .html"),
        (("--plot", "no/such/front.html"), "there is no folder"),
        (("--devices", "8,x"), "a number above 0, or several"),
        (("--devices", "0"), "a number above 0, or several"),
        (("--objective", "speed"), "--objective is one of time, goodput"),
        (("--objective", "goodput"), "give --mtbf-hours"),
        (("--deadline", "soon"), "a number with s, m, h, d or w"),
        (("--deadline", "1s"), r"the --deadline of .* days: the nearest takes"),
        (("--budget", "-1"), "--budget must be above 0"),
        (("--headroom", "100%"), "below 100% or a size"),
        (("--headroom", "8"), "below 100% or a size"),
        (("--restart-s", "60"), "without --mtbf-hours there are no failures; leave --restart-s out"),
        (("--tokens", "-5"), "cannot train on"),
        (("--mtbf-hours", "0"), "above 0"),
        (("--mtbf-hours", "10", "--storage-gbps", "0"), "--storage-gbps must be above 0"),
    ],
)
def test_mistakes_are_told(args: tuple[str, ...], message: str) -> None:
    with pytest.raises(MoestroError, match=message):
        plan(*SMALL[1:], *args)
