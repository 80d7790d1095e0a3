"""`moestro place`: where the parts of a model lie: layers on stages and regions, experts on devices, circuits."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moestro.cli.shown import print_json

if TYPE_CHECKING:
    from moestro.config.plan import Plan, Workload
    from moestro.hardware.curves.optical import Floats, OpticalTier
    from moestro.plan.ilp.replicas import Layer
    from moestro.predict.target import Target
    from moestro.predict.words import Prediction

app = typer.Typer(
    no_args_is_help=True,
    help="Place layers, experts, unlike devices, regions and optical circuits, each against the placement that one has "
    "without. Attention and experts apart on equal devices: `moestro predict --disaggregate auto`.",
)

Preset = Annotated[str, typer.Argument(help="A preset's name or a TOML file.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value …, plan.pp=8, workload.precision=fp8 …")]
Hardware = Annotated[
    str, typer.Option("--hardware", help="A device or cluster of `moestro hardware list`, or a TOML file of one.")
]
Profile = Annotated[Path | None, typer.Option(help="A machine measured by `moestro measure`, instead.")]
Devices = Annotated[int | None, typer.Option(min=1, help="How many; by default the cluster's, or a node's.")]
Limit = Annotated[float, typer.Option("--limit", min=0.1, help="Seconds for each integer program.")]
Json = Annotated[bool, typer.Option("--json", help="For machines.")]


@app.command("experts", no_args_is_help=True)
def experts(
    loads: Annotated[
        Path, typer.Argument(help="A run's folder, or a CSV or JSON file: a row a layer, of its experts.")
    ],
    overrides: Overrides = None,
    devices: Annotated[int, typer.Option(min=1, max=4096, help="That share out the experts (expert parallelism).")] = 8,
    places: Annotated[
        int | None, typer.Option(min=1, help="On all devices together; by default one more on each than it takes.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="In which groups of experts stay whole.")] = 1,
    groups: Annotated[int, typer.Option(min=1, help="Of experts, the router's; with --nodes.")] = 1,
    limit_s: Annotated[
        float,
        typer.Option("--limit", min=0.0, help="Seconds of each layer's integer program, a dozen experts; 0: none."),
    ] = 0.0,
    preset: Annotated[str, typer.Option(help="Whose step is predicted, with --hardware; by default the run's.")] = "",
    hardware: Hardware = "",
    out: Annotated[Path | None, typer.Option(help="Write the placement as JSON.")] = None,
    as_json: Json = False,
) -> None:
    """Replicas of busy experts, and on which device each lies; with --hardware what a step gains by it.

    The balancer of DeepSeek-V3 (EPLB), made better by exchanges. `moestro train` keeps experts in their order and
    without replicas; the file is for engines that take a table from places to experts.
    """
    from moestro.cli.place_files import placement_tree, read_loads, write_json
    from moestro.cli.place_tables import print_experts
    from moestro.plan.ilp.replicas import checked_loads, place_experts

    table = checked_loads(read_loads(loads))
    places = places or devices * (-(-table.shape[1] // devices) + 1)
    layers = place_experts(table, places, devices, nodes, groups, limit_s)
    steps: dict[str, Prediction] = {}
    if hardware:
        steps = _with_placement(preset or _config_of(loads), overrides or (), hardware, devices, table, layers)
    tree = placement_tree(layers, devices, nodes)
    if out is not None:
        write_json(out, tree)
    if as_json:
        print_json({**tree, "step_s": {name: found.step_s.value for name, found in steps.items()}})
        return
    print_experts(layers, table.shape[1], devices, nodes, steps)
    if out is not None:
        typer.echo(f"placement  {out}")


@app.command("layers", no_args_is_help=True)
def layers(
    preset: Preset,
    overrides: Overrides = None,
    hardware: Hardware = "",
    profile: Profile = None,
    devices: Devices = None,
    memory_gb: Annotated[
        float | None, typer.Option(min=0.0, help="That a device may need; by default 98 % of what it has.")
    ] = None,
    limit_s: Limit = 5.0,
    out: Annotated[Path | None, typer.Option(help="Write the plan as a TOML file for `moestro train`.")] = None,
    as_json: Json = False,
) -> None:
    """Layers and recomputation of each stage of a pipeline (plan.pp=…), against layers as even as they come out."""
    from moestro.cli.asked import trainer_overrides
    from moestro.cli.place_tables import layers_tree, print_layers
    from moestro.plan.file import write_plan
    from moestro.plan.ilp.balance import balanced

    workload, plan, target = _asked(preset, overrides or (), hardware, profile, devices, out)
    if plan.pp == 1:
        raise _error("the plan has one pipeline rank: there are no stages to share layers out over; give plan.pp=…")
    found = balanced(workload, plan, target, None if memory_gb is None else memory_gb * 1e9, limit_s)
    _keep(target)
    if out is not None:
        write_plan(out, preset, trainer_overrides(overrides or ()), found.plan, found.step)
    if as_json:
        print_json(layers_tree(found))
        return
    print_layers(Path(preset).name, found, workload, target)
    if out is not None:
        typer.echo(f"plan  {out}: `moestro train {out}`")


@app.command("mixed", no_args_is_help=True)
def mixed(
    preset: Preset,
    overrides: Overrides = None,
    hardware: Hardware = "",
    top: Annotated[int, typer.Option(min=1, help="Splits of the devices to show.")] = 5,
    as_json: Json = False,
) -> None:
    """Two kinds of devices: which do attention and which experts, against ways that do not tell them apart.

    The cluster has two pools, as a40-v100-mixed. After HeterMoE; the trainer has no ranks of this kind.
    """
    from dataclasses import asdict

    from moestro.cli.place_tables import print_mixed
    from moestro.plan.mixed_choice import choose

    workload, _, target = _asked(preset, [*(overrides or ()), "plan.pp=1"], hardware, None, None)
    found = choose(workload, target)
    _keep(target)
    if as_json:
        print_json({**asdict(found), "apart": [asdict(one) for one in found.apart[:top]]})
        return
    print_mixed(Path(preset).name, found, workload, target, top)


@app.command("regions", no_args_is_help=True)
def regions(
    preset: Preset, overrides: Overrides = None, hardware: Hardware = "", limit_s: Limit = 1.0, as_json: Json = False
) -> None:
    """A pipeline over regions: their order, the stages, layers and micro-batches in flight of each, against plain 1F1B.

    The cluster's file has a `wan` table, as two-regions. plan.pp=8 or plan.pp=[4,8] says how many stages are tried,
    other plan.* hold for all.
    """
    from moestro.cli.asked import plan_asked, read_workload, target_asked
    from moestro.cli.place_tables import print_regions, regions_tree
    from moestro.plan.regions import place_regions

    config, workload, values = read_workload(preset, overrides or ())
    target = target_asked(hardware, None, None)
    stages = values.pop("pp", None)
    stages = [stages] if isinstance(stages, int) else stages
    if not (stages is None or (isinstance(stages, list) and stages and all(type(n) is int and n > 0 for n in stages))):
        raise _error(f"plan.pp = {stages}: give a number of stages, or several to try, as [4, 8]")
    plan = plan_asked(config, {**values, "pp": 1}, target, None)
    found = place_regions(workload, plan, target, stages, limit_s)
    _keep(target)
    if as_json:
        print_json(regions_tree(found))
        return
    print_regions(Path(preset).name, found, target)


@app.command("circuits", no_args_is_help=True)
def circuits(
    source: Annotated[
        str,
        typer.Argument(
            help="A CSV or JSON file of bytes, from row to column; or a preset, whose exchange is predicted."
        ),
    ],
    overrides: Overrides = None,
    hardware: Annotated[
        str, typer.Option("--hardware", help="A cluster with an `optical` table, as mixnet-1024.")
    ] = "",
    ocs_ports: Annotated[int, typer.Option(min=1, help="Of a server, to the optical switch; without --hardware.")] = 6,
    eps_ports: Annotated[int, typer.Option(min=1, help="Of a server, to the packet network.")] = 2,
    port_gbit: Annotated[float, typer.Option(min=0.001, help="Of a port.")] = 100.0,
    region: Annotated[int | None, typer.Option(min=2, help="Servers of an optical switch; by default all.")] = None,
    layer: Annotated[
        int | None, typer.Option(min=0, help="Of a preset; by default that with the longest exchange.")
    ] = None,
    limit_s: Limit = 20.0,
    as_json: Json = False,
) -> None:
    """Circuits between servers for an exchange of experts, against even and greedy ones (MixNet)."""
    from moestro.cli.place_tables import circuits_tree, print_circuits
    from moestro.plan.ilp.circuits import lay_circuits

    if Path(source).suffix in (".csv", ".json"):
        import numpy as np

        from moestro.cli.place_files import read_table

        demand = np.array(read_table(Path(source), "demand"))
        tier = _tier(hardware, ocs_ports, eps_ports, port_gbit, region or max(2, len(demand)))
        title = Path(source).name
    else:
        demand, tier, title = _predicted_demand(source, overrides or (), hardware, layer)
    found = lay_circuits(demand, tier, limit_s)
    if as_json:
        print_json(circuits_tree(found))
        return
    print_circuits(title, found, demand, tier)


def _tier(hardware: str, ocs_ports: int, eps_ports: int, port_gbit: float, region: int) -> "OpticalTier":
    """The cluster's, or of what is given; nobody waits for circuits to be laid."""
    from moestro.hardware.curves.optical import OpticalTier
    from moestro.predict.target import target_of

    if not hardware:
        return OpticalTier(region, ocs_ports, eps_ports, port_gbit / 8 * 1e9, 0.0)
    tier = target_of(hardware).optical
    if tier is None:
        raise _error(
            f"{hardware} has no [optical]: leave --hardware out and give --ocs-ports, --eps-ports, --port-gbit"
        )
    return tier


