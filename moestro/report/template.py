"""What every HTML page of a report shares: templates beside this file, plotly's library and the figures in the page."""

import json
from collections.abc import Iterable
from html import escape
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from moestro.config.files import write_whole
from moestro.report.style import INK, MUTED, Plot


def fill(name: str, **values: object) -> str:
    """The template `name` with `values`, and with `plotly`, the library for a script element."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name).render(plotly=plotly_library(), **values)


def write_picture(path: Path, title: str, body: str) -> None:
    """One HTML file that needs nothing else. body: HTML under the heading, with figures that lack the library.

    Raises:
        MoestroError: `path` is no file that can be written.
        OSError: no such folder, no right to write there, or a full disk.
    """
    style = f"body{{font:14px system-ui,sans-serif;color:{INK};max-width:1000px;margin:24px auto}}p{{color:{MUTED}}}"
    write_whole(
        path,
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)} · Moestro</title>'
        f"<style>{style}</style><script>{plotly_library()}</script></head>\n"
        f"<body><h1>{escape(title)}</h1>{body}</body></html>\n",
    )


def plotly_library() -> Markup:
    """A backslash before the slash keeps `</script>` in data or library from ending the element."""
    from plotly.offline import get_plotlyjs

    return Markup(get_plotlyjs().replace("</script", "<\\/script"))


def figures(plots: Iterable[Plot]) -> Markup:
    """The figures as JSON inside a script element, where only `<` can end it."""
    parts = [f"{json.dumps(f'plot-{plot.key}')}:{plot.figure.to_json(engine='json')}" for plot in plots]
    # plotly writes every `/` of its base64 as six characters, which makes the page a tenth larger for nothing.
    return Markup(("{" + ",".join(parts) + "}").replace("\\u002f", "/").replace("<", "\\u003c"))
