"""What becomes of one payload message: verified, staged exactly once, forwarded, answered."""

import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import zmq

from vllm_sparse_refit.checksum import checksum_hex
from vllm_sparse_refit.config import WorkerConfig
from vllm_sparse_refit.errors import ChecksumError, PayloadError, RefitError
from vllm_sparse_refit.transport.ledger import Repeat, ReplyTo, Ticket, TransferLedger
from vllm_sparse_refit.transport.protocol import (
    ACK,
    NACK,
    PayloadMetadata,
    RequestHead,
    ack_bytes,
    authenticate,
    nack_bytes,
)
from vllm_sparse_refit.transport.relay import Connect, Countdown, Forwarded, TransferRelay
from vllm_sparse_refit.transport.statistics import Statistics
from vllm_sparse_refit.transport.tree import RelayTree

# Below vLLM's own logger, so that lines come out in its format and with its worker prefix.
logger = logging.getLogger("vllm.sparse_refit.transport")

ApplyPayload = Callable[[bytes, Mapping[str, Any]], dict[str, Any]]

_JOIN_S: Final = 2.0


class Job:
    """One payload message on its way through the pool. Used by one thread at a time."""

    def __init__(
        self, reply_to: ReplyTo, head: RequestHead, metadata: PayloadMetadata, body: zmq.Frame
    ) -> None:
        self.reply_to = reply_to
        self.head = head
        self.metadata = metadata
        self._body: zmq.Frame | None = body

    def take_body(self) -> bytes:
        """The body, once: libzmq's copy of it is freed, so that it is not held while staging."""
        body, self._body = self._body, None
        assert body is not None
        return body.bytes


