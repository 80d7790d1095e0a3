"""`moestro evaluate`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from moestro.errors import MoestroError


def evaluate(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    max_batches: Annotated[int | None, typer.Option(min=1, help="Only so many micro-batches of held-out text.")] = None,
    device: Annotated[str, typer.Option(help='"auto", "cpu", "cuda:0", ...')] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Loss and bits per byte of a run's newest checkpoint on its held-out text."""
    from moestro.data.batches import ValidationStream
    from moestro.data.prepare import prepare
    from moestro.serve.load import load_run
    from moestro.train.engine import alone
    from moestro.train.evaluate import evaluate as run_evaluation

    loaded = load_run(run, device)
    prepared = prepare(loaded.config.data, encoders=loaded.config.model.encoders)
    if prepared.tokenizer.fingerprint != loaded.tokenizer.fingerprint:
        raise MoestroError(f"the text behind data.sources has changed since {run} was trained; restore it")
    stream = ValidationStream(prepared, loaded.config.data)
    result = run_evaluation(alone(loaded.model), stream, loaded.config.train.resolved_micro_batch_size, max_batches)
    if as_json:
        typer.echo(json.dumps({"run": str(run), "step": loaded.step, **asdict(result)}))
    else:
        typer.echo(
            f"{run} at step {loaded.step} (measured): {result.bits_per_byte:.4f} bits/byte, loss {result.loss:.4f} "
            f"nats/token, over {result.tokens:,} tokens ({result.bytes:,.0f} bytes) of held-out text"
        )
