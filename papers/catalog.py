"""All papers. `moestro papers` reads this, so a paper's own file, and torch with it, is imported only to be run."""

from moestro.errors import MoestroError, nearest
from papers.result import Paper, PaperResult, Progress


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


PAPERS: dict[str, Paper] = {
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
        feature='parallel.dispatch = "leader" or "two_hop": exchanges for nodes with fast links inside',
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
}


def find_paper(slug: str) -> Paper:
    """Raises MoestroError for a slug that is not in the catalog."""
    if slug not in PAPERS:
        hint = nearest(slug, list(PAPERS)) or " `moestro papers` lists them."
        raise MoestroError(f"no paper '{slug}'.{hint}")
    return PAPERS[slug]
