"""What checkpoints write, and what a restart reads: bytes by layout, and seconds at the storage's rate.

Every number of the state is written once, by one of the ranks that hold it, all of them about as much. Every rank reads
all that it holds, so what several ranks hold whole is read several times: that is how a layout makes restarts slow.
"""

import math
from typing import NamedTuple

from moestro.config.plan import Plan, Workload
from moestro.graph.count import count_step
from moestro.graph.tape import expert_shards
from moestro.graph.words import Parameters
from moestro.predict.memory import moment_bytes

WEIGHT_BYTES = 4  # fp32, whatever is computed in


class Storage(NamedTuple):
    """Bytes per second, of all storage together and over one device's way to it. source: in words."""

    bytes_per_s: float
    device_bytes_per_s: float = math.inf
    source: str = "given"


class StateBytes(NamedTuple):
    """Of a checkpoint: by all ranks together and by the one with most, written and read again."""

    written: float
    most_written: float
    read: float
    most_read: float


def rank_state(workload: Workload, plan: Plan, numbers: Parameters) -> tuple[float, float]:
    """Bytes that a rank which holds these parameters writes, and that it reads."""
    trained = numbers.trained / numbers.total if numbers.total else 0.0
    of_dense, of_expert = moment_bytes(workload.optimizer, numbers)
    written = read = 0.0
    for count, moments, holders, split in (
        (numbers.dense * trained, of_dense, plan.dp * plan.cp, plan.shard_ranks),
        (numbers.expert * trained, of_expert, plan.expert_data_ranks, expert_shards(workload, plan)),
    ):
        written += count * (WEIGHT_BYTES + moments) / holders
        read += count * (WEIGHT_BYTES / (split if plan.zero == 3 else 1) + moments / split)
    return written, read


def state_bytes(workload: Workload, plan: Plan) -> StateBytes:
    """Of a plan that fits the workload."""
    written, read = [0.0] * plan.pp, [0.0] * plan.pp
    for stage in count_step(workload, plan).stages:
        mine = rank_state(workload, plan, stage.parameters)
        holders = {stage.rank, plan.pp - 1 - stage.rank} if plan.schedule == "dualpipe" else {stage.rank}
        written[stage.rank] += mine[0]
        for rank in holders:
            read[rank] += mine[1]
    alike = plan.world_size // plan.pp
    return StateBytes(alike * sum(written), max(written), alike * sum(read), max(read))
