"""How the ranks share the work: the sizes of the mesh and the choices that go with each of its dimensions."""

from typing import Annotated, Literal

from pydantic import Field

from moestro.config.base import Section

Size = Annotated[int, Field(ge=1)]


class ParallelConfig(Section):
    """The world is pp · dp · fsdp · cp · tp ranks; ep groups are taken out of dp · fsdp · cp.

    Every layout computes what one process computes. `moestro.parallel.layout` checks that a layout fits.
    """

    pp: Size = 1  # pipeline: the layers in consecutive stages
    dp: Size | None = None  # replicas of the (sharded) model; None: what the world leaves over
    fsdp: Size = 1  # ranks among which weights, gradients and optimizer state are split (FSDP2)
    cp: Size = 1  # context: every sequence is cut among these ranks
    tp: Size = 1  # tensor: attention heads and feed-forward widths; between them, the sequence
    ep: Size = 1  # experts: each rank of a group holds num_experts / ep of them
    # 0: replicas keep all. 1: replicas split the optimizer state. 2, 3: FSDP2 without and with freeing the gathered
    # weights between forward and backward. None: 1 without fsdp, 3 with it, and 2 with a pipeline too.
    zero: Literal[0, 1, 2, 3] | None = None

    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev"] = "1f1b"
    stages_per_rank: Size | None = None  # None: 2 for interleaved, zbv and dualpipev, else 1
    layers_per_stage: tuple[int, ...] | None = None  # one number a stage; None: as even as possible

    context: Literal["all_gather", "ring"] = "all_gather"  # how keys and values travel under cp

    # How tokens reach their experts. "leader" and "two_hop" are for nodes with fast links inside and slow ones between.
    dispatch: Literal["all_to_all", "all_gather", "leader", "two_hop"] = "all_to_all"
    ranks_per_node: Size | None = None  # None: LOCAL_WORLD_SIZE as torchrun sets it
    # How Muon's matrices that several ZeRO-1 slices share are brought together; "auto" sends two-rank matrices to one
    # of the two and gathers longer ones, "gather" gathers every matrix that is cut, "all_gather" all gradients.
    muon_exchange: Literal["auto", "gather", "all_gather"] = "auto"
