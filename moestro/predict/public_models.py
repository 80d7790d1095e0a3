"""The architecture that a row of a public table means."""

import re
from functools import lru_cache

from pydantic import ValidationError

from moestro.config.attention import MLAConfig
from moestro.config.counts import count
from moestro.config.model import ModelConfig, MTPConfig
from moestro.config.moe import MoEConfig
from moestro.predict.public_rows import Row, Unusable, number, whole

# Attention that a row's columns cannot say, by the published architecture. (name, query rank or None.)
# Names are compared in small letters and digits alone: "DeepSeek-V3 (w/o MTP)" is "deepseekv3womtp".
LATENT = (("deepseekv3", 1536), ("deepseekv2lite", None), ("deepseekv2", 1536), ("kimik2", 1536))
DENSE_LAYERS = (("deepseekv3", 3), ("deepseekv2", 1), ("kimik2", 1))
HEAD_DIMS = (("qwen3", 128), ("gptoss", 64), ("gemma", 256))
WRONG_DEPTH = 0.1  # more layers than inferred, if parameters are to tell; learned positions are not taken for layers
USUAL_VOCABULARY = 51200  # of GPT-2's tokens, filled up
GATED_NAMES = ("llama", "qwen", "deepseek", "mixtral", "mistral", "kimi", "gptoss", "internlm", "gemma", "phi")


def model_of(row: Row, assumed: list[str]) -> ModelConfig:
    shape = tuple(row.get(name, "") for name in _SHAPE)
    try:
        model, rules = _model_of(re.sub(r"[^a-z0-9]", "", row["model"].lower()), shape)
    except ValidationError as error:
        raise Unusable("its shapes contradict each other") from error
    assumed += rules
    if re.search(r"layers\S* INFERRED", row.get("notes", "")):
        model = _as_deep_as_it_weighs(model, row, assumed)
    if model.mtp is not None and "tpu" in row["hardware"].lower():
        model = model.model_copy(update={"mtp": None})
        assumed.append("no multi-token prediction, as is usual on TPUs")
    return model


def _as_deep_as_it_weighs(model: ModelConfig, row: Row, assumed: list[str]) -> ModelConfig:
    """The published number of parameters is surer than a depth that somebody inferred; widths stay."""
    total_b, positions = number(row, "params_total_b"), (whole(row, "seq") or 0) * model.hidden_size
    if total_b is None or model.moe is not None:
        return model
    counts = count(model, 1024)
    missing = total_b * 1e9 - counts.total_params
    layers = model.num_layers + round(missing * model.num_layers / counts.non_embedding_params)
    if missing < 1.1 * positions or layers < (1 + WRONG_DEPTH) * model.num_layers:
        return model
    assumed.append(f"{layers} layers, as the number of parameters says")
    return model.model_copy(update={"num_layers": layers})


_SHAPE = (
    "layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "seq", "experts", "topk", "expert_ffn", "shared_experts",
    "params_total_b",
)  # fmt: skip


@lru_cache(maxsize=1024)
def _model_of(name: str, shape: tuple[str, ...]) -> tuple[ModelConfig, tuple[str, ...]]:
    row, rules = dict(zip(_SHAPE, shape, strict=True)), []
    layers, hidden, heads = (whole(row, key) for key in ("layers", "hidden", "heads"))
    if not layers or not hidden or not heads:
        raise Unusable("no layers, hidden size or heads")
    if "lora" in name or "vision" in name or "visual" in name:
        raise Unusable("adapters or images: shapes of the trained part are not in the row")
    experts, vocab, ffn = whole(row, "experts"), whole(row, "vocab"), whole(row, "ffn")
    gated = any(known in name for known in GATED_NAMES)
    vocab_given = vocab is not None
    if vocab is None:
        vocab = USUAL_VOCABULARY
        rules.append("vocabulary of 51,200")
    if ffn is None:
        ffn = 4 * hidden
        rules.append("feed-forward of 4 times the hidden size")
    moe = None
    if experts:
        expert_ffn = whole(row, "expert_ffn") or ffn
        moe = MoEConfig(
            num_experts=experts,
            top_k=whole(row, "topk") or 1,
            expert_hidden_size=expert_ffn,
            num_shared_experts=whole(row, "shared_experts") or 0,
            first_k_dense=_dense_layers(name, layers),
        )
    mla = None
    rank = _latent_rank(name)
    if rank != 0:
        mla = MLAConfig(q_rank=rank, kv_rank=512, rope_head_dim=64, nope_head_dim=128, v_head_dim=128)
        rules.append("latent attention of the model's name")
    head_dim = next((dim for known, dim in HEAD_DIMS if known in name), None)
    if head_dim is None and hidden % heads:
        head_dim = max(2, hidden // heads // 2 * 2)
        rules.append(f"head size of {head_dim}")
    model = ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=None if mla else whole(row, "kv_heads"),
        head_dim=head_dim,
        mla=mla,
        intermediate_size=ffn,
        activation="swiglu" if gated or experts else "gelu",
        moe=moe,
        max_seq_len=10**7,
        sliding_window=128 if "gptoss" in name else None,
        layer_types=("sliding", "full") if "gptoss" in name else None,
        tie_embeddings=not gated and not experts,
        mtp=MTPConfig() if "deepseekv3" in name and "womtp" not in name and "truncated" not in name else None,
    )
    if not gated and not experts:
        rules.append("two matrices and GELU in the feed-forward, tied embeddings")
    larger = None if vocab_given else _vocabulary(row["params_total_b"], model)
    if larger is not None:
        model = model.model_copy(update={"vocab_size": larger})
        rules = [f"vocabulary of {larger:,}, what the number of parameters leaves for it", *rules[1:]]
    return model, tuple(rules)


def _dense_layers(name: str, layers: int) -> int:
    """Leading layers without experts. A model cut down to a few layers for a test keeps one of them."""
    usual = next((n for known, n in DENSE_LAYERS if known in name), 0)
    return min(usual, 1 if "truncated" in name else layers - 1)


def _vocabulary(total_b: str, model: ModelConfig) -> int | None:
    """What the published number of parameters leaves for the embedding, unless its last digit allows the usual one."""
    try:
        total = float(total_b) * 1e9
    except ValueError:
        return None
    counts = count(model, 1024)
    each = counts.part("embedding").total // USUAL_VOCABULARY * (1 if model.tie_embeddings else 2)
    unsure = 0.5e9 * 10.0 ** -len(total_b.partition(".")[2])
    excess = total - counts.total_params
    if excess <= unsure:
        return None
    return round((USUAL_VOCABULARY + excess / each) / 128) * 128


def _latent_rank(name: str) -> int | None:
    """The query rank of latent attention, None where queries have no latent; 0: another attention."""
    return next((rank for known, rank in LATENT if known in name), 0)
