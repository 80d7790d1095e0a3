"""What the plan explorer says of a pick, without a page."""

import os
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from urllib.parse import parse_qsl

import pytest
from typer.testing import CliRunner

from moestro.cli.asked import plan_asked, read_workload, target_asked
from moestro.cli.main import app
from moestro.config import load_config
from moestro.config.plan import Plan
from moestro.errors import MoestroError
from moestro.predict.predict import predict_step
from moestro.ui.charts import gantt_chart, memory_chart, parts_of, step_chart
from moestro.ui.commands import plan_command, plan_file, predict_command
from moestro.ui.finding import Progress, Search, find
from moestro.ui.gantt import kernel_gantt, pipeline_gantt
from moestro.ui.goal import Wish
from moestro.ui.ladders import ladder, nearest_place
from moestro.ui.link import from_query, to_query
from moestro.ui.near import best_value, guessed, mended
from moestro.ui.offer import MOST_DEVICES, offer_of
from moestro.ui.picked import FIELDS, Picked, start
from moestro.ui.server import free_port
from moestro.ui.state import in_force, told, view_of

OFFER = offer_of()
# Two GPUs and a batch of 16: few plans, all of them quick.
SMALL = {"run": "olmoe-1b-7b", "hardware": "h100-sxm", "devices": "2", "global_batch_size": "16"}
TINY_PINS = "cp,tp,zero,recompute,expert_chunks,expert_recompute,overlap_dispatch,context"


def picked_of(**query: str) -> Picked:
    picked, wrong = from_query({**SMALL, **query}, OFFER)
    assert wrong == []
    return picked


def test_a_view_is_the_prediction_with_its_parts() -> None:
    view = view_of(picked_of(pp="2", micro_batch_size="2"), OFFER)
    assert view.problems == {}
    assert view.plan == Plan(pp=2, micro_batch_size=2)
    assert view.setting is not None
    assert view.prediction == predict_step(view.setting.workload, view.plan, view.setting.target)
    assert tuple(rank.total for rank in view.memory) == view.prediction.memory_by_rank
    assert max(view.memory, key=lambda rank: rank.total) == view.prediction.memory
    assert view.training_s == pytest.approx(view.steps * view.prediction.step_s.value)
    assert view.cost is not None
    hours = view.training_s / 3600 * 2
    assert view.cost.usd == pytest.approx(hours * view.cost.rate.usd_per_hour)
    cheap = view_of(replace(view.picked, usd_per_hour=1.0), OFFER)
    assert cheap.cost is not None
    assert cheap.cost.usd == pytest.approx(hours)
    assert sum(parts_of(view.prediction.time).values()) == pytest.approx(view.prediction.time.total)


@pytest.mark.parametrize(
    ("query", "changed", "where", "words"),
    [
        ({"pp": "2", "tp": "2"}, "tp", "tp", "pp · tp = 4 does not divide 2 devices"),
        ({"pp": "2", "tp": "2"}, "", "pp", "pp · tp = 4 does not divide 2 devices"),
        ({"ep": "8"}, "ep", "ep", "ep · etp = 8 does not divide"),
        ({"micro_batch_size": "3"}, "micro_batch_size", "micro_batch_size", "not a multiple of"),
        ({"pp": "2", "schedule": "interleaved", "vpp": "9"}, "vpp", "vpp", "18 stages for 16 layers"),
        (
            {"pp": "2", "schedule": "dualpipe", "global_batch_size": "2"},
            "schedule",
            "schedule",
            "needs 4 micro-batches",
        ),
        ({"hardware": "apple-m1-ultra"}, "hardware", "precision", "does not compute in bf16"),
    ],
)
def test_what_is_wrong_stands_at_its_field(query: dict[str, str], changed: str, where: str, words: str) -> None:
    view = view_of(picked_of(**query), OFFER, changed)
    assert view.prediction is None
    assert words in view.problems[where]
    assert "Traceback" not in "".join(view.problems.values())


