"""Muon: momentum, orthogonalised (Jordan et al. 2024; scaled to AdamW's update size as in arXiv 2502.16982).

`torch.optim.Muon` refuses packed experts; this one treats every leading axis as a batch of matrices, so that each
expert is orthogonalised by itself. On two-dimensional weights the two are equal (tested).
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from moestro.model.ops import cpu_has_bf16_units
from moestro.parallel.comm import Group, gather_list, rank_in, size_of

# Quintic iteration x ← a x + b x³ + c x⁵ on the singular values: drives them to about 0.7…1.2 in five steps.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.Optimizer):
    """Parameters must have two or more axes; the last two are the matrix.

    The update is lr · 0.2 · sqrt(max(rows, columns)) · orthogonal(momentum), whose root mean square is about 0.2 lr,
    with decoupled weight decay. A group of parameters with `tp_axis` 0 or 1 holds this rank's part of the rows or the
    columns of matrices that are cut among the ranks of `tp`; they are orthogonalised whole.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        newton_schulz_steps: int = 5,
        tp: Group = None,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "steps": newton_schulz_steps}
        super().__init__(params, defaults | {"tp_axis": None})
        self.tp = tp
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() < 2:
                    raise ValueError(f"Muon takes matrices, got a parameter of shape {tuple(parameter.shape)}")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure: gradients are there already
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer: Tensor = state["momentum_buffer"]
        buffer.lerp_(grad, 1 - group["momentum"])
        update = grad.lerp(buffer, group["momentum"])  # Nesterov
        whole = list(parameter.shape[-2:])
        if group["tp_axis"] is not None:
            whole[group["tp_axis"]] *= size_of(self.tp)
        update = orthogonalize_part(update, group["steps"], group["tp_axis"], self.tp)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update.to(parameter.dtype), alpha=-group["lr"] * update_scale(*whole))


def update_scale(rows: int, columns: int) -> float:
    """What an orthogonal matrix is multiplied by to have AdamW's root mean square, 0.2."""
    return 0.2 * float(max(rows, columns) ** 0.5)


def working_dtype(device: torch.device) -> torch.dtype:
    """What Newton–Schulz runs in: bf16 where the device multiplies it fast. Matrices may travel in it, too."""
    return torch.bfloat16 if device.type != "cpu" or cpu_has_bf16_units() else torch.float32


def orthogonalize_part(matrices: Tensor, steps: int, tp_axis: int | None, tp: Group) -> Tensor:
    """This rank's part of the orthogonalised whole, given its part; every rank of `tp` must call it."""
    if tp_axis is None or tp is None:
        return orthogonalize(matrices, steps)
    whole = torch.cat(gather_list(matrices.to(working_dtype(matrices.device)), tp), dim=tp_axis - 2)
    return orthogonalize(whole, steps).chunk(tp.size(), dim=tp_axis - 2)[rank_in(tp)]


def orthogonalize(matrices: Tensor, steps: int) -> Tensor:
    """Approximately U Vᵀ of each matrix U S Vᵀ in [..., rows, columns], by Newton–Schulz iteration.

    Runs in the device's `working_dtype`. A zero matrix (an idle expert) stays zero.
    """
    x = matrices.reshape(-1, *matrices.shape[-2:]).to(working_dtype(matrices.device))
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.transpose(1, 2)
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    if x.device.type == "cpu":  # batched products run at a fifth of the rate of plain ones there
        x = torch.stack([_newton_schulz(matrix, steps) for matrix in x.unbind(0)])
    else:
        x = _newton_schulz(x, steps)
    if tall:
        x = x.transpose(1, 2)
    return x.reshape(matrices.shape)


def _newton_schulz(x: Tensor, steps: int) -> Tensor:
    """x: [rows, columns] or [batch, rows, columns], rows <= columns, Frobenius norm at most 1."""
    a, b, c = COEFFICIENTS
    addmm = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = addmm(x, addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x
