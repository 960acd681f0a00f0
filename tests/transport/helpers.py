"""Servers, clients and raw sockets for tests that talk over loopback."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import zmq

from vllm_sparse_refit.checksum import checksum_hex
from vllm_sparse_refit.config import WorkerConfig
from vllm_sparse_refit.transport.client import ZmqSparseRefitClient
from vllm_sparse_refit.transport.curve import CurveServerKeys
from vllm_sparse_refit.transport.protocol import DATA, PayloadMetadata, sign
from vllm_sparse_refit.transport.server import ApplyPayload, ZmqSparseRefitServer

WAIT_S = 10.0


class Recorder:
    """An ``apply_payload`` that remembers what it was given."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.calls: list[tuple[bytes, dict[str, Any]]] = []

    def __call__(self, body: bytes, metadata: Mapping[str, Any]) -> dict[str, Any]:
        with self.lock:
            self.calls.append((body, dict(metadata)))
        return {"size": len(body)}

    @property
    def bodies(self) -> list[bytes]:
        with self.lock:
            return [body for body, _ in self.calls]


class Gate(Recorder):
    """A recorder that holds each payload until ``opened`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self, body: bytes, metadata: Mapping[str, Any]) -> dict[str, Any]:
        result = super().__call__(body, metadata)
        self.entered.set()
        assert self.opened.wait(WAIT_S)
        return result


@contextlib.contextmanager
def serving(
    apply_payload: ApplyPayload,
    *,
    api_key: bytes | None = None,
    curve: CurveServerKeys | None = None,
    transfer_id: str | None = "t",
    **config: Any,
) -> Iterator[tuple[ZmqSparseRefitServer, str]]:
    """A started server on which transfer ``transfer_id`` was opened with sequence number 1."""
    server = ZmqSparseRefitServer(
        apply_payload,
        config=WorkerConfig(**{"timeout_s": WAIT_S, **config}),
        api_key=api_key,
        curve=curve,
    )
    try:
        address = server.start()
        if transfer_id is not None:
            server.open(transfer_id, 1)
        yield server, address
    finally:
        server.close()


@contextlib.contextmanager
def fleet(
    stagings: Sequence[ApplyPayload], *, fanout: int = 2, **config: Any
) -> Iterator[list[tuple[ZmqSparseRefitServer, str]]]:
    """Started servers, joined to a tree, on which transfer "t" was opened with sequence number 1."""
    with contextlib.ExitStack() as stack:
        members = [
            stack.enter_context(serving(staging, transfer_id=None, **config))
            for staging in stagings
        ]
        plant(members, fanout=fanout)
        yield members


def plant(
    members: Sequence[tuple[ZmqSparseRefitServer, str]],
    *,
    fanout: int = 2,
    transfer_id: str = "t",
    sequence: int = 1,
) -> None:
    """Join servers to a tree and open a transfer on all of them."""
    addresses = [address for _, address in members]
    for server, address in members:
        server.configure_tree(addresses, own_address=address, fanout=fanout)
        server.open(transfer_id, sequence)


@contextlib.contextmanager
def client_of(address: str, **options: Any) -> Iterator[ZmqSparseRefitClient]:
    client = ZmqSparseRefitClient(
        address, **{"timeout_s": WAIT_S, "producer_id": 0, "retries": 0, **options}
    )
    with contextlib.closing(client):
        yield client


def send(
    client: ZmqSparseRefitClient,
    body: bytes = b"payload",
    *,
    transfer_id: str = "t",
    payload_id: int = 0,
    **options: Any,
) -> dict[str, Any]:
    return client.send_payload(
        transfer_id=transfer_id,
        payload_id=payload_id,
        sequence=options.pop("sequence", 1),
        checksum=options.pop("checksum", checksum_hex(body)),
        verification_candidates=3,
        body=body,
        **options,
    )


def request(
    body: bytes = b"payload",
    *,
    request_id: bytes = b"12345678",
    api_key: bytes | None = None,
    **fields: Any,
) -> list[bytes]:
    """The frames of a well-formed request."""
    metadata = PayloadMetadata(
        **{
            "transfer_id": "t",
            "sequence": 1,
            "producer_id": 0,
            "payload_id": 0,
            "checksum": checksum_hex(body),
            "verification_candidates": 3,
            **fields,
        }
    ).to_bytes()
    return [DATA, request_id, metadata, sign(api_key, metadata, body), body]


class RawPeer:
    """A bare socket, to send what a client never would, or to answer as no server does."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket

    def send(self, frames: Sequence[bytes]) -> None:
        self.socket.send_multipart(frames)

    def receive(self) -> list[bytes]:
        assert self.socket.poll(int(WAIT_S * 1000)), "nothing arrived"
        return self.socket.recv_multipart()


@contextlib.contextmanager
def raw_dealer(address: str) -> Iterator[RawPeer]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        yield RawPeer(socket)


@contextlib.contextmanager
def raw_router() -> Iterator[tuple[RawPeer, str]]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        yield RawPeer(socket), f"tcp://127.0.0.1:{port}"


class Background:
    """A call in a thread; ``result()`` returns or raises what it did."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._outcome: list[Any] = []
        self._error: list[BaseException] = []
        self.thread = threading.Thread(target=self._run, args=(call,), name="test-background")
        self.thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self._outcome.append(call())
        except BaseException as error:
            self._error.append(error)

    def result(self) -> Any:
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive(), "the call did not end"
        if self._error:
            raise self._error[0]
        return self._outcome[0]


def eventually(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> bool:
    """Whether ``condition`` comes true in time; asked often, since nothing announces it."""
    deadline = time.monotonic() + timeout_s
    never = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            return False
        never.wait(0.005)
    return True


def threads_named(prefix: str) -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(prefix)]
