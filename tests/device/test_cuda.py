"""The trainer's and the worker's work on a GPU, against the same work on the CPU."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from vllm_sparse_refit.apply.storage import storage_bits
from vllm_sparse_refit.apply.writer import WeightWriter, Write, digest_targets
from vllm_sparse_refit.codec.delta import (
    Chunk,
    SparseOperation,
    apply_delta,
    find_changes,
    make_delta,
)
from vllm_sparse_refit.codec.digest import BitsDigest, box_digest, digest_on_device
from vllm_sparse_refit.codec.dtypes import bits_view
from vllm_sparse_refit.codec.payload import DecodeLimits, decode_payload
from vllm_sparse_refit.config import SyncConfig
from vllm_sparse_refit.errors import TensorMismatchError
from vllm_sparse_refit.trainer.baseline import DeltaCompressionTracker

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LIMITS = DecodeLimits(1 << 28, 1 << 28)
CHUNK = 1 << 12
SHAPES = {"embed": (300, 70), "norm": (64,), "scalar": (), "empty": (0, 4), "big": (3, 5000)}


def make_weights(dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()
    }


def change(weights: dict[str, torch.Tensor], every: int) -> dict[str, torch.Tensor]:
    changed = {name: tensor.clone() for name, tensor in weights.items()}
    for tensor in changed.values():
        bits_view(tensor).view(-1)[::every] += 1
    return changed


def laid_out(weights: dict[str, torch.Tensor], *, transposed: bool) -> dict[str, torch.Tensor]:
    """The same values, matrices transposed in memory if asked for."""
    return {
        name: tensor.t().contiguous().t() if transposed and tensor.ndim == 2 else tensor
        for name, tensor in weights.items()
    }


def on_gpu(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same values and strides in GPU tensors."""
    return {name: tensor.cuda() for name, tensor in weights.items()}


def encoded(
    config: SyncConfig, old: dict[str, torch.Tensor], new: dict[str, torch.Tensor], **routing: Any
) -> list[bytes]:
    tracker = DeltaCompressionTracker(config=config)
    tracker.snapshot_baseline(old.items())
    tracker.set_routing(**{"skip": (), "overwrite": (), "dense": (), **routing})
    bodies = [payload.body for payload in tracker.prepare_sparse_delta_payload(new.items())]
    tracker.on_sync_succeeded()
    tracker.settle()
    # The baseline followed: the same export again has nothing to send.
    assert list(tracker.prepare_sparse_delta_payload(new.items())) == []
    tracker.close()
    return bodies


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("every", [1, 3, 100])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
def test_payloads_are_those_of_cpu_tensors(
    dtype: torch.dtype, every: int, transposed: bool, on_device: bool
) -> None:
    old = make_weights(dtype, 1)
    new = change(old, every)
    routing = {"overwrite": {"big"}, "dense": {"big"}}
    plain = SyncConfig(chunk_elements=CHUNK, payload_bytes=1000)
    # The same strides on both sides: chunks of what is not contiguous end where rows end.
    sides = [laid_out(side, transposed=transposed) for side in (old, new)]
    expected = encoded(plain, *sides, **routing)
    config = SyncConfig(chunk_elements=CHUNK, payload_bytes=1000, baseline_on_device=on_device)
    assert encoded(config, *map(on_gpu, sides), **routing) == expected
    assert expected


@pytest.mark.parametrize("operation", list(SparseOperation))
def test_only_what_changed_comes_to_the_host(operation: SparseOperation) -> None:
    old = torch.randint(-(2**15), 2**15, (1 << 16,), dtype=torch.int16)
    new = old.clone()
    new[::97] ^= 5
    on_cpu = find_changes(old, new, operation, begin=7, wide=True)
    found = find_changes(old.cuda(), new.cuda(), operation, begin=7, wide=True)
    assert all(map(torch.equal, on_cpu, found))
    assert all(part.device.type == "cpu" for part in found)


