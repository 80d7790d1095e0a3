"""Where a router's tokens come from: which sequence, which rank, which type."""

from dataclasses import dataclass

from torch import Tensor

from moestro.config import MoEConfig
from moestro.errors import MoestroError
from moestro.model.shards import SequenceShard


@dataclass(frozen=True)
class TokenGroups:
    """What the router must know about where its tokens come from.

    valid: [T] bool, False at padding, or None when there is none. seq_len: tokens of one sequence; T is a multiple.
    noise_seeds: one integer a sequence, or None outside training. All three describe whole sequences, also when
    `shard` says that this rank routes only some of their positions.
    """

    seq_len: int
    valid: Tensor | None = None
    noise_seeds: Tensor | None = None
    shard: SequenceShard | None = None
    token_ids: Tensor | None = None  # [T] int64 of the tokens here, -1 where a vector of an encoder stands
    token_types: Tensor | None = None  # [T] int64 of the tokens here, when the model knows several types

    def mine(self, x: Tensor) -> Tensor:
        """[all tokens, ...] → [tokens here, ...]."""
        return x if self.shard is None else self.shard.mine(x)

    def all(self, x: Tensor) -> Tensor:
        """[tokens here, ...] → [all tokens, ...], without gradient."""
        return x if self.shard is None else self.shard.gather(x)

    def valid_here(self) -> Tensor | None:
        return None if self.valid is None else self.mine(self.valid)

    def count(self, here: int) -> Tensor | int:
        """Valid tokens of the micro-batch, of which `here` (padding included) are on this rank."""
        if self.valid is not None:
            return self.valid.sum()
        return here if self.shard is None else here * self.shard.parts

    def types(self) -> Tensor:
        """`token_types`, where an option cannot do without."""
        if self.token_types is None:
            raise MoestroError(
                "the router needs the tokens' types, which come from the token ids at the embedding; "
                "pass token ids to the model, or unset moe.expert_groups and moe.balance.modality_…_coef"
            )
        return self.token_types


def open_choices(groups: TokenGroups, moe: MoEConfig) -> Tensor | None:
    """[T, C] bool: the experts of a token's own type, and null experts; None when everything is open to all."""
    sizes = moe.resolved_expert_groups
    if sizes is None or len(sizes) == 1:
        return None
    types = groups.types()
    owner = types.new_tensor([kind for kind, size in enumerate(sizes) for _ in range(size)] + [-1] * moe.null_experts)
    return (owner == types.unsqueeze(1)) | (owner < 0)
