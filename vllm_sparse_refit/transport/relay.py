"""The forwarding end of a worker's server: payloads of one transfer on to this worker's children."""

import contextlib
import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from vllm_sparse_refit.errors import PayloadError, RefitError, TransportError
from vllm_sparse_refit.transport.client import ZmqSparseRefitClient
from vllm_sparse_refit.transport.tree import RelayTree

_THREAD_NAME: Final = "sparse-refit-relay"

# Makes a client: address, levels of workers below it, an event that stops it.
Connect = Callable[[str, int, threading.Event], ZmqSparseRefitClient]


class Countdown:
    """Calls ``finish`` once: when all parts are done, or with the first error."""

    def __init__(self, parts: int, finish: Callable[[Exception | None], None]) -> None:
        self._lock = threading.Lock()
        self._left = parts
        self._finish = finish

    def done(self, error: Exception | None = None) -> None:
        """One part is done, or failed."""
        with self._lock:
            if self._left <= 0:
                return
            self._left = 0 if error is not None else self._left - 1
            if self._left:
                return
        self._finish(error)


@dataclass(frozen=True, eq=False)
class Forwarded:
    """One verified payload on its way to the children, just as it came.

    Attributes:
        metadata_bytes, mac, body: The sender's own frames; ``mac`` stays valid since nothing changes.
        room: Counted down by each child's lane once few enough payloads wait before this one.
        arrived: Called for each child that has registered the payload.
        failed: Called with the reason if a child cannot be served.
    """

    metadata_bytes: bytes
    mac: bytes
    body: bytes
    room: Countdown
    arrived: Callable[[], None]
    failed: Callable[[str], None]


