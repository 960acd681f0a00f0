"""Deltas: which elements of a canonical tensor changed, and how. Pure functions, any thread."""

import enum
import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from vllm_sparse_refit.codec import kernels
from vllm_sparse_refit.codec.digest import BitsDigest
from vllm_sparse_refit.codec.dtypes import bits_dtype
from vllm_sparse_refit.errors import TensorMismatchError

_INT32_ELEMENTS: Final = 1 << 31


class SparseOperation(enum.StrEnum):
    """What a delta's values do to the elements at its locations."""

    XOR = "xor"
    OVERWRITE = "overwrite"
    ADD = "add"


KERNEL_OPERATIONS: Final = {
    SparseOperation.XOR: kernels.XOR,
    SparseOperation.OVERWRITE: kernels.OVERWRITE,
    SparseOperation.ADD: kernels.ADD,
}


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
            in, the new bits, or the integer to add to the bits (wrapping around).
        prior: Digest of (flat position, bits before) of exactly the elements at ``locations``. None
            for ``OVERWRITE``, which builds on nothing, and where it is not known.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    operation: SparseOperation
    begin: int
    end: int
    locations: torch.Tensor | range
    values: torch.Tensor
    prior: BitsDigest | None = None


def location_dtype(numel: int) -> torch.dtype:
    """dtype of the locations in a tensor of ``numel`` elements: int32 if that can hold them."""
    return torch.int32 if numel <= _INT32_ELEMENTS else torch.int64


@dataclass(frozen=True, eq=False)
class Chunk:
    """A stretch of a tensor before and after a change, from which a delta is made.

    Attributes:
        name: The tensor's checkpoint name.
        shape: The whole tensor's shape.
        dtype: The tensor's dtype.
        operation: What the delta's values shall do.
        begin: Flat position of the first element.
        old_bits: 1-D, ``bits_dtype(dtype)``, ``[n]``.
        new_bits: The same for the new bits, on the same device.
        every_element: Ship all ``n`` elements, changed or not; only for ``OVERWRITE``, and the caller's
            decision, since it may depend on other chunks of the tensor.

    Raises:
        TensorMismatchError: the old bits are not those of the dtype, or every element of a difference
            is asked for.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    operation: SparseOperation
    begin: int
    old_bits: torch.Tensor
    new_bits: torch.Tensor
    every_element: bool = False

    def __post_init__(self) -> None:
        wanted, found = bits_dtype(self.dtype), self.old_bits.dtype
        if found != wanted:
            raise TensorMismatchError(
                f"the bits of {self.name!r} ({self.dtype}) must be {wanted}, not {found}"
            )
        if self.every_element and self.operation is not SparseOperation.OVERWRITE:
            raise TensorMismatchError(f"every element of {self.name!r} can only be overwritten")

    @property
    def end(self) -> int:
        """One past its last flat position."""
        return self.begin + self.new_bits.numel()

    @property
    def location_dtype(self) -> torch.dtype:
        """dtype of locations in its tensor."""
        return location_dtype(math.prod(self.shape))

    def sends_run(self, changed: int, span: range) -> bool:
        """Whether all elements of ``span``, from the first that changed to the last, are sent."""
        if changed == len(span):
            return True
        # What is overwritten with the bits that it had would count as a change.
        may = self.operation is not SparseOperation.OVERWRITE
        return may and is_dense(changed, len(span), self.dtype)

    def run(self, locations: range, prior: BitsDigest | None = None) -> TensorDelta:
        """The delta of all elements in a range, changed or not.

        Args:
            locations: Which.
            prior: As :meth:`prior` computes it, if it is known.
        """
        inside = slice(locations.start - self.begin, locations.stop - self.begin)
        values = _difference(self.old_bits[inside], self.new_bits[inside], self.operation)
        is_view = self.operation is SparseOperation.OVERWRITE
        values = values.to("cpu", copy=is_view)
        return self.delta(locations, values, self.prior(locations) if prior is None else prior)

    def delta(
        self, locations: torch.Tensor | range, values: torch.Tensor, prior: BitsDigest | None
    ) -> TensorDelta:
        """A delta of these elements."""
        return TensorDelta(
            name=self.name,
            shape=self.shape,
            dtype=self.dtype,
            operation=self.operation,
            begin=self.begin,
            end=self.end,
            locations=locations,
            values=values,
            prior=prior,
        )

    def prior(self, locations: torch.Tensor | range) -> BitsDigest | None:
        """The digest of the old bits at some locations, computed where they are.

        Args:
            locations: A range, or a tensor on the device of the bits.
        """
        if self.operation is SparseOperation.OVERWRITE:
            return None
        if isinstance(locations, range):
            inside = slice(locations.start - self.begin, locations.stop - self.begin)
            return BitsDigest.of(self.old_bits[inside].contiguous(), locations)
        return BitsDigest.of(self.old_bits[locations.to(torch.int64) - self.begin], locations)


def make_delta(chunk: Chunk) -> TensorDelta | None:
    """The delta that leads from a chunk's old bits to the new ones, or None if there is nothing to send.

    Where nearly all elements changed, the few others between the first and the last are sent with
    them, since their locations would cost more than their values. A delta that builds on the old bits
    carries their digest.

    Raises:
        TensorMismatchError: old and new bits do not match each other.
    """
    if chunk.every_element:
        return chunk.run(range(chunk.begin, chunk.end)) if chunk.begin < chunk.end else None
    wide = chunk.location_dtype is torch.int64
    locations, values = _find(chunk.old_bits, chunk.new_bits, chunk.operation, chunk.begin, wide)
    count = locations.numel()
    if not count:
        return None
    on_host = locations.cpu()
    span = range(int(on_host[0]), int(on_host[-1]) + 1)
    if chunk.sends_run(count, span):
        return chunk.run(span)
    return chunk.delta(on_host, values.cpu(), chunk.prior(locations))


def is_dense(changed: int, span: int, dtype: torch.dtype) -> bool:
    """Whether ``changed`` elements among ``span`` are so many that all of them cost less."""
    # A gap takes at least about a bit, with some to spare for the coder. An unchanged element that
    # is sent along takes at most its width.
    bits = 8 * dtype.itemsize
    return changed * (bits + 2) > span * bits


def find_changes(
    old_bits: torch.Tensor,
    new_bits: torch.Tensor,
    operation: SparseOperation,
    *,
    begin: int = 0,
    wide: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the elements whose bits differ, on the device where they are.

    Only what changed crosses to the host; temporaries on a device are a mask of a byte an element.

    Args:
        old_bits: 1-D contiguous integer tensor, ``[n]``.
        new_bits: The same dtype, length and device.
        operation: Which values to return.
        begin: Added to every location.
        wide: Return int64 locations; they must be below 2**31 otherwise.

    Returns:
        Ascending locations ``[k]`` and values ``[k]`` of the inputs' dtype, both on the CPU.

    Raises:
        TensorMismatchError: the inputs differ in shape, dtype or device, or are not 1-D.
    """
    locations, values = _find(old_bits, new_bits, operation, begin, wide)
    return locations.cpu(), values.cpu()


