"""MoMa's published figures: sizes from shapes, and what savings in FLOPs are worth in time."""

from dataclasses import dataclass

from moestro.config import count, load_config, resolved_model
from papers.result import Check, verdict_of

VOCAB_SIZE = 65536


@dataclass(frozen=True)
class Row:
    """A model of the paper's table. published: its parameters as printed, dense and with 8 experts."""

    name: str
    layers: int
    hidden: int
    heads: int
    published: tuple[str, str]
    preset: str
    depth: bool = False

    def params(self, experts: int) -> int:
        """Attention, feed-forwards of two matrices 4 hidden wide, untied embeddings."""
        d = self.hidden
        return self.layers * (4 * d * d + 2 * d * 4 * d * experts) + 2 * VOCAB_SIZE * d

    def built(self) -> int:
        """Of our preset in this shape with 8 experts, without the auxiliary routers, which the paper adds later."""
        width = 8 * round(8 * self.hidden / 3 / 8)  # three matrices instead of two
        changes = [f"model.num_layers={self.layers}", f"model.hidden_size={self.hidden}"]
        changes += [f"model.num_heads={self.heads}", f"model.moe.expert_hidden_size={width}"]
        changes += ["model.depth.capacity=0.25"] if self.depth else []
        config = load_config(self.preset, changes).config
        counts = count(resolved_model(config), config.data.seq_len)
        return counts.total_params - counts.part("auxiliary router").total


TABLE = (
    Row("90M", 8, 512, 8, ("90M", "210M"), "moma-90m-4t4i"),
    Row("435M", 24, 1024, 16, ("435M", "1.9B"), "moma-435m-4t4i"),
    Row("1.4B", 24, 2048, 16, ("1.4B", "7.1B"), "moma-1.4b-4t4i"),
    Row("90M + MoD", 14, 512, 8, ("110M", "317M"), "moma-90m-4t4i", depth=True),
    Row("435M + MoD", 40, 1024, 16, ("635M", "3B"), "moma-435m-4t4i", depth=True),
    Row("1.4B + MoD", 32, 2304, 18, ("2.3B", "12B"), "moma-1.4b-4t4i", depth=True),
)


def rounds_to(params: float, published: str) -> bool:
    """Whether the count rounds to the published figure at its last printed digit; a last 0 of M is taken as rounded."""
    number, unit = published[:-1], {"M": 1e6, "B": 1e9}[published[-1]]
    step = 10.0 ** -len(number.partition(".")[2])
    if "." not in number and number.endswith("0"):
        step = 10.0
    return bool(round(params / unit / step) == round(float(number) / step))


def off(params: float, published: str) -> float:
    """By what share of the published figure the count differs."""
    return params / (float(published[:-1]) * {"M": 1e6, "B": 1e9}[published[-1]]) - 1


def check_table() -> Check:
    """l (4 d² + 2 d · 4 d · E) + 2 V d against every figure."""
    cells = [(row, experts, row.published[i]) for row in TABLE for i, experts in enumerate((1, 8))]
    closes = [rounds_to(row.params(experts), published) for row, experts, published in cells]
    worst = max(abs(off(row.params(experts), published)) for row, experts, published in cells)
    open_cells = ", ".join(
        f"{published} ({row.params(experts) / 1e6:,.0f}M)"
        for (row, experts, published), closed in zip(cells, closes, strict=True)
        if not closed
    )
    return Check(
        claim="Sizes from shapes: l (4 d² + 8 d² E) + 2 V d, dense and with 8 experts",
        published="; ".join(f"{row.name} {' / '.join(row.published)}" for row in TABLE),
        ours="; ".join(f"{row.params(1) / 1e6:,.0f}M / {row.params(8) / 1e9:.3g}B" for row in TABLE),
        how="computed",
        verdict=verdict_of(closes),
        note=f"{sum(closes)} of {len(closes)} figures to their last digit (a last 0 taken as rounded), all within "
        f"{worst:.1%}. Not to the digit: {open_cells}; dense figures are names of families more than counts. The "
        "published width is of two matrices: with SwiGLU's three it is two thirds of that.",
    )


def check_presets() -> Check:
    built = [row.built() for row in TABLE]
    closes = [rounds_to(params, row.published[1]) for params, row in zip(built, TABLE, strict=True)]
    return Check(
        claim="Our presets with 4 + 4 experts, and these with a mixture of depths, have the published sizes",
        published=" / ".join(row.published[1] for row in TABLE),
        ours=" / ".join(f"{params / 1e6:,.0f}M" for params in built),
        how="computed",
        verdict=verdict_of(closes),
        note="Three SwiGLU matrices of two thirds of the published width, in multiples of 8; routers, norms and the "
        "routers of depth are in it, auxiliary routers of the experts are not. The layers and sizes of the last three "
        "are set over the preset of their family.",
    )


# Times fewer training FLOPs at equal loss (1.4B), and words a second on a GPU (435M; 256 A100).
DENSE_SPEED = 31970
SAVINGS = {"4t4i": (3.7, 26424), "8 mixed": (3.0, 28990), "MoD + 4t4i": (4.2, 22114)}


def worth() -> dict[str, float]:
    """FLOPs saved times relative speed: how many times less time."""
    return {name: saving * speed / DENSE_SPEED for name, (saving, speed) in SAVINGS.items()}


def check_worth() -> Check:
    fastest, fewest = max(worth(), key=lambda name: worth()[name]), max(SAVINGS, key=lambda name: SAVINGS[name][0])
    parts = [f"{name} {SAVINGS[name][0]} → {value:.2f}" for name, value in worth().items()]
    return Check(
        claim="What saves the most FLOPs saves the most time",
        published=", ".join(f"{name} {saving} times at {speed} words/s" for name, (saving, speed) in SAVINGS.items())
        + f"; dense {DENSE_SPEED} words/s",
        ours=f"FLOPs → time: {', '.join(parts)}",
        how="computed",
        verdict="holds" if fastest == fewest else "does not hold",
        note=f"{fewest} saves the most FLOPs, {fastest} the most time. The paper does not claim it; it shows FLOPs and "
        "throughput apart. Savings are of the 1.4B family and speeds of the 435M one, so that this is indicative.",
    )
