"""Parameters, FLOPs and cache of an architecture, counted from its shape alone; the built model has exactly these."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from moestro.config.media import EncoderConfig
from moestro.config.model import ModelConfig
from moestro.config.moe import GATED, Activation, MoEConfig
from moestro.config.root import Config
from moestro.errors import MoestroError

BYTE_VOCAB_SIZE = 257  # bytes and the end of text


def feed_forward_params(hidden_size: int, width: int, matrices: int = 3) -> int:
    """Weights of one feed-forward or expert: 3 matrices when gated (SwiGLU), 2 when not."""
    return matrices * hidden_size * width


def attention_params(hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """Weights of the query, key, value and output projections."""
    return hidden_size * head_dim * (2 * num_heads + 2 * num_kv_heads)


def moe_params(hidden_size: int, width: int, num_experts: int, matrices: int = 3) -> int:
    """Weights of num_experts experts and of a linear router."""
    return num_experts * (feed_forward_params(hidden_size, width, matrices) + hidden_size)


@dataclass(frozen=True)
class Part:
    """All parameters of one kind, over all layers. The last three are of one token."""

    name: str
    total: int
    active: int  # that it uses when text is generated: of top_k experts, also where some choices are null
    matmul: int  # of these, in matrices that it is multiplied with
    train_products: float  # multiply-adds of its forward pass while training; a mean where tokens differ
    attention_flops: float = 0.0  # its forward score and value products while training, causal half only

    @property
    def train_flops_per_token(self) -> float:
        return 3 * (2 * self.train_products + self.attention_flops)


@dataclass(frozen=True)
class Counts:
    """What one model holds and does. A multiply-add is two FLOPs; backward is twice forward.

    Active parameters leave out idle experts, multi-token prediction and encoders. Papers differ in whether they count
    the embedding: `active_params` counts it, and a head that is not tied to it.
    """

    parts: tuple[Part, ...]

    def part(self, name: str) -> Part:
        """One of `parts`, empty where the model has none of that name."""
        return next((part for part in self.parts if part.name == name), Part(name, 0, 0, 0, 0.0))

    @property
    def total_params(self) -> int:
        return sum(part.total for part in self.parts)

    @property
    def active_params(self) -> int:
        return sum(part.active for part in self.parts)

    @property
    def matmul_params(self) -> int:
        """Multiplied with a token: active matrices without the embedding's look-up, with the head."""
        return sum(part.matmul for part in self.parts)

    @property
    def embedding_params(self) -> int:
        """The table of token embeddings; when tied it is the head too."""
        return self.part("embedding").total

    @property
    def non_embedding_params(self) -> int:
        """Neither the table nor the head."""
        return self.total_params - self.embedding_params - self.part("head").total

    @property
    def active_non_embedding_params(self) -> int:
        return self.active_params - self.embedding_params - self.part("head").total

    @property
    def attention_flops_per_token(self) -> float:
        return sum(part.attention_flops for part in self.parts)

    @property
    def train_flops_per_token(self) -> float:
        """Model FLOPs of one trained token, recomputation not counted (PaLM's MFU, arXiv 2204.02311, appendix B).

        Multi-token prediction and every expert of a dense router are in it, choices that are dropped or null are
        not taken off, and encoders, whose work is by the image and not by the token, are left out.
        """
        return sum(part.train_flops_per_token for part in self.parts)


def resolved_model(config: Config) -> ModelConfig:
    """The model with the size of its vocabulary, as it will be when the tokenizer has been made.

    Raises:
        MoestroError: neither [model] nor the tokenizer's settings say how large the vocabulary is.
    """
    model, tokenizer = config.model, config.data.tokenizer
    if model.vocab_size is not None:
        return model
    if tokenizer.kind == "file":
        raise MoestroError("the vocabulary's size is in the tokenizer's file; set model.vocab_size to count parameters")
    size = BYTE_VOCAB_SIZE if tokenizer.kind == "byte" else tokenizer.vocab_size
    return model.model_copy(update={"vocab_size": size})


def count(model: ModelConfig, seq_len: int) -> Counts:
    """Count `model` (vocab_size resolved) for sequences of `seq_len` tokens."""
    assert model.vocab_size is not None
    hidden = model.hidden_size
    embedding = model.vocab_size * hidden
    parts = [
        Part("embedding", embedding, embedding, *((embedding,) * 2 if model.tie_embeddings else (0, 0))),
        *([] if model.tie_embeddings else [_part("head", embedding)]),
        _part("norms", 0, hidden),
    ]
    if model.residual_scaling == "released":
        parts.append(_part("residual scaling", 0, 2 * hidden))
    for layer in range(model.num_layers):
        parts += _layer(model, layer, seq_len)
    for layer in range(model.num_layers, model.num_blocks):
        parts.append(_predict_ahead(model, layer, seq_len, embedding))
    encoders = sum(encoder_params(encoder, hidden) for encoder in model.encoders)
    parts.append(Part("encoders", encoders, 0, 0, 0.0))
    return Counts(_merge(parts))


