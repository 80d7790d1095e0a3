"""`moestro predict`: what a training step takes on hardware that nobody has to own."""

from pathlib import Path
from typing import Annotated

import typer

# Headings of the help.
ON = "On what"
OTHER = "Instead of a preset"
STREAMS = "Closer to the clock"
BEYOND = "Beyond a step"
HELD = "Against measurements"


def predict(
    context: typer.Context,
    preset: Annotated[str | None, typer.Argument(help="A preset's name or a TOML file; not with --from.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="section.key=value …; plan.tp=8, workload.precision=fp8 … for what the trainer lacks."),
    ] = None,
    hardware: Annotated[
        str,
        typer.Option(
            "--hardware",
            help="A device or cluster of `moestro hardware list`, or a TOML file of one.",
            rich_help_panel=ON,
        ),
    ] = "",
    profile: Annotated[
        Path | None, typer.Option(help="A machine measured by `moestro measure`, instead.", rich_help_panel=ON)
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(
            min=1, help="How many; by default the cluster's, a node's, or 1 with --profile.", rich_help_panel=ON
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            "--from", help="A run's folder: its settings, and its measured step beside.", rich_help_panel=HELD
        ),
    ] = None,
    trace: Annotated[
        str,
        typer.Option(
            help="module:function of your own: any PyTorch training step, traced without running it.",
            rich_help_panel=OTHER,
        ),
    ] = "",
    world: Annotated[int, typer.Option(min=1, help="Ranks of a traced program.", rich_help_panel=OTHER)] = 1,
    routing: Annotated[
        str,
        typer.Option(
            help="Of a traced program: balanced, power_law[:ALPHA], or an .npz of choices, rows × K.",
            rich_help_panel=OTHER,
        ),
    ] = "",
    net: Annotated[
        str,
        typer.Option(
            help="No language model: affmae, vit-mae, resnet50, unet, dlrm-ddp …, or a TOML file; batch=64 …",
            rich_help_panel=OTHER,
        ),
    ] = "",
    exact: Annotated[
        bool, typer.Option("--exact", help="Simulate the pipeline pass by pass.", rich_help_panel=STREAMS)
    ] = False,
    simulate: Annotated[
        bool,
        typer.Option(
            "--simulate", help="Simulate the step on the streams of every pipeline rank, too.", rich_help_panel=STREAMS
        ),
    ] = False,
    slow: Annotated[
        list[str] | None,
        typer.Option(
            help="RANK=FACTOR: --simulate with a pipeline rank (or one device of it) that computes slower.",
            rich_help_panel=STREAMS,
        ),
    ] = None,
    tokens: Annotated[
        float | None, typer.Option(help="Of the whole training; by default train.steps tell.", rich_help_panel=BEYOND)
    ] = None,
    usd_per_hour: Annotated[
        float | None, typer.Option(help="For one device, instead of the catalog's price.", rich_help_panel=BEYOND)
    ] = None,
    mtbf_hours: Annotated[
        float | None,
        typer.Option(
            help="Mean hours between failures of one device: time and cost with restarts.", rich_help_panel=BEYOND
        ),
    ] = None,
    checkpoint_s: Annotated[
        float, typer.Option(help="For which a checkpoint stops training.", rich_help_panel=BEYOND)
    ] = 30.0,
    restart_s: Annotated[float, typer.Option(help="To start again after a failure.", rich_help_panel=BEYOND)] = 600.0,
    perfetto: Annotated[
        Path | None,
        typer.Option(
            help="Write the passes as a trace for ui.perfetto.dev; all streams with --simulate.",
            rich_help_panel=STREAMS,
        ),
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            help="Write a micro-batch of the slowest stage, host and streams, kernel by kernel, as a trace.",
            rich_help_panel=STREAMS,
        ),
    ] = None,
    serving: Annotated[
        str,
        typer.Option(
            help="REQUESTS/S:PROMPT:ANSWER, as 4:4096:512: the model served on these devices, too.",
            rich_help_panel=BEYOND,
        ),
    ] = "",
    disaggregate: Annotated[
        str,
        typer.Option(
            help="M:N devices, or auto: whether attention and experts apart would be faster.", rich_help_panel=BEYOND
        ),
    ] = "",
    oracle: Annotated[
        bool,
        typer.Option(
            "--oracle",
            help="Run the step here too (a CPU's --profile), and say where the error lies.",
            rich_help_panel=HELD,
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Predict a training step: time with its parts, memory, tokens per second, days and dollars. Nothing is run.

    Without plan.* the layout is the trainer's, by parallel.*; with it, the plan is what you give, and dp is what the
    devices leave. docs/predicting.md tells more.
    """
    import json

    from moestro.cli import predict_beside as beside
    from moestro.cli import predict_files as files
    from moestro.cli.asked import keep_curves, plan_asked, read_workload, target_asked
    from moestro.cli.predict_options import check_together
    from moestro.cli.predict_tables import Outlook, as_tree, print_prediction
    from moestro.predict.predict import predict_step

    sources = {name: context.get_parameter_source(name) for name in context.params}
    check_together({name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"})
    if trace:
        from moestro.cli.predict_traced import predict_program

        target = target_asked(hardware, profile, devices)
        predict_program(trace, world, routing, target, [path for path in (perfetto, timeline) if path], as_json)
        return
    if net:
        from moestro.cli.predict_net import predict_net

        texts = [*filter(None, [preset]), *(overrides or ())]
        predict_net(net, texts, target_asked(hardware, profile, devices), as_json)
        return
    source, overrides, measured_s, ranks = _source(preset, overrides or [], run)
    devices = devices or ranks
    config, workload, plan_values = read_workload(source, overrides)
    target = target_asked(hardware, profile, devices)
    plan = plan_asked(config, plan_values, target, devices)
    found = predict_step(workload, plan, target, exact=exact)
    tokens = float(config.train.steps) * workload.tokens if tokens is None else tokens
    faults = None if mtbf_hours is None else (mtbf_hours * 3600, checkpoint_s, restart_s)
    outlook = Outlook.of(found, workload, plan, target, tokens, usd_per_hour, faults, measured_s)
    simulation, more = None, list[beside.Beside]()
    if simulate or slow:
        simulation, shown = beside.simulated(slow or (), workload, plan, target, found.time.total)
        more.append(shown)
    if serving:
        more.append(beside.serving(serving, workload, plan, target, usd_per_hour))
    if disaggregate:
        more.append(beside.disaggregated(disaggregate, found.time, plan.world_size))
    if oracle:
        more.append(beside.oracle(config, plan_values, target, plan.world_size))
    keep_curves(target)
    if perfetto is not None and simulation is not None:
        files.write_streams(perfetto, simulation)
    elif perfetto is not None:
        files.write_passes(perfetto, workload, plan, target)
    if timeline is not None:
        files.write_timeline(timeline, workload, plan, target)
    if as_json:
        tree = as_tree(found, outlook, workload, plan) | {one.name: one.tree for one in more}
        typer.echo(json.dumps(tree, indent=1, ensure_ascii=False))
        return
    print_prediction(Path(source).name if run is None else str(run), found, outlook, workload, plan, target)
    for one in more:
        one.show()
    for label, path in (("trace", perfetto), ("timeline", timeline)):
        if path is not None:
            typer.echo(f"{label}  {path}")


def _source(
    preset: str | None, overrides: list[str], run: Path | None
) -> tuple[str, list[str], float | None, int | None]:
    """What is read, with which overrides; of a run its measured seconds and its ranks."""
    from moestro.errors import MoestroError

    if run is not None and preset is not None and "=" in preset:  # there is no preset to give, only overrides
        overrides, preset = [preset, *overrides], None
    if run is not None and preset is None:
        return (str(run / "config.toml"), overrides, *_measured(run))
    if run is None and preset is not None:
        return preset, overrides, None, None
    raise MoestroError("give a preset (or a TOML file), or --from RUN; `moestro config list` shows the presets")


def _measured(run: Path) -> tuple[float, int]:
    """The median step of a run, without its first two, and its ranks."""
    import numpy as np

    from moestro.errors import MoestroError
    from moestro.report.read import read_run, whole

    data = read_run(run)
    steps = data.train.step_s[2:] if len(data.train.step_s) > 4 else data.train.step_s
    steps = steps[np.isfinite(steps)]
    if not len(steps):
        raise MoestroError(f"{run} tells no step times")
    return float(np.median(steps)), whole(data.environment.get("world_size")) or 1
