"""The plain way to find and pack changes, to measure the codec against.

``ne``, ``nonzero``, gathers, differences and xor in torch; then 16-bit gaps and xor values one after
the other under zstd level 1, a frame a tensor.
"""

import time
from collections.abc import Sequence

import numpy as np
import torch
import zstandard

from benchmarks.workloads import Pair

_WIDTH_OF_GAPS = {2: torch.int16, 4: torch.int32}


def encode(pairs: list[Pair], threads: int) -> list[bytes]:
    """The changes of each tensor, compressed; of a tensor without any, no bytes at all."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        compressor = zstandard.ZstdCompressor(level=1)
        return [_encode(pair, compressor) for pair in pairs]
    finally:
        torch.set_num_threads(before)


def fastest_threads(pairs: list[Pair], candidates: Sequence[int]) -> int:
    """How many threads serve best here and now; more are slower where cores are taken."""

    def seconds(threads: int) -> float:
        started = time.perf_counter()
        encode(pairs, threads)
        return time.perf_counter() - started

    # The best of two turns; the first also touches memory for the first time.
    turns = [[seconds(threads) for threads in candidates] for _ in range(2)]
    best = [min(own) for own in zip(*turns, strict=True)]
    return candidates[best.index(min(best))]


def _encode(pair: Pair, compressor: zstandard.ZstdCompressor) -> bytes:
    old, new = (tensor.view(torch.int16).view(-1) for tensor in (pair.old, pair.new))
    positions = torch.ne(old, new).nonzero().squeeze(1)
    if not positions.numel():
        return b""
    xor = old[positions] ^ new[positions]
    gaps = torch.diff(positions, prepend=positions.new_zeros(1))
    width = 2 if gaps.max() < 1 << 16 else 4
    packed = torch.cat([gaps.to(_WIDTH_OF_GAPS[width]).view(torch.uint8), xor.view(torch.uint8)])
    return bytes([width]) + compressor.compress(packed.numpy().data)


def decode_into(encoded: bytes, old: torch.Tensor) -> None:
    """Bring the bits of a tensor, int16 ``[n]``, to what was encoded, in place."""
    if not encoded:
        return
    width = encoded[0]
    plain = np.frombuffer(zstandard.ZstdDecompressor().decompress(encoded[1:]), np.uint8)
    count = plain.size // (width + 2)
    gaps = plain[: count * width].view(f"u{width}")
    old.numpy()[np.cumsum(gaps, dtype=np.int64)] ^= plain[count * width :].view(np.int16)
