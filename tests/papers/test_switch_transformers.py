"""Switch Transformers: the exact checks, the toy task, and (slow) the whole reproduction."""

import math
from dataclasses import replace

import pytest
import torch

from moestro.data.batches import IGNORE
from papers import switch_exact as exact
from papers import switch_transformers as switch
from papers.encoder_decoder import Shape
from papers.result import PaperResult
from papers.toys import Curve, HiddenClusters


class TestExactChecks:
    @pytest.mark.parametrize(
        "check",
        [
            exact.check_uniform_loss,
            exact.check_gradient,
            exact.check_conservation,
            exact.check_precision,
            exact.check_jitter,
            exact.check_groups,
            exact.check_teachers,
        ],
    )
    def test_holds(self, check) -> None:  # type: ignore[no-untyped-def]
        assert check().verdict == "holds"

    def test_table_closes_but_for_the_two_large_rows(self) -> None:
        assert exact.check_table().verdict == "holds in part"
        assert [shape.name for shape in exact.TABLE if not shape.closes] == ["T5-Large", "Switch-Large"]
        for shape in exact.TABLE:
            assert shape.billions == pytest.approx(float(shape.published), rel=0.12)

    def test_large_rows_close_with_t5_1_0_feed_forwards(self) -> None:
        large = [shape for shape in exact.TABLE if shape.name.endswith("Large")]
        assert all(replace(shape, width=4096, matrices=2).closes for shape in large)

    def test_xxl_is_flagged(self) -> None:
        assert exact.check_xxl().verdict == "arithmetic does not close"
        assert exact.XXL.billions == pytest.approx(201, abs=1)
        assert replace(exact.XXL, experts=128).closes


class TestShape:
    def test_counts_a_model_small_enough_to_count_by_hand(self) -> None:
        shape = Shape("tiny", "0", hidden=2, width=3, layers=2, heads=1, experts=5)
        attention = 4 * 2 * 64  # q, k, v, o of one head of 64
        dense, sparse = 3 * 2 * 3, 5 * (3 * 2 * 3 + 2)
        by_hand = (2 + 2 * 2) * attention + 2 * dense + 2 * sparse + 32128 * 2
        assert shape.billions * 1e9 == pytest.approx(by_hand)


class TestHiddenClusters:
    def test_labels_follow_the_map_of_the_first_tokens_cluster(self) -> None:
        task = HiddenClusters(32, seed=0, num_clusters=4, noise=0.0)
        batch = task.batch(8, 6)
        for tokens, labels in zip(batch.input_ids.tolist(), batch.labels.tolist(), strict=True):
            assert labels[0] == IGNORE
            follow = task.next_token[task.cluster[tokens[0]]]
            assert labels[1:] == [int(follow[token]) for token in tokens[1:]]

    def test_noise_share(self) -> None:
        task = HiddenClusters(64, seed=0, noise=0.2)
        batch = task.batch(500, 16)
        follow = task.next_token[task.cluster[batch.input_ids[:, :1]], batch.input_ids][:, 1:]
        share = (batch.labels[:, 1:] != follow).float().mean().item()
        assert share == pytest.approx(0.2 * 63 / 64, abs=0.02)

    def test_stream_is_fixed_by_its_seed_and_goes_on(self) -> None:
        one, other = HiddenClusters(16, seed=3), HiddenClusters(16, seed=3)
        first, same = one.batch(4, 5), other.batch(4, 5)
        assert torch.equal(first.labels, same.labels)
        second = one.batch(4, 5)
        assert not torch.equal(first.labels, second.labels)
        assert second.sample_ids.tolist() == [4, 5, 6, 7]


class TestCurve:
    def test_steps_to_loss_waits_for_a_whole_window(self) -> None:
        curve = Curve(loss=[4.0, 2.0, 2.0, 1.0], dropped=[0.0] * 4)
        assert curve.final_loss(2) == 1.5
        assert curve.steps_to(3.0, window=2) == 2
        assert curve.steps_to(1.9, window=2) == 4
        assert curve.steps_to(1.0, window=2) is None


class TestTraining:
    def test_learns_and_is_repeatable(self) -> None:
        job = switch.Job(seed=0, num_experts=4, steps=12)
        curve = switch.train(job)
        assert curve.loss[0] == pytest.approx(math.log(switch.VOCAB_SIZE), abs=0.3)
        assert curve.final_loss(3) < curve.loss[0] - 0.1
        assert switch.train(job) == curve

    def test_capacity_below_one_drops_at_least_the_rest(self) -> None:
        job = switch.Job(seed=0, num_experts=8, capacity_factor=0.5, steps=2)
        assert min(switch.train(job).dropped) >= 0.5


@pytest.mark.slow
def test_reproduction() -> None:
    """The whole of `moestro papers run switch_transformers`, held against what we say of it."""
    seen: list[int] = []
    result: PaperResult = switch.run(lambda done, total, what: seen.append(done))
    verdicts = {check.claim: check.verdict for check in result.checks}
    assert seen == list(range(1, len(seen) + 1))
    assert verdicts["At equal FLOPs per token, more experts give a lower loss"] == "holds"
    assert verdicts["Steps to the dense model's final loss"] == "not reproducible here"
    assert all(math.isfinite(value) for value in result.figures.values())
