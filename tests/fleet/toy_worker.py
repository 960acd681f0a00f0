"""A worker without vLLM: a toy model, its receiver and server, and the RPC methods.

Can be made to fail at any step: to raise, to stop answering, or to die as by SIGKILL.
"""

import os
import signal
import socket
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from tests.apply.toys import LIMITS, TOYS, random_weights, state_bits, toy_applier
from vllm_sparse_refit.checksum import checksum_hex
from vllm_sparse_refit.config import WorkerConfig, read_api_key
from vllm_sparse_refit.transport.curve import read_server_keys
from vllm_sparse_refit.worker.extension import RECEIVER_ATTRIBUTE, SparseRefitWorkerExtension
from vllm_sparse_refit.worker.receiver import Receiver

TOY = TOYS["mixed"]
BF16 = torch.bfloat16
# So short that a test need not wait: it tells a worker that the limit has passed ("toy_silence").
REAP_INTERVAL_S = 0.1


def toy_weights(seed: int) -> dict[str, torch.Tensor]:
    """Canonical weights of the toy model; other seeds differ in most elements."""
    return random_weights(TOY, BF16, seed)


def toy_bits(weights: Mapping[str, torch.Tensor]) -> str:
    """What a worker reports that holds exactly these weights."""
    return _digest(TOY.model(BF16, weights))


def _digest(model: torch.nn.Module) -> str:
    parts = [f"{name}:{bits.tolist()}" for name, bits in sorted(state_bits(model).items())]
    return checksum_hex("\n".join(parts).encode())


class ToyWorker(SparseRefitWorkerExtension):
    """Attributes that a test sets:

    ``faults``: what happens when an RPC method, ``"stage"`` (of the *n*-th payload: ``"stage 3"``), or
    ``"after"`` and a method, is reached: ``"raise"``, ``"kill"``, ``"stop"``, ``"slow"``, or ``"kill"`` and
    the number of another process: the trainer's.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], rank: int, **config: Any) -> None:
        self.rank = rank
        self.model = TOY.model(BF16, weights)
        self.applier = toy_applier(self.model)
        self.faults: dict[str, str] = {}
        self.staged = 0
        settings = WorkerConfig(**{"timeout_s": 5.0, **config})
        self.receiver = Receiver(
            self.applier,
            settings,
            LIMITS,
            read_api_key(settings.api_key_env_var),
            read_server_keys(settings.curve_key_file, settings.curve_clients_dir),
        )
        self._apply = self.applier.apply
        self.applier.apply = self._apply_or_fail  # type: ignore[method-assign]
        check = self.applier.check_delta

        def check_or_fail(delta: Any) -> bool:
            self.reach("stage")
            self.reach(f"stage {self.staged}")
            self.staged += 1
            return check(delta)

        self.applier.check_delta = check_or_fail  # type: ignore[method-assign]
        setattr(self, RECEIVER_ATTRIBUTE, self.receiver)
        self.receiver.start()

    def _apply_or_fail(self, deltas: Any) -> None:
        self._apply(deltas)
        self.reach("apply")

    def reach(self, point: str) -> None:
        match self.faults.pop(point, "").split():
            case ["raise"]:
                raise RuntimeError(f"told to fail at {point}")
            case ["kill", *other]:
                os.kill(int(other[0]) if other else os.getpid(), signal.SIGKILL)
            case ["stop"]:
                os.kill(os.getpid(), signal.SIGSTOP)
            case ["slow"]:
                time.sleep(0.2)

    def call(self, method: str, args: Any, kwargs: Any) -> Any:
        """One call, as an executor makes it; ``toy_`` methods are the tests' own."""
        if method == "toy_bits":
            return _digest(self.model)
        if method == "toy_undo_bytes":
            with self.receiver._calls:  # a transfer that just ended drops its log as the last thing
                return 0 if self.applier._writer is None else self.applier._writer.undo_bytes
        if method == "toy_fault":
            self.staged = 0
            return self.faults.update([args])
        if method == "toy_silence":  # as if nothing had been heard for the limit
            with self.receiver._lock:
                if (transfer := self.receiver._transfer) is not None:
                    transfer.heard_at -= self.receiver._config.transfer_timeout_s
            return None
        if method == "toy_write":  # weights written by somebody else
            with self.receiver.weights_replaced("toy_write"):
                self.model.qkv.data.view(torch.int16).bitwise_not_()
            return None
        self.reach(method)
        reply = getattr(self, method)(*args, **kwargs)
        self.reach(f"after {method}")
        return reply

    def compute_weight_checksums(self) -> dict[str, str]:
        return {
            name: checksum_hex(bits.numpy().tobytes())
            for name, bits in state_bits(self.model).items()
        }

    def close(self) -> None:
        self.receiver.close()


def run_worker(
    owner: Connection, address: str, seed: int, rank: int, config: dict[str, Any]
) -> None:
    """A worker process: serves calls until its owner's pipe closes.

    Other processes, trainers that may die, call it over connections of their own to ``address``.
    """
    torch.set_num_threads(1)
    Receiver._reap_interval_s = REAP_INTERVAL_S  # type: ignore[assignment]
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(address)
        door.listen()
        worker = ToyWorker(toy_weights(seed), rank, **config)
        owner.send("ready")
        callers = [owner]
        while owner in callers:
            for ready in wait([door, *callers]):
                if ready is door:
                    callers.append(Connection(door.accept()[0].detach()))
                elif isinstance(ready, Connection) and not _answer(worker, ready):
                    callers.remove(ready)
        worker.close()


def _answer(worker: ToyWorker, caller: Connection) -> bool:
    """Serve one call; whether the caller is still there."""
    try:
        method, args, kwargs = caller.recv()
        try:
            reply = worker.call(method, args, kwargs)
        except RuntimeError as error:
            reply = error
        caller.send(reply)
    except (EOFError, OSError):
        return False
    return True
