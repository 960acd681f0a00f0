"""The streaming pipeline: export, compare, encode and send, overlapped and bounded."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Final, Generic, Protocol, Self, TypeVar

from vllm_sparse_refit.config import SyncConfig, read_api_key
from vllm_sparse_refit.errors import ConfigError, TransportStoppedError
from vllm_sparse_refit.trainer.exported import ExportedTensor, NamedTensor
from vllm_sparse_refit.transport.client import ZmqSparseRefitClient
from vllm_sparse_refit.transport.curve import read_client_keys
from vllm_sparse_refit.transport.tree import height, patience

if TYPE_CHECKING:
    from vllm_sparse_refit.trainer.baseline import SparsePayload

T = TypeVar("T")

_THREAD_NAME: Final = "sparse-refit-stream"
# How soon a stage that waits for its neighbour notices that the pipeline was stopped.
_STOP_CHECK_S: Final = 0.05
_DEFAULT_CONFIG: Final = SyncConfig()


class PayloadSource(Protocol):
    """What the pipeline asks of a tracker."""

    def encode_exported(
        self, exports: Iterable[ExportedTensor]
    ) -> Generator[SparsePayload, None, None]:
        """The payloads of the tensors, in order. Closing it ends all that it started."""


def stream_sparse_delta_payloads_via_zmq(
    iterator: Iterable[NamedTensor],
    *,
    delta_tracker: PayloadSource,
    refit_targets: Sequence[str],
    transfer_id: str,
    sequence: int,
    api_key_env_var: str | None = None,
    timeout_s: float = 60.0,
    shard_rank: int = 0,
    shard_count: int = 1,
    sends: Callable[[str], bool] | None = None,
    config: SyncConfig = _DEFAULT_CONFIG,
    alive: Callable[[], None] = lambda: None,
) -> dict[str, int]:
    """Send what changed since the baseline to every target, as one producer of a transfer.

    Each payload is sent once, to the target at which this producer enters the relay tree, and the
    targets forward it to each other.

    The iterator is pulled in the calling thread. Comparing, encoding and sending run in threads of
    their own. At most ``config.queue_depth`` items wait between two stages, and the targets hold few,
    so the slowest one sets the pace and memory stays bounded. A tensor must keep its values until this
    returns; on a device, those it has when the caller's stream gets there.

    The outcome of the sync is the caller's to tell the tracker: this calls none of its
    ``finish_export``, ``on_sync_succeeded`` and ``on_sync_failed``. When nothing changed, nothing
    is sent. On an error the iterator is left where it is; where an export is collective, its other
    processes must be told.

    Args:
        iterator: Canonical tensors, ``(name, tensor)``.
        delta_tracker: Holds the baseline; used by nobody else meanwhile.
        refit_targets: Addresses of the workers' servers, in the order in which each of them was given the
            tree; each one gets every payload. Producer *n* enters at number *n*, counted around.
        transfer_id: Names the transfer, which must have been begun on every target.
        sequence: The number under which it was begun.
        api_key_env_var: Variable that holds the key; None takes ``config.api_key_env_var``.
        timeout_s: Longest wait for one acknowledgement, in seconds, per try; a quarter more for each level
            of the tree below its root.
        shard_rank: Which shard this process sends, and its ``producer_id``.
        shard_count: Processes that share the tensors: number i of the iterator, counted from 0, is
            sent by shard ``i % shard_count``. The others are pulled and dropped.
        sends: Whether this shard sends the tensor of a name, where the order in which tensors come must not
            matter; None shares by number.
        config: Payload size, queue depth, retries and verification samples.
        alive: Called now and then by the calling thread; may raise to stop everything, for a caller that
            learns of a dead worker sooner than by its silence.

    Returns:
        ``payloads``, ``deltas`` and ``changed_elements`` sent, ``total_elements`` of this shard's
        tensors, ``wire_bytes`` of the payloads, each counted once, as each is sent once.

    Raises:
        ConfigError: no or repeated targets, a shard out of range, or the key's variable is empty.
        Exception: the first error of any stage or of the iterator, as it was raised, with notes on
            further ones. Everything has stopped by then; what a target has staged is still staged.
    """
    _check(refit_targets, shard_rank, shard_count)
    api_key = read_api_key(api_key_env_var or config.api_key_env_var)
    encoded = _Encoded()
    with _Pipeline(alive) as pipeline:
        tensors: _Channel[ExportedTensor] = pipeline.channel(config.queue_depth, alive)
        outbox: _Channel[_Numbered] = pipeline.channel(config.queue_depth)
        root = refit_targets[shard_rank % len(refit_targets)]
        levels = height(len(refit_targets), config.fanout)
        connect = functools.partial(
            ZmqSparseRefitClient,
            root,
            timeout_s=patience(timeout_s, levels),
            producer_id=shard_rank,
            retries=config.retries,
            api_key=api_key,
            curve=read_client_keys(config.curve_key_file, config.curve_server_key_file),
            stop=pipeline.stopped,
        )
        send = functools.partial(
            ZmqSparseRefitClient.send_payload,
            transfer_id=transfer_id,
            sequence=sequence,
            verification_candidates=config.verification_samples,
            relay_root=root,
        )
        pipeline.start("send", _send, connect, send, outbox)
        pipeline.start("encode", _encode, tensors, outbox, delta_tracker, encoded)
        by_number = functools.partial(_is_of_shard, shard_rank, shard_count)
        is_own = by_number if sends is None else lambda _, name: sends(name)
        total_elements = _export(iterator, tensors, is_own)
    return {
        "payloads": encoded.payloads,
        "deltas": encoded.deltas,
        "changed_elements": encoded.changed_elements,
        "total_elements": total_elements,
        "wire_bytes": encoded.wire_bytes,
    }


def _check(refit_targets: Sequence[str], shard_rank: int, shard_count: int) -> None:
    if not refit_targets:
        raise ConfigError("there are no refit targets; give the address of each worker's server")
    if len(set(refit_targets)) != len(refit_targets):
        raise ConfigError(f"a refit target is named twice: {list(refit_targets)}")
    if not 0 <= shard_rank < shard_count:
        raise ConfigError(
            f"shard_rank {shard_rank} must be from 0 to shard_count - 1, with "
            f"shard_count {shard_count}"
        )


# The stages. Each runs in one thread and ends when its input is exhausted.


def _is_of_shard(rank: int, count: int, number: int, _name: str) -> bool:
    return number % count == rank


def _export(
    iterator: Iterable[NamedTensor],
    tensors: _Channel[ExportedTensor],
    is_own: Callable[[int, str], bool],
) -> int:
    total_elements = 0
    for number, (name, tensor) in enumerate(iterator):
        tensors.raise_if_stopped()
        if is_own(number, name):
            total_elements += tensor.numel()
            tensors.put(ExportedTensor.of(name, tensor))
    tensors.close()
    return total_elements


def _encode(
    tensors: _Channel[ExportedTensor],
    outbox: _Channel[_Numbered],
    source: PayloadSource,
    encoded: _Encoded,
) -> None:
    # Closed at once on an error, so that its threads end before the pipeline does.
    with contextlib.closing(source.encode_exported(tensors)) as payloads:
        for payload in payloads:
            numbered = _Numbered(encoded.payloads, payload)
            encoded.count(payload)
            outbox.put(numbered)
    outbox.close()


def _send(
    connect: Callable[[], ZmqSparseRefitClient],
    send: Callable[..., object],
    outbox: _Channel[_Numbered],
) -> None:
    with contextlib.closing(connect()) as client:
        for numbered in outbox:
            send(
                client,
                payload_id=numbered.payload_id,
                checksum=numbered.payload.checksum,
                body=numbered.payload.body,
            )


@dataclass(frozen=True)
class _Numbered:
    payload_id: int
    payload: SparsePayload


@dataclass
class _Encoded:
    """What was encoded. Written by the encoding thread; read when that has ended."""

    payloads: int = 0
    deltas: int = 0
    changed_elements: int = 0
    wire_bytes: int = 0

    def count(self, payload: SparsePayload) -> None:
        self.payloads += 1
        self.deltas += payload.deltas
        self.changed_elements += payload.changed_elements
        self.wire_bytes += len(payload.body)


class _Channel(Generic[T]):
    """A bounded queue between two stages; a wait on it ends when the pipeline is stopped."""

    def __init__(self, depth: int, stopped: threading.Event, waits: Callable[[], None]) -> None:
        self._queue: queue.Queue[tuple[T] | None] = queue.Queue(depth)
        self._stopped = stopped
        self._waits = waits  # called by the writer now and then while there is no room

    def raise_if_stopped(self) -> None:
        if self._stopped.is_set():
            raise TransportStoppedError("the pipeline was stopped")

    def put(self, item: T) -> None:
        self._put((item,))

    def close(self) -> None:
        """End the reader's iteration."""
        self._put(None)

    def __iter__(self) -> Iterator[T]:
        while (entry := self._get()) is not None:
            yield entry[0]

    def _put(self, entry: tuple[T] | None) -> None:
        while True:
            self.raise_if_stopped()
            with contextlib.suppress(queue.Full):
                return self._queue.put(entry, timeout=_STOP_CHECK_S)
            self._waits()

    def _get(self) -> tuple[T] | None:
        while True:
            self.raise_if_stopped()
            with contextlib.suppress(queue.Empty):
                return self._queue.get(timeout=_STOP_CHECK_S)


