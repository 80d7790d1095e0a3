"""What lies differently in released checkpoints: types, packed experts, older names, multi-token prediction."""

import importlib
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from cli.helpers import moestro
from safetensors.torch import load_file, save_file
from torch import nn

from moestro.checkpoint.huggingface.architecture import differences
from moestro.checkpoint.huggingface.files import Weights
from moestro.checkpoint.huggingface.importing import import_run, open_source
from moestro.checkpoint.store import Progress, save_checkpoint
from moestro.config import MTPConfig, load_config, to_toml
from moestro.model.transformer import Transformer
from moestro.parallel.logical import model_tensors
from moestro.serve.load import load_run

from .models import (
    VOCAB,
    Made,
    error,
    export,
    make,
    save,
    some_ids,
    transformers,
)


class TestOtherFormats:
    def test_bf16(self, made: Made, tmp_path: Path) -> None:
        run = made.run("deepseek_v3")
        done = moestro("checkpoint", "export", str(run), str(tmp_path / "out"), "--dtype", "bf16")
        assert done.code == 0, done.err
        assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
        written = load_file(tmp_path / "out" / "model.safetensors")
        bias = {key for key in written if key.endswith("e_score_correction_bias")}
        assert {value.dtype for key, value in written.items() if key not in bias} == {torch.bfloat16}
        assert {written[key].dtype for key in bias} == {torch.float32}
        done = moestro("checkpoint", "import", str(tmp_path / "out"), str(tmp_path / "run"))
        assert done.code == 0, done.err
        again = load_run(tmp_path / "run", "cpu")
        assert again.config.train.dtype == "bf16"
        rounded = again.model.state_dict()
        for name, value in made.loaded("deepseek_v3").model.state_dict().items():
            exact = name.endswith("router.bias") or "bias_moments" in name or "global_load" in name
            assert torch.equal(rounded[name], value if exact else value.bfloat16().float()), name

    def test_mxfp4_experts(self, made: Made, tmp_path: Path) -> None:
        """Half bytes and powers of two, as transformers reads them too."""
        reference = pytest.importorskip("transformers.integrations.mxfp4")._convert_moe_packed_tensors
        shapes_of = {"hidden_size": 32, "intermediate_size": 64}
        folder = save(make("gpt_oss", **shapes_of), tmp_path / "plain")
        plain = load_file(folder / "model.safetensors")
        packed = {key: value for key, value in plain.items() if "_proj" not in key or "experts" not in key}
        packed |= {key: value for key, value in plain.items() if key.endswith("_proj_bias")}
        generator = torch.Generator().manual_seed(3)
        for key in plain:
            if key.endswith((".gate_up_proj", ".down_proj")):
                experts, columns, rows = plain[key].shape
                shape = (experts, rows, columns // 32)
                packed[f"{key}_blocks"] = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
                packed[f"{key}_scales"] = torch.randint(120, 127, shape, generator=generator, dtype=torch.uint8)
                plain[key] = reference(packed[f"{key}_blocks"], packed[f"{key}_scales"]).contiguous()
        save_file(plain, folder / "model.safetensors")
        shutil.copytree(folder, tmp_path / "packed")
        save_file(packed, tmp_path / "packed" / "model.safetensors")
        values = []
        for name in ("plain", "packed"):
            import_run(open_source(tmp_path / name), tmp_path / f"{name}-run", lambda count: None)
            values.append(load_run(tmp_path / f"{name}-run", "cpu").model.state_dict())
        assert all(torch.equal(values[1][name], value) for name, value in values[0].items())

    def test_fp8_with_scales_of_blocks(self, tmp_path: Path) -> None:
        """Against one block after the other."""
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(200, 300, generator=generator).to(torch.float8_e4m3fn)
        scales = torch.rand(2, 3, generator=generator)
        save_file({"a.weight": weight, "a.weight_scale_inv": scales}, tmp_path / "model.safetensors")
        weights = Weights(tmp_path)
        assert weights.keys() == {"a.weight"}
        assert weights.dtype("a.weight") == torch.bfloat16
        expected = weight.float()
        for i in range(2):
            for j in range(3):
                expected[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)] *= scales[i, j]
        assert torch.equal(weights.read("a.weight"), expected.bfloat16())

    def test_legacy_zaya(self, made: Made, tmp_path: Path) -> None:
        """Attention and experts as layers of their own, each with the scales of the sum before it."""
        native = load_file(made.folder("zaya") / "model.safetensors")
        legacy = {legacy_name(key): value for key, value in native.items() if ".experts." not in key}
        for layer in range(2):
            for theirs, key in (("linear_fc1", "gate_up_proj"), ("linear_fc2", "down_proj")):
                for e, expert in enumerate(native[f"model.layers.{layer}.mlp.experts.{key}"]):
                    where = f"model.layers.{2 * layer + 1}.zaya_block.experts.local_experts.{e}"
                    legacy[f"{where}.{theirs}.weight"] = expert.clone()
        folder = Path(shutil.copytree(made.folder("zaya"), tmp_path / "legacy"))
        save_file(legacy, folder / "model.safetensors")
        config = {
            "model_type": "zaya",
            "vocab_size": VOCAB,
            "hidden_size": 16,
            "num_attention_heads": 2,
            "cca_num_q_heads": [4, 0, 4, 0],
            "num_query_groups_list": [2, 0, 2, 0],
            "ffn_hidden_size_list": [0, 24, 0, 24],
            "zaya_layers": ["a", 4, "a", 4],
            "zaya_mlp_expansion": 6,
            "swa_layers": [0, 0, 4, 0],
            "swa_rotary_base": 1e4,
            "rope_theta": 5e6,
            "rope_scaling": False,
            "norm_epsilon": 1e-5,
            "max_position_embeddings": 320,
        }
        (folder / "config.json").write_text(json.dumps(config))
        source = open_source(folder)
        assert source.ignored == ["rope_scaling"]
        # What is skipped gives its input there: so did the code that the released weights came with.
        found = differences(source.model, made.loaded("zaya").config.model)
        assert found == ["moe.null_output = input"]
        import_run(source, tmp_path / "run", lambda count: None)
        values = load_run(tmp_path / "run", "cpu").model.state_dict()
        assert all(torch.equal(values[name], value) for name, value in made.loaded("zaya").model.state_dict().items())

    def test_multi_token_prediction(self, made: Made, tmp_path: Path) -> None:
        """Its block is layer num_layers of the released checkpoints; what is predicted is the same there and here."""
        run = with_mtp(made.run("deepseek_v3"), tmp_path / "run")
        out = export(run, tmp_path / "out")
        written = load_file(out / "model.safetensors")
        copies = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
        assert all(torch.equal(written[f"model.layers.2.{key}"], written[name]) for key, name in copies.items())
        import_run(open_source(out), tmp_path / "again", lambda count: None)
        model, again = load_run(run, "cpu").model, load_run(tmp_path / "again", "cpu").model
        assert again.state_dict().keys() == model.state_dict().keys()
        assert all(torch.equal(again.state_dict()[name], value) for name, value in model.state_dict().items())

        main = transformers.AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager").eval()
        main._keys_to_ignore_on_load_unexpected = [
            r"model\.layers\.2.*"
        ]  # it only knows the number of the released one
        block = importlib.import_module("transformers.modeling_layers").MtpModel.from_pretrained(main).layers[0].eval()
        ids = some_ids(2, 12)
        inputs, labels, ahead = ids[:, :10], ids[:, 1:11], ids[:, 2:]
        mask = torch.full((10, 10), float("-inf")).triu(1).expand(2, 1, 10, 10)
        positions = torch.arange(10).expand(2, 10)
        with torch.no_grad():
            hidden = main.model(inputs).last_hidden_state
            rotary = main.model.rotary_emb(hidden, positions)
            known = main.model.embed_tokens(labels)
            expected = main.lm_head(block(known, hidden, rotary, mask, positions, None))
            loss = nn.functional.cross_entropy(expected.flatten(0, 1), ahead.flatten(), reduction="sum")
            found = model(inputs, labels=labels, ahead=ahead.unsqueeze(0)).mtp_loss
        assert found is not None
        assert error(found, loss) < 1e-5


