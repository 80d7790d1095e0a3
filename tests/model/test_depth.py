"""Mixture of depths: who is admitted, what becomes of them, and that decoding needs no future."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moestro.config import ModelConfig
from moestro.errors import MoestroError
from moestro.model.attention.mask import positions_of
from moestro.model.depth import DepthBlock, best, room
from moestro.model.moe.router import TokenGroups
from moestro.model.transformer import Transformer

from .helpers import build, error, model_config, normal, token_ids

SEQ = 11
# Documents of 5 and 4 tokens and padding; one of 7 and more padding; one of all.
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 4 + [-1] * 2, [0] * 7 + [-1] * 4, [0] * SEQ])
POSITIONS = torch.tensor([[*range(5), *range(4), 0, 0], [*range(7), 0, 0, 0, 0], [*range(SEQ)]])
MOE: list[Any] = [None, {"num_shared_experts": 1, "balance": {"z_loss_coef": 0.1}}]


def depth_config(moe: Any = None, capacity: float = 0.4, every: int = 2, **more: Any) -> ModelConfig:
    return model_config(moe, num_layers=3, depth={"capacity": capacity, "every_n_layers": every}, **more)


def double(model: Transformer) -> Transformer:
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    return model


def first_block(config: ModelConfig) -> DepthBlock:
    block = double(build(config, dtype=torch.float64)).blocks()[0]
    assert isinstance(block, DepthBlock)
    return block


def run(block: DepthBlock, x: Tensor, documents: Tensor | None, positions: Tensor) -> Any:
    where = positions_of("full", block.config, positions, documents, None, None)
    valid = None if documents is None else (documents >= 0).flatten()
    return block(x, where, TokenGroups(x.shape[1], valid))


def naive(block: DepthBlock, x: Tensor, documents: Tensor, admitted: Tensor) -> Tensor:
    """Each document's admitted tokens as a sequence of their own."""
    rows = []
    for row in range(len(x)):
        out = list(x[row])
        for document in range(int(documents[row].max()) + 1):
            places = torch.nonzero((documents[row] == document) & admitted[row]).flatten()
            if len(places) == 0:
                continue
            chosen = x[row, places][None]
            where = positions_of("full", block.config, POSITIONS[row, places][None], None, None, None)
            change = block.block(chosen, where, TokenGroups(len(places))).x[0] - chosen[0]
            for i, place in enumerate(places.tolist()):
                out[place] = out[place] + torch.sigmoid(block.depth_router.weight @ x[row, place]) * change[i]
        rows.append(torch.stack(out))
    return torch.stack(rows)


@pytest.mark.parametrize("moe", MOE)
@pytest.mark.parametrize("training", [True, False])
def test_equals_each_documents_admitted_tokens_alone(moe: Any, training: bool) -> None:
    block = first_block(depth_config(moe)).train(training)
    x = normal(3, SEQ, 16, dtype=torch.float64, grad=True)
    score = (x @ block.depth_router.weight.t()).squeeze(-1)
    if training:
        admitted = torch.zeros(3, SEQ, dtype=torch.bool)
        for row in range(3):
            places = [i for i in range(SEQ) if DOCUMENTS[row, i] >= 0]
            chosen = sorted(places, key=lambda i, row=row: -score[row, i].item())[: math.ceil(0.4 * len(places))]
            admitted[row, chosen] = True
    else:
        aux = torch.nn.functional.silu(x @ block.aux_in.weight.t()) @ block.aux_out.weight.t()
        admitted = (aux.squeeze(-1) > 0) & (DOCUMENTS >= 0)
    assert 0 < admitted.sum() < (DOCUMENTS >= 0).sum()
    out = run(block, x, DOCUMENTS, POSITIONS).x
    expected = naive(block, x, DOCUMENTS, admitted)
    assert error(out, expected) < 1e-12
    assert torch.equal(out[~admitted], x[~admitted])
    weight = normal(3, SEQ, 16, seed=1, dtype=torch.float64)
    inputs = [x, *block.block.parameters(), block.depth_router.weight]
    found = torch.autograd.grad((out * weight).sum(), inputs, allow_unused=True)
    wanted = torch.autograd.grad((expected * weight).sum(), inputs, allow_unused=True)
    for name, a, b in zip(["x", *dict(block.block.named_parameters()), "router"], found, wanted, strict=True):
        assert (b is None and (a is None or not a.any())) or error(a, b) < 1e-10, name


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_full_capacity_is_the_plain_block_weighed_by_its_router(documents: Tensor | None) -> None:
    block = first_block(depth_config({}, capacity=1.0))
    x = normal(3, SEQ, 16, dtype=torch.float64)
    where = positions_of("full", block.config, POSITIONS, documents, None, None)
    groups = TokenGroups(SEQ, None if documents is None else (documents >= 0).flatten())
    plain, out = block.block(x, where, groups), block(x, where, groups)
    expected = x + torch.sigmoid(x @ block.depth_router.weight.t()) * (plain.x - x)
    valid = torch.ones(3, SEQ, dtype=torch.bool) if documents is None else documents >= 0
    assert error(out.x[valid], expected[valid]) < 1e-12
    torch.testing.assert_close(out.stats.aux_loss, plain.stats.aux_loss)
    assert torch.equal(out.stats.load, plain.stats.load)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 40), st.floats(0.01, 1.0), st.integers(0, 10_000))
