"""A worker without vLLM: a toy model, its receiver and server, and the RPC methods.

Can be made to fail at any step: to raise, to stop answering, or to die as by SIGKILL.
"""

import os
import signal
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch

from tests.apply.toys import LIMITS, TOYS, random_weights, state_bits, toy_applier
from vllm_sparse_refit.checksum import checksum_hex
from vllm_sparse_refit.config import WorkerConfig
from vllm_sparse_refit.worker.extension import RECEIVER_ATTRIBUTE, SparseRefitWorkerExtension
from vllm_sparse_refit.worker.receiver import Receiver

TOY = TOYS["mixed"]
BF16 = torch.bfloat16


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
    ``"after"`` and a method, is reached: ``"raise"``, ``"kill"``, ``"stop"`` or ``"slow"``.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], rank: int, **config: Any) -> None:
        self.rank = rank
        self.model = TOY.model(BF16, weights)
        self.applier = toy_applier(self.model)
        self.faults: dict[str, str] = {}
        self.staged = 0
        self.receiver = Receiver(
            self.applier, WorkerConfig(**{"timeout_s": 5.0, **config}), LIMITS, None
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
        match self.faults.pop(point, None):
            case "raise":
                raise RuntimeError(f"told to fail at {point}")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "slow":
                time.sleep(0.2)

    def call(self, method: str, args: Any, kwargs: Any) -> Any:
        """One call, as an executor makes it; ``toy_`` methods are the tests' own."""
        if method == "toy_bits":
            return _digest(self.model)
        if method == "toy_fault":
            self.staged = 0
            return self.faults.update([args])
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


def run_worker(calls: Connection, seed: int, rank: int, config: dict[str, Any]) -> None:
    """A worker process: serves calls until its pipe closes."""
    torch.set_num_threads(1)
    worker = ToyWorker(toy_weights(seed), rank, **config)
    calls.send("ready")
    try:
        while True:
            method, args, kwargs = calls.recv()
            try:
                calls.send(worker.call(method, args, kwargs))
            except RuntimeError as error:
                calls.send(error)
    except (EOFError, OSError):
        worker.close()
