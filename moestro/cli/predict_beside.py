"""What `moestro predict` tells beside a step: simulated, served, taken apart, or held against a step that ran here."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from moestro.errors import MoestroError

if TYPE_CHECKING:
    from moestro.config import Config
    from moestro.config.plan import Plan, Workload
    from moestro.predict.simulate import Simulation
    from moestro.predict.target import Target
    from moestro.predict.words import TimeBreakdown


class Beside(NamedTuple):
    """tree: for machines, under this name. show: prints it for people."""

    name: str
    tree: dict[str, Any]
    show: Callable[[], None]


def simulated(
    slow: Sequence[str], workload: "Workload", plan: "Plan", target: "Target", composed_s: float
) -> "tuple[Simulation, Beside]":
    """Of --simulate and --slow. composed_s: the step as it is predicted without the simulation."""
    from moestro.cli.predict_simulated import parse_slow, print_simulated, simulated_tree
    from moestro.predict.simulate import simulate_on

    slower = parse_slow(slow)
    found = simulate_on(workload, plan, target, slower)
    show = partial(print_simulated, found, composed_s, slower)
    return found, Beside("simulated", simulated_tree(found, composed_s), show)


def serving(text: str, workload: "Workload", plan: "Plan", target: "Target", usd_per_hour: float | None) -> Beside:
    """Of --serving, on the devices of the plan."""
    from moestro.cli.predict_serving import print_serving, serving_tree
    from moestro.predict.service import parse_demand, serve, widths

    demand, tp = parse_demand(text)
    found = serve(workload, target, plan.world_size, demand, tp, usd_per_hour)
    others = widths(workload, plan, target, found)
    return Beside("serving", serving_tree(found, others), partial(print_serving, found, others))


def disaggregated(text: str, time: "TimeBreakdown", devices: int) -> Beside:
    """Of --disaggregate: the split given, or the best."""
    from moestro.cli.predict_serving import disaggregated_tree, print_disaggregated
    from moestro.predict.disaggregate import best_split, parse_split, work_of

    work = work_of(time)
    split = parse_split(text, devices) or best_split(work, devices)
    return Beside("disaggregate", disaggregated_tree(work, split), partial(print_disaggregated, work, split))


def oracle(config: "Config", plan_values: Mapping[str, Any], target: "Target", ranks: int) -> Beside:
    """Of --oracle: the step is run."""
    from moestro.cli.predict_oracle import as_tree, print_split
    from moestro.predict.oracle import measure_and_split

    if plan_values:
        raise MoestroError("--oracle runs the trainer's own layout: give parallel.* and train.*, not plan.*")
    found = measure_and_split(config, target, ranks)
    return Beside("oracle", as_tree(found), partial(print_split, found))
