"""Layouts and compressors that the payload format could use, measured against each other.

Run ``python -m benchmarks.codec_alternatives``. Needs lz4, blosc2 and brotli for those compressors,
and reports what is absent. Each stream of a layout is compressed by itself and kept as it is where
that is smaller. Times are of one thread unless a compressor's name says otherwise.
"""

import argparse
import functools
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard

from benchmarks.packings import LAYOUTS, Stream, entropy, entropy_given_exponent, exponents
from benchmarks.workloads import ELEMENTS, WORKLOADS, Changes, Pair, bits, changes

STUDIED = ("rl-1e-6", "rl-3e-6", "rl-1e-5", "uniform-0.01")


@dataclass(frozen=True)
class Compressor:
    """A library and its parameters.

    Attributes:
        compress: bytes of integers of a width, to bytes.
        decompress: the reverse.
    """

    name: str
    compress: Callable[[Stream], bytes]
    decompress: Callable[[bytes], bytes]


@dataclass(frozen=True)
class Result:
    layout: str
    compressor: str
    bits_per_changed: float
    compress_mb_s: float
    decompress_mb_s: float


def _zstd(name: str, parameters: zstandard.ZstdCompressionParameters) -> Compressor:
    encoder = zstandard.ZstdCompressor(compression_params=parameters)
    decoder = zstandard.ZstdDecompressor()
    return Compressor(name, lambda stream: encoder.compress(stream.data), decoder.decompress)


def _zstd_level(level: int) -> Compressor:
    parameters = zstandard.ZstdCompressionParameters.from_level(level, write_checksum=0)
    return _zstd(f"zstd {level}", parameters)


def _zstd_fast(window_log: int, hash_log: int, min_match: int, target: int = 0) -> Compressor:
    parameters = zstandard.ZstdCompressionParameters(
        window_log=window_log,
        hash_log=hash_log,
        chain_log=6,
        search_log=1,
        min_match=min_match,
        target_length=target,
        strategy=zstandard.STRATEGY_FAST,
    )
    return _zstd(f"zstd fast w{window_log} h{hash_log} m{min_match} t{target}", parameters)


def _zstd_compressors() -> Iterator[Compressor]:
    for level in (-1, -5, 1, 3, 9):
        yield _zstd_level(level)
    yield _zstd_fast(19, 13, 7)
    yield _zstd_fast(19, 6, 7)
    yield _zstd_fast(17, 6, 7)
    yield _zstd_fast(14, 6, 7)
    yield _zstd_fast(10, 6, 7)


def _lz4() -> Iterator[Compressor]:
    block = importlib.import_module("lz4.block")
    yield Compressor("lz4", lambda stream: bytes(block.compress(stream.data)), block.decompress)


def _brotli() -> Iterator[Compressor]:
    brotli = importlib.import_module("brotli")
    for quality in (1, 3):

        def compress(stream: Stream, quality: int = quality) -> bytes:
            return bytes(brotli.compress(stream.data, quality=quality))

        yield Compressor(f"brotli {quality}", compress, brotli.decompress)


def _blosc2() -> Iterator[Compressor]:
    blosc2 = importlib.import_module("blosc2")
    blosc2.set_nthreads(2)
    for shuffle in ("SHUFFLE", "BITSHUFFLE"):
        for codec in ("LZ4", "ZSTD"):

            def compress(stream: Stream, shuffle: str = shuffle, codec: str = codec) -> bytes:
                return bytes(
                    blosc2.compress(
                        stream.data,
                        typesize=stream.width,
                        clevel=1,
                        filter=blosc2.Filter[shuffle],
                        codec=blosc2.Codec[codec],
                    )
                )

            name = f"blosc2 {shuffle.lower()} {codec.lower()}, 2 threads"
            yield Compressor(name, compress, blosc2.decompress)


def compressors() -> Iterator[Compressor]:
    """All that can be imported here; says on stderr which library is absent."""
    for source in (_zstd_compressors, _lz4, _blosc2, _brotli):
        try:
            yield from source()
        except ImportError as error:
            print(f"absent: {source.__name__.strip('_')} ({error})", file=sys.stderr)


def measure(
    changed: Changes, layout: str, streams: list[Stream], compressor: Compressor, runs: int
) -> Result:
    """Sizes and median times of one layout under one compressor; checks that it gives back all."""
    compressed = [compressor.compress(stream) for stream in streams]
    for stream, packed in zip(streams, compressed, strict=True):
        if stream.data and compressor.decompress(packed) != stream.data:
            raise AssertionError(f"{compressor.name} does not give back what it got")
    size = sum(
        min(len(stream.data), len(packed))
        for stream, packed in zip(streams, compressed, strict=True)
    )
    plain = sum(len(stream.data) for stream in streams)

    def decompress() -> None:
        for packed in compressed:
            compressor.decompress(packed)

    return Result(
        layout,
        compressor.name,
        size * 8 / changed.count,
        plain / _median_seconds(lambda: [compressor.compress(s) for s in streams], runs) / 1e6,
        plain / _median_seconds(decompress, runs) / 1e6,
    )


def _median_seconds(action: Callable[[], Any], runs: int) -> float:
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def bounds(changed: Changes, pairs: list[Pair]) -> dict[str, float]:
    """Bits per changed element."""
    before = np.concatenate([exponents(bits(pair.old)) for pair in pairs])
    places, values = entropy_given_exponent(changed, before)
    return {
        "gaps": entropy(changed.gaps),
        "xor": entropy(changed.xor),
        "difference": entropy(changed.zigzag),
        "places, exponent known": places,
        "difference, exponent known": values,
    }


def study(name: str, elements: int, runs: int) -> None:
    """Print the table of one workload, in Markdown."""
    pairs = WORKLOADS[name](elements)
    changed = changes(pairs)
    total = sum(pair.old.numel() for pair in pairs)
    figures = ", ".join(f"{what} {value:.2f}" for what, value in bounds(changed, pairs).items())
    print(f"\n## {name}: {changed.count / total:.2%} of {total:,} changed\n")
    print(f"Order-0 entropies, bits per changed element: {figures}\n")
    print("| layout | compressor | bits per changed | MB/s in | MB/s out |")
    print("|---|---|---|---|---|")
    # Twice: a generator's absent libraries are named once.
    known = list(compressors())
    for layout, pack in LAYOUTS.items():
        streams = pack(changed)
        whole = sum(entropy(np.frombuffer(s.data, np.uint8)) * len(s.data) for s in streams) / max(
            changed.count, 1
        )
        print(f"| {layout} | order-0 of its bytes | {whole:.2f} | | |")
        results = map(functools.partial(measure, changed, layout, streams, runs=runs), known)
        for result in results:
            print(
                f"| {layout} | {result.compressor} | {result.bits_per_changed:.2f} "
                f"| {result.compress_mb_s:.0f} | {result.decompress_mb_s:.0f} |",
                flush=True,
            )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.codec_alternatives",
        description="Measure layouts and compressors for the payload format.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--elements", type=int, default=ELEMENTS, help="elements of a workload")
    parser.add_argument("--runs", type=int, default=3, help="measured runs of each")
    parser.add_argument("workloads", nargs="*", default=STUDIED, help="which to study")
    options = parser.parse_args(arguments)
    for name in options.workloads:
        study(name, options.elements, options.runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
