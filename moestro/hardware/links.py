"""How the accelerators of a machine reach each other, read from the tables that the vendors' tools print."""

import re
from collections.abc import Sequence
from typing import Literal

LinkKind = Literal["switch", "mesh", "ring", "torus", "hypercube_mesh", "pcie", "host", "none", "unknown"]

# The most NVLinks that any device has (NVLink 4 and 5): that many lead to each peer only through a switch.
MOST_NVLINKS = 18


def nvidia_links(text: str) -> tuple[LinkKind, str]:
    """From `nvidia-smi topo -m`: NV# between two GPUs are # NVLinks; PIX, PXB, PHB, NODE and SYS are PCIe.

    With a switch all of a device's links lead to every peer, without one they are shared out among the peers.
    """
    table = _table(re.sub(r"\x1b\[[\d;]*m", "", text))  # the header is underlined
    if len(table) < 2:
        return "unknown", "no table of GPUs"
    links = [[int(cell[2:]) if re.fullmatch(r"NV\d+", cell) else 0 for cell in row] for row in table]
    counts = sorted({n for i, row in enumerate(links) for j, n in enumerate(row) if i != j})
    named = f"{len(table)} GPUs, " + ", ".join(f"NV{n}" if n else "PCIe" for n in counts) + " between pairs"
    if counts == [0]:
        return "pcie", named
    if counts[0] == 0:
        return _partly([[n > 0 for n in row] for row in links]), named
    if len(table) == 2:
        return "unknown", f"{named}: two GPUs look alike with a bridge and with a switch"
    return ("switch" if counts[0] * (len(table) - 1) > MOST_NVLINKS else "mesh"), named


def amd_links(text: str) -> tuple[LinkKind, str]:
    """From `rocm-smi --showtopo`: XGMI between all GPUs, all at the same distance, is a full mesh."""
    types = _table(_section(text, "Link Type"))
    if len(types) < 2:
        return "unknown", "no table of GPUs"
    joined = [[cell == "XGMI" for cell in row] for row in types]
    pairs = [(i, j) for i in range(len(types)) for j in range(len(types)) if i != j]
    if not any(joined[i][j] for i, j in pairs):
        return "pcie", f"{len(types)} GPUs, no XGMI"
    weights = _table(_section(text, "Weight"))
    distances = {weights[i][j] for i, j in pairs if joined[i][j]} if len(weights) == len(types) else {""}
    named = f"{len(types)} GPUs, XGMI with distances {', '.join(sorted(distances))}"
    if all(joined[i][j] for i, j in pairs):
        return ("mesh" if len(distances) == 1 else "hypercube_mesh"), named
    return _partly(joined), f"{named}, and PCIe"


def _partly(joined: Sequence[Sequence[bool]]) -> LinkKind:
    """Some pairs have a direct link: a ring, a sparser mesh that reaches all, or islands which only PCIe joins."""
    reached, todo = {0}, [0]
    while todo:
        here = todo.pop()
        fresh = {j for j, linked in enumerate(joined[here]) if linked and j != here} - reached
        reached |= fresh
        todo += fresh
    if len(reached) < len(joined):
        return "pcie"
    neighbours = {sum(linked for j, linked in enumerate(row) if j != i) for i, row in enumerate(joined)}
    return "ring" if neighbours == {2} else "hypercube_mesh"


def _section(text: str, title: str) -> str:
    """The lines below the heading that begins with `title`, up to the next heading."""
    found = re.search(rf"^=+ {title}[^\n]*=+$(.*?)(?=^=+ |\Z)", text, re.MULTILINE | re.DOTALL)
    return found[1] if found else ""


def _table(text: str) -> list[list[str]]:
    """The square of cells between GPU0, GPU1, ...; empty if there is none, or a row is short."""
    rows = [line.split() for line in text.splitlines()]
    header = next((row for row in rows if row[:2] == ["GPU0", "GPU1"]), [])
    size = sum(1 for cell in header if re.fullmatch(r"GPU\d+", cell))
    cells = [row[1 : 1 + size] for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and row is not header]
    return cells if len(cells) == size and all(len(row) == size for row in cells) else []