def _predicted_demand(
    preset: str, overrides: Sequence[str], hardware: str, layer: int | None
) -> "tuple[Floats, OpticalTier, str]":
    """Of one layer; by default of the one whose even circuits take longest."""
    from moestro.hardware.curves.optical import circuit_s, even_circuits
    from moestro.plan.demand import server_demands

    workload, plan, target = _asked(preset, overrides, hardware, None, None)
    if target.optical is None:
        raise _error(f"{hardware} has no [optical]: take a cluster as mixnet-1024, or give the demand as a file")
    every = server_demands(workload, plan, target)
    if layer is not None and layer >= len(every):
        raise _error(f"--layer {layer}: the demand is of {len(every)} layers, from 0")
    tier = target.optical
    even = even_circuits(every.shape[1], tier.ocs_ports)
    longest = max(range(len(every)), key=lambda n: circuit_s(every[n], even, tier))
    number = longest if layer is None else layer
    what = "layer" if workload.routing.loads else "drawn order of experts"
    which = f"{what} {number} of {len(every)}" if len(every) > 1 else "any layer"
    return every[number], tier, f"{Path(preset).name}, {which}"


def _with_placement(
    preset: str, overrides: Sequence[str], hardware: str, devices: int, loads: "Floats", layers: "Sequence[Layer]"
) -> "dict[str, Prediction]":
    """A step with experts in their order, as placed, and with equal loads."""
    from moestro.config.plan import RoutingConfig
    from moestro.plan.ilp.replicas import routed
    from moestro.predict.predict import predict_step

    ep = [] if any(text.startswith("plan.ep=") for text in overrides) else [f"plan.ep={devices}"]
    workload, plan, target = _asked(preset, [*overrides, *ep], hardware, None, None)
    if plan.ep != devices:
        raise _error(f"experts are placed on --devices {devices}, and plan.ep = {plan.ep}: make them equal")
    found = {
        "in order": predict_step(routed(workload, loads), plan, target),
        "placed": predict_step(routed(workload, loads, layers), plan, target),
        "even loads": predict_step(workload.model_copy(update={"routing": RoutingConfig()}), plan, target),
    }
    _keep(target)
    return found


def _config_of(loads: Path) -> str:
    if not loads.is_dir():
        raise _error("--hardware predicts a step: give --preset too, the model that the loads are of")
    return str(loads / "config.toml")


def _asked(
    preset: str, overrides: Sequence[str], hardware: str, profile: Path | None, devices: int | None,
    out: Path | None = None,
) -> "tuple[Workload, Plan, Target]":  # fmt: skip
    from moestro.cli.asked import check_folder, plan_asked, read_workload, target_asked

    if out is not None:
        check_folder("--out", out)
    config, workload, values = read_workload(preset, overrides)
    target = target_asked(hardware, profile, devices)
    return workload, plan_asked(config, values, target, devices), target


def _keep(target: "Target") -> None:
    from moestro.cli.asked import keep_curves

    keep_curves(target)


def _error(text: str) -> Exception:
    from moestro.errors import MoestroError

    return MoestroError(text)