def with_mtp(run: Path, copy: Path) -> Path:
    """The run with a block of multi-token prediction of random weights."""
    config = load_config(str(run / "config.toml")).config
    model = config.model.model_copy(update={"mtp": MTPConfig()})
    copy.mkdir()
    shutil.copy(run / "tokenizer.json", copy)
    (copy / "config.toml").write_text(to_toml(config.model_copy(update={"model": model})))
    new = Transformer(model)
    new.init_weights(0)
    new.load_state_dict(load_run(run, "cpu").model.state_dict(), strict=False)
    save_checkpoint(copy / "checkpoints", model_tensors(new), Progress(0, 0, 0.0), keep=1)
    return copy


def legacy_name(key: str) -> str:
    """By hand, from a look at both."""
    layer = re.match(r"model\.layers\.(\d+)\.", key)
    if layer is None:
        return {
            "model.norm.weight": "model.final_norm.weight",
            "model.input_hidden_states_scale": "model.layers.0.res_scale.hidden_states_scale",
            "model.input_hidden_states_bias": "model.layers.0.res_scale.hidden_states_bias",
        }.get(key, key)
    attention, experts = 2 * int(layer[1]), 2 * int(layer[1]) + 1
    after = "model" if experts == 3 else f"model.layers.{experts + 1}"
    for part, name in {
        "self_attn.qkv_proj.q_proj": f"model.layers.{attention}.self_attn.qkv.linear_q",
        "self_attn.qkv_proj.k_proj": f"model.layers.{attention}.self_attn.qkv.linear_k",
        "self_attn.qkv_proj.v_proj_current": f"model.layers.{attention}.self_attn.qkv.val_proj1",
        "self_attn.qkv_proj.v_proj_delayed": f"model.layers.{attention}.self_attn.qkv.val_proj2",
        "self_attn.qkv_proj.conv_qk_depthwise": f"model.layers.{attention}.self_attn.qkv.conv_qk.0",
        "self_attn.qkv_proj.conv_qk_grouped": f"model.layers.{attention}.self_attn.qkv.conv_qk.1",
        "self_attn.qk_norm": f"model.layers.{attention}.self_attn.qkv",
        "self_attn.o_proj": f"model.layers.{attention}.self_attn.o_proj",
        "input_layernorm": f"model.layers.{attention}.input_norm",
        "post_attention_layernorm": f"model.layers.{experts}.input_norm",
        "post_attention_residual_scale": f"model.layers.{experts}.res_scale",
        "post_mlp_residual_scale": f"{after}.res_scale",
        "mlp.gate.router_mlp.norm": f"model.layers.{experts}.zaya_block.router.rmsnorm_eda",
        "mlp.gate.router_mlp.fc1": f"model.layers.{experts}.zaya_block.router.router_mlp.0",
        "mlp.gate.router_mlp.fc2": f"model.layers.{experts}.zaya_block.router.router_mlp.2",
        "mlp.gate.router_mlp.out_proj": f"model.layers.{experts}.zaya_block.router.router_mlp.4",
        "mlp.gate": f"model.layers.{experts}.zaya_block.router",
    }.items():
        if key.startswith(layer[0] + part + "."):
            return name + key.removeprefix(layer[0] + part)
    raise KeyError(key)
