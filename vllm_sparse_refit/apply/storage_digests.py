"""What storages hold whose canonical bits are not here: digests that follow every write.

A loader that casts or transforms a tensor leaves bits that the trainer does not know. Whether they are still
those that the last update left can be told all the same.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from vllm_sparse_refit.apply.discovery import Discovery
from vllm_sparse_refit.apply.load_mode import LoadKind
from vllm_sparse_refit.apply.storage import storage_key
from vllm_sparse_refit.apply.writer import Write
from vllm_sparse_refit.codec.delta import combined
from vllm_sparse_refit.codec.digest import BitsDigest, box_digest


@dataclass(frozen=True, eq=False)
class _Watched:
    """A storage, the digest of all that it holds, and a tensor that goes there."""

    name: str
    storage: torch.Tensor
    digest: BitsDigest


@dataclass(frozen=True, eq=False)
class StorageDigests:
    """The digests of some storages, by storage key. Immutable, so that an undone update is forgotten."""

    watched: dict[int, _Watched]

    @classmethod
    def of(cls, discovery: Discovery) -> "StorageDigests":
        """Digest all storages that transformed tensors go to, at the cost of reading them."""
        watched: dict[int, _Watched] = {}
        for name in discovery.names(LoadKind.TRANSFORM, LoadKind.DENSE):
            for copy in discovery.weights[name].copies:
                if (key := copy.storage_key) not in watched:
                    watched[key] = _Watched(name, copy.storage, _digest(copy.storage))
        return cls(watched)

    def after(self, written: Iterable[tuple[Write, torch.Tensor]]) -> "StorageDigests":
        """What the digests are after writes, at a cost that grows with what they wrote.

        Args:
            written: Each write, in order, and the bits that were there before.
        """
        if not self.watched:
            return self
        watched = dict(self.watched)
        for write, before in written:
            key = storage_key(write.storage)
            if (known := watched.get(key)) is not None:
                bits = combined(write.operation, before, write.bits.to(before.device))
                where = write.positions()
                digest = known.digest - _digest_at(before, where) + _digest_at(bits, where)
                watched[key] = _Watched(known.name, known.storage, digest)
        return StorageDigests(watched)

    def different(self) -> list[str]:
        """Names of tensors whose storage holds something else now; reads all of them."""
        return [w.name for w in self.watched.values() if _digest(w.storage) != w.digest]


def _digest(storage: torch.Tensor) -> BitsDigest:
    return box_digest(storage, 0, storage.shape, (1,))


def _digest_at(bits: torch.Tensor, positions: torch.Tensor) -> BitsDigest:
    return BitsDigest.of(bits, positions.to(bits.device))
