"""The streaming pipeline over loopback, with a fake tracker and with the real one."""

import contextlib
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.transport.helpers import (
    WAIT_S,
    Background,
    Gate,
    Recorder,
    eventually,
    fleet,
    plant,
    serving,
    threads_named,
)
from vllm_sparse_refit.checksum import checksum_hex
from vllm_sparse_refit.codec.coding import CodedDelta
from vllm_sparse_refit.codec.delta import SparseOperation, TensorDelta, apply_delta
from vllm_sparse_refit.codec.dtypes import bits_view
from vllm_sparse_refit.codec.payload import DecodeLimits, batch_deltas, decode_payload
from vllm_sparse_refit.config import MIB, SyncConfig
from vllm_sparse_refit.errors import (
    AuthenticationError,
    ConfigError,
    EngineStateError,
    PayloadError,
    PayloadRejectedError,
    TensorMismatchError,
    TransportError,
    TransportTimeoutError,
)
from vllm_sparse_refit.trainer.baseline import DeltaCompressionTracker, SparsePayload
from vllm_sparse_refit.trainer.exported import ExportedTensor
from vllm_sparse_refit.trainer.stream import _Pipeline, stream_sparse_delta_payloads_via_zmq

THREADS = "sparse-refit-stream"


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    yield
    assert not threads_named("sparse-refit")


@dataclass
class FakeTracker:
    """Every tensor is one delta, its bytes are the payload. Counts what passes through."""

    fail_on: str | None = None
    compared: list[str] = field(default_factory=list)
    compare_threads: set[int] = field(default_factory=set)
    encoded: int = 0
    payload_bytes: int = 1

    def compare(self, name: str, tensor: torch.Tensor) -> Iterator[TensorDelta]:
        self.compare_threads.add(threading.get_ident())
        if name == self.fail_on:
            raise TensorMismatchError(f"tensor {name!r} is unknown")
        self.compared.append(name)
        if tensor.any():
            numel = tensor.numel()
            yield TensorDelta(
                name,
                tuple(tensor.shape),
                tensor.dtype,
                SparseOperation.XOR,
                0,
                numel,
                range(numel),
                bits_view(tensor).reshape(-1),
            )

    def encode_exported(
        self, exports: Iterable[ExportedTensor]
    ) -> Generator[SparsePayload, None, None]:
        deltas = (
            CodedDelta.of(delta) for one in exports for delta in self.compare(one.name, one.tensor)
        )
        for batch in batch_deltas(deltas, self.payload_bytes):
            yield self.encode(batch)

    def encode(self, deltas: Sequence[CodedDelta]) -> SparsePayload:
        self.encoded += 1
        body = b"|".join(delta.row.name.encode() for delta in deltas)
        changed = sum(delta.changed for delta in deltas)
        return SparsePayload(body, checksum_hex(body), len(deltas), changed)


def tensors(count: int) -> Iterator[tuple[str, torch.Tensor]]:
    for index in range(count):
        yield f"w{index}", torch.full((2, 3), index + 1, dtype=torch.int16)


def stream(iterator: Any, tracker: Any, targets: Sequence[str], **options: Any) -> dict[str, int]:
    config = {"payload_bytes": 1, "retries": 0, **options.pop("config", {})}
    return stream_sparse_delta_payloads_via_zmq(
        iterator,
        delta_tracker=tracker,
        refit_targets=targets,
        transfer_id="t",
        sequence=1,
        config=SyncConfig(**config),
        **{"timeout_s": WAIT_S, **options},
    )


def refuse(_body: bytes, _metadata: Mapping[str, Any]) -> dict[str, Any]:
    raise PayloadError("no such tensor")


def test_every_target_gets_every_payload_in_order() -> None:
    received = [Recorder() for _ in range(3)]
    tracker = FakeTracker()
    with fleet(received) as servers:
        report = stream(
            tensors(20),
            tracker,
            [address for _, address in servers],
            config={"verification_samples": 7},
        )
        for server, _ in servers:
            assert server.flush("t", 20) == {"payloads": 20, "producers": {"0": 20}}
    expected = [f"w{i}".encode() for i in range(20)]
    assert received[0].bodies == expected
    for recorder in received:
        assert sorted(recorder.bodies) == sorted(expected)
        assert {metadata["payload_id"] for _, metadata in recorder.calls} == set(range(20))
        assert {metadata["verification_candidates"] for _, metadata in recorder.calls} == {7}
    assert report == {
        "payloads": 20,
        "deltas": 20,
        "changed_elements": 120,
        "total_elements": 120,
        "wire_bytes": sum(map(len, expected)),
    }


