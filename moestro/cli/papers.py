"""`moestro papers`: the table of all papers, one paper's recorded checks, one paper run."""

from typing import Annotated

import typer

app = typer.Typer(help="What Moestro implements of each paper, and how its claim reproduces.")

JsonOption = Annotated[bool, typer.Option("--json", help="For machines.")]
SlugArgument = Annotated[str, typer.Argument(help="A paper's slug; see `moestro papers`.")]


@app.callback(invoke_without_command=True)
def table(context: typer.Context, as_json: JsonOption = False) -> None:
    """Published figure, ours, how it was obtained, and the verdict, for every paper. Nothing is run."""
    from papers.show import print_table

    context.obj = as_json
    if context.invoked_subcommand is None:
        print_table(as_json)


@app.command("show", no_args_is_help=True)
def show(context: typer.Context, slug: SlugArgument, as_json: JsonOption = False) -> None:
    """Print what was recorded when the paper was last run."""
    from papers.show import print_record

    print_record(slug, as_json or bool(context.obj))


@app.command("run", no_args_is_help=True)
def run(context: typer.Context, slug: SlugArgument, as_json: JsonOption = False) -> None:
    """Reproduce one paper here and now, print its checks, and record them."""
    from papers.show import run_and_print

    run_and_print(slug, as_json or bool(context.obj))
