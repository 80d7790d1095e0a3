"""Public runs: what a row says, what is assumed, and what makes it unusable."""

import csv
from pathlib import Path

import pytest

from moestro.errors import MoestroError
from moestro.predict.public import PublicRun, parse_runs

ROW = {
    "source": "github some/where", "year": "2024", "model": "Llama-3 8B", "layers": "32", "hidden": "4096",
    "ffn": "14336", "heads": "32", "kv_heads": "8", "vocab": "128256", "seq": "8192", "hardware": "H100 SXM 80GB",
    "gpus": "64", "gpus_per_node": "8", "tp": "2", "pp": "2", "dp": "", "ep": "", "cp": "2", "vpp": "", "zero": "",
    "micro_batch": "1", "global_batch": "128", "precision": "bf16", "recompute": "none", "flash_attn": "yes",
    "metric": "tokens_per_s_per_gpu", "value": "8000", "notes": "", "experts": "", "topk": "", "expert_ffn": "",
    "shared_experts": "", "params_total_b": "", "interconnect": "",
}  # fmt: skip


def parse(folder: Path, **changes: str) -> tuple[list[PublicRun], dict[str, int]]:
    path = folder / "runs.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ROW)
        writer.writeheader()
        writer.writerow(ROW | changes)
    runs, unusable = parse_runs(path)
    return runs, dict(unusable)


def one(folder: Path, **changes: str) -> PublicRun:
    (run,), _ = parse(folder, **changes)
    return run


class TestMetrics:
    @pytest.mark.parametrize(
        ("metric", "value", "seconds"),
        [
            ("step_time_ms", "1500", 1.5),
            ("step_time_s", "1.5", 1.5),
            ("tokens_per_s_per_gpu", "8000", 128 * 8192 / (8000 * 64)),
            ("tokens_per_s_total", "512000", 128 * 8192 / 512000),
        ],
    )
    def test_become_seconds_of_a_step(self, tmp_path: Path, metric: str, value: str, seconds: float) -> None:
        assert one(tmp_path, metric=metric, value=value).measured == pytest.approx(seconds)

    def test_flops_are_counted_with_full_attention_until_mid_2025(self, tmp_path: Path) -> None:
        rate = {"metric": "tflops_per_gpu", "value": "400"}
        old = one(tmp_path, **rate, year="2025").measured
        assert old == one(tmp_path, **rate, year="2024").measured
        for year, source in (("2026", "github some/where"), ("2025", "a page (25.09 NeMo Container)")):
            assert 1.05 < old / one(tmp_path, **rate, year=year, source=source).measured < 1.2
        assert "FLOPs by our count" in one(tmp_path, metric="tflops_per_gpu").assumed

    def test_packed_short_sequences_count_no_attention(self, tmp_path: Path) -> None:
        rate = {"metric": "model_tflops_per_gpu", "value": "400"}
        whole, packed = (one(tmp_path, **rate, model=name) for name in ("Llama-3 8B", "Llama-3 8B SFT"))
        assert 1.1 < whole.measured / packed.measured < 1.4

    @pytest.mark.parametrize(
        ("metric", "year", "ratio"),
        [("tflops_per_gpu", "2022", 4 / 3), ("tflops_per_gpu", "2024", 1), ("mfu_percent", "2022", 1)],
    )
    def test_hardware_flops_of_old_rates_hold_recomputation(
        self, tmp_path: Path, metric: str, year: str, ratio: float
    ) -> None:
        rate = {"metric": metric, "value": "40", "year": year}
        full, none = (one(tmp_path, **rate, recompute=how).measured for how in ("full", "none"))
        assert full / none == pytest.approx(ratio)

    def test_other_gates_and_windows_were_miscounted_until_mid_2026(self, tmp_path: Path) -> None:
        rate = {
            "metric": "model_tflops_per_gpu",
            "value": "400",
            "model": "GPT-OSS 20B",
            "year": "2026",
            "pp": "1",
            "cp": "1",
        }
        shape = {
            "layers": "24",
            "hidden": "2880",
            "ffn": "2880",
            "heads": "64",
            "experts": "32",
            "topk": "4",
            "vocab": "201088",
        }
        old = one(tmp_path, **rate, **shape, source="a page (26.04 NeMo Container)").measured
        new = one(tmp_path, **rate, **shape, source="a page (26.06 NeMo Container)").measured
        assert 0.7 < old / new < 0.95

    def test_memory_is_bytes(self, tmp_path: Path) -> None:
        run = one(tmp_path, metric="peak_alloc_gib_per_gpu", value="60")
        assert (run.quantity, run.measured) == ("bytes", 60 * 2**30)


class TestDepth:
    """Of a row whose layers somebody inferred."""

    def layers(self, folder: Path, total_b: str, notes: str, seq: str = "1024") -> int:
        shape = {"model": "MPT", "hidden": "1024", "ffn": "4096", "heads": "16", "kv_heads": "16", "vocab": "50368"}
        run = one(folder, **shape, layers="24", params_total_b=total_b, notes=notes, seq=seq)
        return run.workload.model.num_layers

    def test_parameters_tell(self, tmp_path: Path) -> None:
        inferred = "layers/hidden INFERRED from a family"
        assert self.layers(tmp_path, "0.504", inferred) == 36
        assert self.layers(tmp_path, "0.504", "") == 24
        assert self.layers(tmp_path, "0.354", inferred) == 24
        assert self.layers(tmp_path, "much", inferred) == 24

    def test_learned_positions_are_no_layers(self, tmp_path: Path) -> None:
        assert self.layers(tmp_path, "0.421", "layers/hidden INFERRED from a family", seq="65536") == 24


