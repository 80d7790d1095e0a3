"""The whole step simulated, by hand: times are sums of powers of two, so that equality is exact."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.config.model import ModelConfig
from moestro.config.moe import MoEConfig
from moestro.config.plan import Plan, Workload
from moestro.errors import MoestroError
from moestro.graph.count import count_step, rank_of
from moestro.graph.words import Collective, Kernel, Node, Parameters, Piece, RankStep, Run, Saved, Stage, StepGraph
from moestro.hardware.catalog import load_device
from moestro.hardware.curves.network import CollectiveModel
from moestro.predict.blocks import Block, run_block
from moestro.predict.chains import Chain, Link, Writer
from moestro.predict.constants import Constants
from moestro.predict.costs import price, pricer_of
from moestro.predict.curves import DeviceCurves
from moestro.predict.orders import Pass
from moestro.predict.program import BUCKETS
from moestro.predict.schedule import simulate_pipeline
from moestro.predict.simulate import PASSES, Simulation, simulate_passes, simulate_step
from moestro.predict.step import step_time
from moestro.predict.timeline import COMPUTE

MODEL = ModelConfig(
    vocab_size=4096, hidden_size=512, num_layers=8, num_heads=8, intermediate_size=1024,
    moe=MoEConfig(num_experts=16, top_k=2, expert_hidden_size=256),
)  # fmt: skip
WORK = Workload(model=MODEL, seq_len=1024, global_batch_size=64)

PERFECT = Constants(
    gemm=1, gemm_low=1, grouped=1, grouped_low=1, attention=1, memory=1, optimizer=1, inside=1, between=1,
    launch_s=0, collective_host_s=0, step_s=0, hidden=1, contention=0,
)  # fmt: skip


def kernel(seconds: float, name: str = "work", times: float = 1, launches: int = 1) -> Kernel:
    """Its price is its number of FLOPs."""
    return Kernel("gemm", "dense", name, (1, 1, 1, 1), "bf16", seconds, 0, times, launches)


def sent(seconds: float, dimension: str = "ep", overlap: bool = True, times: float = 1, **more: str) -> Collective:
    values = {"op": "all_to_all", "part": "dispatch", "name": "exchange", **more}
    return Collective(
        dimension=dimension, ranks=2, bytes=seconds, dtype="bf16", times=times, overlap=overlap, **values  # type: ignore[arg-type]
    )  # fmt: skip


def seconds(node: Node) -> float:
    return node.times * (node.bytes if isinstance(node, Collective) else node.flops)


def stage(index: int, plan: Plan, *pieces: Piece, size: float = 0.0) -> Stage:
    runs = tuple(Run(piece) for piece in pieces)
    return Stage(index, rank_of(index, plan), (), Parameters(dense=1), Saved(0, 0, 0), runs, size)


def graph(stages: Sequence[Stage], plan: Plan, m: int, **once: tuple[Node, ...]) -> StepGraph:
    of = {"before": (), "gradients": (), "update": (), **once}
    return StepGraph(plan.world_size, m, 1, 0.0, tuple(stages), tuple(RankStep(r, **of) for r in range(plan.pp)))


def run(
    of: StepGraph, plan: Plan, constants: Constants = PERFECT, slow: dict[int, float] | None = None
) -> Simulation:  # fmt: skip
    return simulate_passes(of, plan, seconds, lambda size: size, constants, slow or {})


def plain(
    plan: Plan, m: int, times: Sequence[tuple[float, float, float]], sizes: Sequence[float] | None = None
) -> StepGraph:  # fmt: skip
    """Stages with one kernel of each kind. sizes: seconds of what they send."""
    pieces = [Piece((kernel(f),), (kernel(b),), (kernel(w),)) for f, b, w in times]
    sends = sizes or [0.0] * len(pieces)
    return graph([stage(i, plan, piece, size=sends[i]) for i, piece in enumerate(pieces)], plan, m)


SCHEDULES = [
    ("gpipe", 4, 1, 8), ("1f1b", 4, 1, 8), ("1f1b", 1, 1, 3), ("interleaved", 4, 2, 8), ("interleaved", 2, 4, 6),
    ("zero_bubble", 4, 1, 8), ("zero_bubble", 4, 2, 8), ("zbv", 4, 2, 8), ("dualpipe", 4, 1, 8),
    ("dualpipev", 4, 2, 12),
]  # fmt: skip


class TestAgainstThePipeline:
    """Without collectives and host times it is `simulate_pipeline`, to the last bit."""

    @pytest.mark.parametrize(("schedule", "pp", "vpp", "m"), SCHEDULES)
    def test_uneven_stages(self, schedule: str, pp: int, vpp: int, m: int) -> None:
        plan = Plan(pp=pp, vpp=vpp, schedule=schedule)  # type: ignore[arg-type]
        times = [(1 + i % 3 / 4, 1.5 + i % 2 / 8, 0.5 + i % 5 / 16) for i in range(pp * vpp)]
        for size in (0.0, 0.125):
            sends = [size * (1 + i % 3) for i in range(pp * vpp)]
            found = run(plain(plan, m, times, sends), plan)
            known = simulate_pipeline(schedule, pp, vpp, m, *map(list, zip(*times, strict=True)), sends)
            assert found.total_s == known.total_s
            assert tuple(rank.compute_s for rank in found.ranks) == known.busy_s
            assert tuple(rank.bubble_s for rank in found.ranks) == known.bubble_s

    def test_slow_ranks(self) -> None:
        plan, times = Plan(pp=4), [(1.0, 1.0, 1.0)] * 4
        for rank in range(4):
            for factor in (0.5, 1.5, 4.0):
                slow = [factor if r == rank else 1.0 for r in range(4)]
                known = simulate_pipeline("1f1b", 4, 1, 8, *map(list, zip(*times, strict=True)), slow=slow)
                assert run(plain(plan, 8, times), plan, slow={rank: factor}).total_s == known.total_s

    def test_deep_pipelines(self) -> None:
        plan = Plan(pp=2, in_flight=(4, 1))
        deep, shallow = (run(plain(p, 8, [(1, 1, 0)] * 2, [2.0, 0]), p) for p in (plan, Plan(pp=2)))
        assert deep.total_s < shallow.total_s


def chain(*links: tuple[str, float] | Link) -> Chain:
    made: list[Link] = []
    for link in links:
        needs = (len(made) - 1,) if made else ()
        made.append(link if isinstance(link, Link) else Link("", link[0], link[1], 1, 0.0, needs))
    return tuple(made)


def alone(*links: tuple[str, float]) -> Block:
    return run_block([chain(*links)])


class TestBlocks:
    """Streams of one rank: the cases of Maya (arXiv 2503.20191) that concern one device."""

    def test_a_serial_stream(self) -> None:
        block = alone((COMPUTE, 4), (COMPUTE, 8), (COMPUTE, 2))
        assert block.length_s == 14
        assert block.busy_s == {COMPUTE: 14}

    def test_two_streams_in_turns_show_all_that_is_sent(self) -> None:
        block = alone((COMPUTE, 4), ("ep", 8), (COMPUTE, 2), ("ep", 1))
        assert block.length_s == 15
        assert block.exposed_s == {"ep": 9}

    def test_two_chains_hide_each_other(self) -> None:
        one = chain((COMPUTE, 4), ("ep", 4), (COMPUTE, 4), ("ep", 4))
        block = run_block([one, one])
        assert block.length_s == 4 * 4 + 4  # the last exchange
        assert block.ends_s == (16, 20)
        assert block.exposed_s == {"ep": 4}

    def test_an_exchange_longer_than_what_is_beside_it(self) -> None:
        block = run_block([chain((COMPUTE, 1), ("ep", 8), (COMPUTE, 1)), chain((COMPUTE, 2))])
        assert block.length_s == 10
        assert block.exposed_s == {"ep": 6}

    def test_streams_do_not_hold_up_each_other(self) -> None:
        first = chain((COMPUTE, 1), ("ep", 8))
        assert run_block([first, chain(("tp", 8))]).length_s == 9
        assert run_block([first, chain(("ep", 8))]).length_s == 16  # the same stream: one after the other

    def test_what_blocks_is_beside_nothing(self) -> None:
        blocks = Link("", "tp", 4, 1, 0.0, (), alone=True)
        block = run_block([(blocks,), chain((COMPUTE, 8))])
        assert block.length_s == 12
        assert block.exposed_s == {"tp": 4}

    def test_computation_is_slower_beside_communication(self) -> None:
        both = [chain((COMPUTE, 8)), chain(("ep", 4))]
        assert run_block(both, contention=0.5).length_s == 8 + 2
        assert run_block([chain(("ep", 4)), chain((COMPUTE, 8))], contention=0.5).length_s == 10
        assert run_block([chain((COMPUTE, 8)), chain(("ep", 4)), chain(("tp", 4))], contention=0.5).length_s == 10

    def test_launches_of_many_small_kernels(self) -> None:
        block = run_block([(Link("", COMPUTE, 4.0, 4, 32.0, ()),)])
        assert block.late_s == 32 + 1  # the last of four kernels after the last launch
        block = run_block([(Link("", COMPUTE, 64.0, 4, 32.0, ()),)])
        assert block.late_s == 8 + 64  # all of them after the first

    @given(
        st.lists(
            st.lists(st.tuples(st.sampled_from([COMPUTE, "ep", "tp"]), st.integers(0, 9)), max_size=12),
            min_size=1, max_size=3,
        ),
        st.sampled_from([0.0, 0.25]),
    )  # fmt: skip
    def test_properties(self, parts: list[list[tuple[str, int]]], contention: float) -> None:
        chains = [chain(*part) for part in parts]
        block = run_block(chains, contention)
        assert len(block.ran) == sum(map(len, parts))
        for stream in (COMPUTE, "ep", "tp"):
            row = [ran for ran in block.ran if ran.link.stream == stream]
            assert all(b.start_s >= a.end_s - 1e-9 for a, b in pairwise(row))
        work = [sum(seconds for _, seconds in part) for part in parts]
        assert max(work, default=0) - 1e-9 <= block.length_s <= (1 + contention) * sum(work) + 1e-9
        idle = block.length_s - block.busy_s.get(COMPUTE, 0.0)
        assert sum(block.exposed_s.values()) == pytest.approx(idle, abs=1e-9)


class TestChains:
    writer = Writer(seconds, PERFECT)

    def of(self, *nodes: Node, chunks: int = 1) -> Block:
        plan = Plan()
        return run_block([Writer(seconds, PERFECT, chunks).forward(stage(0, plan, Piece(nodes)))])

    def test_kernels_in_a_row_are_one_link(self) -> None:
        links = self.writer.forward(stage(0, Plan(), Piece((kernel(1), kernel(2), kernel(4, launches=3)))))
        assert [(link.seconds, link.launches) for link in links] == [(7, 5)]

    def test_an_exchange_holds_up_its_own_micro_batch(self) -> None:
        assert self.of(kernel(1), sent(4), kernel(2)).length_s == 7

    def test_gathered_keys_pass_beside_one_kernel(self) -> None:
        assert self.of(kernel(1), sent(4, "cp"), kernel(2), kernel(8)).length_s == 1 + 4 + 8
        assert self.of(kernel(1), sent(4, "cp"), kernel(6), kernel(8)).length_s == 1 + 6 + 8

    def test_weights_are_fetched_a_layer_early(self) -> None:
        fetch = sent(4, "dp", op="all_gather", part="sharding")
        plan, layer = Plan(), Piece((fetch, kernel(6)))
        block = run_block([self.writer.forward(stage(0, plan, layer, layer, layer))])
        assert block.length_s == 4 + 3 * 6
        assert block.exposed_s == {"dp": 4}

    def test_nothing_waits_for_gradients(self) -> None:
        scatter = sent(4, "dp", op="reduce_scatter", part="sharding")
        block = self.of(kernel(1), scatter, kernel(2))
        assert block.length_s == 3
        assert block.last_s["dp"] == 5

    def test_chunks_of_experts_hide_each_other(self) -> None:
        nodes = (kernel(1), sent(2, times=2), kernel(2, times=2), sent(2, times=2), kernel(1))
        assert self.of(*nodes).length_s == 1 + 4 + 4 + 4 + 1
        assert self.of(*nodes, chunks=2).length_s == 1 + 2 + 2 + 2 + 2 + 2 + 1 - 2 + 0  # dispatch 2 beside chunk 1


def layer(exchange: float, overlap: bool = True) -> Piece:
    one = (kernel(1), sent(exchange, overlap=overlap), kernel(1))
    return Piece(one, one, (kernel(2),))


class TestSteps:
    def pipe(self, schedule: str, exchange: float, m: int = 16, pp: int = 4, overlap: bool = True) -> Simulation:
        vpp = 2 if schedule in ("interleaved", "dualpipev", "zbv") else 1
        plan = Plan(pp=pp, vpp=vpp, dp=2, ep=2, schedule=schedule, overlap_dispatch=overlap)  # type: ignore[arg-type]
        stages = [stage(i, plan, *[layer(exchange, overlap)] * 4) for i in range(pp * vpp)]
        return run(graph(stages, plan, m), plan)

    @pytest.mark.parametrize("schedule", ["dualpipe", "dualpipev", "1f1b", "interleaved", "gpipe", "zbv"])
    def test_seconds_add_up(self, schedule: str) -> None:
        found = self.pipe(schedule, 0.5)
        for number, rank in enumerate(found.ranks):
            assert rank.total_s == pytest.approx(found.total_s)
            rows: dict[str, list[tuple[float, float]]] = {}
            for event in found.timeline(number):
                rows.setdefault(event.row, []).append((event.start_s, event.end_s))
            for name, row in rows.items():
                assert all(b[0] >= a[1] - 1e-9 for a, b in pairwise(sorted(row))), name
                if name != PASSES:
                    assert sum(end - start for start, end in row) == pytest.approx(rank.busy_s[name])
                    assert rank.busy_s[name] <= found.total_s + 1e-9

    def test_dualpipe_hides_exchanges_in_its_pairs(self) -> None:
        shown = {overlap: self.pipe("dualpipe", 0.5, 64, overlap=overlap) for overlap in (True, False)}
        rank = shown[True].ranks[1]
        assert rank.exposed_s["ep"] < 0.3 * rank.busy_s["ep"]
        assert shown[False].ranks[1].exposed_s["ep"] == pytest.approx(shown[False].ranks[1].busy_s["ep"])
        assert shown[True].total_s < shown[False].total_s - 0.6 * rank.busy_s["ep"]

    def test_micro_batches_in_turns_hide_them_without_a_pipeline(self) -> None:
        plan = Plan(dp=2, ep=2, overlap_dispatch=True)
        found = run(graph([stage(0, plan, *[layer(0.5)] * 4)], plan, 8), plan)
        assert found.ranks[0].exposed_s["ep"] < 0.35 * found.ranks[0].busy_s["ep"]

    def test_a_slow_rank_costs_what_it_computes_longer(self) -> None:
        plan = Plan(dp=2, ep=2)
        of = graph([stage(0, plan, layer(0.5, overlap=False))], plan, 4)
        base = run(of, plan)
        assert run(of, plan, slow={0: 1.5}).total_s - base.total_s == 0.5 * base.ranks[0].busy_s[COMPUTE]

    def test_a_step_bound_by_its_host(self) -> None:
        """The control: without the host's times it is far too fast."""
        plan = Plan(pp=2)
        tiny = Piece((kernel(2**-10, launches=64),), (kernel(2**-9, launches=128),))
        of = graph([stage(i, plan, tiny) for i in range(2)], plan, 8)
        bound = run(of, plan, PERFECT.model_copy(update={"launch_s": 2**-8}))
        assert bound.total_s >= 8 * 192 * 2**-8
        assert bound.total_s > 20 * run(of, plan).total_s
        assert bound.ranks[0].host_s > 0.6 * bound.total_s

    def test_a_host_that_is_ahead_costs_nothing(self) -> None:
        plan, times = Plan(pp=4), [(1.0, 1.0, 1.0)] * 4
        slower = run(plain(plan, 8, times), plan, PERFECT.model_copy(update={"launch_s": 2**-6}))
        assert slower.total_s == run(plain(plan, 8, times), plan).total_s + 2**-6  # the first launch

    def test_gradients_are_reduced_while_the_last_backward_computes(self) -> None:
        plan = Plan(dp=2)
        work = Piece((kernel(8),), (kernel(8),), (kernel(8),))
        for seconds, more in ((4.0, 4 / BUCKETS), (16.0, 16 / BUCKETS), (64.0, 64 - 14)):
            nodes = (sent(seconds, "dp", op="all_reduce", part="gradients"),)
            found = run(graph([stage(0, plan, work)], plan, 4, gradients=nodes), plan)
            assert found.total_s == 4 * 24 + more, seconds
            assert found.ranks[0].exposed_s["dp"] == more
        nodes = (sent(4, "dp", overlap=False),)
        assert run(graph([stage(0, plan, work)], plan, 4, gradients=nodes), plan).total_s == 4 * 24 + 4

    def test_what_is_left_of_them_slows_the_passes_that_follow(self) -> None:
        plan, work = Plan(vpp=2, dp=2, schedule="interleaved"), Piece((kernel(1),), (kernel(16),))
        nodes = (sent(64, "dp", op="all_reduce", part="gradients"),)
        of = graph([stage(0, plan, work), stage(1, plan, work)], plan, 1, gradients=nodes)
        found = run(of, plan, PERFECT.model_copy(update={"contention": 0.5}))
        # Each stage's take 32 s. The first ones run from 2 s on, 14 s beside their own pass, which ends after 23, and
        # 11 s beside the next; there the others follow at once.
        first, second = 14 * 0.5, 11 * 0.5
        assert found.ranks[0].compute_s == 2 * 17 + first + second + 0.5 * (16 + second - 11)

    def test_weights_are_gathered_while_the_first_forward_computes(self) -> None:
        plan, work = Plan(dp=2), Piece((kernel(8),), (kernel(16),))
        for seconds, more in ((4.0, 4 / BUCKETS), (64.0, 64 - 7)):
            nodes = (sent(seconds, "dp", op="all_gather", part="weights"),)
            assert run(graph([stage(0, plan, work)], plan, 4, before=nodes), plan).total_s == 4 * 24 + more

    def test_the_norm_waits_for_all_ranks(self) -> None:
        plan = Plan(pp=2)
        update = (kernel(1), sent(2, "world", overlap=False), kernel(4))
        of = plain(plan, 4, [(1, 1, 1), (1, 1, 1)])
        found = run(graph(of.stages, plan, 4, update=update), plan)
        assert found.total_s == run(of, plan).total_s + 7
        assert [rank.optimizer_s for rank in found.ranks] == [7, 7]
        slow = run(graph(of.stages, plan, 4, update=update), plan, slow={1: 2})
        assert [rank.optimizer_s for rank in slow.ranks] == [7, 12]
        assert slow.total_s == run(of, plan, slow={1: 2}).total_s + 11  # the first rank is the last to be there

    def test_a_shared_embedding_joins_the_ends(self) -> None:
        plan = Plan(pp=2)
        of = plain(plan, 4, [(1, 1, 1), (1, 1, 1)])
        found = run(graph(of.stages, plan, 4, gradients=(sent(8, "pp", overlap=False),)), plan)
        assert found.total_s == run(of, plan).total_s + 8
        assert all(rank.total_s == found.total_s for rank in found.ranks)

    def test_a_deadlock_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        orders = [
            [Pass("F", 0, 0), Pass("B", 0, 0), Pass("F", 0, 1), Pass("B", 0, 1)],
            [Pass("F", 1, 1), Pass("B", 1, 1), Pass("F", 1, 0), Pass("B", 1, 0)],
        ]
        monkeypatch.setattr("moestro.predict.simulate.pipeline_orders", lambda *_: orders)
        with pytest.raises(MoestroError, match="deadlock: rank 0 waits to run B of micro-batch 0 on stage 0; rank 1"):
            run(plain(Plan(pp=2), 2, [(1, 1, 1)] * 2), Plan(pp=2))


