"""The page of a machine profile, and the folder that `moestro measure` leaves: whole, or not there."""

import csv
import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import moestro
from moestro.config.files import write_whole
from moestro.errors import MoestroError
from moestro.hardware.profile import FitReport, MachineProfile, Sample, load_profile, save_profile
from moestro.measure.constants import with_curves, with_samples
from moestro.measure.curves import Curves
from moestro.report.profile_plots import profile_plots
from moestro.report.profile_summary import about_machine, counts, summary_rows
from moestro.report.template import figures, fill
from moestro.report.text import MISSING, percent

_MEASURED = ("median_s", "low_s", "high_s", "repeats", "noisy", "flops", "bytes_moved", "source", "software")


def check_new(folder: Path) -> None:
    """Before minutes of measuring: whether the folder can be made. A measurement is not overwritten.

    Raises:
        MoestroError: something is there already, or nothing can be written where it would be.
    """
    if folder.exists():
        raise MoestroError(f"{folder} is there already; name another folder with --out, or move it away")
    place = next(parent for parent in folder.absolute().parents if parent.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".moestro-", dir=place):
            pass
    except OSError as error:
        raise MoestroError(f"cannot write at {place}: {error.strerror}; name another folder with --out") from error


def write_folder(profile: MachineProfile, curves: Curves, folder: Path) -> list[Path]:
    """Write profile.json, samples.csv, samples.jsonl and profile.html; returns their paths.

    The folder appears under its name only when it is complete. Raises MoestroError when it is there already.
    """
    with _new_folder(folder) as temporary:
        save_profile(profile, temporary / "profile.json")
        write_samples(profile.samples, temporary)
        (temporary / "profile.html").write_text(render(profile, curves), encoding="utf-8")
    return [folder / name for name in ("profile.json", "samples.csv", "samples.jsonl", "profile.html")]


def write_samples_folder(samples: Sequence[Sample], notes: Sequence[str], folder: Path) -> None:
    """Write samples.csv, samples.jsonl and notes.json into a new folder, which appears when it is complete."""
    with _new_folder(folder) as temporary:
        write_samples(samples, temporary)
        (temporary / "notes.json").write_text(json.dumps(list(notes), indent=1) + "\n", encoding="utf-8")


def rewrite_folder(path: Path, samples: Sequence[Sample], notes: Sequence[str]) -> None:
    """Put samples into a profile, in place of its own of the same cases, fit its curves again, and write its files."""
    profile, curves = with_curves(with_samples(load_profile(path), samples, notes))
    folder = path if path.is_dir() else path.parent
    save_profile(profile, folder / "profile.json" if path.is_dir() else path)
    write_samples(profile.samples, folder)
    write_page(profile, curves, folder / "profile.html")


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A folder under a temporary name, which gets its own when the block is done, and goes when it fails."""
    check_new(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir()
        yield temporary
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_page(profile: MachineProfile, curves: Curves, target: Path) -> None:
    """Write the page alone; it replaces an older one only when it is complete."""
    write_whole(target, render(profile, curves))


def write_samples(samples: Sequence[Sample], folder: Path) -> None:
    """samples.csv, one column for each entry of any case, and samples.jsonl with the entries of each."""
    entries = list(dict.fromkeys(key for sample in samples for key in sample.case))
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["op", *entries, *_MEASURED])
    for sample in samples:
        figures = (getattr(sample, name) for name in _MEASURED)
        writer.writerow([sample.op, *(sample.case.get(key, "") for key in entries), *figures])
    write_whole(folder / "samples.csv", table.getvalue())
    lines = (json.dumps(sample.model_dump(mode="json", exclude_none=True)) for sample in samples)
    write_whole(folder / "samples.jsonl", "".join(f"{line}\n" for line in lines))


def render(profile: MachineProfile, curves: Curves) -> str:
    """One HTML file that needs nothing else."""
    plots, missing = profile_plots(profile, curves)
    return fill(
        "profile.html.j2",
        profile=profile,
        version=moestro.__version__,
        about=about_machine(profile),
        facts=_facts(profile),
        rows=summary_rows(profile),
        counts=counts(profile),
        plots=plots,
        missing=missing,
        fits=[_fit(fit) for fit in profile.fits],
        constants=sorted(profile.constants.items()),
        figures=figures(plots),
    )


def _facts(profile: MachineProfile) -> list[tuple[str, str]]:
    machine = profile.machine
    facts = [
        ("Device", machine.device_name),
        ("In the catalog", machine.device_id),
        ("Devices", str(machine.num_devices)),
        ("Host", machine.hostname),
        ("Processor", machine.cpu if machine.cpu not in machine.device_name else ""),
        ("Cores", str(machine.cores or "")),
        ("Threads while measuring", str(machine.threads or "")),
        ("Memory", f"{machine.memory_bytes / 1e9:.0f} GB" if machine.memory_bytes else ""),
        ("Links", "" if machine.topology == "unknown" else machine.topology),
        ("NICs", ", ".join(machine.nics)),
        ("Load before", "" if machine.load_average is None else f"{machine.load_average:.2f}"),
        *((name, value) for name, value in machine.versions.items()),
        *((name, value) for name, value in machine.environment.items()),
    ]
    return [(label, value) for label, value in facts if value]


def _fit(fit: FitReport) -> dict[str, str]:
    shown = list(fit.parameters.items())[:8]
    more = f", and {len(fit.parameters) - len(shown)} more" if len(fit.parameters) > len(shown) else ""
    return {
        "what": fit.what,
        "form": fit.form.replace("_", " "),
        "parameters": ", ".join(f"{name} {value:.4g}" for name, value in shown) + more,
        "samples": str(fit.samples),
        "median": MISSING if fit.held_out_median is None else percent(fit.held_out_median),
        "p90": MISSING if fit.held_out_p90 is None else percent(fit.held_out_p90),
    }
