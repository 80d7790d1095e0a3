"""Which part of each logical parameter a rank's model holds.

Only tensor and expert parallelism cut parameters here. FSDP2 and ZeRO-1 cut what is left once more, for storage; no
computation sees that. Names are the logical ones, the same in every layout.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from moestro.parallel.layout import Layout, Place

# The axis that tensor parallelism cuts: heads of attention, width of a feed-forward. What is not listed is whole on
# every tp rank and adds up the gradients of the tokens each of them had.
TP_AXIS = {
    "q_proj.weight": 0,
    "k_proj.weight": 0,
    "v_proj.weight": 0,
    "q_b_proj.weight": 0,
    "kv_b_proj.weight": 0,
    "q_proj.bias": 0,
    "k_proj.bias": 0,
    "v_proj.bias": 0,
    "self_attn.sinks": 0,
    "o_proj.weight": 1,
    "gate_proj.weight": 0,
    "up_proj.weight": 0,
    "down_proj.weight": 1,
    "experts.gate_up_proj": 2,
    "experts.down_proj": 2,
    "experts.gate_up_bias": 2,
    # Of the output, which tp does not cut: each rank adds a share of the columns, so that their sum has each once.
    "experts.down_bias": 1,
}


@dataclass(frozen=True)
class Part:
    """A box inside a logical tensor."""

    shape: tuple[int, ...]  # of the whole
    start: tuple[int, ...]
    size: tuple[int, ...]
    tp_axis: int | None  # the axis that tp cuts, if it does
    # The ranks that hold the same part and whose gradients are added: Mesh.tokens, Mesh.data or Mesh.edp.
    group: Literal["tokens", "data", "edp"]

    def of(self, whole: Tensor) -> Tensor:
        return whole[tuple(slice(s, s + n) for s, n in zip(self.start, self.size, strict=True))]


def part_of(name: str, shape: Sequence[int], layout: Layout, place: Place) -> Part:
    """The part of parameter `name`, of whole shape `shape`, at `place`."""
    start, size = [0] * len(shape), list(shape)
    tp_axis = next((axis for suffix, axis in TP_AXIS.items() if name.endswith(suffix)), None) if layout.tp > 1 else None
    if tp_axis is not None:
        size[tp_axis] //= layout.tp
        start[tp_axis] = place.tp * size[tp_axis]
    is_expert = ".experts." in name
    if is_expert:
        size[0] //= layout.ep
        start[0] = place.ep * size[0]
    group: Literal["tokens", "data", "edp"] = "edp" if is_expert else "data" if tp_axis is not None else "tokens"
    return Part(tuple(shape), tuple(start), tuple(size), tp_axis, group)
