"""How well we would have chosen among the layouts that others published: the regret, and the ranks.

    python benchmarks/plan_regret.py [TABLE] [--hold-out] [--worst N] [--json]

Every group of runs that differ in nothing but their layout is one choice. Its regret is the measured time of the layout
that is predicted fastest over that of the best one, less 1; "at random" is what any of them loses on average. TABLE: a
CSV of runs instead of the shipped ones (docs/predicting.md). --hold-out: predict each source with constants fitted to
all others, which takes minutes.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from moestro.plan.regret import Choice, Regrets, choices, regrets, regrets_by
from moestro.plan.why import changes
from moestro.predict.validate import validate


def line(one: Regrets) -> str:
    ranks = " ".join(f"{'' if value is None else f'{value:.2f}':>8}" for value in (one.kendall, one.spearman))
    shares = " ".join(f"{share:>9.1%}" for share in (one.median, one.p90, one.blind))
    return f"{one.name[:44]:<44} {one.choices:>7} {one.layouts:>7} {one.right:>5} {shares} {ranks}"


def told(one: Choice) -> str:
    chosen, best = one.layouts[0], min(one.layouts, key=lambda layout: layout.measured_s)
    ours, theirs = changes(best.plan, chosen.plan), changes(chosen.plan, best.plan)
    return (
        f"{one.regret:6.1%}  {one.model}, {one.num_devices} × {one.device}, of {len(one.layouts)}: "
        f"{' '.join(ours)} takes {chosen.measured_s:.3g} s (predicted {chosen.predicted_s:.3g}), "
        f"{' '.join(theirs)} {best.measured_s:.3g} s (predicted {best.predicted_s:.3g})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", type=Path)
    parser.add_argument("--hold-out", action="store_true")
    parser.add_argument("--worst", type=int, default=5, help="choices to tell one by one")
    parser.add_argument("--json", action="store_true", help="for machines")
    asked = parser.parse_args()
    some = choices(validate(asked.table, hold_out=asked.hold_out).rows)
    if not some:
        raise SystemExit("no two runs of the table differ in nothing but their layout")
    whole, complete = regrets("all", some), [one for one in some if all(layout.complete for layout in one.layouts)]
    groups = [*regrets_by(some, lambda one: one.device), *regrets_by(some, lambda one: one.source)]
    if complete:
        groups.append(regrets("whole configuration published", complete))
    if asked.json:
        print(json.dumps([asdict(one) for one in (*groups, whole)], indent=1))
        return
    head = "choices layouts right    median       p90 at random  kendall spearman"
    print(f"{'':<44} {head}")
    for one in (*groups, whole):
        print(line(one))
    print()
    for choice in sorted(some, key=lambda one: -one.regret)[: asked.worst]:
        print(told(choice))


if __name__ == "__main__":
    main()
