"""Devices by name, and the rate MFU is quoted against."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moestro.errors import MoestroError
from moestro.hardware import peak
from moestro.hardware.device import device_name, resolve_device, synchronize
from moestro.hardware.peak import measure_gemm_flops


def test_auto_takes_what_is_here() -> None:
    device = resolve_device("auto")
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    assert device.type == (here.type if here else "cpu")
    assert torch.ones(2, device=device).sum() == 2


def test_cpu() -> None:
    assert resolve_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["gpu", "", "cuda:x", "cuda:9999", "cpu;", "mps:77", "meta"])
def test_unknown_or_absent(name: str) -> None:
    with pytest.raises(MoestroError, match=r"run\.device = .* is not usable here") as error:
        resolve_device(name)
    assert "Available: cpu" in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["xpu", "hpu", "mtia", "xla", "vulkan", "ipu", "maia", "privateuseone", "fpga"])
def test_every_kind_that_torch_knows(name: str) -> None:
    if torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == name:  # type: ignore[union-attr]
        assert resolve_device(name).type == name
        return
    with pytest.raises(MoestroError, match="is not usable here"):
        resolve_device(name)


def test_names() -> None:
    name = device_name(torch.device("cpu"))
    assert name.endswith(f"{torch.get_num_threads()} threads")
    assert len(name) > len(", 1 threads")
    assert device_name(torch.device("meta")) == "meta"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/cpuinfo")
def test_the_name_of_an_unknown_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *a, **k: (_ for _ in ()).throw(OSError("no /proc")))
    assert device_name(torch.device("cpu")).endswith("threads")


def test_synchronize_on_cpu_does_nothing() -> None:
    synchronize(torch.device("cpu"))


def test_peak_is_a_plausible_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak, "SECONDS", 0.05)
    rate = measure_gemm_flops(torch.device("cpu"), torch.float32)
    assert 1e8 < rate < 1e14


def test_peak_is_two_n_cubed_over_the_best_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that ticks a known time for each product."""
    # The deadline, then (check, start, end) for each product: 0.2 s, 0.05 s, 0.2 s; then the check that ends it.
    times = iter([0.0, 0.0, 0.0, 0.2, 0.2, 0.25, 0.3, 0.3, 0.3, 0.5, 0.9])
    monkeypatch.setattr(peak, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    rate = measure_gemm_flops(torch.device("cpu"), torch.float32)
    assert rate == pytest.approx(2 * 1024**3 / 0.05)
