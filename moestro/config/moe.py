"""The mixture of experts: who is chosen, what keeps the load even, and what an expert is."""

from typing import Annotated, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from moestro.config.base import Section

Activation = Literal["swiglu", "geglu", "relu2", "gelu", "clamped_swiglu"]
GATED: tuple[Activation, ...] = ("swiglu", "geglu", "clamped_swiglu")


class RouterConfig(Section):
    """How a token chooses its experts. Scores are computed in fp32; `fp32` says whether the logits are too.

    The order of operations is: (jitter) → logits → (noise) → score → selection by `score + bias` → weights.
    """

    # What makes logits of a token: one product; a hidden layer of router.hidden_size with GELU; a query of that size
    # against learned keys of the experts; a learned mix of the first and the third; two products multiplied with each
    # other; ZAYA1's down-projection, state of the layer before, norm and three-layer network; or the token's number.
    kind: Literal["linear", "mlp", "attention", "hybrid", "mlp_hadamard", "zaya", "hash"] = "linear"
    hidden_size: int = Field(256, ge=1)
    bias: bool = False  # a bias on the logits of "linear"
    # "zaya": add γ times the router state of the MoE layer before (depth averaging, EDA).
    carry_state: bool = True
    # How experts are chosen from the scores:
    #   top_k            the best top_k, of the best top_groups of num_groups groups of experts
    #   k_top_1          experts in top_k prototypes, the best of each, scored among its own (HetuMoE)
    #   sam              the best group by its summed scores, the best top_k in it (HetuMoE)
    #   base             equal loads by solving an assignment for each sequence while training (BASE layers)
    #   expert_choice    each expert takes the capacity_factor · top_k / num_experts best of a sequence's tokens; a
    #                    second, causal router stands in when not training (MoMa)
    #   dense            all experts (DS-MoE); fewer by eval_top_k or eval_threshold when not training
    #   dense_to_sparse  all experts above 1 / E of a softmax whose temperature falls (EvoMoE)
    selection: Literal["top_k", "k_top_1", "sam", "base", "expert_choice", "dense", "dense_to_sparse"] = "top_k"
    score: Literal["softmax", "sigmoid"] = "softmax"
    # False: score all experts, then select (Mixtral, DeepSeek). True: select on logits, then score the chosen only.
    top_k_before_score: bool = False
    # Divide the chosen weights by their sum. Switch's top-1 needs False: the raw gate is the router's only gradient.
    renormalize: bool = True
    scaling_factor: float = Field(1.0, gt=0)
    # Of the experts' consecutive, equal groups only the best top_groups are open to a token (node-limited routing).
    num_groups: int = Field(1, ge=1)
    top_groups: int = Field(1, ge=1)
    group_score: Literal["sum_of_two", "max"] = "sum_of_two"  # DeepSeek-V3, DeepSeek-V2
    # "dense": how many experts a token visits when not training, or the least E · weight of those it does.
    eval_top_k: int | None = Field(None, ge=1)
    eval_threshold: float | None = Field(None, ge=0)
    # "dense_to_sparse": the temperature starts here and falls by this factor in each step, down to the last.
    temperature: float = Field(1.0, gt=0)
    temperature_decay: float = Field(0.99, gt=0, le=1)
    min_temperature: float = Field(0.1, gt=0)
    # Multiply the router's input by uniform noise in [1 - jitter, 1 + jitter] while training (Switch: 1e-2).
    jitter: float = Field(0.0, ge=0, lt=1)
    # Added to the logits while training: normal of this deviation, or the difference of two Gumbel variables times it.
    noise: Literal["gaussian", "gumbel"] = "gaussian"
    noise_scale: float = Field(0.0, ge=0)
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
    # Minus the mutual information of token and expert: experts even on average, tokens decided (DS-MoE).
    mi_coef: float = Field(0.0, ge=0)
    # "sam": what experts outside the chosen group score above the last chosen one inside.
    alignment_coef: float = Field(0.0, ge=0)
    # With token types (model.token_types): the L1 distance between a token's gate and its type's share of the experts,
    # all types having equal, consecutive shares; and how alike the types' mean gates are, 1 - their KL (Uni-MoE).
    modality_prior_coef: float = Field(0.0, ge=0)
    modality_split_coef: float = Field(0.0, ge=0)
    # A bias added to the selection scores only, moved once per step by the global batch's load: by the sign of the
    # error, by AdamW on the error, or to the quantile of the scores that would have given every expert its share.
    bias_rule: Literal["none", "sign", "adamw", "quantile"] = "none"
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
    # Split every expert in this many, of as much less width, and choose as many times more: the same parameters and
    # FLOPs but for the router (arXiv 2401.06066). The three numbers above are those before the split.
    granularity: int = Field(1, ge=1)
    activation: Activation = "swiglu"
    activation_limit: float = Field(7.0, gt=0)  # "clamped_swiglu": GPT-OSS's
    expert_bias: bool = False
    # Experts every token visits; together they are one feed-forward of num_shared_experts * expert_hidden_size, which
    # granularity leaves as it is.
    num_shared_experts: int = Field(0, ge=0)
    # Experts work on a projection of this size, which all share; None: on the hidden state (LatentMoE).
    latent_size: int | None = Field(None, ge=1)
    # Further choices of the router without an expert behind them: their output is 0, or the layer's (normalised) input.
    null_experts: int = Field(0, ge=0)
    null_output: Literal["zero", "input"] = "zero"
    null_bias: float = 0.0  # where their selection bias starts (ZAYA1: -1)
    # Choices after a null expert go nowhere either (ZAYA1's skip).
    null_ends_choice: bool = False
    # Experts of each token type, consecutive: a token only sees its own (MoMa). They add up to num_experts.
    expert_groups: tuple[int, ...] | None = None
    # Layer i is MoE when i >= first_k_dense and (i - first_k_dense) % every_n_layers == every_n_layers - 1.
    first_k_dense: int = Field(0, ge=0)
    every_n_layers: int = Field(1, ge=1)
    # How the experts are computed; "auto" takes "segmented" on CPU and "grouped" elsewhere.
    experts: Literal["auto", "reference", "grouped", "segmented"] = "auto"
    router: RouterConfig = RouterConfig()
    balance: BalanceConfig = BalanceConfig()

    @property
    def resolved_num_experts(self) -> int:
        """Experts after the split by granularity, null ones not among them."""
        return self.num_experts * self.granularity

    @property
    def resolved_expert_hidden_size(self) -> int:
        return self.expert_hidden_size // self.granularity

    @property
    def num_choices(self) -> int:
        """What the router scores: experts and null experts."""
        return self.resolved_num_experts + self.null_experts

    @property
    def resolved_expert_groups(self) -> tuple[int, ...] | None:
        return None if self.expert_groups is None else tuple(n * self.granularity for n in self.expert_groups)

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_sizes()
        self._check_router()
        self._check_ignored()
        return self

    def _check_sizes(self) -> None:
        top_ks = (self.top_k,) if isinstance(self.top_k, int) else self.top_k
        for top_k in top_ks:
            if not 1 <= top_k <= self.num_experts:
                raise ValueError(f"top_k = {top_k} must lie between 1 and num_experts = {self.num_experts}")
        if self.expert_hidden_size % self.granularity:
            raise ValueError(
                f"granularity = {self.granularity} does not divide expert_hidden_size = {self.expert_hidden_size}"
            )
        groups = self.expert_groups
        if groups is not None and (sum(groups) != self.num_experts or min(groups) < 1):
            raise ValueError(f"expert_groups = {list(groups)} must add up to num_experts = {self.num_experts}")
        if groups is not None and max(top_ks) > min(groups):
            raise ValueError(f"top_k = {max(top_ks)} exceeds the smallest of expert_groups = {list(groups)}")

    def _check_router(self) -> None:
        router, experts = self.router, self.resolved_num_experts
        top_ks = [k * self.granularity for k in ((self.top_k,) if isinstance(self.top_k, int) else self.top_k)]
        if router.num_groups > 1 or router.selection == "sam":
            if experts % router.num_groups:
                raise ValueError(f"router.num_groups = {router.num_groups} does not divide the {experts} experts")
            if router.top_groups > router.num_groups:
                raise ValueError(f"router.top_groups = {router.top_groups} exceeds num_groups = {router.num_groups}")
            open_groups = 1 if router.selection == "sam" else router.top_groups
            if max(top_ks) > open_groups * (experts // router.num_groups):
                raise ValueError(
                    f"top_k = {max(top_ks)} exceeds the {open_groups * (experts // router.num_groups)} experts of "
                    f"{open_groups} of router.num_groups = {router.num_groups} groups; raise router.top_groups"
                )
            if self.null_experts or self.expert_groups:
                raise ValueError("router.num_groups goes with neither null_experts nor expert_groups")
        if router.selection == "k_top_1" and any(experts % k for k in top_ks):
            raise ValueError(f'router.selection = "k_top_1" needs top_k to divide the {experts} experts')
        if router.selection != "top_k" and (self.null_experts or self.balance.bias_rule != "none"):
            raise ValueError(
                f"null_experts and balance.bias_rule change a selection of the best top_k; router.selection = "
                f'"{router.selection}" has none'
            )
        if router.selection == "base" and max(top_ks) > 1:
            raise ValueError('router.selection = "base" gives each token one expert; set top_k = 1')
        ruled = router.selection != "top_k" or router.num_groups > 1 or self.balance.bias_rule != "none"
        if router.kind == "hash" and (ruled or self.null_experts):
            raise ValueError(
                'router.kind = "hash" is a selection by itself; leave out router.selection and num_groups, '
                "null_experts and balance.bias_rule"
            )
        if router.selection == "k_top_1" and self.expert_groups:
            raise ValueError('router.selection = "k_top_1" has groups of its own; leave out expert_groups')
        if router.selection != "dense" and (router.eval_top_k or router.eval_threshold is not None):
            raise ValueError('router.eval_top_k and eval_threshold are for router.selection = "dense"')
        # With one expert's weight divided by itself, or one logit's softmax, nothing would ever train the router.
        constant = router.renormalize or (router.top_k_before_score and router.score == "softmax")
        weighed = router.selection in ("top_k", "k_top_1", "sam") and router.kind != "hash"
        if constant and weighed and 1 in top_ks and self.num_choices > 1:
            raise ValueError(
                "top_k = 1 with router.renormalize or router.top_k_before_score makes every weight 1, and the "
                "language-model loss trains no router; set both to false"
            )

    def _check_ignored(self) -> None:
        """Options that the selection would never look at. Those of other kinds of router pass, so that kinds can be
        swapped."""
        router, kind = self.router, self.router.selection
        ignored = {
            "router.num_groups": router.num_groups > 1 and kind not in ("top_k", "sam"),
            "router.top_groups": router.top_groups > 1 and kind == "sam",
            "router.top_k_before_score": router.top_k_before_score and kind != "top_k",
            "router.scaling_factor": router.scaling_factor != 1 and kind == "base",
            "router.eval_capacity_factor": router.eval_capacity_factor is not None and kind == "expert_choice",
            "router.min_expert_capacity": router.min_expert_capacity > 1 and kind == "expert_choice",
            "balance.alignment_coef": self.balance.alignment_coef > 0 and kind != "sam",
        }
        for name, is_set in ignored.items():
            if is_set:
                raise ValueError(f'{name} does nothing with router.selection = "{kind}"; leave it out')
        if kind == "dense_to_sparse" and router.temperature < router.min_temperature:
            raise ValueError(
                f"router.temperature = {router.temperature} lies below router.min_temperature = "
                f"{router.min_temperature}, to which it is to fall"
            )
