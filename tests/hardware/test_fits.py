"""On which device it fits at all (arXiv 2304.12149: more than 100 GB on a desktop with one pool of 128)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.errors import MoestroError
from moestro.hardware.catalog import load_device
from moestro.hardware.fits import WRITE_OFF_HOURS, devices_that_fit, hourly_price, usable_bytes


def ids(gigabytes: float, **options: float) -> list[str]:
    return [fit.device.id for fit in devices_that_fit(gigabytes * 1e9, **options)]


def test_gigapixel_images_fit_where_no_gpu_of_the_time_held_them() -> None:
    fitting = ids(100)
    assert "apple-m1-ultra" in fitting
    assert not {"rtx-4090", "a100-sxm-80gb"} & set(fitting)


def test_the_host_takes_its_share_of_a_unified_pool_only() -> None:
    assert usable_bytes(load_device("apple-m1-ultra"), 8e9) == 120e9
    assert usable_bytes(load_device("h200-sxm"), 8e9) == 141e9
    assert "apple-m1-ultra" not in ids(100, host_bytes=30e9)
    assert "apple-m1-ultra" in ids(128, host_bytes=0)


def test_one_die_of_a_package_holds_its_half() -> None:
    assert usable_bytes(load_device("mi250x")) == 64e9


def test_banks_are_not_one_memory() -> None:
    assert usable_bytes(load_device("upmem")) is None


def test_the_cheapest_first_and_unknown_prices_last_by_size() -> None:
    fits = devices_that_fit(20e9)
    prices = [fit.usd_per_hour for fit in fits]
    known = [price for price in prices if price is not None]
    assert len(known) >= 5
    assert known == sorted(known)
    assert prices[: len(known)] == known
    sizes = [fit.usable_bytes for fit in fits[len(known) :]]
    assert sizes == sorted(sizes)
    assert all(bool(fit.basis) == (fit.usd_per_hour is not None) for fit in fits)


def test_a_price_to_buy_is_spread_over_three_years() -> None:
    assert hourly_price(load_device("apple-m1-ultra")) == (5000 / WRITE_OFF_HOURS, "bought")
    assert hourly_price(load_device("a100-sxm-80gb")) == (0.8, "rented")
    assert hourly_price(load_device("mi300x")) == (None, "")


def test_announced_devices_and_processors_are_left_out() -> None:
    assert not {"mi455x", "rubin", "epyc-9654"} & set(ids(10))
    assert [fit.device.kind for fit in devices_that_fit(3000e9, kinds=["cpu"])] == ["cpu"] * 5
    assert devices_that_fit(3000e9) == []


@given(st.floats(min_value=1, max_value=1e13), st.floats(min_value=0, max_value=1e12))
def test_all_that_is_named_fits_and_more_never_fits_on_more(needed: float, host: float) -> None:
    fits = devices_that_fit(needed, host)
    assert all(fit.usable_bytes >= needed for fit in fits)
    assert {f.device.id for f in devices_that_fit(needed * 1.5, host)} <= {f.device.id for f in fits}


@pytest.mark.parametrize("needed", [0.0, -1.0, float("inf"), float("nan")])
def test_bytes_that_are_none(needed: float) -> None:
    with pytest.raises(MoestroError, match="above zero"):
        devices_that_fit(needed)


def test_negative_host() -> None:
    with pytest.raises(MoestroError, match="zero or more"):
        devices_that_fit(1e9, -1.0)
