"""Boxes of logical tensors: slices of the flattened tensor, and whether boxes make up the whole."""

import math
from itertools import pairwise, product
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from moestro.parallel.logical import Box, boxes_of_slice, model_tensors, tiles, whole

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def numbers(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape)).view(shape)


def part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(s, s + n) for s, n in zip(*box, strict=True))]


@st.composite
def gridded(draw: Any) -> tuple[tuple[int, ...], list[Box]]:
    """A shape and the cells of a random grid on it."""
    shape = draw(shapes)
    cuts = []
    for n in shape:
        inner = draw(st.sets(st.integers(1, n - 1))) if n > 1 else set()
        cuts.append(list(pairwise([0, *sorted(inner), n])))
    boxes = [(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in product(*cuts)]
    return shape, boxes


class TestSlices:
    @settings(deadline=None)
    @given(shape=shapes, data=st.data())
    def test_are_the_elements_in_order(self, shape: tuple[int, ...], data: Any) -> None:
        count = math.prod(shape)
        first = data.draw(st.integers(0, count))
        last = data.draw(st.integers(first, count))
        boxes = list(boxes_of_slice(shape, first, last))
        found = [n for box in boxes for n in part(numbers(shape), box).reshape(-1).tolist()]
        assert found == list(range(first, last))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)

    def test_a_scalar(self) -> None:
        assert list(boxes_of_slice((), 0, 1)) == [((), ())]
        assert list(boxes_of_slice((), 0, 0)) == []


class TestTiles:
    @settings(deadline=None)
    @given(gridded())
    def test_a_grid(self, case: tuple[tuple[int, ...], list[Box]]) -> None:
        assert tiles(*case)

    @settings(deadline=None)
    @given(shape=shapes, ranks=st.integers(1, 4))
    def test_slices(self, shape: tuple[int, ...], ranks: int) -> None:
        count = math.prod(shape)
        length = -(-count // ranks)
        ends = [min(i * length, count) for i in range(ranks + 1)]
        assert tiles(shape, [box for a, b in pairwise(ends) for box in boxes_of_slice(shape, a, b)])

    @settings(deadline=None)
    @given(case=gridded(), data=st.data())
    def test_one_missing_one_twice_or_one_moved(self, case: tuple[tuple[int, ...], list[Box]], data: Any) -> None:
        shape, boxes = case
        chosen = data.draw(st.integers(0, len(boxes) - 1))
        others = boxes[:chosen] + boxes[chosen + 1 :]
        assert not tiles(shape, others)
        assert not tiles(shape, [*boxes, boxes[chosen]])
        if shape:
            start, size = boxes[chosen]
            assert not tiles(shape, [*others, ((start[0] + 1, *start[1:]), size)])

    @settings(deadline=None)
    @given(case=gridded(), changes=st.lists(st.tuples(st.integers(0), st.integers(0, 2)), max_size=3))
    def test_agrees_with_counting(
        self, case: tuple[tuple[int, ...], list[Box]], changes: list[tuple[int, int]]
    ) -> None:
        """Cells taken out of the grid or put in twice, against the number of boxes over each element."""
        shape, boxes = case
        times = {i % len(boxes): count for i, count in changes}
        chosen = [box for i, box in enumerate(boxes) for _ in range(times.get(i, 1))]
        covered = torch.zeros(shape)
        for box in chosen:
            part(covered, box).add_(1)
        assert tiles(shape, chosen) == bool((covered == 1).all())

    def test_equal_volume_is_not_enough(self) -> None:
        assert not tiles((4,), [((0,), (2,)), ((1,), (2,))])
        assert not tiles((2, 2), [((0, 0), (2, 1)), ((0, 0), (1, 2))])
        assert not tiles((4,), [((-1,), (2,)), ((1,), (3,))])

    def test_no_box(self) -> None:
        assert not tiles((), [])
        assert not tiles((3,), [])


def test_whole_is_a_view_of_the_tensor() -> None:
    parameter = nn.Parameter(torch.zeros(3, 2))
    logical = whole(parameter)
    logical.chunks[0].tensor.fill_(2)
    assert logical.shape == (3, 2)
    assert logical.chunks[0].start == (0, 0)
    assert parameter.tolist() == [[2, 2]] * 3


def test_model_tensors_are_its_parameters_and_saved_buffers() -> None:
    model = nn.BatchNorm1d(3)
    model.register_buffer("scratch", torch.zeros(1), persistent=False)
    tensors = model_tensors(model)
    assert set(tensors) == {f"model.{name}" for name in model.state_dict()}
    tensors["model.running_var"].chunks[0].tensor.fill_(5)
    assert model.running_var.tolist() == [5, 5, 5]
