"""A digest of a tensor's bits that parts can be added to and taken from.

The digest of a set of elements is the sum, over its elements, of two independent 64-bit hashes of
(flat position, bits), each modulo 2**64; bits are unsigned. So it does not depend on the order, the
digests of parts add up to that of the whole, and a change costs what changed: the old elements are
taken away and the new ones added. The hash is a linear form of both, mixed by multiplications and
shifts. It finds accidents, not attackers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Self

import torch

from vllm_sparse_refit.codec import kernels

_HALF: Final = 1 << 64
# Elements that are looked at together, of a box or on a device.
_CHUNK: Final = 1 << 20


def _signed(word: int) -> int:
    """The number of 64 bits as torch has it."""
    return word - _HALF if word >> 63 else word


# Of each half: what position and bits are multiplied with, and what is added.
_FORMS: Final = tuple(
    tuple(map(_signed, form))
    for form in (
        (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9),
        (0x85EBCA77C2B2AE63, 0xFF51AFD7ED558CCD, 0x27D4EB2F165667C5),
    )
)
_MULTIPLIER: Final = _signed(0xD6E8FEB86659FD93)
_LOW_32_BITS: Final = (1 << 32) - 1


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
            bits: 1-D contiguous integers, ``[n]``. If they are on a device, this waits for it.
            locations: Their flat positions: a range of step 1, or int32 or int64 ``[n]`` on the
                device of ``bits``.
        """
        if bits.device.type != "cpu":
            if isinstance(locations, range):
                locations = torch.arange(locations.start, locations.stop, device=bits.device)
            return cls.of_halves(digest_on_device(bits, locations))
        if isinstance(locations, range):
            return cls(*kernels.digest_run(bits.numpy(), locations.start))
        return cls(*kernels.digest_places(bits.numpy(), locations.numpy()))

    @classmethod
    def of_halves(cls, halves: torch.Tensor) -> Self:
        """What :func:`digest_on_device` computed, or a sum of such; waits for the device."""
        low, high = halves.tolist()
        return cls(low % _HALF, high % _HALF)


def digest_sum(digests: Iterable[BitsDigest]) -> BitsDigest:
    """The digest of all elements of parts that share none."""
    low = high = 0
    for digest in digests:
        low, high = low + digest.low, high + digest.high
    return BitsDigest(low % _HALF, high % _HALF)


def digest_on_device(bits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The digest of some elements, computed where they are, without waiting for it.

    Temporaries are about 50 bytes an element, of at most a mebi of elements at a time.

    Args:
        bits: 1-D integers, ``[n]``, on any device; the CPU has faster loops, see
            :meth:`BitsDigest.of`.
        positions: Their flat positions, int32 or int64, ``[n]``, on the same device.

    Returns:
        The low and the high half as signed integers: int64 ``[2]`` on that device, for
        :meth:`BitsDigest.of_halves`. Digests of parts may be added before.
    """
    sums = torch.zeros(2, dtype=torch.int64, device=bits.device)
    for first in range(0, bits.numel(), _CHUNK):
        chunk = slice(first, first + _CHUNK)
        sums += _digest_on_device(bits[chunk], positions[chunk])
    return sums


def _digest_on_device(bits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The same at once. Every constant is a number of Python: a tensor would have to be copied."""
    where, what = positions.to(torch.int64), bits.to(torch.int64)
    if bits.itemsize < 8:
        what = what & ((1 << 8 * bits.itemsize) - 1)  # a sign is a bit like others
    x = torch.empty((2, bits.numel()), dtype=torch.int64, device=bits.device)
    for half, (of_position, of_bits, constant) in zip(x, _FORMS, strict=True):
        torch.mul(where, of_position, out=half)
        half.add_(what, alpha=of_bits).add_(constant)
    _fold(x)
    for _ in range(2):
        x *= _MULTIPLIER
        _fold(x)
    return x.sum(1)


def _fold(x: torch.Tensor) -> None:
    """Xor the upper half of each number into the lower; shifts of int64 would carry the sign along."""
    upper = x >> 32
    upper &= _LOW_32_BITS
    x ^= upper


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
    flat = bits.reshape(-1)
    if flat.device.type != "cpu":
        return BitsDigest.of_halves(_box_on_device(flat, offset, shape, strides))
    digest = BitsDigest()
    is_run = _is_one_run(shape, strides)
    for first in range(0, flat.numel(), _CHUNK):
        chunk = flat[first : first + _CHUNK]
        end = first + chunk.numel()
        if is_run:
            digest += BitsDigest.of(chunk, range(offset + first, offset + end))
        else:
            digest += BitsDigest.of(chunk, _positions(range(first, end), offset, shape, strides))
    return digest


def _box_on_device(
    flat: torch.Tensor, offset: int, shape: Sequence[int], strides: Sequence[int]
) -> torch.Tensor:
    """Both halves, as of :func:`digest_on_device`, of a box's elements in row-major order."""
    sums = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for first in range(0, flat.numel(), _CHUNK):
        chunk = flat[first : first + _CHUNK]
        which = range(first, first + chunk.numel())
        sums += digest_on_device(chunk, _positions(which, offset, shape, strides, flat.device))
    return sums


def _is_one_run(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements of a box, in row-major order, follow each other in the tensor."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _positions(
    which: range,
    offset: int,
    shape: Sequence[int],
    strides: Sequence[int],
    device: torch.device | None = None,
) -> torch.Tensor:
    """Canonical positions, int64, of some of a box's elements in row-major order."""
    rest = torch.arange(which.start, which.stop, device=device)
    positions = torch.full_like(rest, offset)
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        positions += rest % size * stride
        rest = rest.div(size, rounding_mode="floor")
    return positions
