"""`moestro checkpoint import` and `export`; what does not fit is refused in one line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.helpers import moestro
from safetensors.torch import load_file, save_file
from torch import Tensor

from moestro.checkpoint.huggingface.importing import open_source

from .models import Made, transformers


class TestCommands:
    def test_there_and_back(self, made: Made, tmp_path: Path) -> None:
        folder, run, out = tmp_path / "folder", tmp_path / "run", tmp_path / "out"
        shutil.copytree(made.folder("qwen3_moe"), folder)
        (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
        done = moestro("checkpoint", "import", str(folder), str(run))
        assert done.code == 0, done.err
        assert done.out.startswith(f"{run}  qwen3_moe, ")
        done = moestro("generate", str(run), "w3 w4", "--max-new-tokens", "3", "--device", "cpu")
        assert done.code == 0, done.err
        done = moestro("checkpoint", "export", str(run), str(out))
        assert done.code == 0, done.err
        names = [
            "chat_template.jinja",
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        ]
        assert sorted(path.name for path in out.iterdir()) == names
        tokenizer = transformers.AutoTokenizer.from_pretrained(out)
        assert tokenizer.eos_token_id == 0
        assert tokenizer("w3 w4")["input_ids"] == [3, 4]
        assert tokenizer.apply_chat_template([{"role": "user", "content": "w5"}], tokenize=False) == "w5"

    def test_the_rope_of_the_phase_that_training_is_in(self, made: Made, tmp_path: Path) -> None:
        run = Path(shutil.copytree(made.run("mixtral"), tmp_path / "run"))
        text = (run / "config.toml").read_text()
        assert "phases = []\n" in text
        phases = "phases = [{steps = 1000, rope_theta = 500000.0}]\n"
        (run / "config.toml").write_text(text.replace("phases = []\n", phases))
        done = moestro("checkpoint", "export", str(run), str(tmp_path / "out"))
        assert done.code == 0, done.err
        assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_theta"] == 500_000

    def test_an_architecture_that_no_family_has(self, made: Made, tmp_path: Path) -> None:
        run = Path(shutil.copytree(made.run("qwen3_moe"), tmp_path / "run"))
        text = (run / "config.toml").read_text()
        assert 'score = "softmax"' in text
        (run / "config.toml").write_text(text.replace('score = "softmax"', 'score = "sigmoid"'))
        done = moestro("checkpoint", "export", str(run), str(tmp_path / "plain"))
        assert done.code == 0, done.err
        assert "the nearest, qwen3_moe, has no moe.router.score = sigmoid" in done.err
        assert (tmp_path / "plain" / "config.toml").is_file()
        done = moestro("checkpoint", "export", str(run), str(tmp_path / "no"), "--layout", "fused")
        assert done.code == 2
        assert "--layout is of Hugging Face models" in done.err
        done = moestro("checkpoint", "export", str(run), str(tmp_path / "no"), "--format", "huggingface")
        assert done.code == 2
        assert not (tmp_path / "no").exists()

    @pytest.mark.parametrize("family", ["zaya", "llama"])
    def test_a_layout_that_a_family_does_not_have(self, made: Made, tmp_path: Path, family: str) -> None:
        layout = {"zaya": "per-expert", "llama": "fused"}[family]
        done = moestro("checkpoint", "export", str(made.run(family)), str(tmp_path / "out"), "--layout", layout)
        assert done.code == 2
        assert f"{family} has no layout {layout}" in done.err
        assert not (tmp_path / "out").exists()


def changed(file: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        values = json.loads((folder / file).read_text())
        change(values)
        (folder / file).write_text(json.dumps(values))

    return apply


def config(**values: Any) -> Callable[[Path], None]:
    return changed("config.json", lambda there: there.update(values))


def tensors(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        there = load_file(folder / "model.safetensors")
        change(there)
        save_file(there, folder / "model.safetensors")

    return apply


def in_shards(then: Callable[[Path], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        there = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names = sorted(there)
        files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
        for file, keys in files.items():
            save_file({key: there[key] for key in keys}, folder / file)
        weight_map = {key: file for file, keys in files.items() for key in keys}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        then(folder)

    return apply


def truncate(folder: Path) -> None:
    for path in sorted(folder.glob("*.safetensors"))[-1:]:
        path.write_bytes(path.read_bytes()[:-7])


def garble_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:20] + b"x" + path.read_bytes()[21:])


ROUTER, EXPERT = "model.layers.1.mlp.gate.weight", "model.layers.1.mlp.experts.3.up_proj.weight"
DOWN = EXPERT.replace("up_proj", "down_proj")


class TestRefusals:
    """On qwen3_moe: one line that names the trouble, exit status 2, and nothing left behind."""

    @pytest.mark.parametrize(
        ("harm", "words"),
        [
            (in_shards(truncate), "model-00002-of-00002.safetensors is damaged"),
            (
                in_shards(lambda folder: (folder / "model-00001-of-00002.safetensors").unlink()),
                "00002.safetensors is missing",
            ),
            (garble_header, "model.safetensors is damaged"),
            (lambda folder: (folder / "model.safetensors").unlink(), "only safetensors are read"),
            (lambda folder: (folder / "config.json").unlink(), "cannot read"),
            (lambda folder: (folder / "config.json").write_text("{"), "not valid JSON"),
            (lambda folder: (folder / "tokenizer.json").unlink(), "cannot read tokenizer"),
            (tensors(lambda there: there.pop(EXPERT)), f"lacks {EXPERT}"),
            (tensors(lambda there: there.update(extra=torch.zeros(2))), "also holds extra"),
            (tensors(lambda there: there.update({ROUTER: torch.zeros(5, 16)})), f"{ROUTER} is [5, 16], and"),
            (tensors(lambda there: there.update({EXPERT: torch.zeros(16, 12)})), f"{EXPERT} is [16, 12], and"),
            (tensors(lambda there: there.update({ROUTER: there[ROUTER].double()})), "has the type F64"),
            (tensors(lambda there: there.update({ROUTER: there[ROUTER].byte()})), "is of type uint8"),
            (tensors(lambda there: there.update({EXPERT: there[EXPERT].half()})), "differ in type: float16 or float32"),
            (tensors(lambda there: there.update({DOWN: there[DOWN].half()})), "of the types float16 or float32"),
            (config(model_type="qwen3_mo"), "Did you mean 'qwen3_moe'?"),
            (config(model_type="gpt2"), "Known are mixtral, olmoe"),
            (config(hidden_act="gelu"), 'hidden_act = "gelu" cannot be represented'),
            (config(rope_parameters={"rope_type": "yarn", "mscale_all_dim": 1}), "it needs a factor"),
            (config(model_type="zaya", zaya_mlp_expansion=1, zaya_layers=["a"]), "not of the type it should have"),
            (config(rope_parameters={"rope_type": "longrope"}), 'rope_type = "longrope" cannot'),
            (config(rope_parameters={"rope_type": "linear", "factor": 2.0, "beta_fast": 1}), "no such number"),
            (config(num_hidden_layers=3, mlp_only_layers=[1]), "neither the first ones nor regular"),
            (config(tie_word_embeddings=True), "lm_head.weight differs from model.embed_tokens.weight"),
            (config(num_experts_per_tok=9), "top_k = 9"),
            (config(num_attention_heads="four"), "num_heads"),
            (config(num_hidden_layers="2"), "not of the type it should have"),
            (config(num_experts_per_tok=None), "not of the type it should have"),
            (changed("config.json", lambda there: there.pop("hidden_size")), "lacks hidden_size"),
        ],
    )
    def test_one_line(self, made: Made, tmp_path: Path, harm: Callable[[Path], None], words: str) -> None:
        folder = Path(shutil.copytree(made.folder("qwen3_moe"), tmp_path / "folder"))
        harm(folder)
        before = sorted(tmp_path.rglob("*"))
        done = moestro("checkpoint", "import", str(folder), str(tmp_path / "run"))
        assert done.code == 2
        assert words in done.err
        assert len(done.err.splitlines()) == 1, done.err
        assert sorted(tmp_path.rglob("*")) == before

    def test_a_tied_head_that_repeats_the_embedding_is_none(self, made: Made, tmp_path: Path) -> None:
        folder = Path(shutil.copytree(made.folder("qwen3_moe"), tmp_path / "folder"))
        config(tie_word_embeddings=True)(folder)
        tensors(lambda there: there.update({"lm_head.weight": there["model.embed_tokens.weight"].clone()}))(folder)
        assert open_source(folder).model.tie_embeddings

    def test_a_run_that_is_there(self, made: Made, tmp_path: Path) -> None:
        (tmp_path / "run").mkdir()
        done = moestro("checkpoint", "import", str(made.folder("qwen3_moe")), str(tmp_path / "run"))
        assert done.code == 2
        assert "is there already" in done.err

    def test_a_run_of_another_model(self, made: Made, tmp_path: Path) -> None:
        run = Path(shutil.copytree(made.run("mixtral"), tmp_path / "run"))
        shutil.copy(made.run("olmoe") / "config.toml", run / "config.toml")
        done = moestro("checkpoint", "export", str(run), str(tmp_path / "out"))
        assert done.code == 2
        assert "is not of the model in its run's config.toml" in done.err
        assert not (tmp_path / "out").exists()
