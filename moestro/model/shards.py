"""What the model must be told when its tensors are spread over ranks. `moestro.parallel` provides both.

Without them, a module computes on whole sequences and whole weights.
"""

from typing import Protocol

from torch import Tensor


class TensorShard(Protocol):
    """This rank holds some of the heads (or of the feed-forward's width), and between such modules some positions."""

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """The ranks' positions along `dim`, all of them; the gradient is the sum of the ranks'."""

    def scatter(self, x: Tensor, dim: int) -> Tensor:
        """The sum of the ranks' x, of which each keeps its positions along `dim`."""

    def total(self, x: Tensor) -> Tensor:
        """The sum of the ranks' x, for all of them; the gradient is the sum of theirs."""

    def part(self, x: Tensor) -> Tensor:
        """This rank's part along the first axis of x, which all have whole: what belongs to its heads."""


class SequenceShard(Protocol):
    """This rank holds some positions of every sequence."""

    parts: int  # over how many ranks a sequence is cut

    def gather(self, x: Tensor) -> Tensor:
        """[batch · positions here, ...] → [batch · all positions, ...] in their order; without gradient."""

    def mine(self, x: Tensor) -> Tensor:
        """[batch · all positions, ...] → [batch · positions here, ...]."""

    @property
    def splits_attention(self) -> bool:
        """Whether attention, too, has only some of the positions (context parallelism)."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        document_ids: Tensor | None,
        window: int | None = None,
        scale: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of the queries here to the keys everywhere, inside documents (see `mask.attend`).

        query: [batch, heads, context positions, head_dim]; key: [batch, kv_heads, context positions, head_dim];
        value: the same with a head_dim of its own; document_ids: [batch, all positions] or None; window: tokens that
        one sees, itself included. Returns [batch, heads, context positions, head_dim of values].
        """

    def before(self, x: Tensor, n: int) -> Tensor:
        """The n positions before each run of consecutive ones that attention has here; zeros before the first.

        x: [batch, context positions, ...]; returns [batch, runs, n, ...]. The gradient goes where they are held.
        """
