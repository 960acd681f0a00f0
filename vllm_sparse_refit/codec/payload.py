"""Deltas to payload bytes and back (``docs/wire-format.md``). Pure functions, any thread.

All deltas of a payload share its sections, one for each kind of number, and each section is a zstd
frame of its own: numbers of one kind have one distribution, which is all that there is to gain from.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import zstandard

from vllm_sparse_refit.codec import kernels, wire
from vllm_sparse_refit.codec.coding import UNSIGNED, CodedDelta
from vllm_sparse_refit.codec.delta import SparseOperation, TensorDelta
from vllm_sparse_refit.codec.wire import Buffer, Prelude, Row, Section
from vllm_sparse_refit.errors import PayloadError

_Array = npt.NDArray[Any]
# zstd's largest window without --long, so every level up to 22 can be read.
_MAX_WINDOW_BYTES: Final = 1 << 27
# What is packed here has no repetitions worth a reference, and every one that zstd finds by accident
# costs more than it saves: its entropy coder alone is wanted. A tiny hash table and long matches come
# closest. The target length must stay 0, or the strategy leaves literals as they are.
_ENTROPY_CODING: Final = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    window_log=17,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
)

_SAMPLE_BYTES: Final = 1 << 14
_NO_BYTES: Final = np.empty(0, np.uint8)

_of_thread = threading.local()


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


def encode_payload(deltas: Sequence[TensorDelta]) -> bytes:
    """Encode deltas into one self-contained payload.

    Args:
        deltas: At most ``wire.MAX_DELTAS``; of one tensor, several with disjoint spans.

    Raises:
        PayloadError: a delta breaks the format's rules, for instance by a location out of its span.
    """
    return join_payload([CodedDelta.of(delta) for delta in deltas])


def join_payload(coded: Sequence[CodedDelta]) -> bytes:
    """As :func:`encode_payload`, of deltas that are coded already."""
    if len(coded) > wire.MAX_DELTAS:
        raise PayloadError(f"{len(coded)} deltas in one payload; {wire.MAX_DELTAS} are the limit")
    rows = [item.row for item in coded]
    wire.check_agreement(rows)
    plain = _plain_sections(coded, b"".join(row.pack() for row in rows))
    sections, stored = [], []
    for kind, content in plain.items():
        encoding, data = _compress(content)
        sections.append(
            Section(kind=kind, encoding=encoding, plain_bytes=len(content), stored_bytes=len(data))
        )
        stored.append(data)
    prelude = Prelude(
        deltas=len(rows),
        decoded_bytes=(len(plain[wire.TABLE]) if rows else 0)
        + sum(row.tensor_bytes for row in rows),
        sections=tuple(sections),
    )
    return prelude.pack(stored)


def _plain_sections(coded: Sequence[CodedDelta], table: bytes) -> dict[int, Buffer]:
    """What goes into each section, less the empty ones, ascending by kind."""
    sections: dict[int, Buffer] = {
        wire.TABLE: table,
        wire.GAPS: b"".join([item.gaps for item in coded]),
        wire.NIBBLES: b"".join([item.nibbles for item in coded]),
    }
    for kinds, numbers in (
        (wire.WIDE_GAP_PLANES, [(8, item.wide) for item in coded]),
        (wire.CODE_PLANES, [(item.row.dtype.itemsize, item.codes) for item in coded]),
    ):
        planes = kernels.write_planes(numbers)
        sections |= {kinds[plane]: content for plane, content in planes.items()}
    return {kind: content for kind, content in sections.items() if len(content)}


def _compress(content: Buffer) -> tuple[int, Buffer]:
    if len(content) > 4 * _SAMPLE_BYTES and _is_noise(content):
        return wire.RAW, content
    compressed = _compressor().compress(content)
    if len(compressed) < len(content):
        return wire.ZSTD, compressed
    return wire.RAW, content


def _is_noise(content: Buffer) -> bool:
    """Whether a sample from the middle hardly compresses: trying the rest would be a waste of time."""
    middle = len(content) // 2
    sample = memoryview(content)[middle : middle + _SAMPLE_BYTES]
    return len(_compressor().compress(sample)) > 0.99 * _SAMPLE_BYTES


def _compressor() -> zstandard.ZstdCompressor:
    """This thread's own: its tables are costly to make, and two threads must not share one."""
    if not hasattr(_of_thread, "compressor"):
        _of_thread.compressor = zstandard.ZstdCompressor(compression_params=_ENTROPY_CODING)
    compressor: zstandard.ZstdCompressor = _of_thread.compressor
    return compressor


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
    plain = _Sections(prelude, memoryview(body))
    rows = wire.read_table(plain.read(wire.TABLE).data, prelude.deltas)
    _check_sizes(prelude, plain, rows)
    gaps, nibbles = _Cursor(plain, wire.GAPS), _Cursor(plain, wire.NIBBLES)
    wide, codes = _Planes(plain, wire.WIDE_GAP_PLANES), _Planes(plain, wire.CODE_PLANES)
    deltas = []
    for row in rows:
        locations = _read_locations(row, gaps, wide)
        deltas.append(
            TensorDelta(
                name=row.name,
                shape=row.shape,
                dtype=row.dtype,
                operation=row.operation,
                begin=row.begin,
                end=row.end,
                locations=locations,
                values=_read_values(row, nibbles, codes),
                prior=row.prior,
            )
        )
    for planes in (wide, codes):
        planes.check_used_up()
    return deltas