class _Pipeline:
    """Threads that end together: the first error in any of them, or in the body, stops all.

    Leaving the ``with`` block waits for every thread and raises that first error.

    Args:
        alive: Called now and then during that wait; an error of it is one of the body's.
    """

    def __init__(self, alive: Callable[[], None] = lambda: None) -> None:
        self.stopped = threading.Event()
        self._alive = alive
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()  # guards _errors
        self._errors: list[BaseException] = []

    def channel(self, depth: int, waits: Callable[[], None] = lambda: None) -> _Channel[T]:
        return _Channel(depth, self.stopped, waits)

    def start(self, name: str, stage: Callable[..., None], *args: object) -> None:
        def run() -> None:
            try:
                stage(*args)
            except BaseException as error:
                self.fail(error)

        thread = threading.Thread(target=run, name=f"{_THREAD_NAME}-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def fail(self, error: BaseException) -> None:
        """Record an error and stop everything; being stopped is no error of its own."""
        with self._lock:
            if not isinstance(error, TransportStoppedError):
                self._errors.append(error)
        self.stopped.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.fail(error)
        try:
            self._join()
        except BaseException as interrupt:  # such as Ctrl-C, or an engine that died
            self.fail(interrupt)
            self._join()
        self._raise_first(error)

    def _join(self) -> None:
        for thread in self._threads:
            while thread.is_alive():
                thread.join(_STOP_CHECK_S)
                if not self.stopped.is_set():
                    self._alive()

    def _raise_first(self, propagating: BaseException | None) -> None:
        with self._lock:
            errors, self._errors = self._errors, []
        if not errors:
            return
        # An interrupt must reach the caller as one, whatever else failed by then.
        first, *others = sorted(errors, key=lambda each: isinstance(each, Exception))
        for other in others:
            first.add_note(f"also failed: {type(other).__name__}: {other}")
        if first is not propagating:
            raise first from first.__cause__
