"""What is fuzzed: each target takes any bytes, and only the errors that it documents may come out."""

import contextlib
import struct
from collections.abc import Callable, Iterator

import torch
import zmq

from tests.codec.crafted import plain, seal
from vllm_sparse_refit.checksum import checksum_hex
from vllm_sparse_refit.codec.delta import Chunk, SparseOperation, make_delta
from vllm_sparse_refit.codec.payload import DecodeLimits, decode_payload, encode_payload
from vllm_sparse_refit.config import WorkerConfig
from vllm_sparse_refit.errors import PayloadError
from vllm_sparse_refit.transport.protocol import (
    ACK,
    DATA,
    NACK,
    PayloadMetadata,
    StatusQuery,
    ack_bytes,
    nack_bytes,
    parse_reply,
)
from vllm_sparse_refit.transport.server import ZmqSparseRefitServer

LIMITS = DecodeLimits(max_payload_bytes=1 << 16, max_decoded_bytes=1 << 20)

Target = Callable[[bytes], None]


def decode(data: bytes) -> None:
    """A payload's bytes as they come."""
    with contextlib.suppress(PayloadError):
        _check(decode_payload(data, LIMITS))


def decode_checksummed(data: bytes) -> None:
    """The same with sizes and checksum put right, so that what is behind them is reached."""
    decode(repaired(data))


_PRELUDE, _ENTRY = 48, 24


def repaired(data: bytes) -> bytes:
    """The data with the sizes of its sections, the last one taking the rest, and the checksum put right."""
    if len(data) < _PRELUDE + _ENTRY:
        return data
    made = bytearray(data)
    (sections,) = struct.unpack_from("<I", made, 28)
    begin = _PRELUDE + _ENTRY * sections
    if not 0 < sections <= 32 or begin > len(made):
        return seal(data)
    entries = range(_PRELUDE, begin, _ENTRY)
    left = len(made) - begin
    for at in entries:
        (stored,) = struct.unpack_from("<Q", made, at + 16)
        stored = left if at == entries[-1] else min(stored, left)
        struct.pack_into("<Q", made, at + 16, stored)
        if made[at + 1] == 0:  # stored as it is
            struct.pack_into("<Q", made, at + 8, stored)
        left -= stored
    struct.pack_into("<Q", made, 40, len(made) - begin)
    return seal(bytes(made))


def _check(deltas: object) -> None:
    assert isinstance(deltas, list)
    for delta in deltas:
        count = len(delta.locations)
        assert 1 <= count == delta.values.numel() <= LIMITS.max_decoded_bytes
        ends = (int(delta.locations[0]), int(delta.locations[-1]))
        assert delta.begin <= ends[0] <= ends[1] < delta.end
        assert delta.prior is None or delta.operation is not SparseOperation.OVERWRITE


def metadata(data: bytes) -> None:
    """A metadata frame of a payload, of a status query, and a reply."""
    for read in (PayloadMetadata.from_bytes, StatusQuery.from_bytes, parse_reply):
        with contextlib.suppress(PayloadError):
            read(data)


class LiveServer:
    """Messages to a running server, which must answer a good one after every bad one."""

    def __init__(self) -> None:
        self.staged = 0
        config = WorkerConfig(max_payload_bytes=1 << 16, timeout_s=1.0)
        self._server = ZmqSparseRefitServer(self._stage, config=config, api_key=None)
        self._address = self._server.start()
        self._server.open("t", 1)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._connect()

    def _connect(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(self._address)

    def _stage(self, body: bytes, _metadata: object) -> dict[str, int]:
        self.staged += len(decode_payload(body, LIMITS))
        return {}

    def message(self, data: bytes) -> None:
        """Frames whose sizes the data itself tells, then a status query, which must be answered."""
        self._socket.send_multipart(list(_frames(data)))
        query = StatusQuery().to_bytes()
        self._socket.send_multipart([b"STAT", b"fuzz-status", query, b"", b""])
        while True:
            assert self._socket.poll(10_000), "the server no longer answers"
            kind, request_id, _ = self._socket.recv_multipart()
            assert kind in (ACK, NACK)
            if request_id == b"fuzz-status":
                return

    def close(self) -> None:
        self._context.destroy(linger=0)
        self._server.close()


def _frames(data: bytes) -> Iterator[bytes]:
    while True:
        size = data[0] * 4 if data else 0
        yield data[1 : 1 + size]
        data = data[1 + size :]
        if not data:
            return


_LONGEST = 4 * 255  # of a frame


def framed(*frames: bytes) -> bytes:
    """Data that :meth:`LiveServer.message` takes for these frames, padded to whole sizes."""
    return b"".join(
        bytes([(len(frame) + 3) // 4]) + frame + b" " * (-len(frame) % 4) for frame in frames
    )


def metadata_of(body: bytes) -> bytes:
    """The metadata frame of a payload of the open transfer."""
    return PayloadMetadata(
        transfer_id="t",
        sequence=1,
        producer_id=0,
        payload_id=0,
        checksum=checksum_hex(body),
        verification_candidates=0,
    ).to_bytes()


GOOD_METADATA = metadata_of(b"")


def seeds(target: str) -> list[bytes]:
    """Good inputs of a target to start from."""
    queries = [StatusQuery().to_bytes(), StatusQuery(transfer_id="t").to_bytes()]
    if target == "metadata":
        reply = ack_bytes({"transfer_id": "t", "duplicate": False, "result": {}})
        return [GOOD_METADATA, *queries, reply, nack_bytes(PayloadError("no"))]
    if target == "message":
        bodies = [payload[: len(payload) & ~3][:_LONGEST] for payload in corpus()]
        payloads = [framed(DATA, b"1234", metadata_of(body), b"", body) for body in bodies]
        return payloads + [framed(b"STAT", b"1234", query, b"", b"") for query in queries]
    return corpus()


def corpus() -> list[bytes]:
    """Good payloads to start from, with digests of old bits in all but those that overwrite."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for dtype, operation in (
        (torch.int16, SparseOperation.XOR),
        (torch.bfloat16, SparseOperation.OVERWRITE),
        (torch.int8, SparseOperation.XOR),
        (torch.bfloat16, SparseOperation.ADD),
    ):
        size = 600
        old = torch.randint(0, 99, (size,), generator=generator).to(torch.int16)
        if dtype.itemsize == 1:
            old = old.to(torch.uint8)
        new = old.clone()
        new[torch.rand(size, generator=generator) < 0.1] ^= 3
        delta = make_delta(Chunk("layer.weight", (20, 30), dtype, operation, 0, old, new))
        assert delta is not None
        payload = encode_payload([delta])
        found += [payload, plain(payload)]
    return found
