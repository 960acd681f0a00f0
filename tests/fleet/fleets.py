"""Fleets of toy workers behind stand-ins for ``vllm.LLM``, in this process or in their own."""

import contextlib
import multiprocessing
import os
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fleet.toy_worker import REAP_INTERVAL_S, ToyWorker, run_worker, toy_bits, toy_weights
from vllm_sparse_refit import SyncConfig, WeightSynchronizer
from vllm_sparse_refit.trainer.baseline import DeltaCompressionTracker
from vllm_sparse_refit.trainer.engine import LocalEngine
from vllm_sparse_refit.trainer.stream import stream_sparse_delta_payloads_via_zmq
from vllm_sparse_refit.worker.receiver import Receiver

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.fleet.preload"])

# Long enough for a busy machine: only a peer that is stopped is waited for, since deaths are noticed.
LIMITS: dict[str, Any] = {"timeout_s": 8.0, "retries": 0, "rpc_timeout_s": 30.0, "payload_bytes": 1}
WORKER_LIMITS: dict[str, Any] = {"relay_timeout_s": 4.0, "relay_retries": 0}


class ToyLLM:
    """What a synchronizer needs of a ``vllm.LLM``; its workers are threads or processes."""

    def __init__(self, workers: Sequence[Any], *, in_process: bool) -> None:
        self.workers = list(workers)
        self.in_process = in_process
        self.label: str | None = None
        self.llm_engine = SimpleNamespace(
            has_unfinished_requests=lambda: False,
            is_sleeping=lambda: False,
            reset_encoder_cache=lambda: None,
            set_weight_version=self._set_label,
            engine_core=SimpleNamespace(ensure_alive=self._ensure_alive),
        )

    def _ensure_alive(self) -> None:
        if not self.is_alive:
            raise RuntimeError("a worker process died")

    def _set_label(self, label: str) -> None:
        self.label = label

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: Any = (), kwargs: Any = None
    ) -> list[Any]:
        assert timeout is None, "vLLM's own time limit corrupts an engine"
        if self.in_process:
            return [worker.call(method, args, kwargs or {}) for worker in self.workers]
        self._ensure_alive()
        try:
            for worker in self.workers:
                worker.calls.send((method, args, kwargs or {}))
            replies = [worker.calls.recv() for worker in self.workers]
        except (EOFError, OSError):
            self.workers[0].closed.wait()  # as vLLM waits for ever for an engine core that died
            raise
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply
        return replies

    def reset_prefix_cache(self, **_: Any) -> bool:
        return True

    def reset_mm_cache(self) -> None:
        pass

    def fault(self, point: str, kind: str) -> None:
        """See :class:`ToyWorker`; for every worker of this engine."""
        self.collective_rpc("toy_fault", args=(point, kind))

    @property
    def bits(self) -> set[str]:
        return set(self.collective_rpc("toy_bits"))

    @property
    def is_alive(self) -> bool:
        return self.in_process or all(worker.process.is_alive() for worker in self.workers)

    def has_died(self) -> bool:
        """Whether a worker ends within seconds."""
        for worker in self.workers:
            worker.process.join(10)
        return not self.is_alive

    def kill(self) -> None:
        """SIGKILL every worker."""
        for worker in self.workers:
            worker.process.kill()
            worker.process.join(10)

    def signal(self, number: int) -> None:
        for worker in self.workers:
            os.kill(worker.process.pid, number)


class WorkerProcess:
    """A worker of its own process and the pipe to it."""

    def __init__(self, seed: int, rank: int, config: dict[str, Any]) -> None:
        self.closed = threading.Event()
        self.calls, theirs = CONTEXT.Pipe()
        self.address = f"\0sparse-refit-{uuid.uuid4()}"  # abstract: there is no file to remove
        self.process = CONTEXT.Process(
            target=run_worker, args=(theirs, self.address, seed, rank, config), daemon=True
        )
        self.process.start()
        theirs.close()  # so that its death ends a wait for its answer

    def await_ready(self) -> None:
        assert self.calls.recv() == "ready"

    def close(self) -> None:
        self.calls.close()
        self.process.kill()  # also one that is stopped
        self.process.join(10)
        self.closed.set()


