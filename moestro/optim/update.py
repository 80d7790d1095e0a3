"""What happens between backward and the next forward: gradients are added up and clipped, optimizers step.

A parameter is stored in one of three ways. Whole: each rank of a group has it, and all step it alike. Flat (ZeRO-1):
each rank steps its slice of many parameters laid end to end. Sharded (FSDP2): each rank has its shard only. The loss is
divided by the tokens of the global batch before backward; so gradients are sums over ranks, and never averaged.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from moestro.config import OptimConfig
from moestro.optim.build import Kind, build_adamw, build_muon, kind_of, set_learning_rate, with_peaks
from moestro.optim.matrix_exchange import MatrixExchange, Mode
from moestro.optim.pieces import PieceMuon, matrices_of_flat, matrices_of_shard, matrix_axis
from moestro.optim.slots import Slot, flat_slot, fresh_state, shard_slot, whole_slot
from moestro.parallel.comm import Group, all_reduce, size_of
from moestro.parallel.flat import FlatShard, all_reduce_buckets
from moestro.parallel.fsdp import shard_of
from moestro.parallel.logical import Chunk, LogicalTensor
from moestro.parallel.mesh import Mesh
from moestro.parallel.parts import Part

SHARED = "embed_tokens.weight"  # with tied embeddings the first and the last stage of a pipeline both have it


class Update:
    """The optimizers of a rank's part of the model.

    Args:
        stages: the rank's pieces of the model; with FSDP2 `fully_shard` has been applied to them.
        parts: what each of their parameters is a part of.
        exchange: how Muon brings together the matrices that ZeRO-1 cuts.
        tied: this rank and the one at the other end of the pipeline, if both have the embedding.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        config: OptimConfig,
        mesh: Mesh,
        parts: dict[str, Part],
        exchange: Mode,
        tied: Group = None,
    ) -> None:
        self.mesh, self.tied = mesh, tied
        self._named = [named for stage in stages for named in stage.named_parameters()]
        self._parts = parts
        self._slots = self._make_slots(config)
        shared = [slot for slot in self._slots if slot.names == [SHARED]]
        self._twins = (shared[0], shared[1]) if len(shared) == 2 else None  # both ends of the pipeline on one rank
        self._shared = shared if tied is not None or self._twins else []
        for slot in self._shared:
            slot.holders *= 2
        for slot in shared[1:]:
            slot.boxes = []
        tables, vectors = (
            [slot.tensor for slot in self._slots if slot.kind == kind and slot.tensor.numel()]
            for kind in ("table", "vector")
        )
        muon = self._build_muon(config, exchange)
        self.optimizers = with_peaks([*build_adamw(tables, vectors, config), *muon])

    def _make_slots(self, config: OptimConfig) -> list[Slot]:
        slots: list[Slot] = []
        flats: dict[tuple[Group, Kind, str], list[tuple[str, nn.Parameter]]] = defaultdict(list)
        for i, (name, parameter) in enumerate(self._named):
            part, kind = self._parts[name], kind_of(name, parameter, config)
            group: Group = getattr(self.mesh, part.group)
            if isinstance(parameter, DTensor):
                slots.append(shard_slot(name, parameter, kind, part, group))
            elif group is None or self.mesh.layout.zero == 0:
                slots.append(whole_slot(name, parameter, kind, part, group))
            else:  # the embedding by itself: at the pipeline's other end it must be cut alike
                flats[group, kind, f"{name} {i}" if name == SHARED else ""].append((name, parameter))
        for (group, kind, _), named in flats.items():
            names, parameters = [name for name, _ in named], [parameter for _, parameter in named]
            slots.append(flat_slot(names, FlatShard(parameters, group), kind, [self._parts[name] for name in names]))
        return slots

    def _build_muon(self, config: OptimConfig, mode: Mode) -> list[torch.optim.Optimizer]:
        """One optimizer for whole matrices, one for pieces."""
        tp, steps = self.mesh.tp, config.newton_schulz_steps
        whole: dict[int | None, list[nn.Parameter]] = defaultdict(list)
        sharded: dict[Group, list[Slot]] = defaultdict(list)
        shares: list[tuple[list[nn.Parameter], MatrixExchange]] = []
        for slot in self._slots:
            if slot.kind != "matrix":
                continue
            if slot.source is not None:
                sharded[shard_of(slot.source)[0]].append(slot)
            elif slot.flat is not None:
                matrices = list(matrices_of_flat(slot.flat, slot.parts))
                shares.append(([slot.tensor], MatrixExchange(matrices, slot.group, tp, mode, steps)))
            else:
                whole[matrix_axis(slot.parts[0])].append(slot.tensor)
        for group, slots in sharded.items():
            matrices = []
            for i, slot in enumerate(slots):
                assert slot.source is not None
                matrices += matrices_of_shard(i, slot.parts[0], shard_of(slot.source)[1], size_of(group))
            shares.append(([slot.tensor for slot in slots], MatrixExchange(matrices, group, tp, "gather", steps)))
        return [*build_muon(whole, config, tp), *([PieceMuon(shares, config)] if shares else [])]

    @torch.no_grad()
    def zero_grad(self) -> None:
        for slot in self._slots:
            slot.zero_grad()

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Add up the gradients of the ranks that hold the same parameters, once all micro-batches are done."""
        sums: dict[Group, list[Tensor]] = defaultdict(list)
        for slot in self._slots:
            slot.fetch_shard()
            if slot.flat is not None:
                slot.flat.reduce_gradients()
            elif slot.source is None and slot.group is not None:
                sums[slot.group].append(slot.gradient)
            elif slot.source is not None and slot.parts[0].group == "tokens" and self.mesh.tp is not None:
                sums[self.mesh.tp].append(slot.gradient)  # FSDP2 has added up those of its mesh
        for group, gradients in sums.items():
            all_reduce_buckets(gradients, group)
        if self._twins is not None:
            first, second = self._twins
            second.gradient.copy_(first.gradient.add_(second.gradient))
        elif self.tied is not None:
            for slot in self._shared:
                all_reduce(slot.gradient, self.tied)

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients to a norm of at most max_norm, over the whole model; return the norm they had."""
        if self.mesh.world is None:
            return clip_grad_norm_([parameter for _, parameter in self._named], max_norm)
        slots = [slot for slot in self._slots if slot.tensor.numel()]
        by_holders: dict[int, list[Tensor]] = defaultdict(list)
        for slot in slots:
            by_holders[slot.holders].append(slot.gradient)
        square = torch.zeros((), device=self._device)
        for holders, gradients in by_holders.items():  # each holder adds its share, so that elements count once
            square += get_total_norm(gradients).square() / holders
        norm = all_reduce(square, self.mesh.world).sqrt()
        clip_grads_with_norm_([slot.tensor for slot in slots], max_norm, norm)
        return norm

    @torch.no_grad()
    def step(self) -> None:
        """Step the optimizers; then every rank has the new weights."""
        for optimizer in self.optimizers:
            optimizer.step()
        for slot in self._slots:
            if slot.flat is not None:
                slot.flat.gather_parameters()

    def set_learning_rate(self, factor: float) -> None:
        """Set every learning rate to `factor` times its peak."""
        set_learning_rate(self.optimizers, factor)

    @property
    def exchange_bytes(self) -> int:
        """What Muon takes on this rank, beside the optimizers' state, to bring cut matrices together."""
        exchanges = [
            e for optimizer in self.optimizers if isinstance(optimizer, PieceMuon) for e in optimizer.exchanges
        ]
        return max((exchange.extra_bytes(self._device) for exchange in exchanges), default=0)

    @property
    def _device(self) -> torch.device:
        return self._slots[0].tensor.device

    def state(self) -> dict[str, LogicalTensor]:
        """What this rank holds of the optimizers' state, as `optimizer.state.<parameter>.<key>`.

        A load may overwrite it, with `after_load` to follow. State that is not there yet is made, with no step counted.
        """
        tensors: dict[str, LogicalTensor] = {}
        slots: dict[Tensor, Slot] = {slot.tensor: slot for slot in self._slots}
        for optimizer in self.optimizers:
            fresh_state(optimizer)
            for tensor, values in optimizer.state.items():
                for key, value in values.items():
                    _add_state(tensors, slots[tensor], key, value)
        return tensors

    def parameters_state(self) -> dict[str, LogicalTensor]:
        """What this rank holds of the weights, as `model.<parameter>`. A load may overwrite it."""
        tensors: dict[str, LogicalTensor] = {}
        for slot in self._slots:
            slot.fetch_shard()
            for box in slot.boxes if slot.source is not None else ():
                chunk = Chunk(box.start, box.view(slot.tensor.detach()))
                tensors[f"model.{box.name}"] = LogicalTensor(box.shape, [chunk])
        for name, parameter in self._named:
            if not isinstance(parameter, DTensor) and f"model.{name}" not in tensors:
                part = self._parts[name]
                tensors[f"model.{name}"] = LogicalTensor(part.shape, [Chunk(part.start, parameter.detach())])
        return tensors

    @torch.no_grad()
    def replicas(self) -> dict[Group, dict[str, Tensor]]:
        """What this rank holds of the weights by the ranks that should hold the same numbers, where there are such."""
        found: dict[Group, dict[str, Tensor]] = defaultdict(dict)
        for name, parameter in self._named:
            group: Group = getattr(self.mesh, self._parts[name].group)
            tensor = parameter.detach()
            if isinstance(tensor, DTensor):
                mesh, tensor = tensor.device_mesh, tensor.to_local()
                group = mesh.get_group("dp") if mesh.ndim == 2 else None
            if group is not None:
                found[group][name] = tensor
        return found

    def stepped(self) -> dict[str, tuple[Tensor, float]]:
        """Each tensor that this rank's optimizers step, by the first parameter in it, and its learning rate."""
        rates = {p: float(group["lr"]) for o in self.optimizers for group in o.param_groups for p in group["params"]}
        return {
            slot.names[0]: (slot.tensor.detach(), rates[slot.tensor]) for slot in self._slots if slot.tensor in rates
        }

    @torch.no_grad()
    def after_load(self) -> None:
        """Bring in line what a load cannot reach: the flat slices' step counts, and the second of two embeddings."""
        state = {tensor: values for optimizer in self.optimizers for tensor, values in optimizer.state.items()}
        for slot in self._slots:
            for step in slot.steps.values():
                state[slot.tensor]["step"].copy_(step)
        if self._twins is None:
            return
        first, second = (slot.tensor for slot in self._twins)
        for key, value in state.get(first, {}).items():
            state[second][key].copy_(value)
        copies = [parameter for name, parameter in self._named if name == SHARED]
        copies[1].copy_(copies[0])


def _add_state(tensors: dict[str, LogicalTensor], slot: Slot, key: str, value: Tensor) -> None:
    for box in slot.boxes:
        name = f"optimizer.state.{box.name}.{key}"
        if key != "step":
            tensors.setdefault(name, LogicalTensor(box.shape, [])).chunks.append(Chunk(box.start, box.view(value)))
        elif name not in tensors:
            if slot.flat is not None:  # one count for many parameters
                value = slot.steps.setdefault(box.name, torch.empty_like(value)).copy_(value)
            tensors[name] = LogicalTensor((), [Chunk((), value)])
