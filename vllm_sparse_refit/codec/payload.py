"""Deltas to payload bytes and back (``docs/wire-format.md``). Pure functions, any thread.

The body is ``table | location planes | value planes``. Split into planes, the nearly constant
high bytes of gaps and values lie together, which is what makes them compress.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import zstandard

from vllm_sparse_refit.codec import wire
from vllm_sparse_refit.codec.delta import TensorDelta
from vllm_sparse_refit.codec.dtypes import bits_dtype
from vllm_sparse_refit.codec.wire import Buffer, Prelude, Row
from vllm_sparse_refit.errors import PayloadError

_Array = npt.NDArray[Any]
_UNSIGNED: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# zstd's largest window without --long, so every level up to 22 can be read.
_MAX_WINDOW_BYTES: Final = 1 << 27


@dataclass(frozen=True)
class DecodeLimits:
    """What a decoder accepts, in bytes.

    Attributes:
        max_payload_bytes: Size of the encoded payload.
        max_decoded_bytes: Size of the decoded tensors and the table. While decoding, about as much
            again is held for the decompressed body.
    """

    max_payload_bytes: int
    max_decoded_bytes: int


def encode_payload(deltas: Sequence[TensorDelta], *, compression_level: int = 1) -> bytes:
    """Encode deltas into one self-contained payload.

    Args:
        deltas: At most ``wire.MAX_DELTAS``; of one tensor, several with disjoint spans.
        compression_level: zstd level.

    Raises:
        PayloadError: a delta breaks the format's rules, for instance by a location out of its span.
    """
    if len(deltas) > wire.MAX_DELTAS:
        raise PayloadError(f"{len(deltas)} deltas in one payload; {wire.MAX_DELTAS} are the limit")
    gaps = [_narrow_gaps(delta) for delta in deltas]
    rows = [
        Row.of(delta, wire.CONTIGUOUS if gap is None else gap.itemsize)
        for delta, gap in zip(deltas, gaps, strict=True)
    ]
    wire.check_agreement(rows)
    table = b"".join(row.pack() for row in rows)
    location_bytes = sum(row.location_bytes for row in rows)
    value_bytes = sum(row.value_bytes for row in rows)
    body = np.empty(len(table) + location_bytes + value_bytes, np.uint8)
    body[: len(table)] = np.frombuffer(table, np.uint8)
    at = len(table)
    for gap in gaps:
        if gap is not None:
            at = _write_planes(body, at, gap)
    for delta in deltas:
        at = _write_planes(body, at, _checked_values(delta))
    encoding, stored = _compress(body, compression_level)
    prelude = Prelude(
        encoding=encoding,
        deltas=len(rows),
        table_bytes=len(table),
        location_bytes=location_bytes,
        value_bytes=value_bytes,
        decoded_bytes=len(table) + sum(row.tensor_bytes for row in rows),
        stored_bytes=len(stored),
    )
    return b"".join((prelude.pack(stored), stored))


def _narrow_gaps(delta: TensorDelta) -> _Array | None:
    """Differences of neighbouring locations in the narrowest unsigned dtype; None for a range."""
    locations = delta.locations
    if isinstance(locations, range):
        if locations.step != 1:
            raise PayloadError(f"the range of {delta.name!r} must have step 1")
        return None
    array = locations.numpy()
    if array.size < 2:
        return None
    gaps = np.diff(array)
    if gaps.min() < 1:
        raise PayloadError(f"the locations of {delta.name!r} are not strictly ascending")
    if int(array[-1]) >= delta.end:
        raise PayloadError(f"location {int(array[-1])} of {delta.name!r} is out of its span")
    largest = int(gaps.max())
    width = next(width for width in wire.GAP_WIDTHS if largest < 1 << 8 * width)
    return gaps.astype(_UNSIGNED[width])


def _checked_values(delta: TensorDelta) -> _Array:
    values = delta.values
    count, dtype = len(delta.locations), bits_dtype(delta.dtype)
    if values.dtype != dtype or values.shape != (count,):
        raise PayloadError(
            f"the values of {delta.name!r} must be {count} {dtype}, "
            f"not {tuple(values.shape)} {values.dtype}"
        )
    return values.contiguous().numpy()


def _write_planes(body: _Array, at: int, array: _Array) -> int:
    """Byte 0 (the lowest) of every element, then byte 1 of every element, ..."""
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    size, width = little.size, little.itemsize
    split = little.view(np.uint8).reshape(size, width)
    for plane in range(width):
        body[at : at + size] = split[:, plane]
        at += size
    return at


def _read_planes(planes: _Array, size: int, out: _Array) -> None:
    """The reverse; ``out`` may be wider than there are planes."""
    width = planes.size // size if size else 0
    little = out.view(np.uint8).reshape(size, out.itemsize)
    little[:, width:] = 0
    for plane in range(width):
        little[:, plane] = planes[plane * size : (plane + 1) * size]
    if out.dtype.newbyteorder("<") != out.dtype:
        out.byteswap(inplace=True)


def _compress(body: _Array, level: int) -> tuple[int, Buffer]:
    compressed = zstandard.ZstdCompressor(level=level).compress(body.data)
    if len(compressed) < body.nbytes:
        return wire.BODY_ZSTD, compressed
    return wire.BODY_RAW, body.tobytes()


def payload_decoded_bytes(body: Buffer) -> int:
    """Memory that the decoded payload will hold, in bytes, as its prelude declares.

    ``decode_payload`` refuses a payload that declares anything but the truth.

    Raises:
        PayloadError: the prelude is malformed.
    """
    return Prelude.read(body).decoded_bytes


def decode_payload(body: Buffer, limits: DecodeLimits) -> list[TensorDelta]:
    """Decode a payload of unknown origin into deltas with tensors of their own.

    Every length is checked against the limits and against the others before memory of that size is
    allocated. Each location is checked to be in its delta's span and in its tensor.

    Raises:
        ChecksumError: the bytes are not those that were sent.
        PayloadError: anything else is wrong.
    """
    prelude = _checked_prelude(body, limits)
    plain = np.frombuffer(_decompress(prelude, memoryview(body)), np.uint8)
    rows = wire.read_table(plain[: prelude.table_bytes].data, prelude.deltas)
    _check_sums(prelude, rows)
    locations_at = prelude.table_bytes
    values_at = locations_at + prelude.location_bytes
    deltas = []
    for row in rows:
        locations = _read_locations(row, plain[locations_at : locations_at + row.location_bytes])
        values = _read_values(row, plain[values_at : values_at + row.value_bytes])
        locations_at += row.location_bytes
        values_at += row.value_bytes
        deltas.append(
            TensorDelta(
                name=row.name,
                shape=row.shape,
                dtype=row.dtype,
                operation=row.operation,
                begin=row.begin,
                end=row.end,
                locations=locations,
                values=values,
            )
        )
    return deltas


def _checked_prelude(payload: Buffer, limits: DecodeLimits) -> Prelude:
    if len(payload) > limits.max_payload_bytes:
        raise PayloadError(
            f"the payload has {len(payload)} bytes and the limit is {limits.max_payload_bytes}; "
            "raise max_payload_bytes or lower payload_bytes on the trainer"
        )
    prelude = Prelude.read(payload)
    if prelude.stored_bytes != len(payload) - wire.PRELUDE_BYTES:
        raise PayloadError(
            f"the payload says {prelude.stored_bytes} bytes follow its prelude, but "
            f"{len(payload) - wire.PRELUDE_BYTES} do; it was cut short or run together"
        )
    wire.verify_checksum(payload)
    if prelude.decoded_bytes > limits.max_decoded_bytes:
        raise PayloadError(
            f"the payload decodes to {prelude.decoded_bytes} bytes and the limit is "
            f"{limits.max_decoded_bytes}; raise max_decoded_bytes or lower chunk_elements and "
            "payload_bytes on the trainer"
        )
    if prelude.body_bytes > prelude.decoded_bytes:
        raise PayloadError(
            f"the payload says its body of {prelude.body_bytes} bytes decodes to no more than "
            f"{prelude.decoded_bytes}"
        )
    if prelude.deltas > wire.MAX_DELTAS:
        raise PayloadError(f"{prelude.deltas} deltas in a payload; {wire.MAX_DELTAS} are the limit")
    return prelude


def _decompress(prelude: Prelude, payload: memoryview) -> Buffer:
    stored = payload[wire.PRELUDE_BYTES :]
    if prelude.encoding == wire.BODY_RAW:
        if len(stored) != prelude.body_bytes:
            raise PayloadError(
                f"the body has {len(stored)} bytes and should have {prelude.body_bytes}"
            )
        return stored
    try:
        # zstandard allocates what the frame declares, so that must be read first. With the output
        # complete beforehand zstd writes no byte past it.
        frame = zstandard.get_frame_parameters(stored)
        if frame.content_size != prelude.body_bytes or frame.window_size > _MAX_WINDOW_BYTES:
            raise PayloadError(
                f"the zstd frame declares {frame.content_size} bytes (window {frame.window_size}) "
                f"and should have {prelude.body_bytes}"
            )
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        plain = decompressor.decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise PayloadError(f"the body cannot be decompressed: {error}") from None
    if len(plain) != prelude.body_bytes:
        raise PayloadError(f"the body has {len(plain)} bytes, not {prelude.body_bytes}")
    return plain


def _check_sums(prelude: Prelude, rows: Sequence[Row]) -> None:
    declared = (prelude.location_bytes, prelude.value_bytes, prelude.decoded_bytes)
    needed = (
        sum(row.location_bytes for row in rows),
        sum(row.value_bytes for row in rows),
        prelude.table_bytes + sum(row.tensor_bytes for row in rows),
    )
    if declared != needed:
        raise PayloadError(
            f"the prelude declares {declared} bytes of locations, values and decoded data, but the "
            f"counts of its deltas need {needed}"
        )


def _read_locations(row: Row, planes: _Array) -> torch.Tensor | range:
    if row.gap_width == wire.CONTIGUOUS:
        return range(row.first, row.first + row.count)
    locations = np.empty(row.count, _UNSIGNED[row.location_dtype.itemsize])
    locations[0] = row.first
    _read_planes(planes, row.count - 1, locations[1:])
    np.cumsum(locations, dtype=locations.dtype, out=locations)
    # A gap of zero repeats a location; a sum that wraps around comes out smaller. Both show here.
    if not (locations[1:] > locations[:-1]).all():
        raise PayloadError(
            f"the locations of {row.name!r} are not strictly ascending: one comes twice or they "
            "run past the largest integer"
        )
    if int(locations[-1]) >= row.end:
        raise PayloadError(
            f"location {int(locations[-1])} of {row.name!r} is outside its span "
            f"[{row.begin}, {row.end})"
        )
    return torch.from_numpy(locations).view(row.location_dtype)


def _read_values(row: Row, planes: _Array) -> torch.Tensor:
    values = np.empty(row.count, _UNSIGNED[row.dtype.itemsize])
    _read_planes(planes, row.count, values)
    return torch.from_numpy(values).view(bits_dtype(row.dtype))


def batch_deltas(deltas: Iterable[TensorDelta], payload_bytes: int) -> Iterator[list[TensorDelta]]:
    """Group deltas, in order, into batches that each fill about one payload.

    A delta is never split, so one of more than ``payload_bytes`` makes a payload of its size.

    Args:
        deltas: Pulled one at a time.
        payload_bytes: Size before compression at which a batch is closed.
    """
    batch: list[TensorDelta] = []
    size = 0
    for delta in deltas:
        batch.append(delta)
        size += delta.values.nbytes + _plane_bytes(delta.locations)
        if size >= payload_bytes or len(batch) >= wire.MAX_DELTAS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _plane_bytes(locations: torch.Tensor | range) -> int:
    # Two bytes hold nearly every gap of a delta that is dense enough to matter.
    return 0 if isinstance(locations, range) else 2 * locations.numel()
