"""`moestro train`."""

from pathlib import Path
from typing import Annotated

import typer

from moestro.errors import MoestroError


def train(
    context: typer.Context,
    preset: Annotated[str, typer.Argument(help="A preset's name or a TOML file; see `moestro config list`.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ...")] = None,
    nproc: Annotated[int | None, typer.Option(min=1, help="Train on so many ranks of this machine.")] = None,
) -> None:
    """Train a model: text to tokens, training, samples of its writing, and an HTML report.

    Ctrl-C saves a checkpoint and stops; run the same command with run.resume=auto to continue, to the same last bit.
    Under torchrun or srun leave --nproc out. With run.supervise=true a process watches over the ranks, and starts them
    again from the newest good checkpoint when one fails or hangs.
    """
    from moestro.config import load_config
    from moestro.parallel.process import this_rank
    from moestro.train.heartbeat import is_watched
    from moestro.train.phases import resolve_stretches

    # Before torch loads, and before any rank starts: a mistake is answered at once.
    config, me = load_config(preset, overrides or ()).config, this_rank()
    if nproc is not None and me.world_size > 1:
        raise MoestroError(
            f"--nproc starts ranks, but this process is one of {me.world_size} that torchrun or SLURM started; "
            "leave --nproc out, or start one process"
        )
    resolve_stretches(config, nproc or me.world_size, ranks_per_node=nproc)
    if config.run.supervise and not is_watched() and me.world_size > 1:
        from moestro.resilience.beside import watch_beside
        from moestro.resilience.supervisor import has_alike_ranks

        folder = Path(config.run.dir) / config.run.name
        watch_beside(folder, config.supervise, me, has_alike_ranks(config, me.world_size))
    elif config.run.supervise and not is_watched():
        from moestro.resilience.supervisor import supervise

        debug = ["--debug"] if context.obj["debug"] else []
        raise typer.Exit(supervise(config, ["train", preset, *(overrides or ()), *debug], nproc or 1, typer.echo))
    if nproc is not None and nproc > 1:
        from moestro.parallel.launch import launch

        debug = ["--debug"] if context.obj["debug"] else []
        raise typer.Exit(launch(nproc, ["train", preset, *(overrides or ()), *debug]))

    from moestro.report import write_report
    from moestro.report.summary import print_summary
    from moestro.serve.samples import write_samples
    from moestro.train.loop import train as run_training

    result = run_training(config)
    if me.rank > 0:
        return
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
