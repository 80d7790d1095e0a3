"""Plans near the picked one: the best value of one field, a plan that mends a misfit, and one to start with."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any

from moestro.errors import MoestroError
from moestro.plan.search import search
from moestro.plan.space import Space
from moestro.ui.offer import Offer
from moestro.ui.picked import LAYOUT, Picked
from moestro.ui.state import Setting, View, problems_of, setting_of, view_of

MOST_CHANGES = 3  # of a plan that is mended
MOST_PREDICTED = 120  # of mended plans
# What a first guess tries of each field, where the run allows it.
GUESSED: dict[str, tuple[Any, ...]] = {
    "pp": (1, 2, 4, 8, 16), "vpp": (1,), "schedule": ("1f1b",), "tp": (1, 8), "ep": (1, 8, 64),
    "zero": (1, 2, 3), "micro_batch_size": (1, 2, 4), "recompute": ("none", "block"), "expert_chunks": (1,),
    "expert_recompute": (False,), "overlap_dispatch": (False,), "context": ("ring",), "shard": (None,),
}  # fmt: skip


def best_value(picked: Picked, name: str, offer: Offer) -> View | None:
    """With the value of one field that makes the step shortest, all else as it is. None: no value makes a plan that
    fits in memory."""
    values = setting_of(picked, offer).values(name)
    return _fastest(view_of(picked.with_field(name, value), offer) for value in values)


def mended(picked: Picked, offer: Offer, keep: Sequence[str] = ()) -> View | None:
    """The fastest plan that exists and fits, of those with the fewest changes. keep: fields that stay, beside the pins.

    Searches changes of up to MOST_CHANGES fields; None: none of them mends it.
    """
    setting = setting_of(picked, offer)
    free = [name for name in LAYOUT if name not in keep and name not in picked.pins]
    for count in range(1, MOST_CHANGES + 1):
        some = []
        for one in _changed(setting, picked, free, count):
            if not any(problems_of(setting, one)):
                some.append(one)
            if len(some) == MOST_PREDICTED:
                break
        found = _fastest(view_of(one, offer) for one in some)
        if found is not None:
            return found
    return None


def guessed(picked: Picked, offer: Offer) -> Picked:
    """A plan to start with: the best of a few dozen, pins kept. As picked where none of them fits."""
    setting = setting_of(picked, offer)
    space = pinned_space(_coarse(setting.space), picked)
    try:
        found = search(setting.workload, setting.target, setting.devices, space, keep=1, exact=1)
    except MoestroError:
        return picked
    return picked.with_plan(found.exact[0][0])


def pinned_space(space: Space, picked: Picked) -> Space:
    """With one value of each pinned field."""
    changes: dict[str, Any] = {name: (picked.value(name),) for name in picked.pins}
    return replace(space, **changes)


def _coarse(space: Space) -> Space:
    changes: dict[str, Any] = {}
    for name, wanted in GUESSED.items():
        there = getattr(space, name)
        changes[name] = tuple(value for value in wanted if value in there) or there[:1]
    return replace(space, **changes, dispatch=space.dispatch[:1], cp=space.cp[:1])


def _changed(setting: Setting, picked: Picked, free: Sequence[str], count: int) -> Iterator[Picked]:
    """With other values of `count` fields."""
    others = {name: [v for v in setting.values(name) if v != picked.value(name)] for name in free}
    for names in combinations(free, count):
        for values in product(*(others[name] for name in names)):
            one = picked
            for name, value in zip(names, values, strict=True):
                one = one.with_field(name, value)
            yield one


def _fastest(views: Iterator[View]) -> View | None:
    found = [view for view in views if view.prediction is not None and view.fits]
    return min(found, key=lambda view: view.prediction.step_s.value if view.prediction else 0.0, default=None)