def _checked_prelude(payload: Buffer, limits: DecodeLimits) -> Prelude:
    if len(payload) > limits.max_payload_bytes:
        raise PayloadError(
            f"the payload has {len(payload)} bytes and the limit is {limits.max_payload_bytes}; "
            "raise max_payload_bytes or lower payload_bytes on the trainer"
        )
    prelude = Prelude.read(payload)
    wire.verify_checksum(payload)
    if (largest := max(prelude.decoded_bytes, prelude.plain_bytes)) > limits.max_decoded_bytes:
        raise PayloadError(
            f"the payload decodes to {largest} bytes and the limit is "
            f"{limits.max_decoded_bytes}; raise max_decoded_bytes or lower chunk_elements and "
            "payload_bytes on the trainer"
        )
    if prelude.deltas > wire.MAX_DELTAS:
        raise PayloadError(f"{prelude.deltas} deltas in a payload; {wire.MAX_DELTAS} are the limit")
    return prelude


class _Sections:
    """A payload's sections, decompressed as they are asked for."""

    def __init__(self, prelude: Prelude, payload: memoryview) -> None:
        self._stored: dict[int, tuple[Section, memoryview]] = {}
        at = prelude.body_at
        for section in prelude.sections:
            self._stored[section.kind] = section, payload[at : at + section.stored_bytes]
            at += section.stored_bytes

    def size(self, kind: int) -> int:
        """Bytes of a section once decompressed, 0 if it was left out."""
        return self._stored[kind][0].plain_bytes if kind in self._stored else 0

    def read(self, kind: int) -> _Array:
        """A section's bytes, read-only; none if it was left out."""
        if kind not in self._stored:
            return _NO_BYTES
        section, stored = self._stored[kind]
        if section.encoding == wire.RAW:
            return np.frombuffer(stored, np.uint8)
        return np.frombuffer(_decompress(section, stored), np.uint8)


def _decompress(section: Section, stored: memoryview) -> bytes:
    declared = section.plain_bytes
    try:
        # zstandard allocates what the frame declares, so that must be read first. With the output
        # complete beforehand zstd writes no byte past it.
        frame = zstandard.get_frame_parameters(stored)
        if frame.content_size != declared or frame.window_size > _MAX_WINDOW_BYTES:
            raise PayloadError(
                f"the zstd frame of section {section.kind} declares {frame.content_size} bytes "
                f"(window {frame.window_size}) and should have {declared}"
            )
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        plain = decompressor.decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise PayloadError(f"section {section.kind} cannot be decompressed: {error}") from None
    if len(plain) != declared:
        raise PayloadError(f"section {section.kind} has {len(plain)} bytes, not {declared}")
    return plain


def _check_sizes(prelude: Prelude, plain: _Sections, rows: Sequence[Row]) -> None:
    """What the rows imply must be what is there, before tensors of their sizes are allocated."""
    declared = (prelude.decoded_bytes, plain.size(wire.GAPS), plain.size(wire.NIBBLES))
    needed = (
        plain.size(wire.TABLE) + sum(row.tensor_bytes for row in rows),
        sum(row.gap_bytes for row in rows),
        sum(row.nibble_bytes for row in rows),
    )
    if declared != needed:
        raise PayloadError(
            f"the payload declares {declared} bytes of decoded data, gaps and nibbles, but the counts "
            f"of its deltas need {needed}"
        )
    fewest = sum(row.count for row in rows if not row.has_nibbles)
    if plain.size(wire.CODE_PLANES[0]) < fewest:
        raise PayloadError(
            f"the payload has {plain.size(wire.CODE_PLANES[0])} values beside its nibbles, but the "
            f"counts of its deltas need {fewest}"
        )


