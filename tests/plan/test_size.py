"""The linter of shapes: what it must flag and what it must pass, and that losses are those of the mended twin."""

import pytest
from predict.test_predict import h100

from moestro.config import load_config
from moestro.config.model import ModelConfig
from moestro.config.moe import MoEConfig
from moestro.config.plan import Plan, Workload
from moestro.errors import MoestroError
from moestro.graph.convert import workload_of
from moestro.graph.count import count_step
from moestro.graph.words import Kernel
from moestro.hardware.profile import Sample
from moestro.plan.alignment import BELOW_VECTOR, RULE, aligned_graph, measured_alignment, price_shape
from moestro.plan.shapes import changed, scaled, with_head_dim, with_width
from moestro.plan.size import Lint, lint_shape
from moestro.predict.predict import predict_step

TARGET = h100()
MODEL = ModelConfig(
    vocab_size=50_304,
    hidden_size=2048,
    num_layers=8,
    num_heads=16,
    num_kv_heads=8,
    max_seq_len=4096,
    moe=MoEConfig(num_experts=8, top_k=2, expert_hidden_size=4096),
)


def work(**changes: object) -> Workload:
    return Workload(model=changed(MODEL, changes), seq_len=4096, global_batch_size=2)


def lint(plan: Plan | None = None, **changes: object) -> Lint:
    return lint_shape(work(**changes), plan or Plan(), TARGET)


def rules(found: Lint) -> list[str]:
    return [finding.rule for finding in found.of("shape")]


class TestFindings:
    def test_a_good_shape_passes(self) -> None:
        assert rules(lint()) == []

    @pytest.mark.parametrize("sequences", [1, 4])
    def test_zaya1_passes(self, sequences: int) -> None:
        zaya = workload_of(load_config("zaya1-8b").config).model_copy(update={"global_batch_size": 4})
        assert rules(lint_shape(zaya, Plan(micro_batch_size=sequences), TARGET)) == []

    def test_vocabulary_of_gpt2(self) -> None:
        (found,) = lint(vocab_size=50_257).of("shape")
        assert (found.rule, found.advice) == ("vocabulary", "vocab_size = 50,304")
        assert found.loss > 0.005

    def test_heads_of_80(self) -> None:
        (found,) = lint(hidden_size=2560, num_heads=32, num_kv_heads=32).of("shape")
        assert found.rule == "heads"
        assert "head_dim = 80" in found.what
        assert "pad it to 96" in found.what
        assert found.loss > 0.005

    def test_swiglu_width_of_eight_thirds(self) -> None:
        (found,) = lint(moe=MoEConfig(num_experts=8, top_k=2, expert_hidden_size=5461)).of("shape")
        assert found.rule == "alignment"
        assert "8·h/3" in found.what
        assert found.advice in ("moe.expert_hidden_size = 5,440", "moe.expert_hidden_size = 5,504")
        assert found.loss > 0.1

    def test_a_slice_of_a_tensor_rank_counts(self) -> None:
        """1,376 = 64 · 21.5 is what each of two ranks has of 2,752 = 64 · 43."""
        dense = {"moe": None, "intermediate_size": 2752}
        assert rules(lint(**dense)) == []
        assert rules(lint(Plan(tp=2), **dense)) == ["alignment"]

    def test_layers_that_stages_do_not_share_out(self) -> None:
        assert rules(lint(Plan(pp=2))) == []
        (found,) = lint(Plan(pp=3)).of("shape")
        assert found.rule == "layers"
        assert found.advice == "num_layers = 9"

    def test_tensor_ranks_beyond_the_heads_of_keys_are_refused(self) -> None:
        assert rules(lint(Plan(tp=8))) == []
        with pytest.raises(MoestroError, match="num_kv_heads = 8: ranks hold whole heads"):
            lint(Plan(tp=16))

    def test_the_loss_is_the_twins(self) -> None:
        own, twin = work(vocab_size=50_257), work(vocab_size=50_304)
        loss = price_shape(own, Plan(), TARGET).step_s / price_shape(twin, Plan(), TARGET).step_s - 1
        assert lint(vocab_size=50_257).of("shape")[0].loss == pytest.approx(loss)

    def test_few_tokens_are_the_batchs_fault(self) -> None:
        small = work().model_copy(update={"seq_len": 128})
        found = lint_shape(small, Plan(), TARGET)
        assert rules(found) == []
        assert "knee" in [finding.rule for finding in found.of("batch")]
        large = lint_shape(work().model_copy(update={"seq_len": 4096}), Plan(micro_batch_size=2), TARGET)
        assert "knee" not in [finding.rule for finding in large.of("batch")]


