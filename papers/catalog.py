"""All papers. `moestro papers` reads this, so a paper's own file, and torch with it, is imported only to be run."""

from moestro.errors import MoestroError, nearest
from papers.result import Paper, PaperResult, Progress


def _zaya1(progress: Progress) -> PaperResult:
    from papers.zaya1 import run

    return run(progress)


def _switch_transformers(progress: Progress) -> PaperResult:
    from papers.switch_transformers import run

    return run(progress)


def _moeblaze(progress: Progress) -> PaperResult:
    from papers.moeblaze import run

    return run(progress)


def _hetumoe(progress: Progress) -> PaperResult:
    from papers.hetumoe import run

    return run(progress)


def _memfine(progress: Progress) -> PaperResult:
    from papers.memfine import run

    return run(progress)


def _fine_grained_moe(progress: Progress) -> PaperResult:
    from papers.fine_grained_moe import run

    return run(progress)


def _affmae(progress: Progress) -> PaperResult:
    from papers.affmae import run

    return run(progress)


def _deepseek_v3(progress: Progress) -> PaperResult:
    from papers.deepseek_v3 import run

    return run(progress)


def _ds_moe(progress: Progress) -> PaperResult:
    from papers.ds_moe import run

    return run(progress)


def _mm1(progress: Progress) -> PaperResult:
    from papers.mm1 import run

    return run(progress)


def _uni_moe(progress: Progress) -> PaperResult:
    from papers.uni_moe import run

    return run(progress)


def _moma(progress: Progress) -> PaperResult:
    from papers.moma import run

    return run(progress)


def _moe_routers(progress: Progress) -> PaperResult:
    from papers.moe_routers import run

    return run(progress)


def _mi300x(progress: Progress) -> PaperResult:
    from papers.mi300x import run

    return run(progress)


def _leading_edge_systems(progress: Progress) -> PaperResult:
    from papers.leading_edge_systems import run

    return run(progress)


def _gigapixel(progress: Progress) -> PaperResult:
    from papers.gigapixel import run

    return run(progress)


def _pim_ml(progress: Progress) -> PaperResult:
    from papers.pim_ml import run

    return run(progress)


def _profilednn(progress: Progress) -> PaperResult:
    from papers.profilednn import run

    return run(progress)


def _maya(progress: Progress) -> PaperResult:
    from papers.maya import run

    return run(progress)


def _microbench_models(progress: Progress) -> PaperResult:
    from papers.microbench_models import run

    return run(progress)


def _mixnet(progress: Progress) -> PaperResult:
    from papers.mixnet import run

    return run(progress)


def _deepcee(progress: Progress) -> PaperResult:
    from papers.deepcee import run

    return run(progress)


def _mofa(progress: Progress) -> PaperResult:
    from papers.mofa import run

    return run(progress)


def _gemma4_tpu(progress: Progress) -> PaperResult:
    from papers.gemma4_tpu import run

    return run(progress)


def _telechat3(progress: Progress) -> PaperResult:
    from papers.telechat3 import run

    return run(progress)


def _hetermoe(progress: Progress) -> PaperResult:
    from papers.hetermoe import run

    return run(progress)


def _emo(progress: Progress) -> PaperResult:
    from papers.emo import run

    return run(progress)


def _gamer_grpo(progress: Progress) -> PaperResult:
    from papers.gamer_grpo import run

    return run(progress)


def _universal_perf_model(progress: Progress) -> PaperResult:
    from papers.universal_perf_model import run

    return run(progress)


def _dlrm_perf_model(progress: Progress) -> PaperResult:
    from papers.dlrm_perf_model import run

    return run(progress)


def _disagmoe(progress: Progress) -> PaperResult:
    from papers.disagmoe import run

    return run(progress)


def _sigma(progress: Progress) -> PaperResult:
    from papers.sigma import run

    return run(progress)


