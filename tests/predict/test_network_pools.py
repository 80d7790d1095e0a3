"""A step over pools of unlike devices and over regions: where stages lie, what they and the way between them take."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from moestro.config.model import ModelConfig
from moestro.config.moe import MoEConfig
from moestro.config.plan import Plan, Workload, misfits
from moestro.errors import MoestroError
from moestro.graph.count import count_step
from moestro.hardware.catalog import load_cluster, load_device
from moestro.hardware.curves.network import CollectiveModel
from moestro.predict import target as targets
from moestro.predict.constants import Constants, load_calibration
from moestro.predict.costs import price, pricer_of
from moestro.predict.curves import DeviceCurves
from moestro.predict.memory import memory_of
from moestro.predict.pools import Line, Part, line_between, memory_notes, parts_of_ranks, pool_notes, price_parts
from moestro.predict.predict import device_bytes, peak_flops, predict_step, predict_traced, target_pricer
from moestro.predict.schedule import simulate_pipeline
from moestro.predict.step import Place, step_time
from moestro.predict.target import Target, target_of, target_of_cluster
from moestro.predict.warmup import deep_orders, in_flight_over_links, orders_of

WORKLOAD = Workload(
    model=ModelConfig(
        num_layers=4, hidden_size=512, num_heads=8, vocab_size=1024,
        moe=MoEConfig(num_experts=8, top_k=2, expert_hidden_size=512),
    ),
    seq_len=512, global_batch_size=32,
)  # fmt: skip
LINE = Line(frozenset(("east", "west")), 1e9, 0.010)
CONSTANTS = Constants()


def curves(name: str) -> DeviceCurves:
    """Of the class: no samples to read and fit."""
    device = load_device(name)
    return DeviceCurves(device, [], CollectiveModel([], device))


CURVES = {name: curves(name) for name in ("h100-sxm", "a100-sxm-80gb", "v100-sxm-16gb")}


def part(name: str, devices: int = 4, region: str = "") -> Part:
    return Part(name, Place(load_device(name), 8), CURVES[name], devices, region)


H100, A100, WEST = part("h100-sxm"), part("a100-sxm-80gb"), part("h100-sxm", region="west")
EAST = replace(WEST, region="east")
PLAN = Plan(pp=2, dp=4, ep=4)


class TestPlaces:
    def test_stage_after_stage_fills_a_pool(self) -> None:
        assert parts_of_ranks(Plan(pp=4, dp=2), [H100, A100]) == [H100, H100, A100, A100]
        assert parts_of_ranks(Plan(pp=1, dp=4), [H100, A100]) == [H100]

    def test_not_in_two_pools(self) -> None:
        with pytest.raises(MoestroError, match=r"rank 0 would lie in several pools \(4 h100-sxm, 4 a100"):
            parts_of_ranks(Plan(dp=8), [H100, A100])
        with pytest.raises(MoestroError, match="needs 16 devices, and the pools have 8"):
            parts_of_ranks(Plan(dp=16), [H100, A100])

    def test_a_line_joins_either_way(self) -> None:
        assert line_between("west", "east", [LINE]) is LINE
        with pytest.raises(MoestroError, match=r"no \[\[wan\]\] joins the regions 'east' and 'north'"):
            line_between("east", "north", [LINE])


class TestPrices:
    def test_alike_pools_are_one(self) -> None:
        graph = count_step(WORKLOAD, PLAN)
        one = price(graph, pricer_of(CURVES["h100-sxm"], WORKLOAD.routing, PLAN, 8))
        assert price_parts(graph, WORKLOAD, PLAN, [H100, part("h100-sxm")], ()) == one

    def test_each_stage_takes_what_it_would_on_its_own_device(self) -> None:
        graph = count_step(WORKLOAD, PLAN)
        costs = price_parts(graph, WORKLOAD, PLAN, [H100, A100], ())
        fast, slow = (load_calibration().of(p.place.device.id, "fused") for p in (H100, A100))
        assert fast != slow
        alone = price(graph, pricer_of(CURVES["a100-sxm-80gb"], WORKLOAD.routing, PLAN, 8))
        for mine, own in zip(costs.stages[1:], alone.stages[1:], strict=True):
            assert mine.forward.compute_s(fast) == pytest.approx(own.forward.compute_s(slow))
            assert mine.backward.host_s(fast) == pytest.approx(own.backward.host_s(slow))
            assert mine.forward.communication_s(fast, False) == pytest.approx(own.forward.communication_s(slow, False))
        assert costs.once[1][2].compute_s(fast) == pytest.approx(alone.once[1][2].compute_s(slow))

    def test_fewer_layers_on_the_slower_device_are_faster(self) -> None:
        model = WORKLOAD.model.model_copy(update={"num_layers": 8, "hidden_size": 2048, "num_heads": 16})
        large = WORKLOAD.model_copy(update={"model": model, "seq_len": 4096})
        times = {}
        for layers in ((4, 4), (7, 1), (1, 7)):
            plan = PLAN.model_copy(update={"layers_per_stage": layers})
            pools = [H100, part("v100-sxm-16gb")]
            costs = price_parts(count_step(large, plan), large, plan, pools, ())
            times[layers] = step_time(costs, plan, CONSTANTS).total
        assert times[7, 1] < times[4, 4] < times[1, 7]

    def test_the_way_between_regions(self) -> None:
        graph = count_step(WORKLOAD, PLAN)
        costs = price_parts(graph, WORKLOAD, PLAN, [EAST, WEST], [LINE])
        sent = graph.stages[0].send_bytes
        assert costs.stages[0].latency_s == 0.010
        assert costs.stages[0].line_s == pytest.approx(4 * sent / 1e9)  # four ranks send at once
        assert costs.stages[0].send_s == 0
        assert (costs.stages[1].latency_s, costs.stages[1].line_s) == (0, 0)
        near = price_parts(graph, WORKLOAD, PLAN, [EAST, replace(WEST, region="east")], [LINE])
        assert near.stages[0].send_s > 0
        assert near.stages[0].line_s == 0
        norm = costs.once[0][2].collectives["world", True, False] - near.once[0][2].collectives.get(
            ("world", True, False), 0.0
        )
        calls = sum(node.times for node in graph.ranks[0].update if getattr(node, "dimension", "") == "world")
        assert calls
        assert norm == pytest.approx(calls * 0.020)

    def test_no_line(self) -> None:
        with pytest.raises(MoestroError, match="no"):
            price_parts(count_step(WORKLOAD, PLAN), WORKLOAD, PLAN, [EAST, WEST], [])


class TestSteps:
    def step(self, line: Line, **changes: object) -> float:
        plan = PLAN.model_copy(update=changes)
        costs = price_parts(count_step(WORKLOAD, plan), WORKLOAD, plan, [EAST, WEST], [line])
        return step_time(costs, plan, CONSTANTS).total

    def test_latency_costs_and_micro_batches_in_flight_hide_it(self) -> None:
        plan = PLAN
        costs = price_parts(count_step(WORKLOAD, plan), WORKLOAD, plan, [EAST, WEST], [LINE])
        far = replace(LINE, bytes_per_s=1e15)
        near = self.step(replace(far, latency_s=1e-9))
        plain, deep = self.step(far), self.step(far, in_flight=(8, 1))
        assert near < deep < plain
        hint = pool_notes(costs, plan, [EAST, WEST], CONSTANTS)[-1]
        assert hint.startswith("plan.in_flight=[")
        assert "shorter" in hint

    def test_a_full_line_sets_the_pace(self) -> None:
        """However many are in flight, micro-batches pass it one after the other."""
        graph = count_step(WORKLOAD, PLAN)
        narrow = replace(LINE, bytes_per_s=4 * graph.stages[0].send_bytes, latency_s=0.0)  # a second each
        for in_flight in (None, (8, 1)):
            assert self.step(narrow, in_flight=in_flight) > graph.micro_batches * 1.0
        assert self.step(narrow, in_flight=(8, 1)) < (graph.micro_batches + 1.5) * 1.0

    def test_notes_say_where_ranks_lie(self) -> None:
        plan = Plan(pp=4, dp=2)
        pools = [EAST, part("a100-sxm-80gb", region="west")]
        costs = price_parts(count_step(WORKLOAD, plan), WORKLOAD, plan, pools, [LINE])
        notes = pool_notes(costs, plan, pools, CONSTANTS)
        assert notes[:2] == [
            "pipeline ranks 0 to 1 on h100-sxm in east",
            "pipeline ranks 2 to 3 on a100-sxm-80gb in west",
        ]
        assert notes[2].startswith("stages 1 and 2 are in different regions")
        assert "10 ms on the way" in notes[2]
        assert pool_notes(costs, plan, [], CONSTANTS) == []

    def test_memory_is_held_against_each_pool(self) -> None:
        pools = [H100, part("v100-sxm-16gb")]
        assert memory_notes([70e9, 10e9], PLAN, pools) == []
        assert memory_notes([70e9, 17e9], PLAN, pools) == [
            "does not fit: pipeline rank 1 needs 17.0 GB, and v100-sxm-16gb has 16.0"
        ]


class TestInFlight:
    def test_fast_links_leave_1f1b(self) -> None:
        assert in_flight_over_links([1, 1, 1], [2, 2, 2], [0, 0, 9]) == (3, 2, 1)

    def test_each_link_is_rounded_up(self) -> None:
        assert in_flight_over_links([1, 1, 1], [2, 2, 2], [1, 1, 0]) == (5, 3, 1)
        assert in_flight_over_links([1, 2], [2, 4], [3.0, 0]) == (3, 1)  # a round of the slower stage

    @pytest.mark.parametrize("link", [0.2, 0.5, 1.0, 2.0, 4.0])
    def test_ranks_stay_busy(self, link: float) -> None:
        """All but the first fill and the last drain: then nobody waits."""
        forward, backward, stages, count = 1.0, 2.0, 4, 64
        held = in_flight_over_links([forward] * stages, [backward] * stages, [link] * stages)
        found = simulate_pipeline(
            "1f1b", stages, 1, count, [forward] * stages, [backward] * stages, [0.0] * stages, link,
            orders=deep_orders(held, count),
        )  # fmt: skip
        fill = (stages - 1) * (forward + backward + 2 * link)
        assert found.total_s == pytest.approx(count * (forward + backward) + fill)
        assert found.peak_in_flight == held

    def test_orders_run_everything_once(self) -> None:
        for order in deep_orders((9, 2, 1), 5):
            for kind in "FB":
                assert [work.micro_batch for work in order if work.kind == kind] == list(range(5))
        assert orders_of(Plan(pp=2), 4) is None

    def test_memory_counts_them(self) -> None:
        graph = count_step(WORKLOAD, PLAN)
        plain, same, more = (
            memory_of(graph, WORKLOAD, PLAN.model_copy(update={"in_flight": held}))[1]
            for held in (None, (2, 1), (6, 1))
        )
        assert plain == same
        assert more[0] > plain[0]
        assert more[1] == plain[1]

    def test_misfits(self) -> None:
        assert "in_flight has 3 numbers" in misfits(WORKLOAD, Plan(pp=2, dp=4, in_flight=(3, 2, 1)))[0]
        assert misfits(WORKLOAD, Plan(pp=2, dp=4, schedule="gpipe", in_flight=(2, 1)))
        assert not misfits(WORKLOAD, Plan(pp=2, dp=4, in_flight=(2, 1)))


class TestTargets:
    @pytest.fixture(autouse=True)
    def _no_fitting(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(targets, "known_curves", lambda device: curves(device.id))

    def two(self, tmp_path: Path, change: tuple[str, str] = ("", "")) -> Target:
        path = tmp_path / "own.toml"
        text = """\
