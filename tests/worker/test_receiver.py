"""A worker's transfers from begin to release: a toy model behind, a real server in front."""

import contextlib
import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.apply.toys import (
    LIMITS,
    TOYS,
    ToyModel,
    Weights,
    assert_same_bits,
    deltas_between,
    mixed,
    payloads_of,
    random_weights,
    state_bits,
    toy_applier,
)
from vllm_sparse_refit.apply.processing import PackedLayer
from vllm_sparse_refit.checksum import checksum_hex
from vllm_sparse_refit.codec.delta import SparseOperation
from vllm_sparse_refit.codec.dtypes import dtype_name
from vllm_sparse_refit.config import WorkerConfig
from vllm_sparse_refit.errors import PayloadRejectedError
from vllm_sparse_refit.transport.client import ZmqSparseRefitClient
from vllm_sparse_refit.worker.extension import (
    RECEIVER_ATTRIBUTE,
    RPC_METHODS,
    SparseRefitWorkerExtension,
)
from vllm_sparse_refit.worker.receiver import Receiver, State

BF16 = torch.bfloat16
TOY = TOYS["mixed"]
INITIAL = "0" * 32

Reply = dict[str, Any]


class Rig:
    """A worker with the extension, its receiver and server, and a trainer's client for it."""

    def __init__(self, packed: tuple[PackedLayer, ...] = (), **config: Any) -> None:
        self.old = random_weights(TOY, BF16, 1)
        self.new = mixed(self.old, random_weights(TOY, BF16, 2), seed=3)
        self.model = TOY.model(BF16, self.old)
        self.before = state_bits(self.model)
        self.after = state_bits(TOY.model(BF16, self.new))
        self.fails: Exception | None = None
        self.sequence = 0
        self.model._loader = self._load
        self.applier = toy_applier(self.model, refused=packed)
        settings = WorkerConfig(**{"timeout_s": 5.0, **config})
        self.receiver = Receiver(self.applier, settings, LIMITS, None)
        self.worker = Worker()
        setattr(self.worker, RECEIVER_ATTRIBUTE, self.receiver)
        self.receiver.start()
        self.client = ZmqSparseRefitClient(
            self.receiver.address, timeout_s=5.0, producer_id=0, retries=0
        )
        info = {n: [list(shape), dtype_name(d)] for n, (shape, d) in TOY.info(BF16).items()}
        self.discovered = self.call("discover_native_skips", info)
        self.payloads = payloads_of(
            deltas_between(self.old, self.new, self.applier.discovery, SparseOperation.XOR)
        )

    def _load(self, model: ToyModel, weights: Weights) -> set[str] | None:
        """The toy's loader, which fails after its first tensor when told to."""

        def counted() -> Iterator[tuple[str, torch.Tensor]]:
            for number, item in enumerate(weights):
                if number and self.fails is not None:
                    raise self.fails
                yield item

        return TOY.loader(model, counted())

    def call(self, method: str, *args: Any, **kwargs: Any) -> Reply:
        """One RPC, as an executor makes it; every reply must survive JSON unchanged."""
        reply = getattr(self.worker, method)(*args, nonce="n1", **kwargs)
        assert json.loads(json.dumps(reply)) == reply
        assert (reply["rank"], reply["nonce"]) == (3, "n1")
        assert reply["ok"] is (reply["error"] is None)
        return reply

    def ok(self, method: str, *args: Any, **kwargs: Any) -> Reply:
        reply = self.call(method, *args, **kwargs)
        assert reply["ok"], reply
        return reply

    def refused(self, method: str, *args: Any, **kwargs: Any) -> str:
        reply = self.call(method, *args, **kwargs)
        assert not reply["ok"], reply
        return f"{reply['error_type']}: {reply['error']}"

    @property
    def state(self) -> str:
        state = self.ok("sparse_refit_status")["state"]
        assert isinstance(state, str)
        return state

    @property
    def digest(self) -> str:
        digest = self.ok("sparse_refit_status")["version"]["digest"]
        assert isinstance(digest, str)
        return digest

    def begin(
        self, transfer_id: str = "t1", base: str | None = None, label: str = "step-1"
    ) -> Reply:
        base = self.digest if base is None else base
        sequence = self.ok("sparse_refit_status")["server"]["sequence"] + 1
        reply = self.call("sparse_refit_begin", transfer_id, base, label, sequence=sequence)
        if reply["ok"]:
            self.sequence = sequence
        return reply

    def send(self, body: bytes, payload_id: int = 0, transfer_id: str = "t1") -> Reply:
        return self.client.send_payload(
            transfer_id=transfer_id,
            sequence=self.sequence,
            payload_id=payload_id,
            checksum=checksum_hex(body),
            verification_candidates=1,
            body=body,
        )

    def send_all(self, transfer_id: str = "t1") -> None:
        for payload_id, body in enumerate(self.payloads):
            self.send(body, payload_id, transfer_id)

    def prepare(self, transfer_id: str = "t1") -> Reply:
        return self.call("sparse_refit_prepare", transfer_id, {"0": len(self.payloads)})

    def advance(self, state: State, transfer_id: str = "t1") -> None:
        """From idle to ``state`` with everything in order."""
        assert self.begin(transfer_id)["ok"]
        self.send_all(transfer_id)
        if state is not State.OPEN:
            assert self.prepare(transfer_id)["ok"]
        if state is State.COMMITTED:
            self.ok("sparse_refit_commit", transfer_id)
        assert self.state == state

    def assert_as_before(self) -> None:
        """Idle, and no version or weight is another than at the start."""
        assert self.state == State.IDLE
        assert self.digest == INITIAL
        assert_same_bits(self.model, self.before)