def test_a_link_comes_back_as_it_was() -> None:
    picked = picked_of(
        pp="2", schedule="zbv", overlap_dispatch="true", ep="2", pin="pp,zero", tokens="1e12", seq_len="8192"
    )
    picked = picked.changed(usd_per_hour=2.5, objective="memory", deadline_days=30.0, headroom=10.0)
    assert from_query(dict(parse_qsl(to_query(picked, OFFER))), OFFER) == (picked, [])
    assert to_query(start(OFFER, "olmoe-1b-7b", "h100-8"), OFFER) == "run=olmoe-1b-7b&hardware=h100-8"


def test_a_link_with_nonsense_is_told_and_clamped() -> None:
    query = {
        "run": "/etc/passwd", "hardware": "none-such", "devices": "99999999", "seq_len": "abc", "pp": "-1", "zero": "9",
        "tokens": "nan", "global_batch_size": "1e30", "schedule": "<script>", "precision": "int1", "pin": "nonsense",
    }  # fmt: skip
    picked, wrong = from_query(query, OFFER)
    assert (picked.run, picked.hardware, picked.devices) == ("olmoe-1b-7b", "h100-8", 8)
    assert picked.layout == {}
    assert picked.pins == frozenset()
    assert picked.global_batch_size == 2**20
    assert len(wrong) == len(query) - 1
    most, _ = from_query({"hardware": "h100-sxm", "devices": "99999999"}, OFFER)
    assert most.devices == MOST_DEVICES


@pytest.mark.parametrize(
    "query", [{"ep": "2", "dispatch": "deduplicated"}, {"trainer": "megatron", "precision": "fp8"}]
)
def test_the_command_line_says_the_same(query: dict[str, str]) -> None:
    picked = picked_of(pp="1", zero="1", micro_batch_size="2", usd_per_hour="3", **query)
    view = view_of(picked, OFFER)
    assert view.plan is not None
    said = predict_command(picked, view.plan, OFFER).split()
    assert said[:3] == ["moestro", "predict", "olmoe-1b-7b"]
    config, workload, values = read_workload(said[2], [word for word in said[3:] if "=" in word])
    target = target_asked(said[said.index("--hardware") + 1], None, 2)
    assert predict_step(workload, plan_asked(config, values, target, 2), target) == view.prediction
    search = plan_command(picked.pinned("zero", True).changed(objective="energy", headroom=5.0), OFFER)
    assert "plan.zero=1 --objective energy --headroom 5% --tokens" in search


def test_the_saved_plan_is_a_run(tmp_path: Path) -> None:
    picked = picked_of(ep="2", dispatch="deduplicated", zero="1", seq_len="2048", tokens="1e9", micro_batch_size="2")
    view = view_of(picked, OFFER)
    assert view.plan is not None
    assert view.prediction is not None
    path = tmp_path / "plan.toml"
    path.write_text(plan_file(picked, view.plan, view.prediction, OFFER))
    config = load_config(str(path)).config
    assert (config.parallel.ep, config.parallel.dp, config.data.seq_len) == (2, 2, 2048)
    assert config.train.steps == round(1e9 / (2048 * 16))
    assert view_of(picked_of(run="sotu-tiny"), OFFER).problems == {}
    with pytest.raises(MoestroError, match="not in fp8"):
        plan_file(replace(picked, precision="fp8"), view.plan, view.prediction, OFFER)


def test_what_a_change_did_is_told() -> None:
    one = view_of(picked_of(), OFFER)
    two = view_of(picked_of(pp="2"), OFFER)
    assert one.prediction is not None
    assert two.prediction is not None
    more = two.prediction.step_s.value / one.prediction.step_s.value - 1
    assert told(one, two).startswith(f"pp 1 → 2: step {100 * more:+.1f} %".replace("-", "−"))
    assert "bubble +" in told(one, two)
    assert told(one, one) == ""


