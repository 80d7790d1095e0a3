"""What `moestro size` prints."""

from typing import TYPE_CHECKING, Any

from moestro.cli.shown import console_of
from moestro.report.text import MISSING, duration, grouped, percent, plural, si

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.table import Table

    from moestro.config.model import ModelConfig
    from moestro.config.plan import Plan, Workload
    from moestro.hardware.fits import Fit
    from moestro.plan.alignment import Alignment
    from moestro.plan.budget import Budget as Memory
    from moestro.plan.rates import Rate, RateLaw
    from moestro.plan.shape_search import Budget, Found, Shape
    from moestro.plan.size import Finding, Lint, Product
    from moestro.plan.width import Widths
    from moestro.predict.target import Target

WIDTH = 118
CHEAPEST = 4  # devices told


def print_lint(
    name: str, found: "Lint", workload: "Workload", plan: "Plan", target: "Target", alignment: "Alignment"
) -> None:  # fmt: skip
    console = console_of(WIDTH)
    _head(console, name, plan, target)
    rows = f"micro-batches of {plan.micro_batch_size} × {grouped(workload.seq_len)} tokens in {workload.precision}"
    mfu = "" if found.priced.mfu is None else f", MFU {percent(found.priced.mfu)}"
    console.print(f"{rows}: {duration(found.priced.step_s)} a step{mfu}", style="dim", markup=False)
    console.print(f"alignment: {alignment.basis}", style="dim", markup=False)
    console.print(f"knee: {found.knee_flops / 1e9:,.0f} GFLOP a product ({found.basis})\n", style="dim", markup=False)
    shape, batch = found.of("shape"), found.of("batch")
    if shape:
        console.print(_finding_table("the shape", shape))
    else:
        console.print("the shape: nothing to find fault with", style="green", markup=False)
    if batch:
        console.print()
        console.print(_finding_table("more tokens in a micro-batch would mend", batch))
    if found.products:
        console.print()
        console.print(_product_table(found.products))
    console.print(
        "loss: how much longer the step is, predicted, than with that size mended and the same work done; of products, "
        "than if they ran at the rate of large ones.",
        style="dim",
        markup=False,
    )


def _finding_table(title: str, findings: "Sequence[Finding]") -> "Table":
    table = _table(title)
    table.add_column("loss", justify="right", no_wrap=True)
    table.add_column("instead", overflow="fold")
    for one in findings:
        table.add_row(one.what, percent(one.loss), one.advice)
    return table


def _product_table(products: "Sequence[Product]") -> "Table":
    table = _table("products, forward", "tokens × out × in", "GFLOP", "of the step", "of the best", "waves full")
    for one in products:
        shape = f"{one.m:,.0f} × {one.n:,} × {one.k:,}"
        many = f"{one.groups} × " if one.groups > 1 else ""
        table.add_row(
            f"{one.part}: {one.name}", many + shape, f"{one.flops / 1e9:,.0f}", percent(one.share),
            percent(one.of_best / one.slower), percent(one.waves),
        )  # fmt: skip
    return table


def print_search(name: str, found: "Found", budget: "Budget", target: "Target", alignment: "Alignment") -> None:
    console = console_of(WIDTH)
    console.print(f"{name} within {_limit(budget)}, on {target.place.device.name}", style="bold", markup=False)
    console.print(f"priced by: {target.profile}; alignment {alignment.basis}", style="dim", markup=False)
    console.print(f"{plural(found.tried, 'shape')} of as many parameters priced\n", style="dim", markup=False)
    table = _table("", "hidden", "layers", "heads", "dense", "experts", "total", "active")
    for column in (_unit(budget), "tokens/s", "MFU", "memory"):
        table.add_column(column, justify="right")
    naive = found.naive.priced.tokens_per_s_per_device
    rows = [("scaled", found.naive), ("and rounded", found.rounded)]
    rows += [(str(number), shape) for number, shape in enumerate(found.best, 1)]
    for label, shape in rows:
        gain = shape.priced.tokens_per_s_per_device / naive - 1
        speed = f"{si(shape.priced.tokens_per_s_per_device)} {f'{gain:+.0%}' if label != 'scaled' else '':>5}"
        own = shape.priced
        table.add_row(
            label, *_sizes(shape.model), _params(shape.counts.total_params), _params(shape.counts.active_params),
            _spent(shape, budget), speed, MISSING if own.mfu is None else percent(own.mfu),
            f"{own.needed_bytes / 1e9:.1f} GB{'' if own.fits is not False else ' !'}",
            style="bold" if label == "1" else None,
        )  # fmt: skip
    console.print(table)
    if not found.best:
        console.print("no aligned shape of as many parameters is within the budget; a larger --ratios", style="yellow")
    console.print(
        "scaled: the preset's widths and depth times one factor, as they come out; all others are within 3 % of its "
        "parameters, all and active. What depth and width do to the loss is not predicted. ! does not fit the device.",
        style="dim",
        markup=False,
    )