class Worker(SparseRefitWorkerExtension):
    rank = 3


@contextlib.contextmanager
def rig_of(**options: Any) -> Iterator[Rig]:
    rig = Rig(**options)
    try:
        yield rig
    finally:
        rig.client.close()
        rig.receiver.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    with rig_of() as made:
        yield made


# --- the way through -----------------------------------------------------------------------------


def test_discovery_reports_plain_types(rig: Rig) -> None:
    assert rig.discovered["ok"]
    expected = ("skips", "dense", "aliases", "uncovered")
    assert all(rig.discovered[key] == [] for key in expected)
    assert rig.discovered["overwrite"] == ["first", "second"]
    assert rig.discovered["tied"] == rig.discovered["narrowed"] == {}
    info = {n: [list(shape), "float32"] for n, (shape, _) in TOY.info(BF16).items()}
    found = rig.ok("discover_native_skips", info)
    assert found["narrowed"] == dict.fromkeys("qkv", "bfloat16")
    assert rig.discovered["unsupported"] == rig.discovered["packed"] == {}


def test_a_whole_transfer(rig: Rig) -> None:
    assert rig.begin()["ok"]
    rig.send_all()
    assert_same_bits(rig.model, rig.before)

    prepared = rig.prepare()
    assert prepared["ok"]
    assert prepared["changed_elements"] > 0
    assert prepared["staged_bytes"] > 0
    assert_same_bits(rig.model, rig.before)

    rig.ok("sparse_refit_commit", "t1")
    assert_same_bits(rig.model, rig.after)
    finished = rig.ok("finish_sparse_delta_refit")
    assert finished["samples_compared"] > 0
    assert rig.digest == INITIAL

    released = rig.ok("sparse_refit_release", "t1")
    assert released["version"] == {"label": "step-1", "digest": prepared["target_digest"]}
    assert rig.digest == prepared["target_digest"] != INITIAL
    assert rig.state == State.IDLE
    assert_same_bits(rig.model, rig.after)


def test_a_second_transfer_takes_the_first_one_back(rig: Rig) -> None:
    rig.advance(State.COMMITTED)
    rig.ok("sparse_refit_release", "t1")
    rig.payloads = payloads_of(
        deltas_between(rig.new, rig.old, rig.applier.discovery, SparseOperation.OVERWRITE)
    )
    first = rig.digest
    rig.advance(State.COMMITTED, "t2")
    rig.ok("sparse_refit_release", "t2")
    assert_same_bits(rig.model, rig.before)
    assert len({INITIAL, first, rig.digest}) == 3


