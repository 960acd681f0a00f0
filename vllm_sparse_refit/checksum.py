"""The checksum that identifies a payload's bytes: xxh3-128."""

import xxhash


def checksum_hex(body: bytes | bytearray | memoryview) -> str:
    """xxh3-128 of ``body`` as 32 lower-case hex digits. Guards against accidents, not attackers."""
    return xxhash.xxh3_128_hexdigest(body)
