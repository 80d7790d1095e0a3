"""Parameters of low-rank adapters (LoRA, arXiv 2106.09685): two thin matrices beside each frozen one."""

from collections.abc import Iterable, Iterator

from moestro.config.counts import matrices_of
from moestro.config.model import ModelConfig
from moestro.errors import MoestroError

ATTENTION = ("q", "k", "v", "o")
FEED_FORWARD = ("gate", "up", "down")


def adapter_params(model: ModelConfig, rank: int, targets: Iterable[str] = (*ATTENTION, *FEED_FORWARD)) -> int:
    """rank · (inputs + outputs) of every target matrix, each with adapters of its own, experts' too.

    Projections are counted apart, as adapters are put on them, also where a kernel computes several as one.

    Raises:
        MoestroError: a target that the model has no matrix of, or attention other than grouped-query.
    """
    if model.mla is not None or model.cca is not None:
        raise MoestroError("adapters are counted for grouped-query attention only, not for mla or cca")
    matrices = list(_matrices(model))
    targets = set(targets)
    missing = targets - {name for name, _, _ in matrices}
    if missing:
        there = ", ".join(dict.fromkeys(name for name, _, _ in matrices))
        raise MoestroError(f"the model has no matrix '{min(missing)}' for an adapter; it has {there}")
    return sum(rank * (inputs + outputs) for name, inputs, outputs in matrices if name in targets)


def _matrices(model: ModelConfig) -> Iterator[tuple[str, int, int]]:
    """(Target, inputs, outputs) of every matrix in the layers; routers are left out, as they usually are."""
    hidden = model.hidden_size
    query, key = model.num_heads * model.resolved_head_dim, model.resolved_num_kv_heads * model.resolved_head_dim
    for routed in model.moe_blocks:
        yield from (("q", hidden, query), ("k", hidden, key), ("v", hidden, key), ("o", query, hidden))
        if not routed:
            assert model.intermediate_size is not None
            yield from _feed_forward(hidden, model.intermediate_size, matrices_of(model.activation))
            continue
        moe = model.moe
        assert moe is not None
        outer, width = moe.latent_size or hidden, moe.resolved_expert_hidden_size
        for _ in range(moe.resolved_num_experts):
            yield from _feed_forward(outer, width, matrices_of(moe.activation))
        if moe.num_shared_experts:
            shared = moe.num_shared_experts * moe.expert_hidden_size
            yield from _feed_forward(hidden, shared, matrices_of(moe.activation))


def _feed_forward(hidden: int, width: int, matrices: int) -> Iterator[tuple[str, int, int]]:
    for name in FEED_FORWARD[3 - matrices : 2]:
        yield name, hidden, width
    yield "down", width, hidden
