"""The fixed parts of a payload: its prelude and its table of deltas (``docs/wire-format.md``).

Reading checks everything that can be known without touching locations or values, and allocates
nothing larger than the table it reads.
"""

import itertools
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

import torch
import xxhash

from vllm_sparse_refit.codec.delta import SparseOperation, TensorDelta, location_dtype
from vllm_sparse_refit.errors import ChecksumError, PayloadError

Buffer = bytes | bytearray | memoryview

VERSION: Final = 1
MAX_DELTAS: Final = 1 << 16
MAX_NAME_BYTES: Final = 1024
MAX_DIMENSIONS: Final = 32
MAX_ELEMENTS: Final = (1 << 63) - 1

BODY_RAW: Final = 0
BODY_ZSTD: Final = 1

CONTIGUOUS: Final = 0
GAP_WIDTHS: Final = (1, 2, 4, 8)

_MAGIC: Final = b"VSRP"
_HEAD: Final = struct.Struct("<4sHBB")
_SIZES: Final = struct.Struct("<IIQQQQ")
_CHECKSUM: Final = slice(8, 24)
PRELUDE_BYTES: Final = 64

_ROW: Final = struct.Struct("<QQQQHBBBB")

_DTYPE_CODES: Final = {
    torch.bool: 1,
    torch.uint8: 2,
    torch.uint16: 3,
    torch.uint32: 4,
    torch.uint64: 5,
    torch.int8: 6,
    torch.int16: 7,
    torch.int32: 8,
    torch.int64: 9,
    torch.float16: 10,
    torch.bfloat16: 11,
    torch.float32: 12,
    torch.float64: 13,
    torch.float8_e4m3fn: 14,
    torch.float8_e4m3fnuz: 15,
    torch.float8_e5m2: 16,
    torch.float8_e5m2fnuz: 17,
}
_DTYPES: Final = {code: dtype for dtype, code in _DTYPE_CODES.items()}
_OPERATION_CODES: Final = {SparseOperation.XOR: 1, SparseOperation.OVERWRITE: 2}
_OPERATIONS: Final = {code: operation for operation, code in _OPERATION_CODES.items()}


@dataclass(frozen=True, kw_only=True)
class Prelude:
    """The first 64 bytes of a payload, less magic, version and checksum. Sizes are in bytes.

    Attributes:
        encoding: ``BODY_RAW`` or ``BODY_ZSTD``.
        deltas: Rows of the table.
        table_bytes: Size of the table in the decoded body.
        location_bytes: Size of the location planes.
        value_bytes: Size of the value planes.
        decoded_bytes: The table and the tensors of the decoded deltas together.
        stored_bytes: What follows the prelude.
    """

    encoding: int
    deltas: int
    table_bytes: int
    location_bytes: int
    value_bytes: int
    decoded_bytes: int
    stored_bytes: int

    @property
    def body_bytes(self) -> int:
        """Size of the body once decompressed."""
        return self.table_bytes + self.location_bytes + self.value_bytes

    def pack(self, stored: Buffer) -> bytes:
        """The prelude's bytes, with the checksum over itself and the stored body."""
        head = _HEAD.pack(_MAGIC, VERSION, self.encoding, 0)
        sizes = _SIZES.pack(
            self.deltas,
            self.table_bytes,
            self.location_bytes,
            self.value_bytes,
            self.decoded_bytes,
            self.stored_bytes,
        )
        return head + _digest(head, sizes, stored) + sizes

    @classmethod
    def read(cls, payload: Buffer) -> Self:
        """Read the prelude alone; neither the checksum nor the body is looked at.

        Raises:
            PayloadError: too short, not a payload, or of a version this decoder does not know.
        """
        if len(payload) < PRELUDE_BYTES:
            raise PayloadError(
                f"a payload has at least {PRELUDE_BYTES} bytes, this one has {len(payload)}; "
                "it was cut short or is something else"
            )
        magic, version, encoding, reserved = _HEAD.unpack_from(payload)
        if magic != _MAGIC:
            raise PayloadError(f"this is no payload: it begins with {magic!r}, not {_MAGIC!r}")
        if version != VERSION:
            raise PayloadError(
                f"the payload has format version {version} and this decoder reads {VERSION}; "
                "install the same vllm-sparse-refit on both sides"
            )
        if encoding not in (BODY_RAW, BODY_ZSTD) or reserved:
            raise PayloadError(f"unknown body encoding {encoding} (reserved byte {reserved})")
        deltas, table, location, value, decoded, stored = _SIZES.unpack_from(payload, 24)
        return cls(
            encoding=encoding,
            deltas=deltas,
            table_bytes=table,
            location_bytes=location,
            value_bytes=value,
            decoded_bytes=decoded,
            stored_bytes=stored,
        )


