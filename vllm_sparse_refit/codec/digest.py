"""A digest of a tensor's bits that parts can be added to and taken from.

The digest of a set of elements is the sum, over its elements, of two independent 64-bit hashes of
(flat position, bits), each modulo 2**64. So it does not depend on the order, the digests of parts add
up to that of the whole, and a change costs what changed: the old elements are taken away and the new
ones added. The hash is a linear form of both, mixed by multiplications and shifts. It finds accidents,
not attackers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import torch

from vllm_sparse_refit.codec import kernels

_HALF: Final = 1 << 64
# Elements of a box that are looked at together.
_CHUNK: Final = 1 << 20


@dataclass(frozen=True)
class BitsDigest:
    """A 128-bit digest; the default is that of no element."""

    low: int = 0
    high: int = 0

    def __add__(self, other: "BitsDigest") -> "BitsDigest":
        return BitsDigest((self.low + other.low) % _HALF, (self.high + other.high) % _HALF)

    def __sub__(self, other: "BitsDigest") -> "BitsDigest":
        return BitsDigest((self.low - other.low) % _HALF, (self.high - other.high) % _HALF)

    @property
    def hex(self) -> str:
        """32 hex digits."""
        return f"{self.high:016x}{self.low:016x}"

    @classmethod
    def from_hex(cls, digits: str) -> Self:
        """The reverse of :attr:`hex`.

        Raises:
            ValueError: these are not 32 hex digits.
        """
        if len(digits) != 32:
            raise ValueError(f"a digest has 32 hex digits, not {digits!r}")
        return cls(int(digits[16:], 16), int(digits[:16], 16))

    @classmethod
    def of(cls, bits: torch.Tensor, locations: torch.Tensor | range) -> Self:
        """The digest of some elements.

        Args:
            bits: 1-D contiguous integers on the CPU, ``[n]``.
            locations: Their flat positions: a range of step 1, or int32 or int64 ``[n]`` on the CPU.
        """
        if isinstance(locations, range):
            return cls(*kernels.digest_run(bits.numpy(), locations.start))
        return cls(*kernels.digest_places(bits.numpy(), locations.numpy()))


def box_digest(
    bits: torch.Tensor, offset: int, shape: Sequence[int], strides: Sequence[int]
) -> BitsDigest:
    """The digest of a strided box of a canonical tensor.

    Args:
        bits: The elements of the box as integers, in the box's own shape, any strides, on any device.
        offset: Of the box's first element in the flat, row-major canonical tensor.
        shape: Of the box.
        strides: Of the box, in elements of the canonical tensor.
    """
    flat, digest = bits.reshape(-1), BitsDigest()
    is_run = _is_one_run(shape, strides)
    for first in range(0, flat.numel(), _CHUNK):
        chunk = flat[first : first + _CHUNK].cpu()
        end = first + chunk.numel()
        if is_run:
            digest += BitsDigest.of(chunk, range(offset + first, offset + end))
        else:
            digest += BitsDigest.of(chunk, _positions(range(first, end), offset, shape, strides))
    return digest


def _is_one_run(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements of a box, in row-major order, follow each other in the tensor."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _positions(
    which: range, offset: int, shape: Sequence[int], strides: Sequence[int]
) -> torch.Tensor:
    """Canonical positions, int64, of some of a box's elements in row-major order."""
    rest = torch.arange(which.start, which.stop)
    positions = torch.full_like(rest, offset)
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        positions += rest % size * stride
        rest = rest.div(size, rounding_mode="floor")
    return positions
