"""Transfers that the trainer keeps, to bring workers up that missed them."""

import contextlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass

from vllm_sparse_refit.checksum import checksum_hex
from vllm_sparse_refit.codec.coding import CodedDelta, code_changes
from vllm_sparse_refit.codec.delta import Chunk, SparseOperation
from vllm_sparse_refit.codec.dtypes import bits_view
from vllm_sparse_refit.codec.payload import batch_deltas, join_payload
from vllm_sparse_refit.config import SyncConfig
from vllm_sparse_refit.trainer.baseline import SparsePayload
from vllm_sparse_refit.trainer.exported import ExportedTensor
from vllm_sparse_refit.trainer.stream import PayloadSource
from vllm_sparse_refit.weight_version import WeightVersion


@dataclass(frozen=True)
class RetainedTransfer:
    """A committed transfer: where it led from and to, and its payloads in the order of their ids."""

    base: WeightVersion
    target: WeightVersion
    payloads: tuple[SparsePayload, ...]

    @property
    def size(self) -> int:
        """Bytes of its payloads."""
        return sum(len(payload.body) for payload in self.payloads)


class TransferHistory:
    """The latest committed transfers, within a bound of bytes; the oldest go first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._transfers: deque[RetainedTransfer] = deque()
        self._size = 0

    def add(self, transfer: RetainedTransfer) -> None:
        """Keep a transfer that starts where the latest one ended; any other starts the history anew."""
        if self._transfers and self._transfers[-1].target.digest != transfer.base.digest:
            self.clear()
        self._transfers.append(transfer)
        self._size += transfer.size
        while self._transfers and self._size > self._max_bytes:
            self._size -= self._transfers.popleft().size

    def clear(self) -> None:
        """Forget all."""
        self._transfers.clear()
        self._size = 0

    def path(self, digest: str, target: str) -> list[RetainedTransfer] | None:
        """The transfers that lead from one version digest to another; None if they are not all kept."""
        transfers = list(self._transfers)
        for start, transfer in enumerate(transfers):
            if transfer.base.digest != digest:
                continue
            for end in range(start, len(transfers)):
                if transfers[end].target.digest == target:
                    return transfers[start : end + 1]
        return None


class RecordingSource:
    """A source of payloads that remembers those of the running transfer."""

    def __init__(self, source: PayloadSource) -> None:
        self._source = source
        self.payloads: list[SparsePayload] = []

    def encode_exported(
        self, exports: Iterable[ExportedTensor]
    ) -> Generator[SparsePayload, None, None]:
        """As the source's."""
        with contextlib.closing(self._source.encode_exported(exports)) as payloads:
            for payload in payloads:
                self.payloads.append(payload)
                yield payload


class OverwriteSource:
    """A source that ships every element of what it is given, whatever the receiver holds."""

    def __init__(self, config: SyncConfig, skip: frozenset[str]) -> None:
        self._config = config
        self._skip = skip

    def encode_exported(
        self, exports: Iterable[ExportedTensor]
    ) -> Generator[SparsePayload, None, None]:
        """Every element of contiguous CPU tensors, chunk by chunk; nothing is kept."""
        deltas = (delta for exported in exports for delta in self._deltas(exported))
        for batch in batch_deltas(deltas, self._config.payload_bytes):
            body = join_payload(batch)
            changed = sum(delta.changed for delta in batch)
            yield SparsePayload(body, checksum_hex(body), len(batch), changed)

    def _deltas(self, exported: ExportedTensor) -> Iterator[CodedDelta]:
        if exported.name in self._skip:
            return
        bits = bits_view(exported.tensor).reshape(-1)
        for begin in range(0, bits.numel(), self._config.chunk_elements):
            part = bits[begin : begin + self._config.chunk_elements]
            chunk = Chunk(
                exported.name,
                tuple(exported.tensor.shape),
                exported.tensor.dtype,
                SparseOperation.OVERWRITE,
                begin,
                part,
                part,
                every_element=True,
            )
            yield from (delta for delta in code_changes([chunk]) if delta is not None)
