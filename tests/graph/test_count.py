"""Counted steps: exact against the model's own counts, conserved over ranks, collectives by closed forms."""

import random
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.config import ModelConfig, count, load_config, preset_names
from moestro.config.plan import Plan, Workload
from moestro.errors import MoestroError
from moestro.graph import pieces
from moestro.graph.convert import workload_of
from moestro.graph.count import count_step
from moestro.graph.feedforward import distinct_ranks, worst_rows
from moestro.graph.words import Collective, Kernel, StepGraph


def of_preset(name: str) -> Workload:
    workload = workload_of(load_config(name).config)
    return workload.model_copy(update={"global_batch_size": 1})


def flops(graph: StepGraph, part: str | None = None) -> float:
    """Of one rank of each stage, with attention's backward as twice its forward, as FLOPs of models are counted."""
    total = 0.0
    for node, times in graph.nodes():
        if isinstance(node, Kernel) and node.part != "optimizer" and part in (None, node.part):
            total += node.flops * times * (0.8 if node.op == "attention_backward" else 1.0)
    return total


def total_parameters(graph: StepGraph, plan: Plan) -> int:
    """Over the ranks that hold different parts."""
    found = 0
    for stage in graph.stages:
        parameters = stage.parameters
        found += (parameters.dense - parameters.replicated) * plan.tp + parameters.replicated
        found += parameters.expert * plan.ep * plan.etp
    return found


def twice_held(model: ModelConfig, plan: Plan) -> int:
    """The embedding, which the last stage of a pipeline has again."""
    assert model.vocab_size is not None
    return model.vocab_size * model.hidden_size * (plan.pp > 1 and (model.tie_embeddings or model.mtp is not None))


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_has_its_models_parameters_and_flops(name: str) -> None:
    workload = of_preset(name)
    counts = count(workload.model, workload.seq_len)
    for plan in (Plan(), Plan(pp=2)):
        graph = count_step(workload, plan)
        assert total_parameters(graph, plan) - twice_held(workload.model, plan) == counts.total_params
        # Routers that learn from a constant send no gradient back, which the model's counts do not know.
        left_out = sum(n.flops * times for n, times in graph.nodes() if n.name == "causal in" and isinstance(n, Kernel))
        assert flops(graph) + left_out == pytest.approx(graph.model_flops, rel=1e-12)
        assert graph.model_flops == counts.train_flops_per_token * workload.seq_len
    said = " ".join(count_step(workload, Plan()).notes)
    moe = workload.model.moe
    assert bool(said) == bool(workload.model.encoders or (moe and moe.null_experts))


@pytest.mark.parametrize("name", ["mm1-tiny", "uni-moe-tiny"])
def test_encoders_work_when_there_is_something_to_see(name: str) -> None:
    workload = of_preset(name)
    shown = workload.model_copy(update={"media_items": (1.0,) * len(workload.model.encoders)})
    graph = count_step(shown, Plan())
    assert graph.notes == ()
    assert total_parameters(graph, Plan()) == count(workload.model, 1).total_params
    dense = sum(
        3 * 2 * e.max_patches * e.num_layers * (4 * e.hidden_size**2 + 2 * e.hidden_size * e.resolved_intermediate_size)
        for e in workload.model.encoders
    )
    assert flops(graph, "encoders") > dense
    assert flops(graph, "encoders") + flops(count_step(workload, Plan())) == pytest.approx(flops(graph))


