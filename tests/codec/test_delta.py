import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codec.test_digest import by_hand
from vllm_sparse_refit.codec import delta as module
from vllm_sparse_refit.codec.coding import code_changes
from vllm_sparse_refit.codec.delta import (
    Chunk,
    SparseOperation,
    TensorDelta,
    apply_delta,
    changed_elements,
    find_changes,
    location_dtype,
    make_delta,
)
from vllm_sparse_refit.codec.dtypes import bits_dtype
from vllm_sparse_refit.errors import TensorMismatchError

XOR, OVERWRITE, ADD = SparseOperation.XOR, SparseOperation.OVERWRITE, SparseOperation.ADD
BITS = [torch.uint8, torch.int16, torch.int32, torch.int64]

pytestmark = pytest.mark.usefixtures("both_implementations")


def random_bits(generator: torch.Generator, size: int, dtype: torch.dtype) -> torch.Tensor:
    raw = torch.randint(0, 256, (size * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype)


def reference(
    old: torch.Tensor, new: torch.Tensor, operation: SparseOperation
) -> tuple[list[int], list[int]]:
    """Positions and values, as Python's integers of the width of the bits."""
    bits = 8 * old.itemsize
    pairs = [(a % 2**bits, b % 2**bits) for a, b in zip(old.tolist(), new.tolist(), strict=True)]
    where = [index for index, (a, b) in enumerate(pairs) if a != b]
    found = {
        XOR: lambda a, b: a ^ b,
        OVERWRITE: lambda _, b: b,
        ADD: lambda a, b: (b - a) % 2**bits,
    }[operation]
    return where, [found(*pairs[index]) for index in where]


@settings(deadline=None)
@given(
    dtype=st.sampled_from(BITS),
    operation=st.sampled_from(SparseOperation),
    size=st.integers(0, 700),
    offsets=st.tuples(st.integers(0, 8), st.integers(0, 8)),
    density=st.sampled_from([0.0, 0.002, 0.02, 0.3, 1.0]),
    begin=st.sampled_from([0, 5, 2**31 - 700, 2**31, 2**40]),
    seed=st.integers(0, 2**32),
)
def test_find_changes_finds_what_a_loop_finds(
    dtype: torch.dtype,
    operation: SparseOperation,
    size: int,
    offsets: tuple[int, int],
    density: float,
    begin: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    old = random_bits(generator, size + 8, dtype)[offsets[0] : offsets[0] + size]
    new = torch.zeros(size + 8, dtype=dtype)[offsets[1] : offsets[1] + size]
    new.copy_(old)
    touched = torch.rand(size, generator=generator) < density
    new[touched] = random_bits(generator, size, dtype)[touched]
    wide = begin + size > 2**31
    on_cpu = find_changes(old, new, operation, begin=begin, wide=wide)
    # What devices run, here on the CPU.
    as_on_device = module._find_changes_on_device(old, new, operation, begin, wide)
    where, expected = reference(old, new, operation)
    for locations, values in (on_cpu, as_on_device):
        assert locations.dtype == (torch.int64 if wide else torch.int32)
        assert values.dtype == dtype
        assert locations.tolist() == [begin + at for at in where]
        assert [value % 2 ** (8 * dtype.itemsize) for value in values.tolist()] == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no other device")
def test_a_device_finds_and_applies_what_the_cpu_does() -> None:
    generator = torch.Generator().manual_seed(1)
    for operation in SparseOperation:
        for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.float64):
            old = random_bits(generator, 10_000, bits_dtype(dtype))
            new = torch.where(torch.rand(10_000, generator=generator) < 0.1, old + 3, old)
            delta = make_delta(Chunk("w", (10_000,), dtype, operation, 0, old, new))
            other = make_delta(Chunk("w", (10_000,), dtype, operation, 0, old.cuda(), new.cuda()))
            assert delta is not None
            assert other is not None
            assert list(delta.locations) == list(other.locations)
            assert torch.equal(delta.values, other.values)
            assert delta.prior == other.prior
            on_device = old.cuda()
            apply_delta(delta, on_device)
            assert torch.equal(on_device.cpu(), new)


def test_find_changes_takes_strided_chunks() -> None:
    old = torch.arange(20, dtype=torch.int16)
    new = old.clone()
    new[6] = -1
    locations, values = find_changes(old[::2], new[::2], XOR)
    assert (locations.tolist(), values.tolist()) == ([3], [6 ^ -1])


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(4, dtype=torch.int16),
        torch.zeros(3, dtype=torch.int32),
        torch.zeros(1, 3, dtype=torch.int16),
        torch.zeros(3, dtype=torch.int16, device="meta"),
    ],
)
def test_find_changes_refuses_unlike_chunks(other: torch.Tensor) -> None:
    with pytest.raises(TensorMismatchError, match="one length, dtype and device"):
        find_changes(torch.zeros(3, dtype=torch.int16), other, XOR)


