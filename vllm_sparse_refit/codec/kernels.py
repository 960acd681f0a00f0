"""The codec's loops over arrays: compiled where that was possible, in numpy elsewhere.

Pure functions on numpy arrays, safe in any thread. The compiled ones run without the interpreter
lock, so that several threads work at once. Arrays of bits and codes are integers of 1, 2, 4 or 8
bytes, signed or not; only their width counts.
"""

import mmap
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_sparse_refit.codec import portable

try:
    from vllm_sparse_refit.codec import _kernels as compiled
except ImportError:
    compiled: ModuleType | None = None  # type: ignore[no-redef]

_Array = npt.NDArray[Any]

XOR: Final = 1
OVERWRITE: Final = 2
ADD: Final = 3

# A gap byte of this value, a nibble of that one, say that the number is kept elsewhere.
ESCAPED_GAP: Final = 255
ESCAPED_NIBBLE: Final = 15
# Nibbles are used when at most one code in so many does not fit.
NIBBLES_PER_ESCAPE: Final = 4

# What codes take at most, in bytes; _kernels.c has the same two.
_CODED_PER_ELEMENT: Final = 18
_CODED_PER_CHUNK: Final = 32

_of_thread = threading.local()
_NOTHING: _Array = np.empty(0, np.uint8)

_loops: Any = portable if compiled is None else compiled


def implementation() -> str:
    """What runs the loops: ``"avx512"``, ``"avx2"``, ``"portable"`` (compiled C) or ``"numpy"``."""
    return "numpy" if _loops is portable else str(_loops.instructions())


def scratch(purpose: str, size: int, dtype: npt.DTypeLike) -> _Array:
    """Uninitialized memory of this thread, ``[size]``, until it asks for the same purpose again.

    Fresh memory of such sizes comes from the system page by page, which takes longer than all that is
    done with it. Only what was ever written to is really taken.
    """
    nbytes = size * np.dtype(dtype).itemsize
    return _at_least(purpose, nbytes)[:nbytes].view(dtype)


def _at_least(purpose: str, nbytes: int) -> _Array:
    """As :func:`scratch`, uint8, with all the memory that there is: sizes differ from call to call."""
    held: dict[str, _Array] = _of_thread.__dict__
    memory = held.get(purpose, _NOTHING)
    if memory.size < nbytes:
        # Not numpy's own, which asks for huge pages: those are cleared 2 MiB at a time.
        pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory = held[purpose] = np.frombuffer(pages, np.uint8)
    return memory


def find_changes(
    old: _Array,
    new: _Array,
    operation: int,
    begin: int,
    location_dtype: type[np.signedinteger[Any]],
) -> tuple[_Array, _Array]:
    """Find the elements that differ, in one pass over both arrays.

    Args:
        old: Contiguous, ``[n]``.
        new: The same dtype and length.
        operation: ``XOR`` yields old xor new, ``ADD`` new - old (wrapping), ``OVERWRITE`` new.
        begin: Added to every location.
        location_dtype: int32 or int64; must hold ``begin + n - 1``.

    Returns:
        Ascending locations ``[k]`` and the values at them ``[k]``, of the inputs' dtype.
    """
    locations = scratch("locations", old.size, location_dtype)
    values = scratch("values", 2 * old.size, old.dtype)  # old and new bits before they are values
    found = _loops.find_changes(old, new, operation, begin, locations, values)
    return locations[:found].copy(), values[:found].copy()


class CodedChanges(NamedTuple):
    """What :func:`code_changes` found; numbers are in the machine's byte order.

    Attributes:
        count: How many elements differ; all else is empty or 0 if none does.
        first, last: The first location and the last one.
        gaps: As from :func:`encode_gaps`, a byte each.
        wide: As from there, 8 bytes each.
        nibbles: As from :func:`encode_nibbles`; empty for ``OVERWRITE``, and where more than one code in
            ``NIBBLES_PER_ESCAPE`` would escape.
        codes: Of the width of the arrays: values, in zigzag form for ``ADD``; with nibbles, those that they
            escape, and all of them otherwise.
        low, high: Halves of the digest (``digest.py``) of the elements in the old array; 0 for ``OVERWRITE``.
    """

    found: int
    first: int
    last: int
    gaps: bytes
    wide: bytes
    nibbles: bytes
    codes: bytes
    low: int
    high: int


