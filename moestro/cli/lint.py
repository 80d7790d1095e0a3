"""`moestro lint`: figures that cannot be, and runs that cannot be compared."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from moestro.predict.comparability import Comparison, Figure
    from moestro.predict.physics import Verdict

app = typer.Typer(no_args_is_help=True, help="Check claimed figures against physics, and runs against each other.")

Json = Annotated[bool, typer.Option("--json", help="For machines.")]
FIGURES: "tuple[Figure, ...]" = ("speed", "quality", "cost")


@app.command("claim", no_args_is_help=True)
def claim(
    device: Annotated[str, typer.Option(help="A device of the catalog, or a TOML file of one.")],
    seconds: Annotated[float, typer.Option(min=0.0, help="The claimed time.")],
    devices: Annotated[int, typer.Option(min=1, help="How many of them.")] = 1,
    flops: Annotated[float, typer.Option(min=0.0, help="That the work needs, on all devices together.")] = 0.0,
    moved: Annotated[float, typer.Option("--bytes", min=0.0, help="Read or written, on all together.")] = 0.0,
    dtype: Annotated[str, typer.Option(help="Of the matrix products.")] = "bf16",
    rate: Annotated[float, typer.Option(min=0.0, help="Requests of such work in a second.")] = 0.0,
    as_json: Json = False,
) -> None:
    """Hold one time against the device's peaks. Exit status 1: it cannot be."""
    from moestro.errors import MoestroError, nearest
    from moestro.hardware.catalog import load_device
    from moestro.predict.physics import Claim, check

    if not flops and not moved:
        raise MoestroError("nothing bounds this claim; give --flops, --bytes or both")
    of = load_device(device)
    known: list[str] = [*of.peak_tflops, *of.vector_tflops, *of.support]
    peak = of.peak_flops(dtype)
    if peak is None:
        raise MoestroError(f"no peak of {of.name} in '{dtype}' is known.{nearest(dtype, known)}")
    bandwidth = of.memory.gbps.nominal
    if moved and bandwidth is None:
        raise MoestroError(f"the memory bandwidth of {of.name} is not known, so --bytes has no bound")
    verdict = check(Claim("", seconds, devices, flops, moved, rate), peak, bandwidth and bandwidth * 1e9)
    _tell([verdict], 1, {}, as_json)


@app.command("runs", no_args_is_help=True)
def runs(
    file: Annotated[str, typer.Argument(help="A CSV of published runs, as `moestro validate` takes it.")],
    as_json: Json = False,
) -> None:
    """Hold every training run of a table against the peak of its devices. Exit status 1: some cannot be."""
    from pathlib import Path

    from moestro.hardware.catalog import load_device
    from moestro.predict.physics import check_step
    from moestro.predict.public import parse_runs

    found, unusable = parse_runs(Path(file))
    devices = {device: load_device(device) for device in {run.device for run in found}}
    verdicts = []
    for run in found:
        if run.quantity == "step_s":
            name = f"row {run.row}, {run.model}"
            verdict = check_step(run.workload, devices[run.device], run.num_devices, run.measured, name)
            verdicts += [] if verdict is None else [verdict]
    _tell([verdict for verdict in verdicts if not verdict.possible], len(verdicts), dict(unusable), as_json)


@app.command("compare", no_args_is_help=True)
def compare(
    first: Annotated[str, typer.Argument(help="A run's folder, or a TOML or JSON file that describes it.")],
    second: Annotated[str, typer.Argument(help="The other one.")],
    figure: Annotated[str, typer.Option(help=f"What is compared: {', '.join(FIGURES)}.")] = "speed",
    vary: Annotated[list[str] | None, typer.Option(help="A key that is meant to differ; several times.")] = None,
    as_json: Json = False,
) -> None:
    """Compare what two runs are before what they reached. Exit status 1: something else differs than what should."""
    from pathlib import Path

    from moestro.errors import MoestroError, nearest
    from moestro.predict.comparability import compare as compare_manifests
    from moestro.predict.comparability import read_manifest

    wanted: Figure | None = next((name for name in FIGURES if name == figure), None)
    if wanted is None:
        raise MoestroError(f"no figure '{figure}'.{nearest(figure, FIGURES)} Known: {', '.join(FIGURES)}")
    result = compare_manifests(read_manifest(Path(first)), read_manifest(Path(second)), wanted, vary or ())
    if as_json:
        _print_json(
            {
                "figure": figure,
                "comparable": result.comparable,
                "bearing": [vars(difference) for difference in result.bearing],
                "other": [vars(difference) for difference in result.other],
            }
        )
    else:
        _print_comparison(result)
    if not result.comparable:
        raise typer.Exit(1)


def _tell(verdicts: "list[Verdict]", checked: int, unusable: dict[str, int], as_json: bool) -> None:
    wrong = [verdict for verdict in verdicts if not verdict.possible]
    if as_json:
        _print_json({"checked": checked, "verdicts": [vars(verdict) for verdict in verdicts], "unusable": unusable})
    else:
        for verdict in verdicts:
            name = f"{verdict.name}: " if verdict.name else ""
            typer.echo(f"{name}{'possible' if verdict.possible else 'impossible'}: {verdict.reason}")
        if checked != 1 or unusable:
            skipped = f"; rows that say too little to check: {sum(unusable.values()):,}" if unusable else ""
            typer.echo(f"figures checked: {checked:,}; impossible: {len(wrong)}{skipped}")
    if wrong:
        raise typer.Exit(1)


def _print_comparison(result: "Comparison") -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if result.bearing:
        table = Table("differs", "first", "second", "", box=None, header_style="bold", pad_edge=False)
        for difference in sorted(result.bearing, key=lambda one: one.varied):
            table.add_row(
                difference.key, difference.first, difference.second, "meant to differ" if difference.varied else ""
            )
        console.print(table)
    untold = sum(not difference.told for difference in result.against)
    if result.comparable:
        console.print(f"comparable in {result.figure}; differences that do not bear on it: {len(result.other)}")
        return
    told = f" ({untold} told of one run only)" if untold else ""
    console.print(
        f"not comparable in {result.figure}; differences that bear on it: {len(result.against)}{told}. "
        "Name with --vary what the comparison is about."
    )


def _print_json(tree: object) -> None:
    import json

    typer.echo(json.dumps(tree, indent=1, ensure_ascii=False))
