"""Client and server over loopback: every payload staged once, or refused with a reason."""

import json
import logging
import threading
from collections.abc import Mapping
from typing import Any

import pytest
import zmq

from tests.transport.helpers import (
    WAIT_S,
    Background,
    Gate,
    Recorder,
    client_of,
    eventually,
    raw_dealer,
    raw_router,
    request,
    send,
    serving,
    threads_named,
)
from vllm_sparse_refit.checksum import checksum_hex
from vllm_sparse_refit.config import WorkerConfig
from vllm_sparse_refit.errors import (
    AuthenticationError,
    ConfigError,
    PayloadError,
    PayloadRejectedError,
    TransactionError,
    TransportError,
    TransportStoppedError,
    TransportTimeoutError,
)
from vllm_sparse_refit.transport.client import ZmqSparseRefitClient
from vllm_sparse_refit.transport.protocol import ACK, DATA, NACK
from vllm_sparse_refit.transport.server import ZmqSparseRefitServer

BIG = bytes(range(256)) * 4096  # 1 MiB: sent without a copy


# --- One payload -----------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"", b"x", BIG])
@pytest.mark.parametrize("api_key", [None, b"secret"])
@pytest.mark.parametrize("bind_address", ["tcp://127.0.0.1:*", "ipc://{}/socket"])
def test_round_trip(body: bytes, api_key: bytes | None, bind_address: str, tmp_path: Any) -> None:
    staged = Recorder()
    with (
        serving(staged, api_key=api_key, bind_address=bind_address.format(tmp_path)) as (
            _,
            address,
        ),
        client_of(address, api_key=api_key, producer_id=5) as client,
    ):
        reply = send(client, body, payload_id=9)
    assert reply == {
        "transfer_id": "t",
        "producer_id": 5,
        "payload_id": 9,
        "duplicate": False,
        "result": {"size": len(body)},
    }
    metadata = {
        "transfer_id": "t",
        "producer_id": 5,
        "payload_id": 9,
        "sequence": 1,
        "checksum": checksum_hex(body),
        "verification_candidates": 3,
        "relay_root": None,
    }
    assert staged.calls == [(body, metadata)]


def test_a_client_sends_many_and_may_name_another_producer() -> None:
    staged = Recorder()
    with serving(staged) as (server, address), client_of(address) as client:
        for payload_id in range(20):
            send(client, bytes([payload_id]), payload_id=payload_id)
        send(client, b"other", payload_id=0, producer_id=3)
        assert server.flush("t", 21) == {"payloads": 21, "producers": {"0": 20, "3": 1}}
        status = server.status()
    assert staged.bodies == [bytes([i]) for i in range(20)] + [b"other"]
    json.dumps(status)
    assert status == {
        "address": address,
        "payloads_received": 21,
        "payloads_rejected": 0,
        "bytes_received": 25,
        "queue_depth": status["queue_depth"],
        "peers": status["peers"],
        "sequence": 1,
        "relays": [],
        "transfer": None,
        "last_error": None,
    }


