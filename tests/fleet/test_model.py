"""Two workers, a trainer and faults in any order, against a small reference model.

No sockets and no real weights, so that thousands of schedules run: what is tested is the worker's side of
the protocol (exactly once, two-phase commit, in doubt, versions) and the rule by which a trainer brings
workers together again. Hypothesis searches, and shrinks what it finds; random walks over the same rules,
each told by its seed, make the number. ``VLLM_SPARSE_REFIT_SCHEDULES`` sets how many walks there are.
"""

import contextlib
import functools
import logging
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.fleet.fleets import CONTEXT
from vllm_sparse_refit.checksum import checksum_hex
from vllm_sparse_refit.codec.delta import (
    Chunk,
    SparseOperation,
    TensorDelta,
    apply_delta,
    make_delta,
)
from vllm_sparse_refit.codec.payload import DecodeLimits, encode_payload
from vllm_sparse_refit.config import WorkerConfig
from vllm_sparse_refit.errors import RefitError
from vllm_sparse_refit.transport.intake import Job, PayloadIntake
from vllm_sparse_refit.transport.ledger import ReplyTo
from vllm_sparse_refit.transport.protocol import ACK, PayloadMetadata, RequestHead
from vllm_sparse_refit.transport.statistics import Statistics
from vllm_sparse_refit.transport.tree import RelayTree
from vllm_sparse_refit.weight_version import WeightVersion
from vllm_sparse_refit.worker import receiver as receivers
from vllm_sparse_refit.worker.receiver import Receiver

WALKS = int(os.environ.get("VLLM_SPARSE_REFIT_SCHEDULES", "10000"))
SEARCHED = 300
STEPS = 16
LIMITS = DecodeLimits(1 << 20, 1 << 20)
CONFIG = WorkerConfig(timeout_s=1e-6, transfer_timeout_s=100)
PARTS = ("w0", "w1")  # each in a payload of its own
WORKERS = 2

Bits = tuple[int, ...]


@functools.cache
def payload_of(name: str, old: int, new: int, operation: SparseOperation) -> bytes:
    return encode_payload([delta_of(name, old, new, operation)])


def delta_of(name: str, old: int, new: int, operation: SparseOperation) -> TensorDelta:
    whole = operation is SparseOperation.OVERWRITE
    bits = [torch.tensor([value], dtype=torch.int16) for value in (old, new)]
    found = make_delta(Chunk(name, (1,), torch.int16, operation, 0, *bits, every_element=whole))
    assert found is not None
    return found