def test_deltas_are_batched_by_size() -> None:
    received = Recorder()
    with serving(received) as (_, address):
        # A delta here is 6 nibbles: 9 bytes are reached with the third.
        report = stream(tensors(7), FakeTracker(payload_bytes=9), [address])
    assert received.bodies == [b"w0|w1|w2", b"w3|w4|w5", b"w6"]
    assert (report["payloads"], report["deltas"]) == (3, 7)


def test_the_iterator_runs_in_the_calling_thread_and_the_comparison_does_not() -> None:
    pulled_in: set[int] = set()

    def exported() -> Iterator[tuple[str, torch.Tensor]]:
        for item in tensors(3):
            pulled_in.add(threading.get_ident())
            yield item

    tracker = FakeTracker()
    with serving(Recorder()) as (_, address):
        stream(exported(), tracker, [address])
    assert pulled_in == {threading.get_ident()}
    assert len(tracker.compare_threads) == 1
    assert not pulled_in & tracker.compare_threads


def test_shards_split_the_tensors_and_are_producers() -> None:
    received = Recorder()
    with serving(received) as (server, address):
        reports = [
            stream(tensors(5), FakeTracker(), [address], shard_rank=rank, shard_count=2)
            for rank in range(2)
        ]
        assert server.flush("t", 5) == {"payloads": 5, "producers": {"0": 3, "1": 2}}
    assert received.bodies == [b"w0", b"w2", b"w4", b"w1", b"w3"]
    assert [report["total_elements"] for report in reports] == [18, 12]


def test_each_producer_enters_the_tree_at_its_own_target() -> None:
    received = [Recorder() for _ in range(3)]
    with fleet(received) as servers:
        addresses = [address for _, address in servers]
        for rank in range(4):
            stream(tensors(8), FakeTracker(), addresses, shard_rank=rank, shard_count=4)
        for server, _ in servers:
            assert server.flush("t", 8)["producers"] == {str(rank): 2 for rank in range(4)}
    for recorder in received:
        roots = {metadata["producer_id"]: metadata["relay_root"] for _, metadata in recorder.calls}
        assert roots == {rank: addresses[rank % 3] for rank in range(4)}


@pytest.mark.parametrize("exported", [[], [("w", torch.zeros(4))]])
def test_nothing_changed_sends_nothing(exported: list[tuple[str, torch.Tensor]]) -> None:
    with serving(Recorder()) as (server, address):
        report = stream(exported, FakeTracker(), [address])
        assert server.status()["payloads_received"] == 0
    assert report == {
        "payloads": 0,
        "deltas": 0,
        "changed_elements": 0,
        "total_elements": 4 * len(exported),
        "wire_bytes": 0,
    }


def test_the_key_comes_from_the_named_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFIT_KEY", "secret")
    monkeypatch.setenv("WRONG_KEY", "guess")
    with serving(Recorder(), api_key=b"secret") as (server, address):
        stream(tensors(1), FakeTracker(), [address], api_key_env_var="REFIT_KEY")
        named = {"api_key_env_var": "REFIT_KEY"}
        stream(tensors(1), FakeTracker(), [address], config=named)
        with pytest.raises(AuthenticationError):
            stream(tensors(1), FakeTracker(), [address], api_key_env_var="WRONG_KEY", config=named)
        assert server.flush("t", 1)["payloads"] == 1


# --- Errors ----------------------------------------------------------------------------------


def test_an_error_in_the_iterator() -> None:
    def exported() -> Iterator[tuple[str, torch.Tensor]]:
        yield from tensors(5)
        raise LookupError("gather failed")

    with serving(Recorder()) as (_, address), pytest.raises(LookupError, match="gather failed"):
        stream(exported(), FakeTracker(), [address])
    assert not threads_named(THREADS)


