"""Deltas: which elements of a canonical tensor changed, and how. Pure functions, any thread."""

import enum
import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from vllm_sparse_refit.codec.dtypes import bits_dtype
from vllm_sparse_refit.errors import TensorMismatchError

# Two blocks of this size and their mask stay in a core's L2 cache.
_BLOCK_BYTES: Final = 1 << 18
# Flags of a mask, one byte each, that are looked at together.
_FLAGS: Final = 8

_Array = npt.NDArray[Any]
_INT32_ELEMENTS: Final = 1 << 31


class SparseOperation(enum.StrEnum):
    """What a delta's values do to the elements at its locations."""

    XOR = "xor"
    OVERWRITE = "overwrite"


@dataclass(frozen=True, eq=False)
class TensorDelta:
    """The changed elements of one stretch of one canonical tensor.

    Attributes:
        name: The tensor's checkpoint name.
        shape: The whole tensor's shape.
        dtype: The tensor's dtype.
        operation: What ``values`` do.
        begin: First flat (row-major) element this delta speaks for.
        end: One past the last one.
        locations: Strictly ascending flat positions in [begin, end), at least one: a 1-D CPU tensor
            of :func:`location_dtype`, or a ``range`` of step 1.
        values: 1-D CPU tensor of ``bits_dtype(dtype)``, as long as ``locations``: the bits to xor
            in, or the new bits.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    operation: SparseOperation
    begin: int
    end: int
    locations: torch.Tensor | range
    values: torch.Tensor


def location_dtype(numel: int) -> torch.dtype:
    """dtype of the locations in a tensor of ``numel`` elements: int32 if that can hold them."""
    return torch.int32 if numel <= _INT32_ELEMENTS else torch.int64


def compare_bits(
    old_bits: torch.Tensor, new_bits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the elements whose bits differ.

    Args:
        old_bits: 1-D CPU integer tensor, ``[n]``.
        new_bits: The same dtype and length. Neither is copied when contiguous.

    Returns:
        Ascending positions, int64 ``[k]``, and old xor new at them, ``[k]`` of the inputs' dtype.

    Raises:
        TensorMismatchError: the inputs differ in shape or dtype, or are not 1-D.
    """
    if old_bits.ndim != 1 or old_bits.shape != new_bits.shape or old_bits.dtype != new_bits.dtype:
        raise TensorMismatchError(
            "compare_bits takes two 1-D tensors of one length and dtype, not "
            f"{tuple(old_bits.shape)} {old_bits.dtype} and {tuple(new_bits.shape)} {new_bits.dtype}"
        )
    old, new = old_bits.contiguous().numpy(), new_bits.contiguous().numpy()
    positions, changed = [np.empty(0, np.int64)], [np.empty(0, old.dtype)]
    step = _BLOCK_BYTES // old.itemsize
    for begin in range(0, old.size, step):
        block = slice(begin, begin + step)
        found = _changed_positions(old[block], new[block])
        changed.append(old[block].take(found) ^ new[block].take(found))
        found += begin
        positions.append(found)
    return torch.from_numpy(np.concatenate(positions)), torch.from_numpy(np.concatenate(changed))


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


def make_delta(  # noqa: PLR0917 - what a delta is, in the order of its fields
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    operation: SparseOperation,
    begin: int,
    old_bits: torch.Tensor,
    new_bits: torch.Tensor,
    *,
    every_element: bool = False,
) -> TensorDelta | None:
    """The delta that leads from ``old_bits`` to ``new_bits``, or None if there is nothing to send.

    Args:
        name: The tensor's checkpoint name.
        shape: The whole tensor's shape.
        dtype: The tensor's dtype.
        operation: What the delta's values shall do.
        begin: Flat position of the first element of the two chunks.
        old_bits: 1-D CPU, ``bits_dtype(dtype)``, ``[n]``.
        new_bits: The same for the new bits.
        every_element: Ship all ``n`` elements, changed or not; only for ``OVERWRITE``, and the
            caller's decision, since it may depend on other chunks of the tensor.

    Raises:
        TensorMismatchError: the chunks do not match each other or the dtype, or every element of an
            xor is asked for.
    """
    if old_bits.dtype != bits_dtype(dtype):
        raise TensorMismatchError(
            f"the bits of {name!r} ({dtype}) must be {bits_dtype(dtype)}, not {old_bits.dtype}"
        )
    if every_element and operation is not SparseOperation.OVERWRITE:
        raise TensorMismatchError(f"every element of {name!r} can be overwritten but not xored")
    end = begin + new_bits.numel()
    if every_element:
        if begin == end:
            return None
        return TensorDelta(
            name, shape, dtype, operation, begin, end, range(begin, end), new_bits.clone()
        )
    positions, xor = compare_bits(old_bits, new_bits)
    if not positions.numel():
        return None
    values = xor if operation is SparseOperation.XOR else new_bits[positions]
    locations = _locations(positions, begin, shape)
    return TensorDelta(name, shape, dtype, operation, begin, end, locations, values)


def _locations(positions: torch.Tensor, begin: int, shape: tuple[int, ...]) -> torch.Tensor | range:
    first, last = int(positions[0]), int(positions[-1])
    if last - first + 1 == positions.numel():
        return range(begin + first, begin + last + 1)
    numel = math.prod(shape)
    return (positions + begin).to(location_dtype(numel))


def apply_delta(delta: TensorDelta, bits: torch.Tensor) -> None:
    """Write a delta into the whole tensor's bits, in place.

    Args:
        delta: What to write. Its locations must lie in the tensor, as a decoded payload's do.
        bits: 1-D CPU, ``bits_dtype(delta.dtype)``, as long as the tensor has elements.
    """
    target, values = bits.numpy(), delta.values.numpy()
    where: slice | _Array
    if isinstance(delta.locations, range):
        where = slice(delta.locations.start, delta.locations.stop)
    else:
        # Converted once, where each use of other integers as indices would convert them again.
        where = delta.locations.numpy().astype(np.intp, copy=False)
    target[where] = (
        values if delta.operation is SparseOperation.OVERWRITE else target[where] ^ values
    )
