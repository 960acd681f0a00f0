"""Which payloads of which transfer were staged: exactly-once bookkeeping. Knows no sockets."""

import enum
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from vllm_sparse_refit.errors import TransactionError, TransportError, TransportTimeoutError
from vllm_sparse_refit.transport.protocol import PayloadMetadata

# Payloads of one transfer, and payloads of ended transfers whose bytes are still told apart.
MAX_PAYLOADS: Final = 1 << 18

TransferKey = tuple[str, int]  # transfer_id, sequence


@dataclass(frozen=True)
class ReplyTo:
    """Who waits for an answer: the sender's socket identity and its request id."""

    identity: bytes
    request_id: bytes


class Repeat(enum.Enum):
    """What becomes of a payload that was seen before with the same bytes."""

    STAGED = "staged"  # acknowledge it and drop it
    UNDER_WAY = "under way"  # it gets the answer that the first one gets


@dataclass(eq=False)
class _Payload:
    checksum: str
    staged: bool = False
    waiting: list[ReplyTo] = field(default_factory=list)


@dataclass(eq=False)
class _Transfer:
    key: TransferKey
    payloads: dict[tuple[int, int], _Payload] = field(default_factory=dict)
    staged: Counter[int] = field(default_factory=Counter)  # payloads by producer_id
    forwarding: int = 0  # payloads on their way to a child, counted once for each child
    failure: str | None = None
    sealed: bool = False
    ended: bool = False


@dataclass(frozen=True, eq=False)
class Ticket:
    """The right, and the duty, to stage one payload and to settle it afterwards."""

    metadata: PayloadMetadata
    _transfer: _Transfer
    _payload: _Payload


