"""The loops of ``_kernels.c`` in numpy, for where that was not compiled. Same names, same contract."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

_Array = npt.NDArray[Any]

_XOR: Final = 1
_OVERWRITE: Final = 2
_ADD: Final = 3
# Two blocks of this size and their mask stay in a core's L2 cache.
_BLOCK_BYTES: Final = 1 << 18
# Flags of a mask, one byte each, that are looked at together.
_FLAGS: Final = 8
_ESCAPED_GAP: Final = 255
_ESCAPED_NIBBLE: Final = 15
_U64: Final = np.uint64


def find_changes(  # noqa: PLR0917 - called as the compiled one is
    old: _Array, new: _Array, operation: int, begin: int, locations: _Array, values: _Array, /
) -> int:
    found = 0
    step = _BLOCK_BYTES // old.itemsize
    for at in range(0, old.size, step):
        a, b = old[at : at + step], new[at : at + step]
        changed = _changed_positions(a, b)
        block = slice(found, found + changed.size)
        b = b.take(changed)
        if operation == _XOR:
            values[block] = a.take(changed) ^ b
        elif operation == _ADD:
            values[block] = b - a.take(changed)
        else:
            values[block] = b
        locations[block] = changed + (begin + at)
        found = block.stop
    return found


def _changed_positions(old: _Array, new: _Array) -> _Array:
    mask = np.zeros(-(-old.size // _FLAGS) * _FLAGS, np.bool_)
    np.not_equal(old, new, out=mask[: old.size])
    # Most groups of flags are all clear, and whole groups are much faster to look through.
    groups = mask.view(np.int64)
    hits = np.flatnonzero(groups != 0)  # much faster on booleans than on integers
    flags = np.flatnonzero(groups.take(hits).view(np.bool_))
    # Shifts and masks, since divisions are slow; _FLAGS is a power of two.
    positions = hits.take(flags >> (_FLAGS.bit_length() - 1))
    positions *= _FLAGS
    positions += flags & (_FLAGS - 1)
    return positions


def code_changes(  # noqa: PLR0917
    old: _Array,
    new: _Array,
    operation: int,
    begin: int,
    locations: _Array,
    values: _Array,
    gaps: _Array,
    wide: _Array,
    nibbles: _Array,
    escapes: _Array,
    /,
) -> tuple[int, int, int, int, int]:
    found = find_changes(old, new, operation, begin, locations, values)
    if not found:
        return 0, 0, 0, 0, 0
    escaped = low = high = 0
    used = write_gaps(locations[:found], gaps[: found - 1], wide)
    if operation == _ADD:
        zigzag(values[:found].copy(), values[:found])
    if operation != _OVERWRITE:
        low, high = digest_places(old.take(locations[:found] - begin), locations[:found])
        escaped = int(np.count_nonzero(_unsigned(values[:found]) >= _ESCAPED_NIBBLE))
        if escaped <= found // 2:  # where most codes escape, nibbles are not used
            write_nibbles(values[:found], nibbles[: (found + 1) // 2], escapes)
    return found, used, escaped, low, high


def write_gaps(locations: _Array, gaps: _Array, wide: _Array, /) -> int:
    if (locations[1:] <= locations[:-1]).any():
        raise ValueError("the locations are not strictly ascending")
    codes = np.diff(locations.astype(np.uint64, copy=False)) - np.uint64(1)
    gaps[:] = np.minimum(codes, _ESCAPED_GAP)
    escaped = codes[gaps == _ESCAPED_GAP] - np.uint64(_ESCAPED_GAP)
    wide[: escaped.size] = escaped
    return int(escaped.size)


def read_gaps(gaps: _Array, wide: _Array, first: int, end: int, locations: _Array, /) -> int:
    marks = np.flatnonzero(gaps == _ESCAPED_GAP)
    if marks.size > wide.size:
        raise ValueError("there are fewer wide gaps than their marks")
    used = wide[: marks.size]
    # Checked before the sum, in floating point: it cannot wrap around and a wrong span is far too long.
    total = float(gaps.sum(dtype=np.uint64)) + float(gaps.size) + used.astype(np.float64).sum()
    if total > 1.001 * float(end - first):
        raise ValueError("a location is outside its span")
    steps = gaps.astype(np.uint64)
    steps[marks] += used
    steps += np.uint64(1)
    if first + int(steps.sum(dtype=np.uint64)) >= end:
        raise ValueError("a location is outside its span")
    locations[0] = first
    np.cumsum(steps, out=steps)
    locations[1:] = (steps + np.uint64(first)).view(np.int64)
    return int(marks.size)


def write_nibbles(codes: _Array, nibbles: _Array, escapes: _Array, /) -> int:
    unsigned = _unsigned(codes)
    low = np.zeros(2 * nibbles.size, np.uint8)
    low[: codes.size] = np.minimum(unsigned, _ESCAPED_NIBBLE)
    nibbles[:] = low[0::2] | low[1::2] << 4
    escaped = unsigned[unsigned >= _ESCAPED_NIBBLE]
    _unsigned(escapes)[: escaped.size] = escaped
    return int(escaped.size)


def read_nibbles(nibbles: _Array, escapes: _Array, codes: _Array, /) -> int:
    both = np.empty((nibbles.size, 2), np.uint8)
    both[:, 0] = nibbles & 15
    both[:, 1] = nibbles >> 4
    flat = both.reshape(-1)[: codes.size]
    marks = np.flatnonzero(flat == _ESCAPED_NIBBLE)
    if marks.size > escapes.size:
        raise ValueError("there are fewer escaped values than their marks")
    codes[:] = flat
    codes[marks] = escapes[: marks.size]
    return int(marks.size)


def write_plane(codes: _Array, plane: int, out: _Array, /) -> None:
    out[:] = (_unsigned(codes) >> 8 * plane) & 255


def read_plane(plane_bytes: _Array, plane: int, codes: _Array, /) -> None:
    unsigned = _unsigned(codes)
    unsigned |= plane_bytes.astype(unsigned.dtype) << 8 * plane


def zigzag(values: _Array, codes: _Array, /) -> None:
    signed = _signed(values)
    codes[:] = ((signed << 1) ^ (signed >> 8 * signed.itemsize - 1)).view(codes.dtype)


def unzigzag(codes: _Array, /) -> None:
    unsigned, signed = _unsigned(codes), _signed(codes)
    signs = -(signed & 1)
    unsigned >>= 1
    signed ^= signs


def scatter(  # noqa: PLR0917
    target: _Array,
    locations: _Array,
    values: _Array,
    operation: int,
    stride: int,
    shift: int,
    before: _Array | None,
    done: _Array | None,
    /,
) -> None:
    if locations.size:
        # Python's integers do not wrap around.
        ends = [int(end) * stride + shift for end in (locations.min(), locations.max())]
        if ends[0] < 0 or ends[1] >= target.size or stride < 1:
            raise ValueError("a location is outside the target")
    where = locations.astype(np.int64) * stride + shift
    old = target[where]
    if before is not None:
        before[:] = old
    if done is not None:
        done[0] = 1  # what is about to be written can be taken back from here on
    if operation == _XOR:
        target[where] = old ^ values
    elif operation == _ADD:
        target[where] = old + values
    else:
        target[where] = values


def digest_run(bits: _Array, begin: int, /) -> tuple[int, int]:
    low = high = 0
    for at in range(0, bits.size, _BLOCK_BYTES):
        block = bits[at : at + _BLOCK_BYTES]
        locations = np.arange(begin + at, begin + at + block.size, dtype=np.int64)
        sums = digest_places(block, locations)
        low, high = low + sums[0], high + sums[1]
    return low % (1 << 64), high % (1 << 64)


def digest_places(bits: _Array, locations: _Array, /) -> tuple[int, int]:
    where = locations.astype(np.int64, copy=False).view(np.uint64)
    what = _unsigned(bits).astype(np.uint64)
    low, high = (
        _mix(where * a + what * b + c).sum(dtype=np.uint64)
        for a, b, c in (
            (_U64(0x9E3779B97F4A7C15), _U64(0xC2B2AE3D27D4EB4F), _U64(0x165667B19E3779F9)),
            (_U64(0x85EBCA77C2B2AE63), _U64(0xFF51AFD7ED558CCD), _U64(0x27D4EB2F165667C5)),
        )
    )
    return int(low), int(high)


def _mix(x: _Array) -> _Array:
    half = _U64(32)
    x ^= x >> half
    x *= _U64(0xD6E8FEB86659FD93)
    x ^= x >> half
    x *= _U64(0xD6E8FEB86659FD93)
    x ^= x >> half
    return x


def _unsigned(array: _Array) -> _Array:
    return array.view(f"u{array.itemsize}")


def _signed(array: _Array) -> _Array:
    return array.view(f"i{array.itemsize}")
