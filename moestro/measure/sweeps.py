"""Sweeps found among samples: cases that differ in one width only, from which alignment can be read."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from moestro.hardware.profile import Sample

FEWEST_WIDTHS = 6
FEWEST_CLASSES = 3  # of alignment, or the sweep says nothing about it
VOCABULARY = 16_000  # a sweep of outputs up to such a width is one of logits
MOST_ALIGNED = 128  # multiples of higher powers of two count as this

# name → (operation, the width that changes)
_KINDS = {
    "gemm_n": ("gemm", "n"),
    "gemm_k": ("gemm", "k"),
    "hidden": ("gemm", "hidden"),
    "vocab": ("gemm", "n"),
    "expert_n": ("grouped_gemm", "n"),
    "ffn": ("moe_experts", "ffn"),
    "head_dim": ("attention", "head_dim"),
}


@dataclass(frozen=True)
class Sweep:
    """Samples in the order of their widths. name: a key of what was swept, as in the constants align_NAME_DTYPE."""

    name: str
    dtype: str
    samples: tuple[Sample, ...]

    def width(self, sample: Sample) -> int:
        return _width(sample, _KINDS[self.name][1])

    @property
    def fixed(self) -> dict[str, int | float | str]:
        """The entries of the case that all samples share."""
        first = self.samples[0].case
        return {k: v for k, v in first.items() if all(s.case.get(k) == v for s in self.samples)}


def alignment_of(width: int) -> int:
    """The largest power of two that divides the width, at most MOST_ALIGNED."""
    return min(width & -width, MOST_ALIGNED)


def find_sweeps(samples: Iterable[Sample]) -> list[Sweep]:
    """For every kind of width and dtype the sweep with the most widths, in the order of the kinds.

    A hidden size changes n and k of a product together; a vocabulary is an n that reaches VOCABULARY.
    """
    samples = list(samples)
    sweeps = []
    for name, (op, width) in _KINDS.items():
        groups = defaultdict[tuple[object, ...], list[Sample]](list)
        for sample in samples:
            if sample.op == op and sample.flops and (key := _rest(name, sample, width)) is not None:
                groups[key].append(sample)
        best = dict[str, list[Sample]]()
        for group in groups.values():
            dtype = str(group[0].case.get("dtype", ""))
            widths = {_width(s, width) for s in group}
            if name in ("gemm_n", "vocab") and (max(widths) >= VOCABULARY) != (name == "vocab"):
                continue
            if _telling(widths) and len(group) > len(best.get(dtype, ())):
                best[dtype] = group
        for dtype, group in sorted(best.items()):
            sweeps.append(Sweep(name, dtype, tuple(sorted(group, key=lambda s: _width(s, width)))))
    return sweeps


def _rest(name: str, sample: Sample, width: str) -> tuple[object, ...] | None:
    """What must be equal among the samples of one sweep, or None when the sample is of none."""
    case = dict(sample.case)
    if name == "hidden":
        if case["n"] != case["k"] or case["m"] == case["n"]:
            return None
        del case["n"], case["k"]
    elif width not in case:
        return None
    else:
        del case[width]
    return (sample.software, *sorted(case.items()))


def _telling(widths: set[int]) -> bool:
    return len(widths) >= FEWEST_WIDTHS and len({alignment_of(w) for w in widths}) >= FEWEST_CLASSES


def _width(sample: Sample, width: str) -> int:
    return int(sample.number("n" if width == "hidden" else width))
