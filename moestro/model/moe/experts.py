"""Stage three: experts over rows grouped by expert, in three interchangeable implementations.

Each takes the tokens x [T, D], a Dispatch of R rows, and the packed weights; each returns the rows' outputs [R, D],
already multiplied by their gate weights. The gate and up projections are stacked so that one product serves both; as
the last two axes are a matrix each, an optimizer that works on matrices sees them apart, and flattening axes 1 and 2
gives the fused layout of Hugging Face.

* reference: a plain loop, the definition the others are tested against.
* segmented: works through the experts one at a time, so that a block of rows is gathered, multiplied and activated
  while it is in cache. Fastest on CPUs.
* grouped: `torch.nn.functional.grouped_mm`, one kernel for all experts. For GPUs.

The last two keep x, the gate and up products [R, W H] and the index lists for backward, no gathered rows: these and the
activation are made again (arXiv 2601.05296). The reference keeps what autograd keeps, about twice as much or more. In
compiled code the compiler chooses instead, and keeps more.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moestro.config.moe import Activation
from moestro.errors import MoestroError
from moestro.model.activations import (
    activate,
    curve,
    curve_backward,
    num_products,
    split,
    straight,
    straight_backward_,
)
from moestro.model.moe.dispatch import Dispatch
from moestro.model.ops import product_dtype


class ExpertWeights(NamedTuple):
    """Of all experts here: [E, W, H, D], [E, D, H], [E, W, H] and [E, D]; W = 2 with a gate, 1 without."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


class Experts(nn.Module):
    """A layer's experts, packed into few tensors, so that idle experts still take part in sharding."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        expert_hidden_size: int,
        implementation: Literal["auto", "reference", "grouped", "segmented"],
        activation: Activation = "swiglu",
        limit: float = 7.0,
        bias: bool = False,
    ) -> None:
        """limit: of "clamped_swiglu"."""
        super().__init__()
        products = num_products(activation)
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, products, expert_hidden_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, expert_hidden_size))
        self.gate_up_bias = nn.Parameter(torch.empty(num_experts, products, expert_hidden_size)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(num_experts, hidden_size)) if bias else None
        self.implementation, self.activation, self.limit = implementation, activation, limit
        self.down_bias_start = 0  # column of the first entry here, where tensor parallelism cuts the bias

    def forward(self, x: Tensor, plan: Dispatch) -> Tensor:
        """x: [T, D]; returns [R, D]."""
        implementation = self.implementation
        if implementation == "auto":
            implementation = "grouped" if _grouped_is_faster(x, self.down_proj) else "segmented"
        function = {"reference": reference_experts, "grouped": grouped_experts, "segmented": segmented_experts}
        down_bias = self._whole_down_bias(x.shape[1])
        weights = ExpertWeights(self.gate_up_proj, self.down_proj, self.gate_up_bias, down_bias)
        return function[implementation](x, plan, weights, self.activation, self.limit)

    def _whole_down_bias(self, hidden: int) -> Tensor | None:
        """[E, D], zero in the columns of other tp ranks: their outputs are summed, and a bias is to count once."""
        bias = self.down_bias
        if bias is None or bias.shape[1] == hidden:
            return bias
        return F.pad(bias, (self.down_bias_start, hidden - bias.shape[1] - self.down_bias_start))


def _grouped_is_faster(x: Tensor, weight: Tensor) -> bool:
    """grouped_mm has one fast kernel: bf16 on an accelerator, rows aligned to 16 bytes."""
    return x.device.type != "cpu" and x.dtype == torch.bfloat16 and all(n % 8 == 0 for n in weight.shape[1:])


def reference_experts(
    x: Tensor, plan: Dispatch, weights: ExpertWeights, kind: Activation = "swiglu", limit: float = 7.0
) -> Tensor:
    gate_up, down, gate_up_bias, down_bias = weights
    out, start = [], 0
    for expert, count in enumerate(plan.counts.tolist()):
        rows = x[plan.row_token[start : start + count]]
        products = [rows @ matrix.to(x.dtype).t() for matrix in gate_up[expert]]
        if gate_up_bias is not None:
            products = [p + bias.to(x.dtype) for p, bias in zip(products, gate_up_bias[expert], strict=True)]
        result = _plain_activation(products, kind, limit) @ down[expert].to(x.dtype).t()
        if down_bias is not None:
            result = result + down_bias[expert].to(x.dtype)
        out.append(result * plan.row_weight[start : start + count, None].to(x.dtype))
        start += count
    return torch.cat(out)


def _plain_activation(products: list[Tensor], kind: Activation, limit: float) -> Tensor:
    """As in `moestro.model.activations`, but with autograd's backward."""
    if kind == "swiglu":
        return F.silu(products[0]) * products[1]
    if kind == "geglu":
        return F.gelu(products[0]) * products[1]
    if kind == "clamped_swiglu":
        gate, up = products[0].clamp(max=limit), products[1].clamp(-limit, limit)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return F.gelu(products[0]) if kind == "gelu" else F.relu(products[0]).square()


