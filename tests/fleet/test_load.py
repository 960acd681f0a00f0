"""Many servers at once: all are reached, and none holds more than its limits say."""

import threading
import time
from collections.abc import Mapping
from typing import Any

from tests.transport.helpers import client_of, fleet, send, threads_named
from vllm_sparse_refit.transport.monitor import FleetMonitor

SERVERS = 64
PAYLOADS = 24
SIZE = 1 << 16


class Counting:
    """A staging that counts what is held in the process at once: slow, so that payloads pile up."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.staged = 0

    def __call__(self, body: bytes, _metadata: Mapping[str, Any]) -> dict[str, Any]:
        time.sleep(0.001)
        with self.lock:
            self.staged += 1
        return {}


def test_sixty_four_servers_within_their_limits() -> None:
    stagings = [Counting() for _ in range(SERVERS)]
    limits: dict[str, Any] = {"queue_depth": 2, "staging_threads": 1, "relay_queue_depth": 2}
    with fleet(stagings, **limits) as members:
        root = members[0][1]
        most_queued = most_waiting = 0
        watching = threading.Event()

        def watch() -> None:
            nonlocal most_queued, most_waiting
            while not watching.wait(0.02):
                for server, _ in members:
                    status = server.status()
                    queued = [lane["queued"] for lane in status["relays"]]
                    most_queued = max([most_queued, *queued])
                    most_waiting = max(most_waiting, server._intake._relay._bytes)

        watcher = threading.Thread(target=watch)
        watcher.start()
        with client_of(root) as client, FleetMonitor([a for _, a in members]) as monitor:
            for payload_id in range(PAYLOADS):
                body = payload_id.to_bytes(4, "big") * (SIZE // 4)
                send(client, body, payload_id=payload_id, relay_root=root)
            monitor.await_staged("t", {"0": PAYLOADS}, stall_s=30)
        watching.set()
        watcher.join()
        for server, _ in members:
            assert server.flush("t", PAYLOADS)["payloads"] == PAYLOADS
            assert server.status()["payloads_received"] == PAYLOADS
    assert {staging.staged for staging in stagings} == {PAYLOADS}
    # Two in each lane, and one whose sender waits for its acknowledgement.
    assert 0 < most_queued <= limits["relay_queue_depth"] + 1
    assert 0 < most_waiting <= 2 * (limits["relay_queue_depth"] + 1) * SIZE
    assert not threads_named("sparse-refit")
