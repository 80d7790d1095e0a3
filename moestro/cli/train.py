"""`moestro train`."""

from typing import Annotated

import typer


def train(
    preset: Annotated[str, typer.Argument(help="A preset's name or a TOML file; see `moestro config list`.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ...")] = None,
) -> None:
    """Train a model: text to tokens, training, samples of its writing, and an HTML report.

    Ctrl-C saves a checkpoint and stops; run the same command with run.resume=auto to continue, to the same last bit.
    """
    from moestro.config import load_config

    config = load_config(preset, overrides or ()).config  # before torch loads: a mistake is answered at once

    from moestro.report import write_report
    from moestro.report.summary import print_summary
    from moestro.serve.samples import write_samples
    from moestro.train.loop import train as run_training

    result = run_training(config)
    if result.finished:
        for sample in write_samples(result.folder):
            typer.echo(f"\n{sample['prompt']}{sample['text']}")
    if not result.finished and result.step == 0:
        typer.echo(f"stopped before the first step; run {result.folder} again with run.resume=auto", err=True)
        raise typer.Exit(130)
    report = write_report(result.folder)
    typer.echo()
    print_summary(result.folder)
    typer.echo(f"run     {result.folder}\nreport  {report}")
    if not result.finished:
        typer.echo(f"stopped at step {result.step}; add run.resume=auto to the same command to continue", err=True)
        raise typer.Exit(130)
