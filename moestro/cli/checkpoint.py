"""`moestro checkpoint`: look into checkpoints, verify, rewrite, import and export them."""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from moestro.errors import MoestroError

if TYPE_CHECKING:
    from rich.table import Table

    from moestro.checkpoint.inspect import Contents

STATE = "optimizer.state."

app = typer.Typer(no_args_is_help=True, help="Look into checkpoints, verify, rewrite and export them.")

Source = Annotated[Path, typer.Argument(help="A step_… folder, or a run's folder for its newest good checkpoint.")]


@app.command("inspect", no_args_is_help=True)
def inspect(
    path: Source, as_json: Annotated[bool, typer.Option("--json", help="Every tensor, as JSON.")] = False
) -> None:
    """Print what a checkpoint holds: progress, files, tensors and the boxes they are stored in."""
    from dataclasses import asdict

    from rich.console import Console
    from rich.markup import escape

    from moestro.checkpoint.inspect import contents

    held = contents(_find(path))
    if as_json:
        typer.echo(json.dumps(asdict(held), indent=1))
        return
    console = Console() if sys.stdout.isatty() else Console(width=120)
    progress, size = held.progress, sum(held.files.values())
    ranks = f"{held.world_size} {'rank' if held.world_size == 1 else 'ranks'}"
    console.print(f"[bold]{escape(held.path)}[/]  format {held.format_version}", highlight=False)
    console.print(
        f"step {progress.step:,} · {progress.tokens:,} tokens · {progress.train_time_s:,.0f} s of training · "
        f"written by {ranks} · {_bytes(size)} in {len(held.files)} files",
        highlight=False,
    )
    console.print(_tensor_table(held))
    for text in _notes(held):
        console.print(escape(text), highlight=False, soft_wrap=True)


@app.command("verify", no_args_is_help=True)
def verify(path: Annotated[Path, typer.Argument(help="A step_… folder, or a run's folder for all of its.")]) -> None:
    """Check every file against the manifest. Exit status 2 if one is damaged, which is named with its tensors."""
    from moestro.checkpoint.inspect import all_checkpoints, contents, damages

    bad: list[str] = []
    for checkpoint in all_checkpoints(path):
        found = list(damages(checkpoint))
        bad += [f"{checkpoint}: {text}" for text in found]
        if not found:
            files = contents(checkpoint).files
            typer.echo(f"{checkpoint}  good  {len(files)} files, {_bytes(sum(files.values()))}")
    if bad:
        raise MoestroError("\n".join(bad))


@app.command("reshape", no_args_is_help=True)
def reshape(
    source: Source,
    destination: Annotated[Path, typer.Argument(help="The folder to make.")],
    files: Annotated[int, typer.Option(min=1, help="Number of data files, of about the same size.")] = 1,
) -> None:
    """Write a checkpoint again in another number of files; every tensor stays the same to the bit."""
    from moestro.checkpoint import convert

    found = _find(source)
    with _bar("reshape", convert.total_bytes(found)) as advance:
        convert.reshape(found, destination, files, advance)
    typer.echo(f"{destination}  {files} data {'file' if files == 1 else 'files'}")


@app.command("import", no_args_is_help=True)
def import_(
    source: Annotated[Path, typer.Argument(help="A folder with config.json, tokenizer.json and safetensors.")],
    destination: Annotated[Path, typer.Argument(help="The run's folder to make.")],
) -> None:
    """Make a run of a Hugging Face model, for generate, evaluate, export, or train with run.init_from."""
    from moestro.checkpoint.huggingface import importing
    from moestro.config import count
    from moestro.data.tokenizer import Tokenizer

    Tokenizer.load(source / "tokenizer.json")  # one that cannot be used is said before anything is copied
    opened = importing.open_source(source)
    if opened.ignored:
        typer.echo(f"not understood in config.json, and left out: {', '.join(opened.ignored)}", err=True)
    with _bar("import", opened.bytes) as advance:
        importing.import_run(opened, destination, advance)
    counts = count(opened.model, min(2048, opened.model.max_seq_len))
    typer.echo(
        f"{destination}  {opened.model_type}, {counts.total_params:,} parameters, {counts.active_params:,} active; "
        f"{_bytes(opened.bytes)}"
    )


