"""The same on the command line, and as a file for the trainer."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from moestro.config.load import load_config
from moestro.config.plan import Plan
from moestro.errors import MoestroError
from moestro.graph.convert import workload_of
from moestro.plan.file import write_plan
from moestro.predict.words import Prediction
from moestro.ui.offer import Offer
from moestro.ui.picked import FIELDS, WORKLOAD, Picked


def predict_command(picked: Picked, plan: Plan, offer: Offer) -> str:
    """The same prediction on the command line."""
    train = offer.config(picked.run).train
    written: dict[str, Any] = {"micro_batch_size": train.micro_batch_size or 1, "recompute": train.recompute}
    written |= {"expert_recompute": train.expert_recompute, "expert_chunks": train.expert_chunks}
    plain = Plan()
    said = [
        f"plan.{name}={_word(getattr(plan, name))}"
        for name in Plan.model_fields
        if name in ("pp", "dp") or getattr(plan, name) != written.get(name, getattr(plain, name))
    ]
    tokens = f"--tokens {picked.tokens:.10g}"
    return " ".join(("moestro predict", *_asked(picked, offer), *said, tokens, *_price(picked)))


def plan_command(picked: Picked, offer: Offer) -> str:
    """The same search on the command line."""
    pins = [f"plan.{name}={_word(picked.value(name))}" for name in FIELDS if name in picked.pins and name != "etp"]
    tokens = f"--tokens {picked.tokens:.10g}"
    return " ".join(("moestro plan", *_asked(picked, offer), *pins, *picked.wish.options, tokens, *_price(picked)))


def _asked(picked: Picked, offer: Offer) -> list[str]:
    profile = offer.profile(picked.hardware)
    workload = offer.workload(picked.run)
    where = f"--hardware {picked.hardware}" if profile is None else f"--profile {profile}"
    changed = [
        f"workload.{name}={getattr(picked, name)}"
        for name in WORKLOAD
        if getattr(picked, name) != getattr(workload, name)
    ]
    return [picked.run, where, f"--devices {picked.devices}", *changed]


def _price(picked: Picked) -> list[str]:
    return [] if picked.usd_per_hour is None else [f"--usd-per-hour {picked.usd_per_hour:g}"]


def config_overrides(picked: Picked, offer: Offer) -> list[str]:
    """For a run's configuration: what was picked instead of what is written down.

    Raises:
        MoestroError: the trainer has no such precision or optimizer.
    """
    if picked.precision not in ("fp32", "bf16"):
        raise MoestroError(f"the trainer computes in bf16 or fp32, not in {picked.precision}: it cannot take this plan")
    workload = offer.workload(picked.run)
    names = {
        "seq_len": "data.seq_len",
        "global_batch_size": "train.global_batch_size",
        "precision": "train.dtype",
        "optimizer": "optim.name",
    }
    changed = [
        f"{key}={getattr(picked, name)}"
        for name, key in names.items()
        if getattr(picked, name) != getattr(workload, name)
    ]
    steps = max(1, round(picked.tokens / (picked.seq_len * picked.global_batch_size)))
    if steps != offer.config(picked.run).train.steps:
        changed.append(f"train.steps={steps}")
    return changed


def plan_file(picked: Picked, plan: Plan, found: Prediction, offer: Offer) -> str:
    """A plan.toml for `moestro train`.

    Raises:
        MoestroError: the trainer cannot do what was picked; it says what.
    """
    overrides = config_overrides(picked, offer)
    got = workload_of(load_config(picked.run, overrides).config)
    for name in ("seq_len", "global_batch_size"):
        if getattr(got, name) != getattr(picked, name):  # the run's phases say it
            raise MoestroError(f"{picked.run} sets {name} in its phases: change it in the file, not here")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "plan.toml"
        write_plan(path, picked.run, overrides, plan, found)
        return path.read_text(encoding="utf-8")


def _word(value: Any) -> str:
    """As TOML, or a bare word."""
    if isinstance(value, tuple):
        return "[" + ",".join(map(str, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
