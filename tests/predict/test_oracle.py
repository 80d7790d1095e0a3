"""Splitting a prediction's error by measured parts, on made-up steps whose parts are known."""

from dataclasses import replace

import pytest

from moestro.config import load_config
from moestro.config.plan import Plan, Workload
from moestro.errors import MoestroError
from moestro.graph.convert import plan_of, workload_of
from moestro.graph.count import count_step
from moestro.graph.words import Kernel
from moestro.hardware.profile import Machine, MachineProfile, Sample
from moestro.measure.primitives import Event, Span, Spans
from moestro.measure.step_ranks import RankAccount, RanksStep, rank_account, transfers_s
from moestro.predict.oracle import GROUPS, Measured, Split, by_pipeline_rank, split, substitute
from moestro.predict.predict import compose, predict_step, price_step
from moestro.predict.processes import CALLS, CALLS_OF_EXCHANGE, SHORT_BYTES, STEP, TO_ALL, of_processes, waits_s
from moestro.predict.target import Target, target_of_profile
from moestro.predict.words import TimeBreakdown

SIZES = (2**10, 2**16, 2**18, 2**22)


def _sample(op: str, seconds: float, bytes_moved: float | None = None, **case: float | str) -> Sample:
    return Sample(op=op, case=case, median_s=seconds, repeats=9, bytes_moved=bytes_moved)


def _samples(slow: float = 1.0, **more: float | str) -> list[Sample]:
    """Products at 10 GFLOP/s, memory at 5 GB/s."""
    found = [
        _sample("gemm", slow * (1e-6 + 2 * m * n * k / 1e10), m=m, n=n, k=k, dtype="fp32", **more)
        for m, n, k in ((64, 64, 64), (128, 128, 128), (256, 256, 256), (512, 512, 512), (1024, 128, 128))
    ]
    found += [_sample("copy", slow * (1e-6 + 2 * s / 5e9), 2 * s, bytes=s, dtype="fp32", **more) for s in SIZES]
    for seq in (128, 256, 512):
        for phase, flops in (("fwd", 4), ("bwd", 10)):
            seconds = slow * flops * 256 * seq * seq / 1e10
            case = {"batch": 1, "seq": seq, "heads": 4, "kv_heads": 4, "head_dim": 64, "dtype": "fp32", "causal": 1}
            found.append(_sample("attention", seconds, **case, phase=phase, **more))
    return found


def _profile(at_once: float | None = None) -> MachineProfile:
    """at_once: how much slower two processes at once are."""
    samples = [*_samples(), _sample("host_t1", 8e-6, what="mean"), _sample("host_t4", 2e-6, what="mean")]
    for op, per_byte in (("all_to_all", 1e-9), ("all_reduce", 5e-9), ("all_gather", 4e-9), ("reduce_scatter", 4e-9)):
        for ranks, groups in ((2, "one"), (2, "all"), (4, "one")):
            base = 1e-3 * ranks * (2 if groups == "all" else 1) * (1 if op == "all_to_all" else 5)
            case = {"ranks": ranks, "nodes": 1, "world": 4, "groups": groups, "dtype": "fp32"}
            samples += [_sample(op, base + per_byte * s, bytes=s, **case) for s in SIZES]
    together = () if at_once is None else tuple(_samples(at_once, processes=2))
    machine = Machine(device_name="a CPU", device_type="cpu", cores=2, threads=2, memory_bytes=8e9)
    return MachineProfile(
        name="made up", created_at="2026-01-01", mode="quick", machine=machine, samples=tuple(samples),
        at_once=together,
    )  # fmt: skip


def _case(*parallel: str, ranks: int) -> tuple[Workload, Plan, Target]:
    config = load_config("olmoe-tiny", parallel).config
    return workload_of(config), plan_of(config, ranks, ranks), target_of_profile(_profile(1.5), ranks)


