"""Exploring shared memory architectures for end-to-end gigapixel deep learning (Remedios, Cai, Remedios and others;
arXiv 2304.12149).

The claim: a desktop system whose 128 GB are shared by processor and graphics unit trains a small U-Net end to end on
images of 16,000 × 64,000 pixels with more than 100 GB in use, which no single GPU of its time could hold.

What is reproduced here:

* computed: on which devices of the catalog 100 GB fit, and the cheapest (`moestro hardware fits`); what tiles and
  checkpoints ask of smaller devices, on a stack of convolutions of our own that needs as much (the layers of the
  paper's net could not be read); the paper's arithmetic;
* measured on CPU: that stack's memory against its prediction, as live tensors and as resident bytes; gradients tile by
  tile against those of the whole image.

What is not: the training, its Dice of 0.989, and how fast either device would be.
"""

from collections.abc import Sequence

import numpy as np
import torch

from moestro.hardware.catalog import device_ids, load_device
from moestro.hardware.devices import Device
from moestro.hardware.fits import devices_that_fit, usable_bytes
from papers.conv_stack import (
    Layer,
    Stack,
    Tile,
    accumulate,
    build,
    gradients,
    peak_bytes,
    resident_bytes,
    step_flops,
    tiles,
)
from papers.live_bytes import LiveBytes
from papers.resident import resident_peaks
from papers.result import Check, PaperResult, Progress, verdict_of

HEIGHT, WIDTH = 16_000, 64_000
WORKLOAD_BYTES = 100e9
UNIFIED, LARGE, SMALL = "apple-m1-ultra", "a100-sxm-80gb", "rtx-3090"
LAST_YEAR = 2022  # of devices "of its time"

# Nine layers at full resolution, then strides: about 100 GB on the published image.
GIGA = Stack((Layer(2, 7),) * 9 + (Layer(4, 7, 4), Layer(8, 7, 4), Layer(8, 5, 4)))
# For measurements: the rule of `resident_bytes` was found on the first; the last one's channels are no multiple of 8.
MEASURED = {
    "8-8-8-16-16": Stack((Layer(8, 5), Layer(8, 3), Layer(8, 3), Layer(16, 5, 4), Layer(16, 3, 2))),
    "24-8-16-32": Stack((Layer(24, 3), Layer(8, 3), Layer(16, 3, 2), Layer(32, 3, 2))),
    "4-4-8-16-16": Stack((Layer(4, 5), Layer(4, 3), Layer(8, 3), Layer(16, 5, 4), Layer(16, 3, 2))),
}
SIDES = (384, 576, 768)
SAVED_SIDE = 256  # of the image on which checkpoints are measured
SEGMENT = 3  # layers between checkpoints