@pytest.mark.parametrize(
    ("sender", "worker", "reason"),
    [
        (None, b"secret", "needs a key"),
        (b"guess", b"secret", "is not this worker's key"),
        (b"secret", None, "has no key set"),
    ],
)
def test_keys_that_do_not_match(
    sender: bytes | None, worker: bytes | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    staged = Recorder()
    with (
        serving(staged, api_key=worker) as (server, address),
        client_of(address, api_key=sender) as client,
    ):
        with pytest.raises(AuthenticationError, match=reason) as caught:
            send(client)
        texts = [str(caught.value), repr(client), repr(server), str(server.status()), caplog.text]
        assert server.status()["payloads_rejected"] == 1
        assert server.flush("t", 0)["payloads"] == 0
    assert address in texts[0]
    assert "AuthenticationError" in caplog.text
    assert not any("secret" in text or "guess" in text for text in texts)
    assert not staged.calls


def test_a_flipped_bit_is_noticed_and_the_good_copy_still_accepted() -> None:
    staged = Recorder()
    with serving(staged) as (_, address), client_of(address) as client:
        with pytest.raises(PayloadRejectedError, match=r"ChecksumError: the body's checksum is"):
            send(client, b"qayload", checksum=checksum_hex(b"payload"))
        assert send(client, b"payload")["duplicate"] is False
    assert staged.bodies == [b"payload"]


def test_the_receivers_reason_reaches_the_sender_and_a_retry_may_succeed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    errors: list[Exception] = [PayloadError("tensor 'w' is unknown"), KeyError("boom")]

    def stage(_body: bytes, _metadata: Mapping[str, Any]) -> dict[str, Any]:
        if errors:
            raise errors.pop(0)
        return {}

    with serving(stage) as (server, address), client_of(address) as client:
        with pytest.raises(
            PayloadRejectedError, match=rf"{address} refused payload 0.*tensor 'w' is"
        ):
            send(client)
        assert "Traceback" not in caplog.text
        with pytest.raises(PayloadRejectedError, match="KeyError: 'boom'"):
            send(client)
        assert "Traceback" in caplog.text
        assert send(client)["duplicate"] is False
        assert server.status()["payloads_rejected"] == 2
        assert server.status()["last_error"] == "KeyError: 'boom'"
        assert server.flush("t", 1)["payloads"] == 1


def test_bad_arguments_are_refused_before_anything_is_sent() -> None:
    with serving(Recorder()) as (server, address), client_of(address) as client:
        with pytest.raises(PayloadError, match="transfer_id"):
            send(client, transfer_id="")
        send(client)
        assert server.status()["payloads_received"] == 1


# --- Exactly once ----------------------------------------------------------------------------


def test_a_repeat_is_acknowledged_and_dropped() -> None:
    staged = Recorder()
    with serving(staged) as (server, address), client_of(address) as client:
        assert send(client)["duplicate"] is False
        assert send(client)["duplicate"] is True
        with client_of(address) as other:
            assert send(other)["duplicate"] is True
        assert server.flush("t", 1)["payloads"] == 1
        assert send(client)["duplicate"] is True
    assert staged.bodies == [b"payload"]


def test_a_repeat_during_staging_gets_the_first_ones_answer() -> None:
    gate = Gate()
    with (
        serving(gate) as (server, address),
        raw_dealer(address) as first,
        raw_dealer(address) as second,
    ):
        first.send(request(request_id=b"first"))
        assert gate.entered.wait(WAIT_S)
        second.send(request(request_id=b"second"))
        assert eventually(lambda: server.status()["payloads_received"] == 2)
        # A third payload is answered only after the other pool thread has dealt with the repeat.
        first.send(request(b"broken", request_id=b"third", checksum="0" * 32, payload_id=1))
        assert first.receive()[:2] == [NACK, b"third"]
        gate.opened.set()
        kind, request_id, body = first.receive()
        assert (kind, request_id, json.loads(body)["duplicate"]) == (ACK, b"first", False)
        kind, request_id, body = second.receive()
        assert (kind, request_id, json.loads(body)["duplicate"]) == (ACK, b"second", True)
    assert gate.bodies == [b"payload"]


def test_a_repeat_during_a_staging_that_fails_is_refused_too() -> None:
    entered, opened = threading.Event(), threading.Event()

    def stage(_body: bytes, _metadata: Mapping[str, Any]) -> dict[str, Any]:
        entered.set()
        assert opened.wait(WAIT_S)
        raise PayloadError("no room")

    with serving(stage) as (server, address), raw_dealer(address) as peer:
        peer.send(request(request_id=b"1"))
        assert entered.wait(WAIT_S)
        peer.send(request(request_id=b"2"))
        peer.send(request(b"broken", request_id=b"3", checksum="0" * 32))
        assert peer.receive()[:2] == [NACK, b"3"]
        opened.set()
        replies = [peer.receive(), peer.receive()]
        assert [reply[:2] for reply in replies] == [[NACK, b"1"], [NACK, b"2"]]
        assert all(json.loads(reply[2])["error"] == "no room" for reply in replies)
        assert eventually(lambda: server.status()["queue_depth"] == 0)


def test_the_same_ids_with_other_bytes_are_refused() -> None:
    staged = Recorder()
    with serving(staged) as (server, address), client_of(address) as client:
        send(client, b"payload")
        with pytest.raises(PayloadRejectedError, match="sent before in transfer 't' with other"):
            send(client, b"another")
        server.end("t")
        with pytest.raises(PayloadRejectedError, match="sent before in transfer 't' with other"):
            send(client, b"another")
        server.open("u", 2)
        assert send(client, b"another", transfer_id="u", sequence=2)["duplicate"] is False
    assert staged.bodies == [b"payload", b"another"]


def test_a_transfer_that_ended_takes_nothing_new_and_never_opens_again() -> None:
    staged = Recorder()
    with serving(staged) as (server, address), client_of(address) as client:
        send(client)
        server.end("t")
        assert send(client)["duplicate"] is True
        with pytest.raises(PayloadRejectedError, match="number 1 is not above 1"):
            send(client, b"late", payload_id=1)
        for sequence in (0, 1):
            with pytest.raises(TransactionError, match="has begun number 1"):
                server.open("t", sequence)
        server.open("t", 2)  # the same name, another transfer
        assert send(client)["duplicate"] is True
        assert send(client, sequence=2)["duplicate"] is False
    assert len(staged.calls) == 2


def test_a_payload_of_a_transfer_that_was_not_begun_is_refused() -> None:
    staged = Recorder()
    with serving(staged) as (server, address), client_of(address) as client:
        with pytest.raises(TransactionError, match="'t' is open, and a worker has one"):
            server.open("u", 2)
        for transfer_id, sequence in (("t", 2), ("u", 2), ("u", 1)):
            with pytest.raises(PayloadRejectedError, match="not open on this worker"):
                send(client, transfer_id=transfer_id, sequence=sequence)
    assert not staged.calls


# --- Loss and delay --------------------------------------------------------------------------


def test_a_lost_reply_makes_the_client_send_the_same_again() -> None:
    with raw_router() as (router, address), client_of(address, timeout_s=1.0, retries=1) as client:
        sending = Background(lambda: send(client, BIG))
        first_identity, *first = router.receive()
        second_identity, *second = router.receive()
        # The late answer to the first try goes to a socket that is gone.
        router.send([first_identity, ACK, first[1], b'{"try": 1}'])
        router.send([second_identity, ACK, second[1], b'{"try": 2}'])
        assert sending.result() == {"try": 2}
    assert first == second
    assert first[4] == BIG


def test_replies_to_other_requests_are_ignored() -> None:
    with raw_router() as (router, address), client_of(address) as client:
        sending = Background(lambda: send(client))
        identity, _, request_id, *_ = router.receive()
        router.send([identity, ACK, b"stale", b"{}"])
        router.send([identity, NACK, b"stale", b"{}"])
        router.send([identity, b"HUH", request_id, b"{}"])
        router.send([identity, ACK, request_id])
        router.send([identity, ACK, request_id, b'{"mine": true}'])
        assert sending.result() == {"mine": True}


def test_an_answer_that_is_no_json() -> None:
    with raw_router() as (router, address), client_of(address) as client:
        sending = Background(lambda: send(client))
        identity, _, request_id, *_ = router.receive()
        router.send([identity, ACK, request_id, b"<html>"])
        with pytest.raises(TransportError, match=f"{address} answered with reply is no JSON"):
            sending.result()


def test_silence_is_a_timeout_that_says_what_to_check() -> None:
    with (
        raw_router() as (_, address),
        client_of(address, timeout_s=0.1, retries=1) as client,
        pytest.raises(TransportTimeoutError) as caught,
    ):
        send(client, payload_id=6)
    for part in (address, "payload 6", "'t'", " s (2 tries)", "7 bytes", "check that"):
        assert part in str(caught.value)


def test_nobody_at_the_address() -> None:
    with serving(Recorder()) as (_, address):
        pass
    with (
        client_of(address, timeout_s=0.1) as client,
        pytest.raises(TransportTimeoutError, match=address),
    ):
        send(client)


def test_a_waiting_client_can_be_stopped() -> None:
    stop = threading.Event()
    with raw_router() as (router, address), client_of(address, stop=stop) as client:
        sending = Background(lambda: send(client))
        router.receive()
        stop.set()
        with pytest.raises(TransportStoppedError, match=address):
            sending.result()


def test_a_closed_client() -> None:
    with client_of("tcp://127.0.0.1:9") as client:
        client.close()
        client.close()
        with pytest.raises(TransportError, match="is closed"):
            send(client)


@pytest.mark.parametrize("address", ["", "nonsense", "tcp://127.0.0.1", "udp://127.0.0.1:1"])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(TransportError, match="cannot connect to"):
        ZmqSparseRefitClient(address, timeout_s=1, producer_id=0, retries=0)


def test_a_client_checks_its_settings() -> None:
    for bad in ({"timeout_s": 0}, {"retries": -1}, {"api_key": b""}):
        with pytest.raises(ConfigError), client_of("tcp://127.0.0.1:9", **bad):
            pass


# --- Limits ----------------------------------------------------------------------------------


def test_a_full_queue_stops_the_reading() -> None:
    gate = Gate()
    with (
        serving(gate, queue_depth=3, staging_threads=1) as (server, address),
        raw_dealer(address) as peer,
    ):
        for payload_id in range(12):
            peer.send(request(request_id=bytes([payload_id]), payload_id=payload_id))
        assert eventually(lambda: server.status()["payloads_received"] == 3)
        assert not eventually(lambda: server.status()["payloads_received"] > 3, timeout_s=0.3)
        assert server.status()["queue_depth"] == 3
        assert len(gate.calls) == 1  # one thread, and it is held
        gate.opened.set()
        assert sorted(peer.receive()[1] for _ in range(12)) == [bytes([i]) for i in range(12)]
    assert len(gate.calls) == 12


def test_a_payload_over_the_limit_is_not_received() -> None:
    staged = Recorder()
    with (
        serving(staged, max_payload_bytes=100_000) as (server, address),
        client_of(address, timeout_s=0.3) as client,
        client_of(address) as other,
    ):
        with pytest.raises(TransportTimeoutError, match="100001 bytes are within its max_payload"):
            send(client, bytes(100_001))
        send(other, bytes(100_000), payload_id=1)
        assert server.status()["payloads_received"] == 1
    assert len(staged.calls) == 1


GARBAGE = [
    [b""],
    [b"GET / HTTP/1.1"],
    [DATA, b"id"],
    [DATA, b"12345678", b"{}", b"", b"body"],
    [DATA, b"12345678", b"\xff" * 40, b"", b"body"],
    [DATA, b"12345678", b"{}", b"short mac", b"body"],
    [DATA, b"12345678", b"x" * 5000, b"", b"body"],
    [DATA, b"i" * 1000, b"{}", b"", b"body"],
    [b"K" * 1000, b"12345678", b"{}", b"", b"body"],
    [b"NEWS", *request()[1:]],
    [*request(), b"surplus"],
    [*request(), *[b"surplus"] * 50],
]


@pytest.mark.parametrize("frames", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_refused_and_the_server_goes_on(frames: list[bytes]) -> None:
    staged = Recorder()
    with serving(staged) as (server, address), raw_dealer(address) as peer:
        peer.send(frames)
        if len(frames) > 1 and len(frames[1]) <= 16:
            kind, request_id, reason = peer.receive()
            assert (kind, request_id) == (NACK, frames[1])
            assert json.loads(reason)["error_type"] == "PayloadError"
        peer.send(request(request_id=b"good"))
        assert peer.receive()[:2] == [ACK, b"good"]
        assert server.status()["payloads_rejected"] == 1
    assert staged.bodies == [b"payload"]


def test_a_flood_of_garbage_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with serving(Recorder()) as (server, address), raw_dealer(address) as peer:
        for _ in range(50):
            peer.send([b"noise"])
        assert eventually(lambda: server.status()["payloads_rejected"] == 50)
    assert caplog.text.count("refused a payload") == 1


# --- Flush -----------------------------------------------------------------------------------


def test_flush_waits_for_staging_and_then_seals() -> None:
    gate = Gate()
    with serving(gate) as (server, address), client_of(address) as client:
        sending = Background(lambda: send(client))
        assert gate.entered.wait(WAIT_S)
        with pytest.raises(TransportTimeoutError, match="1 being staged"):
            server.flush("t", timeout_s=0.05)
        flushing = Background(lambda: server.flush("t", expected_payloads=2))
        gate.opened.set()
        sending.result()
        send(client, b"second", payload_id=1)  # accepted: the failed flush sealed nothing
        assert flushing.result() == {"payloads": 2, "producers": {"0": 2}}
        with pytest.raises(PayloadRejectedError, match="'t' is sealed"):
            send(client, b"third", payload_id=2)
        assert send(client, b"second", payload_id=1)["duplicate"] is True
    assert sorted(gate.bodies) == [b"payload", b"second"]


def test_flush_waits_for_what_is_still_queued() -> None:
    gate = Gate()
    with (
        serving(gate, staging_threads=1) as (server, address),
        raw_dealer(address) as peer,
    ):
        for payload_id in range(3):
            peer.send(request(request_id=bytes([payload_id]), payload_id=payload_id))
        assert eventually(lambda: server.status()["payloads_received"] == 3)
        flushing = Background(lambda: server.flush("t"))
        gate.opened.set()
        assert flushing.result()["payloads"] == 3


def test_flush_says_how_many_are_missing() -> None:
    with serving(Recorder(), timeout_s=0.05) as (server, address), client_of(address) as client:
        send(client)
        with pytest.raises(TransportTimeoutError, match=r"1 of 3 payloads.*: 2 missing"):
            server.flush("t", 3)


def test_flush_of_nothing() -> None:
    with serving(Recorder()) as (server, address), client_of(address) as client:
        assert server.flush("t") == {"payloads": 0, "producers": {}}
        with pytest.raises(PayloadRejectedError, match="sealed"):
            send(client)


def test_closing_wakes_a_flush() -> None:
    with serving(Recorder()) as (server, _):
        flushing = Background(lambda: server.flush("t", 1))
        server.close()
        with pytest.raises(TransportError, match="closed"):
            flushing.result()


# --- Start and end ---------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:*", "tcp://*:*", "tcp://[::]:*"])
def test_off_loopback_needs_a_key(address: str) -> None:
    with (
        pytest.raises(ConfigError, match=r"needs a key.*api_key_env_var"),
        serving(Recorder(), bind_address=address),
    ):
        pass
    assert not threads_named("sparse-refit-server")


def test_off_loopback_with_a_key() -> None:
    with serving(Recorder(), bind_address="tcp://0.0.0.0:*", api_key=b"secret") as (_, address):
        port = address.rpartition(":")[2]
        with client_of(f"tcp://127.0.0.1:{port}", api_key=b"secret") as client:
            send(client)


def test_an_address_in_use() -> None:
    with (
        serving(Recorder()) as (_, address),
        pytest.raises(TransportError, match=rf"cannot bind '{address}': Address already in use"),
        serving(Recorder(), bind_address=address),
    ):
        pass


def test_start_returns_the_real_port_and_may_be_repeated() -> None:
    with serving(Recorder()) as (server, address):
        assert int(address.removeprefix("tcp://127.0.0.1:")) > 0
        assert server.start() == address


def test_close_ends_the_threads_and_frees_the_port() -> None:
    with serving(Recorder(), staging_threads=3) as (server, address):
        assert len(threads_named("sparse-refit-server")) == 4
        server.close()
        server.close()
        assert not threads_named("sparse-refit-server")
        with pytest.raises(TransportError, match="was closed"):
            server.start()
        with serving(Recorder(), bind_address=address) as (_, again):
            assert again == address


def test_close_drops_what_is_queued_and_waits_for_what_is_being_staged() -> None:
    gate = Gate()
    with serving(gate, staging_threads=1) as (server, address), raw_dealer(address) as peer:
        for payload_id in range(4):
            peer.send(request(payload_id=payload_id))
        assert eventually(lambda: server.status()["payloads_received"] == 4)
        assert gate.entered.wait(WAIT_S)
        closing = Background(server.close)
        assert eventually(lambda: "sparse-refit-server" not in threads_named("sparse-refit-server"))
        gate.opened.set()
        closing.result()
        assert not threads_named("sparse-refit-server")
    assert len(gate.calls) == 1


def test_a_server_that_never_started_can_be_closed() -> None:
    server = ZmqSparseRefitServer(Recorder(), config=WorkerConfig(), api_key=None)
    server.close()
    with pytest.raises(ConfigError, match="empty"):
        ZmqSparseRefitServer(Recorder(), config=WorkerConfig(), api_key=b"")


class _Vanishing:
    """A socket whose connection goes between the moment when it would take a message and the send."""

    def __init__(self, socket: Any, times: int) -> None:
        self._socket = socket
        self.left = times

    def send_multipart(self, *arguments: Any, **options: Any) -> Any:
        if self.left:
            self.left -= 1
            raise zmq.Again
        return self._socket.send_multipart(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


def test_a_connection_that_vanishes_before_the_send_is_waited_for() -> None:
    received = Recorder()
    with serving(received) as (_, address), client_of(address) as client:
        vanishing = _Vanishing(client._socket, 3)
        client._socket = vanishing
        assert send(client)["duplicate"] is False
        assert vanishing.left == 0
    assert received.bodies == [b"payload"]


def test_a_connection_that_vanishes_for_good_is_a_timeout() -> None:
    with serving(Recorder()) as (_, address), client_of(address, timeout_s=0.2) as client:
        client._socket = _Vanishing(client._socket, 1 << 30)
        with pytest.raises(TransportTimeoutError, match="did not acknowledge"):
            send(client)
