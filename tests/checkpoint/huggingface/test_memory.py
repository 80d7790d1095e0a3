"""No more of a model is in memory than one expert, whatever its size."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moestro.checkpoint.huggingface.exporting import Export, export_family, family_of
from moestro.checkpoint.huggingface.families import FAMILIES as KNOWN
from moestro.checkpoint.huggingface.files import Weights
from moestro.checkpoint.huggingface.importing import import_run, open_source
from moestro.checkpoint.huggingface.mapping import entries, shapes
from moestro.checkpoint.store import Progress, save_checkpoint
from moestro.config import ModelConfig
from moestro.parallel.logical import whole

from .models import CHECKPOINT, END, VOCAB, write_tokenizer


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory in use is read from /proc")
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """24 experts of 0.75 MB in one layer, in files of 3 MB: one expert at a time, both ways."""
    model = ModelConfig.model_validate(
        {
            "vocab_size": VOCAB,
            "hidden_size": 256,
            "num_layers": 1,
            "num_heads": 4,
            "qk_norm": "head",
            "max_seq_len": 64,
            "moe": {"num_experts": 24, "top_k": 2, "expert_hidden_size": 256},
        }
    )
    assert family_of(model) == ("qwen3_moe", "")
    first = tmp_path / "first"
    write_folder(first, model)
    used = []

    def watch(count: int) -> None:
        used.append(resident_bytes())

    warm = save_checkpoint(tmp_path / "warm", {"model.x": whole(torch.zeros(1 << 20))}, Progress(0, 0, 0.0), keep=1)
    assert warm.is_dir()
    source = open_source(first)
    start = resident_bytes()
    import_run(source, tmp_path / "run", watch)
    assert source.bytes > 18 << 20
    assert max(used) - start < 5 << 20
    used.clear()
    how = Export(max_shard_bytes=3 << 20)
    export_family(tmp_path / "run" / CHECKPOINT, tmp_path / "second", model, END, how, watch)
    assert len(list((tmp_path / "second").glob("*.safetensors"))) > 6
    assert max(used) - start < 5 << 20
    before, after = Weights(first), Weights(tmp_path / "second")
    assert after.keys() == before.keys()
    assert all(torch.equal(after.read(key), before.read(key)) for key in before.keys())  # noqa: SIM118


def write_folder(folder: Path, model: ModelConfig) -> None:
    """A Hugging Face folder of random weights, a file for each tensor."""
    folder.mkdir()
    write_tokenizer(folder)
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen3_moe", **(KNOWN["qwen3_moe"].write(model) or {})})
    )
    generator = torch.Generator().manual_seed(0)
    weight_map = {}
    for entry in entries(model, KNOWN["qwen3_moe"].layouts["per-expert"], shapes(model)):
        assert entry.codec.write is not None
        for key, part in zip(entry.keys, entry.codec.write(torch.randn(entry.size, generator=generator)), strict=True):
            weight_map[key] = f"{key}.safetensors"
            save_file({key: part.contiguous()}, folder / weight_map[key])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
