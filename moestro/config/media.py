"""Images, sounds and the like: what turns them into vectors that stand among a text's tokens."""

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from moestro.config.base import Section

# By these words in their names weights are told apart (initial values, optimizer, part of a rank).
RESERVED = ("conv", "embed", "experts", "lm_head", "queries", "router")


class EncoderConfig(Section):
    """A transformer over the patches of one image (or the frames of one sound), and the connector behind it."""

    # The modality. In text, <NAME> stands where an item goes.
    name: str = Field(pattern="^[A-Za-z][A-Za-z0-9_]*$")
    input_size: int = Field(ge=1)  # numbers in a patch: 3 · 14² for RGB patches of 14, mel bins for a frame of sound
    max_patches: int = Field(ge=1)
    # "grid": an item is a square of exactly max_patches, row by row. "line": a series of at most max_patches.
    shape: Literal["grid", "line"] = "grid"
    # Learned positions; None: max_patches. When fewer or more, they are interpolated to max_patches, so that a model
    # may go on at another resolution with the weights it has (MM1's fine-tuning).
    position_patches: int | None = Field(None, ge=1)
    hidden_size: int = Field(ge=1)
    num_layers: int = Field(ge=0)
    num_heads: int = Field(1, ge=1)
    intermediate_size: int | None = Field(None, ge=1)  # None: 4 · hidden_size
    # Patches to tokens: means of neighbours and a product; learned queries that look at all of them; residual
    # convolutions around such means (C-Abstractor); or a two-layer network on each patch (LLaVA).
    connector: Literal["average_pool", "attention_pool", "c_abstractor", "mlp"] = "average_pool"
    num_tokens: int = Field(ge=1)  # that one image takes among the tokens ("mlp": max_patches)

    @property
    def resolved_position_patches(self) -> int:
        return self.position_patches if self.position_patches is not None else self.max_patches

    @property
    def resolved_intermediate_size(self) -> int:
        return self.intermediate_size if self.intermediate_size is not None else 4 * self.hidden_size

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(word in self.name for word in RESERVED):
            raise ValueError(f"{self.name}: an encoder's name may not contain one of {', '.join(RESERVED)}")
        if self.hidden_size % self.num_heads:
            raise ValueError(f"{self.name}: num_heads = {self.num_heads} does not divide {self.hidden_size}")
        if self.connector == "mlp" and self.num_tokens != self.max_patches:
            raise ValueError(
                f'{self.name}: connector = "mlp" makes a token of every patch; set num_tokens to max_patches'
            )
        squares = {"max_patches": self.max_patches, "position_patches": self.resolved_position_patches}
        if self.connector in ("average_pool", "c_abstractor"):
            squares["num_tokens"] = self.num_tokens
        for name, count in squares.items():
            if self.shape == "grid" and math.isqrt(count) ** 2 != count:
                raise ValueError(
                    f'{self.name}: {name} = {count} is no square, which shape = "grid" needs; or set "line"'
                )
        return self
