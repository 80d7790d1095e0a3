"""AFFMAE (Smerkous, Wang, Najafian; arXiv 2602.16249): masked auto-encoding with near attention and merged tokens.

The claim: at equal parameters up to 7 times fewer FLOPs than a plain masked auto-encoder, 46 % less memory and 36 %
more throughput on one RTX 5090.

What is reproduced here, on CPU:

* counted: FLOPs of both encoders, whose sequences get shorter with depth (`moestro predict --net affmae`), and that the
  count is what PyTorch's counter says of small encoders of our own;
* measured: on small images the plain encoder's time over the other's, which FLOPs alone overstate;
* predicted: throughput and activations on an RTX 5090;
* exact: hidden pixels change no visible token, merging keeps int(share · n), near attention that reaches all is dense.

What is not: its kernels, the decoder, and segmentation. There is no licence on the released code, of which nothing is
used; our encoders have its sizes, a plainer bias of distance, and merge weights of one channel.
"""

import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from moestro.graph.tokens import TokenNet, affmae, kept_tokens, token_graph, vit_mae
from moestro.graph.words import Kernel
from moestro.predict.predict import predict_traced
from moestro.predict.target import target_of
from papers.affmae_model import Encoder, NearAttention, Tokens, kept_by_level, random_mask
from papers.result import Check, PaperResult, Progress, verdict_of

PATCH, SHARES = 8, (0.35, 0.4)
VIT_MASK, AFF_MASK = 0.6, 0.5
MOST_FEWER = 7.0  # published
THROUGHPUT, MEMORY = 1.36, 0.54  # published: AFFMAE over the plain one
IMAGES = (128, 192)  # of the measured encoders
BATCH, ROUNDS = 2, 5


