"""What a training step costs beyond kernels timed alone: a few numbers for a class of devices and its software."""

import tomllib
from functools import lru_cache
from pathlib import Path

from pydantic import Field, ValidationError

from moestro.config.base import Section
from moestro.config.plan import Workload
from moestro.errors import MoestroError

CALIBRATION = Path(__file__).parent / "calibration.toml"


class Constants(Section):
    """Factors multiply what curves of isolated operations say; times are added. 1 and 0 would be a perfect step.

    Fitted by `moestro validate --fit`, on whole sources other than those it reports on.
    """

    gemm: float = Field(1.05, gt=0)  # cold caches, clocks under load, several layouts
    gemm_low: float = Field(1.0, gt=0)  # in 8 and 4 bits, where training fuses other casts than the curves' samples
    grouped: float = Field(1.1, gt=0)
    grouped_low: float = Field(1.0, gt=0)
    attention: float = Field(1.0, gt=0)
    memory: float = Field(1.3, gt=0)  # operations bound by memory: those a stack does not fuse
    optimizer: float = Field(1.2, gt=0)
    inside: float = Field(1.2, gt=0)  # collectives within a node or scale-up domain
    between: float = Field(1.2, gt=0)  # collectives over nodes
    launch_s: float = Field(8e-6, ge=0)  # host time of one counted kernel, with what the framework does around it
    collective_host_s: float = Field(30e-6, ge=0)  # host time of one collective
    step_s: float = Field(5e-3, ge=0)  # once a step: data, logging, synchronisation
    hidden: float = Field(0.8, ge=0, le=1)  # share of the computation behind which communication can hide
    contention: float = Field(0.1, ge=0)  # computation slows by this share while communication runs


class Residuals(Section):
    """Ratios measured ÷ predicted of the validated runs of a class; "" stands for any."""

    device: str
    precision: str
    experts: str
    unseen: bool  # with the runs' sources left out of the fit
    runs: int
    low: float  # the 10th percentile
    high: float  # the 90th
    largest: int  # number of devices


class Calibration(Section):
    """Constants by device and software generation. `sources`: what they were fitted on."""

    generations: dict[str, Constants] = Field(default_factory=dict)  # over all devices
    devices: dict[str, dict[str, Constants]] = Field(default_factory=dict)  # device id -> generation -> constants
    sources: tuple[str, ...] = ()
    residuals: tuple[Residuals, ...] = ()

    def of(self, device: str, generation: str) -> Constants:
        """The device's own in this generation of software, or those of the generation over all devices."""
        return self.devices.get(device, {}).get(generation) or self.generations.get(generation) or Constants()


def generation(workload: Workload) -> str:
    """Of the software: "eager" stacks write attention's scores to memory and fuse little; "fused" ones came after."""
    return "eager" if workload.attention_kernel == "math" else "fused"


@lru_cache(maxsize=4)
def load_calibration(path: Path = CALIBRATION) -> Calibration:
    """Raises MoestroError for a file that is not a calibration. A missing file gives the defaults."""
    if not path.is_file():
        return Calibration()
    try:
        return Calibration.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, ValidationError) as error:
        raise MoestroError(f"{path} is not a calibration: {str(error).splitlines()[0]}") from error
