"""A linter of shapes: what of a model's sizes a device does not like, and how much of a step that costs.

Findings come of two kinds. Those of the *shape* are the architecture's: each is held against a twin with that one size
mended, predicted in the same way, and `loss` is how much longer the step takes for the same work. Those of the *batch*
go away with more tokens in a micro-batch (or devices that reach their rate earlier); their loss is what the step would
be shorter by if the products concerned ran as large ones do.

Rules: arXiv 2401.14489, where the step of alignment and the knee are each device's own.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from pydantic import ValidationError

from moestro.config.model import ModelConfig
from moestro.config.plan import Plan, Workload, misfits
from moestro.errors import MoestroError
from moestro.graph.count import count_step
from moestro.graph.words import Kernel
from moestro.hardware.curves.gemm import GemmCurve
from moestro.plan.alignment import RULE, Alignment, Priced, price_shape
from moestro.plan.shapes import HEAD_DIMS, Width, is_gated_width, multiple, widths_of, with_head_dim, with_width
from moestro.predict.target import Target

VOCABULARY_STEP = 64
HEAD_STEP = 64
NEAR = 0.03  # how far from a width twins are looked for
LEAST_SHARE = 0.01  # of a step, below which a product is not told of
FULL_WAVES = 0.9
KNEE_SHARE = 0.9  # of the best rate

Rule = Literal["alignment", "vocabulary", "heads", "layers", "knee", "waves", "tokens per expert"]


@dataclass(frozen=True)
class Finding:
    """loss: share by which the step is longer than it need be. twin: what it was held against."""

    kind: Literal["shape", "batch"]
    rule: Rule
    what: str
    advice: str
    loss: float
    twin: str = ""


@dataclass(frozen=True)
class Product:
    """A matrix product of the layer that a step has most of, forward. m: rows (of one expert); groups: experts.

    share: of the step that this product's part, which the backward pass repeats twice, takes. of_best: its rate over
    that of the same widths with very many rows. waves: share of the units kept busy, by the model of the curve.
    """

    part: str
    name: str
    groups: int
    m: float
    n: int
    k: int
    flops: float
    seconds: float
    share: float
    of_best: float
    waves: float
    slower: float = 1.0


@dataclass(frozen=True)
class Lint:
    """knee_flops: work of a product from which the device's rate is near its best; basis: where that is from."""

    findings: tuple[Finding, ...]
    products: tuple[Product, ...]
    priced: Priced
    knee_flops: float
    basis: str

    def of(self, kind: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.kind == kind]


def lint_shape(workload: Workload, plan: Plan, target: Target, alignment: Alignment = RULE) -> Lint:
    """workload: its model's vocab_size resolved.

    Raises:
        MoestroError: the plan does not fit, or the device does not compute in the precision.
    """
    priced = price_shape(workload, plan, target, alignment)
    held = _Twins(workload, plan, target, alignment, priced)
    curve = target.curves.product(_dtype(workload))
    published = target.place.device.knee_gflop.best
    knee = published * 1e9 if published else curve.knee_flops(KNEE_SHARE)
    products = products_of(workload, plan, target, priced, alignment)
    findings = [*_widths(held), *_heads(held), *_layers(held), *_batch(products, knee)]
    basis = "published" if published else f"curve of {curve.basis}"
    return Lint(tuple(sorted(findings, key=lambda f: (f.kind == "batch", -f.loss))), products, priced, knee, basis)


def _dtype(workload: Workload) -> str:
    return workload.precision


# Findings of the shape.


@dataclass
class _Twins:
    workload: Workload
    plan: Plan
    target: Target
    alignment: Alignment
    own: Priced

    def loss(self, model: ModelConfig, same_work: bool = False) -> float | None:
        """How much longer the own step takes than that of the twin `model` would for the same model FLOPs.

        same_work: the twin's further FLOPs are of no use (a padded vocabulary). None: the twin does not fit the plan.
        """
        workload = self.workload.model_copy(update={"model": model})
        if misfits(workload, self.plan):
            return None
        with suppress(MoestroError):
            twin = price_shape(workload, self.plan, self.target, self.alignment)
            work = 1.0 if same_work else twin.model_flops / self.own.model_flops
            return self.own.step_s / twin.step_s * work - 1
        return None


