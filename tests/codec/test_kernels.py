"""Each loop of the codec against one that is plainly right, in every implementation."""

import itertools
import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_sparse_refit.codec import kernels


def encode_gaps(locations: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    gaps = np.empty(locations.size - 1, np.uint8)
    wide = np.empty(gaps.size, np.uint64)
    return gaps, wide[: kernels.encode_gaps(locations, gaps, wide)]


def encode_nibbles(codes: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    nibbles, escapes = np.empty((codes.size + 1) // 2, np.uint8), np.empty_like(codes)
    return nibbles, escapes[: kernels.encode_nibbles(codes, nibbles, escapes)]


Array = npt.NDArray[Any]
WIDTHS = [1, 2, 4, 8]
# Around the sizes of a block of 64 bytes and of a group of eight flags, and any other.
SIZES = st.one_of(
    st.sampled_from([0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128]),
    st.integers(0, 700),
)
DENSITIES = st.sampled_from([0.0, 0.01, 0.2, 0.9, 1.0])
OPERATIONS = st.sampled_from([kernels.XOR, kernels.OVERWRITE, kernels.ADD])
LARGEST = {np.int32: 2**31 - 1, np.int64: 2**63 - 1}

each_implementation = pytest.mark.usefixtures("each_implementation")


def random_array(seed: int, size: int, width: int, *, signed: bool = False) -> Array:
    content = random.Random(seed).randbytes(size * width)
    return np.frombuffer(bytearray(content), f"{'i' if signed else 'u'}{width}")


def unaligned(array: Array) -> Array:
    """The same array at an odd address."""
    memory = np.empty(array.nbytes + 1, np.uint8)[1:]
    memory[:] = np.frombuffer(array.tobytes(), np.uint8)
    return memory.view(array.dtype)


def wrapped(number: int, width: int) -> int:
    return number % (1 << 8 * width)


def combined(old: int, value: int, operation: int, width: int) -> int:
    if operation == kernels.XOR:
        return old ^ value
    return wrapped(old + value, width) if operation == kernels.ADD else value


# --- find_changes


@each_implementation
@settings(deadline=None)
@given(
    width=st.sampled_from(WIDTHS),
    signed=st.booleans(),
    size=SIZES,
    density=DENSITIES,
    operation=OPERATIONS,
    location_dtype=st.sampled_from([np.int32, np.int64]),
    far=st.booleans(),
    bit=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_find_changes_finds_what_a_loop_finds(
    width: int,
    signed: bool,
    size: int,
    density: float,
    operation: int,
    location_dtype: type[np.signedinteger[Any]],
    far: bool,
    bit: bool,
    seed: int,
) -> None:
    rng = random.Random(seed)
    begin = LARGEST[location_dtype] + 1 - max(size, 1) if far else rng.randrange(1000)
    old = random_array(seed, size, width, signed=signed)
    new = old.copy()
    for i in range(size):
        if rng.random() < density:
            # A single bit anywhere is a change too.
            change = 1 << rng.randrange(8 * width) if bit else rng.randrange(1 << 8 * width)
            new.view(f"u{width}")[i] ^= np.array(change, f"u{width}")
    if rng.random() < 0.5:
        old = unaligned(old)
    locations, values = kernels.find_changes(old, new, operation, begin, location_dtype)
    changed = [i for i in range(size) if old[i] != new[i]]
    assert locations.dtype == location_dtype
    assert values.dtype == old.dtype
    assert locations.tolist() == [begin + i for i in changed]
    bits = [
        (int(a), int(b)) for a, b in zip(old.view(f"u{width}"), new.view(f"u{width}"), strict=True)
    ]
    assert values.view(f"u{width}").tolist() == [
        bits[i][0] ^ bits[i][1]
        if operation == kernels.XOR
        else wrapped(bits[i][1] - bits[i][0], width)
        if operation == kernels.ADD
        else bits[i][1]
        for i in changed
    ]


@each_implementation
@pytest.mark.parametrize("width", WIDTHS)
def test_find_changes_finds_each_bit_of_each_element(width: int) -> None:
    size = 2 * 64 // width + 3  # two blocks and a tail
    old = np.zeros(size, f"u{width}")
    for bit in range(8 * size * width):
        new = old.copy()
        new.view(np.uint8)[bit // 8] = 1 << bit % 8
        locations, values = kernels.find_changes(old, new, kernels.XOR, 0, np.int32)
        assert locations.tolist() == [bit // (8 * width)]
        assert values.tolist() == [1 << bit % (8 * width)]


@each_implementation
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("every", [997, 3])
def test_find_changes_crosses_large_blocks(width: int, every: int) -> None:
    size = (3 << 18) // width + 5
    old = np.zeros(size, f"u{width}")
    new = old.copy()
    new[::every] = 7
    new[-1] = 9
    locations, values = kernels.find_changes(old, new, kernels.XOR, 100, np.int64)
    assert np.array_equal(locations, np.flatnonzero(new) + 100)
    assert np.array_equal(values, new[new != 0])


# --- code_changes


@each_implementation
@settings(deadline=None)
@given(
    width=st.sampled_from(WIDTHS),
    signed=st.booleans(),
    size=SIZES,
    density=DENSITIES,
    operation=OPERATIONS,
    location_dtype=st.sampled_from([np.int32, np.int64]),
    far=st.booleans(),
    largest=st.sampled_from([3, 40, None]),
    seed=st.integers(0, 2**32),
)
def test_code_changes_codes_what_find_changes_finds(
    width: int,
    signed: bool,
    size: int,
    density: float,
    operation: int,
    location_dtype: type[np.signedinteger[Any]],
    far: bool,
    largest: int | None,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    begin = LARGEST[location_dtype] + 1 - max(size, 1) if far else seed % 1000
    old = random_array(seed, size, width, signed=signed)
    change = random_array(seed + 1, size, width)
    if largest is not None:
        change %= np.array(largest, change.dtype)
    new = (old.view(f"u{width}") + change * (rng.random(size) < density)).view(old.dtype)
    locations, values = kernels.find_changes(old, new, operation, begin, location_dtype)
    is_wide = location_dtype is np.int64
    chunk = kernels.ChunkArrays(old, new, operation, begin, is_wide)
    # What is coded before and after it in the same call changes nothing.
    other = kernels.ChunkArrays(new, old, operation, begin, not is_wide or far)
    before, found, after = kernels.code_changes([other, chunk, other])
    assert before == after
    assert found.found == locations.size
    if not locations.size:
        assert found == (0, 0, 0, b"", b"", b"", b"", 0, 0)
        return
    assert (found.first, found.last) == (locations[0], locations[-1])
    before = old[locations.astype(np.int64) - begin]
    digest = (0, 0) if operation == kernels.OVERWRITE else kernels.digest_places(before, locations)
    assert (found.low, found.high) == digest
    gaps, wide = encode_gaps(locations)
    assert (found.gaps, found.wide) == (gaps.tobytes(), wide.tobytes())
    codes = kernels.zigzag(values, values.copy()) if operation == kernels.ADD else values
    nibbles, escapes = encode_nibbles(codes.view(f"u{width}"))
    if operation == kernels.OVERWRITE or 4 * escapes.size > codes.size:
        assert (found.nibbles, found.codes) == (b"", codes.tobytes())
    else:
        assert (found.nibbles, found.codes) == (nibbles.tobytes(), escapes.tobytes())


# --- gaps


def gap_bytes(locations: list[int]) -> tuple[list[int], list[int]]:
    gaps = [after - before - 1 for before, after in itertools.pairwise(locations)]
    return [min(gap, 255) for gap in gaps], [gap - 255 for gap in gaps if gap >= 255]


@st.composite
def ascending(draw: st.DrawFn) -> Array:
    dtype = draw(st.sampled_from([np.int32, np.int64]))
    widest = 60_000 if dtype is np.int32 else 2**54
    gap = st.one_of(
        st.sampled_from([0, 1, 253, 254, 255, 256, 510, 511, widest]), st.integers(0, widest)
    )
    steps = draw(st.lists(gap, max_size=40))
    first = draw(st.sampled_from([0, 1, 7, 2**31 - 1 - sum(steps) - len(steps)]))
    locations = [max(first, 0)]
    for step in steps:
        locations.append(locations[-1] + step + 1)
    return np.array(locations, dtype)


@each_implementation
@settings(deadline=None)
@given(locations=ascending(), spare=st.integers(0, 3), room=st.sampled_from([1, 2, 1000]))
@example(np.array([0, 2**62 + 1, 2**63 - 2]), 0, 1)
@example(np.array([2**31 - 2, 2**31 - 1], np.int32), 0, 1)
@example(np.array([0, 2**31 - 1], np.int32), 2, 1)
def test_gaps_are_those_of_a_loop_and_lead_back(locations: Array, spare: int, room: int) -> None:
    gaps, wide = encode_gaps(locations)
    assert gaps.dtype == np.uint8
    assert wide.dtype == np.uint64
    assert (gaps.tolist(), wide.tolist()) == gap_bytes(locations.tolist())
    end = min(int(locations[-1]) + room, LARGEST[locations.dtype.type])
    end = max(end, int(locations[-1]) + 1)
    more = np.concatenate((wide, np.full(spare, 5, np.uint64)))
    decoded, used = kernels.decode_gaps(gaps, more, int(locations[0]), end, locations.dtype.type)
    assert decoded.dtype == locations.dtype
    assert np.array_equal(decoded, locations)
    assert used == wide.size
    if len(locations) > 1:
        with pytest.raises(ValueError, match="outside its span"):
            kernels.decode_gaps(
                gaps, wide, int(locations[0]), int(locations[-1]), locations.dtype.type
            )
    if wide.size:
        with pytest.raises(ValueError, match="fewer wide gaps"):
            kernels.decode_gaps(gaps, wide[:-1], int(locations[0]), end, locations.dtype.type)


@each_implementation
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("where", [[1, 1], [2, 1], [0, 5, 4], [3, 4, 5, 5]])
def test_locations_that_do_not_ascend_are_refused(where: list[int], dtype: npt.DTypeLike) -> None:
    with pytest.raises(ValueError, match="not strictly ascending"):
        encode_gaps(np.array(where, dtype))


@each_implementation
@settings(deadline=None)
@given(
    first=st.one_of(st.integers(0, 1000), st.integers(2**63 - 1000, 2**63 - 3)),
    gaps=st.lists(st.sampled_from([0, 3, 254, 255]), min_size=1, max_size=8),
    wide=st.lists(
        st.one_of(
            st.integers(0, 300), st.integers(2**62, 2**64 - 1), st.integers(2**63 - 600, 2**63)
        ),
        min_size=8,
        max_size=8,
    ),
    end=st.one_of(st.integers(2**63 - 400, 2**63 - 1), st.integers(1001, 3000)),
)
@example(2**63 - 2, [255], [2**63 - 2] * 8, 2**63 - 1)
@example(3, [0, 255], [2**64 - 259] * 8, 8)
@example(3, [0, 255], [2**64 - 1] * 8, 8)
def test_a_sum_that_wraps_around_is_refused(
    first: int, gaps: list[int], wide: list[int], end: int
) -> None:
    first = min(first, end - 1)
    locations, widths = [first], iter(wide)
    for gap in gaps:
        locations.append(locations[-1] + 1 + gap + (next(widths) if gap == 255 else 0))
    arrays = np.array(gaps, np.uint8), np.array(wide, np.uint64)
    if locations[-1] >= end:
        with pytest.raises(ValueError, match="outside its span"):
            kernels.decode_gaps(*arrays, first, end, np.int64)
    else:
        assert kernels.decode_gaps(*arrays, first, end, np.int64)[0].tolist() == locations


# --- values


@each_implementation
@settings(deadline=None)
@given(
    width=st.sampled_from(WIDTHS),
    size=SIZES,
    largest=st.sampled_from([1, 14, 15, 16, 17, 20, None]),
    seed=st.integers(0, 2**32),
)
def test_nibbles_are_those_of_a_loop_and_lead_back(
    width: int, size: int, largest: int | None, seed: int
) -> None:
    codes = random_array(seed, size, width)
    if largest is not None:
        codes %= np.array(largest, codes.dtype)
    nibbles, escapes = encode_nibbles(codes)
    low = [min(code, 15) for code in codes.tolist()] + [0]
    assert nibbles.dtype == np.uint8
    assert nibbles.tolist() == [low[i] | low[i + 1] << 4 for i in range(0, size, 2)]
    assert escapes.dtype == codes.dtype
    assert escapes.tolist() == [code for code in codes.tolist() if code >= 15]
    assert kernels.count_escaped_nibbles(nibbles) == escapes.size
    more = np.concatenate((escapes, codes[:2]))
    assert np.array_equal(kernels.decode_nibbles(nibbles, more, size), codes)
    if escapes.size:
        with pytest.raises(ValueError, match="fewer escaped"):
            kernels.decode_nibbles(nibbles, escapes[:-1], size)


@each_implementation
def test_the_unused_half_of_a_last_nibble_is_not_read() -> None:
    nibbles = np.array([0x21, 0xF3], np.uint8)
    assert kernels.decode_nibbles(nibbles, np.empty(0, np.uint16), 3).tolist() == [1, 2, 3]


@each_implementation
@settings(deadline=None)
@given(width=st.sampled_from(WIDTHS), size=SIZES, seed=st.integers(0, 2**32))
def test_planes_hold_one_byte_of_each_code_and_lead_back(width: int, size: int, seed: int) -> None:
    codes = random_array(seed, size, width)
    again = np.zeros_like(codes)
    planes = kernels.write_planes([(width, codes.tobytes())])
    for plane in range(width):
        expected = [code >> 8 * plane & 255 for code in codes.tolist()]
        kept = any(expected) if plane else bool(expected)
        assert (plane in planes) is kept
        if kept:
            assert list(planes[plane]) == expected
            kernels.read_plane(np.frombuffer(planes[plane], np.uint8), plane, again)
    assert set(planes) <= set(range(width))
    assert np.array_equal(codes, again)


@each_implementation
@settings(deadline=None)
@given(
    parts=st.lists(st.tuples(st.sampled_from(WIDTHS), SIZES, st.integers(1, 64)), max_size=6),
    seed=st.integers(0, 2**32),
)
def test_planes_join_numbers_of_all_widths_in_order(
    parts: list[tuple[int, int, int]], seed: int
) -> None:
    arrays = [
        random_array(seed + i, size, width) >> np.array(max(8 * width - bits, 0), f"u{width}")
        for i, (width, size, bits) in enumerate(parts)
    ]
    planes = kernels.write_planes([(array.itemsize, array.tobytes()) for array in arrays])
    for plane in range(8):
        wide = [array for array in arrays if array.itemsize > plane]
        expected = bytes(number >> 8 * plane & 255 for array in wide for number in array.tolist())
        assert planes.get(plane, bytes(len(expected))) == expected
        assert (plane in planes) is (any(expected) if plane else bool(expected))


@each_implementation
@settings(deadline=None)
@given(width=st.sampled_from(WIDTHS), size=SIZES, signed=st.booleans(), seed=st.integers(0, 2**32))
def test_zigzag_is_that_of_a_loop_and_leads_back(
    width: int, size: int, signed: bool, seed: int
) -> None:
    half = 1 << 8 * width - 1
    edges = np.array([0, 1, 2, half - 1, half, half + 1, 2 * half - 2, 2 * half - 1], f"u{width}")
    values = np.concatenate((random_array(seed, size, width), edges))
    if signed:
        values = values.view(f"i{width}")
    codes = kernels.zigzag(values, np.empty_like(values))
    steps = values.view(f"i{width}").tolist()
    assert codes.view(f"u{width}").tolist() == [
        2 * step if step >= 0 else -2 * step - 1 for step in steps
    ]
    kernels.unzigzag(codes)
    assert np.array_equal(codes, values)


# --- scatter


@each_implementation
@settings(deadline=None)
@given(
    width=st.sampled_from(WIDTHS),
    count=st.one_of(st.sampled_from([0, 1, 2]), st.integers(0, 200)),
    operation=OPERATIONS,
    location_dtype=st.sampled_from([np.int32, np.int64]),
    stride=st.integers(1, 5),
    start=st.sampled_from([0, 1, 10**9]),
    keep=st.booleans(),
    shuffled=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_scatter_writes_what_a_loop_writes(
    width: int,
    count: int,
    operation: int,
    location_dtype: npt.DTypeLike,
    stride: int,
    start: int,
    keep: bool,
    shuffled: bool,
    seed: int,
) -> None:
    rng = random.Random(seed)
    where = sorted(rng.sample(range(2 * count + 1), count))
    locations = np.array([start + at for at in where], location_dtype)
    values = random_array(seed + 1, count, width)
    target = random_array(seed, (2 * count + 1) * stride + 3, width)
    old = target.tolist()
    expected = list(old)
    for at, value in zip(where, values.tolist(), strict=True):
        expected[at * stride + 2] = combined(old[at * stride + 2], value, operation, width)
    if shuffled:  # the same writes in another order
        order = np.array(rng.sample(range(count), count), np.int64)
        locations, values, where = locations[order], values[order], [where[i] for i in order]
    write = kernels.ArrayWrite(target, locations, values, operation, stride, 2 - start * stride)
    before = np.empty(kernels.before_bytes([write]), np.uint8) if keep else None
    done = np.zeros(1, np.uint8) if keep else None
    kernels.scatter([write], before=before, done=done)
    assert target.tolist() == expected
    if before is not None and done is not None:
        assert done.tolist() == [1]
        (kept,) = kernels.before_parts([write], before)
        assert kept.tolist() == [old[at * stride + 2] for at in where]


def many_writes(seed: int) -> tuple[list[Array], list[kernels.ArrayWrite]]:
    """Writes of all kinds to disjoint elements of arrays of all widths, some with thousands of elements."""
    rng = np.random.default_rng(seed)
    targets = [random_array(seed + width, 200_000, width) for width in WIDTHS]
    writes = []
    for i, (target, operation) in enumerate(itertools.product(targets, (1, 2, 3))):
        count = (0, 7, 40_000)[i % 3]
        values = random_array(seed + i, count, target.itemsize)
        where = rng.permutation(60_000)[:count].astype((np.int32, np.int64)[i % 2])
        canonical = rng.integers(0, 2**40, count) if i % 2 else None
        writes.append(
            kernels.ArrayWrite(target, where, values, operation, 1, 60_000 * (i % 3), canonical)
        )
        run = random_array(seed + 100 + i, 1000, target.itemsize)
        writes.append(
            kernels.ArrayWrite(target, 180_000 + 1500 * (i % 3), run, operation, 3, -360_000)
        )
    return targets, writes


def elements_of(write: kernels.ArrayWrite) -> Array:
    run = isinstance(write.where, int)
    where = np.arange(write.where, write.where + write.values.size) if run else write.where
    return np.asarray(where, np.int64) * write.stride + write.shift


@each_implementation
@pytest.mark.parametrize("threads", [1, 2, 7, 100])
def test_many_writes_are_done_looked_at_and_taken_back(threads: int) -> None:
    targets, writes = many_writes(threads)
    as_they_were = [target.copy() for target in targets]
    expected = [target.copy() for target in targets]
    for i, write in enumerate(writes):
        # One after the other, with numpy's own indexing.
        target, where = expected[i // 6], elements_of(write)
        if write.operation == kernels.XOR:
            target[where] ^= write.values
        elif write.operation == kernels.ADD:
            target[where] += write.values
        else:
            target[where] = write.values
    before = np.empty(kernels.before_bytes(writes), np.uint8)
    kernels.scatter(writes, before=before, threads=threads)
    assert all(map(np.array_equal, targets, expected))
    for limit in (1, 64, 10**9):
        looked_at = sum(-(-w.values.size // max(-(-w.values.size // limit), 1)) for w in writes)
        found = kernels.count_different(writes, before, limit=limit, threads=threads)
        assert found == (looked_at, 0)
    for write in writes[-2:]:
        write.target[elements_of(write)[0]] ^= 1
    assert kernels.count_different(writes, before, limit=64, threads=threads)[1] == 2
    olds = kernels.before_parts(writes, before)
    back = [w._replace(values=old, operation=2) for w, old in zip(writes, olds, strict=True)]
    kernels.scatter(back, threads=threads)
    assert all(map(np.array_equal, targets, as_they_were))


@each_implementation
@pytest.mark.parametrize("threads", [1, 3])
def test_digests_of_targets_are_those_of_their_elements(threads: int) -> None:
    _, writes = many_writes(5)
    sums = kernels.digest_targets(writes, threads=threads)
    for write, found in zip(writes, sums.tolist(), strict=True):
        canonical = write.canonical
        if canonical is None:
            run = isinstance(write.where, int)
            canonical = (
                np.arange(write.where, write.where + write.values.size) if run else write.where
            )
        bits = write.target[elements_of(write)]
        assert tuple(found) == kernels.digest_places(bits, np.ascontiguousarray(canonical))
    assert kernels.digest_targets([]).shape == (0, 2)


@each_implementation
def test_one_location_outside_stops_all_writes() -> None:
    targets, writes = many_writes(2)
    as_they_were = [target.copy() for target in targets]
    bad = writes[2]._replace(shift=200_000)
    before, done = np.empty(kernels.before_bytes(writes), np.uint8), np.zeros(1, np.uint8)
    with pytest.raises(ValueError, match="outside the target"):
        kernels.scatter([*writes[:2], bad, *writes[3:]], before=before, done=done, threads=2)
    assert all(map(np.array_equal, targets, as_they_were))
    assert done.tolist() == [0]
    for call in (
        lambda: kernels.count_different([bad], before[: kernels.before_bytes([bad])], limit=1),
        lambda: kernels.digest_targets([bad]),
    ):
        with pytest.raises(ValueError, match="outside the target"):
            call()


@each_implementation
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(
    ("locations", "stride", "shift"),
    [
        ([0, 8], 1, 0),
        ([0, 7], 1, 1),
        ([0, 7], 1, -1),
        ([-1, 3], 1, 0),
        ([2, 4], 2, 0),
        ([0, 1], 0, 0),
        ([0, 1], -1, 4),
        ([3], 2**62, 0),
        ([3], 1, 2**63 - 1),
        ([4], 2**62, 4),  # 4 * 2**62 wraps around to 0
        ([0, 4], 2**62, 1),
        ([2**31 - 1], 1, 0),
        ([0, 8, 1], 1, 0),
        ([0, -1, 1], 1, 0),
        ([0, -(2**31), 2**31 - 1, 1], 1, 0),
    ],
)
def test_scatter_out_of_range_writes_nothing(
    locations: list[int], stride: int, shift: int, dtype: npt.DTypeLike, width: int
) -> None:
    target = random_array(0, 8, width)
    as_it_was, count = target.copy(), len(locations)
    values = np.ones(count, f"u{width}")
    write = kernels.ArrayWrite(target, np.array(locations, dtype), values, 1, stride, shift)
    before, done = np.full(kernels.before_bytes([write]), 9, np.uint8), np.zeros(1, np.uint8)
    with pytest.raises(ValueError, match="outside the target"):
        kernels.scatter([write], before=before, done=done)
    assert np.array_equal(target, as_it_was)
    assert set(before.tolist()) == {9}
    assert done.tolist() == [0]


@each_implementation
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("first", "stride", "shift"),
    [
        (-1, 1, 0),
        (6, 1, 0),
        (0, 4, 0),
        (0, 0, 0),
        (2**62, 1, 0),
        (2**63 - 2, 1, 0),
        (0, 1, 2**63 - 1),
    ],
)
def test_a_run_out_of_range_writes_nothing(first: int, stride: int, shift: int, width: int) -> None:
    target = random_array(0, 8, width)
    as_it_was = target.copy()
    write = kernels.ArrayWrite(target, first, np.ones(3, f"u{width}"), 1, stride, shift)
    with pytest.raises(ValueError, match="outside the target"):
        kernels.scatter([write])
    assert np.array_equal(target, as_it_was)


@each_implementation
def test_scatter_of_nothing_into_nothing() -> None:
    nothing = np.empty(0, np.uint16)
    done = np.zeros(1, np.uint8)
    write = kernels.ArrayWrite(nothing, np.empty(0, np.int32), nothing, kernels.ADD)
    kernels.scatter([write], done=done)
    assert done.tolist() == [1]
