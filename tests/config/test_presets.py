"""The presets: published parameter counts, exact ones, and a step of each small one."""

import math

import pytest
import torch

from moestro.config import Config, Counts, count, load_config, preset_names, resolved_model
from moestro.model.transformer import ModelOutput, Transformer

# Total and active parameters as we count them; whoever changes one changes the architecture.
EXACT = {
    "deepseek-v2-lite": (15_706_484_224, 2_661_150_208),
    "deepseek-v3": (682_636_472_320, 37_552_282_624),
    "ds-moe-1b": (1_227_683_840, 648_869_888),
    "ds-moe-3b": (3_021_100_032, 1_237_472_256),
    "ds-moe-6b": (6_609_006_592, 2_230_153_216),
    "gpt-oss-20b": (20_914_757_184, 4_187_440_704),
    "mixtral-8x7b": (46_702_792_704, 12_879_925_248),
    "moma-1.4b-4t4i": (7_167_713_280, 1_527_816_192),
    "moma-435m-4t4i": (1_856_851_968, 448_942_080),
    "moma-90m-4t4i": (211_084_800, 93_414_912),
    "olmoe-1b-7b": (6_919_161_856, 1_282_017_280),
    "qwen3-235b-a22b": (235_093_634_560, 22_190_763_520),
    "qwen3-30b-a3b": (30_532_122_624, 3_353_032_704),
    "switch-base-128": (7_386_895_104, 195_760_896),
    "switch-c": (1_571_053_346_720, 1_472_700_320),
    "switch-large-128": (27_020_198_912, 652_706_816),
    "switch-xxl": (392_932_757_504, 9_405_599_744),
    "telechat3-105b": (102_256_309_760, 4_675_827_200),
    "zaya1-8b": (8_840_488_784, 1_290_741_584),
}
# Without encoders, which are counted by what they are built of.
EXACT_DECODERS = {
    "mm1-3b-moe": (63_973_788_160, 4_000_483_840),
    "uni-moe-4e": (19_724_505_088, 11_067_461_632),
    "uni-moe-8e": (37_039_116_288, 11_067_985_920),
}
SMALL = [name for name in preset_names() if name.endswith("-tiny") or name.startswith("sotu-")]


def load(name: str, *overrides: str) -> tuple[Config, Counts]:
    config = load_config(name, overrides).config
    return config, count(resolved_model(config), config.data.seq_len)


def test_every_preset_is_here() -> None:
    assert sorted([*EXACT, *EXACT_DECODERS, *SMALL]) == preset_names()


@pytest.mark.parametrize("name", EXACT)
def test_exact_counts(name: str) -> None:
    _, counts = load(name)
    assert (counts.total_params, counts.active_params) == EXACT[name]


@pytest.mark.parametrize("name", EXACT_DECODERS)
def test_exact_counts_of_decoders(name: str) -> None:
    _, counts = load(name)
    assert (counts.total_params - counts.part("encoders").total, counts.active_params) == EXACT_DECODERS[name]


def without(counts: Counts, *parts: str) -> int:
    return counts.total_params - sum(counts.part(part).total for part in parts)


def check(ours: float, published: str, unit: float = 1e9) -> None:
    """Within one unit of the last printed digit: some figures are rounded, some cut off."""
    digits = len(published.partition(".")[2])
    assert abs(ours / unit - float(published)) < 10**-digits, (ours / unit, published)


def test_published_zaya() -> None:
    _, released = load("zaya1-8b")
    check(released.non_embedding_params, "8.303")
    check(released.total_params, "8.840")
    check(released.active_non_embedding_params, "753.6", 1e6)
    assert (released.non_embedding_params, released.active_non_embedding_params) == (8_303_355_728, 753_608_528)
    config, paper = load("zaya1-8b", "model.moe.null_experts=0")
    assert (paper.total_params, paper.non_embedding_params) == (8_840_478_544, 8_303_345_488)
    assert paper.active_non_embedding_params == 753_598_288
    # Training FLOPs of a token at the three context lengths.
    for seq_len, published in ((4096, "8.746"), (32_768, "15.79"), (131_072, "39.95")):
        check(count(config.model, seq_len).train_flops_per_token, published)


