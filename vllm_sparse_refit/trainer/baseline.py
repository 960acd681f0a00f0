"""The baseline: the trainer's copy of the bits that the engines hold, and the deltas against it."""

import contextlib
import dataclasses
import functools
import os
import threading
import weakref
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from vllm_sparse_refit.checksum import checksum_hex
from vllm_sparse_refit.codec.coding import CodedDelta
from vllm_sparse_refit.codec.delta import (
    SparseOperation,
    TensorDelta,
    apply_delta,
)
from vllm_sparse_refit.codec.digest import BitsDigest
from vllm_sparse_refit.codec.dtypes import bits_dtype
from vllm_sparse_refit.codec.payload import (
    DecodeLimits,
    decode_payload,
    join_payload,
    payload_decoded_bytes,
)
from vllm_sparse_refit.codec.wire import encode_name
from vllm_sparse_refit.config import SyncConfig
from vllm_sparse_refit.errors import (
    BaselineError,
    ConfigError,
    PayloadError,
    TensorMismatchError,
    UnsupportedModelError,
)
from vllm_sparse_refit.trainer.baseline_files import MappedFiles, MappedTensor
from vllm_sparse_refit.trainer.comparison import (
    Comparison,
    comparisons,
    goes_whole,
    run_all,
)
from vllm_sparse_refit.trainer.exported import ExportedTensor, HostCopier, NamedTensor, chunks
from vllm_sparse_refit.trainer.parallel_encoder import ParallelEncoder, default_threads

_NO_SNAPSHOT: Final = "no snapshot was taken"
_NAMES_SHOWN: Final = 10
_DEFAULTS: Final = SyncConfig()


@dataclass(frozen=True)
class SparsePayload:
    """One encoded payload.

    Attributes:
        body: The payload's bytes.
        checksum: xxh3-128 of ``body``, 32 hex digits.
        deltas: How many deltas it holds.
        changed_elements: How many elements they carry.
    """

    body: bytes
    checksum: str
    deltas: int
    changed_elements: int


@dataclass(frozen=True, eq=False)
class _Entry:
    """One tensor of the baseline.

    ``bits`` is 1-D, contiguous, owned by the baseline; ``digest`` is theirs, if they are in a file.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    bits: torch.Tensor
    digest: BitsDigest | None = None


@dataclass(frozen=True)
class _Routing:
    skip: frozenset[str] = frozenset()
    overwrite: frozenset[str] = frozenset()
    dense: frozenset[str] = frozenset()


def _synchronize(entries: Iterable[_Entry]) -> None:
    """Wait for what was written to a baseline on a device: comparing runs on other streams."""
    for device in {entry.bits.device for entry in entries}:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def _digest(bits: torch.Tensor) -> BitsDigest:
    return BitsDigest.of(bits, range(bits.numel()))


def _moved(entry: _Entry, delta: TensorDelta) -> _Entry:
    """The entry with a delta written into its bits, and the digest that goes with them."""
    if entry.digest is None:
        apply_delta(delta, entry.bits)
        return entry
    digest = entry.digest - _digest_at(entry.bits, delta)
    apply_delta(delta, entry.bits)
    return dataclasses.replace(entry, digest=digest + _digest_at(entry.bits, delta))


def _digest_at(bits: torch.Tensor, delta: TensorDelta) -> BitsDigest:
    locations = delta.locations
    if isinstance(locations, range):
        return BitsDigest.of(bits[locations.start : locations.stop], locations)
    return BitsDigest.of(bits.index_select(0, locations), locations)


def _begin_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the bits of two tensors are the same, as far as the shorter one goes."""
    parts = one.view(torch.uint8), other.view(torch.uint8)
    size = min(part.numel() for part in parts)
    return torch.equal(*(part[:size] for part in parts))


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


