"""Attention to time: PyTorch's fused kernel over length, heads, shared keys, and head dimension.

FLOPs of a head of dimension d over s positions: forward 4 s² d, half of it when causal (each position sees half of the
others on average); backward 2.5 times forward, as the fused kernel computes the scores again (the count of arXiv
2307.08691). Decoding, one query against s keys: 4 s d. Bytes moved: each operand and result once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional as F

from moestro.hardware.devices import DTYPE_BYTES
from moestro.measure.operands import free_bytes, operand, product_rates, usable_dtypes
from moestro.measure.timing import Case

Phase = Literal["fwd", "bwd", "decode"]
BACKWARD = 2.5  # of forward's FLOPs
SLOWNESS = 3  # times below the rate of matrix products, about, that small attention runs at: to foresee its time


@dataclass(frozen=True)
class _Sizes:
    call_s: float  # a longer call is left out
    batch: int
    heads: int
    head_dim: int
    seqs: tuple[int, ...]
    seq: int  # of the sweeps over heads and head dimension
    kv_heads: tuple[int, ...]  # multi-head, grouped, multi-query
    head_dims: tuple[int, ...]
    caches: tuple[int, ...]  # lengths that one token is decoded against
    decode_batches: tuple[int, ...]


CPU_QUICK = _Sizes(0.08, 1, 4, 64, (128, 256, 512, 1024), 256, (4, 2, 1), (32, 64, 80, 96, 128, 256), (1024,), (1, 8))
CPU_FULL = _Sizes(
    0.5, 1, 4, 64, (64, 128, 256, 512, 1024, 2048, 4096), 256, (4, 2, 1), tuple(range(32, 257, 8)), (256, 1024, 4096),
    (1, 4, 16),
)  # fmt: skip
ACCELERATOR_QUICK = _Sizes(
    0.1, 1, 16, 128, (1024, 4096, 16384), 4096, (16, 4, 1), (32, 64, 80, 128, 192, 256), (4096, 32768), (1, 64)
)
ACCELERATOR_FULL = _Sizes(
    0.5, 1, 16, 128, (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536), 4096, (16, 8, 4, 2, 1),
    tuple(range(32, 257, 8)), (1024, 4096, 32768, 131072), (1, 8, 64, 256),
)  # fmt: skip


def attention_cases(device: torch.device, quick: bool) -> list[Case]:
    """Op attention in the dtype that one would train in here, causal; decoding reads a cache instead."""
    sizes = _sizes(device, quick)
    dtype = usable_dtypes(device)[0]
    heads, dim = sizes.heads, sizes.head_dim
    prefill = [(seq, heads, heads, dim) for seq in sizes.seqs]
    prefill += [(sizes.seq, heads, kv_heads, dim) for kv_heads in sizes.kv_heads]
    prefill += [(sizes.seq, heads // 2, heads // 2, dim), (sizes.seq, 2 * heads, 2 * heads, dim)]
    prefill += [(sizes.seq, heads, heads, head_dim) for head_dim in sizes.head_dims]
    phases: tuple[Phase, ...] = ("fwd", "bwd")
    cases = [
        attention_case(device, sizes.batch, *shape, dtype, phase)
        for shape in dict.fromkeys(prefill)
        for phase in phases
    ]
    cases += [
        attention_case(device, batch, seq, heads, kv_heads, dim, dtype, "decode")
        for seq in sizes.caches
        for batch in sizes.decode_batches
        for kv_heads in sizes.kv_heads[:2]
    ]
    most_flops, room = product_rates(device)[dtype] / SLOWNESS * sizes.call_s, free_bytes(device) / 4
    return [case for case in cases if (case.flops or 0) <= most_flops and (case.bytes_moved or 0) <= room]


def _sizes(device: torch.device, quick: bool) -> _Sizes:
    if device.type == "cpu":
        return CPU_QUICK if quick else CPU_FULL
    return ACCELERATOR_QUICK if quick else ACCELERATOR_FULL


def attention_case(
    device: torch.device, batch: int, seq: int, heads: int, kv_heads: int, head_dim: int, dtype: str, phase: Phase
) -> Case:
    """Queries [batch, heads, seq, head_dim] (decode: [batch, heads, 1, head_dim]), keys and values with kv_heads.

    bwd times the backward pass alone: of queries, keys and values.
    """
    queries = 1 if phase == "decode" else seq

    def prepare() -> Callable[[], object]:
        q = operand((batch, heads, queries, head_dim), dtype, device)
        k, v = (operand((batch, kv_heads, seq, head_dim), dtype, device) for _ in range(2))

        def forward() -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=phase != "decode", enable_gqa=kv_heads != heads)

        if phase != "bwd":
            return forward
        for tensor in (q, k, v):
            tensor.requires_grad_()
        out = forward()
        grad = operand(tuple(out.shape), dtype, device)
        return lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

    case: dict[str, int | str] = {
        "batch": batch, "seq": seq, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype,
        "causal": int(phase != "decode"), "phase": phase,
    }  # fmt: skip
    flops, moved = attention_cost(batch, seq, heads, kv_heads, head_dim, phase)
    return Case("attention", case, flops, moved * DTYPE_BYTES[dtype], prepare)


def attention_cost(batch: int, seq: int, heads: int, kv_heads: int, head_dim: int, phase: Phase) -> tuple[float, float]:
    """FLOPs and numbers moved. Backward reads q, k, v, the output and its gradient and writes three gradients."""
    if phase == "decode":
        return 4.0 * batch * heads * seq * head_dim, 2.0 * batch * head_dim * (kv_heads * seq + heads)
    flops, mine, shared = 2.0 * batch * heads * seq**2 * head_dim, heads * seq, kv_heads * seq
    if phase == "fwd":
        return flops, 2.0 * batch * head_dim * (mine + shared)
    return BACKWARD * flops, 4.0 * batch * head_dim * (mine + shared)
