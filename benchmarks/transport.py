"""What the relay tree costs: against a raw ZeroMQ copy of the same bytes, and by fleet size and fan-out.

    python -m benchmarks.transport --json

On loopback; servers are threads of this process, for the load test processes. A server verifies each
payload's checksum, keeps count, and forwards; it decodes nothing, so that only the transport is measured. The
raw copy sends the same payloads over the same tree with bare PUSH and PULL sockets: no acknowledgements, no
checksums, no identities.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import resource
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import zmq

from vllm_sparse_refit.checksum import checksum_hex
from vllm_sparse_refit.config import MIB, WorkerConfig
from vllm_sparse_refit.transport.client import ZmqSparseRefitClient
from vllm_sparse_refit.transport.monitor import FleetMonitor
from vllm_sparse_refit.transport.server import ZmqSparseRefitServer
from vllm_sparse_refit.transport.tree import RelayTree

PAYLOAD_BYTES = 4 * MIB
STALL_S = 120.0


def discard(_body: bytes, _metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Stands for staging."""
    return {}


# --- this package ----------------------------------------------------------------------------------


@contextlib.contextmanager
def servers(count: int, fanout: int) -> Iterator[list[str]]:
    """Started servers that form a tree, with a transfer open; their addresses."""
    config = WorkerConfig(staging_threads=1, relay_timeout_s=STALL_S)
    with contextlib.ExitStack() as stack:
        made = [ZmqSparseRefitServer(discard, config=config, api_key=None) for _ in range(count)]
        for server in made:
            stack.callback(server.close)
        addresses = [server.start() for server in made]
        for server, address in zip(made, addresses, strict=True):
            server.configure_tree(addresses, own_address=address, fanout=fanout)
            server.open("bench", 1)
        yield addresses


def send_through_tree(addresses: Sequence[str], payloads: Sequence[bytes]) -> float:
    """Seconds until every server has every payload."""
    started = time.perf_counter()
    client = ZmqSparseRefitClient(addresses[0], timeout_s=STALL_S, producer_id=0, retries=0)
    with contextlib.closing(client), FleetMonitor(addresses) as monitor:
        for payload_id, body in enumerate(payloads):
            client.send_payload(
                transfer_id="bench",
                sequence=1,
                payload_id=payload_id,
                checksum=checksum_hex(body),
                verification_candidates=0,
                body=body,
                relay_root=addresses[0],
            )
        monitor.await_staged("bench", {"0": len(payloads)}, stall_s=STALL_S)
    return time.perf_counter() - started


def tree_seconds(count: int, fanout: int, payloads: Sequence[bytes]) -> float:
    """One run with fresh servers."""
    with servers(count, fanout) as addresses:
        return send_through_tree(addresses, payloads)


# --- the raw copy ----------------------------------------------------------------------------------


def raw_seconds(count: int, fanout: int, payloads: Sequence[bytes]) -> float:
    """The same payloads over the same tree with bare sockets."""
    context: zmq.Context[Any] = zmq.Context()
    inlets = [context.socket(zmq.PULL) for _ in range(count)]
    for inlet in inlets:
        inlet.setsockopt(zmq.RCVHWM, 2)
    ports = [inlet.bind_to_random_port("tcp://127.0.0.1") for inlet in inlets]
    addresses = [f"tcp://127.0.0.1:{port}" for port in ports]
    threads = [
        threading.Thread(
            target=_copy,
            args=(context, inlet, RelayTree(tuple(addresses), address, fanout), len(payloads)),
        )
        for inlet, address in zip(inlets, addresses, strict=True)
    ]
    for thread in threads:
        thread.start()
    outlet = _push(context, addresses[0])
    started = time.perf_counter()
    for body in payloads:
        outlet.send(body, copy=False)
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    context.destroy(linger=0)
    return seconds


def _push(context: "zmq.Context[Any]", address: str) -> Any:
    outlet = context.socket(zmq.PUSH)
    outlet.setsockopt(zmq.SNDHWM, 2)
    outlet.connect(address)
    return outlet


def _copy(context: "zmq.Context[Any]", inlet: Any, tree: RelayTree, count: int) -> None:
    outlets = [_push(context, child) for child in tree.children(tree.addresses[0])]
    for _ in range(count):
        frame = inlet.recv(copy=False)
        for outlet in outlets:
            outlet.send(frame, copy=False)
    for outlet in outlets:
        outlet.close(linger=-1)  # what is queued still goes
    inlet.close()


# --- the figures -----------------------------------------------------------------------------------


