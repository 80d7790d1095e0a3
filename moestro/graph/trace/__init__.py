"""StepGraphs of real programs: run on tensors without values, among ranks that do not exist, and written down.

trace_step(config, 64)                    the trainer's own step, at any world size
trace_function("train:step", 64)          anyone's
trace_program("train:step", 64)           the same with its calls, stream by stream, and its memory
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moestro.config import Config
from moestro.config.plan import RoutingConfig
from moestro.graph.trace.program import Traced
from moestro.graph.words import StepGraph

if TYPE_CHECKING:
    from torch import Tensor


def trace_step(
    config: Config,
    world_size: int,
    routing: RoutingConfig | None = None,
    recorded: "Sequence[Tensor]" = (),
    ranks_per_node: int | None = None,
) -> StepGraph:
    """One step of `config` on `world_size` ranks, as the trainer runs it: one rank of each pipeline place is traced.

    recorded: choices [rows, K] of a real run's routers, one tensor a layer, in place of `routing`.

    Raises:
        MoestroError: the layout does not fit, or this process is in a process group.
    """
    from moestro.graph.trace.ours import trace_rank, unique_ranks
    from moestro.graph.trace.to_graph import graph_of
    from moestro.parallel.layout import resolve_layout

    layout = resolve_layout(config.in_phase(0), world_size, ranks_per_node or world_size)
    traces = [trace_rank(config, world_size, rank, routing, recorded, ranks_per_node) for rank in unique_ranks(layout)]
    return graph_of(config, traces)


def trace_program(
    name: str,
    world_size: int,
    rank: int = 0,
    routing: RoutingConfig | None = None,
    recorded: "Sequence[Tensor]" = (),
    seed: int = 0,
) -> Traced:
    """The step that "module:function" runs, as `rank` of `world_size`; see `user.trace` for what it may do.

    Raises:
        MoestroError: there is no such function, or it fails; the message says where.
    """
    from moestro.graph.trace.user import find, trace

    return trace(find(name), world_size, rank, routing, recorded, seed)


def trace_function(
    name: str, world_size: int, rank: int = 0, routing: RoutingConfig | None = None, recorded: "Sequence[Tensor]" = ()
) -> StepGraph:
    """The graph of `trace_program`."""
    return trace_program(name, world_size, rank, routing, recorded).graph