def grouped_experts(
    x: Tensor, plan: Dispatch, weights: ExpertWeights, kind: Activation = "swiglu", limit: float = 7.0
) -> Tensor:
    if x.dtype == torch.float64 or any(n * x.element_size() % 16 for n in weights.down.shape[1:]):
        _, size, width = weights.down.shape
        raise MoestroError(
            f"experts = 'grouped' needs rows of 16 n bytes in bf16 or fp32, got a size of {size} and "
            f"expert_hidden_size = {width} in {x.dtype}; change them or set model.moe.experts = 'segmented'"
        )
    out: Tensor = GroupedExperts.apply(kind, limit, x, plan.row_token, plan.row_weight, plan.counts, *weights)
    return out


class GroupedExperts(torch.autograd.Function):
    """activation(x gate_upᵀ) · weight · downᵀ, all experts at once; rows and activation are made again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        kind: Activation,
        limit: float,
        x: Tensor,
        row_token: Tensor,
        row_weight: Tensor,
        counts: Tensor,
        gate_up: Tensor,
        down: Tensor,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
    ) -> Tensor:
        ctx.kind, ctx.limit = kind, limit
        weights = (gate_up, down, gate_up_bias, down_bias)
        if len(row_token) == 0:  # which not every kernel takes
            ctx.save_for_backward(x, row_token, row_weight, counts, x, *weights)
            return x.new_empty(0, x.shape[1])
        ends = counts.cumsum(0).to(torch.int32)
        products = grouped_mm(x[row_token], gate_up.to(x.dtype).flatten(1, 2).transpose(1, 2), ends)
        if gate_up_bias is not None:
            products.add_(gate_up_bias.to(x.dtype).flatten(1, 2)[_row_expert(ends, row_token)])
        gate, up = split(kind, products)
        hidden = activate(kind, gate, up, limit).mul_(row_weight.unsqueeze(1))
        ctx.save_for_backward(x, row_token, row_weight, ends, products, *weights)
        out = grouped_mm(hidden, down.to(x.dtype).transpose(1, 2), ends)
        if down_bias is not None:
            rows = down_bias.to(x.dtype)[_row_expert(ends, row_token)]
            out.add_(rows.mul_(row_weight.unsqueeze(1)))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, row_token, row_weight, ends, products, gate_up, down, gate_up_bias, down_bias = ctx.saved_tensors
        if len(row_token) == 0:
            given = (x, row_weight, gate_up, down, gate_up_bias, down_bias)
            grad_x, grad_row_weight, *grads = (None if t is None else torch.zeros_like(t) for t in given)
            return None, None, grad_x, None, grad_row_weight, None, *grads
        grad = grad.contiguous()  # as grouped_mm wants it; that of a sum has strides of zero
        d_hidden = grouped_mm(grad, down.to(x.dtype), ends)
        hidden, d_products, grad_row_weight = _activation_backward(
            products, row_weight, d_hidden, None, ctx.kind, ctx.limit
        )
        grad_down = grouped_mm_weight_grad(grad, hidden, ends).to(down.dtype)
        grad_gate_up_bias = grad_down_bias = None
        if down_bias is not None:
            rows = down_bias.to(x.dtype)[_row_expert(ends, row_token)]
            grad_row_weight += _row_dot(rows, grad, row_weight.dtype)
            grad_down_bias = _sum_rows(grad, row_weight.to(grad.dtype), ends).to(down_bias.dtype)
        if gate_up_bias is not None:
            ones = d_products.new_ones(len(d_products))
            grad_gate_up_bias = _sum_rows(d_products, ones, ends).to(gate_up_bias.dtype).view_as(gate_up_bias)
        grad_gate_up = grouped_mm_weight_grad(d_products, x[row_token], ends).to(gate_up.dtype).view_as(gate_up)
        d_rows = grouped_mm(d_products, gate_up.to(x.dtype).flatten(1, 2), ends)
        grad_x = torch.zeros_like(x).index_add_(0, row_token, d_rows)
        of_weights = (grad_gate_up, grad_down, grad_gate_up_bias, grad_down_bias)
        return None, None, grad_x, None, grad_row_weight, None, *of_weights


def _activation_backward(
    products: Tensor, row_weight: Tensor, d_hidden: Tensor, out: Tensor | None, kind: Activation, limit: float
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden = activation · weight [R, H] again, and the gradients of products [R, W H] and weight [R].

    out: where to put the products' gradient. d_hidden is used up.
    """
    gate, up = split(kind, products)
    curved, weight = curve(kind, gate, limit), row_weight.unsqueeze(1)
    factor = None if up is None else straight(kind, up, limit)
    hidden = curved if factor is None else curved * factor
    grad_weight = _row_dot(d_hidden, hidden, row_weight.dtype)
    d_hidden.mul_(weight)
    d_products = torch.empty_like(products) if out is None else out
    d_gate, d_up = split(kind, d_products)
    if factor is not None:
        assert up is not None
        assert d_up is not None
        d_up.copy_(straight_backward_(kind, curved.mul_(d_hidden), up, limit))
        d_hidden.mul_(factor)
    del curved, factor  # memory is at its peak here
    d_gate.copy_(curve_backward(kind, d_hidden, gate, limit))
    return hidden.mul_(weight), d_products, grad_weight


