from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from moestro.errors import MoestroError
from moestro.model import ops
from moestro.model.moe.dispatch import Dispatch, combine, dispatch
from moestro.model.moe.experts import (
    Experts,
    SegmentedExperts,
    grouped_experts,
    grouped_mm,
    grouped_mm_weight_grad,
    reference_experts,
)
from moestro.model.moe.router import Routing

from ..helpers import normal, relative

NAMES = ["out", "x", "row_weight", "gate_up", "down"]


def run(kind: str, x: Tensor, plan: Dispatch, gate_up: Tensor, down: Tensor) -> Tensor:
    if kind == "segmented":
        out: Tensor = SegmentedExperts.apply(x, plan.row_token, plan.row_weight, plan.counts, gate_up, down)
        return out
    return {"reference": reference_experts, "grouped": grouped_experts}[kind](x, plan, gate_up, down)


def pair_by_pair(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """[T, D]: every token's experts, one matrix-vector product at a time."""
    out = []
    for t, row in enumerate(ids.tolist()):
        total = x[t] * 0
        for k, e in enumerate(row):
            if e < len(down):
                hidden = F.silu(gate_up[e, 0] @ x[t]) * (gate_up[e, 1] @ x[t])
                total = total + weights[t, k] * (down[e] @ hidden)
        out.append(total)
    return torch.stack(out)


class Case:
    """Leaves x, weights, gate_up, down and a choice of experts."""

    def __init__(self, ids: Tensor, experts: int, hidden: int, width: int, dtype: torch.dtype = torch.float32) -> None:
        self.ids, self.experts = ids, experts
        self.leaves = [
            normal(len(ids), hidden, seed=1, dtype=dtype, grad=True),
            normal(*ids.shape, seed=2, dtype=dtype, grad=True),
            (normal(experts, 2, width, hidden, seed=3, dtype=dtype) / 2).requires_grad_(),
            (normal(experts, hidden, width, seed=4, dtype=dtype) / 2).requires_grad_(),
        ]
        self.upstream = normal(len(ids), hidden, seed=5, dtype=dtype)

    def plan(self, weights: Tensor) -> Dispatch:
        stats: Any = None
        return dispatch(Routing(self.ids, weights, stats), self.experts)

    def of(self, kind: str) -> list[Tensor]:
        """Combined output and the four gradients."""
        x, weights, gate_up, down = self.leaves
        if kind == "pairs":
            out = pair_by_pair(x, self.ids, weights, gate_up, down)
        else:
            plan = self.plan(weights)
            out = combine(run(kind, x, plan, gate_up, down), plan, len(x))
        grads = torch.autograd.grad(out, self.leaves, self.upstream, allow_unused=True)
        return [out, *(torch.zeros_like(leaf) if g is None else g for g, leaf in zip(grads, self.leaves, strict=True))]


def choose(tokens: int, experts: int, top_k: int) -> Tensor:
    return normal(tokens, experts, seed=7).argsort(1)[:, :top_k]


CHOICES = {
    "random": (choose(9, 4, 2), 4),
    "idle_expert": (choose(9, 3, 2) + 1, 5),  # experts 0 and 4 get nothing
    "all_on_one": (torch.full((9, 1), 2), 4),
    "one_expert": (torch.zeros(9, 1, dtype=torch.int64), 1),
    "every_expert": (choose(9, 4, 4), 4),
    "one_token": (choose(1, 4, 2), 4),
    "dropped_and_padding": (torch.tensor([[0, 4], [4, 4], [3, 1], [4, 0], [4, 4]]), 4),
    "nothing_kept": (torch.full((5, 2), 4), 4),
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(
    ("kind", "hidden", "width"),
    # grouped_mm needs rows of a multiple of 16 bytes.
    [(k, h, w) for k in ("reference", "segmented") for h, w in ((8, 12), (5, 7), (1, 1))] + [("grouped", 8, 12)],
)
def test_every_implementation_equals_single_pairs(kind: str, choice: str, hidden: int, width: int) -> None:
    case = Case(*CHOICES[choice], hidden, width)
    for name, found, expected in zip(NAMES, case.of(kind), case.of("pairs"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("kind", ["reference", "segmented"])
@pytest.mark.parametrize("choice", ["idle_expert", "dropped_and_padding", "nothing_kept"])
def test_gradcheck(kind: str, choice: str) -> None:
    ids, experts = CHOICES[choice]
    case = Case(ids[:5], experts, 3, 2, dtype=torch.float64)

    def function(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        plan = case.plan(weights)
        return combine(run(kind, x, plan, gate_up, down), plan, len(x))

    assert torch.autograd.gradcheck(function, case.leaves)


@pytest.mark.parametrize("kind", ["reference", "segmented", "grouped"])
def test_permuted_tokens_give_permuted_results(kind: str) -> None:
    case = Case(choose(16, 4, 2), 4, 8, 12)
    order = normal(16, seed=8).argsort()
    permuted = Case(case.ids[order], 4, 8, 12)
    permuted.leaves = [case.leaves[0][order], case.leaves[1][order], *case.leaves[2:]]
    permuted.upstream = case.upstream[order]
    out, grad_x, grad_weights, *grads = case.of(kind)
    again, again_x, again_weights, *again_grads = permuted.of(kind)
    torch.testing.assert_close(again, out[order], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(again_x, grad_x[order], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(again_weights, grad_weights[order], rtol=1e-5, atol=1e-5)
    for one, other in zip(again_grads, grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("native", [False, True], ids=["widened", "native"])
@pytest.mark.parametrize("kind", ["reference", "segmented", "grouped"])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_bf16_is_close_to_fp32_on_rounded_operands(
    kind: str, weight_dtype: torch.dtype, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "cpu_has_bf16_units", lambda: native)
    case = Case(CHOICES["dropped_and_padding"][0], 4, 16, 24)
    rounded = [leaf.detach().bfloat16() for leaf in case.leaves]
    rounded[1] = case.leaves[1].detach()  # gate weights stay fp32
    wide = Case(case.ids, 4, 16, 24)
    wide.leaves = [leaf.float().requires_grad_() for leaf in rounded]
    wide.upstream = case.upstream.bfloat16().float()
    case.leaves = [
        rounded[0].requires_grad_(),
        rounded[1].clone().requires_grad_(),
        rounded[2].to(weight_dtype).requires_grad_(),
        rounded[3].to(weight_dtype).requires_grad_(),
    ]
    case.upstream = case.upstream.bfloat16()
    for name, found, expected in zip(NAMES, case.of(kind), wide.of("pairs"), strict=True):
        assert relative(found, expected) < 2e-2, name
        wanted = {"out": torch.bfloat16, "x": torch.bfloat16, "row_weight": torch.float32}.get(name, weight_dtype)
        assert found.dtype == wanted, name


@pytest.mark.parametrize("kind", ["reference", "segmented", "grouped"])
@pytest.mark.parametrize("choice", ["random", "nothing_kept"])
def test_the_same_without_gradients(kind: str, choice: str) -> None:
    case = Case(*CHOICES[choice], 8, 12)
    expected = case.of("pairs")[0]
    x, weights, gate_up, down = (leaf.detach() for leaf in case.leaves)
    plan = case.plan(weights)
    torch.testing.assert_close(combine(run(kind, x, plan, gate_up, down), plan, len(x)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["segmented", "grouped"])
@pytest.mark.parametrize("frozen", range(4))
def test_a_frozen_input_gets_no_gradient(kind: str, frozen: int) -> None:
    case = Case(*CHOICES["random"], 8, 12)
    expected = case.of("pairs")
    case.leaves[frozen].requires_grad_(False)
    x, weights, gate_up, down = case.leaves
    plan = case.plan(weights)
    combine(run(kind, x, plan, gate_up, down), plan, len(x)).backward(case.upstream)
    for i, leaf in enumerate(case.leaves):
        if i == frozen:
            assert leaf.grad is None
        else:
            torch.testing.assert_close(leaf.grad, expected[i + 1], rtol=1e-5, atol=1e-5)


def test_auto_is_segmented_on_a_cpu_and_follows_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(*CHOICES["random"], 8, 12)
    plan = case.plan(case.leaves[1])
    names = {
        "auto": "SegmentedExpertsBackward",
        "segmented": "SegmentedExpertsBackward",
        "grouped": "GroupedExpertsBackward",
        "reference": "CatBackward0",
    }
    for setting, name in names.items():
        layer = Experts(4, 8, 12, setting)  # type: ignore[arg-type]
        out = layer(case.leaves[0], plan)
        assert out.grad_fn is not None
        assert out.grad_fn.name() == name


# Memory


def held_elements(kind: str, case: Case) -> tuple[int, int]:
    """Floating-point and integer elements kept for backward, without the weights, each storage once."""
    x, weights, gate_up, down = case.leaves
    plan = case.plan(weights)
    ours = {t.untyped_storage().data_ptr() for t in (gate_up, down)}
    kept: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        kept.setdefault(t.untyped_storage().data_ptr(), t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run(kind, x, plan, gate_up, down)
    others = [t for pointer, t in kept.items() if pointer not in ours]
    sizes = [(t.untyped_storage().nbytes() // t.element_size(), t.is_floating_point()) for t in others]
    return sum(n for n, floating in sizes if floating), sum(n for n, floating in sizes if not floating)


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


# The grouped implementation and its operators


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
    for name, found, expected in zip(NAMES, case.of("grouped"), case.of("reference"), strict=True):
        assert relative(found, expected) < 1e-6, name


def test_grouped_takes_a_broadcast_gradient() -> None:
    case = Case(*CHOICES["random"], 8, 12)
    x, weights, gate_up, down = case.leaves
    plan = case.plan(weights)
    found, expected = (  # the gradient of a sum has strides of zero
        torch.autograd.grad(run(kind, x, plan, gate_up, down).sum(), [x, gate_up, down], retain_graph=True)
        for kind in ("grouped", "reference")
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
def test_grouped_experts_on_fake_tensors(dtype: torch.dtype) -> None:
    with FakeTensorMode():
        x, weights = torch.empty(9, 8, dtype=dtype, requires_grad=True), torch.empty(18, requires_grad=True)
        gate_up, down = torch.empty(4, 2, 16, 8, requires_grad=True), torch.empty(4, 8, 16, requires_grad=True)
        plan = Dispatch(torch.empty(18, dtype=torch.int64), weights, torch.empty(4, dtype=torch.int64))
        out = grouped_experts(x, plan, gate_up, down)
        assert (out.shape, out.dtype) == ((18, 8), dtype)
        grads = torch.autograd.grad(out.sum(), [x, weights, gate_up, down])
        assert [g.shape for g in grads] == [t.shape for t in (x, weights, gate_up, down)]


def test_grouped_experts_compile() -> None:
    case = Case(*CHOICES["random"], 8, 12)
    x, weights, gate_up, down = case.leaves
    plan = case.plan(weights.detach())
    compiled = torch.compile(grouped_experts, backend="aot_eager", fullgraph=True)
    leaves = [x, gate_up, down]
    found = compiled(x, plan, gate_up, down)
    expected = grouped_experts(x, plan, gate_up, down)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(
        torch.autograd.grad(found.sum(), leaves), torch.autograd.grad(expected.sum(), leaves), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
