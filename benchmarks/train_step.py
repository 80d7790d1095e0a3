"""One training step (forward, loss, backward) of Moestro against its peers: CPU time, wall time, peak memory.

    python benchmarks/train_step.py [--dtype fp32|bf16] [--layers 8] [--rounds 7] [--threads 2] [--json]

Every peer lives in a process of its own and takes one step in turn, so that all see the same weather on the machine;
the ratios are taken round by round. Weights are random and routing is what the initial router gives. No optimizer.
The shape: d = 512, 8 layers, 32 experts, top-4 of width 256, 4 × 512 tokens, vocabulary
8,192. Peers: OLMoE of Hugging Face `transformers` with its grouped_mm experts, LitGPT's Mixtral-style MoE, and our own
dense model of equal active FLOPs. Install them with `pip install -e '.[bench]'`; one that is missing is left out.
"""

import argparse
import json
import multiprocessing as mp
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from multiprocessing.connection import Connection
from typing import Any

HIDDEN, HEADS, EXPERTS, TOP_K, WIDTH, VOCAB = 512, 8, 32, 4, 256, 8192
BATCH, SEQ = 4, 512

Step = Callable[[], float]  # runs one step and returns the loss


def moestro_step(layers: int, dtype: str, dense: bool) -> Step:
    import torch

    from moestro.config import BalanceConfig, ModelConfig, MoEConfig
    from moestro.model.loss import linear_cross_entropy
    from moestro.model.transformer import Transformer

    balance = BalanceConfig(aux_scope="micro_batch")
    moe = MoEConfig(num_experts=EXPERTS, top_k=TOP_K, expert_hidden_size=WIDTH, balance=balance)
    config = ModelConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_layers=layers,
        num_heads=HEADS,
        intermediate_size=TOP_K * WIDTH,
        qk_norm="head",  # as OLMoE has it, over each head instead of all
        moe=None if dense else moe,
    )
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    model = Transformer(config, dtype=kind)
    model.init_weights(0)
    model.to(kind)
    tokens = _tokens()
    labels = tokens.roll(-1, 1)

    def step() -> float:
        out = model(tokens)
        loss = linear_cross_entropy(out.hidden, model.head_weight, labels, scale=1 / labels.numel())
        if out.router_stats:
            loss = loss + 0.01 * torch.stack([s.aux_loss for s in out.router_stats]).mean()
        loss.backward()
        model.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def transformers_step(layers: int, dtype: str) -> Step:
    import torch
    from transformers import OlmoeConfig, OlmoeForCausalLM

    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "max_position_embeddings": SEQ,
        "output_router_logits": True,
        "tie_word_embeddings": False,
        "attn_implementation": "sdpa",
        "experts_implementation": "grouped_mm",
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config = OlmoeConfig(**settings)
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    model: Any = OlmoeForCausalLM(config)
    model.to(kind).train()
    tokens = _tokens()

    def step() -> float:
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        model.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def litgpt_step(layers: int, dtype: str) -> Step:
    import torch
    from litgpt.config import Config
    from litgpt.model import GPT
    from torch.nn import functional as F

    torch.manual_seed(0)
    config = Config(
        block_size=SEQ,
        vocab_size=VOCAB,
        padded_vocab_size=VOCAB,
        n_layer=layers,
        n_head=HEADS,
        n_embd=HIDDEN,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMoE",
        moe_intermediate_size=WIDTH,
        intermediate_size=WIDTH,
        n_expert=EXPERTS,
        n_expert_per_token=TOP_K,
    )
    model = GPT(config).to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    tokens = _tokens()
    labels = tokens.roll(-1, 1)

    def step() -> float:
        loss = F.cross_entropy(model(tokens).float().view(-1, VOCAB), labels.view(-1))
        loss.backward()
        model.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


PEERS: dict[str, Callable[[int, str], Step]] = {
    "moestro MoE": lambda layers, dtype: moestro_step(layers, dtype, dense=False),
    "moestro dense, equal active FLOPs": lambda layers, dtype: moestro_step(layers, dtype, dense=True),
    "transformers OLMoE, grouped_mm": transformers_step,
    "LitGPT LLaMAMoE": litgpt_step,
}
REFERENCE = "moestro MoE"


def _tokens() -> Any:
    import torch

    return torch.randint(0, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))


