"""`moestro analyze`: look into models and their parts."""

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from moestro.analyze.routers import RouterFigures

WIDTH = 116  # that the table takes

app = typer.Typer(no_args_is_help=True, help="Look into models and their parts.")


@app.callback()
def analyze() -> None:
    """A group of commands, also while there is one."""


@app.command("routers", no_args_is_help=True)
def routers(
    preset: Annotated[str, typer.Argument(help="A preset's name or a TOML file: the model, the data, the optimizer.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ...")] = None,
    names: Annotated[str, typer.Option("--routers", help="Which, separated by commas; all by default.")] = "",
    seeds: Annotated[int, typer.Option(min=1, help="Training runs of each.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a run.")] = 60,
    as_json: Annotated[bool, typer.Option("--json", help="Every figure of every seed, as JSON.")] = False,
) -> None:
    """Swap routers into the same model: parameters, latency, and after a few steps their entropy and load.

    Loss ranks nothing after so few steps. Without --routers, those that do not fit the model are left out and named.
    """
    from dataclasses import asdict

    from rich.console import Console
    from rich.progress import Progress

    from moestro.analyze.routers import compare_routers, fitting
    from moestro.config import load_config
    from moestro.errors import MoestroError

    config = load_config(preset, overrides or ()).config
    err = Console(stderr=True)
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    if not chosen:
        chosen, reasons = fitting(config)
        if not chosen:
            raise MoestroError(reasons[0])
        for reason in reasons:
            err.print(f"left out: {reason}", highlight=False, style="dim", soft_wrap=True)
    with Progress(console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("routers", total=len(chosen) * seeds)
        figures = compare_routers(
            config,
            chosen,
            range(seeds),
            steps,
            lambda done, _total, what: bar.update(task, completed=done, description=what),
        )
    if as_json:
        typer.echo(json.dumps([asdict(figure) for figure in figures], indent=1))
        return
    console = Console(width=max(WIDTH, Console().width) if sys.stdout.isatty() else WIDTH)
    console.print(_table(figures))
    console.print(
        f"{seeds} {'seed' if seeds == 1 else 'seeds'} of {steps} steps: mean±standard deviation in the last tenth of "
        "the steps, over layers. "
        "time: of a layer's router alone, 2,048 tokens forward, median and 10–90 %. entropy: 1 is undecided (a token's "
        "scores) or even (load).",
        style="dim",
        highlight=False,
    )


def _table(figures: "list[RouterFigures]") -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    columns = ("router", "params\na layer", "time\nms", "entropy\nof scores", "entropy\nof load", "load\nmax/mean")
    for column in (*columns, "load\nGini", "active\nexperts", "dropped\npairs", "loss\nnats"):
        table.add_column(column, justify="left" if column == "router" else "right", no_wrap=True)
    for f in figures:
        ordered = sorted(f.forward_us)
        low, middle, high = (ordered[round(q * (len(ordered) - 1))] / 1e3 for q in (0.1, 0.5, 0.9))
        table.add_row(
            f.name,
            f"{f.params_per_layer:,}",
            f"{_ms(middle)} ({_ms(low)}–{_ms(high)})",
            *(_spread(values) for values in (f.token_entropy, f.load_entropy, f.max_over_mean, f.gini)),
            f"{sum(f.active_share) / len(f.active_share):.0%}",
            f"{sum(f.dropped) / len(f.dropped):.1%}",
            _spread(f.loss),
        )
    return table


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _spread(values: list[float]) -> str:
    from statistics import fmean, stdev

    return f"{fmean(values):.2f}" + (f"±{stdev(values):.2f}" if len(values) > 1 else "")
