"""The catalog, the records beside it, and the parallel runner. The commands are in tests/cli/test_papers.py."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

import papers.store
from moestro.errors import MoestroError
from papers.catalog import PAPERS, find_paper
from papers.jobs import run_jobs
from papers.result import Check, Paper, PaperResult, Progress, Verdict
from papers.store import read_record, record_path, run_paper, write_record

CHECK = Check("a claim", "7.5", "1.2", "measured", "holds in part", "a toy")


def yes(progress: Progress) -> PaperResult:
    progress(1, 2, "halves")
    progress(2, 2, "halves")
    return PaperResult((CHECK,), {"loss": 0.1})


PAPER = Paper("yes", 99, "Yes", "A Paper", "0000.00000", "a feature", yes)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(papers.store, "RESULTS_DIR", tmp_path / "results")
    return tmp_path / "results"


class TestCatalog:
    @pytest.mark.parametrize("slug", PAPERS)
    def test_entry_is_complete(self, slug: str) -> None:
        paper = PAPERS[slug]
        assert paper.slug == slug
        assert Path(papers.store.__file__).with_name(f"{slug}.py").is_file()
        assert 0 <= paper.number <= 40
        assert re.fullmatch(r"\d{4}\.\d{5}", paper.arxiv)
        assert all((paper.system, paper.title, paper.feature))

    @pytest.mark.parametrize("slug", PAPERS)
    def test_entry_has_a_record(self, slug: str) -> None:
        record = read_record(slug)
        assert record is not None
        assert record.slug == slug
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\dZ", record.recorded)
        assert record.seconds > 0
        assert record.machine
        assert {"moestro", "torch", "python"} <= set(record.versions)
        assert record.result.checks
        for check in record.result.checks:
            assert all((check.claim, check.published, check.ours))

    def test_numbers_are_unique(self) -> None:
        assert len({paper.number for paper in PAPERS.values()}) == len(PAPERS)

    def test_unknown_slug_names_the_nearest(self) -> None:
        with pytest.raises(MoestroError, match=r"no paper 'switch-transformer'.*Did you mean 'switch_transformers'"):
            find_paper("switch-transformer")

    def test_a_slug_like_no_other_is_told_where_to_look(self) -> None:
        with pytest.raises(MoestroError, match="`moestro papers` lists them"):
            find_paper("zzz")

    def test_imports_no_torch(self) -> None:
        code = "import sys, papers.catalog, papers.store, moestro.cli.papers; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


class TestRecords:
    def test_what_is_written_is_read_back(self, results: Path) -> None:
        record = run_paper(PAPER, lambda done, total, what: None)
        assert write_record(record) == results / "yes.json"
        assert read_record("yes") == record
        assert [file.name for file in results.iterdir()] == ["yes.json"]
        assert (results / "yes.json").stat().st_mode & 0o777 == 0o644

    def test_a_second_run_replaces_the_first(self, results: Path) -> None:
        record = run_paper(PAPER, lambda done, total, what: None)
        write_record(record)
        write_record(replace(record, seconds=12.5))
        assert read_record("yes") == replace(record, seconds=12.5)

    def test_no_record(self, results: Path) -> None:
        assert read_record("yes") is None

    @pytest.mark.parametrize("text", ["", "{", "{}", '{"slug": "yes"}'])
    def test_damaged_record_names_file_and_remedy(self, results: Path, text: str) -> None:
        write_record(run_paper(PAPER, lambda done, total, what: None))
        record_path("yes").write_text(text, encoding="utf-8")
        with pytest.raises(MoestroError, match=r"yes\.json is not a record.*`moestro papers run yes`"):
            read_record("yes")

    def test_an_unknown_verdict_is_not_a_record(self, results: Path) -> None:
        path = write_record(run_paper(PAPER, lambda done, total, what: None))
        assert "holds in part" in get_args(Verdict)
        path.write_text(path.read_text(encoding="utf-8").replace("holds in part", "holds, sort of"), encoding="utf-8")
        with pytest.raises(MoestroError, match="is not a record"):
            read_record("yes")


class TestJobs:
    def test_outcomes_are_in_the_order_of_the_jobs(self) -> None:
        seen: list[tuple[int, int, str]] = []
        outcomes = run_jobs(abs, [-3, 2, -1], lambda *progress: seen.append(progress), processes=1)
        assert outcomes == [3, 2, 1]
        assert seen == [(1, 3, "runs"), (2, 3, "runs"), (3, 3, "runs")]

    def test_a_failing_job_fails_the_call(self) -> None:
        with pytest.raises(ValueError, match="math domain error"):
            run_jobs(_root, [1.0, -1.0], lambda *progress: None, processes=1)


def _root(value: float) -> float:
    import math

    return math.sqrt(value)
