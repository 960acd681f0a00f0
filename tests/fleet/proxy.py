"""A proxy in front of a worker's server that loses, delays, repeats, reorders and spoils messages."""

import threading
from random import Random
from typing import Any

import zmq

FAULTS = ("drop", "delay", "duplicate", "reorder", "corrupt", "drop reply", "duplicate reply")


class Proxy:
    """Passes whole messages between clients and one server, each client over a connection of its own.

    Args:
        target: the server's address.
        faults: which of ``FAULTS`` happen, each to ``rate`` of the messages.
    """

    def __init__(self, target: str, faults: tuple[str, ...], rate: float, seed: int) -> None:
        self.enabled = True
        self.counts = dict.fromkeys(faults, 0)
        self._target = target
        self._rate = rate
        self._random = Random(seed)
        self._context: zmq.Context[Any] = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.setsockopt(zmq.LINGER, 0)
        port = self._front.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self._backs: dict[bytes, Any] = {}
        self._held: list[tuple[bytes, list[bytes]]] = []  # requests that wait for a later one
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="test-proxy", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ending.set()
        self._thread.join(5)
        self._context.destroy(linger=0)

    def _strikes(self, fault: str) -> bool:
        if not self.enabled or fault not in self.counts or self._random.random() > self._rate:
            return False
        self.counts[fault] += 1
        return True

    def _run(self) -> None:
        while not self._ending.is_set():
            poller = zmq.Poller()
            poller.register(self._front, zmq.POLLIN)
            for back in self._backs.values():
                poller.register(back, zmq.POLLIN)
            ready = dict(poller.poll(20))
            if not ready and self._held:
                self._pass(*self._held.pop(0))
            if self._front in ready:
                identity, *frames = self._front.recv_multipart()
                self._request(identity, frames)
            for identity, back in self._backs.items():
                if back in ready:
                    self._reply(identity, back.recv_multipart())

    def _request(self, identity: bytes, frames: list[bytes]) -> None:
        if self._strikes("drop"):
            return
        if self._strikes("corrupt"):
            frames = self._spoiled(frames)
        if self._strikes("delay") or self._strikes("reorder"):
            self._held.append((identity, frames))
            return
        self._pass(identity, frames)
        if self._strikes("duplicate"):
            self._pass(identity, frames)

    def _spoiled(self, frames: list[bytes]) -> list[bytes]:
        """One bit of one frame flipped; the kind and the request id stay, so that it is answered."""
        index = self._random.choice([i for i in (2, 4) if frames[i]] or [2])
        data = bytearray(frames[index])
        data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        return [*frames[:index], bytes(data), *frames[index + 1 :]]

    def _pass(self, identity: bytes, frames: list[bytes]) -> None:
        if identity not in self._backs:
            back = self._backs[identity] = self._context.socket(zmq.DEALER)
            back.setsockopt(zmq.LINGER, 0)
            back.connect(self._target)
        self._backs[identity].send_multipart(frames)

    def _reply(self, identity: bytes, frames: list[bytes]) -> None:
        if self._strikes("drop reply"):
            return
        self._front.send_multipart([identity, *frames])
        if self._strikes("duplicate reply"):
            self._front.send_multipart([identity, *frames])
