"""What there is to pick from, and what follows from a pick of run and machine, before any plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from moestro.config import Config, load_config
from moestro.config.load import preset_names
from moestro.config.plan import Workload
from moestro.errors import MoestroError, nearest
from moestro.graph.convert import workload_of
from moestro.hardware.catalog import cluster_ids, device_ids, load_cluster
from moestro.hardware.profile import load_profile
from moestro.predict.target import Target, target_of, target_of_profile

MOST_DEVICES = 16384
FIRST_RUN, FIRST_HARDWARE = "olmoe-1b-7b", "h100-8"
MEASURED = "measured: "  # before the name of a profile, in the list of hardware


@dataclass(frozen=True)
class Offer:
    """runs: presets and files. hardware: clusters and devices of the catalog. profiles: files, by their shown names."""

    runs: tuple[str, ...]
    hardware: tuple[str, ...]
    profiles: tuple[tuple[str, Path], ...] = ()

    @property
    def first_run(self) -> str:
        """What the page starts with: a file that was given, or a model that one node trains."""
        return FIRST_RUN if self.runs[0] in preset_names() else self.runs[0]

    @property
    def first_hardware(self) -> str:
        return self.profiles[0][0] if self.profiles else FIRST_HARDWARE

    @property
    def machines(self) -> tuple[str, ...]:
        """All that can be picked as hardware, measured machines first."""
        return (*(name for name, _ in self.profiles), *self.hardware)

    def profile(self, hardware: str) -> Path | None:
        return dict(self.profiles).get(hardware)

    def target(self, hardware: str, devices: int | None) -> Target:
        """Raises MoestroError: nothing of this name, or not so many devices."""
        if hardware not in self.machines:
            raise MoestroError(f"no hardware '{hardware}'.{nearest(hardware, self.machines)}")
        return _target(hardware, self.profile(hardware), devices)

    def config(self, run: str) -> Config:
        """Raises MoestroError: neither a preset nor a file that was given, or the file is wrong."""
        if run not in self.runs:  # a link must not read any file of this machine
            raise MoestroError(f"no run '{run}'.{nearest(run, self.runs)} A file is given on the command line.")
        return _config(run)

    def workload(self, run: str) -> Workload:
        return workload_of(self.config(run))

    def devices(self, hardware: str) -> tuple[int, int]:
        """How many are taken unless said, and the most there are."""
        target = self.target(hardware, None)
        if target.host_computes:
            return 1, target.cores or 1
        if target.devices is not None:
            return target.devices, target.devices
        return target.place.device.devices_per_node or 1, MOST_DEVICES


def offer_of(runs: Sequence[str] = (), profiles: Sequence[Path] = ()) -> Offer:
    """Presets and the catalog, with files beside; the page starts with the first of these.

    Raises:
        MoestroError: a file that cannot be read, or is wrong.
    """
    for run in runs:
        workload_of(_config(run))
    measured: list[tuple[str, Path]] = []
    for path in profiles:
        name = f"{MEASURED}{load_profile(path).name}"
        measured.append((name if name not in dict(measured) else f"{name} ({path})", path))
    return Offer(tuple(dict.fromkeys((*runs, *preset_names()))), (*cluster_ids(), *device_ids()), tuple(measured))


def described(hardware: str) -> str:
    """A cluster with what it is made of: "h800-2048: 2,048 × h800-sxm"; a device by its id."""
    if hardware not in cluster_ids():
        return hardware
    cluster = load_cluster(hardware)
    kinds = dict.fromkeys(name for pool in cluster.pools for name in pool.node.devices)
    return f"{hardware}: {cluster.num_devices:,} × {' and '.join(kinds)}"


@lru_cache(maxsize=64)
def _config(run: str) -> Config:
    return load_config(run).config


@lru_cache(maxsize=256)
def _target(hardware: str, profile: Path | None, devices: int | None) -> Target:
    if profile is not None:
        return target_of_profile(load_profile(profile), devices)
    return target_of(hardware, devices)