class TestOnDevices:
    def simulated(self, plan: Plan, slow: dict[int, float] | None = None) -> Simulation:
        device = load_device("h100-sxm")
        pricer = pricer_of(DeviceCurves(device, (), CollectiveModel((), device)), WORK.routing, plan, 8)
        return simulate_step(count_step(WORK, plan), plan, pricer, Constants(), slow)

    @settings(max_examples=8, deadline=None)
    @given(
        st.sampled_from([{"pp": 2}, {}, {"pp": 2, "schedule": "zero_bubble"}]),
        st.booleans(),
        st.sampled_from([0, 1, 3]),
    )
    def test_seconds_add_up(self, layout: dict[str, object], over: bool, zero: int) -> None:
        found = self.simulated(Plan(dp=2, ep=2, zero=zero, overlap_dispatch=over, **layout))  # type: ignore[arg-type]
        for rank in found.ranks:
            assert rank.total_s == pytest.approx(found.total_s)
            assert min(rank.compute_s, rank.host_s, rank.bubble_s, *rank.exposed_s.values()) >= -1e-12

    @pytest.mark.parametrize(
        "layout",
        [{}, {"pp": 4}, {"pp": 4, "schedule": "gpipe"}, {"pp": 2, "vpp": 2, "schedule": "interleaved"}, {"tp": 2},
         {"pp": 4, "schedule": "zero_bubble"}, {"pp": 2, "vpp": 2, "schedule": "zbv"}],
    )  # fmt: skip
    def test_the_closed_form_is_near(self, layout: dict[str, object]) -> None:
        plan = Plan(dp=2, ep=2, zero=1, **layout)  # type: ignore[arg-type]
        device = load_device("h100-sxm")
        pricer = pricer_of(DeviceCurves(device, (), CollectiveModel((), device)), WORK.routing, plan, 8)
        of, constants = count_step(WORK, plan), Constants(contention=0, launch_s=0, collective_host_s=0)
        found = simulate_step(of, plan, pricer, constants).total_s
        assert step_time(price(of, pricer), plan, constants).total == pytest.approx(found, rel=0.05)

    def test_wrong_ranks(self) -> None:
        for rank in (2, -1):
            with pytest.raises(MoestroError, match=f"no pipeline rank {rank} that could be slow; they are 0 to 1"):
                self.simulated(Plan(pp=2), slow={rank: 1.5})
        for factor in (0.0, -1.0, float("nan"), float("inf")):
            with pytest.raises(MoestroError, match="give a factor above 0"):
                self.simulated(Plan(pp=2), slow={0: factor})

    def test_slower_ranks_make_longer_steps(self) -> None:
        totals = [self.simulated(Plan(pp=2), slow={1: factor}).total_s for factor in (1.0, 1.5, 3.0)]
        assert totals == sorted(totals)
        assert totals[2] > 1.5 * totals[0]
