"""Energy of a step or a run, from the devices' rated power and what they do meanwhile.

A model, not a measurement: no public table gives energy per step. Its shares are recalled from power readings of
training nodes; pass your own where you have them.
"""

from dataclasses import dataclass

from moestro.errors import MoestroError
from moestro.hardware.devices import Device
from moestro.predict.words import TimeBreakdown

IDLE = 0.15  # of rated power: a device that waits (recalled: 0.1 to 0.2)
COMMUNICATING = 0.45  # while only communication runs (recalled)
COMPUTING = 0.90  # in matrix products and attention at full rate (recalled; memory-bound kernels draw less)
NODE = 1.4  # a node's power over that of its devices: hosts, NICs, fans (recalled: 1.3 to 1.8)
COOLING = 1.2  # power usage effectiveness of the building (recalled: 1.05 to 1.5)


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
    tdp = device.tdp_w.nominal
    if tdp is None:
        raise MoestroError(f"the catalog has no rated power for {device.name}; add tdp_w to its file")
    if not time.total > 0:
        raise MoestroError("a step of no time has no power")
    computing = time.compute + time.optimizer
    waiting = time.host + time.bubble
    share = (computing * COMPUTING + time.communication * COMMUNICATING + waiting * IDLE) / time.total
    device_w = tdp * share
    wall_w = device_w * node * cooling
    source = f"rated power ({device.tdp_w.confidence}) times recalled shares"
    return Energy(device_w, wall_w, wall_w * devices * time.total, source)


def carbon_kg(energy: Energy, grams_per_kwh: float) -> float:
    """Of CO2, from what the grid emits."""
    return energy.kwh * grams_per_kwh / 1000