def _widths(held: _Twins) -> Iterator[Finding]:
    model = held.workload.model
    for width in widths_of(held.workload, held.plan):
        vocabulary = width.key == "vocab_size"
        step = VOCABULARY_STEP if vocabulary else held.alignment.step_of(_dtype(held.workload))
        if vocabulary and held.alignment.step is not None:
            step = held.alignment.step
        if width.size % (step * width.cut) == 0:
            continue
        best = _best_width(held, width, step)
        loss, size = best if best is not None else (0.0, multiple(width.size, step * width.cut))
        over = f" over {width.cut} ranks" if width.cut > 1 else ""
        hint = ""
        if is_gated_width(model, width) and abs(width.size - 8 * model.hidden_size / 3) <= 1:
            hint = " (8·h/3, which is seldom aligned)"
        yield Finding(
            "shape",
            "vocabulary" if vocabulary else "alignment",
            f"{width.key} = {width.size:,}{over} is no multiple of {step * width.cut}{hint}",
            f"{width.key} = {size:,}",
            max(0.0, loss),
            f"{width.key} = {size}",
        )


def _best_width(held: _Twins, width: Width, step: int) -> tuple[float, int] | None:
    """The aligned width near the own one against which the own one loses most, and that loss."""
    vocabulary = width.key == "vocab_size"
    found = []
    for size in _near(width, step, vocabulary):
        with suppress(ValidationError):
            loss = held.loss(with_width(held.workload.model, width.key, size), same_work=vocabulary)
            if loss is not None:
                found.append((loss, size))
    return max(found, default=None)


def _near(width: Width, step: int, only_more: bool) -> list[int]:
    """Multiples of the step and of twice the step around the width; the nearest ones where none is near."""
    sizes = set()
    for each in (step * width.cut, 2 * step * width.cut):
        above = ceil(width.size / each) * each
        sizes |= {above, above - each}
    least = width.size if only_more else 1
    sizes = {size for size in sizes if size >= least}
    near = [size for size in sizes if abs(size / width.size - 1) <= NEAR]
    return sorted(near or sizes)


def _heads(held: _Twins) -> Iterator[Finding]:
    model = held.workload.model
    if model.mla is None and model.resolved_head_dim % HEAD_STEP:
        yield _head_size(held)


def _head_size(held: _Twins) -> Finding:
    model = held.workload.model
    found = []
    for head_dim in HEAD_DIMS:
        with suppress(ValidationError):
            twin = with_head_dim(model, head_dim)
            loss = None if twin is None else held.loss(twin)
            if twin is not None and loss is not None:
                found.append((loss, twin))
    loss, twin = max(found, key=lambda one: one[0], default=(0.0, None))
    advice = "head_dim = 64 or 128"
    if twin is not None:
        advice = f"num_heads = {twin.num_heads}, num_kv_heads = {twin.num_kv_heads}: head_dim = {twin.head_dim}"
    padded = held.alignment.padded_head(model.resolved_head_dim)
    hint = f"; kernels pad it to {padded}" if padded != model.resolved_head_dim else ""
    what = f"head_dim = {model.resolved_head_dim} is no multiple of {HEAD_STEP}{hint}"
    return Finding("shape", "heads", what, advice, max(0.0, loss), advice if twin is not None else "")


def _layers(held: _Twins) -> Iterator[Finding]:
    model, stages = held.workload.model, held.plan.pp * held.plan.vpp
    if model.num_layers % stages == 0 or held.plan.layers_per_stage is not None:
        return
    layers = multiple(model.num_layers, stages)
    with suppress(ValidationError):
        loss = held.loss(model.model_copy(update={"num_layers": layers}))
        if loss is not None and loss <= 0:  # the stage with a layer less has the head
            return
        what = f"num_layers = {model.num_layers} over {stages} stages: some have one more, and the others wait"
        yield Finding(
            "shape", "layers", what, f"num_layers = {layers}", max(0.0, loss or 0.0), f"num_layers = {layers}"
        )


