"""DeepSeek-V3's published numbers, closed from the preset alone; `deepseek_v3.py` runs these checks.

Published per-day rates, hours and prices are the report's; the preset has its shapes. MTP is left out, as in the
published sizes.
"""

from moestro.config import Counts, cache_bytes, count, load_config
from papers.result import Check, verdict_of

SEQ_LEN, GPUS = 4096, 2048
TOKENS_PER_DAY, STEP_S = 272.80e9, 19.926  # arXiv 2505.09343, table 4
PEAK_TFLOPS = 989.5  # H800, bf16 dense
TOKENS = 14.8e12
HOURS_M = {"pre-training": 2.664, "context extension": 0.119, "post-training": 0.005}
USD_PER_HOUR = 2


def counts() -> Counts:
    config = load_config("deepseek-v3").config.model.model_copy(update={"mtp": None})
    return count(config, SEQ_LEN)


def active_without_input(found: Counts) -> int:
    """The input embedding is looked up, not multiplied."""
    return found.active_params - found.embedding_params


def flops_per_token(full: bool) -> float:
    """6 FLOPs a parameter and token, and attention's products, with all 4096 keys or with those before a query."""
    found = counts()
    causal = 3 * found.attention_flops_per_token
    return 6 * active_without_input(found) + causal * (2 * SEQ_LEN / (SEQ_LEN + 1) if full else 1)


def tokens_per_s() -> float:
    """Of one GPU."""
    return TOKENS_PER_DAY / 86400 / GPUS


def near(found: float, published: float, share: float) -> bool:
    return abs(found / published - 1) <= share


def check_size() -> Check:
    found = counts()
    total, active, less = found.total_params / 1e9, found.active_params / 1e9, active_without_input(found) / 1e9
    return Check(
        claim="Size of DeepSeek-V3 from its published shapes",
        published="671 B parameters, 37 B of them active",
        ours=f"{total:.2f} B; {active:.2f} B active with both embeddings, {less:.2f} B without the input's",
        how="computed",
        verdict=verdict_of([round(total) == 671, round(less) == 37]),
        note="Active parameters round to 37 B only if the input embedding, which is looked up, does not count.",
    )


def check_flops() -> Check:
    full, causal = flops_per_token(True) / 1e9, flops_per_token(False) / 1e9
    return Check(
        claim="FLOPs of a trained token, at 4,096",
        published="250 GFLOPs (companion, arXiv 2505.09343)",
        ours=f"{causal:.1f} with causal attention, {full:.1f} with all keys",
        how="computed",
        verdict=verdict_of([near(causal, 250, 0.003)]),
        note="6 FLOPs an active parameter, the input embedding not among them, and three times the forward attention.",
    )


def check_rate() -> Check:
    rate = tokens_per_s()
    found = [flops_per_token(full) * rate / 1e12 for full in (True, False)]
    mfu = [value / PEAK_TFLOPS for value in found]
    published = (432, 385)
    return Check(
        claim="The published rate follows from FLOPs and tokens a day",
        published="432 / 385 TFLOPS a GPU, MFU 43.73 % / 38.94 % (full / causal) at 272.80 B tokens a day on 2,048",
        ours=f"{found[0]:.1f} / {found[1]:.1f} TFLOPS, MFU {mfu[0]:.2%} / {mfu[1]:.2%}, at {rate:.1f} tokens/s a GPU",
        how="computed",
        verdict=verdict_of(near(a, b, 0.004) for a, b in zip(found, published, strict=True)),
        note="Within "
        + " and ".join(f"{a / b - 1:.2%}" for a, b in zip(found, published, strict=True))
        + f" of the published rates, all of them above; the limit is 0.4 %. MFU of {PEAK_TFLOPS} TFLOPS in bf16, "
        "though most products ran in FP8.",
    )


def check_cost() -> Check:
    step = TOKENS_PER_DAY * STEP_S / 86400
    hours = TOKENS / tokens_per_s() / 3600
    per_trillion = 1e12 / tokens_per_s() / 3600
    total = sum(HOURS_M.values())
    closes = [
        near(step, 15360 * SEQ_LEN, 1e-3),
        near(hours, HOURS_M["pre-training"] * 1e6, 2e-3),
        near(per_trillion, 180e3, 2e-3),
        near(total, 2.788, 1e-6),
        near(total * USD_PER_HOUR, 5.576, 1e-6),
    ]
    return Check(
        claim="Tokens of a step, hours and cost follow from the published rate",
        published="15,360 sequences of 4,096; 2.664 M hours for 14.8 T tokens, 180 K a trillion; 2.788 M and $5.576 M",
        ours=f"{step / 1e6:.2f} M tokens against {15360 * SEQ_LEN / 1e6:.2f} M; {hours / 1e6:.3f} M hours, "
        f"{per_trillion / 1e3:.1f} K a trillion; {total:.3f} M and ${total * USD_PER_HOUR:.3f} M",
        how="computed",
        verdict=verdict_of(closes),
        note=f"A step of {STEP_S} s; {per_trillion / GPUS / 24:.2f} days a trillion on 2,048 (published 3.7). The cost "
        "is of the final run at $2 an hour, not of what came before it.",
    )


def check_cache() -> Check:
    config = load_config("deepseek-v3").config.model
    per_token = cache_bytes(config).per_token
    plain = config.model_copy(update={"mla": None, "num_kv_heads": config.num_heads, "head_dim": 128})
    times = cache_bytes(plain).per_token / per_token
    return Check(
        claim="Latent attention keeps one latent and one rotary key a token",
        published="70.272 KB a token in bf16 (companion, arXiv 2505.09343)",
        ours=f"{per_token:,} bytes, {times:.1f} times less than keys and values of all 128 heads",
        how="computed",
        verdict=verdict_of([per_token == 70_272]),
        note="(512 + 64) numbers in each of 61 layers.",
    )
