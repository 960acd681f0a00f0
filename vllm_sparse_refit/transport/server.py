"""The receiving end: one thread that owns the sockets, and the pool that it feeds."""

import contextlib
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import zmq

from vllm_sparse_refit.config import WorkerConfig
from vllm_sparse_refit.errors import ConfigError, PayloadError, TransportError
from vllm_sparse_refit.transport.client import ZmqSparseRefitClient
from vllm_sparse_refit.transport.curve import CurveServerKeys
from vllm_sparse_refit.transport.endpoint import advertised, is_loopback, needs_ipv6
from vllm_sparse_refit.transport.frames import is_answerable, parse_head, receive_frames
from vllm_sparse_refit.transport.intake import ApplyPayload, Job, PayloadIntake
from vllm_sparse_refit.transport.ledger import ReplyTo
from vllm_sparse_refit.transport.protocol import (
    ACK,
    NACK,
    PayloadMetadata,
    RequestHead,
    ack_bytes,
    authenticate,
    check_key,
    nack_bytes,
)
from vllm_sparse_refit.transport.statistics import Statistics
from vllm_sparse_refit.transport.tree import DEFAULT_FANOUT, RelayTree, patience

# Below vLLM's own logger, so that lines come out in its format and with its worker prefix.
logger = logging.getLogger("vllm.sparse_refit.transport")

_THREAD_NAME: Final = "sparse-refit-server"
_WAKE_ENDPOINT: Final = "inproc://sparse-refit-wake"
_STOP: Final = [b"STOP"]
_HANDLED: Final = [b"HANDLED"]
_CLOSE_S: Final = 5.0


