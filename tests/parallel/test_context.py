"""Sequences cut over ranks: attention, halos and the router equal the same on whole sequences, forward and backward."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from model.helpers import error, model_config, normal
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from moestro.config import BalanceConfig, RouterConfig
from moestro.errors import MoestroError
from moestro.model.attention.gqa import GroupedQueryAttention
from moestro.model.attention.mask import CAUSAL, AttentionMask, attend, document_mask
from moestro.model.moe.router import Router, Routing, TokenGroups
from moestro.model.rope import rope_tables
from moestro.model.shards import SequenceShard
from moestro.parallel import context, ring
from moestro.parallel.context import SequenceSlices, _chunk_mask
from moestro.parallel.layout import Layout
from moestro.parallel.mesh import Mesh, build_mesh

CPU = torch.device("cpu")
KINDS = ("all_gather", "ring")


def mesh_of(cp: int, tp: int) -> Mesh:
    layout = Layout(
        pp=1,
        dp=1,
        fsdp=1,
        cp=cp,
        tp=tp,
        ep=1,
        zero=1,
        micro_batch_size=1,
        micro_batches=1,
        stages=((0,),),
        schedule="1f1b",
        ranks_per_node=1,
    )
    return build_mesh(layout, CPU)


def documents(batch: int, seq: int, seed: int) -> Tensor:
    """[batch, seq]: packed documents of other lengths in each row, the last positions of row 0 padding."""
    draws = torch.rand(batch, seq, generator=torch.Generator().manual_seed(seed))
    ids = (draws < 0.3).cumsum(1)
    ids[0, seq - seq // 4 :] = -1
    return ids


def visible(batch: int, seq: int, document_ids: Tensor | None) -> Tensor:
    causal = torch.ones(seq, seq, dtype=torch.bool).tril().expand(batch, 1, seq, seq)
    return causal if document_ids is None else causal & (document_ids[:, None, :, None] == document_ids[:, None, None])


@pytest.mark.parametrize(("cp", "tp"), [(2, 1), (1, 2), (3, 1), (2, 2), (4, 1)])
def test_slices_compute_what_whole_sequences_do(cp: int, tp: int) -> None:
    run_ranks(check_all, cp * tp, cp, tp, timeout_s=400)


def check_all(rank: int, cp: int, tp: int) -> None:
    mesh = mesh_of(cp, tp)
    check_positions(mesh)
    check_halo(mesh)
    check_routers(mesh)
    if cp > 1:
        check_attention_in_all_shapes(mesh)
        check_balance(mesh)
        for kind, packed in itertools.product(KINDS, (False, True)):
            check_module(mesh, kind, packed)


# --- attention -------------------------------------------------------------------------------------------------------


def check_attention_in_all_shapes(mesh: Mesh) -> None:
    tp = mesh.layout.tp
    shapes = [(1, 1, 1, 2), (3, 3, 3, 2), (1, 4, 2, 4), (3, 6, 2, 6), (1, 9, 3, 2)]  # batch, heads, kv heads, chunk
    shapes += [(2, 2, 1, 1)] if tp == 1 else []
    for kind, rows in (("all_gather", 1024), ("ring", 1024), ("ring", 3)):
        ring.ROWS = rows
        for shape in shapes:
            check_attention(mesh, kind, shape, torch.float64, 1e-10)
        check_attention(mesh, kind, (2, 4, 2, 5 * tp), torch.float32, 1e-5)
        check_attention(mesh, kind, (2, 4, 2, 4), torch.bfloat16, 3e-2)
    ring.ROWS = 1024


def check_attention(
    mesh: Mesh, kind: Any, shape: tuple[int, int, int, int], dtype: torch.dtype, tolerance: float
) -> None:
    seq = 2 * mesh.layout.cp * shape[3]
    slices = SequenceSlices(mesh, seq, kind, CPU)
    for document_ids in (None, documents(shape[0], seq, seed=sum(shape)), documents(shape[0], seq, seed=0)):
        compare_attention(slices, shape[:3], seq, document_ids, dtype, tolerance, (mesh.rank, kind, shape, dtype))


def compare_attention(
    slices: SequenceSlices,
    shape: tuple[int, int, int],
    seq: int,
    document_ids: Tensor | None,
    dtype: torch.dtype,
    tolerance: float,
    case: tuple[Any, ...],
) -> None:
    batch, heads, kv_heads = shape
    whole = [normal(batch, n, seq, 4, seed=i, dtype=dtype) for i, n in enumerate((heads, kv_heads, kv_heads, heads))]
    query, key, value = (x.double().clone().requires_grad_() for x in whole[:3])
    expected = F.scaled_dot_product_attention(
        query, key, value, attn_mask=visible(batch, seq, document_ids), enable_gqa=True
    )
    (expected * whole[3].double()).sum().backward()

    here = slices.context_positions
    mine = [x[:, :, here].clone().requires_grad_() for x in whole[:3]]
    out = slices.attend(*mine, document_ids)
    (out * whole[3][:, :, here]).sum().backward()
    assert out.dtype == dtype
    pairs = {"out": (out, expected)} | {
        name: (m.grad, w.grad) for name, m, w in zip("qkv", mine, (query, key, value), strict=True)
    }
    for name, (found, wanted) in pairs.items():
        assert found is not None
        assert wanted is not None
        assert found.dtype == dtype
        assert error(found, wanted[:, :, here]) < tolerance, (*case, document_ids is not None, name)


def check_balance(mesh: Mesh) -> None:
    """Every rank computes as many pairs of chunks as any other, none of them masked throughout, while others travel."""
    chunk, cp = 4, mesh.layout.cp
    query = normal(1, 2, 2 * chunk, 4)
    events: list[float | str] = []
    real_scores, real_pass_on = ring._scores, ring._pass_on

    def scores(q: Tensor, k: Tensor, *rest: Any) -> Tensor:
        events.append(q.shape[-2] * k.shape[-2] / chunk**2)
        return real_scores(q, k, *rest)

    def pass_on(*arguments: Any) -> list[dist.Work]:
        events.append("send")
        return real_pass_on(*arguments)

    def whole(q: Tensor, k: Tensor, *rest: Any) -> Tensor:
        events.append(q.shape[-2] * k.shape[-2] / chunk**2)
        return attend(q, k, *rest)

    ring._scores, ring._pass_on, context.attend = scores, pass_on, whole
    SequenceSlices(mesh, 2 * cp * chunk, "all_gather", CPU).attend(query, query, query, None)
    assert sum(events) == 2 * cp + 1, (mesh.rank, events)
    events.clear()
    SequenceSlices(mesh, 2 * cp * chunk, "ring", CPU).attend(query, query, query, None)
    assert events == ["send", 1, 1, 1, *["send", 1, 1] * (cp - 2), 1, 1], (mesh.rank, events)
    ring._scores, ring._pass_on, context.attend = real_scores, real_pass_on, attend


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("packed", [False, True])
def test_flex_attention_gets_the_same_mask(packed: bool) -> None:
    document_ids = documents(2, 300, seed=0) if packed else None
    query, key = normal(2, 4, 100, 8), normal(2, 2, 200, 8, seed=1)
    masks = [_chunk_mask(100, 200, document_ids, CPU, flex) for flex in (False, True)]
    assert masks[1].block is not None
    with torch.no_grad():
        dense, flex = (attend(query, key, key, mask) for mask in masks)
    assert error(flex, dense) < 1e-6


# --- positions -------------------------------------------------------------------------------------------------------


def check_positions(mesh: Mesh) -> None:
    cp, tp, batch = mesh.layout.cp, mesh.layout.tp, 3
    seq = 4 * cp * tp
    slices = SequenceSlices(mesh, seq, "all_gather", CPU)
    shard: SequenceShard = slices
    assert (shard.parts, shard.splits_attention) == (cp * tp, cp > 1)
    tokens = torch.arange(batch * seq).view(batch, seq)
    held = slices.take(tokens)
    assert held.shape == (batch, seq // (cp * tp))
    assert torch.equal(held[0], slices.positions)
    context_part = slices.take_context(tokens)
    assert torch.equal(context_part.chunk(tp, 1)[mesh.place.tp], held)
    if cp > 1:
        early, late = context_part[0].chunk(2)
        length = seq // (2 * cp)
        assert early.tolist() == list(range(mesh.place.cp * length, (mesh.place.cp + 1) * length))
        assert late.tolist() == [seq - 1 - p for p in reversed(early.tolist())]
    flat = tokens.flatten()
    for whole in (flat, flat % 3 == 0, torch.stack((flat, -flat), 1), flat.double().requires_grad_()):
        mine = slices.mine(whole)
        assert torch.equal(mine[:1], whole[slices.positions[:1]])
        assert mine.shape[0] == batch * seq // (cp * tp)
        again = slices.gather(mine)
        assert again.dtype == whole.dtype
        assert torch.equal(again, whole)
        assert not again.requires_grad
    with pytest.raises(MoestroError, match="make the length a multiple of"):
        SequenceSlices(mesh, seq - 1, "ring", CPU)
    every_other = normal(2 * batch * seq // (cp * tp), 2)[::2]  # not contiguous
    assert torch.equal(slices.mine(slices.gather(every_other)), every_other)


# --- halo ------------------------------------------------------------------------------------------------------------


def check_halo(mesh: Mesh) -> None:
    """A causal convolution over three positions, chunk by chunk, equals the one over whole sequences."""
    cp, tp, batch, width = mesh.layout.cp, mesh.layout.tp, 2, 3
    for length in (2 * tp, 4 * tp) if cp > 1 else (4 * tp,):  # a halo as long as a chunk too
        seq = length * (2 * cp if cp > 1 else 1)
        slices = SequenceSlices(mesh, seq, "all_gather", CPU)
        x, kernel, grad = (
            normal(*shape, seed=i, dtype=torch.float64)
            for i, shape in enumerate([(batch, seq, width), (width, width, 3), (batch, seq, width)])
        )
        whole = x.clone().requires_grad_()
        expected = F.conv1d(F.pad(whole.mT, (2, 0)), kernel).mT
        (expected * grad).sum().backward()
        assert whole.grad is not None

        mine = slices.take_context(x).requires_grad_()
        found = convolve(slices, mine, kernel, 2)
        (found * slices.take_context(grad)).sum().backward()
        assert mine.grad is not None
        assert error(found, slices.take_context(expected)) < 1e-12
        assert error(mine.grad, slices.take_context(whole.grad)) < 1e-12
        if cp > 1:  # where there is only one chunk, the missing position is a zero in any case
            short = convolve(slices, mine, kernel, 1)
            assert error(short, slices.take_context(expected)) > 1e-2
        with pytest.raises(MoestroError, match="longer sequences"):
            slices.halo(mine, slices.context_positions.shape[0] // (2 if cp > 1 else 1) + 1)


def convolve(slices: SequenceSlices, x: Tensor, kernel: Tensor, n: int) -> Tensor:
    halo = slices.halo(x, n)
    batch, chunks = halo.shape[:2]
    padded = torch.cat((halo, x.unflatten(1, (chunks, -1))), 2).flatten(0, 1)
    out = F.conv1d(F.pad(padded.mT, (2 - n, 0)), kernel).mT
    return out.reshape(batch, -1, x.shape[-1])


# --- a module --------------------------------------------------------------------------------------------------------


def check_module(mesh: Mesh, kind: Any, packed: bool) -> None:
    batch, seq = 2, 8 * mesh.layout.cp
    module = GroupedQueryAttention(model_config())
    for i, p in enumerate(module.parameters()):
        p.data = normal(*p.shape, seed=i, dtype=torch.float64) / 4
    slices = SequenceSlices(mesh, seq, kind, CPU)
    document_ids = documents(batch, seq, seed=1) if packed else None
    positions = torch.arange(seq).expand(batch, -1)
    x, grad = (normal(batch, seq, 16, seed=seed, dtype=torch.float64) for seed in (8, 9))
    whole = x.clone().requires_grad_()
    mask = CAUSAL if document_ids is None else document_mask(document_ids, "sdpa")
    expected = module(whole, rope_tables(positions, 4, 1e4), mask)
    (expected * grad).sum().backward()
    assert whole.grad is not None
    wanted = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()

    mine = slices.take_context(x).requires_grad_()
    mask = AttentionMask(context=slices, documents=document_ids)
    rope = rope_tables(slices.take_context(positions), 4, 1e4)
    if mesh.layout.world_size == 2:  # attention runs again in backward; once, because the first use imports for seconds
        found = checkpoint(module, mine, rope, mask, use_reentrant=False)
    else:
        found = module(mine, rope, mask)
    (found * slices.take_context(grad)).sum().backward()
    assert mine.grad is not None
    # Rotations are computed in fp32 from the same angles, so that the rest may agree to fp64.
    assert error(found, slices.take_context(expected)) < 1e-10
    assert error(mine.grad, slices.take_context(whole.grad)) < 1e-10
    for p, want in zip(module.parameters(), wanted, strict=True):
        assert p.grad is not None
        dist.all_reduce(p.grad, group=mesh.cp)
        assert error(p.grad, want) < 1e-10


# --- router ----------------------------------------------------------------------------------------------------------


def check_routers(mesh: Mesh) -> None:
    scopes = ("sequence", "group", "micro_batch", "global_batch")
    routers: list[dict[str, Any]] = [
        {},
        {"capacity_factor": 0.75, "jitter": 0.1},
        {"capacity_factor": 1.0, "group_size": 5, "score": "sigmoid"},
        {"group_size": 7, "jitter": 0.2, "top_k_before_score": True},
    ]
    for scope, settings, padded in itertools.product(scopes, routers, (False, True)):
        check_router(mesh, RouterConfig(**settings), BalanceConfig(aux_scope=scope, bias_rule="sign"), padded)


def check_router(mesh: Mesh, config: RouterConfig, balance: BalanceConfig, padded: bool) -> None:
    batch, seq, width, experts = 3, 4 * mesh.layout.cp * mesh.layout.tp, 6, 4
    router = Router(width, experts, 2, config, balance)
    router.weight.data = normal(experts, width, seed=1, dtype=torch.float64)
    router.bias.copy_(normal(experts, seed=2) / 4)
    router.global_load.copy_(normal(experts, seed=3).softmax(0))
    slices = SequenceSlices(mesh, seq, "all_gather", CPU)
    valid = (documents(batch, seq, seed=4) >= 0).flatten() if padded else None
    seeds = torch.arange(batch)
    x, grad = (normal(batch * seq, n, seed=5 + n, dtype=torch.float64) for n in (width, 2))

    def run(x: Tensor, grad: Tensor, groups: TokenGroups) -> tuple[Routing, Tensor, Tensor]:
        x = x.clone().requires_grad_()
        router.zero_grad()
        routing = router(x, groups, layer=1)
        stats = routing.stats
        (stats.aux_loss + 0.1 * stats.z_loss + (routing.weights * grad).sum()).backward()
        assert x.grad is not None
        assert router.weight.grad is not None
        return routing, x.grad, router.weight.grad.clone()

    whole, grad_x, grad_weight = run(x, grad, TokenGroups(seq, valid, seeds))
    part, grad_x_here, grad_weight_here = run(
        slices.mine(x), slices.mine(grad), TokenGroups(seq, valid, seeds, shard=slices)
    )
    case = (config, balance, padded)
    assert torch.equal(part.expert_ids, slices.mine(whole.expert_ids)), case
    assert error(part.weights, slices.mine(whole.weights)) < 1e-12, case
    assert error(grad_x_here, slices.mine(grad_x)) < 1e-10, case
    dist.all_reduce(grad_weight_here)
    assert error(grad_weight_here, grad_weight) < 1e-10, case
    for name in ("load", "dropped", "tokens", "token_entropy", "aux_loss", "z_loss"):
        total = getattr(part.stats, name).detach().clone()
        dist.all_reduce(total)
        assert error(total, getattr(whole.stats, name)) < (1e-6 if name == "token_entropy" else 1e-12), (name, case)
    if config.capacity_factor is not None:
        assert whole.stats.dropped > 0, case  # or nothing was tested
