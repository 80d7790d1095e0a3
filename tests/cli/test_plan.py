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


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("plan.dp=8",), "no plan.dp"),
        (("plan.pp=3",), "no plan of the search uses 8 devices"),
        (("--devices", "16"), "has 8 devices, not 16"),
        (("plan.nonsense=1",), "no plan.nonsense"),
        (("plan.pp=abc",), r"plan\.pp = abc: Input should be a valid integer"),
        (("plan.pp=[1,0]",), r"plan\.pp = 0: Input should be greater"),
        (("plan.pp=[]",), r"plan\.pp: nothing to try"),
        (("plan.zero=7",), r"plan\.zero = 7: Input should be"),
        (("plan.schedule=foo",), r"plan\.schedule = foo"),
        (("--out", "no/such/plan.toml"), "there is no folder"),
    ],
)
def test_mistakes_are_told(args: tuple[str, ...], message: str) -> None:
    with pytest.raises(MoestroError, match=message):
        plan(*SMALL[1:], *args)
