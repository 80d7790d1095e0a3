"""Each distinct call of a step, made alone in a hot loop: what it takes with its operands at hand and nothing between.

Operands have the shapes, strides and dtypes of the step. Indices and masks hold what they held there, since it decides
which memory is touched; other operands hold numbers that stay harmless however often a call is repeated in place.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moestro.hardware.peak import measure_gemm_flops
from moestro.hardware.profile import Sample, Value
from moestro.measure.memory import memory_case
from moestro.measure.operands import TORCH_DTYPES
from moestro.measure.primitives import Call
from moestro.measure.step_calls import TensorRecipe, Work
from moestro.measure.timing import Case, Progress, measure_cases

ROUNDS = 2
COPY_BYTES = tuple(2**power for power in range(12, 27, 2))  # of the two arrays of each copy


@torch.no_grad()
def measure_alone(
    calls: Mapping[str, Call],
    work: Mapping[str, Work],
    device: torch.device,
    *,
    seconds_per_case: float,
    deadline: float,
    progress: Progress | None = None,
) -> tuple[dict[str, Sample], list[str]]:
    """Samples by key, and notes on calls that could not be made alone.

    calls: one of each key, all in `work`; the most important first, since none is begun after `deadline` (of
    time.perf_counter).
    """
    keys = list(calls)
    cases = [
        Case(
            call.op,
            {"number": number, "shapes": call.shapes},
            call.flops or None,
            call.bytes_moved or None,
            partial(prepare, work[key]),
        )
        for number, (key, call) in enumerate(calls.items())
    ]
    result = measure_cases(
        cases, device, rounds=ROUNDS, seconds_per_case=seconds_per_case, deadline=deadline, progress=progress
    )
    samples = {keys[int(sample.number("number"))]: sample for sample in result.samples}
    return {key: _as_sample(sample, calls[key]) for key, sample in samples.items()}, result.notes


def prepare(work: Work) -> Callable[[], object]:
    """The call with operands of its own. Those of in-place calls are ones: no repetition makes them denormal."""
    in_place = work.function._schema.is_mutable
    args, kwargs = _build(work.args, in_place), _build(work.kwargs, in_place)
    return lambda: work.function(*args, **kwargs)


def _build(value: Any, ones: bool) -> Any:
    if isinstance(value, TensorRecipe):
        return _tensor(value, ones)
    if isinstance(value, (list, tuple)):
        return type(value)(_build(item, ones) for item in value)
    return {key: _build(item, ones) for key, item in value.items()} if isinstance(value, dict) else value


def _tensor(recipe: TensorRecipe, ones: bool) -> Tensor:
    if recipe.values is not None:
        once = recipe.values[tuple(slice(None if stride else 1) for stride in recipe.stride)]  # an expanded axis
        memory = torch.empty_strided(once.shape, recipe.stride, dtype=recipe.dtype, device=recipe.device)
        return memory.copy_(once).expand(recipe.shape)
    reach = 0
    if 0 not in recipe.shape:
        reach = 1 + sum((size - 1) * stride for size, stride in zip(recipe.shape, recipe.stride, strict=True))
    memory = torch.ones(reach, dtype=recipe.dtype, device=recipe.device)
    if not ones:
        memory.uniform_(0.5, 1.0)
    return memory.as_strided(recipe.shape, recipe.stride)


def _as_sample(sample: Sample, call: Call) -> Sample:
    """With the case as `hardware.profile` has it for products, and as this module's own for everything else."""
    case: dict[str, Value]
    if call.gemm is not None:
        batch, m, n, k = call.gemm
        case = {"batch": batch, "m": m, "n": n, "k": k, "dtype": call.dtype}
        op = "gemm" if batch == 1 else "batched_gemm"
    else:
        case = {"name": call.op, "dtype": call.dtype, "shapes": call.shapes}
        op = call.kind
    return sample.model_copy(update={"op": op, "case": case})


@dataclass(frozen=True)
class Limits:
    """What the machine does at best.

    flops_per_s: of a square product, by dtype. copies: (bytes moved, bytes/s) of copies, smallest first, where the
    speed of a size is the best of that size or any larger one: what fits in a cache has a cache's speed.
    """

    flops_per_s: Mapping[str, float]
    copies: Sequence[tuple[float, float]]

    def raised(self, samples: Iterable[Sample]) -> "Limits":
        """With the rate of the fastest product among the samples, where a square one was slower."""
        rates = dict(self.flops_per_s)
        for sample in samples:
            dtype, rate = str(sample.case["dtype"]), sample.flops_per_s
            if rate is not None and sample.op in ("gemm", "batched_gemm"):
                rates[dtype] = max(rates.get(dtype, 0.0), rate)
        return replace(self, flops_per_s=rates)

    def floor_s(self, call: Call) -> float:
        """Seconds that a call cannot do without: its products at the best rate, its bytes at the speed of a copy."""
        rate = self.flops_per_s.get(call.dtype) or max(self.flops_per_s.values())
        speed = next((speed for size, speed in self.copies if size >= call.bytes_moved), self.copies[-1][1])
        return max(call.flops / rate, call.bytes_moved / speed)


def limits_of(copies: Sequence[Sample], flops_per_s: Mapping[str, float]) -> Limits:
    """copies: samples of copies of any sizes."""
    found = sorted((s.bytes_moved, s.bytes_per_s) for s in copies if s.bytes_moved and s.bytes_per_s)
    return Limits(flops_per_s, [(size, max(speed for _, speed in found[i:])) for i, (size, _) in enumerate(found)])


def measure_limits(device: torch.device, dtypes: Collection[str]) -> Limits:
    """dtypes: those of the step's products."""
    cases = [memory_case(device, "copy", size) for size in COPY_BYTES]
    copies = measure_cases(cases, device, rounds=ROUNDS, seconds_per_case=0.06).samples
    rates = {name: measure_gemm_flops(device, TORCH_DTYPES[name]) for name in dtypes if name in TORCH_DTYPES}
    return limits_of(copies, rates or {"fp32": measure_gemm_flops(device, torch.float32)})
