"""The `moestro` command: collects the commands and turns user errors into one line and exit status 2."""

import os
import sys
from typing import Annotated

import typer

import moestro
from moestro.cli import (
    analyze,
    checkpoint,
    config,
    doctor,
    evaluate,
    explain,
    generate,
    hardware,
    lint,
    measure,
    papers,
    place,
    plan,
    predict,
    probe,
    report,
    size,
    supervise,
    train,
    ui,
    validate,
)
from moestro.errors import MoestroError
from moestro.parallel import process

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(config.app, name="config")
app.add_typer(hardware.app, name="hardware")
app.add_typer(measure.app, name="measure")
app.command("doctor")(doctor.doctor)
app.command("predict", no_args_is_help=True)(predict.predict)
app.command("plan", no_args_is_help=True)(plan.plan)
app.command("explain", no_args_is_help=True)(explain.explain)
app.command("ui")(ui.ui)
app.command("validate")(validate.validate)
app.add_typer(place.app, name="place")
app.add_typer(size.app, name="size")
app.add_typer(probe.app, name="probe")
app.command("train", no_args_is_help=True)(train.train)
app.command("supervise", no_args_is_help=True, context_settings=supervise.CONTEXT)(supervise.supervise)
app.command("generate", no_args_is_help=True)(generate.generate)
app.command("evaluate", no_args_is_help=True)(evaluate.evaluate)
app.command("report", no_args_is_help=True)(report.report)
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(analyze.app, name="analyze")
app.add_typer(lint.app, name="lint")
app.add_typer(papers.app, name="papers")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"moestro {moestro.__version__}")
        raise typer.Exit


@app.callback()
def moestro_command(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error (works anywhere).")] = False,
) -> None:
    """Train mixture-of-experts language models, from one laptop CPU upwards."""


def main() -> None:
    """Entry point. Exit status: 0 done, 2 a user error (explained in a line or two), 130 interrupted."""
    # Must be set before torch loads its OpenMP runtime: spinning threads slow a shared machine many times over.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    process.end_with_launcher()
    debug = "--debug" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--debug"]
    try:
        app(obj={"debug": debug})
    except process.PeerError as error:
        if str(error):
            if debug:
                raise
            sys.stderr.write(f"error: {error}\n")
        sys.exit(error.status)
    except MoestroError as error:
        if debug:
            raise
        if process.prints(error):
            sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    except BrokenPipeError:  # `moestro … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:  # a full disk or a folder without permission, wherever it is met
        if debug:
            raise
        if process.prints(error):
            sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    except SystemExit as ended:  # typer ends with 130 after Ctrl-C, and says nothing; with 1 when nobody reads on
        if isinstance(ended.__context__, BrokenPipeError):
            sys.exit(0)
        interrupt = ended.__context__.__cause__ if ended.__context__ else None
        if isinstance(interrupt, KeyboardInterrupt) and process.prints(interrupt):
            sys.stderr.write("interrupted\n")
        raise
    except KeyboardInterrupt as error:
        if process.prints(error):
            sys.stderr.write("interrupted\n")
        sys.exit(130)
