"""Stage three: SwiGLU experts over rows grouped by expert, in three interchangeable implementations.

Each takes the tokens x [T, D], a Dispatch of R rows, and the packed weights gate_up [E, 2, H, D], down [E, D, H]; each
returns the rows' outputs [R, D], already multiplied by their gate weights. The gate and up projections are stacked so
that one product serves both; as the last two axes are a matrix each, an optimizer that works on matrices sees them
apart, and flattening axes 1 and 2 gives the fused layout of Hugging Face.

* reference: a plain loop, the definition the others are tested against.
* segmented: works through the experts one at a time, so that a block of rows is gathered, multiplied and activated
  while it is in cache. Fastest on CPUs.
* grouped: `torch.nn.functional.grouped_mm`, one kernel for all experts. For GPUs.

The last two keep x, the gate and up products [R, 2H] and the index lists for backward, no gathered rows: these and the
silu are made again (arXiv 2601.05296). The reference keeps what autograd keeps, about twice as much or more. In
compiled code the compiler chooses instead, and keeps more.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moestro.errors import MoestroError
from moestro.model.moe.dispatch import Dispatch
from moestro.model.ops import product_dtype


class Experts(nn.Module):
    """A layer's experts, packed into two tensors, so that idle experts still take part in sharding."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        expert_hidden_size: int,
        implementation: Literal["auto", "reference", "grouped", "segmented"],
    ) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2, expert_hidden_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, expert_hidden_size))
        self.implementation = implementation

    def forward(self, x: Tensor, plan: Dispatch) -> Tensor:
        """x: [T, D]; returns [R, D]."""
        weights: tuple[Tensor, Tensor] = (self.gate_up_proj, self.down_proj)
        implementation = self.implementation
        if implementation == "auto":
            implementation = "grouped" if _grouped_is_faster(x, self.down_proj) else "segmented"
        if implementation == "reference":
            return reference_experts(x, plan, *weights)
        if implementation == "grouped":
            return grouped_experts(x, plan, *weights)
        if not torch.is_grad_enabled():
            x, weights = x.detach(), (weights[0].detach(), weights[1].detach())
        result: Tensor = SegmentedExperts.apply(x, plan.row_token, plan.row_weight, plan.counts, *weights)
        return result


def _grouped_is_faster(x: Tensor, weight: Tensor) -> bool:
    """grouped_mm has one fast kernel: bf16 on an accelerator, rows aligned to 16 bytes."""
    return x.device.type != "cpu" and x.dtype == torch.bfloat16 and all(n % 8 == 0 for n in weight.shape[1:])


def reference_experts(x: Tensor, plan: Dispatch, gate_up: Tensor, down: Tensor) -> Tensor:
    out, start = [], 0
    for expert, count in enumerate(plan.counts.tolist()):
        rows = x[plan.row_token[start : start + count]]
        gate, up = gate_up[expert].to(x.dtype)
        hidden = F.silu(rows @ gate.t()) * (rows @ up.t())
        weight = plan.row_weight[start : start + count, None].to(x.dtype)
        out.append((hidden @ down[expert].to(x.dtype).t()) * weight)
        start += count
    return torch.cat(out)


def grouped_experts(x: Tensor, plan: Dispatch, gate_up: Tensor, down: Tensor) -> Tensor:
    if x.dtype == torch.float64 or any(n * x.element_size() % 16 for n in down.shape[1:]):
        raise MoestroError(
            f"experts = 'grouped' needs rows of 16 n bytes in bf16 or fp32, got hidden_size = {down.shape[1]} "
            f"and expert_hidden_size = {down.shape[2]} in {x.dtype}; change them or set model.moe.experts = 'segmented'"
        )
    out: Tensor = GroupedExperts.apply(x, plan.row_token, plan.row_weight, plan.counts, gate_up, down)
    return out


