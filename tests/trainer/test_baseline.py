import errno
import os
import queue
import threading
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_sparse_refit.checksum import checksum_hex
from vllm_sparse_refit.codec import payload as payload_module
from vllm_sparse_refit.codec.coding import CodedDelta
from vllm_sparse_refit.codec.delta import SparseOperation, TensorDelta, apply_delta
from vllm_sparse_refit.codec.dtypes import SUPPORTED, bits_view
from vllm_sparse_refit.codec.payload import DecodeLimits, decode_payload, join_payload
from vllm_sparse_refit.config import SyncConfig
from vllm_sparse_refit.errors import (
    BaselineError,
    ConfigError,
    TensorMismatchError,
    UnsupportedModelError,
)
from vllm_sparse_refit.trainer import baseline
from vllm_sparse_refit.trainer.baseline import DeltaCompressionTracker, SparsePayload
from vllm_sparse_refit.trainer.exported import NamedTensor

Weights = dict[str, torch.Tensor]
LIMITS = DecodeLimits(max_payload_bytes=1 << 26, max_decoded_bytes=1 << 28)
ADD, OVERWRITE = SparseOperation.ADD, SparseOperation.OVERWRITE


@pytest.fixture(params=["ram", "files"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> SyncConfig:
    return SyncConfig(
        chunk_elements=64,
        payload_bytes=64,
        baseline_dir=tmp_path / "base" if request.param == "files" else None,
    )


@pytest.fixture
def tracker(config: SyncConfig) -> Iterator[DeltaCompressionTracker]:
    tracker = DeltaCompressionTracker(config=config)
    yield tracker
    tracker.close()


def make_weights() -> Weights:
    generator = torch.Generator().manual_seed(1)
    return {
        "embed": torch.randn(40, 16, generator=generator).to(torch.bfloat16),
        "odd": torch.randn(3, 5, 7, generator=generator),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "mask": torch.tensor([True, False, True]),
        "a/../b": torch.arange(5),
    }


def changed(weights: Weights) -> Weights:
    new = {name: tensor.clone() for name, tensor in weights.items()}
    new["embed"][3, ::5] += 1
    new["embed"][30, 2] = -0.0
    new["odd"][1] *= -1
    new["scalar"].fill_(float("nan"))
    new["mask"].logical_not_()
    return new


def routed(tracker: DeltaCompressionTracker, **names: set[str]) -> None:
    none: set[str] = set()
    tracker.set_routing(**{"skip": none, "overwrite": none, "dense": none} | names)


def decoded(payloads: list[SparsePayload]) -> list[TensorDelta]:
    return [delta for payload in payloads for delta in decode_payload(payload.body, LIMITS)]


def compared(
    tracker: DeltaCompressionTracker, name: str, tensor: torch.Tensor
) -> list[TensorDelta]:
    """The deltas of a comparison as a receiver sees them."""
    return decode_payload(join_payload(list(tracker.compare(name, tensor))), LIMITS)


def receive(weights: Weights, payloads: list[SparsePayload]) -> None:
    for delta in decoded(payloads):
        apply_delta(delta, bits_view(weights[delta.name]).view(-1))


def assert_same_bits(left: Weights, right: Weights) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(bits_view(left[name]), bits_view(right[name])), name


def export(tracker: DeltaCompressionTracker, weights: Weights) -> list[SparsePayload]:
    payloads = list(tracker.prepare_sparse_delta_payload(weights.items()))
    tracker.finish_export()
    return payloads


def test_receivers_follow_over_several_syncs(tracker: DeltaCompressionTracker) -> None:
    weights = make_weights()
    received = {name: tensor.clone() for name, tensor in weights.items()}
    tracker.snapshot_baseline(weights.items())
    for new in (changed(weights), weights, weights):
        payloads = export(tracker, new)
        receive(received, payloads)
        assert_same_bits(received, new)
        tracker.on_sync_succeeded()
    assert payloads == []


def test_the_baseline_is_a_copy(tracker: DeltaCompressionTracker) -> None:
    weights = make_weights()
    tracker.snapshot_baseline(weights.items())
    weights["embed"].zero_()
    assert {delta.name for delta in decoded(export(tracker, weights))} == {"embed"}


def test_payloads_say_what_they_hold(tracker: DeltaCompressionTracker) -> None:
    weights = make_weights()
    tracker.snapshot_baseline(weights.items())
    payloads = export(tracker, changed(weights))
    assert len(payloads) > 1
    for payload in payloads:
        deltas = decode_payload(payload.body, LIMITS)
        assert payload.checksum == checksum_hex(payload.body)
        assert payload.deltas == len(deltas)
        assert payload.changed_elements == sum(delta.values.numel() for delta in deltas)


def test_the_snapshot_can_be_described(tracker: DeltaCompressionTracker) -> None:
    weights = make_weights()
    tracker.snapshot_baseline(weights.items())
    expected = {name: (tuple(t.shape), t.dtype) for name, t in weights.items()}
    assert list(tracker.state_dict_info.items()) == list(expected.items())
    assert tracker.total_elements == sum(tensor.numel() for tensor in weights.values())


def test_a_failed_sync_leaves_the_baseline(tracker: DeltaCompressionTracker) -> None:
    weights = make_weights()
    tracker.snapshot_baseline(weights.items())
    first = export(tracker, changed(weights))
    tracker.on_sync_failed()
    tracker.on_sync_succeeded()  # Nothing is pending any more, so this moves nothing.
    again = export(tracker, changed(weights))
    assert [payload.body for payload in again] == [payload.body for payload in first]


def test_a_sync_that_failed_half_way_can_be_repeated(tracker: DeltaCompressionTracker) -> None:
    weights = make_weights()
    tracker.snapshot_baseline(weights.items())
    next(iter(tracker.prepare_sparse_delta_payload(changed(weights).items())))
    tracker.on_sync_failed()
    assert export(tracker, weights) == []


def test_nothing_moves_before_the_sync_succeeded(tracker: DeltaCompressionTracker) -> None:
    old = torch.zeros(100)
    new = torch.ones(100)
    tracker.snapshot_baseline([("a", old), ("b", old)])
    tracker.encode(list(tracker.compare("a", new)))
    tracker.on_sync_succeeded()
    assert list(tracker.compare("a", new)) == []
    assert [delta.row.name for delta in tracker.compare("b", new.clone())] == ["b", "b"]


@pytest.mark.parametrize("dtype", SUPPORTED)
def test_every_bit_pattern_survives(tracker: DeltaCompressionTracker, dtype: torch.dtype) -> None:
    if dtype.itemsize == 1:
        bits = torch.arange(256).to(torch.uint8)
    elif dtype.itemsize == 2:
        bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    else:
        generator = torch.Generator().manual_seed(0)
        raw = torch.randint(0, 256, (8 * 512,), generator=generator, dtype=torch.uint8)
        # All-ones exponents above random mantissas: infinities and NaNs of many payloads; then the
        # smallest subnormals, both zeros.
        raw.view(-1, dtype.itemsize)[: 64 // dtype.itemsize, -2:] = 255
        bits = raw.view({4: torch.int32, 8: torch.int64}[dtype.itemsize])
        bits[-3:] = torch.tensor([0, 1, torch.iinfo(bits.dtype).min])
    new = bits.view(dtype)
    received = {"w": bits.flip(0).view(dtype)}
    tracker.snapshot_baseline(received.items())
    receive(received, export(tracker, {"w": new}))
    assert_same_bits(received, {"w": new})


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[:, 3:9],
        lambda t: t[::3, ::2],
        lambda t: t[:1].expand(90, 24),
        lambda t: t.view(10, 9, 24).permute(2, 0, 1),
        lambda t: t.as_strided((24, 90), (1, 24)),
    ],
)
@pytest.mark.parametrize("chunk", [1, 7, 50, 10_000])
def test_tensors_need_not_be_contiguous(
    view: Callable[[torch.Tensor], torch.Tensor], chunk: int
) -> None:
    tracker = DeltaCompressionTracker(config=SyncConfig(chunk_elements=chunk))
    old = torch.arange(90 * 24, dtype=torch.int32).view(90, 24)
    tracker.snapshot_baseline([("w", view(old))])
    new = old * 3
    received = {"w": view(old).contiguous().clone()}
    deltas = compared(tracker, "w", view(new))
    assert all(delta.end - delta.begin <= chunk for delta in deltas)
    for delta in deltas:
        apply_delta(delta, received["w"].view(-1))
    assert torch.equal(received["w"], view(new))


def test_parameters_can_be_given(tracker: DeltaCompressionTracker) -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    tracker.snapshot_baseline([("w", parameter)])
    assert export(tracker, {"w": parameter}) == []


# Routing


def overwriting(
    tracker: DeltaCompressionTracker, old: torch.Tensor, new: torch.Tensor, *, dense: bool = False
) -> list[TensorDelta]:
    tracker.snapshot_baseline([("w", old)])
    routed(tracker, overwrite={"w"}, dense={"w"} if dense else set())
    return compared(tracker, "w", new)


def test_skipped_tensors_are_neither_sent_nor_missed(tracker: DeltaCompressionTracker) -> None:
    weights = make_weights()
    tracker.snapshot_baseline(weights.items())
    routed(tracker, skip={"embed", "odd", "elsewhere"})
    new = changed(weights)
    del new["odd"]
    new["elsewhere"] = torch.ones(3)
    names = {delta.name for delta in decoded(export(tracker, new))}
    assert names == {"scalar", "mask"}


def test_overwrite_ships_the_new_bits_of_what_changed(tracker: DeltaCompressionTracker) -> None:
    new = torch.zeros(200)
    new[150] = 3
    [delta] = overwriting(tracker, torch.zeros(200), new)
    assert delta.operation is OVERWRITE
    assert (delta.locations, delta.values.view(torch.float32).tolist()) == (range(150, 151), [3])


def test_dense_ships_every_element_once_one_changed(tracker: DeltaCompressionTracker) -> None:
    new = torch.zeros(200)
    new[150] = 3
    deltas = overwriting(tracker, torch.zeros(200), new, dense=True)
    assert torch.equal(torch.cat([delta.values for delta in deltas]).view(torch.float32), new)
    assert [delta.locations for delta in deltas] == [
        range(0, 64),
        range(64, 128),
        range(128, 192),
        range(192, 200),
    ]


def test_dense_ships_nothing_when_nothing_changed(tracker: DeltaCompressionTracker) -> None:
    assert overwriting(tracker, torch.zeros(200), torch.zeros(200), dense=True) == []


FLOATS = [dtype for dtype in SUPPORTED if dtype.is_floating_point]


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_new_nan_makes_an_overwrite_whole(
    tracker: DeltaCompressionTracker, dtype: torch.dtype
) -> None:
    new = torch.zeros(200)
    new[150] = float("nan")
    deltas = overwriting(tracker, torch.zeros(200).to(dtype), new.to(dtype))
    assert sum(delta.values.numel() for delta in deltas) == 200
    assert {delta.operation for delta in deltas} == {OVERWRITE}


def test_an_old_nan_does_not_make_an_overwrite_whole(tracker: DeltaCompressionTracker) -> None:
    old = torch.zeros(200)
    old[:2] = float("nan")
    new = old.clone()
    new[1] = 1  # The NaN at 0 stays; the one at 1 goes.
    [delta] = overwriting(tracker, old, new)
    assert delta.locations == range(1, 2)


def test_integers_that_look_like_nan_do_not(tracker: DeltaCompressionTracker) -> None:
    old = torch.zeros(200, dtype=torch.int32)
    new = old.clone()
    new[7] = 0x7FC00000
    [delta] = overwriting(tracker, old, new)
    assert delta.locations == range(7, 8)


def test_a_new_nan_leaves_other_tensors_sparse(tracker: DeltaCompressionTracker) -> None:
    new = torch.zeros(200)
    new[7] = float("nan")
    tracker.snapshot_baseline([("w", torch.zeros(200))])
    [delta] = compared(tracker, "w", new)
    assert (delta.operation, delta.locations) == (ADD, range(7, 8))


def test_overwrites_move_the_baseline(tracker: DeltaCompressionTracker) -> None:
    new = torch.full((200,), 2.0)
    tracker.encode([CodedDelta.of(delta) for delta in overwriting(tracker, torch.zeros(200), new)])
    tracker.on_sync_succeeded()
    assert list(tracker.compare("w", new)) == []


def test_dense_must_be_overwrite(tracker: DeltaCompressionTracker) -> None:
    with pytest.raises(ConfigError, match="stray"):
        routed(tracker, overwrite={"w"}, dense={"w", "stray"})


# Misuse


@pytest.mark.parametrize(
    "use",
    [
        lambda tracker: tracker.compare("w", torch.zeros(1)),
        lambda tracker: list(tracker.prepare_sparse_delta_payload([("w", torch.zeros(1))])),
        lambda tracker: tracker.finish_export(),
        lambda tracker: tracker.on_sync_succeeded(),
        lambda tracker: tracker.state_dict_info,
        lambda tracker: tracker.total_elements,
    ],
)
def test_without_a_snapshot_nothing_works(
    tracker: DeltaCompressionTracker, use: Callable[[DeltaCompressionTracker], Any]
) -> None:
    with pytest.raises(BaselineError, match=r"no snapshot was taken; call snapshot_baseline\(\)"):
        use(tracker)
    tracker.close()
    with pytest.raises(BaselineError, match="the tracker was closed"):
        use(tracker)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("v", torch.zeros(2, 3), "'v' is not in the baseline"),
        ("w", torch.zeros(3, 2), r"'w' is \(3, 2\) torch.float32 .* has \(2, 3\)"),
        ("w", torch.zeros(2, 3, dtype=torch.int32), "'w' is .*int32 .* torch.float32"),
    ],
)
def test_other_tensors_are_refused_at_once(
    tracker: DeltaCompressionTracker, name: str, tensor: torch.Tensor, message: str
) -> None:
    tracker.snapshot_baseline([("w", torch.zeros(2, 3))])
    with pytest.raises(TensorMismatchError, match=message):
        tracker.compare(name, tensor)


