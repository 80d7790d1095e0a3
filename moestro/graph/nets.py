"""Models that are no language models by name, and encoders from a file: what `moestro predict --net` counts."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from moestro.config.plan import Precision
from moestro.errors import MoestroError, nearest
from moestro.graph.classic import DLRM_DDP, DLRM_DEFAULT, DLRM_MLPERF, dlrm, resnet50, unet
from moestro.graph.tokens import TokenNet, affmae, token_graph, vit_mae
from moestro.graph.words import StepGraph
from moestro.hardware.catalog.reading import read_tree

NETS: dict[str, Callable[..., StepGraph]] = {
    "resnet50": resnet50,
    "unet": unet,
    "dlrm-default": partial(dlrm, DLRM_DEFAULT),
    "dlrm-ddp": partial(dlrm, DLRM_DDP),
    "dlrm-mlperf": partial(dlrm, DLRM_MLPERF),
}
ENCODERS: dict[str, Callable[..., TokenNet]] = {"vit-mae": vit_mae, "affmae": affmae}
OF_A_STEP = ("batch", "ranks", "dtype")  # of every net; batch is one rank's


def named_net(name: str, values: Mapping[str, Any]) -> StepGraph:
    """name: of NETS or ENCODERS, or a TOML file of a `tokens.TokenNet`. values: `batch`, `ranks`, `dtype`, and what
    else the net asks for; of a file, its own keys.

    Raises:
        MoestroError: no such net or file, unknown or wrong values.
    """
    step = {"batch": 1, **{key: value for key, value in values.items() if key in OF_A_STEP}}
    own = {key: value for key, value in values.items() if key not in OF_A_STEP}
    _check_step(step)
    if name in NETS:
        _check_own(name, NETS[name], own)
        return NETS[name](**own, **step)
    if name in ENCODERS:
        _check_own(name, ENCODERS[name], own)
        net = _made(name, lambda: ENCODERS[name](**own))
    elif name.endswith(".toml"):
        net = _made(name, lambda: TokenNet.model_validate({**read_tree(Path(name)), **own}))
    else:
        names = (*NETS, *ENCODERS)
        raise MoestroError(f"no net '{name}'.{nearest(name, names)} There are {', '.join(names)}, and TOML files.")
    return token_graph(net, **step)


def _check_step(step: Mapping[str, Any]) -> None:
    for key in ("batch", "ranks"):
        value = step.get(key, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise MoestroError(f"{key}={value}: give a whole number of 1 or more")
    if step.get("dtype", "bf16") not in get_args(Precision):
        raise MoestroError(f"dtype={step['dtype']}: there are {', '.join(get_args(Precision))}")


def _check_own(name: str, build: Callable[..., object], own: Mapping[str, Any]) -> None:
    """Keys that the function has, with numbers of its own kind."""
    known = {
        key: parameter.default
        for key, parameter in inspect.signature(build).parameters.items()
        if key not in OF_A_STEP and parameter.default is not inspect.Parameter.empty
    }
    for key, value in own.items():
        if key not in known:
            hint = nearest(key, list(known)) or f" It has {', '.join((*OF_A_STEP, *known))}."
            raise MoestroError(f"{name} has no '{key}'.{hint}")
        kinds = (int, float) if isinstance(known[key], float) else type(known[key])
        wrong = not isinstance(value, kinds) or isinstance(value, bool) != isinstance(known[key], bool)
        least = 1 if isinstance(known[key], int) and not isinstance(known[key], bool) else 0
        if wrong or value < least:
            raise MoestroError(f"{key}={value}: {name} takes a value like {known[key]}")


def _made(name: str, build: Callable[[], TokenNet]) -> TokenNet:
    try:
        return build()
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise MoestroError(f"{name}: {f'{where}: ' if where else ''}{message}") from error
    except (ValueError, ZeroDivisionError) as error:
        raise MoestroError(f"{name}: {error}") from error
