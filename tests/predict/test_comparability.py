"""Manifests are compared before numbers are."""

import json
from pathlib import Path

import pytest

from moestro.errors import MoestroError
from moestro.predict.comparability import MISSING, compare, read_manifest

TPU = {
    "model": {"name": "gemma-4-31b", "lora_rank": 64},
    "hardware": "8 TPU v5p",
    "train": {"loss_mask": "assistant", "grad_clip": "none", "dtype": "bf16", "seq_len": 3072},
    "serve": {"kv_cache_dtype": "fp8", "version": "1"},
    "run": {"name": "tpu"},
}
GPU = {
    "model": {"name": "gemma-4-31b", "lora_rank": 64.0},
    "hardware": "2 H100",
    "train": {"loss_mask": "all", "grad_clip": 1.0, "dtype": "bf16", "seq_len": 3072, "eager": True},
    "serve": {"kv_cache_dtype": "bf16", "version": "2"},
    "run": {"name": "gpu"},
}


def test_hardware_is_compared_but_other_things_differ_too() -> None:
    speed = compare(TPU, GPU, "speed", varied=["hardware"])
    assert not speed.comparable
    assert {d.key for d in speed.against} == {"serve.kv_cache_dtype", "serve.version", "train.eager"}
    quality = compare(TPU, GPU, "quality", varied=["hardware"])
    assert {d.key for d in quality.against} == {"train.loss_mask", "train.grad_clip", "serve.version"}
    assert "run.name" in {d.key for d in quality.other}


def test_a_setting_that_only_one_run_tells_is_a_difference() -> None:
    eager = next(d for d in compare(TPU, GPU, "speed").against if d.key == "train.eager")
    assert eager.first == MISSING
    assert not eager.told


def test_what_is_declared_may_differ_and_equal_numbers_are_equal() -> None:
    declared = compare(TPU, GPU, "speed", varied=["hardware", "serve", "train.eager"])
    assert declared.comparable
    assert all(d.varied for d in declared.bearing)
    assert "model.lora_rank" not in {d.key for d in (*declared.bearing, *declared.other)}
    assert compare(TPU, TPU).comparable


def test_an_unknown_key_bears_on_everything() -> None:
    for figure in ("speed", "quality", "cost"):
        assert not compare({"mystery": 1}, {"mystery": 2}, figure).comparable  # type: ignore[arg-type]


def test_key_words_match_whole_words_only() -> None:
    assert not compare({"model": {"num_kv_heads": 1}}, {"model": {"num_kv_heads": 2}}, "quality").comparable
    assert not compare({"eclipse": 1}, {"eclipse": 2}, "speed").comparable  # is not about clipping
    assert compare({"clip_norm": 1}, {"clip_norm": 2}, "speed").comparable


def test_a_varied_key_that_is_nowhere_is_refused() -> None:
    with pytest.raises(MoestroError, match="'hardwear' is in neither"):
        compare(TPU, GPU, varied=["hardwear"])


def test_manifests_are_read_from_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[train]\ndtype = "bf16"\n')
    (tmp_path / "environment.json").write_text(json.dumps({"torch": "2.13"}))
    assert read_manifest(tmp_path) == {"train": {"dtype": "bf16"}, "torch": "2.13"}
    bad = tmp_path / "bad.json"
    bad.write_text("[1]")
    with pytest.raises(MoestroError, match="not a table"):
        read_manifest(bad)
    with pytest.raises(MoestroError, match="cannot read"):
        read_manifest(tmp_path / "missing.toml")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(MoestroError, match="run's folder"):
        read_manifest(empty)
