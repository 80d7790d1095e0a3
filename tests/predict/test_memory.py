"""Memory: closed forms against the simulator, exact bytes of classes of state, and public measurements."""

import statistics

import pytest

from moestro.config.counts import resolved_model
from moestro.config.load import load_config
from moestro.config.plan import Plan, Workload
from moestro.graph.count import count_step
from moestro.hardware.catalog import load_device
from moestro.hardware.fits import usable_bytes
from moestro.predict.memory import (
    COMMUNICATOR_BYTES,
    FRAMEWORK_BYTES,
    fits,
    in_flight,
    memory_of,
    memory_peaks,
    memory_timeline,
    most_held,
    published_bytes,
    routed_row_bytes,
    routing_margin,
)
from moestro.predict.public import PublicRun
from moestro.predict.schedule import simulate_pipeline
from moestro.predict.words import MemoryBreakdown

MIXTRAL = resolved_model(load_config("mixtral-8x7b").config)


def workload(**changes: object) -> Workload:
    return Workload.model_validate({"model": MIXTRAL, "seq_len": 4096, "global_batch_size": 64, **changes})


def memory(plan: Plan, **changes: object) -> MemoryBreakdown:
    work = workload(**changes)
    return memory_of(count_step(work, plan), work, plan)[0]


@pytest.mark.parametrize(
    ("schedule", "pp", "vpp", "micro_batches"),
    [
        ("gpipe", 4, 1, 8), ("1f1b", 4, 1, 2), ("1f1b", 8, 1, 16), ("interleaved", 4, 2, 4), ("interleaved", 4, 2, 12),
        ("interleaved", 4, 3, 12), ("interleaved", 8, 2, 32), ("interleaved", 2, 4, 8), ("zero_bubble", 4, 1, 8),
        ("zero_bubble", 4, 2, 8), ("zbv", 4, 2, 64), ("dualpipe", 8, 1, 64), ("dualpipev", 4, 2, 40),
    ],
)  # fmt: skip
def test_micro_batches_in_flight_are_those_of_the_simulator(
    schedule: str, pp: int, vpp: int, micro_batches: int
) -> None:
    ones = [1.0] * (pp * vpp)
    peaks = simulate_pipeline(schedule, pp, vpp, micro_batches, ones, ones, ones).peak_in_flight
    counts = in_flight(schedule, pp, vpp, micro_batches)
    assert tuple(float(sum(n for _, n in rank)) for rank in counts) == peaks


@pytest.mark.parametrize(
    ("schedule", "pp", "vpp", "m"),
    [
        ("1f1b", 4, 1, 8), ("gpipe", 4, 1, 8), ("interleaved", 4, 2, 8), ("interleaved", 3, 2, 27),
        ("interleaved", 4, 3, 40), ("zero_bubble", 4, 2, 8), ("zbv", 4, 2, 24), ("dualpipe", 4, 1, 24),
    ],
)  # fmt: skip
def test_activations_of_chunks_are_weighed_by_their_own_sizes(schedule: str, pp: int, vpp: int, m: int) -> None:
    ones = [1.0] * (pp * vpp)
    held = [1.0 + 0.375 * (7 * stage % 5) for stage in range(pp * vpp)]
    peaks = simulate_pipeline(schedule, pp, vpp, m, ones, ones, ones, held=held).peak_in_flight
    moments = most_held(schedule, pp, vpp, m)
    most = [max(sum(held[stage % (pp * vpp)] * n for stage, n in counts) for counts in rank) for rank in moments]
    assert most == pytest.approx(peaks)


def test_interleaved_ranks_hold_what_megatron_warms_up_with_and_one() -> None:
    pp, vpp = 4, 3
    for rank, counts in enumerate(in_flight("interleaved", pp, vpp, 16)):
        assert sum(n for _, n in counts) == 2 * (pp - rank - 1) + (vpp - 1) * pp + 1
    assert in_flight("interleaved", pp, vpp, 18) == in_flight("interleaved", pp, vpp, 16)  # none of 18 is known


def test_one_device_holds_16_bytes_a_parameter_plus_the_16_bit_copy() -> None:
    found = memory(Plan(), global_batch_size=1)
    parameters = 46_702_792_704
    assert found.weights == 2 * parameters
    assert found.gradients == 4 * parameters
    assert found.optimizer == 12 * parameters


