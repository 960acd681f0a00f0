"""The codec as a trainer and a receiver use it, with its results checked bit by bit."""

import itertools
import os
from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks.workloads import Pair
from vllm_sparse_refit.codec.delta import TensorDelta, apply_delta
from vllm_sparse_refit.codec.payload import DecodeLimits, decode_payload
from vllm_sparse_refit.config import SyncConfig, WorkerConfig
from vllm_sparse_refit.trainer.baseline import DeltaCompressionTracker

CONFIG = SyncConfig()
_RECEIVER = WorkerConfig()
_LIMITS = DecodeLimits(_RECEIVER.max_payload_bytes, _RECEIVER.max_decoded_bytes)


class WrongBitsError(Exception):
    """What was encoded does not lead to the new weights, so its figures mean nothing."""


class Codec:
    """Both sides of the codec, on one workload."""

    def __init__(self, pairs: list[Pair]) -> None:
        self._pairs = pairs
        self._tracker = DeltaCompressionTracker(config=CONFIG)
        self._tracker.snapshot_baseline((pair.name, pair.old) for pair in pairs)
        self._checked: list[bytes] | None = None

    def encode(self) -> list[bytes]:
        """The payloads of one sync, which then counts as failed: the baseline stays."""
        weights = ((pair.name, pair.new) for pair in self._pairs)
        prepared = self._tracker.prepare_sparse_delta_payload(weights)
        bodies = [payload.body for payload in prepared]
        self._tracker.on_sync_failed()
        return bodies

    def encode_without_holding(self) -> None:
        """The same for a reader that forgets each payload; the tracker holds what it must."""
        weights = ((pair.name, pair.new) for pair in self._pairs)
        for _ in self._tracker.prepare_sparse_delta_payload(weights):
            pass
        self._tracker.on_sync_failed()

    @staticmethod
    def decode(bodies: list[bytes]) -> list[TensorDelta]:
        """As a receiver does: payloads in parallel, all held until the last one is there."""
        with ThreadPoolExecutor(cores()) as pool:
            decoded = pool.map(lambda body: decode_payload(body, _LIMITS), bodies)
            return list(itertools.chain.from_iterable(decoded))

    def check(self, bodies: list[bytes]) -> None:
        """Decode, write to a copy of the old weights, and compare with the new ones.

        Payloads that are equal to those checked last are not checked again.

        Raises:
            WrongBitsError: a bit differs.
        """
        if bodies != self._checked:
            self.check_decoded(self.decode(bodies))
            self._checked = bodies

    def check_decoded(self, deltas: list[TensorDelta]) -> None:
        """The same for what was decoded.

        Raises:
            WrongBitsError: a bit differs.
        """
        copies = copies_of_old(self._pairs)
        for delta in deltas:
            apply_delta(delta, copies[delta.name])
        check_equal_to_new(self._pairs, copies)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def copies_of_old(pairs: list[Pair]) -> dict[str, torch.Tensor]:
    """A copy of the bits of each old tensor, int16 ``[n]``."""
    return {pair.name: _int16(pair.old).clone() for pair in pairs}


def check_equal_to_new(pairs: list[Pair], copies: dict[str, torch.Tensor]) -> None:
    """Compare bit by bit.

    Raises:
        WrongBitsError: a tensor differs from the new one.
    """
    wrong = [pair.name for pair in pairs if not torch.equal(copies[pair.name], _int16(pair.new))]
    if wrong:
        raise WrongBitsError(f"{len(wrong)} tensors are not the new ones, first {wrong[0]}")


def _int16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16).view(-1)
