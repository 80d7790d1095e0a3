"""The profile of one machine: what was measured, when, with what, and how well. Predictions are priced by it."""

import json
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from moestro.config.base import Section
from moestro.config.files import write_whole
from moestro.errors import MoestroError

FORMAT = 1

# What a case holds, by operation. Sizes are numbers, dtypes are names of hardware.devices.Dtype.
#   gemm            m, n, k, dtype [, layout]              out [m, n] = a [m, k] · b [k, n]
#   batched_gemm    batch, m, n, k, dtype
#   grouped_gemm    groups, m, n, k, dtype [, how]         m: rows of each group (balanced); how: loop, where not fused
#   moe_experts     experts, top_k, tokens, ffn, hidden, dtype, ep, routing    forward of all local experts
#   attention       batch, seq, heads, kv_heads, head_dim, dtype, causal, phase (fwd | bwd | decode)
#   copy scale add triad dot read                          bytes (of one array), dtype
#   host_to_device device_to_host                          bytes, dtype, pinned (0 | 1)
#   rmsnorm rmsnorm_backward residual_norm swiglu rope gather scatter    tokens, width, dtype
#   router          tokens, width, experts, top_k, dtype
#   embedding embedding_backward cross_entropy             tokens, width, vocab, dtype
#   adamw           elements, dtype
#   muon newton_schulz                                     matrices, rows, columns, dtype
#   all_reduce all_gather reduce_scatter all_to_all all_to_all_uneven broadcast send_recv ring
#                   bytes (the definition of curves.busbw), ranks, nodes, dtype [, world, groups, algorithm, pair]
#   host_t1 … host_t5, host_launch, host_sync              what
#   train_step      preset, batch, what (operations | host)
#   storage_write storage_read storage_random_read storage_scatter    bytes, block_bytes [, depth, advice]
Value = int | float | str

# Without these entries nothing can be done with a sample, so that a file whose samples lack one is refused.
_PRODUCT, _ROWS, _EXCHANGE = ("m", "n", "k", "dtype"), ("tokens", "width", "dtype"), ("bytes", "ranks")
_NEEDED: dict[tuple[str, ...], tuple[str, ...]] = {
    ("gemm",): _PRODUCT,
    ("batched_gemm",): ("batch", *_PRODUCT),
    ("grouped_gemm",): ("groups", *_PRODUCT),
    ("moe_experts",): ("experts", "top_k", "tokens", "ffn", "hidden", "dtype"),
    ("attention",): ("batch", "seq", "heads", "kv_heads", "head_dim", "dtype", "phase"),
    ("copy", "scale", "add", "triad", "dot", "read", "host_to_device", "device_to_host"): ("bytes",),
    ("rmsnorm", "rmsnorm_backward", "residual_norm", "swiglu", "rope", "gather", "scatter"): _ROWS,
    ("router",): (*_ROWS, "experts", "top_k"),
    ("embedding", "embedding_backward", "cross_entropy"): (*_ROWS, "vocab"),
    ("adamw",): ("elements", "dtype"),
    ("muon", "newton_schulz"): ("matrices", "rows", "columns"),
    ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_uneven"): _EXCHANGE,
    ("broadcast", "send_recv", "ring"): _EXCHANGE,
    ("host_t1", "host_t2", "host_t3", "host_t4", "host_t5", "host_launch", "host_sync"): ("what",),
    ("storage_write", "storage_read", "storage_random_read", "storage_scatter"): ("bytes", "block_bytes"),
}
_NEEDED_BY_OP = {op: needed for ops, needed in _NEEDED.items() for op in ops}
_WORDS = ("dtype", "phase", "what")  # all other entries needed are numbers


class Sample(Section):
    """One case, timed `repeats` times in several rounds spread over the whole measurement.

    low_s and high_s: the 10th and 90th percentile of all timings. noisy: the spread stayed wider than the limit after
    every repetition. source: "measured", or the public record that it was taken from (then only median_s is known).
    """

    op: str
    case: dict[str, Value]
    median_s: float = Field(gt=0)
    low_s: float | None = None
    high_s: float | None = None
    repeats: int = 0
    noisy: bool = False
    flops: float | None = None
    bytes_moved: float | None = None
    source: str = "measured"
    software: str = ""

    @property
    def spread(self) -> float | None:
        """(high - low) / median, or None for a figure without repeats."""
        if self.low_s is None or self.high_s is None:
            return None
        return (self.high_s - self.low_s) / self.median_s

    @property
    def flops_per_s(self) -> float | None:
        return None if self.flops is None else self.flops / self.median_s

    @property
    def bytes_per_s(self) -> float | None:
        return None if self.bytes_moved is None else self.bytes_moved / self.median_s

    def number(self, name: str) -> float:
        """A numeric entry of the case. Raises MoestroError when it is missing or not a number."""
        value = self.case.get(name)
        if not isinstance(value, int | float):
            raise MoestroError(f"a sample of {self.op} has no number '{name}': {self.case}")
        return float(value)


