"""Which payloads of which transfer were staged: exactly-once bookkeeping. Knows no sockets."""

import enum
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from vllm_sparse_refit.errors import TransactionError, TransportError, TransportTimeoutError
from vllm_sparse_refit.transport.protocol import PayloadMetadata

MAX_TRANSFERS: Final = 64
MAX_PAYLOADS: Final = 1 << 18


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
    payloads: dict[tuple[int, int], _Payload] = field(default_factory=dict)
    staged: Counter[int] = field(default_factory=Counter)  # payloads by producer_id
    sealed: bool = False


@dataclass(frozen=True, eq=False)
class Ticket:
    """The right, and the duty, to stage one payload and to settle it afterwards."""

    metadata: PayloadMetadata
    _transfer: _Transfer
    _payload: _Payload


class TransferLedger:
    """Remembers the payloads of at most ``max_transfers`` transfers. Safe to use from any thread.

    A payload is unknown, under way, or staged; a failed staging makes it unknown again, so that it
    may be retried. A transfer is open, then sealed by :meth:`flush`. Each :meth:`arrive` must be
    followed by one :meth:`leave`, or by the :meth:`settle` that answers it.
    """

    def __init__(self, max_transfers: int = MAX_TRANSFERS) -> None:
        self._max_transfers = max_transfers
        self._changed = threading.Condition()  # guards everything below
        self._transfers: dict[str, _Transfer] = {}
        self._under_way: Counter[str] = Counter()  # messages by transfer_id, arrived and unanswered
        self._closed = False

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
            TransactionError: the ids were used for other bytes, the transfer is sealed, or a limit
                is reached.
        """
        key = (metadata.producer_id, metadata.payload_id)
        with self._changed:
            transfer = self._transfers.get(metadata.transfer_id) or self._open(metadata.transfer_id)
            known = transfer.payloads.get(key)
            if known is None:
                _require_room(transfer, metadata)
                payload = _Payload(metadata.checksum, waiting=[reply_to])
                transfer.payloads[key] = payload
                return Ticket(metadata, transfer, payload)
            if known.checksum != metadata.checksum:
                raise TransactionError(
                    f"payload {metadata.payload_id} of producer {metadata.producer_id} was sent "
                    f"before in transfer {metadata.transfer_id!r} with other bytes (checksum "
                    f"{known.checksum}, now {metadata.checksum}); use new ids"
                )
            if known.staged:
                return Repeat.STAGED
            known.waiting.append(reply_to)
            return Repeat.UNDER_WAY

    def settle(self, ticket: Ticket, *, staged: bool) -> list[ReplyTo]:
        """Record how staging ended; returns everyone who waits for it, the first sender first."""
        metadata, transfer, payload = ticket.metadata, ticket._transfer, ticket._payload
        with self._changed:
            payload.staged = staged
            if staged:
                transfer.staged[metadata.producer_id] += 1
            else:
                del transfer.payloads[metadata.producer_id, metadata.payload_id]
                self._drop_if_empty(metadata.transfer_id)
            self._leave(metadata.transfer_id, len(payload.waiting))
            self._changed.notify_all()
            return payload.waiting

    def flush(self, transfer_id: str, expected_payloads: int, timeout_s: float) -> dict[str, Any]:
        """Wait until nothing is under way and enough is staged, then seal the transfer.

        Returns:
            ``{"payloads": n, "producers": {"0": n, ...}}``.

        Raises:
            TransportTimeoutError: it did not come to that within ``timeout_s``; nothing is sealed.
            TransportError: the transfer is sealed with fewer payloads, or the server closed.
        """

        def finished() -> bool:
            transfer = self._transfers.get(transfer_id)
            if self._closed or (transfer is not None and transfer.sealed):
                return True
            return (
                not self._under_way[transfer_id] and self._staged(transfer_id) >= expected_payloads
            )

        with self._changed:
            if not self._changed.wait_for(finished, timeout_s):
                raise TransportTimeoutError(
                    self._overdue(transfer_id, expected_payloads, timeout_s)
                )
            if self._closed:
                raise TransportError(
                    f"the server closed while transfer {transfer_id!r} was flushed"
                )
            transfer = self._transfers.get(transfer_id) or self._open(transfer_id)
            if transfer.staged.total() < expected_payloads:
                raise TransportError(
                    f"transfer {transfer_id!r} is sealed with {transfer.staged.total()} payloads "
                    f"and {expected_payloads} are expected; start a new transfer"
                )
            transfer.sealed = True
            producers = {str(producer): n for producer, n in sorted(transfer.staged.items())}
            return {"payloads": transfer.staged.total(), "producers": producers}

    def forget(self, transfer_id: str) -> None:
        """Drop everything remembered about a transfer, its seal included."""
        with self._changed:
            self._transfers.pop(transfer_id, None)
            self._changed.notify_all()

    def close(self) -> None:
        """Wake every :meth:`flush`; each raises."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # The methods below are called with the lock held.

    def _open(self, transfer_id: str) -> _Transfer:
        if len(self._transfers) >= self._max_transfers:
            sealed = next((name for name, t in self._transfers.items() if t.sealed), None)
            if sealed is None:
                raise TransactionError(
                    f"{len(self._transfers)} transfers are open, which is the limit; finish or "
                    f"abort one before starting transfer {transfer_id!r}"
                )
            del self._transfers[sealed]  # the oldest: dicts keep their order
        transfer = self._transfers[transfer_id] = _Transfer()
        return transfer

    def _drop_if_empty(self, transfer_id: str) -> None:
        transfer = self._transfers.get(transfer_id)
        if transfer is not None and not transfer.payloads and not transfer.sealed:
            del self._transfers[transfer_id]

    def _leave(self, transfer_id: str, messages: int) -> None:
        self._under_way[transfer_id] -= messages
        if self._under_way[transfer_id] <= 0:
            del self._under_way[transfer_id]

    def _staged(self, transfer_id: str) -> int:
        transfer = self._transfers.get(transfer_id)
        return transfer.staged.total() if transfer else 0

    def _overdue(self, transfer_id: str, expected: int, timeout_s: float) -> str:
        staged = self._staged(transfer_id)
        return (
            f"transfer {transfer_id!r} has {staged} of {expected} payloads after {timeout_s:g} s: "
            f"{max(expected - staged, 0)} missing, {self._under_way[transfer_id]} being staged; "
            "check that every producer sent all of its payloads, or allow more time"
        )


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
