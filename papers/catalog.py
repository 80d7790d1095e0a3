"""All papers. `moestro papers` reads this, so a paper's own file, and torch with it, is imported only to be run."""

from moestro.errors import MoestroError, nearest
from papers.result import Paper, PaperResult, Progress


def _switch_transformers(progress: Progress) -> PaperResult:
    from papers.switch_transformers import run

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
}


def find_paper(slug: str) -> Paper:
    """Raises MoestroError for a slug that is not in the catalog."""
    if slug not in PAPERS:
        hint = nearest(slug, list(PAPERS)) or " `moestro papers` lists them."
        raise MoestroError(f"no paper '{slug}'.{hint}")
    return PAPERS[slug]