@st.composite
def models(draw: st.DrawFn, deep: bool = True) -> ModelConfig:
    attention = draw(st.sampled_from(["gqa", "mla", "cca"]))
    layers = draw(st.integers(2, 5))
    tree: dict[str, object] = {
        "vocab_size": 64,
        "hidden_size": 64,
        "num_layers": layers,
        "num_heads": 8,
        "num_kv_heads": 8 if attention == "mla" else draw(st.sampled_from([4, 8])),
        "intermediate_size": 96,
        "activation": draw(st.sampled_from(["swiglu", "gelu", "relu2"])),
        "tie_embeddings": draw(st.booleans()),
        "residual_scaling": draw(st.sampled_from(["none", "input", "output", "released"])),
        "mtp": {"depth": 1} if draw(st.booleans()) else None,
    }
    if attention == "mla":
        q_rank = draw(st.sampled_from([None, 32]))
        tree["mla"] = {"q_rank": q_rank, "kv_rank": 16, "nope_head_dim": 8, "rope_head_dim": 4, "v_head_dim": 8}
    elif attention == "cca":
        tree["cca"] = {"depthwise_taps": 2, "grouped_taps": draw(st.sampled_from([2, 3]))}
    else:
        tree["qk_norm"] = draw(st.sampled_from(["none", "head"]))
        tree["attention_bias"] = draw(st.sampled_from(["none", "qkv", "all"]))
        if draw(st.booleans()):
            tree |= {"sliding_window": 5, "layer_types": ["full", "sliding"]}
    if draw(st.booleans()):
        experts, kind = 8, draw(st.sampled_from(["linear", "mlp", "attention", "hybrid", "mlp_hadamard", "zaya"]))
        tree["moe"] = {
            "num_experts": experts,
            "top_k": draw(st.sampled_from([1, 2, 4])),
            "expert_hidden_size": 32,
            "granularity": draw(st.sampled_from([1, 2])),
            "num_shared_experts": draw(st.sampled_from([0, 1])),
            "latent_size": draw(st.sampled_from([None, 32])),
            "null_experts": draw(st.sampled_from([0, 1])),
            "first_k_dense": draw(st.integers(0, layers - 1)),
            "activation": draw(st.sampled_from(["swiglu", "relu2"])),
            "expert_bias": draw(st.booleans()),
            "router": {"kind": kind, "hidden_size": 16, "renormalize": False},
        }
    return ModelConfig.model_validate(tree)


Trainer = Literal["megatron", "moestro"]
TRAINERS = st.sampled_from(["megatron", "moestro"])
PLANS = st.fixed_dictionaries(
    {
        "tp": st.sampled_from([1, 2, 4]),
        "cp": st.sampled_from([1, 2]),
        "dp": st.sampled_from([1, 2]),
        "pp": st.sampled_from([1, 2]),
        "ep": st.sampled_from([1, 2, 4]),
        "etp": st.sampled_from([1, 2]),
        "expert_chunks": st.sampled_from([1, 2]),
        "recompute": st.sampled_from(["none", "selective", "block"]),
        "zero": st.sampled_from([0, 1, 2, 3]),
    }
)


def plan_for(model: ModelConfig, sizes: dict[str, object]) -> Plan | None:
    ranks = int(sizes["tp"]) * int(sizes["cp"]) * int(sizes["dp"])  # type: ignore[call-overload]
    if model.moe is None or ranks % (int(sizes["ep"]) * int(sizes["etp"])):  # type: ignore[call-overload]
        sizes = sizes | {"ep": 1, "etp": 1}
    return Plan.model_validate(sizes)


@settings(max_examples=60, deadline=None)
@given(models(), PLANS, st.booleans(), TRAINERS)
def test_ranks_together_do_and_hold_what_one_process_does(
    model: ModelConfig, sizes: dict[str, object], fused: bool, trainer: Trainer
) -> None:
    plan = plan_for(model, sizes)
    workload = Workload(model=model, seq_len=64, global_batch_size=2, fused_loss=fused, trainer=trainer)
    alone, graph = count_step(workload, Plan()), count_step(workload, plan)
    assert flops(graph) * plan.dp * plan.cp * plan.tp - recomputed(
        graph
    ) * plan.dp * plan.cp * plan.tp == pytest.approx(flops(alone), rel=1e-9)
    assert flops(alone) == pytest.approx(alone.model_flops, rel=1e-9)
    assert total_parameters(graph, plan) - twice_held(model, plan) == count(model, 64).total_params


def recomputed(graph: StepGraph) -> float:
    nodes = (node for stage in graph.stages for node in stage.recompute if isinstance(node, Kernel))
    return sum(node.flops * node.times for node in nodes) * graph.micro_batches


@settings(max_examples=40, deadline=None)
@given(models(), PLANS, PLANS, TRAINERS)
def test_what_was_counted_before_changes_nothing(
    model: ModelConfig, one: dict[str, object], two: dict[str, object], trainer: Trainer
) -> None:
    workload = Workload(model=model, seq_len=64, global_batch_size=4, trainer=trainer)
    first, second = plan_for(model, one), plan_for(model, two)
    pieces._KNOWN.clear()
    count_step(workload, first)
    after = count_step(workload, second)
    pieces._KNOWN.clear()
    fresh = count_step(workload, second)
    assert list(after.nodes()) == list(fresh.nodes())
    assert [s.saved for s in after.stages] == [s.saved for s in fresh.stages]
    assert [s.parameters for s in after.stages] == [s.parameters for s in fresh.stages]


