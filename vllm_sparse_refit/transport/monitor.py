"""What all workers report of a transfer, asked of their servers at once. Used by one thread."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self

import zmq

from vllm_sparse_refit.errors import TransportError, TransportTimeoutError
from vllm_sparse_refit.transport.curve import CurveClientKeys
from vllm_sparse_refit.transport.protocol import (
    ACK,
    REPLY_FRAMES,
    STAT,
    StatusQuery,
    parse_reply,
    sign,
)
from vllm_sparse_refit.transport.sockets import connect_dealer

Report = dict[str, Any]

# Between two rounds of questions: short at first, since most transfers are complete by then.
_FIRST_PAUSE_S: Final = 0.002
_LONGEST_PAUSE_S: Final = 0.1
_ROUND_S: Final = 1.0
_WORTH_TELLING_S: Final = 0.1


class FleetMonitor:
    """A connection to every worker's server, for status queries. A context manager.

    Args:
        addresses: The workers' endpoints.
        api_key: Key shared with them.
        curve: Keys of connections that are encrypted.

    Raises:
        TransportError: an address is no endpoint.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        api_key: bytes | None = None,
        curve: CurveClientKeys | None = None,
    ) -> None:
        self._api_key = api_key
        self._asked = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        try:
            for address in addresses:
                self._sockets[address] = connect_dealer(self._context, address, curve)
                self._poller.register(self._sockets[address], zmq.POLLIN)
        except TransportError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. May be called again."""
        self._context.destroy(linger=0)

    def ask(
        self, transfer_id: str | None, addresses: Sequence[str], timeout_s: float
    ) -> dict[str, Report]:
        """The reports of those who answer within ``timeout_s``, by address.

        Raises:
            TransportError: one refused to answer.
        """
        self._asked += 1
        request_id = self._asked.to_bytes(8, "big")
        metadata = StatusQuery(transfer_id=transfer_id).to_bytes()
        frames = [STAT, request_id, metadata, sign(self._api_key, metadata, b""), b""]
        for address in addresses:
            with contextlib.suppress(zmq.Again):  # it has not taken the last question yet
                self._sockets[address].send_multipart(frames, zmq.NOBLOCK)
        names = {self._sockets[address]: address for address in addresses}
        reports: dict[str, Report] = {}
        deadline = time.monotonic() + timeout_s
        while len(reports) < len(addresses) and (left := deadline - time.monotonic()) > 0:
            for socket, _ in self._poller.poll(max(1, int(left * 1000))):
                reply = socket.recv_multipart(zmq.NOBLOCK)
                if len(reply) == REPLY_FRAMES and reply[1] == request_id and socket in names:
                    reports[names[socket]] = _accepted(names[socket], reply)
        return reports

    def await_staged(
        self,
        transfer_id: str,
        expected: Mapping[str, int],
        *,
        stall_s: float,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait until every worker has staged and forwarded all payloads of a transfer.

        Args:
            expected: Payloads by ``producer_id``.
            stall_s: Longest wait, in seconds, in which no worker gets any further.
            alive: Called now and then; may raise to stop the wait.

        Raises:
            TransportError: a worker could not take or forward the transfer, with its reason.
            TransportTimeoutError: nothing moved for ``stall_s``; says who lacks what.
        """
        wanted = {producer: count for producer, count in expected.items() if count}
        pending, seen = list(self._sockets), dict[str, Any]()
        pause, moved_at = _FIRST_PAUSE_S, time.monotonic()
        while pending:
            alive()
            reports = self.ask(transfer_id, pending, min(_ROUND_S, stall_s))
            for address, report in reports.items():
                progress = _progress(address, transfer_id, report)
                if seen.get(address) != progress:
                    seen[address], moved_at = progress, time.monotonic()
                if _is_complete(progress, wanted):
                    pending.remove(address)
            stalled_s = time.monotonic() - moved_at
            if pending and stalled_s > stall_s:
                raise TransportTimeoutError(_stalled(transfer_id, pending, seen, wanted, stalled_s))
            if pending and len(reports) == len(pending):
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)

    def problems(self, transfer_id: str, timeout_s: float) -> list[str]:
        """What stands in the way of a transfer: who is silent, who waits for whom and for how long."""
        reports: dict[str, Report] = {}
        with contextlib.suppress(TransportError):
            reports = self.ask(transfer_id, list(self._sockets), timeout_s)
        silent = [
            f"worker {address} gave no status within {timeout_s:g} s"
            for address in self._sockets
            if address not in reports
        ]
        waiting = [
            (lane["waiting_s"], address, lane)
            for address, report in reports.items()
            for lane in report["server"]["relays"]
            if lane["failure"] is None and lane["waiting_s"] >= _WORTH_TELLING_S
        ]
        return silent + [
            f"worker {address} has waited {seconds:.1f} s for worker {lane['child']}, with "
            f"{lane['queued']} payloads queued"
            for seconds, address, lane in sorted(waiting, key=lambda w: w[0], reverse=True)
        ]


def _accepted(address: str, reply: list[bytes]) -> Report:
    answer = parse_reply(reply[2])
    if reply[0] != ACK:
        raise TransportError(
            f"{address} refused to tell its status: {answer.get('error_type')}: {answer.get('error')}"
        )
    return answer


def _progress(address: str, transfer_id: str, report: Report) -> Report:
    progress: Report | None = report["server"]["transfer"]
    if progress is None:
        raise TransportError(
            f"worker {address} no longer has transfer {transfer_id!r} open"
            + (f" ({report['last_error']})" if report.get("last_error") else "")
        )
    if progress["failure"] is not None:
        raise TransportError(str(progress["failure"]))
    return progress


def _is_complete(progress: Report, wanted: Mapping[str, int]) -> bool:
    busy = progress["under_way"] or progress["forwarding"]
    return not busy and progress["payloads"] >= sum(wanted.values())


def _stalled(
    transfer_id: str,
    pending: Sequence[str],
    seen: Mapping[str, Report],
    wanted: Mapping[str, int],
    stalled_s: float,
) -> str:
    def said(address: str) -> str:
        progress = seen.get(address)
        if progress is None:
            return f"{address} gave no status"
        return (
            f"{address} has {progress['producers']} of {dict(wanted)} payloads by producer, "
            f"{progress['under_way']} being staged, {progress['forwarding']} being forwarded"
        )

    return (
        f"transfer {transfer_id!r} has not moved for {stalled_s:.1f} s on {len(pending)} workers: "
        + "; ".join(said(address) for address in pending[:5])
    )
