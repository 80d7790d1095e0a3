import pytest
import torch

from moestro.config.moe import Activation
from moestro.model import ops
from moestro.model.moe.experts import Experts

from ..helpers import normal, relative
from .expert_cases import CHOICES, KINDS, LIMIT, NAMES, Case, choose


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(
    ("kind", "hidden", "width"),
    # grouped_mm needs rows of a multiple of 16 bytes.
    [(k, h, w) for k in ("reference", "segmented") for h, w in ((8, 12), (5, 7), (1, 1))] + [("grouped", 8, 12)],
)
def test_every_implementation_equals_single_pairs(kind: str, choice: str, hidden: int, width: int) -> None:
    case = Case(*CHOICES[choice], hidden, width)
    for name, found, expected in zip(NAMES, case.of(kind), case.of("pairs"), strict=False):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("activation", KINDS)
@pytest.mark.parametrize("kind", ["reference", "segmented", "grouped"])
def test_every_activation_with_and_without_biases(kind: str, activation: Activation, bias: bool) -> None:
    dtype, tolerance = (torch.float32, 2e-5) if kind == "grouped" else (torch.float64, 1e-12)
    for choice in CHOICES:
        case = Case(*CHOICES[choice], 8, 12, dtype, activation, bias)
        found, expected = case.of(kind), case.of("pairs")
        assert len(found) == len(expected) == 5 + 2 * bias
        for name, one, other in zip(NAMES, found, expected, strict=False):
            torch.testing.assert_close(
                one, other, rtol=tolerance, atol=tolerance, msg=lambda m, at=(choice, name): f"{at}: {m}"
            )


@pytest.mark.parametrize("kind", ["segmented", "grouped"])
def test_no_rows_at_all(kind: str) -> None:
    """A rank without tokens, and one to whose experts none came."""
    for tokens in (0, 3):
        case = Case(torch.full((tokens, 2), 4), 4, 8, 12, activation="clamped_swiglu", bias=True)
        out, *grads = case.of(kind)
        assert out.shape == (tokens, 8)
        assert all((t == 0).all() and t.shape == leaf.shape for t, leaf in zip(grads, case.leaves, strict=True))


@pytest.mark.parametrize("kind", ["reference", "segmented"])
@pytest.mark.parametrize("choice", ["idle_expert", "dropped_and_padding", "nothing_kept"])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_gradcheck(kind: str, choice: str, activation: Activation) -> None:
    ids, experts = CHOICES[choice]
    case = Case(ids[:5], experts, 3, 2, torch.float64, activation, bias=activation == "gelu")
    assert torch.autograd.gradcheck(lambda *leaves: case.combined(kind, leaves), case.leaves)