def test_an_empty_transfer_changes_nothing_but_the_version(rig: Rig) -> None:
    rig.payloads = []
    rig.advance(State.COMMITTED)
    rig.ok("sparse_refit_release", "t1")
    assert_same_bits(rig.model, rig.before)


def test_a_repeated_payload_is_staged_once(rig: Rig) -> None:
    assert rig.begin()["ok"]
    rig.send_all()
    assert rig.send(rig.payloads[0], 0)["duplicate"]
    assert rig.prepare()["ok"]
    rig.ok("sparse_refit_commit", "t1")
    assert_same_bits(rig.model, rig.after)


# --- giving up -----------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [State.OPEN, State.PREPARED, State.COMMITTED])
def test_an_abort_in_any_state_restores_and_the_next_transfer_works(rig: Rig, state: State) -> None:
    rig.advance(state)
    assert rig.ok("sparse_refit_abort", "t1")["aborted"]
    rig.assert_as_before()

    rig.advance(State.COMMITTED)  # even under the same id
    rig.ok("sparse_refit_release", "t1")
    assert_same_bits(rig.model, rig.after)


def test_an_abort_of_another_transfer_does_nothing(rig: Rig) -> None:
    assert rig.ok("sparse_refit_abort", "t9") == rig.ok("sparse_refit_abort", "t9")
    rig.advance(State.COMMITTED)
    assert not rig.ok("sparse_refit_abort", "t9")["aborted"]
    assert rig.state == State.COMMITTED
    assert_same_bits(rig.model, rig.after)


# --- refusals ------------------------------------------------------------------------------------


def test_another_base_version_is_refused_and_the_own_one_named(rig: Rig) -> None:
    reply = rig.begin(base="f" * 32)
    assert not reply["ok"]
    assert reply["error_type"] == "VersionMismatchError"
    assert "initial" in reply["error"]
    assert rig.state == State.IDLE


def test_a_new_transfer_takes_the_place_of_an_abandoned_one(rig: Rig) -> None:
    for state in (State.OPEN, State.PREPARED, State.COMMITTED):
        rig.advance(state, f"left {state}")
        assert rig.begin(f"after {state}", INITIAL, "step-2")["ok"]
        assert_same_bits(rig.model, rig.before)
        assert "not open" in rig.refused("sparse_refit_release", f"left {state}")
        rig.ok("sparse_refit_abort", f"after {state}")


def test_an_abandoned_commit_is_kept_by_a_transfer_that_starts_from_it(rig: Rig) -> None:
    rig.advance(State.OPEN, "left")
    target = rig.prepare("left")["target_digest"]
    rig.ok("sparse_refit_commit", "left")
    assert rig.begin("next", target, "step-2")["ok"]
    assert_same_bits(rig.model, rig.after)
    rig.ok("sparse_refit_abort", "next")
    assert rig.digest == target


def test_discovery_takes_an_abandoned_commit_back(rig: Rig) -> None:
    rig.advance(State.COMMITTED)
    rig.ok("discover_native_skips", {})
    assert_same_bits(rig.model, rig.before)
    assert rig.state == State.IDLE


def test_samples_are_compared_with_what_the_loader_put_where(rig: Rig) -> None:
    samples = {
        name: [list(range(weight.numel())), weight.reshape(-1).view(torch.int16).tolist()]
        for name, weight in rig.old.items()
    }
    reply = rig.ok("sparse_refit_compare", samples)
    # What is transformed on its way is not compared.
    assert reply["compared"] == sum(rig.old[name].numel() for name in "qkv")
    assert reply["different"] == {}
    samples["k"][1][7] ^= 1
    assert rig.ok("sparse_refit_compare", samples)["different"] == {"k": 1}


def test_a_version_is_adopted_between_transfers_only(rig: Rig) -> None:
    rig.ok("sparse_refit_adopt", "snapshot", "ab" * 16)
    assert rig.digest == "ab" * 16
    rig.refused("sparse_refit_adopt", "snapshot", b"bytes")
    rig.advance(State.OPEN)
    assert "t1" in rig.refused("sparse_refit_adopt", "snapshot", INITIAL)