def test_the_best_value_is_the_fastest_that_fits() -> None:
    picked = picked_of(zero="1", ep="2", dispatch="deduplicated")
    best = best_value(picked, "micro_batch_size", OFFER)
    assert best is not None
    assert best.prediction is not None
    views = [view_of(picked.with_field("micro_batch_size", n), OFFER) for n in (1, 2, 4, 8)]
    times = [view.prediction.step_s.value for view in views if view.prediction is not None and view.fits]
    assert best.prediction.step_s.value == min(times)
    assert {name: value for name, value in best.picked.layout.items() if name != "micro_batch_size"} == {
        name: value for name, value in picked.layout.items() if name != "micro_batch_size"
    }


def test_a_misfit_is_mended_with_the_fewest_changes() -> None:
    picked = picked_of(pp="2", tp="2", pin="tp")
    assert view_of(picked, OFFER).prediction is None
    found = mended(picked, OFFER)
    assert found is not None
    assert found.fits
    assert found.picked.value("tp") == 2
    assert found.picked.value("pp") == 1
    assert mended(picked_of(devices="1", pp="2", tp="2", pin="tp,pp"), OFFER) is None


def test_a_first_guess_fits_and_keeps_pins() -> None:
    picked, _ = from_query(
        {"run": "mixtral-8x7b", "hardware": "h100-sxm", "devices": "64", "zero": "3", "pin": "zero"}, OFFER
    )
    view = view_of(guessed(picked, OFFER), OFFER)
    assert view.fits
    assert view.prediction is not None
    assert view.picked.value("zero") == 3
    lost = replace(picked, devices=1)
    assert guessed(lost, OFFER) == lost  # nothing fits


def test_fields_that_mean_nothing_are_said_to() -> None:
    view = view_of(picked_of(zero="1"), OFFER)
    assert in_force(view, "schedule") == ("1f1b", True)
    assert in_force(view, "pp") == (1, False)
    assert in_force(view, "zero") == (1, False)
    zbv = view_of(picked_of(pp="2", schedule="zbv"), OFFER)
    assert in_force(zbv, "vpp") == (2, True)


@pytest.mark.parametrize(
    "query",
    [
        {"pp": "2", "micro_batch_size": "2"},
        {"pp": "2", "schedule": "zbv", "ep": "1"},
        {"ep": "2", "dispatch": "deduplicated", "overlap_dispatch": "true"},
        pytest.param({"hardware": "two-regions", "devices": "32", "pp": "2"}, marks=pytest.mark.slow),
    ],
)
def test_bars_of_a_row_do_not_overlap(query: dict[str, str]) -> None:
    view = view_of(picked_of(**query), OFFER)
    assert view.setting is not None
    assert view.plan is not None
    drawn = [pipeline_gantt(view.setting.workload, view.plan, view.setting.target)]
    if not view.setting.target.parts:
        drawn.append(kernel_gantt(view.setting.workload, view.plan, view.setting.target))
    for gantt in drawn:
        for row in range(len(gantt.rows)):
            bars = sorted((bar for bar in gantt.bars if bar.row == row), key=lambda bar: bar.start_s)
            assert bars
            assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairwise(bars))
            assert bars[-1].end_s <= gantt.total_s + 1e-9
    assert drawn[0].rows == tuple(f"rank {n}" for n in range(view.plan.pp))


def test_a_long_step_is_drawn_short_and_says_so() -> None:
    query = {"run": "deepseek-v3", "hardware": "h100-sxm", "devices": "128", "pp": "32", "ep": "4", "zero": "1"}
    view = view_of(picked_of(**query, global_batch_size="8192", dispatch="deduplicated"), OFFER)
    assert view.plan is not None, view.problems
    assert view.setting is not None
    gantt = pipeline_gantt(view.setting.workload, view.plan, view.setting.target)
    assert "of 2,048 micro-batches" in gantt.note
    assert "ranks 8 to 23 of 32 are left out" in gantt.note
    assert len(gantt.rows) == 16
    assert len(gantt.bars) < 4000
    assert gantt_chart(gantt)["yAxis"]["data"] == list(gantt.rows)


