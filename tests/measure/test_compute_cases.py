"""The cases of products, memory, attention and element-wise operations: what they compute, and what they count."""

from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from moestro.errors import MoestroError
from moestro.measure import attention, elementwise, experts, gemm, memory, operands
from moestro.measure.attention import attention_case, attention_cases
from moestro.measure.elementwise import elementwise_cases
from moestro.measure.experts import balanced_plan, expert_case, expert_loads, grouped_case
from moestro.measure.gemm import batched_case, gemm_case, gemm_cases, model_shapes
from moestro.measure.memory import memory_case, memory_cases
from moestro.measure.timing import Case, measure_cases
from moestro.model.moe.experts import ExpertWeights, reference_experts

CPU = torch.device("cpu")
CUDA = torch.device("cuda")  # only named: cases allocate nothing before they are prepared
RATES = {"fp32": 110e9, "bf16": 1.5e9}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The operands that were made, in order; random, so that no mix-up gives the right result."""
    tensors: list[Tensor] = []
    random = torch.Generator().manual_seed(0)

    def operand(shape: tuple[int, ...], dtype: str, device: torch.device) -> Tensor:
        tensors.append(torch.randn(shape, generator=random).to(operands.TORCH_DTYPES[dtype]))
        return tensors[-1]

    for module in (operands, gemm, experts, memory, attention, elementwise):
        monkeypatch.setattr(module, "operand", operand)
    return tensors


@pytest.fixture
def known_machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, float]], None]:
    """Sets what a look at the device says."""

    def set_rates(rates: dict[str, float], free: int = 16 * 2**30) -> None:
        for module in (operands, gemm, attention):
            monkeypatch.setattr(module, "product_rates", lambda device: rates)
        for module in (operands, gemm, memory, attention):
            monkeypatch.setattr(module, "free_bytes", lambda device: free)

    set_rates(RATES)
    return set_rates


def key(case: Case) -> tuple[Any, ...]:
    return case.op, *sorted(case.case.items())


def run(case: Case) -> Any:
    return case.prepare()()


def counted_flops(case: Case) -> int:
    call = case.prepare()
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_gemm_multiplies_and_counts(made: list[Tensor], layout: str) -> None:
    case = gemm_case(CPU, 3, 5, 7, "fp32", layout)
    out = run(case)
    a, b = made
    a, b = a.t() if layout[0] == "t" else a, b.t() if layout[1] == "t" else b
    torch.testing.assert_close(out, a @ b)
    assert out.shape == (3, 5)
    assert case.flops == 2 * 3 * 5 * 7
    assert case.bytes_moved == 4 * (3 * 7 + 7 * 5 + 3 * 5)
    assert case.case == {"m": 3, "n": 5, "k": 7, "dtype": "fp32"} | ({} if layout == "nn" else {"layout": layout})


def test_the_output_is_allocated_once(made: list[Tensor]) -> None:
    for case in (gemm_case(CPU, 4, 4, 4, "fp32"), batched_case(CPU, 2, 4, 4, 4, "fp32"), memory_case(CPU, "add", 1024)):
        call = case.prepare()
        first, second = call(), call()
        assert isinstance(first, Tensor)
        assert isinstance(second, Tensor)
        assert first.data_ptr() == second.data_ptr()


def test_batched_gemm(made: list[Tensor]) -> None:
    case = batched_case(CPU, 2, 3, 5, 7, "fp32")
    torch.testing.assert_close(run(case), made[0] @ made[1])
    assert case.flops == 2 * 2 * 3 * 5 * 7 == counted_flops(case)
    assert case.bytes_moved == 4 * 2 * (3 * 7 + 7 * 5 + 3 * 5)


@pytest.mark.parametrize("loop", [True, False])
def test_grouped_gemm_is_a_product_a_group(made: list[Tensor], loop: bool) -> None:
    case = grouped_case(CPU, 3, 4, 8, 12, "fp32", loop=loop)
    out = run(case)
    rows, weights = made
    torch.testing.assert_close(out, torch.cat([a @ w for a, w in zip(rows.split(4), weights, strict=True)]))
    assert case.flops == 2 * 3 * 4 * 8 * 12
    assert case.case == {"groups": 3, "m": 4, "n": 8, "k": 12, "dtype": "fp32"}


def test_both_ways_of_grouped_products_are_told_apart_where_there_are_two() -> None:
    assert grouped_case(CUDA, 3, 4, 8, 12, "bf16", loop=True).case["how"] == "loop"
    assert "how" not in grouped_case(CUDA, 3, 4, 8, 12, "bf16", loop=False).case


def test_moe_experts_run_the_layer(made: list[Tensor]) -> None:
    case = expert_case(CPU, 4, 2, 10, 8, 16, "fp32", "power_law_1.2")
    out = run(case)
    gate_up, down, x = made
    plan = balanced_plan(expert_loads(20, 4, "power_law_1.2"), 10, CPU)
    torch.testing.assert_close(out, reference_experts(x, plan, ExpertWeights(gate_up, down)), rtol=1e-4, atol=1e-4)
    assert case.flops == 6 * 20 * 8 * 16 == counted_flops(case)
    assert case.bytes_moved == 4 * (4 * 3 * 8 * 16 + 2 * 20 * 16)


def test_experts_without_rows_move_no_weights() -> None:
    case = expert_case(CPU, 64, 1, 3, 8, 16, "fp32", "balanced")
    assert case.bytes_moved == 4 * (3 * 3 * 8 * 16 + 2 * 3 * 16)


@given(rows=st.integers(0, 5000), count=st.integers(1, 200), routing=st.sampled_from(["balanced", "power_law_1.2"]))
def test_loads_of_experts_add_up(rows: int, count: int, routing: str) -> None:
    loads = expert_loads(rows, count, routing)
    assert len(loads) == count
    assert sum(loads) == rows
    assert min(loads) >= 0
    if routing == "balanced":
        assert max(loads) - min(loads) <= 1
    else:
        assert all(after <= before + 1 for before, after in pairwise(loads))


def test_a_skewed_load_follows_the_power_law() -> None:
    loads = expert_loads(100_000, 8, "power_law_1.2")
    assert loads[0] / loads[3] == pytest.approx(4**1.2, rel=0.01)


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any))
def test_a_plan_has_tokens_that_exist_and_all_rows(loads: list[int]) -> None:
    plan = balanced_plan(loads, 7, CPU)
    assert plan.counts.tolist() == loads
    assert len(plan.row_token) == len(plan.row_weight) == sum(loads)
    assert int(plan.row_token.min()) >= 0
    assert int(plan.row_token.max()) < 7


def test_models_layers_as_products() -> None:
    shapes = model_shapes("zaya1-tiny", tokens=1024, gradients=False)
    # 4 heads of 32 on a hidden size of 128; 2 key heads; 4 experts, top-1, of 128; 1,024 words; and a null expert
    assert shapes == [
        (1024, 128, 128), (1024, 128, 128), (1024, 128, 128), (256, 256, 128), (256, 128, 128), (1024, 5, 128),
        (1024, 1024, 128),
    ]  # fmt: skip
    three = model_shapes("zaya1-tiny", tokens=1024, gradients=True)
    assert three[9:12] == [(256, 256, 128), (256, 128, 256), (256, 128, 256)]
    assert len(three) == 3 * len(shapes)


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("rate", [20e9, 110e9])
def test_products_on_a_cpu(known_machine: Any, quick: bool, rate: float) -> None:
    known_machine({"fp32": rate, "bf16": 1.5e9})
    cases = gemm_cases(CPU, quick)
    assert len({key(case) for case in cases}) == len(cases)
    usable = [case for case in cases if case.case["dtype"] == "fp32"]
    assert max(case.flops or 0 for case in usable) <= rate * (0.03 if quick else 0.3)
    slow = [case.case for case in cases if case.case["dtype"] == "bf16"]  # done in software: only to say how slow
    assert slow == [
        {"m": 256, "n": 256, "k": 256, "dtype": "bf16"},
        {"m": 256, "n": 256, "k": 256, "dtype": "bf16", "layout": "nt"},
    ]
    assert {case.op for case in cases} == {"gemm", "batched_gemm", "grouped_gemm", "moe_experts"}


@pytest.mark.parametrize("dim", ["n", "k"])
@pytest.mark.parametrize("device", [CPU, CUDA])
def test_sweeps_have_each_alignment_more_than_once(known_machine: Any, device: torch.device, dim: str) -> None:
    known_machine(RATES if device == CPU else {"bf16": 7e14, "fp32": 5e13})
    base = 512 if device == CPU else 4096
    others = {"m", "n", "k"} - {dim}
    swept = [
        int(case.case[dim])
        for case in gemm_cases(device, quick=True)
        if case.op == "gemm" and "layout" not in case.case and all(case.case[d] == base for d in others)
    ]
    for offset in (1, 2, 4, 8, 16, 32, 64):
        assert {base - offset, base + offset} <= set(swept)
    assert base in swept


def test_products_on_an_accelerator(known_machine: Any) -> None:
    known_machine({"fp8": 1.3e15, "bf16": 7e14, "fp16": 7e14, "fp32": 5e13})
    cases = gemm_cases(CUDA, quick=True)
    sizes = {d: [c.case for c in cases if c.case["dtype"] == d] for d in ("bf16", "fp8", "fp16", "fp32")}
    assert {"m": 16384, "n": 16384, "k": 16384, "dtype": "bf16"} in sizes["bf16"]
    assert len(sizes["bf16"]) > len(sizes["fp8"]) > 10  # sweeps in the dtype that one trains in only
    assert all(c["n"] % 16 == 0 and c["k"] % 16 == 0 for c in sizes["fp8"])  # type: ignore[operator]
    # The width 8 h / 3 of h = 4096, which is not aligned, and one that is.
    widths = {c["n"] for c in sizes["bf16"] if c.get("m") == 4096 and c.get("k") == 4096}
    assert {10922, 10944} <= widths


def test_little_memory_leaves_out_large_products(known_machine: Any) -> None:
    known_machine({"bf16": 7e14}, 2**30)
    for case in gemm_cases(CUDA, quick=True):
        if case.op == "gemm":
            assert (case.bytes_moved or 0) <= 2**28


def test_dtypes_in_the_order_of_use(known_machine: Any) -> None:
    assert operands.usable_dtypes(CPU) == ["fp32"]
    known_machine({"bf16": 400e9, "fp32": 110e9})
    assert operands.usable_dtypes(CPU) == ["bf16", "fp32"]
    known_machine({"fp8": 4.0, "fp16": 3.0, "bf16": 2.0, "fp32": 1.0})
    assert operands.usable_dtypes(CPU) == ["bf16", "fp16", "fp32", "fp8"]
    known_machine({"fp16": 3.0, "fp8": 2.0})
    assert operands.usable_dtypes(CPU) == ["fp16", "fp8"]
    known_machine({})
    with pytest.raises(MoestroError, match="none of the dtypes"):
        operands.usable_dtypes(CPU)


def test_a_look_at_this_cpu() -> None:
    rates = operands.product_rates(CPU)
    assert set(rates) <= {"fp32", "bf16"}
    assert 1e8 < rates["fp32"] < 1e14
    assert list(rates.values()) == sorted(rates.values(), reverse=True)
    assert operands.free_bytes(CPU) > 2**20


@pytest.mark.parametrize(
    ("op", "arrays"), [("copy", 2), ("scale", 2), ("add", 3), ("triad", 3), ("dot", 2), ("read", 1)]
)
def test_memory_loops(made: list[Tensor], op: str, arrays: int) -> None:
    case = memory_case(CPU, op, 4096)
    out = run(case)
    a, *rest = made
    b = rest[0]
    expected = {"copy": a, "scale": 3 * a, "add": a + b, "triad": a + 3 * b, "dot": a @ b, "read": a.sum()}[op]
    torch.testing.assert_close(out, expected)
    assert case.bytes_moved == arrays * 4096
    assert case.case == {"bytes": 4096, "dtype": "fp32"}
    assert a.numel() == 1024


@pytest.mark.parametrize(("quick", "largest"), [(True, 2**26), (False, 2**27)])
def test_sizes_of_memory_on_a_cpu(known_machine: object, quick: bool, largest: int) -> None:
    cases = memory_cases(CPU, quick)
    copies = [int(case.case["bytes"]) for case in cases if case.op == "copy"]
    assert copies[0] == 2**10
    assert copies[-1] == largest
    assert copies == sorted(set(copies))
    assert {case.op for case in cases} == {"copy", "scale", "add", "triad", "dot", "read"}


def test_memory_keeps_within_what_is_free(known_machine: Any) -> None:
    known_machine(RATES, 2**20)
    for case in memory_cases(CPU, quick=False):
        assert memory.ARRAYS[case.op] * int(case.case["bytes"]) <= 2**18
    known_machine(RATES, 0)
    assert {case.case["bytes"] for case in memory_cases(CPU, quick=True)} == {2**10}


def test_memory_on_an_accelerator(known_machine: Any) -> None:
    known_machine(RATES, 140 * 10**9)
    cases = memory_cases(CUDA, quick=False)
    assert max(int(case.case["bytes"]) for case in cases if case.op == "triad") == 2**32
    transfers = [case for case in cases if case.op == "host_to_device"]
    assert {case.case["pinned"] for case in transfers} == {0, 1}
    assert all(case.bytes_moved == case.case["bytes"] for case in transfers)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_forward_and_backward(made: list[Tensor], kv_heads: int) -> None:
    forward = attention_case(CPU, 2, 6, 4, kv_heads, 8, "fp32", "fwd")
    out = run(forward)
    q, k, v = made
    torch.testing.assert_close(out, causal_attention(q, k, v, causal=True))
    assert forward.flops == 4 * 2 * 4 * 6 * 6 * 8 / 2
    assert forward.bytes_moved == 4 * (q.numel() + k.numel() + v.numel() + out.numel())
    made.clear()
    backward = attention_case(CPU, 2, 6, 4, kv_heads, 8, "fp32", "bwd")
    call = backward.prepare()
    grads = call()
    q, k, v, grad = made
    expected = torch.autograd.grad(causal_attention(q, k, v, causal=True), (q, k, v), grad)
    torch.testing.assert_close(grads, expected)
    torch.testing.assert_close(call(), expected)  # again, as when timed
    assert backward.flops == 2.5 * forward.flops
    assert backward.bytes_moved == 4 * sum(2 * t.numel() for t in (q, k, v, grad))
    assert backward.case["causal"] == 1


def test_attention_of_one_token_to_its_cache(made: list[Tensor]) -> None:
    case = attention_case(CPU, 3, 9, 4, 2, 8, "fp32", "decode")
    out = run(case)
    q, k, v = made
    assert out.shape == (3, 4, 1, 8)
    torch.testing.assert_close(out, causal_attention(q, k, v, causal=False))
    assert case.flops == 4 * 3 * 4 * 9 * 8
    assert case.bytes_moved == 4 * (q.numel() + k.numel() + v.numel() + out.numel())
    assert case.case["causal"] == 0


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("device", [CPU, CUDA])
def test_attention_sweeps(known_machine: Any, device: torch.device, quick: bool) -> None:
    known_machine(RATES if device == CPU else {"bf16": 7e14})
    cases = attention_cases(device, quick)
    assert len({key(case) for case in cases}) == len(cases)
    forward = [case.case for case in cases if case.case["phase"] == "fwd"]
    assert {"fwd", "bwd", "decode"} == {case.case["phase"] for case in cases}
    assert {32, 64, 128, 256} <= {case["head_dim"] for case in forward}
    heads = max(int(case["kv_heads"]) for case in forward if case["heads"] == forward[0]["heads"])
    assert {1, heads} <= {case["kv_heads"] for case in forward}
    assert all(not case.bytes_moved or case.bytes_moved <= 4 * 2**30 for case in cases)


SMALL: dict[str, tuple[Case, float | None, float | None]] = {
    # numbers of fp32 moved, counted by hand for 3 tokens of width 64
    "rmsnorm": (elementwise.rmsnorm_case(CPU, 3, 64, "fp32"), None, 4 * (192 + 192 + 64)),
    "rmsnorm_backward": (elementwise.rmsnorm_backward_case(CPU, 3, 64, "fp32"), None, 4 * (3 * 192 + 2 * 64)),
    "residual_norm": (elementwise.residual_norm_case(CPU, 3, 64, "fp32"), None, 4 * (4 * 192 + 64)),
    "swiglu": (elementwise.swiglu_case(CPU, 3, 64, "fp32"), None, 4 * 3 * 192),
    "rope": (elementwise.rope_case(CPU, 3, 128, "fp32"), None, 4 * 2 * 384),
    "router": (elementwise.router_case(CPU, 3, 64, 5, 2, "fp32"), 2 * 3 * 64 * 5, 4 * (192 + 320)),
    "gather": (elementwise.gather_case(CPU, 3, 64, "fp32"), None, 4 * 2 * 192),
    "scatter": (elementwise.scatter_case(CPU, 3, 64, "fp32"), None, 4 * 3 * 192),
    "embedding": (elementwise.embedding_case(CPU, 3, 64, 7, "fp32"), None, 4 * 2 * 192),
    "embedding_backward": (elementwise.embedding_backward_case(CPU, 3, 64, 7, "fp32"), None, 4 * (192 + 448)),
    "cross_entropy": (elementwise.cross_entropy_case(CPU, 3, 64, 7, "fp32"), 6 * 3 * 64 * 7, 4 * (2 * 192 + 2 * 448)),
    "adamw": (elementwise.adamw_case(CPU, 50), None, 4 * 7 * 50),
    "newton_schulz": (elementwise.newton_schulz_case(CPU, 2, 6, 4), 5 * 2 * (4 * 16 * 6 + 2 * 64), None),
    "muon": (elementwise.muon_case(CPU, 2, 4, 6), 5 * 2 * (4 * 16 * 6 + 2 * 64), 4 * 5 * 48),
}


@pytest.mark.parametrize("op", SMALL)
def test_elementwise_counts(op: str) -> None:
    case, flops, moved = SMALL[op]
    assert case.op == op
    assert case.flops == flops
    assert case.bytes_moved == moved
    if flops is not None:
        seen = 2 / 3 if op == "cross_entropy" else 1  # PyTorch's counter does not see the product that adds in place
        assert counted_flops(case) == pytest.approx(seen * flops)


def test_elementwise_results(made: list[Tensor]) -> None:
    out = run(elementwise.rmsnorm_case(CPU, 3, 64, "fp32"))
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(made[-1], (64,), eps=1e-6))
    out = run(elementwise.residual_norm_case(CPU, 3, 64, "fp32"))
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(made[-2] + made[-1], (64,), eps=1e-6))
    out = run(elementwise.swiglu_case(CPU, 3, 64, "fp32"))
    torch.testing.assert_close(out, torch.nn.functional.silu(made[-2]) * made[-1])
    out = run(elementwise.rope_case(CPU, 3, 128, "fp32"))
    assert out.shape == (1, 2, 3, 64)
    torch.testing.assert_close(out.norm(dim=-1), made[-1].norm(dim=-1))  # a rotation
    assert run(elementwise.router_case(CPU, 3, 64, 5, 2, "fp32")).indices.shape == (3, 2)
    out = run(elementwise.gather_case(CPU, 5, 8, "fp32"))
    assert sorted(out[:, 0].tolist()) == sorted(made[-2][:, 0].tolist())
    out = run(elementwise.scatter_case(CPU, 5, 8, "fp32"))
    assert sorted(out[:, 0].tolist()) == sorted(made[-1][:, 0].tolist())
    hidden, weight = run(elementwise.cross_entropy_case(CPU, 3, 64, 7, "fp32"))
    assert hidden.shape == (3, 64)
    assert weight.shape == (7, 64)


@pytest.mark.parametrize("module", [elementwise, attention, gemm, memory])
def test_every_small_case_runs_here(known_machine: Any, module: ModuleType) -> None:
    known_machine({"fp32": 5e9, "bf16": 5e8}, 2**25)  # a slow machine gets small cases
    name = module.__name__.rsplit(".", 1)[-1]
    cases = [c for c in getattr(module, f"{name}_cases")(CPU, quick=True) if (c.bytes_moved or 0) < 2**24]
    cases = [case for case in cases if (case.flops or 0) < 5e7]
    samples, notes = measure_cases(cases, CPU, seconds_per_case=0.0, rounds=1)
    assert notes == []
    assert len(samples) == len(cases) > 4
    assert {s.op for s in samples} == {c.op for c in cases}


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("device", [CPU, CUDA])
def test_elementwise_sweeps(known_machine: object, device: torch.device, quick: bool) -> None:
    cases = elementwise_cases(device, quick)
    assert len({key(case) for case in cases}) == len(cases)
    assert {case.op for case in cases} == set(SMALL)
