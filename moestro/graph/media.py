"""Encoders of images and sounds on one rank: a transformer over patches, and the connector to the language model."""

from moestro.config.media import EncoderConfig
from moestro.config.model import ModelConfig
from moestro.graph.tape import Tape

PART = "encoders"


def encoders(tape: Tape, model: ModelConfig) -> None:
    """All encoders of a model, for the items of a micro-batch (`Workload.media_items` says how many a sequence has)."""
    given = tape.workload.media_items or (0.0,) * len(model.encoders)
    for encoder, each in zip(model.encoders, given, strict=True):
        items = max(1, round(each * tape.plan.micro_batch_size)) if each else 0
        _encoder(tape, encoder, model.hidden_size, items)


def _encoder(tape: Tape, encoder: EncoderConfig, hidden: int, items: int) -> None:
    size, patches = encoder.hidden_size, encoder.max_patches
    tokens = items * patches
    _product(tape, "patches", tokens, size, encoder.input_size, detached=True)
    tape.own(encoder.resolved_position_patches, size, muon=False)
    for _ in range(encoder.num_layers):
        _norm(tape, tokens, size)
        _attention(tape, items, patches, patches, encoder)
        _norm(tape, tokens, size)
        _product(tape, "up", tokens, encoder.resolved_intermediate_size, size)
        if tokens:
            tape.activation(PART, tokens, encoder.resolved_intermediate_size, 2)
        _product(tape, "down", tokens, size, encoder.resolved_intermediate_size, keep=False)
        if tokens:
            tape.memory(PART, "residuals", 2 * tokens * size, 3, 0)
    _norm(tape, tokens, size)
    _connector(tape, encoder, hidden, items)


def _connector(tape: Tape, encoder: EncoderConfig, hidden: int, items: int) -> None:
    """Patches to the language model's vectors; the four kinds are those of the model."""
    size, patches = encoder.hidden_size, items * encoder.max_patches
    vectors = items * encoder.num_tokens
    if encoder.connector == "mlp":
        _product(tape, "connector in", patches, hidden, size)
        if patches:
            tape.activation(PART, patches, hidden, 2)
        _product(tape, "connector out", patches, hidden, hidden, keep=False)
        return
    if encoder.connector == "attention_pool":
        tape.own(encoder.num_tokens, size, muon=False)
        _attention(tape, items, encoder.num_tokens, encoder.max_patches, encoder)
        _product(tape, "connector", vectors, hidden, size)
        return
    if encoder.connector == "c_abstractor":
        for rows in (patches, vectors):
            _residual_convolutions(tape, encoder, rows)
    if patches:
        tape.memory(PART, "means of patches", patches * size, 2, 2)
    _product(tape, "connector", vectors, hidden, size)


def _residual_convolutions(tape: Tape, encoder: EncoderConfig, rows: int) -> None:
    """x + conv(silu(conv(norm(x)))), each a product over the taps."""
    size, taps = encoder.hidden_size, 9 if encoder.shape == "grid" else 3
    _norm(tape, rows, size)
    for name in ("convolution in", "convolution out"):
        if rows:
            tape.gemm(PART, name, rows, size, size * taps)
            tape.save(rows * size)
        tape.own(size, size * taps, muon=False)
    if rows:
        tape.memory(PART, "activation", rows * size, 2, 3)
        tape.save(rows * size)


def _attention(tape: Tape, items: int, queries: int, keys: int, encoder: EncoderConfig) -> None:
    """Every query of an item sees all its patches."""
    size, heads = encoder.hidden_size, encoder.num_heads
    _product(tape, "q", items * queries, size, size)
    _product(tape, "k and v", items * keys, 2 * size, size, keep=queries != keys, own=False)
    tape.own(size, size, times=2)
    if items:
        dims = (items, queries, keys, heads, heads, size // heads, size // heads)
        tape.attention(dims, "attention", seen=keys, part=PART)
        tape.save(items * (2 * queries + 2 * keys) * size)
        tape.save(items * queries * heads, width=4)
    _product(tape, "out", items * queries, size, size, keep=False)


def _norm(tape: Tape, rows: int, size: int) -> None:
    if rows:
        tape.norm(PART, "norm", rows, size)
    tape.own_vectors(size)


def _product(
    tape: Tape, name: str, rows: int, n: int, k: int, *, detached: bool = False, keep: bool = True, own: bool = True
) -> None:
    """keep: its input is not kept by anyone else."""
    if rows:
        tape.gemm(PART, name, rows, n, k, detached=detached)
        if keep:
            tape.save(rows * k)
    if own:
        tape.own(n, k)