OUTSIDE: list[tuple[dict[str, object], dict[str, object]]] = [
    ({}, {}),
    ({}, {"zero": 1}),
    ({}, {"zero": 1, "bucket_bytes": 1e4}),
    ({"optimizer": "muon"}, {"zero": 1}),
    ({"optimizer": "muon"}, {"zero": 1, "shard": 2}),
    ({"global_batch_size": 16}, {"zero": 1}),
    ({}, {"zero": 3}),
    ({}, {"zero": 3, "shard": 2}),
    ({}, {"pp": 2, "schedule": "interleaved", "vpp": 2}),
    ({}, {"pp": 2, "schedule": "zbv", "vpp": 2}),
    ({}, {"pp": 2, "recompute": "block", "recompute_layers": 1}),
    ({}, {"pp": 2, "layers_per_stage": (1, 3), "recompute": "block"}),
    ({"routing": {"kind": "power_law"}, "software": "x"}, {"offload": "optimizer"}),
]


def test_what_a_piece_does_not_depend_on_still_counts() -> None:
    model = mixture().model_copy(update={"num_layers": 4})
    cases = [
        (
            Workload.model_validate({"model": model, "seq_len": 64, "global_batch_size": 8} | work),
            Plan.model_validate({"dp": 4, "ep": 2} | plan),
        )
        for work, plan in OUTSIDE
    ]
    after = [count_step(*case) for case in cases]
    for case, graph in zip(cases, after, strict=True):
        pieces._KNOWN.clear()
        fresh = count_step(*case)
        assert (list(graph.nodes()), graph.ranks) == (list(fresh.nodes()), fresh.ranks)
        assert [(s.rank, s.layers, s.saved) for s in graph.stages] == [
            (s.rank, s.layers, s.saved) for s in fresh.stages
        ]
    assert len({str((list(g.nodes()), g.ranks, [s.rank for s in g.stages])) for g in after}) == len(cases) - 1


def test_pieces_are_the_same_objects_in_plans_that_agree_on_them() -> None:
    workload = of_preset("deepseek-v3").model_copy(update={"global_batch_size": 64})
    one = count_step(workload, Plan(pp=4, dp=8, ep=8, zero=1))
    two = count_step(workload, Plan(pp=8, dp=8, ep=8, schedule="interleaved", vpp=2))
    assert one.stages[1].pieces[0].piece is two.stages[5].pieces[0].piece
    assert one.stages[1].pieces == one.stages[2].pieces
    assert one.stages[1].forward == one.stages[1].pieces[0].piece.forward * len(one.stages[1].layers)


# Collectives


def volumes(graph: StepGraph, dimension: str) -> dict[str, float]:
    """Bytes by operation and direction, of the first stage in one micro-batch."""
    found: dict[str, float] = {}
    stage = graph.stages[0]
    for way, nodes in (("forward", stage.forward), ("backward", (*stage.backward, *stage.recompute))):
        for node in nodes:
            if isinstance(node, Collective) and node.dimension == dimension:
                key = f"{way} {node.op}"
                found[key] = found.get(key, 0.0) + node.bytes * node.times
    return found


DENSE = ModelConfig(vocab_size=512, hidden_size=64, num_layers=3, num_heads=8, num_kv_heads=4, intermediate_size=96)


def mixture(**moe: object) -> ModelConfig:
    values = {"num_experts": 16, "top_k": 4, "expert_hidden_size": 32} | moe
    return ModelConfig.model_validate(DENSE.model_dump() | {"moe": values})


def test_tensor_parallelism_gathers_and_scatters_twice_a_layer() -> None:
    workload = Workload(model=DENSE, seq_len=128, global_batch_size=2)
    size = 2 * 128 * 64 * 2.0  # micro-batch · tokens · hidden · 2 bytes
    found = volumes(count_step(workload, Plan(tp=4, micro_batch_size=2)), "tp")
    layers = DENSE.num_layers
    assert found["forward all_gather"] == found["forward reduce_scatter"] == 2 * layers * size
    # Backward mirrors both, and gathers the inputs once more for the gradients of weights.
    assert found["backward all_gather"] == 4 * layers * size
    assert found["backward reduce_scatter"] == 2 * layers * size
    plain = volumes(count_step(workload, Plan(tp=4, micro_batch_size=2, sequence_parallel=False)), "tp")
    assert plain == {"forward all_reduce": 2 * layers * size, "backward all_reduce": 2 * layers * size}


