"""The walk over host and streams by hand: all times are sums of powers of two, so that equality is exact."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.config.plan import Plan
from moestro.errors import MoestroError
from moestro.graph.classic import DLRM_DDP, dlrm
from moestro.graph.count import count_step
from moestro.graph.words import Collective, Node
from moestro.predict.constants import Constants
from moestro.predict.perfetto import stage_trace
from moestro.predict.predict import slowest_stage
from moestro.predict.program import BUCKETS, stage_ops
from moestro.predict.timeline import COMPUTE, HOST, NO_HOST, HostTimes, Op, RankClass, Timeline, walk

from .test_predict import WORK, h100

TIMES = HostTimes(1, 2, 4, 8, 16)


def alone(*ops: Op) -> Timeline:
    return walk([RankClass("one", ops)])[0]


def collective(name: str, seconds: float, *needs: int, stream: str = "ep", **more: object) -> Op:
    return Op(name, (seconds,), stream=stream, needs=needs, group=stream, **more)  # type: ignore[arg-type]


class TestOneRank:
    def test_launch_bound_chain_takes_what_the_host_takes(self) -> None:
        ops = [Op(f"op {i}", (0.5,) * 3, TIMES) for i in range(5)]
        line = alone(*ops)
        assert TIMES.of(3) == 1 + 2 + 3 * 8 + 2 * 16 + 4
        assert line.total_s == 5 * TIMES.of(3)
        assert line.busy_s(COMPUTE) == 5 * 3 * 0.5
        assert line.busy_s(HOST) == line.total_s - 5 * TIMES.t1_s

    def test_the_last_kernel_may_outlast_the_host(self) -> None:
        assert alone(Op("op", (64.0,), TIMES)).total_s == 1 + 2 + 8 + 64

    def test_a_kernel_waits_for_its_own_launch(self) -> None:
        line = alone(Op("op", (1.0, 1.0), HostTimes(t4_s=8, t5_s=16)))
        assert [event.start_s for event in line.row(COMPUTE)] == [8, 32]
        assert line.total_s == 33

    def test_kernel_bound_chain_takes_what_kernels_take(self) -> None:
        ops = [Op(f"op {i}", (64.0, 128.0), TIMES) for i in range(5)]
        assert alone(*ops).total_s == TIMES.t1_s + TIMES.t2_s + TIMES.t4_s + 5 * (64 + 128)

    def test_host_work_launches_nothing(self) -> None:
        assert alone(Op("python", (), TIMES)).total_s == 1 + 16 == TIMES.of(0)
        assert alone(Op("kernel", (4.0,)), Op("python", (), TIMES)).total_s == 17

    def test_a_collective_beside_computation(self) -> None:
        first, sent = Op("first", (4.0,)), collective("send", 8.0, 0)
        line = alone(first, sent, Op("second", (5.0,)))
        assert line.total_s == 12
        assert line.exposed_s("ep") == 3
        assert alone(first, sent, Op("second", (16.0,))).exposed_s("ep") == 0

    def test_a_dependency_joins_streams(self) -> None:
        line = alone(Op("first", (4.0,)), collective("send", 8.0, 0), Op("second", (5.0,), needs=(1,)))
        assert line.total_s == 4 + 8 + 5
        assert line.exposed_s("ep") == 8

    def test_a_wait_holds_up_its_stream_only(self) -> None:
        ops = [Op("first", (4.0,)), collective("send", 8.0, 0), Op("wait", needs=(1,)), Op("second", (5.0,))]
        assert alone(*ops).total_s == 17
        assert alone(*ops[:2], ops[2]._replace(stream="dp"), ops[3]).total_s == 12

    def test_a_copy_to_the_host_blocks_it(self) -> None:
        host = HostTimes(t4_s=1.0)
        ops = [Op("compute", (32.0,), host), Op("copy", (2.0,), host, blocks=True), Op("next", (4.0,), host)]
        line = alone(*ops)
        assert line.total_s == 1 + 32 + 2 + 1 + 4
        assert line.row(HOST)[-1].start_s == 35
        assert alone(*(op._replace(blocks=False) for op in ops)).total_s == 1 + 32 + 2 + 4
        assert alone(ops[0], Op("synchronize", blocks=True), ops[2]).total_s == 1 + 32 + 1 + 4

    def test_without_host_times_tiny_kernels_are_far_too_fast(self) -> None:
        tiny = [Op("tiny", (0.5,), TIMES)] * 100
        assert alone(*tiny).total_s >= 20 * alone(*(op._replace(host=NO_HOST) for op in tiny)).total_s

    @given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9), st.sampled_from(["compute", "ep", "dp"])), max_size=30))
    def test_no_row_overlaps_itself_and_bounds_hold(self, parts: list[tuple[float, float, str]]) -> None:
        ops = [Op("op", (kernel, kernel), HostTimes(t4_s=launch), stream) for kernel, launch, stream in parts]
        line = alone(*ops)
        for row in (HOST, "compute", "ep", "dp"):
            assert all(later.start_s >= earlier.end_s - 1e-9 for earlier, later in pairwise(line.row(row)))
            assert line.busy_s(row) <= line.total_s + 1e-9
            assert -1e-9 <= line.exposed_s(row) <= line.busy_s(row) + 1e-9
        assert line.total_s <= sum(op.host.of(2) + sum(op.kernels_s) for op in ops) + 1e-9

    def test_nothing(self) -> None:
        assert alone().total_s == 0

    @pytest.mark.parametrize("need", [1, 2, -1])
    def test_what_comes_later_cannot_be_needed(self, need: int) -> None:
        with pytest.raises(MoestroError, match="operation 1 of one, 'second', needs one that is not before it"):
            alone(Op("first"), Op("second", needs=(need,)))

    def test_a_collective_is_one_kernel(self) -> None:
        with pytest.raises(MoestroError, match="'sum' of one must have one kernel"):
            alone(Op("sum", (1.0, 1.0), group="dp"))


def loop(compute: float, exchange: float, turns: int) -> list[Op]:
    ops: list[Op] = []
    for _ in range(turns):
        ops += [Op("compute", (compute,), needs=(len(ops) - 1,) if ops else ()), collective("send", exchange, len(ops))]
    return ops


class TestRanks:
    def test_a_collective_starts_with_its_last_rank_and_ends_for_all(self) -> None:
        quick, slow = walk([RankClass("a", loop(4, 2, 3)), RankClass("b", loop(4, 2, 3), slow=2)])
        assert quick.total_s == slow.total_s == 3 * (8 + 2)
        assert quick.row("ep") == slow.row("ep")

    def test_the_longest_says_how_long(self) -> None:
        lines = walk([RankClass("a", loop(4, 2, 1)), RankClass("b", loop(4, 3, 1))])
        assert [line.total_s for line in lines] == [7, 7]

    def test_without_the_maximum_the_error_grows_with_a_slow_rank(self) -> None:
        ops, off = loop(4, 2, 8), []
        for slow in (1.0, 1.25, 1.5, 2.0):
            together = walk([RankClass("a", ops), RankClass("b", ops, slow)])[0].total_s
            assert together == 8 * (4 * slow + 2)
            off.append(1 - alone(*ops).total_s / together)
        assert off[0] == 0
        assert all(later > earlier for earlier, later in pairwise(off))

    def test_each_waits_for_the_slowest_of_every_turn(self) -> None:
        ops = [[*loop(a, 1, 1), Op("second", (b,), needs=(1,)), collective("send", 1, 2)] for a, b in ((8, 2), (2, 8))]
        lines = walk([RankClass(f"rank {i}", each) for i, each in enumerate(ops)])
        assert [line.total_s for line in lines] == [18, 18]
        assert alone(*ops[0]).total_s == alone(*ops[1]).total_s == 12

    def test_other_orders_on_other_streams_are_no_deadlock(self) -> None:
        a, b = collective("a", 2), collective("b", 4, stream="dp")
        assert [line.total_s for line in walk([RankClass("x", [a, b]), RankClass("y", [b, a])])] == [4, 4]

    def test_other_orders_on_one_stream_are(self) -> None:
        a, b = collective("a", 2), collective("b", 4, stream="dp")._replace(stream="ep")
        with pytest.raises(MoestroError, match=r"deadlock: x in 'a' \(number 1 of ep\) waits for y; y in 'b'"):
            walk([RankClass("x", [a, b]), RankClass("y", [b, a])])

    def test_blocking_collectives_in_other_orders_are(self) -> None:
        a, b = collective("a", 2, blocks=True), collective("b", 4, stream="dp", blocks=True)
        with pytest.raises(MoestroError, match="deadlock: x in 'a'"):
            walk([RankClass("x", [a, b]), RankClass("y", [b, a])])

    def test_one_collective_too_few(self) -> None:
        with pytest.raises(MoestroError, match=r"x in 'send' \(number 3 of ep\) waits for y"):
            walk([RankClass("x", loop(1, 1, 3)), RankClass("y", loop(1, 1, 2))])


def price(node: Node) -> float:
    return 4.0 if isinstance(node, Collective) else 1.0


FREE = Constants(launch_s=0, collective_host_s=0)


class TestStage:
    def test_every_node_is_there_with_all_its_seconds(self) -> None:
        graph = count_step(WORK, Plan(dp=4, ep=2, recompute="block"))
        line = alone(*stage_ops(graph, 0, price, FREE))
        stage, rank = graph.stages[0], graph.ranks[0]
        once = (*rank.before, *rank.gradients, *rank.update)
        nodes = (*stage.forward, *stage.recompute, *stage.backward, *stage.weight, *once)
        kernels = sum(node.times for node in nodes if not isinstance(node, Collective))
        sent = sum(4 * node.times for node in nodes if isinstance(node, Collective))
        assert line.busy_s(COMPUTE) == pytest.approx(kernels)
        rows = {event.row for event in line.events} - {HOST, COMPUTE}
        assert sum(line.busy_s(row) for row in rows) == pytest.approx(sent)

    def test_exchanges_that_may_not_overlap_are_exposed(self) -> None:
        hidden, shown = (
            alone(*stage_ops(count_step(WORK, Plan(dp=4, ep=2, overlap_dispatch=over)), 0, price, FREE))
            for over in (True, False)
        )
        assert shown.exposed_s("ep") == pytest.approx(shown.busy_s("ep"))
        assert hidden.exposed_s("ep") < 0.5 * hidden.busy_s("ep")

    def test_gradients_are_reduced_in_parts_while_backward_computes(self) -> None:
        ops = stage_ops(dlrm(DLRM_DDP, 64, ranks=4), 0, price, FREE)
        parts = [i for i, op in enumerate(ops) if op.stream == "dp"]
        assert len(parts) == BUCKETS
        assert sum(sum(ops[i].kernels_s) for i in parts) == 4
        assert ops[-1].name == "sgd"
        assert set(ops[-1].needs) >= set(parts)
        assert all(later - earlier > 1 for earlier, later in pairwise(parts))

    def test_launches_cost_the_host(self) -> None:
        graph = count_step(WORK, Plan())
        ops = stage_ops(graph, 0, lambda node: 1e-9, Constants(launch_s=1e-5))
        assert alone(*ops).total_s == pytest.approx(1e-5 * sum(len(op.kernels_s) for op in ops), rel=1e-2)

    def test_slowest_stage_and_its_trace(self) -> None:
        plan = Plan(pp=2, dp=2, ep=2)
        graph, target = count_step(WORK, plan), h100(constants=Constants())
        line = slowest_stage(graph, WORK, plan, target)
        trace = json.loads(json.dumps(stage_trace(line)))["traceEvents"]
        names = [event["args"]["name"] for event in trace if event["ph"] == "M"]
        assert names[:2] == [HOST, COMPUTE]
        assert "ep" in names
        drawn = [event for event in trace if event["ph"] == "X"]
        assert len(drawn) == len(line.events)
        assert max(event["ts"] + event["dur"] for event in drawn) == pytest.approx(1e6 * line.total_s)
        with pytest.raises(MoestroError, match="a CPU has no streams"):
            slowest_stage(graph, WORK, plan, replace(target, cores=2))