def test_a_tensor_exported_twice_is_refused(tracker: DeltaCompressionTracker) -> None:
    tracker.snapshot_baseline([("w", torch.zeros(2))])
    tracker.compare("w", torch.ones(2))
    with pytest.raises(TensorMismatchError, match="'w' was exported twice"):
        tracker.compare("w", torch.ones(2))
    tracker.on_sync_failed()
    tracker.compare("w", torch.ones(2))


def test_missing_tensors_are_named(tracker: DeltaCompressionTracker) -> None:
    tracker.snapshot_baseline((f"w{i}", torch.zeros(1)) for i in range(13))
    tracker.compare("w0", torch.zeros(1))
    with pytest.raises(TensorMismatchError, match=r"lacks 12 tensors .* w1, .*w10 and 2 more;"):
        tracker.finish_export()


def failing_weights() -> Iterator[tuple[str, torch.Tensor]]:
    yield "w", torch.ones(100)
    raise OSError("checkpoint unreadable")


def test_a_snapshot_that_fails_leaves_no_baseline(
    tracker: DeltaCompressionTracker, config: SyncConfig
) -> None:
    tracker.snapshot_baseline([("w", torch.zeros(100))])
    with pytest.raises(OSError, match="checkpoint unreadable"):
        tracker.snapshot_baseline(failing_weights())
    with pytest.raises(BaselineError, match="last snapshot failed half way"):
        tracker.compare("w", torch.zeros(100))
    if config.baseline_dir is not None:
        assert list(Path(config.baseline_dir).iterdir()) == []
    tracker.snapshot_baseline([("w", torch.zeros(100))])
    assert export(tracker, {"w": torch.zeros(100)}) == []