def test_zero_splits_dense_and_expert_state_over_their_own_ranks() -> None:
    plan = Plan(dp=8, ep=8, zero=1)
    graph = count_step(workload(), plan)
    parameters = graph.stages[0].parameters
    found = memory(plan)
    assert parameters.expert * 8 == 32 * 8 * 3 * 4096 * 14336
    assert found.optimizer == pytest.approx(12 * (parameters.dense / 8 + parameters.expert))
    by_level = [memory(plan.model_copy(update={"zero": level})) for level in (0, 1, 2, 3)]
    assert by_level[0].optimizer > by_level[1].optimizer
    assert by_level[1].gradients > by_level[2].gradients
    # The fp32 shard is the weight then, also of experts that nobody shares: less in all, but not of "weights".
    assert by_level[3].weights + by_level[3].optimizer < by_level[2].weights + by_level[2].optimizer
    fully = memory(Plan(dp=8, zero=3))
    assert fully.weights + fully.gradients + fully.optimizer == pytest.approx(16 * 46_702_792_704 / 8)


def test_fp32_training_has_no_second_copy_and_frozen_weights_no_state() -> None:
    full = memory(Plan(), precision="fp32", global_batch_size=1)
    assert full.weights == 4 * 46_702_792_704
    assert full.optimizer == 8 * 46_702_792_704
    adapters = memory(Plan(), adapter_rank=8, global_batch_size=1)
    assert adapters.weights == pytest.approx(2 * 46_702_792_704, rel=0.01)
    assert adapters.optimizer < 0.02 * adapters.weights


def test_the_first_rank_of_a_pipeline_holds_most_and_recomputation_less() -> None:
    plan = Plan(pp=4, dp=2, ep=2)
    work = workload()
    none, ranks = memory_of(count_step(work, plan), work, plan)
    assert len(ranks) == 4
    assert ranks[0] == max(ranks)
    assert none.total == pytest.approx(ranks[0])
    assert ranks[1] > ranks[2]
    block = memory(plan.model_copy(update={"recompute": "block"}))
    selective = memory(plan.model_copy(update={"recompute": "selective"}))
    assert block.activations < selective.activations < none.activations
    assert block.transient > none.transient


def test_the_heads_gradient_comes_at_the_end_unless_a_fused_loss_keeps_it() -> None:
    whole = memory(Plan(), fused_loss=False, global_batch_size=1)
    fused = memory(Plan(), fused_loss=True, global_batch_size=1)
    head = 32000 * 4096
    assert whole.transient - fused.transient == pytest.approx(2 * head, rel=1e-3)
    # Logits in fp32 against the head's fp32 gradient (and inputs, which both keep).
    assert whole.activations - fused.activations == pytest.approx(4 * 4096 * 32000 - 4 * head, abs=1e6)


def test_offloading_takes_state_off_the_device() -> None:
    plan = Plan(pp=4, dp=2, ep=2)
    assert memory(plan.model_copy(update={"offload": "optimizer"})).optimizer == 0
    assert memory(plan.model_copy(update={"offload": "activations"})).activations < memory(plan).activations


def test_dualpipe_holds_two_copies_of_the_weights() -> None:
    single, double = memory(Plan(pp=4, schedule="1f1b")), memory(Plan(pp=4, schedule="dualpipe"))
    assert double.weights == pytest.approx(2 * single.weights, rel=0.05)


def test_parts_add_up_and_outside_is_counted_by_communicator() -> None:
    found = memory(Plan(dp=2, tp=4, ep=4))
    assert found.communication == 5 * COMMUNICATOR_BYTES  # tp, ep, dp, edp, world
    assert found.framework == FRAMEWORK_BYTES["gpu"]
    assert found.reserved == found.allocated + found.fragmentation
    assert found.total == found.reserved + found.framework + found.communication
    assert found.needed == pytest.approx(found.total - found.fragmentation)
    assert any("routing" in item for item in found.excluded)
    work, plan = workload(), Plan(dp=2)
    cpu = memory_of(count_step(work, plan), work, plan, load_device("epyc-9654"))[0]
    assert cpu.communication == 0
    assert cpu.framework < found.framework


def test_muon_keeps_one_moment_of_matrices() -> None:
    adamw, muon = memory(Plan(), optimizer="adamw"), memory(Plan(), optimizer="muon")
    others = 2 * 32000 * 4096  # embedding and head; norms beside
    assert adamw.optimizer - muon.optimizer == pytest.approx(4 * (46_702_792_704 - others), rel=1e-4)
    assert memory(Plan(), optimizer="none").optimizer == 0


