"""The run report: one HTML file that needs nothing else."""

import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from moestro.config.files import write_whole
from moestro.report.expert_plots import expert_plots
from moestro.report.faults import faults
from moestro.report.keyfigures import key_figures, last_finite, run_status
from moestro.report.plots import gap_note, learning_plots, speed_plots
from moestro.report.read import Record, RunData, Sample, number, parse_time, read_run, table
from moestro.report.template import figures, fill
from moestro.report.text import fixed, grouped, plural, si

_MAX_SAMPLES, _MAX_SAMPLE_CHARS, _MAX_EVENTS = 100, 4000, 400


class _Comparison(NamedTuple):
    name: str
    value: str
    difference: str
    source: str
    own: bool


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into the run folder and return its path.

    Raises MoestroError when the folder holds no run. The file replaces an older one only when it is complete.
    """
    run = read_run(run_dir)
    page = _render(run)
    target = run_dir / "report.html"
    write_whole(target, page)
    return target


def _render(run: RunData) -> str:
    learning, speed, experts = learning_plots(run), speed_plots(run), expert_plots(run)
    wrong = faults(run.folder)
    return fill(
        "page.html.j2",
        run=run,
        version=_version(run),
        status=run_status(run),
        description=str(run.config.get("description") or ""),
        facts=_facts(run),
        notes=[note for note in (gap_note(run), _redone_note(run), *run.notes) if note],
        keys=key_figures(run),
        learning=learning,
        speed=speed,
        experts=experts,
        faults=wrong,
        comparison=_comparison(run),
        samples=_samples(run),
        data=_data(run),
        toml=_toml(run.config_text),
        environment=[(key, _plain(value)) for key, value in run.environment.items()],
        events=_events(run),
        flops=_flops(run),
        peak=_peak(run),
        metrics=f"{run.name}/metrics.jsonl",
        figures=figures([*learning, *speed, *experts, *(wrong["plots"] if wrong else ())]),
    )


def _version(run: RunData) -> str:
    import moestro

    return str(getattr(moestro, "__version__", None) or run.environment.get("moestro") or "")


def _facts(run: RunData) -> list[tuple[str, str]]:
    env = run.environment
    started = parse_time(env.get("started_at"))
    device = str(env.get("device_name") or env.get("device") or "")
    commit = str(env.get("git_commit") or "")[:12]
    if commit and env.get("git_dirty"):
        commit += " with uncommitted changes"
    facts = [
        ("Started", _moment(started)),
        ("Device", device),
        ("Host", str(env.get("hostname") or "")),
        ("Moestro", str(env.get("moestro") or "")),
        ("PyTorch", str(env.get("torch") or "")),
        ("Python", str(env.get("python") or "")),
        ("Commit", commit),
    ]
    return [(label, value) for label, value in facts if value]


def _moment(moment: datetime | None) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if moment else ""


def _redone_note(run: RunData) -> str:
    if not run.redone_steps:
        return ""
    return f"{plural(run.redone_steps, 'logged step')} ran again after a resume; the later measurement is shown."


def _comparison(run: RunData) -> list[_Comparison]:
    """This run and the references, best first."""
    ours = last_finite(run.evals.bits_per_byte)
    if not math.isfinite(ours):
        return [_Comparison(name, fixed(v), "–", "given", False) for name, v in run.references.items()]
    rows = [(value, name, False) for name, value in run.references.items()] + [(ours, run.name, True)]
    return [
        _Comparison(
            name,
            fixed(value),
            "–" if own else _difference(ours, value),
            "measured here" if own else "references.json",
            own,
        )
        for value, name, own in sorted(rows)
    ]


def _difference(ours: float, other: float) -> str:
    if other <= 0 or abs(ours / other - 1) < 5e-4:
        return "equal" if other > 0 else "–"
    change = 100 * (ours / other - 1)
    return f"{abs(change):.1f} % {'worse' if change > 0 else 'better'}"


def _samples(run: RunData) -> dict[str, Any]:
    last = max((s.step or 0 for s in run.samples), default=0)
    latest = [s for s in run.samples if (s.step or 0) == last][-_MAX_SAMPLES:]
    earlier = [s for s in reversed(run.samples) if (s.step or 0) != last]
    shown = earlier[:_MAX_SAMPLES]
    title = f"{plural(len(earlier), 'sample')} from earlier steps"
    if len(shown) < len(earlier):
        title += f" (the latest {len(shown)} are shown)"
    return {
        "latest": [_sample(s) for s in latest],
        "earlier": [_sample(s) for s in shown],
        "earlier_title": title,
    }


def _sample(sample: Sample) -> dict[str, str]:
    text = sample.text
    # Some writers keep the prompt in the text, some do not; it must not be shown twice.
    if sample.prompt and text.startswith(sample.prompt):
        text = text[len(sample.prompt) :]
    if len(text) > _MAX_SAMPLE_CHARS:
        text = text[:_MAX_SAMPLE_CHARS] + f"… (cut; {grouped(len(text))} characters)"
    parts = [f"step {grouped(sample.step)}" if sample.step is not None else ""]
    parts += [f"temperature {sample.temperature:g}" if math.isfinite(sample.temperature) else ""]
    parts += [f"top-p {sample.top_p:g}" if math.isfinite(sample.top_p) else ""]
    return {"meta": ", ".join(part for part in parts if part), "prompt": sample.prompt, "text": text}


def _data(run: RunData) -> dict[str, Any]:
    data = table(run.environment, "data")
    facts = [
        ("Training tokens available", si(number(data.get("train_tokens"))) if data.get("train_tokens") else ""),
        ("Held-out text", si(number(data.get("validation_bytes")), "B") if data.get("validation_bytes") else ""),
        ("Packing fill", _fill(data.get("fill"))),
        ("Skipped", _plain(data["skipped"]) if data.get("skipped") else ""),
    ]
    notices = data.get("notices") or []
    notices = notices if isinstance(notices, list) else [notices]
    return {"facts": [(k, v) for k, v in facts if v], "notices": [_plain(notice) for notice in notices]}


def _fill(value: object) -> str:
    share = number(value)
    if 0 <= share <= 1:
        return f"{100 * share:.1f} % of the positions hold text"
    return _plain(value) if value is not None else ""


def _plain(value: object) -> str:
    """A JSON value as a person would write it."""
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_plain(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return ", ".join(_plain(inner) for inner in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and abs(value) >= 10_000:
        return grouped(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    return "–" if value is None else str(value)


def _toml(text: str) -> list[dict[str, str]]:
    lines = []
    for line in text.splitlines():
        kind, head, rest = "", line, ""
        if line.lstrip().startswith("#"):
            kind = "comment"
        elif line.startswith("["):
            kind = "section"
        elif " = " in line:
            head, rest = line.split(" = ", 1)
            kind, rest = "key", f" = {rest}"
        lines.append({"kind": kind, "head": head, "rest": rest})
    return lines


def _events(run: RunData) -> dict[str, Any]:
    events, omitted = run.events, ""
    if len(events) > _MAX_EVENTS:
        half = _MAX_EVENTS // 2
        omitted = f"The first and the last {half} of {grouped(len(events))} events; events.jsonl has all."
        events = (*events[:half], *events[-half:])
    rows = [
        {
            "time": _moment(event.time) or "–",
            "event": event.event,
            "step": grouped(event.step) if event.step is not None else "–",
            "details": _details(event.details),
        }
        for event in events
    ]
    return {"rows": rows, "omitted": omitted}


def _details(details: Record) -> str:
    text = "; ".join(f"{key}: {_plain(value)}" for key, value in details.items())
    return text if len(text) <= 600 else text[:600] + "…"


def _flops(run: RunData) -> str:
    per_token = number(run.environment.get("flops_per_token"))
    return f": {si(per_token, 'FLOPs')} per token here" if math.isfinite(per_token) else ""


def _peak(run: RunData) -> str:
    peak, dtype = number(run.environment.get("peak_flops_measured")), run.environment.get("peak_dtype")
    if not math.isfinite(peak):
        return "not recorded in this run"
    return f"{si(peak, 'FLOP/s')}{f' in {dtype}' if dtype else ''}, measured on this machine, not a data sheet's figure"
