"""Encrypted connections: who may connect, what passes in the clear, and where keys may appear."""

import logging
import stat
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.transport.helpers import (
    Recorder,
    client_of,
    eventually,
    fleet,
    raw_dealer,
    request,
    send,
    serving,
    threads_named,
)
from vllm_sparse_refit.cli import main
from vllm_sparse_refit.errors import ConfigError, TransportTimeoutError
from vllm_sparse_refit.transport.curve import (
    CurveClientKeys,
    CurveServerKeys,
    generate_keys,
    read_client_keys,
    read_server_keys,
)
from vllm_sparse_refit.transport.monitor import FleetMonitor


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A folder with the pairs of workers, trainer and a stranger, and an allow-list."""
    for name in ("workers", "trainer", "stranger"):
        generate_keys(tmp_path, name)
    (tmp_path / "clients").mkdir()
    (tmp_path / "clients" / "trainer.key").write_bytes((tmp_path / "trainer.key").read_bytes())
    return tmp_path


def server_keys(keys: Path) -> CurveServerKeys:
    found = read_server_keys(keys / "workers.key_secret", keys / "clients")
    assert found is not None
    return found


def client_keys(keys: Path, name: str = "trainer", server: str = "workers") -> CurveClientKeys:
    found = read_client_keys(keys / f"{name}.key_secret", keys / f"{server}.key")
    assert found is not None
    return found


@pytest.mark.parametrize("api_key", [None, b"secret"])
def test_payloads_are_relayed_and_acknowledged(keys: Path, api_key: bytes | None) -> None:
    received = [Recorder() for _ in range(3)]
    ours = client_keys(keys)
    with fleet(received, curve=server_keys(keys), api_key=api_key) as members:
        root = members[0][1]
        with client_of(root, curve=ours, api_key=api_key) as client:
            for payload_id in range(5):
                send(client, bytes([payload_id]), payload_id=payload_id, relay_root=root)
            assert client.status("t")["server"]["transfer"]["payloads"] == 5
        addresses = [address for _, address in members]
        with FleetMonitor(addresses, api_key=api_key, curve=ours) as monitor:
            monitor.await_staged("t", {"0": 5}, stall_s=5)
    assert all(len(recorder.bodies) == 5 for recorder in received)
    assert not threads_named("sparse-refit")


@pytest.mark.parametrize(
    ("name", "server"), [("stranger", "workers"), ("trainer", "stranger"), ("workers", "trainer")]
)
def test_wrong_keys_are_never_answered(keys: Path, name: str, server: str) -> None:
    staged = Recorder()
    with serving(staged, curve=server_keys(keys)) as (served, address):
        wrong = client_keys(keys, name, server)
        with (
            client_of(address, curve=wrong, timeout_s=0.5) as client,
            pytest.raises(TransportTimeoutError, match="CURVE key and its allow-list"),
        ):
            send(client)
        assert served.status()["payloads_received"] == 0
        with client_of(address, curve=client_keys(keys)) as client:
            send(client)
    assert len(staged.calls) == 1


def test_a_plain_peer_is_never_answered(keys: Path) -> None:
    staged = Recorder()
    with serving(staged, curve=server_keys(keys)) as (served, address):
        with raw_dealer(address) as peer:
            peer.send(request())
            assert not peer.socket.poll(300)
        with (
            client_of(address, timeout_s=0.3) as client,
            pytest.raises(TransportTimeoutError, match="does not ask for CURVE"),
        ):
            send(client)
        assert served.status()["payloads_received"] == 0
    assert not staged.calls


def test_a_plain_worker_gets_nothing_from_an_encrypted_client(keys: Path) -> None:
    with (
        serving(Recorder()) as (served, address),
        client_of(address, curve=client_keys(keys), timeout_s=0.3) as client,
    ):
        with pytest.raises(TransportTimeoutError):
            send(client)
        assert served.status()["payloads_received"] == 0


def test_nothing_passes_in_the_clear(keys: Path) -> None:
    """A proxy between client and worker sees neither bodies nor metadata."""
    import socket
    import threading

    seen = bytearray()
    body = b"these are the weights " * 50
    with serving(Recorder(), curve=server_keys(keys)) as (_, address):
        port = int(address.rpartition(":")[2])
        listener = socket.create_server(("127.0.0.1", 0))

        def copy(source: socket.socket, sink: socket.socket) -> None:
            while data := source.recv(65536):
                seen.extend(data)
                sink.sendall(data)
            sink.close()

        def relay() -> None:
            near, _ = listener.accept()
            far = socket.create_connection(("127.0.0.1", port))
            threading.Thread(target=copy, args=(near, far), daemon=True).start()
            threading.Thread(target=copy, args=(far, near), daemon=True).start()

        threading.Thread(target=relay, daemon=True).start()
        proxied = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        with client_of(proxied, curve=client_keys(keys)) as client:
            send(client, body, transfer_id="t")
        listener.close()
    assert len(seen) > len(body)
    assert b"these are the weights" not in seen
    assert b"transfer_id" not in seen


def test_off_loopback_curve_is_a_key(keys: Path) -> None:
    with serving(Recorder(), curve=server_keys(keys), bind_address="tcp://0.0.0.0:*") as (
        _,
        address,
    ):
        port = address.rpartition(":")[2]
        with client_of(f"tcp://127.0.0.1:{port}", curve=client_keys(keys)) as client:
            send(client)


def test_off_loopback_without_a_key_must_be_asked_for() -> None:
    with serving(Recorder(), bind_address="tcp://0.0.0.0:*", allow_unauthenticated=True) as (
        _,
        address,
    ):
        assert address.startswith("tcp://0.0.0.0:")


# --- key files -----------------------------------------------------------------------------------


def test_the_command_makes_a_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keygen", str(tmp_path / "keys"), "workers"]) == 0
    secret = tmp_path / "keys" / "workers.key_secret"
    assert str(secret) in capsys.readouterr().out
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert b"secret-key" not in (tmp_path / "keys" / "workers.key").read_bytes()
    before = secret.read_bytes()
    assert main(["keygen", str(tmp_path / "keys"), "workers"]) == 1
    assert "exists already" in capsys.readouterr().err
    assert secret.read_bytes() == before
    assert main(["keygen", str(tmp_path / "keys"), "../workers"]) == 1


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (("trainer.key", "workers.key"), "no secret key"),
        (("nothing", "workers.key"), "no key file"),
        (("trainer.key_secret", "nothing"), "no key file"),
        (("trainer.key_secret", None), "needs both"),
        ((None, "workers.key"), "needs both"),
    ],
)
def test_bad_client_files_are_named(keys: Path, settings: Any, reason: str) -> None:
    files = [None if name is None else keys / name for name in settings]
    with pytest.raises(ConfigError, match=reason):
        read_client_keys(*files)


def test_bad_server_files_are_named(keys: Path) -> None:
    (keys / "nobody").mkdir()
    with pytest.raises(ConfigError, match="nobody could connect"):
        read_server_keys(keys / "workers.key_secret", keys / "nobody")
    with pytest.raises(ConfigError, match="needs both"):
        read_server_keys(keys / "workers.key_secret", None)
    (keys / "clients" / "bad.key").write_text("secret-key = 'abcdefgh'")
    with pytest.raises(ConfigError, match=r"bad\.key' is no key file") as caught:
        read_server_keys(keys / "workers.key_secret", keys / "clients")
    assert "abcdefgh" not in str(caught.value)


def test_keys_do_not_appear_anywhere(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    ours, theirs = client_keys(keys), server_keys(keys)
    secrets = [ours.secret.decode(), theirs.secret.decode()]
    with (
        serving(Recorder(), curve=theirs) as (server, address),
        client_of(address, curve=ours) as client,
    ):
        send(client)
        texts = [repr(each) for each in (ours, theirs, theirs.as_relay, client, server)]
        texts += [str(server.status()), caplog.text]
    assert not any(secret in text for secret in secrets for text in texts)


def test_closing_ends_the_authenticator(keys: Path) -> None:
    before = zmq.Context.instance()
    with serving(Recorder(), curve=server_keys(keys)) as (server, address):
        server.close()
        with serving(Recorder(), curve=server_keys(keys), bind_address=address):
            pass
    assert eventually(lambda: not threads_named("sparse-refit"))
    assert not before.closed
