"""What tests of the catalog share."""

from collections.abc import Iterator

from pydantic import BaseModel

from moestro.hardware.figures import Figure


def figures(section: object, path: str = "") -> Iterator[tuple[str, Figure]]:
    """Every figure inside a section, with the path to it."""
    if isinstance(section, Figure):
        yield path, section
    elif isinstance(section, dict):
        for key, value in section.items():
            yield from figures(value, f"{path}.{key}")
    elif isinstance(section, tuple):
        for index, value in enumerate(section):
            yield from figures(value, f"{path}.{index}")
    elif isinstance(section, BaseModel):
        for key in type(section).model_fields:
            yield from figures(getattr(section, key), f"{path}.{key}")
