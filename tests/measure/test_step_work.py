"""Kinds, FLOPs and bytes of operations, against torch's own operations on small tensors."""

import pytest
import torch
from torch.nn import functional as F

from moestro.hardware.profile import Sample
from moestro.measure.primitives import Call, Event
from moestro.measure.step_calls import CallRecorder, Lookup, Work, call_key, event_key, event_operands
from moestro.measure.step_replay import Limits, limits_of, prepare
from moestro.measure.step_work import Gemm, Operand, bytes_of, flops_of, gemm_of, kind_of


def operand(*shape: int, read: bool = True, written: bool = False, stride: tuple[int, ...] | None = None) -> Operand:
    return Operand(shape, stride or tuple([1] * len(shape)), "fp32", 4, read, written)


def work_of(function: object, *args: object) -> list[Work]:
    with CallRecorder() as recorder:
        function(*args)  # type: ignore[operator]
    return list(recorder.work.values())


@pytest.mark.parametrize(
    ("op", "part", "phase", "is_view", "kind"),
    [
        ("aten::addmm_", "experts", "backward", False, "gemm"),
        ("moestro::grouped_mm", "experts", "forward", False, "gemm"),
        ("aten::mm", "optimizer", "optimizer", False, "gemm"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention", "backward", False, "attention"),
        ("aten::_softmax", "router", "forward", False, "softmax, top-k"),
        ("aten::_log_softmax", "head and loss", "forward", False, "loss"),
        ("aten::index_add_", "experts", "forward", False, "gather, scatter"),
        ("aten::embedding_dense_backward", "embedding", "backward", False, "embedding"),
        ("aten::mul", "norms", "forward", False, "norm"),
        ("aten::mul", "experts", "forward", False, "elementwise"),
        ("aten::_fused_adamw_", "optimizer", "optimizer", False, "optimizer"),
        ("aten::lerp_", "optimizer", "optimizer", False, "optimizer"),
        ("aten::sum", "router", "forward", False, "reduction"),
        ("aten::_to_copy", "attention", "forward", False, "copy"),
        ("aten::slice", "attention", "forward", True, "view"),
        ("aten::_unsafe_view", "attention", "forward", False, "view"),
        ("c10d::allreduce_", "step", "step", False, "collective"),
    ],
)
def test_kinds(op: str, part: str, phase: str, is_view: bool, kind: str):
    assert kind_of(op, part, phase, is_view) == kind


def test_products():
    assert gemm_of("aten::mm", [operand(3, 5), operand(5, 7)]) == Gemm(1, 3, 7, 5)
    assert gemm_of("aten::addmm_", [operand(3, 7), operand(3, 5), operand(5, 7)]) == Gemm(1, 3, 7, 5)
    assert gemm_of("aten::bmm", [operand(2, 3, 5), operand(2, 5, 7)]) == Gemm(2, 3, 7, 5)
    assert gemm_of("aten::mv", [operand(3, 5), operand(5)]) == Gemm(1, 3, 1, 5)
    assert gemm_of("moestro::grouped_mm", [operand(8, 5), operand(4, 5, 7), operand(4)]) == Gemm(4, 2, 7, 5)
    assert gemm_of("aten::mul", [operand(3, 5), operand(3, 5)]) is None
    assert Gemm(2, 3, 7, 5).flops == 2 * 2 * 3 * 7 * 5
    # Nine rows in two groups: the rows count, not the groups' rounded mean.
    assert flops_of("moestro::grouped_mm", [operand(9, 5), operand(2, 5, 7), operand(2)]) == 2 * 9 * 5 * 7
    assert flops_of("moestro::grouped_mm_weight_grad", [operand(9, 5), operand(9, 7), operand(2)]) == 2 * 9 * 5 * 7


def test_attention_counts_the_causal_half_and_no_recomputed_scores():
    query, key, value = torch.ones(2, 4, 6, 8), torch.ones(2, 2, 6, 8), torch.ones(2, 2, 6, 8)
    for tensor in (query, key, value):
        tensor.requires_grad_()
    forward_flops = 2 * 2 * 4 * (6 * 7 / 2) * (8 + 8)

    def both() -> None:
        F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).sum().backward()

    flops = [w.flops for w in work_of(both) if "scaled_dot" in str(w.function)]
    assert flops == [forward_flops, 2 * forward_flops]


def test_a_convolution_counts_its_backward_by_the_gradients_that_are_wanted():
    x, weight = torch.ones(2, 4, 10), torch.ones(6, 2, 3, requires_grad=True)

    def both(x: torch.Tensor) -> None:
        F.conv1d(x, weight, groups=2).sum().backward()

    one = 2 * (2 * 6 * 8) * (2 * 3)
    convolutions = [w.flops for w in work_of(both, x) if "convolution" in str(w.function)]
    assert convolutions == [one, one]
    wanted = [w.flops for w in work_of(both, x.requires_grad_()) if "convolution" in str(w.function)]
    assert wanted == [one, 2 * one]


def test_bytes_are_of_what_is_read_and_written_once():
    x, y = torch.ones(10, 4), torch.ones(10, 1).expand(10, 4)
    assert [w.bytes_moved for w in work_of(torch.mul, x, y)] == [160 + 40 + 160]
    assert [w.bytes_moved for w in work_of(x.add_, y)] == [320 + 40]
    assert [w.bytes_moved for w in work_of(x.copy_, torch.ones(10, 4))][-1] == 320
    assert [w.bytes_moved for w in work_of(x.view, 40)] == [0]
    assert [w.bytes_moved for w in work_of(torch.empty, 100)] == [0]
    with CallRecorder() as recorder:
        torch.mm(torch.ones(2, 3), torch.ones(3, 4), out=torch.empty(2, 4))
    assert [w.bytes_moved for key, w in recorder.work.items() if "mm" in key] == [4 * (6 + 12 + 8)]


