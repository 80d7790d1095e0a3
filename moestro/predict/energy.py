"""Energy of a step or a run, from the devices' rated power and what they do meanwhile.

A model, not a measurement: no public table gives energy per step. Its shares are recalled from power readings of
training nodes; pass your own where you have them.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from moestro.errors import MoestroError
from moestro.hardware.devices import Device
from moestro.predict.words import TimeBreakdown

IDLE = 0.15  # of rated power: a device that waits (recalled: 0.1 to 0.2)
COMMUNICATING = 0.45  # while only communication runs (recalled)
COMPUTING = 0.90  # in matrix products and attention at full rate (recalled; memory-bound kernels draw less)
NODE = 1.4  # a node's power over that of its devices: hosts, NICs, fans (recalled: 1.3 to 1.8)
COOLING = 1.2  # power usage effectiveness of the building (recalled: 1.05 to 1.5)

Seconds = TypeVar("Seconds", float, NDArray[np.float64])


@dataclass(frozen=True)
class Energy:
    """device_w: mean of one device over the step. joules: of the whole job from the wall."""

    device_w: float
    wall_w: float  # for one device, its share of node and building
    joules: float
    source: str

    @property
    def kwh(self) -> float:
        return self.joules / 3.6e6


def step_energy(
    time: TimeBreakdown, device: Device, devices: int, node: float = NODE, cooling: float = COOLING
) -> Energy:
    """Of one step.

    Raises:
        MoestroError: the catalog does not know the device's rated power, or the step takes no time.
    """
    tdp = rated_w(device)
    if not time.total > 0:
        raise MoestroError("a step of no time has no power")
    device_w = tdp * drawn_s(time.compute + time.optimizer, time.host + time.bubble, time.total) / time.total
    wall_w = device_w * node * cooling
    source = f"rated power ({device.tdp_w.confidence}) times recalled shares"
    return Energy(device_w, wall_w, wall_w * devices * time.total, source)


def rated_w(device: Device) -> float:
    """Raises MoestroError where the catalog does not know it."""
    if device.tdp_w.nominal is None:
        raise MoestroError(f"the catalog has no rated power for {device.name}; add tdp_w to its file")
    return device.tdp_w.nominal


def drawn_s(computing_s: Seconds, waiting_s: Seconds, step_s: Seconds) -> Seconds:
    """Seconds at rated power that draw as much as a step of so many seconds, which communicates in those left over."""
    sending_s = step_s - computing_s - waiting_s
    return computing_s * COMPUTING + sending_s * COMMUNICATING + waiting_s * IDLE


def carbon_kg(energy: Energy, grams_per_kwh: float) -> float:
    """Of CO2, from what the grid emits."""
    return energy.kwh * grams_per_kwh / 1000
