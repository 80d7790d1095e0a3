"""How sure a predicted step time is: the errors of validated runs of its class."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from moestro.config.plan import Workload
from moestro.predict.constants import Calibration, Residuals
from moestro.predict.public import PublicRun
from moestro.predict.words import Interval

LOW = ("fp8", "mxfp8", "nvfp4")
FEW, FEW_MODELS = 8, 3  # runs, and models among them, below which a class says too little
WIDER = 1.5  # in log, for a device without a validated run: no whole device was left out when errors were measured
QUANTILES = (0.1, 0.9)  # four of five runs lie between


def residuals_of(found: Iterable[tuple[PublicRun, float]], unseen: bool) -> list[Residuals]:
    """Ratios measured ÷ predicted by class, from the narrowest to all.

    unseen: the predictions were made with the runs' sources left out of the fit.
    """
    ratios: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    largest: dict[tuple[str, str, str], int] = defaultdict(int)
    models: dict[tuple[str, str, str], set[tuple[int, int]]] = defaultdict(set)
    for run, seconds in found:
        for key in _classes(run.device, run.workload):
            ratios[key].append(run.measured / seconds)
            largest[key] = max(largest[key], run.num_devices)
            models[key].add((run.workload.model.num_layers, run.workload.model.hidden_size))
    return [
        Residuals(
            device=device,
            precision=precision,
            experts=experts,
            unseen=unseen,
            runs=len(values),
            low=round(float(np.quantile(values, QUANTILES[0])), 4),
            high=round(float(np.quantile(values, QUANTILES[1])), 4),
            largest=largest[device, precision, experts],
        )
        for (device, precision, experts), values in ratios.items()
        if len(values) >= FEW and len(models[device, precision, experts]) >= FEW_MODELS
    ]


def interval(seconds: float, workload: Workload, device: str, num_devices: int, calibration: Calibration) -> Interval:
    """The range in which four of five validated runs of the narrowest known class would put this prediction."""
    for number, key in enumerate(_classes(device, workload)):
        # A device that was never validated is as uncertain as sources were before they were seen.
        found = _find(calibration.residuals, key, unseen=not key[0])
        if found is None:
            continue
        basis = f"{found.runs} validated runs: {_words(key)}"
        low, high = min(1.0, found.low), max(1.0, found.high)
        if number:
            basis += "; none of its own class: an extrapolation"
        if not key[0]:
            low, high = low**WIDER, high**WIDER
            basis += ", widened by half"
        if num_devices > 2 * found.largest:
            basis += f"; beyond the {found.largest:,} devices of the largest"
        return Interval(seconds, seconds * low, seconds * high, basis)
    return Interval(
        seconds, seconds * 0.5, seconds * 2.0, "no validated run is like it: a guess within a factor of two"
    )


def _classes(device: str, workload: Workload) -> list[tuple[str, str, str]]:
    """(Device, precision, experts), the narrowest first; "" stands for any."""
    precision = "low" if workload.precision in LOW else "high"
    experts = "moe" if workload.model.moe is not None else "dense"
    return [
        (device, precision, experts),
        (device, "", experts),
        (device, "", ""),
        ("", precision, experts),
        ("", "", experts),
        ("", "", ""),
    ]


def _find(residuals: Sequence[Residuals], key: tuple[str, str, str], unseen: bool) -> Residuals | None:
    device, precision, experts = key
    for entry in residuals:
        if (entry.device, entry.precision, entry.experts, entry.unseen) == (device, precision, experts, unseen):
            return entry
    return None


def _words(key: tuple[str, str, str]) -> str:
    device, precision, experts = key
    bits = {"low": "8 bits or fewer", "high": "16 bits or more", "": ""}[precision]
    return ", ".join(part for part in (device or "any device", experts, bits) if part)
