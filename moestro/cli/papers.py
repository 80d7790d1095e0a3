"""`moestro papers`."""

import typer

app = typer.Typer(help="What Moestro implements of each paper, and how its claim reproduces.")


@app.command("list")
def list_papers() -> None:
    """Placeholder."""
