"""Where the elements of a canonical tensor land in a parameter: strided boxes and their arithmetic.

Everything here is pure: tensors are only ever index vectors.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch


@dataclass(frozen=True)
class Box:
    """A strided box of elements in a flat storage; all three in elements, not bytes."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        """The box that ``tensor`` occupies in its own storage."""
        return cls(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def end(self) -> int:
        """One past the last element touched; ``offset`` for an empty box."""
        if self.numel == 0:
            return self.offset
        reach = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return self.offset + reach + 1

    @functools.cached_property
    def normalized(self) -> Self:
        """The same elements, written in one way only if the box is injective.

        Largest stride first, no axis of one element, and neighbours that are contiguous with each other
        merged.
        """
        axes = _merged_axes(self.shape, self.strides)
        return type(self)(self.offset, tuple(n for n, _ in axes), tuple(s for _, s in axes))

    @property
    def is_injective(self) -> bool:
        """Whether a flat position decomposes into the box's coordinates in at most one way.

        Sufficient test: with the axes sorted by stride, each stride is larger than everything that
        the smaller axes can add up to.
        """
        if self.numel == 0:
            return True
        reach = 0
        for size, stride in reversed(_axes(self.shape, self.strides)):
            if stride <= reach:
                return False
            reach += (size - 1) * stride
        return True


def _axes(shape: Sequence[int], *strides: Sequence[int]) -> list[tuple[int, ...]]:
    """Each axis as its size and its stride in each box, largest first stride first, none of one element."""
    axes = [axis for axis in zip(shape, *strides, strict=True) if axis[0] != 1]
    return sorted(axes, key=lambda axis: axis[1], reverse=True)


def _merged_axes(shape: Sequence[int], *strides: Sequence[int]) -> list[tuple[int, ...]]:
    """As :func:`_axes`, neighbours that are contiguous with each other in every box merged."""
    merged: list[tuple[int, ...]] = []
    for size, *steps in _axes(shape, *strides):
        inner = size
        if merged and merged[-1][1:] == tuple(size * step for step in steps):
            inner *= merged.pop()[0]
        merged.append((inner, *steps))
    return merged


@dataclass(frozen=True)
class BoxCopy:
    """One plain copy of a native loader: from the canonical tensor into a storage.

    Both boxes have the same shape, axis by axis.
    """

    source: Box
    target: Box

    @functools.cached_property
    def axes(self) -> list[tuple[int, ...]]:
        """``(size, source stride, target stride)``, largest source stride first, neighbours merged.

        Two axes that are contiguous with each other on both sides are one longer axis, so that the
        copy of a whole tensor, or of a block of its rows, has a single axis.
        """
        return _merged_axes(self.source.shape, self.source.strides, self.target.strides)


@dataclass(frozen=True, eq=False)
class PlacedRun:
    """Canonical positions that fall into one run of consecutive elements.

    ``selected`` is which of them do; their positions in the target storage are
    ``locations * stride + shift``.
    """

    selected: slice
    locations: torch.Tensor | range
    stride: int
    shift: int


def place_run(copy: BoxCopy, locations: torch.Tensor | range) -> PlacedRun | None:
    """As :func:`place`, without an array of positions; None if the copy is more than one run.

    One run is the usual case: a whole tensor, a block of its rows, an expert's slice.
    """
    axes = copy.axes
    if len(axes) != 1 or axes[0][1] != 1:
        return None
    selected = slice(*_narrow(locations, copy.source.offset, copy.source.end))
    stride = axes[0][2]
    shift = copy.target.offset - stride * copy.source.offset
    return PlacedRun(selected, locations[selected], stride, shift)


def place(copy: BoxCopy, locations: torch.Tensor | range) -> tuple[torch.Tensor, torch.Tensor]:
    """Map canonical positions through one copy.

    Args:
        copy: a copy whose source box :attr:`Box.is_injective`.
        locations: strictly ascending flat positions in the canonical tensor.

    Returns:
        ``(selected, positions)``: which of ``locations`` fall into the source box, as indices, and for
        each the flat position in the target storage; both int64, 1-D, CPU.
    """
    first, last = _narrow(locations, copy.source.offset, copy.source.end)
    rest = _as_int64(locations, first, last)
    axes = copy.axes
    rest -= copy.source.offset
    positions = torch.full_like(rest, copy.target.offset)
    inside = torch.ones(rest.numel(), dtype=torch.bool)
    for size, source_stride, target_stride in axes:
        index = torch.div(rest, source_stride, rounding_mode="floor")
        inside &= index < size
        positions.add_(index, alpha=target_stride)
        rest.sub_(index, alpha=source_stride)
    inside &= rest == 0
    kept = torch.nonzero(inside).squeeze(1)
    return kept + first, positions[kept]


def _narrow(locations: torch.Tensor | range, begin: int, end: int) -> tuple[int, int]:
    """The index range of ``locations`` whose values lie in ``[begin, end)``."""
    if isinstance(locations, range):
        first = min(max(begin - locations.start, 0), len(locations))
        return first, max(first, min(end - locations.start, len(locations)))
    largest = torch.iinfo(locations.dtype).max
    count = locations.numel()
    first = _count_below(locations, begin) if begin <= largest else count
    last = _count_below(locations, end) if end <= largest else count
    return first, last


def _count_below(locations: torch.Tensor, bound: int) -> int:
    array = locations.numpy()
    return int(np.searchsorted(array, array.dtype.type(bound)))


def _as_int64(locations: torch.Tensor | range, first: int, last: int) -> torch.Tensor:
    if isinstance(locations, range):
        return torch.arange(locations.start + first, locations.start + last)
    return locations[first:last].to(torch.int64, copy=True)


def boxes_overlap(a: Box, b: Box) -> bool:
    """Whether two boxes of one storage share an element. Exact.

    Boxes with disjoint extents, the usual case, cost nothing; interleaved ones (column blocks of
    one matrix) are marked in a mask as long as their common extent.
    """
    if a.numel == 0 or b.numel == 0 or a.end <= b.offset or b.end <= a.offset:
        return False
    start = min(a.offset, b.offset)
    mask = torch.zeros(max(a.end, b.end) - start, dtype=torch.bool)
    mask.as_strided(a.shape, a.strides, a.offset - start).fill_(True)
    return bool(mask.as_strided(b.shape, b.strides, b.offset - start).any())
