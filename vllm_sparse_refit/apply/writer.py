"""The only code that changes weights: element writes that can be verified and undone."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from vllm_sparse_refit.apply.storage import storage_bits
from vllm_sparse_refit.codec import kernels
from vllm_sparse_refit.codec.delta import KERNEL_OPERATIONS, SparseOperation, combined
from vllm_sparse_refit.codec.digest import digest_on_device
from vllm_sparse_refit.codec.kernels import ArrayWrite


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
        canonical: The elements' positions in the canonical tensor, ascending int32 or int64 ``[n]``, where
            ``locations`` are something else.
    """

    storage: torch.Tensor
    operation: SparseOperation
    locations: torch.Tensor | range
    bits: torch.Tensor
    stride: int = 1
    shift: int = 0
    canonical: torch.Tensor | None = None

    @functools.cached_property
    def arrays(self) -> ArrayWrite:
        """The same for the compiled loops; the storage must be on the CPU."""
        where = self.locations
        return ArrayWrite(
            self.storage.numpy(),
            where.start if isinstance(where, range) else where.numpy(),
            self.bits.numpy(),
            KERNEL_OPERATIONS[self.operation],
            self.stride,
            self.shift,
            None if self.canonical is None else self.canonical.numpy(),
        )

    @property
    def nbytes(self) -> int:
        """Memory of its locations and bits."""
        locations = (self.locations, self.canonical)
        return self.bits.nbytes + sum(a.nbytes for a in locations if isinstance(a, torch.Tensor))

    def where(self) -> slice | torch.Tensor:
        """An index into the storage, on its device."""
        if isinstance(self.locations, range):
            first, end = (
                at * self.stride + self.shift for at in (self.locations[0], self.locations[-1])
            )
            return slice(first, end + 1, self.stride)
        return self.at(self.locations.to(self.storage.device, torch.int64))

    def positions(self) -> torch.Tensor:
        """The positions, int64 ``[n]``; on the device where the locations are."""
        if isinstance(self.locations, range):
            return self.at(torch.arange(self.locations.start, self.locations.stop))
        return self.at(self.locations.to(torch.int64))

    def at(self, locations: torch.Tensor) -> torch.Tensor:
        """The positions of some locations, int64."""
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


class _Done(Protocol):
    """Writes that were done, or were about to be, and how to take them back."""

    @property
    def nbytes(self) -> int: ...

    def written(self) -> Iterable[tuple[Write, torch.Tensor]]: ...

    def restore(self) -> None: ...


class _HostWrites:
    """Writes to host memory, done together."""

    def __init__(self, writes: Sequence[Write]) -> None:
        self._held = writes
        self.writes = [write.arrays for write in writes]
        self.before = np.empty(kernels.before_bytes(self.writes), np.uint8)
        # One byte that is 1 once `before` was filled; until then nothing was written.
        self._known = np.zeros(1, np.uint8)

    @property
    def nbytes(self) -> int:
        return self.before.nbytes + sum(write.nbytes for write in self._held)

    def do(self) -> None:
        kernels.scatter(self.writes, before=self.before, done=self._known, threads=_threads())

    def restore(self) -> None:
        if self._known[0]:
            olds = kernels.before_parts(self.writes, self.before)
            back = [
                write._replace(values=old, operation=kernels.OVERWRITE)
                for write, old in zip(self.writes, olds, strict=True)
            ]
            kernels.scatter(back, threads=_threads())

    def written(self) -> Iterable[tuple[Write, torch.Tensor]]:
        olds = kernels.before_parts(self.writes, self.before)
        return zip(self._held, map(torch.from_numpy, olds), strict=True)