name = "own"
[[pools]]
nodes = 1
region = "east"
[pools.node]
devices = { h100-sxm = 4 }
[[pools]]
nodes = 1
region = "west"
[pools.node]
devices = { v100-sxm-16gb = 4 }
[[wan]]
regions = ["east", "west"]
gbps = { nominal = 1.25, confidence = "read" }
latency_ms = { nominal = 30, confidence = "read" }
"""
        path.write_text(text.replace(*change) if change[0] else text)
        return target_of(str(path))

    def test_two_regions(self, tmp_path: Path) -> None:
        found = self.two(tmp_path)
        assert [(p.name, p.devices, p.region) for p in found.parts] == [
            ("h100-sxm", 4, "east"),
            ("v100-sxm-16gb", 4, "west"),
        ]
        assert found.lines == (Line(frozenset(("east", "west")), 1.25e9, 0.03),)
        assert found.devices == 8
        assert device_bytes(found, 8) == 16e9  # of the smallest
        whole = load_device("h100-sxm").peak_flops("fp16"), load_device("v100-sxm-16gb").peak_flops("fp16")
        fp16 = WORKLOAD.model_copy(update={"precision": "fp16"})
        assert whole[0]
        assert whole[1]
        assert peak_flops(fp16, found) == (whole[0] + whole[1]) / 2

    def test_a_whole_prediction(self, tmp_path: Path) -> None:
        fp16 = WORKLOAD.model_copy(update={"precision": "fp16"})
        found = predict_step(fp16, PLAN, self.two(tmp_path))
        assert math.isfinite(found.time.total)
        assert found.time.total > 0.06
        assert found.time.total == pytest.approx(found.step_s.value)
        assert any("different regions" in note for note in found.notes)
        assert not any("not priced" in note for note in found.notes)

    def test_only_steps_are_predicted_over_pools(self, tmp_path: Path) -> None:
        found = self.two(tmp_path)
        with pytest.raises(MoestroError, match="over h100-sxm and v100-sxm-16gb in several pools only a step"):
            target_pricer(WORKLOAD, PLAN, found)
        with pytest.raises(MoestroError, match="one kind of device"):
            predict_traced(count_step(WORKLOAD, Plan()), found)

    def test_missing_figures(self, tmp_path: Path) -> None:
        with pytest.raises(MoestroError, match="needs gbps and latency_ms"):
            self.two(tmp_path, ('latency_ms = { nominal = 30, confidence = "read" }', ""))
        with pytest.raises(MoestroError, match="nodes that mix h100-sxm, v100-sxm-16gb"):
            self.two(tmp_path, ("h100-sxm = 4", "h100-sxm = 4, v100-sxm-16gb = 4"))

    def test_circuits_of_the_catalog(self) -> None:
        cluster = load_cluster("mixnet-1024")
        found = target_of_cluster(cluster)
        assert found.optical is not None
        assert not found.parts
        assert (found.optical.ocs_ports, found.optical.port_bytes_per_s, found.optical.delay_s) == (6, 12.5e9, 0.025)
        packets = target_of_cluster(cluster.model_copy(update={"optical": None}))
        assert packets.optical is None
        assert found.fabric is not None
        assert packets.fabric is not None
        # Two ports of eight for all but the exchanges of experts, and each device has its share of them.
        assert packets.fabric.nic_bytes_per_s == pytest.approx(4 * found.fabric.nic_bytes_per_s)
        assert packets.place.device.nic.per_device_gbit.nominal == 100
        assert found.place.device.nic.per_device_gbit.nominal == 25

    def test_circuits_need_figures(self) -> None:
        cluster = load_cluster("mixnet-1024")
        assert cluster.optical is not None
        blank = cluster.optical.model_copy(update={"delay_ms": load_device("h100-sxm").nic.latency_us.__class__()})
        with pytest.raises(MoestroError, match="needs port_gbit and delay_ms"):
            target_of_cluster(cluster.model_copy(update={"optical": blank}))
