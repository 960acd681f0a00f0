"""Compare every element of the baseline with what workers hold, without moving weights."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from vllm_sparse_refit.codec.digest import box_digest
from vllm_sparse_refit.trainer.baseline import DeltaCompressionTracker
from vllm_sparse_refit.trainer.report import VerificationReport


def compare_digests(
    tracker: DeltaCompressionTracker, replies: Iterable[tuple[str, Mapping[str, Any]]]
) -> VerificationReport:
    """Compare what ``sparse_refit_digests`` said with the baseline.

    Args:
        replies: name of a worker and its reply.
    """
    known: dict[tuple[object, ...], str] = {}
    different: dict[str, list[str]] = {}
    unverified: set[str] = set()
    elements = 0
    for worker, reply in replies:
        unverified.update(reply["unverified"])
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
        unverified=tuple(sorted(unverified)),
    )