def test_peaks_come_in_order_and_the_first_step_has_no_moments_yet() -> None:
    plan = Plan(pp=4, dp=2, ep=2)
    found = memory(plan)
    peaks = memory_peaks(found, workload(), plan)
    assert peaks.init < peaks.first_step < peaks.steady == found.total
    moments = 2 / 3 * found.optimizer
    assert peaks.init == pytest.approx(
        found.total - moments - found.activations - found.transient - found.fragmentation
    )
    # With weights split the fp32 shard is a weight: all of the optimizer's bytes are moments.
    split = Plan(dp=8, zero=3)
    fully = memory(split)
    assert memory_peaks(fully, workload(), split).init < fully.total - fully.optimizer


def test_the_timeline_peaks_where_the_breakdown_says() -> None:
    plan, work = Plan(pp=4, dp=2, ep=2), workload()
    graph = count_step(work, plan)
    ones = [1.0] * 4
    lines = memory_timeline(graph, work, plan, simulate_pipeline("1f1b", 4, 1, graph.micro_batches, ones, ones, ones))
    found, _ = memory_of(graph, work, plan)
    assert max(size for _, size in lines[0]) == pytest.approx(found.allocated - found.transient)
    assert lines[0][-1][1] == pytest.approx(found.weights + found.gradients + found.optimizer)


def test_the_margin_of_uneven_routing_is_bounded_by_what_can_arrive() -> None:
    plan, work = Plan(dp=8, ep=8), workload()
    row = routed_row_bytes(work, plan)
    assert row == 2 * (2 * 4096 + 3 * 14336)
    assert routing_margin(work, plan, 1.0) == 0
    assert routing_margin(work, plan, 2.0) == 4096 * 2 * row
    # One expert on each rank: at most one copy of each of the 8 · 4096 tokens, 4 times the even share.
    assert routing_margin(work, plan) == 3 * 4096 * 2 * row
    assert routing_margin(work, plan, 100.0) == routing_margin(work, plan)
    assert routing_margin(work, plan.model_copy(update={"expert_chunks": 4})) == routing_margin(work, plan) / 4


def test_fits() -> None:
    found = memory(Plan(dp=8, ep=8, zero=1))
    assert fits(found, load_device("h100-sxm")) is False
    assert fits(memory(Plan(dp=64, ep=8, zero=3), global_batch_size=64), load_device("h200-sxm")) is True


def test_published_memory_within_five_percent(public_runs: list[PublicRun]) -> None:
    errors: dict[str, list[float]] = {}
    tensors = []
    for run in (run for run in public_runs if run.quantity == "bytes"):
        found, _ = memory_of(count_step(run.workload, run.plan), run.workload, run.plan)
        error = published_bytes(found, run.metric) / run.measured - 1
        errors.setdefault(run.source.split("/")[0], []).append(error)
        tensors += [error] if "alloc" in run.metric else []
    assert sum(len(of) for of in errors.values()) >= 56
    everything = [error for of in errors.values() for error in of]
    assert statistics.median(map(abs, everything)) < 0.03
    # Where tensors alone were measured nothing is fitted but the number of gathered tokens.
    assert statistics.median(map(abs, tensors)) < 0.01
    assert max(map(abs, tensors)) < 0.045
    # The constants are fitted on one source; the others hold too. Missing memory is worse than imagining some.
    for of in errors.values():
        assert statistics.median(map(abs, of)) < 0.05
    assert sum(error < -0.05 for error in everything) <= 0.02 * len(everything)


def test_published_runs_that_tell_their_recomputation_fit(public_runs: list[PublicRun]) -> None:
    """Whoever published a run had the memory for it; many raised the micro-batch until it was full."""
    devices = {device: load_device(device) for device in {run.device for run in public_runs}}
    shares = []
    for run in public_runs:
        size = usable_bytes(devices[run.device])
        guessed = any("recomputed" in rule for rule in run.assumed)
        if run.plan.zero != 3 or guessed or size is None:
            continue
        found, _ = memory_of(count_step(run.workload, run.plan), run.workload, run.plan, devices[run.device])
        shares.append(found.needed / size)
    assert len(shares) > 150
    assert sum(share > 1 for share in shares) <= 0.02 * len(shares)
    assert max(shares) > 0.9
