"""The fastest shape of a family under a budget: as many parameters, all and active, in other widths and depths.

A preset is scaled until it meets the budget; that is the naive shape. Shapes of as many parameters around it, with
aligned widths, are then priced, the fastest first. What a shape is worth beside its parameters (depth against width) is
not predicted: `ratios` bounds how far it may be from the preset's, within which losses hardly differ (2001.08361).
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import exp, log
from typing import Literal

from pydantic import ValidationError

from moestro.config.counts import Counts, count
from moestro.config.model import ModelConfig
from moestro.config.plan import Plan, Workload, misfits
from moestro.errors import MoestroError
from moestro.graph.count import count_step
from moestro.plan.alignment import RULE, Alignment, Priced, price_shape
from moestro.plan.shapes import changed, multiple, scaled
from moestro.predict.memory import memory_of
from moestro.predict.service import WIDTHS
from moestro.predict.serving import decode_step
from moestro.predict.target import Target

TOLERANCE = 0.03  # of parameters, all and active, between shapes that are compared
SMALLEST, LARGEST = 1 / 64, 64.0  # of a preset, as factors of its widths
ROUNDS = 30
HIDDEN_PERCENT = range(70, 146, 5)  # of the naive shape's
FINER = (1, 2, 4)  # times as many experts and choices, of as much less width; never coarser, which learns less
WIDER = (0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 2.0)  # width of a feed-forward over hidden size, of the preset's ratio

Kind = Literal["params", "flops", "latency", "memory"]


@dataclass(frozen=True)
class Budget:
    """limit: parameters; training FLOPs of a token; seconds of a decoding step; bytes of the fullest device."""

    kind: Kind
    limit: float
    batch: int = 1  # sequences that decode together
    context: int = 4096  # tokens in each

    def __post_init__(self) -> None:
        if not 0 < self.limit < float("inf"):
            raise MoestroError(f"a budget of {self.limit:g} holds no model; give a number above zero")


@dataclass(frozen=True)
class Shape:
    """spent: of the budget, in its unit."""

    model: ModelConfig
    counts: Counts
    priced: Priced
    spent: float
    decode_s: float  # floor, at the budget's batch and context


@dataclass(frozen=True)
class Found:
    """naive: the preset scaled without regard to the device. rounded: the same with its widths rounded. best: fastest
    first, all within the budget. tried: shapes priced."""

    naive: Shape
    rounded: Shape
    best: tuple[Shape, ...]
    tried: int


def search_shapes(
    workload: Workload, plan: Plan, target: Target, budget: Budget, alignment: Alignment = RULE,
    ratios: float = 1.5, keep: int = 8,
) -> Found:  # fmt: skip
    """workload: its model is the preset. ratios: how many times hidden size over layers may differ from the preset's.

    Raises:
        MoestroError: no model of this family meets the budget, or none of its shapes fits the plan.
    """
    if workload.model.moe is not None and not isinstance(workload.model.moe.top_k, int):
        raise MoestroError("layers with different numbers of chosen experts cannot be scaled; set one moe.top_k")
    step = max(alignment.step_of(workload.precision), 64)
    search = _Search(workload, plan, target, budget, alignment)
    factor = search.factor()
    naive = search.shape(scaled(workload.model, factor))
    rounded = search.shape(scaled(workload.model, factor, step))
    if naive is None or rounded is None:
        raise MoestroError("the scaled model does not fit the plan: " + "; ".join(search.misfits(factor)))
    models = {model.model_dump_json(): model for model in (*_around(naive.model, step, ratios), rounded.model)}
    alike = [model for model in models.values() if _alike(count(model, workload.seq_len), naive.counts)]
    shapes = [shape for model in alike if (shape := search.shape(model)) is not None and search.affords(shape)]
    best = sorted(shapes, key=lambda shape: -shape.priced.tokens_per_s_per_device)
    return Found(naive, rounded, tuple(best[:keep]), len(alike))


@dataclass
class _Search:
    workload: Workload
    plan: Plan
    target: Target
    budget: Budget
    alignment: Alignment

    def factor(self) -> float:
        """By which the preset's widths and depth come closest to the budget from below, by bisection in log."""
        low, high = log(SMALLEST), log(LARGEST)
        for end, wrong, word in ((low, True, "smallest"), (high, False, "largest")):
            if (self._spent(scaled(self.workload.model, exp(end))) > self.budget.limit) is wrong:
                raise MoestroError(f"the budget is beyond the {word} model that is looked at ({exp(end):g} times)")
        for _ in range(ROUNDS):
            middle = (low + high) / 2
            under = self._spent(scaled(self.workload.model, exp(middle))) <= self.budget.limit
            low, high = (middle, high) if under else (low, middle)
        return exp(low)

    def _spent(self, model: ModelConfig) -> float:
        budget = self.budget
        if budget.kind == "params":
            return float(count(model, self.workload.seq_len).total_params)
        if budget.kind == "flops":
            return count(model, self.workload.seq_len).train_flops_per_token
        if budget.kind == "latency":
            return self._decode_s(model)
        workload = self.workload.model_copy(update={"model": model})
        plan = self.plan.model_copy(update={"layers_per_stage": None})
        return memory_of(count_step(workload, plan), workload, plan, self.target.place.device)[0].needed

    def _decode_s(self, model: ModelConfig) -> float:
        memory = self.target.place.device.memory.gbps
        gbps = memory.nominal or memory.achieved
        if gbps is None:
            raise MoestroError(f"nobody knows the memory bandwidth of {self.target.place.device.id}")
        width = WIDTHS.get(self.workload.precision, 2.0)
        return decode_step(model, self.budget.batch, gbps * 1e9, self.budget.context, width).floor_s

    def misfits(self, factor: float) -> list[str]:
        model = scaled(self.workload.model, factor)
        return misfits(self.workload.model_copy(update={"model": model}), self.plan)

    def shape(self, model: ModelConfig) -> Shape | None:
        """None: it does not fit the plan."""
        workload = self.workload.model_copy(update={"model": model})
        if misfits(workload, self.plan):
            return None
        priced = price_shape(workload, self.plan, self.target, self.alignment)
        counts = count(model, workload.seq_len)
        spent = priced.needed_bytes if self.budget.kind == "memory" else self._spent(model)
        return Shape(model, counts, priced, spent, self._decode_s(model))

    def affords(self, shape: Shape) -> bool:
        slack = 1 + (TOLERANCE if self.budget.kind in ("params", "flops") else 0.0)
        return shape.spent <= self.budget.limit * slack


