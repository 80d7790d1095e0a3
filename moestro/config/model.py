"""The architecture: what the transformer is, with nothing about how it is trained or where it runs."""

from functools import lru_cache
from typing import Literal, Self

from pydantic import Field, model_validator

from moestro.config.attention import AttentionExpertsConfig, CCAConfig, MLAConfig, RopeConfig
from moestro.config.base import Section
from moestro.config.media import EncoderConfig
from moestro.config.moe import Activation, MoEConfig

LayerType = Literal["full", "sliding"]


class MTPConfig(Section):
    """Multi-token prediction (DeepSeek-V3): further blocks, each predicting one token more ahead, while training."""

    depth: int = Field(1, ge=1)
    loss_coef: float = Field(0.3, ge=0)  # of the mean of the depths' losses


class DepthConfig(Section):
    """Mixture of depths (arXiv 2404.02258): some layers take only the tokens of a sequence that their router admits.

    A second, causal router stands in when not training.
    """

    capacity: float = Field(0.25, gt=0, le=1)  # share of a sequence's tokens
    every_n_layers: int = Field(2, ge=1)  # layers 0, n, 2n ...


class ModelConfig(Section):
    """A decoder-only transformer."""

    # None: the tokenizer's size (the run's saved config holds the number).
    vocab_size: int | None = Field(None, ge=2)
    hidden_size: int = Field(ge=1)
    num_layers: int = Field(ge=1)

    # Attention: grouped-query, unless [model.mla] or [model.cca] is there.
    num_heads: int = Field(ge=1)
    num_kv_heads: int | None = Field(None, ge=1)  # None: num_heads
    head_dim: int | None = Field(None, ge=2)  # None: hidden_size / num_heads
    mla: MLAConfig | None = None
    cca: CCAConfig | None = None
    attention_experts: AttentionExpertsConfig | None = None
    # RMSNorm of queries and keys: over each head (Qwen3), or over all of a projection (OLMoE).
    qk_norm: Literal["none", "head", "projection"] = "none"
    attention_bias: Literal["none", "qkv", "all"] = "none"
    clip_qkv: float | None = Field(None, gt=0)  # OLMo's clamp of queries, keys and values
    attention_sinks: bool = False  # a learned logit per head that takes attention and gives nothing (GPT-OSS)
    # Layers of type "sliding" see the last sliding_window tokens, themselves included. layer_types is repeated over the
    # layers; None: all sliding when there is a window, else all full.
    sliding_window: int | None = Field(None, ge=1)
    layer_types: tuple[LayerType, ...] | None = Field(None, min_length=1)
    rope: RopeConfig = RopeConfig()
    sliding_rope: RopeConfig | None = None  # of the sliding layers; None: rope
    max_seq_len: int = Field(4096, ge=1)
    # How packed documents are kept apart; "auto" takes "flex" on CUDA/ROCm and "sdpa" elsewhere.
    attention: Literal["auto", "sdpa", "flex"] = "auto"

    # Feed-forward: dense, or a mixture of experts in the layers that [model.moe] names.
    intermediate_size: int | None = Field(None, ge=1)  # width of the dense feed-forward; needed by dense layers
    activation: Activation = "swiglu"
    moe: MoEConfig | None = None
    depth: DepthConfig | None = None

    # Stack and head.
    norm_eps: float = Field(1e-6, gt=0)
    norm_position: Literal["pre", "post"] = "pre"  # before attention and feed-forward, or after them (Swin, Chameleon)
    # Learned scales and biases of the residual stream x around a layer f, all 1 and 0 at first (ZAYA1):
    #   input     α x + b + f(norm(β x + c))                     the paper's
    #   output    α x + b + β f(norm(x)) + c                     the 8B report's
    #   released  (x + b) α + (f(norm(x)) + c) β, and (embedding + b) α      the released weights'
    residual_scaling: Literal["none", "input", "output", "released"] = "none"
    residual_fp32: bool = False  # add up in fp32 whatever the activations' dtype is
    tie_embeddings: bool = False
    head_fp32: bool = False  # the head's product in fp32
    mtp: MTPConfig | None = None
    # Initial weights are normal, cut at two sigma, with sigma = sqrt(init_scale / fan_in) (Switch: 0.1 instead of 1).
    # Projections back into the residual stream are divided by sqrt(2 * num_layers) (GPT-2).
    init_scale: float = Field(1.0, gt=0)

    # Input other than text. token_types: where each type of token after the first begins, for expert_groups and hash
    # (MoMa's image codes). encoders: what turns images or sounds into vectors in place of tokens.
    token_types: tuple[int, ...] = ()
    encoders: tuple[EncoderConfig, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_attention()
        self._check_layers()
        self._check_types()
        return self

    def _check_attention(self) -> None:
        if self.mla is not None and self.cca is not None:
            raise ValueError("mla and cca are two kinds of attention; leave one out")
        if self.head_dim is None and self.mla is None and self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size = {self.hidden_size} is not divisible by num_heads = {self.num_heads}; "
                "change one of them or set head_dim"
            )
        if self.num_heads % self.resolved_num_kv_heads:
            raise ValueError(
                f"num_heads = {self.num_heads} is not divisible by num_kv_heads = {self.resolved_num_kv_heads}"
            )
        for name, rope in (("rope", self.rope), ("sliding_rope", self.sliding_rope)):
            rotated = 0 if rope is None else self.rotated_dims(rope)
            if rope is not None and (rotated % 2 or rotated < 2):
                at = "mla.rope_head_dim" if self.mla else "head_dim"
                raise ValueError(
                    f"{name}: {at} = {self.rope_head_dim}, of which {rope.fraction} is rotated, must be even for "
                    "rotary embeddings"
                )
        plain = {"qk_norm": "none", "attention_bias": "none", "clip_qkv": None, "attention_sinks": False}
        special = "mla" if self.mla else "cca" if self.cca else None
        for name, off in plain.items():
            if special is not None and getattr(self, name) != off:
                raise ValueError(f"{name} is not an option of {special}; leave it out")
        if self.cca is not None and self.resolved_num_kv_heads * self.resolved_head_dim % 2:
            raise ValueError("cca needs an even num_kv_heads · head_dim: half of it holds the token before's value")
        if self.cca is not None and self.depth is not None:
            raise ValueError("cca looks at the tokens just before, of which depth leaves some out; take one of them")
        if self.attention_experts is not None and self.depth is not None:
            raise ValueError("attention_experts are even over all tokens, of which depth takes some; take one of them")
        if self.attention_experts is not None:
            if special is not None or self.attention_sinks or self.attention_bias == "all":
                raise ValueError("attention_experts go with plain grouped-query attention only")
            if self.num_heads % self.attention_experts.num_experts:
                raise ValueError(
                    f"attention_experts.num_experts = {self.attention_experts.num_experts} does not divide "
                    f"num_heads = {self.num_heads}"
                )
        if self.sliding_window is None and self.layer_types is not None and "sliding" in self.layer_types:
            raise ValueError("layer_types names sliding layers; set sliding_window")

    def _check_layers(self) -> None:
        moe = self.moe
        if moe is not None and not any(self.moe_layers):
            raise ValueError(
                f"no layer is MoE: num_layers = {self.num_layers} with moe.first_k_dense = {moe.first_k_dense} and "
                f"moe.every_n_layers = {moe.every_n_layers}"
            )
        if moe is not None and not isinstance(moe.top_k, int) and len(moe.top_k) != sum(self.moe_layers):
            raise ValueError(f"moe.top_k lists {len(moe.top_k)} values for {sum(self.moe_layers)} MoE layers")
        if self.intermediate_size is None and not all(self.moe_layers):
            raise ValueError("intermediate_size is needed: some layers have a dense feed-forward")
        if self.norm_position == "post" and self.residual_scaling != "none":
            raise ValueError('residual_scaling is made for norm_position = "pre"')
        if self.depth is not None:
            router = moe.router if moe else None
            carries = router is not None and router.kind == "zaya" and router.carry_state
            for name, used in {
                "mtp": self.mtp is not None,
                "moe.router.carry_state": carries,
                "moe.router.group_size": router is not None and router.group_size is not None,
            }.items():
                if used:
                    raise ValueError(f"depth does not go with {name}; leave one of them out")

    def _check_types(self) -> None:
        types = 1 + len(self.token_types) + len(self.encoders)
        if list(self.token_types) != sorted(set(self.token_types)) or any(t < 1 for t in self.token_types):
            raise ValueError(f"token_types = {list(self.token_types)} must rise, from 1 at least")
        if self.vocab_size is not None and self.token_types and self.token_types[-1] >= self.vocab_size:
            raise ValueError(f"token_types = {list(self.token_types)} must lie below vocab_size = {self.vocab_size}")
        groups = self.moe.expert_groups if self.moe else None
        if groups is not None and len(groups) != types:
            raise ValueError(
                f"moe.expert_groups names {len(groups)} types of tokens, but there are {types} "
                "(1 + token_types + encoders)"
            )
        balance = self.moe.balance if self.moe else None
        if balance and (balance.modality_prior_coef or balance.modality_split_coef) and types < 2:
            raise ValueError("moe.balance.modality_…_coef need several types of tokens; set token_types or encoders")
        names = [encoder.name for encoder in self.encoders]
        if len(set(names)) != len(names):
            raise ValueError(f"encoders: two have the same name ({', '.join(names)})")

    @property
    def resolved_head_dim(self) -> int:
        return self.head_dim if self.head_dim is not None else self.hidden_size // self.num_heads

    @property
    def rope_head_dim(self) -> int:
        """Dimensions of a head of which RopeConfig.fraction is rotated."""
        return self.mla.rope_head_dim if self.mla is not None else self.resolved_head_dim

    def rope_of(self, kind: LayerType) -> RopeConfig:
        """Of the layers of this type."""
        return self.sliding_rope if kind == "sliding" and self.sliding_rope is not None else self.rope

    def rotated_dims(self, rope: RopeConfig) -> int:
        return round(self.rope_head_dim * rope.fraction)

    @property
    def resolved_num_kv_heads(self) -> int:
        return self.num_kv_heads if self.num_kv_heads is not None else self.num_heads

    @property
    def num_token_types(self) -> int:
        return 1 + len(self.token_types) + len(self.encoders)

    @property
    def num_blocks(self) -> int:
        """Layers and the blocks of multi-token prediction, which are numbered after them."""
        return self.num_layers + (self.mtp.depth if self.mtp else 0)

    @property
    def moe_layers(self) -> tuple[bool, ...]:
        """For each layer, whether its feed-forward is a mixture of experts."""
        if self.moe is None:
            return (False,) * self.num_layers
        return _mixtures(self.num_layers, self.moe.first_k_dense, self.moe.every_n_layers)

    @property
    def moe_blocks(self) -> tuple[bool, ...]:
        """As moe_layers, for all blocks; those of multi-token prediction are like the last layer."""
        return self.moe_layers + (self.moe_layers[-1],) * (self.num_blocks - self.num_layers)

    @property
    def depth_layers(self) -> tuple[bool, ...]:
        """For each layer, whether it takes only the tokens that its router admits (mixture of depths)."""
        return tuple(self.depth is not None and i % self.depth.every_n_layers == 0 for i in range(self.num_layers))

    def layer_type(self, layer: int) -> LayerType:
        """Of block number `layer`; those of multi-token prediction are like the last layer."""
        if self.layer_types is None:
            return "full" if self.sliding_window is None else "sliding"
        return self.layer_types[min(layer, self.num_layers - 1) % len(self.layer_types)]

    def top_k_of_layer(self, layer: int) -> int:
        """Experts per token in MoE block number `layer` (counted over all blocks, dense ones included)."""
        assert self.moe is not None
        assert self.moe_blocks[layer]
        if isinstance(self.moe.top_k, int):
            return self.moe.top_k * self.moe.granularity
        return self.moe.top_k[sum(self.moe_layers[: min(layer, self.num_layers - 1)])] * self.moe.granularity

    @property
    def largest_top_k(self) -> int:
        """Of all blocks with experts, the most experts per token."""
        return max(self.top_k_of_layer(layer) for layer, routed in enumerate(self.moe_blocks) if routed)


@lru_cache(maxsize=256)
def _mixtures(num_layers: int, first: int, every: int) -> tuple[bool, ...]:
    """Kept, as a search asks for it a million times."""
    return tuple(i >= first and (i - first) % every == every - 1 for i in range(num_layers))
