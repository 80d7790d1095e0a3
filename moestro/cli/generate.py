"""`moestro generate`."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def generate(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(help="Stop after so many tokens.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.8,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens of this probability.")] = 0.95,
    seed: Annotated[int, typer.Option(help="Same seed, same text.")] = 0,
    device: Annotated[str, typer.Option(help='"auto", "cpu", "cuda:0", ...')] = "auto",
) -> None:
    """Continue a prompt with a trained model, printed as it is written."""
    from moestro.serve.generate import generate as stream
    from moestro.serve.load import load_run

    loaded = load_run(run, device)
    pieces = stream(loaded.model, loaded.tokenizer, prompt, max_new_tokens, temperature, top_p, seed)
    sys.stdout.write(prompt)
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
