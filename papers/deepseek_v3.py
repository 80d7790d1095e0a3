"""DeepSeek-V3 Technical Report (DeepSeek-AI, arXiv 2412.19437): the model and its balancing.

The claim: 671 B parameters, 37 B of them active, trained on 14.8 T tokens in 2.788 M hours of H800, with experts that
are balanced by a bias on their selection instead of a loss, latent attention (MLA), and a block that predicts one token
more ahead (MTP).

What is reproduced here, on CPU:

* counted: parameters and FLOPs from the preset, and from them the published rate, utilisation, tokens per step, hours
  and cost; the cache of latent attention (`deepseek_v3_counts.py`);
* predicted: published FP8 products, exchanges, processors shared with communication, and a day of serving
  (`deepseek_v3_kernels.py`);
* placed: replicas of busy experts, on the load balancer's example and against the best placement
  (`deepseek_v3_eplb.py`);
* exact: the limit of groups, gates without bias, the sequence-wise loss, the model without its MTP block, decoding from
  latents;
* trained: balance loss per sequence, per batch, and bias, on sequences of hidden clusters.

What is not: pipeline schedules and their bubbles, the numerics of FP8, and the step's breakdown, of which the published
bubble is more than the schedule's own.
"""

from dataclasses import dataclass
from statistics import mean, stdev
from typing import Literal

from moestro.config import BalanceConfig, ModelConfig, MoEConfig, OptimConfig, RouterConfig
from papers.deepseek_v3_counts import check_cache, check_cost, check_flops, check_rate, check_size
from papers.deepseek_v3_eplb import check_best, check_example
from papers.deepseek_v3_exact import check_absorbed, check_bias, check_groups, check_mtp, check_sequence_loss
from papers.deepseek_v3_kernels import KERNEL_CHECKS
from papers.jobs import run_jobs
from papers.result import Check, PaperResult, Progress, verdict_of
from papers.toys import Curve, HiddenClusters, train_on

Balancing = Literal["sequence", "bias", "batch"]
BALANCINGS: tuple[Balancing, ...] = ("sequence", "bias", "batch")
SEEDS = (10, 11, 12, 13)
VOCAB_SIZE, SEQUENCES, SEQ_LEN, STEPS = 32, 64, 32, 200
EXPERTS, TOP_K = 16, 2
CLUSTERS = 8
AUX_COEF, BIAS_LR = 0.1, 3e-3
WINDOW = 30  # steps over which final figures are averaged


@dataclass(frozen=True)
class Job:
    """One training run."""

    balancing: Balancing
    seed: int


def toy(balancing: Balancing) -> ModelConfig:
    """One layer with DeepSeek-V3's router; the three differ in what keeps the load even."""
    balance = {
        "sequence": BalanceConfig(aux_coef=AUX_COEF, aux_scope="sequence"),
        "batch": BalanceConfig(aux_coef=AUX_COEF, aux_scope="micro_batch"),  # a step is one micro-batch here
        "bias": BalanceConfig(aux_coef=0.0, bias_rule="sign", bias_lr=BIAS_LR),
    }[balancing]
    router = RouterConfig(score="sigmoid")
    moe = MoEConfig(num_experts=EXPERTS, top_k=TOP_K, expert_hidden_size=8, router=router, balance=balance)
    return ModelConfig(vocab_size=VOCAB_SIZE, hidden_size=64, num_layers=1, num_heads=2, max_seq_len=SEQ_LEN, moe=moe)


def train(job: Job) -> Curve:
    optim = OptimConfig(lr=1e-2, weight_decay=0.0, warmup_steps=10, schedule="cosine")
    task = HiddenClusters(VOCAB_SIZE, job.seed, num_clusters=CLUSTERS)
    return train_on(task, toy(job.balancing), optim, STEPS, SEQUENCES, SEQ_LEN, job.seed)


def run(progress: Progress) -> PaperResult:
    """About two minutes of CPU time, over two processes."""
    jobs = [Job(balancing, seed) for seed in SEEDS for balancing in BALANCINGS]
    curves = dict(zip(jobs, run_jobs(train, jobs, progress), strict=True))
    checks = (
        check_rate(),
        check_size(),
        check_flops(),
        check_cost(),
        check_cache(),
        check_groups(),
        check_bias(),
        check_sequence_loss(),
        check_mtp(),
        check_absorbed(),
        *(check() for check in KERNEL_CHECKS),
        check_example(),
        check_best(),
        check_scope(curves),
    )
    return PaperResult(checks, figures(curves))


def figures(curves: dict[Job, Curve]) -> dict[str, float]:
    """Final loss and balance H(f) / ln E of every run."""
    found: dict[str, float] = {}
    for job, curve in curves.items():
        found[f"loss {job.balancing} seed={job.seed}"] = round(curve.final_loss(WINDOW), 5)
        found[f"balance {job.balancing} seed={job.seed}"] = round(mean(curve.balance[-WINDOW:]), 5)
    return found


def check_scope(curves: dict[Job, Curve]) -> Check:
    """Seeds are tasks, too, so that methods are compared on each of them."""
    loss = {b: [curves[Job(b, seed)].final_loss(WINDOW) for seed in SEEDS] for b in BALANCINGS}
    balance = {b: mean(mean(curves[Job(b, seed)].balance[-WINDOW:]) for seed in SEEDS) for b in BALANCINGS}
    gains = {b: [a - c for a, c in zip(loss["sequence"], loss[b], strict=True)] for b in ("bias", "batch")}
    apart = [a - c for a, c in zip(loss["bias"], loss["batch"], strict=True)]
    not_worse = [mean(gain) >= -_noise(gain) for gain in gains.values()]
    return Check(
        claim="On sequences of one domain each: loss of bias ≈ batch-wise ≤ sequence-wise balance",
        published="sequence-wise / bias / batch-wise: 2.258 / 2.253 / 2.253 (1 B), 2.085 / 2.080 / 2.080 (3 B)",
        ours=" / ".join(f"{mean(loss[b]):.3f}" for b in BALANCINGS) + " (toy)",
        how="measured",
        verdict=verdict_of([*not_worse, abs(mean(apart)) <= _noise(apart)]),
        note="Lower than sequence-wise by "
        + " and ".join(f"{mean(row):.3f} ± {stdev(row):.3f} ({name})" for name, row in gains.items())
        + f"; bias minus batch-wise {mean(apart):.3f} ± {stdev(apart):.3f}; mean and deviation of {len(SEEDS)} seeds, "
        "a difference counts beyond twice the standard error. Balance H(f) / ln E "
        + " / ".join(f"{balance[b]:.3f}" for b in BALANCINGS)
        + f". Hidden clusters, {EXPERTS} experts, top-{TOP_K}, {STEPS} steps; coefficient {AUX_COEF}, γ = {BIAS_LR}. "
        "Two coefficients were looked at, on seed 0.",
    )


def _noise(differences: list[float]) -> float:
    """Twice the standard error of their mean."""
    return float(2 * stdev(differences) / len(differences) ** 0.5)
