"""Models that are no transformers, as step graphs of the same operations: convolutional nets and recommendation.

A convolution is counted as the product that an implicit-GEMM kernel computes: rows are output pixels, and the inner
dimension runs over input channels and taps. Ranks, where there are several, see different samples (`batch` is of one).
"""

from dataclasses import dataclass, field
from itertools import pairwise

from moestro.errors import MoestroError
from moestro.graph.tape import ACTIVATION_BYTES
from moestro.graph.words import Collective, Kernel, Node, Parameters, Piece, RankStep, Run, Saved, Stage, StepGraph

Size = tuple[int, int]  # height, width


@dataclass
class Net:
    """Writes down a net layer by layer. All sizes are of one rank."""

    batch: int
    dtype: str = "fp32"
    forward: list[Node] = field(default_factory=list)
    backward: list[Node] = field(default_factory=list)  # in the order of forward
    weight: list[Node] = field(default_factory=list)
    saved: float = 0.0
    parameters: int = 0
    rows: int = 0  # parameters of embedding tables, which are updated row by row

    @property
    def width(self) -> int:
        return ACTIVATION_BYTES.get(self.dtype, 2)

    def conv(
        self,
        name: str,
        size: Size,
        channels: int,
        out: int,
        taps: int,
        *,
        stride: int = 1,
        groups: int = 1,
        bias: bool = False,
        first: bool = False,
    ) -> Size:
        """`taps` along each axis, padded to keep the size but for the stride. first: of the net's input, which wants no
        gradient. Returns the size of what comes out."""
        height, width = (-(-side // stride) for side in size)
        m, n, k = self.batch * height * width, out // groups, channels // groups * taps * taps
        pixels = self.batch * size[0] * size[1]
        moved = self.width * (pixels * channels + out * k + m * out)
        self._product(name, groups, m, n, k, moved, first)
        self._keep(pixels * channels, out * k + out * bias)
        return height, width

    def up_conv(self, name: str, size: Size, channels: int, out: int, stride: int = 2) -> Size:
        """A transposed convolution whose taps do not overlap: each pixel becomes stride² of them."""
        pixels = self.batch * size[0] * size[1]
        moved = self.width * (pixels * (channels + stride**2 * out) + channels * out * stride**2)
        self._product(name, 1, pixels, out * stride**2, channels, moved, False)
        self._keep(pixels * channels, channels * out * stride**2 + out)
        return size[0] * stride, size[1] * stride

    def linear(self, name: str, features: int, out: int, *, first: bool = False) -> None:
        self.rows_linear(name, self.batch, features, out, first=first)

    def rows_linear(
        self, name: str, rows: int, features: int, out: int, *, first: bool = False, part: str = "layers"
    ) -> None:
        """Of several rows a sample: tokens."""
        moved = self.width * (rows * (features + out) + features * out)
        self._product(name, 1, rows, out, features, moved, first, part)
        self._keep(rows * features, features * out + out)

    def products(
        self, name: str, groups: int, m: int, n: int, k: int, *, moved: float | None = None, part: str = "layers"
    ) -> None:
        """[groups, m, k] by [groups, k, n], both activations, whose gradients are a product each. moved: bytes, where
        a kernel does not read and write all three."""
        whole = self.width * groups * (m * k + k * n + m * n)
        self._product(name, groups, m, n, k, whole if moved is None else moved, False, part)

    def pass_over(
        self, name: str, elements: float, passes: float, back: float, *, kept: float = 0.0, part: str = "layers"
    ) -> None:
        """An operation bound by memory; passes and back count reads and writes, kept is numbers saved for backward."""
        for nodes, label, times in ((self.forward, name, passes), (self.backward, f"{name} backward", back)):
            moved = elements * times * self.width
            nodes.append(Kernel("memory", part, label, (round(elements),), self.dtype, 0.0, moved))
        self.saved += kept * self.width

    def norm_relu(self, name: str, size: Size, channels: int, *, relu: bool = True) -> None:
        """Batch normalisation with its activation. Both keep their inputs."""
        elements = self.batch * size[0] * size[1] * channels
        self.pass_over(f"{name} norm", elements, 3, 5, kept=elements)
        if relu:
            self.pass_over(f"{name} relu", elements, 2, 3)
        self.parameters += 2 * channels

    def _product(
        self, name: str, batch: int, m: int, n: int, k: int, moved: float, first: bool, part: str = "layers"
    ) -> None:
        flops = 2.0 * batch * m * n * k
        for nodes, label, dims in (
            (self.forward, name, (batch, m, n, k)),
            (self.backward, f"{name} dgrad", (batch, m, k, n)),
            (self.weight, f"{name} wgrad", (batch, k, n, m)),
        ):
            if not (first and nodes is self.backward):
                nodes.append(Kernel("gemm", part, label, dims, self.dtype, flops, moved))

    def _keep(self, numbers: float, parameters: int) -> None:
        self.saved += numbers * self.width
        self.parameters += parameters


def resnet50(batch: int, *, image: int = 224, classes: int = 1000, ranks: int = 1, dtype: str = "fp32") -> StepGraph:
    """ResNet-50 (arXiv 1512.03385) with the stride in the 3 × 3 convolution, as most libraries train it."""
    net = Net(batch, dtype)
    size = net.conv("stem", (image, image), 3, 64, 7, stride=2, first=True)
    net.norm_relu("stem", size, 64)
    size = (-(-size[0] // 2), -(-size[1] // 2))
    net.pass_over("max pool", batch * size[0] * size[1] * 64, 5, 5)
    channels = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            size = _bottleneck(net, f"stage {stage + 1} block {block + 1}", size, channels, width, stride)
            channels = 4 * width
    net.pass_over("mean", batch * size[0] * size[1] * channels, 1, 1)
    net.linear("classes", channels, classes)
    net.pass_over("cross entropy", batch * classes, 2, 2, kept=batch * classes)
    return net_graph(net, ranks)


def _bottleneck(net: Net, name: str, size: Size, channels: int, width: int, stride: int) -> Size:
    """1 × 1, 3 × 3, 1 × 1 to four times the width, added to the input or a projection of it."""
    net.conv(f"{name} in", size, channels, width, 1)
    net.norm_relu(f"{name} in", size, width)
    small = net.conv(f"{name} middle", size, width, width, 3, stride=stride)
    net.norm_relu(f"{name} middle", small, width)
    net.conv(f"{name} out", small, width, 4 * width, 1)
    net.norm_relu(f"{name} out", small, 4 * width, relu=False)
    if channels != 4 * width:
        net.conv(f"{name} projection", size, channels, 4 * width, 1, stride=stride)
        net.norm_relu(f"{name} projection", small, 4 * width, relu=False)
    net.pass_over(f"{name} sum", net.batch * small[0] * small[1] * 4 * width, 3, 2)
    return small


def unet(
    batch: int, *, image: int = 256, channels: int = 3, width: int = 64, depth: int = 4, classes: int = 2,
    ranks: int = 1, dtype: str = "fp32",
) -> StepGraph:  # fmt: skip
    """A U-Net (arXiv 1505.04597), padded: two convolutions a level, `depth` halvings, and skips on the way back up.

    Raises MoestroError for an image that cannot be halved so often.
    """
    if image % 2**depth:
        raise MoestroError(
            f"a U-Net of depth {depth} halves its image {depth} times; {image} is no multiple of {2**depth}"
        )
    net, size = Net(batch, dtype), (image, image)
    here, skips = channels, list[tuple[Size, int]]()
    for level in range(depth + 1):
        out = width * 2**level
        _two_convs(net, f"down {level}", size, here, out, first=level == 0)
        here = out
        if level < depth:
            skips.append((size, here))
            size = (size[0] // 2, size[1] // 2)
            net.pass_over(f"pool {level}", batch * size[0] * size[1] * here, 5, 5)
    for level, (wide, out) in reversed(list(enumerate(skips))):
        size = net.up_conv(f"up {level}", size, here, out)
        net.pass_over(f"skip {level}", batch * size[0] * size[1] * 2 * out, 2, 2)
        _two_convs(net, f"up {level}", wide, 2 * out, out)
        here = out
    net.conv("classes", size, here, classes, 1, bias=True)
    net.pass_over("cross entropy", batch * size[0] * size[1] * classes, 2, 2)
    return net_graph(net, ranks)


def _two_convs(net: Net, name: str, size: Size, channels: int, out: int, first: bool = False) -> None:
    for number, given in enumerate((channels, out)):
        net.conv(f"{name} conv {number + 1}", size, given, out, 3, first=first and number == 0)
        net.norm_relu(f"{name} conv {number + 1}", size, out)


@dataclass(frozen=True)
class Dlrm:
    """Sizes of a recommendation model (arXiv 1906.00091). bottom begins with the number of dense features and ends with
    dim; top is what follows the pairwise products of the dense vector and the tables' vectors."""

    bottom: tuple[int, ...]
    top: tuple[int, ...]
    tables: int
    rows: int  # of each table
    dim: int
    look_ups: int  # of each table and sample, added up


# The workloads of 2201.07821. MLPerf's tables have very different numbers of rows; here is their mean.
DLRM_DEFAULT = Dlrm((512, 512, 64), (1024, 1024, 1024, 1), 8, 1_000_000, 64, 100)
DLRM_DDP = Dlrm((128, 128, 128, 128), (512, 512, 512, 256, 1), 8, 80_000, 128, 100)
DLRM_MLPERF = Dlrm((13, 512, 256, 128), (1024, 1024, 512, 256, 1), 26, 7_220_000, 128, 1)


def dlrm(shape: Dlrm, batch: int, *, ranks: int = 1, dtype: str = "fp32") -> StepGraph:
    """Tables are spread over the ranks, whose vectors travel to the samples' ranks; the networks are replicated."""
    net, vectors, dim = Net(batch, dtype), shape.tables + 1, shape.dim
    _network(net, "bottom", shape.bottom, first=True)
    read = batch * shape.tables * shape.look_ups * dim  # by a rank, whichever tables it has
    net.pass_over("look-up", read, 1 + 1 / shape.look_ups, 3)
    net.rows = shape.tables * shape.rows * dim // ranks
    if ranks > 1:
        size = float(batch * shape.tables * dim * net.width)
        for nodes, name in ((net.forward, "vectors"), (net.backward, "gradients of vectors")):
            nodes.append(Collective("all_to_all", "layers", name, "ep", ranks, size, dtype))
    flops, moved = 2.0 * batch * vectors**2 * dim, net.width * batch * vectors * (2 * dim + vectors)
    dims = (batch, vectors, vectors, dim)
    net.forward.append(Kernel("gemm", "layers", "pairs", dims, dtype, flops, moved))
    # Of both factors, which are the same vectors.
    net.backward.append(
        Kernel("gemm", "layers", "pairs backward", (batch, vectors, dim, vectors), dtype, flops, moved, times=2)
    )
    net.saved += batch * vectors * dim * net.width
    pairs = vectors * (vectors - 1) // 2
    net.pass_over("choose pairs", batch * (pairs + dim), 2, 2)
    _network(net, "top", (pairs + dim, *shape.top))
    net.pass_over("cross entropy", batch, 2, 2)
    return net_graph(net, ranks)


def _network(net: Net, name: str, sizes: tuple[int, ...], first: bool = False) -> None:
    for number, (features, out) in enumerate(pairwise(sizes)):
        net.linear(f"{name} {number + 1}", features, out, first=first and number == 0)
        net.pass_over(f"{name} {number + 1} activation", net.batch * out, 2, 3, kept=net.batch * out)


def net_graph(net: Net, ranks: int) -> StepGraph:
    """One stage, gradients of the replicated parameters reduced while backward computes, and SGD with momentum."""
    piece = Piece(tuple(net.forward), tuple(reversed(net.backward)), tuple(reversed(net.weight)), saved=net.saved)
    held = Parameters(dense=net.parameters, expert=net.rows, trained=net.parameters + net.rows)
    stage = Stage(0, 0, (0,), held, Saved(net.saved, net.saved, 0.0), (Run(piece),))
    gradients: tuple[Node, ...] = ()
    if ranks > 1:
        size = float(net.parameters * net.width)
        gradients = (Collective("all_reduce", "gradients", "gradients", "dp", ranks, size, net.dtype, overlap=True),)
    moved = 5.0 * net.parameters * 4  # gradient, momentum and weight read, the latter two written
    update = Kernel("memory", "optimizer", "sgd", (net.parameters,), "fp32", 0.0, moved)
    products = (n for n in (*net.forward, *net.backward, *net.weight) if isinstance(n, Kernel))
    return StepGraph(
        world_size=ranks,
        micro_batches=1,
        tokens=net.batch * ranks,  # samples
        model_flops=ranks * sum(n.flops * n.times for n in products),
        stages=(stage,),
        ranks=(RankStep(0, (), gradients, (update,)),),
    )