PAPERS: dict[str, Paper] = {
    "zaya1": Paper(
        slug="zaya1",
        number=0,
        system="ZAYA1",
        title="Training Foundation Models on a Full-Stack AMD Platform: Compute, Networking, and System Design",
        arxiv="2511.17127",
        feature='model.cca, router.kind = "zaya", balance.bias_rule = "adamw", residual_scaling; preset zaya1-8b; '
        "cluster zaya1",
        run=_zaya1,
    ),
    "switch_transformers": Paper(
        slug="switch_transformers",
        number=11,
        system="Switch Transformer",
        title="Switch Transformers: Scaling to Trillion Parameter Models with Simple and Efficient Sparsity",
        arxiv="2101.03961",
        feature="model.moe: top_k = 1, capacity, auxiliary loss, fp32 router, jitter, groups",
        run=_switch_transformers,
    ),
    "moeblaze": Paper(
        slug="moeblaze",
        number=18,
        system="MoEBlaze",
        title="MoEBlaze: Breaking the Memory Wall for Efficient MoE Training on Modern GPUs",
        arxiv="2601.05296",
        feature='model.moe.experts = "segmented" or "grouped": index dispatch, silu computed again in backward',
        run=_moeblaze,
    ),
    "hetumoe": Paper(
        slug="hetumoe",
        number=7,
        system="HetuMoE",
        title="HetuMoE: An Efficient Trillion-scale Mixture-of-Expert Distributed Training System",
        arxiv="2203.14685",
        feature='parallel.dispatch = "leader" or "two_hop" for nodes with fast links inside; router.selection',
        run=_hetumoe,
    ),
    "memfine": Paper(
        slug="memfine",
        number=12,
        system="MemFine",
        title="MemFine: Memory-Aware Fine-Grained Scheduling for MoE Training",
        arxiv="2511.21431",
        feature="train.expert_chunks, expert_recompute, expert_memory_mib",
        run=_memfine,
    ),
    "fine_grained_moe": Paper(
        slug="fine_grained_moe",
        number=13,
        system="Fine-grained MoE",
        title="Scaling Fine-Grained MoE Beyond 50B Parameters: Empirical Evaluation and Practical Insights",
        arxiv="2506.02890",
        feature="model.moe.granularity, router.top_k_before_score; trained experts in finer pieces",
        run=_fine_grained_moe,
    ),
    "deepseek_v3": Paper(
        slug="deepseek_v3",
        number=24,
        system="DeepSeek-V3",
        title="DeepSeek-V3 Technical Report",
        arxiv="2412.19437",
        feature='model.mla, model.mtp, router.num_groups, balance.bias_rule = "sign"; preset deepseek-v3',
        run=_deepseek_v3,
    ),
    "ds_moe": Paper(
        slug="ds_moe",
        number=29,
        system="DS-MoE",
        title="Dense Training, Sparse Inference: Rethinking Training of Mixture-of-Experts Language Models",
        arxiv="2404.05567",
        feature='router.selection = "dense", eval_top_k, eval_threshold, mi_coef, attention_experts; presets ds-moe-*',
        run=_ds_moe,
    ),
    "mm1": Paper(
        slug="mm1",
        number=32,
        system="MM1",
        title="MM1: Methods, Analysis & Insights from Multimodal LLM Pre-training",
        arxiv="2403.09611",
        feature='model.encoders with connector = "c_abstractor" and others, format = "media"; preset mm1-3b-moe; '
        "moestro size lr",
        run=_mm1,
    ),
    "uni_moe": Paper(
        slug="uni_moe",
        number=39,
        system="Uni-MoE",
        title="Uni-MoE: Scaling Unified Multimodal LLMs with Mixture of Experts",
        arxiv="2405.11273",
        feature='balance.modality_prior_coef, modality_split_coef, data.batch_by = "modality"; presets uni-moe-*',
        run=_uni_moe,
    ),
    "moma": Paper(
        slug="moma",
        number=4,
        system="MoMa",
        title="MoMa: Efficient Early-Fusion Pre-training with Mixture of Modality-Aware Experts",
        arxiv="2407.21770",
        feature='model.token_types, model.moe.expert_groups, router.selection = "expert_choice"; model.depth',
        run=_moma,
    ),
    "moe_routers": Paper(
        slug="moe_routers",
        number=25,
        system="MoE Routers",
        title="Optimizing MoE Routers: Design, Implementation, and Evaluation in Transformer Models",
        arxiv="2506.16419",
        feature="model.moe.router.kind; moestro analyze routers",
        run=_moe_routers,
    ),
    "gigapixel": Paper(
        slug="gigapixel",
        number=8,
        system="Gigapixel",
        title="Exploring Shared Memory Architectures for End-to-End Gigapixel Deep Learning",
        arxiv="2304.12149",
        feature="moestro hardware fits; memory.unified: one pool for host and device, less what the host uses",
        run=_gigapixel,
    ),
    "pim_ml": Paper(
        slug="pim_ml",
        number=33,
        system="PIM-ML",
        title="An Experimental Evaluation of Machine Learning Training on a Real Processing-in-Memory System",
        arxiv="2207.07886",
        feature='hardware.phases: times end to end; device kind "pim" with banks and costs by operation; upmem',
        run=_pim_ml,
    ),
    "mi300x": Paper(
        slug="mi300x",
        number=20,
        system="MI300X analysis",
        title="AMD MI300X GPU Performance Analysis",
        arxiv="2510.27583",
        feature="moestro hardware compare; nominal and achieved figures with sources; collectives of a mesh",
        run=_mi300x,
    ),
    "leading_edge_systems": Paper(
        slug="leading_edge_systems",
        number=40,
        system="Leading-edge systems",
        title="Performance Analysis of Deep Learning Workloads on Leading-edge Systems",
        arxiv="1905.08764",
        feature="moestro measure: sweeps of collectives as bus bandwidth; clusters dgx-2, ac922-4, p3dn-2, ts4-2080ti",
        run=_leading_edge_systems,
    ),
    "profilednn": Paper(
        slug="profilednn",
        number=37,
        system="ProfileDNN",
        title="Deep Learning Models on CPUs: A Methodology for Efficient Training",
        arxiv="2206.10034",
        feature="moestro measure step: primitives of a training step, each against what it takes alone",
        run=_profilednn,
    ),
    "maya": Paper(
        slug="maya",
        number=9,
        system="Maya",
        title="Maya: Optimizing Deep Learning Training Workloads using GPU Runtime Emulation",
        arxiv="2503.20191",
        feature="moestro predict --trace, --oracle: any training step emulated and priced, and where a prediction errs",
        run=_maya,
    ),
    "microbench_models": Paper(
        slug="microbench_models",
        number=15,
        system="Microbenchmark models",
        title="Microbenchmark-Driven Analytical Performance Modeling Across Modern GPU Architectures",
        arxiv="2605.04178",
        feature="moestro measure, moestro hardware fit: curves with held-out errors, figures with their sources",
        run=_microbench_models,
    ),
    "telechat3": Paper(
        slug="telechat3",
        number=1,
        system="TeleChat3",
        title="Training Report of TeleChat3-MoE",
        arxiv="2512.24157",
        feature="moestro.predict.dry_run: memory of stages from dry runs; moestro.plan.ilp: layers and recomputation "
        "of each stage; moestro predict: pipelines pass by pass; preset telechat3-105b",
        run=_telechat3,
    ),
    "hetermoe": Paper(
        slug="hetermoe",
        number=5,
        system="HeterMoE",
        title="HeterMoE: Efficient Training of Mixture-of-Experts Models on Heterogeneous GPUs",
        arxiv="2504.03871",
        feature="moestro.plan.mixed: attention on fast devices, experts on slow ones, and which experts change sides",
        run=_hetermoe,
    ),
    "emo": Paper(
        slug="emo",
        number=22,
        system="EMO",
        title="EMO: Frustratingly Easy Progressive Training of Extendable MoE",
        arxiv="2605.13247",
        feature="moestro predict: step time and memory as functions of the number of experts",
        run=_emo,
    ),
    "gamer_grpo": Paper(
        slug="gamer_grpo",
        number=38,
        system="Gamer GRPO",
        title="Can A Gamer Train A Mathematical Reasoning Model?",
        arxiv="2506.08935",
        feature="moestro.config.adapters: how many parameters adapters have; workload.adapter_rank: memory with them; "
        "moestro size budget: what fits",
        run=_gamer_grpo,
    ),
    "affmae": Paper(
        slug="affmae",
        number=10,
        system="AFFMAE",
        title="AFFMAE: Scalable and Efficient Vision Pretraining for Desktop Graphics Cards",
        arxiv="2602.16249",
        feature="moestro predict --net affmae, or a TOML file of levels: sequences that get shorter with depth",
        run=_affmae,
    ),
    "mixnet": Paper(
        slug="mixnet",
        number=14,
        system="MixNet",
        title="MixNet: A Runtime Reconfigurable Optical-Electrical Fabric for Distributed Mixture-of-Experts Training",
        arxiv="2501.03905",
        feature="[optical] of a cluster's file, cluster mixnet-1024, workload.routing in the price of exchanges",
        run=_mixnet,
    ),
    "deepcee": Paper(
        slug="deepcee",
        number=16,
        system="DeepCEE",
        title="DeepCEE: Efficient Cross-Region Model Distributed Training System under Heterogeneous GPUs and Networks",
        arxiv="2505.15536",
        feature="pools and [[wan]] of a cluster's file in `moestro predict`, plan.in_flight; `moestro measure`",
        run=_deepcee,
    ),
    "mofa": Paper(
        slug="mofa",
        number=6,
        system="MoFa",
        title="MoFa: A Unified Performance Modeling Framework for LLM Pretraining",
        arxiv="2511.09837",
        feature="moestro predict --mtbf-hours: useful share of the time, and how often to save a checkpoint",
        run=_mofa,
    ),
    "gemma4_tpu": Paper(
        slug="gemma4_tpu",
        number=35,
        system="Gemma 4 on TPU",
        title="Fine-Tuning and Serving Gemma 4 31B on Google Cloud TPU: A Technical Comparison with GPU Baselines",
        arxiv="2605.25645",
        feature="moestro lint: what two runs differ in, and times that no machine reaches; moestro predict --serving",
        run=_gemma4_tpu,
    ),
    "universal_perf_model": Paper(
        slug="universal_perf_model",
        number=2,
        system="Universal model",
        title="Towards Universal Performance Modeling for Machine Learning Training on Multi-GPU Platforms",
        arxiv="2404.12674",
        feature="moestro predict --timeline: host, compute and communication streams; ranks that wait for each other",
        run=_universal_perf_model,
    ),
    "dlrm_perf_model": Paper(
        slug="dlrm_perf_model",
        number=23,
        system="DLRM model",
        title="Building a Performance Model for Deep Learning Recommendation Model Training on GPUs",
        arxiv="2201.07821",
        feature="moestro predict --timeline; host overheads T1 to T5 of moestro measure; graphs of DLRM",
        run=_dlrm_perf_model,
    ),
    "disagmoe": Paper(
        slug="disagmoe",
        number=19,
        system="DisagMoE",
        title="DisagMoE: Computation-Communication Overlapped MoE Training via Disaggregated AF-Pipe Parallelism",
        arxiv="2605.11005",
        feature="moestro predict --disaggregate: whether attention and experts on devices of their own would pay",
        run=_disagmoe,
    ),
    "sigma": Paper(
        slug="sigma",
        number=36,
        system="SIGMA",
        title="SIGMA: An AI-Empowered Training Stack on Early-Life Hardware",
        arxiv="2512.13488",
        feature="moestro predict --mtbf-hours: goodput with failures; simulated hosts that pause",
        run=_sigma,
    ),
}


def find_paper(slug: str) -> Paper:
    """Raises MoestroError for a slug that is not in the catalog."""
    if slug not in PAPERS:
        hint = nearest(slug, list(PAPERS)) or " `moestro papers` lists them."
        raise MoestroError(f"no paper '{slug}'.{hint}")
    return PAPERS[slug]