class PayloadIntake:
    """Handles payload messages in pool threads; owns the ledger and the open transfer's relay.

    :meth:`handle` never waits for another process. All methods may be called from any thread.

    Args:
        answer: Sends ``[identity, kind, request id, JSON]``.
        connect: Makes a client of another worker, for forwarding.
    """

    def __init__(
        self,
        apply_payload: ApplyPayload,
        *,
        config: WorkerConfig,
        api_key: bytes | None,
        statistics: Statistics,
        answer: Callable[[list[bytes]], None],
        connect: Connect,
    ) -> None:
        self._apply_payload = apply_payload
        self._config = config
        self._api_key = api_key
        self._statistics = statistics
        self._answer = answer
        self._connect = connect
        self.ledger = TransferLedger()
        self._lock = threading.Lock()  # guards the rest
        self._relay: TransferRelay | None = None
        self._ending: list[TransferRelay] = []

    def open(self, transfer_id: str, sequence: int, tree: RelayTree) -> None:
        """Take payloads of a transfer, and forward them along ``tree``; see :meth:`TransferLedger.open`."""
        with self._lock:
            self.ledger.open(transfer_id, sequence)
            self._relay = TransferRelay(
                tree,
                self._connect,
                depth=self._config.relay_queue_depth,
                max_bytes=self._config.max_relay_bytes,
            )

    def end(self, transfer_id: str) -> None:
        """Take no more payloads of a transfer and stop forwarding them."""
        with self._lock:
            if self.ledger.progress(transfer_id) is None:
                return
            self.ledger.end(transfer_id)
            relay, self._relay = self._relay, None
            if relay is not None:
                self._ending = [r for r in self._ending if r.is_running] + [relay]
        if relay is not None:
            relay.close()

    def close(self) -> None:
        """Wake every flush and end the relays' threads, within seconds."""
        self.ledger.close()
        with self._lock:
            relays = [*self._ending, *([self._relay] if self._relay is not None else [])]
        for relay in relays:
            relay.close()
        for relay in relays:
            relay.join(_JOIN_S)

    def relays(self) -> list[dict[str, Any]]:
        """See :meth:`TransferRelay.status`."""
        with self._lock:
            relay = self._relay
        return [] if relay is None else relay.status()

    def handle(self, job: Job) -> None:
        """Verify, stage and forward one payload; its sender is answered now or later."""
        transfer_id = job.metadata.transfer_id
        try:
            # The key comes first: a sender without it must not leave a trace in the ledger.
            body = self._verified_body(job)
            with self._lock:
                relay = self._relay
            admitted = self.ledger.admit(job.metadata, job.reply_to)
        except Exception as error:
            self.ledger.leave(transfer_id)
            self._refuse([job.reply_to], error)
            return
        if isinstance(admitted, Ticket):
            self._take(admitted, job, body, relay)
        elif admitted is Repeat.STAGED:
            self.ledger.leave(transfer_id)
            self._acknowledge([job.reply_to], job.metadata, {}, duplicate=True)

    def _verified_body(self, job: Job) -> bytes:
        body = job.take_body()
        authenticate(self._api_key, job.head, body)
        actual, expected = checksum_hex(body), job.metadata.checksum
        if actual != expected:
            raise ChecksumError(
                f"the body's checksum is {actual} and not {expected}: its bytes changed on the "
                "way; send it again"
            )
        return body

    def _take(self, ticket: Ticket, job: Job, body: bytes, relay: TransferRelay | None) -> None:
        """Forward and stage. The answer comes when it is staged and every child's lane has room."""
        result: dict[str, Any] = {}
        try:
            children = () if relay is None else relay.children(job.metadata.relay_root)
            if relay is not None and children:
                relay.reserve(len(body))
        except PayloadError as error:
            self._refuse(self.ledger.settle(ticket, staged=False), error)
            return
        answer = Countdown(
            1 + len(children), functools.partial(self._settle, ticket, job.metadata, result)
        )
        if relay is not None and children:
            payload = self._on_its_way(ticket, job, body, answer, relay, len(children))
            for child in children:
                relay.forward(str(job.metadata.relay_root), child, payload)
        try:
            result |= self._apply_payload(body, job.metadata.as_dict())
        except Exception as error:
            if not isinstance(error, RefitError):
                logger.exception("staging payload %d failed", job.metadata.payload_id)
            answer.done(error)
        else:
            answer.done()

    def _on_its_way(  # noqa: PLR0917
        self,
        ticket: Ticket,
        job: Job,
        body: bytes,
        room: Countdown,
        relay: TransferRelay,
        children: int,
    ) -> Forwarded:
        freed = Countdown(children, lambda _: relay.free(len(body)))
        self.ledger.forwarding(ticket, children)

        def arrived() -> None:
            freed.done()
            self.ledger.forwarding(ticket, -1)

        return Forwarded(
            metadata_bytes=job.head.metadata_bytes,
            mac=job.head.mac,
            body=body,
            room=room,
            arrived=arrived,
            failed=functools.partial(self.ledger.fail, ticket),
        )

    def _settle(
        self,
        ticket: Ticket,
        metadata: PayloadMetadata,
        result: Mapping[str, Any],
        error: Exception | None,
    ) -> None:
        waiting = self.ledger.settle(ticket, staged=error is None)
        if error is not None:
            self._refuse(waiting, error)
            return
        first, *repeats = waiting
        self._acknowledge([first], metadata, result, duplicate=False)
        self._acknowledge(repeats, metadata, result, duplicate=True)

    def _acknowledge(
        self,
        waiting: Sequence[ReplyTo],
        metadata: PayloadMetadata,
        result: Mapping[str, Any],
        *,
        duplicate: bool,
    ) -> None:
        reply = {
            "transfer_id": metadata.transfer_id,
            "producer_id": metadata.producer_id,
            "payload_id": metadata.payload_id,
            "duplicate": duplicate,
            "result": result,
        }
        for reply_to in waiting:
            self._answer([reply_to.identity, ACK, reply_to.request_id, ack_bytes(reply)])

    def _refuse(self, waiting: Sequence[ReplyTo], error: Exception) -> None:
        for reply_to in waiting:
            self._statistics.rejected(error)
            self._answer([reply_to.identity, NACK, reply_to.request_id, nack_bytes(error)])
