"""A trainer of several processes: each compares and sends a part of one transfer."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.fleet.fleets import CONTEXT, LIMITS, Fleet, ToyLLM, send_part, toy_engines, toy_fleet
from tests.fleet.toy_trainer import RemoteWorker
from tests.fleet.toy_worker import toy_bits, toy_weights
from tests.transport.helpers import eventually
from vllm_sparse_refit import (
    ProducerShard,
    SyncConfig,
    SyncReport,
    TorchProducerGroup,
    WeightSynchronizer,
)
from vllm_sparse_refit.errors import BaselineError, ConfigError, RefitError, TransactionError
from vllm_sparse_refit.trainer import parallel_encoder
from vllm_sparse_refit.trainer.producers import Coordinator
from vllm_sparse_refit.transport.monitor import FleetMonitor

OLD, NEW, NEWER = (toy_weights(seed) for seed in (1, 2, 3))
RANKS = 3


# --- in threads -----------------------------------------------------------------------------------


class Meeting:
    """Where the threads of one group meet."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=30)
        self.given: list[bytes] = [b""] * size


class ThreadGroup:
    """One thread's view of a group of threads."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank, self.size = rank, len(meeting.given)

    def _all(self, data: bytes) -> list[bytes]:
        self._meeting.given[self.rank] = data
        self._meeting.barrier.wait()
        given = list(self._meeting.given)
        self._meeting.barrier.wait()
        return given

    def broadcast(self, data: bytes) -> bytes:
        return self._all(data)[0]

    def gather(self, data: bytes) -> Sequence[bytes]:
        given = self._all(data)
        return given if self.rank == 0 else []


class Trainers:
    """Rank 0 in this thread, and the other ranks, each in a thread while it is called."""

    def __init__(self, fleet: Fleet, **config: Any) -> None:
        self._fleet = fleet
        self._config = SyncConfig(**{**LIMITS, **config})
        meeting = Meeting(RANKS)
        self.sync = WeightSynchronizer.connect(
            fleet.llms, config=self._config, producers=ThreadGroup(meeting, 0)
        )
        self.shards = [
            ProducerShard(ThreadGroup(meeting, rank), config=self._config)
            for rank in range(1, RANKS)
        ]

    def all(self, method: str, *arguments: Any) -> tuple[Any, list[Exception | None]]:
        """Call a method on every rank, with an argument for each or one for all."""
        given = arguments if len(arguments) == RANKS else arguments * RANKS
        failures: list[Exception | None] = [None] * RANKS

        def run(rank: int, call: Callable[[Any], Any]) -> Any:
            try:
                return call(given[rank])
            except Exception as error:
                failures[rank] = error

        threads = [
            threading.Thread(target=run, args=(rank, getattr(shard, method)))
            for rank, shard in enumerate(self.shards, 1)
        ]
        for thread in threads:
            thread.start()
        result = run(0, getattr(self.sync, method))
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        return result, failures

    def succeed(self, method: str, *arguments: Any) -> Any:
        result, failures = self.all(method, *arguments)
        assert failures == [None] * RANKS
        return result

    def bring_to(self, weights: dict[str, torch.Tensor]) -> SyncReport:
        """A sync that succeeds on every rank, after which every worker holds exactly these weights."""
        report: SyncReport = self.succeed("sync", weights)
        self._fleet.assert_holds(weights)
        return report


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with toy_fleet(3) as made:
        yield made


@pytest.fixture
def trainers(fleet: Fleet) -> Trainers:
    """With a snapshot of what the fleet holds."""
    made = Trainers(fleet)
    made.succeed("snapshot", OLD)
    return made


def test_several_producers_bring_all_workers_to_the_new_weights(trainers: Trainers) -> None:
    for weights in (NEW, NEWER, OLD):
        report = trainers.bring_to(weights)
        assert report.total_elements == sum(tensor.numel() for tensor in OLD.values())
        assert {shard.version for shard in trainers.shards} == {report.version}
        assert trainers.sync.verify().ok  # rank 0's baseline has followed what the others sent
    report = trainers.succeed("sync", OLD)
    assert report.changed_elements == 0


def _turned(weights: dict[str, torch.Tensor], by: int) -> dict[str, torch.Tensor]:
    """The same in another order."""
    names = [*weights][::-1]
    return {name: weights[name] for name in names[by:] + names[:by]}


def test_a_sync_may_come_in_another_order_than_the_snapshot(
    fleet: Fleet, trainers: Trainers
) -> None:
    trainers.bring_to(_turned(NEW, 0))
    report = trainers.succeed("sync", *(_turned(NEWER, rank) for rank in range(RANKS)))
    fleet.assert_holds(NEWER)
    assert report.total_elements == sum(tensor.numel() for tensor in OLD.values())
    unknown = {**_turned(NEW, 1), "more.weight": torch.ones(2, dtype=torch.bfloat16)}
    _, failures = trainers.all("sync", unknown)
    assert all("more.weight" in str(failure) for failure in failures)
    missing = dict([*_turned(NEW, 1).items()][1:])
    _, failures = trainers.all("sync", missing)
    assert all("lacks 1 tensors" in str(failure) for failure in failures)
    fleet.assert_holds(NEWER)
    trainers.bring_to(OLD)


def test_snapshots_in_different_orders_are_refused(fleet: Fleet, trainers: Trainers) -> None:
    _, failures = trainers.all("snapshot", OLD, OLD, _turned(OLD, 1))
    assert isinstance(failures[0], BaselineError)
    assert all("in the same order" in str(failure) for failure in failures)
    _, failures = trainers.all("sync", NEW)
    assert all(isinstance(failure, RefitError) for failure in failures)
    trainers.succeed("snapshot", OLD)
    trainers.bring_to(NEW)


def test_an_engine_that_missed_what_several_producers_sent_is_brought_up(
    fleet: Fleet, trainers: Trainers, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_sparse_refit.trainer.resync import Resync

    trainers.succeed("sync", NEW)
    trainers.sync.replace_engine(*fleet.restart(1))
    with monkeypatch.context() as patch:
        patch.delattr(Resync, "_overwrite")
        assert trainers.bring_to(NEWER).resynced == 1
    trainers.sync.replace_engine(*fleet.restart(2, seed=9))
    assert trainers.bring_to(OLD).resynced == 1


def test_several_producers_pick_up_what_was_saved(
    fleet: Fleet, trainers: Trainers, tmp_path: Path
) -> None:
    trainers.succeed("sync", NEW)
    trainers.sync.save(tmp_path)
    second = Trainers(fleet)
    second.succeed("restore", tmp_path)
    assert second.bring_to(NEWER).resynced == 0


class Spoiled(dict[str, torch.Tensor]):
    """Weights whose second tensor cannot be compared; every rank must pull the rest all the same."""

    def __init__(self, weights: dict[str, torch.Tensor], name: str) -> None:
        super().__init__(weights | {name: torch.zeros(1)})


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_that_fails_fails_all_and_leaves_nothing(
    fleet: Fleet, trainers: Trainers, rank: int
) -> None:
    name = list(OLD)[rank]
    _, failures = trainers.all("sync", Spoiled(NEW, name))
    assert all(isinstance(failure, RefitError) for failure in failures), failures
    assert name in str(failures[rank])
    if rank:
        assert f"trainer process {rank} could not do its part" in str(failures[0])
    fleet.assert_holds(OLD)
    assert {reply["state"] for reply in fleet.statuses()} == {"idle"}
    trainers.bring_to(NEW)


@pytest.mark.parametrize("point", ["sparse_refit_begin", "stage 1", "apply"])
def test_an_engine_that_fails_fails_all_ranks(fleet: Fleet, trainers: Trainers, point: str) -> None:
    fleet.llms[1].fault(point, "raise")
    _, failures = trainers.all("sync", NEW)
    assert all(isinstance(failure, RefitError) for failure in failures), failures
    fleet.assert_holds(OLD)
    trainers.bring_to(NEW)


def test_a_release_that_fails_somewhere_has_happened_on_all_ranks(
    fleet: Fleet, trainers: Trainers, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = fleet.llms[1].workers[0].receiver
    with monkeypatch.context() as patch:
        patch.setattr(receiver, "release", lambda _: (_ for _ in ()).throw(TransactionError("no")))
        _, failures = trainers.all("sync", NEW)
    assert "has happened" in str(failures[0])
    assert failures[1:] == [None] * (RANKS - 1)
    trainers.bring_to(NEWER)


def test_a_rank_with_a_baseline_of_another_version_is_refused(
    fleet: Fleet, trainers: Trainers, tmp_path: Path
) -> None:
    trainers.sync.save(tmp_path / "older")
    trainers.succeed("sync", NEW)
    trainers.sync.save(tmp_path / "newer")
    older, newer = tmp_path / "older", tmp_path / "newer"
    trainers.succeed("restore", newer, older, newer)
    _, failures = trainers.all("sync", NEWER)
    assert isinstance(failures[1], BaselineError)
    assert all("on every rank" in str(failure) for failure in failures)
    fleet.assert_holds(NEW)
    trainers.succeed("snapshot", NEW)
    trainers.bring_to(NEWER)


def test_ranks_that_lose_each_other_after_the_commit(
    fleet: Fleet, trainers: Trainers, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell, told = Coordinator._tell, []

    def lose(self: Coordinator, step: str, message: Any) -> None:
        told.append(step)
        if step == "end":
            self._group._meeting.barrier.abort()  # type: ignore[attr-defined]
        tell(self, step, message)

    with monkeypatch.context() as patch:
        patch.setattr(Coordinator, "_tell", lose)
        _, failures = trainers.all("sync", NEW)
    assert told == ["start", "end"]
    assert all("lost each other" in str(failure) for failure in failures)
    assert "all the same" in str(failures[0].__notes__)  # type: ignore[union-attr]
    fleet.assert_holds(NEW)
    again = Trainers(fleet)
    again.succeed("snapshot", NEW)
    again.bring_to(NEWER)


def test_ranks_are_where_they_belong(fleet: Fleet) -> None:
    meeting = Meeting(2)
    with pytest.raises(ConfigError, match="ProducerShard"):
        WeightSynchronizer.connect(fleet.llms, producers=ThreadGroup(meeting, 1))
    with pytest.raises(ConfigError, match="WeightSynchronizer"):
        ProducerShard(ThreadGroup(meeting, 0))


# --- in processes of their own --------------------------------------------------------------------


def _run_rank(
    calls: Connection, rank: int, store: str, addresses: Sequence[str], config: dict[str, Any]
) -> None:
    torch.set_num_threads(1)
    parallel_encoder._GROUP_BYTES = 1  # type: ignore[misc]  # so that small tensors are sent as they come
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS
    )
    group, mesh = TorchProducerGroup(), init_device_mesh("cpu", (RANKS,))
    with toy_engines(), contextlib.suppress(EOFError):
        if rank == 0:
            llms = [ToyLLM([RemoteWorker(each)], in_process=False) for each in addresses]
            own: Any = WeightSynchronizer.connect(
                llms, config=SyncConfig(**config), producers=group
            )
        else:
            own = ProducerShard(group, config=SyncConfig(**config))
        while True:
            method, seed, hangs = calls.recv()
            weights: Any = toy_weights(seed)
            if hangs is None:  # as FSDP holds them: to pull one gathers it from all ranks
                weights = {n: distribute_tensor(t, mesh, [Shard(0)]) for n, t in weights.items()}
            else:
                weights = _slowly(weights, hangs=hangs)
            try:
                getattr(own, method)(weights)
            except RefitError as error:
                calls.send(str(error))
            else:
                calls.send("")


def _slowly(weights: dict[str, torch.Tensor], *, hangs: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights that come one after the other; what one gave is sent when the next one comes."""
    for item in weights.items():
        yield item
        time.sleep(0.1)
    if hangs:
        time.sleep(600)


