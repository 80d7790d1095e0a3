"""Settings of `[supervise]`: how a run is watched over, and when it is started again."""

from pydantic import Field

from moestro.config.base import Section


class SuperviseConfig(Section):
    """Of the process that starts the ranks again: `moestro train … run.supervise=true`. Seconds."""

    # A step may take this many times its median, but never less than the floor, before it counts as hanging. The floor
    # should be above the time that a link needs to come back.
    hang_factor: float = Field(5.0, gt=1)
    hang_floor_s: float = Field(120.0, gt=0)
    # Outside of steps (preparing text, evaluating, saving) and in the first one, which may compile.
    long_s: float = Field(1800.0, gt=0)
    silent_s: float = Field(30.0, gt=0)  # without a sign of life from a rank
    slow_factor: float = Field(1.2, gt=1)  # a rank's own time over the others', of 50 steps
    max_restarts: int = Field(100, ge=0)  # in all
    max_restarts_per_hour: int = Field(20, ge=0)
    # Restarts without a new step between them; then the run stops, as starting again does not help.
    max_without_progress: int = Field(3, ge=1)
    backoff_s: float = Field(1.0, ge=0)  # before a restart, doubled with each that comes without progress
    backoff_most_s: float = Field(60.0, ge=0)
    # Ranks of what counts as one node; None: all of this machine's.
    ranks_per_node: int | None = Field(None, ge=1)
    # Go on without the ranks of a node that ended the run `lost_after` times within `lost_within_s`, or that the doctor
    # finds unfit. It may come back after `back_after_s`, and twice that each time it is lost again.
    elastic: bool = False
    lost_after: int = Field(2, ge=1)
    lost_within_s: float = Field(3600.0, gt=0)
    back_after_s: float = Field(600.0, ge=0)
    doctor: bool = False  # `moestro doctor` looks at a node before its ranks start, and start again