def _find(
    old_bits: torch.Tensor,
    new_bits: torch.Tensor,
    operation: SparseOperation,
    begin: int,
    wide: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`find_changes`, with results that stay where the inputs are."""
    if (
        old_bits.ndim != 1
        or old_bits.shape != new_bits.shape
        or old_bits.dtype != new_bits.dtype
        or old_bits.device != new_bits.device
    ):
        raise TensorMismatchError(
            "two 1-D tensors of one length, dtype and device are compared, not "
            f"{tuple(old_bits.shape)} {old_bits.dtype} on {old_bits.device} and "
            f"{tuple(new_bits.shape)} {new_bits.dtype} on {new_bits.device}"
        )
    if old_bits.device.type != "cpu":
        return _find_changes_on_device(old_bits, new_bits, operation, begin, wide)
    old, new = old_bits.contiguous().numpy(), new_bits.contiguous().numpy()
    locations, values = kernels.find_changes(
        old, new, KERNEL_OPERATIONS[operation], begin, np.int64 if wide else np.int32
    )
    return torch.from_numpy(locations), torch.from_numpy(values)


def _find_changes_on_device(
    old: torch.Tensor, new: torch.Tensor, operation: SparseOperation, begin: int, wide: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    positions = (old != new).nonzero().squeeze(1)
    values = _difference(old[positions], new[positions], operation)
    locations = (positions + begin).to(torch.int64 if wide else torch.int32)
    return locations, values


def _difference(old: torch.Tensor, new: torch.Tensor, operation: SparseOperation) -> torch.Tensor:
    if operation is SparseOperation.XOR:
        return old ^ new
    return new - old if operation is SparseOperation.ADD else new


def changed_elements(delta: TensorDelta) -> int:
    """How many elements a delta changes, or may change if it overwrites."""
    if delta.operation is SparseOperation.OVERWRITE or not isinstance(delta.locations, range):
        return len(delta.locations)
    return int(torch.count_nonzero(delta.values))


def apply_delta(delta: TensorDelta, bits: torch.Tensor) -> None:
    """Write a delta into the whole tensor's bits, in place.

    Args:
        delta: What to write. Its locations must lie in the tensor, as a decoded payload's do.
        bits: 1-D, contiguous, ``bits_dtype(delta.dtype)``, as long as the tensor has elements; on any
            device.
    """
    if isinstance(delta.locations, range):
        part = bits[delta.locations.start : delta.locations.stop]
        part.copy_(combined(delta.operation, part, delta.values.to(bits.device)))
    elif bits.device.type == "cpu":
        write = kernels.ArrayWrite(
            bits.numpy(),
            delta.locations.numpy(),
            delta.values.numpy(),
            KERNEL_OPERATIONS[delta.operation],
        )
        kernels.scatter([write])
    else:
        where = delta.locations.to(bits.device, torch.int64)
        bits[where] = combined(delta.operation, bits[where], delta.values.to(bits.device))


def combined(operation: SparseOperation, before: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """What an operation makes of elements that hold ``before``; both ``[n]``, of one dtype."""
    if operation is SparseOperation.XOR:
        return before ^ bits
    return before + bits if operation is SparseOperation.ADD else bits
