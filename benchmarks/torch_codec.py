"""The plain way to find and pack changes, to measure the codec against.

``ne``, ``nonzero``, gathers, differences and xor in torch; then 16-bit gaps and xor values one after
the other under zstd level 1. All tensors share one frame, which is the least that this way can take.
"""

import time
from collections.abc import Sequence

import numpy as np
import torch
import zstandard

from benchmarks.workloads import Pair

_WIDTH_OF_GAPS = {2: torch.int16, 4: torch.int32}


def encode(pairs: list[Pair], threads: int) -> bytes:
    """The changes of all tensors: width of the gaps, changes in each tensor, and one zstd frame."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _encode(pairs)
    finally:
        torch.set_num_threads(before)


def _encode(pairs: list[Pair]) -> bytes:
    changes = [_changes(pair) for pair in pairs]
    gaps, values = (torch.cat(parts) for parts in zip(*changes, strict=True))
    width = 2 if not gaps.numel() or gaps.max() < 1 << 16 else 4
    packed = torch.cat([gaps.to(_WIDTH_OF_GAPS[width]).view(torch.uint8), values.view(torch.uint8)])
    counts = np.array([own.numel() for own, _ in changes], "<u4").tobytes()
    frame = zstandard.ZstdCompressor(level=1).compress(packed.numpy().data)
    return bytes([width]) + counts + frame


def _changes(pair: Pair) -> tuple[torch.Tensor, torch.Tensor]:
    old, new = (tensor.view(torch.int16).view(-1) for tensor in (pair.old, pair.new))
    positions = torch.ne(old, new).nonzero().squeeze(1)
    xor = old[positions] ^ new[positions]
    return torch.diff(positions, prepend=positions.new_zeros(1)), xor


def decode_into(encoded: bytes, olds: Sequence[torch.Tensor]) -> None:
    """Bring the bits of all tensors, int16 ``[n]`` each, to what was encoded, in place."""
    width, header = encoded[0], 1 + 4 * len(olds)
    counts = np.frombuffer(encoded[1:header], "<u4")
    plain = np.frombuffer(zstandard.ZstdDecompressor().decompress(encoded[header:]), np.uint8)
    at = int(counts.sum()) * width
    gaps, values = plain[:at].view(f"u{width}"), plain[at:].view(np.int16)
    ends = np.cumsum(counts)[:-1]
    for old, own, xor in zip(olds, np.split(gaps, ends), np.split(values, ends), strict=True):
        old.numpy()[np.cumsum(own, dtype=np.int64)] ^= xor


def fastest_threads(pairs: list[Pair], candidates: Sequence[int]) -> int:
    """How many threads serve best here and now; more are slower where cores are taken.

    One try each: encode once before, or the first one pays for touching memory.
    """

    def seconds(threads: int) -> float:
        started = time.perf_counter()
        encode(pairs, threads)
        return time.perf_counter() - started

    times = [seconds(threads) for threads in candidates]
    return candidates[times.index(min(times))]
