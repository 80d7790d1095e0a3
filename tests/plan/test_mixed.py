"""Attention on one kind of device and experts on another: the worked example, bounds, every order of small cases."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.config import ModelConfig, MoEConfig
from moestro.config.plan import Workload
from moestro.errors import MoestroError
from moestro.plan.mixed import Mixed, mixed_of, no_overlap_s, offloads, simulate
from moestro.plan.mixed_choice import best_offloads
from moestro.predict.target import target_of
from papers.hetermoe import shortest

EXAMPLE = Mixed(3.0, 4.0, 3.2, 1, 1, 6)


def test_the_worked_example() -> None:
    assert offloads(EXAMPLE, 3) == (0, 1, 1)
    plain, given_ = simulate(EXAMPLE, 3, 3), simulate(EXAMPLE, 3, 3, (0, 1, 1))
    assert plain.attention == pytest.approx(27 / 39)
    assert simulate(EXAMPLE, 24, 3).attention == pytest.approx(216 / 291)
    assert plain.total_s / given_.total_s == pytest.approx(39 / 35)
    assert no_overlap_s(EXAMPLE, 24, 8) / simulate(EXAMPLE, 24, 8).total_s == pytest.approx(1.743, abs=1e-3)


def test_counts_of_unlike_groups() -> None:
    """An attention device takes N / M experts a chunk, an expert device gives M / N · that; a chunk is bounded."""
    few = Mixed(1.0, 2.0, 1.0, 2, 4, 8)
    assert (few.taken, few.given, few.per_device) == (2, 1, 2)
    assert few.chunk_s == pytest.approx(0.5 * (2.0 * 1 + 1.0 * 2))
    many = Mixed(1.0, 2.0, 1.0, 4, 2, 8)
    assert (many.taken, many.given, many.per_device) == (1, 2, 4)
    assert max(offloads(Mixed(0.01, 9.0, 0.01, 1, 1, 4), 5)) <= 4


def test_memory_of_either_side() -> None:
    assert sum(offloads(EXAMPLE, 24)) == 20
    assert sum(offloads(EXAMPLE, 24, most=5)) == 5
    assert sum(offloads(EXAMPLE, 24, least=22)) == 22
    assert sum(offloads(Mixed(4.0, 3.0, 3.0, 1, 1, 6), 24)) == 0
    with pytest.raises(MoestroError, match="must give up 6"):
        offloads(EXAMPLE, 24, most=5, least=6)


@given(st.floats(0.3, 3), st.floats(0, 0.5), st.integers(1, 4), st.integers(1, 4), st.booleans())
@settings(max_examples=30, deadline=None)
def test_between_bounds(ratio: float, send: float, layers: int, micro_batches: int, backward: bool) -> None:
    mixed = Mixed(ratio, 1.0, 1.0, 1, 1, 6, send)
    found = simulate(mixed, layers, micro_batches, backward=backward)
    busiest = max(mixed.attention_s, mixed.experts_s) * layers * micro_batches * (3 if backward else 1)
    assert busiest * (1 - 1e-9) <= found.total_s
    assert found.total_s <= no_overlap_s(mixed, layers, micro_batches, backward) * (1 + 1e-9) + 4 * send * layers
    assert 0 < found.attention <= 1 + 1e-9
    one = simulate(mixed, layers, 1, backward=backward).total_s
    assert one >= layers * (mixed.attention_s + mixed.experts_s) * (3 if backward else 1) * (1 - 1e-9)


@given(st.floats(0.3, 3), st.sampled_from([(1, 2, True), (2, 2, True), (2, 2, False), (3, 2, False)]))
@settings(max_examples=10, deadline=None)
def test_no_order_is_better(ratio: float, case: tuple[int, int, bool]) -> None:
    mixed = Mixed(ratio, 1.0, 1.0, 1, 1, 6)
    assert simulate(mixed, case[0], case[1], backward=case[2]).total_s == pytest.approx(shortest(mixed, *case))


@given(st.floats(0.3, 3), st.floats(0.3, 3), st.floats(0, 2))
@settings(max_examples=20, deadline=None)
def test_the_way_between_carries_one_at_a_time(attention: float, experts: float, send: float) -> None:
    layers, micro_batches = 3, 6
    total = simulate(Mixed(attention, experts, experts, 1, 1, 6, send), layers, micro_batches, backward=True).total_s
    assert total >= 2 * send * layers * micro_batches * (1 - 1e-9)
    assert total >= simulate(Mixed(attention, experts, experts, 1, 1, 6), layers, micro_batches, backward=True).total_s


@pytest.mark.parametrize("seed", range(4))
def test_no_experts_given_over_are_better(seed: int) -> None:
    """Against all choices of five layers, which are too many for best_offloads to try them all."""
    draw = np.random.default_rng(seed)
    attention, experts, own, send = draw.uniform((0.3, 0.8, 0.5, 0.0), (1.0, 2.0, 2.0, 0.3))
    mixed = Mixed(attention, experts, own, 1, 1, 3, send)
    most = int(draw.integers(3, 15))
    found = best_offloads(mixed, 5, 3, most)
    every = (given for given in product(range(4), repeat=5) if sum(given) <= most)
    best = min(simulate(mixed, 5, 3, given, backward=True).total_s for given in every)
    ours = simulate(mixed, 5, 3, found, backward=True).total_s
    assert sum(found) <= most
    assert ours <= best * 1.02
    rule = simulate(mixed, 5, 3, offloads(mixed, 5, most), backward=True).total_s
    assert ours <= rule * (1 + 1e-9)


def test_few_choices_are_all_tried() -> None:
    found = best_offloads(EXAMPLE, 2, 3)
    every = product(range(7), repeat=2)
    assert simulate(EXAMPLE, 2, 3, found, backward=True).total_s == min(
        simulate(EXAMPLE, 2, 3, given, backward=True).total_s for given in every
    )
    assert sum(best_offloads(EXAMPLE, 2, 3, least=9)) >= 9
    with pytest.raises(MoestroError, match="must give up 9"):
        best_offloads(EXAMPLE, 2, 3, most=8, least=9)


def test_bad_input() -> None:
    with pytest.raises(MoestroError, match="one must divide the other"):
        Mixed(1, 1, 1, 2, 3, 6)
    with pytest.raises(MoestroError, match="7 experts"):
        Mixed(1, 1, 1, 2, 2, 7)
    with pytest.raises(MoestroError, match="0 to 6 experts"):
        simulate(EXAMPLE, 2, 2, (7, 0))


def test_of_predicted_times() -> None:
    """Twice as many sequences reach an expert device as there are attention devices for each."""
    moe = MoEConfig(num_experts=8, top_k=2, expert_hidden_size=512)
    model = ModelConfig(vocab_size=1000, hidden_size=512, num_layers=2, num_heads=8, max_seq_len=4096, moe=moe)
    work, device = Workload(model=model, seq_len=4096, global_batch_size=8), target_of("h100-sxm", 1)
    even, double = mixed_of(work, device, device, 2, 2), mixed_of(work, device, device, 4, 2)
    assert double.attention_s == even.attention_s > 0
    assert double.experts_s == pytest.approx(2 * even.experts_s)
    assert even.experts_s == even.experts_on_attention_s
    with pytest.raises(MoestroError, match="no experts"):
        mixed_of(work.model_copy(update={"model": model.model_copy(update={"moe": None})}), device, device, 1, 1)