@app.command("export", no_args_is_help=True)
def export(
    source: Source,
    destination: Annotated[Path, typer.Argument(help="The folder to make.")],
    form: Annotated[
        Literal["auto", "huggingface", "moestro"],
        typer.Option("--format", help="A Hugging Face model, or our names; auto: the first where a family has it."),
    ] = "auto",
    dtype: Annotated[
        Literal["bf16", "fp32"] | None, typer.Option(help="Of the numbers; as stored if left out.")
    ] = None,
    layout: Annotated[
        Literal["per-expert", "fused"] | None,
        typer.Option(help="Experts' weights apart or together; as the family's released models if left out."),
    ] = None,
    max_shard_gib: Annotated[float, typer.Option(min=0.0, help="Largest size of a file.")] = 5.0,
) -> None:
    """Write the model's weights as safetensors, with configuration and tokenizer beside them."""
    import torch

    from moestro.checkpoint import convert
    from moestro.checkpoint.huggingface import exporting
    from moestro.data.tokenizer import Tokenizer

    found = _find(source)
    how = exporting.Export(
        {"bf16": torch.bfloat16, "fp32": torch.float32, None: None}[dtype], int(max_shard_gib * 2**30), layout
    )
    model = None
    if form != "moestro":
        model, why_not = exporting.known_model(found)
        if model is None and form == "huggingface":
            raise MoestroError(f"not a model that Hugging Face knows: {why_not}. Use --format moestro")
        if model is None and layout is None:
            typer.echo(f"not as a Hugging Face model: {why_not}", err=True)
        elif model is None:
            raise MoestroError(f"--layout is of Hugging Face models, and this is none: {why_not}. Leave --layout out")
    elif layout is not None:
        raise MoestroError("--layout is of Hugging Face models; leave it or --format moestro out")
    with _bar("export", convert.total_bytes(found, "model.")) as advance:
        if model is None:
            written = exporting.export_plain(found, destination, how, advance)
        else:
            tokenizer = Tokenizer.load(found.parent.parent / "tokenizer.json")
            end = exporting.EndOfText(tokenizer.eot_name, tokenizer.eot_id)
            written = exporting.export_family(found, destination, model, end, how, advance)
    for path in written:
        typer.echo(f"{path}  {_bytes(path.stat().st_size)}")


def _find(path: Path) -> Path:
    from moestro.checkpoint.inspect import find_checkpoint

    found, damaged = find_checkpoint(path)
    for text in damaged:
        typer.echo(text, err=True)
    return found


def _tensor_table(held: "Contents") -> "Table":
    """A row for each name and shape of the model, whatever the layer, with the optimizer's state of it."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("tensor", overflow="fold")
    table.add_column("layers", justify="right")
    table.add_column("shape")
    table.add_column("dtype")
    table.add_column("boxes", justify="right")
    table.add_column("bytes", justify="right")
    table.add_column("optimizer", justify="right")
    state: dict[str, int] = defaultdict(int)
    for t in held.tensors:
        if t.name.startswith(STATE):
            state[t.name.removeprefix(STATE).rpartition(".")[0]] += t.bytes
    rows: dict[tuple[str, str, str], list[tuple[int, int, int]]] = defaultdict(list)
    for t in held.tensors:
        if t.name.startswith("model."):
            name = t.name.removeprefix("model.")
            rows[_pattern(name), str(list(t.shape)), t.dtype].append((t.boxes, t.bytes, state[name]))
    for (name, shape, dtype), sizes in rows.items():
        boxes, size, optimizer = (sum(column) for column in zip(*sizes, strict=True))
        layers = str(len(sizes)) if "*" in name else ""
        table.add_row(
            name, layers, escape(shape), dtype, f"{boxes:,}", _bytes(size), _bytes(optimizer) if optimizer else ""
        )
    return table


def _notes(held: "Contents") -> list[str]:
    """What the table does not say: the kinds of optimizer state, and how experts lie in one tensor."""
    kinds: dict[str, list[int]] = defaultdict(list)
    for t in held.tensors:
        if t.name.startswith(STATE):
            kinds[t.name.rpartition(".")[2]].append(t.bytes)
    state = [f"{key} of {len(sizes)} tensors ({_bytes(sum(sizes))})" for key, sizes in sorted(kinds.items())]
    experts = {f"{_pattern(t.name)}: {t.meaning}" for t in held.tensors if t.meaning and t.name.startswith("model.")}
    return [*(["optimizer: " + ", ".join(state)] if state else []), *sorted(text[6:] for text in experts)]


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} B"


@contextmanager
def _bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(title, total=total)
        yield lambda count: progress.advance(task, count)