def test_find_changes_refuses_matrices() -> None:
    matrix = torch.zeros(2, 3, dtype=torch.int16)
    with pytest.raises(TensorMismatchError, match="two 1-D tensors"):
        find_changes(matrix, matrix, XOR)


def bf16_delta(
    operation: SparseOperation, changed: list[int], *, every_element: bool = False
) -> TensorDelta | None:
    old = torch.arange(10, dtype=torch.int16)
    new = old.clone()
    new[changed] = 100
    return make_delta(
        Chunk("w", (5, 6), torch.bfloat16, operation, 20, old, new, every_element=every_element)
    )


@pytest.mark.parametrize("operation", list(SparseOperation))
def test_no_change_is_no_delta(operation: SparseOperation) -> None:
    assert bf16_delta(operation, []) is None


def test_locations_are_absolute() -> None:
    delta = bf16_delta(XOR, [1, 4])
    assert delta is not None
    assert isinstance(delta.locations, torch.Tensor)
    assert (delta.begin, delta.end) == (20, 30)
    assert delta.locations.dtype == torch.int32
    assert delta.locations.tolist() == [21, 24]
    assert delta.values.tolist() == [1 ^ 100, 4 ^ 100]


def test_overwrite_carries_the_new_bits() -> None:
    delta = bf16_delta(OVERWRITE, [1, 4])
    assert delta is not None
    assert delta.values.tolist() == [100, 100]


def test_add_carries_what_to_add() -> None:
    delta = bf16_delta(ADD, [1, 4])
    assert delta is not None
    assert delta.values.tolist() == [99, 96]


def test_add_wraps_around() -> None:
    old = torch.tensor([0x7FFF, -0x8000, 0], dtype=torch.int16)
    new = torch.tensor([-0x8000, 0x7FFF, -0x8000], dtype=torch.int16)
    delta = make_delta(Chunk("w", (3,), torch.bfloat16, ADD, 0, old, new))
    assert delta is not None
    assert delta.values.tolist() == [1, -1, -0x8000]
    apply_delta(delta, old)
    assert torch.equal(old, new)


def test_a_run_of_changes_is_a_range() -> None:
    delta = bf16_delta(XOR, [3, 4, 5])
    assert delta is not None
    assert delta.locations == range(23, 26)


@pytest.mark.parametrize("changed", [[], [3]])
def test_every_element_ships_the_chunk_changed_or_not(changed: list[int]) -> None:
    delta = bf16_delta(OVERWRITE, changed, every_element=True)
    assert delta is not None
    assert delta.locations == range(20, 30)
    assert delta.values.tolist() == [100 if i in changed else i for i in range(10)]


def test_every_element_keeps_a_copy() -> None:
    new = torch.zeros(2, dtype=torch.int16)
    delta = make_delta(Chunk("w", (2,), torch.float16, OVERWRITE, 0, new, new, every_element=True))
    new[0] = 5
    assert delta is not None
    assert delta.values.tolist() == [0, 0]


def test_every_element_of_nothing_is_no_delta() -> None:
    empty = torch.zeros(0, dtype=torch.int16)
    assert (
        make_delta(Chunk("w", (0,), torch.float16, OVERWRITE, 0, empty, empty, every_element=True))
        is None
    )


@pytest.mark.parametrize("operation", [XOR, ADD])
def test_every_element_can_only_be_overwritten(operation: SparseOperation) -> None:
    with pytest.raises(TensorMismatchError, match="'w' can only be overwritten"):
        bf16_delta(operation, [1], every_element=True)


def test_bits_of_another_width_are_refused() -> None:
    bits = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(TensorMismatchError, match="'w'"):
        make_delta(Chunk("w", (2,), torch.bfloat16, XOR, 0, bits, bits))


