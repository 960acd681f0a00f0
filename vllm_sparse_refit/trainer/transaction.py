"""One transfer to some engines, step by step; what goes wrong at a step is for the caller to end."""

import contextlib
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from vllm_sparse_refit.config import SyncConfig, read_api_key
from vllm_sparse_refit.errors import (
    EngineStateError,
    RefitError,
    TransactionError,
    TransportError,
    VersionMismatchError,
)
from vllm_sparse_refit.trainer.baseline import SparsePayload
from vllm_sparse_refit.trainer.engine import LocalEngine
from vllm_sparse_refit.trainer.exported import NamedTensor
from vllm_sparse_refit.trainer.stream import PayloadSource, stream_sparse_delta_payloads_via_zmq
from vllm_sparse_refit.trainer.verification import differing_parts
from vllm_sparse_refit.transport.client import ZmqSparseRefitClient
from vllm_sparse_refit.transport.curve import read_client_keys
from vllm_sparse_refit.transport.monitor import FleetMonitor
from vllm_sparse_refit.transport.tree import height, patience

# How long workers are asked, after a failure, what they wait for.
_DIAGNOSIS_S = 1.0
# Notes on a failure, at most.
_NOTES = 8


class Transaction:
    """``begin``, then ``stream`` or ``resend``, ``prepare``, ``write``, ``release``; ``abort`` at any time.

    Belongs to the engines' thread.

    Args:
        engines: each with the replies of its workers' status, in rank order.
        sequence: above that of every earlier transfer on any of the workers.
        label: of the version that the transfer leads to.
    """

    def __init__(
        self,
        engines: Mapping[LocalEngine, Sequence[Mapping[str, Any]]],
        config: SyncConfig,
        *,
        sequence: int,
        label: str,
    ) -> None:
        self.transfer_id = uuid.uuid4().hex
        self.sequence = sequence
        self.label = label
        self._engines = list(engines)
        self._doubtful: list[LocalEngine] = []
        self._config = config
        self._addresses = [str(w["address"]) for workers in engines.values() for w in workers]

    def begin(self, bases: Mapping[LocalEngine, str]) -> None:
        """Open the transfer on every worker, from the version digest that its engine holds."""
        for engine in self._engines:
            engine.call(
                "sparse_refit_begin",
                self.transfer_id,
                bases[engine],
                self.label,
                sequence=self.sequence,
                verification_samples=self._config.verification_samples,
                addresses=self._addresses,
                fanout=self._config.fanout,
            )

    @property
    def addresses(self) -> list[str]:
        """Of every worker, in the order of the tree."""
        return list(self._addresses)

    def stream(
        self,
        weights: Iterable[NamedTensor],
        source: PayloadSource,
        *,
        sends: Callable[[str], bool] | None = None,
    ) -> dict[str, int]:
        """Compare, encode and send, as the first producer.

        See :func:`stream_sparse_delta_payloads_via_zmq`.
        """
        with self._explained():
            return stream_sparse_delta_payloads_via_zmq(
                weights,
                delta_tracker=source,
                refit_targets=self._addresses,
                transfer_id=self.transfer_id,
                sequence=self.sequence,
                timeout_s=self._config.timeout_s,
                sends=sends,
                config=self._config,
                alive=self._check_alive,
            )

    def resend(self, payloads: Sequence[SparsePayload]) -> None:
        """Send payloads of an earlier transfer, under their old numbers."""
        root = self._addresses[0]
        levels = height(len(self._addresses), self._config.fanout)
        client = ZmqSparseRefitClient(
            root,
            timeout_s=patience(self._config.timeout_s, levels),
            producer_id=0,
            retries=self._config.retries,
            **self._keys(),
        )
        with self._explained(), contextlib.closing(client):
            for payload_id, payload in enumerate(payloads):
                client.send_payload(
                    transfer_id=self.transfer_id,
                    sequence=self.sequence,
                    payload_id=payload_id,
                    checksum=payload.checksum,
                    verification_candidates=self._config.verification_samples,
                    body=payload.body,
                    relay_root=root,
                )

    def prepare(self, payloads: Mapping[str, int]) -> dict[LocalEngine, str]:
        """Wait until every worker has everything and has checked it; only a fault can stop it then.

        Args:
            payloads: how many there are, by producer.

        Returns:
            The version digest that each engine will come to.

        Raises:
            TransactionError: workers of one engine staged different payloads.
            VersionMismatchError: an engine's weights are not those that its version stands for.
        """
        with self._explained(), self._monitor() as monitor:
            monitor.await_staged(
                self.transfer_id,
                payloads,
                stall_s=self._config.timeout_s * (self._config.retries + 1),
                alive=self._check_alive,
            )
        digests = {}
        for engine in self._engines:
            replies = engine.call("sparse_refit_prepare", self.transfer_id, dict(payloads))
            found = {str(reply["target_digest"]) for reply in replies}
            if len(found) != 1:
                raise TransactionError(
                    f"the workers of {engine.name} staged different payloads for transfer "
                    f"{self.transfer_id}; sync again"
                )
            if different := differing_parts(replies):
                self._doubtful.append(engine)
                raise VersionMismatchError(
                    f"the weights of {engine.name} are not those that its version stands for: in "
                    f"{len(different)} tensors, first {', '.join(different[:3])}, its ranks hold other bits "
                    "than the trainer believes (something else wrote to them); nothing was written, and the "
                    "next sync brings the engine up"
                )
            digests[engine] = found.pop()
        return digests

    def write(self) -> None:
        """Write and verify on every worker, and drop what was computed with the old weights."""
        for engine in self._engines:
            engine.call("sparse_refit_commit", self.transfer_id)
        for engine in self._engines:
            engine.call("finish_sparse_delta_refit")
        for engine in self._engines:
            engine.reset_caches()

    @contextlib.contextmanager
    def paused(self, pause: bool) -> Any:
        """Hold generation on every engine; see :meth:`LocalEngine.paused`."""
        with contextlib.ExitStack() as stack:
            for engine in self._engines:
                engine.check_idle(pause)
                stack.enter_context(engine.paused(pause))
            yield

    def release(self) -> list[str]:
        """Make it final on every worker; returns what went wrong with that, by engine."""
        problems = []
        for engine in self._engines:
            try:
                engine.call("sparse_refit_release", self.transfer_id)
                engine.tell_version(self.label)
            except RefitError as error:
                problems.append(str(error))
        return problems

    def release_all(self) -> None:
        """As :meth:`release`.

        Raises:
            TransactionError: it could not be made final somewhere.
        """
        if problems := self.release():
            raise TransactionError(problems[0])

    def give_up(self, error: BaseException) -> None:
        """:meth:`abort` because of ``error``, for the caller to raise; what goes wrong is noted on it.

        Raises:
            BaseException: an interrupt of that, unless ``error`` is one itself.
        """
        try:
            problems = self.abort()
        except BaseException as interrupt:
            if isinstance(error, Exception):
                raise
            problems = getattr(interrupt, "__notes__", [])
        for problem in problems:
            error.add_note(problem)

    def abort(self) -> list[str]:
        """Give it up on every engine; returns what went wrong with that.

        Ctrl-C ends the wait for the engine that is being told, and the others are told all the same.

        Raises:
            BaseException: such an interrupt, after the last engine, with what went wrong as notes.
        """
        problems, interrupts = list[str](), list[BaseException]()
        for engine in self._engines:
            try:
                problems += self._abort_on(engine)
            except BaseException as interrupt:
                problems.append(
                    f"{engine.name} was being told to give the transfer up when it was interrupted; the next "
                    "sync says whether it can still be used"
                )
                interrupts.append(interrupt)
        if interrupts:
            for problem in problems:
                interrupts[0].add_note(problem)
            raise interrupts[0]
        return problems

    def _abort_on(self, engine: LocalEngine) -> list[str]:
        problems = [engine.abort(self.transfer_id)]
        if engine in self._doubtful:
            self._doubtful.remove(engine)
            try:
                # Claims less than its ranks may think, until a resync makes it true.
                engine.call("sparse_refit_adopt", "unknown", uuid.uuid4().hex)
            except RefitError as error:
                problems.append(str(error))
        return [problem for problem in problems if problem is not None]

    def _monitor(self) -> FleetMonitor:
        return FleetMonitor(self._addresses, **self._keys())

    def _keys(self) -> dict[str, Any]:
        config = self._config
        return {
            "api_key": read_api_key(config.api_key_env_var),
            "curve": read_client_keys(config.curve_key_file, config.curve_server_key_file),
        }

    def _check_alive(self) -> None:
        for engine in self._engines:
            engine.check_alive()

    @contextlib.contextmanager
    def _explained(self) -> Any:
        """Turn a transport's error into that of a dead engine, or add what the workers wait for."""
        try:
            yield
        except TransportError as error:
            try:
                self._check_alive()
            except EngineStateError as death:
                death.add_note(str(error))
                raise death from error
            with contextlib.suppress(RefitError), self._monitor() as monitor:
                for problem in monitor.problems(self.transfer_id, _DIAGNOSIS_S)[:_NOTES]:
                    error.add_note(problem)
            raise
