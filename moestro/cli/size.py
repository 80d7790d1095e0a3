"""`moestro size`: shapes of models that a device likes, how wide experts should be, what fits, and learning rates."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moestro.cli.shown import print_json

if TYPE_CHECKING:
    from moestro.config import Config
    from moestro.config.plan import Plan, Workload
    from moestro.plan.alignment import Alignment
    from moestro.plan.shape_search import Budget
    from moestro.predict.target import Target

app = typer.Typer(no_args_is_help=True, help="Shapes that a device likes: check, search, choose, and what fits.")

Preset = Annotated[str, typer.Argument(help="A preset's name or a TOML file.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value …, plan.tp=8, workload.precision=fp8 …")]
Hardware = Annotated[
    str, typer.Option("--hardware", help="A device or cluster of `moestro hardware list`, or a TOML file of one.")
]
Profile = Annotated[Path | None, typer.Option(help="A machine measured by `moestro measure`, instead.")]
Devices = Annotated[int | None, typer.Option(min=1, help="How many; by default a cluster's, or 1.")]
Json = Annotated[bool, typer.Option("--json", help="For machines.")]


@app.command("lint", no_args_is_help=True)
def lint(
    preset: Preset,
    overrides: Overrides = None,
    hardware: Hardware = "",
    profile: Profile = None,
    devices: Devices = None,
    as_json: Json = False,
) -> None:
    """Check a shape: alignment, heads, vocabulary, layers, and what its products reach. Exit status 1: findings.

    Every finding of the shape is predicted against a twin with that size mended. What only depends on how many tokens a
    micro-batch has is told apart, and does not count as a finding.
    """
    from dataclasses import asdict

    from moestro.cli.size_tables import print_lint
    from moestro.plan.size import lint_shape

    asked = _Asked(preset, overrides, hardware, profile, devices)
    found = lint_shape(asked.workload, asked.plan, asked.target, asked.alignment)
    asked.keep()
    if as_json:
        tree = {**asdict(found), "alignment": asked.alignment.basis, "profile": asked.target.profile}
        print_json(tree)
    else:
        print_lint(asked.name, found, asked.workload, asked.plan, asked.target, asked.alignment)
    if found.of("shape"):
        raise typer.Exit(1)


@app.command("search", no_args_is_help=True)
def search(
    preset: Preset,
    overrides: Overrides = None,
    hardware: Hardware = "",
    profile: Profile = None,
    devices: Devices = None,
    params: Annotated[float | None, typer.Option(help="Budget: parameters, as in 7e9.")] = None,
    flops: Annotated[float | None, typer.Option(help="Budget: training FLOPs of a token.")] = None,
    latency_ms: Annotated[float | None, typer.Option(help="Budget: a decoding step, at least.")] = None,
    memory_gb: Annotated[float | None, typer.Option(help="Budget: of the fullest device in training.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences that decode together.")] = 1,
    context: Annotated[int, typer.Option(min=1, help="Tokens in each of them.")] = 4096,
    ratios: Annotated[
        float, typer.Option(min=1.0, max=8.0, help="How far hidden size over layers may be from the preset's, times.")
    ] = 1.5,
    top: Annotated[int, typer.Option(min=1, max=50, help="How many shapes to show.")] = 8,
    out: Annotated[Path | None, typer.Option(help="Write the preset with the best shape as a TOML file.")] = None,
    as_json: Json = False,
) -> None:
    """Search the fastest shape of a preset's kind under one budget: depth, widths, heads and finer experts.

    The preset is scaled to the budget; shapes of as many parameters, all and active, stand beside it.
    """
    from moestro.cli.size_tables import print_search, shape_tree
    from moestro.errors import MoestroError
    from moestro.plan.shape_search import search_shapes

    budget = _budget({"params": params, "flops": flops, "latency": latency_ms, "memory": memory_gb}, batch, context)
    asked = _Asked(preset, overrides, hardware, profile, devices)
    found = search_shapes(asked.workload, asked.plan, asked.target, budget, asked.alignment, ratios, top)
    asked.keep()
    if out is not None:
        if not found.best:
            raise MoestroError("no shape meets the budget; nothing to write")
        _write_preset(asked.config, found.best[0].model, out)
    if as_json:
        rows = {"naive": shape_tree(found.naive), "rounded": shape_tree(found.rounded)}
        tree = {**rows, "best": [shape_tree(shape) for shape in found.best], "tried": found.tried}
        print_json(tree)
        return
    print_search(asked.name, found, budget, asked.target, asked.alignment)
    if out is not None:
        typer.echo(f"\nconfiguration  {out}")


@app.command("width", no_args_is_help=True)
def width(
    preset: Preset,
    overrides: Overrides = None,
    hardware: Hardware = "",
    profile: Profile = None,
    devices: Devices = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences that decode together.")] = 16,
    context: Annotated[int, typer.Option(min=1, help="Tokens in each of them.")] = 4096,
    latency_ms: Annotated[float | None, typer.Option(help="What a decoding step may take.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the picture as an HTML file.")] = None,
    as_json: Json = False,
) -> None:
    """Choose how wide experts should be: training speed, decoding, and bytes sent, at the same active parameters."""
    from dataclasses import asdict

    from moestro.cli.size_tables import print_widths
    from moestro.plan.width import choose_width

    asked = _Asked(preset, overrides, hardware, profile, devices)
    limit = None if latency_ms is None else latency_ms * 1e-3
    found = choose_width(asked.workload, asked.plan, asked.target, batch, context, limit, asked.alignment)
    asked.keep()
    if plot is not None:
        from moestro.report.widths import write_widths

        plot.parent.mkdir(parents=True, exist_ok=True)
        write_widths(found, f"{asked.name} on {asked.target.place.device.name}: width of experts", plot)
    if as_json:
        tree = asdict(found)
        for choice in (*tree["choices"], *filter(None, [tree["chosen"]])):
            del choice["model"]
        print_json(tree)
        return
    print_widths(asked.name, found, asked.target)
    if plot is not None:
        typer.echo(f"\npicture  {plot}")


@app.command("lr", no_args_is_help=True)
def lr(
    points: Annotated[
        list[str],
        typer.Argument(help="PARAMS:RATE …, best rates of three sizes or more; or a CSV of params, lr (and loss)."),
    ],
    params: Annotated[list[float], typer.Option(help="Sizes to tell a rate for; several times.")],
    as_json: Json = False,
) -> None:
    """Extrapolate learning rates over model sizes, in log and log, with the interval; weight decay is 0.1 of the rate.

    With losses in the CSV, the best rate of each size is found first, by a parabola through its lowest.
    """
    from dataclasses import asdict

    from moestro.cli.size_tables import print_rates
    from moestro.plan.rates import fit_rates

    found, notes = _points(points)
    law = fit_rates(found)
    rates = [law.at(size) for size in params]
    if as_json:
        print_json({**asdict(law), "rates": [asdict(rate) for rate in rates], "notes": notes})
        return
    print_rates(law, rates, notes)


@app.command("budget", no_args_is_help=True)
def budget(
    preset: Preset,
    overrides: Overrides = None,
    hardware: Hardware = "",
    profile: Profile = None,
    devices: Devices = None,
    memory_gb: Annotated[float | None, typer.Option(help="Memory of one device, instead of its own.")] = None,
    as_json: Json = False,
) -> None:
    """Tell the largest batch, context and model that fit in training, for each kind of recomputation.

    Beside them, the cheapest devices on one of which the run as it is would fit.
    """
    from moestro.cli.size_tables import budget_tree, print_budget
    from moestro.errors import MoestroError
    from moestro.plan.budget import within

    if memory_gb is not None and not memory_gb > 0:
        raise MoestroError("--memory-gb takes a number above zero")
    asked = _Asked(preset, overrides, hardware, profile, devices)
    found = within(asked.workload, asked.plan, asked.target, memory_gb)
    asked.keep()
    if as_json:
        print_json(budget_tree(found, asked.plan))
        return
    print_budget(asked.name, found, asked.workload, asked.plan, asked.target)


@app.command("grow", no_args_is_help=True)
def grow(
    preset: Preset,
    overrides: Overrides = None,
    hardware: Hardware = "",
    profile: Profile = None,
    devices: Devices = None,
    stage: Annotated[
        list[str] | None, typer.Option(help="EXPERTS:SHARE of the tokens, as 8:0.25; several times, fewest first.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Price a pool of experts that grows in stages, against all experts from the start: the fastest plan of each."""
    from moestro.cli.asked import given_of, keep_curves, read_workload, target_asked
    from moestro.cli.size_growth import growth_tree, parse_stages, print_growth
    from moestro.plan.growth import price_growth

    stages = parse_stages(stage or ())
    config, workload, values = read_workload(preset, overrides or ())
    target = target_asked(hardware, profile, devices)
    count = devices or target.devices or 1
    found = price_growth(workload, target, count, stages, config.train.steps, given_of(values))
    keep_curves(target)
    if as_json:
        print_json(growth_tree(found))
        return
    print_growth(Path(preset).name, found, target)