def _sizes(model: "ModelConfig") -> list[str]:
    moe = model.moe
    experts = MISSING
    if moe is not None:
        k = model.top_k_of_layer(model.moe_blocks.index(True))
        experts = f"{k} of {moe.resolved_num_experts} × {moe.resolved_expert_hidden_size:,}"
    dense = MISSING if model.intermediate_size is None or all(model.moe_layers) else f"{model.intermediate_size:,}"
    heads = f"{model.num_heads}/{model.resolved_num_kv_heads}"
    return [f"{model.hidden_size:,}", str(model.num_layers), heads, dense, experts]


def _limit(budget: "Budget") -> str:
    if budget.kind == "params":
        return f"{_params(budget.limit)} parameters"
    if budget.kind == "flops":
        return f"{si(budget.limit, 'FLOPs')} a trained token"
    if budget.kind == "memory":
        return f"{budget.limit / 1e9:g} GB a device in training"
    return f"{budget.limit * 1e3:g} ms a decoding step of {plural(budget.batch, 'sequence')}"


def _unit(budget: "Budget") -> str:
    return {"params": "decoding", "flops": "FLOPs/token", "memory": "decoding", "latency": "decoding"}[budget.kind]


def _spent(shape: "Shape", budget: "Budget") -> str:
    return si(shape.spent) if budget.kind == "flops" else f"{shape.decode_s * 1e3:.3g} ms"


def shape_tree(shape: "Shape") -> dict[str, Any]:
    """Plain data."""
    own = shape.priced
    return {
        "model": shape.model.model_dump(mode="json", exclude_defaults=True),
        "total_params": shape.counts.total_params,
        "active_params": shape.counts.active_params,
        "train_flops_per_token": shape.counts.train_flops_per_token,
        "step_s": own.step_s,
        "tokens_per_s_per_device": own.tokens_per_s_per_device,
        "mfu": own.mfu,
        "needed_bytes": own.needed_bytes,
        "fits": own.fits,
        "spent": shape.spent,
        "decode_s": shape.decode_s,
    }


