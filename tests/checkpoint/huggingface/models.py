"""Tiny models of transformers with weights far from their usual initial ones, and folders of them."""

from pathlib import Path
from typing import Any, cast

import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers
from torch import Tensor, nn

from moestro.checkpoint.huggingface.exporting import EndOfText, Export, export_family
from moestro.checkpoint.huggingface.importing import import_run, open_source
from moestro.serve.load import LoadedRun, load_run

transformers = pytest.importorskip("transformers")

VOCAB = 40
CHECKPOINT = Path("checkpoints/step_00000000")
END = EndOfText("<|endoftext|>", 0)
FAMILIES = ("mixtral", "olmoe", "qwen3_moe", "qwen3", "llama", "deepseek_v2", "deepseek_v3", "zaya", "gpt_oss")
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 320,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "attn_implementation": "eager",
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "intermediate_size": 20,
    "moe_intermediate_size": 12,
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
# (class name, settings)
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 12}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 12, "clip_qkv": 0.5}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 6,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "intermediate_size": 20,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 6, "intermediate_size": 20, "tie_word_embeddings": True}),
    "llama": (
        "Llama",
        {"intermediate_size": 20, "rope_parameters": LLAMA3 | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    ),
    "deepseek_v2": (
        "DeepseekV2",
        LATENT | {"q_lora_rank": None, "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.0},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        LATENT | {"q_lora_rank": 10, "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}},
    ),
    "zaya": (
        "Zaya",
        {
            "head_dim": 8,
            "num_experts": 4,
            "moe_intermediate_size": 12,
            "router_hidden_size": 6,
            "layer_types": ["hybrid", "hybrid_sliding"],
            "sliding_window": 4,
            "rope_parameters": None,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 8,
            "intermediate_size": 12,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 4,
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
}


def make(family: str, **changes: Any) -> nn.Module:
    name, settings = SETTINGS[family]
    config = getattr(transformers, f"{name}Config")(**(SIZES | settings | changes))
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in key:
                about_one = any(part in key for part in ("norm", "scale", "temp"))
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(noise * (0.4 if tensor.dim() > 1 else 0.2) + about_one)
            if key.endswith("balancing_biases"):
                tensor[-1] = -1  # from_pretrained of transformers 5.24 sets it to this whatever the file says
    return model.eval()


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    words = {"<|endoftext|>": 0} | {f"w{i}": i for i in range(1, VOCAB)}
    inner = tokenizers.Tokenizer(models.WordLevel(words, unk_token="w1"))
    inner.pre_tokenizer = cast(Any, pre_tokenizers.Whitespace())
    inner.add_special_tokens(["<|endoftext|>"])
    inner.save(str(folder / "tokenizer.json"))


class Made:
    """A model of transformers, its folder, and the run that it becomes; each made when it is first wanted."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._models: dict[str, Any] = {}

    def model(self, family: str) -> Any:
        if family not in self._models:
            self._models[family] = make(family)
        return self._models[family]

    def folder(self, family: str) -> Path:
        path = self.root / family
        return path if path.exists() else save(self.model(family), path)

    def run(self, family: str) -> Path:
        path = self.root / f"{family}-run"
        if not path.exists():
            import_run(open_source(self.folder(family)), path, lambda count: None)
        return path

    def loaded(self, family: str) -> LoadedRun:
        return load_run(self.run(family), "cpu")


def some_ids(batch: int = 2, seq: int = 12) -> Tensor:
    return torch.randint(VOCAB, (batch, seq), generator=torch.Generator().manual_seed(1))


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().abs().max() / expected.detach().abs().max().clamp_min(1e-30))


def export(run: Path, destination: Path, **how: Any) -> Path:
    model = load_run(run, "cpu").config.model
    export_family(run / CHECKPOINT, destination, model, END, Export(**how), lambda count: None)
    return destination
