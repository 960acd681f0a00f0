"""Measure the codec: its bytes against their entropy, its speed against a bare compare.

Run ``python -m benchmarks.codec``, with ``--json`` for one JSON object as the last line of output.

Speeds are dense bytes of one copy of the weights per second, with all cores. A time counts only
after what was encoded, decoded and written to a copy of the old weights gave the new ones bit by
bit. Everything is timed in turn, several times; a figure is the median, and a ratio of speeds the
median of the ratios within one turn.

Memory is what was touched beyond the weights, the baseline and the payloads that a decoder is given
(see ``benchmarks/codec_memory.py``). The peak of encoding holds the payloads, which are kept until the sync
ends; the peak of decoding holds what was decoded.

The entropies are those of the changes at hand. Where they are few and random (``uniform-0.001``),
they are below those of their source, which no code can see.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from benchmarks import codec_memory, compare_bound, torch_codec
from benchmarks.packings import entropy
from benchmarks.roundtrip import (
    CONFIG,
    Codec,
    WrongBitsError,
    check_equal_to_new,
    copies_of_old,
    cores,
)
from benchmarks.workloads import ELEMENTS, WORKLOADS, Changes, Pair, bits, changes

MIB = 1 << 20
# OpenMP threads of torch go on spinning for a moment, on the cores of what is timed next.
_REST_S = 0.02

T = TypeVar("T")
Figures = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; 1 when bits came out wrong."""
    options = _parse(arguments)
    results = []
    for name in options.workloads:
        _say(name)
        try:
            results.append(measure(name, options.elements, options.runs))
        except WrongBitsError as error:
            print(f"FAILED: {name}: {error}", file=sys.stderr)
            return 1
    print(json.dumps({"workloads": results}) if options.json else _table(results), flush=True)
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.codec",
        description="Measure the codec's bytes, speed and memory.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    parser.add_argument("--elements", type=int, default=ELEMENTS, help="elements, at least")
    parser.add_argument("--runs", type=int, default=9, help="measured runs of each kind")
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS), help="which to measure")
    options = parser.parse_args(arguments)
    if options.runs < 1 or options.elements < 1:
        parser.error("--runs and --elements must be at least 1")
    if unknown := set(options.workloads) - set(WORKLOADS):
        parser.error(f"unknown workloads {sorted(unknown)}; there are {list(WORKLOADS)}")
    return options


def measure(name: str, elements: int, runs: int) -> Figures:
    """Every figure of one workload.

    Raises:
        WrongBitsError: a codec did not give back the new weights.
    """
    pairs = WORKLOADS[name](elements)
    changed = changes(pairs)
    dense_bytes = sum(pair.new.nbytes for pair in pairs)
    codec = Codec(pairs)
    bodies = codec.encode()
    codec.check(bodies)
    payload_bytes = sum(map(len, bodies))
    plain = torch_codec.encode(pairs, cores())
    threads = torch_codec.fastest_threads(pairs, sorted({1, cores()}))
    return {
        "workload": name,
        "elements": sum(pair.new.numel() for pair in pairs),
        "changed_elements": changed.count,
        "payload_bytes": payload_bytes,
        "payloads": len(bodies),
        **_sizes(changed, payload_bytes, len(plain)),
        **_speeds(codec, bodies, pairs, threads, runs),
        **codec_memory.measure(pairs),
        "chunk_bytes": CONFIG.chunk_elements * torch.bfloat16.itemsize,
        "dense_bytes": dense_bytes,
        "payload_to_dense": payload_bytes / dense_bytes,
        "runs": runs,
    }


def _sizes(changed: Changes, payload_bytes: int, plain_bytes: int) -> Figures:
    gaps, xor = entropy(changed.gaps), entropy(changed.xor)
    difference = entropy(changed.zigzag)
    own = _ratio(payload_bytes * 8, changed.count)
    bound = gaps + min(xor, difference) if changed.count else None
    plain = _ratio(plain_bytes * 8, changed.count)
    return {
        "bits_per_changed": own,
        "bound_bits_per_changed": bound,
        "ratio_to_bound": _ratio(own, bound),
        "gap_entropy_bits": gaps,
        "xor_entropy_bits": xor,
        "difference_entropy_bits": difference,
        "u16_xor_zstd1_bits": plain,
        "u16_xor_zstd1_ratio": _ratio(plain, own),
    }


@dataclass(frozen=True)
class _Turn:
    """Seconds of each kind, measured one right after the other."""

    encode: float
    compare: float
    torch_encode: float
    decode: float


