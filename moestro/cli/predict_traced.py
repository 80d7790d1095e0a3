"""`moestro predict --trace`: a program's step and its memory, from what it did without being run."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from torch import Tensor

    from moestro.config.plan import RoutingConfig
    from moestro.graph.trace.program import Traced
    from moestro.predict.target import Target
    from moestro.predict.timeline import Timeline

DRAWS = 3  # of a routing that is drawn


def predict_program(
    name: str, world: int, routing: str, target: "Target", timelines: Sequence[Path], as_json: bool
) -> None:
    """Trace "module:function", price it, print it, and write its timeline where one is wanted."""
    import json

    from moestro.cli.asked import keep_curves
    from moestro.cli.predict_files import write_events
    from moestro.cli.predict_tables import print_traced
    from moestro.graph.trace import trace_program
    from moestro.predict.perfetto import stage_trace
    from moestro.predict.predict import predict_traced
    from moestro.predict.replay import replay

    config, recorded = read_routing(routing)
    traced = trace_program(name, world, 0, config, recorded)
    time = predict_traced(traced.graph, target)
    seconds = [time.total]
    if traced.is_routed and config is not None and config.kind == "power_law":
        others = (trace_program(name, world, 0, config, recorded, seed * 1000) for seed in range(1, DRAWS))
        seconds += [predict_traced(other.graph, target).total for other in others]
    line = None if target.host_computes and not timelines else replay(traced, target)
    keep_curves(target)
    for path in timelines:
        assert line is not None
        write_events(path, stage_trace(line))
    if as_json:
        typer.echo(json.dumps(_tree(traced, target, time, seconds, line), indent=1))
        return
    print_traced(name, traced.graph, time, target)
    typer.echo("")
    for label, text in _rows(traced, target, seconds, line):
        typer.echo(f"{label:<14}{text}")
    for path in timelines:
        typer.echo(f"{'timeline':<14}{path}")


def read_routing(text: str) -> "tuple[RoutingConfig | None, Sequence[Tensor]]":
    """Of "balanced", "power_law", "power_law:1.5", or the path of an .npz with an array [rows, K] for each layer.

    Raises:
        MoestroError: it is none of them.
    """
    from pydantic import ValidationError

    from moestro.config.plan import RoutingConfig
    from moestro.errors import MoestroError

    kind, _, alpha = text.partition(":")
    if kind in ("", "balanced"):
        return RoutingConfig(), ()
    if kind == "power_law":
        try:
            return RoutingConfig.model_validate({"kind": kind, **({"alpha": alpha} if alpha else {})}), ()
        except ValidationError as error:
            raise MoestroError(f"--routing {text}: ALPHA is a number above 0, as in power_law:1.2") from error
    return None, _choices(Path(text))


def _choices(path: Path) -> "list[Tensor]":
    import zipfile

    import numpy as np
    import torch

    from moestro.errors import MoestroError

    try:
        with np.load(path) as file:
            arrays = [file[name] for name in file.files]
    except (OSError, ValueError, AttributeError, zipfile.BadZipFile) as error:
        raise MoestroError(
            f"--routing {path}: give balanced, power_law, power_law:ALPHA, or a file that numpy.savez wrote"
        ) from error
    if not arrays or any(a.ndim != 2 or a.dtype.kind not in "iu" or a.size == 0 for a in arrays):
        raise MoestroError(f"{path} holds no choices: for each layer an array [rows, K] of experts' numbers")
    return [torch.from_numpy(array.astype("int64")) for array in arrays]


def _rows(traced: "Traced", target: "Target", seconds: list[float], line: "Timeline | None") -> list[tuple[str, str]]:
    memory = traced.memory
    rows = []
    if line is not None:
        rows.append(
            ("replayed", f"{_ms(line.total_s)} on host and streams, call by call, without waits for other ranks")
        )
    if len(seconds) > 1:
        rows.append(("routing", f"{_ms(min(seconds))} to {_ms(max(seconds))} in {len(seconds)} draws"))
    rows.append(
        ("memory", f"peak {_size(memory.steady)} ({'last' if traced.steps > 1 else 'only'} step)" + _beside(target))
    )
    rows.append(("", ", ".join(f"{kind} {_size(size)}" for kind, size in memory.by_kind.items())))
    rows.append(("", f"before the first step {_size(memory.init)}, in the first {_size(memory.first_step)}"))
    rows.append(("", f"allocator: {_size(memory.allocated)} in blocks, {_size(memory.reserved)} reserved"))
    rows.append(
        ("traced", f"{traced.steps} steps; building {traced.build_s:.1f} s, the last step {traced.step_s:.1f} s")
    )
    return rows


def _beside(target: "Target") -> str:
    from moestro.hardware.fits import usable_bytes

    size = None if target.host_computes else usable_bytes(target.place.device)
    return "" if not size else f" of {_size(size)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.4g} ms"


def _size(bytes_: float) -> str:
    for unit, one in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if bytes_ >= one:
            return f"{bytes_ / one:.4g} {unit}"
    return f"{bytes_:.0f} B"


def _tree(
    traced: "Traced", target: "Target", time: Any, seconds: list[float], line: "Timeline | None"
) -> dict[str, Any]:
    from dataclasses import asdict

    graph = traced.graph
    return {
        "devices": graph.world_size,
        "model_flops": graph.model_flops,
        "profile": target.profile,
        "notes": graph.notes,
        "time": {**asdict(time), "total": time.total},
        "draws_s": seconds,
        "replayed_s": None if line is None else line.total_s,
        "memory_bytes": asdict(traced.memory),
        "steps": traced.steps,
    }
