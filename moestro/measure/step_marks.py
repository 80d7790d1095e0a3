"""Markers in a profile that say which part of the model, and which phase of the step, the host is in.

They come from hooks that are on the modules for one step only; the model itself knows nothing of them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.profiler import record_function

from moestro.measure.primitives import PART, PHASE, REST
from moestro.model.moe.layer import MoELayer
from moestro.model.transformer import Transformer
from moestro.train.engine import Engine
from moestro.train.step import Updates

HEAD = "head and loss"


@contextmanager
def marked(engine: Engine) -> Iterator[None]:
    """For the time of the block, a forward of the engine's stage leaves a marker for each module it passes.

    After the final norm, until the stage ends, comes the head: it is no module.
    """
    stage, model = engine.stages[0], engine.stages[0].model
    opened: list[record_function] = []

    def enter(part: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            opened.append(record_function(PART + part))
            opened[-1].__enter__()

        return hook

    def leave(*_: Any) -> None:
        opened.pop().__exit__(None, None, None)

    def leave_all(*_: Any) -> None:
        while opened:
            leave()

    handles = [stage.register_forward_pre_hook(enter(REST))]
    for module, part in _parts(model):
        handles.append(module.register_forward_pre_hook(enter(part)))
        handles.append(module.register_forward_hook(leave, always_call=True))
    if model.norm is not None:
        handles.append(model.norm.register_forward_hook(enter(HEAD)))
    handles.append(stage.register_forward_hook(leave_all, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _parts(model: Transformer) -> Iterator[tuple[nn.Module, str]]:
    moes = {path for path, module in model.named_modules() if isinstance(module, MoELayer)}
    for path, module in model.named_modules():
        if path:
            yield module, part_of(path, moes.__contains__)


def part_of(path: str, is_moe: Callable[[str], bool]) -> str:
    """The part of the model that a module is in, from its path. is_moe: of the path of an `mlp`."""
    names = path.split(".")
    if names[0] in ("encoders", "embed_tokens"):
        return {"encoders": "encoders", "embed_tokens": "embedding"}[names[0]]
    if "self_attn" in names:
        return "attention"
    if "mlp" in names:
        place = names.index("mlp") + 1
        inner = names[place] if place < len(names) else ""
        if inner in ("latent_in", "latent_out"):
            return "latent projections"
        found = {"router": "router", "experts": "experts", "shared_experts": "shared experts"}.get(inner)
        return found or ("dispatch, combine" if is_moe(".".join(names[:place])) else "dense feed-forward")
    if any("norm" in name for name in names):
        return "norms"
    if any(name in ("depth_router", "aux_in", "aux_out") for name in names):
        return "depth routers"
    return "multi-token prediction" if "projection" in names else REST


class MarkedUpdate:
    """An update with a marker around everything it does."""

    def __init__(self, update: Updates) -> None:
        self.update = update

    def reduce_gradients(self) -> None:
        with record_function(f"{PHASE}optimizer"):
            self.update.reduce_gradients()

    def clip(self, max_norm: float) -> Tensor:
        with record_function(f"{PHASE}optimizer"):
            return self.update.clip(max_norm)

    def step(self) -> None:
        with record_function(f"{PHASE}optimizer"):
            self.update.step()

    def zero_grad(self) -> None:
        with record_function(f"{PHASE}optimizer"):
            self.update.zero_grad()
