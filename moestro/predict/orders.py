"""In which order each pipeline rank runs its forward (F), input-gradient (B) and weight-gradient (W) passes.

1F1B: Megatron (2104.04473); interleaved: the same; zero bubble: ZB-H1 and ZB-V (2401.10241, 2405.15362); DualPipe and
its V-shaped half: DeepSeek-V3 (2412.19437) and its public code's phases. Written anew from their descriptions.
"""

from collections.abc import Callable
from typing import NamedTuple

from moestro.errors import MoestroError


class Pass(NamedTuple):
    """One pass of one micro-batch through one stage. pair: it runs together with the next entry of the list."""

    kind: str  # F, B, W
    stage: int
    micro_batch: int
    pair: bool = False


Order = list[Pass]
SPLIT_BACKWARD = ("zero_bubble", "zbv", "dualpipe", "dualpipev")


def pipeline_orders(schedule: str, pp: int, vpp: int, micro_batches: int) -> list[Order]:
    """The passes of each rank. Stages are numbered through the model; `stage_ranks` says where they lie.

    DualPipe runs half of the micro-batches from either end, so each rank has two copies of stages: those of the second
    direction are numbered pp … 2 pp - 1, from the last rank to the first.

    Raises:
        MoestroError: the schedule needs another number of micro-batches, chunks or ranks; the message says which.
    """
    if schedule not in _MAKERS:
        raise MoestroError(f"no schedule '{schedule}'; known are {', '.join(_MAKERS)}")
    need = {"zbv": 2, "dualpipev": 2, "gpipe": 1, "1f1b": 1, "dualpipe": 1}.get(schedule)
    if need is not None and vpp != need:
        raise MoestroError(
            f"schedule {schedule} has {need} chunk{'s' * (need > 1)} of layers on a rank, not vpp = {vpp}"
        )
    if schedule == "interleaved" and micro_batches % pp:
        raise MoestroError(f"schedule interleaved needs micro-batches in multiples of pp = {pp}, not {micro_batches}")
    least = {"dualpipe": 2 * pp, "dualpipev": 2 * pp, "zbv": 1}.get(schedule, 1)
    if micro_batches < least:
        raise MoestroError(
            f"schedule {schedule} on {pp} ranks needs {least} micro-batches or more, not {micro_batches}"
        )
    if schedule == "dualpipe" and (pp % 2 or micro_batches % 2):
        raise MoestroError("schedule dualpipe needs an even number of ranks and of micro-batches")
    return [_MAKERS[schedule](rank, pp, vpp, micro_batches) for rank in range(pp)]


def stage_ranks(schedule: str, pp: int, vpp: int) -> list[int]:
    """The rank of every stage that `pipeline_orders` names."""
    if schedule in ("zbv", "dualpipev"):
        return [*range(pp), *reversed(range(pp))]
    if schedule == "dualpipe":
        return [*range(pp), *reversed(range(pp))]
    return [stage % pp for stage in range(pp * vpp)]


def next_stage(schedule: str, pp: int, vpp: int, stage: int) -> int | None:
    """The stage that takes this one's output."""
    if schedule == "dualpipe":
        return None if stage in (pp - 1, 2 * pp - 1) else stage + 1
    return None if stage == pp * vpp - 1 else stage + 1


def _gpipe(rank: int, pp: int, vpp: int, m: int) -> Order:
    return [Pass("F", rank, i) for i in range(m)] + [Pass("B", rank, i) for i in range(m)]


def _one_f_one_b(rank: int, pp: int, vpp: int, m: int) -> Order:
    return one_f_one_b(rank, pp - rank, m)


def one_f_one_b(stage: int, held: int, m: int) -> Order:
    """Forward and backward passes in turns, once `held` of `m` micro-batches are in flight."""
    warm = min(held, m) - 1
    order = [Pass("F", stage, i) for i in range(warm)]
    for i in range(m - warm):
        order += [Pass("F", stage, warm + i), Pass("B", stage, i)]
    return order + [Pass("B", stage, i) for i in range(m - warm, m)]


