"""Files that are there whole or not at all."""

import os
from pathlib import Path

from moestro.errors import MoestroError


def write_whole(path: Path, text: str) -> None:
    """Write UTF-8 text under a temporary name beside `path`, which it replaces when it is complete.

    Raises:
        MoestroError: `path` is a folder or a device, which a file must not replace.
        OSError: no such folder, no right to write there, or a full disk; then an older file is as it was.
    """
    if path.exists() and not path.is_file():
        raise MoestroError(f"{path} is {'a folder' if path.is_dir() else 'no file'}; give the name of a file to write")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:  # a full disk names no file of its own, and the temporary name is nobody's
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)