def test_a_direct_update_does_not_interrupt_a_transfer(rig: Rig) -> None:
    assert rig.begin()["ok"]
    assert "t1" in rig.refused("update_weights_from_decoded_sparse_payload", *rig.payloads)
    assert rig.state == State.OPEN


def test_begin_needs_discovery_first() -> None:
    with rig_of() as rig:
        rig.applier._discovery = None
        assert "discover" in rig.begin()["error"]


def test_begin_refuses_a_packed_model() -> None:
    with rig_of(packed=(PackedLayer("moe", "parameter 'w13' was replaced"),)) as rig:
        assert rig.discovered["packed"] == {"moe": "parameter 'w13' was replaced"}
        assert "moe is packed" in rig.begin()["error"]
        assert "moe is packed" in rig.refused(
            "update_weights_from_decoded_sparse_payload", *rig.payloads
        )
        assert_same_bits(rig.model, rig.before)


@pytest.mark.parametrize("transfer_id", ["t1", "t2"])
def test_a_payload_for_a_transfer_that_is_not_open_is_refused(rig: Rig, transfer_id: str) -> None:
    if transfer_id == "t2":
        assert rig.begin("t1")["ok"]
    with pytest.raises(PayloadRejectedError, match=f"{transfer_id} is not open"):
        rig.send(rig.payloads[0], transfer_id=transfer_id)


def test_a_payload_after_prepare_is_refused(rig: Rig) -> None:
    rig.advance(State.PREPARED)
    with pytest.raises(PayloadRejectedError):
        rig.send(rig.payloads[0], payload_id=99)
    rig.ok("sparse_refit_commit", "t1")
    assert_same_bits(rig.model, rig.after)


@pytest.mark.parametrize("body", [b"", b"VSRP", b"\0" * 200])
def test_a_malformed_payload_is_refused_and_not_staged(rig: Rig, body: bytes) -> None:
    assert rig.begin()["ok"]
    with pytest.raises(PayloadRejectedError):
        rig.send(body)
    assert rig.ok("sparse_refit_status")["staged_bytes"] == 0
    rig.send_all()
    assert rig.prepare()["ok"]


def test_staged_bytes_are_limited() -> None:
    with rig_of(max_staged_bytes=4000) as rig:
        assert rig.begin()["ok"]
        rig.send(rig.payloads[0])
        with pytest.raises(PayloadRejectedError, match="max_staged_bytes"):
            rig.send_all()  # the first one is a repeat
        assert 0 < rig.ok("sparse_refit_status")["staged_bytes"] <= 4000


def test_prepare_times_out_on_a_missing_payload_and_can_be_aborted() -> None:
    with rig_of(timeout_s=0.05) as rig:
        assert rig.begin()["ok"]
        rig.send(rig.payloads[0])
        assert rig.prepare()["error_type"] == "TransportTimeoutError"
        assert rig.state == State.OPEN
        rig.ok("sparse_refit_abort", "t1")
        rig.advance(State.PREPARED, "t2")


@pytest.mark.parametrize(
    "expected",
    [
        lambda sent: {"1": sent},
        lambda sent: {"0": sent - 1, "1": 1},
        lambda sent: {"0": sent - 1},
        lambda sent: {"0": sent + 1},
        lambda sent: {"0": -sent},
        lambda sent: {"0": "many"},
        lambda sent: {},
        lambda sent: ["0"],
        lambda sent: sent,
    ],
)
def test_prepare_wants_the_right_payloads_of_each_producer(
    expected: Callable[[int], object],
) -> None:
    with rig_of(timeout_s=0.05) as rig:
        assert rig.begin()["ok"]
        rig.send_all()
        rig.refused("sparse_refit_prepare", "t1", expected(len(rig.payloads)))
        assert rig.state == State.OPEN
        rig.ok("sparse_refit_abort", "t1")


def test_prepare_refuses_elements_sent_twice(rig: Rig) -> None:
    rig.payloads.append(rig.payloads[0])
    assert rig.begin()["ok"]
    rig.send_all()
    assert "twice" in rig.prepare()["error"]
    rig.ok("sparse_refit_abort", "t1")


