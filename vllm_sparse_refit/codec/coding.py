"""Deltas as the numbers that payloads hold: gaps, nibbles and codes (``docs/wire-format.md``)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import torch

from vllm_sparse_refit.codec import kernels
from vllm_sparse_refit.codec.delta import (
    KERNEL_OPERATIONS,
    Chunk,
    SparseOperation,
    TensorDelta,
    changed_elements,
    make_delta,
)
from vllm_sparse_refit.codec.digest import BitsDigest
from vllm_sparse_refit.codec.dtypes import bits_dtype
from vllm_sparse_refit.codec.wire import Row
from vllm_sparse_refit.errors import PayloadError

_Array = npt.NDArray[Any]
UNSIGNED: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, eq=False)
class CodedDelta:
    """A delta in the numbers that a payload holds.

    Attributes:
        row: Its row of the table.
        gaps: Gap bytes.
        wide: What the gap bytes escape, 8 bytes each in the machine's byte order.
        nibbles: Two codes a byte.
        codes: Of the dtype's width, likewise: all of them, or those that the nibbles escape.
        changed: Elements it changes, or may change.
    """

    row: Row
    gaps: bytes
    wide: bytes
    nibbles: bytes
    codes: bytes
    changed: int

    @property
    def nbytes(self) -> int:
        """Its size in a payload before compression, less the table."""
        return len(self.gaps) + len(self.wide) + len(self.nibbles) + len(self.codes)

    @classmethod
    def of(cls, delta: TensorDelta) -> Self:
        """Code a delta.

        Raises:
            PayloadError: it breaks the format's rules, for instance by a location out of its span.
        """
        gaps, wide = _coded_locations(delta)
        nibbles, codes = _coded_values(_checked_values(delta), delta.operation)
        row = Row.of(delta, has_gaps=bool(gaps), has_nibbles=bool(nibbles))
        return cls(row, gaps, wide, nibbles, codes, changed_elements(delta))


def code_changes(chunks: Sequence[Chunk]) -> list[CodedDelta | None]:
    """What :func:`make_delta` makes of each chunk, coded.

    Of sparse changes on the CPU no delta is made, and one call of the compiled loops serves all chunks.

    Raises:
        TensorMismatchError: as :func:`make_delta`.
    """
    arrays = [_arrays(chunk) if _is_coded_at_once(chunk) else None for chunk in chunks]
    found = iter(kernels.code_changes([array for array in arrays if array is not None]))
    return [
        _coded_delta(chunk) if array is None else _coded(chunk, next(found))
        for chunk, array in zip(chunks, arrays, strict=True)
    ]


def _is_coded_at_once(chunk: Chunk) -> bool:
    return chunk.old_bits.is_cpu and chunk.new_bits.is_cpu and not chunk.every_element


def _arrays(chunk: Chunk) -> kernels.ChunkArrays:
    return kernels.ChunkArrays(
        chunk.old_bits.contiguous().numpy(),
        chunk.new_bits.contiguous().numpy(),
        KERNEL_OPERATIONS[chunk.operation],
        chunk.begin,
        chunk.location_dtype is torch.int64,
    )


def _coded_delta(chunk: Chunk) -> CodedDelta | None:
    delta = make_delta(chunk)
    return None if delta is None else CodedDelta.of(delta)


def _coded(chunk: Chunk, found: kernels.CodedChanges) -> CodedDelta | None:
    count, first, last = found.found, found.first, found.last
    if not count:
        return None
    has_prior = chunk.operation is not SparseOperation.OVERWRITE
    prior = BitsDigest(found.low, found.high) if has_prior else None
    span = range(first, last + 1)
    if chunk.sends_run(count, span):
        return CodedDelta.of(chunk.run(span, prior if count == len(span) else None))
    row = Row(
        name=chunk.name,
        shape=chunk.shape,
        dtype=chunk.dtype,
        operation=chunk.operation,
        begin=chunk.begin,
        end=chunk.end,
        first=first,
        count=count,
        has_gaps=True,
        has_nibbles=bool(found.nibbles),
        prior=prior,
    )
    return CodedDelta(row, found.gaps, found.wide, found.nibbles, found.codes, count)


def _coded_locations(delta: TensorDelta) -> tuple[bytes, bytes]:
    """Gap bytes and wide gaps; none for consecutive locations."""
    locations = delta.locations
    if isinstance(locations, range):
        if locations.step != 1:
            raise PayloadError(f"the range of {delta.name!r} must have step 1")
        return b"", b""
    array = locations.numpy()
    if array.size < 2:
        return b"", b""
    if int(array[-1]) >= delta.end:
        raise PayloadError(f"location {int(array[-1])} of {delta.name!r} is out of its span")
    try:
        return _gaps(array)
    except ValueError as error:
        raise PayloadError(f"the delta of {delta.name!r}: {error}") from None


def _gaps(locations: _Array) -> tuple[bytes, bytes]:
    gaps = np.empty(locations.size - 1, np.uint8)
    wide = kernels.scratch("wide", gaps.size, np.uint64)
    escaped = kernels.encode_gaps(locations, gaps, wide)
    return gaps.tobytes(), wide[:escaped].tobytes()


def _checked_values(delta: TensorDelta) -> _Array:
    values = delta.values
    count, dtype = len(delta.locations), bits_dtype(delta.dtype)
    if values.dtype != dtype or values.shape != (count,):
        raise PayloadError(
            f"the values of {delta.name!r} must be {count} {dtype}, "
            f"not {tuple(values.shape)} {values.dtype}"
        )
    return values.contiguous().numpy().view(UNSIGNED[dtype.itemsize])


def _coded_values(values: _Array, operation: SparseOperation) -> tuple[bytes, bytes]:
    """Nibbles, if they are worth it, and codes."""
    if operation is SparseOperation.OVERWRITE:
        return b"", values.tobytes()
    codes = values
    if operation is SparseOperation.ADD:
        codes = kernels.zigzag(values, kernels.scratch("zigzag", values.size, values.dtype))
    nibbles = np.empty((codes.size + 1) // 2, np.uint8)
    escapes = kernels.scratch("escapes", codes.size, codes.dtype)
    escaped = kernels.encode_nibbles(codes, nibbles, escapes)
    if escaped * kernels.NIBBLES_PER_ESCAPE <= codes.size:
        return nibbles.tobytes(), escapes[:escaped].tobytes()
    # Most codes are large, and compress better beside each other.
    return b"", codes.tobytes()
