"""From what was picked to all that is shown of it: numbers and words, no page."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from pydantic import ValidationError

from moestro.config.plan import Plan, Workload, misfits
from moestro.errors import MoestroError
from moestro.graph.count import count_step
from moestro.plan.space import CHUNKS_OF_SCHEDULE, Space, space_of
from moestro.plan.why import differences
from moestro.predict.cost import Cost, cost, rented
from moestro.predict.energy import step_energy
from moestro.predict.memory import memory_of_ranks
from moestro.predict.offload import host_rate
from moestro.predict.orders import pipeline_orders
from moestro.predict.predict import device_bytes, predict_step
from moestro.predict.target import Target
from moestro.predict.words import MemoryBreakdown, Prediction
from moestro.report.text import duration
from moestro.ui.goal import price_of, watts_of
from moestro.ui.offer import Offer
from moestro.ui.picked import FIELDS, Picked, usual, workload_picked

TOLD = 0.001  # of a step: smaller parts of a change are not told
PARTS_TOLD = 3
# Words of messages that are not the name of the control they belong to.
ALSO = {
    "num_experts": "ep",
    "num_heads": "tp",
    "micro": "micro_batch_size",
    "chunks": "vpp",
    "compute": "precision",
    "batch": "global_batch_size",
}


@dataclass(frozen=True)
class Setting:
    """A run on a machine: what plans are made for. values: of each field of a plan, what is worth trying."""

    workload: Workload
    target: Target
    devices: int
    space: Space

    def values(self, name: str) -> tuple[Any, ...]:
        """In order; etp 0 stands for as many as tp."""
        if name == "etp":
            return tuple(sorted(self.space.etp))
        found = tuple(getattr(self.space, name))
        return tuple(sorted(found)) if all(isinstance(value, int) for value in found) else found

    @property
    def limit_bytes(self) -> float | None:
        """Of one device."""
        return device_bytes(self.target, self.devices)


@dataclass(frozen=True)
class View:
    """What is seen of a pick. problems: in words, by the field that they stand at ("": none of its own). All else is
    None where there are any.

    memory: of each pipeline rank. training_s, usd, kwh: of the whole training; usd, kwh None: nobody knows.
    """

    picked: Picked
    problems: Mapping[str, str] = field(default_factory=dict)
    setting: Setting | None = None
    plan: Plan | None = None
    prediction: Prediction | None = None
    memory: tuple[MemoryBreakdown, ...] = ()
    steps: float = 0.0
    training_s: float = 0.0
    cost: Cost | None = None
    kwh: float | None = None

    @property
    def usd_per_hour(self) -> float | None:
        """Of one device, given or the catalog's."""
        return price_of(self.setting.target, self.picked.usd_per_hour) if self.setting else None

    @property
    def fits(self) -> bool:
        """In memory, as far as anybody knows."""
        limit = self.setting.limit_bytes if self.setting else None
        return limit is None or all(rank.total <= limit for rank in self.memory)


def setting_of(picked: Picked, offer: Offer) -> Setting:
    """Raises MoestroError: no such run or machine, or a run that it cannot compute."""
    workload = workload_picked(picked, offer)
    target = offer.target(picked.hardware, picked.devices)
    offloads = host_rate(target.place.device) is not None and not target.parts
    space = _space(workload, picked.devices, target.place.node_size, offloads)
    return Setting(workload, target, picked.devices, space)


def view_of(picked: Picked, offer: Offer, changed: str = "") -> View:
    """changed: the control that was moved last: a problem that names it stands there."""
    try:
        setting = setting_of(picked, offer)
    except MoestroError as error:
        return View(picked, {_at(str(error), changed): str(error)})
    found = [problem for problem in problems_of(setting, picked) if problem]
    if not found:
        try:
            return _predicted(picked, setting, plan_of(setting, picked))
        except MoestroError as error:
            found = [str(error)]
    problems: dict[str, str] = {}
    for text in found:
        where = _at(text, changed)
        problems[where] = f"{problems[where]}; {text}" if where in problems else text
    return View(picked, problems, setting)


def plan_of(setting: Setting, picked: Picked) -> Plan:
    """With dp, and with the usual value where a choice means nothing.

    Raises:
        MoestroError: the plan does not exist; why, in words.
    """
    values = {name: picked.value(name) for name in FIELDS}
    values["etp"] = values["etp"] or values["tp"]
    if values["pp"] == 1:
        values.update(schedule="1f1b", vpp=1)
    elif values["schedule"] in CHUNKS_OF_SCHEDULE:
        values["vpp"] = CHUNKS_OF_SCHEDULE[values["schedule"]]
    if values["cp"] == 1:
        values["context"] = usual("context")
    if values["tp"] == 1:
        values.update(etp=1, sequence_parallel=True, overlap_tensor=False)
    if setting.workload.model.moe is None:
        values.update(ep=1, etp=1, expert_chunks=1, expert_recompute=False)
    if values["ep"] == 1:
        values.update(dispatch="all_to_all", overlap_dispatch=False)
    others = values["pp"] * values["cp"] * values["tp"]
    if setting.devices % others:
        product = " · ".join(name for name in ("pp", "cp", "tp") if values[name] > 1)
        raise MoestroError(f"{product} = {others} does not divide {setting.devices:,} devices")
    values["dp"] = setting.devices // others
    if values["dp"] * values["cp"] == 1:
        values.update(zero=0)
    if values["zero"] == 0:
        values["shard"] = None
    values["ranks_per_node"] = setting.target.place.node_size if values["dispatch"] == "two_hop" else None
    try:
        return Plan.model_validate(values)
    except ValidationError as error:
        raise MoestroError(error.errors()[0]["msg"].removeprefix("Value error, ")) from error


