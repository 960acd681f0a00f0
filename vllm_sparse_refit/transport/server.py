"""The receiving end: payloads in, verified and staged exactly once, each answered."""

import contextlib
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import zmq

from vllm_sparse_refit.checksum import checksum_hex
from vllm_sparse_refit.config import WorkerConfig
from vllm_sparse_refit.errors import (
    ChecksumError,
    ConfigError,
    PayloadError,
    RefitError,
    TransportError,
)
from vllm_sparse_refit.transport.endpoint import is_loopback, needs_ipv6
from vllm_sparse_refit.transport.ledger import Repeat, ReplyTo, Ticket, TransferLedger
from vllm_sparse_refit.transport.protocol import (
    ACK,
    MAC_BYTES,
    MAX_KIND_BYTES,
    MAX_METADATA_BYTES,
    MAX_REQUEST_ID_BYTES,
    NACK,
    REQUEST_FRAMES,
    RequestHead,
    ack_bytes,
    authenticate,
    check_key,
    nack_bytes,
    parse_request_head,
)

logger = logging.getLogger(__name__)

ApplyPayload = Callable[[bytes, Mapping[str, Any]], dict[str, Any]]

_THREAD_NAME: Final = "sparse-refit-server"
_WAKE_ENDPOINT: Final = "inproc://sparse-refit-wake"
_STOP: Final = b"STOP"
_HEAD_LIMITS: Final = (MAX_KIND_BYTES, MAX_REQUEST_ID_BYTES, MAX_METADATA_BYTES, MAC_BYTES)
_CLOSE_S: Final = 5.0
_LOG_INTERVAL_S: Final = 10.0


class _Job:
    """One message on its way through the pool. Used by one thread at a time."""

    def __init__(self, reply_to: ReplyTo, head: RequestHead, body: zmq.Frame) -> None:
        self.reply_to = reply_to
        self.head = head
        self._body: zmq.Frame | None = body

    def take_body(self) -> bytes:
        """The body, once: libzmq's copy of it is freed, so that it is not held while staging."""
        body, self._body = self._body, None
        assert body is not None
        return body.bytes


