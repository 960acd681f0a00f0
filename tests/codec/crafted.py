"""Payloads built by hand from the format's description, without the code under test."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash
import zstandard

TABLE, GAPS, NIBBLES, WIDE, CODES = 0, 1, 2, 8, 16
HEAD_BYTES, ENTRY_BYTES = 48, 24


def seal(payload: bytes) -> bytes:
    """The same payload with a checksum that fits."""
    digest = xxhash.xxh3_128_digest(payload[:8] + payload[24:])
    return payload[:8] + digest + payload[24:]


def row(
    name: bytes = b"w",
    shape: tuple[int, ...] = (8,),
    *,
    dtype: int = 11,
    operation: int = 1,
    begin: int = 0,
    end: int = 8,
    first: int = 1,
    count: int = 3,
    flags: int = 1,
    prior: tuple[int, int] | None = None,
    name_bytes: int | None = None,
) -> bytes:
    """One row of the table; by default bf16 xor of 3 of 8 elements, with gaps, without nibbles.

    ``prior`` puts the digest of the old bits in, and its flag with it.
    """
    flags |= 4 * (prior is not None)
    length = len(name) if name_bytes is None else name_bytes
    fixed = struct.pack(
        "<QQQQHBBBB", begin, end, first, count, length, dtype, operation, flags, len(shape)
    )
    digest = b"" if prior is None else struct.pack("<QQ", *prior)
    return fixed + digest + struct.pack(f"<{len(shape)}Q", *shape) + name


@dataclass(frozen=True)
class Entry:
    """A section: its entry of the directory and its bytes.

    Without ``stored`` the bytes are ``plain``, or a frame of them if ``encoding`` is 1. Declared
    sizes are the true ones unless they are given.
    """

    kind: int
    plain: bytes
    encoding: int = 0
    stored: bytes | None = None
    plain_bytes: int | None = None
    stored_bytes: int | None = None
    reserved: bytes = bytes(6)

    @property
    def content(self) -> bytes:
        if self.stored is not None:
            return self.stored
        return zstandard.ZstdCompressor().compress(self.plain) if self.encoding else self.plain

    def pack(self) -> bytes:
        plain = len(self.plain) if self.plain_bytes is None else self.plain_bytes
        stored = len(self.content) if self.stored_bytes is None else self.stored_bytes
        return struct.pack("<BB6sQQ", self.kind, self.encoding, self.reserved, plain, stored)


def assemble(
    entries: Sequence[Entry],
    *,
    deltas: int,
    decoded: int,
    version: int = 1,
    reserved: int = 0,
    sections: int | None = None,
    stored_bytes: int | None = None,
) -> bytes:
    """A sealed payload of these sections, in this order."""
    stored = b"".join(entry.content for entry in entries)
    prelude = struct.pack("<4sHH", b"VSRP", version, reserved) + bytes(16)
    prelude += struct.pack(
        "<IIQQ",
        deltas,
        len(entries) if sections is None else sections,
        decoded,
        len(stored) if stored_bytes is None else stored_bytes,
    )
    return seal(prelude + b"".join(entry.pack() for entry in entries) + stored)


def entries(
    table: bytes = row(),
    gaps: bytes = b"\x01\x02",
    nibbles: bytes = b"",
    wide: tuple[bytes, ...] = (),
    codes: tuple[bytes, ...] = (b"\x01\x02\x03", b"\x00\x00\x80"),
    *,
    encoding: int = 0,
) -> list[Entry]:
    """The sections of :func:`payload`, less the empty ones."""
    plain = {TABLE: table, GAPS: gaps, NIBBLES: nibbles}
    plain |= {WIDE + plane: content for plane, content in enumerate(wide)}
    plain |= {CODES + plane: content for plane, content in enumerate(codes)}
    return [Entry(kind, content, encoding) for kind, content in plain.items() if content]


def payload(
    table: bytes = row(),
    gaps: bytes = b"\x01\x02",
    nibbles: bytes = b"",
    wide: tuple[bytes, ...] = (),
    codes: tuple[bytes, ...] = (b"\x01\x02\x03", b"\x00\x00\x80"),
    *,
    deltas: int = 1,
    tensors: int = 18,
    encoding: int = 0,
    version: int = 1,
    reserved: int = 0,
    sections: int | None = None,
    stored_bytes: int | None = None,
) -> bytes:
    """By default the locations 1, 3 and 6 with the bits 1, 2 and 0x8003; ``tensors``: their bytes."""
    return assemble(
        entries(table, gaps, nibbles, wide, codes, encoding=encoding),
        deltas=deltas,
        decoded=len(table) + tensors,
        version=version,
        reserved=reserved,
        sections=sections,
        stored_bytes=stored_bytes,
    )


def rich(encoding: int = 0) -> bytes:
    """Three deltas with every kind of section and operation.

    ``a``: bf16 add, locations 5, 306, 307 and 2**40 + 401, values 1, -1, 0 and 100; the digest of its old
    bits has the halves 2**64 - 2 and 3.
    ``b``: fp32 xor of the consecutive elements 2 and 3 with 0x01020304 and 5.
    ``c``: bool overwrite of the one element of a scalar with 1.
    """
    table = (
        row(b"a", (2**41,), operation=3, end=2**41, first=5, count=4, flags=3, prior=(2**64 - 2, 3))
        + row(b"b", (2, 4), dtype=12, first=2, count=2, flags=0)
        + row(b"c", (), dtype=1, operation=2, end=1, first=0, count=1, flags=0)
    )
    # Gaps 300, 0 and 2**40 + 93, of which two less 255; codes 2, 1, 0 and, escaped, 200.
    far = struct.pack("<Q", 2**40 + 93 - 255)
    wide = tuple(bytes((near, byte)) for near, byte in zip(b"\x2d" + bytes(7), far, strict=True))
    wide = tuple(plane if any(plane) else b"" for plane in wide)
    # Plane 0 has all four codes' bytes, plane 1 those of a and b, the others those of b.
    codes = (b"\xc8\x04\x05\x01", b"\x00\x03\x00", b"\x02\x00", b"\x01\x00")
    return payload(
        table,
        b"\xff\x00\xff",
        b"\x12\xf0",
        wide,
        codes,
        deltas=3,
        tensors=4 * (8 + 2) + 2 * 4 + 1,
        encoding=encoding,
    )


def sections(encoded: bytes) -> dict[int, bytes]:
    """The plain bytes of each section of a well-formed payload, by kind."""
    count, at, found = struct.unpack_from("<I", encoded, 28)[0], 0, {}
    at = HEAD_BYTES + ENTRY_BYTES * count
    for number in range(count):
        kind, encoding, _, _, stored = struct.unpack_from(
            "<BB6sQQ", encoded, HEAD_BYTES + ENTRY_BYTES * number
        )
        content = encoded[at : at + stored]
        found[kind] = zstandard.ZstdDecompressor().decompress(content) if encoding else content
        at += stored
    return found


def plain(encoded: bytes) -> bytes:
    """The same payload with its sections stored as they are, so that no zstd version shows."""
    deltas, _, decoded = struct.unpack_from("<IIQ", encoded, 24)
    kept = [Entry(kind, content) for kind, content in sections(encoded).items()]
    return assemble(kept, deltas=deltas, decoded=decoded)
