"""Matrix products to time: squares, the shapes of models, and sweeps over one size that show what a device wants.

The sweeps (arXiv 2401.14489, and the sizing of arXiv 2511.17127): n and k one to 64 beside a round number, hidden size,
vocabulary, head dimension, width and number of experts. All of out [m, n] = a [m, k] · b [k, n], outputs allocated.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from moestro.config import load_config, resolved_model
from moestro.hardware.devices import DTYPE_BYTES
from moestro.measure.experts import expert_cases, grouped_cases
from moestro.measure.operands import TORCH_DTYPES, free_bytes, operand, product, product_rates, usable_dtypes
from moestro.measure.timing import Case

Shape = tuple[int, int, int]  # m, n, k
T = TypeVar("T")

OFFSETS = (-64, -32, -16, -8, -4, -2, -1, 0, 1, 2, 4, 8, 16, 32, 64)
MORE_OFFSETS = (-48, -24, -12, -6, -3, 3, 5, 6, 10, 12, 20, 24, 40, 48, 96, 128)
FP8_MULTIPLE = 16  # of n and k: what the units take


@dataclass(frozen=True)
class _Sizes:
    """What suits a kind of device."""

    call_s: float  # a longer product is left out; it is run half a dozen times at least
    largest: int  # square
    base: int  # of the sweeps over n and k
    hidden: range
    rows: int  # of the sweep over hidden sizes
    vocab_shape: tuple[int, int]  # m, k
    vocabs: tuple[int, ...]
    scores: tuple[int, int]  # batch (of sequences and heads) and sequence length
    head_dims: tuple[int, ...]
    presets: tuple[str, ...]
    tokens: int  # of a micro-batch of the presets


CPU_QUICK = _Sizes(
    0.03, 1024, 512, range(128, 1025, 64), 256, (128, 128), (1000, 1024, 8191, 8192, 32000, 50257, 50304), (8, 256),
    (32, 64, 128), ("sotu-tiny", "zaya1-tiny"), 1024,
)  # fmt: skip
CPU_FULL = _Sizes(
    0.3, 2048, 512, range(64, 2049, 64), 256, (128, 128),
    (1000, 1024, 8191, 8192, 32000, 32001, 50257, 50304, 50432, 128000, 128256, 262144, 262272), (16, 256),
    tuple(range(32, 257, 8)), ("sotu-tiny", "zaya1-tiny", "olmoe-tiny", "deepseek-v3-tiny"), 1024,
)  # fmt: skip
ACCELERATOR_QUICK = _Sizes(
    0.03, 16384, 4096, range(512, 8193, 512), 4096, (4096, 2048), (50257, 50304, 128000, 128256, 262144, 262272),
    (64, 2048), (64, 80, 128, 256), ("zaya1-8b", "olmoe-1b-7b"), 16384,
)  # fmt: skip
ACCELERATOR_FULL = _Sizes(
    0.3, 16384, 4096, range(512, 8193, 64), 4096, (4096, 2048),
    (50257, 50304, 50432, 128000, 128256, 129280, 151936, 262144, 262272), (64, 2048), tuple(range(32, 257, 8)),
    ("zaya1-8b", "olmoe-1b-7b", "qwen3-30b-a3b", "deepseek-v2-lite"), 16384,
)  # fmt: skip


def gemm_cases(device: torch.device, quick: bool, dtypes: Sequence[str] | None = None) -> list[Case]:
    """Ops gemm, batched_gemm, grouped_gemm and moe_experts.

    Every sweep in the dtype that one would train in here; squares and models' shapes in the other usable ones too, and
    a single small square in those that the device does in software only, so that the profile says how slow they are.

    dtypes: the usable ones, the main one first; None: see `usable_dtypes`.
    """
    rates = product_rates(device)
    slowest = min(rates.values())
    usable = list(dtypes) if dtypes is not None else usable_dtypes(device)
    sizes = _sizes(device, quick)
    room = free_bytes(device) / 4
    cases = [
        gemm_case(device, *shape, dtype)
        for dtype in usable
        for shape in _unique(_shapes(sizes, quick, full_set=dtype == usable[0]))
        if _fits(shape, dtype, rates.get(dtype, slowest) * sizes.call_s, room)
    ]
    main = usable[0]
    cases += [
        gemm_case(device, sizes.base, sizes.base, sizes.base, main, layout) for layout in ("nt", "tn") if main != "fp8"
    ]
    cases += [batched_case(device, *shape, main) for shape in _score_shapes(sizes)]
    most_flops = rates.get(main, slowest) * sizes.call_s
    cases += grouped_cases(device, quick, main, most_flops) + expert_cases(device, quick, main, most_flops)
    software = [dtype for dtype in rates if dtypes is None and dtype not in usable]
    return cases + [gemm_case(device, 256, 256, 256, dtype, layout) for dtype in software for layout in ("nn", "nt")]


def gemm_case(device: torch.device, m: int, n: int, k: int, dtype: str, layout: str = "nn") -> Case:
    """2 m n k FLOPs. The case names the layout unless it is the plain one, "nn" ("nt" for fp8)."""
    case: dict[str, int | str] = {"m": m, "n": n, "k": k, "dtype": dtype}
    if layout != "nn":
        case["layout"] = layout
    moved = DTYPE_BYTES[dtype] * (m * k + k * n) + (2 if dtype == "fp8" else DTYPE_BYTES[dtype]) * m * n
    return Case("gemm", case, 2.0 * m * n * k, moved, lambda: product(m, n, k, dtype, device, layout))


def batched_case(device: torch.device, batch: int, m: int, n: int, k: int, dtype: str) -> Case:
    """`batch` products of [m, k] by [k, n]."""

    def prepare() -> Callable[[], object]:
        a, b = operand((batch, m, k), dtype, device), operand((batch, k, n), dtype, device)
        out = torch.empty(batch, m, n, dtype=TORCH_DTYPES[dtype], device=device)
        return lambda: torch.bmm(a, b, out=out)

    case: dict[str, int | str] = {"batch": batch, "m": m, "n": n, "k": k, "dtype": dtype}
    moved = DTYPE_BYTES[dtype] * batch * (m * k + k * n + m * n)
    return Case("batched_gemm", case, 2.0 * batch * m * n * k, moved, prepare)


def _sizes(device: torch.device, quick: bool) -> _Sizes:
    if device.type == "cpu":
        return CPU_QUICK if quick else CPU_FULL
    return ACCELERATOR_QUICK if quick else ACCELERATOR_FULL


def _shapes(sizes: _Sizes, quick: bool, full_set: bool) -> Iterable[Shape]:
    """full_set: with the sweeps."""
    yield from ((2**e,) * 3 for e in range(6, sizes.largest.bit_length()))
    for preset in sizes.presets:
        yield from model_shapes(preset, sizes.tokens, gradients=not quick)
    if not full_set:
        return
    base = sizes.base
    for offset in OFFSETS if quick else sorted(OFFSETS + MORE_OFFSETS):
        yield base, base + offset, base
        yield base, base, base + offset
    yield from ((sizes.rows, hidden, hidden) for hidden in sizes.hidden)
    m, k = sizes.vocab_shape
    yield from ((m, vocab, k) for vocab in sizes.vocabs)
    if base >= 4096:  # SwiGLU's 8 h / 3 of h = 4096, and its aligned neighbours
        yield from ((base, width, 4096) for width in (10922, 10944, 11008))


def model_shapes(preset: str, tokens: int, gradients: bool) -> list[Shape]:
    """The linear layers of a preset as products, for a micro-batch of `tokens` with experts evenly loaded.

    A weight [n, k] meets m rows: forward (m, n, k); with `gradients` also (m, k, n) for the input and (n, k, m) for the
    weight.
    """
    model = resolved_model(load_config(preset).config)
    hidden, head_dim = model.hidden_size, model.resolved_head_dim
    queries, keys = model.num_heads * head_dim, model.resolved_num_kv_heads * head_dim
    weights = [(tokens, queries, hidden), (tokens, 2 * keys, hidden), (tokens, hidden, queries)]
    if model.moe is not None:
        experts, width = model.moe.resolved_num_experts, model.moe.expert_hidden_size
        rows = max(tokens * model.top_k_of_layer(model.moe_layers.index(True)) // experts, 1)
        weights += [(rows, 2 * width, hidden), (rows, hidden, width), (tokens, model.moe.num_choices, hidden)]
    if model.intermediate_size is not None:
        weights += [(tokens, model.intermediate_size, hidden), (tokens, hidden, model.intermediate_size)]
    if model.vocab_size is not None:
        weights.append((tokens, model.vocab_size, hidden))
    if not gradients:
        return weights
    return [shape for m, n, k in weights for shape in ((m, n, k), (m, k, n), (n, k, m))]


def _score_shapes(sizes: _Sizes) -> list[tuple[int, int, int, int]]:
    """Attention's two products, scores and their sum over values, for each head dimension."""
    batch, seq = sizes.scores
    return _unique(s for d in sizes.head_dims for s in ((batch, seq, seq, d), (batch, seq, d, seq)))


def _fits(shape: Shape, dtype: str, most_flops: float, room: float) -> bool:
    m, n, k = shape
    if dtype == "fp8" and (n % FP8_MULTIPLE or k % FP8_MULTIPLE):
        return False
    return 2 * m * n * k <= most_flops and 4 * (m * k + k * n + m * n) <= room


def _unique(shapes: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(shapes))
