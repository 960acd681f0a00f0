"""The relay tree over loopback: a payload crosses from the trainer once and reaches every worker."""

import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest

from tests.transport.helpers import (
    WAIT_S,
    Background,
    Gate,
    Recorder,
    client_of,
    eventually,
    fleet,
    plant,
    raw_dealer,
    request,
    send,
    serving,
    threads_named,
)
from vllm_sparse_refit.checksum import checksum_hex
from vllm_sparse_refit.errors import (
    AuthenticationError,
    ConfigError,
    PayloadError,
    PayloadRejectedError,
    TransportError,
)
from vllm_sparse_refit.transport.protocol import ACK, NACK

RELAYS = "sparse-refit-relay"


def enter(root: str, bodies: list[bytes], *, producer_id: int = 0, **options: Any) -> None:
    """Send payloads as one producer that enters the tree at ``root``."""
    with client_of(root, producer_id=producer_id, **options) as client:
        for payload_id, body in enumerate(bodies):
            send(client, body, payload_id=payload_id, relay_root=root)


@pytest.mark.parametrize(("count", "fanout"), [(1, 2), (2, 1), (3, 2), (7, 2), (7, 1), (8, 4)])
@pytest.mark.parametrize("key", [None, b"secret"])
def test_every_worker_gets_every_payload_once(count: int, fanout: int, key: bytes | None) -> None:
    bodies = [bytes([number]) * 1000 for number in range(10)]
    received = [Recorder() for _ in range(count)]
    with fleet(received, fanout=fanout, api_key=key) as members:
        enter(members[0][1], bodies, api_key=key)
        for server, _ in members:
            assert server.flush("t", 10)["payloads"] == 10
            assert server.status()["payloads_received"] == 10
    for recorder in received:
        assert sorted(recorder.bodies) == bodies
        assert {metadata["relay_root"] for _, metadata in recorder.calls} == {members[0][1]}
    assert not threads_named(RELAYS)


def test_producers_enter_at_different_roots() -> None:
    received = [Recorder() for _ in range(5)]
    with fleet(received, queue_depth=1, relay_queue_depth=1) as members:
        bodies = {p: [bytes([p, n]) * 100 for n in range(30)] for p in range(5)}
        sending = [
            Background(lambda p=p: enter(members[p][1], bodies[p], producer_id=p)) for p in bodies
        ]
        for background in sending:
            background.result()
        for server, _ in members:
            assert server.flush("t", 150)["producers"] == {str(p): 30 for p in bodies}
    expected = sorted(body for group in bodies.values() for body in group)
    assert all(sorted(recorder.bodies) == expected for recorder in received)


def test_a_payload_without_a_root_is_not_forwarded() -> None:
    received = [Recorder() for _ in range(3)]
    with fleet(received) as members, client_of(members[0][1]) as client:
        send(client)
        members[0][0].flush("t", 1)
        assert [len(recorder.bodies) for recorder in received] == [1, 0, 0]


def test_a_corrupt_payload_is_not_forwarded() -> None:
    received = [Recorder() for _ in range(3)]
    with fleet(received) as members, client_of(members[0][1]) as client:
        root = members[0][1]
        with pytest.raises(PayloadRejectedError, match="ChecksumError"):
            send(client, b"qayload", checksum=checksum_hex(b"payload"), relay_root=root)
        send(client, b"payload", relay_root=root)
        for server, _ in members:
            server.flush("t", 1)
    assert [recorder.bodies for recorder in received] == [[b"payload"]] * 3


def test_a_payload_signed_with_another_key_is_not_forwarded() -> None:
    received = [Recorder() for _ in range(2)]
    with fleet(received, api_key=b"secret") as members:
        with pytest.raises(AuthenticationError):
            enter(members[0][1], [b"payload"], api_key=b"guess")
        assert members[1][0].status()["payloads_received"] == 0
    assert not any(recorder.calls for recorder in received)


