"""The layouts that the search finds for ZAYA1 (arXiv 2511.17127, 2605.05365), and what it refuses."""

from functools import lru_cache

import pytest

from moestro.config import load_config
from moestro.config.plan import Plan, Workload, cut_heads, misfits
from moestro.errors import MoestroError
from moestro.graph.convert import workload_of
from moestro.graph.count import count_step
from moestro.graph.words import Collective
from moestro.plan.candidates import Found
from moestro.plan.search import search
from moestro.plan.space import space_of
from moestro.predict.kernels import kernel_pricer
from moestro.predict.predict import predict_step
from moestro.predict.target import target_of

RANKS = 1024
FEW: dict[str, tuple[object, ...]] = {
    "expert_chunks": (1,), "expert_recompute": (False,), "pp": (1,), "vpp": (1,), "schedule": ("1f1b",),
    "context": ("all_gather",), "dispatch": ("deduplicated",), "overlap_dispatch": (True,), "zero": (0, 1),
}  # fmt: skip


def work(seq_len: int = 4096, sequences: int = 4096) -> Workload:
    base = workload_of(load_config("zaya1-8b").config)
    return base.model_copy(update={"seq_len": seq_len, "global_batch_size": sequences})


@lru_cache
def found(cluster: str, seq_len: int = 4096, sequences: int = 4096) -> Found:
    workload = work(seq_len, sequences)
    few = {**FEW, "ep": (1, 4, 8), "micro_batch_size": (2, 4) if seq_len == 4096 else (1, 2, 4)}
    return search(workload, target_of(cluster, RANKS), RANKS, space_of(workload, RANKS, 8, few), exact=4)


@pytest.mark.parametrize(("seq_len", "sequences", "cp"), [(4096, 4096, 1), (32_768, 512, 2), (131_072, 128, 8)])
def test_192_gb_need_data_and_context_parallelism_only(seq_len: int, sequences: int, cp: int) -> None:
    plan = found("zaya1", seq_len, sequences).exact[0][0]
    assert (plan.cp, plan.tp, plan.ep, plan.pp, plan.zero, plan.recompute) == (cp, 1, 1, 1, 1, "none")


def test_80_gb_need_experts_shared_out() -> None:
    plan = found("h800-2048").exact[0][0]
    assert plan.ep in (4, 8)
    assert plan.tp == 1


@pytest.mark.slow
@pytest.mark.parametrize(("seq_len", "sequences", "cp"), [(4096, 4096, 1), (32_768, 512, 2), (131_072, 128, 8)])
def test_the_whole_space_says_the_same(seq_len: int, sequences: int, cp: int) -> None:
    workload, target = work(seq_len, sequences), target_of("zaya1")
    plan = search(workload, target, RANKS, space_of(workload, RANKS, 8)).exact[0][0]
    assert (plan.cp, plan.tp, plan.ep, plan.pp, plan.zero) == (cp, 1, 1, 1, 1)


def test_equally_fast_plans_come_simplest_first() -> None:
    """CP 2, 4 and 8 take the same time at 32K."""
    rows = found("zaya1", 32_768, 512).exact
    near = [plan.cp for plan, one in rows if one.step_s.value / rows[0][1].step_s.value - 1 < 5e-4]
    assert near[0] == 2
    assert sorted(near) == [2, 4, 8]


# Tensor parallelism.


@pytest.mark.parametrize(
    ("trainer", "tp", "why"),
    [("moestro", 4, "num_kv_heads = 2"), ("megatron", 4, "num_kv_heads = 2"), ("moestro", 2, "model.cca"),
     ("moestro", 3, "num_heads = 8"), ("megatron", 2, "")],
)  # fmt: skip
def test_ranks_hold_whole_heads_of_keys(trainer: str, tp: int, why: str) -> None:
    workload, target = work(sequences=4080).model_copy(update={"trainer": trainer}), target_of("zaya1")
    if not why:
        assert cut_heads(workload, tp) == []
        assert tp in space_of(workload, RANKS, 8).tp
        return
    assert why in misfits(workload, Plan(tp=tp))[0]
    with pytest.raises(MoestroError, match=why):
        predict_step(workload, Plan(tp=tp, dp=8), target)
    assert tp not in space_of(workload, RANKS, 8).tp
    with pytest.raises(MoestroError, match=why):
        space_of(workload, RANKS, 8, {"tp": (tp,)})


