"""ZAYA1's planner: each check holds, and with a planted bug does not."""

from dataclasses import replace
from functools import lru_cache

import pytest

from moestro.plan.candidates import Found
from papers import zaya1_planner as planner


@lru_cache
def found(seq_len: int = 4096) -> Found:
    return planner.found_on(planner.CLUSTER, seq_len)


def test_layouts() -> None:
    phases = {4096: found()}
    check = planner.check_layouts(phases, found())
    assert check.verdict == "holds"
    assert check.ours == "4K: dp=1024 zero=1 micro_batch_size=4 (0.58 s)"
    second = next(pair for pair in found().exact if pair[0].ep == 8)
    wrong = replace(found(), exact=[second, *found().exact[:3]])
    assert planner.check_layouts({4096: wrong}, found()).verdict == "does not hold"


def test_small_devices() -> None:
    assert planner.check_small_devices(found()).verdict == "holds in part", "192 GB share nothing out"


def test_tensor_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert planner.check_tensor_ranks().verdict == "holds"
    monkeypatch.setattr("moestro.config.plan.cut_heads", lambda workload, tp: [])
    assert planner.check_tensor_ranks().verdict == "holds in part"


def test_full_nodes() -> None:
    assert planner.check_full_nodes(found()).verdict == "holds"
    rest = [pair for pair in found().exact if pair[0].ep != 4]
    assert planner.check_full_nodes(replace(found(), exact=rest)).verdict == "holds in part"


def test_muon(monkeypatch: pytest.MonkeyPatch) -> None:
    check = planner.check_muon()
    assert check.verdict == "holds"
    assert check.ours == "1,053 and 989; on more than two of 1,024 0, of 2,048 603"
    monkeypatch.setattr(planner, "GATE_UP", 4_194_304)
    assert planner.check_muon().verdict == "holds in part"


def test_the_published_step_is_not_within_the_interval() -> None:
    check = planner.check_step(found())
    assert check.verdict == "does not hold"
    assert "4.4%" in check.note