@pytest.mark.parametrize("count", [1, 40])  # within the queues, and beyond them
def test_a_dead_engine_ends_the_wait_for_its_acknowledgement(count: int) -> None:
    gate = Gate()

    def alive() -> None:
        if gate.entered.is_set():
            raise EngineStateError("engine 0 died")

    started = time.monotonic()
    with serving(gate) as (_, address):
        with pytest.raises(EngineStateError, match="engine 0 died"):
            stream(tensors(count), FakeTracker(), [address], timeout_s=600, alive=alive)
        gate.opened.set()
    assert time.monotonic() - started < 60
    assert not threads_named(THREADS)


def test_an_error_in_the_comparison_stops_the_export() -> None:
    pulled: list[str] = []

    def endless() -> Iterator[tuple[str, torch.Tensor]]:
        while True:
            name = f"w{len(pulled)}"
            pulled.append(name)
            yield name, torch.ones(2)

    with (
        serving(Recorder()) as (_, address),
        pytest.raises(TensorMismatchError, match="'w7' is unknown"),
    ):
        stream(endless(), FakeTracker(fail_on="w7"), [address])
    assert not threads_named(THREADS)


def test_an_error_in_the_encoding() -> None:
    class Broken(FakeTracker):
        def encode(self, deltas: Sequence[CodedDelta]) -> SparsePayload:
            raise MemoryError("no memory")

    with serving(Recorder()) as (_, address), pytest.raises(MemoryError, match="no memory"):
        stream(tensors(1000), Broken(), [address])
    assert not threads_named(THREADS)


def test_a_target_that_refuses_stops_the_stream() -> None:
    with fleet([Recorder(), refuse]) as servers:
        addresses = [address for _, address in servers]
        with pytest.raises(PayloadRejectedError, match=f"{addresses[1]}.*no such tensor"):
            stream(tensors(1000), FakeTracker(), addresses)
        assert not threads_named(THREADS)


def test_a_target_that_is_not_there() -> None:
    with fleet([Recorder(), Recorder()], relay_timeout_s=0.3, relay_retries=0) as servers:
        addresses = [address for _, address in servers]
        servers[1][0].close()
        with pytest.raises(
            PayloadRejectedError, match=f"could not forward to worker {addresses[1]}"
        ):
            stream(tensors(1000), FakeTracker(), addresses)
        with pytest.raises(TransportTimeoutError, match=addresses[1]):
            stream(tensors(1000), FakeTracker(), addresses[1:], timeout_s=0.3)
    assert not threads_named(THREADS)


def test_an_address_that_is_none() -> None:
    with pytest.raises(TransportError, match="nonsense"):
        stream(tensors(1000), FakeTracker(), ["nonsense"])
    assert not threads_named(THREADS)


def test_a_failed_stream_can_be_repeated() -> None:
    received = Recorder()
    with serving(received) as (server, address):
        with pytest.raises(TensorMismatchError):
            stream(tensors(9), FakeTracker(fail_on="w4"), [address])
        stream(tensors(9), FakeTracker(), [address])
        assert server.flush("t", 9)["payloads"] == 9
    assert sorted(received.bodies) == sorted(f"w{i}".encode() for i in range(9))


