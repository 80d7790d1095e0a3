"""`moestro predict`: what a training step takes on hardware that nobody has to own."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from moestro.config import Config
    from moestro.config.plan import Plan, Workload
    from moestro.graph.words import StepGraph
    from moestro.predict.oracle import Split
    from moestro.predict.target import Target


def predict(
    preset: Annotated[str | None, typer.Argument(help="A preset's name or a TOML file; not with --from.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="section.key=value …; plan.tp=8, workload.precision=fp8 … for what the trainer lacks."),
    ] = None,
    hardware: Annotated[
        str, typer.Option("--hardware", help="A device or cluster of `moestro hardware list`, or a TOML file of one.")
    ] = "",
    profile: Annotated[Path | None, typer.Option(help="A machine measured by `moestro measure`, instead.")] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="How many; by default the cluster's, a node's, or 1 with --profile.")
    ] = None,
    run: Annotated[
        Path | None, typer.Option("--from", help="A run's folder: its settings, and its measured step beside.")
    ] = None,
    trace: Annotated[
        str, typer.Option(help="module:function of your own: any PyTorch training step, traced without running it.")
    ] = "",
    world: Annotated[int, typer.Option(min=1, help="Ranks of a traced program.")] = 1,
    routing: Annotated[
        str,
        typer.Option(help="Of a traced program: balanced, power_law[:ALPHA], or an .npz of choices [rows, K]."),
    ] = "",
    net: Annotated[
        str,
        typer.Option(help="No language model: affmae, vit-mae, resnet50, unet, dlrm-ddp …, or a TOML file; batch=64 …"),
    ] = "",
    exact: Annotated[bool, typer.Option("--exact", help="Simulate the pipeline pass by pass.")] = False,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Simulate the step on the streams of every pipeline rank, too.")
    ] = False,
    slow: Annotated[
        list[str] | None,
        typer.Option(help="RANK=FACTOR: --simulate with a pipeline rank (or one device of it) that computes slower."),
    ] = None,
    tokens: Annotated[float | None, typer.Option(help="Of the whole training; by default train.steps tell.")] = None,
    usd_per_hour: Annotated[float | None, typer.Option(help="For one device, instead of the catalog's price.")] = None,
    mtbf_hours: Annotated[
        float | None, typer.Option(help="Mean hours between failures of one device: time and cost with restarts.")
    ] = None,
    checkpoint_s: Annotated[float, typer.Option(help="For which a checkpoint stops training.")] = 30.0,
    restart_s: Annotated[float, typer.Option(help="To start again after a failure.")] = 600.0,
    perfetto: Annotated[
        Path | None, typer.Option(help="Write the passes as a trace for ui.perfetto.dev; all streams with --simulate.")
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(help="Write a micro-batch of the slowest stage, host and streams, kernel by kernel, as a trace."),
    ] = None,
    serving: Annotated[
        str, typer.Option(help="REQUESTS/S:PROMPT:ANSWER, as 4:4096:512: the model served on these devices, too.")
    ] = "",
    disaggregate: Annotated[
        str, typer.Option(help="M:N devices, or auto: whether attention and experts apart would be faster.")
    ] = "",
    oracle: Annotated[
        bool, typer.Option("--oracle", help="Run the step here too (a CPU's --profile), and say where the error lies.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Predict a training step: time with its parts, memory, tokens per second, days and dollars. Nothing is run.

    Without plan.* the layout is the trainer's, by parallel.*; with it, the plan is what you give, and dp is what the
    devices leave. docs/predicting.md tells more.
    """
    import json

    from moestro.cli import predict_oracle
    from moestro.cli import predict_serving as more
    from moestro.cli import predict_simulated as streams
    from moestro.cli.predict_tables import Outlook, as_tree, print_prediction
    from moestro.errors import MoestroError
    from moestro.predict.predict import predict_step

    if (trace or net) and (simulate or slow):
        raise MoestroError("--simulate and --slow take a preset with its plan, not --trace or --net")
    if trace:
        if preset is not None or run is not None or serving or disaggregate:
            raise MoestroError(
                "--trace has the model and the layout in its function; leave the preset, overrides, --from, --serving "
                "and --disaggregate out"
            )
        from moestro.cli.predict_traced import predict_program

        target = _target(hardware, profile, devices)
        predict_program(trace, world, routing, target, [path for path in (perfetto, timeline) if path], as_json)
        _keep(target)
        return
    if routing:
        raise MoestroError("--routing is for --trace; a preset takes workload.routing.kind=power_law and so on")
    if net:
        if run is not None or (preset is not None and "=" not in preset):
            raise MoestroError("--net is the model; beside it stand values like batch=64 only, no preset and no --from")
        _predict_net(net, [*filter(None, [preset]), *(overrides or ())], _target(hardware, profile, devices), as_json)
        return
    if run is not None and preset is not None and "=" in preset:  # there is no preset to give, only overrides
        overrides, preset = [preset, *(overrides or ())], None
    if (preset is None) == (run is None):
        raise MoestroError("give a preset (or a TOML file), or --from RUN; `moestro config list` shows the presets")
    measured_s = None
    if run is not None:
        measured_s, ranks = _measured(run)
        preset, devices = str(run / "config.toml"), devices or ranks
    assert preset is not None
    config, workload, plan_values = _read(preset, overrides or ())
    target = _target(hardware, profile, devices)
    plan = _plan(config, plan_values, target, devices)
    found = predict_step(workload, plan, target, exact=exact)
    outlook = Outlook.of(
        found,
        workload,
        plan,
        target,
        tokens=float(config.train.steps) * workload.tokens if tokens is None else tokens,
        usd_per_hour=usd_per_hour,
        faults=None if mtbf_hours is None else (mtbf_hours * 3600, checkpoint_s, restart_s),
        measured_s=measured_s,
    )
    served = more.serving(serving, workload, plan, target, usd_per_hour) if serving else None
    apart = more.disaggregated(disaggregate, found.time, plan.world_size) if disaggregate else None
    split = _split(config, plan_values, target, plan.world_size) if oracle else None
    slower = streams.parse_slow(slow or ())
    simulated = streams.simulated(workload, plan, target, slower) if simulate or slower else None
    _keep(target)
    if perfetto is not None and simulated is not None:
        streams.write_streams(perfetto, simulated)
    elif perfetto is not None:
        _write_trace(perfetto, workload, plan, target)
    if timeline is not None:
        _write_timeline(timeline, workload, plan, target)
    if as_json:
        tree = as_tree(found, outlook, workload, plan)
        tree |= {} if served is None else {"serving": more.serving_tree(*served)}
        tree |= {} if apart is None else {"disaggregate": more.disaggregated_tree(*apart)}
        tree |= {} if split is None else {"oracle": predict_oracle.as_tree(split)}
        tree |= {} if simulated is None else {"simulated": streams.simulated_tree(simulated, found.time.total)}
        typer.echo(json.dumps(tree, indent=1, ensure_ascii=False))
        return
    print_prediction(Path(preset).name if run is None else str(run), found, outlook, workload, plan, target)
    if simulated is not None:
        streams.print_simulated(simulated, found.time.total, slower)
    if served is not None:
        more.print_serving(*served)
    if apart is not None:
        more.print_disaggregated(*apart)
    if split is not None:
        predict_oracle.print_split(split)
    if perfetto is not None:
        typer.echo(f"trace  {perfetto}")
    if timeline is not None:
        typer.echo(f"timeline  {timeline}")


