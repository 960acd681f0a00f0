"""The only code that changes weights: element writes that can be verified and undone."""

import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import torch

from vllm_sparse_refit.codec import kernels
from vllm_sparse_refit.codec.delta import KERNEL_OPERATIONS, SparseOperation, combined
from vllm_sparse_refit.codec.dtypes import bits_view

# Past a few threads memory is the limit.
_MOST_THREADS: Final = 8
# Fewer elements than this are not worth another thread.
_ELEMENTS_PER_THREAD: Final = 1 << 16


def storage_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of ``tensor`` as a flat integer view, elements of the tensor's width."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return bits_view(tensor.detach()).as_strided((elements,), (1,), 0)


@dataclass(frozen=True, eq=False)
class Write:
    """Elements of one storage and what to do with them.

    The positions, in elements of the flat storage, are ``locations * stride + shift``, so that a plain
    copy of consecutive elements needs no array of positions of its own.

    Attributes:
        storage: Flat integer view of a whole storage (:func:`storage_bits`).
        operation: What ``bits`` do.
        locations: Distinct; int32 or int64 ``[n]``, or a range of step 1.
        bits: ``[n]`` integers of the storage's width, on the CPU or on the storage's device.
        stride: At least 1.
        shift: May be negative.
    """

    storage: torch.Tensor
    operation: SparseOperation
    locations: torch.Tensor | range
    bits: torch.Tensor
    stride: int = 1
    shift: int = 0

    def where(self) -> slice | torch.Tensor:
        """An index into the storage, on its device."""
        if isinstance(self.locations, range):
            first, end = (
                at * self.stride + self.shift for at in (self.locations[0], self.locations[-1])
            )
            return slice(first, end + 1, self.stride)
        return self._positions(self.locations.to(self.storage.device, torch.int64))

    def positions(self) -> torch.Tensor:
        """The positions, int64 ``[n]``; on the device where the locations are."""
        if isinstance(self.locations, range):
            return self._positions(torch.arange(self.locations.start, self.locations.stop))
        return self._positions(self.locations.to(torch.int64))

    def _positions(self, locations: torch.Tensor) -> torch.Tensor:
        plain = (self.stride, self.shift) == (1, 0)
        return locations if plain else locations * self.stride + self.shift

    def every(self, step: int) -> "Write":
        """The same write, less all but each ``step``-th element."""
        if isinstance(self.locations, range):
            locations = torch.arange(self.locations.start, self.locations.stop, step)
            locations = locations.to(self.storage.device)
        else:
            locations = self.locations[::step]
        return dataclasses.replace(self, locations=locations, bits=self.bits[::step])


@dataclass(frozen=True, eq=False)
class _Undo:
    """How to take one write back.

    Attributes:
        write: The write.
        before: The bits that were there, ``[n]``, on the storage's device.
        known: One byte that is 1 once ``before`` was filled; until then nothing was written.
    """

    write: Write
    before: torch.Tensor
    known: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, write: Write) -> Self:
        storage = write.storage
        before = torch.empty(len(write.locations), dtype=storage.dtype, device=storage.device)
        return cls(write, before, np.zeros(1, np.uint8))


@dataclass(frozen=True, eq=False)
class _Sample:
    """Positions of a storage (int64) and the bits they must hold, on its device."""

    storage: torch.Tensor
    positions: torch.Tensor
    bits: torch.Tensor