def verify_checksum(payload: Buffer) -> None:
    """Compare a payload with the checksum in its prelude.

    Raises:
        ChecksumError: they differ.
    """
    view = memoryview(payload)
    computed = _digest(view[: _CHECKSUM.start], view[_CHECKSUM.stop :])
    if computed != bytes(view[_CHECKSUM]):
        raise ChecksumError(
            f"the payload was damaged: its bytes have checksum {computed.hex()} and it says "
            f"{bytes(view[_CHECKSUM]).hex()}; send it again"
        )


def _digest(*parts: Buffer) -> bytes:
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.digest()


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table: a delta less its locations and values. Checks itself.

    ``first`` is the first location, absolute; ``count`` the number of elements; ``gap_width`` the
    bytes of each of the ``count - 1`` gaps that follow, or ``CONTIGUOUS`` when there are none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    operation: SparseOperation
    begin: int
    end: int
    first: int
    count: int
    gap_width: int

    def __post_init__(self) -> None:
        numel = self._checked_numel()
        if not 0 <= self.begin < self.end <= numel:
            self._refuse(f"speaks for [{self.begin}, {self.end}) of {numel} elements")
        if not 1 <= self.count <= self.end - self.begin:
            self._refuse(f"has {self.count} elements in a span of {self.end - self.begin}")
        last = self.first + (self.count - 1 if self.gap_width == CONTIGUOUS else 0)
        if not self.begin <= self.first <= last < self.end:
            self._refuse(f"has a location outside its span [{self.begin}, {self.end})")
        if self.gap_width != CONTIGUOUS and self.gap_width not in GAP_WIDTHS:
            self._refuse(f"has gaps of {self.gap_width} bytes; 1, 2, 4 or 8 are possible")
        if self.gap_width > self.location_dtype.itemsize:
            self._refuse(f"has gaps of {self.gap_width} bytes, wider than its locations")

    def _checked_numel(self) -> int:
        if len(self.shape) > MAX_DIMENSIONS:
            self._refuse(f"has {len(self.shape)} dimensions; {MAX_DIMENSIONS} are the limit")
        numel = math.prod(self.shape)
        if min(self.shape, default=0) < 0 or max(*self.shape, numel, 0) > MAX_ELEMENTS:
            self._refuse("has a shape of 2**63 elements or more, or a negative one")
        return numel

    def _refuse(self, what: str) -> None:
        raise PayloadError(f"the delta of {self.name!r} {what}")

    @property
    def location_dtype(self) -> torch.dtype:
        """dtype of the decoded locations."""
        return location_dtype(math.prod(self.shape))

    @property
    def location_bytes(self) -> int:
        """Size of the location planes."""
        return (self.count - 1) * self.gap_width

    @property
    def value_bytes(self) -> int:
        """Size of the value planes."""
        return self.count * self.dtype.itemsize

    @property
    def tensor_bytes(self) -> int:
        """Memory of the decoded delta's tensors."""
        wide = 0 if self.gap_width == CONTIGUOUS else self.location_dtype.itemsize
        return self.count * (wide + self.dtype.itemsize)

    @classmethod
    def of(cls, delta: TensorDelta, gap_width: int) -> Self:
        """The row of a delta.

        Raises:
            PayloadError: the delta breaks the format's rules.
        """
        return cls(
            name=delta.name,
            shape=tuple(delta.shape),
            dtype=delta.dtype,
            operation=delta.operation,
            begin=delta.begin,
            end=delta.end,
            first=int(delta.locations[0]) if len(delta.locations) else delta.begin,
            count=len(delta.locations),
            gap_width=gap_width,
        )

    def pack(self) -> bytes:
        """The row's bytes.

        Raises:
            PayloadError: the name is too long, or no text that UTF-8 can hold.
        """
        name = encode_name(self.name)
        fixed = _ROW.pack(
            self.begin,
            self.end,
            self.first,
            self.count,
            len(name),
            _DTYPE_CODES[self.dtype],
            _OPERATION_CODES[self.operation],
            self.gap_width,
            len(self.shape),
        )
        return fixed + struct.pack(f"<{len(self.shape)}Q", *self.shape) + name


