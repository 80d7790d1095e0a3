"""The catalog as it is shipped, and the reading of it: every file, every figure, every name."""

import csv
import lzma
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from moestro.hardware import published
from moestro.hardware.catalog import device_ids, find_device, load_device
from moestro.hardware.catalog.names import words
from moestro.hardware.compare import balance, compute_bound_ratio, memory_bound_ratio
from moestro.hardware.devices import Device, Support
from moestro.hardware.figures import Figure

from .helpers import figures

# Names in public tables that say no single device.
AMBIGUOUS = {
    "see source (4 nodes x 8)",
    "AWS (EFA; instance in source)",
    "OCI (see source)",
    "H100/H800 class (SM90)",
}


class TestDevices:
    @pytest.mark.parametrize("device_id", device_ids())
    def test_file_is_valid_and_every_figure_has_a_source(self, device_id: str) -> None:
        device = load_device(device_id)
        assert device.id == device_id
        assert device.memory.gb.known
        for path, figure in figures(device):
            if figure.nominal is not None:
                assert figure.source or figure.confidence == "recalled", path
                assert (figure.confidence in ("recalled", "secondary", "announced")) == figure.unsourced, path
            if figure.achieved is not None:
                assert figure.achieved_source, path
                assert figure.nominal is None or figure.achieved <= figure.nominal, path

    @pytest.mark.parametrize("device_id", device_ids())
    def test_every_dtype_with_a_peak_is_computed_in(self, device_id: str) -> None:
        device = load_device(device_id)
        for dtype in (*device.peak_tflops, *device.vector_tflops):
            support = device.support.get(dtype)
            assert support is not None, f"{dtype} has a peak but no word of support"
            assert support.how == "native", f"{dtype} has a peak of its own but is {support.how}"

    def test_those_the_cards_name_are_here(self) -> None:
        wanted = (
            "v100-sxm-32gb a100-sxm-80gb h100-sxm h200-sxm b200 b300 gb200 gb300 mi250x mi300x mi325x mi355x gaudi-2"
        )
        wanted += (
            " gaudi-3 tpu-v4 tpu-v5e tpu-v5p tpu-v6e tpu-v7 trainium-1 trainium-2 ascend-910b rtx-4090 arc-pro-b60"
        )
        wanted += " xeon-8480 epyc-9654 apple-m1-ultra grace-cpu gh200 upmem"
        assert set(wanted.split()) <= set(device_ids())

    def test_no_two_devices_answer_to_one_name(self) -> None:
        owners: dict[frozenset[str], str] = {}
        for device_id in device_ids():
            device = load_device(device_id)
            for name in (device_id, device.name, *device.aliases):
                assert owners.setdefault(words(name), device_id) == device_id, name

    @pytest.mark.parametrize("device_id", device_ids())
    def test_each_name_finds_its_device(self, device_id: str) -> None:
        device = load_device(device_id)
        for name in (device_id, device.name, *device.aliases):
            found = find_device(name)
            assert found is not None, name
            assert found.id == device_id, name
            assert load_device(name.upper()).id == device_id

    def test_mesh_links_add_up_to_the_node_bandwidth(self) -> None:
        meshes = [link for id in device_ids() for link in load_device(id).links if link.topology == "mesh"]
        assert len(meshes) >= 6
        for link in meshes:
            assert link.devices is not None
            assert link.gbps.nominal == pytest.approx((link.devices - 1) * (link.peer_gbps.nominal or 0))
            if link.gbps.achieved and link.peer_gbps.achieved:
                assert link.gbps.achieved == pytest.approx((link.devices - 1) * link.peer_gbps.achieved)

    def test_banks_of_memory_add_up(self) -> None:
        memory = load_device("upmem").memory
        assert memory.banks
        assert memory.bank_mb
        assert memory.gbps.nominal == pytest.approx(memory.banks * (memory.bank_mbps.nominal or 0) / 1e3)
        assert (memory.gb.nominal or 0) * 1024 == memory.banks * memory.bank_mb

    def test_one_device_is_read_without_the_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from moestro.hardware import catalog

        read: list[str] = []
        original = catalog.read_section
        monkeypatch.setattr(
            catalog, "read_section", lambda kind, path: (read.append(path.stem), original(kind, path))[1]
        )
        catalog._device.cache_clear()
        assert load_device("mi300x") is load_device("MI300X")
        assert read == ["mi300x"]


