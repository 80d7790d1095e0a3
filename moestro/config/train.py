"""How the model is trained: steps, batches, precision, optimizer, and where the run is kept."""

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from moestro.config.base import Section
from moestro.config.phases import PhaseConfig


class TrainConfig(Section):
    steps: int = Field(ge=1)  # with phases their sum, which need not be written down
    global_batch_size: int = Field(ge=1)  # sequences per optimizer step
    micro_batch_size: int | None = Field(None, ge=1)  # sequences per forward; None: the whole global batch
    # Activations and products. Weights, gradients and optimizer state are fp32 either way. On a CPU without bf16
    # units "bf16" stores activations in bf16 and multiplies in fp32.
    dtype: Literal["fp32", "bf16"] = "fp32"
    grad_clip: float | None = Field(1.0, gt=0)
    # "block": keep only each layer's input for backward and compute the layer again.
    recompute: Literal["none", "block"] = "none"
    # Cut every MoE layer's tokens into this many chunks that pass dispatch, experts and combine one after the other
    # (MemFine). "auto": the smallest of 1, 2, 4, 8 that keeps a chunk's activations within expert_memory_mib.
    expert_chunks: Annotated[
        Annotated[int, Field(ge=1), Tag("one")] | Annotated[Literal["auto"], Tag("many")],
        Discriminator(lambda value: "many" if value == "auto" else "one"),
    ] = 1
    expert_memory_mib: float | None = Field(None, gt=0)
    # Compute a chunk's dispatch and experts again in backward, so that one chunk's activations are alive at a time.
    expert_recompute: bool = False
    # Start the dispatch of the next chunk before the experts compute this one.
    expert_overlap: bool = False
    log_every: int = Field(1, ge=1)
    eval_every: int | None = Field(None, ge=1)  # None: only at the end
    eval_batches: int | None = Field(None, ge=1)  # micro-batches of held-out text; None: all of it
    checkpoint_every: int | None = Field(None, ge=1)  # None: only at the end and on Ctrl-C
    keep_checkpoints: int = Field(2, ge=1)
    # Copy the state to host memory and write it while training goes on. Takes as much host memory as a checkpoint.
    async_checkpoints: bool = False
    phases: tuple[PhaseConfig, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _sum_phases(cls, tree: Any) -> Any:
        phases = tree.get("phases") if isinstance(tree, dict) else None
        if not isinstance(phases, list) or not phases or "steps" in tree:
            return tree
        steps = [phase.get("steps") for phase in phases if isinstance(phase, dict)]
        return tree | {"steps": sum(n for n in steps if isinstance(n, int)) or 1}  # the phases' own checks say the rest

    @model_validator(mode="after")
    def _check(self) -> Self:
        steps = [phase.steps for phase in self.phases]
        if steps and sum(steps) != self.steps:
            raise ValueError(
                f"steps = {self.steps}, but the phases have {' + '.join(map(str, steps))} = {sum(steps)}; leave "
                "train.steps out or set it to that"
            )
        if self.expert_chunks == "auto" and self.expert_memory_mib is None:
            raise ValueError('expert_chunks = "auto" needs expert_memory_mib, the memory a chunk may take')
        if self.expert_overlap and self.expert_recompute:
            raise ValueError("expert_overlap and expert_recompute exclude each other; unset one of them")
        if self.expert_overlap and self.expert_chunks == 1:
            raise ValueError('expert_overlap needs expert_chunks of 2 or more (or "auto")')
        if self.global_batch_size % self.resolved_micro_batch_size:
            raise ValueError(
                f"global_batch_size = {self.global_batch_size} is not a multiple of "
                f"micro_batch_size = {self.resolved_micro_batch_size}"
            )
        return self

    @property
    def resolved_micro_batch_size(self) -> int:
        return self.micro_batch_size if self.micro_batch_size is not None else self.global_batch_size


class OptimConfig(Section):
    """AdamW for everything, or Muon for the matrices of the layers and AdamW for the rest."""

    name: Literal["adamw", "muon"] = "adamw"
    lr: float = Field(3e-3, gt=0)  # AdamW's peak learning rate
    muon_lr: float = Field(6e-3, gt=0)  # Muon's; an update has a root mean square of 0.2 muon_lr, as AdamW's has
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    momentum: float = Field(0.95, ge=0, lt=1)
    newton_schulz_steps: int = Field(5, ge=1)
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_steps: int = Field(0, ge=0)
    decay_fraction: float = Field(0.2, ge=0, le=1)  # only "wsd": the last part of the run, decayed linearly
    min_lr_ratio: float = Field(0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        for beta in self.betas:
            if not 0 <= beta < 1:
                raise ValueError(f"betas must lie in [0, 1), got {beta}")
        return self


class RunConfig(Section):
    name: str = "run"  # the run's folder is dir/name
    dir: str = "runs"
    seed: int = Field(0, ge=0)
    # "auto": continue from the newest good checkpoint in the folder, or start when there is none;
    # "never": refuse a folder that already holds a run.
    resume: Literal["auto", "never"] = "never"
    # A run's folder or a checkpoint whose weights and balancing state a new run starts from, instead of random ones.
    init_from: str | None = None
    supervise: bool = False  # a process watches over the ranks and starts them again, as [supervise] says
    device: str = "auto"  # "auto": the accelerator if there is one, else "cpu"
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)
    # Prompts continued at the end of training for the report.
    sample_prompts: tuple[str, ...] = ()
