"""Curves and constants of a profile that is made by formulas: the formulas come back."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report.profiles import (
    ALPHA_S,
    LINK_BYTES_PER_S,
    MEMORY_BYTES_PER_S,
    PEAK_FLOPS,
    collectives,
    complete_profile,
    machine_profile,
    memory,
    product,
    products,
    sample,
)

from moestro.hardware.catalog import device_ids, load_device
from moestro.hardware.profile import Machine, MachineProfile
from moestro.measure.constants import derive_constants, with_curves, with_samples
from moestro.measure.curves import Curves, fit_curves, full_device
from moestro.measure.sweeps import alignment_of, find_sweeps


@pytest.fixture(scope="module")
def complete() -> tuple[MachineProfile, Curves]:
    return complete_profile()


def test_rates_and_ridge(complete: tuple[MachineProfile, Curves]) -> None:
    constants = complete[0].constants
    for dtype, peak in PEAK_FLOPS.items():
        assert constants[f"best_gflops_{dtype}"] * 1e9 == pytest.approx(peak, rel=0.01)
        assert constants[f"ridge_flop_per_byte_{dtype}"] == pytest.approx(peak / MEMORY_BYTES_PER_S, rel=0.02)
        assert 1e-3 < constants[f"knee_gflop_{dtype}"] < 0.2  # 5 µs of 120 GFLOP/s, nine times over: 5.4 MFLOP


def test_alignment_comes_from_the_sweeps(complete: tuple[MachineProfile, Curves]) -> None:
    constants = complete[0].constants
    assert constants["align_gemm_n_fp32"] == constants["align_gemm_k_fp32"] == constants["align_hidden_fp32"] == 16
    assert "align_gemm_n_bf16" not in constants  # squares only


def test_memory_is_the_plateau_of_large_arrays_and_not_the_cache(complete: tuple[MachineProfile, Curves]) -> None:
    constants = complete[0].constants
    assert constants["memory_gbps"] * 1e9 == pytest.approx(MEMORY_BYTES_PER_S, rel=0.01)
    assert constants["memory_saturation_bytes"] == 2**22  # the first size above the cache


def test_memory_that_never_levels_off_starts_at_its_largest_array() -> None:
    rising = [sample("copy", 1e-3, moved=2.0 * 4**i, bytes=4**i) for i in range(5, 10)]
    assert derive_constants(rising, Curves())["memory_saturation_bytes"] == 4**9
    flat = [sample("copy", 2e-9 * 4**i, moved=2.0 * 4**i, bytes=4**i) for i in range(5, 10)]
    assert derive_constants(flat, Curves())["memory_saturation_bytes"] == 4**5
    assert derive_constants(flat[:2], Curves()) == {}


def test_collectives_give_start_up_bandwidth_and_sizes(complete: tuple[MachineProfile, Curves]) -> None:
    constants = complete[0].constants
    for op, factor in (("all_reduce", 1.5), ("all_gather", 0.75)):
        assert constants[f"alpha_us_{op}_4"] == pytest.approx(ALPHA_S * 1e6, rel=0.02)
        assert constants[f"busbw_gbps_{op}_4"] * 1e9 == pytest.approx(LINK_BYTES_PER_S, rel=0.02)
        half = ALPHA_S * LINK_BYTES_PER_S / factor
        assert constants[f"s50_bytes_{op}_4"] == pytest.approx(half, rel=0.05)
        assert constants[f"s90_bytes_{op}_4"] == pytest.approx(9 * half, rel=0.05)


def test_series_between_nodes_have_names_of_their_own() -> None:
    two = [s.model_copy(update={"case": {**s.case, "nodes": 2}}) for s in collectives((4,))]
    samples = [*collectives((4,)), *two]
    constants = derive_constants(samples, fit_curves(samples, None)[0])
    assert constants["alpha_us_all_reduce_4_x2"] == constants["alpha_us_all_reduce_4"]


def test_pairs_groups_at_once_and_lone_ranks_are_in_no_series() -> None:
    changes = ({"pair": "0-1"}, {"groups": "all"}, {"ranks": 1})
    samples = [s.model_copy(update={"case": {**s.case, **c}}) for c in changes for s in collectives((2,))]
    assert not fit_curves(samples, None)[0].collectives


def test_bucket_is_what_brings_the_slower_operation_to_90_percent() -> None:
    samples = [
        sample(op, ALPHA_S + 2**i / LINK_BYTES_PER_S, bytes=2**i, ranks=2, nodes=1)
        for op in ("all_gather", "reduce_scatter", "all_reduce")
        for i in range(8, 30)
    ]
    constants = derive_constants(samples, fit_curves(samples, None)[0])
    ninety = 9 * ALPHA_S * LINK_BYTES_PER_S  # bytes of either; gathered values have 2 bytes, gradients 4
    assert constants["bucket_params_2"] == pytest.approx(ninety / 2, rel=0.1)
    assert constants["bucket_bytes_2"] == pytest.approx(2 * ninety, rel=0.1)


def test_small_groups_of_accelerators_show_their_links() -> None:
    def node(share: dict[int, float], topology: str = "unknown") -> MachineProfile:
        samples = [
            sample("all_reduce", 2 * (n - 1) / n * 2**30 / (rate * 1e9), bytes=2**30, ranks=n, nodes=1)
            for n, rate in share.items()
        ]
        machine = Machine(device_name="", device_type="cuda", num_devices=8, topology=topology)  # type: ignore[arg-type]
        return with_curves(machine_profile(samples, machine=machine))[0]

    mesh = node({2: 48, 4: 144, 8: 336})
    assert mesh.machine.topology == "mesh"
    assert mesh.constants["group_share_2"] == pytest.approx(1 / 7)
    assert any("Use the full node" in note for note in mesh.notes)
    assert node({2: 330, 4: 333, 8: 336}).machine.topology == "switch"
    assert node({2: 48, 4: 144, 8: 336}, "pcie").machine.topology == "pcie"  # what the system said stays


def test_a_public_profile_keeps_what_the_catalog_says() -> None:
    public = machine_profile(list(collectives((2,))), mode="published", constants={"memory_gbps": 3.0})
    assert with_curves(public)[0].constants["memory_gbps"] == 3
    measured = public.model_copy(update={"mode": "quick"})
    assert "memory_gbps" not in with_curves(measured)[0].constants


def test_host_and_storage(complete: tuple[MachineProfile, Curves]) -> None:
    constants = complete[0].constants
    assert constants["launch_us"] == pytest.approx(2)
    assert constants["host_t1_us"] == pytest.approx(4)  # the mean, not the forward phase
    assert constants["storage_write_mbps"] == pytest.approx(2**26 / 0.5 / 1e6)
    assert constants["storage_read_mbps"] == pytest.approx(2**26 / 0.25 / 1e6)
    assert constants["storage_iops"] == pytest.approx(5e4)  # of the depth that gives more
    assert constants["storage_scatter_random"] == pytest.approx(1.25)


def test_every_curve_reports_its_held_out_error(complete: tuple[MachineProfile, Curves]) -> None:
    profile, curves = complete
    assert {fit.what for fit in profile.fits} == {
        "gemm fp32", "gemm bf16", "attention fwd fp32", "attention bwd fp32", "copy", "triad",
        *(f"{op}, {ranks} ranks" for op in ("all_reduce", "all_gather") for ranks in (2, 4)),
    }  # fmt: skip
    assert len(curves.collectives) == len(curves.start_up) == 4
    assert all(fit.held_out_median is not None and fit.held_out_median < 0.12 for fit in profile.fits)


def test_fitting_twice_changes_nothing_and_leaves_the_samples() -> None:
    samples = [*memory(), *collectives((2,))]
    profile, _ = with_curves(machine_profile(samples))
    again, _ = with_curves(profile)
    assert again == profile
    assert profile.samples == tuple(samples)


def test_a_series_that_cannot_be_fitted_is_noted_and_costs_nothing_else() -> None:
    bad = [sample("all_reduce", 1e-3, bytes=size, ranks=2, nodes=1) for size in (0, 64, 1024, 4096)]
    profile, curves = with_curves(machine_profile([*memory(), *bad]))
    assert any(note.startswith("no curve of all_reduce, 2 ranks: ") for note in profile.notes)
    assert set(curves.memory) == {"copy", "triad"}


def test_a_dtype_with_a_few_products_has_a_rate_but_no_curve() -> None:
    few = [product(256, 256, 256, "bf16"), product(512, 512, 512, "bf16")]
    profile, curves = with_curves(machine_profile([*products(), *few][-2:]))
    assert not curves.gemm
    assert "best_gflops_bf16" in profile.constants
    assert "knee_gflop_bf16" not in profile.constants


def test_no_samples_no_constants() -> None:
    assert derive_constants([], Curves()) == {}
    assert fit_curves([], None) == (Curves(), [])


def test_part_of_a_cpu_is_not_the_catalog_device() -> None:
    cpu = next(d for d in map(load_device, device_ids()) if d.kind == "cpu" and d.compute_units.nominal)
    whole = Machine(device_id=cpu.id, device_name="", device_type="cpu", cores=int(cpu.compute_units.nominal or 0))
    assert full_device(whole) == cpu
    assert full_device(whole.model_copy(update={"cores": 2})) is None
    assert full_device(whole.model_copy(update={"device_id": ""})) is None
    gpu = next(d for d in map(load_device, device_ids()) if d.kind == "gpu")
    assert full_device(Machine(device_id=gpu.id, device_name="", device_type="cuda", cores=2)) == gpu


def test_new_samples_take_the_place_of_those_of_their_case() -> None:
    old, other = sample("copy", 1.0, bytes=1), sample("copy", 1.0, bytes=2)
    new, further = sample("copy", 2.0, bytes=1), sample("copy", 3.0, bytes=3)
    merged = with_samples(machine_profile([old, other]), [new, further], ["a note"])
    assert merged.samples == (new, other, further)
    assert merged.notes == ("elementwise: no room", "a note")


@given(st.integers(1, 10**6))
def test_alignment_divides_and_is_the_largest(width: int) -> None:
    power = alignment_of(width)
    assert width % power == 0
    assert power == 128 or (width // power) % 2


def test_sweeps_are_told_apart() -> None:
    sweeps = find_sweeps(machine_profile().samples)
    assert [(sweep.name, sweep.dtype) for sweep in sweeps] == [
        (name, "fp32") for name in ("gemm_n", "gemm_k", "hidden", "vocab")
    ]
    for sweep in sweeps:
        widths = [sweep.width(s) for s in sweep.samples]
        assert widths == sorted(set(widths))
        assert sweep.fixed["dtype"] == "fp32"


def test_a_sweep_of_aligned_widths_only_tells_nothing() -> None:
    assert not find_sweeps([product(512, 128 * i, 512) for i in range(1, 9)])
    assert not find_sweeps([product(512, 512 + i, 512) for i in range(5)])


def test_the_longest_sweep_of_a_width_is_taken() -> None:
    short = [product(64, 512 + i, 512) for i in range(7)]
    long = [product(32, 512 + i, 512) for i in range(9)]
    (sweep,) = find_sweeps([*short, *long])
    assert sweep.fixed == {"m": 32, "k": 512, "dtype": "fp32"}


def test_curves_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Curves().gemm = {}  # type: ignore[misc]
