"""What travels on the wire: frames, metadata and message authentication. Knows no sockets.

A request is five frames::

    DATA | request id | metadata (JSON) | mac | body
    STAT | request id | {"protocol", "transfer_id"} | mac | empty

and a reply is three::

    ACK or NACK | request id | JSON

A NACK's JSON is ``{"error": reason, "error_type": class name}``. The key never travels: ``mac`` is
HMAC-SHA256 over the metadata bytes followed by the body's SHA-256, and empty without a key.
"""

import contextlib
import dataclasses
import hashlib
import hmac
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from vllm_sparse_refit.errors import AuthenticationError, ConfigError, PayloadError

PROTOCOL: Final = "vllm-sparse-refit/2"

DATA: Final = b"DATA"
STAT: Final = b"STAT"
ACK: Final = b"ACK"
NACK: Final = b"NACK"

REQUEST_FRAMES: Final = 5
REPLY_FRAMES: Final = 3

MAC_BYTES: Final = 32
MAX_KIND_BYTES: Final = 8
MAX_REQUEST_ID_BYTES: Final = 16
MAX_METADATA_BYTES: Final = 4096
MAX_REPLY_BYTES: Final = 1 << 16

_MAX_TEXT: Final = 128
_MAX_ID: Final = (1 << 63) - 1
# At most six bytes of JSON a character (a control character), so a whole NACK fits a reply.
_MAX_REASON: Final = 8192
_CHECKSUM: Final = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, kw_only=True)
class PayloadMetadata:
    """What a sender says about one payload.

    Attributes:
        transfer_id: Names the transfer; printable, 1 to 128 characters.
        sequence: The number under which the transfer was begun; a worker's only grows.
        producer_id: Names the sending process within the transfer.
        payload_id: Names the payload within its producer; the three ids name it for good.
        checksum: xxh3-128 of the body, 32 lower-case hex digits.
        verification_candidates: Changed elements to read back per tensor after the commit.
        relay_root: Address of the worker at which the payload entered the relay tree; None for a payload
            that is not to be forwarded.

    Raises:
        PayloadError: a value has the wrong type or is out of range.
    """

    transfer_id: str
    sequence: int
    producer_id: int
    payload_id: int
    checksum: str
    verification_candidates: int
    relay_root: str | None = None

    def __post_init__(self) -> None:
        _require_text("transfer_id", self.transfer_id)
        for name in ("sequence", "producer_id", "payload_id", "verification_candidates"):
            _require_count(name, getattr(self, name))
        if not isinstance(self.checksum, str) or not _CHECKSUM.fullmatch(self.checksum):
            raise PayloadError(
                f"checksum must be 32 lower-case hex digits, not {_short(self.checksum)}"
            )
        if self.relay_root is not None:
            _require_text("relay_root", self.relay_root)

    def to_bytes(self) -> bytes:
        """The metadata frame; equal metadata gives equal bytes."""
        return _json_bytes({"protocol": PROTOCOL, **self.as_dict()})

    def as_dict(self) -> dict[str, Any]:
        """The fields, all of JSON types."""
        return dict(
            vars(self)
        )  # flat: dataclasses.asdict() would copy each value, for every payload

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a metadata frame.

        Raises:
            PayloadError: no JSON object, another protocol, or a missing, unknown or bad field.
        """
        fields = _protocol_fields(data)
        known = {field.name for field in dataclasses.fields(cls)}
        if fields.keys() != known:
            raise PayloadError(
                f"metadata lacks {sorted(known - fields.keys())} and has unknown fields "
                f"{_short(sorted(fields.keys() - known))}"
            )
        return cls(**fields)


@dataclass(frozen=True, kw_only=True)
class StatusQuery:
    """A question for a worker's status.

    Attributes:
        transfer_id: Transfer to report the progress of; None for none.
    """

    transfer_id: str | None = None

    def to_bytes(self) -> bytes:
        """The metadata frame."""
        return _json_bytes({"protocol": PROTOCOL, "transfer_id": self.transfer_id})

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a metadata frame.

        Raises:
            PayloadError: no JSON object, another protocol, or a missing, unknown or bad field.
        """
        fields = _protocol_fields(data)
        if fields.keys() != {"transfer_id"}:
            raise PayloadError(f"a status query has the field transfer_id, not {_short(fields)}")
        if fields["transfer_id"] is not None:
            _require_text("transfer_id", fields["transfer_id"])
        return cls(**fields)


@dataclass(frozen=True, kw_only=True)
class RequestHead:
    """A request without its body, validated but not yet authenticated."""

    request_id: bytes
    metadata: PayloadMetadata | StatusQuery
    metadata_bytes: bytes
    mac: bytes