@pytest.mark.parametrize(
    ("numel", "dtype"), [(2**31, torch.int32), (2**31 + 1, torch.int64), (0, torch.int32)]
)
def test_locations_are_as_wide_as_the_tensor_needs(numel: int, dtype: torch.dtype) -> None:
    assert location_dtype(numel) == dtype


# --- nearly every element


def nearly_dense(dtype: torch.dtype, unchanged: int, size: int = 1000) -> tuple[torch.Tensor, ...]:
    """Bits that all change but ``unchanged`` in the middle and one at each end."""
    old = torch.arange(size, dtype=torch.int64).to(bits_dtype(dtype))
    new = old + 1
    keep = torch.linspace(2, size - 3, unchanged).long() if unchanged else torch.empty(0).long()
    assert keep.unique().numel() == unchanged
    new[keep] = old[keep]
    new[0], new[-1] = old[0], old[-1]
    return old, new


@pytest.mark.parametrize("operation", [XOR, ADD])
@pytest.mark.parametrize(
    ("dtype", "unchanged"),
    [(torch.uint8, 150), (torch.bfloat16, 80), (torch.float32, 50), (torch.float64, 25)],
)
def test_nearly_dense_changes_are_a_range_with_zeros(
    dtype: torch.dtype, unchanged: int, operation: SparseOperation
) -> None:
    old, new = nearly_dense(dtype, unchanged)
    delta = make_delta(Chunk("w", (3000,), dtype, operation, 1000, old, new))
    assert delta is not None
    assert delta.locations == range(1001, 1999)
    assert len(delta.values) == 998
    assert int((delta.values == 0).sum()) == unchanged
    assert changed_elements(delta) == 998 - unchanged
    whole = torch.full((3000,), 7, dtype=bits_dtype(dtype))
    whole[1000:2000] = old
    expected = whole.clone()
    expected[1000:2000] = new
    apply_delta(delta, whole)
    assert torch.equal(whole, expected)


@pytest.mark.parametrize(
    ("dtype", "unchanged"),
    [(torch.uint8, 300), (torch.bfloat16, 150), (torch.float32, 90), (torch.float64, 50)],
)
def test_sparser_changes_keep_their_locations(dtype: torch.dtype, unchanged: int) -> None:
    old, new = nearly_dense(dtype, unchanged)
    delta = make_delta(Chunk("w", (1000,), dtype, XOR, 0, old, new))
    assert delta is not None
    assert isinstance(delta.locations, torch.Tensor)
    assert len(delta.locations) == 998 - unchanged == changed_elements(delta)


def test_overwrite_never_carries_what_did_not_change() -> None:
    old, new = nearly_dense(torch.uint8, 1)
    delta = make_delta(Chunk("w", (1000,), torch.uint8, OVERWRITE, 0, old, new))
    assert delta is not None
    assert isinstance(delta.locations, torch.Tensor)
    assert len(delta.locations) == 997 == changed_elements(delta)


def test_an_overwrite_may_change_all_that_it_carries() -> None:
    delta = bf16_delta(OVERWRITE, [3], every_element=True)
    assert delta is not None
    assert changed_elements(delta) == 10


# --- the digest of the old bits