class ChunkArrays(NamedTuple):
    """A chunk of a tensor before and after a change.

    Attributes:
        old: Contiguous, ``[n]``.
        new: The same width and length.
        operation: As for :func:`find_changes`.
        begin: Added to every location.
        is_wide: Whether locations are int64, not int32, which must hold ``begin + n - 1``.
    """

    old: _Array
    new: _Array
    operation: int
    begin: int
    is_wide: bool


def code_changes(chunks: list[ChunkArrays]) -> list[CodedChanges]:
    """:func:`find_changes`, and all codes of what it finds, of several chunks in one call.

    Raises:
        ValueError: arrays do not fit each other; nothing was coded.
    """
    most = max((chunk.old.size for chunk in chunks), default=0)
    room = sum(chunk.old.size * _CODED_PER_ELEMENT + _CODED_PER_CHUNK for chunk in chunks)
    found = _loops.code_changes(
        chunks,
        _at_least("locations of chunks", 8 * most),
        _at_least("values of chunks", 16 * most),
        _at_least("codes of chunks", room),
    )
    return [CodedChanges(*codes) for codes in found]


def encode_gaps(locations: _Array, gaps: _Array, wide: _Array) -> int:
    """Code the distances of neighbouring locations, less one, in a byte each.

    Args:
        locations: Strictly ascending, int32 or int64, ``[n]``, n at least 1.
        gaps: Takes them, uint8, ``[n - 1]``.
        wide: Takes, for each gap that is ``ESCAPED_GAP``, the rest above 255; uint64, at least
            ``[n - 1]``.

    Returns:
        How many gaps were escaped.

    Raises:
        ValueError: the locations do not ascend.
    """
    return int(_loops.write_gaps(locations, gaps, wide))


def decode_gaps(
    gaps: _Array, wide: _Array, first: int, end: int, location_dtype: type[np.signedinteger[Any]]
) -> tuple[_Array, int]:
    """The reverse of :func:`encode_gaps`, for input of unknown origin.

    Args:
        gaps: uint8, ``[n - 1]``.
        wide: uint64, as many as there are escaped gaps, or more.
        first: The first location, below ``end``.
        end: What all locations must stay below; ``location_dtype`` must hold ``end - 1``.
        location_dtype: int32 or int64.

    Returns:
        Strictly ascending locations ``[n]``, and how many of ``wide`` were used.

    Raises:
        ValueError: there are too few wide gaps, or a location reaches ``end``.
    """
    locations = np.empty(gaps.size + 1, location_dtype)
    return locations, int(_loops.read_gaps(gaps, wide, first, end, locations))


def encode_nibbles(codes: _Array, nibbles: _Array, escapes: _Array) -> int:
    """Pack codes below 15 two to a byte, the first in the low half.

    Args:
        codes: ``[n]``.
        nibbles: Takes them, uint8, ``[(n + 1) // 2]``.
        escapes: Takes the codes of 15 and more, in order; of the dtype of ``codes``, at least ``[n]``.

    Returns:
        How many codes were escaped.
    """
    return int(_loops.write_nibbles(codes, nibbles, escapes))


def count_escaped_nibbles(nibbles: _Array) -> int:
    """How many nibbles say that their code is kept elsewhere; the unused half of a last byte is 0."""
    high = int(np.count_nonzero(nibbles >= ESCAPED_NIBBLE << 4))
    return high + int(np.count_nonzero(nibbles & 15 == ESCAPED_NIBBLE))


def decode_nibbles(nibbles: _Array, escapes: _Array, count: int) -> _Array:
    """The reverse of :func:`encode_nibbles`: ``count`` codes of the dtype of ``escapes``.

    Raises:
        ValueError: there are too few escapes.
    """
    codes = np.empty(count, escapes.dtype)
    _loops.read_nibbles(nibbles, escapes, codes)
    return codes


def write_planes(parts: list[tuple[int, bytes]]) -> dict[int, bytes]:
    """Byte 0 (the lowest) of every number, then byte 1 of every number that has one, ...

    Args:
        parts: Width of the numbers, in bytes, and some of them in the machine's byte order.

    Returns:
        By plane. One of zeros is left out, except the first, which tells how many numbers there are.

    Raises:
        ValueError: a part is not made of numbers of its width.
    """
    planes: dict[int, bytes] = _loops.write_planes(parts)
    return planes


