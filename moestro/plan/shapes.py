"""The widths of a model by name, and the model with one of them changed or all of them scaled."""

from typing import Any, NamedTuple

from moestro.config.model import ModelConfig
from moestro.config.moe import GATED
from moestro.config.plan import Plan, Workload

HEAD_DIMS = (64, 128)  # that every kernel has


class Width(NamedTuple):
    """One size that products have. cut: over how many ranks it is split, so that size / cut is what they see."""

    key: str  # "moe.expert_hidden_size"
    size: int
    cut: int = 1


def widths_of(workload: Workload, plan: Plan) -> list[Width]:
    """All widths that are the architecture's choice; sizes of experts as after the split by granularity."""
    model, moe = workload.model, workload.model.moe
    assert model.vocab_size is not None
    found = [
        Width("hidden_size", model.hidden_size),
        Width("vocab_size", model.vocab_size, 1 if workload.fused_loss else plan.tp),
    ]
    if model.intermediate_size is not None and not all(model.moe_layers):
        found.append(Width("intermediate_size", model.intermediate_size, plan.tp))
    if moe is not None:
        found.append(Width("moe.expert_hidden_size", moe.resolved_expert_hidden_size, plan.etp))
        if moe.latent_size is not None:
            found.append(Width("moe.latent_size", moe.latent_size))
    if model.mla is not None:
        found.append(Width("mla.kv_rank", model.mla.kv_rank))
        if model.mla.q_rank is not None:
            found.append(Width("mla.q_rank", model.mla.q_rank))
    return found


def with_width(model: ModelConfig, key: str, size: int) -> ModelConfig:
    """The model with one width of `widths_of` changed; heads stay as they are."""
    section, _, name = key.rpartition(".")
    if not section:
        heads = {} if model.mla is not None else {"head_dim": model.resolved_head_dim}
        return changed(model, {name: size, **heads})
    part = getattr(model, section)
    if name == "expert_hidden_size":
        size *= part.granularity
    return changed(model, {section: part.model_copy(update={name: size})})


def with_head_dim(model: ModelConfig, head_dim: int) -> ModelConfig | None:
    """As many numbers in queries, and in keys and values, in heads of another size. None: they do not share out."""
    queries = model.num_heads * model.resolved_head_dim
    keys = model.resolved_num_kv_heads * model.resolved_head_dim
    heads, kv_heads = queries // head_dim, max(1, round(keys / head_dim))
    if queries % head_dim or not heads:
        return None
    while heads % kv_heads:
        kv_heads -= 1
    return changed(model, {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim})


def changed(model: ModelConfig, values: dict[str, Any]) -> ModelConfig:
    """Checked as a file would be.

    Raises:
        pydantic.ValidationError: there is no such model.
    """
    return ModelConfig.model_validate({**dict(model), **values})


def is_gated_width(model: ModelConfig, width: Width) -> bool:
    """Whether it is that of a SwiGLU, which 8·h/3 would make as large as a plain feed-forward of 4·h."""
    if width.key == "intermediate_size":
        return model.activation in GATED
    return width.key == "moe.expert_hidden_size" and model.moe is not None and model.moe.activation in GATED


def multiple(value: float, step: int) -> int:
    """The nearest multiple, one at least."""
    return max(1, round(value / step)) * step


def scaled(model: ModelConfig, factor: float, step: int = 1) -> ModelConfig:
    """All widths but the vocabulary, and the layers, times `factor`; the same heads in size and ratio, as many experts.

    step: what widths are rounded to a multiple of. The first dense layers stay as many as they are.
    """
    moe, mla = model.moe, model.mla
    every = max(1, moe.every_n_layers) if moe else 1
    first = moe.first_k_dense if moe else 0
    layers = max(first + every, first + multiple((model.num_layers - first) * factor, every))
    values: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": multiple(model.hidden_size * factor, step),
        **_heads(model, factor),
    }
    if model.intermediate_size is not None:
        values["intermediate_size"] = multiple(model.intermediate_size * factor, step)
    if moe is not None:
        width = multiple(moe.resolved_expert_hidden_size * factor, step) * moe.granularity
        latent = None if moe.latent_size is None else multiple(moe.latent_size * factor, step)
        values["moe"] = moe.model_copy(update={"expert_hidden_size": width, "latent_size": latent})
    if mla is not None:
        q_rank = None if mla.q_rank is None else multiple(mla.q_rank * factor, step)
        values["mla"] = mla.model_copy(update={"q_rank": q_rank, "kv_rank": multiple(mla.kv_rank * factor, step)})
    return changed(model, values)


def _heads(model: ModelConfig, factor: float) -> dict[str, Any]:
    """Whole groups of query heads with their key head; heads of one size."""
    group = model.num_heads // model.resolved_num_kv_heads
    kv_heads = max(1, round(model.resolved_num_kv_heads * factor))
    if kv_heads == 1 and model.resolved_num_kv_heads > 1:  # small models: fewer query heads too
        return {"num_heads": max(1, round(model.num_heads * factor)), "num_kv_heads": 1, "head_dim": _size(model)}
    return {"num_heads": group * kv_heads, "num_kv_heads": kv_heads, "head_dim": _size(model)}


def _size(model: ModelConfig) -> int | None:
    return model.head_dim if model.mla is not None else model.resolved_head_dim