def _predict_net(name: str, texts: Sequence[str], target: "Target", as_json: bool) -> None:
    from moestro.graph.nets import named_net

    values = dict(_parse(text, text) for text in texts)
    setting = " ".join((name, *texts))
    _print_graph(setting, "counted", named_net(name, values), target, as_json)


def _print_graph(name: str, how: str, graph: "StepGraph", target: "Target", as_json: bool) -> None:
    import json
    from dataclasses import asdict

    from moestro.cli.predict_tables import print_traced
    from moestro.predict.predict import predict_traced

    time = predict_traced(graph, target)
    _keep(target)
    if as_json:
        tree = {
            "devices": graph.world_size,
            "model_flops": graph.model_flops,
            "profile": target.profile,
            "notes": graph.notes,
        }
        typer.echo(json.dumps({**tree, "time": {**asdict(time), "total": time.total}}, indent=1))
        return
    print_traced(name, graph, time, target, how)


def _read(preset: str, overrides: Sequence[str]) -> "tuple[Config, Workload, dict[str, Any]]":
    """The configuration, its workload with workload.*, and the values of plan.*."""
    from moestro.config import load_config
    from moestro.graph.convert import workload_of

    own: dict[str, dict[str, Any]] = {"plan": {}, "workload": {}}
    others = []
    for text in overrides:
        section, _, rest = text.partition(".")
        if section in own:
            key, value = _parse(text, rest)
            outer, dot, inner = key.partition(".")
            if dot:  # workload.routing.kind
                own[section].setdefault(outer, {})[inner] = value
            else:
                own[section][key] = value
        else:
            others.append(text)
    config = load_config(preset, others).config
    workload = workload_of(config)
    if isinstance(own["workload"].get("routing"), dict) and "run" in own["workload"]["routing"]:
        folder = Path(own["workload"]["routing"].pop("run"))
        own["workload"]["routing"].update(kind="measured", loads=_loads(folder))
    if own["workload"]:
        workload = _section("workload", type(workload), {**dict(workload), **own["workload"]}, own["workload"])
    return config, workload, own["plan"]