def _payloads(tracker: DeltaCompressionTracker, weights: Iterable[NamedTensor]) -> int:
    return len(list(tracker.prepare_sparse_delta_payload(weights)))


@pytest.mark.parametrize("shapes", [[(4, 6), (4, 6)], [(4, 6), (3, 5)], [(3, 5), (4, 6)]])
def test_one_buffer_for_several_names_is_refused(
    tracker: DeltaCompressionTracker, shapes: list[tuple[int, ...]]
) -> None:
    """A list of an export that fills one buffer again and again: all its tensors are the last one."""
    olds = {f"w{i}": torch.randn(shape) for i, shape in enumerate(shapes)}
    tracker.snapshot_baseline(olds.items())
    buffer = torch.empty(24)
    filled = []
    for name, old in olds.items():
        view = buffer[: old.numel()].view(old.shape)
        filled.append((name, view.copy_(old + 1)))
    with pytest.raises(TensorMismatchError, match="'w0' and 'w1' share memory"):
        _payloads(tracker, filled)
    tracker.on_sync_failed()
    # One after the other they may be at one place, which is given out again.
    assert _payloads(tracker, ((name, old + 1) for name, old in olds.items()))


def test_tensors_that_are_tied_share_memory(tracker: DeltaCompressionTracker) -> None:
    tied = torch.randn(4, 6)
    weights = {"head": tied, "embed": tied, "rows": tied[:2]}
    tracker.snapshot_baseline(weights.items())
    tied += 1
    assert _payloads(tracker, weights.items())


