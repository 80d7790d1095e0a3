"""`moestro predict` with uneven routing, unlike devices, regions and optical circuits."""

import json
from pathlib import Path

import pytest

from .helpers import Outcome, moestro

PRESET = "olmoe-tiny"
EP = (PRESET, "train.dtype=bf16", "--hardware", "h100-8", "plan.ep=8", "train.global_batch_size=8")


pytestmark = pytest.mark.usefixtures("own_cache")


def predict(*arguments: str) -> Outcome:
    return moestro("predict", *arguments)


def exchange_s(*arguments: str) -> float:
    done = predict(*arguments, "--json")
    assert done.code == 0, done.err
    return float(json.loads(done.out)["time"]["by_dimension"]["ep"])


class TestRouting:
    def test_a_power_law_slows_dispatch(self) -> None:
        even = exchange_s(*EP)
        assert exchange_s(*EP, "workload.routing.kind=balanced") == even
        uneven = exchange_s(*EP, "workload.routing.kind=power_law")
        assert even < uneven < exchange_s(*EP, "workload.routing.kind=power_law", "workload.routing.alpha=2.0")

    def test_loads_of_a_run(self, tmp_path: Path) -> None:
        steps = []
        for step in range(4):  # the second half counts: all to the first rank's two experts
            load = [1 / 16] * 16 if step < 2 else [0.5, 0.5] + [0.0] * 14
            steps.append(
                {"kind": "train", "step": step, "loss": 1.0, "layers": [{"layer": i, "load": load} for i in (0, 1)]}
            )
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
        even, uneven = exchange_s(*EP), exchange_s(*EP, f"workload.routing.run={tmp_path}")
        assert even < uneven <= 8 * even

    @pytest.mark.parametrize(
        ("override", "words"),
        [
            ("workload.routing.kid=power_law", "workload.routing.kid"),
            ("workload.routing.alpha=0", "workload.routing.alpha"),
            ("workload.routing.run=nowhere", "nowhere"),
        ],
    )
    def test_mistakes(self, override: str, words: str) -> None:
        done = predict(*EP, override)
        assert done.code == 2
        assert words in done.err

    def test_a_run_without_experts(self, tmp_path: Path) -> None:
        (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "train", "step": 1, "loss": 2.0}) + "\n")
        done = predict(*EP, f"workload.routing.run={tmp_path}")
        assert done.code == 2
        assert "tells no loads of experts" in done.err


class TestClusters:
    def test_two_regions(self) -> None:
        done = predict(
            PRESET, "train.dtype=bf16", "--hardware", "two-regions", "plan.pp=2", "plan.dp=16", "plan.ep=8",
            "train.global_batch_size=64",
        )  # fmt: skip
        assert done.code == 0, done.err
        for text in (
            "32 × NVIDIA H100 SXM and NVIDIA A100 SXM 80 GB", "pipeline rank 0 on h100-sxm in east",
            "pipeline rank 1 on a100-sxm-80gb in west", "different regions", "30 ms on the way",
        ):  # fmt: skip
            assert text in " ".join(done.out.split())
        assert "cost" not in done.out  # of two kinds of devices nobody has one price

    def test_circuits(self) -> None:
        done = predict(
            PRESET, "train.dtype=bf16", "--hardware", "mixnet-1024", "plan.ep=8", "plan.etp=2", "plan.tp=2",
            "plan.dp=8", "train.global_batch_size=64",
        )  # fmt: skip
        assert done.code == 0, done.err
        assert "optical circuits" in done.out