class ZmqSparseRefitServer:
    """A worker's server: one thread owns the sockets, a small pool verifies and stages payloads.

    ``apply_payload(body, metadata)`` is called by pool threads, several at a time, at most once for
    each payload that it accepts. It must stage and not write a weight. Its result, a dict of JSON
    types, goes into the acknowledgement; an exception refuses the payload, which may be sent again.

    At most ``config.queue_depth`` payloads are received and unanswered; beyond that the sockets are
    not read, and the senders wait. libzmq itself holds a message or two more per connection, each
    frame at most ``config.max_payload_bytes``; it cannot limit connections, nor the frames of a
    message that never ends, so an address off loopback belongs on a network that is trusted not to
    flood it.

    All methods may be called from any thread, except ``start`` and ``close`` from a pool thread.

    Args:
        apply_payload: Stages one payload; metadata has the fields of ``PayloadMetadata``.
        api_key: Key that senders must hold; None accepts senders without a key only.

    Raises:
        ConfigError: the key is empty.
    """

    def __init__(
        self, apply_payload: ApplyPayload, *, config: WorkerConfig, api_key: bytes | None
    ) -> None:
        self._apply_payload = apply_payload
        self._config = config
        self._api_key = check_key(api_key)
        self._ledger = TransferLedger()
        self._statistics = _Statistics()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._in_flight = 0  # jobs handed to the pool and not answered; written by the loop only
        self._closing = threading.Event()
        self._address: str | None = None  # set once, by start
        self._lifecycle = threading.Lock()  # makes start and close exclude each other
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._threads: list[threading.Thread] = []
        self._wake_lock = threading.Lock()  # guards _wake, which pool threads share
        self._wake: zmq.Socket[bytes] | None = None

    def start(self) -> str:
        """Bind and serve; returns the endpoint with its real port. A second call returns it again.

        Raises:
            ConfigError: the address is reachable from other machines and there is no key.
            TransportError: the address cannot be bound, or the server was closed.
        """
        with self._lifecycle:
            if self._closing.is_set():
                raise TransportError("the server was closed; make a new one")
            if self._address is None:
                self._address = self._bind_and_run()
                logger.info("receiving weight payloads at %s", self._address)
            return self._address

    def configure_tree(self, addresses: Sequence[str], own_address: str) -> None:
        """Say which workers this one forwards to. This version forwards to none.

        Args:
            addresses: Every worker of the tree: empty, or this server alone.
            own_address: This server's address, as ``start`` returned it.

        Raises:
            ConfigError: ``own_address`` is another server's, or there are other workers.
        """
        if own_address != self._address:
            raise ConfigError(
                f"own_address {own_address!r} is not this server's, {self._address!r}"
            )
        if list(addresses) not in ([], [own_address]):
            raise ConfigError(
                "relays are not available in this version; give the sender every worker's address, "
                "it reaches each one directly"
            )

    def flush(
        self, transfer_id: str, expected_payloads: int = 0, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Wait for a transfer's payloads and seal it: new payloads for it are refused from then on.

        Args:
            expected_payloads: Distinct payloads that must be staged, of all producers together.
            timeout_s: Longest wait in seconds; None takes ``config.timeout_s``.

        Returns:
            ``{"payloads": n, "producers": {"0": n, ...}}``, producers by ``producer_id``.

        Raises:
            TransportTimeoutError: payloads are missing or still being staged; nothing is sealed.
            TransportError: the transfer is sealed with fewer payloads, or the server is closed.
        """
        timeout = self._config.timeout_s if timeout_s is None else timeout_s
        return self._ledger.flush(transfer_id, expected_payloads, timeout)

    def forget(self, transfer_id: str) -> None:
        """Drop what is remembered of a transfer; its ids count as new afterwards."""
        self._ledger.forget(transfer_id)

    def status(self) -> dict[str, Any]:
        """Counters since the start, in JSON types.

        ``payloads_received`` and ``bytes_received`` count well-formed messages, repeats included;
        ``payloads_rejected`` counts everything refused or dropped; ``queue_depth`` is what is
        received and unanswered now.
        """
        return {
            "address": self._address,
            **self._statistics.as_dict(),
            "queue_depth": self._in_flight,
        }

    def close(self) -> None:
        """Stop receiving and end the threads, within seconds. May be called again.

        Payloads not yet staged are dropped unanswered. A pool thread that is inside
        ``apply_payload`` is waited for, but not for ever; its answer is dropped.
        """
        with self._lifecycle:
            if self._closing.is_set():
                return
            self._closing.set()
            self._ledger.close()
            deadline = time.monotonic() + _CLOSE_S
            wake = self._stop_loop()
            with contextlib.suppress(queue.Empty):
                while True:
                    self._jobs.get_nowait()
            for _ in self._threads:
                self._jobs.put(None)
            for thread in self._threads:
                thread.join(max(0.0, deadline - time.monotonic()))
            running = [thread.name for thread in self._threads if thread.is_alive()]
            if running:
                logger.warning("the server closed while %s still ran", ", ".join(running))
            if wake is not None:
                wake.close(linger=0)
            if self._context is not None and _THREAD_NAME not in running:
                self._context.term()  # would wait for the loop's sockets

    def _bind_and_run(self) -> str:
        bind_address = self._config.bind_address
        if not is_loopback(bind_address) and self._api_key is None:
            raise ConfigError(
                f"{bind_address!r} is reachable from other machines and needs a key: set "
                "sparse_refit.api_key_env_var, or bind to tcp://127.0.0.1:*"
            )
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            router = self._bind_router(context, bind_address)
            wake_in, wake = context.socket(zmq.PULL), context.socket(zmq.PUSH)
            for socket in (wake_in, wake):
                socket.set_hwm(0)  # queue_depth bounds the answers
            wake_in.bind(_WAKE_ENDPOINT)
            wake.connect(_WAKE_ENDPOINT)
        except BaseException:
            context.destroy(linger=0)
            raise
        self._context, self._wake = context, wake
        # From here on the router and wake_in belong to the loop's thread.
        self._threads = [
            threading.Thread(
                target=self._run, args=(router, wake_in), name=_THREAD_NAME, daemon=True
            ),
            *(
                threading.Thread(target=self._work, name=f"{_THREAD_NAME}-pool-{i}", daemon=True)
                for i in range(self._config.staging_threads)
            ),
        ]
        address = router.getsockopt_string(zmq.LAST_ENDPOINT)
        for thread in self._threads:
            thread.start()
        return address

    def _bind_router(
        self, context: zmq.Context[zmq.Socket[bytes]], bind_address: str
    ) -> zmq.Socket[bytes]:
        router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.RCVHWM, 1)  # per connection, so that unread payloads stay few
        router.setsockopt(zmq.SNDHWM, 64)  # replies to a peer that reads none are dropped
        router.setsockopt(zmq.MAXMSGSIZE, self._config.max_payload_bytes)
        router.setsockopt(zmq.TCP_KEEPALIVE, 1)
        router.setsockopt(zmq.IPV6, int(needs_ipv6(bind_address)))
        try:
            router.bind(bind_address)
        except zmq.ZMQError as error:
            raise TransportError(
                f"cannot bind {bind_address!r}: {error.strerror}; choose another "
                "sparse_refit.bind_address, or a port of * to take a free one"
            ) from error
        return router

    # The loop. It is in one of two states, told apart by the number of jobs in flight:
    #
    #   READING  (fewer than queue_depth)  waits for messages and for answers
    #   FULL     (queue_depth)             waits for answers only, so that senders feel the pressure
    #
    #   READING --a well-formed message, handed to the pool: in_flight + 1--> READING or FULL
    #   READING --a malformed message, refused at once or dropped-----------> READING
    #   either  --an answer from the pool, sent on: in_flight - 1-----------> READING
    #   either  --STOP from close()-----------------------------------------> ended, sockets closed
    #
    # Every job yields exactly one answer, so in_flight returns to 0. What a payload goes through in
    # between (unknown, under way, staged) is the ledger's.
    def _run(self, router: zmq.Socket[bytes], wake_in: zmq.Socket[bytes]) -> None:
        reading, full = zmq.Poller(), zmq.Poller()
        reading.register(router, zmq.POLLIN)
        for poller in (reading, full):
            poller.register(wake_in, zmq.POLLIN)
        try:
            while True:
                poller = full if self._in_flight >= self._config.queue_depth else reading
                ready = dict(poller.poll())  # close() wakes it
                if wake_in in ready:
                    answer = wake_in.recv_multipart()
                    if answer == [_STOP]:
                        return
                    self._in_flight -= 1
                    router.send_multipart(answer)  # to a peer that has gone: dropped by the socket
                if router in ready:
                    self._receive(router)
        except Exception as error:  # a defect: say so instead of going silent
            self._statistics.rejected(error)
            logger.exception("the server's loop failed; no more payloads are received")
        finally:
            router.close(linger=0)
            wake_in.close(linger=0)

    def _receive(self, router: zmq.Socket[bytes]) -> None:
        identity, frames = _receive_frames(router)
        request_id = frames[1].bytes if _is_answerable(frames) else None
        try:
            head = _parse_head(frames)
        except Exception as error:  # whatever a message holds, the loop goes on
            self._statistics.rejected(error)
            if request_id is not None:
                router.send_multipart([identity, NACK, request_id, nack_bytes(error)])
            return
        job = _Job(ReplyTo(identity, head.request_id), head, frames[-1])
        self._statistics.received(len(frames[-1]))
        self._ledger.arrive(head.metadata.transfer_id)
        self._in_flight += 1
        self._jobs.put(job)

    def _work(self) -> None:
        """A pool thread, until close() sends None."""
        while (job := self._jobs.get()) is not None:
            self._handle(job)

    def _handle(self, job: _Job) -> None:
        transfer_id = job.head.metadata.transfer_id
        try:
            # The key comes first: a sender without it must not leave a trace in the ledger.
            body = self._verified_body(job)
            admitted = self._ledger.admit(job.head.metadata, job.reply_to)
        except Exception as error:
            self._ledger.leave(transfer_id)
            self._refuse([job.reply_to], error)
            return
        if isinstance(admitted, Ticket):
            self._stage(admitted, job.head, body)
        elif admitted is Repeat.STAGED:
            self._ledger.leave(transfer_id)
            self._acknowledge([job.reply_to], job.head, {}, duplicate=True)

    def _verified_body(self, job: _Job) -> bytes:
        body = job.take_body()
        authenticate(self._api_key, job.head, body)
        actual, expected = checksum_hex(body), job.head.metadata.checksum
        if actual != expected:
            raise ChecksumError(
                f"the body's checksum is {actual} and not {expected}: its bytes changed on the "
                "way; send it again"
            )
        return body

    def _stage(self, ticket: Ticket, head: RequestHead, body: bytes) -> None:
        try:
            result = self._apply_payload(body, dataclasses.asdict(head.metadata))
        except Exception as error:
            if not isinstance(error, RefitError):
                logger.exception("staging payload %d failed", head.metadata.payload_id)
            self._refuse(self._ledger.settle(ticket, staged=False), error)
        else:
            first, *repeats = self._ledger.settle(ticket, staged=True)
            self._acknowledge([first], head, result, duplicate=False)
            self._acknowledge(repeats, head, result, duplicate=True)

    def _acknowledge(
        self,
        waiting: Sequence[ReplyTo],
        head: RequestHead,
        result: Mapping[str, Any],
        *,
        duplicate: bool,
    ) -> None:
        reply = {
            "transfer_id": head.metadata.transfer_id,
            "producer_id": head.metadata.producer_id,
            "payload_id": head.metadata.payload_id,
            "duplicate": duplicate,
            "result": result,
        }
        for reply_to in waiting:
            self._send_wake([reply_to.identity, ACK, reply_to.request_id, ack_bytes(reply)])

    def _refuse(self, waiting: Sequence[ReplyTo], error: Exception) -> None:
        for reply_to in waiting:
            self._statistics.rejected(error)
            self._send_wake([reply_to.identity, NACK, reply_to.request_id, nack_bytes(error)])

    def _send_wake(self, frames: list[bytes]) -> None:
        """Hand an answer to the loop; dropped when the loop has ended."""
        with self._wake_lock, contextlib.suppress(zmq.Again):
            if self._wake is not None:
                self._wake.send_multipart(frames, zmq.NOBLOCK)

    def _stop_loop(self) -> zmq.Socket[bytes] | None:
        """Send STOP as the last message; returns the socket, to be closed when it has arrived."""
        self._send_wake([_STOP])
        with self._wake_lock:
            wake, self._wake = self._wake, None
        return wake


class _Statistics:
    """Counters of one server, with a lock. A rejection is logged, but a flood of them is not."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._received = 0
        self._rejected = 0
        self._bytes = 0
        self._last_error: str | None = None
        self._logged_at = float("-inf")
        self._unlogged = 0

    def received(self, size: int) -> None:
        with self._lock:
            self._received += 1
            self._bytes += size

    def rejected(self, error: Exception) -> None:
        with self._lock:
            self._rejected += 1
            self._last_error = f"{type(error).__name__}: {error}"
            now = time.monotonic()
            if now - self._logged_at < _LOG_INTERVAL_S:
                self._unlogged += 1
                return
            unlogged, self._unlogged, self._logged_at = self._unlogged, 0, now
            message = self._last_error
        logger.warning("refused a payload: %s (%d more since the last line)", message, unlogged)

    def as_dict(self) -> dict[str, Any]:
        with self._lock:
            return {
                "payloads_received": self._received,
                "payloads_rejected": self._rejected,
                "bytes_received": self._bytes,
                "last_error": self._last_error,
            }


def _receive_frames(router: zmq.Socket[bytes]) -> tuple[bytes, list[zmq.Frame]]:
    """One message: its sender and its frames, of which at most one too many is kept."""
    identity = router.recv()
    frames: list[zmq.Frame] = []
    while router.getsockopt(zmq.RCVMORE):
        frame = router.recv(copy=False)
        if len(frames) <= REQUEST_FRAMES:
            frames.append(frame)
    return identity, frames


def _is_answerable(frames: Sequence[zmq.Frame]) -> bool:
    return len(frames) > 1 and len(frames[1]) <= MAX_REQUEST_ID_BYTES


def _parse_head(frames: Sequence[zmq.Frame]) -> RequestHead:
    if len(frames) != REQUEST_FRAMES:
        raise PayloadError(
            f"a message has {REQUEST_FRAMES} frames, this one has {len(frames)} or more; check "
            "that the sender is a ZmqSparseRefitClient of this version"
        )
    for index, (frame, limit) in enumerate(zip(frames, _HEAD_LIMITS, strict=False)):
        if len(frame) > limit:
            raise PayloadError(f"frame {index} has {len(frame)} bytes; its limit is {limit}")
    return parse_request_head([frame.bytes for frame in frames[:-1]])