class TestFigures:
    def test_achieved_above_nominal_is_refused(self) -> None:
        with pytest.raises(ValidationError, match="above nominal"):
            Figure(nominal=1.0, confidence="read", achieved=1.1, achieved_source="x")

    def test_confidence_of_achieved_is_its_own(self) -> None:
        figure = Figure(nominal=2, confidence="read", achieved=1, achieved_source="x", achieved_confidence="recalled")
        assert figure.unsourced_achieved
        assert not figure.unsourced
        assert not Figure(nominal=2, confidence="recalled").unsourced_achieved


def device(**changes: object) -> Device:
    return Device.model_validate({"name": "x", "vendor": "x", "kind": "gpu", "year": 2000, **changes})


class TestPeak:
    PEAKS = {"vector_tflops": {"fp32": {"nominal": 10, "achieved": 8, "achieved_source": "x", "confidence": "read"}}}  # noqa: RUF012

    def peak(self, achieved: bool = False, **support: object) -> float | None:
        return device(**self.PEAKS, support={"fp32": {"how": "native"}, "bf16": support}).peak_flops("bf16", achieved)

    @given(st.floats(min_value=0.01, max_value=1e4))
    def test_an_emulated_dtype_is_slower_by_its_penalty(self, penalty: float) -> None:
        assert self.peak(how="emulated", via="fp32", penalty=penalty) == pytest.approx(1e13 / penalty)
        assert self.peak(True, how="emulated", via="fp32", penalty=penalty) == pytest.approx(8e12 / penalty)

    def test_an_unknown_penalty_leaves_the_rate_unknown(self) -> None:
        assert self.peak(how="emulated", via="fp32") is None

    def test_a_stored_dtype_runs_at_the_rate_after_the_cast(self) -> None:
        assert self.peak(how="storage", via="fp32") == 1e13

    def test_a_refused_dtype_has_no_rate(self) -> None:
        assert self.peak(how="no") is None

    @pytest.mark.parametrize("via", [None, "bf16", "fp16"])
    def test_via_must_lead_to_a_native_dtype(self, via: str | None) -> None:
        with pytest.raises(ValidationError, match="native support"):
            self.peak(how="storage", via=via)

    def test_a_penalty_is_above_zero(self) -> None:
        with pytest.raises(ValidationError):
            Support(how="emulated", via="fp32", penalty=0)

    def test_what_generations_lack(self) -> None:
        """V100 has no bf16; A100 and MI250X no fp8; AVX2 processors are slow in bf16; UPMEM has no floats."""
        for device_id, dtype in (("v100-sxm-32gb", "bf16"), ("a100-sxm-80gb", "fp8"), ("mi250x", "fp8")):
            assert load_device(device_id).support[dtype].how != "native"  # type: ignore[index]
        for device_id in ("h100-sxm", "mi300x", "l40s", "gaudi-2"):
            assert load_device(device_id).support["fp8"].how == "native"
        cpu, pim = load_device("epyc-7763"), load_device("upmem")
        assert (cpu.peak_flops("bf16") or 0) == pytest.approx((cpu.peak_flops("fp32") or 0) / 8)
        assert (pim.peak_flops("fp32", True) or 0) == pytest.approx((pim.peak_flops("int32", True) or 0) / 21)
        assert load_device("epyc-9654").peak_flops("fp16") is None  # nobody told the penalty