# Products, and findings of the batch.


def products_of(
    workload: Workload, plan: Plan, target: Target, priced: Priced, alignment: Alignment = RULE
) -> tuple[Product, ...]:  # fmt: skip
    """Of the layer that comes most often, those that take LEAST_SHARE of the step; and the head's."""
    graph = count_step(workload, plan)
    constants = target.constants_for(workload, plan.world_size)
    runs = [run for stage in graph.stages for run in stage.pieces]
    heads, layers = (
        [run for run in runs if any(node.part == part for node in run.piece.forward)] for part in ("head", "attention")
    )
    most = max(layers, key=lambda run: run.times)
    found = []
    for run in dict.fromkeys((most, *heads[-1:])):
        for node in run.piece.forward:
            if not isinstance(node, Kernel) or node.op not in ("gemm", "grouped_gemm") or node.part == "router":
                continue
            own = _product(node, target.curves.product(node.dtype))
            factor = constants.grouped if node.op == "grouped_gemm" else constants.gemm
            slower = max(alignment.factor(width, node.dtype) for width in (own.n, own.k))
            # Forward, gradients of inputs, gradients of weights.
            times = 3 * node.times * run.times * graph.micro_batches
            share = times * own.seconds * slower * factor / priced.step_s
            if share >= LEAST_SHARE:
                found.append(replace(own, share=share, slower=slower))
    return tuple(found)


def _product(node: Kernel, curve: GemmCurve) -> Product:
    if node.op == "grouped_gemm":
        groups, rows, n, k = node.dims
        m, seconds = max(1.0, rows / groups), _of_groups(curve)
    else:
        groups, m, n, k = node.dims
        seconds = curve.seconds
    own = float(seconds(m, n, k, groups))
    many = float(seconds(64 * m, n, k, groups)) / 64
    waves = curve.model.units and replace(curve.model, units=None).seconds(m, n, k, groups)
    return Product(
        node.part, node.name, groups, m, n, k, node.flops, own, 0.0, min(1.0, many / own),
        waves / curve.model.seconds(m, n, k, groups) if waves else 1.0,
    )  # fmt: skip


def _of_groups(curve: GemmCurve) -> Callable[[float, float, float, float], float]:
    """As the pricer of kernels has it: tiles alone."""
    return curve.model.seconds


def _batch(products: tuple[Product, ...], knee_flops: float) -> Iterator[Finding]:
    below = [p for p in products if p.flops < knee_flops and p.of_best < KNEE_SHARE]
    if below:
        share, loss = sum(p.share for p in below), _lost(below)
        names = ", ".join(p.name for p in below)
        yield Finding(
            "batch", "knee",
            f"{share:.0%} of the step in products below {knee_flops / 1e9:.0f} GFLOP ({names})",
            "more tokens in a micro-batch, or wider", loss,
        )  # fmt: skip
    for one in products:
        if one.waves < FULL_WAVES:
            yield Finding(
                "batch", "waves",
                f"{one.name} [{one.m:,.0f} × {one.n:,}]: the last wave of tiles keeps {one.waves:.0%} of the time busy",
                "another number of tokens or width", one.share * (1 - one.waves),
            )  # fmt: skip
    experts = [p for p in products if p.part == "experts"]
    if experts and min(p.of_best for p in experts) < KNEE_SHARE:
        rows, need = experts[0].m, knee_flops / (2.0 * experts[0].n * experts[0].k)
        yield Finding(
            "batch", "tokens per expert",
            f"{rows:,.0f} tokens an expert; one alone would need {need:,.0f} for {knee_flops / 1e9:.0f} GFLOP",
            "larger micro-batches, expert parallelism, or fewer and wider experts", _lost(experts),
        )  # fmt: skip


def _lost(products: list[Product]) -> float:
    return sum(p.share * (1 - p.of_best) for p in products)
