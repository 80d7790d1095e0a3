"""What a plan's and a trainer's options change in counted steps."""

import pytest

from moestro.config import ModelConfig, count
from moestro.config.plan import Plan, Workload
from moestro.errors import MoestroError
from moestro.graph.count import count_step
from moestro.graph.feedforward import distinct_ranks
from moestro.graph.words import Collective, Kernel

from .counting import DENSE, flops, mixture, of_preset, total_parameters, volumes


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