def read_plane(plane_bytes: _Array, plane: int, codes: _Array) -> None:
    """The reverse of one plane of :func:`write_planes`: byte ``plane`` is or-ed into ``codes``.

    Args:
        plane_bytes: uint8, ``[n]``.
        plane: 0 is the lowest.
        codes: ``[n]``.
    """
    _loops.read_plane(plane_bytes, plane, codes)


def zigzag(values: _Array, codes: _Array) -> _Array:
    """Signed steps as small codes: 0, -1, 1, -2, ... become 0, 1, 2, 3, ...

    Returns:
        ``codes``, which takes them; of the width of ``values`` and as many.
    """
    _loops.zigzag(values, codes)
    return codes


def unzigzag(codes: _Array) -> None:
    """The reverse of :func:`zigzag`, in place."""
    _loops.unzigzag(codes)


class ArrayWrite(NamedTuple):
    """Elements of an array, and what to do with them: at ``where * stride + shift``.

    Attributes:
        target: Contiguous; writable if it is written to.
        where: Distinct locations, int32 or int64, ``[n]``, fastest when they ascend; or the first of a run
            of ``n``.
        values: ``[n]``, of the target's width.
        operation: ``XOR``, ``OVERWRITE`` or ``ADD`` (wrapping).
        stride: At least 1.
        shift: May be negative.
        canonical: What a digest takes for the positions of the elements, int32 or int64, ``[n]``; those in
            ``where`` if None.
    """

    target: _Array
    where: _Array | int
    values: _Array
    operation: int
    stride: int = 1
    shift: int = 0
    canonical: _Array | None = None


def before_bytes(writes: Sequence[ArrayWrite]) -> int:
    """Size of the memory for the old bits of writes: those of each begin at a multiple of eight bytes."""
    return sum(-(-write.values.nbytes // 8) * 8 for write in writes)


def before_parts(writes: Sequence[ArrayWrite], before: _Array) -> list[_Array]:
    """The old bits of each write, of its values' dtype, in memory that :func:`scatter` filled."""
    parts, at = [], 0
    for write in writes:
        parts.append(before[at : at + write.values.nbytes].view(write.values.dtype))
        at += -(-write.values.nbytes // 8) * 8
    return parts


def scatter(
    writes: list[ArrayWrite],
    *,
    before: _Array | None = None,
    done: _Array | None = None,
    threads: int = 1,
) -> None:
    """Do writes to distinct elements, in one pass.

    Args:
        writes: Any number; no element may be in two of them.
        before: Takes the bits that were there, uint8, ``[before_bytes(writes)]``.
        done: One byte, uint8, that becomes 1 once ``before`` holds what it takes to undo the writes. An
            interrupt can end this call after the writes as well as before them; this tells which.
        threads: At most; few elements get fewer.

    Raises:
        ValueError: a location is outside its target, or sizes do not fit; nothing was written.
    """
    _loops.scatter(writes, before, done, threads)


def count_different(
    writes: list[ArrayWrite], before: _Array, *, limit: int, threads: int = 1
) -> tuple[int, int]:
    """Look whether elements still hold what :func:`scatter` made of them.

    Args:
        writes: As they were handed to it.
        before: What it filled.
        limit: Elements of each write to look at, evenly spread; at least 1.
        threads: At most.

    Returns:
        How many were looked at, and how many of them hold something else.
    """
    compared, different = _loops.count_different(writes, before, limit, threads)
    return int(compared), int(different)


def digest_targets(writes: list[ArrayWrite], *, threads: int = 1) -> _Array:
    """Both halves of the digest (``digest.py``) of what the targets hold where writes would go.

    Returns:
        uint64, ``[len(writes), 2]``.

    Raises:
        ValueError: a location is outside its target.
    """
    sums = np.empty((len(writes), 2), np.uint64)
    _loops.digest_targets(writes, sums.reshape(-1), threads)
    return sums


def digest_run(bits: _Array, begin: int) -> tuple[int, int]:
    """Both halves of the digest (``digest.py``) of elements ``begin``, ``begin + 1``, ...

    Args:
        bits: ``[n]``.
        begin: Position of the first one.
    """
    low, high = _loops.digest_run(bits, begin)
    return int(low), int(high)


def digest_places(bits: _Array, locations: _Array) -> tuple[int, int]:
    """As :func:`digest_run`, for elements at ``locations``, int32 or int64, ``[n]``, not negative."""
    low, high = _loops.digest_places(bits, locations)
    return int(low), int(high)