@pytest.mark.parametrize(
    ("state", "refused"),
    [
        (State.IDLE, ["prepare", "commit", "release"]),
        (State.OPEN, ["commit", "release"]),
        (State.PREPARED, ["prepare", "release"]),
        (State.COMMITTED, ["prepare", "commit"]),
    ],
)
def test_steps_out_of_order_are_refused_and_change_nothing(
    rig: Rig, state: State, refused: list[str]
) -> None:
    if state is not State.IDLE:
        rig.advance(state)
    bits = state_bits(rig.model)
    for step in refused:
        arguments = [{"0": len(rig.payloads)}] if step == "prepare" else []
        assert "TransactionError" in rig.refused(f"sparse_refit_{step}", "t1", *arguments)
    assert rig.state == state
    assert_same_bits(rig.model, bits)


# --- failures during the commit ------------------------------------------------------------------


def test_a_commit_that_fails_leaves_state_and_bits_and_may_be_repeated(rig: Rig) -> None:
    rig.advance(State.PREPARED)
    rig.fails = KeyError("layer 7")
    assert "layer 7" in rig.refused("sparse_refit_commit", "t1")
    assert rig.state == State.PREPARED
    assert_same_bits(rig.model, rig.before)
    assert "layer 7" in rig.ok("sparse_refit_status")["last_error"]
    rig.fails = None
    rig.ok("sparse_refit_commit", "t1")
    assert_same_bits(rig.model, rig.after)


def test_a_commit_that_fails_can_be_aborted(rig: Rig) -> None:
    rig.advance(State.PREPARED)
    rig.fails = KeyError("layer 7")
    rig.refused("sparse_refit_commit", "t1")
    rig.ok("sparse_refit_abort", "t1")
    assert rig.state == State.IDLE
    assert_same_bits(rig.model, rig.before)


def test_an_interrupted_commit_leaves_every_bit(rig: Rig) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    rig.advance(State.PREPARED)
    rig.applier._model_runner.reset_lora_state = interrupted
    with pytest.raises(KeyboardInterrupt):
        rig.receiver.commit("t1")
    assert_same_bits(rig.model, rig.before)
    rig.applier._model_runner.reset_lora_state = lambda: None
    rig.ok("sparse_refit_commit", "t1")
    assert_same_bits(rig.model, rig.after)


def test_a_commit_whose_adapter_reset_fails_leaves_every_bit(rig: Rig) -> None:
    rig.advance(State.PREPARED)
    rig.applier._model_runner.reset_lora_state = _raise
    assert "broken" in rig.refused("sparse_refit_commit", "t1")
    assert_same_bits(rig.model, rig.before)


def _raise(*args: object) -> None:
    raise RuntimeError("broken")


def test_tampering_is_found_by_finish_and_taken_back_by_abort(rig: Rig) -> None:
    rig.advance(State.COMMITTED)
    rig.model.qkv.data.view(torch.int16).bitwise_not_()
    assert "VerificationError" in rig.refused("finish_sparse_delta_refit")
    assert rig.state == State.COMMITTED
    rig.ok("sparse_refit_abort", "t1")
    assert rig.digest == INITIAL


