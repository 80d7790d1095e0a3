"""Which of their tensors hold the numbers of which of ours, and how these lie there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moestro.config import ModelConfig
from moestro.model.moe.layer import MoELayer
from moestro.model.transformer import Transformer


class Codec(NamedTuple):
    """From the parts of their tensors to a box of ours and back; `write` is None where that is not made."""

    read: Callable[[list[Tensor]], Tensor]
    write: Callable[[Tensor], list[Tensor]] | None


@dataclass(frozen=True)
class Entry:
    """A box of one of our tensors, and what of theirs it is made of."""

    name: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    keys: tuple[str, ...]
    codec: Codec
    row: int | None = None  # the element of the keys' first axis that is meant; None: all of them
    copy: bool = False  # the numbers are in another entry too; written, but not needed


@dataclass(frozen=True)
class Naming:
    """One way to lay a family's weights out."""

    rename: Callable[[str, ModelConfig], str]  # our name of a tensor to theirs, in which `model.` may be left out
    # One expert's gate and up projections (one name: merged), and its down projection; None: all experts in one tensor.
    experts: tuple[tuple[str, ...], tuple[str]] | None = None
    has_bias: bool = False  # the router's selection bias is there too
    codecs: Callable[[str, ModelConfig], Codec | None] = lambda name, model: None  # of tensors that lie differently
    # For one expert of a merged tensor: of gate and up, and of down.
    merged: tuple[Codec, Codec] | None = None
    merged_keys: Callable[[str], tuple[str, ...]] = lambda key: (key,)
    copies: Callable[[ModelConfig], dict[str, str]] = lambda model: {}  # keys that repeat one of our tensors


SAME = Codec(lambda parts: parts[0], lambda box: [box])
GATE_AND_UP = Codec(lambda parts: torch.stack(parts).unsqueeze(0), lambda box: list(box[0].unbind(0)))
ONE_EXPERT = Codec(lambda parts: parts[0].unsqueeze(0), lambda box: [box[0]])
STACKED = Codec(  # [2 · width, hidden]: the gate's rows, then up's
    lambda parts: parts[0].unflatten(0, (2, -1)).unsqueeze(0), lambda box: [box[0].flatten(0, 1)]
)


def shapes(model: ModelConfig) -> dict[str, Tensor]:
    """Our tensors by name: parameters without memory, buffers with what they hold at first."""
    with torch.device("meta"):
        whole = Transformer(model)
    for layer in whole.modules():
        if isinstance(layer, MoELayer):
            layer.router.reset_balance(torch.device("cpu"))
    return dict(whole.state_dict())


def entries(model: ModelConfig, naming: Naming, ours: dict[str, Tensor]) -> list[Entry]:
    """What a folder of this layout holds, in the order of our tensors.

    A buffer that the family does not know has no entry.
    """
    found: list[Entry] = []
    for name, tensor in ours.items():
        key = their_name(name, naming, model)
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            found += _experts(name, key, tuple(tensor.shape), naming)
            continue
        if not tensor.is_meta and not (naming.has_bias and name.endswith(".router.bias")):
            continue  # a buffer, which says how training went
        codec = naming.codecs(name, model) or SAME
        found.append(whole_entry(name, tensor.shape, key, codec))
    return found + [whole_entry(name, ours[name].shape, key, copy=True) for key, name in naming.copies(model).items()]


def whole_entry(name: str, shape: Sequence[int], key: str, codec: Codec = SAME, copy: bool = False) -> Entry:
    return Entry(name, (0,) * len(shape), tuple(shape), (key,), codec, copy=copy)


def replacing(*pairs: tuple[str, str]) -> Callable[[str, ModelConfig], str]:
    """Replace parts of our names by theirs, in this order."""

    def rename(name: str, model: ModelConfig) -> str:
        for mine, theirs in pairs:
            name = name.replace(mine, theirs)
        return name

    return rename


def their_name(name: str, naming: Naming, model: ModelConfig) -> str:
    name = naming.rename(name, model)
    return name if name.startswith(("lm_head.", "model.")) else f"model.{name}"


def _experts(name: str, key: str, shape: tuple[int, ...], naming: Naming) -> list[Entry]:
    """One entry for each expert, so that no more than one need be in memory."""
    is_down = name.endswith(".down_proj")
    if naming.experts is None:
        codec = (naming.merged or (STACKED, ONE_EXPERT))[is_down]
        keys = [naming.merged_keys(key)] * shape[0]
        rows: list[int | None] = list(range(shape[0]))
    else:
        prefix, parts = key.rpartition(".")[0], naming.experts[is_down]
        codec = ONE_EXPERT if is_down else STACKED if len(parts) == 1 else GATE_AND_UP
        keys = [tuple(f"{prefix}.{expert}.{part}.weight" for part in parts) for expert in range(shape[0])]
        rows = [None] * shape[0]
    return [
        Entry(name, (expert, *(0,) * (len(shape) - 1)), (1, *shape[1:]), keys[expert], codec, rows[expert])
        for expert in range(shape[0])
    ]
