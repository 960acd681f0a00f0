"""Payloads built by hand from the format's description, without the code under test."""

import struct

import xxhash
import zstandard

SIZES = ("deltas", "table", "locations", "values", "decoded", "stored")


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
    width: int = 1,
    name_bytes: int | None = None,
) -> bytes:
    """One row of the table; by default bf16 xor of 3 of 8 elements, with one-byte gaps."""
    length = len(name) if name_bytes is None else name_bytes
    fixed = struct.pack(
        "<QQQQHBBBB", begin, end, first, count, length, dtype, operation, width, len(shape)
    )
    return fixed + struct.pack(f"<{len(shape)}Q", *shape) + name


def payload(
    table: bytes = row(),
    locations: bytes = b"\x02\x03",
    values: bytes = b"\x01\x02\x03\x00\x00\x80",
    *,
    deltas: int = 1,
    decoded: int = 18,
    version: int = 1,
    encoding: int = 0,
    stored: bytes | None = None,
    **sizes: int,
) -> bytes:
    """A sealed payload; ``decoded`` counts the tensors only, ``sizes`` override declared sizes."""
    body = table + locations + values
    if stored is None:
        stored = zstandard.ZstdCompressor().compress(body) if encoding else body
    declared = {
        "deltas": deltas,
        "table": len(table),
        "locations": len(locations),
        "values": len(values),
        "decoded": len(table) + decoded,
        "stored": len(stored),
    } | sizes
    head = struct.pack("<4sHBB", b"VSRP", version, encoding, 0)
    return seal(
        head + bytes(16) + struct.pack("<IIQQQQ", *(declared[key] for key in SIZES)) + stored
    )


def plain(encoded: bytes) -> bytes:
    """The same payload with its body stored raw, so that no zstd version shows in its bytes."""
    if encoded[6] == 0:
        return encoded
    body = zstandard.ZstdDecompressor().decompress(encoded[64:])
    return seal(encoded[:6] + b"\x00" + encoded[7:56] + struct.pack("<Q", len(body)) + body)
