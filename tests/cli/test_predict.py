"""`moestro predict` and `moestro validate`: what is printed, for people and machines, and every mistake answered."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from predict.test_predict import profile

from moestro.hardware.profile import save_profile
from moestro.predict import constants, curves

from .helpers import Outcome, moestro

PRESET = "olmoe-tiny"


pytestmark = pytest.mark.usefixtures("own_cache")


def predict(*arguments: str) -> Outcome:
    return moestro("predict", *arguments)


def tree(*arguments: str) -> dict[str, object]:
    done = predict(*arguments, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert isinstance(found, dict)
    return found


@pytest.fixture
def measured(tmp_path: Path) -> str:
    path = tmp_path / "profile.json"
    save_profile(profile(), path)
    return str(path)


BF16 = ("train.dtype=bf16", "--hardware", "h100-8")


class TestPredict:
    def test_prints_time_memory_and_what_is_left_out(self) -> None:
        done = predict("olmoe-1b-7b", "--hardware", "h100-8", "plan.ep=8")
        assert done.code == 0
        for text in (
            "8 × NVIDIA H100 SXM", "dp=8 ep=8", "step", "tokens/s", "MFU", "989 TFLOP/s", "of 80.0 GB: fits",
            "training", "cost", "energy", "experts", "communication, exposed", "optimizer", "activations",
            "rests on:", "not included:", "ep ",
        ):  # fmt: skip
            assert text in done.out.replace("\u00a0", " "), text

    def test_json_holds_the_same(self) -> None:
        found = tree(PRESET, *BF16, "plan.dp=4")
        assert found["devices"] == 4
        step, time = found["step_s"], found["time"]
        assert isinstance(step, dict)
        assert isinstance(time, dict)
        assert step["value"] == pytest.approx(time["total"])
        assert found["plan"]["dp"] == 4  # type: ignore[index]
        assert found["outlook"]["steps"] == pytest.approx(200)  # type: ignore[index]

    def test_dp_is_what_the_devices_leave(self) -> None:
        assert tree(PRESET, *BF16, "plan.pp=2", "train.micro_batch_size=1")["plan"]["dp"] == 4  # type: ignore[index]
        found = tree(PRESET, *BF16, "plan.tp=2", "--devices", "4", "train.micro_batch_size=1")
        assert found["plan"]["dp"] == 2  # type: ignore[index]

    def test_without_a_plan_the_layout_is_the_trainers(self) -> None:
        overrides = ("parallel.tp=2", "parallel.ep=2", "train.global_batch_size=8", "train.micro_batch_size=2")
        plan = tree(PRESET, *BF16, *overrides)["plan"]
        assert (plan["tp"], plan["dp"], plan["ep"], plan["etp"]) == (2, 4, 2, 2)  # type: ignore[index]

    def test_workload_overrides(self) -> None:
        found = tree(PRESET, *BF16, "workload.precision=fp8", "workload.global_batch_size=16", "plan.dp=8")
        assert found["workload"]["precision"] == "fp8"  # type: ignore[index]
        assert found["workload"]["global_batch_size"] == 16  # type: ignore[index]

    def test_failures_and_prices(self) -> None:
        plain = tree(PRESET, *BF16, "plan.dp=4", "--usd-per-hour", "2", "--tokens", "1e12")["outlook"]
        failing = tree(
            PRESET, *BF16, "plan.dp=4", "--usd-per-hour", "2", "--tokens", "1e12", "--mtbf-hours", "100"
        )["outlook"]  # fmt: skip
        assert isinstance(plain, dict)
        assert isinstance(failing, dict)
        assert plain["cost"]["usd"] == pytest.approx(plain["training_s"] * 4 * 2 / 3600)
        assert 0 < failing["goodput"] < 1
        assert failing["training_s"] == pytest.approx(plain["training_s"] / failing["goodput"])
        assert failing["cost"]["usd"] == pytest.approx(plain["cost"]["usd"] / failing["goodput"])

    def test_exact_agrees_with_the_closed_form_of_even_stages(self) -> None:
        options = (PRESET, *BF16, "plan.pp=2", "plan.dp=1", "--devices", "2", "train.micro_batch_size=1")
        closed, exact = tree(*options)["step_s"], tree(*options, "--exact")["step_s"]
        assert exact["value"] == pytest.approx(closed["value"], rel=0.2)  # type: ignore[index]

    def test_keeps_the_curves_for_the_next_time(self, own_cache: Path) -> None:
        predict(PRESET, *BF16, "plan.dp=4")
        assert [path.name.startswith("curves-h100_sxm-") for path in own_cache.iterdir()] == [True]

    def test_a_measured_machine(self, measured: str, own_cache: Path) -> None:
        done = predict(PRESET, "--profile", measured)
        assert done.code == 0, done.err
        assert "here (a CPU), measured 2026-01-02" in done.out
        assert "host, waited for" in done.out
        assert "cost" not in done.out
        assert not own_cache.exists()
        two = tree(PRESET, "--profile", measured, "--devices", "2", "parallel.ep=2")
        assert two["plan"]["dp"] == 2  # type: ignore[index]

    def test_beside_a_run(self, measured: str, tmp_path: Path) -> None:
        from moestro.config import load_config, to_toml

        run = tmp_path / "run"
        run.mkdir()
        (run / "config.toml").write_text(to_toml(load_config(PRESET, ()).config))
        (run / "environment.json").write_text(json.dumps({"world_size": 1}))
        steps = [{"kind": "train", "step": i + 1, "loss": 1.0, "step_s": 9.0 if i < 2 else 0.5} for i in range(8)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
        done = predict("--from", str(run), "--profile", measured)
        assert done.code == 0, done.err
        line = next(line for line in done.out.splitlines() if line.startswith("measured"))
        assert "0.50 s" in line
        assert "predicted -" in line
        assert tree("--from", str(run), "train.recompute=block", "--profile", measured)["plan"]["recompute"] == "block"  # type: ignore[index]

    def test_a_traced_function(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What it takes, from a graph that tracing would give."""
        from moestro.config import load_config
        from moestro.config.plan import Plan
        from moestro.graph.convert import workload_of
        from moestro.graph.count import count_step
        from moestro.graph.trace.program import Traced, TracedMemory

        plan = Plan(dp=4)
        config = load_config(PRESET, ("train.dtype=bf16", "train.global_batch_size=8")).config
        graph = count_step(workload_of(config), plan)
        traced = Traced(graph, (), TracedMemory(1, 2, 3))
        asked = []
        monkeypatch.setattr("moestro.graph.trace.trace_program", lambda *given: asked.append(given[:2]) or traced)
        done = predict("--trace", "my:step", "--world", "4", "--hardware", "h100-8")
        assert done.code == 0, done.err
        assert asked == [("my:step", 4)]
        assert "my:step on 4 × NVIDIA H100 SXM" in done.out
        assert "all communication" in done.out
        found = tree("--trace", "my:step", "--world", "4", "--hardware", "h100-8")
        counted = tree(PRESET, *BF16, "train.global_batch_size=8", "plan.dp=4", "train.micro_batch_size=1")
        assert found["time"]["total"] == pytest.approx(counted["time"]["total"])  # type: ignore[index]
        crowded = predict("--trace", "my:step", "--world", "4", "--hardware", "h100-8", "--devices", "2")
        assert crowded.code == 2
        assert "traced for 4 ranks, and there are 2" in crowded.err
        mixed = predict("--trace", "my:step", PRESET, "--hardware", "h100-8")
        assert mixed.code == 2
        assert "leave the preset out" in mixed.err

    def test_writes_a_trace(self, tmp_path: Path) -> None:
        path = tmp_path / "new" / "trace.json"
        assert predict(PRESET, *BF16, "plan.pp=2", "train.micro_batch_size=1", "--perfetto", str(path)).code == 0
        assert {event["tid"] for event in json.loads(path.read_text())["traceEvents"]} == {0, 1}
        assert len(list(path.parent.iterdir())) == 1

    def test_writes_a_timeline(self, tmp_path: Path, measured: str) -> None:
        path = tmp_path / "new" / "timeline.json"
        done = predict(PRESET, *BF16, "plan.dp=4", "plan.ep=4", "train.micro_batch_size=1", "--timeline", str(path))
        assert done.code == 0, done.err
        assert f"timeline  {path}" in done.out
        rows = [e["args"]["name"] for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "M"]
        assert rows[:2] == ["host", "compute"]
        assert {"ep", "dp"} <= set(rows)
        on_cpu = predict(PRESET, "--profile", measured, "--timeline", str(path))
        assert on_cpu.code == 2
        assert "a CPU has no streams" in on_cpu.err

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ((PRESET,), "--hardware NAME"),
            ((PRESET, "--hardware", "h100-8", "--profile", "x"), "--hardware NAME"),
            (("--hardware", "h100-8"), "give a preset"),
            ((PRESET, "--from", "runs/x", "--hardware", "h100-8"), "give a preset"),
            ((PRESET, "--hardware", "h100-9"), "Did you mean 'h100-8'"),
            ((PRESET, "--hardware", "missing.toml"), "missing.toml"),
            ((PRESET, "--profile", "nowhere"), "no profile at nowhere"),
            ((PRESET, *BF16, "plan.tpp=2"), "Did you mean 'tp'"),
            ((PRESET, *BF16, "plan.tp"), "is not an override"),
            ((PRESET, *BF16, "plan.tp=x"), "plan.tp: Input should be a valid integer"),
            ((PRESET, *BF16, "plan.tp=3"), "does not divide 8 devices"),
            ((PRESET, *BF16, "plan.pp=8", "plan.dp=1"), "stages for 2 layers"),
            ((PRESET, *BF16, "plan.ep=3", "plan.dp=4"), "does not divide dp"),
            ((PRESET, *BF16, "plan.dp=16"), "needs 16 devices, and there are 8"),
            ((PRESET, *BF16, "plan.dp=2", "--devices", "4"), "takes 2 devices"),
            ((PRESET, *BF16, "--devices", "16"), "has 8 devices, not 16"),
            ((PRESET, *BF16, "workload.precision=fp7"), "workload.precision"),
            ((PRESET, *BF16, "model.hidden=3"), "Did you mean 'model.hidden_size'"),
            ((PRESET, "--hardware", "a40-v100-mixed", "train.global_batch_size=12", "plan.dp=12"), "in several pools"),
            ((PRESET, *BF16, "plan.dp=4", "--tokens", "0"), "cannot train on 0 tokens"),
            ((PRESET, *BF16, "plan.dp=4", "--mtbf-hours", "0"), "mtbf must be above 0"),
        ],
    )
    def test_mistakes(self, arguments: tuple[str, ...], words: str) -> None:
        done = predict(*arguments)
        assert done.code == 2
        assert words in done.err
        assert len(done.err.splitlines()) <= 2


