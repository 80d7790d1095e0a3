"""Small tasks with a known structure, on which a claim about MoE training can be tried within seconds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from moestro.config import ModelConfig, OptimConfig
from moestro.data.batches import IGNORE, Batch
from moestro.model.transformer import Transformer
from moestro.optim.build import lr_factor
from moestro.optim.update import Update
from moestro.parallel.build import whole_parts
from moestro.train.engine import alone
from moestro.train.step import LayerLoad, train_step


class Stream(Protocol):
    """What a toy trains on."""

    def batch(self, sequences: int, seq_len: int) -> Batch: ...


class HiddenClusters:
    """Sequences whose next-token map is chosen by the hidden cluster of their first token.

    Every token belongs to one of `num_clusters` clusters, and every cluster has a random permutation of the
    vocabulary. A sequence follows the permutation of its first token's cluster; with probability `noise` a token is
    drawn from the whole vocabulary instead. Knowing all maps costs num_clusters · vocab_size facts, which is what
    more experts can hold and one small feed-forward cannot.
    """

    def __init__(self, vocab_size: int, seed: int, num_clusters: int = 16, noise: float = 0.1) -> None:
        self.vocab_size, self.noise, self._samples = vocab_size, noise, 0
        self._generator = torch.Generator().manual_seed(seed)
        self.cluster = torch.randperm(vocab_size, generator=self._generator) % num_clusters
        permutations = [torch.randperm(vocab_size, generator=self._generator) for _ in range(num_clusters)]
        self.next_token = torch.stack(permutations)

    def batch(self, sequences: int, seq_len: int) -> Batch:
        """The next batch of the stream. The first prediction of a sequence, a pure guess, is left out."""
        shape = (sequences, seq_len + 1)
        tokens = torch.randint(self.vocab_size, shape, generator=self._generator)
        noisy = torch.rand(shape, generator=self._generator) < self.noise
        cluster = self.cluster[tokens[:, 0]]
        for t in range(2, seq_len + 1):
            follows = self.next_token[cluster, tokens[:, t - 1]]
            tokens[:, t] = torch.where(noisy[:, t], tokens[:, t], follows)
        labels = tokens[:, 1:].clone()
        labels[:, 0] = IGNORE
        first, self._samples = self._samples, self._samples + sequences
        return Batch(
            input_ids=tokens[:, :-1].contiguous(),
            labels=labels,
            document_ids=torch.zeros(sequences, seq_len, dtype=torch.int32),
            position_ids=torch.arange(seq_len).repeat(sequences, 1),
            sample_ids=torch.arange(first, first + sequences),
        )


@dataclass(frozen=True)
class Curve:
    """One training run, step by step."""

    loss: list[float]  # nats per predicted token, on tokens not seen before
    dropped: list[float]  # share of the tokens that found no room, mean over MoE layers
    balance: list[float] = field(default_factory=list)  # entropy of the experts' load over ln E, mean over MoE layers
    entropy: list[float] = field(default_factory=list)  # mean entropy of a token's scores over ln E, the same mean

    def final_loss(self, window: int) -> float:
        return sum(self.loss[-window:]) / window

    def final_dropped(self, window: int) -> float:
        return sum(self.dropped[-window:]) / window

    def steps_to(self, loss: float, window: int) -> int | None:
        """The first step after which the mean loss of the last `window` steps is at most `loss`."""
        for step in range(window, len(self.loss) + 1):
            if sum(self.loss[step - window : step]) / window <= loss:
                return step
        return None


def train_on(
    task: Stream, config: ModelConfig, optim: OptimConfig, steps: int, sequences: int, seq_len: int, seed: int
) -> Curve:
    """Train a fresh model of `config`; every step sees new data."""
    return train_model(fresh_model(config, seed), task, optim, steps, sequences, seq_len, seed)


def fresh_model(config: ModelConfig, seed: int) -> Transformer:
    model = Transformer(config)
    model.init_weights(seed)
    return model


def train_model(
    model: Transformer, task: Stream, optim: OptimConfig, steps: int, sequences: int, seq_len: int, seed: int
) -> Curve:
    """As `train_on`, of a model that is there already and is trained in place."""
    model.train()
    engine = alone(model, seed)
    update = Update([model], optim, engine.mesh, whole_parts(model), "auto")
    curve = Curve([], [], [], [])
    for step in range(steps):
        update.set_learning_rate(lr_factor(step, steps, optim))
        result = train_step(engine, update, [task.batch(sequences, seq_len)], grad_clip=1.0)
        curve.loss.append(result.loss.item())
        curve.dropped.append(_mean([layer.dropped.item() for layer in result.layers]))
        curve.balance.append(_mean([_evenness(layer) for layer in result.layers]))
        curve.entropy.append(_mean([layer.token_entropy.item() for layer in result.layers]))
    return curve


def _evenness(layer: LayerLoad) -> float:
    """1 when all experts have the same load, 0 when one has all."""
    if len(layer.load) == 1:
        return 1.0
    return float(torch.special.entr(layer.load).sum() / math.log(len(layer.load)))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)
