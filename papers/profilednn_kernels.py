"""What the paper makes faster, each against the plain way: optimizer, focal loss, layout; and what bf16 must not sum.

A speed-up is the median of the ratios of rounds in which both ways take turns.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from moestro.config import OptimConfig
from moestro.measure.primitives import Call
from moestro.measure.step import build_step, take_apart
from moestro.optim.build import build_adamw
from papers import focal_loss
from papers.result import Check, verdict_of
from papers.turns import ROUNDS, alternate, speed_up

TENSORS, TENSOR_SHAPE = 256, (32, 32)
EQUAL_AFTER = 10  # steps of the optimizers before their numbers are compared
OPTIMIZER_AT_LEAST, FOCAL_AT_LEAST = 1.5, 1.3
ANCHORS, CLASSES, POSITIVE = 2048, 601, 0.02  # a detector with many classes; share of anchors that see an object
TERMS, LANES = 1_000_000, 64  # of a loss; partial sums that are kept, as a vector unit does
BF16_MORE_THAN, FP32_LESS_THAN = 0.01, 1e-4
IMAGES, SIDE, CHANNELS = 2, 32, (3, 32, 64, 64)
ROUTER, LOSS = "router", "head and loss"  # parts of a step
COMPUTING, ELEMENTWISE = ("gemm", "softmax, top-k", "reduction", "loss"), "elementwise"  # kinds of its calls
BF16_RUN = "sotu-tiny", ("train.dtype=bf16", "data.seq_len=64", "train.global_batch_size=1")


def kernel_checks() -> tuple[Check, ...]:
    """Some 10 s."""
    return check_optimizer(), check_focal(), check_sums(), check_trainer(*bf16_run()), check_layout()


# Optimizer.


def check_optimizer() -> Check:
    """The trainer's AdamW against a loop over the tensors in Python."""
    looped, ours, grouped = (_parameters() for _ in range(3))
    config = OptimConfig()
    plain = partial(
        torch.optim.AdamW, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
    )
    optimizers: dict[str, torch.optim.Optimizer] = {
        "loop": plain(looped, foreach=False, fused=False),
        "foreach": plain(grouped, foreach=True),
        "ours": build_adamw(ours, [], config)[0],
    }
    for _ in range(EQUAL_AFTER):
        for optimizer in optimizers.values():
            optimizer.step()
    away = max(_distance(looped, others) for others in (ours, grouped))
    times = alternate({name: optimizer.step for name, optimizer in optimizers.items()})
    fused, foreach = (speed_up(times["loop"], times[name]) for name in ("ours", "foreach"))
    return Check(
        claim="A fused optimizer step is faster than a loop over the tensors, with the same numbers",
        published=f"5.5 × for the update; ≥ {OPTIMIZER_AT_LEAST} × (a reader's criterion)",
        ours=f"{fused}; weights {away:.0e} away after {EQUAL_AFTER} steps",
        how="measured",
        verdict=verdict_of([fused.median >= OPTIMIZER_AT_LEAST, away <= 1e-6]),
        note=f"AdamW over {TENSORS} tensors of {TENSOR_SHAPE[0]} × {TENSOR_SHAPE[1]}, {ROUNDS} rounds that take turns "
        f"(10th to 90th percentile). The trainer takes torch's fused step; torch's foreach gives {foreach}.",
    )


def _parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(TENSOR_SHAPE, generator=generator)) for _ in range(TENSORS)]
    for parameter in made:
        parameter.grad = torch.randn(TENSOR_SHAPE, generator=generator)
    return made


