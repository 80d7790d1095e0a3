"""Convolutions on large images: memory, work, tiles against torch; checks that can fail; (slow) the whole row."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from papers import gigapixel
from papers.conv_stack import Layer, Stack, accumulate, build, gradients, peak_bytes, resident_bytes, step_flops, tiles
from papers.live_bytes import LiveBytes

STACK = Stack((Layer(4, 3), Layer(6, 5, 2), Layer(8, 3)))
LAYERS = st.builds(Layer, st.sampled_from([2, 4, 8]), st.sampled_from([1, 3, 5]), st.sampled_from([1, 2]))


class TestStack:
    def test_by_hand(self) -> None:
        assert STACK.shapes(20, 30) == [(3, 20, 30), (4, 18, 28), (6, 7, 12), (8, 5, 10)]
        assert STACK.sizes(20, 30)[1] == 4 * 18 * 28 * 4
        assert STACK.stride == 2
        assert STACK.field == 11  # 3 → (3 - 1) · 2 + 5 = 9 → 11
        assert STACK.params == sum(p.numel() for p in build(STACK, 0).parameters())

    @settings(max_examples=8, deadline=None)
    @given(st.lists(LAYERS, min_size=1, max_size=4), st.integers(80, 96), st.integers(80, 96), st.none() | st.just(2))
    def test_peak_is_that_of_live_tensors(
        self, layers: list[Layer], height: int, width: int, segment: int | None
    ) -> None:
        stack = Stack(tuple(layers))
        model = build(stack, 0)
        with LiveBytes() as live:
            image = torch.rand(1, 3, height, width)
            accumulate(model, image, 1, segment)
        small = 4 * 4 * stack.params + 4096  # gradients of parameters, the loss
        # A last layer as large as the first leaves the loss's own square in the peak.
        assert peak_bytes(stack, height, width, segment) <= live.peak
        assert live.peak <= peak_bytes(stack, height, width, segment) + small + stack.sizes(height, width)[-1]

    def test_what_is_resident_is_never_less(self) -> None:
        assert resident_bytes(STACK, 50, 60) >= peak_bytes(STACK, 50, 60)

    def test_checkpoints_of_one_layer_each_save_nothing(self) -> None:
        assert peak_bytes(STACK, 50, 60, 1) == peak_bytes(STACK, 50, 60)

    @pytest.mark.parametrize("segment", [None, 2])
    def test_work_is_what_torch_counts(self, segment: int | None) -> None:
        model = build(STACK, 0)
        with FlopCounterMode(display=False) as counter:
            accumulate(model, torch.rand(1, 3, 40, 50), 1, segment)
        assert step_flops(STACK, 40, 50, again=segment is not None) == counter.get_total_flops()


class TestTiles:
    @pytest.mark.parametrize(("down", "across"), [*product((1, 2, 5), (1, 3))])
    def test_their_outputs_are_the_whole_output(self, down: int, across: int) -> None:
        model = build(STACK, 0, torch.float64)
        image = torch.rand(1, 3, 29, 33, dtype=torch.float64)
        parts = [model(image[:, :, rows, columns]) for rows, columns in tiles(STACK, 29, 33, down, across)]
        lines = [torch.cat(parts[i : i + across], dim=3) for i in range(0, len(parts), across)]
        assert torch.allclose(torch.cat(lines, dim=2), model(image), atol=1e-12)

    @pytest.mark.parametrize(("down", "across"), [(0, 1), (1, 0), (11, 1), (1, 13)])
    def test_more_tiles_than_pixels(self, down: int, across: int) -> None:
        with pytest.raises(ValueError, match="cannot cut 10 x 12 pixels of output"):
            list(tiles(STACK, 29, 33, down, across))

    def test_gradients_are_those_of_the_whole_loss(self) -> None:
        model = build(STACK, 0, torch.float64)
        image = torch.rand(1, 3, 29, 33, dtype=torch.float64)
        loss, found = gradients(STACK, model, image, list(tiles(STACK, 29, 33, 2, 3)))
        whole = model(image).square().mean()
        expected = torch.autograd.grad(whole, list(model.parameters()))
        assert loss == pytest.approx(whole.item(), rel=1e-12)
        assert all(torch.allclose(a, b, atol=1e-13) for a, b in zip(found, expected, strict=True))


class TestChecks:
    @pytest.mark.parametrize(
        "check", [gigapixel.check_fits, gigapixel.check_tiles, gigapixel.check_shared_pool, gigapixel.check_arithmetic]
    )
    def test_holds(self, check) -> None:  # type: ignore[no-untyped-def]
        assert check().verdict == "holds"

    def test_fits_fails_on_another_size(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gigapixel, "WORKLOAD_BYTES", 70e9)
        assert gigapixel.check_fits().verdict == "does not hold"
        monkeypatch.setattr(gigapixel, "WORKLOAD_BYTES", 125e9)  # more than the pool less the host's part
        assert gigapixel.check_fits().verdict == "does not hold"

    def test_tiles_fail_without_need_or_gain(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gigapixel, "HEIGHT", 8000)
        assert gigapixel.check_tiles().verdict == "holds in part"  # the whole image fits on the large GPU

    def test_tiles_cost_their_halo(self) -> None:
        ratio = gigapixel.tiled_flops(200) / gigapixel.tiled_flops(1)
        # 320 pixels a tile and 85 of halo, of which each of nine layers uses up 6.
        assert 1 + (85 - 9 * 6) / 320 < ratio < 1 + 85 / 320

    def test_shared_pool_fails_where_the_hosts_use_is_forgotten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gigapixel, "usable_bytes", lambda device, host=8e9: device.memory.gb.best * 1e9)
        assert gigapixel.check_shared_pool().verdict == "holds in part"

    def test_live(self) -> None:
        stack, saved = next(iter(gigapixel.MEASURED.values())), gigapixel.SAVED_SIDE
        exact = [peak_bytes(stack, side, side) for side in gigapixel.SIDES]
        with_checkpoints = peak_bytes(gigapixel.GIGA, saved, saved, gigapixel.SEGMENT)
        assert gigapixel.check_live(exact, with_checkpoints).verdict == "holds"
        assert gigapixel.check_live([*exact[:2], int(1.2 * exact[2])], with_checkpoints).verdict == "holds in part"
        without = peak_bytes(gigapixel.GIGA, saved, saved)
        assert gigapixel.check_live(exact, without).verdict == "holds in part"

    def test_resident(self) -> None:
        exact = {
            name: [resident_bytes(stack, side, side) for side in gigapixel.SIDES]
            for name, stack in gigapixel.MEASURED.items()
        }
        assert gigapixel.check_resident(exact).verdict == "holds"
        first = next(iter(exact))
        assert gigapixel.check_resident(exact | {first: [2 * v for v in exact[first]]}).verdict == "holds in part"
        bent = [v * side / 400 for v, side in zip(exact[first], gigapixel.SIDES, strict=True)]
        assert "a line fits to 0.0%" not in gigapixel.check_resident(exact | {first: bent}).ours

    def test_gradients(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert gigapixel.check_gradients().verdict == "holds"
        monkeypatch.setattr(Stack, "field", property(lambda stack: 20))  # one pixel short
        assert gigapixel.check_gradients().verdict == "does not hold"

    def test_arithmetic_that_does_not_close(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gigapixel, "STEP_S", 82)
        assert gigapixel.check_arithmetic().verdict == "arithmetic does not close"


@pytest.mark.slow
def test_whole_row() -> None:
    result = gigapixel.run(lambda done, total, what: None)
    assert [check.verdict for check in result.checks] == ["holds"] * 4 + ["holds in part"] + ["holds"] * 2
    assert len(result.figures) == 9