def test_latent_attention_has_no_heads_of_keys_to_count() -> None:
    workload = workload_of(load_config("deepseek-v3").config)
    assert cut_heads(workload, 8) == []
    assert "num_heads = 128" in cut_heads(workload, 3)[0]


# A mesh of links.


def test_a_whole_node_is_the_fastest_group() -> None:
    """Of n of 8 MI300X each reaches n - 1 links: 48, 144 and 336 GB/s; an all-reduce of 4 GiB shows 47.7 and 312.9."""
    network, size = target_of("zaya1").curves.network, 2.0**32
    rates = {n: size * 2 * (n - 1) / n / network.seconds("all_reduce", size, n).seconds / 1e9 for n in (2, 4, 8)}
    assert rates[2] == pytest.approx(47.7, rel=0.1)
    assert rates[4] == pytest.approx(144, rel=0.1)
    assert rates[8] == pytest.approx(312.9, rel=0.1)
    switched = target_of("h100-8").curves.network
    times = {n: switched.seconds("all_reduce", size, n).seconds for n in (4, 8)}
    assert times[8] > 0.9 * times[4], "a switch gives a part of a node all the bandwidth"


def test_experts_over_a_whole_node_beat_half_of_one() -> None:
    rows = [(plan.ep, one.step_s.value) for plan, one in found("zaya1").exact if plan.micro_batch_size == 4]
    assert [ep for ep, _ in rows] == [1, 8, 4]


def test_context_ranks_do_as_much_in_as_many_blocks() -> None:
    """The same queries and keys, cut among 2 or 8 ranks, take a rank as long."""
    pricer = kernel_pricer(target_of("zaya1").curves, work().routing, 1)
    times = []
    for cp in (2, 4, 8):
        graph = count_step(work(32_768, 512), Plan(cp=cp, dp=RANKS // cp, micro_batch_size=cp // 2))
        (kernel,) = {node for node in graph.stages[0].forward if node.part == "attention" and node.op == "attention"}
        times.append(pricer.seconds(kernel))
    assert times == pytest.approx([times[0]] * 3, rel=1e-9)


# Muon's matrices.


def sent(plan: Plan) -> list[Collective]:
    update = count_step(work(), plan).ranks[0].update
    return [node for node in update if isinstance(node, Collective) and node.dimension in ("dp", "edp")]


def test_what_muon_brings_together_is_counted() -> None:
    """With ZeRO-1 the end of a slice at either side; with ZeRO-3 all that a rank has, there and back."""
    largest, matrices = 2048 * 2048, 640 * 3 * 2048 * 2048
    (ends,) = sent(Plan(dp=RANKS, zero=1))
    assert (ends.op, ends.ranks) == ("send_recv", 2)
    assert 0.95 * 2 * largest < ends.bytes <= 2 * largest
    there, back = sent(Plan(dp=RANKS, zero=3))
    assert there == back
    assert there.op == "all_to_all"
    assert 1 <= there.bytes / (2 * matrices / RANKS) < 1.05
    assert sent(Plan(dp=RANKS)) == sent(Plan(dp=1)) == []


def test_matrices_on_more_than_two_slices_are_told() -> None:
    def told(plan: Plan) -> str:
        return " ".join(note for note in count_step(work(), plan).notes if "Muon" in note)

    # All matrices in one buffer, of 8.26 billion elements, the largest of 4.2 million.
    assert told(Plan(dp=RANKS, zero=1)) == told(Plan(dp=RANKS)) == ""
    assert "up to 1,976 slices" in told(Plan(dp=2048, zero=1))
    # Experts over 8 ranks have slices of their own, and all else is little.
    assert "of Muon's 360 matrices" in told(Plan(dp=RANKS, ep=8, zero=1))
    adamw = work().model_copy(update={"optimizer": "adamw"})
    assert not any("Muon" in note for note in count_step(adamw, Plan(dp=2048, zero=1)).notes)
