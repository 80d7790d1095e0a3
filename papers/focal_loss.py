"""The focal loss of detectors (Lin et al., 1708.02002), composed of plain operations and as one function of autograd.

Σ over anchors and classes of weight · (1 - p_t)^γ · -log p_t, where p_t is σ(logit) for an anchor's own class and
1 - σ(logit) for the others, and weight is α and 1 - α. With s = -logit of the own class and s = logit of the others,
1 - p_t = σ(s) and -log p_t = softplus(s), so that a term is weight · σ(s)^γ · softplus(s).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def composed(logits: Tensor, targets: Tensor, alpha: float = 0.25, gamma: float = 2.0) -> Tensor:
    """The definition. logits [anchors, classes]; targets: the same shape, 1 at an anchor's class, else 0."""
    p = torch.sigmoid(logits)
    cross_entropy = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    p_t = p * targets + (1 - p) * (1 - targets)
    weight = alpha * targets + (1 - alpha) * (1 - targets)
    return (weight * (1 - p_t) ** gamma * cross_entropy).sum()


def focal_loss(logits: Tensor, labels: Tensor, alpha: float = 0.25, gamma: float = 2.0) -> Tensor:
    """The same, with its own backward. labels [anchors]: the class of each, or -1 for background."""
    result: Tensor = _FocalLoss.apply(logits, labels, alpha, gamma)
    return result


class _FocalLoss(torch.autograd.Function):
    """All terms as if every class were another's, then those of the anchors' own classes put right: they are few."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, alpha: float, gamma: float) -> Tensor:
        probability, surprise = torch.sigmoid(logits), F.softplus(logits)
        others = torch.dot(probability.pow(gamma).view(-1), surprise.view(-1))
        rows = (labels >= 0).nonzero().squeeze(1)
        own = labels[rows]
        picked = logits[rows, own]
        wrong = (probability[rows, own] ** gamma * surprise[rows, own]).sum()
        right = (torch.sigmoid(-picked) ** gamma * F.softplus(-picked)).sum()
        ctx.save_for_backward(probability, surprise, rows, own, picked)
        ctx.alpha, ctx.gamma = alpha, gamma
        return (1 - alpha) * (others - wrong) + alpha * right

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        probability, surprise, rows, own, picked = ctx.saved_tensors
        # d/ds σ^γ softplus = σ^γ (γ (1 - σ) softplus + σ)
        out = (1 - probability).mul_(surprise).mul_(ctx.gamma).add_(probability)
        out.mul_(probability.pow(ctx.gamma)).mul_(grad * (1 - ctx.alpha))
        q = torch.sigmoid(-picked)
        slope = q**ctx.gamma * (ctx.gamma * (1 - q) * F.softplus(-picked) + q)
        out[rows, own] = -ctx.alpha * grad * slope
        return out, None, None, None
