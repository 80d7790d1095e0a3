"""What every HTML page of a report shares: templates beside this file, plotly's library and the figures in the page."""

import json
from collections.abc import Iterable
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from moestro.report.style import Plot


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


def plotly_library() -> Markup:
    """A backslash before the slash keeps `</script>` in data or library from ending the element."""
    from plotly.offline import get_plotlyjs

    return Markup(get_plotlyjs().replace("</script", "<\\/script"))


def figures(plots: Iterable[Plot]) -> Markup:
    """The figures as JSON inside a script element, where only `<` can end it."""
    parts = [f"{json.dumps(f'plot-{plot.key}')}:{plot.figure.to_json(engine='json')}" for plot in plots]
    # plotly writes every `/` of its base64 as six characters, which makes the page a tenth larger for nothing.
    return Markup(("{" + ",".join(parts) + "}").replace("\\u002f", "/").replace("<", "\\u003c"))