def test_a_forged_and_a_replayed_relay_message_are_refused() -> None:
    received = [Recorder() for _ in range(2)]
    with fleet(received, api_key=b"secret") as members, raw_dealer(members[1][1]) as attacker:
        root = members[0][1]
        recorded = request(request_id=b"1", api_key=b"secret", relay_root=root)
        forged = [*recorded[:4], b"another body"]
        attacker.send(forged)
        assert attacker.receive()[0] == NACK
        attacker.send(recorded)  # before anybody else sent it: as good as the sender's own
        assert attacker.receive()[0] == ACK
        for server, _ in members:
            server.end("t")
        plant(members, sequence=2)  # even under the same name
        attacker.send(recorded)
        assert attacker.receive()[0] == ACK  # a repeat, dropped
        attacker.send(request(b"new", request_id=b"2", api_key=b"secret", payload_id=9))
        assert attacker.receive()[0] == NACK  # its sequence number has ended
    assert [len(recorder.calls) for recorder in received] == [0, 1]


def test_a_root_that_is_not_in_the_tree_is_refused() -> None:
    received = [Recorder() for _ in range(2)]
    with fleet(received) as members, client_of(members[0][1]) as client:
        with pytest.raises(PayloadRejectedError, match="no worker of the tree"):
            send(client, relay_root="tcp://127.0.0.1:9")
        assert send(client, relay_root=members[0][1])["duplicate"] is False


def test_a_dead_child_fails_the_transfer_and_is_named() -> None:
    received = [Recorder() for _ in range(4)]
    limits: dict[str, Any] = {"relay_timeout_s": 0.3, "relay_retries": 1}
    with fleet(received, fanout=1, **limits) as members:
        dead, dead_address = members[2]
        dead.close()
        parent, root = members[1][1], members[0][1]
        reason = rf"worker {parent} could not forward to worker {dead_address} \(0\.[78]"
        with pytest.raises(PayloadRejectedError, match=reason):
            enter(root, [bytes([n]) for n in range(100)])
        for server, _ in members[:2]:
            with pytest.raises(TransportError, match=reason):
                server.flush("t", 100)
        # The others can go on without it at once.
        alive = [members[0], members[1], members[3]]
        for server, _ in alive:
            server.end("t")
        plant(alive, fanout=1, sequence=2)
        with client_of(root) as client:
            send(client, b"again", sequence=2, relay_root=root)
        for server, _ in alive:
            server.flush("t", 1)
    assert received[3].bodies == [b"again"]


def test_a_child_that_refuses_fails_the_transfer_with_its_reason() -> None:
    def refuse(_body: bytes, _metadata: Mapping[str, Any]) -> dict[str, Any]:
        raise PayloadError("tensor 'w' is unknown")

    with fleet([Recorder(), refuse]) as members:
        root = members[0][1]
        with client_of(root) as client:
            send(client, relay_root=root)
        with pytest.raises(TransportError, match=rf"{members[1][1]} refused.*tensor 'w' is"):
            members[0][0].flush("t", 1)
        with pytest.raises(PayloadRejectedError, match="tensor 'w' is"):
            enter(root, [b"payload", b"another"])


def test_a_slow_child_slows_the_sender_and_holds_few_payloads() -> None:
    gate, sent = Gate(), []

    def sending() -> None:
        with client_of(members[0][1]) as client:
            for payload_id in range(60):
                send(client, bytes([payload_id]), payload_id=payload_id, relay_root=members[0][1])
                sent.append(payload_id)

    with fleet([Recorder(), Recorder(), gate], fanout=1, relay_queue_depth=3) as members:
        background = Background(sending)
        # The leaf holds one; in front of it three wait at each relay, and the last of them is not
        # acknowledged to whoever waits behind it.
        assert eventually(lambda: len(sent) == 6)
        assert not eventually(lambda: len(sent) > 6, timeout_s=0.3)
        assert [lane["queued"] for lane in members[0][0].status()["relays"]] == [4]
        (lane,) = members[1][0].status()["relays"]
        assert (lane["child"], lane["queued"]) == (members[2][1], 4)
        assert lane["waiting_s"] > 0.1
        gate.opened.set()
        background.result()
        for server, _ in members:
            server.flush("t", 60)
    assert len(gate.calls) == 60


