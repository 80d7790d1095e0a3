"""A traced program on a device: its host and streams, call by call, as it was written down."""

from moestro.config.plan import Plan, RoutingConfig
from moestro.errors import MoestroError
from moestro.graph.trace.program import Call, Traced
from moestro.graph.words import Collective, Node
from moestro.predict.constants import Constants, load_calibration
from moestro.predict.costs import kernel_class, pricer_of
from moestro.predict.target import Target
from moestro.predict.timeline import HostTimes, Op, RankClass, Timeline, walk


def replay(traced: Traced, target: Target, constants: Constants | None = None) -> Timeline:
    """The last step of one rank. All ranks are taken to do the same at the same time, so nobody waits for another.

    Raises:
        MoestroError: the target is a CPU, whose host computes: nothing runs beside it.
    """
    if target.host_computes:
        raise MoestroError("a CPU has no streams beside its host: give an accelerator for a timeline")
    plan = Plan(dp=traced.graph.world_size)
    pricer = pricer_of(target.curves, RoutingConfig(), plan, target.place.node_size)
    if constants is None:
        constants = target.constants or load_calibration().of(target.place.device.id, "fused")
    known = constants

    def seconds(node: Node) -> float:
        if isinstance(node, Collective):
            sent = pricer.network.of(node)
            return sent.seconds * (known.between if sent.between else known.inside)
        return float(pricer.kernels.seconds(node) * getattr(known, kernel_class(node)))

    return walk([RankClass("", [_op(call, seconds(call.node) if call.node else 0.0, known) for call in traced.calls])])[
        0
    ]


def _op(call: Call, seconds: float, constants: Constants) -> Op:
    if call.node is None:
        return Op(call.name, stream=call.stream, needs=call.needs, blocks=call.blocks)
    if isinstance(call.node, Collective):
        host = HostTimes(t4_s=constants.collective_host_s)
        return Op(call.name, (seconds,), host, call.stream, call.needs, group=call.stream)
    return Op(call.name, (seconds,), HostTimes(t4_s=constants.launch_s), call.stream, call.needs)
