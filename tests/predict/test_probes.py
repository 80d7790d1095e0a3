"""Dry runs: sets that determine what they are for, tables that come back, and stages' peaks."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.config import load_config
from moestro.config.plan import Plan, Workload
from moestro.errors import MoestroError
from moestro.graph.convert import plan_of, workload_of
from moestro.predict.dry_run import MOST_CONDITION, Probe, fit_dry_run
from moestro.predict.probe_peaks import counted, counted_numbers, counted_peaks, take, traced
from moestro.predict.probe_rounds import Round, design, probes_of, unlike_layers
from moestro.predict.probe_table import read_probes, write_probes


def workload(preset: str, *overrides: str, trainer: str = "moestro") -> Workload:
    return workload_of(load_config(preset, overrides).config).model_copy(update={"trainer": trainer})


def plan(**changes: object) -> Plan:
    return Plan.model_validate({"pp": 4, "dp": 8, "ep": 8, "zero": 1, **changes})


class TestDesign:
    @pytest.mark.parametrize("trainer", ["moestro", "megatron"])
    @pytest.mark.parametrize(("preset", "pp"), [("olmoe-1b-7b", 4), ("deepseek-v2-lite", 6), ("deepseek-v3", 16)])
    def test_numbers_are_determined(self, preset: str, pp: int, trainer: str) -> None:
        asked, layout = workload(preset, trainer=trainer), plan(pp=pp)
        rounds = design(asked, layout, ("none", "block"))
        sizes = [1e9 + i for i, _ in enumerate(rounds.flat)]
        assert fit_dry_run(rounds.flat, sizes).condition == pytest.approx(rounds.condition)
        assert rounds.condition <= MOST_CONDITION
        for one in rounds.rounds:
            assert sum(one.layers) == asked.model.num_layers
            assert min(one.layers) >= 1
            assert all(again <= count for again, count in zip(one.recomputed, one.layers, strict=True))
            if trainer == "moestro":
                assert one.recomputed in (one.layers, (0,) * pp)

    def test_the_same_every_time(self) -> None:
        asked = workload("olmoe-1b-7b")
        assert design(asked, plan(), ("none", "block")) == design(asked, plan(), ("none", "block"))

    def test_stages_that_are_too_big_are_kept_out(self) -> None:
        asked, layout = workload("olmoe-1b-7b", trainer="megatron"), plan()
        free = design(asked, layout, ("none", "block"))
        room = 0.8 * max(max(counted_peaks(asked, layout, one)) for one in free.rounds)
        rounds = design(
            asked, layout, ("none", "block"), lambda one: [size > room for size in counted_peaks(asked, layout, one)]
        )
        assert max(max(counted_peaks(asked, layout, one)) for one in rounds.rounds) <= room
        with pytest.raises(MoestroError, match="does not fit in memory; probe with fewer stages"):
            design(asked, layout, ("none", "block"), lambda one: [True] * layout.pp)

    @pytest.mark.parametrize(
        ("preset", "layout", "text"),
        [
            ("olmoe-1b-7b", plan(pp=3), "probe with pp = 4 or more"),
            ("olmoe-tiny", plan(ep=1), "2 like layers for 4 stages"),
            ("switch-base-128", plan(), "take turns in this model"),
            ("olmoe-1b-7b", plan(dp=1024), "more micro-batches"),  # one: all stages hold as many
        ],
    )
    def test_what_cannot_be_probed(self, preset: str, layout: Plan, text: str) -> None:
        with pytest.raises(MoestroError, match=text):
            design(workload(preset), layout, ("none", "block"))

    def test_layers_unlike_the_others_count_to_the_ends(self) -> None:
        asked, layout = workload("deepseek-v3"), plan(pp=4)
        assert (unlike_layers(asked, layout), unlike_layers(workload("olmoe-1b-7b"), layout)) == (3, 0)
        layers = (10, 20, 21, 10)
        again = probes_of(Round(layers, "block", layers), asked, layout, 3)
        assert again[0] == Probe({"none": 0, "block": 7}, 4, "first (block)")
        assert again[-1] == Probe({"none": 0, "block": 10}, 1, "last (block)")
        some = probes_of(Round(layers, "block", (5, 0, 4, 10)), asked, layout, 3)
        assert some[0] == Probe({"none": 5, "block": 2}, 4, "first (block)")
        assert some[1:3] == (Probe({"none": 20, "block": 0}, 3), Probe({"none": 17, "block": 4}, 2))
        plain = probes_of(Round(layers, "none", (0,) * 4), asked, layout, 0)
        assert [probe.end for probe in plain] == ["first", "middle", "middle", "last (none)"]

    def test_a_round_is_a_plan(self) -> None:
        given = plan(schedule="interleaved", vpp=2)
        some, whole, none = ((1, 0, 2, 3), (1, 2, 3, 4), (0, 0, 0, 0))
        found = Round(whole, "block", some).plan(given)
        assert (found.schedule, found.vpp, found.layers_per_stage) == ("1f1b", 1, whole)
        assert (found.recompute, found.recompute_per_stage) == ("block", some)
        assert Round(whole, "block", whole).plan(given).recompute_per_stage is None
        assert Round(whole, "block", none).plan(given).recompute == "none"


class TestPeaks:
    @pytest.mark.parametrize("preset", ["olmoe-1b-7b", "deepseek-v2-lite", "telechat3-105b", "qwen3-30b-a3b"])
    def test_counted_memory_is_of_this_form(self, preset: str) -> None:
        """Layers within a per cent or so of what is counted of one, stages within two."""
        asked, layout = workload(preset), plan()
        rounds = design(asked, layout, ("none", "block"))
        peaks = take(rounds, counted(asked, layout))
        found = fit_dry_run(rounds.flat, [peaks[key] for key in sorted(peaks)])
        numbers = counted_numbers(asked, layout, ("none", "block"))
        assert found.layer_bytes == pytest.approx(numbers["layer"], rel=0.02)
        assert found.activation_bytes["none"] == pytest.approx(numbers["none"], rel=0.03)
        assert found.activation_bytes["block"] == pytest.approx(numbers["block"], abs=0.05 * numbers["none"])
        assert max(map(abs, found.residuals)) < 0.02

    def test_what_comes_back_matters(self) -> None:
        asked, layout = workload("olmoe-1b-7b"), plan()
        rounds = design(asked, layout, ("none", "block"))
        peaks = take(rounds, counted(asked, layout))
        with_it, without = (
            fit_dry_run(rounds.flat, [peaks[key] for key in sorted(peaks)], comes_back=b) for b in (True, False)
        )
        assert max(map(abs, without.residuals)) > 3 * max(map(abs, with_it.residuals))

    def test_equal_stages_are_run_once(self) -> None:
        rounds = design(workload("olmoe-1b-7b"), plan(), ("none", "block"))
        twice = type(rounds)(rounds.rounds * 2, rounds.probes * 2, rounds.condition)
        asked, told = list[tuple[Round, int]](), list[tuple[int, int]]()

        def peak(one: Round, stage: int) -> float:
            asked.append((one, stage))
            return 1e9 + len(asked)

        found = take(twice, peak, lambda done, total: told.append((done, total)))
        count = len(rounds.rounds)
        assert len(found) == 4 * 2 * count
        assert len(asked) <= 4 * count
        assert all(found[n, s] == found[n + count, s] for n in range(count) for s in range(4))
        assert told[0][0] == 0
        assert told[-1] == (len(asked), len(asked))
        with pytest.raises(MoestroError, match="holds nothing"):
            take(rounds, lambda *_: 0.0)

    @pytest.mark.slow
    def test_traced_stages_are_as_counted(self) -> None:
        """One layer a stage, of a shape at which bookkeeping is small."""
        overrides = ["parallel.pp=4", "train.micro_batch_size=1", "model.num_layers=4"]
        config = load_config("olmoe-1b-7b", overrides).config
        layout, one = plan_of(config, 4, 4), Round((1, 1, 1, 1), "none", (0, 0, 0, 0))
        trace, count = traced("olmoe-1b-7b", overrides, layout, 4), counted(workload_of(config), layout)
        for stage in (0, 2):
            assert trace(one, stage) == pytest.approx(count(one, stage), rel=0.03)


HEAD = "round,stage,end,in_flight,none,block,peak_bytes\n"


class TestTable:
    def test_there_and_back(self, tmp_path: Path) -> None:
        rounds = design(workload("deepseek-v2-lite"), plan(), ("none", "block"))
        peaks = {(n, s): 1e9 * (1 + n) + s for n in range(len(rounds.rounds)) for s in range(4)}
        write_probes(tmp_path / "p.csv", rounds.probes, peaks)
        read = read_probes(tmp_path / "p.csv")
        assert list(map(str, read.probes)) == list(map(str, rounds.flat))
        assert read.peaks_bytes == [peaks[key] for key in sorted(peaks)]
        assert read.names[5] == "1 1"

    @pytest.mark.parametrize(("unit", "factor"), [("peak_mib", 2**20), ("peak_gb", 1e9)])
    def test_other_columns_and_units(self, tmp_path: Path, unit: str, factor: float) -> None:
        path = tmp_path / "p.csv"
        path.write_text(f"in_flight, full, {unit}\n3,4,2.5\n2,1,0.5\n", encoding="utf-8-sig")
        read = read_probes(path)
        assert read.probes == [Probe({"full": 4}, 3), Probe({"full": 1}, 2)]
        assert read.peaks_bytes == [2.5 * factor, 0.5 * factor]
        assert read.names == ["line 2", "line 3"]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "needs one column of peaks"),
            ("in_flight,none\n2,1\n", "needs one column of peaks: peak_bytes, peak_mb"),
            ("in_flight,none,peak_gb,peak_mb\n2,1,3,4\n", "needs one column of peaks"),
            ("stage,none,peak_gb\n1,1,3\n", "no column 'in_flight'"),
            ("in_flight,stage,peak_gb\n1,1,3\n", "no column of layers"),
            ("in_flight,none,none,peak_gb\n1,1,1,3\n", "two columns 'none'"),
            (HEAD + "0,1,middle,3,1,0\n", "line 2 has another number of cells than the 7 columns"),
            (HEAD + "0,1,middle,3,1,0,1e9,7\n", "line 2 has another number of cells"),
            (HEAD + "0,1,middle,3,-1,0,1e9\n", "none = '-1' must be a whole number of at least 0"),
            (HEAD + "0,1,middle,0,1,0,1e9\n", "in_flight = '0' must be a whole number of at least 1"),
            (HEAD + "0,1,middle,3,1.5,0,1e9\n", "none = '1.5' must be a whole number"),
            (HEAD + "0,1,middle,3,1,0,\n", "line 2 has no peak_bytes: run that stage"),
            (HEAD + "0,1,middle,3,1,0,nan\n", "peak_bytes = 'nan' must be a number above 0"),
            (HEAD + "0,1,middle,3,1,0,-5\n", "peak_bytes = '-5' must be a number above 0"),
            (HEAD + "0,1,middle,3,1,0,OOM\n", "take out stages that ran out of memory"),
            (HEAD + "0,1,middle,3,1,0,1e9\n0,1,middle,3,2,0,2e9\n", "line 3 repeats line 2"),
            ("in_flight,none,peak_gb\n3,1,2\n3,1,2\n", "line 3 repeats line 2"),
        ],
    )
    def test_wrong_tables(self, tmp_path: Path, text: str, message: str) -> None:
        path = tmp_path / "p.csv"
        path.write_text(text, encoding="utf-8")
        with pytest.raises(MoestroError, match=message) as error:
            read_probes(path)
        assert len(str(error.value).splitlines()) == 1

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(MoestroError, match="cannot read"):
            read_probes(tmp_path / "none.csv")
        (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00\x01")
        with pytest.raises(MoestroError, match="no CSV file"):
            read_probes(tmp_path / "b.csv")
        with pytest.raises(MoestroError, match="cannot write"):
            write_probes(tmp_path / "none" / "p.csv", [], {})


@settings(max_examples=3, deadline=None)
@given(st.integers(4, 9), st.integers(0, 10**6))
def test_any_seed_and_pipeline(pp: int, seed: int) -> None:
    asked = workload("deepseek-v2-lite")
    rounds = design(asked, plan(pp=pp), ("none", "block"), seed=seed)
    truth = fit_dry_run(rounds.flat, [1e9] * len(rounds.flat))
    peaks = [truth.peak_bytes(probe) + 3e6 * sum(probe.layers.values()) for probe in rounds.flat]
    again = fit_dry_run(rounds.flat, peaks)
    assert again.layer_bytes - truth.layer_bytes == pytest.approx(3e6, rel=1e-3)
