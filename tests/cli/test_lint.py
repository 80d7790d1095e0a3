"""`moestro lint`: verdicts, exit statuses, and mistakes answered in a line."""

import json
from pathlib import Path

import pytest

from .helpers import Outcome, moestro

HEADER = (
    "model,layers,hidden,heads,seq,hardware,gpus,tp,pp,micro_batch,global_batch,precision,metric,value,params_total_b"
)


def lint(*arguments: str) -> Outcome:
    return moestro("lint", *arguments)


class TestClaim:
    def test_faster_than_the_peak_is_impossible(self) -> None:
        done = lint("claim", "--device", "tpu-v6e", "--devices", "8", "--seconds", "0.062", "--flops", "9.52e14")
        assert done.code == 1
        assert done.out.startswith("impossible: 9.52e+14 FLOPs on 8 devices of 918 TFLOP/s take at least 130 ms")

    def test_a_slow_one_is_possible_unless_the_queue_grows(self) -> None:
        claim = ("claim", "--device", "h100-sxm", "--devices", "2", "--seconds", "60", "--flops", "9.52e14")
        assert lint(*claim).code == 0
        loaded = lint(*claim, "--rate", "4", "--json")
        assert loaded.code == 1
        assert json.loads(loaded.out)["verdicts"][0]["possible"] is False

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--device", "h100-sxm", "--seconds", "1", "--flops", "1", "--dtype", "bf61"), "Did you mean 'bf16'?"),
            (("--device", "h100", "--seconds", "1"), "give --flops"),
            (("--device", "h10000", "--seconds", "1", "--flops", "1"), "h10000"),
        ],
    )
    def test_mistakes(self, arguments: tuple[str, ...], message: str) -> None:
        done = lint("claim", *arguments)
        assert done.code == 2
        assert message in done.err
        assert len(done.err.splitlines()) <= 2


class TestRuns:
    def test_only_the_impossible_row_is_named(self, tmp_path: Path) -> None:
        row = "Llama 8B,32,4096,32,4096,H100 SXM,8,1,1,1,64,bf16,step_time_s,{},8"
        table = tmp_path / "runs.csv"
        table.write_text(
            "\n".join([HEADER, row.format(5.0), row.format(0.5), "Thing,,,,,,,,,,,,step_time_s,1,"]) + "\n"
        )
        done = lint("runs", str(table))
        assert done.code == 1
        assert done.out.count(": impossible:") == 1
        assert done.out.startswith("row 3, Llama 8B: impossible")
        assert "figures checked: 2; impossible: 1; rows that say too little to check: 1" in done.out


class TestCompare:
    def test_what_should_not_differ_is_named(self, tmp_path: Path) -> None:
        for name, clip in (("a", 1.0), ("b", 0.0)):
            (tmp_path / f"{name}.json").write_text(json.dumps({"train": {"grad_clip": clip}, "hardware": name}))
        files = (str(tmp_path / "a.json"), str(tmp_path / "b.json"))
        quality = lint("compare", *files, "--figure", "quality")
        assert quality.code == 1
        assert "train.grad_clip" in quality.out
        assert "not comparable in quality; differences that bear on it: 1" in quality.out
        assert lint("compare", *files, "--figure", "quality", "--vary", "train.grad_clip").code == 0
        tree = json.loads(lint("compare", *files, "--vary", "hardware", "--json").out)
        assert tree["comparable"] is True
        assert [one["key"] for one in tree["other"]] == ["train.grad_clip"]

    def test_mistakes(self, tmp_path: Path) -> None:
        assert "Did you mean 'speed'?" in lint("compare", "a", "b", "--figure", "sped").err
        assert lint("compare", str(tmp_path / "no.toml"), str(tmp_path)).code == 2
