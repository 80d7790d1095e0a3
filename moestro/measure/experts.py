"""Products of many experts to time, alone and as the whole forward of a layer's experts."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch.nn import functional as F

from moestro.hardware.devices import DTYPE_BYTES
from moestro.measure.operands import TORCH_DTYPES, operand
from moestro.measure.timing import Case
from moestro.model.moe.dispatch import Dispatch
from moestro.model.moe.experts import ExpertWeights, grouped_experts, segmented_experts

SKEW = 1.2  # exponent of "power_law_1.2": the share of the expert of rank r is r^-1.2

# groups, rows of each, n, k
GROUPED = {
    ("cpu", True): [(8, rows, 256, 256) for rows in (8, 32, 128)] + [(32, rows, 128, 256) for rows in (8, 32)],
    ("cpu", False): [(groups, rows, 256, 256) for groups in (8, 32) for rows in (1, 4, 8, 16, 32, 64, 128, 256)],
    ("accelerator", True): [(16, rows, 4096, 2048) for rows in (16, 128, 1024)] + [(64, 256, 2048, 2048)],
    ("accelerator", False): [
        (groups, rows, n, 2048) for groups, n in ((16, 4096), (64, 2048), (128, 1536)) for rows in (16, 64, 256, 1024)
    ],
}
# hidden size; experts, top_k; widths; tokens (from a decode batch to a micro-batch)
EXPERTS: dict[tuple[str, bool], tuple[int, list[tuple[int, int]], list[int], list[int]]] = {
    ("cpu", True): (256, [(8, 2), (32, 2)], [64, 256], [16, 512]),
    ("cpu", False): (256, [(4, 1), (8, 2), (32, 4)], [64, 96, 128, 256, 512], [1, 16, 64, 256, 1024]),
    ("accelerator", True): (2048, [(16, 1), (64, 8)], [1024, 2048], [16, 256, 8192]),
    ("accelerator", False): (
        2048, [(16, 1), (64, 8), (128, 8)], [768, 1024, 1408, 2048, 4096], [1, 16, 256, 4096, 16384]
    ),
}  # fmt: skip


def grouped_cases(device: torch.device, quick: bool, dtype: str, most_flops: float) -> list[Case]:
    """Op grouped_gemm: one kernel for all groups where the device has one for the dtype, else product by product.

    On an accelerator the full set has both, the loop marked by how = "loop".
    """
    shapes = [s for s in GROUPED[_kind(device), quick] if 2 * s[0] * s[1] * s[2] * s[3] <= most_flops]
    if not _has_grouped(device, dtype):
        return [grouped_case(device, *shape, dtype, loop=True) for shape in shapes]
    cases = [grouped_case(device, *shape, dtype, loop=False) for shape in shapes]
    if not quick:
        cases += [grouped_case(device, *shape, dtype, loop=True) for shape in shapes]
    return cases


def grouped_case(device: torch.device, groups: int, m: int, n: int, k: int, dtype: str, loop: bool) -> Case:
    """`groups` products of [m, k] by a [k, n] of their own; rows lie together as [groups · m, k]."""

    def prepare() -> Callable[[], object]:
        rows, weights = operand((groups * m, k), dtype, device), operand((groups, k, n), dtype, device)
        if not loop:
            ends = torch.arange(m, groups * m + 1, m, device=device, dtype=torch.int32)
            return lambda: F.grouped_mm(rows, weights, offs=ends)
        out = torch.empty(groups * m, n, dtype=TORCH_DTYPES[dtype], device=device)
        parts = list(zip(rows.split(m), weights.unbind(0), out.split(m), strict=True))

        def one_by_one() -> torch.Tensor:
            for a, b, place in parts:
                torch.mm(a, b, out=place)
            return out

        return one_by_one

    case: dict[str, int | str] = {"groups": groups, "m": m, "n": n, "k": k, "dtype": dtype}
    if loop and _has_grouped(device, dtype):
        case["how"] = "loop"
    moved = DTYPE_BYTES[dtype] * groups * (m * k + k * n + m * n)
    return Case("grouped_gemm", case, 2.0 * groups * m * n * k, moved, prepare)


def expert_cases(device: torch.device, quick: bool, dtype: str, most_flops: float) -> list[Case]:
    """Op moe_experts over number and width of experts and tokens, balanced; the largest of each also skewed."""
    hidden, counts, widths, token_counts = EXPERTS[_kind(device), quick]
    if dtype == "fp8":  # the layer's weights and activations are of a wider dtype
        return []
    return [
        expert_case(device, experts, top_k, tokens, ffn, hidden, dtype, routing)
        for experts, top_k in counts
        for ffn in widths
        for tokens in token_counts
        for routing in ("balanced", f"power_law_{SKEW}")
        if 6 * tokens * top_k * ffn * hidden <= most_flops
        and (routing == "balanced" or (tokens == token_counts[-1] and ffn == widths[-1]))
    ]


def expert_case(
    device: torch.device, experts: int, top_k: int, tokens: int, ffn: int, hidden: int, dtype: str, routing: str
) -> Case:
    """Forward of a layer's SwiGLU experts as the model runs it: rows gathered, three products, activation, weights.

    6 tokens top_k ffn hidden FLOPs; bytes: the weights of the experts that have rows, and the rows in and out.
    """
    loads = expert_loads(tokens * top_k, experts, routing)

    def prepare() -> Callable[[], object]:
        function = grouped_experts if _has_grouped(device, dtype) else segmented_experts
        weights = ExpertWeights(
            operand((experts, 2, ffn, hidden), dtype, device), operand((experts, hidden, ffn), dtype, device)
        )
        x, plan = operand((tokens, hidden), dtype, device), balanced_plan(loads, tokens, device)

        def forward() -> torch.Tensor:
            with torch.no_grad():
                return function(x, plan, weights)

        return forward

    case: dict[str, int | str] = {
        "experts": experts, "top_k": top_k, "tokens": tokens, "ffn": ffn, "hidden": hidden, "dtype": dtype, "ep": 1,
        "routing": routing,
    }  # fmt: skip
    rows = tokens * top_k
    used = sum(load > 0 for load in loads)
    moved = DTYPE_BYTES[dtype] * (used * 3 * ffn * hidden + 2 * rows * hidden)
    return Case("moe_experts", case, 6.0 * rows * ffn * hidden, moved, prepare)


def expert_loads(rows: int, experts: int, routing: str) -> list[int]:
    """Rows of each expert, summing to `rows`: even, or by a power law of their rank."""
    shares = [1.0 if routing == "balanced" else (rank + 1) ** -SKEW for rank in range(experts)]
    total, seen, ends = sum(shares), 0.0, [0]
    for share in shares:
        seen += share
        ends.append(round(rows * seen / total))
    return [after - before for before, after in pairwise(ends)]


def balanced_plan(loads: list[int], tokens: int, device: torch.device) -> Dispatch:
    """A Dispatch with these rows an expert, each expert's spread evenly over the tokens."""
    rows = sum(loads)
    row_token = torch.cat([torch.arange(load) * tokens // max(load, 1) for load in loads])
    return Dispatch(
        row_token.to(device),
        torch.ones(rows, device=device, dtype=torch.float32),
        torch.tensor(loads, device=device, dtype=torch.int64),
    )


def _has_grouped(device: torch.device, dtype: str) -> bool:
    return device.type != "cpu" and dtype == "bf16"


def _kind(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else "accelerator"
