"""Devices that are missing, hang, crash, or compute wrongly."""

import json
import sys
from pathlib import Path

import pytest
import torch

from doctor.helpers import ACCELERATOR, CPU, one, write
from moestro.doctor import devices, probe
from moestro.doctor.devices import Inventory, accelerators_on_bus, device_check, devices_check, take_inventory

CPU_DEVICE = torch.device("cpu")


def fake_probe(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


EIGHT = Inventory("cuda", 8, "NVIDIA H100 80GB HBM3")


class TestCount:
    def test_as_expected_or_nothing_expected(self) -> None:
        assert devices_check(EIGHT, 8).status == devices_check(EIGHT, None).status == "passed"
        assert devices_check(EIGHT, 8).reason == "8 x NVIDIA H100 80GB HBM3"

    def test_missing_ones(self) -> None:
        check = devices_check(Inventory("cuda", 7, "X"), 8)
        assert (check.name, check.status, check.value, check.limit) == ("devices", "failed", 7, 8)
        assert "7 of 8 devices answer" in check.reason
        assert "no accelerator, 8 expected" in devices_check(Inventory("cpu", 1, "AMD EPYC"), 8).reason

    def test_more_than_expected_is_a_warning(self) -> None:
        assert devices_check(EIGHT, 4).status == "warned"

    def test_another_device_than_the_profile(self) -> None:
        check = devices_check(EIGHT, 8, "AMD Instinct MI300X")
        assert check.status == "failed"
        assert "measured on AMD Instinct MI300X" in check.reason

    def test_accelerators_without_a_driver(self, tmp_path: Path) -> None:
        classes = {"3b": "0x030200", "5e": "0x120000", "00": "0x030000", "01": "0x020000"}
        root = write(tmp_path, {f"sys/bus/pci/devices/0000:{k}:00.0/class": f"{v}\n" for k, v in classes.items()})
        assert accelerators_on_bus(root) == 2  # not the display, not the NIC
        check = devices_check(Inventory("cpu", 1, "AMD EPYC"), None, on_bus=2)
        assert check.status == "failed"
        assert "2 accelerators on the PCI bus, but torch finds none" in check.reason
        assert devices_check(Inventory("cpu", 1, "AMD EPYC"), 1, on_bus=2).status == "passed"
        assert devices_check(EIGHT, None, on_bus=8).status == "passed"


class TestProcess:
    def test_good_answer(self) -> None:
        answer = {"device": "cuda:3", "problems": [], "usable": ["fp32", "bf16"], "unusable": ["fp64"]}
        check = one(
            device_check("cuda:3", ACCELERATOR, fake_probe(f"print('noise'); print('''{json.dumps(answer)}''')"))
        )
        assert (check.name, check.status) == ("cuda:3", "passed")
        assert "exact in fp32, bf16 (not usable: fp64)" in check.reason

    def test_the_probe_is_told_which_device(self) -> None:
        code = "import sys, json; print(json.dumps(dict(device=sys.argv[1], problems=['p'], usable=[], unusable=[])))"
        check = one(device_check("cuda:5", ACCELERATOR, fake_probe(code)))
        assert (check.name, check.status, check.reason) == ("cuda:5", "failed", "p")

    def test_hung_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(devices, "IMPORT_S", 0.0)
        limits = ACCELERATOR.model_copy(update={"device_answer_s": 1.0})
        code = "import sys, time; sys.stderr.write('stage: the bf16 product\\n'); sys.stderr.flush(); time.sleep(60)"
        check = one(device_check("cuda:3", limits, fake_probe(code)))
        assert (check.name, check.status) == ("cuda:3", "failed")
        assert "it hangs at the bf16 product" in check.reason

    def test_device_that_keeps_the_probe_until_its_alarm(self) -> None:
        code = (
            "import os, signal, sys; sys.stderr.write('stage: the allocation\\n'); os.kill(os.getpid(), signal.SIGALRM)"
        )
        check = one(device_check("cuda:0", ACCELERATOR, fake_probe(code)))
        assert "it hangs at the allocation" in check.reason

    @pytest.mark.parametrize(
        ("code", "said"),
        [
            ("import os; os.kill(os.getpid(), 11)", "was killed by signal 11 at loading torch"),
            ("raise RuntimeError('no CUDA')", "ended with status 1 at loading torch: RuntimeError: no CUDA"),
            ("print('no json')", "ended with status 0"),
            ("print('[1]')", "ended with status 0"),
        ],
    )
    def test_probe_that_crashes(self, code: str, said: str) -> None:
        found = take_inventory(1, fake_probe(code))
        assert (found.count, found.type) == (0, "cpu")
        assert said in found.problem
        check = devices_check(found, None)
        assert check.status == "failed"
        assert said in check.reason

    def test_probe_that_cannot_start(self) -> None:
        assert "did not start" in take_inventory(1, ["/no/such/python"]).problem


class TestProducts:
    """Freivalds' check sees every element that is wrong."""

    @pytest.mark.parametrize("dtype", probe.DTYPES.values())
    @pytest.mark.parametrize("size", [1, 3, 64])
    def test_right_ones_are_exact(self, dtype: torch.dtype, size: int) -> None:
        assert probe.wrong_product(CPU_DEVICE, dtype, size) == ""

    def test_largest_sums_are_exact_in_bf16(self) -> None:
        """Of the size that accelerators get: no sum may pass 256, above which bf16 does not count every number."""
        size = ACCELERATOR.gemm_size

        def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            out = a.float() @ b.float()
            assert out.abs().max() <= 256
            return out

        assert probe.wrong_product(CPU_DEVICE, torch.bfloat16, size, product) == ""

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_product_that_is_not_finite(self, bad: float) -> None:
        def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            out = a @ b
            out[3, 5] = bad
            return out

        said = probe.wrong_product(CPU_DEVICE, torch.float32, 64, multiply)
        assert said == "1 of 4,096 elements are not finite"

    def test_one_wrong_element(self) -> None:
        def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            out = a @ b
            out[7, 7] += 1
            return out

        assert probe.wrong_product(CPU_DEVICE, torch.bfloat16, 64, multiply) == "1 of 64 rows are wrong"

    def test_examination_names_dtype_and_fault(self, monkeypatch: pytest.MonkeyPatch) -> None:
        small = CPU.model_copy(update={"allocate_mib": 1, "gemm_size": 32})
        monkeypatch.setattr(probe, "limits_of", lambda kind: small)

        def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            if a.dtype == torch.float16:
                raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'")
            if a.dtype == torch.float64:
                raise RuntimeError("CUDA error: an illegal instruction was encountered\nmore")
            return (a @ b) * (float("nan") if a.dtype == torch.bfloat16 else 1)

        found = probe.examine(CPU_DEVICE, multiply)
        assert (found["usable"], found["unusable"]) == (["fp32"], ["fp16"])
        assert found["problems"] == [
            "bf16 product: 1,024 of 1,024 elements are not finite",
            "fp64 product: CUDA error: an illegal instruction was encountered",
        ]
        check = devices.examined_check(found, small)
        assert (check.name, check.status) == ("cpu", "failed")
        assert "bf16 product" in check.reason

    def test_memory_that_forgets(self, monkeypatch: pytest.MonkeyPatch) -> None:
        small = CPU.model_copy(update={"allocate_mib": 1, "gemm_size": 8})
        monkeypatch.setattr(probe, "limits_of", lambda kind: small)
        full = torch.full

        def forgetful(size: tuple[int], value: int, **options: object) -> torch.Tensor:
            buffer = full(size, value, **options)  # type: ignore[call-overload]
            buffer[10] &= 0xF7
            return buffer

        monkeypatch.setattr(torch, "full", forgetful)
        found = probe.examine(CPU_DEVICE)
        assert found["problems"] == [
            "memory: 1 of 1,048,576 bytes read back wrong"
        ]  # the other pattern has that bit clear


def test_inventory_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    found = probe.inventory()
    assert found["count"] >= 1
    assert found["name"]
    assert found["versions"]["torch"] == torch.__version__
    assert "stage: the fp32 product" in capsys.readouterr().err or found["type"] != "cpu"
