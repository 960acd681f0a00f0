"""The fastest read-only bitwise compare of two sets of arrays, as a bound for an encoder.

Whatever finds changes must read both copies once. Equal arrays are compared, since most of these
methods stop at the first difference.
"""

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]
Piece = tuple[Bytes, Bytes]
IsEqual = Callable[[Bytes, Bytes], bool]

THREADS = (1, 2)
_PIECE_BYTES = 1 << 22
# Two blocks and a mask stay in a core's cache.
_BLOCK_BYTES = 1 << 18
_PROBES = 3

_memcmp = ctypes.CDLL(None).memcmp  # ctypes lets other threads run during the call
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def pieces(arrays: Sequence[Bytes]) -> list[Piece]:
    """Each array and a copy of it, cut so that threads can share them."""
    found = []
    for array in arrays:
        copy = array.copy()
        for begin in range(0, array.size, _PIECE_BYTES):
            part = slice(begin, begin + _PIECE_BYTES)
            found.append((array[part], copy[part]))
    return found


@dataclass(frozen=True)
class Method:
    """A way to compare, and how many threads share the pieces."""

    name: str
    is_equal: IsEqual
    threads: int

    def seconds(self, compared: Sequence[Piece]) -> float:
        """How long it takes to compare all pieces.

        Raises:
            AssertionError: it took equal pieces for different ones.
        """

        def compare(mine: Sequence[Piece]) -> bool:
            return all(self.is_equal(one, other) for one, other in mine)

        shares = [compared[start :: self.threads] for start in range(self.threads)]
        with ThreadPoolExecutor(self.threads) as pool:
            list(pool.map(lambda _: None, shares))  # the threads exist before the clock starts
            started = time.perf_counter()
            equal = all(list(pool.map(compare, shares)))
            taken = time.perf_counter() - started
        if not equal:
            raise AssertionError(f"{self.name} takes equal bytes for different ones")
        return taken


def fastest(compared: Sequence[Piece]) -> Method:
    """The method with the best median here and now."""
    methods = [
        Method(f"{name}, {threads} thread{'s' * (threads > 1)}", is_equal, threads)
        for name, is_equal in WAYS.items()
        for threads in THREADS
    ]
    # One probe of each in turn, so that a noisy moment hits all of them.
    times = [[method.seconds(compared) for method in methods] for _ in range(_PROBES)]
    medians = [statistics.median(own) for own in zip(*times, strict=True)]
    return methods[medians.index(min(medians))]


def _by_memcmp(one: Bytes, other: Bytes) -> bool:
    return bool(_memcmp(one.ctypes.data, other.ctypes.data, one.size) == 0)


def _by_numpy_not_equal(one: Bytes, other: Bytes) -> bool:
    different = np.empty(_BLOCK_BYTES, np.bool_)
    for left, right in _blocks(one, other):
        if np.not_equal(left, right, out=different[: left.size]).any():
            return False
    return True


def _by_numpy_array_equal(one: Bytes, other: Bytes) -> bool:
    return all(np.array_equal(left, right) for left, right in _blocks(one, other))


def _by_torch_equal(one: Bytes, other: Bytes) -> bool:
    return torch.equal(torch.from_numpy(_wide(one)), torch.from_numpy(_wide(other)))


def _blocks(one: Bytes, other: Bytes) -> list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    left, right = _wide(one), _wide(other)
    step = _BLOCK_BYTES // left.itemsize
    return [
        (left[begin : begin + step], right[begin : begin + step])
        for begin in range(0, left.size, step)
    ]


def _wide(array: Bytes) -> npt.NDArray[Any]:
    """Eight bytes at a time where the size allows."""
    return array.view(np.int64) if array.size % 8 == 0 else array


WAYS: dict[str, IsEqual] = {
    "memcmp": _by_memcmp,
    "numpy.not_equal in blocks": _by_numpy_not_equal,
    "numpy.array_equal in blocks": _by_numpy_array_equal,
    "torch.equal": _by_torch_equal,
}