class TestLayout:
    def test_data_ranks_are_what_is_left(self, tmp_path: Path) -> None:
        plan = one(tmp_path).plan
        assert (plan.tp, plan.pp, plan.cp, plan.dp, plan.zero) == (2, 2, 2, 8, 1)

    @pytest.mark.parametrize(
        ("text", "zero", "shard"),
        [
            ("FSDP FULL_SHARD", 3, None),
            ("FSDP 64", 3, None),
            ("FSDP 0", 1, None),
            ("zero1 group 8", 1, 8),
            ("3", 3, None),
        ],
    )
    def test_zero(self, tmp_path: Path, text: str, zero: int, shard: int | None) -> None:
        plan = one(tmp_path, zero=text, tp="1", pp="1", cp="1").plan
        assert plan.zero == zero
        assert plan.shard in (shard, 64 if text == "FSDP 64" else shard)

    def test_units_of_sequences_and_batches(self, tmp_path: Path) -> None:
        run = one(tmp_path, seq="8K", global_batch="4M tokens")
        assert (run.workload.seq_len, run.workload.global_batch_size) == (8192, 512)

    def test_a_short_pipeline_is_taken_to_be_interleaved(self, tmp_path: Path) -> None:
        run = one(tmp_path, pp="8", cp="1", global_batch="32")
        assert run.plan.schedule == "interleaved"
        assert any("interleaved" in text for text in run.assumed)

    def test_precision(self, tmp_path: Path) -> None:
        assert one(tmp_path, precision="amp_fp8 DEFAULT").workload.precision == "fp8"
        assert one(tmp_path, precision="MXFP8").workload.precision == "mxfp8"
        assert one(tmp_path, precision="", year="2025").workload.precision == "fp8"
        assert one(tmp_path, precision="", year="2023").workload.precision == "bf16"

    def test_old_attention_means_an_old_stack(self, tmp_path: Path) -> None:
        run = one(tmp_path, flash_attn="no", recompute="")
        assert run.workload.attention_kernel == "math"
        assert not run.plan.sequence_parallel
        assert run.plan.recompute == "block"


class TestModels:
    def test_architecture_behind_a_name(self, tmp_path: Path) -> None:
        shapes = {"layers": "61", "hidden": "7168", "ffn": "18432", "heads": "128", "vocab": "129280", "experts": "256"}
        run = one(tmp_path, model="DeepSeekV3", topk="8", expert_ffn="2048", shared_experts="1", seq="4096", **shapes)
        model = run.workload.model
        assert model.mla is not None
        assert model.mtp is not None
        assert model.moe is not None
        assert model.moe.first_k_dense == 3

    def test_a_complete_row_is_known_as_one(self, tmp_path: Path) -> None:
        assert one(tmp_path).complete
        assert not one(tmp_path, tp="").complete


class TestUnusable:
    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({"metric": "time_to_train_min"}, "metric time_to_train_min"),
            ({"hardware": "Abacus 3"}, "device not in the catalog"),
            ({"layers": ""}, "no layers, hidden size or heads"),
            ({"gpus": "63"}, "tp · pp · cp does not divide the devices"),
            ({"value": "fast"}, "no value"),
            ({"seq": ""}, "no sequence length"),
            ({"global_batch": ""}, "no global batch"),
        ],
    )
    def test_is_counted_with_its_reason(self, tmp_path: Path, changes: dict[str, str], why: str) -> None:
        assert parse(tmp_path, **changes) == ([], {why: 1})

    @pytest.mark.parametrize("column", ["gpus", "layers", "hidden", "heads", "seq", "global_batch", "value"])
    @pytest.mark.parametrize("cell", ["0", "-4", "nan", "inf", "1e400", "many"])
    def test_cells_that_are_no_sizes(self, tmp_path: Path, column: str, cell: str) -> None:
        runs, unusable = parse(tmp_path, **{column: cell})
        assert runs == []
        assert sum(unusable.values()) == 1

    @pytest.mark.parametrize("column", ["tp", "pp", "cp", "ep", "vpp", "micro_batch", "kv_heads", "experts", "ffn"])
    @pytest.mark.parametrize("cell", ["0", "-4", "nan", "7", "100000"])
    def test_other_odd_cells_never_stop_the_table(self, tmp_path: Path, column: str, cell: str) -> None:
        runs, unusable = parse(tmp_path, **{column: cell})
        assert len(runs) + sum(unusable.values()) == 1

    def test_a_layout_that_the_model_does_not_allow(self, tmp_path: Path) -> None:
        assert parse(tmp_path, tp="64", pp="1", cp="1")[1] == {"its layout does not fit the model: tp": 1}

    def test_a_table_of_something_else(self, tmp_path: Path) -> None:
        path = tmp_path / "x.csv"
        path.write_text("a,b\n1,2\n")
        with pytest.raises(MoestroError, match="no column model"):
            parse_runs(path)

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(MoestroError, match="cannot read"):
            parse_runs(tmp_path / "none.csv")


def test_most_of_the_shipped_rows_are_used(public_runs: list[PublicRun]) -> None:
    assert len(public_runs) > 1450
    assert sum(run.complete for run in public_runs) > 1400
    assert sum(run.is_moe for run in public_runs) > 180
