"""The part of `moestro predict` that runs the step here and says where the prediction errs."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moestro.predict.oracle import Split

MEANS = {
    "kernels": "operations, the update's too",
    "host": "between operations",
    "communication": "exchanges, without waiting for other ranks",
    "overlap": "what no measured part explains: waiting, and how parts are put together",
}


def as_tree(split: "Split") -> dict[str, Any]:
    left = dict(zip(("kernels", "host", "communication"), split.left, strict=True))
    return {"measured_s": split.measured_s, "error": split.error, "parts": split.parts, "left_with": left}


def print_split(split: "Split") -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    measured, predicted = (f"{seconds * 1e3:.1f} ms" for seconds in (split.measured_s, split.predicted_s))
    console.print(f"\nmeasured here {measured}, predicted {predicted}: {split.error:+.1%}")
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("of the error")
    for column in ("is", "left with it measured"):
        table.add_column(column, justify="right")
    table.add_column("")
    left = [*(f"{error:+.1%}" for error in split.left), ""]
    for (name, error), rest in zip(split.parts.items(), left, strict=True):
        table.add_row(name, f"{error:+.1%}", rest, MEANS[name])
    console.print(table)
