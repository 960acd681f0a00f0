"""The sending end: one payload at a time to one worker, each acknowledged."""

import contextlib
import itertools
import threading
import time
from typing import Any, Final

import zmq

from vllm_sparse_refit.errors import (
    AuthenticationError,
    ConfigError,
    PayloadError,
    PayloadRejectedError,
    TransportError,
    TransportStoppedError,
    TransportTimeoutError,
)
from vllm_sparse_refit.transport.curve import CurveClientKeys
from vllm_sparse_refit.transport.protocol import (
    ACK,
    DATA,
    NACK,
    REPLY_FRAMES,
    STAT,
    PayloadMetadata,
    StatusQuery,
    check_key,
    parse_reply,
    sign,
)
from vllm_sparse_refit.transport.sockets import connect_dealer

# How soon a client that waits for a reply notices that it was told to stop.
_STOP_CHECK_S: Final = 0.05


class ZmqSparseRefitClient:
    """A DEALER socket to one worker. Used by one thread; several clients may run side by side.

    Args:
        address: The worker's endpoint, as its server's ``start()`` returned it.
        timeout_s: Longest wait for the acknowledgement of one payload, in seconds, per try.
        producer_id: Names this process within a transfer.
        retries: Further tries after a payload was not acknowledged in time. A retry sends the same
            ids and bytes, so the worker stages the payload once however many copies reach it.
        api_key: Key shared with the worker; it signs each payload and is never sent.
        curve: Keys of a connection that is encrypted; a worker that does not allow them never answers.
        stop: When another thread sets it, a waiting ``send_payload`` soon gives up.

    Raises:
        ConfigError: a limit is out of range or the key is empty.
        TransportError: ``address`` is no endpoint.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float,
        producer_id: int,
        retries: int,
        api_key: bytes | None = None,
        curve: CurveClientKeys | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        if not timeout_s > 0 or retries < 0:
            raise ConfigError(
                f"a client needs timeout_s > 0 and retries >= 0, not {timeout_s!r} and {retries!r}"
            )
        self._address = address
        self._timeout_s = timeout_s
        self._producer_id = producer_id
        self._retries = retries
        self._api_key = check_key(api_key)
        self._curve = curve
        self._stop = stop if stop is not None else threading.Event()
        self._request_ids = itertools.count()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = zmq.Context()
        try:
            self._socket = connect_dealer(self._context, self._address, self._curve)
        except TransportError:
            self.close()
            raise

    def send_payload(
        self,
        *,
        transfer_id: str,
        sequence: int,
        payload_id: int,
        checksum: str,
        verification_candidates: int,
        body: bytes,
        relay_root: str | None = None,
        producer_id: int | None = None,
    ) -> dict[str, Any]:
        """Send one payload and wait until the worker has registered it.

        Registered means: verified, staged, and queued for the worker's children within their bound.

        Args:
            sequence: The number under which the transfer was begun on the workers.
            checksum: xxh3-128 of ``body``, 32 hex digits.
            body: The payload; not copied, so it must stay as it is until this returns.
            relay_root: This worker's address, to have the payload forwarded to the whole tree; None
                leaves it at this worker.
            producer_id: Overrides this client's own.

        Returns:
            The acknowledgement: ``transfer_id``, ``producer_id``, ``payload_id``, ``duplicate``
            (the worker had it already) and ``result``, what staging returned (empty for a late
            repeat).

        Raises:
            PayloadError: an argument is out of range; nothing was sent.
            AuthenticationError: the worker refused the key.
            PayloadRejectedError: the worker refused the payload and said why.
            TransportTimeoutError: no acknowledgement after all tries.
            TransportStoppedError: ``stop`` was set.
            TransportError: the client is closed, or the peer is no worker.
        """
        metadata = PayloadMetadata(
            transfer_id=transfer_id,
            sequence=sequence,
            producer_id=self._producer_id if producer_id is None else producer_id,
            payload_id=payload_id,
            checksum=checksum,
            verification_candidates=verification_candidates,
            relay_root=relay_root,
        )
        what = f"payload {payload_id} of transfer {transfer_id!r}"
        metadata_bytes = metadata.to_bytes()
        mac = sign(self._api_key, metadata_bytes, body)
        return self._request([DATA, metadata_bytes, mac, body], what)

    def forward(self, metadata_bytes: bytes, mac: bytes, body: bytes) -> dict[str, Any]:
        """Send a payload on with the frames it came in; returns and raises as :meth:`send_payload`."""
        metadata = PayloadMetadata.from_bytes(metadata_bytes)
        what = f"payload {metadata.payload_id} of transfer {metadata.transfer_id!r}"
        return self._request([DATA, metadata_bytes, mac, body], what)

    def status(self, transfer_id: str | None = None) -> dict[str, Any]:
        """What the worker reports about itself, and about the progress of a transfer.

        Raises:
            TransportError: as :meth:`send_payload`.
        """
        metadata_bytes = StatusQuery(transfer_id=transfer_id).to_bytes()
        mac = sign(self._api_key, metadata_bytes, b"")
        return self._request([STAT, metadata_bytes, mac, b""], "a status query")

    def _request(self, frames: list[bytes], what: str) -> dict[str, Any]:
        """Send kind, metadata, mac and body until an answer comes; returns an ACK's JSON."""
        if self._context is None:
            raise TransportError(f"the client of {self._address} is closed; make a new one")
        request_id = next(self._request_ids).to_bytes(8, "big")
        frames.insert(1, request_id)
        started = time.monotonic()
        for attempt in range(self._retries + 1):
            if attempt:
                # A fresh connection: the old one may be half dead, and may hold an unsent copy.
                self._socket.close(linger=0)
                self._socket = connect_dealer(self._context, self._address, self._curve)
            reply = self._exchange(frames, request_id)
            if reply is not None:
                return self._accepted(reply, what)
        raise TransportTimeoutError(
            f"{self._address} did not acknowledge {what} "
            f"within {time.monotonic() - started:.1f} s ({self._retries + 1} tries); check that "
            "the worker is alive and reachable at this address, that its staging is not stuck, "
            f"that {len(frames[-1])} bytes are within its max_payload_bytes (it drops larger ones "
            "unanswered)" + self._curve_hint()
        )

    def close(self) -> None:
        """Close the connection and drop what was not sent. May be called again."""
        context, self._context = self._context, None
        if context is not None:
            context.destroy(linger=0)

    def _curve_hint(self) -> str:
        if self._curve is None:
            return ", and that it does not ask for CURVE keys"
        return ", and that its CURVE key and its allow-list fit this client's"

    def _exchange(self, frames: list[bytes], request_id: bytes) -> list[bytes] | None:
        """One try: the reply to ``request_id``, or None when the time is up."""
        deadline = time.monotonic() + self._timeout_s
        if not self._sent(frames, deadline):
            return None
        while self._wait(zmq.POLLIN, deadline):
            reply = self._socket.recv_multipart(zmq.NOBLOCK)
            if len(reply) == REPLY_FRAMES and reply[0] in (ACK, NACK) and reply[1] == request_id:
                return reply
            # Anything else answers an earlier request of this socket, or is noise.
        return None

    def _sent(self, frames: list[bytes], deadline: float) -> bool:
        while self._wait(zmq.POLLOUT, deadline):
            # What would take a message a moment ago may be gone: a connection whose handshake failed.
            with contextlib.suppress(zmq.Again):
                # Only immutable bytes go without a copy: a send that timed out may still read them.
                self._socket.send_multipart(
                    frames, zmq.NOBLOCK, copy=not isinstance(frames[-1], bytes)
                )
                return True
        return False

    def _wait(self, event: int, deadline: float) -> bool:
        while not self._stop.is_set():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return False
            if self._socket.poll(max(1, int(min(remaining, _STOP_CHECK_S) * 1000)), event):
                return True
        raise TransportStoppedError(f"sending to {self._address} was stopped")

    def _accepted(self, reply: list[bytes], what: str) -> dict[str, Any]:
        try:
            answer = parse_reply(reply[2])
        except PayloadError as error:
            raise TransportError(
                f"{self._address} answered with {error}; check that a worker's server listens there"
            ) from error
        if reply[0] == ACK:
            return answer
        error_type = answer.get("error_type")
        rejected = (
            AuthenticationError
            if error_type == AuthenticationError.__name__
            else PayloadRejectedError
        )
        raise rejected(f"{self._address} refused {what}: {error_type}: {answer.get('error')}")