def run(progress: Progress) -> PaperResult:
    """About half a minute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rates, found = machine_rates(), {}
    for done, image in enumerate(IMAGES):
        found[image] = ratios(image, rates)
        progress(done + 1, len(IMAGES), f"{image} x {image} pixels")
    torch.set_num_threads(threads)
    checks = (
        check_published(),
        check_counter(),
        check_whole(),
        check_time(found),
        check_device(),
        check_hidden(),
        check_merging(),
        check_dense(),
    )
    figures = {f"{name} {image}": round(v, 4) for image, row in found.items() for name, v in row.items()}
    return PaperResult(
        checks, {**figures, "gflops_per_s": round(rates[0] / 1e9, 1), "gb_per_s": round(rates[1] / 1e9, 1)}
    )


# Counted.


def products(net: TokenNet, batch: int = 1) -> list[Kernel]:
    return [k for k in token_graph(net, batch).stages[0].forward if isinstance(k, Kernel) and k.op == "gemm"]


def forward_flops(net: TokenNet, layers_only: bool = False) -> float:
    return sum(k.flops for k in products(net) if k.name.startswith("level") or not layers_only)


def check_published() -> Check:
    fewer = [forward_flops(vit_mae()) / forward_flops(affmae(share=share)) for share in SHARES]
    return Check(
        claim="Up to 7 times fewer FLOPs than a plain masked auto-encoder, at 512 x 512",
        published="up to 7 times; up to 6 in a figure's caption, at high resolution",
        ours=" and ".join(f"{ratio:.1f}" for ratio in fewer)
        + f" times, keeping {SHARES[0]} and {SHARES[1]} of the tokens",
        how="computed",
        verdict=verdict_of(abs(ratio / MOST_FEWER - 1) <= 0.1 for ratio in fewer),
        note=f"Encoders alone, each on the patches that its mask leaves ({1 - VIT_MASK:.1f} and {1 - AFF_MASK:.1f} of "
        "them). The larger share is where the paper sees no loss of quality. Limit 10 %.",
    )


def check_counter() -> Check:
    cases = {"plain": vit_mae(96), **{f"merging, {share}": affmae(96, share=share) for share in SHARES}}
    parts, equal = [], []
    for name, net in cases.items():
        counted, found = token_graph(net, 2).model_flops, counter_flops(net, 96, 2)
        equal.append(counted == found)
        parts.append(f"{name} {found / 1e9:.3f} GFLOPs")
    return Check(
        claim="FLOPs are counted of sequences that change with depth",
        published="not reported",
        ours=f"{sum(equal)} of {len(equal)} encoders to the last FLOP",
        how="measured",
        verdict=verdict_of(equal),
        note=f"Forward and backward of two images of 96 x 96, against PyTorch's counter: {'; '.join(parts)}. Four "
        f"levels of {', '.join(str(level.tokens) for level in cases['merging, 0.35'].levels)} tokens.",
    )


def counter_flops(net: TokenNet, image: int, batch: int) -> int:
    model, mask = Encoder(net, PATCH), mask_of(net, image, batch)
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(batch, 1, image, image), mask).x.square().sum().backward()
    return counter.get_total_flops()


def mask_of(net: TokenNet, image: int, batch: int) -> Tensor:
    side = image // PATCH
    return random_mask(side, 1 - net.levels[0].tokens / side**2 + 1e-9, batch, seed=0)


def check_whole() -> Check:
    rows, ratios = [], []
    for image in (384, 512, 1024):
        plain = forward_flops(vit_mae(image, mask=0), True)
        merged = [forward_flops(affmae(image, mask=0, share=share), True) for share in SHARES]
        ratios.append([plain / flops for flops in merged])
        rows.append(f"{image}: {plain / 1e9:.0f} against {merged[0] / 1e9:.1f} and {merged[1] / 1e9:.1f} G")
    grows = [a < b for first, second in pairwise(ratios) for a, b in zip(first, second, strict=True)]
    return Check(
        claim="Without a mask, the larger the image, the more merging saves",
        published="not reported",
        ours="; ".join(f"{a:.0f} and {b:.0f} times" for a, b in ratios) + " at 384, 512, 1,024 pixels a side",
        how="computed",
        verdict=verdict_of(grows),
        note=f"Forward of all layers, {SHARES[0]} and {SHARES[1]} kept. {'; '.join(rows)}. Attention to all tokens "
        "grows with their square, to near ones it does not.",
    )


# Measured.


def cpu_s(work: Callable[[], object]) -> float:
    """Of the process, which has one thread, so that a busy machine does not count: the median of ROUNDS, after one."""
    times = []
    for _ in range(ROUNDS + 1):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return median(times[1:])


def machine_rates() -> tuple[float, float]:
    """FLOPs and bytes a second that a large product and a large copy reach."""
    a, b, large = torch.randn(1024, 1024), torch.randn(1024, 1024), torch.randn(16_000_000)
    copied = torch.empty_like(large)
    return 2 * 1024**3 / cpu_s(lambda: a @ b), 8 * large.numel() / cpu_s(lambda: copied.copy_(large))


@torch.no_grad()
def forward_s(net: TokenNet, image: int) -> float:
    model, mask, x = Encoder(net, PATCH), mask_of(net, image, BATCH), torch.randn(BATCH, 1, image, image)
    return cpu_s(lambda: model(x, mask))


def ratios(image: int, rates: tuple[float, float]) -> dict[str, float]:
    """Of the plain encoder over the merging one: measured time of forward, FLOPs, and a roofline with bytes."""
    plain, merging = vit_mae(image), affmae(image)
    graphs = [token_graph(net, BATCH, dtype="fp32").stages[0].forward for net in (plain, merging)]
    roof = [roofline_s(nodes, rates) for nodes in graphs]
    seconds = [forward_s(net, image) for net in (plain, merging)]
    return {
        "time": seconds[0] / seconds[1],
        "flops": forward_flops(plain) / forward_flops(merging),
        "roofline": roof[0] / roof[1],
        "ms plain": 1e3 * seconds[0],
        "ms merging": 1e3 * seconds[1],
    }


def roofline_s(nodes: Iterable[object], rates: tuple[float, float]) -> float:
    kernels = [node for node in nodes if isinstance(node, Kernel)]
    return sum(max(k.flops / rates[0], k.bytes_moved / rates[1]) for k in kernels)


def check_time(found: dict[int, dict[str, float]]) -> Check:
    smaller = [row["time"] < row["flops"] for row in found.values()]
    nearer = [abs(row["roofline"] - row["time"]) < abs(row["flops"] - row["time"]) for row in found.values()]

    def three(what: str) -> str:
        return " / ".join(f"{row[what]:.1f}" for row in found.values())

    times = [f"{row['ms plain']:.0f} and {row['ms merging']:.0f} ms" for row in found.values()]
    return Check(
        claim="Fewer FLOPs save less time; bytes tell more of it",
        published="36 % more throughput (RTX 5090) at up to 7 times fewer FLOPs",
        ours=f"{three('time')} times as fast, {three('flops')} times fewer FLOPs; {three('roofline')} by a roofline",
        how="measured",
        verdict=verdict_of([*smaller, *nearer]),
        note=f"Forward of {BATCH} images of {' and '.join(map(str, IMAGES))} pixels a side in fp32 on one thread of "
        f"this CPU, CPU time, medians of {ROUNDS}: {'; '.join(times)}. "
        "The roofline takes each operation at this machine's best product or copy, whichever is slower.",
    )


def check_device() -> Check:
    target, batch = target_of("rtx-5090"), 64
    graphs = {f: [token_graph(net(fused=f), batch) for net in (vit_mae, affmae)] for f in (True, False)}
    seconds = {f: [predict_traced(graph, target).total for graph in pair] for f, pair in graphs.items()}
    faster = {f: plain / merging for f, (plain, merging) in seconds.items()}
    kept = graphs[True][1].stages[0].saved.kept / graphs[True][0].stages[0].saved.kept
    fewer = graphs[True][0].model_flops / graphs[True][1].model_flops
    return Check(
        claim="A training step of 64 images on an RTX 5090",
        published="36 % more throughput, 46 % less memory",
        ours=f"{faster[True]:.1f} times the throughput with fused attention, {faster[False]:.1f} without; "
        f"{1 - kept:.0%} less activations",
        how="simulated",
        verdict=verdict_of(
            [faster[True] < fewer, abs(faster[True] / THROUGHPUT - 1) <= 0.3, abs(kept / MEMORY - 1) <= 0.3]
        ),
        note=f"Encoders alone in bf16, 512 x 512, {fewer:.1f} times fewer FLOPs; seconds of plain and merging "
        f"{' and '.join(f'{s:.3f}' for s in seconds[True])} fused, "
        f"{' and '.join(f'{s:.3f}' for s in seconds[False])} not. "
        "The published step has a decoder and losses, which both share and which are not counted here, and kernels "
        "that its authors call unfinished. Limits 30 %.",
    )


# Exact.


def small() -> TokenNet:
    """AFFMAE's levels, of fewer layers, on 128 x 128 pixels."""
    net = affmae(128)
    return net.model_copy(update={"levels": tuple(level.model_copy(update={"layers": 1}) for level in net.levels)})