class ZmqSparseRefitServer:
    """A worker's server: payloads in, verified, staged exactly once, forwarded, each answered.

    ``apply_payload(body, metadata)`` is called by pool threads, several at a time, at most once for
    each payload that it accepts. It must stage and not write a weight. Its result, a dict of JSON
    types, goes into the acknowledgement; an exception refuses the payload, which may be sent again.

    An ACK means: verified, staged, and queued for each child of the relay tree behind less than
    ``config.relay_queue_depth`` others. Whether the children got it is for :meth:`flush` to say.

    At most ``config.queue_depth`` payloads are being verified and staged; beyond that the sockets are
    not read, and the senders wait. A peer may have ``config.peer_queue_depth`` messages unanswered,
    ``config.max_peers`` peers at a time, and ``config.max_relay_bytes`` may wait to be forwarded; over
    these limits a message is refused by a NACK that names the limit. libzmq itself holds a message or
    two more per connection, each frame at most ``config.max_payload_bytes``; it cannot limit
    connections, nor the frames of a message that never ends, so an address off loopback belongs on a
    network that is trusted not to flood it.

    All methods may be called from any thread, except ``start`` and ``close`` from a pool thread.

    Args:
        apply_payload: Stages one payload; metadata has the fields of ``PayloadMetadata``.
        api_key: Key that senders must hold; None accepts senders without a key only.
        curve: Keys of encrypted connections; None accepts plain ones only.
        describe: More to report to those who ask for the status, in JSON types.

    Raises:
        ConfigError: the key is empty.
    """

    def __init__(
        self,
        apply_payload: ApplyPayload,
        *,
        config: WorkerConfig,
        api_key: bytes | None,
        curve: CurveServerKeys | None = None,
        describe: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        self._config = config
        self._api_key = check_key(api_key)
        self._curve = curve
        self._describe = describe
        self._statistics = Statistics()
        self._intake = PayloadIntake(
            apply_payload,
            config=config,
            api_key=self._api_key,
            statistics=self._statistics,
            answer=self._send_wake,
            connect=self._connect,
        )
        self._tree: RelayTree | None = None
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._in_flight = 0  # jobs handed to the pool and not handled; written by the loop only
        self._unanswered: Counter[bytes] = Counter()  # messages by peer; used by the loop only
        self._closing = threading.Event()
        self._address: str | None = None  # set once, by start
        self._lifecycle = threading.Lock()  # makes start and close exclude each other
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._threads: list[threading.Thread] = []
        self._guard = contextlib.ExitStack()  # the authenticator of CURVE clients
        self._wake_lock = threading.Lock()  # guards _wake, which pool threads share
        self._wake: zmq.Socket[bytes] | None = None

    def start(self) -> str:
        """Bind and serve; returns the endpoint that others reach, with its real port.

        A second call returns it again.

        Raises:
            ConfigError: the address is reachable from other machines and there is no key.
            TransportError: the address cannot be bound, or the server was closed.
        """
        with self._lifecycle:
            if self._closing.is_set():
                raise TransportError("the server was closed; make a new one")
            if self._address is None:
                bound = self._bind_and_run()
                self._address = advertised(bound, self._config.advertised_host)
                logger.info("receiving weight payloads at %s", self._address)
            return self._address

    def configure_tree(
        self, addresses: Sequence[str], *, own_address: str, fanout: int = DEFAULT_FANOUT
    ) -> None:
        """Say which workers there are, for the relay trees of transfers that :meth:`open` opens later.

        Args:
            addresses: Every worker's address, in the same order on all of them; none for no relaying.
            own_address: The one of them at which the others reach this server.
            fanout: Most workers that one forwards a payload to.

        Raises:
            ConfigError: an address comes twice, ``own_address`` is not among them or not an address
                that others reach, or the fan-out is below 1.
        """
        if own_address != self._address:
            raise ConfigError(
                f"own_address {own_address!r} is not this server's, {self._address!r}"
            )
        self._tree = RelayTree.of(addresses or [own_address], own_address, fanout)

    def open(self, transfer_id: str, sequence: int) -> None:
        """Take payloads of a transfer, and forward them along the tree that is configured now.

        Args:
            sequence: Above that of every earlier transfer.

        Raises:
            TransactionError: a transfer is open, or the sequence number was used before.
            TransportError: the server was not started.
        """
        if self._address is None:
            raise TransportError("the server was not started; call start() first")
        tree = self._tree or RelayTree((self._address,), self._address)
        self._intake.open(transfer_id, sequence, tree)

    def end(self, transfer_id: str) -> None:
        """Take no more payloads of a transfer, for good, and stop forwarding them.

        What is remembered of it tells repeats, which are acknowledged, from clashes.
        """
        self._intake.end(transfer_id)

    @property
    def sequence(self) -> int:
        """The highest sequence number that a transfer was opened with."""
        return self._intake.ledger.sequence

    def flush(
        self, transfer_id: str, expected_payloads: int = 0, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Wait until a transfer's payloads are staged and forwarded, and seal it.

        New payloads for it are refused from then on.

        Args:
            expected_payloads: Distinct payloads that must be staged, of all producers together.
            timeout_s: Longest wait in seconds; None takes ``config.timeout_s``.

        Returns:
            ``{"payloads": n, "producers": {"0": n, ...}}``, producers by ``producer_id``.

        Raises:
            TransportTimeoutError: payloads are missing or still under way; nothing is sealed.
            TransactionError: the transfer is not open.
            TransportError: a child could not be served, the transfer is sealed with fewer payloads, or
                the server is closed.
        """
        timeout = self._config.timeout_s if timeout_s is None else timeout_s
        return self._intake.ledger.flush(transfer_id, expected_payloads, timeout)

    def status(self, transfer_id: str | None = None) -> dict[str, Any]:
        """Counters since the start, in JSON types.

        ``payloads_received`` and ``bytes_received`` count well-formed messages, repeats included;
        ``payloads_rejected`` counts everything refused or dropped; ``queue_depth`` is what is being
        staged now; ``peers`` have messages unanswered; ``relays`` says for each child how many
        payloads wait and for how long; ``transfer`` is the progress of ``transfer_id`` if it is open.
        """
        progress = None if transfer_id is None else self._intake.ledger.progress(transfer_id)
        return {
            "address": self._address,
            **self._statistics.as_dict(),
            "queue_depth": self._in_flight,
            "peers": len(self._unanswered),
            "sequence": self.sequence,
            "relays": self._intake.relays(),
            "transfer": progress,
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
            deadline = time.monotonic() + _CLOSE_S
            self._intake.close()
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
            self._guard.close()
            if self._context is not None and _THREAD_NAME not in running:
                self._context.term()  # would wait for the loop's sockets

    def _connect(self, address: str, below: int, stop: threading.Event) -> ZmqSparseRefitClient:
        return ZmqSparseRefitClient(
            address,
            timeout_s=patience(self._config.relay_timeout_s, below),
            producer_id=0,
            retries=self._config.relay_retries,
            api_key=self._api_key,
            curve=None if self._curve is None else self._curve.as_relay,
            stop=stop,
        )

    def _bind_and_run(self) -> str:
        bind_address = self._config.bind_address
        keyless = self._api_key is None and self._curve is None
        if keyless and not is_loopback(bind_address) and not self._config.allow_unauthenticated:
            raise ConfigError(
                f"{bind_address!r} is reachable from other machines and needs a key: set "
                "sparse_refit.api_key_env_var or curve_key_file, bind to tcp://127.0.0.1:*, or allow "
                "everybody who reaches it to change the weights with allow_unauthenticated"
            )
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            router = self._bind_router(context, bind_address)
            wake_in, wake = context.socket(zmq.PULL), context.socket(zmq.PUSH)
            for socket in (wake_in, wake):
                socket.set_hwm(0)  # the limits on unanswered messages bound the answers
            wake_in.bind(_WAKE_ENDPOINT)
            wake.connect(_WAKE_ENDPOINT)
        except BaseException:
            self._guard.close()
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
        # Per connection, so that unread payloads stay few. With CURVE a mark of 1 lets none through at all
        # (seen: the client's routing id, which comes with the handshake, seems to count as one).
        router.setsockopt(zmq.RCVHWM, 1 if self._curve is None else 2)
        router.setsockopt(zmq.SNDHWM, 64)  # replies to a peer that reads none are dropped
        router.setsockopt(zmq.MAXMSGSIZE, self._config.max_payload_bytes)
        router.setsockopt(zmq.TCP_KEEPALIVE, 1)
        router.setsockopt(zmq.IPV6, int(needs_ipv6(bind_address)))
        if self._curve is not None:
            self._guard.enter_context(self._curve.guarding(context, router))
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
    #   READING  (fewer than queue_depth)  waits for messages and for the pool
    #   FULL     (queue_depth)             waits for the pool only, so that senders feel the pressure
    #
    #   READING --a well-formed payload, handed to the pool: in_flight + 1---> READING or FULL
    #   READING --a status query, answered at once---------------------------> READING
    #   READING --a malformed message or one over a limit, refused or dropped-> READING
    #   either  --HANDLED from the pool: in_flight - 1-----------------------> READING
    #   either  --an answer, sent on-----------------------------------------> unchanged
    #   either  --STOP from close()------------------------------------------> ended, sockets closed
    #
    # The pool waits for no other process, so in_flight returns to 0. What a payload goes through in
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
                    message = wake_in.recv_multipart()
                    if message == _STOP:
                        return
                    if message == _HANDLED:
                        self._in_flight -= 1
                    else:
                        self._send_answer(router, message)
                if router in ready:
                    self._receive(router)
        except Exception as error:  # a defect: say so instead of going silent
            self._statistics.rejected(error)
            logger.exception("the server's loop failed; no more payloads are received")
        finally:
            router.close(linger=0)
            wake_in.close(linger=0)

    def _send_answer(self, router: zmq.Socket[bytes], answer: list[bytes]) -> None:
        identity = answer[0]
        self._unanswered[identity] -= 1
        if self._unanswered[identity] <= 0:
            del self._unanswered[identity]
        router.send_multipart(answer)  # to a peer that has gone: dropped by the socket

    def _receive(self, router: zmq.Socket[bytes]) -> None:
        identity, frames = receive_frames(router)
        request_id = frames[1].bytes if is_answerable(frames) else None
        try:
            head = parse_head(frames)
            if not isinstance(head.metadata, PayloadMetadata):
                answer = self._answer_query(head, frames[-1])
                router.send_multipart([identity, ACK, head.request_id, answer])
                return
            self._require_room(identity)
        except Exception as error:  # whatever a message holds, the loop goes on
            self._statistics.rejected(error)
            if request_id is not None:
                router.send_multipart([identity, NACK, request_id, nack_bytes(error)])
            return
        job = Job(ReplyTo(identity, head.request_id), head, head.metadata, frames[-1])
        self._statistics.received(len(frames[-1]))
        self._intake.ledger.arrive(head.metadata.transfer_id)
        self._in_flight += 1
        self._unanswered[identity] += 1
        self._jobs.put(job)

    def _answer_query(self, head: RequestHead, body: zmq.Frame) -> bytes:
        if len(body):
            raise PayloadError(f"a status query has an empty body, not {len(body)} bytes")
        authenticate(self._api_key, head, b"")
        assert not isinstance(head.metadata, PayloadMetadata)
        described = {} if self._describe is None else self._describe()
        return ack_bytes({**described, "server": self.status(head.metadata.transfer_id)})

    def _require_room(self, identity: bytes) -> None:
        if self._unanswered[identity] >= self._config.peer_queue_depth:
            raise PayloadError(
                f"this peer has {self._unanswered[identity]} messages unanswered, and "
                f"peer_queue_depth={self._config.peer_queue_depth} is the limit; wait for answers"
            )
        if not self._unanswered[identity]:
            del self._unanswered[identity]  # which reading it has made
            if len(self._unanswered) >= self._config.max_peers:
                raise PayloadError(
                    f"{len(self._unanswered)} peers have messages unanswered, and "
                    f"max_peers={self._config.max_peers} is the limit; try again later"
                )

    def _work(self) -> None:
        """A pool thread, until close() sends None."""
        while (job := self._jobs.get()) is not None:
            self._intake.handle(job)
            self._send_wake(_HANDLED)

    def _send_wake(self, frames: list[bytes]) -> None:
        """Hand an answer to the loop; dropped when the loop has ended."""
        with self._wake_lock, contextlib.suppress(zmq.Again):
            if self._wake is not None:
                self._wake.send_multipart(frames, zmq.NOBLOCK)

    def _stop_loop(self) -> zmq.Socket[bytes] | None:
        """Send STOP as the last message; returns the socket, to be closed when it has arrived."""
        self._send_wake(_STOP)
        with self._wake_lock:
            wake, self._wake = self._wake, None
        return wake