DENSE = {
    "source": "arXiv 1", "model": "GPT", "hardware": "H100", "gpus": "8", "layers": "4", "hidden": "512", "heads": "8",
    "vocab": "51200", "seq": "1024", "global_batch": "64", "micro_batch": "2", "tp": "1", "pp": "1", "dp": "8",
    "precision": "bf16", "metric": "step_time_ms", "value": "100", "year": "2024",
}  # fmt: skip
OTHERS = (
    "gpus_per_node", "ep", "cp", "vpp", "zero", "experts", "topk", "expert_ffn", "recompute", "flash_attn",
    "interconnect", "ffn", "kv_heads", "shared_experts", "params_total_b", "notes",
)  # fmt: skip
ROWS = (
    DENSE,
    {**DENSE, "gpus": "16", "dp": "16", "value": "60"},
    {**DENSE, "source": "arXiv 2", "experts": "8", "topk": "2", "expert_ffn": "1024", "value": "150"},
    {**DENSE, "metric": "time_to_train_min"},
    {**DENSE, "hardware": "an abacus"},
)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A table of runs; devices are priced by data sheets."""
    monkeypatch.setattr(curves, "_compute_samples", lambda: ())
    monkeypatch.setattr(curves, "_network_samples", lambda: ())
    curves.published_curves.cache_clear()
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*DENSE, *OTHERS], restval="")
        writer.writeheader()
        writer.writerows(ROWS)
    yield str(path)
    curves.published_curves.cache_clear()


class TestValidate:
    def test_prints_errors_by_group_and_what_was_not_used(self, runs: str) -> None:
        done = moestro("validate", runs)
        assert done.code == 0, done.err
        for text in (
            "3 step times",
            "mixture of experts",
            "dense",
            "h100-sxm bf16",
            "arXiv 2",
            "null median",
            "all runs",
        ):
            assert text in done.out
        assert "not used: 2 rows" in done.out
        assert "device not in the catalog" in done.out

    def test_json_and_folder_hold_the_same(self, runs: str, tmp_path: Path) -> None:
        out = tmp_path / "out"
        done = moestro("validate", runs, "--json", "--out", str(out))
        assert done.code == 0, done.err
        found = json.loads(done.out)
        assert found == json.loads((out / "summary.json").read_text())
        assert found["all"]["runs"] == 3
        assert {group["name"]: group["runs"] for group in found["by_kind"]} == {"dense": 2, "mixture of experts": 1}
        with (out / "runs.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [float(row["measured_s"]) for row in rows] == [0.1, 0.06, 0.15]
        for row in rows:
            assert float(row["error"]) == pytest.approx(
                float(row["predicted_s"]) / float(row["measured_s"]) - 1, abs=1e-3
            )
        errors = sorted(abs(float(row["error"])) for row in rows)
        assert found["all"]["median"] == pytest.approx(errors[1], abs=1e-3)
        page = (out / "validation.html").read_text()
        assert "3 runs" in page
        assert "http://" not in page.split("</script>")[-1]
        assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []

    def test_fit_writes_constants_that_can_be_read(self, runs: str, tmp_path: Path) -> None:
        path = tmp_path / "calibration.toml"
        done = moestro("validate", runs, "--fit", str(path))
        assert done.code == 0, done.err
        found = constants.load_calibration(path)
        assert found.generations
        assert set(found.sources) <= {"arXiv 1", "arXiv 2"}

    def test_mistakes(self, runs: str, tmp_path: Path) -> None:
        bad = tmp_path / "bad.csv"
        bad.write_text("a,b\n1,2\n")
        for arguments, words in (
            ((str(tmp_path / "none.csv"),), "cannot read"),
            ((str(bad),), "has no column"),
            ((runs, "--out", str(tmp_path)), "choose another --out"),
            ((runs, "--fit", str(tmp_path / "x"), "--hold-out"), "leave --hold-out"),
        ):
            done = moestro("validate", *arguments)
            assert done.code == 2
            assert words in done.err
