"""All papers. `moestro papers` reads this, so a paper's own file, and torch with it, is imported only to be run."""

from collections.abc import Callable
from importlib import import_module

from moestro.errors import MoestroError, nearest
from papers.result import Paper, PaperResult, Progress


def _file(name: str) -> Callable[[Progress], PaperResult]:
    """Its `run`, imported when it is called."""

    def run(progress: Progress) -> PaperResult:
        found: PaperResult = import_module(f"papers.{name}").run(progress)
        return found

    return run


PAPERS: dict[str, Paper] = {
    "zaya1": Paper(
        slug="zaya1",
        number=0,
        system="ZAYA1",
        title="Training Foundation Models on a Full-Stack AMD Platform: Compute, Networking, and System Design",
        arxiv="2511.17127",
        feature='model.cca, router.kind = "zaya", balance.bias_rule = "adamw", residual_scaling; preset zaya1-8b; '
        "cluster zaya1; moestro plan: its layouts of three phases",
        run=_file("zaya1"),
    ),
    "switch_transformers": Paper(
        slug="switch_transformers",
        number=11,
        system="Switch Transformer",
        title="Switch Transformers: Scaling to Trillion Parameter Models with Simple and Efficient Sparsity",
        arxiv="2101.03961",
        feature="model.moe: top_k = 1, capacity, auxiliary loss, fp32 router, jitter, groups",
        run=_file("switch_transformers"),
    ),
    "moeblaze": Paper(
        slug="moeblaze",
        number=18,
        system="MoEBlaze",
        title="MoEBlaze: Breaking the Memory Wall for Efficient MoE Training on Modern GPUs",
        arxiv="2601.05296",
        feature='model.moe.experts = "segmented" or "grouped": index dispatch, silu computed again in backward',
        run=_file("moeblaze"),
    ),
    "hetumoe": Paper(
        slug="hetumoe",
        number=7,
        system="HetuMoE",
        title="HetuMoE: An Efficient Trillion-scale Mixture-of-Expert Distributed Training System",
        arxiv="2203.14685",
        feature='parallel.dispatch = "leader" or "two_hop" for nodes with fast links inside; router.selection',
        run=_file("hetumoe"),
    ),
    "memfine": Paper(
        slug="memfine",
        number=12,
        system="MemFine",
        title="MemFine: Memory-Aware Fine-Grained Scheduling for MoE Training",
        arxiv="2511.21431",
        feature="train.expert_chunks, expert_recompute, expert_memory_mib; moestro.plan.chunks",
        run=_file("memfine"),
    ),
    "fine_grained_moe": Paper(
        slug="fine_grained_moe",
        number=13,
        system="Fine-grained MoE",
        title="Scaling Fine-Grained MoE Beyond 50B Parameters: Empirical Evaluation and Practical Insights",
        arxiv="2506.02890",
        feature="model.moe.granularity, router.top_k_before_score; trained experts in finer pieces",
        run=_file("fine_grained_moe"),
    ),
    "deepseek_v3": Paper(
        slug="deepseek_v3",
        number=24,
        system="DeepSeek-V3",
        title="DeepSeek-V3 Technical Report",
        arxiv="2412.19437",
        feature='model.mla, model.mtp, router.num_groups, balance.bias_rule = "sign"; preset deepseek-v3',
        run=_file("deepseek_v3"),
    ),
    "ds_moe": Paper(
        slug="ds_moe",
        number=29,
        system="DS-MoE",
        title="Dense Training, Sparse Inference: Rethinking Training of Mixture-of-Experts Language Models",
        arxiv="2404.05567",
        feature='router.selection = "dense", eval_top_k, eval_threshold, mi_coef, attention_experts; presets ds-moe-*',
        run=_file("ds_moe"),
    ),
    "mm1": Paper(
        slug="mm1",
        number=32,
        system="MM1",
        title="MM1: Methods, Analysis & Insights from Multimodal LLM Pre-training",
        arxiv="2403.09611",
        feature='model.encoders with connector = "c_abstractor" and others, format = "media"; preset mm1-3b-moe; '
        "moestro size lr",
        run=_file("mm1"),
    ),
    "uni_moe": Paper(
        slug="uni_moe",
        number=39,
        system="Uni-MoE",
        title="Uni-MoE: Scaling Unified Multimodal LLMs with Mixture of Experts",
        arxiv="2405.11273",
        feature='balance.modality_prior_coef, modality_split_coef, data.batch_by = "modality"; presets uni-moe-*',
        run=_file("uni_moe"),
    ),
    "moma": Paper(
        slug="moma",
        number=4,
        system="MoMa",
        title="MoMa: Efficient Early-Fusion Pre-training with Mixture of Modality-Aware Experts",
        arxiv="2407.21770",
        feature='model.token_types, model.moe.expert_groups, router.selection = "expert_choice"; model.depth',
        run=_file("moma"),
    ),
    "moe_routers": Paper(
        slug="moe_routers",
        number=25,
        system="MoE Routers",
        title="Optimizing MoE Routers: Design, Implementation, and Evaluation in Transformer Models",
        arxiv="2506.16419",
        feature="model.moe.router.kind; moestro analyze routers",
        run=_file("moe_routers"),
    ),
    "gigapixel": Paper(
        slug="gigapixel",
        number=8,
        system="Gigapixel",
        title="Exploring Shared Memory Architectures for End-to-End Gigapixel Deep Learning",
        arxiv="2304.12149",
        feature="moestro hardware fits; memory.unified: one pool for host and device, less what the host uses",
        run=_file("gigapixel"),
    ),
    "pim_ml": Paper(
        slug="pim_ml",
        number=33,
        system="PIM-ML",
        title="An Experimental Evaluation of Machine Learning Training on a Real Processing-in-Memory System",
        arxiv="2207.07886",
        feature='hardware.phases: times end to end; device kind "pim" with banks and costs by operation; upmem',
        run=_file("pim_ml"),
    ),
    "mi300x": Paper(
        slug="mi300x",
        number=20,
        system="MI300X analysis",
        title="AMD MI300X GPU Performance Analysis",
        arxiv="2510.27583",
        feature="moestro hardware compare; nominal and achieved figures with sources; collectives of a mesh",
        run=_file("mi300x"),
    ),
    "leading_edge_systems": Paper(
        slug="leading_edge_systems",
        number=40,
        system="Leading-edge systems",
        title="Performance Analysis of Deep Learning Workloads on Leading-edge Systems",
        arxiv="1905.08764",
        feature="moestro measure: sweeps of collectives as bus bandwidth; clusters dgx-2, ac922-4, p3dn-2, ts4-2080ti",
        run=_file("leading_edge_systems"),
    ),
    "profilednn": Paper(
        slug="profilednn",
        number=37,
        system="ProfileDNN",
        title="Deep Learning Models on CPUs: A Methodology for Efficient Training",
        arxiv="2206.10034",
        feature="moestro measure step: primitives of a training step, each against what it takes alone",
        run=_file("profilednn"),
    ),
    "maya": Paper(
        slug="maya",
        number=9,
        system="Maya",
        title="Maya: Optimizing Deep Learning Training Workloads using GPU Runtime Emulation",
        arxiv="2503.20191",
        feature="moestro predict --trace, --oracle: any training step emulated and priced, and where a prediction errs",
        run=_file("maya"),
    ),
    "microbench_models": Paper(
        slug="microbench_models",
        number=15,
        system="Microbenchmark models",
        title="Microbenchmark-Driven Analytical Performance Modeling Across Modern GPU Architectures",
        arxiv="2605.04178",
        feature="moestro measure, moestro hardware fit: curves with held-out errors, figures with their sources",
        run=_file("microbench_models"),
    ),
    "telechat3": Paper(
        slug="telechat3",
        number=1,
        system="TeleChat3",
        title="Training Report of TeleChat3-MoE",
        arxiv="2512.24157",
        feature="moestro probe: memory of stages from dry runs; moestro.plan.ilp: layers and recomputation "
        "of each stage; moestro predict: pipelines pass by pass; preset telechat3-105b",
        run=_file("telechat3"),
    ),
    "hetermoe": Paper(
        slug="hetermoe",
        number=5,
        system="HeterMoE",
        title="HeterMoE: Efficient Training of Mixture-of-Experts Models on Heterogeneous GPUs",
        arxiv="2504.03871",
        feature="moestro place mixed: attention on fast devices, experts on slow ones, and which experts change sides",
        run=_file("hetermoe"),
    ),
    "emo": Paper(
        slug="emo",
        number=22,
        system="EMO",
        title="EMO: Frustratingly Easy Progressive Training of Extendable MoE",
        arxiv="2605.13247",
        feature="moestro size grow: stages of experts priced, each on its fastest plan",
        run=_file("emo"),
    ),
    "gamer_grpo": Paper(
        slug="gamer_grpo",
        number=38,
        system="Gamer GRPO",
        title="Can A Gamer Train A Mathematical Reasoning Model?",
        arxiv="2506.08935",
        feature="moestro.config.adapters: how many parameters adapters have; workload.adapter_rank: memory with them; "
        "moestro size budget: what fits",
        run=_file("gamer_grpo"),
    ),
    "affmae": Paper(
        slug="affmae",
        number=10,
        system="AFFMAE",
        title="AFFMAE: Scalable and Efficient Vision Pretraining for Desktop Graphics Cards",
        arxiv="2602.16249",
        feature="moestro predict --net affmae, or a TOML file of levels: sequences that get shorter with depth",
        run=_file("affmae"),
    ),
    "mixnet": Paper(
        slug="mixnet",
        number=14,
        system="MixNet",
        title="MixNet: A Runtime Reconfigurable Optical-Electrical Fabric for Distributed Mixture-of-Experts Training",
        arxiv="2501.03905",
        feature="moestro place circuits; [optical] of a cluster's file, workload.routing in the price of exchanges",
        run=_file("mixnet"),
    ),
    "deepcee": Paper(
        slug="deepcee",
        number=16,
        system="DeepCEE",
        title="DeepCEE: Efficient Cross-Region Model Distributed Training System under Heterogeneous GPUs and Networks",
        arxiv="2505.15536",
        feature="moestro place regions; pools and [[wan]] of a cluster's file, plan.in_flight; moestro measure",
        run=_file("deepcee"),
    ),
    "mofa": Paper(
        slug="mofa",
        number=6,
        system="MoFa",
        title="MoFa: A Unified Performance Modeling Framework for LLM Pretraining",
        arxiv="2511.09837",
        feature="moestro predict --mtbf-hours: useful share of the time, and how often to save a checkpoint",
        run=_file("mofa"),
    ),
    "gemma4_tpu": Paper(
        slug="gemma4_tpu",
        number=35,
        system="Gemma 4 on TPU",
        title="Fine-Tuning and Serving Gemma 4 31B on Google Cloud TPU: A Technical Comparison with GPU Baselines",
        arxiv="2605.25645",
        feature="moestro lint: what two runs differ in, and times that no machine reaches; moestro predict --serving",
        run=_file("gemma4_tpu"),
    ),
    "universal_perf_model": Paper(
        slug="universal_perf_model",
        number=2,
        system="Universal model",
        title="Towards Universal Performance Modeling for Machine Learning Training on Multi-GPU Platforms",
        arxiv="2404.12674",
        feature="moestro predict --timeline: host, compute and communication streams; ranks that wait for each other",
        run=_file("universal_perf_model"),
    ),
    "dlrm_perf_model": Paper(
        slug="dlrm_perf_model",
        number=23,
        system="DLRM model",
        title="Building a Performance Model for Deep Learning Recommendation Model Training on GPUs",
        arxiv="2201.07821",
        feature="moestro predict --timeline; host overheads T1 to T5 of moestro measure; graphs of DLRM",
        run=_file("dlrm_perf_model"),
    ),
    "disagmoe": Paper(
        slug="disagmoe",
        number=19,
        system="DisagMoE",
        title="DisagMoE: Computation-Communication Overlapped MoE Training via Disaggregated AF-Pipe Parallelism",
        arxiv="2605.11005",
        feature="moestro predict --disaggregate: whether attention and experts on devices of their own would pay",
        run=_file("disagmoe"),
    ),
    "sigma": Paper(
        slug="sigma",
        number=36,
        system="SIGMA",
        title="SIGMA: An AI-Empowered Training Stack on Early-Life Hardware",
        arxiv="2512.13488",
        feature="moestro predict --mtbf-hours: goodput with failures; simulated hosts that pause; moestro plan: "
        "layouts tuned on few devices",
        run=_file("sigma"),
    ),
}


def find_paper(slug: str) -> Paper:
    """Raises MoestroError for a slug that is not in the catalog."""
    if slug not in PAPERS:
        hint = nearest(slug, list(PAPERS)) or " `moestro papers` lists them."
        raise MoestroError(f"no paper '{slug}'.{hint}")
    return PAPERS[slug]