class TestSubstitution:
    @pytest.mark.parametrize(
        ("parallel", "ranks"), [((), 1), ((), 2), (("parallel.ep=2",), 2), (("parallel.pp=2",), 2)]
    )
    def test_parts_that_are_as_predicted_change_nothing(self, parallel: tuple[str, ...], ranks: int) -> None:
        workload, plan, target = _case(*parallel, ranks=ranks)
        costs = price_step(count_step(workload, plan), workload, plan, target)
        constants = target.constants_for(workload, ranks)
        measured = _as_predicted(costs, constants, plan.pp)
        changed = substitute(costs, constants, measured, GROUPS)
        totals = [compose(each, plan, target, constants, exact=True).total for each in (costs, changed)]
        assert totals[1] == pytest.approx(totals[0], rel=1e-9)

    def test_each_group_puts_its_own_error_right(self) -> None:
        """Kernels took twice, the host half and exchanges three times what was predicted."""
        workload, plan, target = _case("parallel.ep=2", ranks=2)
        costs = price_step(count_step(workload, plan), workload, plan, target)
        constants = target.constants_for(workload, 2)
        predicted = compose(costs, plan, target, constants, exact=True)
        (own,) = _as_predicted(costs, constants, 1)
        rank = RankAccount(2 * own.passes_s, 2 * own.update_s, 0.5 * own.host_s, (3 * own.transfer_s,), 100)
        found = split(workload, plan, target, RanksStep((rank.step_s,), (rank, rank)))
        kernels, host, sent = own.passes_s + own.update_s, own.host_s, own.transfer_s
        assert found.predicted_s == pytest.approx(predicted.total)
        assert found.parts["kernels"] * found.measured_s == pytest.approx(-kernels)
        assert found.parts["host"] * found.measured_s == pytest.approx(0.5 * host)
        assert found.parts["communication"] * found.measured_s == pytest.approx(-2 * sent)
        assert found.parts["overlap"] == pytest.approx(0, abs=1e-9)
        assert sum(found.parts.values()) == pytest.approx(found.error)

    def test_a_slow_pipeline_rank_makes_the_others_wait(self) -> None:
        workload, plan, target = _case("parallel.pp=2", "train.micro_batch_size=1", ranks=2)
        costs = price_step(count_step(workload, plan), workload, plan, target)
        constants = target.constants_for(workload, 2)
        first, second = _as_predicted(costs, constants, 2)
        slow = substitute(costs, constants, [first, replace(second, passes_s=3 * second.passes_s)], ("kernels",))
        before, after = (compose(each, plan, target, constants, exact=True) for each in (costs, slow))
        assert after.compute == pytest.approx(before.compute * 3, rel=0.3)
        assert after.total > before.total + 1.5 * second.passes_s

    def test_means_over_the_ranks_of_a_place(self) -> None:
        accounts = [RankAccount(float(i), 1, 0, (), 9) for i in range(4)]
        found = by_pipeline_rank(RanksStep((1.0,), tuple(accounts)), Plan(pp=2, dp=2))
        assert [one.passes_s for one in found] == [0.5, 2.5]

    def test_only_on_a_cpu(self) -> None:
        from moestro.predict.oracle import measure_and_split
        from moestro.predict.target import target_of

        with pytest.raises(MoestroError, match="--profile"):
            measure_and_split(load_config("olmoe-tiny", ()).config, target_of("h100-8"), 1)


def _as_predicted(costs: object, constants: object, pp: int) -> list[Measured]:
    from moestro.predict.oracle import _sent

    found = []
    for rank in range(pp):
        own = [s for s in costs.stages if s.rank == rank]  # type: ignore[attr-defined]
        passes = [cost for s in own for cost in (s.forward, s.backward, s.weight)]
        m, once = costs.micro_batches, costs.once[rank]  # type: ignore[attr-defined]
        found.append(
            Measured(
                m * sum(c.compute_s(constants) for c in passes),
                once[2].compute_s(constants),
                m * sum(c.host_s(constants) for c in passes) + sum(c.host_s(constants) for c in once),
                m * sum(_sent(c, constants) for c in passes) + sum(_sent(c, constants) for c in once),
            )
        )
    return found


def test_parts_add_up() -> None:
    found = Split(2.0, (1.0, 1.5, 1.7, 1.9))
    assert found.error == -0.5
    assert found.parts == pytest.approx({"kernels": -0.25, "host": -0.1, "communication": -0.1, "overlap": -0.05})


