"""The encoder's threads: order, bounds, errors, and an end in every case."""

import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
import torch

from tests.transport.helpers import eventually, threads_named
from vllm_sparse_refit.codec.coding import CodedDelta
from vllm_sparse_refit.codec.delta import SparseOperation
from vllm_sparse_refit.trainer.comparison import Comparison, comparisons
from vllm_sparse_refit.trainer.exported import ExportedTensor, HostCopier, PendingCopy
from vllm_sparse_refit.trainer.parallel_encoder import ParallelEncoder

ELEMENTS = 1 << 22  # eight mebibytes: a group of its own
# Groups that two threads may have under way: eight taken, sixteen that wait, and one that is handed over.
WINDOW = 8 + 16 + 1


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    yield
    assert not threads_named("sparse-refit-encode")


OLD = torch.zeros(ELEMENTS, dtype=torch.int16)
NEW = OLD.clone()
NEW[::1000] = 1


def tensor(name: str, *, elements: int = ELEMENTS) -> ExportedTensor:
    return ExportedTensor.of(name, NEW[:elements].view(torch.bfloat16))


def cut(exported: ExportedTensor) -> Iterable[Comparison]:
    if exported.name == "broken":
        raise KeyError("broken")
    return comparisons(
        exported,
        OLD[: exported.tensor.numel()],
        SparseOperation.ADD,
        chunk_elements=ELEMENTS,
        copier=HostCopier(),
    )


def names(batch: list[CodedDelta]) -> list[str]:
    return [delta.row.name for delta in batch]


def run(
    encoder: ParallelEncoder[list[str]], tensors: Iterable[ExportedTensor]
) -> Iterator[list[str]]:
    for exported in tensors:
        yield from encoder.feed(exported)
    yield from encoder.finish()


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("payload_bytes", [1, 5000, 1 << 30])
def test_payloads_come_in_the_order_of_the_export(threads: int, payload_bytes: int) -> None:
    expected = [f"w{i}" for i in range(40)]
    # Sizes that take different times, small ones many to a group.
    sizes = [ELEMENTS if i % 3 == 0 else 2000 for i in range(40)]
    with ParallelEncoder(cut, names, payload_bytes=payload_bytes, threads=threads) as encoder:
        tensors = (tensor(n, elements=e) for n, e in zip(expected, sizes, strict=True))
        payloads = list(run(encoder, tensors))
    assert [name for payload in payloads for name in payload] == expected
    if payload_bytes == 1:
        assert all(len(payload) == 1 for payload in payloads)
    if payload_bytes == 1 << 30:
        assert len(payloads) == 1


def test_nothing_changed_is_no_payload() -> None:
    with ParallelEncoder(cut, names, payload_bytes=1, threads=2) as encoder:
        unchanged = ExportedTensor.of("w", OLD.view(torch.bfloat16))
        assert list(run(encoder, [unchanged])) == []
    with ParallelEncoder(cut, names, payload_bytes=1, threads=2) as encoder:
        assert list(run(encoder, [])) == []


def test_a_caller_that_takes_nothing_stops_the_work() -> None:
    encoded: list[list[str]] = []

    def encode(batch: list[CodedDelta]) -> list[str]:
        encoded.append(names(batch))
        return encoded[-1]

    fed = 0

    def feed(encoder: ParallelEncoder[list[str]]) -> None:
        nonlocal fed
        for i in range(100):
            for _ in encoder.feed(tensor(f"w{i}")):
                fed = -1  # there was no room: the first payload had to be taken
                return
            fed += 1

    with ParallelEncoder(cut, encode, payload_bytes=1, threads=2) as encoder:
        feed(encoder)
        assert fed == -1
        # The one taken, those that may wait, and the groups that may be under way meanwhile.
        assert not eventually(lambda: len(encoded) > 1 + 3 + WINDOW, timeout_s=0.3)


def test_a_slow_thread_stops_the_others() -> None:
    proceed = threading.Event()
    compared: list[str] = []

    class Late(threading.Event):
        def synchronize(self) -> None:
            proceed.wait(30)

    def cut_late(exported: ExportedTensor) -> Iterable[Comparison]:
        compared.append(exported.name)
        for comparison in cut(exported):
            late = PendingCopy(exported.tensor.view(torch.int16), Late())  # type: ignore[arg-type]
            yield replace(comparison, new=late) if exported.name == "w0" else comparison

    payloads: list[list[str]] = []
    expected = [f"w{i}" for i in range(100)]
    with ParallelEncoder(cut_late, names, payload_bytes=1, threads=2) as encoder:
        taking = threading.Thread(
            target=lambda: payloads.extend(run(encoder, (tensor(name) for name in expected)))
        )
        taking.start()
        try:
            assert eventually(lambda: len(compared) >= WINDOW // 2)
            assert not eventually(lambda: len(compared) > WINDOW, timeout_s=0.3)
        finally:
            proceed.set()
            taking.join()
    assert payloads == [[name] for name in expected]


def test_an_error_in_the_cutting_is_raised() -> None:
    with (
        ParallelEncoder(cut, names, payload_bytes=1, threads=2) as encoder,
        pytest.raises(KeyError, match="broken"),
    ):
        list(run(encoder, [tensor("a"), tensor("broken"), *[tensor("b")] * 50]))


@pytest.mark.parametrize("count", [1, 2, 30])
def test_an_error_at_the_very_end_is_raised(count: int) -> None:
    """Nothing else is left to be done then, and it must not look as if all were done."""

    class Broken(threading.Event):
        def synchronize(self) -> None:
            raise MemoryError("lost")

    def cut_broken(exported: ExportedTensor) -> Iterable[Comparison]:
        for comparison in cut(exported):
            late = PendingCopy(exported.tensor.view(torch.int16), Broken())  # type: ignore[arg-type]
            last = exported.name == f"w{count - 1}"
            yield replace(comparison, new=late) if last else comparison

    for _ in range(20):
        with (
            ParallelEncoder(cut_broken, names, payload_bytes=1 << 30, threads=2) as encoder,
            pytest.raises(MemoryError, match="lost"),
        ):
            list(run(encoder, [tensor(f"w{i}", elements=1 << 18) for i in range(count)]))


def test_an_error_in_the_encoding_is_raised() -> None:
    def fail(_batch: list[CodedDelta]) -> list[str]:
        raise MemoryError("no memory")

    with (
        ParallelEncoder(cut, fail, payload_bytes=1, threads=2) as encoder,
        pytest.raises(MemoryError, match="no memory"),
    ):
        list(run(encoder, (tensor(f"w{i}") for i in range(50))))


def test_a_tensor_that_was_written_to_is_refused() -> None:
    buffer = NEW.clone()
    exported = ExportedTensor.of("w", buffer.view(torch.bfloat16))
    buffer[0] = 7
    with (
        ParallelEncoder(cut, names, payload_bytes=1, threads=2) as encoder,
        pytest.raises(
            Exception, match="was written to before it had been compared: by an optimizer step"
        ),
    ):
        list(run(encoder, [exported]))


def test_leaving_early_ends_the_threads() -> None:
    slow = threading.Event()

    def encode(batch: list[CodedDelta]) -> list[str]:
        slow.wait(0.05)
        return names(batch)

    started = time.monotonic()
    with ParallelEncoder(cut, encode, payload_bytes=1, threads=3) as encoder:
        payloads = run(encoder, (tensor(f"w{i}") for i in range(1000)))
        assert next(payloads) == ["w0"]
        payloads.close()
    assert time.monotonic() - started < 10
