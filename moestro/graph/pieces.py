"""The pieces of a step: layers, embedding and head on one rank, counted once for all plans that agree on them."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from math import ceil
from typing import NamedTuple

from moestro.config.counts import count as count_model
from moestro.config.model import LayerType, ModelConfig
from moestro.config.plan import Plan, Workload
from moestro.graph.attention import attention
from moestro.graph.feedforward import dense, mixture
from moestro.graph.media import encoders
from moestro.graph.tape import Tape, activation_bytes, activation_dtype, expert_shards, stream_bytes, weight_bytes
from moestro.graph.words import Collective, Dimension, Matrices, Node, Parameters, Piece, RankStep, Run, Saved

# What no piece depends on; everything else is part of a piece's key.
OUTSIDE_WORKLOAD = frozenset(("global_batch_size", "optimizer", "routing", "software"))
OUTSIDE_PLAN = frozenset(
    ("pp", "dp", "zero", "shard", "schedule", "vpp", "layers_per_stage", "recompute_layers", "bucket_bytes", "offload")
) | {"recompute_per_stage"}
LOSS_ELEMENTS = 2**26  # of the logits that our loss makes at a time
MOST_KEYS = 1024  # kept; a search over plans needs a few dozen


class Kind(NamedTuple):
    """What tells the layers of a model apart."""

    layer: int  # the first of its kind
    mixture: bool
    type: LayerType
    deep: bool  # a mixture of depths
    top_k: int
    first: bool  # the first mixture of experts


_KNOWN: dict[tuple[object, ...], "Pieces"] = {}


def pieces_of(workload: Workload, plan: Plan) -> "Pieces":
    """The pieces of this workload under this plan, made now or before."""
    sharded = None
    if sharded_passes(workload, plan):
        sharded = (plan.zero, plan.dp, plan.shard_ranks, plan.expert_data_ranks)
    key = (
        *(value for name, value in workload.__dict__.items() if name not in OUTSIDE_WORKLOAD),
        *(value for name, value in plan.__dict__.items() if name not in OUTSIDE_PLAN),
        sharded,
    )
    found = _KNOWN.get(key)
    if found is None:
        if len(_KNOWN) >= MOST_KEYS:
            _KNOWN.clear()
        found = _KNOWN[key] = Pieces(workload, plan)
    return found


class Pieces:
    """Made as they are asked for."""

    def __init__(self, workload: Workload, plan: Plan) -> None:
        self.workload, self.plan, self.model = workload, plan, workload.model
        self.tokens = plan.micro_batch_size * workload.seq_len // plan.cp
        self.local = self.tokens // plan.tp if plan.sequence_parallel else self.tokens
        self.kinds = _kinds(self.model)
        # Cosines and sines of the positions, fp32, once for all layers of a type.
        types = {kind.type for kind in self.kinds}
        self.tables = 4.0 * self.tokens * sum(self.model.rotated_dims(self.model.rope_of(name)) for name in types)
        self.steps: dict[tuple[object, ...], RankStep] = {}  # what ranks with these pieces do once a step
        self._pieces: dict[object, Piece] = {}
        self._written: dict[object, tuple[Piece, int]] = {}  # before weights are split, and how many are not a layer's
        # Pieces that gather their weights do between it what those that hold them do.
        self._whole = self
        if sharded_passes(workload, plan):
            self._whole = pieces_of(workload, plan.model_copy(update={"zero": 0}))
        # What is recomputed changes nothing in the passes but that it comes before them.
        self._kept = self
        if plan.recompute != "none" and self._whole is self:
            self._kept = pieces_of(workload, plan.model_copy(update={"zero": 0, "recompute": "none"}))
        self._tapes: dict[object, Tape] = {}
        self._stages: dict[tuple[range, bool, bool, bool, int], tuple[Run, ...]] = {}
        self._sums: dict[tuple[tuple[Run, ...], float], tuple[Parameters, Saved]] = {}

    @cached_property
    def flops_per_token(self) -> float:
        return count_model(self.model, self.workload.seq_len).train_flops_per_token

    def stage(
        self, layers: range, first: bool, last: bool, cut: bool, again: int
    ) -> tuple[tuple[Run, ...], Parameters, Saved]:
        """The stage with these layers, of which `again` are recomputed. first, last: it has the embedding, the head.
        cut: there are several pipeline ranks."""
        key = (layers, first, last, cut, again)
        if key not in self._stages:
            self._stages[key] = self._stage(*key)
        runs = self._stages[key]
        besides = self.besides(first, last, cut, again > 0)
        if (runs, besides) not in self._sums:
            self._sums[runs, besides] = _parameters(runs), _saved(runs, besides, self.workload.trainer == "moestro")
        return runs, *self._sums[runs, besides]

    def besides(self, first: bool, last: bool, cut: bool, recomputes: bool) -> float:
        """Bytes that a stage keeps for a micro-batch besides its pieces: tables of positions, and what came from the
        stage before and goes to the next. PyTorch's pipelines, which our trainer uses, hold both until backward; what
        the first layer keeps anyway is not counted twice."""
        if not cut or self.workload.trainer != "moestro":
            return self.tables
        size = float(self.local * stream_bytes(self.workload))
        whole = recomputes or activation_bytes(self.workload) == 4 or self.model.residual_fp32
        return self.tables + size * ((not first and not whole) + (not last))

    def _stage(self, layers: range, first: bool, last: bool, cut: bool, again: int) -> tuple[Run, ...]:
        runs = [Run(self._embedding())] if first else []
        for kind in self.kinds[layers.start : layers.stop]:
            piece = self._piece(kind, partial(self._block, kind=kind))
            if runs and runs[-1].piece is piece:
                runs[-1] = Run(piece, runs[-1].times + 1, runs[-1].recomputed + (again > 0))
            else:
                runs.append(Run(piece, 1, int(again > 0)))
            again -= 1
        if last:
            runs.append(Run(self._head(cut)))
            for kind in self.kinds[self.model.num_layers :]:
                ahead = self._piece(("ahead", kind), partial(self._ahead, kind=kind), 2)
                runs += [Run(ahead, 1, int(again > 0)), Run(self._piece("ahead head", self._ahead_head))]
        return tuple(runs)

    def _piece(self, name: object, write: Callable[[Tape], int], inputs: int = 1) -> Piece:
        """write: returns how many of the parameters are not a layer's. inputs: tensors of the stream's size that
        recomputation starts from."""
        if name not in self._pieces:
            written = self._whole._write(name, write, inputs)
            self._pieces[name] = _sharded(self.workload, self.plan, *written)
        return self._pieces[name]

    def _write(self, name: object, write: Callable[[Tape], int], inputs: int) -> tuple[Piece, int]:
        if name not in self._written:
            if self._kept is self:
                tape = self._tapes[name] = Tape(self.workload, self.plan)
                root = write(tape)
                self._written[name] = _finish(tape), root
            else:
                plain, root = self._kept._write(name, write, inputs)
                self._written[name] = self._recomputed(plain, self._kept._tapes[name], inputs), root
        return self._written[name]

    def _embedding(self) -> Piece:
        """The table and the encoders, which are where the first layer is."""

        def write(tape: Tape) -> int:
            tape.memory("embedding", "look-up", self.local * self.model.hidden_size, 2, 2)
            tape.save(self.local, width=8)
            self._own_vocabulary(tape)
            if not self.workload.fused_loss:  # each tensor rank has looked up the words it holds
                tape.leave_tensor("embedding", self.tokens, self.model.hidden_size)
            if self.model.residual_scaling == "released":
                tape.own_vectors(2 * self.model.hidden_size)
                tape.save(self.local * self.model.hidden_size, width=4 if self.model.residual_fp32 else None)
            encoders(tape, self.model)
            return tape.dense

        return self._piece("embedding", write)

    def _head(self, cut: bool) -> Piece:
        """The last norm, the head and the loss. cut: the first layers, with the embedding, are on another rank."""
        model = self.model
        copies = (not model.tie_embeddings) + (cut and (model.tie_embeddings or model.mtp is not None))

        def write(tape: Tape) -> int:
            tape.norm("norms", "last norm", self.local, model.hidden_size, stream=True)
            tape.own_vectors(model.hidden_size)
            for _ in range(copies):
                self._own_vocabulary(tape)
            self._logits(tape)
            return tape.dense

        return self._piece(("head", copies), write)

    def _ahead(self, tape: Tape, kind: Kind) -> int:
        """A block of multi-token prediction: two norms and a projection before a layer (DeepSeek-V3, 2412.19437)."""
        hidden = self.model.hidden_size
        tape.memory("embedding", "look-up", self.local * hidden, 2, 2)
        tape.save(self.local, width=8)
        for name in ("norm of the state", "norm of the embedding"):
            tape.norm("multi-token prediction", name, self.local, hidden)
        tape.gemm("multi-token prediction", "projection", self.local, hidden, 2 * hidden)
        tape.save(self.local * 2 * hidden)
        tape.own(hidden, 2 * hidden)
        tape.own_vectors(3 * hidden)
        root = tape.dense
        self._block(tape, kind)
        return root

    def _ahead_head(self, tape: Tape) -> int:
        tape.norm("multi-token prediction", "last norm", self.local, self.model.hidden_size, stream=True)
        self._logits(tape)
        return 0

    def _block(self, tape: Tape, kind: Kind) -> int:
        plan, model = self.plan, self.model
        length, hidden = self.workload.seq_len, model.hidden_size
        if kind.deep:
            assert model.depth is not None
            length = ceil(round(model.depth.capacity * length, 9))
            self._choose_tokens(tape)
        tokens = plan.micro_batch_size * (length // plan.cp)
        local = tokens // plan.tp if plan.sequence_parallel else tokens
        if model.residual_scaling != "none":
            tape.memory("norms", "residual scaling", 2 * local * hidden, 3, 4)
            tape.own_vectors(8 * hidden)
            kept = {"input": 2, "output": 2, "released": 4}[model.residual_scaling]
            tape.save(kept * local * hidden, width=4 if model.residual_fp32 else None)
        tape.norm("norms", "norm before attention", local, hidden, stream=True)
        attention(tape, model, kind.layer, plan.micro_batch_size, length)
        tape.memory("norms", "residual of attention", local * hidden, 3, 0)
        tape.norm("norms", "norm before feed-forward", local, hidden, stream=True)
        tape.own_vectors(2 * hidden)
        if kind.mixture:
            mixture(tape, model, kind.layer, tokens)
        else:
            dense(tape, model, tokens)
        tape.memory("norms", "residual of feed-forward", local * hidden, 3, 0)
        return 0

    def _choose_tokens(self, tape: Tape) -> None:
        """Mixture of depths: a router over all tokens, and a causal one that foretells its choice."""
        hidden, width, tokens = self.model.hidden_size, max(1, self.model.hidden_size // 2), self.local
        tape.gemm("depth routers", "router", tokens, 1, hidden, dtype="fp32")
        tape.gemm("depth routers", "causal in", tokens, width, hidden, dtype="fp32", detached=True)
        tape.gemm("depth routers", "causal out", tokens, 1, width, dtype="fp32")
        tape.memory("depth routers", "choice, gather, scatter", tokens * hidden, 4, 4, launches=6)
        tape.own(1, hidden)
        tape.own(width, hidden)
        tape.own(1, width)
        tape.save(tokens * (hidden + 2 * width), width=4)

    def _logits(self, tape: Tape) -> None:
        model, plan = self.model, self.plan
        vocab, hidden, dtype = _vocab(model), model.hidden_size, "fp32" if model.head_fp32 else None
        if self.workload.fused_loss:  # each tensor rank takes its share of the tokens and all of the vocabulary
            rows = self.tokens // plan.tp
            tape.gemm("head", "logits", rows, vocab, hidden, dtype=dtype)
            tape.memory("loss", "cross entropy", rows * vocab, 3, 0, launches=4)
            tape.save(rows * hidden, width=4 if model.head_fp32 else None)  # both gradients are made in forward
            tape.save(vocab * hidden, width=4)
            if tape.ours:
                tape.transient += _of_loss(rows, vocab, hidden, tape.width)
            return
        tape.save(self.local * hidden)
        tape.enter_tensor("head", self.tokens, hidden)
        tape.gemm("head", "logits", self.tokens, vocab // plan.tp, hidden, dtype=dtype)
        tape.memory("loss", "cross entropy", self.tokens * vocab // plan.tp, 4, 2, launches=6, width=4)
        tape.save(self.tokens * vocab // plan.tp, width=tape.width + 4)

    def _own_vocabulary(self, tape: Tape) -> None:
        vocab, hidden = _vocab(self.model), self.model.hidden_size
        if self.workload.fused_loss:
            tape.own(vocab, hidden, muon=False)
        else:
            tape.own(vocab // self.plan.tp, hidden, cut="rows", muon=False)

    def _recomputed(self, plain: Piece, tape: Tape, inputs: int) -> Piece:
        if self.plan.recompute == "block":
            kept = float(inputs * self.local * stream_bytes(self.workload))
            return replace(plain, recompute=_again(tape), kept=kept, base=plain)
        return replace(plain, recompute=tuple(tape.cheap_nodes), kept=tape.saved - tape.cheap_saved, base=plain)


def _finish(tape: Tape) -> Piece:
    passes = tuple(tape.forward), tape.backward(), tuple(tape.weight)
    return Piece(*passes, (), tape.saved, tape.saved, tape.transient, tape.parameters())


def _again(tape: Tape) -> tuple[Node, ...]:
    """What recomputing a layer runs. Ours stops as soon as all is there that backward wants: it does without the last
    product and what follows it, or without the way back from experts, unless the residual's scales want that too."""
    if not tape.ours or tape.workload.model.residual_scaling != "none":
        return tuple(tape.forward)
    shared = any(node.part == "shared experts" for node in tape.forward)
    mixed = any(node.part == "experts" for node in tape.forward)
    last = "shared experts" if shared else "dense"

    def spared(node: Node) -> bool:
        if node.part == "dispatch":
            return not shared and node.name.startswith(("combine", "weighted sum"))
        return node.part == last and node.name in ("down", "tokens out") and (shared or not mixed)

    return tuple(node for node in tape.forward if not spared(node) and node.name != "residual of feed-forward")