def payloads_of(total_bytes: int) -> list[bytes]:
    """Different payloads that add up to ``total_bytes``; made of one block, so that they are cheap."""
    block = os.urandom(PAYLOAD_BYTES)
    count = max(total_bytes // PAYLOAD_BYTES, 1)
    return [number.to_bytes(8, "little") + block[8:] for number in range(count)]


def peak_rss_mib() -> float:
    """Peak resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def throughput(count: int, fanout: int, total_bytes: int, repeats: int) -> dict[str, Any]:
    """Medians of runs that alternate, after one of each to warm up."""
    payloads = payloads_of(total_bytes)
    payload_bytes = sum(map(len, payloads))
    warm = payloads[: max(len(payloads) // 8, 1)]
    tree_seconds(count, fanout, warm)
    raw_seconds(count, fanout, warm)
    before = peak_rss_mib()
    ours, raw = [], []
    for _ in range(repeats):
        raw.append(raw_seconds(count, fanout, payloads))
        ours.append(tree_seconds(count, fanout, payloads))
    tree_s, raw_s = statistics.median(ours), statistics.median(raw)
    return {
        "servers": count,
        "fanout": fanout,
        "payload_bytes": payload_bytes,
        "repeats": repeats,
        "tree_s": round(tree_s, 3),
        "raw_s": round(raw_s, 3),
        "delivered_gib_per_s": round(payload_bytes * count / tree_s / 2**30, 3),
        "throughput_ratio": round(raw_s / tree_s, 3),
        "peak_rss_growth_mib": round(peak_rss_mib() - before, 1),
    }


def scaling(
    counts: Sequence[int], fanouts: Sequence[int], total_bytes: int
) -> list[dict[str, Any]]:
    """Seconds by fleet size and fan-out."""
    payloads = payloads_of(total_bytes)
    return [
        {
            "servers": count,
            "fanout": fanout,
            "payload_bytes": sum(map(len, payloads)),
            "seconds": round(tree_seconds(count, fanout, payloads), 3),
        }
        for count in counts
        for fanout in fanouts
    ]


# --- processes -------------------------------------------------------------------------------------


def _serve(pipe: Any) -> None:
    config = WorkerConfig(staging_threads=1, relay_timeout_s=STALL_S)
    server = ZmqSparseRefitServer(discard, config=config, api_key=None)
    address = server.start()
    pipe.send(address)
    addresses, fanout = pipe.recv()
    server.configure_tree(addresses, own_address=address, fanout=fanout)
    server.open("bench", 1)
    before = peak_rss_mib()
    pipe.send("open")
    pipe.recv()
    server.close()
    pipe.send(peak_rss_mib() - before)


def load(count: int, fanout: int, total_bytes: int) -> dict[str, Any]:
    """Server processes: seconds, and how much memory each of them needed for it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__"])
    pipes, processes = [], []
    for _ in range(count):
        near, far = context.Pipe()
        process = context.Process(target=_serve, args=(far,), daemon=True)
        process.start()
        pipes.append(near)
        processes.append(process)
    addresses = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send((addresses, fanout))
    for pipe in pipes:
        pipe.recv()
    payloads = payloads_of(total_bytes)
    seconds = send_through_tree(addresses, payloads)
    for pipe in pipes:
        pipe.send("end")
    growth = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join(10)
    # In flight at one server, at most: what is being staged, and two lanes of two payloads each.
    config = WorkerConfig()
    bound = config.queue_depth + fanout * (config.relay_queue_depth + 1)
    return {
        "server_processes": count,
        "fanout": fanout,
        "payload_bytes": sum(map(len, payloads)),
        "seconds": round(seconds, 3),
        "delivered_gib_per_s": round(sum(map(len, payloads)) * count / seconds / 2**30, 3),
        "memory_growth_mib_median": round(statistics.median(growth), 1),
        "memory_growth_mib_max": round(max(growth), 1),
        "memory_bound_mib": bound * PAYLOAD_BYTES / MIB,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object, nothing else")
    parser.add_argument("--servers", type=int, default=8, help="for the ratio, default 8")
    parser.add_argument("--mib", type=int, default=256, help="of payloads for the ratio")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--load-servers", type=int, default=64)
    parser.add_argument("--load-mib", type=int, default=1024)
    parser.add_argument("--scaling-mib", type=int, default=32)
    options = parser.parse_args()
    result = {
        **throughput(options.servers, 2, options.mib * MIB, options.repeats),
        "scaling": scaling((1, 4, 16, 64), (2, 4, 8), options.scaling_mib * MIB),
        "load": load(options.load_servers, 2, options.load_mib * MIB),
        "cores": os.cpu_count(),
    }
    print(json.dumps(result) if options.json else json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