def parse_request_head(frames: Sequence[bytes]) -> RequestHead:
    """Validate the four frames before the body.

    Raises:
        PayloadError: these are no frames of a request.
    """
    kind, request_id, metadata_bytes, mac = frames
    if kind not in (DATA, STAT):
        raise PayloadError(f"unknown message kind {_short(kind)}; expected {DATA!r} or {STAT!r}")
    if len(mac) not in (0, MAC_BYTES):
        raise PayloadError(f"a mac has {MAC_BYTES} bytes or none, not {len(mac)}")
    read = PayloadMetadata.from_bytes if kind == DATA else StatusQuery.from_bytes
    return RequestHead(
        request_id=request_id,
        metadata=read(metadata_bytes),
        metadata_bytes=metadata_bytes,
        mac=mac,
    )


def check_key(api_key: bytes | None) -> bytes | None:
    """``api_key`` itself.

    Raises:
        ConfigError: the key is empty, which would look like protection and give none.
    """
    if api_key is not None and not api_key:
        raise ConfigError(
            "the API key is empty; give a key of one byte or more, or None for no key"
        )
    return api_key


def sign(api_key: bytes | None, metadata_bytes: bytes, body: bytes) -> bytes:
    """The mac frame: 32 bytes, or none without a key."""
    if api_key is None:
        return b""
    signed = metadata_bytes + hashlib.sha256(body).digest()
    return hmac.digest(api_key, signed, "sha256")


def authenticate(api_key: bytes | None, head: RequestHead, body: bytes) -> None:
    """Check a request's mac against this worker's key.

    Raises:
        AuthenticationError: the key is missing on one side, or the keys differ.
    """
    if api_key is None:
        if head.mac:
            raise AuthenticationError(
                "the sender signed with a key but this worker has no key set; set "
                "sparse_refit.api_key_env_var for the worker, or send without a key"
            )
        return
    if not head.mac:
        raise AuthenticationError(
            "this worker needs a key and the sender used none; set api_key_env_var at the trainer "
            "to a variable that holds the worker's key"
        )
    if not hmac.compare_digest(sign(api_key, head.metadata_bytes, body), head.mac):
        raise AuthenticationError(
            "the sender's key is not this worker's key, or the message was altered on its way; "
            "give both sides the same key"
        )


def ack_bytes(reply: Mapping[str, Any]) -> bytes:
    """An ACK's JSON. A ``result`` that is too large for a reply, or no JSON, is left out."""
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        data = _json_bytes(reply)
        if len(data) <= MAX_REPLY_BYTES:
            return data
    return _json_bytes({**reply, "result": {}})


def nack_bytes(error: Exception) -> bytes:
    """A NACK's JSON."""
    reason = str(error)
    if len(reason) > _MAX_REASON:
        reason = reason[: _MAX_REASON - 4] + " ..."
    return _json_bytes({"error": reason, "error_type": type(error).__name__})


def parse_reply(data: bytes) -> dict[str, Any]:
    """A reply's JSON object.

    Raises:
        PayloadError: it is none.
    """
    return _json_object(data, "reply")


def _protocol_fields(data: bytes) -> dict[str, Any]:
    """The fields of a metadata frame of this protocol, less the protocol's name."""
    if len(data) > MAX_METADATA_BYTES:
        raise PayloadError(f"metadata of {len(data)} bytes; the limit is {MAX_METADATA_BYTES}")
    fields = _json_object(data, "metadata")
    protocol = fields.pop("protocol", None)
    if protocol != PROTOCOL:
        raise PayloadError(
            f"the sender speaks protocol {_short(protocol)} and this worker {PROTOCOL!r}; "
            "install the same version of vllm-sparse-refit on both sides"
        )
    return fields


def _require_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_TEXT or not value.isprintable():
        raise PayloadError(
            f"{name} must be 1 to {_MAX_TEXT} printable characters, not {_short(value)}"
        )


def _require_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_ID:
        raise PayloadError(
            f"{name} must be a whole number from 0 to {_MAX_ID}, not {_short(value)}"
        )


def _short(value: object) -> str:
    """A repr that cannot flood a log."""
    text = repr(value)
    return text if len(text) <= 80 else text[:76] + " ..."


def _json_bytes(value: Mapping[str, Any]) -> bytes:
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "replace")


def _json_object(data: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"{what} is no JSON: {type(error).__name__}") from error
    if not isinstance(value, dict):
        raise PayloadError(f"{what} must be a JSON object, not {type(value).__name__}")
    return value
