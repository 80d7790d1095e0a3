"""The grouped implementation and its operators, and what all implementations keep for backward."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from moestro.config.moe import Activation
from moestro.errors import MoestroError
from moestro.model.activations import num_products
from moestro.model.moe.dispatch import Dispatch
from moestro.model.moe.experts import Experts, ExpertWeights, grouped_experts, grouped_mm, grouped_mm_weight_grad

from ..helpers import normal, relative
from .expert_cases import CHOICES, KINDS, LIMIT, NAMES, Case, choose, run


def operands() -> tuple[Tensor, Tensor, Tensor]:
    return normal(6, 8), normal(3, 8, 4, seed=1), torch.tensor([2, 2, 6], dtype=torch.int32)


def test_grouped_mm_is_one_product_a_group() -> None:
    rows, weight, ends = operands()
    out = grouped_mm(rows, weight, ends)
    torch.testing.assert_close(out, torch.cat([rows[:2] @ weight[0], rows[2:] @ weight[2]]))
    grad = normal(6, 4, seed=2)
    found = grouped_mm_weight_grad(rows, grad, ends)
    expected = torch.stack([rows[:2].t() @ grad[:2], torch.zeros(8, 4), rows[2:].t() @ grad[2:]])
    torch.testing.assert_close(found, expected)


def test_operators_keep_the_rules_of_operators() -> None:
    rows, weight, ends = operands()
    torch.library.opcheck(grouped_mm, (rows, weight, ends))
    torch.library.opcheck(grouped_mm_weight_grad, (rows, normal(6, 4), ends))


@pytest.mark.parametrize("choice", CHOICES)
def test_grouped_equals_reference_to_1e_6(choice: str) -> None:
    case = Case(*CHOICES[choice], 8, 12)
    for name, found, expected in zip(NAMES, case.of("grouped"), case.of("reference"), strict=False):
        assert relative(found, expected) < 1e-6, name


def test_grouped_takes_a_broadcast_gradient() -> None:
    case = Case(*CHOICES["random"], 8, 12, bias=True)
    leaves = [case.leaves[0], *case.leaves[2:]]
    found, expected = (  # the gradient of a sum has strides of zero
        torch.autograd.grad(case.rows(kind).sum(), leaves, retain_graph=True) for kind in ("grouped", "reference")
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_grouped_repeats_bit_for_bit() -> None:
    case = Case(*CHOICES["every_expert"], 8, 12)
    assert all(torch.equal(one, other) for one, other in zip(case.of("grouped"), case.of("grouped"), strict=True))


def test_grouped_in_double_precision_names_the_remedy() -> None:
    case = Case(*CHOICES["random"], 8, 12, dtype=torch.float64)
    with pytest.raises(MoestroError, match=r"bf16 or fp32.*set model\.moe\.experts = 'segmented'"):
        case.of("grouped")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", KINDS)
def test_grouped_experts_on_fake_tensors(dtype: torch.dtype, activation: Activation) -> None:
    products = num_products(activation)
    with FakeTensorMode():
        x, weights = torch.empty(9, 8, dtype=dtype, requires_grad=True), torch.empty(18, requires_grad=True)
        shapes = ((4, products, 16, 8), (4, 8, 16), (4, products, 16), (4, 8))
        packed = [torch.empty(*shape, requires_grad=True) for shape in shapes]
        plan = Dispatch(torch.empty(18, dtype=torch.int64), weights, torch.empty(4, dtype=torch.int64))
        out = run("grouped", x, plan, packed, activation)
        assert (out.shape, out.dtype) == ((18, 8), dtype)
        grads = torch.autograd.grad(out.sum(), [x, weights, *packed])
        assert [g.shape for g in grads] == [t.shape for t in (x, weights, *packed)]


@pytest.mark.parametrize(("activation", "bias"), [("swiglu", False), ("clamped_swiglu", True), ("relu2", False)])
def test_grouped_experts_compile(activation: Activation, bias: bool) -> None:
    case = Case(*CHOICES["random"], 8, 12, activation=activation, bias=bias)
    x, weights, *packed = case.leaves
    plan = case.plan(weights.detach())
    compiled = torch.compile(grouped_experts, backend="aot_eager", fullgraph=True)
    found = compiled(x, plan, ExpertWeights(*packed), activation, LIMIT)
    expected = run("grouped", x, plan, packed, activation)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    leaves = [x, *packed]
    for one, other in zip(
        torch.autograd.grad(found.sum(), leaves), torch.autograd.grad(expected.sum(), leaves), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


# Memory


def held_elements(kind: str, case: Case) -> tuple[int, int]:
    """Floating-point and integer elements kept for backward, without the weights, each storage once."""
    ours = {t.untyped_storage().data_ptr() for t in case.leaves[2:]}
    kept: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        kept.setdefault(t.untyped_storage().data_ptr(), t)
        return t

    x, weights, *packed = case.leaves
    plan = case.plan(weights)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run(kind, x, plan, packed, case.activation)
    others = [t for pointer, t in kept.items() if pointer not in ours]
    sizes = [(t.untyped_storage().nbytes() // t.element_size(), t.is_floating_point()) for t in others]
    return sum(n for n, floating in sizes if floating), sum(n for n, floating in sizes if not floating)


@pytest.mark.parametrize("activation", KINDS)
@pytest.mark.parametrize("kind", ["segmented", "grouped"])
def test_kept_are_tokens_products_and_index_lists(kind: str, activation: Activation) -> None:
    tokens, top_k, width = 32, 4, 12
    case = Case(choose(tokens, 8, top_k), 8, 16, width, activation=activation, bias=True)
    kept, indices = held_elements(kind, case)
    assert kept == tokens * 16 + num_products(activation) * tokens * top_k * width + tokens * top_k
    assert indices == tokens * top_k + (8 if kind == "grouped" else 0)


@pytest.mark.parametrize(("kind", "counters"), [("segmented", 0), ("grouped", 8)])  # grouped: [E] int32 ends
def test_less_than_half_of_what_the_plain_way_keeps(kind: str, counters: int) -> None:
    """MoEBlaze (arXiv 2601.05296): 2 L K d + 4 L K h against L d + 2 L K h elements; 18 to 8.25 at K = 4, h = 4 d."""
    tokens, top_k, hidden = 32, 4, 8
    width, rows = 4 * hidden, tokens * top_k
    case = Case(choose(tokens, 8, top_k), 8, hidden, width)
    kept, indices = held_elements(kind, case)
    assert kept == tokens * hidden + 2 * rows * width + rows
    assert indices == rows + counters
    plain, _ = held_elements("reference", case)
    assert plain == 2 * rows * hidden + 4 * rows * width + rows
    assert plain / kept > 2


@pytest.mark.parametrize("kind", ["segmented", "grouped"])
def test_in_bf16_no_copy_of_the_weights_is_kept(kind: str) -> None:
    case = Case(choose(32, 8, 4), 8, 16, 24)
    case.leaves[0] = case.leaves[0].detach().bfloat16().requires_grad_()
    assert held_elements(kind, case)[0] == 32 * 16 + 2 * 32 * 4 * 24 + 32 * 4


@pytest.mark.parametrize("kind", ["segmented", "grouped"])
def test_held_does_not_grow_with_top_k_beyond_the_hidden_rows(kind: str) -> None:
    held = [held_elements(kind, Case(choose(32, 8, k), 8, 8, 4))[0] for k in (1, 4)]
    assert held[1] - held[0] == 3 * 32 * (2 * 4 + 1)  # 2 H activations and one weight for each further row


class LargestBuffer(TorchDispatchMode):
    """Elements of the largest buffer that is allocated inside."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "empty" in func.__name__:
            self.elements = max(self.elements, out.numel())
        return out


def test_without_gradients_the_activations_of_one_expert_are_held() -> None:
    case = Case(choose(32, 8, 4), 8, 8, 64)
    layer, rows = Experts(8, 8, 64, "segmented"), 32 * 4
    plan = case.plan(case.leaves[1].detach())
    with LargestBuffer() as trained:
        layer(case.leaves[0], plan)
    with torch.no_grad(), LargestBuffer() as evaluated:
        layer(case.leaves[0], plan)
    assert trained.elements == rows * 2 * 64
    assert evaluated.elements == int(plan.counts.max()) * 2 * 64
