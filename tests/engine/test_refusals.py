"""Bad input: each has its own clear error, and the engine stays exactly as it was."""

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import build_checkpoint, perturb_checkpoint
from tests.codec import crafted
from tests.engine.engines import checksums, engine, generate
from vllm_sparse_refit import RefitError, SyncConfig, WeightSynchronizer
from vllm_sparse_refit.checksum import checksum_hex
from vllm_sparse_refit.codec import kernels
from vllm_sparse_refit.codec.delta import SparseOperation, TensorDelta
from vllm_sparse_refit.codec.payload import encode_payload
from vllm_sparse_refit.errors import (
    BaselineError,
    ConfigError,
    PayloadRejectedError,
    TensorMismatchError,
    UnsupportedModelError,
)
from vllm_sparse_refit.trainer.weights import named_weights
from vllm_sparse_refit.transport.client import ZmqSparseRefitClient

pytestmark = pytest.mark.engine

NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("refusals") / "before", "llama")


@pytest.fixture(scope="module")
def after(before: Path) -> Path:
    perturb_checkpoint(before, before.parent / "after", fraction=0.05, change="values")
    return before.parent / "after"


@pytest.fixture(scope="module")
def llm(before: Path) -> Iterator[Any]:
    with engine(before) as running:
        yield running


@pytest.fixture
def sync(llm: Any, before: Path, after: Path) -> Iterator[WeightSynchronizer]:
    """A synchronizer whose engine must be unchanged, idle and usable after the test."""
    weights, answers = checksums(llm), generate(llm)
    synchronizer = WeightSynchronizer.connect(llm)
    synchronizer.snapshot(before)
    version = synchronizer.version
    yield synchronizer
    (status,) = synchronizer.status()
    assert status["state"] == "idle"
    assert version is not None
    assert status["version"]["digest"] == version.digest
    assert checksums(llm) == weights
    assert generate(llm) == answers
    # The next sync works, there and back.
    fresh = WeightSynchronizer.connect(llm)
    fresh.snapshot(before)
    assert fresh.sync(after).changed_elements > 0
    assert checksums(llm) != weights
    fresh.sync(before)
    assert checksums(llm) == weights


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in named_weights(folder)}


# --- exports that do not fit the snapshot ------------------------------------------------------------


def test_an_unknown_tensor(sync: WeightSynchronizer, after: Path) -> None:
    with pytest.raises(TensorMismatchError, match=r"model\.surprise\.weight"):
        sync.sync({**_weights(after), "model.surprise.weight": torch.zeros(3)})


def test_a_wrong_shape(sync: WeightSynchronizer, after: Path) -> None:
    weights = _weights(after)
    weights[NORM] = weights[NORM].reshape(2, -1)
    with pytest.raises(TensorMismatchError, match=r"model\.norm\.weight.*\[?\(?2, 64"):
        sync.sync(weights)


def test_a_wrong_dtype(sync: WeightSynchronizer, after: Path) -> None:
    weights = _weights(after)
    weights[NORM] = weights[NORM].float()
    with pytest.raises(TensorMismatchError, match=r"model\.norm\.weight.*float32"):
        sync.sync(weights)


def test_a_missing_tensor(sync: WeightSynchronizer, after: Path) -> None:
    weights = _weights(after)
    del weights[NORM]
    with pytest.raises(TensorMismatchError, match=r"model\.norm\.weight"):
        sync.sync(weights)


def test_a_tensor_given_twice(sync: WeightSynchronizer, after: Path) -> None:
    weights = list(_weights(after).items())
    with pytest.raises(TensorMismatchError, match=weights[0][0].replace(".", r"\.")):
        sync.sync([*weights, weights[0]])


def test_an_export_that_raises(sync: WeightSynchronizer, after: Path) -> None:
    class ExportFailedError(Exception):
        pass

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        yield from itertools.islice(_weights(after).items(), 5)
        raise ExportFailedError

    with pytest.raises(ExportFailedError):
        sync.sync(export())


# --- snapshots that do not fit the engine ------------------------------------------------------------


def test_sync_before_snapshot(llm: Any, after: Path) -> None:
    with pytest.raises(BaselineError, match=r"snapshot\(\)"):
        WeightSynchronizer.connect(llm).sync(after)


def test_a_snapshot_with_a_tensor_that_no_worker_loads(
    sync: WeightSynchronizer, llm: Any, before: Path
) -> None:
    weights = {**_weights(before), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16)}
    stranger = WeightSynchronizer.connect(llm)
    with pytest.raises(UnsupportedModelError, match=r"inv_freq.*ignore"):
        stranger.snapshot(weights)
    with pytest.raises(BaselineError):
        stranger.sync(weights)
    told = WeightSynchronizer.connect(llm, config=SyncConfig(ignore=("*.inv_freq",)))
    told.snapshot(weights)
    assert told.sync(weights).payloads == 0


