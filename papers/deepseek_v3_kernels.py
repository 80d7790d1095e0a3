"""DeepSeek-V3's published kernels, exchanges and serving against the predictor's curves; `deepseek_v3.py` runs these.

Rates are those of the released libraries' own tables (DeepGEMM's first release, DeepEP v1, H800) and of the overview of
the serving system; times inside the overlap are read off the released training trace.
"""

from functools import lru_cache
from statistics import median

from moestro.config import cache_bytes, load_config
from moestro.config.plan import Plan
from moestro.graph.convert import workload_of
from moestro.graph.count import count_step
from moestro.graph.feedforward import distinct_ranks
from moestro.graph.words import Collective
from moestro.hardware.published.gemm import read_gemm
from moestro.predict.constants import load_calibration
from moestro.predict.curves import published_curves
from moestro.predict.predict import target_pricer
from moestro.predict.serving import decode_step, prefill_floor
from moestro.predict.target import target_of
from papers.deepseek_v3_counts import near
from papers.result import Check, verdict_of

DEVICE, OTHER = "h800-sxm", "h100-sxm"
Shape = tuple[int, int, int, int]  # groups, rows of each, n, k

_NK = ((2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048))
_RATES = {
    64: (206, 289, 219, 336, 287, 295),
    128: (352, 535, 358, 645, 533, 510),
    4096: (1058, 990, 590, 1358, 1304, 1025),
}
# TFLOPS.
DENSE: dict[Shape, float] = {(1, m, n, k): r for m, row in _RATES.items() for (n, k), r in zip(_NK, row, strict=True)}
CONTIGUOUS: dict[Shape, float] = {
    (4, 8192, 4096, 7168): 1297, (4, 8192, 7168, 2048): 1099, (8, 4096, 4096, 7168): 1288, (8, 4096, 7168, 2048): 1093,
}  # fmt: skip
MASKED: dict[Shape, float] = {
    (1, 1024, 4096, 7168): 1233, (1, 1024, 7168, 2048): 925, (2, 512, 4096, 7168): 1040,
    (2, 512, 7168, 2048): 916, (4, 256, 4096, 7168): 932, (4, 256, 7168, 2048): 815,
}  # fmt: skip
MEDIAN_LIMIT, WORST_LIMIT = 0.15, 0.5

TOKENS, HIDDEN, TOP_K, EXPERTS = 4096, 7168, 8, 256
SMS, COMPUTE_SMS = 132, 112  # in the trace's grids
PAIR_MS = 2.90  # both grouped products of a layer, forward, in the trace
# DeepEP v1, GB/s of the link that limits: ranks -> dispatch (fp8), combine (bf16)
DEEP_EP = {8: (153, 158), 16: (43, 43), 32: (58, 57), 64: (51, 50)}
DISPATCH_MS, COMBINE_MS = 4.35, (5.99, 6.37)  # in the trace, overlapped; combine forward, and its like in backward

NODES, DAY_S = 226.75, 86400  # average over 24 hours
INPUT, CACHED, OUTPUT = 608e9, 0.563, 168e9
NODE_IN, NODE_OUT, USD_A_DAY = 73.7e3, 14.8e3, 87_072  # tokens/s of a node of 8


def flops(shape: Shape) -> float:
    groups, rows, n, k = shape
    return 2.0 * groups * rows * n * k


def rate(shape: Shape, device: str = DEVICE) -> float:
    """TFLOPS by the device's curve, as the predictor prices it: groups by the tiles alone."""
    groups, rows, n, k = shape
    curve = published_curves(device).product("fp8")
    seconds = curve.seconds(rows, n, k) if groups == 1 else curve.model.seconds(rows, n, k, groups)
    return flops(shape) / float(seconds) / 1e12


@lru_cache(maxsize=1)
def shipped() -> set[Shape]:
    """Shapes of the H800 among the samples that its curve was fitted to."""
    found = [s for s in read_gemm()[0] if s.case.get("device") == DEVICE and s.op in ("gemm", "grouped_gemm")]
    return {(int(s.case.get("groups", 1)), int(s.number("m")), int(s.number("n")), int(s.number("k"))) for s in found}


def errors(table: dict[Shape, float], device: str = DEVICE) -> dict[Shape, float]:
    """Of the time: ours over the published, less 1."""
    return {shape: published / rate(shape, device) - 1 for shape, published in table.items()}


