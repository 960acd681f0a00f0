"""Whether the elements that an update changes hold what the update builds on.

Each delta that adds to or xors what is there carries the digest of the bits that its sender believes to be
there. A rank that holds a whole tensor can tell by itself whether they are; of a tensor in parts it can only
say what it found in its own, and whoever asks all ranks adds that up.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_sparse_refit.apply.discovery import DiscoveredWeight
from vllm_sparse_refit.apply.placement import Box
from vllm_sparse_refit.apply.sparse_writes import PlacedDelta
from vllm_sparse_refit.apply.writer import Write, digest_targets
from vllm_sparse_refit.codec.digest import BitsDigest, digest_sum
from vllm_sparse_refit.errors import VersionMismatchError


@dataclass(frozen=True, eq=False)
class PriorBits:
    """What a transfer builds on in one tensor, and what this rank holds there.

    Attributes:
        weight: The tensor.
        expected: Digest of the bits before the change, at all elements that the transfer changes.
        found: By box of the tensor, the digest of what this rank holds at those of them that are in it.
    """

    weight: DiscoveredWeight
    expected: BitsDigest
    found: Mapping[Box, BitsDigest]

    @property
    def differs(self) -> bool:
        """Whether this rank holds all of the tensor and something else in it."""
        return self.weight.is_whole and digest_sum(self.found.values()) != self.expected

    def as_reply(self) -> dict[str, Any]:
        """For whoever asks all ranks, as JSON types; digests in hexadecimal."""
        return {
            "expected": self.expected.hex,
            "elements": self.weight.numel,
            "boxes": [
                [box.offset, list(box.shape), list(box.strides), digest.hex]
                for box, digest in self.found.items()
            ],
        }


def check_prior_bits(
    weights: Mapping[str, DiscoveredWeight], deltas: Mapping[str, Sequence[PlacedDelta]]
) -> dict[str, Any]:
    """Compare what deltas build on with what is where they will be written; writes nothing.

    The cost grows with what changes, not with the model.

    Args:
        weights: What discovery found.
        deltas: By canonical name; those of a tensor are looked at if all of them say what they build on.

    Returns:
        By name, :meth:`PriorBits.as_reply` of the tensors of which only a part is here.

    Raises:
        VersionMismatchError: this rank holds something else; names the first tensors.
    """
    known = {
        name: parts
        for name, parts in deltas.items()
        if all(part.prior is not None for part in parts) and parts[0].writes
    }
    found = list(_prior_bits(weights, known))
    if different := [prior.weight.name for prior in found if prior.differs]:
        raise VersionMismatchError(
            f"this worker's weights are not those that its version stands for: in {len(different)} tensors, "
            f"first {', '.join(different[:3])}, the elements to be changed hold other bits than the trainer "
            "believes (something else wrote to them); nothing was written, and the next sync brings this "
            "worker up"
        )
    return {prior.weight.name: prior.as_reply() for prior in found if not prior.weight.is_whole}


def _prior_bits(
    weights: Mapping[str, DiscoveredWeight], deltas: Mapping[str, Sequence[PlacedDelta]]
) -> Iterator[PriorBits]:
    # One call for all writes, those of a copy of a tensor next to each other.
    writes: list[Write] = []
    starts: list[int] = []
    for name, parts in deltas.items():
        for number in range(len(weights[name].copies)):
            starts.append(len(writes))
            writes += (part.writes[number] for part in parts)
    sums = iter(np.add.reduceat(digest_targets(writes), starts).tolist() if starts else [])
    for name, parts in deltas.items():
        weight = weights[name]
        found: dict[Box, BitsDigest] = {}
        for box, (low, high) in zip(weight.sources, sums, strict=False):
            digest = BitsDigest(low, high)
            # Two copies of the same elements count once, if they hold the same.
            found[box] = digest if found.get(box, digest) == digest else BitsDigest(~low, high)
        expected = digest_sum(part.prior for part in parts if part.prior is not None)
        yield PriorBits(weight, expected, found)
