"""The baseline: the trainer's copy of the bits that the engines hold, and the deltas against it."""

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from vllm_sparse_refit.checksum import checksum_hex
from vllm_sparse_refit.codec.delta import (
    SparseOperation,
    TensorDelta,
    apply_delta,
    compare_bits,
    make_delta,
)
from vllm_sparse_refit.codec.dtypes import bits_dtype, bits_view
from vllm_sparse_refit.codec.payload import (
    DecodeLimits,
    batch_deltas,
    decode_payload,
    encode_payload,
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

NamedTensor = tuple[str, torch.Tensor]

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
    """One tensor of the baseline; ``bits`` is 1-D, CPU, owned by the baseline."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    bits: torch.Tensor


@dataclass(frozen=True)
class _Routing:
    skip: frozenset[str] = frozenset()
    overwrite: frozenset[str] = frozenset()
    dense: frozenset[str] = frozenset()


class _MappedFiles:
    """Baseline tensors in files of a folder of its own, one a tensor; ``close`` removes them."""

    def __init__(self, parent: str | os.PathLike[str]) -> None:
        self._parent = Path(parent)
        self._files = 0
        with self._naming_the_folder():
            self._parent.mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(prefix="baseline-", dir=parent))

    @contextlib.contextmanager
    def _naming_the_folder(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise BaselineError(
                f"the baseline in {str(self._parent)!r} cannot be written ({error}); free space or "
                "change SyncConfig.baseline_dir, then snapshot again"
            ) from error

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialized bits, ``[numel]``, whose disk space is reserved."""
        if not numel:
            return torch.empty(0, dtype=dtype)
        # Numbered: a tensor's name may hold anything, a file's may not.
        path = self._folder / f"{self._files:06d}.bits"
        partial = path.with_suffix(".partial")
        self._files += 1
        size = numel * dtype.itemsize
        with self._naming_the_folder():
            with partial.open("w+b") as file:
                # A full disk must fail here: later it would be a bus error amid a write.
                os.posix_fallocate(file.fileno(), 0, size)
            partial.rename(path)
            mapped = np.memmap(path, dtype=np.uint8, mode="r+", shape=(size,))
        return torch.from_numpy(mapped).view(dtype)

    def close(self) -> None:
        """Remove the files. A mapping still in use stays readable until it is dropped."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _chunks(tensor: torch.Tensor, elements: int) -> Iterator[torch.Tensor]:
    """The bits of a tensor in row-major order, as 1-D CPU pieces of at most ``elements`` each.

    A contiguous CPU tensor is not copied. Any other is copied a piece at a time.
    """
    for piece in _pieces(bits_view(tensor), elements):
        yield piece.cpu()


def _pieces(bits: torch.Tensor, elements: int) -> Iterator[torch.Tensor]:
    if bits.is_contiguous():
        yield from torch.split(bits.view(-1), elements)
    elif bits.numel() <= elements:
        yield bits.reshape(-1)
    elif rows := elements // (bits.numel() // bits.shape[0]):
        for block in torch.split(bits, rows):
            yield block.reshape(-1)
    else:
        for row in bits:
            yield from _pieces(row, elements)


def _has_nan(bits: torch.Tensor, dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and bool(bits.view(dtype).to(torch.float32).isnan().any())


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
            config: ``chunk_elements``, ``payload_bytes``, ``compression_level`` and
                ``baseline_dir`` are used. With a ``baseline_dir`` the baseline lives in
                memory-mapped files below it.
        """
        self._config = config
        self._routing = _Routing()
        self._entries: dict[str, _Entry] = {}
        self._files: _MappedFiles | None = None
        self._unusable: str | None = _NO_SNAPSHOT
        self._mover: threading.Thread | None = None
        self._lock = threading.Lock()  # Owns the three below: the state of the running sync.
        self._exported: set[str] = set()
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
                self._files = _MappedFiles(self._config.baseline_dir)
            for name, tensor in weights:
                if name in self._entries:
                    raise BaselineError(f"the snapshot holds {name!r} twice; give each tensor once")
                self._entries[name] = self._copy(name, tensor)
        except BaseException:
            self._release()
            raise
        if not self._entries:
            raise BaselineError("the snapshot holds no tensor at all; is it an exhausted iterator?")
        self._unusable = None

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
        allocate = torch.empty if self._files is None else self._files.allocate
        bits = allocate(tensor.numel(), dtype=dtype)
        at = 0
        for chunk in _chunks(tensor, self._config.chunk_elements):
            bits[at : at + chunk.numel()] = chunk
            at += chunk.numel()
        return _Entry(tuple(tensor.shape), tensor.dtype, bits)

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
        """Say how tensors are shipped; a tensor not named is shipped as xor.

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

    def compare(self, name: str, tensor: torch.Tensor) -> Iterator[TensorDelta]:
        """Compare a tensor with the baseline, chunk by chunk.

        Memory beyond the deltas is bounded by ``chunk_elements``; tensors that are on a device or
        not contiguous are copied to the CPU one chunk at a time.

        Returns:
            The deltas of the chunks that changed. The tensor must not change until they are pulled.

        Raises:
            BaselineError: there is no baseline.
            TensorMismatchError: the tensor is unknown, has another shape or dtype than in the
                baseline, or was exported before in this sync. The call raises, not the iterator.
        """
        entry = self._checked_entry(name, tensor)
        if entry is None:
            return iter(())
        if name in self._routing.overwrite:
            return self._overwrite_deltas(name, entry, tensor)
        return self._deltas(name, entry, tensor, SparseOperation.XOR, whole=False)

    def _checked_entry(self, name: str, tensor: torch.Tensor) -> _Entry | None:
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
        return None if skipped else entry

    def _deltas(
        self,
        name: str,
        entry: _Entry,
        tensor: torch.Tensor,
        operation: SparseOperation,
        *,
        whole: bool,
    ) -> Iterator[TensorDelta]:
        for begin, old, new in self._chunk_pairs(entry, tensor):
            delta = make_delta(
                name,
                entry.shape,
                entry.dtype,
                operation,
                begin,
                old,
                new,
                every_element=whole,
            )
            if delta is not None:
                yield delta

    def _overwrite_deltas(
        self, name: str, entry: _Entry, tensor: torch.Tensor
    ) -> Iterator[TensorDelta]:
        # Whether all of it goes must be known before its first chunk does: two passes.
        whole = self._goes_whole(name, entry, tensor)
        yield from self._deltas(name, entry, tensor, SparseOperation.OVERWRITE, whole=whole)

    def _goes_whole(self, name: str, entry: _Entry, tensor: torch.Tensor) -> bool:
        any_change = name in self._routing.dense
        for _, old, new in self._chunk_pairs(entry, tensor):
            positions, _ = compare_bits(old, new)
            if positions.numel() and (any_change or _has_nan(new[positions], entry.dtype)):
                return True
        return False

    def _chunk_pairs(
        self, entry: _Entry, tensor: torch.Tensor
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        begin = 0
        for new in _chunks(tensor, self._config.chunk_elements):
            yield begin, entry.bits[begin : begin + new.numel()], new
            begin += new.numel()

    def encode(self, deltas: Sequence[TensorDelta]) -> SparsePayload:
        """Encode deltas of the running sync into a payload, and keep it until the sync ends.

        Raises:
            BaselineError: the sync ended while this ran; the payload must not be sent.
            PayloadError: there are too many deltas, or they overlap.
        """
        with self._lock:
            sync = self._sync
        body = encode_payload(deltas, compression_level=self._config.compression_level)
        with self._lock:
            if sync != self._sync:
                raise BaselineError("the sync ended while a payload of it was being encoded")
            self._pending.append(body)
        changed = sum(delta.values.numel() for delta in deltas)
        return SparsePayload(body, checksum_hex(body), len(deltas), changed)

    def prepare_sparse_delta_payload(
        self, weights: Iterable[NamedTensor]
    ) -> Iterator[SparsePayload]:
        """Compare and encode, yielding payloads of about ``payload_bytes`` before compression.

        Raises:
            BaselineError: there is no baseline.
            TensorMismatchError: as :meth:`compare`.
        """
        deltas = (delta for name, tensor in weights for delta in self.compare(name, tensor))
        for batch in batch_deltas(deltas, self._config.payload_bytes):
            yield self.encode(batch)

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

    def on_sync_succeeded(self) -> None:
        """The engines hold what was sent: move the baseline there.

        Returns at once; the baseline is brought up in a thread, and whatever needs it next waits.

        Raises:
            BaselineError: there is no baseline.
        """
        entries = self._usable()
        pending = self._end_sync()
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
        """Wait until the baseline is where the last sync left it.

        Raises:
            BaselineError: there is no baseline, or a retained payload was damaged; then the
                baseline is given up.
        """
        self._usable()

    def _move(self, entries: dict[str, _Entry], pending: list[bytes]) -> None:
        try:
            for body in pending:
                limits = DecodeLimits(len(body), payload_decoded_bytes(body))
                for delta in decode_payload(body, limits):
                    apply_delta(delta, entries[delta.name].bits)
        except BaseException as error:
            self._unusable = (
                "the last sync's changes were written to it only in part "
                f"({type(error).__name__}: {error})"
            )

    def on_sync_failed(self) -> None:
        """Nothing was committed: forget the payloads. The baseline stays as it is."""
        self._end_sync()

    def close(self) -> None:
        """Give up the baseline and remove its files. May be called more than once."""
        self._give_up("the tracker was closed")

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
            self._sync += 1
        return pending

    def _give_up(self, why: str) -> None:
        if self._mover is not None:
            self._mover.join()
        self._unusable = why
        self._end_sync()
        self._release()

    def _release(self) -> None:
        self._entries = {}
        if self._files is not None:
            self._files.close()
            self._files = None