class _Cursor:
    """Takes one section piece by piece; its size was checked."""

    def __init__(self, plain: _Sections, kind: int) -> None:
        self._bytes = plain.read(kind)
        self._at = 0

    def take(self, size: int) -> _Array:
        self._at += size
        return self._bytes[self._at - size : self._at]


class _Planes:
    """Takes numbers from their byte planes; how many each delta needs shows only on the way."""

    def __init__(self, plain: _Sections, kinds: range) -> None:
        self._planes = [plain.read(kind) for kind in kinds]
        self._used = [0] * len(kinds)

    def take(self, count: int, dtype: npt.DTypeLike) -> _Array:
        """The next ``count`` numbers.

        Raises:
            PayloadError: a plane ends before.
        """
        if self._used[0] + count > self._planes[0].size:
            raise PayloadError("byte plane 0 ends too early")
        numbers = np.zeros(count, dtype)
        for plane in range(numbers.itemsize):
            content, at = self._planes[plane], self._used[plane]
            self._used[plane] = at + count
            if not content.size and plane > 0:
                continue  # left out: zeros
            if at + count > content.size:
                raise PayloadError(f"byte plane {plane} ends too early")
            kernels.read_plane(content[at : at + count], plane, numbers)
        return numbers

    def check_used_up(self) -> None:
        """Raise PayloadError if any plane has bytes left."""
        for plane, (content, used) in enumerate(zip(self._planes, self._used, strict=True)):
            if content.size and content.size != used:
                raise PayloadError(
                    f"byte plane {plane} has {content.size} bytes and the deltas use {used}"
                )


def _read_locations(row: Row, gaps: _Cursor, wide: _Planes) -> torch.Tensor | range:
    if not row.has_gaps:
        return range(row.first, row.first + row.count)
    content = gaps.take(row.gap_bytes)
    escaped = int(np.count_nonzero(content == kernels.ESCAPED_GAP))
    dtype = np.int32 if row.location_dtype is torch.int32 else np.int64
    try:
        locations, _ = kernels.decode_gaps(
            content, wide.take(escaped, np.uint64), row.first, row.end, dtype
        )
    except ValueError as error:
        raise PayloadError(f"the delta of {row.name!r}: {error} [{row.begin}, {row.end})") from None
    return torch.from_numpy(locations)


def _read_values(row: Row, nibbles: _Cursor, planes: _Planes) -> torch.Tensor:
    dtype = UNSIGNED[row.dtype.itemsize]
    if row.has_nibbles:
        content = nibbles.take(row.nibble_bytes)
        if row.count % 2 and content[-1] >> 4:
            raise PayloadError(
                f"the delta of {row.name!r} has bits in a half byte that it does not use"
            )
        escaped = kernels.count_escaped_nibbles(content)
        codes = kernels.decode_nibbles(content, planes.take(escaped, dtype), row.count)
    else:
        codes = planes.take(row.count, dtype)
    if row.operation is SparseOperation.ADD:
        kernels.unzigzag(codes)
    return torch.from_numpy(codes.view(f"i{codes.itemsize}" if codes.itemsize > 1 else "u1"))


class DeltaBatcher:
    """Groups deltas, in order, into batches that each fill about one payload. One thread at a time.

    A delta is never split, so one of more than ``payload_bytes`` makes a payload of its size.

    Args:
        payload_bytes: Size before compression at which a batch is closed.
    """

    def __init__(self, payload_bytes: int) -> None:
        self._payload_bytes = payload_bytes
        self._batch: list[CodedDelta] = []
        self._size = 0

    def add(self, delta: CodedDelta) -> list[CodedDelta]:
        """Take the next delta; returns the batch that it fills, or an empty one."""
        self._batch.append(delta)
        self._size += delta.nbytes
        if self._size >= self._payload_bytes or len(self._batch) >= wire.MAX_DELTAS:
            return self.rest()
        return []

    def rest(self) -> list[CodedDelta]:
        """The batch that is not yet full; the next delta begins another."""
        batch, self._batch, self._size = self._batch, [], 0
        return batch


def batch_deltas(deltas: Iterable[CodedDelta], payload_bytes: int) -> Iterator[list[CodedDelta]]:
    """The batches of a :class:`DeltaBatcher`; deltas are pulled one at a time."""
    batcher = DeltaBatcher(payload_bytes)
    for delta in deltas:
        if batch := batcher.add(delta):
            yield batch
    if batch := batcher.rest():
        yield batch
