"""Pipelines over regions: against every order, every split of the layers and all numbers in flight of small cases."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from moestro.config import ModelConfig, MoEConfig
from moestro.config.plan import Plan, Workload
from moestro.errors import MoestroError
from moestro.plan.regions import Placed, _counts, _placed, deepened, place_regions, region_orders
from moestro.predict import cache
from moestro.predict.pools import Line
from moestro.predict.target import Target, target_of

MODEL = ModelConfig(
    vocab_size=512, hidden_size=512, num_layers=6, num_heads=8, max_seq_len=1024,
    moe=MoEConfig(num_experts=4, top_k=2, expert_hidden_size=1024),
)  # fmt: skip
WORKLOAD = Workload(model=MODEL, seq_len=1024, global_batch_size=16, precision="fp16")
PLAN = Plan(dp=4, ep=2, zero=1)
POOL = """
[[pools]]
nodes = 1
region = "{0}"
[pools.node]
devices = {{ {1} = 2 }}
"""
WAN = """
[[wan]]
regions = ["{0}", "{1}"]
gbps = {{ nominal = 1.25, confidence = "read" }}
latency_ms = {{ nominal = 5, confidence = "read" }}
"""


@pytest.fixture(autouse=True)
def no_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices by their data sheets, at once."""
    monkeypatch.setenv(cache.FOLDER, str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_known", {})
    monkeypatch.setattr(cache, "_as_read", {})
    monkeypatch.setattr(cache, "_shipped", lambda device_id: ())


def cluster(folder: Path, pools: tuple[tuple[str, str], ...], lines: tuple[tuple[str, str], ...]) -> Target:
    text = 'name = "own"\n' + "".join(POOL.format(*one) for one in pools) + "".join(WAN.format(*one) for one in lines)
    path = folder / "own.toml"
    path.write_text(text)
    return target_of(str(path))


@pytest.fixture
def two(tmp_path: Path) -> Target:
    return cluster(tmp_path, (("east", "h100-sxm"), ("west", "v100-sxm-16gb")), (("east", "west"),))


class TestChoice:
    def test_nothing_is_faster(self, two: Target) -> None:
        found = place_regions(WORKLOAD, PLAN, two, [2]).best
        assert found.fits
        best = min(self.every(two), key=lambda one: one.step_s)
        assert found.step_s <= best.step_s * 1.01
        assert found.regions == best.regions

    def every(self, target: Target) -> list[Placed]:
        """Two ranks of two devices, four micro-batches of each of two."""
        found = []
        plan = PLAN.model_copy(update={"pp": 2, "dp": 2})
        for order in region_orders(target):
            for first, held, again in product(range(1, 6), (None, (3, 1), (4, 1), (5, 1), (8, 1)), ("none", "block")):
                changes = {"layers_per_stage": (first, 6 - first), "in_flight": held, "recompute": again}
                one = _placed(WORKLOAD, plan.model_copy(update=changes), order)
                if one.fits:
                    found.append(one)
        return found

    def test_better_than_naive_and_in_between(self, two: Target) -> None:
        found = place_regions(WORKLOAD, PLAN, two, [2])
        assert found.naive is not None
        assert found.deeper is not None
        assert found.best.step_s < found.deeper.step_s < found.naive.step_s
        assert found.naive.plan.layers_per_stage is None
        assert found.naive.plan.in_flight is None
        fast = found.best.regions.index("east")
        assert found.best.plan.layers_per_stage is not None
        assert found.best.plan.layers_per_stage[fast] > 3
        assert found.best.stages() == {"east": 1, "west": 1}

    @pytest.mark.slow
    def test_the_number_of_ranks(self, two: Target) -> None:
        tried = place_regions(WORKLOAD, PLAN.model_copy(update={"ep": 1}), two)
        assert {one.plan.pp for one in (tried.best, *tried.others)} == {2, 4}
        assert tried.best.step_s <= min(one.step_s for one in tried.others)
        with pytest.raises(MoestroError, match=r"no pipeline over these regions: .*does not divide 4 devices"):
            place_regions(WORKLOAD, PLAN, two, [3])


class TestInFlight:
    def test_no_slow_link_no_more_in_flight(self, two: Target) -> None:
        near = replace(two, lines=(Line(frozenset(("east", "west")), 1e15, 0.0),))
        plain = _placed(WORKLOAD, PLAN.model_copy(update={"pp": 2, "dp": 2}), near)
        assert deepened(WORKLOAD, plain).step_s == plain.step_s

    def test_memory_binds(self, two: Target) -> None:
        """From 1F1B's own over what hides the way to all of them; ranks never hold fewer than the next."""
        steps = _counts((10, 6, 1), 12)
        assert (10, 6, 1) in steps
        assert steps[-1] == (12, 12, 1)
        assert all(12 >= a >= b >= c for a, b, c in steps)
        assert [sum(step) for step in steps] == sorted(sum(step) for step in steps)
        assert all(held >= low for step in steps for held, low in zip(step, (3, 2, 1), strict=True))

    def test_given_numbers_stay(self, two: Target) -> None:
        plan = PLAN.model_copy(update={"pp": 2, "dp": 2, "in_flight": (3, 1)})
        placed = _placed(WORKLOAD, plan, two)
        assert deepened(WORKLOAD, placed) is placed


class TestOrders:
    def test_lines_have_to_join_them(self, tmp_path: Path) -> None:
        pools = (("a", "h100-sxm"), ("b", "h100-sxm"), ("c", "a100-sxm-80gb"))
        chain = cluster(tmp_path, pools, (("a", "b"), ("b", "c")))
        orders = [tuple(part.region for part in one.parts) for one in region_orders(chain)]
        assert orders == [("a", "b", "c"), ("c", "b", "a")]
        assert region_orders(chain)[1].place.device.id == "a100-sxm-80gb"
        with pytest.raises(MoestroError, match=r"no .*wan.* joins 'c' to another region"):
            region_orders(cluster(tmp_path, pools, (("a", "b"),)))
        star = (*pools, ("d", "h100-sxm"))
        with pytest.raises(MoestroError, match="no order of the regions a, b, c, d"):
            region_orders(cluster(tmp_path, star, (("a", "b"), ("a", "c"), ("a", "d"))))

    def test_one_region(self) -> None:
        with pytest.raises(MoestroError, match="all devices are in one region"):
            region_orders(target_of("h100-8"))