def test_a_rollback_that_fails_breaks_the_worker_for_good(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.advance(State.COMMITTED)
    monkeypatch.setattr(rig.applier, "roll_back", _raise)
    assert "weights are mixed" in rig.refused("sparse_refit_abort", "t1")
    monkeypatch.undo()
    assert rig.state == State.BROKEN

    assert "rollback failed" in rig.begin("t2", INITIAL)["error"]
    rig.refused("sparse_refit_prepare", "t1", {})
    rig.refused("sparse_refit_commit", "t1")
    rig.refused("sparse_refit_release", "t1")
    rig.refused("discover_native_skips", {})
    rig.refused("update_weights_from_decoded_sparse_payload", *rig.payloads)
    with pytest.raises(PayloadRejectedError):
        rig.send(rig.payloads[0], payload_id=50)
    assert rig.state == State.BROKEN


def test_an_interrupt_of_a_rollback_waits_until_it_is_done(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    rig.advance(State.COMMITTED)
    monkeypatch.setattr(rig.applier, "roll_back", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rig.receiver.abort("t1")
    assert (rig.state, rig.digest) == (State.IDLE, INITIAL)
    assert_same_bits(rig.model, rig.before)


def test_an_abort_does_not_mend_a_broken_worker(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.advance(State.COMMITTED)
    monkeypatch.setattr(rig.applier, "roll_back", _raise)
    rig.refused("sparse_refit_abort", "t1")
    rig.refused("sparse_refit_abort", "t1")
    assert rig.state == State.BROKEN


@pytest.mark.parametrize(
    ("state", "outcome"),
    [(State.OPEN, "given up"), (State.PREPARED, "given up"), (State.COMMITTED, "made final")],
)
def test_whoever_sees_a_silent_transfer_ended_sees_why(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, state: State, outcome: str
) -> None:
    rig.advance(state)
    seen = []
    end = rig.receiver._server.end

    def watched(transfer_id: str) -> None:  # the first thing done once the state has changed
        seen.append(rig.receiver.status())
        end(transfer_id)

    monkeypatch.setattr(rig.receiver._server, "end", watched)
    with rig.receiver._lock:
        assert rig.receiver._transfer is not None
        rig.receiver._transfer.heard_at -= rig.receiver._config.transfer_timeout_s
    with rig.receiver._calls:
        rig.receiver._end_silent()
    (status,) = seen
    assert status["state"] == State.IDLE
    assert f"{outcome} because nothing was heard" in status["last_error"]
    assert f"now at version {rig.receiver._version}" in status["last_error"]
    assert_same_bits(rig.model, rig.after if state is State.COMMITTED else rig.before)


# --- updates without a transfer ------------------------------------------------------------------


def test_direct_updates_are_finished_together(rig: Rig) -> None:
    for payload in rig.payloads:
        rig.ok("update_weights_from_decoded_sparse_payload", payload)
    assert rig.state == State.UPDATING
    assert_same_bits(rig.model, rig.after)
    assert rig.ok("finish_sparse_delta_refit")["samples_compared"] > 0
    assert rig.state == State.IDLE
    assert rig.digest != INITIAL


def test_a_direct_update_can_be_aborted(rig: Rig) -> None:
    rig.ok("update_weights_from_decoded_sparse_payload", *rig.payloads)
    rig.ok("sparse_refit_abort", "direct")
    rig.assert_as_before()


def test_a_direct_update_that_fails_verification_is_taken_back(rig: Rig) -> None:
    rig.ok("update_weights_from_decoded_sparse_payload", rig.payloads[0])
    bits = rig.model.qkv.data.view(torch.int16)
    changed = (bits != rig.before["qkv"]).nonzero()[0]
    bits[tuple(changed)] ^= 1  # somebody else writes to the model
    assert "VerificationError" in rig.refused("finish_sparse_delta_refit")
    rig.assert_as_before()


def test_the_same_direct_update_twice_is_refused(rig: Rig) -> None:
    rig.ok("update_weights_from_decoded_sparse_payload", rig.payloads[0])
    once = state_bits(rig.model)
    assert "VersionMismatchError" in rig.refused(
        "update_weights_from_decoded_sparse_payload", rig.payloads[0]
    )
    assert_same_bits(rig.model, once)
    rig.ok("finish_sparse_delta_refit")
    assert_same_bits(rig.model, once)


# --- the RPC boundary ----------------------------------------------------------------------------

_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), 1 << 63)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["t1", INITIAL, "bfloat16", "q"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
_JUNK = _JSON | st.binary(max_size=80) | st.builds(object) | st.tuples(_JSON, _JSON)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    method=st.sampled_from(RPC_METHODS),
    args=st.lists(_JUNK, max_size=4),
    kwargs=st.dictionaries(st.sampled_from(["transfer_id", "base_digest", "x", "self"]), _JUNK),
)
def test_no_argument_makes_an_rpc_raise(
    shared: Rig, method: str, args: list[Any], kwargs: dict[str, Any]
) -> None:
    reply = getattr(shared.worker, method)(*args, nonce="n2", **kwargs)
    assert json.loads(json.dumps(reply))["nonce"] == "n2"
    assert reply["rank"] == 3
    assert isinstance(reply["ok"], bool)
    assert reply["ok"] is (reply["error"] is None)


@pytest.fixture(scope="module")
def shared() -> Iterator[Rig]:
    with rig_of(timeout_s=0.05) as made:
        yield made
        assert_same_bits(made.model, made.before)


@pytest.mark.parametrize(
    "arguments",
    [
        (b"t1", INITIAL, "step-1"),
        (7, INITIAL, "step-1"),
        ("t1", INITIAL, object()),
    ],
)
def test_begin_refuses_arguments_of_the_wrong_type(rig: Rig, arguments: tuple[Any, ...]) -> None:
    reply = rig.worker.sparse_refit_begin(*arguments, sequence=1, nonce="n1")
    assert reply["error_type"] == "TransactionError"
    assert rig.state == State.IDLE


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"sequence": "1"},
        {"sequence": -1},
        {"sequence": 0},
        {"sequence": 1, "verification_samples": "many"},
        {"sequence": 1, "verification_samples": -1},
        {"sequence": 1, "fanout": 0, "addresses": ["tcp://127.0.0.1:9"]},
        {"sequence": 1, "addresses": ["tcp://127.0.0.1:9"]},
        {"sequence": 1, "addresses": 7},
    ],
)
def test_begin_refuses_bad_settings_and_stays_idle(rig: Rig, keywords: dict[str, Any]) -> None:
    rig.refused("sparse_refit_begin", "t1", INITIAL, "step-1", **keywords)
    assert rig.state == State.IDLE
    assert rig.begin()["ok"]


