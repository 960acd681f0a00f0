"""Threads that compare, code and join deltas into payloads, in the order of the export."""

import collections
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Final, Generic, Self, TypeVar

from vllm_sparse_refit.codec.coding import CodedDelta
from vllm_sparse_refit.codec.payload import DeltaBatcher
from vllm_sparse_refit.trainer.comparison import Comparison, run_all
from vllm_sparse_refit.trainer.exported import ExportedTensor

Payload = TypeVar("Payload")

_MOST_THREADS: Final = 8
# Small tensors are compared together, so that each thread has something to do for a while.
_GROUP_BYTES: Final = 1 << 23


def default_threads() -> int:
    """As many as this process may use, at most 8: past that, memory is the limit and not threads."""
    return min(len(os.sched_getaffinity(0)), _MOST_THREADS)


# Every thread does whatever is due next, and nobody hands a result to anybody: to hand over and to wake up
# costs more than to compare a small tensor.
#
#   feed: cut -> groups of chunks - run -> deltas, in order -> batches - encode -> payloads
#
#   A thread takes a batch, if one is full; otherwise the next group, while few payloads wait to be taken
#   and few groups were taken since the first that is not compared yet; otherwise it waits. It ends when
#   the export has ended and nothing is left.
#   The caller cuts tensors into groups while there is room for one, and takes payloads in order as they are
#   ready.
class ParallelEncoder(Generic[Payload]):
    """Encodes exported tensors in several threads. One user thread; leaving ``with`` ends the threads.

    Args:
        cut: The comparisons of a tensor; called by the user thread.
        encode: Joins deltas into a payload; called by several threads.
        payload_bytes: Size before compression at which a payload is closed.
        threads: At least 1.
    """

    def __init__(
        self,
        cut: Callable[[ExportedTensor], Iterable[Comparison]],
        encode: Callable[[list[CodedDelta]], Payload],
        *,
        payload_bytes: int,
        threads: int,
    ) -> None:
        self._cut_tensor = cut
        self._encode = encode
        self._group: list[Comparison] = []  # of the user thread, until it is full
        self._group_bytes = 0
        self._most_payloads = threads + 1
        # Groups that wait: copies take memory, views of the caller's tensors do not.
        self._most_copies = threads
        self._most_waiting = 8 * threads
        # One thread that is slow must not let the others compare the whole model behind its back.
        self._most_groups = 4 * threads
        lock = threading.Lock()  # owns everything below
        self._due = threading.Condition(lock)  # the threads wait for work
        self._news = threading.Condition(lock)  # the caller waits for room or a payload
        self._groups: collections.deque[list[Comparison]] = collections.deque()
        self._all_cut = False
        self._taken_groups = 0
        self._running = 0
        self._deltas: dict[int, list[CodedDelta]] = {}
        self._in_order = 0
        self._batcher = DeltaBatcher(payload_bytes)
        self._batches: collections.deque[tuple[int, list[CodedDelta]]] = collections.deque()
        self._batch_count = 0
        self._payloads: dict[int, Payload] = {}
        self._taken = 0
        self._error: BaseException | None = None
        self._stopped = False
        self._most_threads = threads
        self._threads: list[threading.Thread] = []  # of the user thread

    # --- the caller -------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        with self._due:
            self._stopped = True
            self._due.notify_all()
        for thread in self._threads:
            thread.join()

    def feed(self, tensor: ExportedTensor) -> Iterator[Payload]:
        """Hand a tensor over, and yield the payloads that are ready until there is room for all of it.

        Raises:
            Exception: the first error of any thread, or of cutting the tensor.
        """
        for comparison in self._cut_tensor(tensor):
            self._group.append(comparison)
            self._group_bytes += comparison.old.nbytes
            if self._group_bytes >= _GROUP_BYTES:
                yield from self._hand_over()

    def finish(self) -> Iterator[Payload]:
        """Say that the export has ended, and yield the payloads that are left.

        Raises:
            Exception: the first error of any thread.
        """
        yield from self._hand_over()
        with self._due:
            self._all_cut = True
            self._close_batches()
            self._due.notify_all()
        while True:
            with self._news:
                self._news.wait_for(lambda: self._is_ready or self._is_done or self._error)
                payload = self._next_payload()
            if payload is None:
                return
            yield payload

    def _hand_over(self) -> Iterator[Payload]:
        """Give the group to the threads once there is room."""
        views = all(comparison.is_view for comparison in self._group)
        most = self._most_waiting if views else self._most_copies
        while self._group:
            with self._news:
                self._news.wait_for(
                    lambda: len(self._groups) < most or self._is_ready or self._error
                )
                payload = self._next_payload()
                if payload is None:
                    self._groups.append(self._group)
                    self._due.notify()
            if payload is None:
                self._group, self._group_bytes = [], 0
                self._start_thread()
                return
            yield payload

    def _start_thread(self) -> None:
        """Start one more, if there may be; not earlier, so that it finds something to do at once."""
        if len(self._threads) < self._most_threads:
            name = f"sparse-refit-encode-{len(self._threads)}"
            self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
            self._threads[-1].start()

    @property
    def _is_ready(self) -> bool:
        return self._taken in self._payloads

    @property
    def _is_done(self) -> bool:
        return self._all_cut and not (self._groups or self._running or self._batches)

    @property
    def _may_compare(self) -> bool:
        return (
            bool(self._groups)
            and len(self._payloads) < self._most_payloads
            and self._taken_groups - self._in_order < self._most_groups
        )

    def _next_payload(self) -> Payload | None:
        if self._error is not None:
            raise self._error
        if not self._is_ready:
            return None
        payload = self._payloads.pop(self._taken)
        self._taken += 1
        if len(self._payloads) == self._most_payloads - 1:
            self._due.notify_all()
        return payload

    # --- the threads ------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while self._step():
                pass
        except BaseException as error:
            with self._due:
                self._error = self._error or error
                self._due.notify_all()
                self._news.notify()

    def _step(self) -> bool:
        """Do one piece of work; False when there will be no more."""
        with self._due:
            self._due.wait_for(
                lambda: (
                    self._stopped
                    or self._error
                    or self._batches
                    or self._may_compare
                    or self._is_done
                )
            )
            if self._stopped or self._error or self._is_done:
                return False
            # Counted at once, so that nobody believes in between that all is done. After an error it
            # stays counted: without what was lost, it never is.
            self._running += 1
            batch = self._batches.popleft() if self._batches else None
            if batch is None:
                group, number = self._groups.popleft(), self._taken_groups
                self._taken_groups += 1
                if len(self._groups) < self._most_copies:
                    self._news.notify()  # not each time: to wake up costs more than to cut a tensor
        if batch is None:
            deltas = run_all(group)
            with self._due:
                self._deltas[number] = deltas
                self._end_step()
        else:
            payload = self._encode(batch[1])
            with self._due:
                self._payloads[batch[0]] = payload
                self._end_step()
        return True

    def _end_step(self) -> None:
        """See what the end of a piece of work makes possible; the lock is held."""
        self._running -= 1
        others_waited = not self._may_compare
        self._close_batches()
        if self._is_ready or self._is_done:
            self._news.notify()
        # What this thread cannot do alone, and what others wait for.
        if len(self._batches) > 1 or self._all_cut or (others_waited and self._may_compare):
            self._due.notify_all()

    def _close_batches(self) -> None:
        """Put the deltas that are next in order into batches; the lock is held."""
        while self._in_order in self._deltas:
            for delta in self._deltas.pop(self._in_order):
                self._add_batch(self._batcher.add(delta))
            self._in_order += 1
        if self._all_cut and not self._groups and self._in_order == self._taken_groups:
            self._add_batch(self._batcher.rest())

    def _add_batch(self, batch: list[CodedDelta]) -> None:
        if batch:
            self._batches.append((self._batch_count, batch))
            self._batch_count += 1
