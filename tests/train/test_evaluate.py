"""Held-out loss: exact, the same however it is cut, and without a trace in the model."""

import math

import pytest
import torch
from torch.nn import functional as F

from moestro.data.batches import IGNORE, ValidationStream
from moestro.data.prepare import prepare
from moestro.model.transformer import Transformer
from moestro.train.engine import alone
from moestro.train.evaluate import evaluate

from .helpers import config, model_config


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> ValidationStream:
    settings = config(tmp_path_factory.mktemp("evaluate"), {"data": {"holdout_every": 3}})
    return ValidationStream(prepare(settings.data, progress=False), settings.data)


@pytest.fixture
def model() -> Transformer:
    network = Transformer(model_config(moe={"balance": {"bias_rule": "sign"}, "router": {"jitter": 0.5}}))
    network.init_weights(0)
    return network


def test_uniform_model(model: Transformer, stream: ValidationStream) -> None:
    torch.nn.init.zeros_(model.head_weight)
    result = evaluate(alone(model), stream, 4)
    assert result.loss == pytest.approx(math.log(257), rel=1e-6)
    assert result.tokens == stream.predictions
    assert result.bytes == stream.bytes
    # One end of text for each document is predicted beside its bytes.
    assert result.bits_per_byte == pytest.approx(math.log2(257) * result.tokens / stream.bytes, rel=1e-6)
    assert result.tokens > stream.bytes


def test_against_cross_entropy_of_logits(model: Transformer, stream: ValidationStream) -> None:
    model.eval()
    nll = 0.0
    with torch.no_grad():
        for batch in stream.batches(1):
            out = model(batch.input_ids, batch.position_ids, batch.document_ids)
            logits = model.logits(out.hidden)
            nll += float(F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE,
                                         reduction="sum"))  # fmt: skip
    result = evaluate(alone(model), stream, 3)
    assert result.loss == pytest.approx(nll / stream.predictions, rel=1e-5)
    assert result.bits_per_byte == pytest.approx(nll / math.log(2) / stream.bytes, rel=1e-5)


@pytest.mark.parametrize("micro", [1, 2, 5, 1000])
def test_micro_batch_size_does_not_matter(micro: int, model: Transformer, stream: ValidationStream) -> None:
    expected, got = evaluate(alone(model), stream, 3), evaluate(alone(model), stream, micro)
    assert (got.tokens, got.bytes) == (expected.tokens, expected.bytes)
    assert got.loss == pytest.approx(expected.loss, rel=1e-5)


def test_a_part(model: Transformer, stream: ValidationStream) -> None:
    whole, part = evaluate(alone(model), stream, 2), evaluate(alone(model), stream, 2, max_batches=2)
    first = next(iter(stream.batches(4, 1)))
    assert part.tokens == int((first.labels != IGNORE).sum())
    assert part.bytes == pytest.approx(stream.bytes * part.tokens / stream.predictions)
    assert part.bits_per_byte == pytest.approx(part.loss / math.log(2) * part.tokens / part.bytes)
    assert part.loss != whole.loss
    assert evaluate(alone(model), stream, 2, max_batches=10**6) == whole


@pytest.mark.parametrize("training", [True, False])
def test_leaves_no_trace(training: bool, model: Transformer, stream: ValidationStream) -> None:
    model.train(training)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    first, second = evaluate(alone(model), stream, 2), evaluate(alone(model), stream, 2)
    assert first == second  # no jitter
    assert all(module.training == training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_uses_the_evaluation_capacity(stream: ValidationStream) -> None:
    losses = []
    for factor in (0.25, None):
        router = {"capacity_factor": 100.0, "eval_capacity_factor": factor}
        network = Transformer(model_config(moe={"router": router}))
        network.init_weights(0)
        losses.append(evaluate(alone(network.train()), stream, 2).loss)
    assert losses[0] != losses[1]


def test_documents_do_not_see_each_other(model: Transformer, stream: ValidationStream) -> None:
    """Packed or one document at a time, every token has the same loss."""
    model.eval()
    separate = 0.0
    with torch.no_grad():
        for batch in stream.batches(1):
            for document in range(int(batch.document_ids.max()) + 1):
                here = batch.document_ids[0] == document
                out = model(batch.input_ids[:, here], batch.position_ids[:, here])
                separate += float(F.cross_entropy(model.logits(out.hidden)[0], batch.labels[0, here], reduction="sum"))
    assert evaluate(alone(model), stream, 2).loss == pytest.approx(separate / stream.predictions, rel=1e-5)
