"""A worker's side of a transfer: server threads stage payloads, a commit writes the weights."""

import contextlib
import functools
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from vllm_sparse_refit.apply.applier import Samples, VllmSparseDeltaApplier
from vllm_sparse_refit.apply.discovery import TensorInfo
from vllm_sparse_refit.apply.load_mode import LoadKind
from vllm_sparse_refit.checksum import checksum_hex
from vllm_sparse_refit.codec.dtypes import dtype_name
from vllm_sparse_refit.codec.payload import DecodeLimits, decode_payload
from vllm_sparse_refit.config import WorkerConfig
from vllm_sparse_refit.errors import (
    PayloadError,
    TransactionError,
    VersionMismatchError,
)
from vllm_sparse_refit.transport.curve import CurveServerKeys
from vllm_sparse_refit.transport.server import ZmqSparseRefitServer
from vllm_sparse_refit.transport.tree import DEFAULT_FANOUT
from vllm_sparse_refit.weight_version import WeightVersion
from vllm_sparse_refit.worker.state import State, Transfer, check_begin, held_bytes

# Below vLLM's own logger, so that lines come out in its format and with its worker prefix.
logger = logging.getLogger("vllm.sparse_refit")


_P = ParamSpec("_P")
_T = TypeVar("_T")

# How the outcome of a transfer begins that can no longer be taken back.
_FINAL = "made final"
# Ended transfers of which a worker still knows how they ended.
_REMEMBERED = 64


