"""A Prediction: one number with its breakdown, its interval, and what it does not include."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Interval:
    """`value` with the range in which four of five validated runs of its class fell."""

    value: float
    low: float
    high: float
    basis: str  # "12 MoE runs on h100-sxm in bf16", or that it extrapolates and from where


@dataclass(frozen=True)
class MemoryBreakdown:
    """Bytes on one device of the fullest pipeline rank, at the steady peak."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    transient: float
    communication: float  # communicators' buffers
    framework: float  # context, libraries, workspace
    fragmentation: float
    excluded: tuple[str, ...] = ()  # what is not in it

    @property
    def allocated(self) -> float:
        """Of tensors: what the framework's allocator has handed out."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.transient

    @property
    def reserved(self) -> float:
        """What the allocator holds."""
        return self.allocated + self.fragmentation

    @property
    def needed(self) -> float:
        """What the device must have, without fragmentation: an allocator short of memory gives free blocks back."""
        return self.allocated + self.communication + self.framework

    @property
    def total(self) -> float:
        """All that the device holds where there is room."""
        return self.reserved + self.communication + self.framework


@dataclass(frozen=True)
class TimeBreakdown:
    """Seconds of a step on the critical pipeline rank; they add up to the step."""

    compute: float  # kernels
    host: float  # launches that the device waited for
    communication: float  # exposed
    bubble: float  # waiting for other pipeline stages
    optimizer: float
    by_part: dict[str, float] = field(default_factory=dict)  # of compute: attention, experts …
    by_dimension: dict[str, float] = field(default_factory=dict)  # tp, ep, dp …: all communication, hidden or not
    hidden_communication: float = 0.0
    # Of `communication`; what they leave of it is computation that slows down while something is sent beside it.
    exposed_by_dimension: dict[str, float] = field(default_factory=dict)
    exposed_once: float = 0.0  # of `communication`: once a step, of gradients and weights
    rank: int = 0  # the critical one

    @property
    def total(self) -> float:
        return self.compute + self.host + self.communication + self.bubble + self.optimizer


@dataclass(frozen=True)
class Prediction:
    step_s: Interval
    time: TimeBreakdown
    memory: MemoryBreakdown
    memory_by_rank: tuple[float, ...]  # bytes, each pipeline rank
    tokens_per_s: float
    tokens_per_s_per_device: float
    mfu: float | None  # of the device's nominal peak
    profile: str  # of which machine
    notes: tuple[str, ...] = ()
