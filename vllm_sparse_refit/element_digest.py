"""A digest of a tensor's elements that does not depend on the order in which they are read."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

_CHUNK: Final = 1 << 20
_SEEDS: Final = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)

_U64 = npt.NDArray[np.uint64]


def box_digest(
    bits: torch.Tensor, offset: int, shape: Sequence[int], strides: Sequence[int]
) -> str:
    """The digest of a strided box of a canonical tensor: the sum of a hash of each element.

    Two boxes have equal digests if they are the same box with the same bits, and otherwise only by an
    accident of 1 in 2^128. Guards against accidents, not attackers.

    Args:
        bits: the elements of the box as integers, in the box's own shape, on any device.
        offset: of the box's first element in the flat, row-major canonical tensor.
        shape: of the box.
        strides: of the box, in elements of the canonical tensor.

    Returns:
        32 hex digits.
    """
    sums = [0, 0]
    flat = bits.reshape(-1)
    for first, positions in _positions(offset, shape, strides):
        chunk = flat[first : first + len(positions)].cpu().numpy()
        values = chunk.view(f"u{chunk.itemsize}").astype(np.uint64)
        for lane, seed in enumerate(_SEEDS):
            hashed = _mixed(_mixed(positions + np.uint64(seed)) ^ values)
            sums[lane] += int(hashed.sum(dtype=np.uint64))
    return "".join(f"{total % (1 << 64):016x}" for total in sums)


def _positions(
    offset: int, shape: Sequence[int], strides: Sequence[int]
) -> Iterator[tuple[int, _U64]]:
    """Canonical positions of a box's elements in row-major order, in chunks with their first index."""
    count = int(np.prod(shape, dtype=np.int64))
    for first in range(0, count, _CHUNK):
        rest: Any = np.arange(first, min(first + _CHUNK, count), dtype=np.uint64)
        positions = np.full(len(rest), offset, dtype=np.uint64)
        for size, stride in zip(reversed(shape), reversed(strides), strict=True):
            positions += (rest % np.uint64(size)) * np.uint64(stride)
            rest //= np.uint64(size)
        yield first, positions


def _mixed(values: _U64) -> _U64:
    """The finalizer of splitmix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
