"""What `moestro size grow` reads and prints."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moestro.cli.shown import console_of
from moestro.errors import MoestroError

if TYPE_CHECKING:
    from moestro.plan.growth import Growth, Stage
    from moestro.predict.target import Target


def parse_stages(texts: Sequence[str]) -> list[tuple[int, float]]:
    """Of "8:0.235" the number of experts and the share of the tokens.

    Raises:
        MoestroError: it is not that.
    """
    found = []
    for text in texts:
        experts, _, share = text.partition(":")
        try:
            found.append((int(experts), float(share)))
        except ValueError as error:
            raise MoestroError(
                f"'{text}' is no stage; write experts and their share of the tokens, as 8:0.25"
            ) from error
    return found


def print_growth(name: str, found: "Growth", target: "Target") -> None:
    from moestro.cli.size_tables import WIDTH, _params, _table
    from moestro.plan.why import changes
    from moestro.report.text import duration, grouped, percent

    console = console_of(WIDTH)
    console.print(
        f"{name} on {found.devices:,} × {target.place.device.name}, experts grown", style="bold", markup=False
    )
    console.print(f"priced by: {target.profile}; the fastest plan of each stage\n", style="dim", markup=False)
    table = _table("experts", "tokens", "parameters", "step", "of the last", "memory")
    table.add_column("plan", overflow="fold")
    last = found.stages[-1]
    for number, one in enumerate(found.stages):
        plan = " ".join(_told(one)) if number == 0 else " ".join(changes(found.stages[0].plan, one.plan)) or "the same"
        table.add_row(
            str(one.experts), percent(one.share), _params(one.total_params), duration(one.step_s),
            percent(one.step_s / last.step_s), f"{one.held_bytes / 1e9:.1f} GB", plan,
        )  # fmt: skip
    console.print(table)
    hours = f"{grouped(round(found.hours))} device hours instead of {grouped(round(found.whole_hours))}"
    console.print(
        f"\ngrowing saves {percent(found.saving)}: {hours} with {last.experts} experts throughout", markup=False
    )
    console.print(
        f"{percent(found.most_saving)} at most, were every stage but the last as fast as the first. {found.steps:,} "
        "steps; warm-ups after growth and what growing does to the loss are not predicted.",
        style="dim",
        markup=False,
    )  # fmt: skip


def _told(stage: "Stage") -> list[str]:
    from moestro.config.plan import Plan
    from moestro.plan.why import changes

    return changes(Plan(), stage.plan) or ["one device"]


def growth_tree(found: "Growth") -> dict[str, Any]:
    """Plain data."""
    rows = [
        {
            "experts": one.experts,
            "share": one.share,
            "total_params": one.total_params,
            "step_s": one.step_s,
            "held_bytes": one.held_bytes,
            "plan": one.plan.model_dump(mode="json", exclude_defaults=True),
        }
        for one in found.stages
    ]
    totals = {"device_hours": found.hours, "whole_device_hours": found.whole_hours, "saving": found.saving}
    return {"stages": rows, "steps": found.steps, "devices": found.devices, **totals}
