"""`moestro predict --net`: the step of a model that is no language model."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from moestro.predict.target import Target


def predict_net(name: str, texts: Sequence[str], target: "Target", as_json: bool) -> None:
    """Count a net of `graph.nets`, price it and print it. texts: its values, as batch=64."""
    import json
    from dataclasses import asdict

    from moestro.cli.asked import keep_curves, parse_value
    from moestro.cli.predict_tables import print_traced
    from moestro.errors import MoestroError
    from moestro.graph.nets import named_net
    from moestro.predict.predict import predict_traced

    if texts and "=" not in texts[0]:
        raise MoestroError("--net is the model; beside it stand values like batch=64 only, no preset")
    graph = named_net(name, dict(parse_value(text, text) for text in texts))
    time = predict_traced(graph, target)
    keep_curves(target)
    if as_json:
        tree = {
            "devices": graph.world_size,
            "model_flops": graph.model_flops,
            "profile": target.profile,
            "notes": graph.notes,
        }
        typer.echo(json.dumps({**tree, "time": {**asdict(time), "total": time.total}}, indent=1))
        return
    print_traced(" ".join((name, *texts)), graph, time, target, "counted")