def _alike(own: Counts, other: Counts) -> bool:
    """Whether both have as many parameters, all and active."""
    pairs = (own.total_params, other.total_params), (own.active_params, other.active_params)
    return all(abs(a / b - 1) <= TOLERANCE for a, b in pairs)


def _around(model: ModelConfig, step: int, ratios: float) -> Iterator[ModelConfig]:
    """Shapes with about as many parameters as `model`: hidden sizes, splits of experts, widths; depth follows."""
    total = count(model, 1).total_params
    aspect = model.hidden_size / model.num_layers
    hiddens = {multiple(model.hidden_size * percent / 100, step) for percent in HIDDEN_PERCENT}
    for hidden in sorted(hiddens):
        for finer in FINER if model.moe is not None else (1,):
            for wider in WIDER:
                with suppress(ValidationError, ZeroDivisionError):
                    one = _with(model, hidden, finer, wider, step)
                    deep = _deep(one, total)
                    if deep and 1 / ratios <= deep.hidden_size / deep.num_layers / aspect <= ratios:
                        yield deep


def _with(model: ModelConfig, hidden: int, finer: int, wider: float, step: int) -> ModelConfig:
    """Feed-forwards of another width and split, and heads to match the hidden size."""
    ratio = hidden / model.hidden_size
    group = model.num_heads // model.resolved_num_kv_heads
    kv_heads = max(1, round(model.resolved_num_kv_heads * ratio))
    values: dict[str, object] = {"hidden_size": hidden, "num_heads": group * kv_heads, "num_kv_heads": kv_heads}
    if model.mla is None:
        values["head_dim"] = model.resolved_head_dim
    if model.intermediate_size is not None:
        values["intermediate_size"] = multiple(model.intermediate_size * ratio * wider, step)
    if (moe := model.moe) is not None:
        assert isinstance(moe.top_k, int)
        width = moe.resolved_expert_hidden_size * ratio * wider / finer
        split = {name: getattr(moe, name) * finer for name in ("num_experts", "top_k", "num_shared_experts")}
        split["expert_hidden_size"] = multiple(width, step) * moe.granularity
        values["moe"] = moe.model_copy(update=split)
    return changed(model, values)


def _deep(model: ModelConfig, total: int) -> ModelConfig | None:
    """With the number of layers that comes closest to `total` parameters, by what two and three of them have."""
    moe = model.moe
    first, every = (moe.first_k_dense, moe.every_n_layers) if moe is not None else (0, 1)
    few, more = (changed(model, {"num_layers": first + n * every}) for n in (1, 2))
    small = count(few, 1).total_params
    each = count(more, 1).total_params - small
    times = 1 + round((total - small) / each)
    return changed(model, {"num_layers": first + times * every}) if times >= 1 else None