class _DeviceWrite:
    """A write to a device's memory; nothing waits for it."""

    def __init__(self, write: Write) -> None:
        self.write = write
        self.before = torch.empty(
            len(write.locations), dtype=write.storage.dtype, device=write.storage.device
        )
        self._known = False

    @property
    def nbytes(self) -> int:
        return self.before.nbytes + self.write.nbytes

    def do(self) -> None:
        write, where = self.write, self.write.where()
        self.before.copy_(write.storage[where])
        self._known = True
        bits = write.bits.to(self.before.device, non_blocking=True)
        write.storage[where] = combined(write.operation, self.before, bits)

    def written(self) -> Iterable[tuple[Write, torch.Tensor]]:
        return [(self.write, self.before)]

    def restore(self) -> None:
        if self._known:
            self.write.storage[self.write.where()] = self.before


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
        self._done: list[_Done] = []
        self._verified: list[_HostWrites] = []
        self._samples: list[_Sample] = []
        self.elements_written = 0

    @property
    def undo_bytes(self) -> int:
        """Bytes held for a rollback."""
        return sum(done.nbytes for done in self._done)

    def write(self, writes: Sequence[Write]) -> None:
        """Do all writes; no element may be in two of them.

        On the host, all are one call of the compiled loops. On a device, all writes into one storage that
        do the same are one operation.

        Raises:
            ValueError: a position is outside its storage; nothing of what goes to the host was written.
        """
        on_host = [write for write in writes if write.storage.is_cpu]
        if on_host:
            self._verified.append(self._write_to_host(on_host))
        on_device = [w for w in writes if not w.storage.is_cpu and len(w.locations)]
        for write in _merged(on_device):
            done = _DeviceWrite(write)
            # Remembered before anything is written, so that a write that ends half way is undone as well.
            self._done.append(done)
            done.do()
            self.elements_written += len(write.locations)
            if self._sample_limit:
                self._samples.append(self._sample(write, done.before))

    def _write_to_host(self, writes: Sequence[Write]) -> _HostWrites:
        done = _HostWrites(writes)
        self._done.append(done)
        done.do()
        self.elements_written += sum(len(write.locations) for write in writes)
        return done

    def _sample(self, write: Write, before: torch.Tensor) -> _Sample:
        step = -(-len(write.locations) // self._sample_limit)
        picked = write.every(step)
        bits = combined(picked.operation, before[::step], picked.bits)
        return _Sample(picked.storage, picked.positions(), bits)

    def overwrite(self, target: torch.Tensor, positions: torch.Tensor, bits: torch.Tensor) -> None:
        """Set the storage of ``target`` to ``bits`` at ``positions`` (int64, distinct, flat)."""
        storage = storage_bits(target)
        locations = _compact(positions, storage.numel())
        write = Write(storage, SparseOperation.OVERWRITE, locations, bits)
        if not storage.is_cpu:
            self.write([write])
        elif positions.numel():
            # Its samples are kept one by one, since supersede() may take some of them away.
            done = self._write_to_host([write])
            if self._sample_limit:
                self._samples += [self._sample(*written) for written in done.written()]

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
        found_different = 0
        if self._sample_limit:
            for done in self._verified:
                counts = kernels.count_different(
                    done.writes, done.before, limit=self._sample_limit, threads=_threads()
                )
                compared, found_different = compared + counts[0], found_different + counts[1]
        # Added up where they are: on a device the host waits once, not once a sample.
        different: dict[torch.device, torch.Tensor] = {}
        for sample in self._samples:
            found = sample.storage.index_select(0, sample.positions)
            count = (found != sample.bits).sum()
            device = sample.storage.device
            different[device] = different[device] + count if device in different else count
        return compared, found_different + sum(int(count) for count in different.values())

    def mark(self) -> tuple[int, int, int, int]:
        """Where the log stands now, for :meth:`roll_back`."""
        return len(self._done), len(self._verified), len(self._samples), self.elements_written

    def written_since(
        self, mark: tuple[int, int, int, int]
    ) -> Iterator[tuple[Write, torch.Tensor]]:
        """The writes since a mark, in order, and the bits ``[n]`` that were there before each."""
        for done in self._done[mark[0] :]:
            yield from done.written()

    def roll_back(self, mark: tuple[int, int, int, int] = (0, 0, 0, 0)) -> None:
        """Restore every element written since ``mark`` (default: ever), newest first."""
        writes, verified, samples, self.elements_written = mark
        while len(self._done) > writes:
            self._done[-1].restore()
            self._done.pop()
        del self._verified[verified:]
        del self._samples[samples:]

    def release(self) -> None:
        """Forget how to undo and what to verify."""
        self._done.clear()
        self._verified.clear()
        self._samples.clear()


def digest_targets(writes: Sequence[Write]) -> npt.NDArray[np.uint64]:
    """Digests (``codec/digest.py``) of what is where writes will go, over their canonical positions.

    On a device they are computed there, and the host waits once for all of them.

    Args:
        writes: To any storages, all of them on the host or all on devices.

    Returns:
        uint64, ``[len(writes), 2]``: the halves of each.
    """
    if all(write.storage.is_cpu for write in writes):
        return kernels.digest_targets([write.arrays for write in writes], threads=_threads())
    halves = torch.stack([_digest_on_device(write) for write in writes]).cpu()
    return halves.numpy().view(np.uint64)


def _digest_on_device(write: Write) -> torch.Tensor:
    storage, locations = write.storage, write.locations
    if not len(locations):
        return torch.zeros(2, dtype=torch.int64, device=storage.device)
    if isinstance(locations, range):
        canonical = torch.arange(locations.start, locations.stop, device=storage.device)
        return digest_on_device(storage[write.where()], canonical)
    locations = _to_device(locations, storage.device)
    found = storage[write.at(locations.to(torch.int64))]
    if write.canonical is None:
        return digest_on_device(found, locations)
    return digest_on_device(found, _to_device(write.canonical, storage.device))


def _threads() -> int:
    return int(torch.get_num_threads())


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


def _compact(positions: torch.Tensor, storage_elements: int) -> torch.Tensor:
    return positions.to(torch.int32) if storage_elements <= 1 << 31 else positions
