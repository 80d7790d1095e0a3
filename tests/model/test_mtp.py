"""Multi-token prediction: what each depth sees and predicts, and that the main model does not notice."""

import pytest
import torch
from torch.nn import functional as F

from moestro.data.batches import IGNORE
from moestro.model.attention.mask import positions_of
from moestro.model.block import MTPBlock
from moestro.model.moe.router import TokenGroups
from moestro.model.transformer import Transformer
from moestro.train.stage import labels_ahead

from .helpers import build, error, model_config, token_ids


def mtp_model(depth: int = 2, **settings: object) -> Transformer:
    return build(model_config({}, mtp={"depth": depth}, **settings))


def test_the_main_model_is_the_same_without_it() -> None:
    with_mtp, plain = mtp_model(), build(model_config({}))
    ids = token_ids(2, 9)
    labels = ids.roll(-1, 1)
    ahead = labels_ahead(labels, torch.zeros_like(ids), 2)
    out = with_mtp(ids, labels=labels, ahead=ahead)
    expected = plain(ids, labels=labels)
    assert torch.equal(out.hidden, expected.hidden)
    assert torch.equal(out.loss, expected.loss)
    assert len(out.router_stats) == 4
    assert with_mtp(ids, labels=labels).mtp_loss is None  # not asked for


@pytest.mark.parametrize("tied", [False, True])
def test_equals_its_equations(tied: bool) -> None:
    """DeepSeek-V3, equations 21 to 25, position by position, and gradients to the shared embedding and head."""
    model = mtp_model(tie_embeddings=tied)
    ids = token_ids(1, 8)
    labels = ids.roll(-1, 1)
    labels[0, -1] = IGNORE
    ahead = labels_ahead(labels, torch.zeros_like(ids), 2)
    out = model(ids, labels=labels, ahead=ahead, loss_scale=0.25)
    assert out.mtp_loss is not None
    found = torch.autograd.grad(out.mtp_loss, [model.head_weight, model.embed_tokens.weight], retain_graph=True)

    assert model.embed_tokens is not None
    total, hidden = torch.zeros(()), model(ids).hidden
    for depth, mtp in enumerate(model.mtp.values(), 1):
        known = torch.cat(
            (ids[:, depth:], ids.new_zeros(1, depth)), 1
        )  # token i + depth; the last ones predict nothing
        both = torch.cat((mtp.hidden_norm(hidden), mtp.embedding_norm(model.embed_tokens(known))), -1)
        positions = positions_of("full", model.config, torch.arange(8).unsqueeze(0), None, None, None)
        hidden = mtp.block(mtp.projection(both), positions, TokenGroups(8)).x
        logits = mtp.norm(hidden) @ model.head_weight.t()
        count = 8 - depth - 1  # positions whose token i + depth + 1 is there
        total = total + F.cross_entropy(logits[0, :count], ids[0, depth + 1 :], reduction="sum")
    expected = total / 2 * 0.25
    assert error(out.mtp_loss, expected) < 1e-5
    wanted = torch.autograd.grad(expected, [model.head_weight, model.embed_tokens.weight])
    for one, other in zip(found, wanted, strict=True):
        assert error(one, other) < 1e-4


def test_its_blocks_are_recomputed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    forward = MTPBlock.forward
    monkeypatch.setattr(MTPBlock, "forward", lambda *args: calls.append(1) or forward(*args))
    ids = token_ids(2, 9)
    labels = ids.roll(-1, 1)
    ahead = labels_ahead(labels, torch.zeros_like(ids), 2)
    found = []
    for recompute, expected in ((False, 2), (True, 4)):
        calls.clear()
        model = build(model_config({}, mtp={"depth": 2}), recompute=recompute)
        out = model(ids, labels=labels, ahead=ahead)
        assert out.mtp_loss is not None
        (out.loss + out.mtp_loss).backward()
        assert len(calls) == expected
        found.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_labels_ahead_stay_in_their_document() -> None:
    labels = torch.tensor([[11, 12, 13, 21, 22, IGNORE, IGNORE]])
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, -1]])
    one, two = labels_ahead(labels, documents, 2)
    x = IGNORE
    assert one.tolist() == [[12, 13, x, 22, x, x, x]]
    assert two.tolist() == [[13, x, x, x, x, x, x]]


def test_a_missing_label_hides_all_behind_it() -> None:
    labels = torch.tensor([[1, IGNORE, 3, 4, 5]])
    one, two = labels_ahead(labels, torch.zeros_like(labels), 2)
    assert one.tolist() == [[IGNORE, IGNORE, 4, 5, IGNORE]]
    assert two.tolist() == [[IGNORE, IGNORE, 5, IGNORE, IGNORE]]


def test_sees_no_token_that_it_predicts() -> None:
    """Depth 1 at position i may know token i + 1 but not i + 2."""
    model = mtp_model(depth=1)
    ids = token_ids(1, 8)

    def losses(tokens: torch.Tensor, at: int) -> float:
        labels = tokens.roll(-1, 1)
        ahead = labels_ahead(labels, torch.zeros_like(tokens), 1)
        kept = torch.full_like(ahead, IGNORE)
        kept[0, 0, at] = 7  # a fixed target, so that only what is seen can make a difference
        out = model(tokens, labels=labels, ahead=kept)
        assert out.mtp_loss is not None
        return out.mtp_loss.item()

    for changed, differs in ((4, True), (5, False), (6, False)):
        other = ids.clone()
        other[0, changed] = (ids[0, changed] + 1) % 40
        assert (abs(losses(other, 3) - losses(ids, 3)) > 1e-4) == differs, changed
