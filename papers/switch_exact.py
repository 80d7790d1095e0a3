"""What is exact in Switch Transformers: balance loss, capacity, precision, jitter, groups; and its parameter table."""

from dataclasses import replace

import torch

from moestro.config import BalanceConfig, ModelConfig, MoEConfig, RouterConfig
from moestro.model.moe.dispatch import dispatch
from moestro.model.moe.router import Router, TokenGroups
from papers.encoder_decoder import Shape
from papers.result import Check, verdict_of

CAPACITY_FACTORS = (0.5, 1.0, 1.25, 2.0)
GROUP = 1024  # tokens; the authors' group_size, and in the trained toy half a step's batch


def _router(num_experts: int, hidden: int = 32, fp32: bool = True, scope: str = "group", **router: float) -> Router:
    """A Switch router with random weights of standard deviation 1 / sqrt(hidden)."""
    config = RouterConfig.model_validate({"renormalize": False, "fp32": fp32, **router})
    balance = BalanceConfig.model_validate({"aux_scope": scope})
    moe = MoEConfig(num_experts=num_experts, top_k=1, expert_hidden_size=8, router=config, balance=balance)
    result = Router(ModelConfig(hidden_size=hidden, num_layers=1, num_heads=1, moe=moe), layer=0)
    torch.nn.init.normal_(result.weight, std=hidden**-0.5, generator=torch.Generator().manual_seed(0))
    return result


def _tokens(count: int, hidden: int = 32) -> torch.Tensor:
    return torch.randn(count, hidden, generator=torch.Generator().manual_seed(1))


def check_uniform_loss() -> Check:
    """With a zero router every score is 1/E, and E · Σ f_i P_i = Σ f_i = 1 whatever f is."""
    values = []
    for num_experts in (2, 8, 64, 128):
        router = _router(num_experts)
        torch.nn.init.zeros_(router.weight)
        values.append(router(_tokens(256), TokenGroups(256))[0].stats.aux_loss.item())
    exact = all(value == 1.0 for value in values)
    return Check(
        claim="The balance loss is α at uniform routing",
        published="α",
        ours="α · " + " / ".join(f"{value:g}" for value in values) + " with 2/8/64/128 experts",
        how="computed",
        verdict="holds" if exact else "does not hold",
        note="Eq. 4, E · Σ f_i P_i before its coefficient; compared exactly, in fp32.",
    )


def check_gradient() -> Check:
    """∂(E · Σ f_i P_i)/∂W with f held constant is the gradient the router gets."""
    num_experts, router, x = 8, _router(8), _tokens(512)
    routing = router(x, TokenGroups(512))[0]
    (gradient,) = torch.autograd.grad(routing.stats.aux_loss, router.weight)
    share = routing.stats.load / routing.stats.load.sum()
    by_hand = num_experts * (share.detach() * torch.softmax(x @ router.weight.t(), -1).mean(0)).sum()
    (expected,) = torch.autograd.grad(by_hand, router.weight)
    norm, error = gradient.norm().item(), (gradient - expected).norm().item()
    return Check(
        claim="The balance loss reaches the router through P alone; f carries no gradient",
        published="f is not differentiable, P is",
        ours=f"gradient norm {norm:.3g}, {error:.1e} away from that of the formula with f constant",
        how="computed",
        verdict="holds" if norm > 1e-4 and error < 1e-5 * norm + 1e-8 else "does not hold",
        note="8 experts, 512 random tokens, fp32.",
    )


def check_conservation() -> Check:
    """Every token is either a row of one expert or counted as dropped."""
    tokens, exact, parts = 1000, True, []
    for factor in CAPACITY_FACTORS:
        router = _router(8, capacity_factor=factor, group_size=250)
        routing = router(_tokens(tokens), TokenGroups(250))[0]
        routed, dropped = int(dispatch(routing, 8).counts.sum()), int(routing.stats.dropped)
        exact = exact and routed + dropped == tokens
        parts.append(f"{routed}+{dropped}")
    return Check(
        claim="routed + dropped = tokens",
        published="dropped tokens pass through the residual only",
        ours=f"{', '.join(parts)} of {tokens}",
        how="computed",
        verdict="holds" if exact else "does not hold",
        note="Capacity factors 0.5, 1, 1.25 and 2; expert rows after dispatch against the router's own count.",
    )


def check_precision() -> Check:
    """Experts whose scores nearly tie: bf16 logits round to equal numbers, fp32 ones do not."""
    tokens, groups = 4096, TokenGroups(4096)
    x = _tokens(tokens).bfloat16()
    chosen = {}
    for name, fp32, inputs in (("fp32", True, x.float()), ("selective", True, x), ("bf16", False, x)):
        router = _router(8, fp32=fp32)
        with torch.no_grad():
            router.weight.copy_(router.weight[:1] + 1e-3 * router.weight)
        chosen[name] = router(inputs, groups)[0].expert_ids
    selective = int((chosen["selective"] != chosen["fp32"]).sum())
    low = int((chosen["bf16"] != chosen["fp32"]).sum())
    return Check(
        claim="Selective precision: an fp32 router on bf16 activations routes as full fp32 does",
        published="quality −1.716 selective, −1.718 fp32, −3.780 bf16",
        ours=f"tokens routed differently from fp32: {selective} selective, {low} bf16, of {tokens}",
        how="computed",
        verdict="holds" if selective == 0 and low > 0 else "does not hold",
        note="8 experts whose router weights differ by a thousandth. Choices, not the published training quality.",
    )


