"""What stands between the matrix products, to time: norms, activation, router, rotation, tables, loss, optimizers.

These are the model's own functions, with the memory that they take for their results, so that the figures are of what a
training step runs. Bytes moved are the least that any implementation moves, each operand read once and each result
written once: what the measured bandwidth lacks of that of a copy of the same size is what fusing could gain.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from moestro.config import OptimConfig, RopeConfig
from moestro.hardware.devices import DTYPE_BYTES
from moestro.measure.operands import TORCH_DTYPES, operand, usable_dtypes
from moestro.measure.timing import Case
from moestro.model.activations import activate
from moestro.model.loss import linear_cross_entropy
from moestro.model.norms import RMSNorm
from moestro.model.ops import linear
from moestro.model.rope import apply_rope, rope_tables
from moestro.optim.build import build_adamw, build_muon
from moestro.optim.muon import orthogonalize

EPS = 1e-6
HEAD_DIM = 64
STEPS = OptimConfig().newton_schulz_steps

# tokens, width
ROWS = {
    ("cpu", True): [(256, 512), (2048, 512)],
    ("cpu", False): [(tokens, width) for tokens in (64, 256, 1024, 4096) for width in (128, 512, 1024)],
    ("accelerator", True): [(1024, 2048), (16384, 2048)],
    ("accelerator", False): [(tokens, width) for tokens in (256, 1024, 4096, 16384) for width in (1024, 2048, 4096)],
}
# tokens, width, vocabulary
HEADS = {
    ("cpu", True): [(512, 128, 1024)],
    ("cpu", False): [(512, 128, 1024), (1024, 192, 1024), (512, 256, 8192), (256, 128, 50304)],
    ("accelerator", True): [(4096, 2048, 50304)],
    ("accelerator", False): [(4096, 2048, 50304), (8192, 2048, 128256), (4096, 2048, 262272)],
}
# matrices, rows, columns
MATRICES = {
    ("cpu", True): [(8, 128, 192), (1, 256, 256)],
    ("cpu", False): [(8, 128, 192), (1, 192, 192), (1, 512, 512), (16, 128, 256)],
    ("accelerator", True): [(16, 2048, 2048), (1, 2048, 1024)],
    ("accelerator", False): [(16, 4096, 2048), (16, 2048, 2048), (64, 1024, 2048), (1, 2048, 1024), (1, 4096, 4096)],
}
ADAMW = {
    ("cpu", True): [2**16, 2**21],
    ("cpu", False): [2**e for e in range(12, 24)],
    ("accelerator", True): [2**20, 2**28],
    ("accelerator", False): [2**e for e in range(14, 30, 2)],
}


def elementwise_cases(device: torch.device, quick: bool) -> list[Case]:
    """Activations in the dtype that one would train in here; the router, loss, and optimizers as the model has them."""
    key = ("cpu" if device.type == "cpu" else "accelerator", quick)
    dtype = usable_dtypes(device)[0]
    cases = []
    for tokens, width in ROWS[key]:
        for make in (rmsnorm_case, rmsnorm_backward_case, residual_norm_case, swiglu_case, rope_case):
            cases.append(make(device, tokens, width, dtype))
        cases.append(router_case(device, tokens, width, 64 if key[0] == "accelerator" else 16, 2, dtype))
        cases += [make(device, tokens, width, dtype) for make in (gather_case, scatter_case)]
    for tokens, width, vocab in HEADS[key]:
        for make_head in (embedding_case, embedding_backward_case, cross_entropy_case):
            cases.append(make_head(device, tokens, width, vocab, dtype))
    cases += [adamw_case(device, elements) for elements in ADAMW[key]]
    for shape in MATRICES[key]:
        cases += [newton_schulz_case(device, *shape), muon_case(device, *shape)]
    return cases


def _rows_case(
    op: str, tokens: int, width: int, dtype: str, numbers: float, prepare: Callable[[], Callable[[], object]]
) -> Case:
    """numbers: how many of `dtype` move."""
    case: dict[str, int | str] = {"tokens": tokens, "width": width, "dtype": dtype}
    return Case(op, case, None, numbers * DTYPE_BYTES[dtype], prepare)


def _without_grad(function: Callable[..., object], *operands: object) -> Callable[[], object]:
    def call() -> object:
        with torch.no_grad():
            return function(*operands)

    return call


def rmsnorm_case(device: torch.device, tokens: int, width: int, dtype: str) -> Case:
    """[tokens, width] read and written, and the weight read."""

    def prepare() -> Callable[[], object]:
        return _without_grad(RMSNorm(width, EPS).to(device), operand((tokens, width), dtype, device))

    return _rows_case("rmsnorm", tokens, width, dtype, 2 * tokens * width + width, prepare)


def rmsnorm_backward_case(device: torch.device, tokens: int, width: int, dtype: str) -> Case:
    """x and the gradient read, the input's gradient written."""

    def prepare() -> Callable[[], object]:
        norm, x = RMSNorm(width, EPS).to(device), operand((tokens, width), dtype, device).requires_grad_()
        return _backward(norm(x), [x, norm.weight])

    return _rows_case("rmsnorm_backward", tokens, width, dtype, 3 * tokens * width + 2 * width, prepare)


