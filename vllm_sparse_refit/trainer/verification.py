"""Compare what the trainer believes of workers' weights with what they hold, without moving weights."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from vllm_sparse_refit.codec.digest import BitsDigest, box_digest, digest_sum
from vllm_sparse_refit.trainer.baseline import DeltaCompressionTracker
from vllm_sparse_refit.trainer.report import VerificationReport

# Offset, shape and strides of a box of a canonical tensor.
_BoxKey = tuple[int, tuple[int, ...], tuple[int, ...]]


def compare_digests(
    tracker: DeltaCompressionTracker, replies: Iterable[tuple[str, Mapping[str, Any]]]
) -> VerificationReport:
    """Compare what ``sparse_refit_digests`` said with the baseline.

    Args:
        replies: name of a worker and its reply.
    """
    known: dict[tuple[object, ...], str] = {}
    different: dict[str, list[str]] = {}
    transformed: set[str] = set()
    elements = 0
    for worker, reply in replies:
        transformed.update(reply["transformed"])
        for name, reason in reply["unlike"].items():
            different.setdefault(name, []).append(f"{worker}: {reason}")
        for name, boxes in reply["boxes"].items():
            for offset, shape, strides, digest in boxes:
                key = name, offset, tuple(shape), tuple(strides)
                if key not in known:
                    bits = tracker.bits_of(name).as_strided(shape, strides, offset)
                    known[key] = box_digest(bits, offset, shape, strides).hex
                elements += math.prod(shape)
                if known[key] != digest and worker not in different.get(name, ()):
                    different.setdefault(name, []).append(worker)
    return VerificationReport(
        elements=elements,
        different={name: tuple(workers) for name, workers in different.items()},
        transformed=tuple(sorted(transformed)),
    )


def differing_parts(replies: Iterable[Mapping[str, Any]]) -> list[str]:
    """Tensors in which the ranks of an engine together hold other bits than a transfer builds on.

    Each rank answered for the part that it holds (``partial`` of ``sparse_refit_prepare``). Equal boxes on
    several ranks must hold the same and count once. What no rank holds, or several hold in boxes of other
    shapes, cannot be added up and is not compared.
    """
    found: dict[str, dict[_BoxKey, set[BitsDigest]]] = {}
    known: dict[str, tuple[BitsDigest, int]] = {}
    for reply in replies:
        for name, part in reply["partial"].items():
            known[name] = BitsDigest.from_hex(part["expected"]), int(part["elements"])
            boxes = found.setdefault(name, {})
            for offset, shape, strides, digest in part["boxes"]:
                key = offset, tuple(shape), tuple(strides)
                boxes.setdefault(key, set()).add(BitsDigest.from_hex(digest))
    different = []
    for name, boxes in found.items():
        expected, elements = known[name]
        if any(len(digests) > 1 for digests in boxes.values()):
            different.append(name)
        elif sum(math.prod(shape) for _, shape, _ in boxes) == elements:
            total = digest_sum(digest for digests in boxes.values() for digest in digests)
            if total != expected:
                different.append(name)
    return different
