"""The catalog: one TOML file a device in `devices/`, one a cluster in `clusters/`; read when asked for, and kept."""

from functools import cache
from math import prod
from pathlib import Path

from moestro.errors import MoestroError, nearest
from moestro.hardware.catalog.names import match, words
from moestro.hardware.catalog.reading import read_section, read_tree
from moestro.hardware.devices import Cluster, Device, Node

DEVICES_DIR = Path(__file__).parent / "devices"
CLUSTERS_DIR = Path(__file__).parent / "clusters"

__all__ = ["cluster_ids", "device_ids", "find_device", "load_cluster", "load_device"]


@cache
def device_ids() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in DEVICES_DIR.glob("*.toml")))


@cache
def cluster_ids() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in CLUSTERS_DIR.glob("*.toml")))


def load_device(name: str) -> Device:
    """A device of the catalog by id or alias, or from a TOML file of one's own.

    A text of several words is taken for what a driver says (`find_device`); a single word must be right, so that
    "h100-pcix" is an error and not the nearest H100.

    Raises:
        MoestroError: no such device or file; a wrong key or value in the file.
    """
    wanted = name.strip().lower()
    if wanted in device_ids():
        return _device(wanted)
    if wanted.endswith(".toml"):
        return _read_device(Path(name))
    exact = [device_id for device_id, names in _names().items() if words(name) in names]
    found = _device(exact[0]) if exact else find_device(name) if " " in wanted else None
    if found is not None:
        return found
    if wanted in cluster_ids():
        raise MoestroError(f"'{name}' is a cluster; a device is wanted, such as one of those it is made of")
    hint = nearest(wanted, device_ids())
    raise MoestroError(f"no device '{name}' in the catalog.{hint} `moestro hardware list` shows them all.")


@cache
def find_device(text: str) -> Device | None:
    """The device that a driver or a public table calls `text`; None when none or more than one fits.

    "NVIDIA H100 80GB HBM3" is h100-sxm; "H100/H800 class" is None, and so is a variant that the catalog does not hold
    ("H100 NVL", "RTX 4090 Laptop GPU"). A bare name such as "A100" is the variant of the largest servers.
    """
    found = match(text, _names())
    return None if found is None else _device(found)


def load_cluster(name_or_path: str) -> Cluster:
    """A cluster of the catalog, or one from a TOML file. Its devices, hosts and links are checked.

    Raises:
        MoestroError: no such cluster or file; a wrong key or value; a device, host or link that does not exist.
    """
    if name_or_path.lower() in cluster_ids():
        return _cluster(name_or_path.lower())
    path = Path(name_or_path)
    if path.is_dir() or not (path.suffix == ".toml" or "/" in name_or_path or path.is_file()):
        hint = nearest(name_or_path, cluster_ids())
        raise MoestroError(
            f"no cluster '{name_or_path}'.{hint} Clusters: {', '.join(cluster_ids())}; or give a TOML file."
        )
    return _read_cluster(path)


@cache
def _device(device_id: str) -> Device:
    return _read_device(DEVICES_DIR / f"{device_id}.toml")


def _read_device(path: Path) -> Device:
    return read_section(Device, path).model_copy(update={"id": path.stem})


@cache
def _cluster(cluster_id: str) -> Cluster:
    return _read_cluster(CLUSTERS_DIR / f"{cluster_id}.toml")


def _read_cluster(path: Path) -> Cluster:
    cluster = read_section(Cluster, path).model_copy(update={"id": path.stem})
    for index, pool in enumerate(cluster.pools):
        _check_node(pool.node, f"{path}: pools.{index}.node")
        joined = prod(level.members for level in pool.levels)
        if pool.levels and joined < pool.nodes:
            raise MoestroError(f"{path}: pools.{index}.levels join {joined} nodes of {pool.nodes}")
    regions = {pool.region for pool in cluster.pools}
    for index, wan in enumerate(cluster.wan):
        for region in wan.regions:
            if region not in regions:
                hint = nearest(region, sorted(regions))
                raise MoestroError(f"{path}: wan.{index}.regions: no pool is in region '{region}'.{hint}")
    return cluster


def _check_node(node: Node, where: str) -> None:
    for device_id, count in node.devices.items():
        if device_id not in device_ids():
            hint = nearest(device_id, device_ids())
            raise MoestroError(f"{where}.devices: no device '{device_id}' in the catalog.{hint}")
        if count < 1:
            raise MoestroError(f"{where}.devices.{device_id}: {count} devices; at least 1")
        links = [link.name for link in _device(device_id).links]
        if node.link and node.link not in links:
            known = f" It has: {', '.join(links)}." if links else ""
            raise MoestroError(
                f"{where}.link: {device_id} has no link '{node.link}'.{nearest(node.link, links)}{known}"
            )
    if node.host and node.host not in device_ids():
        hint = nearest(node.host, device_ids())
        raise MoestroError(f"{where}.host: no device '{node.host}' in the catalog.{hint}")


@cache
def _names() -> dict[str, tuple[frozenset[str], ...]]:
    """Of each device, what it is called, as sets of words; its memory size is a word that may be added to any."""
    names = {}
    for device_id in device_ids():
        tree = read_tree(DEVICES_DIR / f"{device_id}.toml")
        called = [words(name) for name in (device_id, str(tree.get("name", "")), *tree.get("aliases", ()))]
        memory = words(f"{tree.get('memory', {}).get('gb', {}).get('nominal', 0):g}GB")
        names[device_id] = tuple(dict.fromkeys((*called, *(name | memory for name in called))))
    return names