def print_widths(name: str, found: "Widths", target: "Target") -> None:
    console = console_of(WIDTH)
    console.print(f"{name} on {target.place.device.name}: width of experts", style="bold", markup=False)
    decoding = (
        f"{plural(found.batch, 'sequence')} of {grouped(found.context)} tokens on {plural(found.replica, 'device')}"
    )
    console.print(f"priced by: {target.profile}; decoding {decoding} together\n", style="dim", markup=False)
    table = _table("  active experts", "total", "tokens/s", "MFU", "tokens each", "of peak")
    for column in ("decoding", "touched", f"ranks of {found.ranks}", "sent a token"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in found.choices:
        mark = "*" if one.best else " "
        table.add_row(
            f"{mark} {one.top_k} of {one.experts} × {one.width:,}", _params(one.total_params), si(one.tokens_per_s),
            MISSING if one.mfu is None else percent(one.mfu), f"{one.tokens_per_expert:,.0f}", percent(one.of_peak),
            f"{one.decode_s * 1e3:.3g} ms", f"{one.experts_touched:.1f}", f"{one.ranks_reached:.2f}",
            f"{one.dispatch_bytes / 1e3:,.1f} kB",
            style="bold" if one is found.chosen else None,
        )  # fmt: skip
    console.print(table)
    console.print("* no other is as large, trains as fast and decodes as soon", style="dim", markup=False)
    style = "green" if found.chosen is not None else "yellow"
    chosen = found.chosen
    label = "" if chosen is None else f"{chosen.top_k} of {chosen.experts} × {chosen.width:,}: "
    console.print(f"\n{label}{found.why}", style=style, markup=False)
    console.print(
        "All have the same active parameters. tokens/s: of training, a device; tokens each: of a micro-batch, an "
        "expert. Decoding is a lower bound. Sent: there and back in one layer, once a rank. Finer experts learn more "
        "for their FLOPs (arXiv 2506.02890), which is not predicted.",
        style="dim",
        markup=False,
    )


def print_rates(law: "RateLaw", rates: "Sequence[Rate]", notes: "Sequence[str]") -> None:
    from moestro.plan.rates import FAR

    console = console_of(WIDTH)
    sizes = ", ".join(f"{_params(size)}: {rate:.3g}" for size, rate in law.points)
    console.print(f"ln lr = {law.slope:.4f} · ln params {law.intercept:+.4f}", style="bold", markup=False)
    console.print(f"through {sizes}; off the line by {law.spread:.1%}", style="dim", markup=False)
    for note in notes:
        console.print(note, style="yellow", markup=False)
    console.print()
    table = _table("parameters", "learning rate", "four of five within", "weight decay", "of the largest size")
    for rate in rates:
        interval = f"{rate.low:.2e} to {rate.high:.2e}"
        table.add_row(
            _params(rate.params), f"{rate.lr:.2e}", interval, f"{rate.weight_decay:.1e}", f"{rate.beyond:.3g} ×"
        )
    console.print(table)
    if any(rate.beyond > FAR for rate in rates):
        console.print(
            f"more than {FAR:g} times the largest size tried: a hint, whatever the interval says", style="yellow"
        )
    console.print(
        "The interval holds if the line does, and batch, schedule and data stay as they were. Weight decay, 0.1 · "
        "rate, is the share that a step takes off a weight: as AdamW multiplies by the rate, optim.weight_decay = 0.1.",
        style="dim",
        markup=False,
    )


def print_budget(name: str, found: "Memory", workload: "Workload", plan: "Plan", target: "Target") -> None:
    from moestro.hardware.fits import devices_that_fit

    console = console_of(WIDTH)
    _head(console, name, plan, target)
    limit = f"{found.limit_bytes / 1e9:.1f} GB may be needed"
    console.print(f"as it is: {found.needed_bytes / 1e9:.1f} GB; {limit}\n", style="dim", markup=False)
    table = _table("recomputation", "largest micro-batch", "longest context", "largest model", "tokens/s, each")
    for recompute in dict.fromkeys(row.recompute for row in found.rows):
        own = {row.what: row for row in found.rows if row.recompute == recompute}
        rates = [own[what].priced for what in ("batch", "context", "model")]
        speeds = " / ".join(MISSING if rate is None else si(rate.tokens_per_s_per_device) for rate in rates)
        cells = [
            plural(own["batch"].size, "sequence"),
            f"{grouped(own['context'].size)} tokens",
            _params(own["model"].size),
        ]
        more = [own[what].more for what in ("batch", "context", "model")]
        cells = [MISSING if cell.startswith("0") else cell for cell in cells]
        cells = [f"{cell} or more" if further else cell for cell, further in zip(cells, more, strict=True)]
        table.add_row(recompute, *cells, speeds)
    console.print(table)
    console.print(
        f"As it is: micro-batches of {plan.micro_batch_size} × {grouped(workload.seq_len)} tokens, recomputation "
        f"{plan.recompute}. Each cell takes one size as far as it goes and leaves the others; contexts have "
        "micro-batches of 1, and models are the preset's widths and depth scaled.",
        style="dim",
        markup=False,
    )
    fits = devices_that_fit(found.needed_bytes)
    if fits and plan.world_size == 1:
        smallest = min(fits, key=lambda fit: fit.usable_bytes)
        console.print(f"\nsmallest that holds the run as it is: {_device(smallest)}", markup=False)
        cheapest = ", ".join(_device(fit) for fit in fits[:CHEAPEST])
        console.print(f"cheapest that hold it: {cheapest}", markup=False)


def _device(fit: "Fit") -> str:
    price = "price unknown" if fit.usd_per_hour is None else f"${fit.usd_per_hour:.2f}/h {fit.basis}"
    return f"{fit.device.name} ({fit.usable_bytes / 1e9:.0f} GB, {price})"


def budget_tree(found: "Memory", plan: "Plan") -> dict[str, Any]:
    """Plain data; of a plan of one device also those on one of which the run as it is fits, the cheapest first."""
    from moestro.hardware.fits import devices_that_fit

    rows = [
        {
            "what": row.what,
            "recompute": row.recompute,
            "size": row.size,
            "or_more": row.more,
            "needed_bytes": None if row.priced is None else row.priced.needed_bytes,
            "tokens_per_s_per_device": None if row.priced is None else row.priced.tokens_per_s_per_device,
            "model": row.workload.model.model_dump(mode="json", exclude_defaults=True) if row.what == "model" else None,
        }
        for row in found.rows
    ]
    devices = [
        {"id": fit.device.id, "usable_bytes": fit.usable_bytes, "usd_per_hour": fit.usd_per_hour, "basis": fit.basis}
        for fit in devices_that_fit(found.needed_bytes)
    ]
    needs = {"limit_bytes": found.limit_bytes, "needed_bytes": found.needed_bytes}
    return {**needs, "rows": rows, **({"devices_that_hold_it": devices} if plan.world_size == 1 else {})}


def _head(console: "Console", name: str, plan: "Plan", target: "Target") -> None:
    console.print(f"{name} on {plan.world_size:,} × {target.place.device.name}", style="bold", markup=False)
    console.print(f"priced by: {target.profile}", style="dim", markup=False)


def _table(first: str, *columns: str) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(first, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _params(number: float) -> str:
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if number >= 0.9995 * scale:
            return f"{number / scale:.3g}\u00a0{unit}"
    return grouped(number)
