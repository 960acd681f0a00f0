"""Coding changes at once gives what coding their delta gives."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_sparse_refit.codec.coding import code_changes
from vllm_sparse_refit.codec.delta import Chunk, SparseOperation, make_delta
from vllm_sparse_refit.codec.dtypes import bits_dtype
from vllm_sparse_refit.codec.payload import encode_payload, join_payload
from vllm_sparse_refit.errors import TensorMismatchError

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.usefixtures("both_implementations")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", list(SparseOperation))
@given(
    count=st.integers(1, 300),
    density=st.sampled_from([0.0, 0.004, 0.1, 0.5, 0.9, 1.0]),
    step=st.sampled_from([1, 9, 200]),
    begin=st.sampled_from([0, 5, (1 << 31) - 400, (1 << 40) + 1]),
    seed=st.integers(0, 99),
)
@example(count=300, density=0.004, step=1, begin=0, seed=1)
def test_payloads_are_the_same(
    dtype: torch.dtype,
    operation: SparseOperation,
    count: int,
    density: float,
    step: int,
    begin: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    bits = bits_dtype(dtype)
    limits = torch.iinfo(bits)
    old = torch.randint(limits.min, limits.max, (count,), generator=generator, dtype=bits)
    steps = torch.randint(-step if limits.min else 0, step, (count,), generator=generator).to(bits)
    changed = torch.rand(count, generator=generator) < density
    new = torch.where(changed, old + steps, old)
    shape = (begin + count + 7,)
    chunk = Chunk("w", shape, dtype, operation, begin, old, new)
    delta = make_delta(chunk)
    (coded,) = code_changes([chunk])
    if delta is None:
        assert coded is None
        assert torch.equal(old, new)
    else:
        assert coded is not None
        assert join_payload([coded]) == encode_payload([delta])


def test_every_element_can_be_asked_for() -> None:
    old = torch.arange(50, dtype=torch.int16)
    operation = SparseOperation.OVERWRITE
    chunk = Chunk("w", (50,), torch.bfloat16, operation, 0, old, old, every_element=True)
    delta = make_delta(chunk)
    (coded,) = code_changes([chunk])
    assert delta is not None
    assert coded is not None
    assert join_payload([coded]) == encode_payload([delta])
    assert coded.changed == 50


def test_chunks_that_do_not_match_are_refused() -> None:
    old = torch.zeros(5, dtype=torch.int16)
    for new in (old[:4], old.to(torch.int32)):
        with pytest.raises((TensorMismatchError, ValueError)):
            code_changes([Chunk("w", (5,), torch.bfloat16, SparseOperation.ADD, 0, old, new)])


def test_several_chunks_are_coded_as_each_by_itself() -> None:
    """Whatever they are: some without a change, some whole, of other widths and with other operations."""
    generator = torch.Generator().manual_seed(0)
    chunks = []
    for number in range(40):
        dtype = [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float64][number % 4]
        bits = bits_dtype(dtype)
        old = torch.randint(0, 100, (number * 7,), generator=generator).to(bits)
        changed = torch.rand(old.shape, generator=generator) < [0, 0.1, 0.9, 1][number % 3]
        new = torch.where(changed, old + 1, old)
        whole = number % 5 == 0
        operation = SparseOperation.OVERWRITE if whole else [*SparseOperation][number % 3]
        shape = (1000 + (number % 2) * 2**31,)
        chunks.append(Chunk(f"w{number}", shape, dtype, operation, number, old, new, whole))
    together = code_changes(chunks)
    alone = [code_changes([chunk])[0] for chunk in chunks]
    assert sum(coded is None for coded in together) > 3
    for one, other in zip(together, alone, strict=True):
        if one is None or other is None:
            assert one is other
        else:
            assert join_payload([one]) == join_payload([other])
    assert code_changes([]) == []


def test_every_element_of_a_difference_is_refused() -> None:
    old = torch.zeros(5, dtype=torch.int16)
    with pytest.raises(TensorMismatchError, match="'w' can only be overwritten"):
        Chunk("w", (5,), torch.bfloat16, SparseOperation.ADD, 0, old, old, every_element=True)