class BitsApplier:
    """The applier's interface over one integer for each tensor."""

    is_discovered = True
    sample_limit = 0

    def __init__(self) -> None:
        self.bits = {name: torch.zeros(1, dtype=torch.int16) for name in PARTS}
        self.undo: dict[str, torch.Tensor] | None = None
        self.fails = False

    def status(self) -> dict[str, Any]:
        return {}

    def check_model(self) -> None: ...

    def check_delta(self, _delta: TensorDelta) -> bool:
        return True

    def placed(self, delta: TensorDelta) -> TensorDelta:
        return delta

    def check_prior_bits(self, _deltas: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def check_transfer(self, deltas: Mapping[str, Any]) -> None:
        assert all(len(parts) == 1 for parts in deltas.values())

    def apply(self, deltas: Mapping[str, list[TensorDelta]]) -> None:
        self.undo = {name: bits.clone() for name, bits in self.bits.items()}
        for number, (name, (delta,)) in enumerate(deltas.items()):
            if self.fails and number:
                self.roll_back()
                raise RefitError("told to fail")
            apply_delta(delta, self.bits[name])

    def roll_back(self) -> None:
        if self.undo is not None:
            self.bits, self.undo = self.undo, None

    def release(self) -> None:
        self.undo = None

    def reset_adapters(self) -> None: ...

    @property
    def values(self) -> Bits:
        return tuple(int(self.bits[name]) for name in PARTS)


class Frame:
    """The part of a ZeroMQ frame that a job uses."""

    def __init__(self, data: bytes) -> None:
        self.bytes = data


class SocketlessServer:
    """A worker's server less its sockets: messages are handed to :meth:`deliver`."""

    sequence = 0

    def __init__(self, apply_payload: Any, **_: Any) -> None:
        self._answers: list[list[bytes]] = []
        self._intake = PayloadIntake(
            apply_payload,
            config=CONFIG,
            api_key=None,
            statistics=Statistics(),
            answer=self._answers.append,
            connect=lambda *_: pytest.fail("nothing is relayed here"),
        )
        self.end = self._intake.end

    def configure_tree(self, *_: Any, **__: Any) -> None: ...

    def open(self, transfer_id: str, sequence: int) -> None:
        self._intake.open(transfer_id, sequence, RelayTree(("here",), "here"))
        self.sequence = sequence

    def flush(self, transfer_id: str, expected: int) -> Any:
        return self._intake.ledger.flush(transfer_id, expected, CONFIG.timeout_s)

    def status(self) -> dict[str, Any]:
        return {}

    def deliver(self, metadata: PayloadMetadata, body: bytes) -> bool:
        """Whether the message was acknowledged."""
        head = RequestHead(
            request_id=b"1", metadata=metadata, metadata_bytes=metadata.to_bytes(), mac=b""
        )
        self._intake.ledger.arrive(metadata.transfer_id)
        job = Job(ReplyTo(b"peer", b"1"), head, metadata, Frame(body))  # type: ignore[arg-type]
        self._intake.handle(job)
        return self._answers.pop()[1] == ACK


class Worker:
    def __init__(self) -> None:
        self.applier = BitsApplier()
        applier: Any = self.applier
        self.receiver = Receiver(applier, CONFIG, LIMITS, None)
        self.server: Any = self.receiver._server

    def does(self, step: str, *args: Any, **kwargs: Any) -> bool:
        """Whether a call succeeded."""
        try:
            getattr(self.receiver, step)(*args, **kwargs)
        except RefitError:
            return False
        return True

    def falls_silent(self) -> None:
        transfer = self.receiver._transfer
        if transfer is not None:
            transfer.heard_at -= 2 * CONFIG.transfer_timeout_s
        self.receiver._end_silent()


@dataclass(frozen=True)
class Message:
    transfer_id: str
    sequence: int
    payload_id: int
    body: bytes

    def metadata(self, body: bytes | None = None) -> PayloadMetadata:
        return PayloadMetadata(
            transfer_id=self.transfer_id,
            sequence=self.sequence,
            producer_id=0,
            payload_id=self.payload_id,
            checksum=checksum_hex(self.body if body is None else body),
            verification_candidates=0,
        )


@dataclass
class Transfer:
    """What the trainer knows of one."""

    transfer_id: str
    sequence: int
    base: WeightVersion
    new: Bits
    messages: list[Message] = field(default_factory=list)

    @property
    def target(self) -> WeightVersion:
        return self.base.following("step", [checksum_hex(m.body) for m in self.messages])


@dataclass
class Reference:
    """The model: what one worker must hold, and where it is in which transfer."""

    held: Bits = (0, 0)
    version: WeightVersion = field(default_factory=WeightVersion.initial)
    transfer: Transfer | None = None
    state: str = "idle"
    before: Bits = (0, 0)
    seen: dict[tuple[str, int, int], str] = field(default_factory=dict)  # staged, for good
    highest: int = 0

    def end(self, *, keep: bool) -> None:
        assert self.transfer is not None
        if keep:
            self.version = self.transfer.target
        elif self.state == "committed":
            self.held = self.before
        self.transfer, self.state = None, "idle"


class Protocol(RuleBasedStateMachine):
    schedules = 0
    steps = 0
    commits = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).schedules += 1
        self.workers = [Worker() for _ in range(WORKERS)]
        self.models = [Reference() for _ in range(WORKERS)]
        self.base, self.bits = WeightVersion.initial(), (0, 0)  # the trainer's baseline
        self.transfers: list[Transfer] = []

    def _new_transfer(self, new: Bits, operation: SparseOperation) -> Transfer:
        number = len(self.transfers) + 1
        transfer = Transfer(f"t{number % 3}", number, self.base, new)  # names come again
        for name, old, value in zip(PARTS, self.bits, new, strict=True):
            if old != value or operation is SparseOperation.OVERWRITE:
                body = payload_of(name, old, value, operation)
                count = len(transfer.messages)
                transfer.messages.append(
                    Message(transfer.transfer_id, transfer.sequence, count, body)
                )
        self.transfers.append(transfer)
        return transfer

    @rule(new=st.tuples(st.integers(0, 3), st.integers(0, 3)))
    def start(self, new: Bits) -> None:
        self._new_transfer(new, SparseOperation.XOR)

    @precondition(lambda self: self.transfers)
    @rule(which=st.integers(0, WORKERS - 1), back=st.sampled_from([0, 0, 0, 1]))
    def begin(self, which: int, back: int) -> None:
        """The latest transfer, or (a late or repeated call) the one before."""
        worker, model = self.workers[which], self.models[which]
        transfer = self.transfers[max(len(self.transfers) - 1 - back, 0)]
        if model.transfer is not None:
            model.end(keep=model.state == "committed" and model.transfer.target == transfer.base)
        expected = transfer.base == model.version and transfer.sequence > model.highest
        assert expected == worker.does(
            "begin",
            transfer.transfer_id,
            transfer.base.digest,
            "step",
            sequence=transfer.sequence,
            verification_samples=0,
        )
        if expected:
            model.transfer, model.state, model.highest = transfer, "open", transfer.sequence

    @precondition(lambda self: any(t.messages for t in self.transfers))
    @rule(
        which=st.integers(0, WORKERS - 1),
        back=st.sampled_from([0, 0, 0, 0, 1, 2, 5]),
        pick=st.integers(0, 1),
        spoiled=st.sampled_from(["", "", "", "", "", "corrupt", "clash"]),
    )
    def deliver(self, which: int, back: int, pick: int, spoiled: str) -> None:
        """In any order, twice, corrupted, with other bytes under old ids, or replayed much later."""
        transfer = self.transfers[max(len(self.transfers) - 1 - back, 0)]
        if not transfer.messages:
            return
        message = transfer.messages[pick % len(transfer.messages)]
        worker, model = self.workers[which], self.models[which]
        metadata, body = message.metadata(), message.body
        if spoiled == "corrupt":
            assert not worker.server.deliver(metadata, body[:-1] + bytes([body[-1] ^ 1]))
            return
        if spoiled == "clash":
            body = payload_of("w0", 0, 9, SparseOperation.OVERWRITE)
            metadata = message.metadata(body)
        key = (message.transfer_id, message.sequence, message.payload_id)
        if key in model.seen:
            assert worker.server.deliver(metadata, body) == (model.seen[key] == metadata.checksum)
            return
        if spoiled:
            return  # the first to come is believed; that is what keys are for
        is_open = model.transfer is transfer and model.state == "open"
        assert worker.server.deliver(metadata, body) == is_open
        if is_open:
            model.seen[key] = metadata.checksum

    @precondition(lambda self: self.transfers)
    @rule(which=st.integers(0, WORKERS - 1))
    def prepare(self, which: int) -> None:
        worker, model, transfer = self.workers[which], self.models[which], self.transfers[-1]
        complete = all(
            (m.transfer_id, m.sequence, m.payload_id) in model.seen for m in transfer.messages
        )
        expected = model.transfer is transfer and model.state == "open" and complete
        args = (transfer.transfer_id, {"0": len(transfer.messages)})
        # An older transfer may bear the same name; the trainer would not mistake it for its own.
        if model.transfer is not None and model.transfer is not transfer:
            return
        assert expected == worker.does("prepare", *args)
        if expected:
            model.state = "prepared"

    @precondition(lambda self: self.transfers)
    @rule(which=st.integers(0, WORKERS - 1), fails=st.sampled_from([False, False, True]))
    def commit(self, which: int, fails: bool) -> None:
        worker, model, transfer = self.workers[which], self.models[which], self.transfers[-1]
        if model.transfer is not None and model.transfer is not transfer:
            return
        worker.applier.fails = fails
        may = model.transfer is transfer and model.state == "prepared"
        done = worker.does("commit", transfer.transfer_id)
        worker.applier.fails = False
        assert done == (may and not (fails and len(transfer.messages) > 1))
        if done:
            model.before, model.held, model.state = model.held, transfer.new, "committed"
            type(self).commits += 1

    @rule(which=st.integers(0, WORKERS - 1))
    def release(self, which: int) -> None:
        model = self.models[which]
        if model.transfer is not None:
            expected = model.state == "committed"
            transfer_id = model.transfer.transfer_id
            assert self.workers[which].does("release", transfer_id) == expected
            if expected:
                model.end(keep=True)
                assert self.workers[which].does("release", transfer_id)  # may be repeated
                assert not self.workers[which].does("abort", transfer_id)

    @rule(which=st.integers(0, WORKERS - 1))
    def abort(self, which: int) -> None:
        model = self.models[which]
        if model.transfer is not None:
            transfer_id = model.transfer.transfer_id
            for _ in range(2):
                assert self.workers[which].does("abort", transfer_id)
            model.end(keep=False)

    @rule(which=st.integers(0, WORKERS - 1))
    def silence(self, which: int) -> None:
        self.workers[which].falls_silent()
        if self.models[which].transfer is not None:
            self.models[which].end(keep=self.models[which].state == "committed")

    @rule(which=st.integers(0, WORKERS - 1))
    def restart(self, which: int) -> None:
        self.workers[which], self.models[which] = Worker(), Reference()

    @rule(new=st.tuples(st.integers(0, 3), st.integers(0, 3)))
    def sync(self, new: Bits) -> None:
        """What a synchronizer does: end leftovers, bring up who is behind, then one transfer for all."""
        for worker, model in zip(self.workers, self.models, strict=True):
            worker.receiver.recover(self.base.digest)
            if model.transfer is not None:
                keep = model.state == "committed" and model.transfer.target == self.base
                model.end(keep=keep)
            # A restarted worker's version says nothing: only an overwrite makes it known.
            if model.version != self.base or model.highest == 0:
                self._run(worker, model, self._overwrite_of(model.version))
                worker.receiver.adopt(self.base.label, self.base.digest)
                model.version = self.base
        transfer = self._new_transfer(new, SparseOperation.XOR)
        for worker, model in zip(self.workers, self.models, strict=True):
            self._run(worker, model, transfer)
        self.base, self.bits = transfer.target, new
        assert {worker.applier.values for worker in self.workers} == {new}
        assert {worker.receiver.status()["version"]["digest"] for worker in self.workers} == {
            self.base.digest
        }

    def _overwrite_of(self, base: WeightVersion) -> Transfer:
        transfer = self._new_transfer(self.bits, SparseOperation.OVERWRITE)
        transfer.base = base
        return transfer

    def _run(self, worker: Worker, model: Reference, transfer: Transfer) -> None:
        worker.receiver.begin(
            transfer.transfer_id,
            transfer.base.digest,
            "step",
            sequence=transfer.sequence,
            verification_samples=0,
        )
        for message in transfer.messages:
            assert worker.server.deliver(message.metadata(), message.body)
            model.seen[message.transfer_id, message.sequence, message.payload_id] = checksum_hex(
                message.body
            )
        worker.receiver.prepare(transfer.transfer_id, {"0": len(transfer.messages)})
        worker.receiver.commit(transfer.transfer_id)
        worker.receiver.release(transfer.transfer_id)
        model.held, model.version, model.highest = transfer.new, transfer.target, transfer.sequence

    @invariant()
    def every_worker_is_where_the_model_says(self) -> None:
        type(self).steps += 1
        for worker, model in zip(self.workers, self.models, strict=True):
            status = worker.receiver.status()
            assert worker.applier.values == model.held
            assert status["state"] == model.state
            assert status["version"]["digest"] == model.version.digest
            if model.state == "idle":
                assert status["staged_bytes"] == 0
                assert worker.applier.undo is None


