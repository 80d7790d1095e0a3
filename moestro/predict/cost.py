"""What a run costs: devices rented by the hour or owned, and what serving adds to training."""

import math
from dataclasses import dataclass

from moestro.errors import MoestroError
from moestro.hardware.devices import Device

HOUR_S = 3600.0
YEAR_HOURS = 8766.0


@dataclass(frozen=True)
class Rate:
    """US dollars for an hour of one device, and where the figure comes from."""

    usd_per_hour: float
    source: str


@dataclass(frozen=True)
class Ownership:
    """What an owned device costs. overhead: share of the device's price paid for hosts, network, storage, building.

    power_w: drawn from the wall for one device while it works, its share of host and cooling included. used: share of
    its life in which somebody uses it.
    """

    usd_to_buy: float
    power_w: float
    life_years: float = 4.0
    overhead: float = 0.5
    usd_per_kwh: float = 0.10
    used: float = 0.8
    yearly_upkeep: float = 0.05  # of the price: repairs, staff

    def rate(self) -> Rate:
        """Dollars for an hour of use. Raises MoestroError for a life or a use of nothing."""
        if not self.life_years > 0 or not 0 < self.used <= 1:
            raise MoestroError("an owned device needs life_years above 0 and used between 0 and 1")
        hours = self.life_years * YEAR_HOURS * self.used
        price = self.usd_to_buy * (1 + self.overhead) * (1 + self.yearly_upkeep * self.life_years)
        return Rate(price / hours + self.power_w / 1000 * self.usd_per_kwh, f"owned for {self.life_years:g} years")


@dataclass(frozen=True)
class Cost:
    """Of a run. device_hours count every device, working or waiting."""

    usd: float
    device_hours: float
    usd_per_million_tokens: float | None
    rate: Rate


def rented(device: Device, usd_per_hour: float | None = None) -> Rate:
    """A given price, or the middle of the catalog's range.

    Raises:
        MoestroError: neither is known, or the price is below 0.
    """
    if usd_per_hour is not None:
        if not 0 <= usd_per_hour < math.inf:
            raise MoestroError(f"a device cannot cost {usd_per_hour:g} dollars an hour")
        return Rate(usd_per_hour, "given")
    price = device.price
    known = [usd for usd in (price.usd_per_hour_low, price.usd_per_hour_high) if usd is not None]
    if not known:
        raise MoestroError(f"the catalog has no price for {device.name}; give one in US dollars for a device and hour")
    return Rate(sum(known) / len(known), f"{price.confidence}, {price.as_of or 'no date'}: {price.source}")


def cost(seconds: float, devices: int, rate: Rate, tokens: float | None = None, goodput: float = 1.0) -> Cost:
    """`seconds`: without failures; divided by goodput, the share of the time that is useful work."""
    if not 0 < goodput <= 1:
        raise MoestroError(f"goodput is a share between 0 and 1, not {goodput:g}")
    hours = seconds / goodput * devices / HOUR_S
    usd = hours * rate.usd_per_hour
    return Cost(usd, hours, None if not tokens else usd / tokens * 1e6, rate)


def total_with_serving(training_usd: float, serving_usd_per_hour: float, hours: float) -> float:
    """Training once and serving for some hours."""
    return training_usd + serving_usd_per_hour * hours


def break_even_hours(train_a: float, hour_a: float, train_b: float, hour_b: float) -> float | None:
    """After how many hours of serving a and b have cost the same; None: one is cheaper for ever."""
    if hour_a == hour_b:
        return None
    hours = (train_b - train_a) / (hour_a - hour_b)
    return hours if hours >= 0 else None
