"""Attention and experts apart: closed forms against bounds and a pass-by-pass pipeline; no token is lost."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.errors import MoestroError
from moestro.predict.disaggregate import (
    AFPipe,
    Split,
    Work,
    best_split,
    chunked_s,
    copies,
    disaggregated_s,
    paired_s,
    parse_split,
    serial_s,
    simulate,
    split_of,
    work_of,
)
from moestro.predict.words import TimeBreakdown

seconds = st.floats(0.01, 10.0)
works = st.builds(Work, seconds, seconds, seconds, seconds)


def ended(pipe: AFPipe, work: Work, layers: int, micro_batches: int, split: Split) -> dict[str, float]:
    """What each kind of resource must have worked in all, by hand."""
    each = {
        "A": work.attention_s / split.share,
        "F": work.experts_s / (1 - split.share),
        "out": work.exchange_s / 2 / 0.5,
        "back": work.exchange_s / 2 / 0.5,
    }
    groups = len(pipe.busy_s) // 4
    return {kind: value * layers * micro_batches * groups for kind, value in each.items()}


class TestClosedForms:
    def test_by_hand(self) -> None:
        work = Work(1.0, 3.0, 0.5, 0.7)
        assert serial_s(work) == pytest.approx(5.2)
        assert chunked_s(work, 4) == pytest.approx(1.0 + 3.0 + 0.3)
        assert paired_s(work) == pytest.approx(4.0)
        assert disaggregated_s(work, Split(8, 24)) == pytest.approx(4.0)
        assert disaggregated_s(work, Split(16, 16)) == pytest.approx(6.0)
        assert disaggregated_s(Work(0.1, 0.1, 4.0, 2.0), Split(16, 16)) == pytest.approx(6.0)
        assert disaggregated_s(Work(0.1, 0.1, 4.0, 2.0), split_of(4, 12, shared_nics=False)) == pytest.approx(12.0)

    @given(works)
    def test_never_faster_than_what_there_is_to_do(self, work: Work) -> None:
        best = disaggregated_s(work, best_split(work, 64))
        assert best * (1 + 1e-9) >= max(work.compute_s, work.exchange_s)
        for way in (chunked_s(work), paired_s(work)):
            assert max(work.compute_s, work.exchange_s) * (1 - 1e-12) <= way <= serial_s(work) * (1 + 1e-12)

    @given(seconds, seconds, st.integers(2, 64))
    def test_an_infinite_network_leaves_nothing_to_gain(self, attention: float, experts: float, devices: int) -> None:
        work = Work(attention, experts, 0.0, 0.0)
        assert serial_s(work) <= disaggregated_s(work, best_split(work, devices)) * (1 + 1e-12)

    @given(works, st.integers(2, 40))
    def test_no_split_beats_the_best(self, work: Work, devices: int) -> None:
        best = disaggregated_s(work, best_split(work, devices))
        assert all(disaggregated_s(work, split_of(m, devices - m)) >= best for m in range(1, devices))

    @given(works, st.floats(1.0, 5.0))
    def test_more_attention_never_wants_fewer_devices(self, work: Work, factor: float) -> None:
        free = Work(work.attention_s, work.experts_s, 0.0, 0.0)
        more = Work(work.attention_s * factor, work.experts_s, 0.0, 0.0)
        assert best_split(more, 48).attention >= best_split(free, 48).attention

    @given(works, st.integers(1, 31))
    def test_half_of_the_nics_is_the_best_share(self, work: Work, attention: int) -> None:
        shared, own = split_of(attention, 32 - attention), split_of(attention, 32 - attention, shared_nics=False)
        assert disaggregated_s(work, shared) <= disaggregated_s(work, own)


class TestSplits:
    def test_as_given_or_as_a_ratio(self) -> None:
        assert parse_split("16:10", 26) == Split(16, 10)
        assert parse_split("1:3", 32) == Split(8, 24)
        assert parse_split("auto", 32) is None

    @pytest.mark.parametrize("text", ["", "3", "0:4", "1:2:3", "a:b", "5:5", "-1:5"])
    def test_mistakes(self, text: str) -> None:
        with pytest.raises(MoestroError, match="--disaggregate"):
            parse_split(text, 8)

    def test_impossible_ones(self) -> None:
        for bad in (lambda: Split(0, 4), lambda: Split(4, 4, 1.0), lambda: best_split(Work(1, 1, 1, 1), 1)):
            with pytest.raises(MoestroError):
                bad()

    def test_of_a_step(self) -> None:
        time = TimeBreakdown(
            10, 0, 1, 0, 0, {"attention": 3, "norms": 1, "experts": 4, "dispatch": 2}, {"ep": 3.0, "dp": 9.0}
        )
        assert work_of(time) == Work(4, 6, 1.5, 1.5)
        for parts, dimensions in (({"attention": 3}, {"ep": 1.0}), ({"experts": 3}, {"dp": 1.0})):
            with pytest.raises(MoestroError, match=r"plan\.ep"):
                work_of(TimeBreakdown(10, 0, 1, 0, 0, parts, dimensions))


class TestPipe:
    @settings(max_examples=20, deadline=None)
    @given(works, st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(1, 6), st.integers(1, 7))
    def test_all_work_is_done_and_none_at_once(
        self, work: Work, groups: int, each: int, micro_batches: int, attention: int
    ) -> None:
        split = split_of(attention, 8 - attention)
        pipe = simulate(work, split, groups, groups * each, micro_batches)
        for kind, expected in ended(pipe, work, groups * each, micro_batches, split).items():
            busy = sum(value for name, value in pipe.busy_s.items() if name.rstrip("0123456789") == kind)
            assert busy == pytest.approx(expected)
        assert pipe.total_s >= max(pipe.busy_s.values()) * (1 - 1e-9)

    def test_one_micro_batch_passes_alone(self) -> None:
        work, split = Work(2.0, 3.0, 0.5, 0.5), Split(1, 1)
        assert simulate(work, split, 1, 5, 1).total_s == pytest.approx(5 * (4.0 + 6.0 + 2 * 1.0))
        # Groups work side by side, each by its part of the devices.
        assert simulate(work, split, 5, 5, 1).total_s == pytest.approx(5 * 5 * (4.0 + 6.0 + 2 * 1.0))

    @pytest.mark.parametrize("work", [Work(1.0, 1.0, 0.2, 0.2), Work(0.3, 1.0, 0.2, 0.2), Work(0.4, 1.0, 1.0, 1.0)])
    def test_closed_form_is_its_steady_state(self, work: Work) -> None:
        split = best_split(work, 32)
        short, long = (simulate(work, split, 2, 8, m).total_s for m in (40, 120))
        assert (long - short) / 80 / 8 == pytest.approx(disaggregated_s(work, split), rel=0.05)

    def test_no_more_under_way_than_allowed(self) -> None:
        work = Work(1.0, 1.0, 0.2, 0.2)
        free, bound = (simulate(work, Split(1, 1), 2, 4, 30, most=most) for most in (None, 3))
        assert (free.most, bound.most) == (16, 3)
        assert bound.total_s > free.total_s

    @pytest.mark.parametrize(("groups", "layers", "micro_batches"), [(0, 4, 1), (3, 4, 1), (2, 4, 0), (1, 0, 1)])
    def test_mistakes(self, groups: int, layers: int, micro_batches: int) -> None:
        with pytest.raises(MoestroError, match="share out"):
            simulate(Work(1, 1, 1, 1), Split(1, 1), groups, layers, micro_batches)


class TestTokens:
    @settings(max_examples=30, deadline=None)
    @given(st.integers(0, 40), st.integers(1, 4), st.integers(1, 7), st.integers(1, 8), st.integers(0, 9))
    def test_each_worker_gets_one_copy_of_what_it_must_work_on(
        self, tokens: int, top_k: int, attention: int, experts: int, seed: int
    ) -> None:
        choices = np.random.default_rng(seed).integers(0, 16, (tokens, top_k))
        sent = copies(choices, attention, experts, 16)
        assert sent.shape == (attention, experts)
        expected = [sum(any(e * experts // 16 == worker for e in row) for row in choices) for worker in range(experts)]
        assert sent.sum(axis=0).tolist() == expected
        assert tokens <= sent.sum() <= tokens * min(top_k, experts)

    def test_blocks_of_tokens(self) -> None:
        assert copies([[0], [0], [3], [0]], 2, 2, 4).tolist() == [[2, 0], [1, 1]]

    @pytest.mark.parametrize("expert", [-1, 4])
    def test_experts_that_do_not_exist(self, expert: int) -> None:
        with pytest.raises(MoestroError, match="4 experts"):
            copies([[expert]], 1, 1, 4)