@contextlib.contextmanager
def without_sockets() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        _patch(patch)
        yield


def _patch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receivers, "ZmqSparseRefitServer", SocketlessServer)
    # The same few payloads come again and again.
    monkeypatch.setattr(receivers, "decode_payload", functools.cache(receivers.decode_payload))
    # Tens of thousands of refusals, each one expected.
    monkeypatch.setattr(logging.getLogger("vllm.sparse_refit"), "disabled", True)
    monkeypatch.setattr(logging.getLogger("vllm.sparse_refit.transport"), "disabled", True)


def test_no_schedule_is_found_that_leaves_the_model() -> None:
    searched = settings(
        max_examples=SEARCHED,
        stateful_step_count=STEPS,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    with without_sockets():
        run_state_machine_as_test(Protocol, settings=searched)


def _walk(seed: int) -> None:
    random, machine = Random(seed), Protocol()
    for _ in range(STEPS):
        which = random.randrange(WORKERS)
        name, arguments = _next_useful(machine, which, random)
        if random.random() < _STRAY:
            name, arguments = _anything(machine, which, random)
        getattr(machine, name)(**arguments)
        machine.every_worker_is_where_the_model_says()


# How often a walk does something else than what would bring the worker on.
_STRAY = 0.35


def _next_useful(machine: Protocol, which: int, random: Random) -> tuple[str, dict[str, Any]]:
    model, latest = machine.models[which], machine.transfers[-1:]
    if not latest or latest[0].base != machine.base:
        return "start", {"new": _bits(random)}
    if model.transfer is not latest[0]:
        return ("sync", {"new": _bits(random)}) if model.version != machine.base else _begin(which)
    missing = [
        message.payload_id
        for message in latest[0].messages
        if (message.transfer_id, message.sequence, message.payload_id) not in model.seen
    ]
    if model.state == "open" and missing:
        pick = random.choice(missing)
        return "deliver", {"which": which, "back": 0, "pick": pick, "spoiled": ""}
    if model.state == "prepared":
        return "commit", {"which": which, "fails": False}
    return ("prepare" if model.state == "open" else "release"), {"which": which}


def _begin(which: int) -> tuple[str, dict[str, Any]]:
    return "begin", {"which": which, "back": 0}


def _bits(random: Random) -> Bits:
    return random.randrange(4), random.randrange(4)


def _anything(machine: Protocol, which: int, random: Random) -> tuple[str, dict[str, Any]]:
    name = random.choice(_RULES if machine.transfers else ["start", "sync"])
    match name:
        case "start" | "sync":
            return name, {"new": _bits(random)}
        case "begin":
            return name, {"which": which, "back": random.choice([0, 0, 1])}
        case "deliver":
            back, pick = random.choice([0, 0, 1, 2, 5]), random.randrange(2)
            spoiled = random.choice(["", "", "corrupt", "clash"])
            return name, {"which": which, "back": back, "pick": pick, "spoiled": spoiled}
        case "commit":
            return name, {"which": which, "fails": random.random() < 0.5}
    return name, {"which": which}


_RULES = [
    *("start", "begin", "deliver", "deliver", "deliver", "prepare", "commit"),
    *("release", "abort", "silence", "restart", "sync"),
]


def _walks(seeds: range) -> tuple[int, int, int]:
    """Schedules, steps and commits of these walks; in a process of its own."""
    with without_sockets():
        for seed in seeds:
            try:
                _walk(seed)
            except BaseException as error:
                error.add_note(f"walk {seed}")
                raise
    return Protocol.schedules, Protocol.steps, Protocol.commits


def test_no_walk_leaves_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    processes = len(os.sched_getaffinity(0))
    parts = [range(first, WALKS, processes) for first in range(processes)]
    with ProcessPoolExecutor(processes, mp_context=CONTEXT) as pool:
        done = list(pool.map(_walks, parts))
    schedules, steps, commits = (sum(each) for each in zip(*done, strict=True))
    with capsys.disabled():
        print(
            f"\n{schedules} schedules, {steps} steps, {commits} commits outside of a whole sync",
            end=" ",
        )
    assert schedules == WALKS
    assert commits > WALKS / 10
