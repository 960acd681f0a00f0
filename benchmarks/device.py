"""Trainer and worker on a GPU: comparing and encoding device tensors, and committing to them.

    python -m benchmarks.device --json

Needs a CUDA device and no vLLM. Every result is compared bit for bit before its time counts.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from vllm_sparse_refit.apply.storage import storage_bits
from vllm_sparse_refit.apply.writer import WeightWriter, Write, digest_targets
from vllm_sparse_refit.codec.delta import apply_delta
from vllm_sparse_refit.codec.digest import BitsDigest
from vllm_sparse_refit.codec.dtypes import bits_view
from vllm_sparse_refit.codec.payload import DecodeLimits, decode_payload
from vllm_sparse_refit.config import SyncConfig
from vllm_sparse_refit.trainer.baseline import DeltaCompressionTracker

LIMITS = DecodeLimits(1 << 32, 1 << 32)
MIB = 1 << 20
Weights = dict[str, torch.Tensor]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--elements", type=int, default=1 << 30, help="bf16 weights")
    parser.add_argument("--lr", type=float, default=1e-6, help="learning rate of the RL-like step")
    parser.add_argument("--runs", type=int, default=5, help="measured runs of each kind")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device", file=sys.stderr)
        return 2
    result = measure(options.elements, options.lr, options.runs)
    print(
        json.dumps(result) if options.json else "\n".join(f"{k:<28} {v}" for k, v in result.items())
    )
    return 0


def measure(elements: int, lr: float, runs: int) -> dict[str, Any]:
    old, new = rl_step(elements, lr)
    changed = sum(int((old[name] != new[name]).sum()) for name in old)
    dense_bytes = 2 * elements
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "dense_bytes": dense_bytes,
        "changed_fraction": changed / elements,
    }
    bodies = []
    for place, on_device in (("device", True), ("host", False)):
        for chunk in (2 * MIB, 8 * MIB, 32 * MIB):
            seconds, bodies = encode(old, new, on_device=on_device, chunk=chunk, runs=runs)
            key = f"encode_gbps_baseline_on_{place}_chunk_{chunk // MIB}mi"
            result[key] = dense_bytes / seconds / 1e9
    result["payload_bytes"] = sum(map(len, bodies))
    result |= commit(old, new, bodies, runs)
    return result


def rl_step(elements: int, lr: float) -> tuple[Weights, Weights]:
    """Weights before and after a step like those of reinforcement learning, in 64 tensors."""
    old, new = {}, {}
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (elements // 64,)
    for i in range(64):
        master = torch.randn(shape, generator=generator, device="cuda") * 0.02
        step = torch.randn(shape, generator=generator, device="cuda").mul_(0.5).clamp_(-1, 1) * lr
        old[f"w{i}"], new[f"w{i}"] = master.bfloat16(), (master + step).bfloat16()
    return old, new


def encode(
    old: Weights, new: Weights, *, on_device: bool, chunk: int, runs: int
) -> tuple[float, list[bytes]]:
    config = SyncConfig(baseline_on_device=on_device, chunk_elements=chunk)
    tracker = DeltaCompressionTracker(config=config)
    tracker.snapshot_baseline(old.items())
    tracker.set_routing(skip=(), overwrite=(), dense=())
    bodies: list[bytes] = []

    def once() -> None:
        nonlocal bodies
        bodies = [payload.body for payload in tracker.prepare_sparse_delta_payload(new.items())]
        tracker.on_sync_failed()

    seconds = median_seconds(once, runs)
    check(old, new, bodies)
    tracker.close()
    return seconds, bodies


def check(old: Weights, new: Weights, bodies: list[bytes]) -> None:
    held = {name: tensor.clone() for name, tensor in old.items()}
    for body in bodies:
        for delta in decode_payload(body, LIMITS):
            apply_delta(delta, bits_view(held[delta.name]))
    require_equal(held, new)


def require_equal(found: Weights, expected: Weights) -> None:
    for name, tensor in expected.items():
        if not torch.equal(bits_view(found[name]), bits_view(tensor)):
            raise SystemExit(f"wrong bits in {name}")


def commit(old: Weights, new: Weights, bodies: list[bytes], runs: int) -> dict[str, float]:
    deltas = [delta for body in bodies for delta in decode_payload(body, LIMITS)]
    held = {name: tensor.clone() for name, tensor in old.items()}
    on_host = {name: tensor.cpu().pin_memory() for name, tensor in new.items()}
    undo = []

    def once() -> None:
        writer = WeightWriter(sample_limit=64)
        writer.write(writes())
        if writer.verify()[1]:
            raise SystemExit("the writer's own samples differ")
        undo.append(writer)

    def check_prior() -> None:
        digests = digest_targets(writes())
        found = {BitsDigest(low, high) for low, high in digests.tolist()}
        if found != {delta.prior for delta in deltas}:
            raise SystemExit("the digests of the prior bits differ")

    def writes() -> list[Write]:
        return [
            Write(storage_bits(held[d.name]), d.operation, d.locations, d.values) for d in deltas
        ]

    def dense() -> None:
        for name, tensor in on_host.items():
            held[name].copy_(tensor, non_blocking=True)

    def back() -> None:
        require_equal(held, new)
        undo.pop().roll_back()
        require_equal(held, old)

    prior_s = median_seconds(check_prior, runs)
    seconds = median_seconds(once, runs, between=back)
    return {
        "prior_check_s": prior_s,
        "commit_s": seconds,
        "dense_copy_from_pinned_host_s": median_seconds(dense, runs),
    }


def median_seconds(
    once: Callable[[], None], runs: int, *, between: Callable[[], None] = lambda: None
) -> float:
    seconds = []
    for _ in range(2 + runs):
        torch.cuda.synchronize()
        started = time.perf_counter()
        once()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        between()
    return statistics.median(seconds[2:])


if __name__ == "__main__":
    sys.exit(main())