class GroupedExperts(torch.autograd.Function):
    """silu(x gateᵀ) · (x upᵀ) · weight · downᵀ, all experts at once; rows and silu are made again in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, row_token: Tensor, row_weight: Tensor, counts: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        if len(row_token) == 0:  # which not every kernel takes
            ctx.save_for_backward(x, row_token, row_weight, counts, x, gate_up, down)
            return x.new_empty(0, x.shape[1])
        ends = counts.cumsum(0).to(torch.int32)
        gates_ups = grouped_mm(x[row_token], gate_up.to(x.dtype).flatten(1, 2).transpose(1, 2), ends)
        gate, up = gates_ups.chunk(2, dim=1)
        hidden = F.silu(gate).mul_(up).mul_(row_weight.unsqueeze(1))
        ctx.save_for_backward(x, row_token, row_weight, ends, gates_ups, gate_up, down)
        return grouped_mm(hidden, down.to(x.dtype).transpose(1, 2), ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, row_token, row_weight, ends, gates_ups, gate_up, down = ctx.saved_tensors
        if len(row_token) == 0:
            nothing = (torch.zeros_like(t) for t in (x, row_weight, gate_up, down))
            grad_x, grad_row_weight, grad_gate_up, grad_down = nothing
            return grad_x, None, grad_row_weight, None, grad_gate_up, grad_down
        grad = grad.contiguous()  # as grouped_mm wants it; that of a sum has strides of zero
        d_hidden = grouped_mm(grad, down.to(x.dtype), ends)
        hidden, d_gates_ups, grad_row_weight = _activation_backward(gates_ups, row_weight, d_hidden)
        grad_down = grouped_mm_weight_grad(grad, hidden, ends).to(down.dtype)
        grad_gate_up = grouped_mm_weight_grad(d_gates_ups, x[row_token], ends).to(gate_up.dtype)
        d_rows = grouped_mm(d_gates_ups, gate_up.to(x.dtype).flatten(1, 2), ends)
        grad_x = torch.zeros_like(x).index_add_(0, row_token, d_rows)
        return grad_x, None, grad_row_weight, None, grad_gate_up.view_as(gate_up), grad_down


def _activation_backward(gates_ups: Tensor, row_weight: Tensor, d_hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """hidden = silu(gate) · up · weight [R, H] again, and the gradients of gate and up [R, 2H] and of weight [R].

    d_hidden is used up.
    """
    gate, up = gates_ups.chunk(2, dim=1)
    weight = row_weight.unsqueeze(1)
    silu = F.silu(gate)
    hidden = silu * up
    grad_weight = (d_hidden.to(row_weight.dtype) * hidden).sum(1)
    d_hidden.mul_(weight)
    d_gates_ups = torch.empty_like(gates_ups)
    d_gate, d_up = d_gates_ups.chunk(2, dim=1)
    d_up.copy_(silu.mul_(d_hidden))
    d_gate.copy_(torch.ops.aten.silu_backward(d_hidden.mul_(up), gate))
    return hidden.mul_(weight), d_gates_ups, grad_weight


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


class SegmentedExperts(torch.autograd.Function):
    """silu(x gateᵀ) · (x upᵀ) · weight · downᵀ, expert by expert, with the silu computed again in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, row_token: Tensor, row_weight: Tensor, counts: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        wide, rows, width = product_dtype(x), len(row_token), down.shape[2]
        ctx.sizes = sizes = counts.tolist()
        keep = any(ctx.needs_input_grad)
        gates_ups = x.new_empty(rows if keep else max(sizes), 2 * width)
        out = x.new_empty(rows, x.shape[1])
        start = 0
        for size, w_gate_up, w_down in zip(sizes, gate_up.flatten(1, 2).unbind(0), down.unbind(0), strict=True):
            if size == 0:
                continue
            segment = slice(start, start + size)
            start += size
            place = gates_ups[segment if keep else slice(0, size)]
            gate_up_rows = _product_into(place, x[row_token[segment]].to(wide), _as(w_gate_up, x.dtype, wide).t())
            hidden = F.silu(gate_up_rows[:, :width]).mul_(gate_up_rows[:, width:])
            hidden.mul_(row_weight[segment, None].to(wide))
            _product_into(out[segment], hidden, _as(w_down, x.dtype, wide).t())
        if keep:
            ctx.save_for_backward(x, row_token, row_weight, gates_ups, gate_up, down)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, row_token, row_weight, gates_ups, gate_up, down = ctx.saved_tensors
        wide, width = product_dtype(x), down.shape[2]
        grad_x = torch.zeros_like(x, dtype=wide)
        grad_row_weight = torch.empty_like(row_weight)
        grad_gate_up, grad_down = torch.empty_like(gate_up), torch.empty_like(down)
        scratch = x.new_empty(max(ctx.sizes), 2 * width, dtype=wide)
        start = 0
        for expert, size in enumerate(ctx.sizes):
            if size == 0:
                grad_gate_up[expert].zero_()
                grad_down[expert].zero_()
                continue
            segment = slice(start, start + size)
            start += size
            tokens, weight = row_token[segment], row_weight[segment, None].to(wide)
            gate, up = gates_ups[segment].to(wide).chunk(2, dim=1)
            d_out, d_gate_up = grad[segment].to(wide), scratch[:size]
            silu = F.silu(gate)
            hidden = silu * up
            d_hidden = d_out @ _as(down[expert], x.dtype, wide)
            grad_row_weight[segment] = torch.linalg.vecdot(d_hidden, hidden)
            _product_into(grad_down[expert], d_out.t(), hidden.mul_(weight))
            d_hidden.mul_(weight)
            torch.mul(silu, d_hidden, out=d_gate_up[:, width:])
            d_gate_up[:, :width] = torch.ops.aten.silu_backward(d_hidden.mul_(up), gate)
            _product_into(grad_gate_up[expert].flatten(0, 1), d_gate_up.t(), x[tokens].to(wide))
            grad_x.index_add_(0, tokens, d_gate_up @ _as(gate_up[expert].flatten(0, 1), x.dtype, wide))
        return grad_x.to(x.dtype), None, grad_row_weight, None, grad_gate_up, grad_down


def _as(weight: Tensor, dtype: torch.dtype, wide: torch.dtype) -> Tensor:
    """A weight rounded to the activations' dtype, in the dtype of the product."""
    return weight.to(dtype).to(wide)


def _product_into(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """a @ b written to `out`; returned in the product's dtype, rounded to out's."""
    if out.dtype == a.dtype:
        return torch.mm(a, b, out=out)
    out.copy_(a @ b)
    return out.to(a.dtype)
