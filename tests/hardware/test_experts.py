"""Experts and attention on made-up machines."""

import numpy as np
import pytest

from moestro.errors import MoestroError
from moestro.hardware.curves.attention import attention_flops, fit_attention
from moestro.hardware.curves.experts import DEFAULT_SKEW, ExpertsCurve, exponent, fit_experts
from moestro.hardware.profile import Sample

PEAK, BANDWIDTH, UNITS = 400e12, 2e12, 100


def expert_samples(truth: ExpertsCurve, scale: float = 1.0) -> list[Sample]:
    samples = []
    for tokens in (1024, 4096, 16384):
        for experts, top_k, hidden, ffn in ((8, 2, 4096, 14336), (64, 6, 2048, 1408), (256, 8, 4096, 2048)):
            for ep in (1, 2, 4, 8):
                for routing in ("balanced", "power_law_1.2"):
                    case = {"tokens": tokens, "experts": experts, "top_k": top_k, "hidden": hidden, "ffn": ffn,
                            "ep": ep, "routing": routing, "dtype": "bf16"}  # fmt: skip
                    seconds = scale * truth.seconds(tokens, experts, top_k, hidden, ffn, ep, routing)
                    samples.append(Sample(op="moe_experts", case=case, median_s=seconds))
    return samples


@pytest.fixture(scope="module")
def default() -> ExpertsCurve:
    return fit_experts([], "bf16", PEAK, BANDWIDTH, UNITS)


def test_the_default_says_so_and_skews_by_the_public_medians(default: ExpertsCurve) -> None:
    assert default.basis == "class default of bf16"
    balanced = default.seconds(4096, 64, 6, 2048, 1408, 8)
    assert default.seconds(4096, 64, 6, 2048, 1408, 8, "power_law_1.2") == pytest.approx(balanced * DEFAULT_SKEW[8])
    assert default.seconds(4096, 64, 6, 2048, 1408, 8, "power_law_0") == pytest.approx(balanced)


def test_a_known_machine_is_recovered_and_unseen_shapes_predicted(default: ExpertsCurve) -> None:
    curve = fit_experts(expert_samples(default, 1.3), "bf16", PEAK, BANDWIDTH, UNITS)
    for case in ((8192, 64, 6, 2048, 1408, 2), (4096, 128, 8, 4096, 1536, 4)):
        assert curve.seconds(*case) == pytest.approx(1.3 * default.seconds(*case), rel=0.05)
    assert curve.held_out is not None
    assert curve.held_out.median < 0.03
    assert curve.skew_factor(4) == pytest.approx(DEFAULT_SKEW[4], rel=0.01)
    assert curve.skew_factor(4, "balanced") == 1


def test_own_skew_replaces_the_default(default: ExpertsCurve) -> None:
    samples = [
        s.model_copy(update={"median_s": s.median_s * (2.0 if s.case["routing"] != "balanced" else 1.0)})
        for s in expert_samples(default)
    ]
    curve = fit_experts(samples, "bf16", PEAK, BANDWIDTH, UNITS)
    assert curve.skew_factor(8) == pytest.approx(2.0 * DEFAULT_SKEW[8], rel=0.01)
    assert curve.skew_factor(128) == DEFAULT_SKEW[128]


def test_more_tokens_take_longer_and_more_ranks_less(default: ExpertsCurve) -> None:
    times = [default.seconds(tokens, 64, 6, 2048, 1408) for tokens in (1, 16, 256, 4096, 65536)]
    assert times == sorted(times)
    ranks = [default.seconds(4096, 64, 6, 2048, 1408, ep) for ep in (1, 2, 4, 8, 64)]
    assert ranks == sorted(ranks, reverse=True)
    # One token reaches six experts: no more than their weights are read.
    assert default.seconds(1, 64, 6, 2048, 1408) == default.seconds(1, 512, 6, 2048, 1408)


def test_bad_experts_are_refused() -> None:
    with pytest.raises(MoestroError, match="routing 'random'"):
        exponent("random")
    with pytest.raises(MoestroError, match="no number 'experts'"):
        fit_experts([Sample(op="moe_experts", case={"tokens": 4}, median_s=1.0)], "bf16", PEAK, BANDWIDTH, UNITS)
    with pytest.raises(MoestroError, match="no sample of bf16 experts"):
        fit_experts([], "bf16", None, None, None)


