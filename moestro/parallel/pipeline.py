"""Pipeline parallelism by PyTorch's schedules: this rank's stages, and one call that runs a step's micro-batches."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from moestro.config import Config
from moestro.model.transformer import stream_size
from moestro.parallel.layout import MANY_STAGES
from moestro.parallel.mesh import Mesh

SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


class Pipeline:
    """Each module maps (inputs, number of the micro-batch [1]) to hidden states, the last one to a loss [1]."""

    def __init__(
        self, modules: Sequence[nn.Module], mesh: Mesh, config: Config, device: torch.device, dtype: torch.dtype
    ) -> None:
        layout = mesh.layout
        self._numbers = torch.arange(layout.micro_batches)
        ids = (layout.micro_batch_size, config.data.seq_len // layout.sequence_ranks)
        hidden = torch.empty(*ids, stream_size(config.model), dtype=dtype, device="meta", requires_grad=True)
        tokens = torch.empty(ids, dtype=torch.int64, device="meta")
        loss = torch.empty(1, device="meta", requires_grad=True)
        numbers, count = layout.stages_of(mesh.place.pp), len(layout.stages)
        self._has_first = 0 in numbers
        # Shapes are given, not inferred: PyTorch would run every stage once on made-up data to find out.
        stages = [
            _Stage(
                module,
                number,
                count,
                device,
                input_args=tokens if number == 0 else hidden,
                output_args=loss if number == count - 1 else hidden,
                group=mesh.pp,
            )
            for module, number in zip(modules, numbers, strict=True)
        ]
        self._schedule = SCHEDULES[layout.schedule](
            stages if layout.schedule in MANY_STAGES else stages[0],
            n_microbatches=layout.micro_batches,
            loss_fn=_loss,
            scale_grads=False,  # the losses already carry their weight
        )

    def run(self, input_ids: Tensor, backward: bool) -> None:
        """input_ids: [micro-batches · batch, positions here]; gradients are added to the parameters'."""
        args = (input_ids,) if self._has_first else ()
        kwargs = {"number": self._numbers, "target": self._numbers}
        if backward:
            self._schedule.step(*args, **kwargs, return_outputs=False)
        else:
            self._schedule.eval(*args, **kwargs, return_outputs=False)


class _Stage(PipelineStage):
    """V-shaped schedules hand gradients from one stage of a rank to the other also when there are none (`eval`)."""

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


def _loss(output: Tensor, _target: Tensor) -> Tensor:
    return output.sum()