class TestFinding:
    @pytest.mark.parametrize(
        ("text", "device_id"),
        [
            ("NVIDIA H100 80GB HBM3", "h100-sxm"),
            ("NVIDIA H100 PCIe", "h100-pcie"),
            ("A100 SXM (Azure ND A100 v4)", "a100-sxm-80gb"),
            ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"),
            ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
            ("Tesla V100-SXM2-16GB", "v100-sxm-16gb"),
            ("NVIDIA H200", "h200-sxm"),
            ("NVIDIA GH200 480GB", "gh200"),
            ("NVIDIA GeForce RTX 2080 Ti", "rtx-2080-ti"),
            ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
            ("AMD Instinct MI300X", "mi300x"),
            ("AMD Instinct MI300X OAM", "mi300x"),
            ("Intel(R) Arc(TM) Pro B60 Graphics", "arc-pro-b60"),
            ("Intel(R) Xeon(R) Platinum 8480+", "xeon-8480"),
            ("INTEL(R) XEON(R) PLATINUM 8570", "xeon-8570"),
            ("AMD EPYC 9654 96-Core Processor, 2 threads", "epyc-9654"),
            ("Apple M1 Ultra", "apple-m1-ultra"),
            ("TPU v5 lite", "tpu-v5e"),
            ("TPU v5", "tpu-v5p"),
            ("Ascend910B3", "ascend-910b"),
        ],
    )
    def test_what_drivers_say(self, text: str, device_id: str) -> None:
        found = find_device(text)
        assert found is not None
        assert found.id == device_id

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "cpu",
            "AMD EPYC",
            "H100/H800 class (SM90)",
            "NVIDIA H100 NVL",
            "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
            "NVIDIA A100-PCIE-40GB",
            "NVIDIA H100 96GB HBM3",
            "Tesla V100-PCIE-32GB",
            "NVIDIA GeForce RTX 4090 Laptop GPU",
            "NVIDIA GeForce RTX 3090 Ti",
            "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
            "AMD Instinct MI308X",
            "Apple M3 Pro",
        ],
    )
    def test_what_the_catalog_does_not_hold_is_not_guessed(self, text: str) -> None:
        assert find_device(text) is None

    @given(st.text())
    def test_any_text_is_answered(self, text: str) -> None:
        find_device(text)

    def test_names_in_the_public_tables(self) -> None:
        names = set()
        for table in ("gemm", "collectives"):
            with lzma.open(Path(published.__file__).parent / f"{table}.csv.xz", "rt", encoding="utf-8") as file:
                names |= {row["hardware"] for row in csv.DictReader(file)}
        assert len(names) > 20
        assert {name for name in names if find_device(name) is None} == AMBIGUOUS


class TestRatios:
    """Nominal and achieved ratios of MI300X to H100 that readers of arXiv 2510.27583 give."""

    def test_memory_bound_is_faster(self) -> None:
        assert memory_bound_ratio(load_device("mi300x"), load_device("h100-sxm")) == pytest.approx(1.42, abs=0.01)

    def test_compute_bound_is_slower_although_nominally_faster(self) -> None:
        mi300x, h100 = load_device("mi300x"), load_device("h100-sxm")
        nominal = (mi300x.peak_flops("bf16") or 0) / (h100.peak_flops("bf16") or 1)
        assert nominal == pytest.approx(1.32, abs=0.005)
        assert nominal * 0.45 / 0.9 == pytest.approx(0.66, abs=0.005)
        assert (compute_bound_ratio(mi300x, h100) or 9) < 0.9
        assert (compute_bound_ratio(mi300x, h100, "fp8") or 9) < 0.9

    def test_ridge_points(self) -> None:
        """Central card §3.1: 247 FLOP/B (302 against the measured bandwidth), 295 and 206."""
        for device_id, ridge in (("mi300x", 247), ("h100-sxm", 295), ("h200-sxm", 206)):
            assert balance(load_device(device_id)).nominal_ridge == pytest.approx(ridge, abs=0.6)
        mi300x = load_device("mi300x")
        assert (mi300x.peak_flops("bf16") or 0) / ((mi300x.memory.gbps.achieved or 1) * 1e9) == pytest.approx(
            302, abs=1
        )

    def test_price_of_compute(self) -> None:
        h100 = balance(load_device("h100-sxm"))
        assert h100.usd_per_pflop_hour == pytest.approx(1.99 / 0.7945)
        assert balance(load_device("mi300x")).usd_per_pflop_hour is None

    def test_unknown_stays_unknown(self) -> None:
        empty = device()
        assert set(vars(balance(empty)).values()) == {None}
        assert compute_bound_ratio(empty, load_device("h100-sxm")) is None
        assert memory_bound_ratio(load_device("h100-sxm"), empty) is None
