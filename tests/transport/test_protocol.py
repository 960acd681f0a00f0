"""Frames, metadata and authentication, without sockets."""

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transport.helpers import request
from vllm_sparse_refit.errors import AuthenticationError, ConfigError, PayloadError
from vllm_sparse_refit.transport.endpoint import is_loopback
from vllm_sparse_refit.transport.protocol import (
    MAX_REPLY_BYTES,
    PROTOCOL,
    PayloadMetadata,
    ack_bytes,
    authenticate,
    check_key,
    nack_bytes,
    parse_reply,
    parse_request_head,
)

GOOD: dict[str, Any] = {
    "transfer_id": "step-7",
    "sequence": 3,
    "producer_id": 1,
    "payload_id": 2,
    "checksum": "0123456789abcdef" * 2,
    "verification_candidates": 64,
    "relay_root": None,
}

printable = st.text(min_size=1, max_size=128).filter(str.isprintable)
counts = st.integers(0, 2**63 - 1)


@given(
    printable, counts, counts, counts, st.binary(min_size=16, max_size=16), st.none() | printable
)
def test_metadata_survives_the_wire(
    transfer_id: str,
    sequence: int,
    producer_id: int,
    payload_id: int,
    checksum: bytes,
    relay_root: str | None,
) -> None:
    metadata = PayloadMetadata(
        transfer_id=transfer_id,
        sequence=sequence,
        producer_id=producer_id,
        payload_id=payload_id,
        checksum=checksum.hex(),
        verification_candidates=0,
        relay_root=relay_root,
    )
    assert PayloadMetadata.from_bytes(metadata.to_bytes()) == metadata


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("transfer_id", ""),
        ("transfer_id", "x" * 129),
        ("transfer_id", "two\nlines"),
        ("transfer_id", 7),
        ("transfer_id", "\ud800"),
        ("sequence", -1),
        ("producer_id", -1),
        ("producer_id", True),
        ("producer_id", 1.0),
        ("payload_id", 2**63),
        ("payload_id", "0"),
        ("verification_candidates", None),
        ("checksum", "0" * 31),
        ("checksum", "0" * 31 + "G"),
        ("checksum", "A" * 32),
        ("checksum", "0" * 32 + "\n"),
        ("checksum", 0),
        ("relay_root", ""),
    ],
)
def test_bad_fields_are_refused_by_name(field: str, value: object) -> None:
    data = json.dumps({"protocol": PROTOCOL, **GOOD, field: value}).encode()
    with pytest.raises(PayloadError, match=field):
        PayloadMetadata.from_bytes(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"[" * 4096,
        b'{"protocol":' + b"1" * 4000 + b"}",
        b"x" * 4097,
    ],
)
def test_garbage_is_no_metadata(data: bytes) -> None:
    with pytest.raises(PayloadError):
        PayloadMetadata.from_bytes(data)


@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_else(data: bytes) -> None:
    with pytest.raises(PayloadError):
        PayloadMetadata.from_bytes(data)


def test_another_protocol_is_refused_by_name() -> None:
    data = json.dumps({**GOOD, "protocol": "vllm-sparse-refit/1"}).encode()
    with pytest.raises(PayloadError, match=r"vllm-sparse-refit/1.*vllm-sparse-refit/2"):
        PayloadMetadata.from_bytes(data)


def test_missing_and_unknown_fields_are_named() -> None:
    fields = {"protocol": PROTOCOL, **GOOD, "surplus": 1}
    del fields["checksum"]
    with pytest.raises(PayloadError, match=r"lacks \['checksum'\].*\['surplus'\]"):
        PayloadMetadata.from_bytes(json.dumps(fields).encode())


def test_a_huge_value_does_not_make_a_huge_message() -> None:
    with pytest.raises(PayloadError) as caught:
        PayloadMetadata(**{**GOOD, "transfer_id": "y" * 100_000})
    assert len(str(caught.value)) < 300


def head_of(frames: list[bytes]) -> Any:
    return parse_request_head(frames[:-1])


def test_the_right_key_is_accepted() -> None:
    frames = request(b"body", api_key=b"secret")
    authenticate(b"secret", head_of(frames), b"body")
    authenticate(None, head_of(request(b"body")), b"body")


@pytest.mark.parametrize(
    ("sender", "worker", "reason"),
    [
        (None, b"secret", "needs a key"),
        (b"secret", None, "no key set"),
        (b"other", b"secret", "is not this worker's key"),
    ],
)
def test_a_missing_or_wrong_key_is_told_apart(
    sender: bytes | None, worker: bytes | None, reason: str
) -> None:
    frames = request(b"body", api_key=sender)
    with pytest.raises(AuthenticationError, match=reason) as caught:
        authenticate(worker, head_of(frames), b"body")
    assert "secret" not in str(caught.value)


def test_the_mac_covers_metadata_and_body() -> None:
    head = head_of(request(b"body", api_key=b"secret"))
    other = head_of(request(b"body", api_key=b"secret", payload_id=1))
    with pytest.raises(AuthenticationError):
        authenticate(b"secret", head, b"Body")
    with pytest.raises(AuthenticationError):
        authenticate(b"secret", dataclasses.replace(other, mac=head.mac), b"body")


def test_the_key_does_not_travel() -> None:
    assert all(b"secret-key" not in frame for frame in request(b"body", api_key=b"secret-key"))


def test_an_empty_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty"):
        check_key(b"")


@pytest.mark.parametrize("text", ["\x00" * 100_000, "\u2028" * 100_000, "\ud800" * 100_000])
def test_a_nack_always_fits_a_reply(text: str) -> None:
    data = nack_bytes(ValueError(text))
    assert len(data) <= MAX_REPLY_BYTES
    assert parse_reply(data)["error_type"] == "ValueError"


@pytest.mark.parametrize("result", [{"x": "y" * 100_000}, {"x": {1}}, {("a",): 1}])
def test_a_result_that_cannot_travel_is_left_out(result: dict[Any, Any]) -> None:
    assert parse_reply(ack_bytes({"payload_id": 3, "result": result})) == {
        "payload_id": 3,
        "result": {},
    }


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("tcp://127.0.0.1:*", True),
        ("tcp://127.9.8.7:5000", True),
        ("tcp://localhost:5000", True),
        ("tcp://[::1]:5000", True),
        ("ipc:///tmp/socket", True),
        ("inproc://name", True),
        ("tcp://*:5000", False),
        ("tcp://0.0.0.0:5000", False),
        ("tcp://[::]:5000", False),
        ("tcp://eth0:5000", False),
        ("tcp://10.0.0.5:*", False),
        ("tcp://127.0.0.1.example.com:5000", False),
        ("tcp://localhost.example.com:5000", False),
    ],
)
def test_loopback(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback


@pytest.mark.parametrize("address", ["", "127.0.0.1:5000", "udp://127.0.0.1:1", "tcp://127.0.0.1"])
def test_no_endpoint(address: str) -> None:
    with pytest.raises(ConfigError, match="no ZeroMQ endpoint"):
        is_loopback(address)