def attention_sample(seconds: float, **case: int | str) -> Sample:
    whole = {
        "batch": 1,
        "seq": 1024,
        "heads": 8,
        "kv_heads": 8,
        "head_dim": 64,
        "causal": 1,
        "phase": "fwd",
        "dtype": "fp32",
    }
    return Sample(op="attention", case=whole | case, median_s=seconds)


def test_attention_flops_are_halved_where_causal() -> None:
    row = np.array([[2, 1024, 8, 4, 64, 64, 0]], dtype=np.float64)
    causal = row.copy()
    causal[:, 6] = 1
    assert attention_flops(row, "fwd")[0] == 4 * 2 * 1024**2 * 8 * 64
    assert attention_flops(causal, "fwd")[0] == attention_flops(row, "fwd")[0] / 2
    assert attention_flops(causal, "bwd")[0] == 2.5 * attention_flops(causal, "fwd")[0]
    assert attention_flops(row, "decode")[0] == 4 * 2 * 1024 * 8 * 64


def test_attention_of_a_known_machine() -> None:
    """A CPU without a data sheet: rate 50 GFLOP/s, 20 µs to start."""
    samples = []
    for batch in (1, 4):
        for seq in (128, 256, 512, 1024, 2048):
            for heads in (4, 8, 16):
                for phase, factor in (("fwd", 1.0), ("bwd", 2.5)):
                    seconds = 20e-6 + factor * 2 * batch * seq**2 * heads * 64 / 5e10
                    case = {"batch": batch, "seq": seq, "heads": heads, "kv_heads": heads, "phase": phase}
                    samples.append(attention_sample(seconds, **case))
    curve = fit_attention(samples, "fp32", None, None, None)
    assert curve.phases["fwd"].rate_flops == pytest.approx(5e10, rel=0.05)
    assert curve.phases["fwd"].overhead_s == pytest.approx(20e-6, rel=0.15)
    forward = curve.seconds(2, 768, 8, 8, 64)
    assert forward == pytest.approx(20e-6 + 2 * 2 * 768**2 * 8 * 64 / 5e10, rel=0.05)
    assert curve.seconds(2, 768, 8, 8, 64, phase="bwd") > 2 * forward
    assert curve.seconds(2, 768, 8, 8, 64, causal=False) > 1.7 * forward
    held = curve.phases["bwd"].held_out
    assert held is not None
    assert held.median < 0.03


def test_decoding_is_bound_by_the_cache() -> None:
    curve = fit_attention([], "bf16", PEAK, BANDWIDTH, UNITS)
    few, many = (curve.seconds(64, 32768, 32, kv, 128, phase="decode") for kv in (1, 32))
    assert many > 10 * few
    assert curve.phases["decode"].samples == 0


def test_queries_do_not_count_as_memory_of_decoding() -> None:
    """Without a data sheet the bandwidth is guessed from the samples: 20 GB/s of cache, not those of 16 heads."""
    samples = []
    for seq in (1024, 4096, 16384):
        seconds = 20e-6 + seq * 128 * 4 / 20e9
        samples.append(attention_sample(seconds, batch=1, seq=seq, heads=16, kv_heads=1, phase="decode"))
    curve = fit_attention(samples, "fp32", None, None, None)
    assert 20e9 < curve.phases["decode"].bytes_per_s < 50e9


def test_bad_attention_is_refused() -> None:
    with pytest.raises(MoestroError, match="no phase 'sideways'"):
        fit_attention([attention_sample(1.0, phase="sideways")], "fp32", None, None, None)
    curve = fit_attention([], "bf16", PEAK, BANDWIDTH, UNITS)
    with pytest.raises(MoestroError, match="no phase 'sideways'"):
        curve.seconds(1, 8, 1, 1, 8, phase="sideways")
    with pytest.raises(MoestroError, match="1 or more"):
        fit_attention([attention_sample(1.0, heads=0)], "fp32", None, None, None)