def test_a_cut_vocabulary_adds_the_embedding_and_the_head() -> None:
    workload = Workload(model=DENSE, seq_len=128, global_batch_size=1, fused_loss=False)
    size = 128 * 64 * 2.0
    found = volumes(count_step(workload, Plan(tp=2)), "tp")
    assert found["forward reduce_scatter"] == (2 * DENSE.num_layers + 1) * size
    assert found["forward all_gather"] == (2 * DENSE.num_layers + 1) * size


def test_latents_are_gathered_not_hidden_states() -> None:
    workload = of_preset("deepseek-v3").model_copy(update={"seq_len": 128})
    mla = workload.model.mla
    assert mla is not None
    gathers = [n for n in count_step(workload, Plan(tp=2)).stages[0].forward if n.name == "tokens in"]
    assert mla.q_rank is not None
    assert gathers[0].bytes == 128 * (mla.q_rank + mla.kv_rank + mla.rope_head_dim) * 2  # type: ignore[union-attr]


def test_context_parallelism_gathers_keys_and_values() -> None:
    workload = Workload(model=DENSE, seq_len=128, global_batch_size=1)
    found = volumes(count_step(workload, Plan(cp=2)), "cp")
    size = DENSE.num_layers * 128 * 2 * 4 * 8 * 2.0  # tokens · (keys and values) · kv heads · dims · bytes
    assert found == {"forward all_gather": size, "backward reduce_scatter": size}


def test_gathered_keys_and_values_are_kept() -> None:
    workload = Workload(model=DENSE, seq_len=128, global_batch_size=1)
    ring, gathered = (count_step(workload, Plan(cp=4, context=kind)).stages[0] for kind in ("ring", "all_gather"))  # type: ignore[arg-type]
    one = 32 * 2 * 4 * 8 * 2.0  # local tokens · (keys and values) · kv heads · dims · bytes
    assert gathered.saved.kept - ring.saved.kept == DENSE.num_layers * 3 * one
    assert gathered.forward == ring.forward


@pytest.mark.parametrize("dispatch", ["all_to_all", "deduplicated", "two_hop", "all_gather"])
def test_an_exchange_sends_what_its_kind_sends(dispatch: str) -> None:
    tokens, hidden, layers = 64, 64, 3
    workload = Workload(model=mixture(), seq_len=tokens, global_batch_size=8)
    plan = Plan(dp=8, ep=8, dispatch=dispatch, ranks_per_node=4 if dispatch == "two_hop" else None)  # type: ignore[arg-type]
    graph = count_step(workload, plan)
    row = layers * tokens * hidden * 2.0
    expected = {
        "all_to_all": {"forward all_to_all": 2 * 4 * row},
        "deduplicated": {"forward all_to_all": 2 * distinct_ranks(16, 4, 8) * row},
        "two_hop": {"forward all_to_all": 2 * 4 * row},
        "all_gather": {"forward all_gather": 8 * row, "forward reduce_scatter": 8 * row},
    }[dispatch]
    forward = {key: value for key, value in volumes(graph, "ep").items() if key.startswith("forward")}
    assert forward == pytest.approx(expected)
    between = volumes(graph, "ep_between")
    if dispatch == "two_hop":
        assert between["forward all_to_all"] == pytest.approx(2 * distinct_ranks(16, 4, 2) * row)
        first = [n for n in graph.stages[0].forward if n.name.endswith(" nodes")]
        assert [n.name for n in first[:4]] == [
            "dispatch between nodes",
            "dispatch inside nodes",
            "combine inside nodes",
            "combine between nodes",
        ]
        assert [n.ranks for n in first[:2]] == [2, 4]  # type: ignore[union-attr]
    else:
        assert between == {}


