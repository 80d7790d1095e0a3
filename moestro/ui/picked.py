"""What a person has picked: a run, a machine, the numbers of the run, a plan."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, get_args

from moestro.config.plan import Plan, Precision, Workload
from moestro.ui.goal import Wish
from moestro.ui.offer import Offer

# Fields of a plan that have a control. dp is what the others leave; etp = 0 stands for as many as tp.
LAYOUT = (
    "pp", "schedule", "vpp", "tp", "cp", "ep", "etp", "zero", "micro_batch_size", "recompute", "expert_chunks",
    "expert_recompute", "dispatch", "overlap_dispatch",
)  # fmt: skip
# Fields that plans of a search have and that only matter to some.
FINER = ("context", "shard", "gradient_dtype", "sequence_parallel", "overlap_tensor", "offload")
FIELDS = (*LAYOUT, *FINER)
PRECISIONS: tuple[str, ...] = get_args(Precision)
OPTIMIZERS = ("adamw", "muon", "sgd")
TRAINERS = ("moestro", "megatron")
WORKLOAD = ("seq_len", "global_batch_size", "precision", "optimizer", "trainer")
LEAST_SEQ, MOST_SEQ = 128, 2**20
MOST_BATCH = 2**20


@dataclass(frozen=True)
class Picked:
    """tokens: of the whole training. usd_per_hour: of one device; None: the catalog's. layout: by FIELDS, those that
    are not a Plan's usual value. pins: fields that a search must keep."""

    run: str
    hardware: str
    devices: int
    seq_len: int
    global_batch_size: int
    precision: str
    optimizer: str
    trainer: str
    tokens: float
    usd_per_hour: float | None = None
    wish: Wish = field(default_factory=Wish)
    layout: Mapping[str, Any] = field(default_factory=dict)
    pins: frozenset[str] = frozenset()

    def value(self, name: str) -> Any:
        """Of a field of the plan."""
        return self.layout.get(name, usual(name))

    def number(self, name: str) -> float | None:
        """Of the pick itself or of its wish."""
        found: float | None = getattr(self.wish if name in WISHES else self, name)
        return found

    def changed(self, **values: Any) -> "Picked":
        """With other values of fields of this or of its wish."""
        wished = {name: value for name, value in values.items() if name in WISHES}
        own = {name: value for name, value in values.items() if name not in WISHES}
        return replace(self, wish=replace(self.wish, **wished), **own)

    def with_field(self, name: str, value: Any) -> "Picked":
        return replace(self, layout=_plain({**self.layout, name: value}))

    def with_plan(self, plan: Plan) -> "Picked":
        values = {name: getattr(plan, name) for name in FIELDS}
        values["etp"] = 0 if plan.etp == plan.tp else plan.etp
        values |= {name: self.value(name) for name in self.pins}  # also where the plan leaves them no meaning
        return replace(self, layout=_plain(values))

    def pinned(self, name: str, fixed: bool) -> "Picked":
        return replace(self, pins=self.pins | {name} if fixed else self.pins - {name})


def usual(name: str) -> Any:
    """Of a field that nothing was said of."""
    return 0 if name == "etp" else Plan.model_fields[name].default


def start(offer: Offer, run: str, hardware: str) -> Picked:
    """Of a run as it is written down, on a cluster or a node, without a plan.

    Raises:
        MoestroError: no such run or hardware.
    """
    config = offer.config(run)
    workload = offer.workload(run)
    return Picked(
        run, hardware, offer.devices(hardware)[0], workload.seq_len, workload.global_batch_size, workload.precision,
        workload.optimizer, workload.trainer, tokens=float(config.train.steps) * workload.tokens,
    )  # fmt: skip


NUMBERS: dict[str, tuple[float, float]] = {
    "tokens": (1e3, 1e15), "usd_per_hour": (0.0, 1e4), "deadline_days": (0.01, 1e5), "budget_usd": (1.0, 1e13),
    "headroom": (0.0, 90.0), "mtbf_hours": (1.0, 1e8),
}  # fmt: skip
WISHES = tuple(one.name for one in fields(Wish))


def clamped(picked: Picked, offer: Offer) -> Picked:
    """With numbers that there are."""
    values: dict[str, Any] = {
        "devices": _within(picked.devices, 1, offer.devices(picked.hardware)[1]),
        "seq_len": _within(picked.seq_len, LEAST_SEQ, MOST_SEQ),
        "global_batch_size": _within(picked.global_batch_size, 1, MOST_BATCH),
    }
    for name, (least, most) in NUMBERS.items():
        value = picked.number(name)
        values[name] = None if value is None else min(max(value, least), most)
    return picked.changed(**values)


def workload_picked(picked: Picked, offer: Offer) -> Workload:
    return _workload(picked.run, offer, *(getattr(picked, name) for name in WORKLOAD))


@lru_cache(maxsize=256)
def _workload(run: str, offer: Offer, *values: Any) -> Workload:
    return Workload.model_validate({**dict(offer.workload(run)), **dict(zip(WORKLOAD, values, strict=True))})


def _plain(layout: Mapping[str, Any]) -> dict[str, Any]:
    return {name: layout[name] for name in FIELDS if name in layout and layout[name] != usual(name)}


def _within(value: int, least: int, most: int) -> int:
    return min(max(value, least), most)
