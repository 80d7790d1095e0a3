"""ProfileDNN (Fu, Chukka, Achorn, Atta-fosu, Canchi, Teng, White, Schmidt; arXiv 2206.10034).

The claim: break a training run on a CPU into primitives, compare each with what it takes alone, and work on the largest
gap. Doing so doubled the training speed of RetinaNet-ResNeXt50, and a focal-loss kernel became twice as fast.

What is reproduced here, all on one thread of this CPU:

* measured: that the primitives of a training step of small MoE models add up to the step, with the ratio of backward to
  forward; and that steps of models which were not measured can be composed from primitives of others;
* measured: a fused optimizer, a focal loss with its own backward and the channels-last layout against the plain ways;
  the dtypes of the loss and the routers in a bf16 run;
* computed: what a sum of losses in bf16 is worth.

What is not: the paper's models, Xeon and extension of PyTorch. The projection, each primitive in the step against the
same alone, is `moestro measure step`.
"""

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moestro.measure.primitives import Call
from moestro.measure.step import BuiltStep, StepTimes, build_step, take_apart, time_step
from moestro.measure.step_curves import StepCurves, compose, fit_steps
from papers.profilednn_kernels import kernel_checks
from papers.result import Check, PaperResult, Progress, majority_of, verdict_of

# Taken apart, and predicted. In turns, so that a machine whose load changes slowly serves both alike.
SEEN = ("sotu-tiny", "mixtral-tiny", "olmoe-tiny", "telechat3-tiny")
UNSEEN = ("qwen3-moe-tiny", "gpt-oss-tiny", "switch-tiny", "ds-moe-tiny", "deepseek-v3-tiny", "zaya1-tiny")
OVERRIDES = ("train.global_batch_size=2",)
REPEATS, WARM_UP = 5, 2
SUM_WITHIN, PREDICTED_WITHIN = 0.15, 0.20
UNREST = 1.25  # slowest over median of a step's repeats from which on the machine is called busy
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Apart:
    """A step that was taken apart."""

    name: str
    calls: list[Call]
    times: StepTimes

    @property
    def sum_over_step(self) -> float:
        """All primitives and the gaps between them, over the step without the profiler."""
        return (self.times.accounted.calls_s + self.times.accounted.gaps_s) / self.times.median_s

    @property
    def backward_over_forward(self) -> float:
        seconds = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0, "step": 0.0}
        for call, timed in zip(self.calls, self.times.accounted.calls, strict=True):
            seconds[call.phase] += timed.seconds + timed.gap_s
        return seconds["backward"] / seconds["forward"]


@dataclass(frozen=True)
class Whole:
    """A step of which the calls are known and the time is known as a whole only."""

    name: str
    calls: list[Call]
    steps_s: list[float]

    @property
    def median_s(self) -> float:
        return statistics.median(self.steps_s)


def run(progress: Progress) -> PaperResult:
    """Everything; 40 s on two cores."""
    threads, load = torch.get_num_threads(), os.getloadavg()[0]
    torch.set_num_threads(1)
    try:
        apart, whole = measure_steps(progress)
        kernels = kernel_checks()
    finally:
        torch.set_num_threads(threads)
    curves = curves_of(apart)
    checks = check_sums_up(apart, load), check_backward(apart), check_predicted(whole, curves), *kernels
    progress(1, 1, "checks")
    figures = {f"{each.name} sum over step": each.sum_over_step for each in apart}
    figures |= {f"{each.name} predicted over measured": compose(each.calls, curves) / each.median_s for each in whole}
    return PaperResult(checks, {"load average before": load} | figures)


def measure_steps(progress: Progress) -> tuple[list[Apart], list[Whole]]:
    apart: list[Apart] = []
    whole: list[Whole] = []
    for i, preset in enumerate(UNSEEN):
        if i < len(SEEN):
            apart.append(measure_apart(SEEN[i], build_step(SEEN[i], OVERRIDES, CPU)))
        whole.append(measure_whole(preset, build_step(preset, OVERRIDES, CPU)))
        progress(len(apart) + len(whole), len(SEEN) + len(UNSEEN) + 1, "steps")
    return apart, whole


