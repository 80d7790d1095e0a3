"""Two steps side by side: rows that add up, causes that add up, and sides that can change places."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.config import load_config
from moestro.config.plan import Plan, Workload
from moestro.errors import MoestroError
from moestro.graph.convert import workload_of
from moestro.plan.explain import Explanation, Row, as_tree, explain
from moestro.plan.explain_saved import saved_side
from moestro.plan.explain_side import PASSES, WHOLE, Part, Side, predicted_side
from moestro.plan.explain_words import cause, seconds, verdict
from moestro.predict.predict import predict_step
from moestro.predict.target import target_of

TARGET = target_of("h100-8")
PLANS = {
    "dp": Plan(dp=8, zero=1, micro_batch_size=4),
    "ep": Plan(dp=8, ep=8, zero=3),
    "hidden": Plan(dp=8, ep=8, zero=3, overlap_dispatch=True, expert_chunks=2),
    "pp": Plan(dp=4, pp=2, schedule="1f1b", micro_batch_size=4),
    "dualpipe": Plan(dp=4, pp=2, schedule="dualpipe", overlap_dispatch=True, ep=4),
    "tp": Plan(dp=2, tp=4, ep=4, recompute="block"),
    "offload": Plan(dp=8, offload="activations"),
}


def work(**changes: object) -> Workload:
    return workload_of(load_config("olmoe-1b-7b").config).model_copy(update=changes)


def side(name: str, **changes: object) -> Side:
    workload, plan = work(**changes), PLANS[name]
    return predicted_side(name, workload, plan, predict_step(workload, plan, TARGET), TARGET)


@pytest.fixture(scope="module")
def sides() -> dict[str, Side]:
    return {name: side(name) for name in PLANS}


class TestSides:
    def test_every_level_adds_up_to_the_step(self, sides: dict[str, Side]) -> None:
        for one in sides.values():
            for level, parts in one.levels.items():
                assert sum(part.seconds for part in parts.values()) == pytest.approx(one.step_s, rel=1e-8), level
                assert all(part.seconds >= -1e-12 for part in parts.values()), level

    def test_no_dimension_is_exposed_for_longer_than_it_sends(self, sides: dict[str, Side]) -> None:
        for one in sides.values():
            for name, part in one.levels["parts"].items():
                if name.startswith("communication "):
                    assert part.seconds <= (part.busy_s or 0.0) * (1 + 1e-12), name
        sent, hidden = (sides[name].levels["parts"]["communication ep"] for name in ("ep", "hidden"))
        assert sent.seconds == pytest.approx(sent.busy_s)
        assert hidden.seconds < 0.1 * sent.seconds

    def test_parts_do_not_depend_on_the_company_they_keep(self, sides: dict[str, Side]) -> None:
        """Experts of equal work and shape take as long beside a slow dispatch as beside a quick one."""
        one, two = (sides[name].levels["parts"] for name in ("ep", "offload"))
        assert two["head"].work == one["head"].work
        assert two["head"].seconds == pytest.approx(one["head"].seconds, rel=1e-9)
        assert two["dispatch"].seconds < one["dispatch"].seconds

    def test_recomputed_work_is_counted(self, sides: dict[str, Side]) -> None:
        plan = PLANS["tp"].model_copy(update={"recompute": "none"})
        without = predicted_side("", work(), plan, predict_step(work(), plan, TARGET)).levels["phases"][PASSES]
        assert 1.2 * without.work < sides["tp"].levels["phases"][PASSES].work < 4 / 3 * without.work


class TestExplain:
    @pytest.mark.parametrize("pair", [("dp", "ep"), ("ep", "hidden"), ("pp", "dualpipe"), ("dp", "offload")])
    def test_rows_add_up_and_sides_change_places(self, sides: dict[str, Side], pair: tuple[str, str]) -> None:
        there, back = explain(sides[pair[0]], sides[pair[1]]), explain(sides[pair[1]], sides[pair[0]])
        assert sum(row.seconds for row in there.rows) == pytest.approx(there.seconds, rel=1e-9)
        assert there.seconds == sides[pair[1]].step_s - sides[pair[0]].step_s
        assert there.seconds == -back.seconds
        assert {row.name: row.seconds for row in there.rows} == {row.name: -row.seconds for row in back.rows}
        sizes = [abs(row.seconds) for row in there.rows]
        assert sizes == sorted(sizes, reverse=True)
        assert {one.key for one in there.bearing} == {one.key for one in back.bearing}

    def test_hiding_is_told_from_work_and_rate(self, sides: dict[str, Side]) -> None:
        row = next(row for row in explain(sides["ep"], sides["hidden"]).rows if row.name == "communication ep")
        assert row.work == pytest.approx(0, abs=0.01)
        assert row.causes is not None
        assert row.causes["hidden"] == pytest.approx(row.seconds, rel=0.05)
        assert "hidden 0% →" in cause(row)

    def test_unlike_steps_are_compared_by_the_token(self, sides: dict[str, Side]) -> None:
        double = side("dp", global_batch_size=2 * work().global_batch_size)
        found = explain(sides["dp"], double)
        assert found.per == 1_000_000
        assert abs(found.seconds) < 0.01 * found.first_s
        assert abs(double.step_s / sides["dp"].step_s - 2) < 0.02
        assert sum(row.seconds for row in found.rows) == pytest.approx(found.seconds, rel=1e-6, abs=1e-9)
        assert any("all seconds are of 1,000,000 tokens" in note for note in found.notes)
        assert [one.key for one in found.bearing] == ["batch.global_batch_size"]

    def test_the_same_is_said_to_be_the_same(self, sides: dict[str, Side]) -> None:
        found = explain(sides["dp"], sides["dp"])
        assert found.same
        assert verdict(found) == "A and B are the same: nothing differs."

    def test_the_coarser_side_decides(self, sides: dict[str, Side]) -> None:
        for levels in (("phases", "whole"), ("whole",)):
            coarse = replace(sides["dp"], levels={name: sides["dp"].levels[name] for name in levels})
            found = explain(coarse, sides["ep"])
            assert found.level == levels[0]
            assert sum(row.seconds for row in found.rows) == pytest.approx(found.seconds, rel=1e-9)

    def test_a_step_of_no_time(self, sides: dict[str, Side]) -> None:
        with pytest.raises(MoestroError, match="cannot be compared"):
            explain(sides["dp"], replace(sides["dp"], step_s=0.0))

    def test_the_tree_is_plain_data(self, sides: dict[str, Side]) -> None:
        tree = json.loads(json.dumps(as_tree(explain(sides["dp"], sides["ep"]))))
        assert sum(row["difference_s"] for row in tree["rows"]) == pytest.approx(tree["difference_s"])
        assert tree["first"]["tokens_per_s"] * tree["first"]["step_s"] == pytest.approx(tree["first"]["tokens"])


POSITIVE = st.floats(1e-6, 1e3)


@settings(max_examples=60, deadline=None)
@given(*([POSITIVE] * 4), st.floats(0.01, 1), st.floats(0.01, 1))
def test_causes_add_up_and_change_sign(
    seconds: float, other_s: float, done: float, other: float, shown: float, other_shown: float
) -> None:
    """Of parts of which computation hides some."""
    one, two = (
        Part(seconds, done, "bytes sent", seconds / shown),
        Part(other_s, other, "bytes sent", other_s / other_shown),
    )
    there, back = (explain(made(*pair), made(*reversed(pair))).rows[0] for pair in ((one, two), (two, one)))
    assert there.causes is not None
    assert back.causes is not None
    assert sum(there.causes.values()) == pytest.approx(there.seconds, rel=1e-9, abs=1e-12)
    for name, value in there.causes.items():
        assert value == pytest.approx(-back.causes[name], rel=1e-6, abs=1e-6 * max(seconds, other_s))
    if done == other:
        assert there.causes["work"] == pytest.approx(0, abs=1e-9 * max(seconds, other_s))


@pytest.mark.parametrize(
    ("first", "second", "name"),
    [
        (Part(1.0, 4.0, "FLOPs"), Part(2.0, 8.0, "FLOPs"), "work"),
        (Part(1.0, 4.0, "FLOPs"), Part(2.0, 4.0, "FLOPs"), "rate"),
        (Part(1.0, 4.0, "bytes sent", 3.0), Part(2.0, 4.0, "bytes sent", 3.0), "hidden"),
        (Part(0.0, 4.0, "bytes sent", 3.0), Part(2.0, 4.0, "bytes sent", 3.0), "hidden"),
        (Part(0.0, 0.0, "bytes sent", 0.0), Part(2.0, 4.0, "bytes sent", 3.0), "work"),
    ],
)
def test_one_cause_is_the_whole_cause(first: Part, second: Part, name: str) -> None:
    causes = Row("a part", first, second).causes
    assert causes == pytest.approx({"work": 0, "rate": 0, "hidden": 0, name: second.seconds - first.seconds})


def made(
    part: Part, *_: Part, kind: Literal["predicted", "measured"] = "predicted", low_s: float | None = None,
    high_s: float | None = None,
) -> Side:  # fmt: skip
    whole = {WHOLE: part}
    return Side("x", kind, "", part.seconds, 8, 1, {"whole": whole}, {}, low_s=low_s, high_s=high_s)


class TestWords:
    def explained(self, first: Part, second: Part, **options: float) -> Explanation:
        return explain(made(first, **options), made(second, kind="measured"))

    def test_what_is_within_the_spread_is_no_difference(self) -> None:
        sides = [made(Part(value, spread_s=0.1), kind="measured") for value in (1.0, 1.05, 1.2)]
        near, far = explain(sides[0], sides[1]), explain(sides[0], sides[2])
        assert near.is_noise
        assert "These steps show no difference" in verdict(near)
        assert not far.is_noise
        assert verdict(far).startswith("B takes 20.0% longer than A (1.20 s against 1.00 s for a step).")

    def test_a_measured_step_is_held_against_its_interval(self) -> None:
        inside = self.explained(Part(1.0), Part(1.1), low_s=0.8, high_s=1.2)
        assert "10.0% longer than predicted, within its interval of 800 ms to 1.20 s." in verdict(inside)
        assert "outside of its interval" in verdict(self.explained(Part(1.0), Part(1.3), low_s=0.8, high_s=1.2))

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (0.0, "0 µs"),
            (1.234, "1.23 s"),
            (0.01234, "12.3 ms"),
            (-0.5, "-500 ms"),
            (99.96, "100 s"),
            (4e-6, "4.00 µs"),
        ],
    )
    def test_seconds(self, value: float, text: str) -> None:
        assert seconds(value) == text


class TestSaved:
    def tree(self) -> dict[str, object]:
        found = predict_step(work(), PLANS["ep"], TARGET)
        more = {"plan": PLANS["ep"].model_dump(mode="json"), "workload": work().model_dump(exclude_defaults=True)}
        tree: dict[str, object] = json.loads(json.dumps({**asdict(found), **more}))
        return tree

    def test_is_the_prediction_it_was(self, tmp_path: Path, sides: dict[str, Side]) -> None:
        path = tmp_path / "saved.json"
        path.write_text(json.dumps(self.tree()))
        found = explain(sides["ep"], saved_side(path))
        assert found.seconds == 0
        assert not any(row.seconds for row in found.rows)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"time": None}, "another version"),
            ({"plan": {"dp": 0}}, r"another version \(dp: Input should be greater"),
            ({"workload": {}}, "another version"),
        ],
    )
    def test_a_damaged_one(self, tmp_path: Path, change: dict[str, object], message: str) -> None:
        path = tmp_path / "saved.json"
        path.write_text(json.dumps({**self.tree(), **change}))
        with pytest.raises(MoestroError, match=message):
            saved_side(path)

    @pytest.mark.parametrize(
        ("text", "message"),
        [("{", "cannot read"), ("[]", "no prediction"), ('{"ranked": []}', "several plans"), ('{"time": {}}', "a net")],
    )
    def test_something_else(self, tmp_path: Path, text: str, message: str) -> None:
        path = tmp_path / "other.json"
        path.write_text(text)
        with pytest.raises(MoestroError, match=message):
            saved_side(path)