def test_published_deepseek() -> None:
    _, v3 = load("deepseek-v3")
    assert without(v3, "multi-token prediction") == 671_026_404_352
    check(without(v3, "multi-token prediction"), "671.03")
    check(v3.active_params, "37.55")
    check(v3.active_params - v3.embedding_params, "36.62")
    _, alone = load("deepseek-v3", "model.mtp=none")
    assert alone.active_params == v3.active_params
    check(alone.train_flops_per_token, "250.4")
    _, lite = load("deepseek-v2-lite")
    check(lite.total_params, "15.7")
    check(lite.active_params - lite.embedding_params, "2.4")


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("mixtral-8x7b", "46.7", "12.9"),
        ("olmoe-1b-7b", "6.92", "1.28"),
        ("qwen3-30b-a3b", "30.5", "3.3"),
        ("qwen3-235b-a22b", "235", "22"),
    ],
)
def test_published_totals(name: str, total: str, active: str) -> None:
    _, counts = load(name)
    check(counts.total_params, total)
    check(counts.active_params, active)


def test_published_gpt_oss() -> None:
    """Its model card counts the head among active parameters and the embedding not."""
    _, counts = load("gpt-oss-20b")
    check(counts.total_params, "20.91")
    check(counts.active_params - counts.embedding_params, "3.61")
    check(counts.embedding_params + counts.part("head").total, "1.16")


@pytest.mark.parametrize(
    ("name", "published"), [("moma-90m-4t4i", "0.210"), ("moma-435m-4t4i", "1.9"), ("moma-1.4b-4t4i", "7.1")]
)
def test_published_moma(name: str, published: str) -> None:
    _, counts = load(name)
    check(without(counts, "auxiliary router"), published)


@pytest.mark.parametrize(
    ("name", "total", "active"), [("ds-moe-1b", 1067, 439), ("ds-moe-3b", 2846, 934), ("ds-moe-6b", 6343, 1813)]
)
def test_published_ds_moe(name: str, total: float, active: float) -> None:
    """The published totals hold 2 to 5 % that the published shapes do not."""
    _, counts = load(name)
    assert counts.non_embedding_params / 1e6 == pytest.approx(total, rel=0.05)
    assert counts.non_embedding_params / 1e6 < total
    assert counts.active_non_embedding_params / 1e6 == pytest.approx(active, rel=0.01)


@pytest.mark.parametrize(
    ("name", "published", "within"),
    [
        ("switch-base-128", 7, 0.06),  # printed with one digit
        ("switch-large-128", 26, 0.04),  # high from the listed shapes in the original's form too
        ("switch-xxl", 395, 0.006),  # the original's decoder attends twice
        ("switch-c", 1571, 0.0005),
    ],
)
def test_published_switch(name: str, published: float, within: float) -> None:
    _, counts = load(name)
    assert counts.total_params / 1e9 == pytest.approx(published, rel=within)


def test_published_multimodal() -> None:
    _, mm1 = load("mm1-3b-moe")
    decoder, experts = without(mm1, "encoders"), mm1.part("experts").total
    check(decoder, "64")
    check(decoder - experts * 63 / 64, "3.0")
    for name, total in (("uni-moe-4e", "19.7"), ("uni-moe-8e", "37.0")):
        _, uni = load(name)
        check(without(uni, "encoders"), total)
        check(uni.active_params, "11.1")


def test_published_telechat() -> None:
    _, counts = load("telechat3-105b")
    check(counts.active_params, "4.7")
    _, with_mtp = load("telechat3-105b", "model.mtp.depth=1")
    check(with_mtp.total_params, "105")


@pytest.mark.parametrize("name", [*EXACT, *EXACT_DECODERS])
def test_the_built_model_has_as_many(name: str) -> None:
    config, counts = load(name)
    with torch.device("meta"):
        model = Transformer(config.model)
    assert counts.total_params == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", SMALL)
def test_a_small_preset_trains(name: str) -> None:
    """One forward and backward pass: finite, and every parameter but an encoder's gets a gradient."""
    config, counts = load(name)
    model = Transformer(resolved_model(config))
    model.init_weights(0)
    assert counts.total_params == sum(p.numel() for p in model.parameters())
    assert counts.total_params < 2e6
    output = step(model, seq_len=64)
    losses = [output.loss, output.mtp_loss, *(s.aux_loss + s.z_loss + s.other_loss for s in output.router_stats)]
    loss = torch.stack([loss for loss in losses if loss is not None]).sum()
    loss.backward()
    assert math.isfinite(loss.item())
    missing = [n for n, p in model.named_parameters() if p.grad is None and not n.startswith("encoders.")]
    assert not missing
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def step(model: Transformer, seq_len: int) -> ModelOutput:
    ids = torch.randint(1024, (1, seq_len), generator=torch.Generator().manual_seed(0))
    labels = ids.roll(-1, 1)
    depth = len(model.mtp)
    ahead = torch.stack([labels.roll(-k - 1, 1) for k in range(depth)]) if depth else None
    output: ModelOutput = model(ids, labels=labels, ahead=ahead, loss_scale=1 / seq_len, noise_seeds=torch.tensor([0]))
    return output
