"""Counting live memory."""

import torch

from papers.live_bytes import LiveBytes


class TestLiveBytes:
    def test_counts_what_is_made_and_what_is_gone(self) -> None:
        before = torch.ones(100)
        with LiveBytes() as live:
            x = torch.zeros(256)
            assert live.now == 1024
            y = x.view(16, 16).t() + 0  # views are free, the sum is not
            assert live.now == 2048
            del x
            assert live.now == 1024
            before.add_(1)
            before.view(10, 10)
        assert (live.now, live.peak) == (1024, 2048)
        del y
        assert live.now == 0

    def test_counts_what_backward_makes(self) -> None:
        x = torch.ones(256, requires_grad=True)
        with LiveBytes() as live:
            (x * x).sum().backward()
        assert live.now == 1024  # the gradient
        assert live.peak >= 2048
