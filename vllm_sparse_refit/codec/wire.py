"""The fixed parts of a payload: prelude, directory and table of deltas (``docs/wire-format.md``).

Reading checks everything that can be known without touching locations or values, and allocates
nothing larger than the table it reads.
"""

import itertools
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Self

import torch
import xxhash

from vllm_sparse_refit.codec.delta import SparseOperation, TensorDelta, location_dtype
from vllm_sparse_refit.codec.digest import BitsDigest
from vllm_sparse_refit.errors import ChecksumError, PayloadError

Buffer = bytes | bytearray | memoryview

VERSION: Final = 1
MAX_DELTAS: Final = 1 << 16
MAX_NAME_BYTES: Final = 1024
MAX_DIMENSIONS: Final = 32
MAX_ELEMENTS: Final = (1 << 63) - 1

RAW: Final = 0
ZSTD: Final = 1

# Kinds of section. A plane holds one byte of each of its numbers, the lowest byte in the first.
TABLE: Final = 0
GAPS: Final = 1
NIBBLES: Final = 2
WIDE_GAP_PLANES: Final = range(8, 16)
CODE_PLANES: Final = range(16, 24)
_KINDS: Final = frozenset((TABLE, GAPS, NIBBLES, *WIDE_GAP_PLANES, *CODE_PLANES))

_MAGIC: Final = b"VSRP"
_HEAD: Final = struct.Struct("<4sHH")
_COUNTS: Final = struct.Struct("<IIQQ")
_SECTION: Final = struct.Struct("<BBHIQQ")
_CHECKSUM: Final = slice(8, 24)
PRELUDE_BYTES: Final = 48
SECTION_BYTES: Final = _SECTION.size

_ROW: Final = struct.Struct("<QQQQHBBBB")
_HAS_GAPS: Final = 1
_HAS_NIBBLES: Final = 2
_HAS_PRIOR: Final = 4
_PRIOR: Final = struct.Struct("<QQ")

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
_OPERATION_CODES: Final = {
    SparseOperation.XOR: 1,
    SparseOperation.OVERWRITE: 2,
    SparseOperation.ADD: 3,
}
_OPERATIONS: Final = {code: operation for operation, code in _OPERATION_CODES.items()}


@dataclass(frozen=True, kw_only=True)
class Section:
    """One entry of the directory; sizes are in bytes.

    Attributes:
        kind: ``TABLE``, ``GAPS``, ``NIBBLES``, or one of the two ranges of planes.
        encoding: ``RAW`` or ``ZSTD``.
        plain_bytes: Size once decompressed.
        stored_bytes: Size in the payload.
    """

    kind: int
    encoding: int
    plain_bytes: int
    stored_bytes: int

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise PayloadError(f"the payload has a section of the unknown kind {self.kind}")
        if self.encoding not in (RAW, ZSTD):
            raise PayloadError(f"section {self.kind} has the unknown encoding {self.encoding}")
        if self.encoding == RAW and self.plain_bytes != self.stored_bytes:
            raise PayloadError(
                f"section {self.kind} is stored as it is, but declares {self.plain_bytes} bytes and "
                f"has {self.stored_bytes}"
            )
        if not self.plain_bytes:
            raise PayloadError(f"section {self.kind} is empty; empty sections are left out")


@dataclass(frozen=True, kw_only=True)
class Prelude:
    """What a payload says of itself before its sections.

    Attributes:
        deltas: Rows of the table.
        decoded_bytes: Size of the table and of the tensors of the decoded deltas together.
        sections: Ascending by kind, in the order in which their bytes follow.
    """

    deltas: int
    decoded_bytes: int
    sections: tuple[Section, ...]

    @property
    def stored_bytes(self) -> int:
        """Size of all sections' bytes, which end the payload."""
        return sum(section.stored_bytes for section in self.sections)

    @property
    def plain_bytes(self) -> int:
        """Size of all sections once decompressed."""
        return sum(section.plain_bytes for section in self.sections)

    @property
    def body_at(self) -> int:
        """Where the sections' bytes begin."""
        return PRELUDE_BYTES + SECTION_BYTES * len(self.sections)

    def pack(self, stored: Sequence[Buffer]) -> bytes:
        """The whole payload, of this prelude and the bytes of its sections."""
        head = _HEAD.pack(_MAGIC, VERSION, 0)
        counts = _COUNTS.pack(
            self.deltas, len(self.sections), self.decoded_bytes, self.stored_bytes
        )
        directory = [
            _SECTION.pack(s.kind, s.encoding, 0, 0, s.plain_bytes, s.stored_bytes)
            for s in self.sections
        ]
        rest = (counts, *directory, *stored)
        return b"".join((head, _digest(head, *rest), *rest))

    @classmethod
    def read(cls, payload: Buffer) -> Self:
        """Read prelude and directory; neither the checksum nor the sections are looked at.

        Raises:
            PayloadError: too short, not a payload, of a version this decoder does not know, or a
                directory that cannot be.
        """
        if len(payload) < PRELUDE_BYTES:
            raise PayloadError(
                f"a payload has at least {PRELUDE_BYTES} bytes, this one has {len(payload)}; "
                "it was cut short or is something else"
            )
        magic, version, reserved = _HEAD.unpack_from(payload)
        if magic != _MAGIC:
            raise PayloadError(f"this is no payload: it begins with {magic!r}, not {_MAGIC!r}")
        if version != VERSION:
            raise PayloadError(
                f"the payload has format version {version} and this decoder reads {VERSION}; "
                "install the same vllm-sparse-refit on both sides"
            )
        deltas, count, decoded, stored = _COUNTS.unpack_from(payload, _CHECKSUM.stop)
        if reserved or count > len(_KINDS):
            raise PayloadError(f"the payload has {count} sections (reserved field {reserved})")
        if len(payload) != PRELUDE_BYTES + SECTION_BYTES * count + stored:
            raise PayloadError(
                f"the payload declares {count} sections of {stored} bytes together, but has "
                f"{len(payload)} bytes in all; it was cut short or run together"
            )
        prelude = cls(
            deltas=deltas, decoded_bytes=decoded, sections=_read_directory(payload, count)
        )
        if prelude.stored_bytes != stored:
            raise PayloadError(
                f"the sections have {prelude.stored_bytes} bytes together, not the declared {stored}"
            )
        return prelude