class TransferRelay:
    """Forwards the payloads of one transfer. Safe from any thread; nothing here waits for a child.

    A payload has its own lane for each root and child, so that waiting follows one tree and no two
    workers can wait for each other. The sender's acknowledgement is withheld until at most ``depth``
    payloads wait in each lane, which is how a slow child slows the sender.

    Args:
        connect: Makes a client of a child.
        depth: Payloads in a lane, the one being sent included, beyond which acknowledgements wait.
        max_bytes: Most bytes of payloads that wait to be forwarded.
    """

    def __init__(self, tree: RelayTree, connect: Connect, *, depth: int, max_bytes: int) -> None:
        self._tree = tree
        self._connect = connect
        self._depth = depth
        self._max_bytes = max_bytes
        self._lock = threading.Lock()  # guards the rest
        self._lanes: dict[tuple[str, str], _Lane] = {}
        self._bytes = 0
        self._closed = False

    def children(self, root: str | None) -> tuple[str, ...]:
        """Whom a payload that entered at ``root`` goes to from here.

        Raises:
            PayloadError: ``root`` is no worker of this transfer's tree.
        """
        return () if root is None else self._tree.children(root)

    def reserve(self, size: int) -> None:
        """Account for a payload of ``size`` bytes until :meth:`free`.

        Raises:
            PayloadError: too many bytes wait already.
        """
        with self._lock:
            if self._bytes + size > self._max_bytes:
                raise PayloadError(
                    f"{self._bytes} bytes wait to be forwarded and {size} more are over "
                    f"max_relay_bytes={self._max_bytes}; raise it, or send smaller payloads"
                )
            self._bytes += size

    def free(self, size: int) -> None:
        """A payload was forwarded to every child."""
        with self._lock:
            self._bytes -= size

    def forward(self, root: str, child: str, payload: Forwarded) -> None:
        """Queue a payload for a child."""
        with self._lock:
            if self._closed:
                payload.room.done(TransportError("the transfer ended"))
                return
            lane = self._lanes.get((root, child))
            if lane is None:
                below = self._tree.levels_below(root, child)
                connect = functools.partial(self._connect, child, below)
                lane = _Lane(self._tree.own_address, child, connect, self._depth)
                self._lanes[root, child] = lane
        lane.put(payload)

    def status(self) -> list[dict[str, Any]]:
        """For each lane: child, root, payloads queued, and for how long the first one has waited."""
        with self._lock:
            lanes = dict(self._lanes)
        return [{"root": root, **lane.status()} for (root, _), lane in lanes.items()]

    @property
    def is_running(self) -> bool:
        """Whether a lane's thread still runs."""
        with self._lock:
            return any(lane.thread.is_alive() for lane in self._lanes.values())

    def close(self) -> None:
        """Drop what waits and stop the lanes, without waiting for them. May be called again."""
        with self._lock:
            self._closed = True
            lanes = list(self._lanes.values())
        for lane in lanes:
            lane.stop()

    def join(self, timeout_s: float) -> None:
        """Wait until the lanes' threads have ended."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            lanes = list(self._lanes.values())
        for lane in lanes:
            lane.thread.join(max(0.0, deadline - time.monotonic()))


class _Lane:
    """One thread that forwards to one child, one payload at a time."""

    def __init__(
        self,
        own_address: str,
        child: str,
        connect: Callable[[threading.Event], ZmqSparseRefitClient],
        depth: int,
    ) -> None:
        self._own_address = own_address
        self._child = child
        self._connect = connect
        self._depth = depth
        self._stop = threading.Event()  # also seen by a client that waits
        self._changed = threading.Condition()  # guards the rest
        self._payloads: deque[Forwarded] = deque()  # the first one is being sent
        self._since = 0.0
        self._failure: TransportError | None = None
        self.thread = threading.Thread(target=self._run, name=_THREAD_NAME, daemon=True)
        self.thread.start()

    def put(self, payload: Forwarded) -> None:
        with self._changed:
            failure = self._failure
            if failure is None:
                self._payloads.append(payload)
                has_room = len(self._payloads) <= self._depth
                self._changed.notify_all()
        if failure is not None:
            # In this order: a transfer that failed admits nothing, so that no payload is staged twice.
            payload.failed(str(failure))
            payload.room.done(failure)
        elif has_room:
            payload.room.done()

    def stop(self) -> None:
        self._stop.set()
        self._fail(TransportError(f"the transfer ended before {self._child} had all of it"))

    def status(self) -> dict[str, Any]:
        with self._changed:
            waiting = time.monotonic() - self._since if self._payloads and self._since else 0.0
            return {
                "child": self._child,
                "queued": len(self._payloads),
                "waiting_s": round(waiting, 3),
                "failure": None if self._failure is None else str(self._failure),
            }

    def _run(self) -> None:
        started = time.monotonic()
        try:
            with contextlib.closing(self._connect(self._stop)) as client:
                while (payload := self._next()) is not None:
                    started = time.monotonic()
                    client.forward(payload.metadata_bytes, payload.mac, payload.body)
                    self._finish(payload)
        except Exception as error:
            text = str(error) if isinstance(error, RefitError) else repr(error)
            self._fail(
                TransportError(
                    f"worker {self._own_address} could not forward to worker {self._child} "
                    f"({time.monotonic() - started:.1f} s): {text}"
                )
            )

    def _next(self) -> Forwarded | None:
        with self._changed:
            self._changed.wait_for(lambda: self._payloads or self._failure is not None)
            if self._failure is not None:
                return None
            self._since = time.monotonic()
            return self._payloads[0]

    def _finish(self, payload: Forwarded) -> None:
        admitted = None
        with self._changed:
            if self._failure is not None:
                return
            self._payloads.popleft()
            if len(self._payloads) >= self._depth:
                admitted = self._payloads[self._depth - 1]
        payload.arrived()
        if admitted is not None:
            admitted.room.done()

    def _fail(self, failure: TransportError) -> None:
        with self._changed:
            if self._failure is not None:
                return
            self._failure = failure
            dropped, self._payloads = list(self._payloads), deque()
            self._changed.notify_all()
        for payload in dropped:
            payload.failed(str(failure))
            payload.room.done(failure)