def test_of_a_table_only_the_rows_taken_count():
    # 5 of 1,000 rows of 8: read and written once, and 5 indices.
    table, ids, rows = (
        operand(1000, 8),
        Operand((5,), (1,), "int64", 8, True, False),
        operand(5, 8, read=False, written=True),
    )
    assert bytes_of("aten::index_select", [table, ids, rows]) == 2 * (160 + 40)
    assert bytes_of("aten::mul", [operand(5, 8), operand(5, 8), rows]) == 480


def test_events_and_calls_make_the_same_key():
    a, b = torch.ones(3, 5), torch.ones(7, 5, dtype=torch.bfloat16).t()
    from_call = call_key("aten::mm", [a, b, 1.0, None])
    from_event = event_key(
        "aten::mm", [[3, 5], [5, 7], [], []], [[5, 1], [1, 5], [], []], ["float", "c10::BFloat16", "Scalar", ""]
    )
    assert from_call == from_event == "aten::mm 3×5@5×1fp32 5×7@1×5bf16"
    listed = call_key("aten::cat", [[a, a], 0])
    assert listed == event_key("aten::cat", [[[3, 5], [3, 5]], []], [[[5, 1], [5, 1]], []], ["TensorList", "Scalar"])
    assert call_key("aten::mm", [a.double(), b]) != from_call


def test_a_call_whose_key_the_events_cannot_make_is_found_by_its_number():
    x, few, many = torch.ones(4, 2), torch.tensor([0, 1]), torch.tensor([0, 1, 2])
    with CallRecorder() as recorder:
        x[few], x[many]
    event = Event("aten::index", 0, 1, key="aten::index 4×2@2×1fp32")
    lookup = Lookup(recorder, ["aten::index", "aten::index"])
    found = [lookup.find(event)[1], lookup.find(event)[1]]
    assert [w.operands[-1].shape for w in found if w] == [(2, 2), (3, 2)]
    other = Lookup(recorder, ["aten::index"])  # another number of them: no telling which is which
    assert other.find(event) == (event.key, None)


def test_an_event_that_was_not_taken_down_keeps_its_operands():
    found = event_operands("aten::add_", [[3, 5], [3, 5], []], [[5, 1], [5, 1], []], ["float", "float", "Scalar"])
    assert [(o.shape, o.read, o.written) for o in found] == [((3, 5), True, True), ((3, 5), True, False)]


@pytest.mark.parametrize("seed", range(3))
def test_a_replayed_call_has_the_operands_of_the_first(seed: int):
    torch.manual_seed(seed)
    x, ids, mask = torch.randn(6, 4).t(), torch.randint(0, 4, (5,)), torch.rand(4, 1).gt(0.5).expand(4, 6)

    def calls() -> None:
        x[ids]
        x.masked_fill(mask, 0.0)
        torch.zeros(4, 6).index_add_(0, ids, torch.ones(5, 6))

    for work in work_of(calls):
        result = prepare(work)()
        assert isinstance(result, torch.Tensor)
        assert result.shape == work.operands[-1].shape or work.function._schema.is_mutable
    gathered = next(w for w in work_of(calls) if "index.Tensor" in str(w.function))
    assert torch.equal(gathered.args[1][0].values, ids)
    masked = next(w for w in work_of(calls) if "masked_fill" in str(w.function))
    assert masked.args[1].stride == mask.stride()


def test_repeating_a_call_in_place_stays_clear_of_denormals():
    x = torch.ones(8)
    work = work_of(x.mul_, torch.full((8,), 0.5))[-1]
    call = prepare(work)
    for _ in range(1000):
        result = call()
    assert isinstance(result, torch.Tensor)
    assert float(result.abs().min()) >= 1e-3


def test_the_floor_takes_the_slower_of_products_and_bytes():
    limits = Limits({"fp32": 1e9}, [(1000.0, 1e9), (1e6, 1e8)])
    product = Call("aten::mm", "", "forward", "", "gemm", (operand(1),), None, 1e6, 100.0)
    assert limits.floor_s(product) == 1e-3
    copies = [
        Call("aten::add", "", "forward", "", "elementwise", (operand(1),), None, 0.0, size) for size in (500.0, 1e7)
    ]
    assert [limits.floor_s(c) for c in copies] == [500 / 1e9, 1e7 / 1e8]


def test_the_best_rate_is_that_of_the_fastest_product_measured():
    def sample(op: str, dtype: str, flops: float) -> Sample:
        return Sample(op=op, case={"dtype": dtype}, median_s=1.0, flops=flops)

    limits = Limits({"fp32": 5.0}, [(1.0, 1.0)])
    found = limits.raised([sample("gemm", "fp32", 7.0), sample("gemm", "bf16", 3.0), sample("attention", "fp32", 9.0)])
    assert found.flops_per_s == {"fp32": 7.0, "bf16": 3.0}


def test_a_copy_is_as_fast_as_the_best_of_its_size_or_larger():
    samples = [
        Sample(op="copy", case={"bytes": size}, median_s=seconds, bytes_moved=2.0 * size)
        for size, seconds in ((1000, 1e-6), (10_000, 1e-6), (100_000, 1e-4))
    ]
    assert limits_of(samples, {"fp32": 1.0}).copies == [(2e3, 2e10), (2e4, 2e10), (2e5, 2e9)]
