"""The only code that changes weights: element writes that can be verified and undone."""

from dataclasses import dataclass

import torch

from vllm_sparse_refit.codec.dtypes import bits_view


def storage_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of ``tensor`` as a flat integer view, elements of the tensor's width."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return bits_view(tensor.detach()).as_strided((elements,), (1,), 0)


@dataclass(frozen=True, eq=False)
class _Write:
    """Elements of one flat storage and the bits they held (undo) or must hold (verification)."""

    storage: torch.Tensor
    positions: torch.Tensor
    bits: torch.Tensor


class WeightWriter:
    """Writes elements of live parameters and remembers what they were.

    Memory grows with the number of elements written: position and old bits of each. One owner, the
    worker's main thread; not thread-safe.

    Args:
        sample_limit: Elements remembered per write for :meth:`verify`, spread evenly.
    """

    def __init__(self, sample_limit: int) -> None:
        self._sample_limit = sample_limit
        self._undo: list[_Write] = []
        self._samples: list[_Write] = []
        self.elements_written = 0

    @property
    def undo_bytes(self) -> int:
        """Bytes held for a rollback."""
        return sum(w.positions.nbytes + w.bits.nbytes for w in self._undo)

    def xor(self, target: torch.Tensor, positions: torch.Tensor, bits: torch.Tensor) -> None:
        """Xor ``bits`` into the storage of ``target`` at ``positions`` (int64, distinct, flat)."""
        storage, positions, bits = _on_device(target, positions, bits)
        old = storage.index_select(0, positions)
        self._write(storage, positions, old, old ^ bits)

    def overwrite(self, target: torch.Tensor, positions: torch.Tensor, bits: torch.Tensor) -> None:
        """Set the storage of ``target`` to ``bits`` at ``positions`` (int64, distinct, flat)."""
        storage, positions, bits = _on_device(target, positions, bits)
        old = storage.index_select(0, positions)
        self._write(storage, positions, old, bits)

    def supersede(self, target: torch.Tensor, positions: torch.Tensor) -> None:
        """Say that ``positions`` are about to be written again on purpose: forget their samples."""
        storage, positions = storage_bits(target), positions.to(target.device)
        for i, sample in enumerate(self._samples):
            if sample.storage.data_ptr() == storage.data_ptr():
                kept = ~torch.isin(sample.positions, positions)
                self._samples[i] = _Write(sample.storage, sample.positions[kept], sample.bits[kept])

    def _write(
        self, storage: torch.Tensor, positions: torch.Tensor, old: torch.Tensor, new: torch.Tensor
    ) -> None:
        if positions.numel() == 0:
            return
        # Remembered before the write, so that a write that fails half way is undone as well.
        self._undo.append(_Write(storage, _compact(positions, storage.numel()), old))
        storage.index_copy_(0, positions, new)
        self.elements_written += positions.numel()
        if self._sample_limit:
            picked = _spread(positions.numel(), self._sample_limit).to(positions.device)
            self._samples.append(_Write(storage, positions[picked], new[picked]))

    def verify(self) -> tuple[int, int]:
        """Read the sampled elements back: ``(compared, different)``.

        An element that was written twice counts as different from its first value.
        """
        compared = different = 0
        for sample in self._samples:
            found = sample.storage.index_select(0, sample.positions)
            compared += sample.positions.numel()
            different += int((found != sample.bits).sum())
        return compared, different

    def mark(self) -> tuple[int, int, int]:
        """Where the log stands now, for :meth:`roll_back`."""
        return len(self._undo), len(self._samples), self.elements_written

    def roll_back(self, mark: tuple[int, int, int] = (0, 0, 0)) -> None:
        """Restore every element written since ``mark`` (default: ever), newest first."""
        writes, samples, self.elements_written = mark
        while len(self._undo) > writes:
            write = self._undo[-1]
            write.storage.index_copy_(0, write.positions.to(torch.int64), write.bits)
            self._undo.pop()
        del self._samples[samples:]

    def release(self) -> None:
        """Forget how to undo and what to verify."""
        self._undo.clear()
        self._samples.clear()


def _on_device(
    target: torch.Tensor, positions: torch.Tensor, bits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return storage_bits(target), positions.to(target.device), bits.to(target.device)


def _compact(positions: torch.Tensor, storage_elements: int) -> torch.Tensor:
    return positions.to(torch.int32) if storage_elements <= 1 << 31 else positions


def _spread(count: int, limit: int) -> torch.Tensor:
    """At most ``limit`` indices below ``count``, evenly spread, first and last included."""
    if count <= limit:
        return torch.arange(count)
    return torch.linspace(0, count - 1, limit, dtype=torch.float64).round().to(torch.int64)