def _row_dot(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a · b of each row, summed in `dtype`: [R, n], [R, n] → [R]."""
    return torch.linalg.vecdot(a, b) if a.dtype == dtype else (a.to(dtype) * b).sum(1)


def _row_expert(ends: Tensor, row_token: Tensor) -> Tensor:
    """[R] int64, the expert of each row."""
    rows = torch.arange(len(row_token), device=ends.device, dtype=ends.dtype)
    return torch.searchsorted(ends, rows, right=True)


def _sum_rows(rows: Tensor, factors: Tensor, ends: Tensor) -> Tensor:
    """Σ factor · row of each expert, [R, n], [R] → [E, n], in a fixed order, which atomic additions have not."""
    columns = 16 // rows.element_size()  # the fewest that grouped_mm takes
    return grouped_mm_weight_grad(rows, factors.unsqueeze(1).repeat(1, columns), ends)[..., 0]


# grouped_mm's own fake kernel takes bf16 only; wrapped as one operator it can be compiled and traced in every dtype.
@torch.library.custom_op("moestro::grouped_mm", mutates_args=())
def grouped_mm(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """rows: [R, in] grouped by expert, weight: [E, in, out], ends: [E] int32 last row + 1; returns [R, out]."""
    return F.grouped_mm(rows, weight, offs=ends)


@torch.library.custom_op("moestro::grouped_mm_weight_grad", mutates_args=())
def grouped_mm_weight_grad(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """left: [R, a], right: [R, b]; returns leftᵀ right of each group, [E, a, b], zero for an expert without rows."""
    return F.grouped_mm(left.t(), right, offs=ends)


@grouped_mm.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


@grouped_mm_weight_grad.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])


def segmented_experts(
    x: Tensor, plan: Dispatch, weights: ExpertWeights, kind: Activation = "swiglu", limit: float = 7.0
) -> Tensor:
    tensors = [x, plan.row_token, plan.row_weight, plan.counts, *weights]
    if not torch.is_grad_enabled():  # tells the function to keep nothing
        tensors = [None if t is None else t.detach() for t in tensors]
    out: Tensor = SegmentedExperts.apply(kind, limit, *tensors)
    return out


class SegmentedExperts(torch.autograd.Function):
    """activation(x gate_upᵀ) · weight · downᵀ, expert by expert, with the activation made again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        kind: Activation,
        limit: float,
        x: Tensor,
        row_token: Tensor,
        row_weight: Tensor,
        counts: Tensor,
        gate_up: Tensor,
        down: Tensor,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
    ) -> Tensor:
        wide, rows, width = product_dtype(x), len(row_token), gate_up.shape[1] * gate_up.shape[2]
        ctx.sizes, ctx.kind, ctx.limit = counts.tolist(), kind, limit
        keep = any(ctx.needs_input_grad)
        products = x.new_empty(rows if keep else max(ctx.sizes), width)
        out = x.new_empty(rows, x.shape[1])
        start = 0
        for expert, size in enumerate(ctx.sizes):
            if size == 0:
                continue
            segment = slice(start, start + size)
            start += size
            weight = row_weight[segment, None].to(wide)
            matrix = _as(gate_up[expert].flatten(0, 1), x.dtype, wide).t()
            bias = None if gate_up_bias is None else _as(gate_up_bias[expert].flatten(), x.dtype, wide)
            place = products[segment if keep else slice(0, size)]
            gate, up = split(kind, _product_into(place, x[row_token[segment]].to(wide), matrix, bias))
            hidden = activate(kind, gate, up, limit).mul_(weight)
            bias = None if down_bias is None else weight * _as(down_bias[expert], x.dtype, wide)
            _product_into(out[segment], hidden, _as(down[expert], x.dtype, wide).t(), bias)
        if keep:
            ctx.save_for_backward(x, row_token, row_weight, products, gate_up, down, gate_up_bias, down_bias)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, row_token, row_weight, products, gate_up, down, gate_up_bias, down_bias = ctx.saved_tensors
        wide = product_dtype(x)
        grad_x, grad_row_weight = torch.zeros_like(x, dtype=wide), torch.empty_like(row_weight)
        grad_gate_up, grad_down = torch.empty_like(gate_up), torch.empty_like(down)
        grad_gate_up_bias = None if gate_up_bias is None else torch.empty_like(gate_up_bias)
        grad_down_bias = None if down_bias is None else torch.empty_like(down_bias)
        grads = (grad_gate_up, grad_down, grad_gate_up_bias, grad_down_bias)
        scratch = x.new_empty(max(ctx.sizes), products.shape[1], dtype=wide)
        start = 0
        for expert, size in enumerate(ctx.sizes):
            if size == 0:
                for t in grads:
                    if t is not None:
                        t[expert].zero_()
                continue
            segment = slice(start, start + size)
            start += size
            tokens, weight = row_token[segment], row_weight[segment]
            d_out = grad[segment].to(wide)
            d_hidden = d_out @ _as(down[expert], x.dtype, wide)
            hidden, d_products, grad_row_weight[segment] = _activation_backward(
                products[segment].to(wide), weight, d_hidden, scratch[:size], ctx.kind, ctx.limit
            )
            _product_into(grad_down[expert], d_out.t(), hidden)
            if grad_down_bias is not None:
                grad_row_weight[segment] += d_out @ _as(down_bias[expert], x.dtype, wide)
                grad_down_bias[expert] = weight.to(wide) @ d_out
            if grad_gate_up_bias is not None:
                grad_gate_up_bias[expert] = d_products.sum(0).view_as(grad_gate_up_bias[expert])
            _product_into(grad_gate_up[expert].flatten(0, 1), d_products.t(), x[tokens].to(wide))
            grad_x.index_add_(0, tokens, d_products @ _as(gate_up[expert].flatten(0, 1), x.dtype, wide))
        return None, None, grad_x.to(x.dtype), None, grad_row_weight, None, *grads


def _as(weight: Tensor, dtype: torch.dtype, wide: torch.dtype) -> Tensor:
    """A weight rounded to the activations' dtype, in the dtype of the product."""
    return weight.to(dtype).to(wide)


def _product_into(out: Tensor, a: Tensor, b: Tensor, plus: Tensor | None = None) -> Tensor:
    """a @ b + plus written to `out`; returned in the product's dtype, rounded to out's."""
    if out.dtype == a.dtype:
        return torch.mm(a, b, out=out) if plus is None else torch.addmm(plus, a, b, out=out)
    out.copy_(a @ b if plus is None else torch.addmm(plus, a, b))
    return out.to(a.dtype)