def _control(
    method: Callable[Concatenate["Receiver", _P], _T],
) -> Callable[Concatenate["Receiver", _P], _T]:
    """A call that drives a transfer: one at a time, and a sign that its trainer lives."""

    @functools.wraps(method)
    def call(self: "Receiver", /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        with self._calls:
            self._heard()
            try:
                return method(self, *args, **kwargs)
            finally:
                self._heard()

    return call


class Receiver:
    """Owns the state of transfers of one worker.

    :meth:`stage` is called by the server's threads; everything else by the worker's main thread,
    inside an RPC, but for the end of an abandoned transfer, which has a thread of its own. ``_calls``
    makes that thread and the RPCs exclude each other. ``_lock`` guards ``_state``, ``_transfer`` and
    ``_outcomes``; it is never held while payloads are decoded or weights are written.
    """

    def __init__(
        self,
        applier: VllmSparseDeltaApplier,
        config: WorkerConfig,
        limits: DecodeLimits,
        api_key: bytes | None,
        curve: CurveServerKeys | None = None,
    ) -> None:
        self._applier = applier
        self._config = config
        self._limits = limits
        # Which keys, never what they are; of CURVE the public one.
        self._keys = {
            "api_key": api_key is not None,
            "curve": None if curve is None else curve.public.decode(),
        }
        self._lock = threading.Lock()
        self._state = State.IDLE
        self._transfer: Transfer | None = None
        self._version = WeightVersion.initial()
        self._last_error = ""
        self._incarnation = uuid.uuid4().hex
        self._outcomes: dict[str, str] = {}  # how ended transfers ended, by transfer_id
        self._calls = threading.RLock()
        self._closed = threading.Event()
        self._reaper: threading.Thread | None = None
        self._server = ZmqSparseRefitServer(
            self.stage, config=config, api_key=api_key, curve=curve, describe=self._describe
        )
        self.address = ""

    def start(self) -> None:
        """Open the server. Called once, when the model is loaded."""
        self.address = self._server.start()
        self._reaper = threading.Thread(target=self._reap, name="sparse-refit-reaper", daemon=True)
        self._reaper.start()
        logger.info("this worker receives weight updates at %s", self.address)
        if (kept := self._applier.status())["packed_layers"]:
            logger.info(
                "%d packed layers are kept as they were loaded, in %.1f MiB of host memory, so that they can "
                "be updated; shadow_packed_layers and max_shadow_bytes limit this",
                kept["packed_layers"],
                kept["shadow_bytes"] / (1 << 20),
            )

    def close(self) -> None:
        """End the server's threads; harmless when repeated."""
        self._closed.set()
        self._server.close()
        if self._reaper is not None:
            self._reaper.join(self._reap_interval_s)

    # --- server threads ---------------------------------------------------------------------------

    def stage(self, body: bytes, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Decode, check and hold one payload; touches no weight. Safe from several threads at once.

        Raises:
            RefitError: the payload is refused, with the reason; nothing of it is kept.
        """
        transfer = self._open_transfer(str(metadata["transfer_id"]))
        applier = self._applier
        deltas = [
            applier.placed(delta)
            for delta in decode_payload(body, self._limits)
            if applier.check_delta(delta)
        ]
        staged_bytes = sum(held_bytes(delta) for delta in deltas)
        key = (int(metadata["producer_id"]), int(metadata["payload_id"]))
        with self._lock:
            if self._transfer is not transfer or self._state is not State.OPEN:
                raise TransactionError(f"transfer {transfer.transfer_id} ended meanwhile")
            transfer.heard_at = time.monotonic()
            if transfer.staged_bytes + staged_bytes > self._config.max_staged_bytes:
                raise PayloadError(
                    f"transfer {transfer.transfer_id} would hold more than max_staged_bytes="
                    f"{self._config.max_staged_bytes} bytes; raise the limit or sync more often"
                )
            transfer.staged_bytes += staged_bytes
            transfer.checksums[key] = str(metadata["checksum"])
            for delta in deltas:
                transfer.deltas.setdefault(delta.name, []).append(delta)
                transfer.changed_elements += len(delta.locations)
        return {"deltas": len(deltas)}

    def _open_transfer(self, transfer_id: str) -> Transfer:
        with self._lock:
            if self._transfer is None or self._transfer.transfer_id != transfer_id:
                raise TransactionError(
                    f"transfer {transfer_id} is not open on this worker; begin it first"
                )
            if self._state is not State.OPEN:
                raise TransactionError(
                    f"transfer {transfer_id} is {self._state} and takes no payloads"
                )
            return self._transfer

    # --- RPCs, worker's main thread ---------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """What this worker is doing, as JSON types."""
        return {
            **self._describe(),
            **self._applier.status(),
            "keys": dict(self._keys),
            "server": self._server.status(),
        }

    def _describe(self) -> dict[str, Any]:
        with self._lock:
            transfer = self._transfer
            return {
                "address": self.address,
                "incarnation": self._incarnation,
                "state": str(self._state),
                "version": {"label": self._version.label, "digest": self._version.digest},
                "discovered": self._applier.is_discovered,
                "transfer_id": transfer.transfer_id if transfer else None,
                "staged_bytes": transfer.staged_bytes if transfer else 0,
                "last_error": self._last_error,
            }

    @_control
    def recover(self, base_digest: str) -> dict[str, Any]:
        """End what an earlier trainer or sync left, then report the status.

        What was committed and not released is kept if it led to ``base_digest`` and taken back otherwise.
        """
        self._end_abandoned(base_digest)
        return self.status()

    @_control
    def discover(self, state_dict_info: Mapping[str, TensorInfo]) -> dict[str, Any]:
        """See :meth:`VllmSparseDeltaApplier.discover_native_skips`."""
        self._end_abandoned()
        self._require(State.IDLE)
        self._applier.discover_native_skips(state_dict_info)
        found = self._applier.discovery
        return {
            "skips": found.names(LoadKind.SKIP),
            "tied": dict(found.tied),
            "overwrite": found.names(LoadKind.TRANSFORM, LoadKind.DENSE),
            "dense": found.names(LoadKind.DENSE),
            "narrowed": {name: dtype_name(dtype) for name, dtype in found.narrowed.items()},
            "aliases": [list(group) for group in found.aliases],
            "unsupported": found.unsupported,
            "packed": {layer.module: layer.reason for layer in found.packed},
            "uncovered": list(found.uncovered),
        }

    def compare(self, samples: Samples) -> dict[str, Any]:
        """See :meth:`VllmSparseDeltaApplier.differing_samples`."""
        self._require(State.IDLE)
        compared, different = self._applier.differing_samples(samples)
        return {"compared": compared, "different": different}

    @_control
    def digests(self) -> dict[str, Any]:
        """See :meth:`VllmSparseDeltaApplier.digests`."""
        self._require(State.IDLE)
        return self._applier.digests()

    @_control
    def adopt(self, label: str, digest: str) -> dict[str, Any]:
        """Take a version that the trainer gives to all workers, which it found to hold equal weights."""
        self._require(State.IDLE)
        if not isinstance(label, str) or not isinstance(digest, str):
            raise TransactionError(f"a version is two strings, not {label!r} and {digest!r}")
        with self._lock:
            self._version = WeightVersion(label, digest)
        return {}

    @_control
    def begin(
        self,
        transfer_id: str,
        base_digest: str,
        target_label: str,
        *,
        sequence: int,
        verification_samples: int,
        addresses: Sequence[str] = (),
        fanout: int = DEFAULT_FANOUT,
    ) -> dict[str, Any]:
        """Open a transfer that starts from the version this worker holds.

        One that is still open, because its trainer died or was interrupted, ends first.

        Args:
            sequence: above that of every earlier transfer on this worker.
            addresses: every worker of the transfer's relay tree; none if nothing is forwarded.
            fanout: of that tree.
        """
        check_begin(transfer_id, base_digest, target_label, sequence, verification_samples)
        self._applier.check_model()
        self._end_abandoned(base_digest)
        with self._lock:
            if self._state is not State.IDLE:
                raise TransactionError(self._busy())
            if base_digest != self._version.digest:
                raise VersionMismatchError(
                    f"this worker holds version {self._version}, but the transfer starts from "
                    f"{base_digest[:12]}; call snapshot() with the weights that the engines hold"
                )
        self._server.configure_tree(addresses, own_address=self.address, fanout=fanout)
        self._server.open(transfer_id, sequence)
        self._applier.release()  # left over if the last release was interrupted
        self._applier.sample_limit = verification_samples
        with self._lock:
            self._outcomes.pop(transfer_id, None)
            self._transfer = Transfer(transfer_id, self._version, target_label)
            self._state = State.OPEN
        return {}

    def _end_abandoned(self, base_digest: str | None = None) -> None:
        """End a transfer whose trainer went away without ending it.

        What was only staged is dropped. What was committed and not released is kept if a new transfer
        starts from it, and taken back otherwise.
        """
        with self._lock:
            transfer, state = self._transfer, self._state
        if transfer is None or state not in (State.OPEN, State.PREPARED, State.COMMITTED):
            return
        logger.warning("transfer %s was left %s and ends now", transfer.transfer_id, state)
        if state is State.COMMITTED and self._target(transfer).digest == base_digest:
            self._make_final(transfer, f"{_FINAL} by the transfer that followed it")
        else:
            self._give_up(transfer, "given up for the transfer that followed it")

    @_control
    def prepare(self, transfer_id: str, expected_payloads: Mapping[str, int]) -> dict[str, Any]:
        """Wait for all payloads, then check the whole transfer; then only the commit is missing.

        Returns:
            ``{"partial", "staged_bytes", "changed_elements", "target_digest"}``; the first as
            :meth:`VllmSparseDeltaApplier.check_prior_bits` returns it.

        Raises:
            VersionMismatchError: the weights are not those that the version stands for. The worker has no
                known version from then on.
        """
        transfer = self._current(transfer_id, State.OPEN)
        expected = {int(producer): int(count) for producer, count in expected_payloads.items()}
        self._server.flush(transfer_id, sum(expected.values()))
        with self._lock:
            received: dict[int, int] = {}
            for producer, _ in transfer.checksums:
                received[producer] = received.get(producer, 0) + 1
        if received != {producer: count for producer, count in expected.items() if count}:
            raise TransactionError(
                f"transfer {transfer_id} should have the payloads {expected} by producer, but this "
                f"worker has {received}"
            )
        self._applier.check_transfer(transfer.deltas)
        try:
            partial = self._applier.check_prior_bits(transfer.deltas)
        except VersionMismatchError:
            # The version claims more than is true, until a resync makes it so.
            with self._lock:
                transfer.base = self._version = WeightVersion("unknown", uuid.uuid4().hex)
            raise
        with self._lock:
            self._state = State.PREPARED
        return {
            "partial": partial,
            "staged_bytes": transfer.staged_bytes,
            "changed_elements": transfer.changed_elements,
            "target_digest": self._target(transfer).digest,
        }

    @_control
    def commit(self, transfer_id: str) -> dict[str, Any]:
        """Write the prepared transfer into the model. If it raises, every bit is as it was."""
        transfer = self._current(transfer_id, State.PREPARED)
        try:
            self._applier.apply(transfer.deltas)
            self._applier.reset_adapters()
        except BaseException:  # an interrupt too
            self._roll_back()
            raise
        # The decoded payloads are done with; the undo log takes their place until release.
        transfer.deltas.clear()
        with self._lock:
            self._state = State.COMMITTED
        return {}

    @_control
    def finish(self) -> dict[str, Any]:
        """Compare samples of what was written; after direct updates also make them final.

        Raises:
            VerificationError: a sample differs. A direct update is rolled back then; a transfer
                waits for the caller's abort, which must reach every worker.
        """
        with self._lock:
            transfer, direct = self._transfer, self._state is State.UPDATING
        if transfer is None or not direct:
            return self._applier.finish_sparse_delta_refit()
        try:
            result = self._applier.finish_sparse_delta_refit()
        except Exception:
            self._roll_back()
            self._end(transfer, transfer.base, "taken back")
            raise
        self._applier.release()
        self._end(transfer, self._target(transfer), _FINAL)
        return result

    @_control
    def release(self, transfer_id: str) -> dict[str, Any]:
        """Make a committed transfer final: the undo log goes, the version moves. May be repeated."""
        with self._lock:
            outcome = self._outcomes.get(transfer_id, "")
        if not outcome.startswith(_FINAL):
            self._make_final(self._current(transfer_id, State.COMMITTED), _FINAL)
        with self._lock:
            version = self._version
        return {"version": {"label": version.label, "digest": version.digest}}

    def _make_final(self, transfer: Transfer, outcome: str) -> None:
        version = self._target(transfer)
        self._end(transfer, version, outcome)
        self._applier.release()
        logger.info(
            "transfer %s: %d changed elements in %d payloads, %d bytes staged, now at version %s",
            transfer.transfer_id,
            transfer.changed_elements,
            len(transfer.checksums),
            transfer.staged_bytes,
            version,
        )

    @_control
    def abort(self, transfer_id: str) -> dict[str, Any]:
        """Give an uncommitted transfer up, or take a committed one back; the old version stays.

        Does nothing for a transfer that this worker does not have, so that it can be sent to all.

        Raises:
            TransactionError: it was made final, so that the way back is gone; or the rollback failed.
        """
        with self._lock:
            transfer, state = self._transfer, self._state
            outcome = self._outcomes.get(transfer_id, "")
        if state is State.BROKEN:
            raise TransactionError(self._busy())
        if outcome.startswith(_FINAL):
            raise TransactionError(
                f"transfer {transfer_id} was {outcome} on this worker and cannot be taken back; it "
                f"holds version {self._version}, and the next sync brings it to the others' version"
            )
        if transfer is None or transfer.transfer_id != transfer_id:
            return {"aborted": False}
        self._give_up(transfer, "given up by its trainer")
        return {"aborted": True}

    def _give_up(self, transfer: Transfer, outcome: str) -> None:
        try:
            self._roll_back()  # whatever was written, also by a commit that was interrupted
        except KeyboardInterrupt:
            # Raised when all is back, so nothing of it may be left open.
            self._end(transfer, transfer.base, outcome)
            raise
        self._end(transfer, transfer.base, outcome)
        level = logging.WARNING if transfer.checksums else logging.DEBUG
        logger.log(
            level, "transfer %s was %s, still at %s", transfer.transfer_id, outcome, transfer.base
        )

    @_control
    def update_directly(self, *payloads: bytes | str) -> dict[str, Any]:
        """Apply payloads, bytes or file paths, without a transfer; :meth:`finish` ends the update.

        Each call is all or nothing. Several may follow each other, for different elements.
        """
        with self._lock:
            if self._state not in (State.IDLE, State.UPDATING):
                raise TransactionError(self._busy())
        if not payloads:
            return {"tensors": 0, "changed_elements": 0}
        bodies = [p if isinstance(p, bytes) else Path(p).read_bytes() for p in payloads]
        result = self._applier.update_weights_from_decoded_sparse_payload(*bodies)
        self._applier.reset_adapters()
        with self._lock:
            if self._transfer is None:
                self._outcomes.pop("direct", None)
                self._transfer = Transfer("direct", self._version, "direct")
                self._state = State.UPDATING
            for body in bodies:
                self._transfer.checksums[0, len(self._transfer.checksums)] = checksum_hex(body)
        return result

    @contextlib.contextmanager
    def weights_replaced(self, by: str) -> Iterator[None]:
        """Follow ``by``, which writes the weights meanwhile: a transfer ends, the version is another.

        The next sync is refused until the trainer takes a snapshot again. Every rank comes to the same
        version, since all of them did the same.
        """
        with self._calls:
            with self._lock:
                unfinished = self._transfer is not None
            if unfinished:
                # How to take it back is known for the weights that are replaced only.
                self._applier.release()
            try:
                with self._applier.weights_replaced(by):
                    yield
            finally:
                self._note_replaced(by)

    def _note_replaced(self, by: str) -> None:
        with self._lock:
            transfer, version = self._transfer, self._version.following(by, [by])
            if transfer is None:
                self._version = version
        if transfer is not None:
            self._end(transfer, version, f"ended by {by}")
        logger.info("%s replaced the weights, now at version %s", by, version)

    # --- helpers ----------------------------------------------------------------------------------

    def remember_error(self, message: str) -> None:
        """Keep the latest error for :meth:`status`."""
        self._last_error = message

    def _heard(self) -> None:
        with self._lock:
            if self._transfer is not None:
                self._transfer.heard_at = time.monotonic()

    @property
    def _reap_interval_s(self) -> float:
        return min(self._config.transfer_timeout_s / 4, 5.0)

    def _reap(self) -> None:
        """A thread: end the transfer of a trainer from which nothing was heard for the limit."""
        while not self._closed.wait(self._reap_interval_s):
            with self._calls:
                try:
                    self._end_silent()
                except Exception as error:
                    self.remember_error(str(error))
                    logger.exception("a transfer whose trainer is silent could not be ended")

    def _end_silent(self) -> None:
        limit = self._config.transfer_timeout_s
        with self._lock:
            transfer, state = self._transfer, self._state
            if transfer is None or time.monotonic() - transfer.heard_at < limit:
                return
        final = state is State.COMMITTED
        if not final and state not in (State.OPEN, State.PREPARED):
            return
        silence = f"because nothing was heard of its trainer for {limit:g} s"
        outcome = f"{_FINAL if final else 'given up'} {silence}"
        version = self._target(transfer) if final else transfer.base
        message = f"transfer {transfer.transfer_id} was {outcome}; now at version {version}"
        # Told before it ends: whoever sees this worker idle must also see why.
        self.remember_error(message)
        if final:
            self._make_final(transfer, outcome)
        else:
            self._give_up(transfer, outcome)
        logger.warning(message)

    def _roll_back(self) -> None:
        interrupts: list[BaseException] = []
        try:
            try:
                self._applier.roll_back()
            except KeyboardInterrupt as interrupt:  # of the user in whose process the engine runs
                interrupts.append(interrupt)
                self._applier.roll_back()  # goes on where it was
        except BaseException as error:
            with self._lock:
                self._state = State.BROKEN
            raise TransactionError(
                f"the rollback failed ({type(error).__name__}: {error}); this worker's weights are "
                "mixed: restart or reload the engine"
            ) from error
        if interrupts:
            raise interrupts[0]

    def _end(self, transfer: Transfer, version: WeightVersion, outcome: str) -> None:
        with self._lock:
            self._version = version
            self._transfer = None
            self._state = State.IDLE
            self._outcomes.pop(transfer.transfer_id, None)
            self._outcomes[transfer.transfer_id] = outcome
            while len(self._outcomes) > _REMEMBERED:
                del self._outcomes[next(iter(self._outcomes))]
        self._server.end(transfer.transfer_id)

    def _target(self, transfer: Transfer) -> WeightVersion:
        return transfer.base.following(transfer.target_label, transfer.checksums.values())

    def _current(self, transfer_id: str, state: State) -> Transfer:
        with self._lock:
            if self._transfer is None or self._transfer.transfer_id != transfer_id:
                outcome = self._outcomes.get(transfer_id)
                raise TransactionError(
                    f"transfer {transfer_id} is not open on this worker"
                    + (f": it was {outcome}" if outcome else "")
                )
            if self._state is not state:
                raise TransactionError(
                    f"transfer {transfer_id} is {self._state} on this worker, not {state}"
                )
            return self._transfer

    def _require(self, state: State) -> None:
        with self._lock:
            if self._state is not state:
                raise TransactionError(self._busy())

    def _busy(self) -> str:
        if self._state is State.BROKEN:
            return "this worker's last rollback failed; restart or reload the engine"
        transfer_id = self._transfer.transfer_id if self._transfer else "none"
        return (
            f"transfer {transfer_id} is {self._state} on this worker; finish it, or abort it with "
            "sparse_refit_abort"
        )
