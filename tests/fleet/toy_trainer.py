"""A trainer in a process of its own, over workers that outlive it: to be killed at any step."""

import os
import signal
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client, Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.fleet.fleets import CONTEXT, LIMITS, Fleet, ToyLLM, toy_engines
from tests.fleet.toy_worker import toy_weights
from vllm_sparse_refit import SyncConfig, WeightSynchronizer
from vllm_sparse_refit.errors import RefitError
from vllm_sparse_refit.trainer.baseline_files import MappedFiles
from vllm_sparse_refit.trainer.decisions import DecisionLog

# Where a trainer can be told to kill itself, beside the steps at which a worker kills it.
DECIDED_COMMIT, DECIDED_FINAL, BASELINE_MOVES = "decided commit", "decided final", "baseline moves"


class Trainer:
    """A trainer process over the workers of a fleet. A context manager: nothing of it is left."""

    def __init__(self, fleet: Fleet, folder: Path, *, in_files: bool) -> None:
        self._calls, theirs = CONTEXT.Pipe()
        addresses = [[worker.address for worker in llm.workers] for llm in fleet.llms]
        config = {
            "state_dir": folder / "state",
            "baseline_dir": folder / "baselines" if in_files else None,
        }
        self.process = CONTEXT.Process(
            target=_run, args=(theirs, addresses, {**LIMITS, **config}), daemon=True
        )
        self.process.start()
        theirs.close()

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_: object) -> None:
        self._calls.close()
        self.process.kill()
        self.process.join(10)

    def start(self, what: str, *args: Any) -> None:
        """Have it do something, and do not wait for it."""
        self._calls.send((what, args))

    def does(self, what: str, *args: Any) -> Any:
        """Have it do something; returns, or raises, what came of it there."""
        self.start(what, *args)
        reply = self._calls.recv()
        if isinstance(reply, Exception):
            raise reply
        return reply

    def is_killed(self) -> bool:
        """Whether it ends within seconds, by SIGKILL."""
        self.process.join(30)
        return self.process.exitcode == -signal.SIGKILL


class RemoteWorker:
    """The worker of another process's fleet."""

    def __init__(self, address: str) -> None:
        self.calls = Client(address, family="AF_UNIX")
        self.closed = threading.Event()
        self.process = SimpleNamespace(is_alive=lambda: True)


def _run(calls: Connection, addresses: Sequence[Sequence[str]], config: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    with toy_engines():
        llms = [ToyLLM([RemoteWorker(a) for a in ranks], in_process=False) for ranks in addresses]
        sync = WeightSynchronizer.connect(llms, config=SyncConfig(**config))
        try:
            while True:
                what, args = calls.recv()
                try:
                    calls.send(_DO[what](sync, *args))
                except RefitError as error:
                    calls.send(error)
        except EOFError:
            sync.close()


def _die_at(_sync: WeightSynchronizer, point: str) -> None:
    write, remove_index = DecisionLog.write, MappedFiles.remove_index

    def write_and_die(self: DecisionLog, decision: str, *args: Any) -> None:
        write(self, decision, *args)
        if point == f"decided {decision}":
            os.kill(os.getpid(), signal.SIGKILL)

    def remove_index_and_die(self: MappedFiles) -> None:
        remove_index(self)
        if point == BASELINE_MOVES:
            os.kill(os.getpid(), signal.SIGKILL)

    DecisionLog.write = write_and_die  # type: ignore[method-assign]
    MappedFiles.remove_index = remove_index_and_die  # type: ignore[method-assign]


_DO: dict[str, Callable[..., Any]] = {
    "snapshot": lambda sync, seed: sync.snapshot(toy_weights(seed).items()),
    "save": lambda sync, folder: sync.save(folder),
    "restore": lambda sync, folder: sync.restore(folder),
    "folder": lambda sync: sync.baseline_folder,
    "sync": lambda sync, seed: sync.sync(toy_weights(seed).items()).resynced,
    "die at": _die_at,
}