class TestAlignment:
    def test_an_aligned_step_is_predicted_as_ever(self) -> None:
        assert price_shape(work(), Plan(), TARGET).step_s == pytest.approx(
            predict_step(work(), Plan(), TARGET).step_s.value
        )

    @pytest.mark.parametrize(
        ("part", "changes"),
        [
            ("experts", {"moe": MoEConfig(num_experts=8, top_k=2, expert_hidden_size=4095)}),
            ("dense", {"moe": None, "intermediate_size": 4095}),
        ],
    )
    def test_misaligned_products_take_the_published_factor(self, part: str, changes: dict[str, object]) -> None:
        """Of all passes, and no others: the width is n of one product, k of the next. Odd numbers of tokens are not."""
        odd = work(**changes).model_copy(update={"seq_len": 1001})
        graph = count_step(odd, Plan())
        for old, new in zip(graph.nodes(), aligned_graph(graph, RULE).nodes(), strict=True):
            longer = isinstance(old[0], Kernel) and old[0].part == part and "gemm" in old[0].op
            assert new[1] / old[1] == pytest.approx(BELOW_VECTOR if longer else 1.0), old[0]

    @pytest.mark.parametrize(("width", "dtype", "slow"), [(8, "bf16", False), (4, "bf16", True), (4, "fp32", False)])
    def test_rule_is_in_bytes(self, width: int, dtype: str, slow: bool) -> None:
        assert (RULE.factor(1024 + width, dtype) > 1) is slow

    def test_a_sweep_stands_before_the_rule(self) -> None:
        """Odd widths at half the rate, multiples of 2 at 0.8 of it, all others alike."""
        share = {1: 0.5, 2: 0.8}
        samples = []
        for width in (2047, 2046, 2044, 2040, 2032, 2048, 2049, 2050, 2052, 2056):
            power = min(width & -width, 128)
            flops = 2.0 * 1024 * 1024 * width
            case = {"m": 1024, "n": width, "k": 1024, "dtype": "fp32"}
            seconds = flops / (1e12 * share.get(power, 1.0))
            samples.append(Sample(op="gemm", case=case, median_s=seconds, flops=flops))
        found = measured_alignment(samples, "fp32")
        assert found.step == 4
        assert found.factor(1001, "fp32") == pytest.approx(2.0, rel=1e-3)
        assert found.factor(1002, "fp32") == pytest.approx(1.25, rel=1e-3)
        assert found.factor(1004, "fp32") == 1.0
        assert measured_alignment(samples, "bf16").basis == RULE.basis


class TestShapes:
    def test_heads_of_another_size_hold_as_much(self) -> None:
        model = changed(MODEL, {"hidden_size": 2560, "num_heads": 32, "num_kv_heads": 32})
        twin = with_head_dim(model, 128)
        assert twin is not None
        assert (twin.num_heads, twin.num_kv_heads, twin.head_dim) == (20, 20, 128)
        assert with_head_dim(changed(MODEL, {"num_heads": 1, "num_kv_heads": 1, "head_dim": 80}), 128) is None

    def test_a_width_after_the_split(self) -> None:
        model = changed(MODEL, {"moe": MoEConfig(num_experts=8, top_k=2, expert_hidden_size=4096, granularity=4)})
        moe = with_width(model, "moe.expert_hidden_size", 1088).moe
        assert moe is not None
        assert moe.resolved_expert_hidden_size == 1088

    @pytest.mark.parametrize("name", ["zaya1-8b", "deepseek-v3", "mixtral-8x7b", "qwen3-235b-a22b", "switch-base-128"])
    def test_scaled_by_one_is_the_same(self, name: str) -> None:
        model = workload_of(load_config(name).config).model
        same = scaled(model, 1.0)
        assert same.model_copy(update={"head_dim": model.head_dim, "num_kv_heads": model.num_kv_heads}) == model