def test_the_best_valid_tokens_are_admitted(seq: int, capacity: float, seed: int) -> None:
    score = normal(3, seq, seed=seed).round(decimals=1)  # with ties
    valid = normal(3, seq, seed=seed + 1) > -0.5
    admitted = best(score, valid, capacity)
    for row in range(3):
        count = math.ceil(round(int(valid[row].sum()) * capacity, 9))
        assert int(admitted[row].sum()) == count <= room(seq, capacity)
        others = score[row, valid[row] & ~admitted[row]]
        assert count == 0 or len(others) == 0 or score[row, admitted[row]].min() >= others.max()
    assert not (admitted & ~valid).any()


def test_capacity_is_rounded_up_once() -> None:
    assert [room(100, 0.07), room(100, 0.071), room(1, 0.25), room(8, 1.0)] == [7, 8, 1, 8]


@pytest.mark.parametrize("training", [True, False])
def test_only_the_causal_router_knows_no_future(training: bool) -> None:
    model = build(depth_config({}), seed=1).train(training)
    ids = token_ids(1, 24)
    before = model(ids).hidden
    changed = False
    for last in range(40):
        other = ids.clone()
        other[0, -1] = last
        changed |= error(model(other).hidden[:, :-1], before[:, :-1]) > 1e-4
    assert changed == training


@pytest.mark.parametrize("more", [{}, {"sliding_window": 3, "layer_types": ["sliding", "full"]}])
def test_decoding_equals_the_full_forward(more: dict[str, Any]) -> None:
    model = build(depth_config({}, **more), seed=4).eval()
    ids = token_ids(1, 40)
    with torch.no_grad():
        cache = model.new_cache(1, 40, "cpu", torch.float32)
        parts = [model(ids[:, :9], cache=cache).hidden]
        parts += [model(ids[:, i : i + 1], cache=cache).hidden for i in range(9, 40)]
        found, full = model.logits(torch.cat(parts, 1)), model.logits(model(ids).hidden)
    assert error(found, full) < 1e-5
    assert torch.equal(found.argmax(-1), full.argmax(-1))
    lengths = [layer.length for layer in cache.layers]
    assert lengths[1] == 40
    assert 0 < lengths[0] < 40
    assert 0 < lengths[2] < 40
    with pytest.raises(MoestroError, match="one sequence at a time"):
        model(token_ids(2, 3), cache=model.new_cache(2, 4, "cpu", torch.float32))


def test_one_token_and_a_layer_that_admits_none() -> None:
    model = build(depth_config()).eval()
    for i in ("0", "2"):
        model.layers[i].aux_out.weight.data.zero_()  # foretells exactly 0: nobody
    ids, cache = token_ids(1, 1), model.new_cache(1, 4, "cpu", torch.float32)
    assert error(model(ids, cache=cache).hidden, model(ids).hidden) < 1e-6
    assert [layer.length for layer in cache.layers] == [0, 1, 0]
    assert torch.isfinite(model.train()(ids).hidden).all()


def test_the_causal_router_learns_from_its_own_loss_alone_and_foretells_the_other() -> None:
    model = build(depth_config())
    inputs: dict[str, Any] = {"document_ids": DOCUMENTS, "position_ids": POSITIONS}
    ids = token_ids(3, SEQ)
    loss = model(ids, **inputs).depth_loss
    loss.backward()
    moved = {name.rpartition("layers.")[2] for name, p in model.named_parameters() if p.grad is not None}
    assert moved == {f"{i}.{name}.weight" for i in (0, 2) for name in ("aux_in", "aux_out")}
    block = model.layers["0"]
    optimizer = torch.optim.Adam([block.aux_in.weight, block.aux_out.weight], lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        now = model(ids, **inputs).depth_loss
        now.backward()
        optimizer.step()
    assert now < 0.8 * loss
    assert model.eval()(ids).depth_loss is None


def test_recomputing_changes_nothing() -> None:
    gradients = []
    for recompute in (False, True):
        model = build(depth_config({}), recompute=recompute)
        ids = token_ids(3, SEQ)
        out = model(ids, document_ids=DOCUMENTS, position_ids=POSITIONS, labels=ids)
        (out.loss + out.depth_loss + sum(s.aux_loss for s in out.router_stats)).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_balance_losses_do_not_depend_on_the_cut() -> None:
    """Weighed by their valid tokens, the rows' losses add up to those of all rows, though admission rounds up."""
    model = double(build(depth_config({"balance": {"aux_coef": 0.1}}), dtype=torch.float64))
    ids, valid = token_ids(3, SEQ), (DOCUMENTS >= 0).sum(1)
    names = ("aux_loss", "z_loss", "token_entropy")

    def losses(rows: slice) -> Tensor:
        out = model(ids[rows], document_ids=DOCUMENTS[rows], position_ids=POSITIONS[rows])
        return torch.stack([getattr(s, n) for s in out.router_stats for n in names] + [out.depth_loss])

    parts = sum(losses(slice(i, i + 1)) * valid[i] for i in range(3)) / valid.sum()
    torch.testing.assert_close(parts, losses(slice(0, 3)), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("other", "name"),
    [
        ({"mtp": {"depth": 1}}, "mtp"),
        ({"moe": {"router": {"group_size": 4}}}, "moe.router.group_size"),
        ({"moe": {"router": {"kind": "zaya"}}}, "moe.router.carry_state"),
    ],
)
def test_what_it_does_not_go_with(other: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"depth does not go with {name}"):
        depth_config(**other)


def test_which_layers() -> None:
    assert depth_config(every=2).depth_layers == (True, False, True)
    model = build(depth_config({}, every=3))
    assert [isinstance(block, DepthBlock) for block in model.blocks()] == [True, False, False]
    assert [layer.layer for layer in model.moe_layers()] == [0, 1, 2]
