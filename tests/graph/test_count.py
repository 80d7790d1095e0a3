"""Counted steps: exact against the model's own counts, conserved over ranks, the same when counted before."""

from typing import Literal

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moestro.config import ModelConfig, count, preset_names
from moestro.config.plan import Plan, Workload, cut_heads
from moestro.graph import pieces
from moestro.graph.count import count_step
from moestro.graph.words import Kernel, StepGraph

from .counting import flops, mixture, of_preset, total_parameters, twice_held


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_has_its_models_parameters_and_flops(name: str) -> None:
    workload = of_preset(name).model_copy(update={"trainer": "megatron"})  # ours adds a key for an attention sink
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
    assume(not cut_heads(workload, plan.tp))
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
    assume(not cut_heads(workload, first.tp) and not cut_heads(workload, second.tp))
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
