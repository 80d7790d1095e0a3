"""The operations that ranks exchange data with, ready to be timed, and to be checked element by element."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moestro.errors import MoestroError, nearest

OPS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "all_to_all",
    "all_to_all_uneven",
    "send_recv",
    "ring",
)
# Each with the whole numbers up to which it counts without a gap.
DTYPES: dict[str, tuple[torch.dtype, int]] = {
    "fp64": (torch.float64, 2**53),
    "fp32": (torch.float32, 2**24),
    "bf16": (torch.bfloat16, 2**8),
    "fp16": (torch.float16, 2**11),
    "int32": (torch.int32, 2**31 - 1),
    "int8": (torch.int8, 2**7 - 1),
}
PRIMES = (97, 61, 31, 13, 7, 5, 3, 2)

# Newer PyTorch renames the two and warns at the old names; 2.11 has only those.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Finish = Callable[[], None]


@dataclass(frozen=True)
class Place:
    """This rank among those of an exchange: `ranks` are numbers in the world, `me` is an index among them.

    group: None is that of all ranks.
    """

    group: dist.ProcessGroup | None
    ranks: tuple[int, ...]
    me: int

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class Exchange:
    """One operation on operands of its own.

    bytes: by the definition of hardware.curves.busbw (central card: rccl-tests' convention). trips: how often they
    travel in one call. refill: put the operands back and spoil the last result; the same work on every rank.
    start: issue the operation; what it returns waits for the end. wrong: elements of the result that differ from the
    right ones, after refill and one call.
    """

    bytes: int
    trips: int
    refill: Callable[[], None]
    start: Callable[[], Finish]
    wrong: Callable[[], int]


def build(op: str, place: Place, size_bytes: int, dtype: str, device: torch.device) -> Exchange:
    """The operation `op` among the ranks of `place`, all of which must build and run it alike.

    Sizes that the ranks or the dtype do not divide are rounded down, but not to nothing. What `bytes` means:
    all_reduce, broadcast: the buffer of each rank. reduce_scatter: the whole input of a rank. all_gather: the whole
    output. all_to_all: the whole send buffer. all_to_all_uneven: the largest that any rank sends or receives in all.
    send_recv (2 ranks; there and back, half of the time counts) and ring (each to its next): one message.

    Raises:
        MoestroError: no such operation or dtype, send_recv among more than two ranks, or a dtype too narrow to add
            up so many ranks without rounding.
    """
    check_choice(op, dtype)
    n, me = place.size, place.me
    kind, exact = DTYPES[dtype]
    values = Values(kind, device, n, exact // n if op in ("all_reduce", "reduce_scatter") else exact)
    count = max(1, size_bytes // kind.itemsize)
    part = max(1, count // n)
    if op in ("all_reduce", "broadcast"):
        return _in_place(op, place, count, values)
    if op == "reduce_scatter":
        return _apart(op, place, values.of(me, n * part), part, lambda: values.sums(part, me * part))
    if op == "all_gather":
        return _apart(
            op, place, values.of(me, part), n * part, lambda: torch.cat([values.of(r, part) for r in range(n)])
        )
    if op.startswith("all_to_all"):
        return _all_to_all(
            op, place, uneven_splits(n, count) if op == "all_to_all_uneven" else [[part] * n] * n, values
        )
    if op == "send_recv" and n != 2:
        raise MoestroError(f"send_recv is measured between 2 ranks, not among {n}")
    return _apart(op, place, values.of(me, count), count, lambda: values.of((me - 1) % n, count))


def check_choice(op: str, dtype: str) -> None:
    if op not in OPS:
        raise MoestroError(f"no collective '{op}'; there are {', '.join(OPS)}.{nearest(op, OPS)}")
    if dtype not in DTYPES:
        raise MoestroError(f"collectives are measured in {', '.join(DTYPES)}, not '{dtype}'")


def uneven_splits(ranks: int, count: int) -> list[list[int]]:
    """[from][to] elements: rank 0 receives most, as a popular expert does, and some pairs exchange nothing.

    The largest total of any rank, sent or received, is `count`.
    """
    last = ranks - 1
    weight = [
        [0.0 if (i - j) % ranks == 2 or i == j == last else 1 / (1 + j) for j in range(ranks)] for i in range(ranks)
    ]
    largest = max(max(map(sum, weight)), max(map(sum, zip(*weight, strict=True))))
    splits = [[int(count * w / largest) for w in row] for row in weight]
    splits[last][0] += count - max(max(map(sum, splits)), max(map(sum, zip(*splits, strict=True))))
    return splits


class Values:
    """What the ranks hold: small whole numbers that differ by rank and by index, with sums that are exact.

    Element i of rank r is (i + r·shift) mod m, so that a wrong rank, a shifted part, or a part left over from an
    earlier call shows in nearly every element, and a sum depends on i mod m alone.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, ranks: int, limit: int) -> None:
        fitting = [prime for prime in PRIMES if prime <= limit]
        if not fitting:
            raise MoestroError(f"{dtype} cannot add up {ranks} ranks without rounding; measure in fp32")
        self.modulus = fitting[0]
        self.shift = self.modulus // 3 + 1
        self.dtype, self.device, self.ranks = dtype, device, ranks

    def of(self, rank: int, count: int, offset: int = 0) -> Tensor:
        """[count] elements of `rank`, from `offset` on."""
        return self._tiled(self._period(rank, offset), count)

    def sums(self, count: int, offset: int = 0) -> Tensor:
        """[count] sums over the ranks, from `offset` on."""
        total = torch.stack([self._period(rank, offset) for rank in range(self.ranks)]).sum(0)
        return self._tiled(total, count)

    def _period(self, rank: int, offset: int) -> Tensor:
        return (torch.arange(self.modulus) + offset + rank * self.shift) % self.modulus

    def _tiled(self, period: Tensor, count: int) -> Tensor:
        return period.to(self.device, self.dtype).repeat(-(-count // self.modulus))[:count]


def count_wrong(result: Tensor, expected: Tensor) -> int:
    """Elements that are not equal; NaN never is."""
    return int((result != expected).sum())


def _in_place(op: str, place: Place, count: int, values: Values) -> Exchange:
    """all_reduce, and broadcast from the first rank."""
    sends = op == "all_reduce" or place.me == 0
    source = values.of(place.me, count) if sends else torch.full_like(values.of(0, count), -1)
    buffer = torch.empty_like(source)

    def start() -> Finish:
        if op == "all_reduce":
            work = dist.all_reduce(buffer, group=place.group, async_op=True)
        else:
            work = dist.broadcast(buffer, place.ranks[0], group=place.group, async_op=True)
        return work.wait

    def wrong() -> int:
        return count_wrong(buffer, values.sums(count) if op == "all_reduce" else values.of(0, count))

    return Exchange(source.nbytes, 1, lambda: _copy(buffer, source), start, wrong)


def _apart(op: str, place: Place, given: Tensor, received: int, expected: Callable[[], Tensor]) -> Exchange:
    """The operations from one buffer into another of `received` elements, which should then hold `expected`."""
    out = given.new_empty(received)
    group = place.group
    after, before = (place.ranks[(place.me + step) % place.size] for step in (1, -1))

    def start() -> Finish:
        if op == "reduce_scatter":
            return _reduce_scatter_single(out, given, group=group, async_op=True).wait
        if op == "all_gather":
            return _all_gather_single(out, given, group=group, async_op=True).wait
        if op == "ring":
            pair = [dist.P2POp(dist.isend, given, after, group), dist.P2POp(dist.irecv, out, before, group)]
            return _wait_all(dist.batch_isend_irecv(pair))
        return _there_and_back(given, out, after, place)

    def wrong() -> int:
        return count_wrong(out, expected())

    trips = 2 if op == "send_recv" else 1
    return Exchange(max(given.nbytes, out.nbytes), trips, lambda: _spoil(out), start, wrong)


def _all_to_all(op: str, place: Place, splits: list[list[int]], values: Values) -> Exchange:
    me = place.me
    sends, receives = splits[me], [row[me] for row in splits]
    largest = max(max(map(sum, splits)), max(map(sum, zip(*splits, strict=True))))
    given = values.of(me, sum(sends))
    room = given.new_empty(largest)  # all of it is spoilt, so that this takes as long on every rank
    out = room[: sum(receives)]
    even = op == "all_to_all"

    def start() -> Finish:
        if even:
            work = dist.all_to_all_single(out, given, group=place.group, async_op=True)
        else:
            work = dist.all_to_all_single(out, given, receives, sends, group=place.group, async_op=True)
        return work.wait

    def wrong() -> int:
        parts = [values.of(rank, row[me], sum(row[:me])) for rank, row in enumerate(splits)]
        return count_wrong(out, torch.cat(parts))

    return Exchange(largest * given.itemsize, 1, lambda: _spoil(room), start, wrong)


def _there_and_back(given: Tensor, out: Tensor, other: int, place: Place) -> Finish:
    """The first rank sends and the second answers when it has all. In this order: NCCL runs one after the other."""
    leaving = dist.isend(given, other, group=place.group) if place.me == 0 else None
    arriving = dist.irecv(out, other, group=place.group)

    def finish() -> None:
        if leaving is not None:
            leaving.wait()
        arriving.wait()  # type: ignore[union-attr]
        if leaving is None:
            dist.isend(given, other, group=place.group).wait()  # type: ignore[union-attr]

    return finish


def _wait_all(works: Sequence[dist.Work]) -> Finish:
    def finish() -> None:
        for work in works:
            work.wait()

    return finish


def _copy(buffer: Tensor, source: Tensor) -> None:
    buffer.copy_(source)


def _spoil(out: Tensor) -> None:
    out.fill_(-1)  # which no rank ever sends