def test_a_keyword_named_worker_does_not_escape_the_boundary(rig: Rig) -> None:
    assert rig.worker.sparse_refit_status(worker=1)["ok"] is False


@pytest.mark.parametrize("method", RPC_METHODS)
def test_a_worker_without_the_plugin_enabled_says_so(method: str) -> None:
    arguments: dict[str, list[Any]] = {
        "discover_native_skips": [{}],
        "sparse_refit_compare": [{}],
        "sparse_refit_adopt": ["snapshot", INITIAL],
        "sparse_refit_recover": [INITIAL],
        "sparse_refit_begin": ["t1", INITIAL, "step-1"],
        "sparse_refit_prepare": ["t1", {}],
        "sparse_refit_commit": ["t1"],
        "sparse_refit_release": ["t1"],
        "sparse_refit_abort": ["t1"],
    }
    worker: Any = SimpleNamespace()
    call: Callable[..., Reply] = getattr(SparseRefitWorkerExtension, method)
    keywords = {"sequence": 1} if method == "sparse_refit_begin" else {}
    reply = call(worker, *arguments.get(method, []), **keywords, nonce="n3")
    assert reply["ok"] is False
    assert reply["error_type"] == "PluginNotEnabledError"
    assert (reply["rank"], reply["nonce"]) == (-1, "n3")


@pytest.mark.parametrize("value", [None, "", "sparse-refit", "foo, sparse_refit"])
def test_a_list_of_plugins_without_this_one_is_quoted(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is None:
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    else:
        monkeypatch.setenv("VLLM_PLUGINS", value)
    worker: Any = SimpleNamespace()
    error = SparseRefitWorkerExtension.sparse_refit_status(worker)["error"]
    found = "not set" if value is None else repr(value)
    assert error.endswith(
        f"VLLM_PLUGINS is {found} now; names are separated by commas without spaces"
    )


def test_the_extension_leaves_the_workers_own_names_alone() -> None:
    """vLLM's worker has ``synchronize_device``; a second one would be refused as a clash."""
    assert set(RPC_METHODS) == {
        "discover_native_skips",
        "update_weights_from_decoded_sparse_payload",
        "finish_sparse_delta_refit",
        "sparse_refit_status",
        "sparse_refit_recover",
        "sparse_refit_fingerprint",
        "sparse_refit_compare",
        "sparse_refit_digests",
        "sparse_refit_adopt",
        "sparse_refit_begin",
        "sparse_refit_prepare",
        "sparse_refit_commit",
        "sparse_refit_release",
        "sparse_refit_abort",
    }


def test_closing_ends_the_server_and_may_be_repeated(rig: Rig) -> None:
    rig.receiver.close()
    rig.receiver.close()
    assert rig.ok("sparse_refit_status")["state"] == State.IDLE