def _distance(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Largest difference relative to the largest number."""
    pairs = zip(some, others, strict=True)
    return max(((a - b).abs().max() / a.abs().max()).item() for a, b in pairs)


# Focal loss.


def check_focal() -> Check:
    exact = focal_is_exact()
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(ANCHORS, CLASSES, generator=generator).requires_grad_()
    labels = _labels(ANCHORS, CLASSES, generator)
    targets = _targets(labels, CLASSES)
    plain, custom = focal_loss.composed(logits, targets), focal_loss.focal_loss(logits, labels)
    away = (custom / plain - 1).abs().item()
    forward = alternate(
        {
            "plain": lambda: focal_loss.composed(logits, targets),
            "custom": lambda: focal_loss.focal_loss(logits, labels),
        }
    )
    backward = alternate(
        {
            "plain": lambda: torch.autograd.grad(plain, logits, retain_graph=True),
            "custom": lambda: torch.autograd.grad(custom, logits, retain_graph=True),
        }
    )
    forth, back = (speed_up(times["plain"], times["custom"]) for times in (forward, backward))
    return Check(
        claim="A focal loss with its own backward is faster than the composition of plain operations",
        published=f"2 ×; second-hand 2.6 × forward, 1.3 × backward; ≥ {FOCAL_AT_LEAST} × forward (reader's criterion)",
        ours=f"forward {forth}, backward {back}; gradients {'agree' if exact else 'disagree'} in fp64",
        how="measured",
        verdict=verdict_of([exact, away <= 1e-5, forth.median >= FOCAL_AT_LEAST]),
        note=f"{ANCHORS:,} anchors × {CLASSES} classes in fp32, {POSITIVE:.0%} of the anchors with an object; the "
        f"values are {away:.0e} apart. Gradients against finite differences and against the composition. The plain "
        "way's one-hot targets are made beforehand and not timed.",
    )


def focal_is_exact() -> bool:
    """Value and gradient in fp64, against the definition and against finite differences."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(7, 5, dtype=torch.float64, generator=generator).mul_(3).requires_grad_()
    labels = torch.tensor([0, 4, -1, 2, -1, 2, 1])
    targets = _targets(labels, 5).double()
    for alpha, gamma in ((0.25, 2.0), (0.6, 1.5)):
        found, expected = (
            focal_loss.focal_loss(logits, labels, alpha, gamma),
            focal_loss.composed(logits, targets, alpha, gamma),
        )
        gradient, wanted = (torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (found, expected))
        if not torch.allclose(found, expected, rtol=1e-12) or not torch.allclose(gradient, wanted, rtol=1e-10):
            return False
        loss = partial(focal_loss.focal_loss, labels=labels, alpha=alpha, gamma=gamma)
        checked = torch.autograd.gradcheck(loss, (logits,), raise_exception=False)
        if not checked:
            return False
    return True


def _labels(anchors: int, classes: int, generator: torch.Generator) -> Tensor:
    labels = torch.randint(classes, (anchors,), generator=generator)
    return torch.where(torch.rand(anchors, generator=generator) < POSITIVE, labels, -1)


def _targets(labels: Tensor, classes: int) -> Tensor:
    return nn.functional.one_hot(labels.clamp_min(0), classes).mul(labels[:, None] >= 0).float()


# Precision.


def summed(terms: Tensor, dtype: torch.dtype) -> float:
    """Σ of the terms, every partial sum kept in `dtype`: LANES of them side by side, then those one after another."""
    rows = terms.to(dtype).view(-1, LANES)
    lanes = torch.zeros(LANES, dtype=dtype)
    for row in rows:
        lanes += row
    total = torch.zeros((), dtype=dtype)
    for lane in lanes:
        total += lane
    return total.item()


def check_sums() -> Check:
    generator = torch.Generator().manual_seed(0)
    terms = torch.empty(TERMS).exponential_(generator=generator)  # as -log p with p uniform
    exact = terms.double().sum().item()
    wrong = {dtype: abs(summed(terms, dtype) / exact - 1) for dtype in (torch.bfloat16, torch.float32)}
    of_torch = abs(terms.bfloat16().sum().item() / exact - 1)
    bf16, fp32 = wrong[torch.bfloat16], wrong[torch.float32]
    return Check(
        claim="bf16 sums of a loss lose accuracy, so the loss is kept in fp32",
        published=f"> 1 % over 10⁶ terms, fp32 below {FP32_LESS_THAN:g} (a reader's criterion)",
        ours=f"bf16 {bf16:.0%} wrong, fp32 {fp32:.0e}",
        how="computed",
        verdict=verdict_of([bf16 > BF16_MORE_THAN, fp32 < FP32_LESS_THAN]),
        note=f"{TERMS:,} exponential terms of mean 1, every partial sum rounded to the dtype in {LANES} lanes: a sum "
        f"in bf16 stops growing at 2⁸ times a term. torch's own sum of bf16 terms adds in fp32 and rounds once: "
        f"{of_torch:.1%} wrong.",
    )


def bf16_run(overrides: Sequence[str] = ()) -> tuple[list[Call], dict[str, int]]:
    """The calls of one real training step with activations in bf16, and how wide the parts' logits are."""
    preset, own = BF16_RUN
    step = build_step(preset, [*own, *overrides], torch.device("cpu"))
    model = step.config.model
    assert model.moe is not None
    assert model.vocab_size is not None
    return take_apart(step, step.record()), {ROUTER: model.moe.num_choices, LOSS: model.vocab_size}


def computing(calls: Sequence[Call], part: str, logits: int) -> list[Call]:
    """Calls of a part that compute, or that touch its logits: a CPU without bf16 units multiplies in fp32 and rounds.

    In backward without elementwise ones, which there also add up gradients of the part's input.
    """
    return [
        call
        for call in calls
        if call.part == part
        and (
            call.kind in COMPUTING
            or (call.kind == ELEMENTWISE and call.phase == "forward")
            or any(operand.shape[-1:] == (logits,) for operand in call.operands)
        )
    ]


def takes_bf16(call: Call) -> bool:
    return any(operand.dtype == "bf16" for operand in call.operands)


def check_trainer(calls: Sequence[Call], logits: Mapping[str, int]) -> Check:
    """Not what the code says, but the dtypes of the operands of a real step."""
    inside = {part: computing(calls, part, width) for part, width in logits.items()}
    narrow = {part: sum(map(takes_bf16, found)) for part, found in inside.items()}
    elsewhere = sum(map(takes_bf16, calls))
    return Check(
        claim="In bf16 training the loss and the router stay in fp32",
        published="bf16 ≈ 2 × with the loss kept in fp32",
        ours=f"{narrow[ROUTER]} of the routers' {len(inside[ROUTER])} and {narrow[LOSS]} of the loss's "
        f"{len(inside[LOSS])} calls that compute or touch logits take bf16",
        how="measured",
        verdict=verdict_of([len(found) > 0 and narrow[part] == 0 for part, found in inside.items()] + [elsewhere > 0]),
        note=f"One step of {BF16_RUN[0]} with {BF16_RUN[1][0]}, its {len(calls):,} calls and their operands as seen by "
        f"the profiler; {elsewhere:,} calls take bf16 elsewhere. The speed of bf16 cannot be shown on a CPU without "
        "bf16 units.",
    )


# Layout.


def check_layout() -> Check:
    """Training steps of a small convolutional network in both layouts."""
    ways = {name: _network(layout) for name, layout in LAYOUTS.items()}
    times = alternate(ways)
    found = speed_up(times["channels first"], times["channels last"])
    return Check(
        claim="Channels-last layout does not slow convolutions down on a CPU",
        published="used, no figure of its own; ≥ 1.0 × (a reader's criterion)",
        ours=str(found),
        how="measured",
        verdict=verdict_of([found.median >= 1.0, found.high >= 1.0]),
        note=f"Forward and backward of {len(CHANNELS) - 1} convolutions with batch norm and ReLU, {IMAGES} images of "
        f"{SIDE} × {SIDE}, {ROUNDS} rounds that take turns; {statistics.median(times['channels last']) * 1e3:.0f} ms a "
        "step. A median below 1 with a 90th percentile above it counts as in part. torch alone: no model of ours has "
        "such convolutions.",
    )


LAYOUTS = {"channels first": torch.contiguous_format, "channels last": torch.channels_last}


def _network(layout: torch.memory_format) -> Callable[[], object]:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in pairwise(CHANNELS):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    network: nn.Module = nn.Sequential(*layers).to(memory_format=layout)  # type: ignore[call-overload]
    images = torch.randn(IMAGES, CHANNELS[0], SIDE, SIDE).contiguous(memory_format=layout)

    def step() -> None:
        network.zero_grad()
        network(images).mean().backward()

    return step
