"""MoE routers: the exact checks, verdicts that can fail, and what was recorded."""

import pytest
import torch

from moestro.analyze.routers import RouterFigures
from papers import moe_routers
from papers.moe_routers import KINDS, Times
from papers.result import PaperResult
from papers.store import read_record


class TestExactChecks:
    @pytest.mark.parametrize("check", [moe_routers.check_parameters, moe_routers.check_hash, moe_routers.check_swap])
    def test_holds(self, check) -> None:  # type: ignore[no-untyped-def]
        assert check().verdict == "holds"

    def test_a_wrong_formula_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        right = moe_routers.formulas
        monkeypatch.setattr(moe_routers, "formulas", lambda d, e, m: right(d, e, m) | {"hybrid": d * e + d * m + e * m})
        assert moe_routers.check_parameters().verdict == "does not hold"

    def test_a_hash_that_does_not_hash_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(moe_routers, "hashed", lambda router, ids: torch.zeros_like(ids))
        assert moe_routers.check_hash().verdict == "does not hold"  # one expert has all
        generator = torch.Generator().manual_seed(0)
        even = lambda router, ids: torch.randint(16, (len(ids),), generator=generator)  # noqa: E731
        monkeypatch.setattr(moe_routers, "hashed", even)
        assert moe_routers.check_hash().verdict == "holds in part"  # even, and not a function of the id


def times(**micros: float) -> Times:
    return {kind: [micros.get(kind, 100.0)] * 3 for kind in KINDS}


class TestVerdicts:
    def test_of_times(self) -> None:
        good = {"narrow": times(hash=9, linear=10, mlp=20, attention=20, hybrid=20, mlp_hadamard=30)}
        assert moe_routers.check_fastest(good).verdict == moe_routers.check_order(good).verdict == "holds"
        both = good | {"wide": times(hash=9, linear=19, mlp=20, attention=40, hybrid=10, mlp_hadamard=40)}
        assert moe_routers.check_fastest(both).verdict == moe_routers.check_order(both).verdict == "holds in part"
        bad = {"narrow": times(hash=200, linear=100, mlp=90, hybrid=80)}
        assert moe_routers.check_fastest(bad).verdict == moe_routers.check_order(bad).verdict == "does not hold"

    def test_range(self) -> None:
        fine = [RouterFigures(kind, 1, [1.0], [1.0], [0.5], [0.9], [1.2], [0.1], [1.0], [0.0]) for kind in KINDS]
        assert moe_routers.check_range(fine).verdict == "holds"
        fine[0].load_entropy = [float("nan")]
        assert moe_routers.check_range(fine).verdict == "does not hold"

    def test_sparse(self) -> None:
        made = {kind: RouterFigures(kind, 1, token_entropy=[0.5, 0.5, 0.5]) for kind in KINDS}
        made["mlp_hadamard"].token_entropy = [0.4, 0.6, 0.4]
        assert moe_routers.check_sparse(list(made.values())).verdict == "holds in part"


class TestRecord:
    record = read_record("moe_routers")

    def test_verdicts_follow_from_the_figures(self) -> None:
        assert self.record is not None
        checks, figures = self.record.result.checks, self.record.result.figures
        verdicts = {check.claim: check.verdict for check in checks}
        for exact in (moe_routers.check_parameters, moe_routers.check_hash, moe_routers.check_swap):
            assert verdicts[exact().claim] == "holds"
        by_name = {kind: RouterFigures(kind, 1) for kind in KINDS}
        for kind, made in by_name.items():
            for key in ("token_entropy", "load_entropy", "max_over_mean", "active_share"):
                setattr(made, key, [figures[f"{key}: {kind} seed={seed}"] for seed in moe_routers.SEEDS])
        for check in (moe_routers.check_range, moe_routers.check_sparse):
            again = check(list(by_name.values()))
            assert (again.verdict, again.ours) == (
                verdicts[again.claim],
                next(check.ours for check in checks if check.claim == again.claim),
            )

    def test_times_bear_out_the_headline(self) -> None:
        assert self.record is not None
        assert self.record.result.checks[0].verdict == "holds"
        for name in moe_routers.TIMED:
            micros = {kind: self.record.result.figures[f"CPU microseconds: {kind}, {name}"] for kind in KINDS}
            assert micros["linear"] < min(micros[kind] for kind in ("mlp", "attention", "hybrid", "mlp_hadamard"))


@pytest.mark.slow
def test_reproduction() -> None:
    """The whole of `moestro papers run moe_routers`."""
    seen: list[int] = []
    result: PaperResult = moe_routers.run(lambda done, total, what: seen.append(done))
    assert seen == sorted(seen)
    assert {check.verdict for check in result.checks[2:6]} == {"holds"}
