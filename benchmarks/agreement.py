"""Counted against traced: the same steps of our trainer from shapes alone and as they run, for presets × layouts.

    python benchmarks/agreement.py [--presets olmoe-tiny,…] [--layouts ep,tp,…] [--random N] [--seed 0]

Every cell has traced over counted for parameters, FLOPs, bytes sent and bytes saved for backward, of which the figure
furthest from 1 is shown in the table; those that differ are listed before it as they come. Nothing is computed and no
weight is made, so that a cell takes seconds. --random adds N layouts drawn from all that the trainer can do.
"""

import argparse

from rich.console import Console
from rich.table import Table

from moestro.config import preset_names
from moestro.errors import MoestroError
from moestro.graph.trace.agreement import LAYOUTS, Figure, compare, drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--presets", default=",".join(name for name in preset_names() if name.endswith("-tiny")))
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    names = [*filter(None, args.layouts.split(",")), *(f"random {n}" for n in range(args.random))]
    kinds = ("parameters", "FLOPs", "sent", "saved")
    console, table = Console(), Table("preset", "layout", *kinds, title="traced over counted", title_justify="left")
    for preset in args.presets.split(","):
        random_ones = list(drawn(preset, args.random, args.seed))
        for name in names:
            layout = random_ones[int(name.split()[1])] if name.startswith("random ") else LAYOUTS[name]
            try:
                found = compare(preset, layout)
            except MoestroError as error:
                console.print(f"{preset} {name}: {error}", soft_wrap=True)
                table.add_row(preset, name, *["–"] * len(kinds))
                continue
            table.add_row(preset, name, *(_furthest([f for f in found if f.of == kind]) for kind in kinds))
            for f in found:
                if round(f.ratio, 4) != 1:
                    ratio = f"{f.traced:.0f} / {f.counted:.0f} = {f.ratio:.4f}"
                    console.print(f"{preset} {name}: {f.of} {f.name} {ratio}", soft_wrap=True)
    console.print(table)


def _furthest(found: list[Figure]) -> str:
    ratio = max((f.ratio for f in found), key=lambda r: abs(r - 1), default=1.0)
    return "=" if ratio == 1 else f"{ratio:.4f}"


if __name__ == "__main__":
    main()