def test_flush_waits_until_the_children_have_it() -> None:
    gate = Gate()
    with fleet([Recorder(), gate]) as members:
        enter(members[0][1], [b"payload"])
        with pytest.raises(TransportError, match="1 being forwarded"):
            members[0][0].flush("t", 1, timeout_s=0.05)
        gate.opened.set()
        assert members[0][0].flush("t", 1)["payloads"] == 1
        assert members[1][0].flush("t", 1)["payloads"] == 1


def test_ending_a_transfer_stops_its_relays_at_once() -> None:
    gate = Gate()
    with fleet([Recorder(), gate]) as members:
        enter(members[0][1], [b"payload"])
        assert gate.entered.wait(WAIT_S)
        assert threads_named(RELAYS)
        members[0][0].end("t")
        assert eventually(lambda: not threads_named(RELAYS), timeout_s=1)
        gate.opened.set()


def test_two_workers_that_relay_to_each_other_do_not_wait_for_each_other() -> None:
    """Every payload takes both ways through narrow queues: what waits must follow one tree only."""

    def slow(_body: bytes, _metadata: Mapping[str, Any]) -> dict[str, Any]:
        time.sleep(0.002)
        return {}

    with fleet(
        [slow] * 3, fanout=1, queue_depth=1, staging_threads=1, relay_queue_depth=1
    ) as members:
        sending = [
            Background(
                lambda p=p: enter(members[p % 3][1], [bytes([n]) for n in range(60)], producer_id=p)
            )
            for p in range(6)
        ]
        for background in sending:
            background.result()
        for server, _ in members:
            server.flush("t", 360)


# --- limits --------------------------------------------------------------------------------------


def test_bytes_that_wait_to_be_forwarded_are_limited() -> None:
    gate = Gate()
    limits: dict[str, Any] = {"max_relay_bytes": 2500, "relay_queue_depth": 10}
    with fleet([Recorder(), gate], **limits) as members:
        with pytest.raises(PayloadRejectedError, match="max_relay_bytes=2500"):
            enter(members[0][1], [bytes([n]) * 1000 for n in range(5)])
        gate.opened.set()
        with pytest.raises(TransportError, match="2 of 3 payloads"):
            members[0][0].flush("t", 3, timeout_s=0.2)
        with client_of(members[0][1]) as client:  # what was refused may be sent again
            send(client, bytes([2]) * 1000, payload_id=2, relay_root=members[0][1])
        assert members[0][0].flush("t", 3)["payloads"] == 3


def test_unanswered_messages_of_a_peer_are_limited() -> None:
    gate = Gate()
    with (
        serving(gate, peer_queue_depth=2, queue_depth=10) as (server, address),
        raw_dealer(address) as greedy,
        raw_dealer(address) as modest,
    ):
        for payload_id in range(3):
            greedy.send(request(request_id=bytes([payload_id]), payload_id=payload_id))
        kind, request_id, reason = greedy.receive()
        assert (kind, request_id) == (NACK, b"\2")
        assert b"peer_queue_depth=2" in reason
        modest.send(request(request_id=b"m", payload_id=7))
        assert eventually(lambda: server.status()["payloads_received"] == 3)
        assert server.status()["peers"] == 2
        gate.opened.set()
        assert {greedy.receive()[0], modest.receive()[0]} == {ACK}
        assert greedy.receive()[0] == ACK
        assert eventually(lambda: server.status()["peers"] == 0)


def test_peers_are_limited() -> None:
    gate = Gate()
    with (
        serving(gate, max_peers=1) as (server, address),
        raw_dealer(address) as first,
        raw_dealer(address) as second,
    ):
        first.send(request(request_id=b"1"))
        assert eventually(lambda: server.status()["payloads_received"] == 1)
        second.send(request(request_id=b"2"))
        kind, _, reason = second.receive()
        assert kind == NACK
        assert b"max_peers=1" in reason
        gate.opened.set()
        assert first.receive()[0] == ACK
        second.send(request(request_id=b"2"))
        assert second.receive()[0] == ACK


# --- status --------------------------------------------------------------------------------------


