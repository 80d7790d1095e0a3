"""What `moestro place` prints: each placement beside the one that one has without."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moestro.cli.shown import console_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from moestro.config.plan import Plan, Workload
    from moestro.hardware.curves.optical import Floats, OpticalTier
    from moestro.plan.ilp.balance import Balanced
    from moestro.plan.ilp.circuits import Laid
    from moestro.plan.ilp.replicas import Layer
    from moestro.plan.mixed_choice import Choice
    from moestro.plan.regions import Choice as Regions
    from moestro.plan.regions import Placed
    from moestro.predict.target import Target
    from moestro.predict.words import Prediction

WIDTH = 130
MOST_ROWS = 12  # layers that are all shown
MOST_SERVERS = 16  # whose circuits are shown one by one
NEAR = 1e-4  # of a gap that is told


def print_experts(
    layers: "Sequence[Layer]", experts: int, devices: int, nodes: int, steps: "Mapping[str, Prediction]"
) -> None:
    from moestro.report.text import plural

    places, console = len(layers[0].experts.experts), console_of(WIDTH)
    where = f"{plural(devices, 'device')}{f' in {nodes} nodes' if nodes > 1 else ''}"
    heading = f"{plural(len(layers), 'layer')} of {plural(experts, 'expert')} in {places:,} places on {where}"
    console.print(heading, style="bold")
    console.print("the busiest device's load over the mean\n", style="dim")
    table = _table("layer", "in order", "balancer", "placed", "at least", "busiest expert has")
    shown = sorted(range(len(layers)), key=lambda n: -layers[n].before)[:MOST_ROWS]
    for number in sorted(shown):
        one = layers[number]
        copies = one.experts.experts.tolist()
        most = max(copies.count(expert) for expert in set(copies))
        values = (one.before, one.balanced, one.after, one.bound)
        table.add_row(str(number), *(f"{value:.3f}" for value in values), plural(most, "replica"))
    if len(layers) > 1:
        means = [sum(getattr(one, name) for one in layers) / len(layers) for name in _LOADS]
        table.add_row("mean", *(f"{value:.3f}" for value in means), style="bold")
    console.print(table)
    if len(layers) > MOST_ROWS:
        console.print(f"the {MOST_ROWS} most uneven of {len(layers)} layers, and the mean of all", style="dim")
    _print_gap(console, max(one.gap for one in layers), "a layer's busiest device", "a longer --limit may tell")
    _print_steps(console, steps)


_LOADS = ("before", "balanced", "after", "bound")


def _print_steps(console: "Console", steps: "Mapping[str, Prediction]") -> None:
    from moestro.report.text import duration

    if not steps:
        return
    first = steps["in order"]
    table = _table("experts", "step", "faster", "memory")
    for name, found in steps.items():
        table.add_row(
            name, duration(found.step_s.value), f"{first.step_s.value / found.step_s.value - 1:+.1%}",
            f"{found.memory.total / 1e9:.1f} GB", style="bold" if name == "placed" else "",
        )  # fmt: skip
    console.print()
    console.print(table)
    console.print("replicas are priced as further experts; summing their gradients is not priced", style="dim")


def layers_tree(found: "Balanced") -> dict[str, Any]:
    def tree(plan: "Plan", one: "Prediction") -> dict[str, Any]:
        return {"plan": plan.model_dump(mode="json"), "step_s": one.step_s.value, "memory_by_rank": one.memory_by_rank}

    even = None if found.even is None else tree(*found.even)
    return {"even": even, "placed": tree(found.plan, found.step), "gap": found.gap}


def print_layers(name: str, found: "Balanced", workload: "Workload", target: "Target") -> None:
    from moestro.report.text import duration

    console, plan = console_of(WIDTH), found.plan
    head = f"{name} on {plan.world_size:,} × {target.place.device.name}, {plan.pp} pipeline ranks"
    console.print(f"{head}{f' of {plan.vpp} chunks' if plan.vpp > 1 else ''}", style="bold")
    console.print(f"priced by: {target.profile}\n", style="dim")
    ways = [("even", *found.even)] if found.even is not None else []
    ways.append(("placed", found.plan, found.step))
    table = _table("rank")
    for way, *_ in ways:
        for column in (f"{way}: layers", "recomputed", "reserved"):
            table.add_column(column, justify="right")
    for rank in range(plan.pp):
        cells = [str(rank)]
        for _, one, step in ways:
            sizes, again = _layers_of(one, workload, rank)
            cells += [sizes, again, f"{step.memory_by_rank[rank] / 1e9:.1f} GB"]
        table.add_row(*cells)
    table.add_row(
        "step", *(cell for _, _, step in ways for cell in (duration(step.step_s.value), "", "")), style="bold"
    )
    console.print(table)
    if found.even is None:
        console.print("with layers as even as they come out nothing fits, however it is recomputed", style="dim")
    else:
        faster = found.even[1].step_s.value / found.step.step_s.value - 1
        told = (
            f"{faster:.1%} faster, simulated pass by pass" if faster > NEAR else "no placement that was found is faster"
        )
        needed = f"{found.step.memory.needed / 1e9:.1f} GB needed on the fullest device, the rest is fragments"
        console.print(f"{told}; {needed}", style="dim")
    _print_gap(console, found.gap, "the pipeline's closed form", "a longer --limit may tell")


def _layers_of(plan: "Plan", workload: "Workload", rank: int) -> tuple[str, str]:
    """Of a rank's stages, layers and how many of them are recomputed."""
    from moestro.graph.count import count_step

    graph = count_step(workload, plan)
    own = [stage for stage in graph.stages if stage.rank == rank]
    again = [sum(run.recomputed for run in stage.pieces) for stage in own]
    return "+".join(str(len(stage.layers)) for stage in own), "+".join(map(str, again)) if any(again) else ""