def serve(name: str, layers: int, dtype: str, threads: int, pipe: Connection) -> None:
    """A peer's process: build, warm up once, then one step for each message."""
    try:
        import torch

        torch.set_num_threads(threads)
        before = _peak_bytes()
        step = PEERS[name](layers, dtype)
        step()
    except ImportError as error:
        pipe.send(f"not installed ({error})")
        return
    pipe.send(None)
    while pipe.recv():
        cpu, wall = time.process_time(), time.perf_counter()
        loss = step()
        record = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall, "loss": loss}
        pipe.send(record | {"peak_bytes": _peak_bytes(), "peak_over_import_bytes": _peak_bytes() - before})


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run(layers: int, dtype: str, rounds: int, threads: int, peers: list[str]) -> dict[str, list[dict[str, float]]]:
    """`rounds` steps of each peer, taking turns."""
    context = mp.get_context("spawn")
    pipes: dict[str, Connection] = {}
    for name in peers:
        ours, theirs = context.Pipe()
        context.Process(target=serve, args=(name, layers, dtype, threads, theirs), daemon=True).start()
        theirs.close()
        problem = ours.recv()  # one builds after the other, so that no warm-up disturbs another's
        if problem is None:
            pipes[name] = ours
        else:
            print(f"left out: {name}: {problem}")
    records: dict[str, list[dict[str, float]]] = {name: [] for name in pipes}
    for _ in range(rounds):
        for name, pipe in pipes.items():
            pipe.send(True)
            records[name].append(pipe.recv())
    for pipe in pipes.values():
        pipe.send(False)
    return records


def floor_flops(layers: int) -> float:
    """Matrix-product FLOPs of one step: 6 for each weight a token meets, and attention's causal half."""
    per_layer = 4 * HIDDEN * HIDDEN + 3 * TOP_K * HIDDEN * WIDTH + HIDDEN * EXPERTS
    tokens = BATCH * SEQ
    attention = layers * 3 * 2 * 2 * HIDDEN * (SEQ + 1) / 2 * tokens
    return 6 * tokens * (layers * per_layer + HIDDEN * VOCAB) + attention


def gemm_cpu_rate(threads: int) -> float:
    """FLOP per CPU-second of the fp32 products at the experts' shape (256 rows × 512 × 256), all three directions."""
    import torch

    torch.set_num_threads(threads)
    rows = BATCH * SEQ * TOP_K // EXPERTS
    x, w, g = torch.randn(rows, HIDDEN), torch.randn(WIDTH, HIDDEN), torch.randn(rows, WIDTH)
    rates = []
    for _ in range(7):
        cpu = time.process_time()
        for _ in range(60):
            x @ w.t(), g @ w, g.t() @ x
        rates.append(60 * 3 * 2 * rows * HIDDEN * WIDTH / (time.process_time() - cpu))
    return statistics.median(rates)


def summarise(records: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Medians, and each peer's ratio to ours round by round (median, smallest, largest)."""
    rows = []
    for name, steps in records.items():
        row: dict[str, Any] = {"peer": name, "peak_over_import_gb": steps[-1]["peak_over_import_bytes"] / 1e9}
        row["peak_gb"] = steps[-1]["peak_bytes"] / 1e9
        for key in ("cpu_s", "wall_s"):
            row[key] = statistics.median(s[key] for s in steps)
            ratios = sorted(ours[key] / s[key] for ours, s in zip(records[REFERENCE], steps, strict=True))
            row[f"ours_over_it_{key}"] = (statistics.median(ratios), ratios[0], ratios[-1])
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peers", nargs="*", default=list(PEERS), help="part of each peer's name")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    names = [name for name in PEERS if name == REFERENCE or any(part in name for part in args.peers)]
    records = run(args.layers, args.dtype, args.rounds, args.threads, names)
    rows = summarise(records)
    floor_s = floor_flops(args.layers) / gemm_cpu_rate(args.threads)
    if args.json:
        print(json.dumps({"rows": rows, "floor_cpu_s": floor_s, "records": records}))
        return
    versions = {p: metadata.version(p) for p in ("torch", "transformers", "litgpt") if _installed(p)}
    print(f"\nmeasured on {platform.processor() or platform.machine()}, {args.threads} threads, {versions}")
    print(f"{args.layers} layers, {args.dtype}, {BATCH}×{SEQ} tokens, {args.rounds} rounds in turn; medians [range]\n")
    print(f"{'':36}{'CPU s':>7}{'wall s':>8}{'peak GB':>9}{'- import':>9}   ours/it CPU           ours/it peak")
    ours = next(row for row in rows if row["peer"] == REFERENCE)
    for row in rows:
        median, low, high = row["ours_over_it_cpu_s"]
        memory = ours["peak_over_import_gb"] / row["peak_over_import_gb"]
        print(
            f"{row['peer']:36}{row['cpu_s']:7.2f}{row['wall_s']:8.2f}{row['peak_gb']:9.2f}"
            f"{row['peak_over_import_gb']:9.2f}   {median:5.3f} [{low:.3f}-{high:.3f}]   {memory:10.2f}"
        )
    print(
        f"\nfp32 GEMM floor {floor_s:.2f} CPU s ({floor_flops(args.layers) / 1e9:.0f} GFLOP at the rate of the "
        f"experts' products, measured): ours reaches {floor_s / ours['cpu_s']:.0%} of it"
    )


def _installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
