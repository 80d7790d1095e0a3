"""Parameters of T5-like encoder-decoders with experts, from a row of a paper's table of shapes.

Norms and position buckets, together under a thousandth of any model, are left out.
"""

from dataclasses import dataclass

from moestro.config import attention_params, feed_forward_params, moe_params

T5_VOCAB_SIZE = 32128
HEAD_DIM = 64


@dataclass(frozen=True)
class Shape:
    """Encoder and decoder have `layers` each. published: parameters as printed, in units of 1e9."""

    name: str
    published: str
    hidden: int
    width: int
    layers: int
    heads: int
    experts: int = 0
    every: int = 2  # one feed-forward in `every` is a mixture
    matrices: int = 3

    @property
    def billions(self) -> float:
        """Encoder, decoder (which attends twice) and one tied embedding."""
        attention = attention_params(self.hidden, self.heads, self.heads, HEAD_DIM)
        dense = feed_forward_params(self.hidden, self.width, self.matrices)
        sparse = moe_params(self.hidden, self.width, self.experts, self.matrices)
        num_sparse = 2 * (self.layers // self.every) if self.experts else 0
        feed_forwards = num_sparse * sparse + (2 * self.layers - num_sparse) * dense
        return (3 * self.layers * attention + feed_forwards + T5_VOCAB_SIZE * self.hidden) / 1e9

    @property
    def closes(self) -> bool:
        """Whether the count rounds to the published figure."""
        digits = len(self.published.partition(".")[2])
        return f"{self.billions:.{digits}f}" == self.published
