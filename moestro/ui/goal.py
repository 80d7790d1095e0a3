"""What a search looks for, from what was picked; the names are those of `moestro plan`."""

from dataclasses import dataclass
from typing import get_args

from moestro.plan.objective import DAY_S, Failures, Goal, Objective
from moestro.predict.cost import HOUR_S, rented
from moestro.predict.target import Target

OBJECTIVES: tuple[str, ...] = get_args(Objective)
CHECKPOINT_S = 30.0  # as `moestro plan` takes it where storage is not known


@dataclass(frozen=True)
class Wish:
    """None: no limit. headroom: per cent of a device's memory to leave free. mtbf_hours: between failures of a device,
    without which there are none."""

    objective: str = "time"
    deadline_days: float | None = None
    budget_usd: float | None = None
    headroom: float = 0.0
    mtbf_hours: float | None = None

    @property
    def options(self) -> list[str]:
        """For the command line."""
        found = [] if self.objective == "time" else [f"--objective {self.objective}"]
        found += [] if self.deadline_days is None else [f"--deadline {self.deadline_days:g}d"]
        found += [] if self.budget_usd is None else [f"--budget {self.budget_usd:.10g}"]
        found += [] if not self.headroom else [f"--headroom {self.headroom:g}%"]
        return found + ([] if self.mtbf_hours is None else [f"--mtbf-hours {self.mtbf_hours:g}"])


def price_of(target: Target, usd_per_hour: float | None) -> float | None:
    """US dollars for an hour of one device: given, or the catalog's. None: unknown, or unlike devices."""
    price = target.place.device.price
    if usd_per_hour is None and (target.parts or not (price.usd_per_hour_low or price.usd_per_hour_high)):
        return None
    return rented(target.place.device, usd_per_hour).usd_per_hour


def watts_of(target: Target) -> float | None:
    """Rated power of one device. None: unknown, or unlike devices."""
    return None if target.measured or target.parts else target.place.device.tdp_w.nominal


def goal_of(wish: Wish, target: Target, steps: float, usd_per_hour: float | None) -> Goal:
    """Raises MoestroError: it needs what is not known."""
    failures = None
    if wish.mtbf_hours is not None:
        checkpoint_s = CHECKPOINT_S if target.storage is None else None
        failures = Failures(wish.mtbf_hours * HOUR_S, checkpoint_s=checkpoint_s, storage=target.storage)
    return Goal(
        objective=next(name for name in get_args(Objective) if name == wish.objective),
        steps=steps,
        usd_per_hour=price_of(target, usd_per_hour),
        watts=watts_of(target),
        failures=failures,
        deadline_s=None if wish.deadline_days is None else wish.deadline_days * DAY_S,
        budget_usd=wish.budget_usd,
        free_share=wish.headroom / 100,
    )
