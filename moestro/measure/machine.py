"""One machine measured as a whole, within a time limit, into one profile.

A section that fails is noted with its reason, and the rest goes on; what no longer fits into the time is noted too.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

import moestro
from moestro.errors import MoestroError
from moestro.hardware.catalog import find_device
from moestro.hardware.device import device_name, resolve_device
from moestro.hardware.profile import Machine, MachineProfile, Sample
from moestro.hardware.topology import discover, driver_version, usable_cores
from moestro.measure.attention import attention_cases
from moestro.measure.collectives import Plan as CollectivePlan
from moestro.measure.collectives import collective_profile, usual_plan
from moestro.measure.compare import BUSY
from moestro.measure.elementwise import elementwise_cases
from moestro.measure.gemm import gemm_cases
from moestro.measure.host import measure_host
from moestro.measure.memory import memory_cases
from moestro.measure.sections import COMPUTE, SECTIONS, SKIPPED, check_skipped
from moestro.measure.storage import measure_storage
from moestro.measure.timing import Case, measure_cases
from moestro.measure.together import measure_steps, measure_together, processes_at_once

Progress = Callable[[str, int, int, str], None]  # section, cases done, of how many, the one at hand

# Seconds of measuring, in all and by section. Start of Python before, curves and page after, come on top: about 8 s.
QUICK_S, FULL_S = 46.0, 480.0
_SHARES = {"compute": 21.0, "host": 3.0, "storage": 5.0, "collectives": 17.0}
# Of its own time: what must be left, or a section is not started; and what it takes at most of what others leave.
LEAST, MOST = 0.3, 1.5
LEAVE = 0.8  # of its share that storage plans with, as a pass that has begun is finished
TOGETHER = 0.2  # of the whole time, that operations in several processes at once take on top, on a CPU
HANGS_S = 60.0  # beyond its time, after which the command that measures collectives is taken to hang
CALL_S, ENOUGH_S = 2.5e-3, 0.5  # of timing one compute case, at least and at most

_CASES = {
    "gemm": gemm_cases,
    "memory": memory_cases,
    "attention": attention_cases,
    "elementwise": elementwise_cases,
}
_SPEED_VARIABLES = (
    "OMP_", "GOMP_", "KMP_", "MKL_", "NCCL_", "RCCL_", "GLOO_", "UCX_", "FI_", "CUDA_", "HIP_", "HSA_", "ROCR_",
    "PYTORCH_", "TORCH_NCCL_", "MIOPEN_", "LD_PRELOAD", "MALLOC_",
)  # fmt: skip


@dataclass
class _Findings:
    samples: list[Sample] = field(default_factory=list)
    at_once: list[Sample] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Plan:
    """What is to be measured, and by when."""

    device: torch.device
    quick: bool
    ranks: int
    folder: Path
    skip: Collection[str]
    progress: Progress
    deadline: float  # of time.perf_counter()
    together: bool  # whether operations are also measured in several processes at once

    def left_s(self) -> float:
        return self.deadline - time.perf_counter()


def measure_machine(
    *,
    quick: bool,
    device: str = "auto",
    ranks: int | None = None,
    folder: Path,
    skip: Collection[str] = (),
    name: str = "",
    progress: Progress = lambda section, done, total, what: None,
    started: float | None = None,
) -> MachineProfile:
    """Samples of every section that is not skipped, without curves: see `constants.with_curves`.

    Args:
        quick: within QUICK_S, else within FULL_S, of `started`.
        ranks: of the collectives; None: one for each accelerator, or up to the cores of a CPU. On a CPU operations and
            a training step are then also measured in several processes at once, which takes TOGETHER of the time more;
            with None, not if quick.
        folder: where storage is measured; nothing is left there.
        started: time.perf_counter() from which the time counts; None: now.

    Raises:
        MoestroError: a device that is not here, fewer than one rank, an unknown section, or nothing to measure.
    """
    begin = time.perf_counter()
    skip = check_skipped(skip)
    if ranks is not None and ranks < 1:
        raise MoestroError(f"collectives need at least one rank, not {ranks}")
    where = resolve_device(device, "--device")
    machine, found = describe_machine(where), _Findings()
    found.notes += _doubts(machine)
    if skip:
        found.notes.append(f"{SKIPPED}: {', '.join(section for section in SECTIONS if section in skip)}")
    together = where.type == "cpu" and (ranks is not None or not quick)
    ranks = ranks or default_ranks(machine, quick)
    if where.type == "cpu" and machine.cores and ranks > machine.cores:
        found.notes.append(f"collectives: {ranks} ranks share {machine.cores} cores; the scheduler is in their times")
    limit_s = QUICK_S if quick else FULL_S
    plan = _Plan(
        where, quick, ranks, folder, skip, progress, (begin if started is None else started) + limit_s, together
    )
    _run_sections(plan, found)
    if not found.samples:
        raise MoestroError(f"nothing could be measured: {'; '.join(found.notes) or 'every section failed'}")
    return MachineProfile(
        name=name or machine.hostname or "machine",
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(time.perf_counter() - begin, 1),
        mode="quick" if quick else "full",
        machine=machine,
        samples=tuple(found.samples),
        at_once=tuple(found.at_once),
        notes=tuple(found.notes),
    )


def _run_sections(plan: _Plan, found: _Findings) -> None:
    work = {"compute": _compute, "host": _host, "storage": _storage, "collectives": _collectives}
    wanted = [name for name in work if _wanted(name, plan.skip)]
    for index, name in enumerate(wanted):
        own_s = _SHARES[name] * (QUICK_S if plan.quick else FULL_S) / sum(_SHARES.values())
        # Time that a section leaves goes to those after it.
        share_s = plan.left_s() * _SHARES[name] / sum(_SHARES[other] for other in wanted[index:])
        share_s = min(share_s, MOST * own_s)
        if share_s < LEAST * own_s:
            found.notes.append(f"{name}: left out, as the time was up")
            continue
        try:
            work[name](plan, share_s, found)
        except (MoestroError, RuntimeError, OSError, ValueError, ArithmeticError, ImportError) as error:
            found.notes.append(f"{name}: {_first_line(error)}")


def _wanted(name: str, skip: Collection[str]) -> bool:
    parts = {"compute": COMPUTE, "collectives": ("collectives", "pairs")}.get(name, (name,))
    return not set(parts) <= set(skip)


def _compute(plan: _Plan, share_s: float, found: _Findings) -> None:
    """The four sections of computing in common rounds, so that drift over the whole of it shows in every spread."""
    deadline = time.perf_counter() + share_s
    cases = list[Case]()
    for section in COMPUTE:
        if section in plan.skip:
            continue
        plan.progress("compute", 0, 1, f"{section}: preparing")
        try:
            cases += _CASES[section](plan.device, plan.quick)
        except (MoestroError, RuntimeError, ValueError) as error:
            found.notes.append(f"{section}: {_first_line(error)}")
    if not cases:
        return
    left_s = deadline - time.perf_counter()
    result = measure_cases(
        cases,
        plan.device,
        seconds_per_case=min(max(0.5 * left_s / len(cases), CALL_S), ENOUGH_S),
        progress=lambda done, total, what: plan.progress("compute", done, total, what),
        deadline=deadline,
    )
    found.samples += result.samples
    found.notes += result.notes


def _host(plan: _Plan, share_s: float, found: _Findings) -> None:
    plan.progress("host", 0, 1, "launch overheads")
    found.samples += measure_host(plan.device, plan.quick)
    plan.progress("host", 1, 1, "")


def _storage(plan: _Plan, share_s: float, found: _Findings) -> None:
    plan.progress("storage", 0, 1, "write, read, random reads")
    result = measure_storage(plan.folder, plan.quick, limit_s=LEAVE * share_s)
    found.samples += result.samples
    told = set(map(str, result.scatter))  # the samples hold it
    found.notes += [f"storage: {note}" for note in result.notes if note not in told]
    plan.progress("storage", 1, 1, "")


def _collectives(plan: _Plan, share_s: float, found: _Findings) -> None:
    plan.progress("collectives", 0, 1, f"{plan.ranks} ranks")
    usual = usual_plan(plan.ranks, plan.quick, plan.device)
    wanted = replace(
        usual,
        ops=() if "collectives" in plan.skip else usual.ops,
        pair_bytes=0 if "pairs" in plan.skip else usual.pair_bytes,
    )
    if plan.device.type == "cpu" or plan.ranks == 1:
        if plan.together and "collectives" not in plan.skip:  # in time of its own
            _together(plan, TOGETHER * (QUICK_S if plan.quick else FULL_S), found)
        result = collective_profile(plan.ranks, plan.quick, plan=wanted, limit_s=share_s)
        found.samples += result.samples
        notes = [str(note) for note in (*result.findings, *result.notes)]
    else:
        samples, notes = collectives_of_devices(plan.ranks, plan.device, wanted, share_s)
        found.samples += samples
    found.notes += [f"collectives: {note}" for note in notes]
    plan.progress("collectives", 1, 1, "")


def _together(plan: _Plan, limit_s: float, found: _Findings) -> None:
    """Operations while several processes work at once, which is what the ranks of one CPU do."""
    cores = usable_cores()
    numbers = processes_at_once(plan.ranks, cores)
    for processes in numbers:
        plan.progress("collectives", 0, 1, f"operations of {processes} processes at once")
        try:
            found.at_once += measure_together(processes, cores, limit_s / len(numbers))
        except RuntimeError as error:
            found.notes.append(f"operations of {processes} processes at once: {_first_line(error)}")
    for processes in (1, *numbers):
        plan.progress(
            "collectives", 0, 1, f"a training step on {processes} {'processes' if processes > 1 else 'process'}"
        )
        try:
            found.at_once += measure_steps(processes)
        except (MoestroError, RuntimeError) as error:
            found.notes.append(f"a training step on {processes} processes: {_first_line(error)}")


def collectives_of_devices(
    ranks: int, device: torch.device, plan: CollectivePlan, limit_s: float
) -> tuple[list[Sample], list[str]]:
    """What `moestro measure collectives` measures with one new process for each device, and its notes.

    Raises:
        RuntimeError: it failed; with what it wrote to its standard error. Or it hangs, and was killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        command = [sys.executable, "-m", "moestro", "measure", "collectives", f"--nproc={ranks}", f"--out={out}"]
        command += [f"--device={device.type}", f"--limit={limit_s:.0f}", f"--pair-bytes={plan.pair_bytes}"]
        command += [f"--ops={','.join(plan.ops) or 'none'}", f"--sizes={','.join(map(str, plan.sizes_bytes))}"]
        command += [f"--groups={','.join(map(str, plan.group_sizes))}", f"--repeats={plan.repeats}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s + HANGS_S)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"no answer within {limit_s + HANGS_S:.0f} s; `moestro doctor` may say why") from error
        if not (out / "samples.jsonl").exists():
            raise RuntimeError(done.stderr.strip() or f"exit status {done.returncode}")
        samples = [Sample.model_validate_json(line) for line in (out / "samples.jsonl").read_text().splitlines()]
        return samples, json.loads((out / "notes.json").read_text())


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if isinstance(error, RuntimeError) and lines else lines[0] if lines else type(error).__name__


def default_ranks(machine: Machine, quick: bool) -> int:
    """One rank for each accelerator; on a CPU two, or four in full mode where there are cores for them."""
    if machine.device_type != "cpu":
        return machine.num_devices
    return max(1, min(machine.cores or 2, 2 if quick else 4))


def describe_machine(device: torch.device) -> Machine:
    """Who is measured: device, processor, versions, and the variables that change speed."""
    text, found = device_name(device), discover()
    catalog = find_device(text.split(", ")[0])
    cores = usable_cores()
    memory = [limit for limit in (_memory_bytes(), found.limits.memory_bytes) if limit is not None]
    return Machine(
        device_id=catalog.id if catalog else "",
        device_name=text,
        device_type=device.type,
        num_devices=torch.accelerator.device_count() if device.type != "cpu" else 1,
        hostname=platform.node(),
        cpu=found.cpu.name or device_name(torch.device("cpu")).split(", ")[0],
        cores=min(cores, max(1, round(found.limits.cpus or cores))),
        threads=torch.get_num_threads(),
        memory_bytes=min(memory, default=None),
        topology="host" if device.type == "cpu" else found.link,
        nics=tuple(map(str, found.nics)),
        load_average=_load_average(),
        versions=_versions(device),
        environment=_environment(),
    )


def _doubts(machine: Machine) -> list[str]:
    """Why the figures may be worse than the machine."""
    load, cores = machine.load_average, machine.cores or 1
    if load is None or load <= BUSY * cores:
        return []
    return [
        f"suspect: the load average was {load:.2f} on {cores} cores before measuring began; other work slows the "
        "figures and widens their spread. Measure again when the machine is idle."
    ]


def _load_average() -> float | None:
    try:
        return round(os.getloadavg()[0], 2)
    except OSError:
        return None


def _memory_bytes() -> float | None:
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError):
        return None


def _versions(device: torch.device) -> dict[str, str]:
    versions = {
        "moestro": moestro.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernel": platform.release(),
    }
    for name, version in (("cuda", torch.version.cuda), ("rocm", torch.version.hip)):
        if device.type == "cuda" and version:
            versions[name] = version
    if device.type == "cuda" and (driver := driver_version()):
        versions["driver"] = driver
    if device.type == "cuda":
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_SPEED_VARIABLES)}
