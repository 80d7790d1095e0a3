"""The architecture: what the transformer is, with nothing about how it is trained or where it runs."""

from typing import Annotated, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from moestro.config.base import Section


class RouterConfig(Section):
    """How a token chooses its experts. Scores are computed in fp32; `fp32` says whether the logits are too.

    The order of operations is: (jitter) → logits → score → selection of top_k by `score + bias` → weights.
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    # False: score all experts, then select (Mixtral, DeepSeek). True: select on logits, then score the chosen only.
    top_k_before_score: bool = False
    # Divide the chosen weights by their sum. Switch's top-1 needs False: the raw gate is the router's only gradient.
    renormalize: bool = True
    scaling_factor: float = Field(1.0, gt=0)
    # Multiply the router's input by uniform noise in [1 - jitter, 1 + jitter] while training (Switch: 1e-2).
    jitter: float = Field(0.0, ge=0, lt=1)
    # The router's initial weights have standard deviation sqrt(init_scale / hidden_size).
    init_scale: float = Field(1.0, gt=0)
    # "selective precision": the router's input, product and softmax in fp32 whatever the model's dtype is.
    fp32: bool = True
    # None: dropless. Otherwise an expert takes ceil(tokens * top_k / num_experts * capacity_factor) tokens of a
    # group; the rest of its queue is dropped and passes through the residual only.
    capacity_factor: float | None = Field(None, gt=0)
    eval_capacity_factor: float | None = Field(None, gt=0)
    min_expert_capacity: int = Field(1, ge=1)
    # Tokens in a group for capacity and for `balance.aux_scope = "group"`; None: one group per sequence.
    group_size: int | None = Field(None, ge=1)


class BalanceConfig(Section):
    """What keeps the experts' load even. A loss and a selection bias may be used together (DeepSeek-V3)."""

    # Coefficient of E * sum_i f_i P_i, which is 1 at uniform routing whatever top_k is. 0 turns it off.
    aux_coef: float = Field(0.01, ge=0)
    # Over which tokens f and P are taken; see moestro/model/moe/balance.py for the exact definitions.
    aux_scope: Literal["sequence", "group", "micro_batch", "global_batch"] = "global_batch"
    z_loss_coef: float = Field(0.0, ge=0)
    # A bias added to the selection scores only, moved once per step by the global batch's load.
    bias_rule: Literal["none", "sign", "adamw"] = "none"
    bias_lr: float = Field(1e-3, gt=0)


class MoEConfig(Section):
    """A mixture-of-experts feed-forward and the layers that have it."""

    num_experts: int = Field(ge=1)
    # One number for all layers, or one per MoE layer.
    top_k: Annotated[
        Annotated[int, Tag("one")] | Annotated[tuple[int, ...], Tag("many")],
        Discriminator(lambda value: "many" if isinstance(value, list | tuple) else "one"),
    ] = 2
    expert_hidden_size: int = Field(ge=1)
    # Experts every token visits; together they are one SwiGLU of num_shared_experts * expert_hidden_size.
    num_shared_experts: int = Field(0, ge=0)
    # Layer i is MoE when i >= first_k_dense and (i - first_k_dense) % every_n_layers == every_n_layers - 1.
    first_k_dense: int = Field(0, ge=0)
    every_n_layers: int = Field(1, ge=1)
    # How the experts are computed; "auto" takes "segmented" on CPU and "grouped" elsewhere.
    experts: Literal["auto", "reference", "grouped", "segmented"] = "auto"
    router: RouterConfig = RouterConfig()
    balance: BalanceConfig = BalanceConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        top_ks = (self.top_k,) if isinstance(self.top_k, int) else self.top_k
        for top_k in top_ks:
            if not 1 <= top_k <= self.num_experts:
                raise ValueError(f"top_k = {top_k} must lie between 1 and num_experts = {self.num_experts}")
        return self


class ModelConfig(Section):
    """A decoder-only transformer: pre-norm RMSNorm, RoPE, grouped-query attention, SwiGLU or MoE."""

    # None: the tokenizer's size (the run's saved config holds the number).
    vocab_size: int | None = Field(None, ge=2)
    hidden_size: int = Field(ge=1)
    num_layers: int = Field(ge=1)
    num_heads: int = Field(ge=1)
    num_kv_heads: int | None = Field(None, ge=1)  # None: num_heads
    head_dim: int | None = Field(None, ge=2)  # None: hidden_size / num_heads
    intermediate_size: int | None = Field(None, ge=1)  # width of the dense feed-forward; needed by dense layers
    max_seq_len: int = Field(4096, ge=1)
    rope_theta: float = Field(10_000.0, gt=0)
    norm_eps: float = Field(1e-6, gt=0)
    qk_norm: bool = False
    tie_embeddings: bool = False
    # Initial weights are normal, cut at two sigma, with sigma = sqrt(init_scale / fan_in) (Switch: 0.1 instead of 1).
    # Projections back into the residual stream are divided by sqrt(2 * num_layers) (GPT-2).
    init_scale: float = Field(1.0, gt=0)
    # How packed documents are kept apart; "auto" takes "flex" on CUDA/ROCm and "sdpa" elsewhere.
    attention: Literal["auto", "sdpa", "flex"] = "auto"
    moe: MoEConfig | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size = {self.hidden_size} is not divisible by num_heads = {self.num_heads}; "
                "change one of them or set head_dim"
            )
        if self.resolved_head_dim % 2:
            raise ValueError(f"head_dim = {self.resolved_head_dim} must be even for rotary embeddings")
        if self.num_heads % self.resolved_num_kv_heads:
            raise ValueError(
                f"num_heads = {self.num_heads} is not divisible by num_kv_heads = {self.resolved_num_kv_heads}"
            )
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
        return self

    @property
    def resolved_head_dim(self) -> int:
        return self.head_dim if self.head_dim is not None else self.hidden_size // self.num_heads

    @property
    def resolved_num_kv_heads(self) -> int:
        return self.num_kv_heads if self.num_kv_heads is not None else self.num_heads

    @property
    def moe_layers(self) -> tuple[bool, ...]:
        """For each layer, whether its feed-forward is a mixture of experts."""
        if self.moe is None:
            return (False,) * self.num_layers
        first, every = self.moe.first_k_dense, self.moe.every_n_layers
        return tuple(i >= first and (i - first) % every == every - 1 for i in range(self.num_layers))

    def top_k_of_layer(self, layer: int) -> int:
        """Experts per token in MoE layer number `layer` (counted over all layers, dense ones included)."""
        assert self.moe is not None
        assert self.moe_layers[layer]
        if isinstance(self.moe.top_k, int):
            return self.moe.top_k
        return self.moe.top_k[sum(self.moe_layers[:layer])]