def check_products() -> Check:
    found, known = errors(DENSE), shipped()
    unseen = [abs(e) for shape, e in found.items() if shape not in known]
    seen = [abs(e) for shape, e in found.items() if shape in known]
    worst = max(found, key=lambda shape: abs(found[shape]))
    other = [abs(e) for e in errors(DENSE, OTHER).values()]
    return Check(
        claim="FP8 products of DeepGEMM's first table by our H800's curve",
        published="206 to 336 TFLOPS of 64 rows, 352 to 645 of 128, 590 to 1,358 of 4,096",
        ours=f"median error {median(unseen):.1%} of the {len(unseen)} shapes that no curve was fitted to, "
        f"{median(seen):.1%} of the other {len(seen)}; the worst {abs(found[worst]):.0%}",
        how="computed",
        verdict=verdict_of([median(unseen) <= MEDIAN_LIMIT, abs(found[worst]) <= WORST_LIMIT]),
        note=f"The worst is m, n, k = {', '.join(map(str, worst[1:]))}: {rate(worst):.0f} TFLOPS by the curve, "
        f"{DENSE[worst]:.0f} published: writing its wide output is slower than the curve knows. Limits: median "
        f"{MEDIAN_LIMIT:.0%}, each {WORST_LIMIT:.0%}. By an H100's curve, of other kernels and 386 samples, the median "
        f"is {median(other):.0%}: DeepGEMM is that much faster with few rows.",
    )


def check_groups_of_products() -> Check:
    tables, known = {"contiguous": CONTIGUOUS, "masked": MASKED}, shipped()
    found = {name: errors(table) for name, table in tables.items()}
    medians = {name: median(map(abs, each.values())) for name, each in found.items()}
    all_errors = {shape: e for each in found.values() for shape, e in each.items()}
    unseen = [abs(e) for shape, e in all_errors.items() if shape not in known]
    return Check(
        claim="Grouped FP8 products, contiguous and masked",
        published="1,093 to 1,297 TFLOPS in 4 or 8 groups; 815 to 1,233 in 1 to 4 groups of a fixed size",
        ours=", ".join(f"{name} {value:.1%}" for name, value in medians.items())
        + f" median error; {median(unseen):.1%} of the {len(unseen)} not fitted to, at most "
        f"{max(map(abs, all_errors.values())):.0%}",
        how="computed",
        verdict=verdict_of([median(unseen) <= MEDIAN_LIMIT, max(map(abs, all_errors.values())) <= WORST_LIMIT]),
        note="Times of published and ours. The curve has no term for masks: it takes the groups' tiles side by side.",
    )


def check_shared_processors() -> Check:
    first, second = (4, 8192, 4096, 7168), (4, 8192, 7168, 2048)
    alone = {
        "their rates": sum(flops(s) / CONTIGUOUS[s] / 1e9 for s in (first, second)),
        "our curve": sum(flops(s) / rate(s) / 1e9 for s in (first, second)),
    }
    shared = {name: ms * SMS / COMPUTE_SMS for name, ms in alone.items()}
    constants = load_calibration().of(DEVICE, "fused")
    return Check(
        claim="Beside communication on 20 of 132 processors, products take 132 / 112 of their time",
        published=f"{PAIR_MS:.2f} ms for both grouped products of a layer in the overlapped trace",
        ours=" and ".join(f"{ms:.2f} ms by {name}" for name, ms in shared.items()),
        how="computed",
        verdict=verdict_of(near(ms, PAIR_MS, 0.06) for ms in shared.values()),
        note=f"{alone['their rates']:.2f} ms alone. Limit 6 %. Wherever communication hides, the predictor slows "
        f"computation by its constant for the device's public runs, {constants.contention:.2f} (this rule: "
        f"{SMS / COMPUTE_SMS - 1:.2f}).",
    )


def exchange(ranks: int) -> tuple[float, float]:
    """Our dispatch of a layer on the H800 cluster: GB/s of the hop that limits, and milliseconds of all hops."""
    config = load_config("deepseek-v3", ["model.num_layers=4"]).config
    model = config.model.model_copy(update={"mtp": None})
    values = {"model": model, "global_batch_size": ranks, "seq_len": TOKENS, "precision": "fp8", "trainer": "megatron"}
    workload = workload_of(config).model_copy(update=values)
    plan = Plan(dp=ranks, ep=ranks, zero=1, dispatch="two_hop", ranks_per_node=8)
    network = target_pricer(workload, plan, target_of("h800-2048", ranks)).network
    nodes = [node for run in count_step(workload, plan).stages[0].pieces for node in run.piece.forward]
    hops = {n for n in nodes if isinstance(n, Collective) and n.name.startswith("dispatch")}
    limiting = max(hops, key=lambda hop: hop.dimension == "ep_between")
    return limiting.bytes / network.seconds(limiting) / 1e9, 1e3 * sum(network.seconds(hop) for hop in hops)


