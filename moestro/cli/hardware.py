"""`moestro hardware`: devices and clusters of the catalog, one by one, side by side, and by what fits on them."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from moestro.cli import hardware_fit
from moestro.cli.shown import console_of, print_json

if TYPE_CHECKING:
    from rich.console import Console

    from moestro.hardware.devices import Cluster, Device, Kind, Pool

app = typer.Typer(
    no_args_is_help=True, help="The hardware catalog: devices and clusters, every figure with its source."
)

Json = Annotated[bool, typer.Option("--json", help="For machines.")]
WIDTH = 140  # in a pipe
KINDS: "tuple[Kind, ...]" = ("gpu", "superchip", "tpu", "npu", "cpu", "soc", "pim")


@app.command("list")
def list_hardware(
    kind: Annotated[str, typer.Option(help=f"Only one kind: {', '.join(KINDS)}.")] = "",
    as_json: Json = False,
) -> None:
    """List the devices and the clusters of the catalog."""
    from moestro.cli.hardware_tables import LEGEND, cluster_list, device_list
    from moestro.errors import MoestroError, nearest
    from moestro.hardware.catalog import cluster_ids, device_ids, load_cluster, load_device

    if kind and kind not in KINDS:
        raise MoestroError(f"no kind '{kind}'.{nearest(kind, KINDS)} Kinds: {', '.join(KINDS)}")
    devices = [device for device in map(load_device, device_ids()) if kind in ("", device.kind)]
    clusters = [] if kind else [load_cluster(cluster_id) for cluster_id in cluster_ids()]
    if as_json:
        print_json({"devices": [_dump(d) for d in devices], "clusters": [_dump(c) for c in clusters]})
        return
    console = console_of(WIDTH)
    console.print(device_list(devices, console.width))
    console.print(LEGEND, style="dim")
    if clusters:
        console.print()
        console.print(cluster_list(clusters))


@app.command("show", no_args_is_help=True)
def show(
    name: Annotated[str, typer.Argument(help="A device or cluster of the catalog, or a TOML file of one.")],
    as_json: Json = False,
) -> None:
    """Show every figure of a device or a cluster: nominal, achieved, and the source of each."""
    from pathlib import Path

    from moestro.errors import MoestroError, nearest
    from moestro.hardware.catalog import cluster_ids, device_ids, load_cluster, load_device
    from moestro.hardware.catalog.reading import read_tree

    own_file = name.endswith(".toml")
    if name.lower() in cluster_ids() or (own_file and "pools" in read_tree(Path(name))):
        _show_cluster(load_cluster(name), as_json)
        return
    try:
        device = load_device(name)
    except MoestroError as error:
        if own_file:
            raise
        hint = nearest(name.lower(), (*device_ids(), *cluster_ids()))
        raise MoestroError(f"no device or cluster '{name}'.{hint} `moestro hardware list` shows them all.") from error
    if as_json:
        print_json(_dump(device))
        return
    _show_device(device)


def _show_device(device: "Device") -> None:
    from rich.markup import escape

    from moestro.cli.hardware_tables import device_figures, figure_table, price_line, support_table

    console = console_of(WIDTH)
    node = f", {device.devices_per_node} in a usual node" if device.devices_per_node else ""
    console.print(f"[bold]{escape(device.name)}[/]  {device.id}: {device.kind} of {device.year}{node}")
    memory = device.memory
    shared = ", one pool with the host" if memory.unified else ""
    banks = f", {memory.banks} banks of {memory.bank_mb:g} MB" if memory.banks and memory.bank_mb else ""
    console.print(f"memory: {escape(memory.kind or 'unknown kind')}{shared}{banks}")
    for link in device.links:
        among = f" among {link.devices} devices" if link.devices else ""
        through = "; exchanges go through the host" if link.host_mediated else ""
        console.print(f"link: {escape(link.name)}, {link.topology.replace('_', ' ')}{among}{through}")
    console.print(price_line(device.price), markup=False)
    if device.note:
        console.print(f"note: {device.note}", markup=False)
    console.print()
    console.print(figure_table(device_figures(device)))
    if device.support:
        console.print()
        console.print(support_table(device))
    console.print("\n~ recalled, second-hand or announced: check before relying on it.", style="dim")


def _show_cluster(cluster: "Cluster", as_json: bool) -> None:
    from rich.markup import escape

    from moestro.cli.hardware_tables import cluster_totals, figure_table, number
    from moestro.hardware.catalog import load_device
    from moestro.hardware.compare import is_native

    devices = {key: load_device(key) for pool in cluster.pools for key in pool.node.devices}
    totals = cluster_totals(cluster, devices)
    if as_json:
        print_json({**_dump(cluster), "totals": totals})
        return
    console = console_of(WIDTH)
    console.print(f"[bold]{escape(cluster.name)}[/]  {cluster.id}")
    for text in (f"software: {cluster.software}" if cluster.software else "", cluster.note):
        if text:
            console.print(text, markup=False)
    console.print(f"source: {cluster.source or 'none given'}", markup=False)
    rates = [(device.peak_flops("bf16"), is_native(device, "bf16")) for device in devices.values()]
    emulated = " (emulated)" if any(rate is not None and not native for rate, native in rates) else ""
    count = f"{cluster.num_devices:,} device{'s' if cluster.num_devices > 1 else ''}"
    console.print(
        f"in all: {count}, memory {number(totals['memory_gb'])} GB, "
        f"bf16{emulated} {number(totals['bf16_pflops_nominal'])} PFLOP/s nominal and "
        f"{number(totals['bf16_pflops_achieved'])} at the best rates known, "
        f"{number(totals['usd_per_hour_low'])} USD an hour at the lowest price known"
    )
    for index, pool in enumerate(cluster.pools):
        _print_pool(console, f"pool {index + 1}", pool)
    for wan in cluster.wan:
        console.print(f"\n[bold]{escape(' – '.join(wan.regions))}[/]")
        console.print(figure_table([("GB/s", wan.gbps), ("latency ms", wan.latency_ms)]))
    if cluster.optical is not None:
        tier = cluster.optical
        ports = f"{tier.ocs_ports} optical and {tier.eps_ports} packet ports a node"
        console.print(f"\n[bold]optical circuits[/]: among {tier.region_size} nodes, {ports}")
        console.print(figure_table([("Gbit/s a port", tier.port_gbit), ("ms to lay circuits", tier.delay_ms)]))


def _print_pool(console: "Console", title: str, pool: "Pool") -> None:
    from rich.markup import escape

    from moestro.cli.hardware_tables import figure_table

    node = pool.node
    what = " + ".join(f"{count} {device_id}" for device_id, count in node.devices.items())
    place = f" in {pool.region}" if pool.region else ""
    parts = [
        f"joined by {node.link}" if node.link else "",
        f"host {node.host}" if node.host else "",
        f"{node.host_memory_gb:,g} GB of host memory" if node.host_memory_gb else "",
        f"{node.nics} NIC{'s' if node.nics > 1 else ''}" if node.nics else "",
        f"{node.rails} rails" if node.rails else "",
        f"{node.local_disk_tb:g} TB of local disk" if node.local_disk_tb else "",
    ]
    console.print(f"\n[bold]{title}[/]{escape(place)}: {pool.nodes:,} × ({escape(what)})", end="")
    console.print("".join(f", {part}" for part in parts if part), markup=False)
    rows = [("a NIC Gbit/s", node.nic_gbit), ("storage network GB/s", node.storage_gbps)]
    for level in pool.levels:
        label = f"{level.name} of {level.members}"
        rows += [(f"{label} GB/s a device", level.gbps), (f"{label} latency µs", level.latency_us)]
    if any(figure.known for _, figure in rows):
        console.print(figure_table(rows))


@app.command("compare", no_args_is_help=True)
def compare(
    names: Annotated[list[str], typer.Argument(help="Two or more devices; ratios are to the first.")],
    as_json: Json = False,
) -> None:
    """Put devices side by side: peaks, memory, links, the ridge of the roofline, price of compute, dtypes."""
    from dataclasses import asdict

    from moestro.cli.hardware_tables import LEGEND, comparison, dtype_differences
    from moestro.errors import MoestroError
    from moestro.hardware.catalog import load_device
    from moestro.hardware.compare import balance, compute_bound_ratio, memory_bound_ratio

    if len(names) < 2:
        raise MoestroError("give two devices or more, for example: moestro hardware compare h100-sxm mi300x")
    devices = [load_device(name) for name in names]
    if as_json:
        rows = [
            {
                "id": device.id,
                **asdict(balance(device)),
                "compute_bound_speed": compute_bound_ratio(device, devices[0]),
                "memory_bound_speed": memory_bound_ratio(device, devices[0]),
                "device": _dump(device),
            }
            for device in devices
        ]
        print_json(rows)
        return
    console = console_of(WIDTH)
    console.print(comparison(devices))
    for line in dtype_differences(devices):
        console.print(line, markup=False)
    console.print(LEGEND, style="dim")
    console.print(
        "Speeds use achieved rates, and nominal ones where none is known. Measured software often loses more than "
        "these ratios say; only a measured profile tells.",
        style="dim",
    )


@app.command("fits", no_args_is_help=True)
def fits(
    gigabytes: Annotated[float, typer.Argument(metavar="GB", help="What one device must hold, in 10⁹ bytes.")],
    host_gb: Annotated[float, typer.Option(help="What the host takes of memory that it shares with the device.")] = 8.0,
    cpus: Annotated[bool, typer.Option("--cpus", help="Processors too, with all the memory a socket takes.")] = False,
    as_json: Json = False,
) -> None:
    """On which single devices so many bytes fit: the cheapest first, then those without a known price by size."""
    from moestro.cli.hardware_tables import fit_table
    from moestro.errors import MoestroError
    from moestro.hardware.fits import devices_that_fit

    found = devices_that_fit(gigabytes * 1e9, host_gb * 1e9, KINDS if cpus else None)
    if as_json:
        keys = ("usable_bytes", "usd_per_hour", "basis")
        print_json([{"id": fit.device.id, **{key: getattr(fit, key) for key in keys}} for fit in found])
        return
    if not found:
        raise MoestroError(f"{gigabytes:g} GB fit on no single device of the catalog; split them over several devices")
    console = console_of(WIDTH)
    console.print(fit_table(found))
    smallest = min(found, key=lambda fit: fit.usable_bytes)  # the first of equals is the cheapest
    cheapest = f"cheapest with a known price: {found[0].device.id}; " if found[0].basis else "no price is known; "
    console.print(f"{cheapest}smallest: {smallest.device.id}", style="bold")
    console.print(
        "Bought devices: the price over three years, without power. Memory shared with the host: less "
        f"{host_gb:g} GB. Prices age: see `moestro hardware show`. ~ recalled or announced; – unknown.",
        style="dim",
    )


app.command("fit")(hardware_fit.fit)


def _dump(section: "Device | Cluster") -> dict[str, Any]:
    """Without what is unknown; the id comes first."""
    tree = section.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    return {"id": section.id, **tree}
