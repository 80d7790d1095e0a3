"""The few values that a program without values still needs: counts, indices, masks.

Tensors of a trace have shapes only. But a program with experts counts tokens, sorts by expert, and asks how many rows
to send where; so integers and booleans are computed beside it for real, on the CPU, as long as all that went into them
is known. They begin at constants and `arange`, and at what is asked of scores without values: an order of candidates,
which the routing model gives. What other ranks would send is what this one would send in their place.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map

from moestro.errors import MoestroError
from moestro.graph.trace.routing import Routing

aten = torch.ops.aten

MOST = 2**28  # elements of a tensor that is computed beside the trace
FEW = 64  # of one of floats
# Their outputs have a size that depends on values.
SIZED_BY_VALUES = (
    aten.nonzero.default,
    aten.bincount.default,
    aten.masked_select.default,
    aten.repeat_interleave.Tensor,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
)
ORDERS = (aten.sort.default, aten.sort.stable, aten.topk.default, aten.argsort.default, aten.argsort.stable)
BEST = (aten.argmax.default, aten.max.dim)
# Comparisons of unknown floats: strict ones fail, as in loops until nothing is out of bounds, the others hold, as in
# assertions; nothing is NaN, and nothing is infinite.
FAILS = (aten.gt.Scalar, aten.gt.Tensor, aten.lt.Scalar, aten.lt.Tensor)
HOLDS = (aten.ge.Scalar, aten.ge.Tensor, aten.le.Scalar, aten.le.Tensor)
EQUAL = (aten.eq.Tensor, aten.eq.Scalar)
UNEQUAL = (aten.ne.Tensor, aten.ne.Scalar)
NEVER = (aten.isnan.default, aten.isinf.default)
EMPTIES = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
SCALED_LOSS = "_amp_foreach_non_finite_check_and_unscale_"  # leaves its flag, which is known to be 0, as it is


class Known(NamedTuple):
    """The real tensor beside a fake one. Views share `state`, of which [0] is whether anything known is in there."""

    real: Tensor
    state: list[bool]


class Values:
    """where: in which place of the program an operation is, and whether it is done again there."""

    def __init__(self, routing: Routing, where: Callable[[], tuple[object, bool]]) -> None:
        self.routing, self.where = routing, where
        self.guesses = 0  # values that the program asked for and that nobody knows
        self.sums = True  # whether the all-reduce under way adds; its operation cannot be read below

    def forget(self, tensor: Tensor) -> None:
        """Its values have been overwritten by what nobody knows."""
        if hasattr(tensor, "_known"):
            tensor._known.state[0] = False

    def of(self, tensor: Tensor) -> Tensor | None:
        """The values, if they are known."""
        if not isinstance(tensor, FakeTensor):
            return tensor if _wanted(tensor) else None
        known = getattr(tensor, "_known", None)
        return known.real if known is not None and known.state[0] else None

    def set(self, tensor: Tensor, real: Tensor, state: list[bool] | None = None) -> None:
        tensor._known = Known(real, [True] if state is None else state)  # type: ignore[attr-defined]

    def answer(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What the program gets instead of the operation's own result; NotImplemented where it can have that.

        Raises:
            MoestroError: a size depends on values that nobody knows.
        """
        if func is aten._local_scalar_dense.default:
            real = self.of(args[0])
            self.guesses += real is None
            with no_dispatch():
                return _guess(args[0].dtype) if real is None else real.item()
        if func is aten.equal.default:
            return self._equal(*args)
        if func in SIZED_BY_VALUES:
            if func is aten.masked_select.default and (mask := self.of(args[1])) is not None:
                with no_dispatch():
                    size = int(mask.expand(args[0].shape).sum())
                return args[0].new_empty(size)
            out = self._evaluate(func, args, kwargs)
            if out is None and func is aten.bincount.default and len(args) > 2:
                return args[0].new_empty(args[2])  # values below minlength, as they should be
            if out is None:
                raise MoestroError(
                    f"the size of what {func} gives depends on values, and a trace has only those of integers that "
                    "come from constants and routing; take it out of the traced step"
                )
            return tree_map(lambda real: self._fake_of(real, args) if isinstance(real, Tensor) else real, out)
        return NotImplemented

    def mask_as_rows(self, func: Any, args: Sequence[Any]) -> Sequence[Any]:
        """An index by known masks as one by positions, of which the number is known."""
        if func not in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
            return args
        indices: list[Any] = []
        for index in args[1]:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                indices.append(index)
                continue
            real = self.of(index)
            if real is None:
                raise MoestroError("an index by a mask of unknown values has an unknown size; take it out of the step")
            with no_dispatch():
                places = real.nonzero().unbind(1)
            indices += [self._fake_of(place, [index]) for place in places]
        return [args[0], indices, *args[2:]]

    def follow(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        """Compute the operation beside the trace where that can be, and forget what it overwrites where not."""
        outputs = [o for o in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(o, FakeTensor)]
        inputs = list(_tensors(args)) + list(_tensors(list(kwargs.values())))
        name = func._schema.name.removeprefix("aten::")
        if name in EMPTIES:
            for output in outputs:
                if not output.dtype.is_floating_point and output.numel() <= MOST:
                    with no_dispatch():
                        self.set(output, torch.empty(output.shape, dtype=output.dtype), [False])
            return
        tracked = [t for t in inputs if not isinstance(t, FakeTensor) or hasattr(t, "_known")]
        if (
            len(tracked) == len(inputs)
            and any(_wanted(o) for o in outputs)
            and self._beside(func, args, kwargs, outputs)
        ):
            return
        if func._schema.is_mutable and name != SCALED_LOSS:
            self._forget(func, args, kwargs)
        if not any(o.dtype.is_floating_point for o in outputs) or func in ORDERS + BEST:
            self._choose(func, args, kwargs, outputs)

    def _beside(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: list[FakeTensor]) -> bool:
        """Whether it could be computed for real."""
        is_view = not func._schema.is_mutable and any(a.alias_info is not None for a in func._schema.arguments)
        reads = _reads(func, args, kwargs)
        if not is_view and any(self.of(t) is None for t in reads):
            return False
        real = self._evaluate(func, args, kwargs, reads_only=reads)
        if real is None:
            return False
        reals = real if isinstance(real, (tuple, list)) else (real,)
        state = [True]
        if is_view or func._schema.is_mutable:
            bases = list(_tensors(args)) if is_view else _written(func, args, kwargs)
            state = next((t._known.state for t in bases if hasattr(t, "_known")), state)
            state[0] |= func._schema.is_mutable
        for output, value in zip(outputs, [r for r in reals if isinstance(r, Tensor)], strict=True):
            if _wanted(output):
                self.set(output, value, state)
        return True

    def _evaluate(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], reads_only: list[Tensor] | None = None
    ) -> Any:
        missing: list[Tensor] = []

        def real_of(value: Any) -> Any:
            if isinstance(value, torch.device):
                return torch.device("cpu")
            if not isinstance(value, Tensor):
                return value
            if not isinstance(value, FakeTensor):
                return value
            known = getattr(value, "_known", None)
            if known is None or (reads_only is None and not known.state[0]):
                missing.append(value)
                return value
            return known.real

        real_args, real_kwargs = tree_map(real_of, (list(args), dict(kwargs)))
        if missing:
            return None
        if real_kwargs.get("pin_memory"):
            real_kwargs["pin_memory"] = False
        try:
            with no_dispatch(), torch.no_grad():
                return func(*real_args, **real_kwargs)
        except (RuntimeError, NotImplementedError, TypeError):
            return None

    def _forget(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        for tensor in _written(func, args, kwargs):
            self.forget(tensor)

    def _choose(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: list[FakeTensor]) -> None:
        """Give values to what is asked of unknown floats."""
        if func in ORDERS or func in BEST:
            self._order(func, args, kwargs, outputs)
            return
        if func not in FAILS + HOLDS + EQUAL + UNEQUAL + NEVER or not args[0].dtype.is_floating_point:
            return
        same = func not in NEVER and args[0] is args[1]
        answer = same if func in EQUAL else not same if func in UNEQUAL else func in HOLDS
        with no_dispatch():
            self.set(outputs[0], torch.full(outputs[0].shape, answer))

    def _order(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: list[FakeTensor]) -> None:
        scores, indices = args[0], outputs[-1]
        given = {argument.name: value for argument, value in _bound(func, args, kwargs)}
        dim = given.get("dim", -1)
        if dim is None or scores.dim() == 0 or scores.numel() > MOST:
            return
        dim %= scores.dim()
        candidates = scores.shape[dim]
        with no_dispatch():
            order = self.routing.order(scores.numel() // max(candidates, 1), candidates, *self.where())
            if func in ORDERS and not given.get("descending", given.get("largest", False)):
                order = order.flip(1)
            shape = [n for d, n in enumerate(scores.shape) if d != dim] + [candidates]
            order = order.view(shape).movedim(-1, dim)
            if func is aten.topk.default:
                order = order.narrow(dim, 0, indices.shape[dim])
            elif func in BEST:
                order = order.select(dim, 0).view(indices.shape)
            self.set(indices, order.contiguous())

    def _equal(self, left: Tensor, right: Tensor) -> bool:
        a, b = self.of(left), self.of(right)
        with no_dispatch():
            return left.shape == right.shape and (a is None or b is None or torch.equal(a, b))

    def _fake_of(self, real: Tensor, like: Sequence[Any]) -> Tensor:
        device = next(_tensors(like)).device
        fake = torch.empty(real.shape, dtype=real.dtype, device=device)
        if not isinstance(fake, FakeTensor):  # PyTorch has switched fake tensors off for a moment
            return real
        self.set(fake, real)
        return fake


def _wanted(tensor: Tensor) -> bool:
    """Whether its values are worth knowing."""
    return tensor.numel() <= (FEW if tensor.dtype.is_floating_point or tensor.dtype.is_complex else MOST)


def _guess(dtype: torch.dtype) -> bool | int | float:
    return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1


def _bound(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    """(argument of the schema, value) of those that are given."""
    arguments = func._schema.arguments
    pairs = list(zip(arguments, args, strict=False))
    return pairs + [(a, kwargs[a.name]) for a in arguments[len(args) :] if a.name in kwargs]


def _reads(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors whose values an operation needs: not those that `copy_` or `out=` overwrite."""
    overwrites = func._schema.name in ("aten::copy_", "aten::zero_", "aten::fill_")
    found: list[Tensor] = []
    for argument, value in _bound(func, args, kwargs):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if not (is_written and (overwrites or argument.is_out)):
            found += _tensors([value])
    return found


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    bound = _bound(func, args, kwargs)
    return [t for a, value in bound if a.alias_info is not None and a.alias_info.is_write for t in _tensors([value])]


def _tensors(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)
