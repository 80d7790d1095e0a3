"""Autocast for the virtual device, for which PyTorch has no rules: the lists of CUDA's.

Products run in the lower precision, sums and soft-maxes in fp32, and the rest as its inputs are. Unlike PyTorch's own,
a weight that is used twice is cast twice.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from moestro.graph.trace.device import NAME

LOWER = (
    "linear", "matmul", "mm", "mv", "bmm", "addmm", "addbmm", "baddbmm", "einsum", "prelu", "conv1d", "conv2d",
    "conv3d", "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "_grouped_mm", "convolution",
)  # fmt: skip
FP32 = (
    "softmax.int", "log_softmax.int", "_softmax", "_log_softmax", "layer_norm", "group_norm", "cross_entropy_loss",
    "nll_loss", "nll_loss_nd", "mse_loss", "l1_loss", "smooth_l1_loss", "kl_div", "binary_cross_entropy_with_logits",
    "exp", "log", "log2", "log10", "log1p", "expm1", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "rsqrt",
    "reciprocal", "softplus", "prod", "prod.dim_int", "sum", "sum.dim_IntList", "cumsum", "cumprod", "norm.Scalar",
    "norm.ScalarOpt_dim", "cosine_similarity", "cdist", "logsumexp",
)  # fmt: skip
_kept: list[torch.library.Library] = []  # rules last as long as their library


def autocast_rules() -> None:
    """Once for the life of the process."""
    if _kept:
        return
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    operations = torch.library.Library("aten", "IMPL")
    for names, lowers in ((LOWER, True), (FP32, False)):
        for name in names:
            packet, _, overload = name.partition(".")
            operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
            operations.impl(name, _rule(operation, lowers), "AutocastPrivateUse1")
    _kept.extend((everything, operations))


def _rule(operation: Any, lowers: bool) -> Callable[..., Any]:
    def cast(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype == torch.float64:
            return value
        return value.to(torch.get_autocast_dtype(NAME) if lowers else torch.float32)

    def rule(*args: Any, **kwargs: Any) -> Any:
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return operation(*tree_map(cast, args), **tree_map(cast, kwargs))

    return rule
