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
_NIBBLES_PER_ESCAPE: Final = 4
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


def code_changes(
    chunks: list[Any], _locations: _Array, _values: _Array, _coded: _Array, /
) -> list[tuple[int, int, int, bytes, bytes, bytes, bytes, int, int]]:
    return [_code_chunk(*chunk) for chunk in chunks]


def _code_chunk(
    old: _Array, new: _Array, operation: int, begin: int, is_wide: bool
) -> tuple[int, int, int, bytes, bytes, bytes, bytes, int, int]:
    every: _Array = np.empty(old.size, np.int64 if is_wide else np.int32)
    values: _Array = np.empty_like(old)
    found = find_changes(old, new, operation, begin, every, values)
    if not found:
        return 0, 0, 0, b"", b"", b"", b"", 0, 0
    locations, codes = every[:found], values[:found]
    low = high = 0
    gaps, wide = np.empty(found - 1, np.uint8), np.empty(found - 1, np.uint64)
    wide = wide[: write_gaps(locations, gaps, wide)]
    nibbles = gaps[:0]
    if operation == _ADD:
        zigzag(codes.copy(), codes)
    if operation != _OVERWRITE:
        low, high = digest_places(old.take(locations - begin), locations)
        if np.count_nonzero(_unsigned(codes) >= _ESCAPED_NIBBLE) * _NIBBLES_PER_ESCAPE <= found:
            nibbles, escapes = np.empty((found + 1) // 2, np.uint8), np.empty_like(codes)
            codes = escapes[: write_nibbles(codes, nibbles, escapes)]
    return (
        found,
        int(locations[0]),
        int(locations[-1]),
        gaps.tobytes(),
        wide.tobytes(),
        nibbles.tobytes(),
        codes.tobytes(),
        low,
        high,
    )


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


def write_planes(parts: list[tuple[int, bytes]], /) -> dict[int, bytes]:
    arrays = [np.frombuffer(numbers, f"u{width}") for width, numbers in parts]
    planes = {}
    for plane in range(8):
        kept = [array for array in arrays if array.itemsize > plane]
        content = b"".join((array >> 8 * plane).astype(np.uint8).tobytes() for array in kept)
        if content if plane == 0 else np.frombuffer(content, np.uint8).any():
            planes[plane] = content
    return planes


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


def scatter(
    writes: list[Any], before: _Array | None, done: _Array | None, _threads: int, /
) -> None:
    places = [_places(write) for write in writes]
    olds = [write[0][where] for write, where in zip(writes, places, strict=True)]
    if before is not None:
        for part, old in zip(_before_parts(writes, before), olds, strict=True):
            part[:] = old
    if done is not None:
        done[0] = 1  # what is about to be written can be taken back from here on
    for write, where, old in zip(writes, places, olds, strict=True):
        write[0][where] = _combined(write[3], old, write[2])


def count_different(
    writes: list[Any], before: _Array, limit: int, _threads: int, /
) -> tuple[int, int]:
    compared = different = 0
    for write, old in zip(writes, _before_parts(writes, before), strict=True):
        step = max(-(-old.size // limit), 1)
        expected = _combined(write[3], old[::step], write[2][::step])
        compared += expected.size
        different += int(np.count_nonzero(write[0][_places(write)[::step]] != expected))
    return compared, different


def _combined(operation: int, old: _Array, values: _Array) -> _Array:
    combined: _Array = values
    if operation == _XOR:
        combined = old ^ values
    elif operation == _ADD:
        combined = old + values
    return combined


def _places(write: Any) -> _Array:
    """Where a write goes, int64, checked."""
    target, where, values, _, stride, shift, _ = write
    if values.size:
        ends = (
            (where, where + values.size - 1)
            if isinstance(where, int)
            else (int(where.min()), int(where.max()))
        )
        # Python's integers do not wrap around.
        least, largest = (end * stride + shift for end in ends)
        if least < 0 or largest >= target.size or stride < 1:
            raise ValueError("a location is outside the target")
    if isinstance(where, int):
        where = np.arange(where, where + values.size)
    places: _Array = where.astype(np.int64) * stride + shift
    return places


def _before_parts(writes: list[Any], before: _Array) -> list[_Array]:
    parts, at = [], 0
    for _, _, values, *_ in writes:
        parts.append(before[at : at + values.nbytes].view(values.dtype))
        at += -(-values.nbytes // 8) * 8
    if at != before.size:
        raise ValueError("there must be exactly the room that the old bits take")
    return parts


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


def digest_targets(writes: list[Any], sums: _Array, _threads: int, /) -> None:
    for i, write in enumerate(writes):
        target, where, values, _, _, _, canonical = write
        if canonical is None:
            run = isinstance(where, int)
            canonical = np.arange(where, where + values.size) if run else where
        sums[2 * i : 2 * i + 2] = digest_places(target[_places(write)], canonical)


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