def print_mixed(name: str, found: "Choice", workload: "Workload", target: "Target", top: int) -> None:
    from moestro.report.text import duration, percent

    console = console_of(WIDTH)
    kinds = " and ".join(f"{kind.devices} × {kind.name}" for kind in found.kinds)
    console.print(f"{name} on {kinds}, {workload.global_batch_size} sequences of {workload.seq_len:,}", style="bold")
    console.print(f"priced by: {target.profile}\n", style="dim")
    table = _table("a sequence, forward, on one device", "attention of a layer", "experts", "sent, one way")
    for kind in found.kinds:
        table.add_row(kind.name, _ms(kind.sides.attention_s), _ms(kind.sides.experts_s), _ms(kind.sent_s))
    console.print(table)
    console.print()
    best = found.apart[0].step_s
    table = _table("layers, embedding and head of a step", "time", "to the best apart", "busy: attention", "experts",
                   "experts given over")  # fmt: skip
    table.columns[0].justify = "left"
    for one in found.apart[:top]:
        mixed = one.mixed
        words = f"attention on {mixed.attention_devices} {one.attention_on}, experts on {mixed.expert_devices} "
        table.add_row(
            words + one.experts_on, duration(one.step_s), f"{one.step_s / best:.2f}", percent(one.attention),
            percent(one.experts), f"{sum(one.given)} of {mixed.per_device * len(one.given)}",
            style="bold" if one is found.apart[0] else "",
        )  # fmt: skip
    both = " and ".join(f"{n} on {kind.name}" for n, kind in zip(found.layers, found.kinds, strict=True))
    others = [("experts over all devices", found.uniform_s), ("the same, were work shared out by speed", found.ideal_s),
              (f"a pipeline, layers {both}", found.pipeline_s)]  # fmt: skip
    others += [(f"{kind.name} alone", s) for kind, s in zip(found.kinds, found.alone_s, strict=True)]
    for words, seconds in others:
        table.add_row(words, duration(seconds), f"{seconds / best:.2f}")
    console.print(table)
    given = " ".join(map(str, found.apart[0].given))
    console.print(
        f"each expert device of the best gives over {given} of its layers' experts; {found.apart[0].micro_batches} "
        "micro-batches go through together\nreduction of gradients, optimizer and host left out; exchanges by each "
        "device's share of the NICs",
        style="dim",
    )


