"""Any cut of a tensor loads what any other cut has stored, to the bit; and who writes what."""

import math
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint.cuts import Cuts, assert_same, blank, even, grid, layout, slices
from moestro.checkpoint import write
from moestro.checkpoint.store import Progress, load_checkpoint, save_checkpoint
from moestro.checkpoint.write import Piece, share_out
from moestro.parallel.logical import Chunk, LogicalTensor, tiles

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn]
many = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def joined(parts: list[list[Chunk]], shape: tuple[int, ...]) -> LogicalTensor:
    """The boxes of all ranks, as if one rank had them."""
    return LogicalTensor(shape, [chunk for part in parts for chunk in part])


@st.composite
def cut_twice(draw: Any) -> tuple[torch.Tensor, list[list[Chunk]], list[list[Chunk]]]:
    """A tensor and two ways to cut it: random grids, or slices of the flattened tensor."""
    shape = draw(st.lists(st.integers(1, 6), max_size=4).map(tuple))
    dtype = draw(st.sampled_from(DTYPES))
    tensor = torch.arange(math.prod(shape)).remainder(100).view(shape).to(dtype)
    return tensor, draw(a_cut(tensor)), draw(a_cut(tensor))


@st.composite
def a_cut(draw: Any, tensor: torch.Tensor) -> list[list[Chunk]]:
    if draw(st.booleans()):
        return slices(tensor, draw(st.integers(1, 5)))
    cuts: Cuts = [sorted({0, n, *draw(st.sets(st.integers(0, n), max_size=3))}) for n in tensor.shape]
    return grid(tensor, cuts)


@many
@given(cut_twice())
def test_any_two_cuts(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[torch.Tensor, list[list[Chunk]], list[list[Chunk]]]
) -> None:
    tensor, stored, wanted = case
    folder = tmp_path_factory.mktemp("cuts")
    path = save_checkpoint(folder, {"model.w": joined(stored, tensor.shape)}, Progress(1, 2, 3.0), keep=1)
    expected = {"model.w": joined(wanted, tensor.shape)}
    got = blank_bits(expected)
    load_checkpoint(path, got)
    for mine, theirs in zip(got["model.w"].chunks, expected["model.w"].chunks, strict=True):
        assert bits(mine.tensor) == bits(theirs.tensor)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


def blank_bits(tensors: dict[str, LogicalTensor]) -> dict[str, LogicalTensor]:
    chunks = {name: [Chunk(c.start, torch.ones_like(c.tensor)) for c in t.chunks] for name, t in tensors.items()}
    return {name: LogicalTensor(tensors[name].shape, chunks[name]) for name in tensors}


class TestGatedExperts:
    """Merged experts [experts, gate or up, width, hidden] and their moments: the halves are cut at different places."""

    SHAPE = (3, 2, 7, 5)

    def state(self) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        names = ("model.experts.gate_up_proj", "optimizer.state.experts.gate_up_proj.exp_avg")
        return {name: torch.randn(self.SHAPE, generator=generator) for name in names}

    @pytest.mark.parametrize("before", [1, 2, 3, 4])
    @pytest.mark.parametrize("after", [1, 2, 3, 4])
    def test_flat_slices(self, before: int, after: int, tmp_path: Path) -> None:
        state = self.state()
        counts = [Counter(c.start[1] for c in part) for part in slices(state["model.experts.gate_up_proj"], before)]
        assert before < 3 or any(count[0] != count[1] for count in counts)  # a slice that has more boxes of one half
        stored = {name: joined(slices(value, before), self.SHAPE) for name, value in state.items()}
        path = save_checkpoint(tmp_path, stored, Progress(1, 2, 3.0), keep=1)
        for rank in range(after):
            expected = layout(state, "slices", after)[rank]
            got = blank(expected)
            load_checkpoint(path, got)
            assert_same(got, expected)

    @pytest.mark.parametrize("cut", [[0, 7], [0, 2, 7], [0, 1, 3, 7]], ids=str)
    @pytest.mark.parametrize("other", [[0, 7], [0, 4, 7], [0, 3, 4, 7]], ids=str)
    def test_width_in_unequal_parts(self, cut: list[int], other: list[int], tmp_path: Path) -> None:
        state = self.state()

        def laid(width: list[int], experts: list[int]) -> dict[str, LogicalTensor]:
            return {n: joined(grid(v, [experts, [0, 2], width, [0, 5]]), self.SHAPE) for n, v in state.items()}

        path = save_checkpoint(tmp_path, laid(cut, [0, 1, 3]), Progress(1, 2, 3.0), keep=1)
        expected = laid(other, [0, 3])
        got = blank(expected)
        load_checkpoint(path, got)
        assert_same(got, expected)