def run(progress: Progress) -> PaperResult:
    """Everything; about 20 s of CPU time in one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    total = len(MEASURED) + 3
    try:
        resident = {}
        for number, (name, stack) in enumerate(MEASURED.items(), 1):
            resident[name] = resident_peaks(stack, SIDES)
            progress(number, total, "resident memory")
        live = [live_peak(next(iter(MEASURED.values())), side, None) for side in SIDES]
        saved = live_peak(GIGA, SAVED_SIDE, SEGMENT)
        progress(total - 2, total, "live tensors")
        tiled = check_gradients()
        progress(total - 1, total, "gradients")
    finally:
        torch.set_num_threads(threads)
    checks = (
        check_fits(),
        check_tiles(),
        check_shared_pool(),
        check_live(live, saved),
        check_resident(resident),
        tiled,
        check_arithmetic(),
    )
    progress(total, total, "checks")
    figures = {
        f"resident MB: {name}, {side} x {side}": round(value / 1e6, 1)
        for name, values in resident.items()
        for side, value in zip(SIDES, values, strict=True)
    }
    return PaperResult(checks, figures)


# By the catalog.


def check_fits() -> Check:
    """The three devices, and all of the time."""
    devices = [load_device(name) for name in (SMALL, LARGE, UNIFIED)]
    held = [_holds(device, WORKLOAD_BYTES) for device in devices]
    fits = devices_that_fit(WORKLOAD_BYTES)
    of_its_time = [fit.device.id for fit in fits if fit.device.year <= LAST_YEAR]
    cheapest = fits[0]
    sourced = next(fit for fit in fits if fit.device.price.confidence == "read")
    return Check(
        claim="A system with 128 GB shared by host and device trains on images that no GPU of its time could hold",
        published="more than 100 GB in use on an M1 Ultra of 128 GB; an A100 has 80 GB",
        ours="100 GB: " + ", ".join(
            f"{device.id} {'fits' if held_one else 'does not fit'}"
            for device, held_one in zip(devices, held, strict=True)
        ) + f"; of the catalog until {LAST_YEAR}: {', '.join(of_its_time) or 'none'}",
        how="computed",
        verdict=verdict_of((held == [False, False, True], of_its_time == [UNIFIED])),
        note=f"Of {len(device_ids())} devices, processors and announced ones left out; 8 GB of a shared pool are the "
        f"host's. Today {len(fits)} fit; the cheapest with a known price is {cheapest.device.id} at "
        f"{cheapest.usd_per_hour:.2f} USD an hour ({cheapest.basis}, {cheapest.device.price.confidence}), and of "
        f"prices that were read {sourced.device.id} at {sourced.usd_per_hour:.2f} ({sourced.basis}; bought ones over "
        "three years, without power). A package of two dies counts with half, as software shows it.",
    )  # fmt: skip


def _holds(device: Device, size: float) -> bool:
    usable = usable_bytes(device)
    return usable is not None and usable >= size


def check_tiles() -> Check:
    """What smaller devices can do once the image need not be whole, and what it costs."""
    whole = peak_bytes(GIGA, HEIGHT, WIDTH)
    saved = peak_bytes(GIGA, HEIGHT, WIDTH, SEGMENT)
    again = step_flops(GIGA, HEIGHT, WIDTH, again=True) / step_flops(GIGA, HEIGHT, WIDTH)
    cut = {name: fewest_tiles(usable_bytes(load_device(name)) or 0.0) for name in (LARGE, SMALL)}
    ratios = {name: tiled_flops(parts) / tiled_flops(1) for name, parts in cut.items()}
    devices = {name: load_device(name) for name in (LARGE, SMALL)}
    return Check(
        claim="With checkpoints or tiles the same step fits on the GPUs",
        published="not tried: the whole image at once is the point",
        ours=f"{whole / 1e9:.0f} GB; 80 GB: {saved / 1e9:.0f} GB with checkpoints at {again:.2f} × the work, or "
        f"{cut[LARGE]} tiles at {ratios[LARGE]:.3f} ×; 24 GB: {cut[SMALL]} tiles at {ratios[SMALL]:.3f} ×",
        how="computed",
        verdict=verdict_of(
            (
                not _holds(devices[LARGE], whole),
                _holds(devices[LARGE], saved),
                not _holds(devices[SMALL], saved),
                max(ratios.values()) < again,
            )
        ),
        note=f"Nine layers of 2 channels at full resolution and three of stride 4, {GIGA.params:,} parameters. Work: "
        "floating-point operations over those of the plain step; as long as it is bound by them, that is the ratio of "
        f"times. Checkpoints every {SEGMENT} layers make forward twice. Tiles overlap by {GIGA.field - GIGA.stride} "
        "pixels and stay on the host until their turn; moving them is not counted, nor do normalisations over the "
        "whole image allow them.",
    )


def fewest_tiles(limit_bytes: float) -> int:
    """Across the long side, so that the largest fits."""
    parts = 1
    while max(peak_bytes(GIGA, *_sides(tile)) for tile in tiles(GIGA, HEIGHT, WIDTH, 1, parts)) > limit_bytes:
        parts += 1
    return parts


def tiled_flops(parts: int) -> int:
    return sum(step_flops(GIGA, *_sides(tile)) for tile in tiles(GIGA, HEIGHT, WIDTH, 1, parts))


def _sides(tile: Tile) -> tuple[int, int]:
    rows, columns = tile
    return rows.stop - rows.start, columns.stop - columns.start


def check_shared_pool() -> Check:
    """The host's use counts there, and only there."""
    unified, gpu = load_device(UNIFIED), load_device(LARGE)
    used = (8e9, 20e9, 30e9)
    fits = [(usable_bytes(unified, host) or 0.0) >= WORKLOAD_BYTES for host in used]
    same = len({usable_bytes(gpu, host) for host in used}) == 1
    return Check(
        claim="What the host uses is missing from a shared pool, and from no other",
        published="“more than 100 GB” of 128",
        ours="; ".join(
            f"host {host / 1e9:.0f} GB: {'fits' if fit else 'does not fit'}"
            for host, fit in zip(used, fits, strict=True)
        ),
        how="computed",
        verdict=verdict_of((fits == [True, True, False], same)),
        note="100 GB on the M1 Ultra. There is no host memory to offload to beside it.",
    )


# Measured.


def live_peak(stack: Stack, side: int, segment: int | None) -> int:
    """Bytes of tensors alive at most in one step on a square image."""
    model = build(stack, 0)
    with LiveBytes() as live:
        image = torch.rand(1, stack.channels, side, side)
        accumulate(model, image, 1, segment)
    return live.peak


def check_live(live: Sequence[int], saved: int) -> Check:
    name, stack = next(iter(MEASURED.items()))
    misses = [peak_bytes(stack, side, side) / peak - 1 for side, peak in zip(SIDES, live, strict=True)]
    miss = peak_bytes(GIGA, SAVED_SIDE, SAVED_SIDE, SEGMENT) / saved - 1
    return Check(
        claim="The activations' memory is known beforehand, with checkpoints too",
        published="one fp32 channel of the image is 4.1 GB, so that about 25 fill 100 GB (limit: 10 % off)",
        ours=f"{_span(misses)} off at {_list(SIDES)} pixels a side; with checkpoints {miss:+.2%}",
        how="measured",
        verdict=verdict_of(abs(value) <= 0.10 for value in (*misses, miss)),
        note=f"Predicted over measured: bytes of tensors alive at most in a step of batch 1. Channels {name}, and the "
        f"stack of 100 GB with checkpoints every {SEGMENT} layers on {SAVED_SIDE} × {SAVED_SIDE}. Parameters and their "
        "gradients are left out.",
    )


