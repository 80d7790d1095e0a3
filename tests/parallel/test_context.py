"""Sequences cut over ranks: attention, halos and the router equal the same on whole sequences, forward and backward."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from model.attention.options import OPTIONS, attention
from model.helpers import error, model_config, normal
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from moestro.config import ModelConfig
from moestro.errors import MoestroError
from moestro.model.attention.mask import attend, positions_of
from moestro.model.moe.router import Router, Routing, TokenGroups
from moestro.model.shards import SequenceShard
from moestro.parallel import context, ring
from moestro.parallel.comm import all_reduce
from moestro.parallel.context import SequenceSlices, _chunk_mask
from moestro.parallel.layout import Layout
from moestro.parallel.mesh import Mesh, build_mesh
from moestro.parallel.parts import Part, part_of
from moestro.parallel.tensor import TensorRanks

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


def visible(batch: int, seq: int, document_ids: Tensor | None, window: int | None = None) -> Tensor:
    causal = torch.ones(seq, seq, dtype=torch.bool).tril().expand(batch, 1, seq, seq)
    causal = causal if window is None else causal.triu(1 - window)
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
    if cp in (2, 3) and tp == 1:
        check_attention_options(mesh)
    if cp * tp == 2 or tp == cp:
        check_modules(mesh)


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


def check_attention_options(mesh: Mesh) -> None:
    """Windows, sinks, scales, values of another width: each kind of mask is made once and then used by all layers."""
    batch, heads, kv_heads, chunk = 2, 4, 2, 3
    seq = 2 * mesh.layout.cp * chunk
    settings: list[dict[str, Any]] = [{"window": window} for window in (2, chunk, chunk + 2, seq - 1, seq + 1)]
    settings += [{"sinks": True}, {"scale": 0.8, "width": 7}, {"sinks": True, "window": 1, "scale": 0.3, "width": 2}]
    for kind, rows in (("all_gather", 1024), ("ring", 1024), ("ring", 2)):
        ring.ROWS = rows
        slices = SequenceSlices(mesh, seq, kind, CPU)
        for document_ids in (None, documents(batch, seq, seed=3)):
            for options in settings:
                case = (mesh.rank, kind, rows, options)
                shape = (batch, heads, kv_heads)
                compare_attention(slices, shape, seq, document_ids, torch.float64, 1e-10, case, **options)
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
    window: int | None = None,
    scale: float | None = None,
    width: int = 4,
    sinks: bool = False,
) -> None:
    batch, heads, kv_heads = shape
    sizes = [(batch, heads, seq, 4), (batch, kv_heads, seq, 4), (batch, kv_heads, seq, width), (heads,)]
    whole = [normal(*size, seed=i, dtype=dtype) for i, size in enumerate(sizes)]
    grad = normal(batch, heads, seq, width, seed=9, dtype=dtype)
    query, key, value, sink = (x.double().clone().requires_grad_() for x in whole)
    seen = visible(batch, seq, document_ids, window)
    expected = whole_attention(query, key, value, seen, scale or 0.5, sink if sinks else None)
    (expected * grad.double()).sum().backward()

    here = slices.context_positions
    mine = [x[:, :, here].clone().requires_grad_() for x in whole[:3]] + [whole[3].clone().requires_grad_()]
    out = slices.attend(*mine[:3], document_ids, window, scale, mine[3] if sinks else None)
    (out * grad[:, :, here]).sum().backward()
    assert out.dtype == dtype
    pairs = {"out": (out, expected)} | {
        name: (m.grad, w.grad) for name, m, w in zip("qkv", mine[:3], (query, key, value), strict=True)
    }
    for name, (found, wanted) in pairs.items():
        assert found is not None
        assert wanted is not None
        assert found.dtype == dtype
        assert error(found, wanted[:, :, here]) < tolerance, (*case, document_ids is not None, name)
    if sinks:
        assert mine[3].grad is not None
        assert sink.grad is not None
        all_reduce(mine[3].grad, slices._mesh.cp)
        assert error(mine[3].grad, sink.grad) < tolerance, (*case, "sinks")


def whole_attention(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float, sinks: Tensor | None
) -> Tensor:
    """By the definition. seen: [batch, 1, seq, seq] bool; sinks: [heads] or None."""
    group = query.shape[1] // key.shape[1]
    scores = (query @ key.repeat_interleave(group, 1).mT * scale).masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:3], 1)), -1)
    return scores.softmax(-1)[..., : key.shape[2]] @ value.repeat_interleave(group, 1)


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
@pytest.mark.parametrize(("keys", "window"), [(slice(0, 200), None), (slice(71, 200), 30)])
def test_flex_attention_gets_the_same_mask(packed: bool, keys: slice, window: int | None) -> None:
    document_ids = documents(2, 300, seed=0) if packed else None
    query, key = normal(2, 4, 100, 8), normal(2, 2, 200, 8, seed=1)
    expected = whole_attention(query, key, key, visible(2, 300, document_ids, window)[:, :, 100:200, :200], 0.5, None)
    for flex in (False, True):
        mask = _chunk_mask(100, keys, document_ids, window, CPU, flex)
        assert (mask.block is not None) == flex
        with torch.no_grad():
            found = attend(query, key[:, :, keys], key[:, :, keys], mask, 0.5)
        assert error(found, expected) < 1e-6


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
            slices.before(mine, slices.context_positions.shape[0] // (2 if cp > 1 else 1) + 1)


def convolve(slices: SequenceSlices, x: Tensor, kernel: Tensor, n: int) -> Tensor:
    halo = slices.before(x, n)
    batch, chunks = halo.shape[:2]
    padded = torch.cat((halo, x.unflatten(1, (chunks, -1))), 2).flatten(0, 1)
    out = F.conv1d(F.pad(padded.mT, (2 - n, 0)), kernel).mT
    return out.reshape(batch, -1, x.shape[-1])


# --- a module --------------------------------------------------------------------------------------------------------


MODULES = ("norm of heads", "olmoe", "gpt-oss")  # of OPTIONS, those that together use all


def check_modules(mesh: Mesh) -> None:
    for name, kind, packed in itertools.product(MODULES, KINDS if mesh.layout.cp > 1 else KINDS[:1], (False, True)):
        check_module(mesh, model_config(**OPTIONS[name]), kind, packed)


def check_module(mesh: Mesh, config: ModelConfig, kind: Any, packed: bool) -> None:
    """Attention over whole sequences, and with positions cut by cp, and heads and positions by tp."""
    batch, seq, case = 2, 8 * mesh.layout.cp * mesh.layout.tp, (config.qk_norm, config.sliding_window, kind, packed)
    slices = SequenceSlices(mesh, seq, kind, CPU)
    document_ids = documents(batch, seq, seed=1) if packed else None
    places = torch.arange(seq).expand(batch, -1)
    x, grad = (normal(batch, seq, 16, seed=seed, dtype=torch.float64) for seed in (8, 9))

    whole, module = x.clone().requires_grad_(), attention(config, dtype=torch.float64)
    expected = module(whole, positions_of(config.layer_type(0), config, places, document_ids, None, None))
    (expected * grad).sum().backward()
    wanted = {name: p.grad for name, p in module.named_parameters()}

    part, parts = attention(config, dtype=torch.float64), dict[str, Part]()
    for name, p in part.named_parameters():
        parts[name] = part_of(f"layers.0.self_attn.{name}", p.shape, mesh.layout, mesh.place)
        p.data = parts[name].of(p.data)
    part.tp = TensorRanks(mesh.tp) if mesh.layout.tp > 1 else None
    mine, here = slices.take(x).requires_grad_(), slices.take_context(places)
    positions = positions_of(config.layer_type(0), config, here, document_ids, None, slices)
    if config.qk_norm == "head":  # attention runs again in backward; once, because the first use imports for seconds
        found = checkpoint(part, mine, positions, use_reentrant=False)
    else:
        found = part(mine, positions)
    (found * slices.take(grad)).sum().backward()
    # Rotations are computed in fp32 from the same angles, so that the rest may agree to fp64.
    assert whole.grad is not None
    assert mine.grad is not None
    assert error(found, slices.take(expected)) < 1e-10, case
    assert error(mine.grad, slices.take(whole.grad)) < 1e-10, case
    for name, p in part.named_parameters():
        assert p.grad is not None
        all_reduce(p.grad, mesh.data if parts[name].group == "data" else mesh.tokens)
        assert error(p.grad, parts[name].of(wanted[name])) < 1e-10, (*case, name)


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
        check_router(mesh, {"router": settings, "balance": {"aux_scope": scope, "bias_rule": "sign"}}, padded)


def check_router(mesh: Mesh, moe: dict[str, Any], padded: bool) -> None:
    batch, seq, width, experts = 3, 4 * mesh.layout.cp * mesh.layout.tp, 16, 4
    router = Router(model_config(moe), 1)
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
        routing, _ = router(x, groups)
        stats = routing.stats
        (stats.aux_loss + 0.1 * stats.z_loss + (routing.weights * grad).sum()).backward()
        assert x.grad is not None
        assert router.weight.grad is not None
        return routing, x.grad, router.weight.grad.clone()

    whole, grad_x, grad_weight = run(x, grad, TokenGroups(seq, valid, seeds))
    part, grad_x_here, grad_weight_here = run(
        slices.mine(x), slices.mine(grad), TokenGroups(seq, valid, seeds, shard=slices)
    )
    case = (moe, padded)
    assert torch.equal(part.expert_ids, slices.mine(whole.expert_ids)), case
    assert error(part.weights, slices.mine(whole.weights)) < 1e-12, case
    assert error(grad_x_here, slices.mine(grad_x)) < 1e-10, case
    dist.all_reduce(grad_weight_here)
    assert error(grad_weight_here, grad_weight) < 1e-10, case
    for name in ("load", "dropped", "tokens", "token_entropy", "aux_loss", "z_loss"):
        total = getattr(part.stats, name).detach().clone()
        dist.all_reduce(total)
        assert error(total, getattr(whole.stats, name)) < (1e-6 if name == "token_entropy" else 1e-12), (name, case)
    if "capacity_factor" in moe["router"]:
        assert whole.stats.dropped > 0, case  # or nothing was tested
