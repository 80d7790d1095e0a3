"""Layouts: every refusal names a setting to change, and what is accepted splits the ranks and layers right."""

import copy
import math
from collections import defaultdict
from itertools import chain
from typing import Any

import pytest
from config.helpers import tree
from hypothesis import given
from hypothesis import strategies as st

from moestro.config import Config, parse_config
from moestro.errors import MoestroError
from moestro.parallel.layout import SPLIT_BACKWARD, V_SHAPED, Layout, resolve_layout


def config(**settings: Any) -> Config:
    """Eight layers that all sizes up to 8 divide in every way, with changes by keys such as `parallel__tp`."""
    fitting = {
        "model__hidden_size": 64,
        "model__num_layers": 8,
        "model__num_heads": 8,
        "model__moe__num_experts": 8,
        "model__moe__expert_hidden_size": 8,
        "model__max_seq_len": 256,
        "data__seq_len": 256,
        "train__global_batch_size": 64,
    }
    return parse_config(tree(**copy.deepcopy({**fitting, **settings})), source="test")


REFUSED: dict[str, tuple[int, dict[str, Any], str]] = {
    "too few ranks": (1, {"tp": 2}, "tp 2 = 2 ranks, but 1 is running; start with --nproc 2"),
    "too many ranks": (6, {"dp": 1, "tp": 2}, "= 2 ranks, but 6 are running; start with --nproc 2"),
    "ranks left over": (6, {"tp": 4}, "tp 4 = 4 ranks, but 6 are running"),
    "zero 1 of fsdp": (2, {"fsdp": 2, "zero": 1}, "set parallel.zero to 2 or 3, or use parallel.dp"),
    "zero 3 of dp": (2, {"dp": 2, "zero": 3}, "splits weights among parallel.fsdp ranks; raise that from 1"),
    "heads": (3, {"tp": 3}, "parallel.tp = 3 does not divide model.num_heads = 8"),
    "kv heads": (4, {"tp": 4, "model.num_kv_heads": 2}, "parallel.tp = 4 does not divide model.num_kv_heads = 2"),
    "dense width": (
        2,
        {"tp": 2, "model.moe.first_k_dense": 1, "model.intermediate_size": 9},
        "parallel.tp = 2 does not divide model.intermediate_size = 9",
    ),
    "expert width": (
        2,
        {"tp": 2, "model.moe.expert_hidden_size": 9},
        "parallel.tp = 2 does not divide model.moe.expert_hidden_size = 9",
    ),
    "width of split experts": (
        4,
        {"tp": 4, "model.moe.granularity": 4},
        "parallel.tp = 4 does not divide model.moe.expert_hidden_size / granularity = 2",
    ),
    "biases of latent experts": (
        2,
        {"tp": 2, "model.moe.expert_bias": True, "model.moe.latent_size": 9},
        "parallel.tp = 2 does not divide model.moe.latent_size = 9",
    ),
    "sequence by tp": (2, {"tp": 2, "data.seq_len": 9}, "data.seq_len = 9 .* make it a multiple of 2"),
    "sequence by cp": (2, {"cp": 2, "data.seq_len": 10}, "parallel.cp = 2 .* make it a multiple of 4"),
    "sequence by both": (4, {"cp": 2, "tp": 2, "data.seq_len": 12}, "make it a multiple of 8"),
    "no experts": (
        2,
        {"ep": 2, "model.moe": None, "model.intermediate_size": 8},
        r"parallel.ep = 2 needs experts, but the model has no \[model.moe\]",
    ),
    "experts": (
        3,
        {"ep": 3, "train.global_batch_size": 3},
        "parallel.ep = 3 does not divide model.moe.num_experts = 8",
    ),
    "split experts": (
        3,
        {"ep": 3, "model.moe.granularity": 2, "train.global_batch_size": 3},
        "parallel.ep = 3 does not divide model.moe.num_experts · granularity = 16",
    ),
    "ep and data": (4, {"ep": 4, "tp": 4}, "parallel.ep = 4 does not divide the dp · fsdp · cp = 1 ranks"),
    "ep and fsdp": (
        12,
        {"fsdp": 3, "ep": 2, "train.global_batch_size": 12},
        "parallel.ep = 2 must divide parallel.fsdp · parallel.cp = 3 or be a multiple of it",
    ),
    "one node": (
        4,
        {"ep": 4, "dispatch": "two_hop", "ranks_per_node": 4},
        "parallel.dispatch = 'two_hop' .* ep = 4 with 4 data ranks a node; set parallel.ranks_per_node",
    ),
    "lone ranks": (4, {"ep": 4, "dispatch": "leader"}, "4 with 1 data ranks a node; .* dispatch to 'all_to_all'"),
    "crossing nodes": (8, {"ep": 4, "dispatch": "leader", "ranks_per_node": 3}, "with 3 data ranks a node"),
    "nodes of tp": (8, {"ep": 4, "tp": 2, "dispatch": "leader", "ranks_per_node": 2}, "with 1 data ranks a node"),
    "stage sizes": (
        2,
        {"pp": 2, "layers_per_stage": [3, 4]},
        r"parallel.layers_per_stage must list 2 numbers .* model.num_layers = 8, got \[3, 4\]",
    ),
    "stage count": (2, {"pp": 2, "layers_per_stage": [8]}, "must list 2 numbers"),
    "empty stage": (2, {"pp": 2, "layers_per_stage": [0, 8]}, "of at least 1"),
    "more stages than layers": (
        4,
        {"pp": 4, "schedule": "interleaved", "stages_per_rank": 3},
        r"12 pipeline stages \(parallel.pp = 4, 3 a rank\) for model.num_layers = 8; lower",
    ),
    "batch": (6, {"train.global_batch_size": 64}, "train.global_batch_size = 64 is not a multiple of .* 6 ranks"),
    "micro-batch": (
        4,
        {"train.global_batch_size": 24, "train.micro_batch_size": 4},
        "a rank's 6 sequences .* are not a multiple of train.micro_batch_size = 4",
    ),
    "V of one stage": (
        2,
        {"pp": 2, "schedule": "zbv", "stages_per_rank": 1},
        "parallel.schedule = 'zbv' has 2 stages a rank; leave parallel.stages_per_rank out",
    ),
    "1f1b of two": (2, {"pp": 2, "stages_per_rank": 2}, "'1f1b' has one stage a rank; leave parallel.stages_per_rank"),
    "short pipeline": (
        4,
        {"pp": 4, "train.micro_batch_size": 32},
        "'1f1b' needs at least 4 micro-batches a rank, got 2; lower train.micro_batch_size or raise train.global_batch",
    ),
    "no micro-batches": (
        8,
        {"pp": 4, "dp": 2, "train.global_batch_size": 6},
        "needs at least 4 micro-batches a rank, got 3; .* raise train.global_batch_size",
    ),
    "ragged interleaving": (
        2,
        {"pp": 2, "schedule": "interleaved", "train.global_batch_size": 3, "train.micro_batch_size": 1},
        "needs a multiple of 2 micro-batches a rank, got 3",
    ),
    "dualpipev": (
        2,
        {"pp": 2, "schedule": "dualpipev", "train.global_batch_size": 2},
        "'dualpipev' needs at least 4 micro-batches",
    ),
    "cca across chunks": (
        8,
        {"cp": 8, "data.seq_len": 64, "model.cca": {"depthwise_taps": 9, "grouped_taps": 9}},
        "model.cca looks back 16 tokens, further than the 4 of a chunk",
    ),
    "backward in two parts through two depths": (
        2,
        {"pp": 2, "schedule": "zbv", "model.mtp": {"depth": 2}},
        "set model.mtp.depth = 1 and model.tie_embeddings = false, or choose '1f1b'",
    ),
    "backward in two parts through a tied embedding": (
        2,
        {"pp": 2, "schedule": "zero_bubble", "model.mtp": {}, "model.tie_embeddings": True},
        "set model.mtp.depth = 1 and model.tie_embeddings = false, or choose '1f1b'",
    ),
    "recompute": (
        2,
        {"pp": 2, "schedule": "zero_bubble", "train.recompute": "block"},
        "set train.recompute = 'none' and train.expert_recompute = false, or choose '1f1b' or 'interleaved'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str) -> None:
    ranks, changes, message = REFUSED[case]
    settings = {(k.replace(".", "__") if "." in k else f"parallel__{k}"): value for k, value in changes.items()}
    with pytest.raises(MoestroError, match=message) as caught:
        resolve_layout(config(**settings), ranks)
    assert any(section in str(caught.value) for section in ("parallel", "train.", "model.", "data."))


def test_takes_the_machines_size_from_the_config_then_the_caller_then_the_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "8"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    assert resolve_layout(config(), 8).ranks_per_node == 4
    assert resolve_layout(config(), 8, ranks_per_node=8).ranks_per_node == 8
    assert resolve_layout(config(parallel__ranks_per_node=2), 8, ranks_per_node=8).ranks_per_node == 2
    assert resolve_layout(config(parallel__ep=8, parallel__dispatch="leader"), 8).ranks_per_node == 4


@pytest.mark.parametrize(
    ("settings", "ranks", "zero"),
    [({}, 1, 0), ({}, 2, 1), ({"tp": 2}, 2, 1), ({"pp": 2}, 2, 0), ({"fsdp": 2}, 2, 3), ({"fsdp": 2, "zero": 2}, 4, 2)],
)
def test_default_zero(settings: dict[str, Any], ranks: int, zero: int) -> None:
    assert resolve_layout(config(**{f"parallel__{k}": v for k, v in settings.items()}), ranks).zero == zero


@pytest.mark.parametrize(
    ("layers", "pp", "sizes"), [(8, 2, [4, 4]), (8, 3, [3, 3, 2]), (7, 4, [2, 2, 2, 1]), (5, 4, [1, 2, 1, 1])]
)
def test_extra_layers_go_to_the_middle(layers: int, pp: int, sizes: list[int]) -> None:
    layout = resolve_layout(config(model__num_layers=layers, parallel__pp=pp, train__global_batch_size=12), pp)
    assert list(map(len, layout.stages)) == sizes
    assert list(chain(*layout.stages)) == list(range(layers))


def test_listed_stages_are_taken_as_they_are() -> None:
    layout = resolve_layout(config(parallel__pp=2, parallel__layers_per_stage=[3, 5]), 2)
    assert layout.stages == ((0, 1, 2), (3, 4, 5, 6, 7))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Every layout of at most 64 ranks out of sizes up to 8, by choosing what divides."""
    size = st.sampled_from([1, 2, 4])
    sizes = {name: draw(size) for name in ("pp", "dp", "fsdp", "cp", "tp")}
    world = math.prod(sizes.values())
    data, shards = sizes["dp"] * sizes["fsdp"] * sizes["cp"], sizes["fsdp"] * sizes["cp"]
    fitting = [n for n in (1, 2, 4, 8) if data % n == 0 and (sizes["fsdp"] == 1 or shards % n == 0 or n % shards == 0)]
    sizes["ep"] = draw(st.sampled_from(fitting))
    schedules = ["gpipe", "1f1b"] + (["interleaved", "zero_bubble", "zbv", "dualpipev"] if sizes["pp"] > 1 else [])
    changes: dict[str, Any] = {f"parallel__{name}": value for name, value in sizes.items()}
    changes["parallel__schedule"] = schedule = draw(st.sampled_from(schedules))
    if schedule in ("interleaved", "zero_bubble"):
        changes["parallel__stages_per_rank"] = draw(st.sampled_from([1, 2] if sizes["pp"] == 4 else [1, 2, 3, 4]))
    changes["train__global_batch_size"] = 128 * draw(st.sampled_from([1, 3]))
    return resolve_layout(config(**changes), world)


@given(layouts())
def test_places(layout: Layout) -> None:
    """Each rank has its own coordinates, within the sizes, and ep groups hold every expert part once."""
    places = list(layout.places())
    assert len({(p.pp, p.dp, p.fsdp, p.cp, p.tp) for p in places}) == layout.world_size == len(places)
    for name in ("pp", "dp", "fsdp", "cp", "tp", "ep"):
        assert {getattr(p, name) for p in places} == set(range(getattr(layout, name)))
    experts: dict[Any, list[int]] = defaultdict(list)
    copies: dict[Any, set[int]] = defaultdict(set)
    for p in places:
        assert (p.batch, p.data) == (p.dp * layout.fsdp + p.fsdp, p.batch * layout.cp + p.cp)
        experts[p.pp, p.tp, p.edp].append(p.ep)
        copies[p.pp, p.tp, p.ep].add(p.edp)
    assert all(sorted(group) == list(range(layout.ep)) for group in experts.values())
    assert all(group == set(range(layout.data_ranks // layout.ep)) for group in copies.values())


@given(layouts())
def test_tp_ranks_are_neighbours_and_ep_ranks_next(layout: Layout) -> None:
    for rank, place in enumerate(layout.places()):
        assert place.tp == rank % layout.tp
        assert place.ep == rank // layout.tp % layout.ep
        assert place.pp == rank // (layout.world_size // layout.pp)


@given(layouts())
def test_shards_of_experts(layout: Layout) -> None:
    """FSDP2's shard of the experts and ep together take as many ranks as the dense shard, or ep takes more."""
    if layout.fsdp > 1:
        assert layout.efsdp * layout.ep in (layout.fsdp * layout.cp, layout.ep)
        assert layout.data_ranks % (layout.efsdp * layout.ep) == 0
    else:
        assert layout.efsdp == 1


@given(layouts())
def test_stages(layout: Layout) -> None:
    """Each layer is in one stage, each stage on one pipeline rank; a V begins and ends on the first."""
    assert list(chain(*layout.stages)) == list(range(8))
    held = [layout.stages_of(rank) for rank in range(layout.pp)]
    assert sorted(chain(*held)) == list(range(len(layout.stages)))
    assert {len(stages) for stages in held} == {len(layout.stages) // layout.pp}
    if layout.pp > 1 and layout.schedule in V_SHAPED:
        assert held[0] == [0, len(layout.stages) - 1]
        assert held[-1] == [layout.pp - 1, layout.pp]  # the point of the V stays on one rank
    else:
        assert all(stage % layout.pp == rank for rank, stages in enumerate(held) for stage in stages)


@given(layouts())
def test_micro_batches(layout: Layout) -> None:
    """They make up the global batch and are enough for the schedule."""
    sequences = layout.micro_batch_size * layout.micro_batches * layout.batch_ranks
    assert sequences in (128, 384)
    if layout.pp > 1:
        assert layout.micro_batches >= layout.pp
        if layout.schedule in SPLIT_BACKWARD or layout.schedule == "interleaved":
            assert layout.micro_batches >= len(layout.stages)
    else:
        assert layout.micro_batches == 1


def test_describes_itself() -> None:
    assert resolve_layout(config(), 1).describe() == "one process"
    assert resolve_layout(config(parallel__pp=2), 2).describe() == "pp=2"
    assert resolve_layout(config(parallel__tp=2, parallel__ep=2), 4).describe() == "dp=2 tp=2 ep=2 zero=1"


def test_experts_are_dealt_out_after_their_split() -> None:
    ranks = {"parallel__ep": 8, "parallel__dp": 8}
    assert resolve_layout(config(model__moe__num_experts=2, model__moe__granularity=4, **ranks), 8).ep == 8
    with pytest.raises(MoestroError, match=r"num_experts = 2"):
        resolve_layout(config(model__moe__num_experts=2, **ranks), 8)
