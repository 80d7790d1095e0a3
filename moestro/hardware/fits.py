"""On which devices a number of bytes fits at all: the smallest and the cheapest (card: arXiv 2304.12149)."""

from collections.abc import Collection
from dataclasses import dataclass

from moestro.errors import MoestroError
from moestro.hardware.catalog import device_ids, load_device
from moestro.hardware.devices import Device, Kind

SHARE = 0.98  # of a device's memory, that a plan may need
HOST_BYTES = 8e9  # that the system and the training process take from a pool they share with the device
WRITE_OFF_HOURS = 3 * 365 * 24  # over which the price of a bought device is spread, power not counted


@dataclass(frozen=True)
class Fit:
    """usd_per_hour: None where no price is known. basis: "rented", "bought" (spread over three years) or ""."""

    device: Device
    usable_bytes: float
    usd_per_hour: float | None
    basis: str


def usable_bytes(device: Device, host_bytes: float = HOST_BYTES) -> float | None:
    """Memory that one computation can use: a shared pool less the host's share, or one die's part of a package.

    None: unknown, or cut into banks.
    """
    memory = device.memory
    if memory.gb.best is None or memory.banks is not None:
        return None
    return memory.gb.best * 1e9 / device.logical_devices - (host_bytes if memory.unified else 0.0)


def hourly_price(device: Device) -> tuple[float | None, str]:
    """The lowest price known, in USD an hour, and its basis."""
    price = device.price
    if price.usd_per_hour_low is not None:
        return price.usd_per_hour_low, "rented"
    if price.usd_to_buy is not None:
        return price.usd_to_buy / WRITE_OFF_HOURS, "bought"
    return None, ""


def devices_that_fit(
    bytes_needed: float, host_bytes: float = HOST_BYTES, kinds: Collection[Kind] | None = None
) -> list[Fit]:
    """Devices of the catalog on one of which `bytes_needed` fit: the cheapest first, then without price the smallest.

    Announced devices are left out, and so are processors, whose catalog figure is what a socket could hold, unless
    `kinds` asks for them.

    Raises:
        MoestroError: a number of bytes that is not positive and finite, or a negative share of the host.
    """
    if not 0 < bytes_needed < float("inf"):
        raise MoestroError(f"cannot fit {bytes_needed:g} bytes; give a number above zero")
    if not 0 <= host_bytes < float("inf"):
        raise MoestroError(f"the host cannot use {host_bytes:g} bytes; give zero or more")
    fits = []
    for device in map(load_device, device_ids()):
        wanted = device.kind in kinds if kinds is not None else device.kind != "cpu"
        usable = usable_bytes(device, host_bytes)
        if not wanted or usable is None or usable < bytes_needed or device.memory.gb.confidence == "announced":
            continue
        fits.append(Fit(device, usable, *hourly_price(device)))
    return sorted(fits, key=_rank)


def _rank(fit: Fit) -> tuple[bool, float, float, str]:
    price = fit.usd_per_hour
    return price is None, price or 0.0, fit.usable_bytes, fit.device.id