def check_resident(resident: dict[str, list[int]]) -> Check:
    pixels = np.square(np.array(SIDES, dtype=float))
    misses, bends, shares = {}, [], []
    for name, peaks in resident.items():
        stack, measured = MEASURED[name], np.array(peaks, dtype=float)
        predicted = np.array([resident_bytes(stack, side, side) for side in SIDES])
        misses[name] = (predicted / measured - 1).tolist()
        line = np.polyval(np.polyfit(pixels, measured, 1), pixels)
        bends.append(float(np.abs(line / measured - 1).max()))
        shares.append(measured[-1] / peak_bytes(stack, SIDES[-1], SIDES[-1]))
    return Check(
        claim="So is what the system sees, and it grows linearly with the pixels",
        published="activations are everything (limit: 10 % off; linear to 5 %)",
        ours="; ".join(f"{name} {_span(values)}" for name, values in misses.items())
        + f" off; a line fits to {max(bends):.1%}",
        how="measured",
        verdict=verdict_of((*(abs(v) <= 0.10 for values in misses.values() for v in values), max(bends) <= 0.05)),
        note=f"Growth of a fresh process's largest resident size in one step, {_list(SIDES)} pixels a side, one "
        f"thread. It is {min(shares):.2f} to {max(shares):.2f} × the live tensors, because convolutions copy their "
        "input and gradient into an order of their own. Two such copies are predicted; the rule was found on the "
        "first stack. Of five tried, the two it missed had few channels, which are padded, or a stride in the first "
        "layer; one of them is here.",
    )


def check_gradients() -> Check:
    """Whole, in exact tiles, and in tiles that see only their own part."""
    stack = next(iter(MEASURED.values()))
    height, width = 157, 205
    model = build(stack, 0, torch.float64)
    image = torch.rand(1, stack.channels, height, width, dtype=torch.float64)
    whole_loss, whole = gradients(stack, model, image, list(tiles(stack, height, width, 1, 1)))
    loss, tiled = gradients(stack, model, image, exact := list(tiles(stack, height, width, 3, 4)))
    halo = stack.field - stack.stride
    _, blind = gradients(stack, model, image, [_without(tile, halo) for tile in exact])
    error = max(_apart(whole, tiled), abs(loss / whole_loss - 1))
    return Check(
        claim="Tiles with a halo give the gradient of the whole image",
        published="end to end on the whole image",
        ours=f"{error:.0e} apart in 3 × 4 tiles; without the halo {_apart(whole, blind):.0%}",
        how="measured",
        verdict=verdict_of((error <= 1e-10 < _apart(whole, blind),)),
        note=f"Loss and every gradient in fp64, of the largest value of each; {height} × {width} pixels, a halo of "
        f"{halo}. Convolutions without padding: where a layer pads, only the image's own edge may be padded.",
    )


def _without(tile: Tile, halo: int) -> Tile:
    """As a data set cut in pieces would be: the halo that lies in the next tile is missing."""
    rows, columns = tile
    return slice(rows.start, rows.stop - halo), slice(columns.start, columns.stop - halo)


def _apart(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> float:
    return max(((x - y).abs().max() / x.abs().max()).item() for x, y in zip(a, b, strict=True))


# The paper's arithmetic.

STEPS, STEP_S, TOTAL_H = 4940, 81, 111 + 24 / 60
NODE_USD, NODE_DEVICES = 40.96, 8


def check_arithmetic() -> Check:
    hours = STEPS * STEP_S / 3600
    pixels = HEIGHT * WIDTH
    channels = WORKLOAD_BYTES / (pixels * 4)
    hourly = NODE_USD / NODE_DEVICES
    closes = abs(TOTAL_H * 3600 / STEPS - STEP_S) <= 0.5 and round(pixels / 1e9, 3) == 1.024
    return Check(
        claim="Steps, seconds, pixels and prices agree with each other",
        published="4,940 steps, 81 s each, 111 h 24 min; 1.024 Gpx; 40.96 USD an hour for 8 A100",
        ours=f"{hours:.2f} h; {pixels / 1e9:.3f} Gpx; {channels:.1f} fp32 channels of the image are 100 GB; "
        f"{hourly:.2f} USD an A100 and hour, {TOTAL_H * hourly:.0f} USD",
        how="computed",
        verdict="holds" if closes else "arithmetic does not close",
        note=f"{TOTAL_H:.1f} h over {STEPS:,} steps are {TOTAL_H * 3600 / STEPS:.1f} s, which rounds to {STEP_S}. "
        f"{pixels / STEP_S / 1e6:.1f} Mpx a second. The price is what one A100 would cost for as long, were it equally "
        "fast; it could not hold the job.",
    )


def _list(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


def _span(values: Sequence[float]) -> str:
    return f"{min(values):+.1%} to {max(values):+.1%}"
