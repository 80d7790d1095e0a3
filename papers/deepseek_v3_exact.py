"""The exact checks of DeepSeek-V3's routing, multi-token prediction and latent attention.

`deepseek_v3.py` runs them.
"""

import torch
from torch import Tensor

from moestro.config import MoEConfig, OptimConfig, load_config
from moestro.model.attention.mla import LatentAttention
from moestro.model.moe.router import Router, Routing, TokenGroups
from moestro.model.transformer import Transformer
from moestro.optim.update import Update
from moestro.parallel.build import whole_parts
from moestro.train.engine import alone
from moestro.train.step import train_step
from papers.result import Check, verdict_of
from papers.toys import HiddenClusters

HIDDEN, VOCAB_SIZE = 32, 64
TOLERANCE = 1e-5


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def router_of(*overrides: str) -> Router:
    """DeepSeek-V3's, of a narrower model; experts differ in how much all tokens like them, by their first weight."""
    config = load_config("deepseek-v3", overrides).config.model.model_copy(update={"hidden_size": HIDDEN})
    router = Router(config, config.num_layers - 1)
    with torch.no_grad():
        router.weight.copy_(normal(*router.weight.shape, seed=1) * HIDDEN**-0.5)
        router.weight[:, 0] = torch.linspace(-1, 1, len(router.weight))
    return router


def tokens(count: int) -> Tensor:
    x = normal(count, HIDDEN, seed=2)
    x[:, 0] = 1
    return x


def groups_visited(routing: Routing, moe: MoEConfig) -> Tensor:
    """[T] for each token."""
    group = routing.expert_ids // (moe.resolved_num_experts // 8)
    return torch.nn.functional.one_hot(group, 8).amax(1).sum(1)


def slowly(scores: Tensor, bias: Tensor, top_k: int, top_groups: int) -> list[list[int]]:
    """The chosen experts of each token of [T, E] scores, by hand: 8 groups, ranked by the sum of their best two."""
    chosen = []
    for row in (scores + bias).tolist():
        size = len(row) // 8
        groups = [range(g * size, (g + 1) * size) for g in range(8)]
        ranked = sorted(groups, key=lambda group: -sum(sorted((row[e] for e in group), reverse=True)[:2]))
        candidates = [expert for group in ranked[:top_groups] for expert in group]
        chosen.append(sorted(sorted(candidates, key=lambda expert: -row[expert])[:top_k]))
    return chosen


@torch.no_grad()
def check_groups() -> Check:
    count, x = 512, tokens(512)
    router, free = router_of(), router_of("model.moe.router.num_groups=1", "model.moe.router.top_groups=1")
    bias = 0.1 * normal(len(router.bias), seed=3)
    router.bias.copy_(bias)
    free.bias.copy_(bias)
    routing = router(x, TokenGroups(count))[0]
    visited, unlimited = (groups_visited(r, router.moe) for r in (routing, free(x, TokenGroups(count))[0]))
    expected = slowly((x @ router.weight.t()).sigmoid(), bias, router.top_k, router.config.top_groups)
    same = sum(sorted(ids) == by_hand for ids, by_hand in zip(routing.expert_ids.tolist(), expected, strict=True))
    most, without = int(visited.max()), int(unlimited.max())
    return Check(
        claim="A token's experts lie in at most 4 of 8 groups (nodes)",
        published="at most M = 4 nodes, ranked by the sum of their best two scores",
        ours=f"in {most} at most, for {count} tokens; in up to {without} without the limit",
        how="measured",
        verdict=verdict_of([most == router.config.top_groups < without, same == count]),
        note=f"256 experts, top-8, skewed scores and random biases; {same} of {count} choices as by sorting by hand. "
        f"{float((visited < 4).float().mean()):.0%} of the tokens stay within fewer groups.",
    )


def load_ratio(routing: Routing) -> float:
    """Of the busiest expert's load to the mean."""
    return float(routing.stats.load.max() / routing.stats.load.mean())


@torch.no_grad()
def check_bias(steps: int = 300) -> Check:
    router = router_of("model.moe.num_experts=32", "model.moe.top_k=4")
    x, groups = tokens(1024), TokenGroups(1024)
    routing = router(x, groups)[0]
    start, first = load_ratio(routing), routing.expert_ids
    for _ in range(steps):
        router.update_balance(routing.stats.load, routing.stats.sums)
        routing = router(x, groups)[0]
    end, moved = load_ratio(routing), (routing.expert_ids.sort(-1).values != first.sort(-1).values).any(-1)
    scores = (x @ router.weight.t()).sigmoid()
    gates = {}
    for name, values in (("free", scores), ("biased", scores + router.bias)):
        chosen = values.gather(1, routing.expert_ids)
        gates[name] = router.config.scaling_factor * chosen / chosen.sum(-1, keepdim=True)
    free, biased = (float((routing.weights - gate).abs().max()) for gate in (gates["free"], gates["biased"]))
    return Check(
        claim="The bias drives max / mean load to 1, and never enters a gate",
        published="b ± γ after each step, γ = 0.001; gates from the scores alone",
        ours=f"max / mean {start:.2f} → {end:.2f} in {steps} steps; gates {free:.0e} from those of the scores",
        how="measured",
        verdict=verdict_of([start > 2, end < 1.1, free < TOLERANCE, biased > 1e-2]),
        note=f"32 experts, top-4 in 4 of 8 groups, 1,024 fixed tokens with skewed scores; {int(moved.sum())} tokens "
        f"choose otherwise than at first. Gates with the bias in them would be up to {biased:.2g} away.",
    )