def _read_directory(payload: Buffer, count: int) -> tuple[Section, ...]:
    sections: list[Section] = []
    for number in range(count):
        kind, encoding, *reserved, plain, stored = _SECTION.unpack_from(
            payload, PRELUDE_BYTES + SECTION_BYTES * number
        )
        if any(reserved):
            raise PayloadError(f"section {kind} uses reserved fields")
        if sections and kind <= sections[-1].kind:
            raise PayloadError(f"section {kind} comes twice or too late")
        sections.append(
            Section(kind=kind, encoding=encoding, plain_bytes=plain, stored_bytes=stored)
        )
    return tuple(sections)


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

    Attributes:
        name, shape, dtype, operation, begin, end, prior: As in :class:`TensorDelta`.
        first: The first location, absolute.
        count: Number of elements.
        has_gaps: Whether ``count - 1`` gaps follow the first location; otherwise the locations are
            consecutive.
        has_nibbles: Whether the values are packed as nibbles, with planes for the escaped ones only.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    operation: SparseOperation
    begin: int
    end: int
    first: int
    count: int
    has_gaps: bool
    has_nibbles: bool
    prior: BitsDigest | None = None

    def __post_init__(self) -> None:
        numel = self._checked_numel()
        if not 0 <= self.begin < self.end <= numel:
            self._refuse(f"speaks for [{self.begin}, {self.end}) of {numel} elements")
        if not 1 <= self.count <= self.end - self.begin:
            self._refuse(f"has {self.count} elements in a span of {self.end - self.begin}")
        last = self.first + (0 if self.has_gaps else self.count - 1)
        if not self.begin <= self.first <= last < self.end:
            self._refuse(f"has a location outside its span [{self.begin}, {self.end})")
        if self.operation is SparseOperation.OVERWRITE:
            if self.has_nibbles:
                self._refuse("has nibbles, which an overwrite never has")
            if self.prior is not None:
                self._refuse("has a digest of bits that it overwrites, and builds on none")

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
    def gap_bytes(self) -> int:
        """Size of its part of the gaps."""
        return self.count - 1 if self.has_gaps else 0

    @property
    def nibble_bytes(self) -> int:
        """Size of its part of the nibbles."""
        return (self.count + 1) // 2 if self.has_nibbles else 0

    @property
    def tensor_bytes(self) -> int:
        """Memory of the decoded delta's tensors."""
        location_bytes = self.location_dtype.itemsize if self.has_gaps else 0
        return self.count * (location_bytes + self.dtype.itemsize)

    @classmethod
    def of(cls, delta: TensorDelta, *, has_gaps: bool, has_nibbles: bool) -> Self:
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
            has_gaps=has_gaps,
            has_nibbles=has_nibbles,
            prior=delta.prior,
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
            self._flags,
            len(self.shape),
        )
        prior = b"" if self.prior is None else _PRIOR.pack(self.prior.low, self.prior.high)
        return fixed + prior + struct.pack(f"<{len(self.shape)}Q", *self.shape) + name

    @property
    def _flags(self) -> int:
        has_prior = self.prior is not None
        return _HAS_GAPS * self.has_gaps | _HAS_NIBBLES * self.has_nibbles | _HAS_PRIOR * has_prior


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

    begin, end, first, count, name_bytes, dtype, operation, flags, dimensions = _ROW.unpack(
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
    prior = BitsDigest(*_PRIOR.unpack(take(_PRIOR.size))) if flags & _HAS_PRIOR else None
    shape = struct.unpack(f"<{dimensions}Q", take(8 * dimensions))
    name = _decode_name(take(name_bytes), number)
    if dtype not in _DTYPES:
        raise PayloadError(f"the delta of {name!r} has the unknown dtype code {dtype}")
    if operation not in _OPERATIONS:
        raise PayloadError(f"the delta of {name!r} has the unknown operation code {operation}")
    if flags & ~(_HAS_GAPS | _HAS_NIBBLES | _HAS_PRIOR):
        raise PayloadError(f"the delta of {name!r} has the unknown flags {flags:#x}")
    row = Row(
        name=name,
        shape=shape,
        dtype=_DTYPES[dtype],
        operation=_OPERATIONS[operation],
        begin=begin,
        end=end,
        first=first,
        count=count,
        has_gaps=bool(flags & _HAS_GAPS),
        has_nibbles=bool(flags & _HAS_NIBBLES),
        prior=prior,
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
