"""What commands that predict are asked about: a run with its overrides, a machine, a plan; and each mistake, told."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moestro.errors import MoestroError, nearest

if TYPE_CHECKING:
    from moestro.config import Config
    from moestro.config.plan import Plan, Workload
    from moestro.predict.target import Target


def read_workload(preset: str, overrides: Sequence[str]) -> "tuple[Config, Workload, dict[str, Any]]":
    """The configuration, its workload with workload.*, and the values of plan.*, which are not checked yet.

    Raises:
        MoestroError: no such preset, an unknown key or a bad value.
    """
    from moestro.config import load_config
    from moestro.graph.convert import workload_of

    own: dict[str, dict[str, Any]] = {"plan": {}, "workload": {}}
    others = []
    for text in overrides:
        section, _, rest = text.partition(".")
        if section in own:
            key, value = parse_value(text, rest)
            outer, dot, inner = key.partition(".")
            if dot:  # workload.routing.kind
                own[section].setdefault(outer, {})[inner] = value
            else:
                own[section][key] = value
        else:
            others.append(text)
    config = load_config(preset, others).config
    workload = workload_of(config)
    if isinstance(own["workload"].get("routing"), dict) and "run" in own["workload"]["routing"]:
        folder = Path(own["workload"]["routing"].pop("run"))
        own["workload"]["routing"].update(kind="measured", loads=loads_of_run(folder))
    if own["workload"]:
        workload = _section("workload", type(workload), {**dict(workload), **own["workload"]}, own["workload"])
    return config, workload, own["plan"]


def parse_value(text: str, rest: str) -> tuple[str, Any]:
    """Of "key=value" its two, the value as TOML reads it or a bare word; text: the whole, for the message.

    Raises:
        MoestroError: it is not that.
    """
    key, equals, raw = rest.partition("=")
    if not equals or not key:
        raise MoestroError(f"'{text}' is not an override; write for example plan.tp=8")
    try:
        return key, tomllib.loads(f"v = {raw}")["v"]
    except tomllib.TOMLDecodeError:
        return key, raw


def target_asked(hardware: str, profile: Path | None, devices: int | None) -> "Target":
    """Of --hardware or --profile.

    Raises:
        MoestroError: none or both are given, or there is no such device, cluster or profile.
    """
    from moestro.hardware.profile import load_profile
    from moestro.predict.target import target_of, target_of_profile

    if hardware and profile is not None:
        raise MoestroError("give --hardware NAME or --profile PATH, not both")
    if not hardware and profile is None:
        raise MoestroError(
            "say for what: --hardware NAME (see `moestro hardware list`), or --profile PATH of a measured machine"
        )
    return target_of(hardware, devices) if profile is None else target_of_profile(load_profile(profile), devices)


def usual_devices(target: "Target") -> int:
    """How many there are where nobody says: the cluster's, a node's, or one machine."""
    return target.devices or (1 if target.host_computes else target.place.device.devices_per_node or 1)


def given_of(values: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """plan.* of the command line as what a search is given."""
    return {name: tuple(value) if isinstance(value, list) else (value,) for name, value in values.items()}


def trainer_overrides(overrides: Sequence[str]) -> list[str]:
    """Those that the trainer's configuration has."""
    return [text for text in overrides if not text.startswith(("plan.", "workload."))]


def check_folder(flag: str, path: Path) -> None:
    """Before long work whose result goes there. Raises MoestroError: there is none."""
    if not path.parent.is_dir():
        raise MoestroError(f"{flag} {path}: there is no folder {path.parent}")


def plan_asked(config: "Config", values: Mapping[str, Any], target: "Target", devices: int | None) -> "Plan":
    """The trainer's layout; or, where plan.* was given, that plan, with the settings of `train` that it leaves open.

    Raises:
        MoestroError: an unknown key, a bad value, or a plan of another number of devices.
    """
    from moestro.config.plan import Plan
    from moestro.graph.convert import plan_of

    node = 1 if target.host_computes else target.place.device.devices_per_node or 1
    world = devices or usual_devices(target)
    if not values:
        return plan_of(config, world, world if target.host_computes else min(world, node))
    train = config.train
    chunks = {"expert_chunks": train.expert_chunks} if isinstance(train.expert_chunks, int) else {}
    base: dict[str, Any] = {
        "micro_batch_size": train.micro_batch_size or 1,
        "recompute": train.recompute,
        "expert_recompute": train.expert_recompute,
        **chunks,
    }
    if "dp" not in values:
        sizes = [values.get(name, 1) for name in ("pp", "cp", "tp")]
        others = 1
        for size in sizes:
            others *= size if isinstance(size, int) and size > 0 else 1
        if world % others:
            raise MoestroError(f"pp · cp · tp = {others} does not divide {world} devices; give plan.dp or --devices")
        base["dp"] = world // others
    plan: Plan = _section("plan", Plan, {**base, **values}, values)
    if devices is not None and plan.world_size != devices:
        raise MoestroError(f"the plan takes {plan.world_size} devices (pp · dp · cp · tp), not {devices}")
    return plan


def keep_curves(target: "Target") -> None:
    """Fitted curves of a device, for the next time."""
    from moestro.predict.cache import keep_if_grown

    if not target.measured:
        keep_if_grown(target.curves)


def _section(name: str, kind: type[Any], values: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    """Validate, and say which key is wrong as the configuration does."""
    from pydantic import ValidationError

    for key in given:
        if key.partition(".")[0] not in kind.model_fields:
            raise MoestroError(f"unknown key '{name}.{key}'.{nearest(key, list(kind.model_fields))}")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join((name, *(str(part) for part in first["loc"])))
        message = first["msg"].removeprefix("Value error, ")
        raise MoestroError(f"{where}: {message}" if first["loc"] else f"{name}: {message}") from error


def loads_of_run(run: Path) -> list[list[float]]:
    """Of each layer with experts of a run, what each expert got on average over the second half of its records."""
    import numpy as np

    from moestro.report.read import read_run

    layers = [layer.load[len(layer.load) // 2 :] for layer in read_run(run).train.layers if layer.num_experts]
    if not layers:
        raise MoestroError(f"{run} tells no loads of experts: not a run of a model with experts, or cut off")
    return [np.nanmean(load, axis=0).tolist() for load in layers]
