"""Counts a step's graph from shapes alone: no tensor is made, no module is built."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from moestro.config.counts import count as count_model
from moestro.config.model import ModelConfig
from moestro.config.plan import Plan, Workload, misfits
from moestro.errors import MoestroError
from moestro.graph.attention import attention
from moestro.graph.feedforward import dense, mixture
from moestro.graph.step import rank_step
from moestro.graph.tape import Tape
from moestro.graph.words import Collective, Dimension, Node, Parameters, Saved, Stage, StepGraph

V_SHAPED = ("zbv", "dualpipev")


def count_step(workload: Workload, plan: Plan) -> StepGraph:
    """The graph of one optimizer step.

    Raises:
        MoestroError: the plan does not fit the workload; the message says why.
    """
    wrong = misfits(workload, plan)
    if wrong:
        raise MoestroError("; ".join(wrong[:2]))
    model = workload.model
    layers = split_layers(model.num_layers, plan)
    pieces = _Pieces(workload, plan)
    stages = [_stage(pieces, index, tuple(part)) for index, part in enumerate(layers)]
    ranks = []
    for rank in range(plan.pp):
        own = [stage.parameters for stage in stages if stage.rank == rank]
        ranks.append(rank_step(workload, plan, rank, _sum(own)))
    per_token = count_model(model, workload.seq_len).train_flops_per_token
    return StepGraph(
        world_size=plan.world_size,
        micro_batches=plan.micro_batches(workload),
        tokens=workload.tokens,
        model_flops=per_token * workload.tokens,
        stages=tuple(stages),
        ranks=tuple(ranks),
        notes=_notes(model),
    )


def split_layers(num_layers: int, plan: Plan) -> list[range]:
    """The layers of each of the pp · vpp stages, the first ones larger where they do not come out even."""
    stages = plan.pp * plan.vpp
    sizes = plan.layers_per_stage or tuple(num_layers // stages + (i < num_layers % stages) for i in range(stages))
    starts = [sum(sizes[:i]) for i in range(stages)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def rank_of(stage: int, plan: Plan) -> int:
    """The pipeline rank of a stage: every pp-th, or for V-shaped schedules down and up again."""
    if plan.schedule in V_SHAPED:
        return stage if stage < plan.pp else 2 * plan.pp - 1 - stage
    return stage % plan.pp


@dataclass(frozen=True)
class _Piece:
    """What one layer, the embedding or the head adds to its stage."""

    forward: tuple[Node, ...]
    backward: tuple[Node, ...]
    weight: tuple[Node, ...]
    recompute: tuple[Node, ...]
    saved: float
    kept: float  # of saved, when it is computed again in backward
    parameters: Parameters


class _Pieces:
    """The pieces of a model. Layers of one kind are counted once."""

    def __init__(self, workload: Workload, plan: Plan) -> None:
        self.workload, self.plan = workload, plan
        self.tokens = plan.micro_batch_size * workload.seq_len // plan.cp
        self.local = self.tokens // plan.tp if plan.sequence_parallel else self.tokens
        self._layers: dict[tuple[object, ...], _Piece] = {}

    def embedding(self) -> _Piece:
        tape, model = self._tape(), self.workload.model
        tape.memory("embedding", "look-up", self.local * model.hidden_size, 2, 2)
        tape.own(_vocab(model) * model.hidden_size // _vocab_ranks(self.plan))
        return self._piece(tape)

    def layer(self, layer: int) -> _Piece:
        model = self.workload.model
        deep = model.depth is not None and layer % model.depth.every_n_layers == 0
        kind = (model.moe_blocks[layer], model.layer_type(layer), deep, _top_k(model, layer), _first_moe(model, layer))
        if kind not in self._layers:
            tape = self._tape()
            self._block(tape, layer, deep)
            self._layers[kind] = self._piece(tape)
        return self._layers[kind]

    def head(self) -> _Piece:
        """The last norm, the head and the loss."""
        tape, model = self._tape(), self.workload.model
        tape.norm("norms", "last norm", self.local * model.hidden_size)
        tape.own(0, model.hidden_size * (3 if model.residual_scaling == "released" else 1))
        if not model.tie_embeddings or self.plan.pp > 1:
            tape.own(_vocab(model) * model.hidden_size // _vocab_ranks(self.plan))
        self._logits(tape)
        return self._piece(tape)

    def ahead(self, layer: int) -> _Piece:
        """A block of multi-token prediction: two norms, a projection, a layer, a norm, the head once more."""
        tape, model = self._tape(), self.workload.model
        hidden = model.hidden_size
        for name in ("norm of the state", "norm of the embedding", "last norm"):
            tape.norm("multi-token prediction", name, self.local * hidden)
        tape.gemm("multi-token prediction", "projection", self.local, hidden, 2 * hidden)
        tape.save(self.local * 2 * hidden)
        tape.own(2 * hidden * hidden, 3 * hidden)
        self._block(tape, layer, deep=False)
        self._logits(tape)
        return self._piece(tape)

    def _tape(self) -> Tape:
        return Tape(self.workload, self.plan)

    def _block(self, tape: Tape, layer: int, deep: bool) -> None:
        workload, plan, model = self.workload, self.plan, self.workload.model
        length, hidden = workload.seq_len, model.hidden_size
        if deep:
            assert model.depth is not None
            length = ceil(round(model.depth.capacity * length, 9))
            tape.memory("depth routers", "choice, gather, scatter", self.local * hidden, 4, 4, launches=6)
            tape.own(hidden + max(1, hidden // 2) * (hidden + 1))
        tokens = plan.micro_batch_size * (length // plan.cp)
        local = tokens // plan.tp if plan.sequence_parallel else tokens
        if model.residual_scaling != "none":
            tape.memory("norms", "residual scaling", 2 * local * hidden, 3, 4)
            tape.own(0, 8 * hidden)
        tape.norm("norms", "norm before attention", local * hidden)
        attention(tape, model, layer, plan.micro_batch_size, length)
        tape.memory("norms", "residual of attention", local * hidden, 3, 0)
        tape.norm("norms", "norm before feed-forward", local * hidden)
        tape.own(0, 2 * hidden)
        if model.moe_blocks[layer]:
            mixture(tape, model, layer, tokens)
        else:
            dense(tape, model, tokens)
        tape.memory("norms", "residual of feed-forward", local * hidden, 3, 0)

    def _logits(self, tape: Tape) -> None:
        model, plan = self.workload.model, self.plan
        vocab, dtype = _vocab(model), "fp32" if model.head_fp32 else None
        tape.save(self.local * model.hidden_size)
        if self.workload.fused_loss:  # each tensor rank takes its share of the tokens and all of the vocabulary
            tape.gemm("head", "logits", self.tokens // plan.tp, vocab, model.hidden_size, dtype=dtype)
            tape.memory("loss", "cross entropy", self.tokens // plan.tp * vocab, 3, 0, launches=4)
            return
        tape.enter_tensor("head", self.tokens, model.hidden_size)
        tape.gemm("head", "logits", self.tokens, vocab // plan.tp, model.hidden_size, dtype=dtype)
        tape.memory("loss", "cross entropy", self.tokens * vocab // plan.tp, 4, 2, launches=6, width=4)
        tape.save(self.tokens * vocab // plan.tp, width=tape.width + 4)

    def _piece(self, tape: Tape) -> _Piece:
        plan, hidden = self.plan, self.workload.model.hidden_size
        parameters = Parameters(tape.dense, tape.expert, tape.matrices, self._trained(tape))
        forward, backward = tuple(tape.forward), tape.backward()
        again: tuple[Node, ...] = ()
        kept = tape.saved
        if plan.recompute == "block":
            again, kept = forward, float(self.local * hidden * tape.width)
        elif plan.recompute == "selective":
            again, kept = tuple(tape.cheap_nodes), tape.saved - tape.cheap_saved
        if plan.zero == 3 and plan.shard_ranks > 1:
            gather, scatter = _sharded(self.workload, plan, parameters, tape)
            forward, backward = (*gather, *forward), (*gather, *backward, *scatter)
        return _Piece(forward, backward, tuple(tape.weight), again, tape.saved, kept, parameters)

    def _trained(self, tape: Tape) -> int:
        return tape.dense + tape.expert if self.workload.adapter_rank is None else tape.adapters


def _stage(pieces: _Pieces, index: int, layers: tuple[int, ...]) -> Stage:
    plan, model = pieces.plan, pieces.workload.model
    last = index == plan.pp * plan.vpp - 1
    before = [pieces.embedding()] if index == 0 else []
    middle = [pieces.layer(layer) for layer in layers]
    after = [pieces.head()] if last else []
    if last:
        after += [pieces.ahead(layer) for layer in range(model.num_layers, model.num_blocks)]
    again = len(middle) if plan.recompute_layers is None else min(plan.recompute_layers, len(middle))
    if plan.recompute == "none":
        again = 0
    whole = [*before, *middle, *after]
    saved = sum(piece.saved for piece in whole)
    kept = saved - sum(piece.saved - piece.kept for piece in middle[:again])
    return Stage(
        index=index,
        rank=rank_of(index, plan),
        layers=layers,
        parameters=_sum([piece.parameters for piece in whole]),
        saved=Saved(kept, saved, max((piece.saved - piece.kept for piece in middle[:again]), default=0.0)),
        forward=tuple(node for piece in whole for node in piece.forward),
        backward=tuple(node for piece in reversed(whole) for node in piece.backward),
        weight=tuple(node for piece in reversed(whole) for node in piece.weight),
        recompute=tuple(node for piece in middle[:again] for node in piece.recompute),
        send_bytes=0.0 if last else float(pieces.local * model.hidden_size * Tape(pieces.workload, plan).width),
    )


def _sharded(
    workload: Workload, plan: Plan, parameters: Parameters, tape: Tape
) -> tuple[list[Collective], list[Collective]]:
    """ZeRO-3: a piece's weights are gathered before each pass, and its gradients scattered after the backward one."""
    gather, scatter = [], []
    experts = min(plan.shard_ranks, plan.expert_data_ranks)
    reduced = 4 if plan.gradient_dtype == "fp32" else 2
    groups: tuple[tuple[str, Dimension, int, int], ...] = (
        ("weights", "dp", parameters.dense, plan.shard_ranks),
        ("expert weights", "edp", parameters.expert, experts),
    )
    for name, dimension, numbers, ranks in groups:
        if not numbers or ranks == 1:
            continue
        size, dtype, early = float(numbers * tape.width), tape.activation_dtype, plan.overlap_parameters
        gather.append(Collective("all_gather", "sharding", name, dimension, ranks, size, dtype, overlap=early))
        if parameters.trained:
            size, dtype, late = float(numbers * reduced), plan.gradient_dtype, plan.overlap_gradients
            name = f"gradients of {name}"
            scatter.append(Collective("reduce_scatter", "sharding", name, dimension, ranks, size, dtype, overlap=late))
    return gather, scatter


def _sum(parameters: Sequence[Parameters]) -> Parameters:
    return Parameters(
        sum(p.dense for p in parameters),
        sum(p.expert for p in parameters),
        sum(p.matrices for p in parameters),
        sum(p.trained for p in parameters),
    )


def _vocab(model: ModelConfig) -> int:
    assert model.vocab_size is not None, "a workload's model has a vocabulary"
    return model.vocab_size


def _vocab_ranks(plan: Plan) -> int:
    return plan.tp


def _top_k(model: ModelConfig, layer: int) -> int:
    return model.top_k_of_layer(layer) if model.moe is not None and model.moe_blocks[layer] else 0


def _first_moe(model: ModelConfig, layer: int) -> bool:
    return model.moe is not None and True in model.moe_layers and model.moe_layers.index(True) == layer


def _notes(model: ModelConfig) -> tuple[str, ...]:
    notes = []
    if model.encoders:
        notes.append("encoders of images and sounds are not counted")
    if model.attention_experts is not None:
        notes.append("attention experts are counted as plain heads")
    return tuple(notes)