def encode_name(name: str) -> bytes:
    """A tensor's name as it goes into a payload.

    Raises:
        PayloadError: the name is empty, too long, or no text that UTF-8 can hold.
    """
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        raise PayloadError(f"the tensor name {name!r} cannot be written as UTF-8") from None
    if not 1 <= len(encoded) <= MAX_NAME_BYTES:
        raise PayloadError(
            f"a tensor name has 1 to {MAX_NAME_BYTES} bytes; {name[:64]!r} has {len(encoded)}"
        )
    return encoded


def read_table(table: memoryview, deltas: int) -> list[Row]:
    """Read exactly ``deltas`` rows from exactly these bytes.

    Raises:
        PayloadError: anything in the table is malformed, or rows of one tensor disagree.
    """
    rows = []
    at = 0
    for number in range(deltas):
        row, at = _read_row(table, at, number)
        rows.append(row)
    if at != len(table):
        raise PayloadError(f"the table has {len(table) - at} bytes after its last delta")
    check_agreement(rows)
    return rows


def _read_row(table: memoryview, at: int, number: int) -> tuple[Row, int]:
    def take(size: int) -> memoryview:
        nonlocal at
        if size > len(table) - at:
            raise PayloadError(f"the table ends within delta {number}")
        at += size
        return table[at - size : at]

    begin, end, first, count, name_bytes, dtype, operation, gap_width, dimensions = _ROW.unpack(
        take(_ROW.size)
    )
    if dimensions > MAX_DIMENSIONS:
        raise PayloadError(
            f"delta {number} has {dimensions} dimensions; {MAX_DIMENSIONS} are the limit"
        )
    if not 1 <= name_bytes <= MAX_NAME_BYTES:
        raise PayloadError(
            f"delta {number} has a name of {name_bytes} bytes; 1 to {MAX_NAME_BYTES} are possible"
        )
    shape = struct.unpack(f"<{dimensions}Q", take(8 * dimensions))
    name = _decode_name(take(name_bytes), number)
    if dtype not in _DTYPES:
        raise PayloadError(f"the delta of {name!r} has the unknown dtype code {dtype}")
    if operation not in _OPERATIONS:
        raise PayloadError(f"the delta of {name!r} has the unknown operation code {operation}")
    row = Row(
        name=name,
        shape=shape,
        dtype=_DTYPES[dtype],
        operation=_OPERATIONS[operation],
        begin=begin,
        end=end,
        first=first,
        count=count,
        gap_width=gap_width,
    )
    return row, at


def _decode_name(encoded: memoryview, number: int) -> str:
    try:
        return str(encoded, "utf-8")
    except UnicodeDecodeError:
        raise PayloadError(f"the name of delta {number} is not UTF-8") from None


def check_agreement(rows: Iterable[Row]) -> None:
    """Rows of one tensor must have one shape and dtype, and spans that do not overlap.

    Raises:
        PayloadError: they do not.
    """
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row.name, []).append(row)
    for name, same in by_name.items():
        if len({(row.shape, row.dtype) for row in same}) > 1:
            raise PayloadError(f"the deltas of {name!r} differ in shape or dtype")
        spans = sorted((row.begin, row.end) for row in same)
        for (_, end), (begin, _) in itertools.pairwise(spans):
            if begin < end:
                raise PayloadError(f"two deltas of {name!r} both speak for element {begin}")