@torch.no_grad()
def check_sequence_loss() -> Check:
    sequences, length = 6, 40
    router, x = router_of("model.moe.num_experts=32", "model.moe.top_k=4"), tokens(240)
    routing = router(x, TokenGroups(length))[0]
    scores = (x @ router.weight.t()).sigmoid()
    shares = scores / scores.sum(-1, keepdim=True)
    total = torch.zeros(())
    for s in range(sequences):
        mine = slice(s * length, (s + 1) * length)
        count = torch.bincount(routing.expert_ids[mine].flatten(), minlength=32)
        f = 32 / (4 * length) * count  # N_r / (K_r T) of the times that an expert is chosen
        total += (f * shares[mine].mean(0)).sum()
    apart = abs(float(routing.stats.aux_loss - total / sequences))
    return Check(
        claim="The small balance loss is Σ f_i P_i of each sequence",
        published="f from counts times N_r / (K_r T), P the mean of normalised scores; coefficient 1e-4",
        ours=f"{float(routing.stats.aux_loss):.6f}, {apart:.0e} from the sum by hand",
        how="computed",
        verdict=verdict_of([apart < TOLERANCE]),
        note=f"{sequences} sequences of {length} tokens, 32 experts, top-4; the mean over sequences.",
    )


def tiny(with_mtp: bool) -> Transformer:
    """The preset deepseek-v3-tiny with initial weights."""
    config = load_config("deepseek-v3-tiny").config.model
    changes = {"vocab_size": VOCAB_SIZE} | ({} if with_mtp else {"mtp": None})
    model = Transformer(config.model_copy(update=changes))
    model.init_weights(0)
    return model


def trained(with_mtp: bool, steps: int = 3) -> tuple[Transformer, float]:
    """After a few steps, in evaluation; and the last loss of the token after the next."""
    model = tiny(with_mtp).train()
    engine, task, ahead = alone(model), HiddenClusters(VOCAB_SIZE, 0), 0.0
    update = Update([model], OptimConfig(lr=3e-3), engine.mesh, whole_parts(model), "auto")
    for _ in range(steps):
        ahead = train_step(engine, update, [task.batch(4, 32)], grad_clip=1.0).mtp_loss.item()
    return model.eval(), ahead


def check_mtp() -> Check:
    (model, ahead), (never, _), plain = trained(True), trained(False), tiny(False).eval()
    kept = {name: value for name, value in model.state_dict().items() if not name.startswith("mtp.")}
    dropped = len(model.state_dict()) - len(kept)
    plain.load_state_dict(kept)
    ids = torch.randint(VOCAB_SIZE, (2, 32), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        logits, without, other = (m.logits(m(ids).hidden) for m in (model, plain, never))
    equal, moved = torch.equal(logits, without), float((logits - other).abs().max())
    return Check(
        claim="Without its MTP block the model's own logits are the same",
        published="the block is dropped, or used to guess ahead, when text is generated",
        ours=f"{'equal to the last bit' if equal else 'not equal'} without {dropped} tensors",
        how="measured",
        verdict=verdict_of([equal, dropped > 0, moved > 1e-3, ahead > 0]),
        note=f"deepseek-v3-tiny after three steps with the block (its loss {ahead:.2f}), which had an effect: a model "
        f"trained without it has logits up to {moved:.2g} away.",
    )


@torch.no_grad()
def check_absorbed(count: int = 96) -> Check:
    model = tiny(False).eval()
    ids = torch.randint(VOCAB_SIZE, (1, count), generator=torch.Generator().manual_seed(5))
    rows = {"whole": 0, "one by one": 0}
    phase = "whole"

    def note_rows(_module: torch.nn.Module, _inputs: object, out: Tensor) -> None:
        rows[phase] += out[..., 0].numel()

    for block in model.blocks():
        assert isinstance(block.self_attn, LatentAttention)
        block.self_attn.kv_b_proj.register_forward_hook(note_rows)
    expected = model.logits(model(ids).hidden)
    cache = model.new_cache(1, count, "cpu", torch.float32)
    first, *rest = ids.split([count // 2, *[1] * (count - count // 2)], 1)
    found = [model.logits(model(first, cache=cache).hidden)]
    phase = "one by one"
    found += [model.logits(model(token, cache=cache).hidden) for token in rest]
    apart = float((torch.cat(found, 1) - expected).abs().max() / expected.abs().max())
    return Check(
        claim="Decoding from latents, with the up-projections absorbed, gives what plain attention gives",
        published="absorbed into the query and output projections (DeepSeek-V2, section 2.1.2)",
        ours=f"logits at most {apart:.0e} apart over {count} tokens; {rows['one by one']} rows of keys and values made",
        how="measured",
        verdict=verdict_of([apart < TOLERANCE, rows["one by one"] == 0 < rows["whole"]]),
        note=f"deepseek-v3-tiny, {count // 2} tokens at once and {len(rest)} one by one, fp32. The sequence as a whole "
        "and the first half go through the up-projection of keys and values.",
    )
