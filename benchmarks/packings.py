"""Ways to lay out changed elements as bytes before a compressor sees them, and their entropies.

For comparison only; the codec has one of its own. A layout is a list of streams, each compressed
by itself. None holds more than a decoder needs to get the gaps and values back.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.workloads import U16, Changes

U8 = npt.NDArray[np.uint8]
_INTEGERS = npt.NDArray[np.uint8] | npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Stream:
    """Bytes, and the width of the integers in them, which some compressors want to know."""

    data: bytes
    width: int = 1


def entropy(symbols: _INTEGERS) -> float:
    """Order-0 entropy, in bits a symbol; 0 of nothing."""
    if not symbols.size:
        return 0.0
    counts = np.bincount(symbols)
    return entropy_of_counts(counts)


def entropy_of_counts(counts: npt.NDArray[np.integer]) -> float:
    """Entropy of the distribution that the counts describe, in bits."""
    shares = counts[counts > 0] / counts.sum()
    # abs: not -0.0 for a single symbol.
    return float(abs((shares * np.log2(shares)).sum()))


def entropy_given_exponent(changed: Changes, all_exponents: U8) -> tuple[float, float]:
    """What a code could reach that knows the exponent of every element before the change.

    Whether an element changed is a coin of its own bias for each exponent, instead of a gap.

    Args:
        changed: the changed elements.
        all_exponents: of every element before the change, changed or not.

    Returns:
        Bits per changed element for the places, and for the differences.
    """
    totals = np.bincount(all_exponents, minlength=256)
    own = exponents(changed.old)
    zigzag = changed.zigzag
    places = values = 0.0
    for exponent, hits in enumerate(np.bincount(own, minlength=256)):
        if hits:
            coin = entropy_of_counts(np.array([hits, totals[exponent] - hits]))
            places += coin * int(totals[exponent])
            values += entropy(zigzag[own == exponent]) * int(hits)
    return places / changed.count, values / changed.count


def exponents(bf16_bits: U16) -> U8:
    """The exponent fields of bf16 bit patterns."""
    return ((bf16_bits >> 7) & 0xFF).astype(np.uint8)


def _u16_gaps(changed: Changes) -> U16:
    if changed.count and changed.gaps.max() > 0xFFFF:
        raise ValueError("a gap does not fit in 16 bits; this layout is not for changes so sparse")
    return changed.gaps.astype(np.uint16)


def _planes(integers: U16) -> list[Stream]:
    return [
        Stream((integers & 0xFF).astype(np.uint8).tobytes()),
        Stream((integers >> 8).astype(np.uint8).tobytes()),
    ]


def _gap_bytes(changed: Changes) -> Stream:
    """gap - 1 in one byte; each 255 before it means 255 more."""
    gaps = changed.gaps - 1
    escapes = gaps // 255
    out = np.full(gaps.size + int(escapes.sum()), 255, np.uint8)
    out[np.arange(gaps.size) + np.cumsum(escapes, dtype=np.int64)] = gaps % 255
    return Stream(out.tobytes())


def _packed(codes: U16, width: int) -> list[Stream]:
    """Codes of ``width`` bits, low bits first; the highest is an escape to two byte planes."""
    escape = (1 << width) - 1
    per_byte = 8 // width
    small = np.minimum(codes, escape).astype(np.uint8)
    small = np.pad(small, (0, -small.size % per_byte)).reshape(-1, per_byte)
    packed = np.zeros(small.shape[0], np.uint8)
    for place in range(per_byte):
        packed |= small[:, place] << (place * width)
    return [Stream(packed.tobytes()), *_planes(codes[codes >= escape] - escape)]


def u16_gaps_xor(changed: Changes) -> list[Stream]:
    return [Stream(_u16_gaps(changed).tobytes() + changed.xor.tobytes(), 2)]


def planes_xor(changed: Changes) -> list[Stream]:
    return [*_planes(_u16_gaps(changed)), *_planes(changed.xor)]


def planes_zigzag(changed: Changes) -> list[Stream]:
    return [*_planes(_u16_gaps(changed)), *_planes(changed.zigzag)]


def byte_gaps_byte_zigzag(changed: Changes) -> list[Stream]:
    return [_gap_bytes(changed), *_packed(changed.zigzag - np.uint16(1), 8)]


def byte_gaps_nibble_zigzag(changed: Changes) -> list[Stream]:
    return [_gap_bytes(changed), *_packed(changed.zigzag - np.uint16(1), 4)]


def byte_gaps_two_bit_zigzag(changed: Changes) -> list[Stream]:
    """Two bits; escapes go on in a nibble, and from there to bytes."""
    codes = changed.zigzag - np.uint16(1)
    (small, *_), longer = _packed(codes, 2), codes[codes >= 3] - np.uint16(3)
    return [_gap_bytes(changed), small, *_packed(longer, 4)]


LAYOUTS: dict[str, Callable[[Changes], list[Stream]]] = {
    "u16 gaps + xor": u16_gaps_xor,
    "byte planes, xor": planes_xor,
    "byte planes, zigzag": planes_zigzag,
    "gap bytes + zigzag bytes": byte_gaps_byte_zigzag,
    "gap bytes + zigzag nibbles": byte_gaps_nibble_zigzag,
    "gap bytes + zigzag 2 bits": byte_gaps_two_bit_zigzag,
}