def test_a_name_given_twice_is_refused(tracker: DeltaCompressionTracker) -> None:
    with pytest.raises(BaselineError, match="'w' twice"):
        tracker.snapshot_baseline([("w", torch.zeros(1)), ("w", torch.zeros(1))])
    with pytest.raises(BaselineError, match="last snapshot failed"):
        tracker.finish_export()


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("w", torch.zeros(2, dtype=torch.complex64)),
        ("w", torch.zeros(2, device="meta")),
        ("w", torch.zeros(2, 2).to_sparse()),
        ("w" * 2000, torch.zeros(2)),
    ],
)
def test_tensors_that_cannot_be_sent_are_refused(
    tracker: DeltaCompressionTracker, name: str, tensor: torch.Tensor
) -> None:
    with pytest.raises(UnsupportedModelError, match="w' "):
        tracker.snapshot_baseline([(name, tensor)])


def test_a_new_snapshot_forgets_the_running_sync(tracker: DeltaCompressionTracker) -> None:
    tracker.snapshot_baseline([("w", torch.zeros(2))])
    tracker.encode(list(tracker.compare("w", torch.ones(2))))
    tracker.snapshot_baseline([("w", torch.zeros(2))])
    tracker.on_sync_succeeded()
    assert export(tracker, {"w": torch.zeros(2)}) == []


