"""Money and energy: a published table to the cent, and properties."""

import pytest

from moestro.errors import MoestroError
from moestro.hardware.catalog import load_device
from moestro.hardware.devices import Device
from moestro.predict.cost import Ownership, Rate, break_even_hours, cost, rented, total_with_serving
from moestro.predict.energy import COOLING, NODE, carbon_kg, step_energy
from moestro.predict.words import TimeBreakdown

HOUR = 3600.0
UNKNOWN_DEVICE = Device(name="thing", vendor="x", kind="gpu", year=2026)


def test_the_training_costs_of_gemma_on_tpu_and_gpu_to_the_cent() -> None:
    tpu = cost(3.34 * HOUR, 4, Rate(16.80 / 4, "published"))
    gpu = cost(5.39 * HOUR, 2, Rate(22.12 / 2, "published"))
    assert round(tpu.usd, 2) == 56.11
    assert round(gpu.usd, 2) == 119.23
    assert tpu.device_hours == pytest.approx(4 * 3.34)


@pytest.mark.parametrize(("hours", "ratio"), [(1, 1.82), (8, 1.30), (24, 1.14)])
def test_serving_for_longer_shrinks_their_ratio(hours: float, ratio: float) -> None:
    tpu = total_with_serving(56.11, 21.52, hours)
    gpu = total_with_serving(119.23, 22.12, hours)
    assert round(gpu / tpu, 2) == ratio


def test_goodput_and_tokens() -> None:
    rate = Rate(2.0, "given")
    whole = cost(1000.0, 8, rate, tokens=1e6)
    half = cost(1000.0, 8, rate, tokens=1e6, goodput=0.5)
    assert half.usd == pytest.approx(2 * whole.usd)
    assert whole.usd_per_million_tokens == pytest.approx(whole.usd)
    assert cost(1000.0, 8, rate).usd_per_million_tokens is None
    with pytest.raises(MoestroError, match="goodput"):
        cost(1.0, 1, rate, goodput=0.0)


def test_rents_come_from_the_catalog_or_from_the_user() -> None:
    h100 = load_device("h100-sxm")
    rate = rented(h100)
    low, high = h100.price.usd_per_hour_low, h100.price.usd_per_hour_high
    assert low is not None
    assert high is not None
    assert rate.usd_per_hour == pytest.approx((low + high) / 2)
    assert h100.price.as_of in rate.source
    assert rented(h100, 3.0) == Rate(3.0, "given")
    with pytest.raises(MoestroError, match="no price for thing"):
        rented(UNKNOWN_DEVICE)


def test_owning_pays_by_use() -> None:
    full = Ownership(30_000, power_w=1000, used=1.0, overhead=0.0, yearly_upkeep=0.0, life_years=1.0)
    assert full.rate().usd_per_hour == pytest.approx(30_000 / 8766 + 0.10)
    half = Ownership(30_000, power_w=1000, used=0.5, overhead=0.0, yearly_upkeep=0.0, life_years=1.0)
    assert half.rate().usd_per_hour > full.rate().usd_per_hour
    with pytest.raises(MoestroError, match="used"):
        Ownership(1.0, 1.0, used=0.0).rate()


def test_break_even() -> None:
    hours = break_even_hours(56.0, 3.0, 120.0, 1.0)
    assert hours == pytest.approx(32.0)
    assert total_with_serving(56, 3, 32) == pytest.approx(total_with_serving(120, 1, 32))
    assert break_even_hours(56.0, 1.0, 120.0, 3.0) is None
    assert break_even_hours(56.0, 1.0, 120.0, 1.0) is None


def test_energy_lies_between_idle_and_rated_power_and_grows_with_work() -> None:
    device = load_device("h100-sxm")
    tdp = device.tdp_w.nominal
    assert tdp is not None
    busy = step_energy(TimeBreakdown(1.0, 0.0, 0.0, 0.0, 0.0), device, 8)
    waits = step_energy(TimeBreakdown(0.2, 0.1, 0.2, 0.5, 0.0), device, 8)
    assert 0.1 * tdp < waits.device_w < busy.device_w < tdp
    assert busy.wall_w == pytest.approx(busy.device_w * NODE * COOLING)
    assert busy.joules == pytest.approx(busy.wall_w * 8 * 1.0)
    assert busy.kwh == pytest.approx(busy.joules / 3.6e6)
    assert carbon_kg(busy, 400) == pytest.approx(busy.kwh * 0.4)
    assert "recalled" in busy.source
    with pytest.raises(MoestroError, match="rated power"):
        step_energy(TimeBreakdown(1.0, 0, 0, 0, 0), UNKNOWN_DEVICE, 1)
    with pytest.raises(MoestroError, match="no time"):
        step_energy(TimeBreakdown(0, 0, 0, 0, 0), device, 1)
