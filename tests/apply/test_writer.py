"""Writes into live storages: what they write, how they are taken back, and how many there are."""

import contextlib
import dataclasses
from typing import Any

import pytest
import torch

from vllm_sparse_refit.apply import writer as writer_module
from vllm_sparse_refit.apply.storage import storage_bits
from vllm_sparse_refit.apply.writer import WeightWriter, Write
from vllm_sparse_refit.codec import kernels
from vllm_sparse_refit.codec.delta import SparseOperation
from vllm_sparse_refit.codec.digest import BitsDigest

XOR, OVERWRITE, ADD = SparseOperation.XOR, SparseOperation.OVERWRITE, SparseOperation.ADD
ELEMENTS = 10_000


def random_bits(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**15), 2**15, (count,), generator=generator, dtype=torch.int16)


def random_writes(storage: torch.Tensor, seed: int) -> list[Write]:
    """Writes of every operation, by locations and by range, no element in two of them."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(4000, generator=generator)
    writes = []
    for i, operation in enumerate((*SparseOperation, *SparseOperation)):
        dtype = torch.int32 if i % 2 else torch.int64
        locations = order[i * 100 : (i + 1) * 100].to(dtype)
        writes.append(Write(storage, operation, locations, random_bits(100, i), 2, 1))
    for i, operation in enumerate(SparseOperation):
        run = range(8500 + 500 * i, 8800 + 500 * i)
        writes.append(Write(storage, operation, run, random_bits(300, i)))
    run = range(-40, 0)  # with a shift, locations may be anywhere
    return [*writes, Write(storage, ADD, run, random_bits(40, 7), 3, 8400)]


def by_hand(storage: torch.Tensor, writes: list[Write]) -> torch.Tensor:
    expected = storage.clone()
    for write in writes:
        for location, bits in zip(list(write.locations), write.bits, strict=True):
            at = int(location) * write.stride + write.shift
            if write.operation is XOR:
                expected[at] ^= bits
            elif write.operation is ADD:
                expected[at] += bits
            else:
                expected[at] = bits
    return expected


@pytest.fixture
def storage() -> torch.Tensor:
    return random_bits(ELEMENTS)


def test_writes_are_those_of_a_loop(storage: torch.Tensor) -> None:
    writes = random_writes(storage, 1)
    expected = by_hand(storage, writes)
    before = storage.clone()
    writer = WeightWriter(sample_limit=7)
    writer.write(writes)
    assert torch.equal(storage, expected)
    assert writer.elements_written == sum(len(write.locations) for write in writes)
    assert writer.undo_bytes >= 2 * writer.elements_written
    compared, different = writer.verify()
    assert (different, compared <= 7 * len(writes), compared >= len(writes)) == (0, True, True)
    writer.roll_back()
    assert torch.equal(storage, before)
    assert writer.elements_written == 0


def test_a_mark_keeps_what_was_before_it(storage: torch.Tensor) -> None:
    writer = WeightWriter(sample_limit=4)
    writer.write([Write(storage, ADD, torch.tensor([1, 5]), random_bits(2))])
    kept, mark = storage.clone(), writer.mark()
    writer.write(random_writes(storage, 2)[1:])
    writer.overwrite(storage, torch.tensor([8400, 3]), random_bits(2))
    writer.roll_back(mark)
    assert torch.equal(storage, kept)
    assert writer.elements_written == 2
    assert writer.verify() == (2, 0)


def test_the_same_element_twice_is_taken_back_in_order(storage: torch.Tensor) -> None:
    before = storage.clone()
    writer = WeightWriter(sample_limit=4)
    for bits in ([1, 2], [3, 4]):
        values = torch.tensor(bits, dtype=torch.int16)
        writer.write([Write(storage, OVERWRITE, torch.tensor([7, 9]), values)])
    writer.roll_back()
    assert torch.equal(storage, before)


def test_another_write_shows_in_the_samples(storage: torch.Tensor) -> None:
    writer = WeightWriter(sample_limit=100)
    writer.write([Write(storage, ADD, range(100, 160), random_bits(60))])
    storage[130] += 1
    assert writer.verify() == (60, 1)


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("done", [False, True])
def test_an_interrupt_leaves_nothing_that_cannot_be_taken_back(
    storage: torch.Tensor, monkeypatch: pytest.MonkeyPatch, at: int, done: bool
) -> None:
    """Before the writes nothing was kept of them, and after them their end was not noticed."""
    scatter, calls = kernels.scatter, iter(range(1000))

    def interrupted(*arguments: Any, **options: Any) -> None:
        if next(calls) != at:
            return scatter(*arguments, **options)
        if done:
            scatter(*arguments, **options)
        raise KeyboardInterrupt

    before = storage.clone()
    writer = WeightWriter(sample_limit=4)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "scatter", interrupted)
        for seed in (3, 4, 5)[: at + 1]:
            interrupt = (
                contextlib.nullcontext() if seed < 3 + at else pytest.raises(KeyboardInterrupt)
            )
            with interrupt:
                writer.write(random_writes(storage, seed))
    writer.roll_back()
    assert torch.equal(storage, before)


def test_positions_outside_the_storage_are_refused(storage: torch.Tensor) -> None:
    before = storage.clone()
    writer = WeightWriter(sample_limit=4)
    bad = torch.tensor([5, ELEMENTS])
    with pytest.raises(ValueError, match="outside the target"):
        writer.write([Write(storage, ADD, bad, random_bits(2))])
    writer.roll_back()
    assert torch.equal(storage, before)


@pytest.fixture
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies to a device are none on the CPU."""
    monkeypatch.setattr(writer_module, "_to_device", lambda tensor, _: tensor)


@pytest.mark.usefixtures("_as_on_a_device")
@pytest.mark.parametrize("payloads", [1, 50])
def test_on_a_device_operations_grow_with_parameters_not_with_deltas(payloads: int) -> None:
    parameters = [random_bits(ELEMENTS, seed) for seed in range(3)]
    writes = [
        Write(storage_bits(parameter), ADD, torch.arange(box, 9000, 100) + payload, random_bits(90))
        for payload in range(payloads)
        for parameter in parameters
        for box in (0, 50)
    ]
    # Boxes and payloads of one parameter come together, wherever they are among the others.
    merged = list(writer_module._merged([w for w in writes if len(w.locations) == 90]))
    assert len(merged) == len(parameters)
    for parameter, joined in zip(parameters, merged, strict=True):
        own = [w for w in writes if w.storage.data_ptr() == parameter.data_ptr()]
        assert torch.equal(by_hand(parameter, [joined]), by_hand(parameter, own))


@pytest.mark.usefixtures("_as_on_a_device")
def test_digests_on_a_device_are_those_of_the_compiled_loops() -> None:
    storage = random_bits(ELEMENTS)
    writes = random_writes(storage, 5)
    canonical = torch.randint(0, 2**40, (100,))
    writes += [dataclasses.replace(w, canonical=canonical) for w in writes[:4]]
    writes.append(Write(storage, ADD, torch.empty(0, dtype=torch.int32), random_bits(0)))
    writes.append(Write(storage, ADD, range(5, 5), random_bits(0)))
    writes = [w for w in writes if not (isinstance(w.locations, range) and w.locations.start < 0)]
    expected = writer_module.digest_targets(writes)
    on_device = [BitsDigest.of_halves(writer_module._digest_on_device(write)) for write in writes]
    assert [(digest.low, digest.high) for digest in on_device] == [
        tuple(e) for e in expected.tolist()
    ]
    assert len(set(on_device)) == len(writes) - 1  # two are those of nothing
