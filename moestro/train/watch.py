"""What is looked at every so many steps, and what of it is worth a line in the audit log."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moestro.config import Config
from moestro.optim.update import Update
from moestro.parallel.ranks import together
from moestro.train.guards import deepest_valley, odd_updates, uneven_experts
from moestro.train.incidents import Signal
from moestro.train.probes import UpdateSizes, differing_products, layer_norms
from moestro.train.step import StepResult


class Finding(NamedTuple):
    signal: Signal
    evidence: dict[str, Any]
    rank: int | None = None


class Watch:
    """Remembers from look to look what was noted, so that what lasts is noted once."""

    def __init__(self, config: Config) -> None:
        self._settings = config.guard
        self._moe_layers = [i for i, is_moe in enumerate(config.model.moe_blocks) if is_moe]
        self._load: Tensor | None = None  # [MoE layers, E] summed over steps since the last look
        self._steps = 0
        self._sizes: UpdateSizes | None = None
        self._valleys = 0  # looks in a row with one
        self._noted: dict[Signal, set[Any]] = {}

    def before_update(self, step: int, update: Update) -> None:
        if is_due(step, self._settings.probe_every):
            self._sizes = UpdateSizes(update)

    def findings(self, step: int, result: StepResult, update: Update) -> Iterator[Finding]:
        """After the update of a step. All ranks yield the same."""
        settings = self._settings
        if settings.probe_every is not None and result.layers:
            load = torch.stack([layer.load for layer in result.layers])
            self._load = load if self._load is None else self._load.add_(load)
            self._steps += 1
        if is_due(step, settings.probe_every):
            yield from self._updates(update)
            yield from self._valley(update)
            yield from self._experts()
        every = settings.recompute_every
        if every is not None and is_due(step, every):
            for found in differing_products(update, step // every):
                yield Finding("corrupt_compute", {"what": found.text, "among": found.among}, found.ranks[0])

    def _updates(self, update: Update) -> Iterator[Finding]:
        if self._sizes is None:
            return
        sizes, self._sizes = self._sizes, None
        odd = {
            k: v
            for rank in together(update.mesh.world, lambda: odd_updates(*sizes.measure(update)))
            for k, v in rank.items()
        }
        if new := self._new("update_anomaly", set(odd)):
            yield Finding("update_anomaly", {"update_rms_over_lr": {name: str(odd[name]) for name in sorted(new)}})

    def _valley(self, update: Update) -> Iterator[Finding]:
        norms = layer_norms(update)
        layer, depth = deepest_valley(norms)
        self._valleys = self._valleys + 1 if depth > self._settings.valley else 0
        lasting = {"valley"} if self._valleys > 1 else set()
        if self._new("collapse", lasting):
            yield Finding("collapse", {"layer": layer, "below": round(depth, 4), "norms": [round(n, 6) for n in norms]})

    def _experts(self) -> Iterator[Finding]:
        if self._load is None:
            return
        shares, steps = (self._load / self._steps).tolist(), self._steps
        self._load, self._steps = None, 0
        uneven = {
            layer: uneven_experts(load, self._settings) for layer, load in zip(self._moe_layers, shares, strict=True)
        }
        pairs = {(layer, e, kind) for layer, found in uneven.items() for kind in (0, 1) for e in found[kind]}
        if self._new("dead_experts", pairs):
            dead, hot = ({str(layer): found[kind] for layer, found in uneven.items() if found[kind]} for kind in (0, 1))
            yield Finding("dead_experts", {"dead": dead, "hot": hot, "steps": steps})

    def _new(self, signal: Signal, seen: set[Any]) -> set[Any]:
        """What was not there at the look before."""
        before, self._noted[signal] = self._noted.get(signal, set()), seen
        return seen - before


def is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
