"""Prove by experiment that a native loader's transform treats every element by itself.

A sparse overwrite through a transform marks the unchanged elements of the source with a sentinel
(NaN) and keeps the target wherever the sentinel comes out. That is exact only if each result
depends on one source element. A loader that normalizes, sums or rotates would spread the sentinel,
and nothing, or too much, would be written without any error.
"""

import torch

from vllm_sparse_refit.apply.live_model import LiveModel
from vllm_sparse_refit.apply.load_mode import LoaderCopy, LoaderWeight, LoadKind
from vllm_sparse_refit.codec.dtypes import bits_view

_ROUNDS = 4


class _Results:
    """Keeps what the loader would have written, in its order."""

    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []

    def copy(self, weight: LoaderWeight, copy: LoaderCopy) -> None:
        self.values.append(loaded_value(copy))


def loaded_value(copy: LoaderCopy) -> torch.Tensor:
    """What ``target.copy_(source)`` would leave in the target: cast and broadcast, contiguous,
    CPU."""
    assert copy.source is not None
    value = torch.empty(copy.target.shape, dtype=copy.target.dtype)
    return value.copy_(copy.source)


def sentinel_bits(dtype: torch.dtype, values: torch.Tensor) -> int | None:
    """Bits that mean "unchanged" in a source of ``dtype`` that holds the bit patterns ``values``.

    A floating dtype of 2 bytes or more has NaN, which survives casts and arithmetic; ``values``
    must hold none. Any other dtype gets an exact pattern that ``values`` lacks, which survives
    moves only; None when one byte has no pattern left.
    """
    if is_nan_marked(dtype):
        return int(bits_view(torch.full((), float("nan"), dtype=dtype)))
    taken = set(values.unique().tolist()) if values.dtype == torch.uint8 else None
    if taken is not None:
        return next((code for code in range(255, -1, -1) if code not in taken), None)
    info = torch.iinfo(values.dtype)
    return next(c for c in range(info.min, info.max) if not bool((values == c).any()))


def is_nan_marked(dtype: torch.dtype) -> bool:
    """Whether NaN is the sentinel of ``dtype``."""
    return dtype.is_floating_point and dtype.itemsize > 1


def unchanged_mask(value: torch.Tensor, source_dtype: torch.dtype, sentinel: int) -> torch.Tensor:
    """Where a loaded value says "unchanged"; bool, shape of ``value``."""
    if is_nan_marked(source_dtype):
        return value.isnan()
    return bits_view(value) == sentinel


def is_elementwise(live: LiveModel, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether a sparse overwrite of this tensor through its loader is exact.

    A source of known values is loaded whole, then in two complementary halves with the sentinel in
    the other half. Every result must come out in exactly one of the halves, bit-equal to the whole.
    A result that needs two elements is caught in each round with a chance of one half; results are
    many and there are several rounds.
    """
    generator = torch.Generator().manual_seed(0)
    whole = _test_values(shape, dtype, generator)
    sentinel = sentinel_bits(dtype, bits_view(whole))
    if sentinel is None or whole.numel() < 2:
        return False
    expected = _load(live, name, whole)
    if not is_nan_marked(dtype) and any(value.dtype != dtype for value in expected):
        return False
    if is_nan_marked(dtype) and any(not value.dtype.is_floating_point for value in expected):
        return False
    for _ in range(_ROUNDS):
        half = torch.rand(shape, generator=generator) < 0.5
        if not _halves_agree(live, name, whole, half, sentinel, expected):
            return False
    return True


def _test_values(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    # Positive and of the size of weights, so that roots and logarithms work; no integer extremes.
    if dtype.is_floating_point and dtype.itemsize > 1:
        return (torch.rand(shape, generator=generator) + 0.5).to(dtype)
    return (
        torch.randint(1, 100, shape, generator=generator).to(torch.uint8).view(dtype)
        if (dtype.itemsize == 1 and dtype != torch.bool)
        else torch.randint(0, 2, shape, generator=generator).to(dtype)
    )


def _load(live: LiveModel, name: str, source: torch.Tensor) -> list[torch.Tensor]:
    results = _Results()
    with live.guarded([]):
        live.load([LoaderWeight(name, source, LoadKind.TRANSFORM)], results)
    return results.values


def _halves_agree(
    live: LiveModel,
    name: str,
    whole: torch.Tensor,
    half: torch.Tensor,
    sentinel: int,
    expected: list[torch.Tensor],
) -> bool:
    loaded = []
    for mask in (half, ~half):
        source = whole.clone()
        bits_view(source).masked_fill_(mask, sentinel)
        loaded.append(_load(live, name, source))
    if not len(loaded[0]) == len(loaded[1]) == len(expected):
        return False
    for first, second, value in zip(*loaded, expected, strict=True):
        kept_first = ~unchanged_mask(first, whole.dtype, sentinel)
        kept_second = ~unchanged_mask(second, whole.dtype, sentinel)
        if not bool((kept_first ^ kept_second).all()):
            return False
        merged = torch.where(kept_first, bits_view(first), bits_view(second))
        if not torch.equal(merged, bits_view(value)):
            return False
    return True