def test_the_status_is_told_to_those_who_hold_the_key() -> None:
    with fleet([Recorder(), Recorder()], api_key=b"secret") as members:
        root = members[0][1]
        with client_of(root, api_key=b"secret") as client:
            send(client, relay_root=root)
            members[0][0].flush("t", 1)
            status = client.status("t")["server"]
            assert client.status("other")["server"]["transfer"] is None
        assert status["transfer"] == {
            "payloads": 1,
            "producers": {"0": 1},
            "under_way": 0,
            "forwarding": 0,
            "failure": None,
        }
        assert status["relays"][0]["child"] == members[1][1]
        for key in (None, b"guess"):
            with client_of(root, api_key=key) as client, pytest.raises(AuthenticationError):
                client.status()


def test_the_status_is_told_while_all_threads_are_busy() -> None:
    gate = Gate()
    with (
        serving(gate, staging_threads=1, queue_depth=2) as (server, address),
        raw_dealer(address) as peer,
        client_of(address) as client,
    ):
        peer.send(request())
        assert gate.entered.wait(WAIT_S)
        assert client.status("t")["server"]["transfer"]["under_way"] == 1
        assert server.status()["payloads_received"] == 1
        gate.opened.set()


# --- settings ------------------------------------------------------------------------------------


def test_the_tree_needs_this_servers_address() -> None:
    with serving(Recorder()) as (server, address):
        server.configure_tree([], own_address=address)
        with pytest.raises(ConfigError, match="is not this server's"):
            server.configure_tree([], own_address="tcp://127.0.0.1:9")
        with pytest.raises(ConfigError, match="not in the relay tree"):
            server.configure_tree(["tcp://127.0.0.1:9"], own_address=address)


def test_an_advertised_host_replaces_the_wildcard() -> None:
    options: dict[str, Any] = {"bind_address": "tcp://0.0.0.0:*", "api_key": b"secret"}
    with (
        serving(Recorder(), advertised_host="localhost", **options) as (one, address),
        serving(Recorder(), transfer_id=None, **options) as (other, wildcard),
    ):
        assert address.startswith("tcp://localhost:")
        enter(address, [b"payload"], api_key=b"secret")
        one.flush("t", 1)
        with pytest.raises(ConfigError, match="advertised_host"):
            other.configure_tree([address, wildcard], own_address=wildcard)


def test_closing_a_relay_in_the_middle_ends_its_threads() -> None:
    gate = Gate()
    with fleet([Recorder(), gate]) as members:
        enter(members[0][1], [b"payload"])
        assert gate.entered.wait(WAIT_S)
        closed = threading.Event()
        Background(lambda: (members[0][0].close(), closed.set()))
        assert closed.wait(3)
        assert not threads_named(RELAYS)
        gate.opened.set()


def test_what_failed_here_is_never_staged_again() -> None:
    """A payload that was staged but not forwarded is refused, and so is its repeat."""
    staged = Recorder()
    limits: dict[str, Any] = {"relay_timeout_s": 0.2, "relay_retries": 0}
    with fleet([staged, Recorder()], **limits) as members:
        members[1][0].close()
        with client_of(members[0][1]) as client:
            send(client, relay_root=members[0][1])
            assert eventually(
                lambda: client.status("t")["server"]["transfer"]["failure"] is not None
            )
            for payload_id in (0, 0, 1, 1):
                with pytest.raises(PayloadRejectedError, match="could not forward"):
                    send(client, payload_id=payload_id, relay_root=members[0][1])
    assert len(staged.bodies) == 1


def test_an_address_that_is_none_fails_the_transfer_at_once() -> None:
    staged = Recorder()
    with serving(staged, transfer_id=None) as (server, address):
        server.configure_tree([address, "udp://nowhere:1"], own_address=address)
        server.open("t", 1)
        with pytest.raises(PayloadRejectedError, match="cannot connect to 'udp://nowhere:1'"):
            enter(address, [bytes([n]) for n in range(5)])
        with pytest.raises(TransportError, match="cannot connect"):
            server.flush("t", 1)
        assert len({metadata["payload_id"] for _, metadata in staged.calls}) == len(staged.calls)