def test_an_empty_snapshot_is_refused(tracker: DeltaCompressionTracker) -> None:
    with pytest.raises(BaselineError, match="exhausted"):
        tracker.snapshot_baseline(iter(()))
    with pytest.raises(BaselineError):
        tracker.compare("w", torch.ones(2))


def test_a_damaged_retained_payload_gives_the_baseline_up(
    tracker: DeltaCompressionTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(*args: Any, **options: Any) -> bytes:
        return payload_module.join_payload(*args, **options)[:-1] + b"?"

    monkeypatch.setattr(baseline, "join_payload", damaged)
    tracker.snapshot_baseline([("w", torch.zeros(2))])
    tracker.encode(list(tracker.compare("w", torch.ones(2))))
    tracker.on_sync_succeeded()
    with pytest.raises(BaselineError, match=r"only in part \(ChecksumError"):
        tracker.settle()
    with pytest.raises(BaselineError, match="call snapshot_baseline"):
        tracker.compare("w", torch.ones(2))


# Threads and memory


def test_one_thread_compares_while_another_encodes(tracker: DeltaCompressionTracker) -> None:
    names = [f"w{index}" for index in range(60)]
    old = {name: torch.zeros(500) for name in names}
    new = {name: torch.full((500,), float(index)) for index, name in enumerate(names)}
    tracker.snapshot_baseline(old.items())
    deltas: queue.Queue[list[CodedDelta] | None] = queue.Queue(maxsize=2)
    payloads: list[SparsePayload] = []

    def encode() -> None:
        while (batch := deltas.get(timeout=30)) is not None:
            payloads.append(tracker.encode(batch))

    encoder = threading.Thread(target=encode)
    encoder.start()
    for name in names:
        deltas.put(list(tracker.compare(name, new[name])), timeout=30)
    deltas.put(None, timeout=30)
    encoder.join(timeout=30)
    tracker.finish_export()
    receive(old, payloads)
    assert_same_bits(old, new)
    tracker.on_sync_succeeded()
    assert export(tracker, new) == []


def test_a_payload_encoded_across_the_end_of_a_sync_is_not_kept(
    tracker: DeltaCompressionTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **options: Any) -> bytes:
        tracker.on_sync_failed()
        return payload_module.join_payload(*args, **options)

    tracker.snapshot_baseline([("w", torch.zeros(2))])
    deltas = list(tracker.compare("w", torch.ones(2)))
    monkeypatch.setattr(baseline, "join_payload", interrupted)
    with pytest.raises(BaselineError, match="the sync ended while"):
        tracker.encode(deltas)
    tracker.on_sync_succeeded()
    assert export(tracker, {"w": torch.zeros(2)}) == []


class LargestAllocation(TorchDispatchMode):
    """Watches the largest storage that an operation returns and that no argument had."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        known = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in known:
            self.bytes = max(self.bytes, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("overwrite", [False, True])
def test_comparing_takes_memory_of_a_chunk_not_of_the_tensor(
    transposed: bool, overwrite: bool
) -> None:
    chunk = 1 << 16
    old = torch.zeros(1024, 2048, dtype=torch.bfloat16)  # 4 MiB, 32 chunks
    if transposed:
        old = old.t()
    tracker = DeltaCompressionTracker(config=SyncConfig(chunk_elements=chunk))
    tracker.snapshot_baseline([("w", old)])
    routed(tracker, overwrite={"w"} if overwrite else set())
    new = old.clone()
    new[::50, ::50] = 1
    with LargestAllocation() as largest:
        next(tracker.compare("w", new))  # The first use of a mode imports much.
        tracker.on_sync_failed()
        tracemalloc.start()
        for _ in tracker.compare("w", new):
            pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert largest.bytes <= 4 * chunk
    assert peak < 1 << 20


# Files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "base"


def test_the_baseline_lives_in_files_until_closed(folder: Path) -> None:
    tracker = DeltaCompressionTracker(config=SyncConfig(baseline_dir=folder))
    weights = make_weights()
    tracker.snapshot_baseline(weights.items())
    files = sorted(folder.rglob("*.bits"))
    filled = [tensor for tensor in weights.values() if tensor.numel()]
    assert [file.stat().st_size for file in files] == [tensor.nbytes for tensor in filled]
    assert all(file.parent == tracker.folder and file.parent.parent == folder for file in files)
    assert files[0].read_bytes() == bits_view(weights["embed"]).numpy().tobytes()
    new = changed(weights)
    export(tracker, new)
    assert files[0].read_bytes() == bits_view(weights["embed"]).numpy().tobytes()
    tracker.on_sync_succeeded()
    tracker.settle()
    assert files[0].read_bytes() == bits_view(new["embed"]).numpy().tobytes()
    tracker.close()
    tracker.close()
    assert list(folder.iterdir()) == []


def test_a_second_snapshot_takes_the_place_of_the_first(folder: Path) -> None:
    tracker = DeltaCompressionTracker(config=SyncConfig(baseline_dir=folder))
    for _ in range(2):
        tracker.snapshot_baseline([("w", torch.zeros(10))])
        assert len(list(folder.rglob("*.bits"))) == 1
    tracker.close()


def test_two_trackers_can_share_a_folder(folder: Path) -> None:
    config = SyncConfig(baseline_dir=folder)
    one, two = DeltaCompressionTracker(config=config), DeltaCompressionTracker(config=config)
    one.snapshot_baseline([("w", torch.zeros(10))])
    two.snapshot_baseline([("w", torch.ones(10))])
    one.close()
    assert export(two, {"w": torch.ones(10)}) == []
    two.close()


def test_a_full_disk_is_an_error_at_the_snapshot(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    tracker = DeltaCompressionTracker(config=SyncConfig(baseline_dir=folder))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(BaselineError, match=r"No space left on device.*baseline_dir"):
        tracker.snapshot_baseline([("w", torch.zeros(10))])
    assert list(folder.iterdir()) == []


# Files that outlive their process


def reopened(folder: Path | None) -> tuple[DeltaCompressionTracker, str]:
    assert folder is not None
    tracker = DeltaCompressionTracker(config=SyncConfig(chunk_elements=64))
    return tracker, tracker.reopen_baseline(folder)


@pytest.fixture
def left(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A baseline that was moved twice and then left by its process, and what it holds."""
    tracker = DeltaCompressionTracker(config=SyncConfig(baseline_dir=folder, chunk_elements=64))
    weights = make_weights()
    tracker.snapshot_baseline(weights.items())
    tracker.annotate("start")
    for step in range(2):
        weights = changed(weights)
        export(tracker, weights)
        tracker.on_sync_succeeded(f"step {step}")
    path = tracker.folder
    assert path is not None
    tracker.close(keep=True)
    return path, weights


def test_another_process_takes_the_files_over(left: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, weights = left
    tracker, note = reopened(path)
    assert note == "step 1"
    assert tracker.state_dict_info == {n: (tuple(t.shape), t.dtype) for n, t in weights.items()}
    assert export(tracker, weights) == []
    tracker.on_sync_failed()
    new = changed(weights)
    assert export(tracker, new)
    tracker.on_sync_succeeded()
    tracker.close(keep=True)
    again, note = reopened(path)
    assert note == "step 1"
    assert export(again, new) == []
    again.close()
    assert not path.exists()


def test_files_of_a_process_that_died_while_changing_them_are_refused(
    left: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    path, _ = left
    (path / "index.json").unlink()  # what a move does first
    with pytest.raises(BaselineError, match=r"has no index.*snapshot the weights"):
        reopened(path)
    assert list(path.glob("*.bits"))


def test_a_move_that_fails_leaves_no_index(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = DeltaCompressionTracker(config=SyncConfig(baseline_dir=folder))
    tracker.snapshot_baseline([("w", torch.zeros(100))])
    export(tracker, {"w": torch.ones(100)})

    def fail(*_: object) -> None:
        raise OSError("input/output error")

    monkeypatch.setattr("vllm_sparse_refit.trainer.baseline.apply_delta", fail)
    tracker.on_sync_succeeded()
    path = tracker.folder
    with pytest.raises(BaselineError, match="only in part"):
        tracker.settle()
    tracker.close(keep=True)
    with pytest.raises(BaselineError, match="has no index"):
        reopened(path)


@pytest.mark.parametrize("size", [0, 3, -1])
def test_files_that_are_not_what_was_written_are_refused(
    left: tuple[Path, dict[str, torch.Tensor]], size: int
) -> None:
    path, _ = left
    bits = sorted(path.glob("*.bits"))[0]
    data = bytearray(bits.read_bytes())
    if size < 0:
        data[17] ^= 4
    else:
        data = data[:size]
    bits.write_bytes(data)
    with pytest.raises(BaselineError, match=r"are not those of its index|bytes, not"):
        reopened(path)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format": "other", "tensors": []}'])
def test_an_index_that_is_none_is_refused(
    left: tuple[Path, dict[str, torch.Tensor]], text: str
) -> None:
    path, _ = left
    (path / "index.json").write_text(text)
    with pytest.raises(BaselineError, match="cannot be read"):
        reopened(path)


def test_files_in_use_are_refused(folder: Path) -> None:
    tracker = DeltaCompressionTracker(config=SyncConfig(baseline_dir=folder))
    tracker.snapshot_baseline([("w", torch.zeros(100))])
    with pytest.raises(BaselineError, match=r"in use: .*close\(keep=True\)"):
        reopened(tracker.folder)
    assert export(tracker, {"w": torch.zeros(100)}) == []
    tracker.close()
    with pytest.raises(BaselineError, match="it is no folder"):
        reopened(folder / "none")