def test_charts_add_up() -> None:
    view = view_of(picked_of(pp="2"), OFFER)
    assert view.prediction is not None
    series = step_chart(view.prediction.time, None)["series"]
    assert sum(one["data"][0] for one in series) == pytest.approx(view.prediction.step_s.value)
    chart = memory_chart(view.memory, 80e9)
    for rank, total in enumerate(view.prediction.memory_by_rank):
        assert sum(one["data"][rank] for one in chart["series"][:-1]) == pytest.approx(total / 1e9)
    over = memory_chart(view.memory, 1e9)["series"][-1]["data"][0]["label"]["color"]
    assert over != chart["series"][-1]["data"][0]["label"]["color"]


def test_ladders_rise_and_find_their_place() -> None:
    picked = start(OFFER, "deepseek-v3", "h800-2048")
    for name in ("devices", "seq_len", "global_batch_size", "tokens", "usd_per_hour"):
        steps = ladder(name, picked, OFFER)
        assert list(steps) == sorted(set(steps))
        assert all(nearest_place(steps, value) == place for place, value in enumerate(steps))
    assert picked.devices in ladder("devices", picked, OFFER)
    assert picked.global_batch_size in ladder("global_batch_size", picked, OFFER)


def test_a_search_keeps_locks_and_limits() -> None:
    picked = picked_of(pp="2", micro_batch_size="2", pin=f"pp,micro_batch_size,schedule,vpp,{TINY_PINS}")
    found = find(picked, OFFER, workers=1)
    assert all((plan.pp, plan.micro_batch_size, plan.schedule) == (2, 2, "1f1b") for plan, _ in found.exact)
    view = view_of(picked.with_plan(found.exact[0][0]), OFFER)
    assert view.plan == found.exact[0][0]
    with pytest.raises(MoestroError):
        find(picked.changed(budget_usd=1.0), OFFER, workers=1)
    with pytest.raises(MoestroError, match="goodput"):
        find(picked.changed(objective="goodput"), OFFER, workers=1)


@pytest.mark.slow
def test_a_search_in_its_process_ends_with_a_word_or_when_told() -> None:
    picked = picked_of(pp="2", micro_batch_size="2", pin=f"pp,micro_batch_size,schedule,vpp,{TINY_PINS}")
    search = Search(picked.changed(budget_usd=1.0), OFFER, workers=1)
    long = Search(replace(picked, pins=frozenset()), OFFER, workers=1)
    end = time.monotonic() + 120
    while not search.progress().over and time.monotonic() < end:
        time.sleep(0.05)
    assert "budget" in search.progress().error or "$" in search.progress().error
    long.cancel()
    assert not long.progress().over or long.progress().error
    search.cancel()


def test_a_search_that_dies_is_told() -> None:
    search = Search(picked_of(), OFFER, workers=1)
    assert search.pid is not None
    os.kill(search.pid, 9)
    end = time.monotonic() + 60
    while not search.progress().over and time.monotonic() < end:
        time.sleep(0.02)
    assert search.progress() == Progress(error=search.progress().error)
    assert "ended without a word" in search.progress().error
    search.cancel()


def test_every_field_has_a_name_and_a_word() -> None:
    from moestro.ui.words import HELP, LABELS

    assert set(FIELDS) <= set(LABELS)
    assert set(FIELDS) <= set(HELP)
    assert Wish().options == []


def test_mistakes_on_the_command_line_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(*args: str) -> str:
        return str(CliRunner().invoke(app, ["ui", *args]).exception)

    assert "no preset 'olmo-1b-7b'. Did you mean 'olmoe-1b-7b'?" in said("olmo-1b-7b")
    assert "no such config file" in said("nowhere.toml")
    assert "nowhere.json" in said("--profile", str(tmp_path / "nowhere.json"))
    monkeypatch.setattr("moestro.cli.ui.find_spec", lambda name: None)
    assert said() == "the plan explorer needs NiceGUI: pip install 'moestro[ui]'"


def test_a_port_that_is_taken_is_told() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(MoestroError, match=r"cannot listen on .* take another --port"):
            free_port("127.0.0.1", taken.getsockname()[1])
    assert free_port("127.0.0.1", 0) > 0