def _interleaved(rank: int, pp: int, vpp: int, m: int) -> Order:
    """Micro-batches go round in groups of pp, each group through all chunks before the next."""
    total = m * vpp

    def forward(k: int) -> Pass:
        group, inside = divmod(k, pp * vpp)
        return Pass("F", (inside // pp) * pp + rank, group * pp + inside % pp)

    def backward(k: int) -> Pass:
        group, inside = divmod(k, pp * vpp)
        return Pass("B", (vpp - 1 - inside // pp) * pp + rank, group * pp + inside % pp)

    warm = total if m == pp else min((pp - rank - 1) * 2 + (vpp - 1) * pp, total)
    order = [forward(k) for k in range(warm)]
    for k in range(total - warm):
        order += [forward(warm + k), backward(k)]
    return order + [backward(k) for k in range(total - warm, total)]


def _zero_bubble(rank: int, pp: int, vpp: int, m: int) -> Order:
    """ZB-H1: 1F1B (or interleaved) whose weight gradients wait by the rank's number, to fill the end."""
    base = _one_f_one_b(rank, pp, 1, m) if vpp == 1 else _interleaved(rank, pp, vpp, m)
    order, waiting = Order(), Order()
    for item in base:
        order.append(item)
        if item.kind == "B":
            waiting.append(Pass("W", item.stage, item.micro_batch))
            if len(waiting) > rank:
                order.append(waiting.pop(0))
    return order + waiting


class _Counted:
    """Hands out the micro-batches of each kind of pass on a rank's two chunks, in order."""

    def __init__(self, stages: tuple[int, int], starts: tuple[int, int]) -> None:
        self.stages, self.starts = stages, starts
        self.done = {(kind, chunk): 0 for kind in "FBW" for chunk in (0, 1)}
        self.order: Order = []
        self.waiting: Order = []

    def run(self, kind: str, chunk: int, pair: bool = False) -> None:
        micro_batch = self.starts[chunk] + self.done[kind, chunk]
        self.done[kind, chunk] += 1
        self.order.append(Pass(kind, self.stages[chunk], micro_batch, pair))

    def backward(self, chunk: int, split: bool) -> None:
        """B, with its W at once or kept for later."""
        self.run("B", chunk)
        weight = Pass("W", self.stages[chunk], self.order[-1].micro_batch)
        if split:
            self.waiting.append(weight)
        else:
            self.order.append(weight)

    def together(self, forward: int, backward: int) -> None:
        """F and a full B overlapped."""
        self.run("F", forward, pair=True)
        self.backward(backward, split=False)

    def weight(self) -> None:
        if self.waiting:
            self.order.append(self.waiting.pop(0))


def _zbv(rank: int, pp: int, vpp: int, m: int) -> Order:
    """ZB-V: two chunks on a rank, one from either end of the model."""
    hands = _Counted((rank, 2 * pp - 1 - rank), (0, 0))
    done = hands.done

    def some(kind: str, chunk: int) -> None:
        limit = m if kind == "F" else done["F" if kind == "B" else "B", chunk]
        if done[kind, chunk] < limit:
            hands.run(kind, chunk)

    for _ in range(2 * (pp - rank) - 1):
        some("F", 0)
    for _ in range(rank):
        some("F", 1)
        some("F", 0)
    for _ in range(pp - rank):
        for kind in "FBW":
            some(kind, 1)
    while done["F", 1] < done["F", 0] or done["F", 0] < m:
        for kind, chunk in (("F", 0), ("B", 0), ("W", 0), ("F", 1), ("B", 1), ("W", 1)):
            some(kind, chunk)
    for _ in range(rank):
        some("B", 0)
        some("B", 1)
    while done["B", 0] < m or done["B", 1] < m:
        some("B", 0)
        some("W", 0)
        some("B", 1)
    for chunk in (1, 0):
        while done["W", chunk] < m:
            some("W", chunk)
    return hands.order


def _dualpipe(rank: int, pp: int, vpp: int, m: int) -> Order:
    """Half of the micro-batches from either end. A rank near an end starts with the direction that begins there."""
    half = m // 2
    low = rank < pp // 2
    near = (rank, 2 * pp - 1 - rank) if low else (2 * pp - 1 - rank, rank)
    starts = (0, half) if low else (half, 0)
    return _eight_phases(_Counted(near, starts), min(rank, pp - 1 - rank), pp // 2, pp, half)


def _dualpipev(rank: int, pp: int, vpp: int, m: int) -> Order:
    return _eight_phases(_Counted((rank, 2 * pp - 1 - rank), (0, 0)), rank, pp, 2 * pp, m)


def _eight_phases(hands: _Counted, place: int, ranks: int, depth: int, m: int) -> Order:
    """`place` of `ranks` from the end where the first chunk's micro-batches enter; `m` of them on each chunk."""
    far = ranks - place - 1
    for _ in range(2 * far):
        hands.run("F", 0)
    for _ in range(place + 1):
        hands.run("F", 0)
        hands.run("F", 1)
    for _ in range(far):
        hands.backward(1, split=True)
        hands.weight()
        hands.run("F", 1)
    for _ in range(m - depth + place + 1):
        hands.together(0, 1)
        hands.together(1, 0)
    for _ in range(far):
        hands.backward(1, split=False)
        hands.together(1, 0)
    split = False
    for i in range(place + 1):
        split = split or (i == (place + 1) // 2 and place % 2 == 1)
        hands.backward(1, split)
        split = split or (i == (place + 1) // 2 and place % 2 == 0)
        hands.backward(0, split)
    for _ in range(far):
        hands.weight()
        hands.backward(0, split=True)
    while hands.waiting:
        hands.weight()
    return hands.order


_MAKERS: dict[str, Callable[[int, int, int, int], Order]] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "interleaved": _interleaved,
    "zero_bubble": _zero_bubble,
    "zbv": _zbv,
    "dualpipe": _dualpipe,
    "dualpipev": _dualpipev,
}