def test_two_hops_inside_one_node_are_one() -> None:
    workload = Workload(model=mixture(), seq_len=64, global_batch_size=8)
    near = count_step(workload, Plan(dp=8, ep=8, dispatch="two_hop", ranks_per_node=8))
    plain = count_step(workload, Plan(dp=8, ep=8))
    assert volumes(near, "ep") == volumes(plain, "ep")
    assert volumes(near, "ep_between") == {}


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([(16, 1, 1), (16, 4, 2), (32, 8, 4), (64, 8, 3), (32, 2, 1)]),
    st.sampled_from([2, 4, 8, 16]),
    st.data(),
)
def test_distinct_ranks_are_what_drawing_experts_finds(
    shape: tuple[int, int, int], ranks: int, data: st.DataObject
) -> None:
    experts, groups, top_groups = shape
    top_k = data.draw(st.integers(1, min(8, top_groups * experts // groups)))
    generator, found, draws = random.Random(top_k * ranks + experts), 0, 1500
    size = experts // groups
    for _ in range(draws):
        open_groups = generator.sample(range(groups), top_groups)
        choice = generator.sample([g * size + i for g in open_groups for i in range(size)], top_k)
        found += len({expert // (experts // ranks) for expert in choice})
    exact = distinct_ranks(experts, top_k, ranks, groups, top_groups)
    assert found / draws == pytest.approx(exact, rel=0.08)
    assert exact <= min(top_k, ranks) + 1e-9


def test_node_limited_routing_bounds_the_nodes() -> None:
    # DeepSeek-V3: 256 experts in 8 groups of a node each, of which a token sees 4.
    assert distinct_ranks(256, 8, 8, 8, 4) <= 4
    assert distinct_ranks(256, 8, 8) > 5
    assert distinct_ranks(64, 1, 8) == pytest.approx(1)
    assert distinct_ranks(8, 8, 4) == pytest.approx(4)


def test_worst_rows_are_bounded_by_the_experts_of_a_rank() -> None:
    assert worst_rows(4096, 32, 8, 2) == 4096 * 32 * 2
    assert worst_rows(4096, 32, 2, 8) == 4096 * 32 * 2


# Options


def test_chunks_cut_kernels_and_exchanges_and_keep_their_sum() -> None:
    workload = Workload(model=mixture(), seq_len=64, global_batch_size=2)
    whole, chunks = (count_step(workload, Plan(dp=2, ep=2, expert_chunks=n)) for n in (1, 4))
    assert flops(whole) == flops(chunks)
    assert volumes(whole, "ep") == volumes(chunks, "ep")
    assert whole.stages[0].saved == chunks.stages[0].saved
    again = count_step(workload, Plan(dp=2, ep=2, expert_chunks=4, expert_recompute=True))
    spared = whole.stages[0].saved.kept - again.stages[0].saved.kept
    # A chunk of one layer is there at a time; all layers' are spared.
    assert spared == pytest.approx(again.stages[0].saved.transient * 4 * 3)
    # Up and down products run a second time, the way back does not.
    assert flops(again, "experts") == pytest.approx(flops(whole, "experts") * 4 / 3)
    assert volumes(again, "ep")["backward all_to_all"] == pytest.approx(
        1.5 * volumes(whole, "ep")["backward all_to_all"]
    )


def test_recomputation_keeps_inputs_only() -> None:
    workload = Workload(model=DENSE, seq_len=64, global_batch_size=1)
    none, block = (count_step(workload, Plan(recompute=kind)).stages[0] for kind in ("none", "block"))  # type: ignore[arg-type]
    layer = none.pieces[1].piece
    assert block.saved.kept == pytest.approx(none.saved.kept - 3 * (layer.saved - 64 * 64 * 2))
    assert block.saved.transient == layer.saved - 64 * 64 * 2
    assert block.recompute == layer.forward * 3
    one = count_step(workload, Plan(recompute="block", recompute_layers=1)).stages[0]
    assert one.recompute == layer.forward
    assert none.recompute == ()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gradients_are_reduced_once(zero: int) -> None:
    workload = Workload(model=mixture(), seq_len=64, global_batch_size=8)
    plan = Plan(dp=8, ep=4, zero=zero)  # type: ignore[arg-type]
    graph = count_step(workload, plan)
    parameters, (rank,) = graph.stages[0].parameters, graph.ranks
    reduced = {(n.op, n.dimension): n.bytes for n in rank.gradients if isinstance(n, Collective)}
    dense, expert = parameters.dense * 4.0, parameters.expert * 4.0
    if zero == 0:
        assert reduced == {("all_reduce", "dp"): dense, ("all_reduce", "edp"): expert}
    elif zero < 3:
        assert reduced == {("reduce_scatter", "dp"): dense, ("reduce_scatter", "edp"): expert}
        assert sum(n.bytes for n in rank.before if isinstance(n, Collective)) == (dense + expert) / 2
    else:
        assert reduced == {}
        scattered = [n for n in graph.stages[0].backward if isinstance(n, Collective) and n.op == "reduce_scatter"]
        assert sum(n.bytes for n in scattered) == dense + expert


OURS = {"seq_len": 64, "global_batch_size": 8, "trainer": "moestro"}


def test_our_trainer_reduces_whole_weights_among_tensor_ranks_too() -> None:
    workload = Workload.model_validate(OURS | {"model": mixture()})
    graph = count_step(workload, Plan(dp=4, tp=2, ep=2, etp=2, zero=1, dispatch="deduplicated"))
    parameters, (rank,) = graph.stages[0].parameters, graph.ranks
    cut, whole, expert = parameters.dense - parameters.replicated, parameters.replicated, parameters.expert
    expected = [("dp", 4, cut * 4.0), ("world", 8, whole * 4.0), ("edp", 2, expert * 4.0)]
    for nodes, op in ((rank.gradients, "reduce_scatter"), (rank.before, "all_gather")):
        found = [(n.dimension, n.ranks, n.bytes) for n in nodes if isinstance(n, Collective) and n.op == op]
        assert found == expected  # weights are gathered in fp32 as well
    norm = next(n for n in rank.update if n.name == "gradient norm" and isinstance(n, Kernel))
    assert norm.dims == (round(cut / 4 + whole / 8 + expert / 2),)


@pytest.mark.parametrize(("zero", "gathers"), [(2, 1), (3, 2)])
def test_our_trainer_gathers_and_scatters_in_every_micro_batch(zero: int, gathers: int) -> None:
    workload = Workload.model_validate(OURS | {"model": mixture()})
    graph = count_step(workload, Plan(dp=8, ep=2, zero=zero, shard=4))  # type: ignore[arg-type]
    stage, rank = graph.stages[0], graph.ranks[0]
    root = stage.pieces[0].piece.parameters.dense + stage.pieces[-1].piece.parameters.dense
    parameters = stage.parameters
    found: dict[tuple[str, str, int], float] = {}
    for node in (*stage.forward, *stage.backward):
        if isinstance(node, Collective) and node.dimension in ("dp", "edp"):
            key = (node.op, node.dimension, node.ranks)
            found[key] = found.get(key, 0.0) + node.bytes
    assert found == {
        ("all_gather", "dp", 4): 4.0 * (gathers * (parameters.dense - root) + root),
        ("reduce_scatter", "dp", 4): 4.0 * parameters.dense,
        ("all_reduce", "dp", 2): parameters.dense,
        ("all_gather", "edp", 2): 4.0 * gathers * parameters.expert,
        ("reduce_scatter", "edp", 2): 4.0 * parameters.expert,
        ("all_reduce", "edp", 2): 2.0 * parameters.expert,
    }
    assert not rank.gradients
    assert not rank.before


def test_our_trainers_rows_carry_weights_and_ids() -> None:
    workload = Workload.model_validate(OURS | {"model": mixture()})
    stage = count_step(workload, Plan(dp=8, ep=8, dispatch="deduplicated")).stages[0]
    rows = 64 * distinct_ranks(16, 4, 8)
    found = {n.name: n.bytes / rows for n in (*stage.forward, *stage.backward) if isinstance(n, Collective)}
    assert found == pytest.approx(
        {"dispatch": 128 + 16 + 16, "dispatch backward": 128 + 16, "combine": 128, "combine backward": 128}
    )


def test_our_recomputation_stops_when_backward_has_all_it_wants() -> None:
    def again(model: ModelConfig) -> set[str]:
        workload = Workload.model_validate(OURS | {"model": model})
        stage = count_step(workload, Plan(dp=8, ep=1 if model.moe is None else 8, recompute="block")).stages[0]
        layer = stage.pieces[1].piece
        return {f"{n.part} {n.name}" for n in layer.forward} - {f"{n.part} {n.name}" for n in layer.recompute}

    residual = "norms residual of feed-forward"
    assert again(DENSE) == {"dense down", residual}
    back = {"dispatch combine", "dispatch combine: order by expert", "dispatch weighted sum"}
    assert again(mixture()) == {*back, residual}
    assert again(mixture(num_shared_experts=1)) == {"shared experts down", residual}
    scaled = mixture().model_copy(update={"residual_scaling": "released"})
    assert again(scaled) == set()


def test_muon_orthogonalises_every_matrix_once() -> None:
    workload = of_preset("zaya1-8b").model_copy(update={"optimizer": "muon", "global_batch_size": 64})

    def cost(plan: Plan) -> float:
        update = count_step(workload, plan).ranks[0].update
        return sum(n.flops * n.times for n in update if isinstance(n, Kernel))

    whole = cost(Plan())
    shapes = count_step(workload, Plan()).stages[0].parameters.shapes
    assert (
        sum(m.rows * m.columns * m.times for m in shapes) == count_step(workload, Plan()).stages[0].parameters.matrices
    )
    assert whole == sum(5 * m.times * newton_schulz(m.rows, m.columns) for m in shapes)
    assert cost(Plan(dp=64, zero=1)) == pytest.approx(whole / 64)
    assert cost(Plan(dp=64, ep=8, zero=1)) == pytest.approx(whole / 64)
    # ZAYA1's 444 TFLOP a step are with an expert's gate and up as one matrix of 4,096 × 2,048.
    experts = next(m for m in shapes if m.expert)
    fused = whole - 5 * experts.times / 3 * (2 * newton_schulz(2048, 2048) - newton_schulz(4096, 2048))
    assert fused == pytest.approx(444e12, rel=2e-3)


def newton_schulz(rows: int, columns: int) -> float:
    m, n = min(rows, columns), max(rows, columns)
    return 4.0 * m * m * n + 2.0 * m**3


def test_adapters_are_trained_and_nothing_else() -> None:
    workload = Workload(model=mixture(), seq_len=64, global_batch_size=1, adapter_rank=4)
    frozen = count_step(workload.model_copy(update={"adapter_rank": None}), Plan()).stages[0].parameters
    (stage,) = count_step(workload, Plan()).stages
    assert stage.parameters.total == frozen.total + stage.parameters.trained
    assert 0 < stage.parameters.trained < frozen.total / 2
    assert all("adapter" in node.name for node in stage.weight)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({"tp": 3}, "does not divide num_heads"),
        ({"pp": 4}, "stages for 3 layers"),
        ({"ep": 2, "dp": 2}, "without experts"),
        ({"pp": 2, "layers_per_stage": (1, 1, 1)}, "3 numbers for 2 stages"),
        ({"pp": 2, "layers_per_stage": (1, 1)}, "adds up to 2"),
        ({"dp": 4}, "not a multiple"),
    ],
)
def test_a_plan_that_does_not_fit_says_why(plan: dict[str, object], says: str) -> None:
    workload = Workload(model=DENSE, seq_len=64, global_batch_size=2)
    with pytest.raises(MoestroError, match=says):
        count_step(workload, Plan.model_validate(plan))


def test_a_stage_without_layers_holds_the_ends_once() -> None:
    workload = Workload(model=DENSE, seq_len=64, global_batch_size=1)
    graph = count_step(workload, Plan(pp=3, layers_per_stage=(0, 3, 0)))
    assert total_parameters(graph, Plan(pp=3)) == count(DENSE, 64).total_params
    assert [stage.layers for stage in graph.stages] == [(), (0, 1, 2), ()]
    assert graph.stages[2].send_bytes == 0 < graph.stages[1].send_bytes == 64 * 64 * 2


def test_router_state_travels_between_stages() -> None:
    workload = of_preset("zaya1-8b").model_copy(update={"seq_len": 64})
    sent = count_step(workload, Plan(pp=2)).stages[0].send_bytes
    assert sent == 64 * (workload.model.hidden_size + 256) * (4 if workload.model.residual_fp32 else 2)


def test_deepseek_v3_is_as_large_as_its_report_says() -> None:
    """671.03 billion parameters without multi-token prediction; Hugging Face counts 685 billion, with it and its own
    embedding and head."""
    workload = of_preset("deepseek-v3")
    stages = count_step(workload, Plan(pp=2)).stages
    ahead = count(workload.model, 4096).part("multi-token prediction").total
    embedding = 129_280 * 7168
    total = sum(stage.parameters.total for stage in stages)
    assert total - ahead - embedding == pytest.approx(671.03e9, rel=1e-4)
    assert total + embedding == pytest.approx(684.5e9, rel=1e-3)