def check_exchange() -> Check:
    found = {ranks: exchange(ranks) for ranks in DEEP_EP}
    ms, theirs_ms = found[64][1], sent_bytes(8) / DEEP_EP[64][0] / 1e6
    ratios = [found[ranks][0] / gb for ranks, rates in DEEP_EP.items() for gb in rates]
    rows = [
        f"EP{ranks} {ours:.0f} ({rates[0]}, {rates[1]})"
        for (ranks, rates), (ours, _) in zip(DEEP_EP.items(), found.values(), strict=True)
    ]
    return Check(
        claim="Rates of DeepEP's exchanges on the link that limits, by our curves",
        published="dispatch 153 / 43 / 58 / 51, combine 158 / 43 / 57 / 50 GB/s at EP 8 / 16 / 32 / 64",
        ours=f"{' / '.join(f'{ours:.0f}' for ours, _ in found.values())} GB/s, median {median(ratios):.2f} of the "
        f"published; a dispatch at EP 64 takes {ms:.1f} ms ({theirs_ms:.1f})",
        how="computed",
        verdict=verdict_of(
            [abs(median(ratios) - 1) <= 0.3, all(0.5 <= ratio <= 2 for ratio in ratios), ms / theirs_ms <= 2]
        ),
        note=f"GB/s, published dispatch and combine in brackets: {'; '.join(rows)}. Of a token's one copy for each "
        "node that it goes to, its own included, as DeepEP counts; for EP 8 inside a node. No exchange of an H800 is "
        "among our samples; between nodes it is the cluster's NICs and steps. Limits: median within 30 %, each rate, "
        "and the time, within a factor of 2. The predictor's dispatch sends 16 bits and makes both hops after each "
        "other; DeepEP's sends 8 bits and pipelines the hops.",
    )


def sent_bytes(nodes: int) -> float:
    """Of a dispatch in 8 bits: a token goes once to each node that one of its experts is on, its own among them."""
    return HIDDEN * TOKENS * distinct_ranks(EXPERTS, TOP_K, nodes, 8, 4)


def check_overlap() -> Check:
    alone = DEEP_EP[64]
    sizes = (4 * TOKENS * HIDDEN, 4 * TOKENS * HIDDEN * 2)
    reached = (sizes[0] / DISPATCH_MS / 1e6, sizes[1] / (sum(COMBINE_MS) / 2) / 1e6)
    shares = [rate / gb for rate, gb in zip(reached, alone, strict=True)]
    return Check(
        claim="Inside the overlap, exchanges are slower than alone",
        published=f"{alone[0]} / {alone[1]} GB/s alone; {DISPATCH_MS} and {COMBINE_MS[0]} to {COMBINE_MS[1]} ms in the "
        "trace",
        ours=f"{reached[0]:.0f} and {reached[1]:.0f} GB/s, {shares[0]:.2f} and {shares[1]:.2f} of alone",
        how="computed",
        verdict=verdict_of(share < 0.8 for share in shares),
        note="117 MB in FP8 and 235 MB in BF16, 4 nodes for each token; waiting for slower ranks not taken out.",
    )


def check_serving() -> Check:
    node_days = (INPUT / NODE_IN + OUTPUT / NODE_OUT) / DAY_S
    usd = NODES * 8 * 24 * 2
    model = load_config("deepseek-v3").config.model.model_copy(update={"mtp": None})
    computed, context = NODE_IN * (1 - CACHED), 4096
    most_in = context / prefill_floor(model, context, 8 * 1979e12)
    units, cache = 40, cache_bytes(model).per_token / 2  # nodes of the decode unit; a cache in FP8 is half as large
    batch = int((units * 8 * 80e9 - 671e9) / (cache * context))
    step = decode_step(model, batch, units * 8 * 3350e9, context, weight_width=1, cache_width=1)
    most_out = batch / step.floor_s / units
    return Check(
        claim="Serving for a day: nodes from tokens, and rates within what the hardware can do",
        published=f"{NODES} nodes; 608 B tokens in (56.3 % cached), 168 B out; 73.7 K and 14.8 K tokens/s a node; "
        f"${USD_A_DAY:,}",
        ours=f"{node_days:.1f} node-days, ${usd:,.0f}; {computed / most_in:.0%} of a node's prefill limit and "
        f"{NODE_OUT / most_out:.0%} of its decode limit",
        how="computed",
        verdict=verdict_of([near(node_days, NODES, 0.005), usd == USD_A_DAY, computed < most_in, most_out > NODE_OUT]),
        note=f"Prefill: {computed / 1e3:.1f} K tokens/s that were not cached, against {most_in / 1e3:.0f} K if all "
        f"FLOPs of 8 H800 in FP8 were used. Decode: against {most_out / 1e3:.0f} K if {units} nodes full of sequences "
        f"of {context:,} tokens read weights and caches at their memory's full rate. $2 for a GPU and hour.",
    )


KERNEL_CHECKS = (
    check_products,
    check_groups_of_products,
    check_shared_processors,
    check_exchange,
    check_overlap,
    check_serving,
)