def offered(view: View, name: str, value: Any) -> tuple[Any, ...]:
    """The values of a control: those worth trying, with the shown one among them."""
    there = view.setting.values(name) if view.setting is not None else ()
    found = there if value in there else (*there, value)
    return tuple(sorted(found)) if all(isinstance(one, int) for one in found) else found


def in_force(view: View, name: str) -> tuple[Any, bool]:
    """The value of a field, and whether the other fields leave it none but this: a pipeline's schedule without a
    pipeline."""
    picked, setting, plan = view.picked, view.setting, view.plan
    if setting is None or plan is None:
        return picked.value(name), False
    try:
        others = [plan_of(setting, picked.with_field(name, value)) for value in _ends(setting.values(name))]
    except MoestroError:  # another value makes no plan: then it means something
        return picked.value(name), False
    if any(other != plan for other in others):
        return picked.value(name), False
    return (0 if name == "etp" and plan.etp == plan.tp else getattr(plan, name)), True


def _ends(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return values if len(values) < 3 else (values[0], values[1], values[-1])


def problems_of(setting: Setting, picked: Picked) -> list[str]:
    """Why the picked plan does not exist or does not fit the run; empty when it does."""
    try:
        plan = plan_of(setting, picked)
    except MoestroError as error:
        return [str(error)]
    found = misfits(setting.workload, plan)
    if not found and plan.pp > 1:
        m = plan.micro_batches(setting.workload)
        try:  # what a schedule needs shows with few micro-batches, too
            pipeline_orders(plan.schedule, plan.pp, plan.vpp, min(m, 2 * plan.pp + m % plan.pp + m % 2))
        except MoestroError as error:
            found.append(str(error))
    return found


def _predicted(picked: Picked, setting: Setting, plan: Plan) -> View:
    workload, target = setting.workload, setting.target
    found = predict_step(workload, plan, target)
    device = target.place.device
    memory = memory_of_ranks(count_step(workload, plan), workload, plan, device)
    steps = picked.tokens / workload.tokens
    training_s = steps * found.step_s.value
    price = kwh = None
    if price_of(target, picked.usd_per_hour) is not None:
        price = cost(training_s, plan.world_size, rented(device, picked.usd_per_hour), picked.tokens)
    if watts_of(target) is not None:
        kwh = step_energy(found.time, device, plan.world_size).kwh * steps
    return View(picked, {}, setting, plan, found, memory, steps, training_s, price, kwh)


def told(before: View, after: View) -> str:
    """What the step from one view to another did, in a sentence; empty where there is nothing to compare."""
    old, new = before.prediction, after.prediction
    what = _changes(before.picked, after.picked)
    if old is None or new is None or not what:
        return ""
    total = old.step_s.value
    parts = [one for one in differences(old.time, new.time) if abs(one.seconds) > TOLD * total][:PARTS_TOLD]
    reasons = ", ".join(f"{one.what} {_signed(one.seconds / total)}" for one in parts)
    memory = (new.memory.total - old.memory.total) / 1e9
    step = f"step {_signed(new.step_s.value / total - 1)} ({duration(total)} → {duration(new.step_s.value)})"
    size = f"memory {memory:+.1f} GB".replace("-", "−") if abs(memory) >= 0.05 else "memory as before"
    return "; ".join(part for part in (f"{what}: {step}", reasons, size) if part)


def _signed(share: float) -> str:
    return "±0 %" if abs(share) < 0.0005 else f"{100 * share:+.1f} %".replace("-", "−")


def _changes(before: Picked, after: Picked) -> str:
    """What was picked differently: `tp 1 → 2`."""
    names = ("run", "hardware", "devices", "seq_len", "global_batch_size", "precision", "optimizer", "trainer")
    found = [(name, getattr(before, name), getattr(after, name)) for name in names]
    found += [(name, before.value(name), after.value(name)) for name in FIELDS]
    texts = [f"{name} {shown(name, old)} → {shown(name, new)}" for name, old, new in found if old != new]
    return ", ".join(texts) if len(texts) <= 4 else f"{', '.join(texts[:3])} and {len(texts) - 3} more"


def shown(name: str, value: Any) -> str:
    """A field's value as people read it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if name == "etp" and value == 0:
        return "as tp"
    return "all" if name == "shard" and value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _at(text: str, changed: str) -> str:
    """The control that a message is about: the one moved last, if it is named, or the first that is."""
    known = (*FIELDS, "devices", "seq_len", "global_batch_size", "precision", "optimizer", "run", "hardware")
    words = [ALSO.get(word, word) for word in re.findall(r"\w+", text)]
    if changed in words:
        return changed
    return next((word for word in words if word in known), "")


@lru_cache(maxsize=128)
def _space(workload: Workload, devices: int, node_size: int, offloads: bool) -> Space:
    return space_of(workload, devices, node_size, offloads=offloads)