class TestSaveRefuses:
    """A part that no rank has, or that two have differently, is a defect of the caller: never written."""

    def test_a_missing_box(self, tmp_path: Path) -> None:
        parts = slices(torch.ones(6, 5), 3)
        with pytest.raises(ValueError, match=r"model\.w: the ranks' boxes are not the whole tensor"):
            save_checkpoint(tmp_path, {"model.w": joined(parts[:2], (6, 5))}, Progress(1, 2, 3.0), keep=1)
        assert list(tmp_path.iterdir()) == []

    def test_an_overlap(self, tmp_path: Path) -> None:
        chunks = [Chunk((0, 0), torch.ones(2, 4)), Chunk((1, 0), torch.ones(2, 4))]
        with pytest.raises(ValueError, match="not the whole tensor"):
            save_checkpoint(tmp_path, {"model.w": LogicalTensor((4, 4), chunks)}, Progress(1, 2, 3.0), keep=1)

    def test_a_name_without_any_box(self, tmp_path: Path) -> None:
        state = {"model.v": joined(slices(torch.ones(3), 1), (3,)), "model.w": LogicalTensor((3,), [])}
        with pytest.raises(ValueError, match=r"model\.w: the ranks"):
            save_checkpoint(tmp_path, state, Progress(1, 2, 3.0), keep=1)


class TestShareOut:
    def piece(self, name: str, shape: tuple[int, ...], start: int = 0, rows: int | None = None) -> Piece:
        size = (shape[0] if rows is None else rows, *shape[1:])
        return Piece(name, shape, torch.float32, (start, *(0 for _ in shape[1:])), size)

    def check(self, held: list[list[Piece]], shares: list[list[Piece]]) -> None:
        """Every element is written once, by a rank that has it."""
        for name in {p.name for pieces in held for p in pieces}:
            mine = [p for share in shares for p in share if p.name == name]
            assert tiles(mine[0].shape, [(p.start, p.size) for p in mine]), name
        for pieces, share in zip(held, shares, strict=True):
            for part in share:
                assert any(p.name == part.name and contains(p, part) for p in pieces), part

    def test_replicas_write_equal_shares(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(write, "SMALLEST_PIECE", 64)
        pieces = [self.piece("big", (64, 32)), self.piece("one row", (1, 512)), self.piece("scalars", (3,))]
        held = [list(pieces) for _ in range(4)]
        shares = share_out(held)
        sizes = [sum(p.bytes for p in share) for share in shares]
        assert sum(sizes) == sum(p.bytes for p in pieces)
        assert max(sizes) <= 1.05 * sum(sizes) / 4
        self.check(held, shares)

    def test_replicas_make_up_for_what_others_must_write(self) -> None:
        """Rank 0 alone holds an expert; what all hold goes to the others."""
        shared = [self.piece(f"dense{i}", (256, 1024)) for i in range(4)]
        held = [[self.piece("expert", (1024, 1024)), *shared], list(shared), list(shared)]
        shares = share_out(held)
        assert [p.name for p in shares[0]] == ["expert"]
        assert sum(p.bytes for p in shares[1]) == sum(p.bytes for p in shares[2])
        self.check(held, shares)

    @settings(deadline=None)
    @given(st.data())
    def test_each_box_once_by_a_rank_that_has_it(self, data: Any) -> None:
        ranks = data.draw(st.integers(1, 5))
        held: list[list[Piece]] = [[] for _ in range(ranks)]
        for number in range(data.draw(st.integers(1, 4))):
            shape = (data.draw(st.integers(1, 9)), data.draw(st.sampled_from([1, 3, 1 << 17])))
            for first, last in pairwise(even(shape[0], data.draw(st.integers(1, min(3, shape[0]))))):
                for rank in data.draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
                    held[rank].append(self.piece(f"t{number}", shape, first, last - first))
        self.check(held, share_out(held))


def contains(box: Piece, part: Piece) -> bool:
    sides = zip(box.start, box.size, part.start, part.size, strict=True)
    return all(a <= b and b + n <= a + m for a, m, b, n in sides)