WIDTHS = [torch.uint8, torch.int16, torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("count", [0, 1, 5000, (1 << 20) + 3])
def test_digests_are_those_of_the_cpu(dtype: torch.dtype, count: int) -> None:
    generator = torch.Generator().manual_seed(2)
    raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    bits = raw.view(dtype)
    begin = (1 << 62) + 9
    run = range(begin, begin + count)
    assert BitsDigest.of(bits.cuda(), run) == BitsDigest.of(bits, run)
    for location_dtype in (torch.int32, torch.int64):
        locations = torch.arange(0, 3 * count, 3, dtype=location_dtype)
        expected = BitsDigest.of(bits, locations)
        assert BitsDigest.of(bits.cuda(), locations.cuda()) == expected


@pytest.mark.parametrize("dtype", WIDTHS)
def test_digests_of_boxes_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    bits = torch.randint(0, 100, (1500, 1000), dtype=dtype)
    if dtype.is_signed:
        bits.neg_()
    for box in (bits, bits[:, 200:900], bits[7:, 3:].t(), bits[3:4], bits[0:0], bits[1, 2]):
        arguments = (int(box.storage_offset()), box.shape, box.stride())
        assert box_digest(box.cuda(), *arguments) == box_digest(box, *arguments)


def test_a_digest_does_not_wait_for_the_device() -> None:
    bits = torch.zeros((1 << 20) + 3, dtype=torch.int16, device="cuda")
    positions = torch.arange(bits.numel(), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        halves = digest_on_device(bits, positions)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert BitsDigest.of_halves(halves) == BitsDigest.of(bits.cpu(), range(bits.numel()))


@pytest.mark.parametrize("operation", list(SparseOperation))
@pytest.mark.parametrize("every", [1, 3, 97])
def test_deltas_carry_the_digest_of_the_old_bits(operation: SparseOperation, every: int) -> None:
    old = torch.randint(-(2**15), 2**15, (1 << 16,), dtype=torch.int16)
    new = old.clone()
    new[::every] ^= 5
    new[::50] = old[::50]  # nearly dense, where every element changed
    arguments = ("w", (1 << 17,), torch.bfloat16, operation, 7)
    on_cpu = make_delta(Chunk(*arguments, old, new))
    on_device = make_delta(Chunk(*arguments, old.cuda(), new.cuda()))
    assert on_cpu is not None
    assert on_device is not None
    assert list(on_device.locations) == list(on_cpu.locations)
    assert torch.equal(on_device.values, on_cpu.values)
    assert on_device.prior == on_cpu.prior
    assert (on_cpu.prior is None) == (operation is SparseOperation.OVERWRITE)


def test_values_are_those_at_the_time_of_the_export() -> None:
    """The export's stream is still at work when a tensor is handed over."""
    old = torch.zeros(1 << 22, dtype=torch.bfloat16, device="cuda")
    tracker = DeltaCompressionTracker(config=SyncConfig(chunk_elements=1 << 20))
    tracker.snapshot_baseline([("w", old)])

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)
            new = torch.ones(1 << 22, dtype=torch.bfloat16, device="cuda")
            yield "w", new

    found = torch.zeros(1 << 22, dtype=torch.int16)
    for payload in tracker.prepare_sparse_delta_payload(export()):
        for delta in decode_payload(payload.body, LIMITS):
            apply_delta(delta, found)
    assert torch.equal(found.view(torch.bfloat16), torch.ones(1 << 22, dtype=torch.bfloat16))


def test_a_tensor_written_to_meanwhile_is_refused() -> None:
    tracker = DeltaCompressionTracker()
    tracker.snapshot_baseline([(f"w{i}", torch.zeros(1 << 20, device="cuda")) for i in range(8)])
    buffer = torch.zeros(1 << 20, device="cuda")

    def refilled() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(8):
            buffer.fill_(i)
            yield f"w{i}", buffer

    with pytest.raises(TensorMismatchError, match="was written to"):
        list(tracker.prepare_sparse_delta_payload(refilled()))


@pytest.mark.parametrize("operation", list(SparseOperation))
def test_applying_a_delta_on_the_gpu(operation: SparseOperation) -> None:
    old = torch.randint(-(2**15), 2**15, (5000,), dtype=torch.int16)
    new = old.clone()
    new[::7] += 3
    tracker = DeltaCompressionTracker(config=SyncConfig(chunk_elements=1000))
    tracker.snapshot_baseline([("w", old)])
    names = {"w"} if operation is SparseOperation.OVERWRITE else set()
    tracker.set_routing(skip=(), overwrite=names, dense=())
    bits = old.cuda()
    for payload in tracker.prepare_sparse_delta_payload([("w", new)]):
        for delta in decode_payload(payload.body, LIMITS):
            apply_delta(delta, bits)
    assert torch.equal(bits.cpu(), new)


def random_writes(storage: torch.Tensor, seed: int) -> list[Write]:
    """Several writes of every operation into one storage, no element twice."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(4000, generator=generator).to(torch.int32)
    writes = []
    for i, operation in enumerate((*SparseOperation, *SparseOperation)):
        locations = order[i * 100 : (i + 1) * 100].sort().values
        bits = torch.randint(-99, 99, (100,), generator=generator, dtype=torch.int16)
        writes.append(Write(storage, operation, locations, bits, stride=2, shift=1))
    run = torch.randint(-99, 99, (500,), generator=generator, dtype=torch.int16)
    return [*writes, Write(storage, SparseOperation.ADD, range(9000, 9500), run)]


def test_writes_are_those_on_the_cpu_and_roll_back() -> None:
    parameter = torch.randint(-(2**15), 2**15, (10_000,), dtype=torch.int16).view(torch.bfloat16)
    on_cpu, on_device = parameter.clone(), parameter.cuda()
    writers = []
    for tensor in (on_cpu, on_device):
        writer = WeightWriter(sample_limit=16)
        writer.write(random_writes(storage_bits(tensor), 3))
        assert writer.verify()[1] == 0
        assert writer.verify()[0] > 0
        writers.append(writer)
    assert torch.equal(bits_view(on_device).cpu(), bits_view(on_cpu))
    assert writers[0].elements_written == writers[1].elements_written
    writers[1].roll_back()
    assert torch.equal(bits_view(on_device).cpu(), bits_view(parameter))


def test_digests_of_targets_are_those_on_the_cpu() -> None:
    parameter = torch.randint(-(2**15), 2**15, (10_000,), dtype=torch.int16)
    found = []
    for storage in (parameter, parameter.cuda()):
        writes = random_writes(storage_bits(storage), 3)
        canonical = torch.arange(100) * 10**10
        writes += [dataclasses.replace(write, canonical=canonical) for write in writes[:3]]
        found.append(digest_targets(writes).tolist())
    assert found[0] == found[1]


def test_storages_on_the_gpu_are_digested_there() -> None:
    parameter = torch.randint(-(2**15), 2**15, (3 << 20,), dtype=torch.int16)
    flat = box_digest(parameter, 0, parameter.shape, (1,))
    assert box_digest(parameter.cuda(), 0, parameter.shape, (1,)) == flat


def test_a_commit_waits_for_the_device_once_at_most() -> None:
    storages = [storage_bits(torch.zeros(10_000, dtype=torch.int16).cuda()) for _ in range(5)]
    writes = [write for i, s in enumerate(storages) for write in random_writes(s, i)]
    writer = WeightWriter(sample_limit=16)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        writer.write(writes)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert writer.verify()[1] == 0
