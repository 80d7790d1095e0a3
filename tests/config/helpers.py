"""Small settings as plain dictionaries and files."""

import copy
from pathlib import Path
from typing import Any

import tomli_w

BASE: dict[str, Any] = {
    "model": {"hidden_size": 8, "num_layers": 2, "num_heads": 2, "moe": {"num_experts": 4, "expert_hidden_size": 4}},
    "data": {"sources": [{"path": "a.txt"}, {"path": "b.txt", "weight": 2.0}], "seq_len": 8},
    "train": {"steps": 3, "global_batch_size": 4},
}


def tree(**settings: Any) -> dict[str, Any]:
    """BASE with values set by keys such as `model__moe__top_k`."""
    out = copy.deepcopy(BASE)
    for key, value in settings.items():
        *parents, leaf = key.split("__")
        node: Any = out
        for part in parents:
            node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
        node[leaf] = value
    return out


def config_file(folder: Path, **settings: Any) -> str:
    path = folder / "config.toml"
    path.write_text(tomli_w.dumps(tree(**settings)), encoding="utf-8")
    return str(path)