@settings(deadline=None)
@given(
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64]),
    operation=st.sampled_from([XOR, ADD]),
    density=st.sampled_from([0.02, 0.5, 0.93, 0.99, 1.0]),
    begin=st.sampled_from([0, 5, 2**31 - 300, 2**40]),
    strided=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_a_delta_carries_the_digest_of_the_old_bits_at_its_locations(
    dtype: torch.dtype,
    operation: SparseOperation,
    density: float,
    begin: int,
    strided: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    old = random_bits(generator, 400, bits_dtype(dtype))[:: 2 if strided else 1][:200]
    new = torch.where(torch.rand(200, generator=generator) < density, old + 3, old)
    shape = (begin + 200,)
    chunk = Chunk("w", shape, dtype, operation, begin, old, new)
    delta = make_delta(chunk)
    (coded,) = code_changes([chunk])
    if delta is None:
        assert coded is None
        return
    where = [int(location) for location in delta.locations]
    expected = by_hand(old[[at - begin for at in where]], where)
    assert delta.prior == expected
    assert coded is not None
    assert coded.row.prior == expected


@pytest.mark.parametrize("every_element", [False, True])
@pytest.mark.parametrize("changed", [[3], [1, 8], list(range(10))])
def test_an_overwrite_builds_on_no_bits(changed: list[int], every_element: bool) -> None:
    delta = bf16_delta(OVERWRITE, changed, every_element=every_element)
    assert delta is not None
    assert delta.prior is None


def test_an_overwrite_of_a_run_keeps_a_copy() -> None:
    new = torch.ones(4, dtype=torch.int16)
    delta = make_delta(Chunk("w", (4,), torch.float16, OVERWRITE, 0, torch.zeros_like(new), new))
    new[0] = 5
    assert delta is not None
    assert delta.locations == range(4)
    assert delta.values.tolist() == [1, 1, 1, 1]


# --- applying


@pytest.mark.parametrize("operation", list(SparseOperation))
@pytest.mark.parametrize("changed", [[0], [2, 3, 4], [1, 8], [*range(5), *range(6, 10)]])
def test_applying_a_delta_yields_the_new_bits(
    operation: SparseOperation, changed: list[int]
) -> None:
    whole = torch.full((30,), 77, dtype=torch.int16)
    whole[20:] = torch.arange(10, dtype=torch.int16)
    expected = whole.clone()
    expected[[20 + index for index in changed]] = 100
    delta = bf16_delta(operation, changed)
    assert delta is not None
    apply_delta(delta, whole)
    assert torch.equal(whole, expected)


@pytest.mark.parametrize("operation", list(SparseOperation))
@pytest.mark.parametrize("numel", [2**31, 2**31 + 1, 2**32 + 7, 2**63 - 1])
def test_the_last_elements_of_huge_tensors(numel: int, operation: SparseOperation) -> None:
    old = torch.arange(50, dtype=torch.int16)
    new = old.clone()
    new[[0, 48, 49]] = 1000
    begin = numel - 50
    delta = make_delta(Chunk("w", (numel,), torch.bfloat16, operation, begin, old, new))
    assert delta is not None
    assert isinstance(delta.locations, torch.Tensor)
    assert delta.locations.dtype == location_dtype(numel)
    assert delta.locations.tolist() == [numel - 50, numel - 2, numel - 1]
    assert (delta.begin, delta.end) == (begin, numel)
    # The same values applied to the part alone.
    near = TensorDelta(
        "w", (50,), torch.bfloat16, operation, 0, 50, delta.locations - begin, delta.values
    )
    apply_delta(near, old)
    assert torch.equal(old, new)


SPECIAL = {
    torch.float16: [0x0000, 0x8000, 0x7C00, 0xFC00, 0x7C01, 0x7E00, 0xFFFF, 0x0001, 0x83FF],
    torch.bfloat16: [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0xFFFF, 0x0001, 0x807F],
    torch.float32: [0, 1 << 31, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF, 1, 0x807FFFFF],
    torch.float64: [0, 1 << 63, 0x7FF << 52, 0xFFF << 52, (0x7FF << 52) + 1, 2**64 - 1, 1],
    torch.float8_e4m3fn: [0x00, 0x80, 0x7F, 0xFF, 0x01, 0x87],
    torch.float8_e5m2: [0x00, 0x80, 0x7C, 0xFC, 0x7D, 0x7F, 0xFE, 0x01, 0x83],
    torch.float8_e4m3fnuz: [0x00, 0x80, 0x01, 0x87],
    torch.float8_e5m2fnuz: [0x00, 0x80, 0x01, 0x83],
}


@pytest.mark.parametrize("operation", list(SparseOperation))
@pytest.mark.parametrize("dtype", SPECIAL)
def test_every_special_number_becomes_every_other(
    dtype: torch.dtype, operation: SparseOperation
) -> None:
    """From and to both zeros, infinities, NaNs with payloads, and subnormals."""
    bits = 8 * dtype.itemsize
    wanted = bits_dtype(dtype)
    signed = [
        n - 2**bits if wanted is not torch.uint8 and n >> bits - 1 else n for n in SPECIAL[dtype]
    ]
    pairs = [(a, b) for a in signed for b in signed]
    random.Random(0).shuffle(pairs)
    old, new = (torch.tensor(column, dtype=wanted) for column in zip(*pairs, strict=True))
    delta = make_delta(Chunk("w", (len(pairs),), dtype, operation, 0, old, new))
    assert delta is not None
    assert changed_elements(delta) == sum(a != b for a, b in pairs)
    assert math.prod(delta.shape) == len(old)
    apply_delta(delta, old)
    assert torch.equal(old, new)
