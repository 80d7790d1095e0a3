"""Fitted curves of devices, kept on disk: reading the public samples and fitting them takes seconds, a prediction none.

A file is used only if it is whole and was made by this code from this data; any other is ignored and made again.
"""

import hashlib
import os
import pickle
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import overload

import moestro
from moestro.hardware.curves.network import CollectiveModel
from moestro.hardware.devices import Device
from moestro.hardware.profile import Sample
from moestro.predict import curves
from moestro.predict.curves import DeviceCurves

FOLDER = "MOESTRO_CACHE"  # the variable that names another folder than the user's cache
DIGEST_BYTES = 32
# What the curves are made by and of; a change in any of these files makes the kept curves void.
SOURCES = (
    "hardware/curves/*.py",
    "hardware/published/*",
    "hardware/catalog/**/*",
    "hardware/*.py",
    "predict/curves.py",
)


class Shipped(Sequence[Sample]):
    """The shipped public samples of one device (None: of all, of collectives), read when first looked at."""

    def __init__(self, device_id: str | None) -> None:
        self.device_id = device_id

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | Sequence[Sample]:
        return _shipped(self.device_id)[index]

    def __len__(self) -> int:
        return len(_shipped(self.device_id))

    def __iter__(self) -> Iterator[Sample]:
        return iter(_shipped(self.device_id))


@cache
def _shipped(device_id: str | None) -> tuple[Sample, ...]:
    if device_id is None:
        return curves._network_samples()
    return tuple(sample for sample in curves._compute_samples() if sample.case.get("device") == device_id)


_known: dict[Path, DeviceCurves] = {}  # of this process
_as_read: dict[Path, int] = {}  # how many curves each had when it was read


def known_curves(device: Device) -> DeviceCurves:
    """The curves of a device by the shipped samples: those kept on disk, or fitted as they are asked for."""
    path = _path(device)
    if path not in _known:
        kept = _read(path)
        _as_read[path] = _fitted(kept) if kept else 0
        _known[path] = kept or DeviceCurves(device, Shipped(device.id), CollectiveModel(Shipped(None), device))
    return _known[path]


def keep_curves(known: DeviceCurves) -> bool:
    """Write what `known_curves` gave, with all that was fitted since. False: it cannot be, no error."""
    path = _path(known.device)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    payload = pickle.dumps(known, protocol=pickle.HIGHEST_PROTOCOL)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.write_bytes(hashlib.sha256(payload).digest() + payload)
        os.replace(temporary, path)
    except OSError:
        return False
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    for old in path.parent.glob(f"curves-{_name(known.device)}-*.pickle"):
        if old != path:
            old.unlink(missing_ok=True)
    return True


def keep_if_grown(known: DeviceCurves) -> None:
    """Write it if something was fitted since it was read."""
    if _fitted(known) > _as_read.get(_path(known.device), 0):
        keep_curves(known)


def _fitted(known: DeviceCurves) -> int:
    """How many curves there are."""
    own = len(known._products) + len(known._experts) + len(known._attention)
    return own + len(known.network._curves) + len(known.network._errors)


def cache_folder() -> Path:
    chosen = os.environ.get(FOLDER)
    if chosen:
        return Path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "moestro"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moestro"


def _read(path: Path) -> DeviceCurves | None:
    """None: no file, not the user's own, cut short or changed."""
    try:
        if hasattr(os, "getuid") and path.stat().st_uid != os.getuid():
            return None  # a pickle can run code: never another user's
        content = path.read_bytes()
        payload = content[DIGEST_BYTES:]
        if hashlib.sha256(payload).digest() != content[:DIGEST_BYTES]:
            return None
        found = pickle.loads(payload)
    except (OSError, pickle.UnpicklingError, AttributeError, ImportError, EOFError, TypeError, ValueError):
        return None
    return found if isinstance(found, DeviceCurves) else None


def _path(device: Device) -> Path:
    own = hashlib.sha256(device.model_dump_json().encode()).hexdigest()
    key = hashlib.sha256(f"{_origin()} {own}".encode()).hexdigest()[:20]
    return cache_folder() / f"curves-{_name(device)}-{key}.pickle"


def _name(device: Device) -> str:
    return "".join(c if c.isalnum() else "_" for c in device.id or device.name)[:40]


@cache
def _origin() -> str:
    """Of the data, of the code that fits it, and of the versions that a pickle depends on."""
    import numpy
    import pydantic

    package = Path(moestro.__file__).parent
    digest = hashlib.sha256(f"{moestro.__version__} {sys.version_info[:2]}".encode())
    digest.update(f"{numpy.__version__} {pydantic.VERSION}".encode())
    for path in sorted({path for pattern in SOURCES for path in package.glob(pattern) if path.is_file()}):
        if path.suffix not in (".pyc",):
            digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