class TestProcesses:
    def test_operations_are_those_of_as_many_processes(self) -> None:
        profile = _profile(1.5)
        for processes, slow, threads in ((1, 1.0, 2), (2, 1.5, 1), (4, 1.5, 1)):
            found, each = of_processes(profile, processes)
            (square,) = [s for s in found.samples if s.op == "gemm" and s.case["m"] == 512]
            assert square.median_s == pytest.approx(slow * (1e-6 + 2 * 512**3 / 1e10))
            assert each == threads

    def test_more_processes_than_cores_take_turns(self) -> None:
        workload, _, _ = _case(ranks=1)
        two, four = (target_of_profile(_profile(1.5), n).constants_for(workload, n) for n in (2, 4))
        assert four.gemm == 2 * two.gemm
        assert four.launch_s == 2 * two.launch_s

    def test_short_exchanges_go_by_all_to_all(self) -> None:
        found, _ = of_processes(_profile(), 4)
        times = {(s.op, s.case["bytes"], s.case["ranks"]): s.median_s for s in found.samples if "ranks" in s.case}
        assert times["all_gather", 2**16, 4] == pytest.approx(times["all_to_all", 2**16, 4])
        assert times["all_reduce", 2**16, 4] == pytest.approx(times["all_to_all", 2**18, 4])  # of everyone's buffer
        assert times["all_gather", 2**22, 4] > 4 * times["all_to_all", 2**22, 4]
        assert SHORT_BYTES == 2**18

    def test_groups_of_a_larger_world_exchange_at_once(self) -> None:
        alone, among = ({s.median_s for s in of_processes(_profile(), n)[0].samples if _pair(s)} for n in (2, 4))
        assert max(among) == pytest.approx(2 * max(alone), rel=0.01)

    def test_a_measured_step_corrects_the_constants(self) -> None:
        profile = _profile()
        plain = target_of_profile(profile, 1)
        workload, plan = (
            f(load_config("mixtral-tiny", ("train.global_batch_size=4",)).config) for f in (workload_of, _alone)
        )
        time = compose(
            price_step(count_step(workload, plan), workload, plan, plain), plan, plain, plain.constants_for(workload, 1)
        )
        case = {"preset": "mixtral-tiny", "batch": 4, "processes": 1}
        steps = (
            _sample(STEP, 1.4 * (time.compute + time.optimizer), **case, what="operations"),
            _sample(STEP, 0.8 * time.host, **case, what="host"),
        )
        found = target_of_profile(profile.model_copy(update={"at_once": steps}), 1)
        assert found.constants is not None
        assert plain.constants is not None
        assert found.constants.gemm == pytest.approx(1.4 * plain.constants.gemm, rel=0.02)
        assert found.constants.launch_s == pytest.approx(0.8 * plain.constants.launch_s, rel=0.02)


class TestTurns:
    """What a pipeline waits where processes share cores: times of 10 s of work and a bubble."""

    def test_a_core_for_each_process_changes_nothing(self) -> None:
        assert waits_s(_time(3.0), 4, 1.0) == 3.0
        assert waits_s(_time(0.0), 1, 2.0) == 0.0

    def test_others_have_the_core_of_one_that_waits(self) -> None:
        """Two stages of two processes on two cores: always one of them works, and both cores are busy."""
        assert waits_s(_time(5.0), 2, 2.0) == 0
        assert waits_s(_time(5.0), 4, 4.0) == 0

    def test_cores_are_idle_while_too_few_work(self) -> None:
        """Four stages on two cores: as a pipeline of two, at full speed: a third of the stages to wait for, half as
        long."""
        assert waits_s(_time(6.0), 4, 2.0) == pytest.approx(6.0 / 3 / 2)

    @pytest.mark.parametrize("bubble", [0.0, 1.0, 10.0, 30.0, 100.0])
    @pytest.mark.parametrize(("pp", "turns"), [(2, 1.5), (2, 2.0), (4, 1.5), (4, 2.0), (8, 2.0), (4, 8.0)])
    def test_is_between_a_core_for_each_and_all_slowed_alike(self, bubble: float, pp: int, turns: float) -> None:
        found = waits_s(_time(bubble), pp, turns)
        assert 0 <= found <= bubble
        assert 10 + found >= (10 + bubble) / turns - 1e-9

    def test_a_pipeline_of_four_processes_on_two_cores(self) -> None:
        """As long as its work takes on the two cores."""
        workload, plan, target = _case("parallel.pp=2", "train.micro_batch_size=1", ranks=4)
        found = predict_step(workload, plan, target, exact=True).time
        assert target.turns(4) == 2
        assert found.bubble == 0
        assert predict_step(workload, plan.model_copy(update={"dp": 1}), _case(ranks=2)[2], exact=True).time.bubble > 0