def _parse(text: str, rest: str) -> tuple[str, Any]:
    import tomllib

    from moestro.errors import MoestroError

    key, equals, raw = rest.partition("=")
    if not equals or not key:
        raise MoestroError(f"'{text}' is not an override; write for example plan.tp=8")
    try:
        return key, tomllib.loads(f"v = {raw}")["v"]
    except tomllib.TOMLDecodeError:
        return key, raw  # a bare word


def _section(name: str, kind: type[Any], values: dict[str, Any], given: dict[str, Any]) -> Any:
    """Validate, and say which key is wrong as the configuration does."""
    from pydantic import ValidationError

    from moestro.errors import MoestroError, nearest

    for key in given:
        if key.partition(".")[0] not in kind.model_fields:
            raise MoestroError(f"unknown key '{name}.{key}'.{nearest(key, list(kind.model_fields))}")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join((name, *(str(part) for part in first["loc"])))
        message = first["msg"].removeprefix("Value error, ")
        raise MoestroError(f"{where}: {message}" if first["loc"] else f"{name}: {message}") from error


def _target(hardware: str, profile: Path | None, devices: int | None) -> "Target":
    from moestro.errors import MoestroError
    from moestro.hardware.profile import load_profile
    from moestro.predict.target import target_of, target_of_profile

    if hardware and profile is not None:
        raise MoestroError("give --hardware NAME or --profile PATH, not both")
    if not hardware and profile is None:
        raise MoestroError(
            "say for what: --hardware NAME (see `moestro hardware list`), or --profile PATH of a measured machine"
        )
    return target_of(hardware, devices) if profile is None else target_of_profile(load_profile(profile), devices)


def _plan(config: "Config", values: dict[str, Any], target: "Target", devices: int | None) -> "Plan":
    """The trainer's layout; or, where plan.* was given, that plan, with the settings of `train` that it leaves open."""
    from moestro.config.plan import Plan
    from moestro.errors import MoestroError
    from moestro.graph.convert import plan_of

    node = 1 if target.host_computes else target.place.device.devices_per_node or 1
    world = devices or target.devices or node
    if not values:
        return plan_of(config, world, world if target.host_computes else min(world, node))
    train = config.train
    chunks = {"expert_chunks": train.expert_chunks} if isinstance(train.expert_chunks, int) else {}
    base: dict[str, Any] = {
        "micro_batch_size": train.micro_batch_size or 1,
        "recompute": train.recompute,
        "expert_recompute": train.expert_recompute,
        **chunks,
    }
    if "dp" not in values:
        sizes = [values.get(name, 1) for name in ("pp", "cp", "tp")]
        others = 1
        for size in sizes:
            others *= size if isinstance(size, int) and size > 0 else 1
        if world % others:
            raise MoestroError(f"pp · cp · tp = {others} does not divide {world} devices; give plan.dp or --devices")
        base["dp"] = world // others
    plan: Plan = _section("plan", Plan, {**base, **values}, values)
    if devices is not None and plan.world_size != devices:
        raise MoestroError(f"the plan takes {plan.world_size} devices (pp · dp · cp · tp), not {devices}")
    return plan


def _split(config: "Config", plan_values: dict[str, Any], target: "Target", ranks: int) -> "Split":
    from moestro.errors import MoestroError
    from moestro.predict.oracle import measure_and_split

    if plan_values:
        raise MoestroError("--oracle runs the trainer's own layout: give parallel.* and train.*, not plan.*")
    return measure_and_split(config, target, ranks)


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


def _loads(run: Path) -> list[list[float]]:
    """Of each layer with experts of a run, what each expert got on average over the second half of its records."""
    import numpy as np

    from moestro.errors import MoestroError
    from moestro.report.read import read_run

    layers = [layer.load[len(layer.load) // 2 :] for layer in read_run(run).train.layers if layer.num_experts]
    if not layers:
        raise MoestroError(f"{run} tells no loads of experts: not a run of a model with experts, or cut off")
    return [np.nanmean(load, axis=0).tolist() for load in layers]


def _keep(target: "Target") -> None:
    """Fitted curves of a device, for the next time."""
    from moestro.predict.cache import keep_if_grown

    if not target.measured:
        keep_if_grown(target.curves)


def _write_trace(path: Path, workload: "Workload", plan: "Plan", target: "Target") -> None:
    from moestro.graph.count import count_step
    from moestro.predict.perfetto import pipeline_trace
    from moestro.predict.predict import price_step

    costs = price_step(count_step(workload, plan), workload, plan, target)
    _write_events(path, pipeline_trace(costs, plan, target.constants_for(workload, plan.world_size)))


def _write_timeline(path: Path, workload: "Workload", plan: "Plan", target: "Target") -> None:
    from moestro.graph.count import count_step
    from moestro.predict.perfetto import stage_trace
    from moestro.predict.predict import slowest_stage

    _write_events(path, stage_trace(slowest_stage(count_step(workload, plan), workload, plan, target)))


def _write_events(path: Path, trace: dict[str, Any]) -> None:
    import json

    from moestro.config.files import write_whole

    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(trace))
