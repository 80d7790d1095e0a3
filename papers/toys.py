"""Small tasks with a known structure, on which a claim about MoE training can be tried within seconds."""

from dataclasses import dataclass

import torch

from moestro.config import ModelConfig, OptimConfig
from moestro.data.batches import IGNORE, Batch
from moestro.model.transformer import Transformer
from moestro.optim.build import lr_factor
from moestro.optim.update import Update
from moestro.parallel.build import whole_parts
from moestro.train.engine import alone
from moestro.train.step import train_step


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
    task: HiddenClusters, config: ModelConfig, optim: OptimConfig, steps: int, sequences: int, seq_len: int, seed: int
) -> Curve:
    """Train a fresh model of `config`; every step sees new data."""
    model = Transformer(config)
    model.init_weights(seed)
    model.train()
    engine = alone(model, seed)
    update = Update([model], optim, engine.mesh, whole_parts(model), "auto")
    loss, dropped = [], []
    for step in range(steps):
        update.set_learning_rate(lr_factor(step, steps, optim))
        result = train_step(engine, update, [task.batch(sequences, seq_len)], grad_clip=1.0)
        loss.append(result.loss.item())
        dropped.append(sum(layer.dropped.item() for layer in result.layers) / max(len(result.layers), 1))
    return Curve(loss, dropped)
