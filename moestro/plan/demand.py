"""What servers send each other in an exchange of experts, as the prediction has it: what circuits are laid for."""

import numpy as np

from moestro.config.plan import Plan, Workload
from moestro.errors import MoestroError
from moestro.graph.pieces import pieces_of
from moestro.graph.words import Collective
from moestro.hardware.curves.optical import Floats
from moestro.predict.network import span
from moestro.predict.target import Target
from moestro.predict.traffic import demand, rank_shares


def server_demands(workload: Workload, plan: Plan, target: Target) -> Floats:
    """[layers, servers, servers] bytes from row to column of one dispatch of a micro-batch, of servers that share
    experts; of balanced routing, or one measured number, one layer stands for all.

    Raises:
        MoestroError: no experts, or all in one server, or experts that do not share out over servers.
    """
    moe = workload.model.moe
    if moe is None:
        raise MoestroError("a model without experts has no exchange to lay circuits for")
    sent = _dispatch(workload, plan)
    place = None if sent is None else span(plan, sent.dimension, sent.ranks, target.place.node_size)
    if sent is None or place is None or place.nodes == 1:
        raise MoestroError(
            f"with ep = {plan.ep} experts are exchanged inside a server of {target.place.node_size}: give a larger "
            "plan.ep (or plan.tp and plan.etp) for an exchange between servers"
        )
    experts = moe.resolved_num_experts
    if place.ranks % place.nodes or experts % place.ranks:
        raise MoestroError(f"{experts} experts on {place.ranks} ranks do not share out over {place.nodes} servers")
    shares = rank_shares(workload.routing, experts, workload.model.largest_top_k, place.ranks)
    by_server = shares.reshape(len(shares), place.nodes, -1).sum(axis=2)
    found = np.stack([demand(layer, sent.bytes * target.place.node_size) for layer in by_server])
    return found * (1 - np.eye(place.nodes))


def _dispatch(workload: Workload, plan: Plan) -> Collective | None:
    """The first exchange of a layer with experts."""
    pieces = pieces_of(workload, plan)
    layer = workload.model.moe_layers.index(True)
    piece = pieces.stage(range(layer, layer + 1), False, False, plan.pp > 1, 0)[0][0].piece
    sends = (n for n in piece.forward if isinstance(n, Collective) and n.op == "all_to_all")
    return next((n for n in sends if n.dimension in ("ep", "ep_between")), None)
