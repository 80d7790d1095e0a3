"""The round values that a slider goes through for a number that can be anything."""

from bisect import bisect_left
from collections.abc import Sequence

from moestro.ui.offer import Offer
from moestro.ui.picked import LEAST_SEQ, MOST_BATCH, MOST_SEQ, Picked

LOWER, HIGHER = 6, 6  # times that the written batch is halved and doubled
TOKENS = (*(m * 10.0**e for e in range(9, 14) for m in (1, 1.5, 2, 3, 5, 7)), 1e14)
USD = tuple(sorted(m * 10.0**e for e in (-1, 0, 1) for m in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8)))


def ladder(name: str, picked: Picked, offer: Offer) -> tuple[float, ...]:
    """In ascending order. Lengths and devices in powers of two, batches in halves and doubles of what is written down,
    so that what divided them still does."""
    match name:
        case "devices":
            most = offer.devices(picked.hardware)[1]
            return tuple(sorted({*(2**i for i in range(most.bit_length())), most}))
        case "seq_len":
            return tuple(2**i for i in range(LEAST_SEQ.bit_length() - 1, MOST_SEQ.bit_length()))
        case "global_batch_size":
            written = offer.workload(picked.run).global_batch_size
            halves = [written // 2**i for i in range(LOWER, 0, -1) if written % 2**i == 0]
            return tuple(n for n in (*halves, *(written * 2**i for i in range(HIGHER))) if n <= MOST_BATCH)
        case "tokens":
            return TOKENS
        case "usd_per_hour":
            return USD
    raise ValueError(name)


def nearest_place(steps: Sequence[float], value: float) -> int:
    """Of the value nearest to this one."""
    after = bisect_left(steps, value)
    if after == 0:
        return 0
    if after == len(steps):
        return len(steps) - 1
    return after if steps[after] - value < value - steps[after - 1] else after - 1
