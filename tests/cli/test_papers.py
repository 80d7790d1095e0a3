"""`moestro papers`: the table, the records, a run, and its mistakes."""

import json
from pathlib import Path

import pytest

import papers.catalog
import papers.show
import papers.store
from papers.result import Check, Paper, PaperResult, Progress

from .helpers import moestro

CHECKS = (
    Check("a headline claim", "7.5 [times]", "1.2", "measured", "holds in part", "a toy"),
    Check("another", "1", "1", "computed", "holds"),
)


def run(progress: Progress) -> PaperResult:
    progress(1, 1, "runs")
    return PaperResult(CHECKS, {"loss": 0.1})


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A catalog of one quick paper, and a folder of its own for the records."""
    monkeypatch.setattr(papers.store, "RESULTS_DIR", tmp_path)
    monkeypatch.setattr(papers.show, "RESULTS_DIR", tmp_path)
    paper = Paper("toy", 99, "Toy", "A Toy Paper", "0000.00000", "a feature", run)
    monkeypatch.setitem(papers.catalog.PAPERS, "toy", paper)
    return tmp_path


class TestTable:
    def test_shows_the_recorded_headline_and_its_date(self) -> None:
        done = moestro("papers")
        assert done.code == 0
        for text in ("Switch Transformer", "2101.03961", "switch_transformers", "recorded 20", "checks hold"):
            assert text in done.out

    def test_json(self) -> None:
        rows = json.loads(moestro("papers", "--json").out)
        assert {row["slug"] for row in rows} == set(papers.catalog.PAPERS)
        assert [row["number"] for row in rows] == sorted(row["number"] for row in rows)
        (switch,) = (row for row in rows if row["slug"] == "switch_transformers")
        assert switch["number"] == 11
        assert {"claim", "published", "ours", "how", "verdict", "note"} == set(switch["record"]["result"]["checks"][0])

    def test_a_paper_never_run_says_so(self, toy: Path) -> None:
        assert "not recorded" in moestro("papers").out
        assert "`moestro papers run toy`" in moestro("papers", "show", "toy").out
        assert json.loads(moestro("papers", "show", "toy", "--json").out)["record"] is None

    def test_a_damaged_record_is_a_user_error(self, toy: Path) -> None:
        (toy / "toy.json").write_text("{", encoding="utf-8")
        done = moestro("papers")
        assert done.code == 2
        assert "toy.json is not a record" in done.err


class TestRun:
    def test_prints_and_records(self, toy: Path) -> None:
        done = moestro("papers", "run", "toy")
        assert done.code == 0
        for text in ("A Toy Paper", "holds in part", "a headline claim", "7.5 [times]", "measured", "a toy"):
            assert text in done.out
        assert "Toy: 1/1 runs" in done.err
        assert f"recorded in {toy / 'toy.json'}" in done.err
        assert moestro("papers", "show", "toy").out == done.out
        assert "1 of 2 checks hold" in moestro("papers").out

    def test_json_is_the_record(self, toy: Path) -> None:
        printed = json.loads(moestro("papers", "run", "toy", "--json").out)
        assert printed["record"] == json.loads((toy / "toy.json").read_text(encoding="utf-8"))
        assert json.loads(moestro("papers", "--json", "show", "toy").out) == printed

    def test_a_folder_that_cannot_be_written_costs_only_the_record(
        self, toy: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (toy / "file").touch()
        monkeypatch.setattr(papers.store, "RESULTS_DIR", toy / "file" / "results")
        done = moestro("papers", "run", "toy")
        assert done.code == 0
        assert "a headline claim" in done.out
        assert "not recorded" in done.err

    @pytest.mark.parametrize("subcommand", ["run", "show"])
    def test_unknown_slug(self, subcommand: str) -> None:
        done = moestro("papers", subcommand, "switch_transformer")
        assert done.code == 2
        assert done.err == "error: no paper 'switch_transformer'. Did you mean 'switch_transformers'?\n"