class FitReport(Section):
    """A curve fitted to some of the samples: its parameters, and its error on samples held out of the fit."""

    what: str  # for example "all_reduce, 8 ranks" or "gemm bf16"
    form: str  # the chosen form: "alpha_beta", "half_size", "sigmoid", "piecewise", "tiles" …
    parameters: dict[str, float]
    samples: int
    held_out_median: float | None = None  # relative error of the time
    held_out_p90: float | None = None


class Machine(Section):
    """The machine that was measured."""

    device_id: str = ""  # in the catalog, where it is known
    device_name: str
    device_type: str  # torch's: cpu, cuda, xpu …
    num_devices: int = 1
    hostname: str = ""
    cpu: str = ""
    cores: int | None = None
    threads: int | None = None  # torch's intra-op threads while measuring
    memory_bytes: float | None = None
    topology: Literal["switch", "mesh", "ring", "torus", "hypercube_mesh", "pcie", "host", "none", "unknown"] = (
        "unknown"
    )
    nics: tuple[str, ...] = ()
    load_average: float | None = None  # before measuring; above a few tenths of a core the profile is suspect
    versions: dict[str, str] = Field(default_factory=dict)
    environment: dict[str, str] = Field(default_factory=dict)  # variables that change speed (OMP_*, NCCL_*, …)


class MachineProfile(Section):
    """Samples of one machine with the curves fitted to them and the constants derived from them.

    at_once: of a CPU, the same operations as several processes ran them at a time; their cases hold "processes".
    constants: for example align_gemm_n_fp32, knee_gflop_fp32, bucket_bytes_8, memory_gbps, launch_us.
    """

    format: int = FORMAT
    name: str
    created_at: str  # UTC, ISO 8601; empty for a profile made of public records
    seconds: float = 0.0  # that measuring took
    mode: Literal["quick", "full", "published"]
    machine: Machine
    samples: tuple[Sample, ...]
    at_once: tuple[Sample, ...] = ()
    fits: tuple[FitReport, ...] = ()
    constants: dict[str, float] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what was skipped or is suspect, and why

    def of(self, op: str, **wanted: Value) -> list[Sample]:
        """The samples of an operation whose cases hold all of `wanted`."""
        return [s for s in self.samples if s.op == op and all(s.case.get(k) == v for k, v in wanted.items())]


def save_profile(profile: MachineProfile, path: Path) -> None:
    """Write the profile as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(profile.model_dump(mode="json", exclude_none=True), indent=1) + "\n")


def load_profile(path: Path) -> MachineProfile:
    """Read a profile (a file, or a folder that holds profile.json).

    Raises:
        MoestroError: no such file, not JSON, another format, a key or value that the schema does not know, or a case
            that lacks an entry which its operation needs.
    """
    if path.is_dir():
        path = path / "profile.json"
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MoestroError(f"no profile at {path}; `moestro measure` writes one") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise MoestroError(f"{path} is not a profile: {error}") from error
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        found = tree.get("format") if isinstance(tree, dict) else type(tree).__name__
        raise MoestroError(f"{path} has profile format {found}; this version reads {FORMAT}. Measure again.")
    try:
        profile = MachineProfile.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise MoestroError(f"{path}: {where}: {first['msg']}") from error
    for number, sample in enumerate(profile.samples):
        if problem := _case_problem(sample):
            raise MoestroError(f"{path}: samples.{number}, of {sample.op}: {problem}")
    return profile


def _case_problem(sample: Sample) -> str:
    """What is wrong with the entries that the operation needs; empty for an operation that we do not know."""
    for name in _NEEDED_BY_OP.get(sample.op, ()):
        value = sample.case.get(name)
        if value is None:
            return f"its case has no '{name}'"
        if isinstance(value, str) != (name in _WORDS):
            return f"'{name}' is a {'word' if name in _WORDS else 'number'}, not {value!r}"
    return ""