def _speeds(
    codec: Codec, bodies: list[bytes], pairs: list[Pair], torch_threads: int, runs: int
) -> Figures:
    compared = compare_bound.pieces([bits(pair.old).view("u1") for pair in pairs])
    bound = compare_bound.fastest(compared)
    plain = b""

    def turn() -> _Turn:
        nonlocal plain
        encode_s, encoded = _timed(codec.encode)
        codec.check(encoded)
        time.sleep(_REST_S)
        compare_s = bound.seconds(compared)
        torch_s, packed = _timed(lambda: torch_codec.encode(pairs, torch_threads))
        if packed != plain:
            _check_plain(pairs, packed)
            plain = packed
        decode_s, decoded = _timed(lambda: codec.decode(bodies))
        codec.check_decoded(decoded)
        return _Turn(encode_s, compare_s, torch_s, decode_s)

    turns = [turn() for _ in range(runs)]
    dense_bytes = sum(pair.new.nbytes for pair in pairs)

    def speed(seconds: Callable[[_Turn], float]) -> float:
        return dense_bytes / statistics.median(map(seconds, turns)) / 1e9

    return {
        "encode_gbps": speed(lambda t: t.encode),
        "compare_bound_gbps": speed(lambda t: t.compare),
        "compare_bound_method": bound.name,
        "encode_vs_bound": statistics.median(t.compare / t.encode for t in turns),
        "torch_threads": torch_threads,
        "torch_encode_gbps": speed(lambda t: t.torch_encode),
        "encode_vs_torch": statistics.median(t.torch_encode / t.encode for t in turns),
        "decode_gbps": speed(lambda t: t.decode) if bodies else None,
    }


def _check_plain(pairs: list[Pair], encoded: bytes) -> None:
    copies = copies_of_old(pairs)
    torch_codec.decode_into(encoded, [copies[pair.name] for pair in pairs])
    check_equal_to_new(pairs, copies)


def _timed(action: Callable[[], T]) -> tuple[float, T]:
    time.sleep(_REST_S)
    started = time.perf_counter()
    result = action()
    return time.perf_counter() - started, result


def _ratio(one: float | None, other: float | None) -> float | None:
    """None where there is nothing to divide, or by."""
    return one / other if one is not None and other else None


def _say(what: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {what}", file=sys.stderr, flush=True)


_COLUMNS: tuple[tuple[str, str, Callable[[Figures], float | None]], ...] = (
    ("changed", "%", lambda w: 100 * w["changed_elements"] / w["elements"]),
    ("bits per", "changed", lambda w: w["bits_per_changed"]),
    ("entropy", "bits", lambda w: w["bound_bits_per_changed"]),
    ("of", "entropy", lambda w: w["ratio_to_bound"]),
    ("u16+xor", "zstd-1", lambda w: w["u16_xor_zstd1_bits"]),
    ("times", "smaller", lambda w: w["u16_xor_zstd1_ratio"]),
    ("encode", "GB/s", lambda w: w["encode_gbps"]),
    ("compare", "GB/s", lambda w: w["compare_bound_gbps"]),
    ("encode/", "compare", lambda w: w["encode_vs_bound"]),
    ("torch", "GB/s", lambda w: w["torch_encode_gbps"]),
    ("encode/", "torch", lambda w: w["encode_vs_torch"]),
    ("decode", "GB/s", lambda w: w["decode_gbps"]),
    ("payload", "MiB", lambda w: w["payload_bytes"] / MIB),
    ("encode", "+MiB", lambda w: w["encode_peak_bytes"] / MIB),
    ("decoded", "MiB", lambda w: w["decoded_bytes"] / MIB),
    ("decode", "+MiB", lambda w: w["decode_peak_bytes"] / MIB),
)


def _table(results: list[Figures]) -> str:
    def line(first: str, cells: list[str]) -> str:
        return f"{first:<13}" + "".join(f"{cell:>9}" for cell in cells)

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    rows = [
        line("", [top for top, _, _ in _COLUMNS]),
        line("", [below for _, below, _ in _COLUMNS]),
    ]
    rows += [line(w["workload"], [number(of(w)) for _, _, of in _COLUMNS]) for w in results]
    methods = ", ".join(sorted({w["compare_bound_method"] for w in results}))
    first = results[0]
    rows.append(
        f"Medians of {first['runs']} runs, {cores()} cores; {first['dense_bytes'] / MIB:.0f} MiB of "
        f"weights in chunks of {first['chunk_bytes'] / MIB:.0f}; fastest compare: {methods}"
    )
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
