"""Cross-entropy straight from hidden states, without ever holding all logits."""

from typing import Any

import torch
from torch import Tensor

from moestro.model.ops import product_dtype

IGNORE = -100  # label of positions that are not predicted


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, scale: float = 1.0) -> Tensor:
    """scale · Σ over predicted tokens of -log softmax(hidden @ weight.T)[label], in fp32.

    Works through blocks of tokens and computes the gradients in the forward pass, so that no block's logits outlive
    it: three matrix products in all, as many as the plain way, and nothing computed twice.

    Args:
        hidden: [..., D]; weight: [V, D]; labels: [...] int64, IGNORE where nothing is predicted.
    """
    if not torch.is_grad_enabled():  # a Function sees requires_grad, not whether anyone wants gradients
        hidden, weight = hidden.detach(), weight.detach()
    result: Tensor = _LinearCrossEntropy.apply(hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1), scale)
    return result


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, scale: float) -> Tensor:
        wide = product_dtype(hidden)
        head = weight.detach().to(hidden.dtype).to(wide)
        total = torch.zeros((), device=hidden.device, dtype=torch.promote_types(hidden.dtype, torch.float32))
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=total.dtype) if need_weight else None
        for start in range(0, len(hidden), block := _block_rows(hidden, weight)):
            rows, label = hidden[start : start + block].detach().to(wide), labels[start : start + block]
            logits = (rows @ head.t()).to(total.dtype)
            predicted = (label != IGNORE).to(total.dtype)
            label = label.clamp_min(0).unsqueeze(1)
            log_probs = torch.log_softmax(logits, -1)
            total -= (log_probs.gather(1, label).squeeze(1) * predicted).sum()
            if grad_hidden is None and grad_weight is None:
                continue
            # d loss / d logits = softmax - one-hot, zero where nothing is predicted.
            grad = log_probs.exp_()
            grad.scatter_add_(1, label, grad.new_full(label.shape, -1.0))
            grad = grad.mul_((predicted * scale).unsqueeze(1)).to(wide)
            if grad_hidden is not None:
                grad_hidden[start : start + block] = grad @ head
            if grad_weight is not None:
                grad_weight.addmm_(grad.t(), rows) if wide == total.dtype else grad_weight.add_(grad.t() @ rows)
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        return total * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return _times(grad_hidden, grad), _times(grad_weight, grad), None, None


def _times(tensor: Tensor | None, factor: Tensor) -> Tensor | None:
    # Nearly always the factor is 1; asking is free on a CPU and would stall an accelerator.
    if tensor is None or (factor.device.type == "cpu" and factor.item() == 1):
        return tensor
    return tensor * factor.to(tensor.dtype)


def _block_rows(hidden: Tensor, weight: Tensor) -> int:
    """Rows whose fp32 logits take 16 MiB on a CPU (a few times its cache), 256 MiB on an accelerator."""
    elements = 2**22 if hidden.device.type == "cpu" else 2**26
    return max(elements // weight.shape[0], 64)
