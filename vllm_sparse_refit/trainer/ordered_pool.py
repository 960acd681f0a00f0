"""Threads that work through a stream of items while the results are used in its order."""

import collections
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Final, Self, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_MOST_BY_DEFAULT: Final = 8


def default_threads() -> int:
    """As many as this process may use, at most 8: past that, memory is the limit and not threads."""
    return min(len(os.sched_getaffinity(0)), _MOST_BY_DEFAULT)


class OrderedPool:
    """A bounded pool of threads.

    Leaving the ``with`` block waits for all that was submitted; an exception drops what is not yet
    running, whose futures are cancelled.

    Args:
        threads: At least 1.
        name: Prefix of the threads' names.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._ahead = threads + 1
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Apply ``function`` to each item in some thread and yield the results in order.

        Items are pulled in the calling thread, at most one more than there are threads ahead of the
        result that is yielded. The items of one map may be the results of another on the same pool.

        Raises:
            Exception: what ``items`` or the first ``function`` to fail, in order, raised.
        """
        waiting: collections.deque[Future[Result]] = collections.deque()
        for item in items:
            waiting.append(self._executor.submit(function, item))
            if len(waiting) > self._ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def submit(
        self, function: Callable[[Item], Result], items: Iterable[Item]
    ) -> Iterator[Future[Result]]:
        """As :meth:`map`, but yields each future as soon as its item was pulled.

        How far the items run ahead of the results is the caller's to bound.
        """
        for item in items:
            yield self._executor.submit(function, item)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._executor.shutdown(wait=True, cancel_futures=error_type is not None)
