"""Pages with one picture."""

from pathlib import Path

import pytest

from moestro.config import load_config
from moestro.config.plan import Plan
from moestro.graph.convert import workload_of
from moestro.plan.candidates import Candidate, Found, Tally
from moestro.predict.predict import predict_step
from moestro.predict.target import target_of
from moestro.report.front import write_front
from moestro.report.template import write_picture


@pytest.mark.parametrize(
    ("skipped", "told"), [({}, "100 plans, 7 of them"), ({"bound": 50}, "100 plans, at least 7 of")]
)
def test_what_rules_left_out_is_not_counted_as_known(skipped: dict[str, int], told: str, tmp_path: Path) -> None:
    work, plan = workload_of(load_config("olmoe-1b-7b").config), Plan(dp=8, zero=1)
    one = predict_step(work, plan, target_of("h100-sxm", 8))
    candidate = Candidate(one.step_s.value, one.memory.needed, one.memory.total, plan)
    tally = Tally(plans=100, too_big=7, skipped=skipped)
    write_front(Found([candidate], [candidate], exact=[(plan, one)], tally=tally), "a < b", 8e10, tmp_path / "f.html")
    page = (tmp_path / "f.html").read_text(encoding="utf-8")
    assert told in page
    assert "<h1>a &lt; b</h1>" in page


def test_a_page_needs_nothing_else(tmp_path: Path) -> None:
    write_picture(tmp_path / "page.html", "A & B", "<p>text</p>")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    head, body = page.split("</head>")
    assert "A &amp; B · Moestro" in head
    assert "Plotly" in head
    assert body.strip() == "<body><h1>A &amp; B</h1><p>text</p></body></html>"