class Fleet:
    """Engines of one worker each (or ``ranks``), started from the weights of seed 1."""

    def __init__(
        self, engines: int, *, in_process: bool, ranks: int, config: dict[str, Any]
    ) -> None:
        self._in_process = in_process
        self._ranks = ranks
        self._config = {**WORKER_LIMITS, **config}
        self._workers: list[Any] = []
        self.llms: list[ToyLLM] = []
        workers = [self._start(1, rank % ranks) for rank in range(engines * ranks)]
        for worker in workers:
            if not in_process:
                worker.await_ready()
        for first in range(0, len(workers), ranks):
            self.llms.append(ToyLLM(workers[first : first + ranks], in_process=in_process))

    def _start(self, seed: int, rank: int) -> Any:
        if self._in_process:
            worker: Any = ToyWorker(toy_weights(seed), rank, **self._config)
        else:
            worker = WorkerProcess(seed, rank, self._config)
        self._workers.append(worker)
        return worker

    def restart(self, position: int, seed: int = 1) -> tuple[ToyLLM, ToyLLM]:
        """A new engine in the place of one, started from the weights of ``seed``: the old and the new."""
        old = self.llms[position]
        workers = [self._start(seed, rank) for rank in range(self._ranks)]
        if not self._in_process:
            for worker in workers:
                worker.await_ready()
        self.llms[position] = ToyLLM(workers, in_process=self._in_process)
        return old, self.llms[position]

    def connect(self, **config: Any) -> WeightSynchronizer:
        """A synchronizer that has taken a snapshot of the weights of seed 1."""
        sync = WeightSynchronizer.connect(self.llms, config=SyncConfig(**{**LIMITS, **config}))
        sync.snapshot(toy_weights(1).items())
        return sync

    def assert_holds(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Every worker of every living engine holds exactly these weights."""
        expected = toy_bits(weights)
        for llm in self.llms:
            if llm.is_alive:
                assert llm.bits == {expected}

    def fall_silent(self) -> None:
        """Let the time pass in which nothing must be heard of a trainer; wait until all workers noticed.

        By their clocks only: a limit short enough to wait for would also pass on a busy machine.
        """
        deadline = time.monotonic() + 60
        while {reply["state"] for reply in self.statuses()} != {"idle"}:
            for llm in self.llms:  # again and again: relays may still be passing payloads on
                llm.collective_rpc("toy_silence")
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert {reply["staged_bytes"] for reply in self.statuses()} == {0}
        undo = [count for llm in self.llms for count in llm.collective_rpc("toy_undo_bytes")]
        assert set(undo) == {0}

    def statuses(self) -> list[dict[str, Any]]:
        """What every worker reports of itself."""
        return [reply for llm in self.llms for reply in llm.collective_rpc("sparse_refit_status")]

    def begin_by_hand(self, transfer_id: str) -> list[str]:
        """Open a transfer on every worker, from the version that they hold; returns their addresses."""
        statuses = self.statuses()
        addresses = [str(status["address"]) for status in statuses]
        for llm in self.llms:
            (reply,) = llm.collective_rpc(
                "sparse_refit_begin",
                args=(transfer_id, statuses[0]["version"]["digest"], "label"),
                kwargs={"sequence": 1, "addresses": addresses},
            )
            assert reply["ok"], reply
        return addresses

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


def send_part(
    weights: Iterable[tuple[str, torch.Tensor]],
    addresses: Sequence[str],
    transfer_id: str,
    *,
    rank: int,
    size: int,
) -> int:
    """Be one producer of a transfer that was begun by hand, from seed 1; returns its count of payloads."""
    config = SyncConfig(payload_bytes=1)
    tracker = DeltaCompressionTracker(config=config)
    tracker.snapshot_baseline(toy_weights(1).items())
    tracker.set_routing(skip=(), overwrite={"first", "second"}, dense=())
    report = stream_sparse_delta_payloads_via_zmq(
        weights,
        delta_tracker=tracker,
        refit_targets=addresses,
        transfer_id=transfer_id,
        sequence=1,
        shard_rank=rank,
        shard_count=size,
        config=config,
    )
    return report["payloads"]


@contextlib.contextmanager
def toy_engines() -> Iterator[None]:
    """Have synchronizers of this process take toys for engines of vLLM."""

    def inspect(_engine: LocalEngine, llm: ToyLLM) -> tuple[bool, int]:
        return llm.in_process, len(llm.workers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalEngine, "_inspect", inspect)
        patch.setattr(Receiver, "_reap_interval_s", REAP_INTERVAL_S)
        yield


@contextlib.contextmanager
def toy_fleet(
    engines: int, *, in_process: bool = True, ranks: int = 1, **config: Any
) -> Iterator[Fleet]:
    """A running fleet; ended, with its processes, on exit.

    Args:
        config: settings of the workers.
    """

    with toy_engines():
        fleet = Fleet(engines, in_process=in_process, ranks=ranks, config=config)
        try:
            yield fleet
        finally:
            fleet.close()