def measure_apart(name: str, step: BuiltStep) -> Apart:
    calls = take_apart(step, step.record())
    return Apart(name, calls, time_step(step, calls, REPEATS))


def measure_whole(name: str, step: BuiltStep) -> Whole:
    calls, steps = take_apart(step, step.record()), []
    for _ in range(WARM_UP + REPEATS):
        start = time.perf_counter()
        step.run()
        steps.append(time.perf_counter() - start)
        step.put_back()
    return Whole(name, calls, steps[WARM_UP:])


def curves_of(apart: Sequence[Apart]) -> StepCurves:
    """Of every primitive of these steps, and the mean gap between two."""
    measured = [
        (call, timed.seconds)
        for each in apart
        for call, timed in zip(each.calls, each.times.accounted.calls, strict=True)
    ]
    return fit_steps(measured, sum(each.times.accounted.gaps_s for each in apart) / len(measured))


def unrest(steps: Sequence[Sequence[float]], load: float | None = None) -> str:
    """What to say of the machine."""
    worst = max(max(times) / statistics.median(times) for times in steps)
    busy = f" The machine was busy: a step took up to {worst:.1f} times its median." if worst > UNREST else ""
    return busy if load is None else f"Load average {load:.1f} before.{busy}"


def check_sums_up(apart: Sequence[Apart], load: float) -> Check:
    """Where this does not hold, no projection of a primitive can be trusted."""
    close = [abs(each.sum_over_step - 1) <= SUM_WITHIN for each in apart]
    middle = statistics.median(each.sum_over_step for each in apart)
    return Check(
        claim="A training step is the sum of its primitives, so that their gaps say what to work on",
        published=f"the method; 2 × on RetinaNet-ResNeXt50. Within {SUM_WITHIN:.0%} of the step (a reader's criterion)",
        ours=f"primitives and the gaps between them are {middle:.2f} of the step (median of {len(apart)} presets), "
        f"within {SUM_WITHIN:.0%} in {sum(close)}",
        how="measured",
        verdict=majority_of(close),
        note=", ".join(f"{each.name} {each.sum_over_step:.2f}" for each in apart)
        + f". Of the middle one of {REPEATS} profiled steps, the profiler's own cost taken off, over the median of "
        f"{REPEATS} steps without it, in turns; random tokens, one thread. "
        + unrest([each.times.steps_s for each in apart], load),
    )


def check_backward(apart: Sequence[Apart]) -> Check:
    ratios = [each.backward_over_forward for each in apart]
    return Check(
        claim="Backward takes longer than forward, so it is the first to optimise",
        published="observed for convolutional and recurrent networks",
        ours=" / ".join(f"{ratio:.2f}" for ratio in ratios) + f" on {', '.join(each.name for each in apart)}",
        how="measured",
        verdict=verdict_of([ratio > 1 for ratio in ratios]),
        note="Backward over forward, gaps included. The loss makes its gradients in the forward pass, so these ratios "
        "are below the 2 of the FLOPs. Of one profiled step each, the same as above.",
    )


def check_predicted(whole: Sequence[Whole], curves: StepCurves) -> Check:
    """From the calls of a step, and curves of the primitives of other models' steps."""
    ratios = {each.name: compose(each.calls, curves) / each.median_s for each in whole}
    wrong = [abs(ratio - 1) for ratio in ratios.values()]
    middle = statistics.median(wrong)
    within = [error <= PREDICTED_WITHIN for error in wrong]
    return Check(
        claim="Steps of unseen MoE models are predicted by composing primitives of others",
        published=f"within {PREDICTED_WITHIN:.0%} in the median (a reader's criterion; a neighbour, DLBricks, claims "
        "some 95 % accuracy for inference)",
        ours=f"{middle:.0%} wrong in the median of {len(whole)} presets, within {PREDICTED_WITHIN:.0%} in "
        f"{sum(within)}",
        how="measured",
        verdict=verdict_of([middle <= PREDICTED_WITHIN]),
        note="Predicted over measured: "
        + ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
        + f". Curves from {', '.join(SEEN)}; of the unseen models only the list of calls with their shapes is used. "
        f"Measured: median of {REPEATS} steps.{unrest([each.steps_s for each in whole])}",
    )