class DeltaCompressionTracker:
    """Compares weights with the baseline and moves the baseline once the engines have moved.

    The baseline changes only in :meth:`snapshot_baseline` and :meth:`on_sync_succeeded`; a failed
    sync leaves it as it was. In between, :meth:`compare` may run in one thread while
    :meth:`encode` runs in others. The two methods that end a sync must be called when no
    :meth:`compare` or :meth:`encode` of that sync is still running.

    The payloads of a running sync are kept, encoded, until it ends.
    """

    def __init__(self, *, config: SyncConfig = _DEFAULTS) -> None:
        """Without a baseline as yet.

        Args:
            config: ``chunk_elements``, ``payload_bytes``, ``threads``, ``baseline_dir`` and
                ``baseline_on_device`` are used. With a ``baseline_dir`` the baseline lives in
                memory-mapped files in a folder of its own below it (:attr:`folder`), which another
                process can :meth:`reopen_baseline` if this one dies.
        """
        self._config = config
        self._routing = _Routing()
        self._entries: dict[str, _Entry] = {}
        self._files: MappedFiles | None = None
        self._note = ""
        self._lacks_index = False  # the files are whole, but could not be said to be
        self._unusable: str | None = _NO_SNAPSHOT
        self._mover: threading.Thread | None = None
        self._lock = threading.Lock()  # Owns those below: the state of the running sync.
        self._exported: set[str] = set()
        # By address, the tensor of the running sync that is there, as long as it lives.
        self._memory: dict[int, tuple[str, weakref.ref[torch.Tensor]]] = {}
        self._pending: list[bytes] = []
        self._sync = 0

    def snapshot_baseline(self, weights: Iterable[NamedTensor]) -> None:
        """Copy the weights that the engines hold now; they replace any earlier baseline.

        The earlier one is given up first, so that two never take memory at once. When this fails
        there is no baseline, and every use of one says so until a snapshot succeeds.

        Raises:
            BaselineError: a name comes twice, or the files cannot be written.
            UnsupportedModelError: a tensor's dtype, layout or name cannot be sent.
        """
        self._give_up("the last snapshot failed half way")
        try:
            if self._config.baseline_dir is not None:
                self._files = MappedFiles.create(self._config.baseline_dir)
            for name, tensor in weights:
                if name in self._entries:
                    raise BaselineError(f"the snapshot holds {name!r} twice; give each tensor once")
                self._entries[name] = self._copy(name, tensor)
            if not self._entries:
                raise BaselineError(
                    "the snapshot holds no tensor at all; is it an exhausted iterator?"
                )
            _synchronize(self._entries.values())
            self._note = ""
            self._write_index(self._entries)
        except BaseException:
            self._release()
            raise
        self._unusable = None

    @property
    def folder(self) -> Path | None:
        """Where the baseline's files are, None for one in memory."""
        return None if self._files is None else self._files.folder

    def annotate(self, note: str) -> None:
        """Keep a text with a baseline in files, for whoever reopens it; nothing for one in memory.

        Raises:
            BaselineError: there is no baseline, or the text cannot be written.
        """
        self._usable()
        self._note = note
        self._write_index(self._entries)

    def _write_index(self, entries: Mapping[str, _Entry]) -> None:
        if self._files is None:
            return
        self._lacks_index = True
        tensors = [
            MappedTensor(name, entry.shape, entry.dtype, entry.bits, entry.digest or BitsDigest())
            for name, entry in entries.items()
        ]
        self._files.write_index(tensors, self._note)
        self._lacks_index = False

    def reopen_baseline(self, folder: str | os.PathLike[str]) -> str:
        """Take over the baseline in files that another process left; it replaces any earlier one.

        Every tensor is read once and compared with its digest.

        Args:
            folder: What :attr:`folder` was there.

        Returns:
            The text that was last given to :meth:`annotate` or :meth:`on_sync_succeeded`.

        Raises:
            BaselineError: another process holds it, its last change did not end, or a file is not what
                the index says. There is no baseline then, and the folder is left as it is.
        """
        # Also one that is held here already, as after a restore that failed later on.
        own = self.folder is not None and self.folder.resolve() == Path(folder).resolve()
        self._give_up("the last baseline could not be reopened", keep=own)
        if not Path(folder).is_dir():
            raise BaselineError(f"there is no baseline in {str(folder)!r}: it is no folder")
        files = MappedFiles(Path(folder))
        try:
            tensors, note = files.read()
            with ThreadPoolExecutor(self._config.threads or default_threads()) as pool:
                digests = pool.map(_digest, [tensor.bits for tensor in tensors])
                for tensor, digest in zip(tensors, digests, strict=True):
                    if digest != tensor.digest:
                        raise BaselineError(
                            f"the bits of {tensor.name!r} in {str(folder)!r} are not those of its index; "
                            "snapshot the weights that the engines hold"
                        )
        except BaseException:
            files.close(keep=True)
            raise
        self._files, self._note = files, note
        self._entries = {t.name: _Entry(t.shape, t.dtype, t.bits, t.digest) for t in tensors}
        self._unusable = None
        return note

    def _copy(self, name: str, tensor: torch.Tensor) -> _Entry:
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise UnsupportedModelError(
                f"tensor {name!r} has no plain data ({tensor.layout}, {tensor.device}); "
                "give it as a dense tensor with storage"
            )
        try:
            encode_name(name)
            dtype = bits_dtype(tensor.dtype)
        except PayloadError as error:
            raise UnsupportedModelError(f"tensor {name!r} cannot be sent: {error}") from None
        bits = self._allocate(tensor, dtype)
        at = 0
        for chunk in chunks(tensor, self._config.chunk_elements):
            bits[at : at + chunk.numel()] = chunk
            at += chunk.numel()
        digest = None if self._files is None else _digest(bits)
        return _Entry(tuple(tensor.shape), tensor.dtype, bits, digest)

    def _allocate(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if self._files is not None:
            return self._files.allocate(tensor.numel(), dtype)
        if self._config.baseline_on_device and tensor.device.type != "cpu":
            return torch.empty(tensor.numel(), dtype=dtype, device=tensor.device)
        return torch.empty(tensor.numel(), dtype=dtype)

    @property
    def state_dict_info(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every tensor, in the snapshot's order.

        Raises:
            BaselineError: there is no baseline.
        """
        return {name: (entry.shape, entry.dtype) for name, entry in self._usable().items()}

    @property
    def total_elements(self) -> int:
        """Elements of all tensors of the baseline.

        Raises:
            BaselineError: there is no baseline.
        """
        return sum(entry.bits.numel() for entry in self._usable().values())

    def tensors(self) -> Iterator[NamedTensor]:
        """Every tensor of the baseline, on the CPU, sharing its memory: not to be written to.

        Raises:
            BaselineError: there is no baseline.
        """
        for name, entry in self._usable().items():
            yield name, entry.bits.view(entry.dtype).view(entry.shape)

    def holds_same_bits(self, name: str, other: str) -> bool:
        """Whether two tensors of the baseline have equal dtypes and bits.

        Raises:
            BaselineError: there is no baseline.
        """
        one, two = self._usable()[name], self._usable()[other]
        return one.dtype == two.dtype and torch.equal(one.bits, two.bits)

    def bits_of(self, name: str) -> torch.Tensor:
        """The bits of one tensor of the baseline, 1-D, CPU; not to be written to.

        Raises:
            BaselineError: there is no baseline.
        """
        return self._usable()[name].bits

    def samples(self, per_tensor: int) -> dict[str, tuple[list[int], list[int]]]:
        """Evenly spread flat positions of every tensor, ascending, and the bits there.

        Raises:
            BaselineError: there is no baseline.
        """
        found = {}
        for name, entry in self._usable().items():
            count = min(per_tensor, entry.bits.numel())
            spread = torch.linspace(0, max(entry.bits.numel() - 1, 0), count, dtype=torch.float64)
            positions = spread.round().to(torch.int64)
            found[name] = (positions.tolist(), entry.bits[positions].tolist())
        return found

    def set_routing(
        self, *, skip: Collection[str], overwrite: Collection[str], dense: Collection[str]
    ) -> None:
        """Say how tensors are shipped; a tensor not named is shipped as differences to add.

        A tensor of ``overwrite`` among whose changed new values is a NaN is shipped whole: a
        receiver may use NaN as the mark of an unchanged element. The routing stays until set anew.

        Args:
            skip: Names that are neither compared nor sent.
            overwrite: Names that are shipped as new bits.
            dense: Those of ``overwrite`` that are shipped whole as soon as any element changed.

        Raises:
            ConfigError: ``dense`` has a name that ``overwrite`` has not.
        """
        if stray := sorted(set(dense) - set(overwrite)):
            raise ConfigError(f"dense tensors must be overwrite tensors too: {_some(stray)}")
        self._routing = _Routing(frozenset(skip), frozenset(overwrite), frozenset(dense))

    def compare(self, name: str, tensor: torch.Tensor) -> Iterator[CodedDelta]:
        """Compare a tensor with the baseline, chunk by chunk.

        Memory beyond the deltas is bounded by ``chunk_elements``; tensors that are not contiguous, or
        not on the baseline's device, are copied one chunk at a time.

        Returns:
            The deltas of the chunks that changed. The tensor must not change until they are pulled.

        Raises:
            BaselineError: there is no baseline.
            TensorMismatchError: the tensor is unknown, has another shape or dtype than in the
                baseline, or was exported before in this sync. The call raises, not the iterator.
        """
        exported = ExportedTensor.of(name, tensor)
        entry = self._checked_entry(exported)
        chunked = self._comparisons(exported, entry, HostCopier()) if entry else ()
        return (delta for item in chunked for delta in run_all([item]))

    def _checked_entry(self, exported: ExportedTensor) -> _Entry | None:
        name, tensor = exported.name, exported.tensor
        entry = self._usable().get(name)
        skipped = name in self._routing.skip
        if entry is None and not skipped:
            raise TensorMismatchError(
                f"tensor {name!r} is not in the baseline; snapshot again or export the same names"
            )
        if entry is not None and (tuple(tensor.shape), tensor.dtype) != (entry.shape, entry.dtype):
            raise TensorMismatchError(
                f"tensor {name!r} is {tuple(tensor.shape)} {tensor.dtype} and the baseline has "
                f"{entry.shape} {entry.dtype}; export it as it was in the snapshot (for a trainer in "
                "another dtype than the engines, see SyncConfig.dtype)"
            )
        with self._lock:
            if name in self._exported:
                raise TensorMismatchError(
                    f"tensor {name!r} was exported twice in one sync; give each tensor once"
                )
            self._exported.add(name)
        if entry is not None:
            self._check_memory(exported, entry)
        return None if skipped else entry

    def _check_memory(self, exported: ExportedTensor, entry: _Entry) -> None:
        """Refuse one buffer that was filled for several names in turn: it holds the values of the last."""
        tensor = exported.tensor
        if not tensor.numel() or not tensor.is_contiguous():
            return
        with self._lock:
            name, earlier = self._memory.get(tensor.data_ptr(), ("", None))
            self._memory[tensor.data_ptr()] = exported.name, weakref.ref(tensor)
        # Memory that was given back is given out again. Tied tensors share theirs, and have equal bits.
        is_shared = earlier is not None and earlier() is not None
        if is_shared and not _begin_alike(self._usable()[name].bits, entry.bits):
            raise TensorMismatchError(
                f"tensors {name!r} and {exported.name!r} share memory, but they differed so far; an export "
                "must yield tensors that keep their values, not one buffer that it fills again (where both "
                "shall have the same values from now on, give a clone of one)"
            )

    def _comparisons(
        self, exported: ExportedTensor, entry: _Entry, copier: HostCopier
    ) -> Iterator[Comparison]:
        cut = functools.partial(
            comparisons,
            exported,
            entry.bits,
            chunk_elements=self._config.chunk_elements,
            copier=copier,
        )
        if exported.name not in self._routing.overwrite:
            return cut(SparseOperation.ADD)
        # Whether all of it goes must be known before its first chunk does: two passes.
        whole = goes_whole(
            cut(SparseOperation.OVERWRITE), any_change=exported.name in self._routing.dense
        )
        return cut(SparseOperation.OVERWRITE, whole=whole)

    def encode(self, deltas: Sequence[CodedDelta]) -> SparsePayload:
        """Encode deltas of the running sync into a payload, and keep it until the sync ends.

        Raises:
            BaselineError: the sync ended while this ran; the payload must not be sent.
            PayloadError: there are too many deltas, or they overlap.
        """
        with self._lock:
            sync = self._sync
        body = join_payload(deltas)
        with self._lock:
            if sync != self._sync:
                raise BaselineError("the sync ended while a payload of it was being encoded")
            self._pending.append(body)
        changed = sum(delta.changed for delta in deltas)
        return SparsePayload(body, checksum_hex(body), len(deltas), changed)

    def prepare_sparse_delta_payload(
        self, weights: Iterable[NamedTensor]
    ) -> Iterator[SparsePayload]:
        """Compare and encode, yielding payloads of about ``payload_bytes`` before compression.

        The weights are pulled in the calling thread; ``config.threads`` others compare and encode.
        When the last payload is there, or the iterator is closed, they have ended.

        Raises:
            BaselineError: there is no baseline.
            TensorMismatchError: as :meth:`compare`, or a tensor was written to meanwhile.
        """
        return self.encode_exported(ExportedTensor.of(*pair) for pair in weights)

    def encode_exported(
        self, exports: Iterable[ExportedTensor]
    ) -> Generator[SparsePayload, None, None]:
        """As :meth:`prepare_sparse_delta_payload`, for tensors that another thread exported."""
        copier = HostCopier()

        def cut(exported: ExportedTensor) -> Iterable[Comparison]:
            entry = self._checked_entry(exported)
            return () if entry is None else self._comparisons(exported, entry, copier)

        with ParallelEncoder(
            cut,
            self.encode,
            payload_bytes=self._config.payload_bytes,
            threads=self._config.threads or default_threads(),
        ) as encoder:
            for exported in exports:
                yield from encoder.feed(exported)
            yield from encoder.finish()

    def take_over(self, names: Iterable[str], payloads: Iterable[bytes]) -> None:
        """Count what other processes compared, and sent, in the running sync as exported here."""
        with self._lock:
            self._exported.update(names)
            self._pending.extend(payloads)

    def finish_export(self) -> None:
        """Check that the running sync exported the whole baseline, less what is skipped.

        Raises:
            BaselineError: there is no baseline.
            TensorMismatchError: tensors are missing.
        """
        with self._lock:
            done = self._exported | self._routing.skip
        if missing := [name for name in self._usable() if name not in done]:
            raise TensorMismatchError(
                f"the export lacks {len(missing)} tensors of the baseline: {_some(missing)}; "
                "export every tensor of the snapshot"
            )

    def on_sync_succeeded(self, note: str | None = None) -> None:
        """The engines hold what was sent: move the baseline there.

        Returns at once; the baseline is brought up in a thread, and whatever needs it next waits.

        Args:
            note: As for :meth:`annotate`, kept from when the baseline has moved; None keeps the last.

        Raises:
            BaselineError: there is no baseline.
        """
        entries = self._usable()
        pending = self._end_sync()
        self._note = self._note if note is None else note
        mover = threading.Thread(
            target=self._move, args=(entries, pending), name="sparse-refit-baseline"
        )
        try:
            mover.start()
        except RuntimeError:  # no thread to be had
            self._move(entries, pending)
        else:
            self._mover = mover

    def settle(self) -> None:
        """Wait until the baseline is where the last sync left it, in its files too.

        Raises:
            BaselineError: there is no baseline, or a retained payload was damaged; then the baseline is
                given up. Or the files could not be said to be whole again, as on a full disk; then the
                baseline is used as before, and this can be called again.
        """
        entries = self._usable()
        if self._lacks_index:
            self._write_index(entries)

    def _move(self, entries: dict[str, _Entry], pending: list[bytes]) -> None:
        try:
            if self._files is not None:
                self._files.remove_index()
            for body in pending:
                limits = DecodeLimits(len(body), payload_decoded_bytes(body))
                for delta in decode_payload(body, limits):
                    entries[delta.name] = _moved(entries[delta.name], delta)
            _synchronize(entries.values())
        except BaseException as error:
            self._unusable = (
                "the last sync's changes were written to it only in part "
                f"({type(error).__name__}: {error})"
            )
            return
        with contextlib.suppress(BaselineError):  # then settle() tries again, and raises it
            self._write_index(entries)

    def on_sync_failed(self) -> None:
        """Nothing was committed: forget the payloads. The baseline stays as it is."""
        self._end_sync()

    def close(self, *, keep: bool = False) -> None:
        """Give up the baseline and remove its files. May be called more than once.

        Args:
            keep: Leave the files to be reopened.

        Raises:
            BaselineError: they shall be kept, and cannot be said to be whole, as on a full disk. Nothing
                was given up.
        """
        if self._mover is not None:
            self._mover.join()
        if keep and self._unusable is None:
            self.settle()
        self._give_up("the tracker was closed", keep=keep)

    def _usable(self) -> dict[str, _Entry]:
        if self._mover is not None:
            self._mover.join()
        if self._unusable is not None:
            raise BaselineError(
                f"there is no baseline: {self._unusable}; call snapshot_baseline() with the "
                "weights that the engines hold"
            )
        return self._entries

    def _end_sync(self) -> list[bytes]:
        with self._lock:
            pending, self._pending = self._pending, []
            self._exported.clear()
            self._memory.clear()
            self._sync += 1
        return pending

    def _give_up(self, why: str, *, keep: bool = False) -> None:
        if self._mover is not None:
            self._mover.join()
        self._unusable = why
        self._end_sync()
        self._release(keep=keep)

    def _release(self, *, keep: bool = False) -> None:
        self._entries, self._lacks_index = {}, False
        if self._files is not None:
            self._files.close(keep=keep)
            self._files = None