@torch.no_grad()
def check_hidden() -> Check:
    net = small()
    torch.manual_seed(0)
    model, mask, x = Encoder(net, PATCH), mask_of(net, 128, 2), torch.randn(2, 1, 128, 128)
    hidden = mask.view(2, 1, 16, 16).repeat_interleave(PATCH, 2).repeat_interleave(PATCH, 3)
    moved = torch.where(hidden, x + 10 * torch.randn_like(x), x)
    same = torch.equal(model(x, mask).x, model(moved, mask).x)
    seen = not torch.equal(model(x, mask).x, model(torch.where(hidden, x, x + 0.1), mask).x)
    return Check(
        claim="Hidden patches never influence a visible token, though patches overlap",
        published="pixels are masked before patches are made",
        ours="equal to the last bit" if same else "not equal",
        how="measured",
        verdict=verdict_of([same, seen]),
        note="All hidden pixels of two images moved by noise of ten times their spread; all levels. "
        "Moving visible pixels changes the result.",
    )


def check_merging() -> Check:
    nets = [affmae(image, share=share) for image in (128, 384, 512, 1024) for share in SHARES]
    by_count = [kept_by_level(net, share) for net, share in zip(nets, SHARES * 4, strict=True)]
    net = small()
    with torch.no_grad():
        came = Encoder(net, PATCH)(torch.randn(1, 1, 128, 128), mask_of(net, 128, 1)).x.shape[1]
    expected = net.levels[0].tokens
    for _ in net.levels[1:]:
        expected = kept_tokens(expected, SHARES[0])
    return Check(
        claim="Merging keeps int(share · n) tokens",
        published="a deterministic choice of the best ds · n",
        ours=f"{' → '.join(str(level.tokens) for level in net.levels)} of 128 x 128 pixels; {came} came out",
        how="measured",
        verdict=verdict_of([*by_count, came == expected]),
        note=f"{len(nets)} sizes and shares counted, one run.",
    )


@torch.no_grad()
def check_dense() -> Check:
    torch.manual_seed(1)
    count, width = 45, 32
    place = torch.stack((torch.arange(count) // 7, torch.arange(count) % 7), -1).float().expand(2, -1, -1)
    tokens = Tokens(torch.randn(2, count, width, dtype=torch.float64), place.double())
    near, dense = (NearAttention(width, 4, cluster).double() for cluster in (count, None))
    dense.load_state_dict(near.state_dict())
    apart = float((near(tokens) - dense(tokens)).abs().max())
    local = NearAttention(width, 4, 2).double()
    local.load_state_dict(near.state_dict())
    differs = float((local(tokens) - dense(tokens)).abs().max())
    return Check(
        claim="Near attention that reaches all tokens is dense attention",
        published="not reported",
        ours=f"at most {apart:.0e} apart in fp64",
        how="measured",
        verdict=verdict_of([apart < 1e-12, differs > 1e-3]),
        note=f"One cluster of {count} tokens, and with clusters of 2 (16 of {count} tokens near): {differs:.2f} apart.",
    )
