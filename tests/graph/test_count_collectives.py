"""Collectives of counted steps by closed forms."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.config.plan import Plan, Workload
from moestro.graph.count import count_step
from moestro.graph.feedforward import distinct_ranks, worst_rows

from .counting import DENSE, mixture, of_preset, volumes


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
