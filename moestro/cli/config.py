"""`moestro config`: list presets, show a resolved configuration, count what a model holds and does.

Like all commands it imports what it needs when it runs, so that `moestro --help` answers at once.
"""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from moestro.config import CacheBytes, Counts

app = typer.Typer(no_args_is_help=True, help="Presets, resolved configurations, and counts of models.")

PresetArgument = Annotated[str, typer.Argument(help="A preset's name or a TOML file.")]
OverridesArgument = Annotated[list[str] | None, typer.Argument(help="section.key=value ...")]

SMALL = 10_000_000  # parameters of a preset that two CPU cores train in minutes


@app.command("list")
def list_presets() -> None:
    """List the presets, the published models first, with their total and active parameters."""
    from rich.console import Console
    from rich.table import Table

    from moestro.config import count, load_config, preset_names, resolved_model

    large: list[tuple[str, ...]] = []
    small: list[tuple[str, ...]] = []
    for name in preset_names():
        config = load_config(name).config
        counts = count(resolved_model(config), config.data.seq_len)
        what, _, _ = config.description.partition(". ")
        rows = small if counts.total_params < SMALL else large
        rows.append((name, _params(counts.total_params), _params(counts.active_params), what.rstrip(".")))
    table = Table(box=None, pad_edge=False)
    table.add_column("preset", style="bold", no_wrap=True)
    for column in ("total", "active"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("what it is")
    for cells in (*large, (), *small):
        table.add_row(*cells)
    Console().print(table)


def _params(number: int) -> str:
    """8840488784 → `8.84 B`."""
    from moestro.report.text import si

    return si(number).replace("G", "B")


@app.command("show", no_args_is_help=True)
def show(preset: PresetArgument, overrides: OverridesArgument = None) -> None:
    """Print every setting, its value, and where the value came from."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from moestro.config import describe, load_config

    table = Table(box=None, pad_edge=False)
    for column in ("setting", "value", "from"):
        table.add_column(column, overflow="fold")
    for key, value, origin in describe(load_config(preset, overrides or ())):
        style = "dim" if origin == "default" else ""
        table.add_row(key, escape(value), escape(origin), style=style)
    Console().print(table)


@app.command("count", no_args_is_help=True)
def count_parts(
    preset: PresetArgument,
    overrides: OverridesArgument = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Print parameters by part, FLOPs of a trained token, and what decoding keeps of a token. Nothing is built."""
    import json

    from moestro.config import cache_bytes, count, load_config, resolved_model

    config = load_config(preset, overrides or ()).config
    model, seq_len = resolved_model(config), config.data.seq_len
    counts, cache = count(model, seq_len), cache_bytes(model)
    if not as_json:
        _print_counts(counts, cache, seq_len)
        return
    figures = {
        "seq_len": seq_len,
        "total_params": counts.total_params,
        "total_params_without_embeddings": counts.non_embedding_params,
        "active_params": counts.active_params,
        "active_params_without_embeddings": counts.active_non_embedding_params,
        "train_flops_per_token": counts.train_flops_per_token,
        "kv_cache_bytes_per_token": cache.per_token,
        "kv_cache_bytes_of_windows": cache.window,
        "kv_cache_bytes_of_states": cache.state,
        "parts": {
            part.name: {
                "total_params": part.total,
                "active_params": part.active,
                "train_flops_per_token": part.train_flops_per_token,
            }
            for part in counts.parts
        },
    }
    typer.echo(json.dumps(figures, indent=2))


def _print_counts(counts: "Counts", cache: "CacheBytes", seq_len: int) -> None:
    from rich.console import Console
    from rich.table import Table

    from moestro.report.text import MISSING, si

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("parameters")
    for column in ("total", "active", "FLOPs of a trained token"):
        table.add_column(column, justify="right")

    def add(name: str, total: int, active: int, flops: str, style: str = "") -> None:
        table.add_row(name, f"{total:,}", f"{active:,}", flops, style=style)

    for part in counts.parts:
        add(part.name, part.total, part.active, si(part.train_flops_per_token))
    add("all", counts.total_params, counts.active_params, si(counts.train_flops_per_token), "bold")
    add("without embedding and head", counts.non_embedding_params, counts.active_non_embedding_params, MISSING)
    console = Console()
    console.print(table)
    console.print(
        f"\nSequences of {seq_len:,} tokens; a token's backward pass is twice its forward.\n"
        f"Cache when decoding in bf16: {cache.per_token:,} bytes a token"
        + (f", at most {cache.window:,} in sliding windows" if cache.window else "")
        + (f", {cache.state:,} of state" if cache.state else "")
        + "."
    )