def _time(bubble: float) -> TimeBreakdown:
    return TimeBreakdown(compute=7, host=1, communication=1, bubble=bubble, optimizer=1)


def test_the_host_makes_calls_for_exchanges() -> None:
    """Of two data ranks: gradients once a step, their norm, and two exchanges of a few bytes."""
    workload, plan, target = _case(ranks=2)
    graph = count_step(workload, plan)
    nodes = [*graph.ranks[0].before, *graph.ranks[0].gradients, *graph.ranks[0].update]
    sent = sum(node.times for node in nodes if not isinstance(node, Kernel))
    costs = price_step(graph, workload, plan, target)
    kernels = sum(node.launches * node.times for node in graph.ranks[0].update if isinstance(node, Kernel))
    calls = (costs.once[0][2].launches - kernels) * CALLS
    assert sent > 0
    assert calls == pytest.approx(CALLS_OF_EXCHANGE * (sent + TO_ALL))


def _pair(sample: Sample) -> bool:
    return sample.op == "all_to_all" and sample.case["ranks"] == 2 and sample.case["bytes"] == 2**10


def _alone(config: object) -> Plan:
    return plan_of(config, 1, 1)  # type: ignore[arg-type]


class TestAccount:
    def test_times_add_up_and_waits_belong_to_exchanges(self) -> None:
        """Two operations, an exchange that is waited for, an operation of the update; ends at 1000 µs."""
        update = (_event("moestro.phase optimizer", 845, 960),)
        events = [
            ("aten::mm", 10, 110, ()),
            ("aten::mm", 120, 220, ()),
            ("c10d::alltoall_base_", 230, 280, ()),
            ("aten::mm", 790, 840, ()),
            ("aten::add", 850, 950, update),
        ]
        spans = [Span(_event(name, start, end), around, 0, 0) for name, start, end, around in events]
        found = rank_account(Spans(_event("moestro.step", 0, 1000), spans, 0))
        assert found.exchanges == pytest.approx((50e-6 + 500e-6,))
        assert found.passes_s == pytest.approx(250e-6)
        assert found.update_s == pytest.approx(100e-6)
        assert found.step_s == pytest.approx(1000e-6)
        assert found.calls == 4

    def test_which_gaps_are_waits(self) -> None:
        """Behind an exchange any beyond the usual; elsewhere long ones, once something was sent."""
        times = [(10, 20), (30, 40), (340, 350), (360, 370), (480, 490), (500, 510), (820, 830)]
        names = ["aten::mm"] * 3 + ["c10d::alltoall_base_"] + ["aten::mm"] * 3
        spans = [Span(_event(n, a, b), (), 0, 0) for n, (a, b) in zip(names, times, strict=True)]
        found = rank_account(Spans(_event("moestro.step", 0, 830), spans, 0))
        assert found.exchanges == pytest.approx((10e-6 + 100e-6 + 300e-6,))
        assert found.host_s == pytest.approx(360e-6)

    def test_the_last_rank_waits_for_nobody(self) -> None:
        ranks = [RankAccount(0, 0, 0, exchanges, 1) for exchanges in ((5.0, 1.0), (2.0, 4.0))]
        assert transfers_s(ranks) == [3.0, 3.0]


def _event(name: str, start_us: int, end_us: int) -> Event:
    return Event(name, start_us * 1000, end_us * 1000)
