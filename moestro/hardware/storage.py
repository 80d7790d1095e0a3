"""What training data asks of storage: random pages, more than their number says when samples lie scattered.

Equations of ZAYA1-8B (arXiv 2605.05365), appendix B.
"""

from dataclasses import dataclass

from moestro.errors import MoestroError

PAGE_BYTES = 4096


@dataclass(frozen=True)
class StorageDemand:
    """Reads of one optimizer step over the whole job; checkpoints, which are bound by bandwidth, are left out.

    global_batch: samples of a step. seq_len: tokens of a sample. token_bytes: of one token in the file. scatter: page
    reads for each page of data, σ; `scatter_factor` gives it.
    """

    global_batch: int
    seq_len: int
    token_bytes: int
    iteration_s: float
    page_bytes: int = PAGE_BYTES
    scatter: float = 1.0

    def __post_init__(self) -> None:
        for name in ("global_batch", "seq_len", "token_bytes", "iteration_s", "page_bytes"):
            if not getattr(self, name) > 0:
                raise MoestroError(f"{name} is above zero, not {getattr(self, name)}")
        if not self.scatter >= 1:
            raise MoestroError(f"the scatter factor is 1 or more, not {self.scatter}: every page is read at least once")

    @property
    def bytes_per_iteration(self) -> int:
        """D = G·s·b"""
        return self.global_batch * self.seq_len * self.token_bytes

    @property
    def pages_per_iteration(self) -> float:
        """n = D/P"""
        return self.bytes_per_iteration / self.page_bytes

    @property
    def iops(self) -> float:
        """I = σ·D/(P·t), page reads per second that storage has to serve."""
        return self.scatter * self.pages_per_iteration / self.iteration_s

    @property
    def bytes_per_s(self) -> float:
        """What the pages read amount to."""
        return self.iops * self.page_bytes

    def break_even_s(self, max_iops: float) -> float:
        """t_break = σ·D/(P·I_max): a step that is shorter waits for storage."""
        if not max_iops > 0:
            raise MoestroError(f"storage serves more than 0 reads per second, not {max_iops}")
        return self.scatter * self.pages_per_iteration / max_iops

    def is_storage_bound(self, max_iops: float) -> bool:
        return self.iteration_s < self.break_even_s(max_iops)


def scatter_factor(extra_faults: float, seq_len: int, token_bytes: int, page_bytes: int = PAGE_BYTES) -> float:
    """σ ≈ 1 + m·P/(s·b), with m page faults for each sample beyond those that its bytes fill.

    m is 1 to 2 for well-packed data and 2 to 8 for fragmented data. A sample that starts anywhere in its first page
    needs one more page than its bytes fill: m = 1 (less by the share that starts at a page's beginning).
    """
    if not (extra_faults >= 0 and seq_len > 0 and token_bytes > 0 and page_bytes > 0):
        raise MoestroError(
            f"extra faults are 0 or more and sizes above 0, not {extra_faults}, {seq_len}, {token_bytes}, {page_bytes}"
        )
    return 1 + extra_faults * page_bytes / (seq_len * token_bytes)


def extra_faults(scatter: float, seq_len: int, token_bytes: int, page_bytes: int = PAGE_BYTES) -> float:
    """m of a measured σ: the inverse of `scatter_factor`."""
    return (scatter - 1) * seq_len * token_bytes / page_bytes