def regions_tree(found: "Regions") -> dict[str, Any]:
    def tree(one: "Placed | None") -> dict[str, Any] | None:
        if one is None:
            return None
        return {
            "regions": one.stages(), "plan": one.plan.model_dump(mode="json"), "step_s": one.step_s,
            "memory_by_rank": one.prediction.memory_by_rank, "fits": one.fits,
        }  # fmt: skip

    rest = [tree(one) for one in found.others]
    return {"naive": tree(found.naive), "deeper": tree(found.deeper), "best": tree(found.best), "others": rest}


def print_regions(name: str, found: "Regions", target: "Target") -> None:
    from moestro.report.text import duration

    console = console_of(WIDTH)
    console.print(f"{name} over {', '.join(found.best.regions)}", style="bold")
    console.print(f"priced by: {target.profile}\n", style="dim")
    table = _table("", "step", "faster", "ranks", "layers", "recomputed", "in flight", "memory")
    table.columns[0].justify = "left"
    base = found.naive or found.best
    rows = [("even layers, plain 1F1B", found.naive), ("more micro-batches in flight", found.deeper),
            ("placed", found.best)]  # fmt: skip
    rows += [(f"else: {' → '.join(one.regions)}", one) for one in found.others]
    for words, one in rows:
        if one is None:
            continue
        plan = one.plan
        table.add_row(
            words + ("" if one.fits else " (does not fit)"), duration(one.step_s),
            "" if one is base else f"{base.step_s / one.step_s:.2f}×",
            ", ".join(f"{count} {region}" for region, count in one.stages().items()),
            "even" if plan.layers_per_stage is None else " ".join(map(str, plan.layers_per_stage)),
            "no" if plan.recompute == "none" else plan.recompute,
            "1F1B" if plan.in_flight is None else " ".join(map(str, plan.in_flight)),
            f"{max(one.prediction.memory_by_rank) / 1e9:.1f} GB", style="bold" if one is found.best else "",
        )  # fmt: skip
    console.print(table)
    step = found.best.prediction.step_s
    console.print(f"how sure: {step.low:.4g} to {step.high:.4g} s: {step.basis}", style="dim")


def circuits_tree(found: "Laid") -> dict[str, Any]:
    from dataclasses import asdict

    return {**asdict(found), "counts": found.counts.tolist(), "gap": found.gap}


def print_circuits(title: str, found: "Laid", demand: "Floats", tier: "OpticalTier") -> None:
    from moestro.report.text import si

    console, servers = console_of(WIDTH), len(found.counts)
    ports = f"{tier.ocs_ports} ports to the optical switch and {tier.eps_ports} for packets"
    console.print(f"{title}: {si(float(demand.sum()), 'B')} among {servers} servers, {ports} each\n", style="bold")
    table = _table("over", "exchange", "times a network that never blocks")
    table.columns[0].justify = "left"
    rows = {"even circuits": found.even_s, "greedy circuits": found.greedy_s, "placed": found.seconds,
            "no circuits are below": found.bound_s, "a network that never blocks": found.unblocked_s}  # fmt: skip
    for words, seconds in rows.items():
        table.add_row(words, _ms(seconds), f"{seconds / found.unblocked_s:.2f}",
                      style="bold" if words == "placed" else "")  # fmt: skip
    console.print(table)
    if servers <= MOST_SERVERS:
        console.print()
        table = _table("circuits", *map(str, range(servers)))
        for server, row in enumerate(found.counts.tolist()):
            table.add_row(str(server), *(str(n) if n else "·" for n in row))
        console.print(table)
    _print_gap(console, found.gap, "the exchange", "a longer --limit may tell")


def _print_gap(console: "Console", gap: float, what: str, remedy: str) -> None:
    if gap > NEAR:
        console.print(f"not proven the best: {what} is at most {gap:.1%} above it; {remedy}", style="dim")


def _ms(seconds: float) -> str:
    from moestro.report.text import duration

    return duration(seconds) if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _table(*columns: str) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, justify="right")
    return table