@pytest.mark.parametrize("kind", ["reference", "segmented", "grouped"])
def test_permuted_tokens_give_permuted_results(kind: str) -> None:
    case = Case(choose(16, 4, 2), 4, 8, 12)
    order = normal(16, seed=8).argsort()
    permuted = Case(case.ids[order], 4, 8, 12)
    permuted.leaves = [case.leaves[0][order], case.leaves[1][order], *case.leaves[2:]]
    permuted.upstream = case.upstream[order]
    out, grad_x, grad_weights, *grads = case.of(kind)
    again, again_x, again_weights, *again_grads = permuted.of(kind)
    torch.testing.assert_close(again, out[order], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(again_x, grad_x[order], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(again_weights, grad_weights[order], rtol=1e-5, atol=1e-5)
    for one, other in zip(again_grads, grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("native", [False, True], ids=["widened", "native"])
@pytest.mark.parametrize("kind", ["reference", "segmented", "grouped"])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("activation", "bias"), [("swiglu", False), ("clamped_swiglu", True)])
def test_bf16_is_close_to_fp32_on_rounded_operands(
    kind: str,
    weight_dtype: torch.dtype,
    native: bool,
    activation: Activation,
    bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ops, "cpu_has_bf16_units", lambda: native)
    case, wide = (
        Case(CHOICES["dropped_and_padding"][0], 4, 16, 24, activation=activation, bias=bias) for _ in range(2)
    )
    x, weights, *packed = (leaf.detach() for leaf in case.leaves)  # gate weights stay fp32
    x, packed = x.bfloat16(), [leaf.bfloat16() for leaf in packed]
    wide.leaves = [leaf.float().requires_grad_() for leaf in (x, weights, *packed)]
    wide.upstream = case.upstream.bfloat16().float()
    case.leaves = [leaf.clone().requires_grad_() for leaf in (x, weights, *(leaf.to(weight_dtype) for leaf in packed))]
    case.upstream = case.upstream.bfloat16()
    for name, found, expected in zip(NAMES, case.of(kind), wide.of("pairs"), strict=False):
        assert relative(found, expected) < 2e-2, name
        wanted = {"out": torch.bfloat16, "x": torch.bfloat16, "row_weight": torch.float32}.get(name, weight_dtype)
        assert found.dtype == wanted, name


@pytest.mark.parametrize("kind", ["reference", "segmented", "grouped"])
@pytest.mark.parametrize("choice", ["random", "nothing_kept"])
def test_the_same_without_gradients(kind: str, choice: str) -> None:
    case = Case(*CHOICES[choice], 8, 12)
    expected = case.of("pairs")[0]
    found = case.combined(kind, [leaf.detach() for leaf in case.leaves])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["segmented", "grouped"])
@pytest.mark.parametrize("frozen", range(6))
def test_a_frozen_input_gets_no_gradient(kind: str, frozen: int) -> None:
    case = Case(*CHOICES["random"], 8, 12, bias=True)
    expected = case.of("pairs")
    case.leaves[frozen].requires_grad_(False)
    case.combined(kind).backward(case.upstream)
    for i, leaf in enumerate(case.leaves):
        if i == frozen:
            assert leaf.grad is None
        else:
            torch.testing.assert_close(leaf.grad, expected[i + 1], rtol=1e-5, atol=1e-5)


def test_auto_is_segmented_on_a_cpu_and_follows_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(*CHOICES["random"], 8, 12)
    plan = case.plan(case.leaves[1])
    names = {
        "auto": "SegmentedExpertsBackward",
        "segmented": "SegmentedExpertsBackward",
        "grouped": "GroupedExpertsBackward",
        "reference": "CatBackward0",
    }
    for setting, name in names.items():
        layer = Experts(4, 8, 12, setting)  # type: ignore[arg-type]
        out = layer(case.leaves[0], plan)
        assert out.grad_fn is not None
        assert out.grad_fn.name() == name


@pytest.mark.parametrize("kind", ["reference", "segmented", "grouped"])
def test_equals_gpt_oss(kind: str) -> None:
    """Transformers' experts, which are transposed and have gate and up in alternating columns."""
    theirs = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    config = theirs.GptOssConfig(
        hidden_size=8, intermediate_size=12, num_local_experts=4, swiglu_limit=LIMIT, experts_implementation="eager"
    )
    experts = theirs.GptOssExperts(config)
    ids, _ = CHOICES["random"]
    case = Case(ids, 4, 8, 12, activation="clamped_swiglu", bias=True)
    x, weights, gate_up, down, gate_up_bias, down_bias = case.leaves
    with torch.no_grad():
        experts.gate_up_proj.copy_(gate_up.permute(0, 3, 2, 1).flatten(2))
        experts.gate_up_proj_bias.copy_(gate_up_bias.transpose(1, 2).flatten(1))
        experts.down_proj.copy_(down.transpose(1, 2))
        experts.down_proj_bias.copy_(down_bias)
    tokens, gates = (t.detach().clone().requires_grad_() for t in (x, weights))
    expected = experts(tokens, ids, gates)
    expected.backward(case.upstream)
    found, grad_x, grad_weights, grad_gate_up, grad_down, grad_gate_up_bias, grad_down_bias = case.of(kind)
    for one, other in (
        (found, expected),
        (grad_x, tokens.grad),
        (grad_weights, gates.grad),
        (grad_gate_up.permute(0, 3, 2, 1).flatten(2), experts.gate_up_proj.grad),
        (grad_gate_up_bias.transpose(1, 2).flatten(1), experts.gate_up_proj_bias.grad),
        (grad_down.transpose(1, 2), experts.down_proj.grad),
        (grad_down_bias, experts.down_proj_bias.grad),
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
