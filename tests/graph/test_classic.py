"""Nets that are no transformers: FLOPs and parameters as PyTorch counts them of the same nets on meta tensors."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from moestro.graph.classic import DLRM_DDP, DLRM_DEFAULT, DLRM_MLPERF, Dlrm, dlrm, resnet50, unet
from moestro.graph.words import Collective, Kernel, StepGraph


class Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width),
        )  # fmt: skip
        self.side = nn.Sequential()
        if channels != 4 * width:
            self.side = nn.Sequential(nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.side(x))


def residual_net() -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
    ]  # fmt: skip
    channels = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
        for block in range(blocks):
            layers.append(Bottleneck(channels, width, 2 if stage and block == 0 else 1))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


def convs(channels: int, out: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(),
        nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        sizes = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(convs(given, out) for given, out in zip([3, *sizes], sizes, strict=False))
        pairs = list(zip(sizes[1:], sizes[:-1], strict=True))[::-1]
        self.wider = nn.ModuleList(nn.ConvTranspose2d(big, small, 2, 2) for big, small in pairs)
        self.up = nn.ModuleList(convs(2 * small, small) for _, small in pairs)
        self.classes = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        for wider, block, skip in zip(self.wider, self.up, skips[-2::-1], strict=True):
            x = block(torch.cat((skip, wider(x)), 1))
        out: Tensor = self.classes(x)
        return out


def network(sizes: tuple[int, ...]) -> nn.Module:
    return nn.Sequential(*(m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())))


class Recommender(nn.Module):
    def __init__(self, shape: Dlrm) -> None:
        super().__init__()
        vectors = shape.tables + 1
        self.shape, self.bottom = shape, network(shape.bottom)
        self.top = network((vectors * (vectors - 1) // 2 + shape.dim, *shape.top))

    def forward(self, dense: Tensor) -> Tensor:
        x = self.bottom(dense)
        tables = dense.new_empty(len(dense), self.shape.tables, self.shape.dim).requires_grad_()
        both = torch.cat((x.unsqueeze(1), tables), 1)
        pairs = (both @ both.transpose(1, 2)).flatten(1)
        chosen = pairs[:, : self.shape.tables * (self.shape.tables + 1) // 2]
        out: Tensor = self.top(torch.cat((x, chosen), 1))
        return out


def torch_counts(make: Callable[[], nn.Module], *shape: int) -> tuple[int, int]:
    """(FLOPs of forward and backward, parameters) by PyTorch, without computing anything."""
    with torch.device("meta"):
        net, x = make(), torch.empty(*shape)
    with FlopCounterMode(display=False) as counter:
        net(x).sum().backward()
    return counter.get_total_flops(), sum(p.numel() for p in net.parameters())


def counted(graph: StepGraph) -> tuple[float, int]:
    total = sum(node.flops * times for node, times in graph.nodes() if isinstance(node, Kernel))
    assert total * graph.world_size == graph.model_flops
    return total, graph.stages[0].parameters.dense


@pytest.mark.parametrize("image", [96, 100])
def test_resnet50(image: int) -> None:
    graph = resnet50(2, image=image)
    assert counted(graph) == torch_counts(residual_net, 2, 3, image, image)
    assert graph.stages[0].parameters.dense == 25_557_032


def test_unet() -> None:
    assert counted(unet(2, image=64, width=16, depth=3)) == torch_counts(lambda: UNet(16, 3), 2, 3, 64, 64)


@pytest.mark.parametrize("shape", [DLRM_DEFAULT, DLRM_DDP, DLRM_MLPERF])
def test_dlrm(shape: Dlrm) -> None:
    assert counted(dlrm(shape, 64)) == torch_counts(lambda: Recommender(shape), 64, shape.bottom[0])


def test_tables_are_spread_and_networks_replicated() -> None:
    one, four = dlrm(DLRM_DEFAULT, 128), dlrm(DLRM_DEFAULT, 128, ranks=4)
    assert one.stages[0].parameters.expert == 8 * 1_000_000 * 64 == 4 * four.stages[0].parameters.expert
    assert one.stages[0].parameters.dense == four.stages[0].parameters.dense
    sent = [node for node, _ in four.nodes() if isinstance(node, Collective)]
    assert [(node.op, node.bytes) for node in sent if node.op == "all_to_all"] == [
        ("all_to_all", 128 * 8 * 64 * 4.0)
    ] * 2
    assert [node.bytes for node in sent if node.op == "all_reduce"] == [four.stages[0].parameters.dense * 4.0]
    assert not [node for node, _ in one.nodes() if isinstance(node, Collective)]


def test_sixteen_bits_move_half() -> None:
    wide, narrow = resnet50(4), resnet50(4, dtype="bf16")
    assert narrow.stages[0].saved.kept * 2 == wide.stages[0].saved.kept
    assert narrow.model_flops == wide.model_flops
