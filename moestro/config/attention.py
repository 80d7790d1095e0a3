"""How tokens look at each other: rotary positions, latent and convolutional attention, experts among the heads."""

from typing import Literal, Self

from pydantic import Field, model_validator

from moestro.config.base import Section


class RopeConfig(Section):
    """Rotary positions, and how they stretch beyond the length they were trained at."""

    theta: float = Field(10_000.0, gt=0)
    fraction: float = Field(1.0, gt=0, le=1)  # share of a head's dimensions that is rotated, the first ones
    scaling: Literal["none", "linear", "yarn", "llama3"] = "none"
    factor: float = Field(1.0, ge=1)  # how many times longer
    original_max_seq_len: int | None = Field(None, ge=1)  # yarn and llama3: the length before
    beta_fast: float = Field(32.0, gt=0)  # yarn: rotations within the original length above which nothing changes
    beta_slow: float = Field(1.0, gt=0)  # yarn: and below which everything is stretched
    truncate: bool = True  # yarn: round the borders between the two to whole dimensions (not in GPT-OSS)
    # yarn multiplies cosines and sines by this; None: m(mscale) / m(mscale_all_dim) with m(s) = 0.1 s ln factor + 1
    attention_factor: float | None = Field(None, gt=0)
    mscale: float = Field(1.0, ge=0)
    mscale_all_dim: float = Field(0.0, ge=0)  # DeepSeek: and the softmax's scale by m(mscale_all_dim)²
    low_freq_factor: float = Field(1.0, gt=0)  # llama3
    high_freq_factor: float = Field(4.0, gt=0)  # llama3

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.scaling in ("yarn", "llama3") and self.original_max_seq_len is None:
            raise ValueError(f'scaling = "{self.scaling}" needs original_max_seq_len, the length before it')
        if self.scaling == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(f"high_freq_factor must exceed low_freq_factor = {self.low_freq_factor}")
        if self.scaling == "yarn" and self.theta <= 1:
            raise ValueError(f'scaling = "yarn" needs theta above 1, got {self.theta}')
        if self.scaling == "none" and self.factor != 1:
            raise ValueError(f'factor = {self.factor} does nothing with scaling = "none"; choose one of the others')
        return self


class MLAConfig(Section):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values are made from a short latent."""

    q_rank: int | None = Field(None, ge=1)  # None: queries straight from the hidden state
    kv_rank: int = Field(ge=1)
    nope_head_dim: int = Field(ge=1)  # of a query and key without positions
    rope_head_dim: int = Field(ge=2)  # with them; one such key for all heads
    v_head_dim: int = Field(ge=1)

    @property
    def qk_head_dim(self) -> int:
        return self.nope_head_dim + self.rope_head_dim


class CCAConfig(Section):
    """Compressed convolutional attention (arXiv 2510.04476), as ZAYA1 has it. Heads and their size are the model's."""

    depthwise_taps: int = Field(2, ge=1)
    grouped_taps: int = Field(2, ge=1)

    @property
    def halo(self) -> int:
        """Earlier tokens that a token's query and key see."""
        return self.depthwise_taps + self.grouped_taps - 2


class AttentionExpertsConfig(Section):
    """Groups of query heads as experts, each with its output projection; keys and values are shared (DS-MoE).

    Every expert is computed, weighted by a softmax over all of them; see `moe.router.selection = "dense"`.
    """

    num_experts: int = Field(ge=1)
    mi_coef: float = Field(0.0, ge=0)  # of the mutual-information loss over these experts
    eval_threshold: float | None = Field(None, ge=0)  # when not training, experts with E · weight above this only
