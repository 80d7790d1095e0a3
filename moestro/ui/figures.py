"""The key figures of a view, as text."""

from moestro.report.text import MISSING, duration, grouped, percent, si
from moestro.ui.state import View

KEYS = ("step", "tokens/s", "MFU", "memory", "training", "cost")


def key_figures(view: View) -> dict[str, tuple[str, str, bool]]:
    """Of each: the value, a line of detail, and whether it is bad."""
    found, limit = view.prediction, view.setting.limit_bytes if view.setting else None
    if found is None or view.plan is None:
        return dict.fromkeys(KEYS, (MISSING, "", False))
    step, total = found.step_s, found.memory.total
    room = "of a device: its size is not known"
    if limit is not None:
        room = f"of {limit / 1e9:.1f} GB on the fullest device" + ("" if total <= limit else ": does not fit")
    return {
        "step": (duration(step.value), f"{duration(step.low)} to {duration(step.high)}", False),
        "tokens/s": (si(found.tokens_per_s), f"{si(found.tokens_per_s_per_device)} a device", False),
        "MFU": (MISSING if found.mfu is None else percent(found.mfu), "of the device's nominal peak", False),
        "memory": (f"{total / 1e9:.1f} GB", room, limit is not None and total > limit),
        "training": (duration(view.training_s), f"{si(view.picked.tokens)} tokens, {grouped(view.steps)} steps", False),
        "cost": _cost(view),
    }


def dollars(usd: float) -> str:
    """1234567 → $1.23 M."""
    return f"${usd:,.2f}" if usd < 100 else f"${usd:,.0f}" if usd < 999_500 else f"${si(usd)}"


def _cost(view: View) -> tuple[str, str, bool]:
    energy = "" if view.kwh is None else f", {si(view.kwh * 1e3, 'Wh')}"
    if view.cost is None:
        return MISSING, f"no price is known; give one{energy}", False
    rate = view.cost.rate.usd_per_hour
    return dollars(view.cost.usd), f"${rate:,.2f} a device and hour{energy}", False