def _part(name: str, matrices: int, vectors: int = 0, copies: int = 1, used: int | None = None) -> Part:
    """`copies` of some matrices and vectors, of which a token meets `used` (all, if not given)."""
    used = copies if used is None else used
    return Part(name, copies * (matrices + vectors), used * (matrices + vectors), used * matrices, used * matrices)


def _merge(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Parts of one name added up, in the order of ORDER; empty ones left out."""
    sums = {}
    for name in ORDER:
        same = [part for part in parts if part.name == name]
        sums[name] = Part(
            name,
            sum(p.total for p in same),
            sum(p.active for p in same),
            sum(p.matmul for p in same),
            sum(p.train_products for p in same),
            sum(p.attention_flops for p in same),
        )
    return tuple(part for part in sums.values() if part.total)


ORDER = (
    "embedding",
    "attention",
    "router",
    "auxiliary router",
    "experts",
    "shared experts",
    "latent projections",
    "dense feed-forward",
    "norms",
    "residual scaling",
    "depth routers",
    "head",
    "multi-token prediction",
    "encoders",
)


def _layer(model: ModelConfig, layer: int, seq_len: int) -> list[Part]:
    """A block; with mixture of depths, the mean over a sequence's tokens."""
    depth, hidden = model.depth, model.hidden_size
    if depth is None or layer % depth.every_n_layers:
        return _block(model, layer, seq_len)
    admitted = ceil(round(depth.capacity * seq_len, 9))
    share = admitted / seq_len
    inside = [
        Part(p.name, p.total, p.active, p.matmul, p.train_products * share, p.attention_flops * share)
        for p in _block(model, layer, admitted)
    ]
    return [*inside, _part("depth routers", hidden + max(1, hidden // 2) * (hidden + 1))]


def _block(model: ModelConfig, layer: int, seq_len: int) -> list[Part]:
    hidden = model.hidden_size
    parts = [_attention(model, layer, seq_len), _part("norms", 0, 2 * hidden)]
    if model.residual_scaling != "none":
        parts.append(_part("residual scaling", 0, 8 * hidden))
    if model.moe_blocks[layer]:
        return [*parts, *_moe(model, layer)]
    assert model.intermediate_size is not None
    dense = feed_forward_params(hidden, model.intermediate_size, matrices_of(model.activation))
    return [*parts, _part("dense feed-forward", dense)]


def matrices_of(activation: Activation) -> int:
    return 3 if activation in GATED else 2


def _predict_ahead(model: ModelConfig, layer: int, seq_len: int, head: int) -> Part:
    """A block of multi-token prediction, with the projection and norms before it and its use of the head."""
    hidden = model.hidden_size
    parts = [*_block(model, layer, seq_len), _part("", 2 * hidden * hidden, 3 * hidden)]
    return Part(
        "multi-token prediction",
        sum(part.total for part in parts),
        0,
        0,
        sum(part.train_products for part in parts) + head,
        sum(part.attention_flops for part in parts),
    )


# Attention


def _attention(model: ModelConfig, layer: int, seq_len: int) -> Part:
    if model.mla is not None:
        matrices, vectors = _latent_attention(model)
        width = model.mla.qk_head_dim + model.mla.v_head_dim
    else:
        matrices, vectors = _convolutional_attention(model) if model.cca is not None else _grouped_attention(model)
        width = 2 * model.resolved_head_dim
    part = _part("attention", matrices, vectors)
    flops = 2.0 * model.num_heads * width * _keys_seen(model, layer, seq_len)
    return Part(part.name, part.total, part.active, part.matmul, part.train_products, flops)


def _keys_seen(model: ModelConfig, layer: int, seq_len: int) -> float:
    """Positions that a token of one document of seq_len tokens looks at, on average."""
    window = model.sliding_window if model.layer_type(layer) == "sliding" else None
    window = seq_len if window is None else min(window, seq_len)
    return (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len


def _grouped_attention(model: ModelConfig) -> tuple[int, int]:
    """(Numbers in matrices, numbers in vectors.)"""
    hidden, head_dim = model.hidden_size, model.resolved_head_dim
    heads, kv_heads = model.num_heads, model.resolved_num_kv_heads
    matrices = attention_params(hidden, heads, kv_heads, head_dim)
    if model.attention_experts is not None:
        matrices += model.attention_experts.num_experts * hidden
    vectors = heads if model.attention_sinks else 0
    if model.attention_bias != "none":
        vectors += (heads + 2 * kv_heads) * head_dim + (hidden if model.attention_bias == "all" else 0)
    vectors += {"none": 0, "head": 2 * head_dim, "projection": (heads + kv_heads) * head_dim}[model.qk_norm]
    return matrices, vectors


def _latent_attention(model: ModelConfig) -> tuple[int, int]:
    mla, hidden, heads = model.mla, model.hidden_size, model.num_heads
    assert mla is not None
    query = heads * mla.qk_head_dim
    matrices = hidden * query if mla.q_rank is None else mla.q_rank * (hidden + query)
    matrices += hidden * (mla.kv_rank + mla.rope_head_dim)
    matrices += mla.kv_rank * heads * (mla.nope_head_dim + mla.v_head_dim) + heads * mla.v_head_dim * hidden
    return matrices, mla.kv_rank + (mla.q_rank or 0)


def _convolutional_attention(model: ModelConfig) -> tuple[int, int]:
    cca, head_dim, kv_heads = model.cca, model.resolved_head_dim, model.resolved_num_kv_heads
    assert cca is not None
    channels = (model.num_heads + kv_heads) * head_dim
    matrices = attention_params(model.hidden_size, model.num_heads, kv_heads, head_dim)
    matrices += channels * cca.depthwise_taps + channels * head_dim * cca.grouped_taps
    return matrices, 2 * channels + kv_heads


# Mixture of experts


def _moe(model: ModelConfig, layer: int) -> list[Part]:
    moe, hidden = model.moe, model.hidden_size
    assert moe is not None
    width, matrices = moe.resolved_expert_hidden_size, matrices_of(moe.activation)
    outer = hidden if moe.latent_size is None else moe.latent_size
    biases = (matrices - 1) * width + outer if moe.expert_bias else 0
    top_k = model.top_k_of_layer(layer)
    one = feed_forward_params(outer, width, matrices)
    experts = _part("experts", one, biases, moe.resolved_num_experts, top_k)
    trained = one * _experts_trained(moe, top_k)
    parts = [
        _router(model, layer),
        Part(experts.name, experts.total, experts.active, experts.matmul, trained),
        _part("shared experts", feed_forward_params(hidden, moe.num_shared_experts * moe.expert_hidden_size, matrices)),
    ]
    if moe.latent_size is not None:
        parts.append(_part("latent projections", 2 * hidden * moe.latent_size))
    if moe.router.selection == "expert_choice":
        parts.append(_part("auxiliary router", hidden // 2 * (hidden + moe.resolved_num_experts)))
    return parts


def _experts_trained(moe: MoEConfig, top_k: int) -> float:
    """Experts that work on a token while training, on average. For dense_to_sparse, where it ends up."""
    if moe.router.selection == "dense":
        return moe.resolved_num_experts
    if moe.router.selection == "expert_choice":
        return top_k * (moe.router.capacity_factor or 1.0)
    return top_k


def _router(model: ModelConfig, layer: int) -> Part:
    moe, hidden = model.moe, model.hidden_size
    assert moe is not None
    router, choices, size = moe.router, moe.num_choices, moe.router.hidden_size
    linear, attention = hidden * choices, hidden * size + size * choices
    if router.kind == "zaya":
        carries = router.carry_state and layer != model.moe_layers.index(True)
        matrices = hidden * size + 2 * size * size + size * choices
        return _part("router", matrices, size * (5 if carries else 4))
    if router.kind == "linear":
        return _part("router", linear, choices if router.bias else 0)
    if router.kind == "hybrid":
        return _part("router", linear + attention, 1)
    sizes = {"mlp": attention, "attention": attention, "mlp_hadamard": attention + hidden * size, "hash": 0}
    return _part("router", sizes[router.kind])


# Encoders


def encoder_params(encoder: EncoderConfig, hidden_size: int) -> int:
    """A transformer over patches and the connector to the language model's hidden_size."""
    size = encoder.hidden_size
    layer = 4 * size * size + feed_forward_params(size, encoder.resolved_intermediate_size, matrices=2) + 2 * size
    entry = (encoder.input_size + encoder.resolved_position_patches) * size
    return entry + encoder.num_layers * layer + size + _connector_params(encoder, hidden_size)


def _connector_params(encoder: EncoderConfig, hidden_size: int) -> int:
    size = encoder.hidden_size
    if encoder.connector == "mlp":
        return hidden_size * (size + hidden_size)
    if encoder.connector == "attention_pool":
        return encoder.num_tokens * size + 4 * size * size + size * hidden_size
    if encoder.connector == "average_pool":
        return size * hidden_size
    block = size + 2 * size * size * (9 if encoder.shape == "grid" else 3)
    return 2 * block + size * hidden_size


# Cache


@dataclass(frozen=True)
class CacheBytes:
    """What decoding remembers of one sequence."""

    per_token: int  # in layers that see the whole sequence
    window: int  # at most, in sliding layers
    state: int  # convolutions and the value of the token before, in fp32


def cache_bytes(model: ModelConfig, bytes_per_number: int = 2) -> CacheBytes:
    """Keys and values (MLA: the latent and the rotary key) of all layers, of `bytes_per_number` each."""
    if model.mla is not None:
        numbers = model.mla.kv_rank + model.mla.rope_head_dim
    else:
        numbers = 2 * model.resolved_num_kv_heads * model.resolved_head_dim
    sliding = sum(model.layer_type(layer) == "sliding" for layer in range(model.num_layers))
    state = 0
    if model.cca is not None:
        kv_width = model.resolved_num_kv_heads * model.resolved_head_dim
        query_key = model.num_heads * model.resolved_head_dim + kv_width
        state = 4 * model.num_layers * (model.cca.halo * query_key + kv_width // 2)
    return CacheBytes(
        per_token=(model.num_layers - sliding) * numbers * bytes_per_number,
        window=sliding * numbers * bytes_per_number * (model.sliding_window or 0),
        state=state,
    )
