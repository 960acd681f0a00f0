"""Prove by experiment that a native loader's transform treats every element by itself.

A sparse overwrite through a transform marks the unchanged elements of the source with a sentinel
(NaN) and keeps the target wherever the sentinel comes out. That is exact only if each result
depends on one source element. A loader that normalizes, sums or rotates would spread the sentinel,
and nothing, or too much, would be written without any error.
"""

from collections.abc import Callable

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

    def zeros(self, target: torch.Tensor) -> None:
        """They are there already."""


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
    if values.dtype == torch.uint8:
        taken = set(torch.bincount(values.flatten(), minlength=256).nonzero().flatten().tolist())
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
    expected = _load(live, name, whole.clone())
    if is_nan_marked(dtype) and _makes_nan(live, name, shape, dtype):
        return False
    if not is_nan_marked(dtype) and any(value.dtype != dtype for value in expected):
        return False
    if is_nan_marked(dtype) and any(not value.dtype.is_floating_point for value in expected):
        return False
    for _ in range(_ROUNDS):
        half = torch.rand(shape, generator=generator) < 0.5
        first, second = (
            _load(live, name, _marked(whole, mask, sentinel)) for mask in (half, ~half)
        )
        if not _halves_agree(first, second, expected, lambda v: unchanged_mask(v, dtype, sentinel)):
            return False
    return True


def load_test_values(
    live: LiveModel, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> list[torch.Tensor]:
    """What the loader makes of values that are equal for equal shapes and dtypes."""
    return _load(live, name, _test_values(shape, dtype, torch.Generator().manual_seed(0)))


def _makes_nan(live: LiveModel, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether some number becomes NaN, as in a logarithm, and so would look unchanged."""
    info = torch.finfo(dtype)
    edges = torch.tensor(
        [-1.0, 0.0, float("inf"), -float("inf"), info.max, info.min, info.tiny], dtype=dtype
    )
    count = torch.Size(shape).numel()
    source = edges.repeat(count // edges.numel() + 1)[:count].reshape(shape)
    return any(bool(value.isnan().any()) for value in _load(live, name, source))


def _marked(whole: torch.Tensor, mask: torch.Tensor, sentinel: int) -> torch.Tensor:
    source = whole.clone()
    bits_view(source).masked_fill_(mask, sentinel)
    return source


def _test_values(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    # Positive and of the size of weights, so that roots and logarithms work; no integer extremes.
    if dtype.is_floating_point and dtype.itemsize > 1:
        return (torch.rand(shape, generator=generator) + 0.5).to(dtype)
    if dtype.itemsize == 1 and dtype != torch.bool:
        return torch.randint(1, 100, shape, generator=generator).to(torch.uint8).view(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def _load(live: LiveModel, name: str, source: torch.Tensor) -> list[torch.Tensor]:
    results = _Results()
    with live.guarded([]):
        live.load([LoaderWeight(name, source, LoadKind.TRANSFORM)], results)
    return results.values


def _halves_agree(
    first: list[torch.Tensor],
    second: list[torch.Tensor],
    expected: list[torch.Tensor],
    unchanged: Callable[[torch.Tensor], torch.Tensor],
) -> bool:
    """Whether each expected element came out, bit-equal, in exactly one half."""
    if not len(first) == len(second) == len(expected):
        return False
    for one, other, value in zip(first, second, expected, strict=True):
        kept_one, kept_other = ~unchanged(one), ~unchanged(other)
        if not bool((kept_one ^ kept_other).all()):
            return False
        merged = torch.where(kept_one, bits_view(one), bits_view(other))
        if not torch.equal(merged, bits_view(value)):
            return False
    return True
