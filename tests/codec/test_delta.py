import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_sparse_refit.codec.delta import (
    SparseOperation,
    TensorDelta,
    apply_delta,
    compare_bits,
    location_dtype,
    make_delta,
)
from vllm_sparse_refit.errors import TensorMismatchError

XOR, OVERWRITE = SparseOperation.XOR, SparseOperation.OVERWRITE
BITS = [torch.uint8, torch.int16, torch.int32, torch.int64]


def random_bits(generator: torch.Generator, size: int, dtype: torch.dtype) -> torch.Tensor:
    raw = torch.randint(0, 256, (size * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype)


def reference(old: torch.Tensor, new: torch.Tensor) -> tuple[list[int], list[int]]:
    pairs = list(zip(old.tolist(), new.tolist(), strict=True))
    where = [index for index, (a, b) in enumerate(pairs) if a != b]
    return where, [pairs[index][0] ^ pairs[index][1] for index in where]


@given(
    dtype=st.sampled_from(BITS),
    size=st.integers(0, 700),
    offsets=st.tuples(st.integers(0, 8), st.integers(0, 8)),
    density=st.sampled_from([0.0, 0.002, 0.02, 0.3, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_compare_finds_what_a_loop_finds(
    dtype: torch.dtype, size: int, offsets: tuple[int, int], density: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    old = random_bits(generator, size + 8, dtype)[offsets[0] : offsets[0] + size]
    new = torch.zeros(size + 8, dtype=dtype)[offsets[1] : offsets[1] + size]
    new.copy_(old)
    touched = torch.rand(size, generator=generator) < density
    new[touched] = random_bits(generator, size, dtype)[touched]
    positions, xor = compare_bits(old, new)
    assert positions.dtype == torch.int64
    assert xor.dtype == dtype
    assert (positions.tolist(), xor.tolist()) == reference(old, new)


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("every", [997, 3])
def test_compare_crosses_blocks(dtype: torch.dtype, every: int) -> None:
    size = (3 << 20) // dtype.itemsize + 5  # Three blocks and a bit.
    old = torch.zeros(size, dtype=dtype)
    new = old.clone()
    new[::every] = 7
    new[-1] = 9
    positions, xor = compare_bits(old, new)
    expected = torch.nonzero(new).flatten()
    assert torch.equal(positions, expected)
    assert torch.equal(xor, new[expected])


def test_compare_takes_strided_chunks() -> None:
    old = torch.arange(20, dtype=torch.int16)
    new = old.clone()
    new[6] = -1
    positions, xor = compare_bits(old[::2], new[::2])
    assert (positions.tolist(), xor.tolist()) == ([3], [6 ^ -1])


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(4, dtype=torch.int16),
        torch.zeros(3, dtype=torch.int32),
        torch.zeros(1, 3, dtype=torch.int16),
    ],
)
def test_compare_refuses_unlike_chunks(other: torch.Tensor) -> None:
    with pytest.raises(TensorMismatchError, match="one length and dtype"):
        compare_bits(torch.zeros(3, dtype=torch.int16), other)


def bf16_delta(
    operation: SparseOperation, changed: list[int], *, every_element: bool = False
) -> TensorDelta | None:
    old = torch.arange(10, dtype=torch.int16)
    new = old.clone()
    new[changed] = 100
    return make_delta(
        "w", (5, 6), torch.bfloat16, operation, 20, old, new, every_element=every_element
    )


def test_no_change_is_no_delta() -> None:
    assert bf16_delta(XOR, []) is None
    assert bf16_delta(OVERWRITE, []) is None


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
    delta = make_delta("w", (2,), torch.float16, OVERWRITE, 0, new, new, every_element=True)
    new[0] = 5
    assert delta is not None
    assert delta.values.tolist() == [0, 0]


def test_every_element_of_nothing_is_no_delta() -> None:
    empty = torch.zeros(0, dtype=torch.int16)
    assert (
        make_delta("w", (0,), torch.float16, OVERWRITE, 0, empty, empty, every_element=True) is None
    )


def test_every_element_cannot_be_xored() -> None:
    with pytest.raises(TensorMismatchError, match="'w'"):
        bf16_delta(XOR, [1], every_element=True)


def test_bits_of_another_width_are_refused() -> None:
    bits = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(TensorMismatchError, match="'w'"):
        make_delta("w", (2,), torch.bfloat16, XOR, 0, bits, bits)


@pytest.mark.parametrize(
    ("numel", "dtype"), [(2**31, torch.int32), (2**31 + 1, torch.int64), (0, torch.int32)]
)
def test_locations_are_as_wide_as_the_tensor_needs(numel: int, dtype: torch.dtype) -> None:
    assert location_dtype(numel) == dtype


@pytest.mark.parametrize("operation", list(SparseOperation))
@pytest.mark.parametrize("changed", [[0], [2, 3, 4], [1, 8]])
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