class Ranks:
    """A trainer of several processes over a fleet of processes."""

    def __init__(self, fleet: Fleet, store: Path) -> None:
        self.processes, self.calls = [], []
        addresses = [llm.workers[0].address for llm in fleet.llms]
        for rank in range(RANKS):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(
                target=_run_rank, args=(theirs, rank, str(store), addresses, LIMITS), daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.calls.append(ours)

    def start(self, method: str, seed: int, hanging: int | None = None) -> None:
        """Have every rank do something; if one shall hang, all take their time."""
        for rank, calls in enumerate(self.calls):
            calls.send((method, seed, None if hanging is None else rank == hanging))

    def outcomes(self, ranks: Sequence[int] = range(RANKS)) -> list[str]:
        for rank in ranks:
            assert self.calls[rank].poll(120)
        return [self.calls[rank].recv() for rank in ranks]

    def succeed(self, method: str, seed: int) -> None:
        self.start(method, seed)
        assert self.outcomes() == [""] * RANKS

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(10)


@pytest.mark.parametrize("victim", range(RANKS))
def test_a_trainer_process_is_killed_amid_its_data(victim: int, tmp_path: Path) -> None:
    with toy_fleet(3, in_process=False) as fleet, contextlib.ExitStack() as stack:
        first = Ranks(fleet, tmp_path / "first")
        stack.callback(first.close)
        first.succeed("snapshot", 1)
        first.succeed("sync", 2)
        fleet.assert_holds(NEW)
        first.start("sync", 3, hanging=victim)
        assert eventually(lambda: any(r["staged_bytes"] for r in fleet.statuses()), timeout_s=60)
        first.processes[victim].kill()
        others = [rank for rank in range(RANKS) if rank != victim]
        assert all(first.outcomes(others))  # both say what happened
        fleet.fall_silent()  # all at once if rank 0 lives, which aborts
        fleet.assert_holds(NEW)
        first.close()
        second = Ranks(fleet, tmp_path / "second")
        stack.callback(second.close)
        second.succeed("snapshot", 2)
        second.succeed("sync", 3)
        fleet.assert_holds(NEWER)


# --- driven by hand, over the stream's own arguments ------------------------------------------------


def _produce(addresses: Sequence[str], rank: int, sent: Connection, hangs: bool) -> None:
    """One producer of a transfer that somebody else begins, prepares and commits."""
    parallel_encoder._GROUP_BYTES = 1  # type: ignore[misc]
    sent.send(send_part(_slowly(NEW, hangs=hangs), addresses, "t", rank=rank, size=RANKS))


def _await_producer(addresses: Sequence[str], producer: str) -> None:
    """Wait until a payload of a producer is staged on every worker."""

    def is_staged() -> bool:
        reports = monitor.ask("t", addresses, 10.0).values()
        found = [report["server"]["transfer"]["producers"] for report in reports]
        return len(found) == len(addresses) and all(producer in each for each in found)

    with FleetMonitor(addresses) as monitor:
        assert eventually(is_staged, timeout_s=60)


@pytest.mark.parametrize("victim", [0, 1])  # number 2 has one tensor only
def test_a_producer_that_is_killed_leaves_nothing(victim: int) -> None:
    """Each enters at a root of its own. The others end well; what they sent goes at the worker's limit."""
    with toy_fleet(3, in_process=False) as fleet:
        sync = fleet.connect()
        addresses = fleet.begin_by_hand("t")
        pipes = [CONTEXT.Pipe(duplex=False) for _ in range(RANKS)]
        producers = [
            CONTEXT.Process(
                target=_produce,
                args=(addresses, rank, pipes[rank][1], rank == victim),
                daemon=True,
            )
            for rank in range(RANKS)
        ]
        for producer, (_, theirs) in zip(producers, pipes, strict=True):
            producer.start()
            theirs.close()
        counts = [pipes[rank][0].recv() for rank in range(RANKS) if rank != victim]
        _await_producer(addresses, str(victim))
        producers[victim].kill()
        for producer in producers:
            producer.join(30)
        with pytest.raises(EOFError):
            pipes[victim][0].recv()
        assert {reply["state"] for reply in fleet.statuses()} == {"open"}
        entered = [reply["server"]["relays"] for reply in fleet.statuses()]
        roots = {lane["root"] for lanes in entered for lane in lanes}
        assert roots >= {addresses[rank] for rank in range(RANKS) if rank != victim}
        assert all(counts)
        fleet.fall_silent()
        assert all("nothing was heard" in reply["last_error"] for reply in fleet.statuses())
        for llm in fleet.llms:
            assert llm.bits == {toy_bits(OLD)}
        sync.sync(NEW.items())
        fleet.assert_holds(NEW)