def check_jitter() -> Check:
    """Noise on the router's input moves near-tied tokens, repeats from its seeds, and is absent in evaluation."""
    x, seeds = _tokens(4096), torch.arange(16)
    groups = TokenGroups(256, noise_seeds=seeds)
    router = _router(8, jitter=1e-2)
    noisy, again = (router(x, groups)[0].expert_ids for _ in range(2))
    second_half = router(x[2048:], TokenGroups(256, noise_seeds=seeds[8:]))[0].expert_ids
    calm = _router(8)(x, groups)[0].expert_ids
    evaluated = router.eval()(x, groups)[0].expert_ids
    moved = int((noisy != calm).sum())
    repeats = torch.equal(noisy, again) and torch.equal(noisy[2048:], second_half)
    acts = moved > 0 and repeats and torch.equal(evaluated, calm)
    return Check(
        claim="Input jitter of 1e-2 acts while training, and only then",
        published="multiplicative, uniform in [1 − 1e-2, 1 + 1e-2] (authors' code)",
        ours=f"{moved} of 4096 tokens change expert; 0 in evaluation",
        how="computed",
        verdict="holds" if acts else "does not hold",
        note="The noise is a function of (sample, layer): it repeats, and however the batch is cut it is the same.",
    )


def check_groups() -> Check:
    """Eight groups, each wanting one expert of its own: even over the batch, as uneven as can be in every group."""
    experts, size = 8, 128
    x = 40 * torch.eye(experts).repeat_interleave(size, 0)
    loss, dropped = {}, {}
    for scope, group_size in (("group", size), ("micro_batch", size * experts)):
        router = _router(experts, hidden=experts, scope=scope, capacity_factor=1.0, group_size=group_size)
        with torch.no_grad():
            router.weight.copy_(torch.eye(experts))
        stats = router(x, TokenGroups(size))[0].stats
        loss[scope], dropped[scope] = stats.aux_loss.item(), stats.dropped.item() / len(x)
    acts = loss == {"group": 8.0, "micro_batch": 1.0} and dropped == {"group": 7 / 8, "micro_batch": 0.0}
    return Check(
        claim="Balance loss and capacity are per group of tokens, not over the batch",
        published="group_size = 1024 (authors' code)",
        ours=f"loss {loss['group']:g} and {dropped['group']:.1%} dropped per group; {loss['micro_batch']:g} and "
        f"{dropped['micro_batch']:.0%} over the batch",
        how="computed",
        verdict="holds" if acts else "does not hold",
        note="Eight groups whose tokens all want one expert, each group another. aux_scope = 'group' and "
        "router.group_size against one group of the whole batch.",
    )


# Counted.

# The paper's table 9.
TABLE = (
    Shape("T5-Base", "0.2", 768, 2048, 12, 12),
    Shape("Switch-Base", "7", 768, 2048, 12, 12, experts=128),
    Shape("T5-Large", "0.7", 1024, 2816, 24, 16),
    Shape("Switch-Large", "26", 1024, 2816, 24, 16, experts=128),
    Shape("T5-XXL", "11", 4096, 10240, 24, 64),
    Shape("Switch-C", "1571", 2080, 6144, 15, 32, experts=2048, every=1, matrices=2),
)
XXL = Shape("Switch-XXL", "395", 4096, 10240, 24, 64, experts=64)
TEACHERS = {16: "1.1", 32: "2.0", 64: "3.8", 128: "7.4", 256: "14.7"}


def check_table() -> Check:
    open_rows = [shape for shape in TABLE if not shape.closes]
    high = max(shape.billions / float(shape.published) - 1 for shape in open_rows)
    # T5 1.0's Large has an ungated feed-forward.
    ungated = [replace(shape, width=4096, matrices=2) for shape in open_rows]
    return Check(
        claim="Published parameter counts follow from the published shapes (billions)",
        published=", ".join(f"{shape.name} {shape.published}" for shape in TABLE),
        ours=", ".join(f"{shape.name} {shape.billions:.4g}" for shape in TABLE),
        how="computed",
        verdict="holds in part" if open_rows else "holds",
        note=f"{len(TABLE) - len(open_rows)} of {len(TABLE)} rows to the last printed digit. "
        f"{' and '.join(shape.name for shape in open_rows)} are up to {high:.0%} high with the listed gated "
        "feed-forward of width 2816; two matrices of width 4096, as in T5 1.0, give "
        f"{', '.join(f'{shape.billions:.4g}' for shape in ungated)}, of which {sum(s.closes for s in ungated)} close. "
        "Switch-XXL has a check of its own.",
    )


def check_teachers() -> Check:
    shapes = [replace(TABLE[1], experts=experts, published=size) for experts, size in TEACHERS.items()]
    return Check(
        claim="Sizes of Switch-Base with 16/32/64/128/256 experts (billions)",
        published=" / ".join(TEACHERS.values()),
        ours=" / ".join(f"{shape.billions:.2f}" for shape in shapes),
        how="computed",
        verdict=verdict_of(shape.closes for shape in shapes),
        note="The distillation teachers; a gated feed-forward of width 2048, a mixture in every other layer.",
    )


def check_xxl() -> Check:
    doubled = replace(XXL, experts=128)
    return Check(
        claim="Switch-XXL's size from its listed 64 experts (billions)",
        published=XXL.published,
        ours=f"{XXL.billions:.1f} with 64 experts; {doubled.billions:.1f} with 128",
        how="computed",
        verdict="holds" if XXL.closes else "arithmetic does not close",
        note="The published total fits twice the listed number of experts"
        + (", to the last printed digit." if doubled.closes else ", roughly."),
    )