class WeightWriter:
    """Writes elements of live parameters and remembers what they were.

    Memory grows with the number of elements written: location and old bits of each. One owner, the
    worker's main thread; not thread-safe.

    Args:
        sample_limit: Elements remembered per write for :meth:`verify`, spread evenly.
    """

    def __init__(self, sample_limit: int) -> None:
        self._sample_limit = sample_limit
        self._undo: list[_Undo] = []
        self._samples: list[_Sample] = []
        self.elements_written = 0

    @property
    def undo_bytes(self) -> int:
        """Bytes held for a rollback."""
        return sum(_held_bytes(undo.write.locations) + undo.before.nbytes for undo in self._undo)

    def write(self, writes: Sequence[Write]) -> None:
        """Do all writes; no element may be in two of them.

        On a device, all writes into one storage that do the same are one operation.
        """
        on_device = [write for write in writes if write.storage.device.type != "cpu"]
        on_host = [write for write in writes if write.storage.device.type == "cpu"]
        undos = [
            _Undo.of(write) for write in (*on_host, *_merged(on_device)) if len(write.locations)
        ]
        # Remembered before anything is written, so that a write that ends half way is undone as well.
        self._undo += undos
        self.elements_written += _in_threads(undos)
        if self._sample_limit:
            self._samples += [self._sample(undo) for undo in undos]

    def _sample(self, undo: _Undo) -> _Sample:
        step = -(-len(undo.write.locations) // self._sample_limit)
        picked = undo.write.every(step)
        bits = combined(picked.operation, undo.before[::step], picked.bits)
        return _Sample(picked.storage, picked.positions(), bits)

    def overwrite(self, target: torch.Tensor, positions: torch.Tensor, bits: torch.Tensor) -> None:
        """Set the storage of ``target`` to ``bits`` at ``positions`` (int64, distinct, flat)."""
        storage = storage_bits(target)
        locations = _compact(positions, storage.numel())
        self.write([Write(storage, SparseOperation.OVERWRITE, locations, bits)])

    def supersede(self, target: torch.Tensor, positions: torch.Tensor) -> None:
        """Say that ``positions`` are about to be written again on purpose: forget their samples."""
        storage, positions = storage_bits(target), positions.to(target.device)
        for i, sample in enumerate(self._samples):
            if sample.storage.data_ptr() == storage.data_ptr():
                kept = ~torch.isin(sample.positions, positions)
                self._samples[i] = _Sample(
                    sample.storage, sample.positions[kept], sample.bits[kept]
                )

    def verify(self) -> tuple[int, int]:
        """Read the sampled elements back: ``(compared, different)``.

        An element that was written twice counts as different from its first value.
        """
        compared = sum(sample.positions.numel() for sample in self._samples)
        # Added up where they are: on a device the host waits once, not once a sample.
        different: dict[torch.device, torch.Tensor] = {}
        for sample in self._samples:
            found = sample.storage.index_select(0, sample.positions)
            count = (found != sample.bits).sum()
            device = sample.storage.device
            different[device] = different[device] + count if device in different else count
        return compared, sum(int(count) for count in different.values())

    def mark(self) -> tuple[int, int, int]:
        """Where the log stands now, for :meth:`roll_back`."""
        return len(self._undo), len(self._samples), self.elements_written

    def roll_back(self, mark: tuple[int, int, int] = (0, 0, 0)) -> None:
        """Restore every element written since ``mark`` (default: ever), newest first."""
        writes, samples, self.elements_written = mark
        while len(self._undo) > writes:
            _restore(self._undo[-1])
            self._undo.pop()
        del self._samples[samples:]

    def release(self) -> None:
        """Forget how to undo and what to verify."""
        self._undo.clear()
        self._samples.clear()


def _do(undo: _Undo) -> int:
    """Do a write, and return how many elements it wrote."""
    write, before = undo.write, undo.before
    if write.storage.device.type == "cpu" and isinstance(write.locations, torch.Tensor):
        kernels.scatter(
            write.storage.numpy(),
            write.locations.numpy(),
            write.bits.numpy(),
            KERNEL_OPERATIONS[write.operation],
            stride=write.stride,
            shift=write.shift,
            before=before.numpy(),
            done=undo.known,
        )
        return len(write.locations)
    where = write.where()
    before.copy_(write.storage[where])
    undo.known[0] = 1
    bits = write.bits.to(before.device, non_blocking=True)
    write.storage[where] = combined(write.operation, before, bits)
    return len(write.locations)


def _restore(undo: _Undo) -> None:
    if undo.known[0]:
        undo.write.storage[undo.write.where()] = undo.before


def _do_all(undos: Sequence[_Undo]) -> int:
    return sum(map(_do, undos))


def _in_threads(undos: Sequence[_Undo]) -> int:
    """Do all writes, and return how many elements were written.

    When this ends or raises, no thread is still at work.
    """
    elements = sum(undo.before.numel() for undo in undos)
    threads = min(elements // _ELEMENTS_PER_THREAD, torch.get_num_threads(), _MOST_THREADS)
    # A device's work goes to the current stream, which belongs to this thread.
    if threads < 2 or any(undo.before.device.type != "cpu" for undo in undos):
        return _do_all(undos)
    shares = [undos[first :: 2 * threads] for first in range(2 * threads)]
    with ThreadPoolExecutor(threads, "sparse-refit-write") as pool:
        return sum(pool.map(_do_all, shares))


def _merged(writes: Sequence[Write]) -> Iterator[Write]:
    """Join the writes into one storage that do the same, so that each parameter takes one operation.

    What they need crosses to the device in one copy, from pinned memory, and nothing waits for it.
    """
    groups: dict[tuple[int, SparseOperation], list[Write]] = {}
    for write in writes:
        if isinstance(write.locations, range):  # a plain slice, which needs no positions
            bits = _to_device(write.bits, write.storage.device)
            yield dataclasses.replace(write, bits=bits)
        else:
            groups.setdefault((write.storage.data_ptr(), write.operation), []).append(write)
    for group in groups.values():
        storage = group[0].storage
        yield Write(
            storage,
            group[0].operation,
            _to_device(torch.cat([write.positions() for write in group]), storage.device),
            _to_device(torch.cat([write.bits for write in group]), storage.device),
        )


def _to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.device.type != "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def _held_bytes(locations: torch.Tensor | range) -> int:
    return 0 if isinstance(locations, range) else locations.nbytes


def _compact(positions: torch.Tensor, storage_elements: int) -> torch.Tensor:
    return positions.to(torch.int32) if storage_elements <= 1 << 31 else positions