@lru_cache(maxsize=64)
def _kinds(model: ModelConfig) -> tuple[Kind, ...]:
    """Of all blocks; those of one kind are equal, with the number of the first."""
    mixtures, deep = model.moe_blocks, model.depth_layers
    first: dict[tuple[object, ...], Kind] = {}
    kinds = []
    for layer, mixed in enumerate(mixtures):
        kind = Kind(
            layer,
            mixed,
            model.layer_type(layer),
            layer < model.num_layers and deep[layer],
            model.top_k_of_layer(layer) if mixed else 0,
            mixed and True not in mixtures[:layer],
        )
        kinds.append(first.setdefault(kind[1:], kind))
    return tuple(kinds)


def sharded_passes(workload: Workload, plan: Plan) -> bool:
    """Whether each micro-batch gathers weights and scatters gradients: ZeRO-3, and our trainer's ZeRO-2 when there is
    no pipeline to hold them back."""
    ours = workload.trainer == "moestro" and plan.zero == 2 and plan.pp == 1
    return (plan.zero == 3 or ours) and plan.shard_ranks > 1


def _sharded(workload: Workload, plan: Plan, piece: Piece, root: int) -> Piece:
    """A piece's weights are gathered before each pass, and its gradients scattered after the backward one.

    root: of the dense parameters, those that our trainer gathers once for both passes, as ZeRO-2 does with all.
    """
    if not sharded_passes(workload, plan):
        return piece
    parameters, ours = piece.parameters, workload.trainer == "moestro"
    before, between, after = list[Node](), list[Node](), list[Node]()
    reduced = 4 if plan.gradient_dtype == "fp32" else 2
    groups: tuple[tuple[str, Dimension, int, int, int, int], ...] = (
        ("weights", "dp", parameters.dense, root, plan.shard_ranks, plan.dp * plan.cp),
        ("expert weights", "edp", parameters.expert, 0, expert_shards(workload, plan), plan.expert_data_ranks),
    )
    for name, dimension, numbers, rooted, ranks, replicas in groups:
        if not numbers:
            continue
        early, late, dtype = plan.overlap_parameters, plan.overlap_gradients, plan.gradient_dtype
        wide = "fp32" if weight_bytes(workload) == 4 else activation_dtype(workload)
        again = 0 if ours and plan.zero == 2 else numbers - (rooted if ours else 0)
        for nodes, gathered in ((before, numbers), (between, again)):
            size = float(gathered * weight_bytes(workload))
            if size and ranks > 1:
                nodes.append(Collective("all_gather", "sharding", name, dimension, ranks, size, wide, overlap=early))
        if not parameters.trained:
            continue
        size, name = float(numbers * reduced), f"gradients of {name}"
        if ranks > 1:
            after.append(Collective("reduce_scatter", "sharding", name, dimension, ranks, size, dtype, overlap=late))
        if ours and replicas > ranks:
            among, size = replicas // ranks, size / ranks
            after.append(Collective("all_reduce", "sharding", name, dimension, among, size, dtype, overlap=late))
    forward, backward = (*before, *piece.forward), (*between, *piece.backward, *after)
    return replace(piece, forward=forward, backward=backward, base=piece)


