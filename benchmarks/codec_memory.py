"""Peak memory of encoding and decoding, each in a process of its own.

A process that has worked holds free memory, which what is measured could use without its showing.
So a new one reads the weights from a file, does one small sync to have all code loaded, and gives
everything larger than 64 KiB straight back to the kernel when it is freed.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.memory import PeakMemory
from benchmarks.roundtrip import Codec
from benchmarks.workloads import Pair, uniform
from vllm_sparse_refit.codec.delta import TensorDelta

_ALLOCATOR = {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=65536"}


def measure(pairs: list[Pair]) -> dict[str, int]:
    """Bytes touched beyond weights and baseline, and for decoding beyond the payloads.

    Returns:
        ``encode_peak_bytes``, with the payloads, which are kept until the sync ends,
        ``decode_peak_bytes``, with what was decoded, and ``decoded_bytes``, the size of that.
    """
    with tempfile.TemporaryDirectory(prefix="codec-benchmark-") as folder:
        path = Path(folder, "pairs.pt")
        torch.save([(pair.name, pair.old, pair.new) for pair in pairs], path)
        finished = subprocess.run(
            [sys.executable, "-m", "benchmarks.codec_memory", str(path)],
            env={**os.environ, **_ALLOCATOR},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    figures: dict[str, int] = json.loads(finished.stdout.splitlines()[-1])
    return figures


def main() -> int:
    """Measure the weights of the file that is named, and print the figures as JSON."""
    codec = Codec(uniform(0.1, 100_000))
    codec.check(codec.encode())
    codec = Codec([Pair(*pair) for pair in torch.load(sys.argv[1])])
    peak = PeakMemory()
    codec.encode_without_holding()
    encode_peak = peak.extra_bytes()
    bodies = codec.encode()
    peak = PeakMemory()
    deltas = codec.decode(bodies)
    decode_peak = peak.extra_bytes()
    figures = {
        "encode_peak_bytes": encode_peak,
        "decode_peak_bytes": decode_peak,
        "decoded_bytes": sum(map(_decoded_bytes, deltas)),
    }
    print(json.dumps(figures))
    return 0


def _decoded_bytes(delta: TensorDelta) -> int:
    locations = 0 if isinstance(delta.locations, range) else delta.locations.nbytes
    return locations + delta.values.nbytes


if __name__ == "__main__":
    sys.exit(main())