class TransferLedger:
    """Remembers the payloads of the one open transfer, and of ended ones. Safe from any thread.

    A transfer is opened under a sequence number above all earlier ones, then sealed by :meth:`flush`,
    then ended; it never opens again, so a replayed payload of it is never staged. What ended transfers
    staged is remembered, within ``max_remembered`` payloads, to tell a harmless repeat from a clash;
    once it is forgotten every payload with a sequence number that was used is refused.

    A payload is unknown, under way, or staged; a failed staging makes it unknown again, so that it
    may be retried. Each :meth:`arrive` must be followed by one :meth:`leave`, or by the :meth:`settle`
    that answers it.
    """

    def __init__(self, max_remembered: int = MAX_PAYLOADS) -> None:
        self._max_remembered = max_remembered
        self._changed = threading.Condition()  # guards everything below
        self._open: _Transfer | None = None
        self._ended: dict[TransferKey, _Transfer] = {}
        self._sequence = 0  # the highest one opened
        self._under_way: Counter[str] = Counter()  # messages by transfer_id, arrived and unanswered
        self._closed = False

    @property
    def sequence(self) -> int:
        """The highest sequence number that a transfer was opened with."""
        with self._changed:
            return self._sequence

    def open(self, transfer_id: str, sequence: int) -> None:
        """Take payloads of a transfer from now on.

        Raises:
            TransactionError: another transfer is open, or the sequence number was used before.
        """
        with self._changed:
            if self._open is not None:
                raise TransactionError(
                    f"transfer {self._open.key[0]!r} is open, and a worker has one at a time; end it "
                    f"before beginning {transfer_id!r}"
                )
            if sequence <= self._sequence:
                raise TransactionError(
                    f"transfer {transfer_id!r} has sequence number {sequence}, but this worker has "
                    f"begun number {self._sequence} already; begin it with a higher one"
                )
            self._sequence = sequence
            self._open = _Transfer((transfer_id, sequence))

    def arrive(self, transfer_id: str) -> None:
        """A message of the transfer was received and will be answered."""
        with self._changed:
            self._under_way[transfer_id] += 1

    def leave(self, transfer_id: str) -> None:
        """A message of the transfer is about to be answered without a :meth:`settle`."""
        with self._changed:
            self._leave(transfer_id, 1)
            self._changed.notify_all()

    def admit(self, metadata: PayloadMetadata, reply_to: ReplyTo) -> Ticket | Repeat:
        """A ticket for a payload to stage, or how to treat a repeat.

        Raises:
            TransactionError: the transfer is not open or sealed, the ids were used for other bytes, or a
                limit is reached.
            TransportError: the transfer failed on this worker, with the reason.
        """
        key = (metadata.transfer_id, metadata.sequence)
        with self._changed:
            is_open = self._open is not None and self._open.key == key
            transfer = self._open if is_open else self._ended.get(key)
            ids = (metadata.producer_id, metadata.payload_id)
            known = None if transfer is None else transfer.payloads.get(ids)
            if known is not None and known.checksum != metadata.checksum:
                raise TransactionError(
                    f"payload {metadata.payload_id} of producer {metadata.producer_id} was sent "
                    f"before in transfer {metadata.transfer_id!r} with other bytes (checksum "
                    f"{known.checksum}, now {metadata.checksum}); use new ids"
                )
            if transfer is not None and is_open and transfer.failure is not None:
                raise TransportError(transfer.failure)
            if known is not None and known.staged:
                return Repeat.STAGED
            if transfer is None or not is_open:
                raise TransactionError(self._not_open(metadata))
            if known is not None:
                known.waiting.append(reply_to)
                return Repeat.UNDER_WAY
            _require_room(transfer, metadata)
            payload = _Payload(metadata.checksum, waiting=[reply_to])
            transfer.payloads[ids] = payload
            return Ticket(metadata, transfer, payload)

    def settle(self, ticket: Ticket, *, staged: bool) -> list[ReplyTo]:
        """Record how staging ended; returns everyone who waits for it, the first sender first."""
        metadata, transfer, payload = ticket.metadata, ticket._transfer, ticket._payload
        with self._changed:
            payload.staged = staged
            if staged:
                transfer.staged[metadata.producer_id] += 1
            else:
                transfer.payloads.pop((metadata.producer_id, metadata.payload_id), None)
            waiting, payload.waiting = payload.waiting, []
            self._leave(metadata.transfer_id, len(waiting))
            self._changed.notify_all()
            return waiting

    def forwarding(self, ticket: Ticket, count: int) -> None:
        """The payload is on its way to ``count`` more children; negative when they have it."""
        with self._changed:
            ticket._transfer.forwarding += count
            self._changed.notify_all()

    def fail(self, ticket: Ticket, reason: str) -> None:
        """The ticket's transfer cannot be completed: its flush and new payloads raise ``reason``."""
        with self._changed:
            if ticket._transfer.failure is None:
                ticket._transfer.failure = reason
            self._changed.notify_all()

    def flush(self, transfer_id: str, expected_payloads: int, timeout_s: float) -> dict[str, Any]:
        """Wait until nothing is under way or being forwarded and enough is staged, then seal it.

        Returns:
            ``{"payloads": n, "producers": {"0": n, ...}}``.

        Raises:
            TransportTimeoutError: it did not come to that within ``timeout_s``; nothing is sealed.
            TransactionError: the transfer is not open, or ended meanwhile.
            TransportError: the transfer failed or is sealed with fewer payloads, or the server closed.
        """
        with self._changed:
            transfer = self._open
            if transfer is None or transfer.key[0] != transfer_id:
                raise TransactionError(f"transfer {transfer_id!r} is not open; begin it first")

            def finished() -> bool:
                return (
                    self._closed
                    or transfer.ended
                    or transfer.failure is not None
                    or transfer.sealed
                    or self._is_complete(transfer, expected_payloads)
                )

            if not self._changed.wait_for(finished, timeout_s):
                raise TransportTimeoutError(self._overdue(transfer, expected_payloads, timeout_s))
            if self._closed:
                raise TransportError(
                    f"the server closed while transfer {transfer_id!r} was flushed"
                )
            if transfer.ended:
                raise TransactionError(f"transfer {transfer_id!r} ended while it was flushed")
            if transfer.failure is not None:
                raise TransportError(transfer.failure)
            if transfer.staged.total() < expected_payloads:
                raise TransportError(
                    f"transfer {transfer_id!r} is sealed with {transfer.staged.total()} payloads "
                    f"and {expected_payloads} are expected; start a new transfer"
                )
            transfer.sealed = True
            return {"payloads": transfer.staged.total(), "producers": _by_producer(transfer)}

    def progress(self, transfer_id: str) -> dict[str, Any] | None:
        """How far the open transfer is, in JSON types; None when another one or none is open."""
        with self._changed:
            transfer = self._open
            if transfer is None or transfer.key[0] != transfer_id:
                return None
            return {
                "payloads": transfer.staged.total(),
                "producers": _by_producer(transfer),
                "under_way": self._under_way[transfer_id],
                "forwarding": transfer.forwarding,
                "failure": transfer.failure,
            }

    def end(self, transfer_id: str) -> None:
        """Take no more payloads of the open transfer. Does nothing if it is not open."""
        with self._changed:
            transfer = self._open
            if transfer is None or transfer.key[0] != transfer_id:
                return
            self._open, transfer.ended = None, True
            self._ended[transfer.key] = transfer
            remembered = sum(len(ended.payloads) for ended in self._ended.values())
            while self._ended and remembered > self._max_remembered:
                oldest = next(iter(self._ended))  # dicts keep their order
                remembered -= len(self._ended.pop(oldest).payloads)
            while len(self._ended) > MAX_ENDED:
                del self._ended[next(iter(self._ended))]
            self._changed.notify_all()

    def close(self) -> None:
        """Wake every :meth:`flush`; each raises."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # The methods below are called with the lock held.

    def _is_complete(self, transfer: _Transfer, expected: int) -> bool:
        busy = self._under_way[transfer.key[0]] or transfer.forwarding
        return not busy and transfer.staged.total() >= expected

    def _leave(self, transfer_id: str, messages: int) -> None:
        self._under_way[transfer_id] -= messages
        if self._under_way[transfer_id] <= 0:
            del self._under_way[transfer_id]

    def _not_open(self, metadata: PayloadMetadata) -> str:
        text = f"transfer {metadata.transfer_id} is not open on this worker"
        if metadata.sequence <= self._sequence:
            return (
                f"{text}: its sequence number {metadata.sequence} is not above {self._sequence}, the "
                "latest one begun here, so it has ended; sync again"
            )
        return f"{text}; begin it first"

    def _overdue(self, transfer: _Transfer, expected: int, timeout_s: float) -> str:
        staged = transfer.staged.total()
        return (
            f"transfer {transfer.key[0]!r} has {staged} of {expected} payloads after {timeout_s:g} s: "
            f"{max(expected - staged, 0)} missing, {self._under_way[transfer.key[0]]} being staged, "
            f"{transfer.forwarding} being forwarded; check that every producer sent all of its "
            "payloads, or allow more time"
        )


# Ended transfers with few payloads must not pile up either.
MAX_ENDED: Final = 64


def _by_producer(transfer: _Transfer) -> dict[str, int]:
    return {str(producer): count for producer, count in sorted(transfer.staged.items())}


def _require_room(transfer: _Transfer, metadata: PayloadMetadata) -> None:
    if transfer.sealed:
        raise TransactionError(
            f"transfer {metadata.transfer_id!r} is sealed and takes no more payloads; "
            "start a new one"
        )
    if len(transfer.payloads) >= MAX_PAYLOADS:
        raise TransactionError(
            f"transfer {metadata.transfer_id!r} has {MAX_PAYLOADS} payloads, which is the limit; "
            "raise payload_bytes at the trainer"
        )