def _parameters(runs: tuple[Run, ...]) -> Parameters:
    return add_parameters([(run.piece.parameters, run.times) for run in runs])


def _of_loss(rows: int, vocab: int, hidden: int, width: int) -> float:
    """Bytes that our loss needs while it works on a block of rows: the head in 16 bits, the block's share of the
    head's gradient, logits in both types, their softmax, and the block itself."""
    block = min(rows, max(LOSS_ELEMENTS // vocab, 64))
    if width == 4:
        return float(8 * block * vocab)
    return float(2 * width * vocab * hidden + (8 + width) * block * vocab + width * block * hidden)


def _saved(runs: tuple[Run, ...], once: float, ours: bool) -> Saved:
    """once: bytes that the stage keeps besides its pieces. ours: what comes and goes in a layer that is computed again
    comes on top of what it then keeps."""
    saved = once + sum(run.piece.saved * run.times for run in runs)
    spared = sum((run.piece.saved - run.piece.kept) * run.recomputed for run in runs)
    again = (run.piece.saved - run.piece.kept + run.piece.transient * ours for run in runs if run.recomputed)
    most = max((*again, *(run.piece.transient for run in runs)), default=0.0)
    return Saved(saved - spared, saved, most)


def add_parameters(parts: list[tuple[Parameters, int]]) -> Parameters:
    """Each as often as it is there."""
    shapes: Counter[tuple[int, int, bool]] = Counter()
    for parameters, n in parts:
        for rows, columns, times, expert in parameters.shapes:
            shapes[(rows, columns, expert)] += times * n
    return Parameters(
        sum(p.dense * n for p, n in parts),
        sum(p.expert * n for p, n in parts),
        sum(p.matrices * n for p, n in parts),
        sum(p.trained * n for p, n in parts),
        sum(p.replicated * n for p, n in parts),
        tuple(Matrices(rows, columns, times, expert) for (rows, columns, expert), times in shapes.items()),
    )


def _vocab(model: ModelConfig) -> int:
    assert model.vocab_size is not None, "a workload's model has a vocabulary"
    return model.vocab_size