def _backward(out: Tensor, inputs: list[Tensor]) -> Callable[[], object]:
    grad = torch.full_like(out, 0.5)
    return lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)


def residual_norm_case(device: torch.device, tokens: int, width: int, dtype: str) -> Case:
    """x + y kept for the next residual, and its norm: two read, two written."""

    def prepare() -> Callable[[], object]:
        norm = RMSNorm(width, EPS).to(device)
        x, y = operand((tokens, width), dtype, device), operand((tokens, width), dtype, device)
        total = torch.empty_like(x)
        return _without_grad(lambda: norm(torch.add(x, y, out=total)))

    return _rows_case("residual_norm", tokens, width, dtype, 4 * tokens * width + width, prepare)


def swiglu_case(device: torch.device, tokens: int, width: int, dtype: str) -> Case:
    """silu(gate) · up: two read, one written."""

    def prepare() -> Callable[[], object]:
        gate, up = operand((tokens, width), dtype, device), operand((tokens, width), dtype, device)
        return lambda: activate("swiglu", gate, up, 0.0)

    return _rows_case("swiglu", tokens, width, dtype, 3 * tokens * width, prepare)


def rope_case(device: torch.device, tokens: int, width: int, dtype: str) -> Case:
    """One sequence of width / HEAD_DIM heads, rotated whole; the tables are read once."""

    def prepare() -> Callable[[], object]:
        x = operand((1, max(width // HEAD_DIM, 1), tokens, HEAD_DIM), dtype, device)
        cos, sin = rope_tables(torch.arange(tokens, device=device).unsqueeze(0), HEAD_DIM, RopeConfig())
        return _without_grad(apply_rope, x, cos, sin)

    return _rows_case("rope", tokens, width, dtype, 2 * tokens * max(width // HEAD_DIM, 1) * HEAD_DIM, prepare)


def router_case(device: torch.device, tokens: int, width: int, experts: int, top_k: int, dtype: str) -> Case:
    """A linear router: logits, softmax, top_k, in fp32 whatever the activations are.

    2 tokens width experts FLOPs; moved: the activations and the fp32 weight once.
    """

    def prepare() -> Callable[[], object]:
        x, weight = operand((tokens, width), dtype, device), torch.randn(experts, width, device=device)

        return _without_grad(lambda: linear(x.float(), weight).softmax(-1).topk(top_k, dim=-1))

    case: dict[str, int | str] = {"tokens": tokens, "width": width, "experts": experts, "top_k": top_k, "dtype": dtype}
    moved = DTYPE_BYTES[dtype] * tokens * width + 4 * experts * width
    return Case("router", case, 2.0 * tokens * width * experts, moved, prepare)


def gather_case(device: torch.device, tokens: int, width: int, dtype: str) -> Case:
    """Dispatch: `tokens` rows read in an order of their own and written one after the other."""

    def prepare() -> Callable[[], object]:
        x, out = operand((tokens, width), dtype, device), operand((tokens, width), dtype, device)
        rows = torch.randperm(tokens).to(device)
        return lambda: torch.index_select(x, 0, rows, out=out)

    return _rows_case("gather", tokens, width, dtype, 2 * tokens * width, prepare)


def scatter_case(device: torch.device, tokens: int, width: int, dtype: str) -> Case:
    """Combine: `tokens` rows added to rows in another order; two read, one written."""

    def prepare() -> Callable[[], object]:
        x, out = (
            operand((tokens, width), dtype, device),
            torch.zeros(tokens, width, dtype=TORCH_DTYPES[dtype], device=device),
        )
        rows = torch.randperm(tokens).to(device)
        return lambda: out.index_add_(0, rows, x)

    return _rows_case("scatter", tokens, width, dtype, 3 * tokens * width, prepare)


def _head_case(
    op: str,
    shape: tuple[int, int, int],
    dtype: str,
    flops: float | None,
    moved: float,
    prepare: Callable[[], Callable[[], object]],
) -> Case:
    """shape: tokens, width, vocabulary. moved: bytes."""
    tokens, width, vocab = shape
    return Case(op, {"tokens": tokens, "width": width, "vocab": vocab, "dtype": dtype}, flops, moved, prepare)


def embedding_case(device: torch.device, tokens: int, width: int, vocab: int, dtype: str) -> Case:
    """Rows of the table read, and written."""

    def prepare() -> Callable[[], object]:
        return _without_grad(F.embedding, _token_ids(tokens, vocab, device), operand((vocab, width), dtype, device))

    moved = 2 * tokens * width * DTYPE_BYTES[dtype]
    return _head_case("embedding", (tokens, width, vocab), dtype, None, moved, prepare)


def embedding_backward_case(device: torch.device, tokens: int, width: int, vocab: int, dtype: str) -> Case:
    """The gradient of the rows read, and a gradient of the whole table written."""

    def prepare() -> Callable[[], object]:
        table = operand((vocab, width), dtype, device).requires_grad_()
        return _backward(F.embedding(_token_ids(tokens, vocab, device), table), [table])

    moved = (tokens + vocab) * width * DTYPE_BYTES[dtype]
    return _head_case("embedding_backward", (tokens, width, vocab), dtype, None, moved, prepare)


def cross_entropy_case(device: torch.device, tokens: int, width: int, vocab: int, dtype: str) -> Case:
    """Head, loss and both gradients in one, as training runs them: three products, 6 tokens width vocab FLOPs.

    Moved: activations, their gradient, the fp32 weight and its gradient; no logits.
    """

    def prepare() -> Callable[[], object]:
        hidden = operand((tokens, width), dtype, device).requires_grad_()
        weight = operand((vocab, width), "fp32", device).requires_grad_()
        labels = _token_ids(tokens, vocab, device)

        def step() -> object:
            loss = linear_cross_entropy(hidden, weight, labels, scale=1 / tokens)
            return torch.autograd.grad(loss, (hidden, weight))

        return step

    moved = 2 * tokens * width * DTYPE_BYTES[dtype] + 2 * vocab * width * 4
    return _head_case("cross_entropy", (tokens, width, vocab), dtype, 6.0 * tokens * width * vocab, moved, prepare)


def _token_ids(tokens: int, vocab: int, device: torch.device) -> Tensor:
    return torch.randint(vocab, (tokens,), generator=torch.Generator().manual_seed(0)).to(device)


def adamw_case(device: torch.device, elements: int) -> Case:
    """A step of fp32 parameters: weight, gradient and two moments read; weight and moments written: 28 bytes each."""

    def prepare() -> Callable[[], object]:
        parameter = torch.nn.Parameter(operand((elements,), "fp32", device))
        parameter.grad = operand((elements,), "fp32", device)
        return build_adamw([parameter], [], OptimConfig())[0].step

    return Case("adamw", {"elements": elements, "dtype": "fp32"}, None, 28.0 * elements, prepare)


def newton_schulz_case(device: torch.device, matrices: int, rows: int, columns: int) -> Case:
    """Muon's orthogonalisation of `matrices` fp32 matrices; three products an iteration."""

    def prepare() -> Callable[[], object]:
        return _without_grad(orthogonalize, _momenta(matrices, rows, columns, device), STEPS)

    return _matrix_case("newton_schulz", matrices, rows, columns, None, prepare)


def muon_case(device: torch.device, matrices: int, rows: int, columns: int) -> Case:
    """Muon's whole step. Moved: weight, gradient and momentum read, weight and momentum written, 20 bytes a weight."""

    def prepare() -> Callable[[], object]:
        parameter = torch.nn.Parameter(_momenta(matrices, rows, columns, device))
        parameter.grad = _momenta(matrices, rows, columns, device)
        return build_muon({None: [parameter]}, OptimConfig())[0].step

    return _matrix_case("muon", matrices, rows, columns, 20.0 * matrices * rows * columns, prepare)


def _momenta(matrices: int, rows: int, columns: int, device: torch.device) -> Tensor:
    return torch.randn(matrices, rows, columns, generator=torch.Generator().manual_seed(0)).to(device)


def _matrix_case(
    op: str, matrices: int, rows: int, columns: int, moved: float | None, prepare: Callable[[], Callable[[], object]]
) -> Case:
    """With a the shorter side and b the longer, an iteration takes 2 a² b + 2 a³ + 2 a² b FLOPs."""
    a, b = min(rows, columns), max(rows, columns)
    flops = float(STEPS * matrices * (4 * a * a * b + 2 * a**3))
    case: dict[str, int | str] = {"matrices": matrices, "rows": rows, "columns": columns, "dtype": "fp32"}
    return Case(op, case, flops, moved, prepare)
