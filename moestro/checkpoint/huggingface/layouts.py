"""How each family's weights are named and laid out, in released checkpoints and in those that transformers 5 holds.

"per-expert": each expert's projections are tensors of their own; "fused": those of a layer's experts are merged.
"""

import re

import torch
from torch import Tensor

from moestro.checkpoint.huggingface.mapping import Codec, Naming, replacing
from moestro.config import ModelConfig

EXPERTS = (("gate_proj", "up_proj"), ("down_proj",))
GATE = (".mlp.router.", ".mlp.gate.")

DENSE = {"per-expert": Naming(replacing())}

MIXTRAL = {
    "per-expert": Naming(
        replacing((".mlp.router.", ".block_sparse_moe.gate."), (".mlp.", ".block_sparse_moe.")), (("w1", "w3"), ("w2",))
    ),
    "fused": Naming(replacing(GATE)),
}

QWEN = {"per-expert": Naming(replacing(GATE), EXPERTS), "fused": Naming(replacing(GATE))}


def half_split_rows(name: str, model: ModelConfig) -> Codec | None:
    """DeepSeek rotates neighbours (2i, 2i + 1) of a head's rotary dimensions, we rotate (i, i + half)."""
    mla = model.mla
    if mla is None or not name.endswith((".q_proj.weight", ".q_b_proj.weight", ".kv_a_proj_with_mqa.weight")):
        return None
    rotary = [*range(0, mla.rope_head_dim, 2), *range(1, mla.rope_head_dim, 2)]
    plain, heads = (mla.kv_rank, 1) if "kv_a_proj" in name else (mla.nope_head_dim, model.num_heads)
    one = [*range(plain), *(plain + i for i in rotary)]
    rows = torch.tensor([head * len(one) + i for head in range(heads) for i in one])
    back = rows.argsort()
    return Codec(lambda parts: parts[0][rows], lambda box: [box[back]])


def swapped_halves(name: str) -> Codec | None:
    """The projection of multi-token prediction sees (embedding, hidden state) there, (hidden state, embedding) here."""
    if not name.startswith("mtp.") or not name.endswith(".projection.weight"):
        return None
    return Codec(lambda parts: _swap(parts[0]), lambda box: [_swap(box)])


def _swap(x: Tensor) -> Tensor:
    return torch.cat(x.chunk(2, 1)[::-1], 1)


MTP = (
    (".block.", "."),
    (".hidden_norm.", ".hnorm."),
    (".embedding_norm.", ".enorm."),
    (".projection.", ".eh_proj."),
)


def _rename_deepseek(name: str, model: ModelConfig) -> str:
    name = replacing((".mlp.router.bias", ".mlp.gate.e_score_correction_bias"), GATE)(name, model)
    if not name.startswith("mtp."):
        return name
    name = re.sub(r"^mtp\.(\d+)\.norm\.", r"mtp.\1.shared_head.norm.", name)
    return "layers." + replacing(*MTP)(name, model).removeprefix("mtp.")


def _deepseek_v3_codecs(name: str, model: ModelConfig) -> Codec | None:
    return swapped_halves(name) or half_split_rows(name, model)


DEEPSEEK_V2 = {
    "per-expert": Naming(replacing(GATE), EXPERTS, codecs=half_split_rows),
    "fused": Naming(replacing(GATE), codecs=half_split_rows),
}


def _mtp_copies(model: ModelConfig) -> dict[str, str]:
    """Released checkpoints repeat the embedding and the head in each block of multi-token prediction."""
    head = "embed_tokens.weight" if model.tie_embeddings else "lm_head.weight"
    found = {}
    for layer in range(model.num_layers, model.num_blocks):
        found[f"model.layers.{layer}.embed_tokens.weight"] = "embed_tokens.weight"
        found[f"model.layers.{layer}.shared_head.head.weight"] = head
    return found


DEEPSEEK_V3 = {
    "per-expert": Naming(_rename_deepseek, EXPERTS, True, _deepseek_v3_codecs, copies=_mtp_copies),
    "fused": Naming(_rename_deepseek, None, True, _deepseek_v3_codecs, copies=_mtp_copies),
}


def _interleaved(rows: Tensor) -> Tensor:
    """[2 · width, …], gate and up in turn → [2, width, …]."""
    return rows.unflatten(0, (-1, 2)).transpose(0, 1)


def _in_turn(pair: Tensor) -> Tensor:
    return pair.transpose(0, 1).flatten(0, 1)


def _gpt_oss_codecs(name: str, model: ModelConfig) -> Codec | None:
    if not name.endswith(".experts.gate_up_bias"):
        return None
    return Codec(
        lambda parts: parts[0].unflatten(1, (-1, 2)).transpose(1, 2), lambda box: [box.transpose(1, 2).flatten(1, 2)]
    )


TRANSPOSED = (
    Codec(lambda parts: _interleaved(parts[0].t()).unsqueeze(0), lambda box: [_in_turn(box[0]).t()]),
    Codec(lambda parts: parts[0].t().unsqueeze(0), lambda box: [box[0].t()]),
)

# The sixteen numbers of four bits, sign, two bits of exponent and one of mantissa (OCP microscaling formats 1.0).
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unpack_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """[rows, n, 16] bytes of two numbers each, the low half first, and [rows, n] exponents → [rows, 32 · n], bf16."""
    table = torch.tensor([*FP4, *(-x for x in FP4)], dtype=torch.bfloat16, device=blocks.device)
    numbers = torch.stack((table[(blocks & 15).int()], table[(blocks >> 4).int()]), -1).flatten(2)
    return torch.ldexp(numbers.float(), scales.int().unsqueeze(-1) - 127).to(torch.bfloat16).flatten(1)


MXFP4 = (
    Codec(lambda parts: _interleaved(unpack_mxfp4(*parts)).unsqueeze(0), None),
    Codec(lambda parts: unpack_mxfp4(*parts).unsqueeze(0), None),
)
_GPT_OSS_NAMES = replacing(
    (".router.logit_bias", ".router.bias"),
    (".gate_up_bias", ".gate_up_proj_bias"),
    (".down_bias", ".down_proj_bias"),
)
GPT_OSS = {
    "fused": Naming(_GPT_OSS_NAMES, codecs=_gpt_oss_codecs, merged=TRANSPOSED),
    "mxfp4": Naming(
        _GPT_OSS_NAMES,
        codecs=_gpt_oss_codecs,
        merged=MXFP4,
        merged_keys=lambda key: (f"{key}_blocks", f"{key}_scales"),
    ),
}