class _Asked:
    """What all commands read: a run, its plan on so many devices, what they are, what misaligned widths cost there."""

    def __init__(
        self, preset: str, overrides: list[str] | None, hardware: str, profile: Path | None, devices: int | None
    ) -> None:
        from moestro.cli.asked import plan_asked, read_workload, target_asked

        self.config, workload, values = read_workload(preset, overrides or ())
        self.name, self.workload = Path(preset).name, workload
        self.target: Target = target_asked(hardware, profile, devices)
        self.plan: Plan = plan_asked(self.config, values, self.target, devices or self.target.devices or 1)
        self.alignment = _alignment(profile, workload)

    def keep(self) -> None:
        from moestro.cli.asked import keep_curves

        keep_curves(self.target)


def _alignment(profile: Path | None, workload: "Workload") -> "Alignment":
    from moestro.hardware.profile import load_profile
    from moestro.plan.alignment import RULE, measured_alignment

    return RULE if profile is None else measured_alignment(load_profile(profile).samples, workload.precision)


def _budget(given: dict[str, float | None], batch: int, context: int) -> "Budget":
    from moestro.errors import MoestroError
    from moestro.plan.shape_search import Budget, Kind

    units: dict[Kind, float] = {"params": 1.0, "flops": 1.0, "latency": 1e-3, "memory": 1e9}
    named = [(kind, value) for kind in units if (value := given[kind]) is not None]
    if len(named) != 1:
        raise MoestroError("give one budget: --params, --flops, --latency-ms or --memory-gb")
    (kind, value), *_ = named
    return Budget(kind, value * units[kind], batch, context)


def _points(texts: list[str]) -> tuple[list[tuple[float, float]], list[str]]:
    from moestro.errors import MoestroError
    from moestro.plan.rates import read_rates

    if len(texts) == 1 and ":" not in texts[0]:
        return read_rates(Path(texts[0]))
    points = []
    for text in texts:
        size, _, rate = text.partition(":")
        try:
            points.append((float(size), float(rate)))
        except ValueError as error:
            raise MoestroError(f"'{text}' is no point; write parameters and the best rate, as in 85e6:3e-4") from error
    return points, []


def _write_preset(config: "Config", model: Any, out: Path) -> None:
    from moestro.config.files import write_whole
    from moestro.config.load import to_toml
    from moestro.errors import MoestroError

    try:
        write_whole(out, to_toml(config.model_copy(update={"model": model})))
    except OSError as error:
        raise MoestroError(f"cannot write {out}: {error.strerror}") from error