def test_an_interrupt_is_raised_whatever_failed_before_it() -> None:
    def run() -> None:
        with _Pipeline() as pipeline:
            pipeline.fail(TransportError("no answer"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        run()
    assert caught.value.__notes__ == ["also failed: TransportError: no answer"]


def test_the_first_error_is_raised_and_the_others_are_mentioned() -> None:
    def run() -> None:
        with _Pipeline() as pipeline:
            pipeline.fail(PayloadRejectedError("tcp://a refused"))
            pipeline.fail(TransportTimeoutError("tcp://b is silent"))
            raise KeyError("later")

    with pytest.raises(PayloadRejectedError, match="tcp://a refused") as caught:
        run()
    assert caught.value.__notes__ == [
        "also failed: TransportTimeoutError: tcp://b is silent",
        "also failed: KeyError: 'later'",
    ]


@pytest.mark.parametrize(
    ("targets", "shard", "reason"),
    [
        ([], (0, 1), "no refit targets"),
        (["tcp://127.0.0.1:9"] * 2, (0, 1), "named twice"),
        (["tcp://127.0.0.1:9"], (2, 2), "shard_rank 2"),
        (["tcp://127.0.0.1:9"], (-1, 2), "shard_rank -1"),
    ],
)
def test_arguments_are_checked(targets: list[str], shard: tuple[int, int], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        stream(tensors(1), FakeTracker(), targets, shard_rank=shard[0], shard_count=shard[1])


# --- Bounds ----------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 3])
def test_a_slow_target_slows_the_export(depth: int) -> None:
    gate = Gate()
    tracker = FakeTracker()
    pulled: list[str] = []

    def exported() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors(100):
            pulled.append(name)
            yield name, tensor

    # Held by the sender, its queue and the encoder; then by the queue of tensors and the export.
    most_encoded = 1 + depth + 1
    most_pulled = most_encoded + depth + 1
    with serving(gate) as (server, slow):
        streaming = Background(
            lambda: stream(exported(), tracker, [slow], config={"queue_depth": depth})
        )
        assert eventually(lambda: len(pulled) == most_pulled)
        assert not eventually(lambda: len(pulled) > most_pulled, timeout_s=0.3)
        assert tracker.encoded == most_encoded
        assert len(gate.calls) == 1
        gate.opened.set()
        assert streaming.result()["payloads"] == 100
        assert server.flush("t", 100)["payloads"] == 100
    assert gate.bodies == [f"w{i}".encode() for i in range(100)]


# --- With the real codec ---------------------------------------------------------------------


class Replica:
    """A receiver that applies payloads to its own copy of the bits."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.weights = {name: tensor.clone() for name, tensor in weights.items()}
        self._lock = threading.Lock()

    def __call__(self, body: bytes, _metadata: Mapping[str, Any]) -> dict[str, Any]:
        deltas = decode_payload(body, DecodeLimits(64 * MIB, 64 * MIB))
        with self._lock:
            for delta in deltas:
                apply_delta(delta, bits_view(self.weights[delta.name]).view(-1))
        return {"deltas": len(deltas)}


@pytest.mark.parametrize("shard_count", [1, 2])
def test_replicas_end_with_the_trainers_bits(shard_count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    old = {
        f"layer.{i}": torch.randn(300 + i, 70, generator=generator).to(torch.bfloat16)
        for i in range(6)
    }
    new = {name: tensor.clone() for name, tensor in old.items()}
    for index, tensor in enumerate(new.values()):
        if index != 3:  # one tensor stays
            mask = torch.rand(tensor.shape, generator=generator) < 0.02
            tensor[mask] = -tensor[mask]
    changed = sum(int((bits_view(old[n]) != bits_view(new[n])).sum()) for n in old)

    config = SyncConfig(chunk_elements=4096, payload_bytes=500)
    trackers = [DeltaCompressionTracker(config=config) for _ in range(shard_count)]
    replicas = [Replica(old), Replica(old)]
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(serving(replica, transfer_id=None)) for replica in replicas]
        plant(servers, transfer_id="step", sequence=7)
        reports = []
        for rank, tracker in enumerate(trackers):
            tracker.snapshot_baseline(old.items())
            reports.append(
                stream_sparse_delta_payloads_via_zmq(
                    new.items(),
                    delta_tracker=tracker,
                    refit_targets=[address for _, address in servers],
                    transfer_id="step",
                    sequence=7,
                    shard_rank=rank,
                    shard_count=shard_count,
                    config=config,
                )
            )
        payloads = sum(report["payloads"] for report in reports)
        for server, _ in servers:
            assert server.flush("step", payloads)["payloads"] == payloads
    assert all(report["payloads"] > 1 for report in reports)
    assert sum(report["changed_elements"] for report in reports) == changed
    assert sum(report["total_elements"] for report in reports) == trackers[0].total_elements
    for replica in replicas:
        assert all(
            torch.equal(bits_view(replica.weights[name]), bits_view(new[name])) for name in new
        )