def test_a_snapshot_of_another_shape(sync: WeightSynchronizer, llm: Any, before: Path) -> None:
    weights = _weights(before)
    weights[NORM] = torch.zeros(7, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight"):
        WeightSynchronizer.connect(llm).snapshot(weights)


# --- payloads, as an attacker or a broken network would send them -----------------------------------


def _delta(**changes: Any) -> TensorDelta:
    fields: dict[str, Any] = {
        "name": NORM,
        "shape": (128,),
        "dtype": torch.bfloat16,
        "operation": SparseOperation.XOR,
        "begin": 0,
        "end": 128,
        "locations": torch.tensor([3, 90], dtype=torch.int32),
        "values": torch.tensor([1, 2], dtype=torch.int16),
    }
    return TensorDelta(**{**fields, **changes})


@contextlib.contextmanager
def _open_transfer(sync: WeightSynchronizer, llm: Any) -> Iterator[ZmqSparseRefitClient]:
    (status,) = sync.status()
    digest = status["version"]["digest"]
    (reply,) = llm.collective_rpc(
        "sparse_refit_begin",
        args=("attack", digest, "label"),
        kwargs={"sequence": status["server"]["sequence"] + 1},
    )
    assert reply["ok"], reply
    client = ZmqSparseRefitClient(status["address"], timeout_s=10, producer_id=0, retries=0)
    try:
        yield client
    finally:
        client.close()
        (reply,) = llm.collective_rpc("sparse_refit_abort", args=("attack",))
        assert reply["ok"], reply


def _send(
    client: ZmqSparseRefitClient, body: bytes, checksum: str | None = None, payload_id: int = 0
) -> dict[str, Any]:
    return client.send_payload(
        transfer_id="attack",
        sequence=client.status()["server"]["sequence"],
        payload_id=payload_id,
        checksum=checksum_hex(body) if checksum is None else checksum,
        verification_candidates=0,
        body=body,
    )


GOOD = encode_payload([_delta()])


def _out_of_range() -> bytes:
    row = crafted.row(NORM.encode(), (128,), end=128, first=120, count=2)
    return crafted.payload(row, b"\x32", codes=(b"\1\2", b"\0\0"), tensors=12)


def _one_location_twice() -> bytes:
    """Gaps cannot repeat a location, so two deltas of the tensor do."""
    rows = [
        crafted.row(NORM.encode(), (128,), begin=begin, end=128, first=3, count=1, flags=0)
        for begin in (0, 3)
    ]
    codes = (b"\1\2", b"\0\0")
    return crafted.payload(b"".join(rows), b"", codes=codes, deltas=2, tensors=4)


def _hostile() -> dict[str, tuple[bytes, str]]:
    flipped = bytearray(GOOD)
    flipped[-1] ^= 4
    return {
        "truncated": (GOOD[:-3], "truncated|bytes|hecksum"),
        "flipped bit": (bytes(flipped), "hecksum"),
        "unknown tensor": (encode_payload([_delta(name="model.surprise")]), r"model\.surprise"),
        "wrong shape": (encode_payload([_delta(shape=(64, 2))]), r"model\.norm\.weight"),
        "wrong dtype": (encode_payload([_delta(dtype=torch.float16)]), r"float16"),
        "duplicate location": (_one_location_twice(), r"model\.norm\.weight.*both speak for"),
        "location out of range": (_out_of_range(), r"model\.norm\.weight.*outside its span"),
    }


@pytest.mark.parametrize("case", list(_hostile()))
def test_a_hostile_payload(case: str, sync: WeightSynchronizer, llm: Any) -> None:
    body, message = _hostile()[case]
    with _open_transfer(sync, llm) as client, pytest.raises(PayloadRejectedError, match=message):
        _send(client, body)
    (reply,) = llm.collective_rpc("update_weights_from_decoded_sparse_payload", args=(body,))
    assert not reply["ok"]


def test_a_wrong_checksum(sync: WeightSynchronizer, llm: Any) -> None:
    with _open_transfer(sync, llm) as client, pytest.raises(PayloadRejectedError, match="hecksum"):
        _send(client, GOOD, checksum="0" * 32)


def test_a_payload_for_no_open_transfer(sync: WeightSynchronizer, llm: Any) -> None:
    with _open_transfer(sync, llm) as client:
        assert _send(client, GOOD)["duplicate"] is False
    (status,) = sync.status()
    client = ZmqSparseRefitClient(status["address"], timeout_s=10, producer_id=0, retries=0)
    other = encode_payload([_delta(values=torch.tensor([3, 5], dtype=torch.int16))])
    with contextlib.closing(client):
        assert _send(client, GOOD)["duplicate"] is True  # dropped
        with pytest.raises(PayloadRejectedError, match="not open"):
            _send(client, other, payload_id=1)


def test_two_payloads_for_the_same_elements(sync: WeightSynchronizer, llm: Any) -> None:
    with _open_transfer(sync, llm) as client:
        _send(client, GOOD)
        other = encode_payload([_delta(values=torch.tensor([3, 5], dtype=torch.int16))])
        _send(client, other, payload_id=1)
        (reply,) = llm.collective_rpc("sparse_refit_prepare", args=("attack", {"0": 2}))
        assert not reply["ok"]
        assert NORM in reply["error"]
        (reply,) = llm.collective_rpc("sparse_refit_commit", args=("attack",))
        assert not reply["ok"]


def test_a_commit_that_fails_is_undone(
    sync: WeightSynchronizer, llm: Any, after: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scatter, calls = kernels.scatter, 0

    def half(writes: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        scatter(writes, **options)
        if calls == 1:
            raise RuntimeError("the disk is on fire")

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "scatter", half)
        with pytest.raises(RefitError, match="the disk is on fire"):
            sync.sync(after)
    assert calls > 1  # and taken back


def test_other_arguments_of_connect(llm: Any) -> None:
    with pytest.raises(ConfigError, match="at least one"):
        WeightSynchronizer.connect([])
    with pytest.raises(ConfigError, match="twice"):
        WeightSynchronizer.connect([llm, llm])
    with pytest.raises(ConfigError, match="str"):
        WeightSynchronizer.connect("http://127.0.0.1:8000")
