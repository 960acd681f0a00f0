"""A worker's side of a transfer: server threads stage payloads, a commit writes the weights."""

import contextlib
import enum
import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_sparse_refit.apply.applier import Samples, VllmSparseDeltaApplier
from vllm_sparse_refit.apply.discovery import TensorInfo
from vllm_sparse_refit.apply.load_mode import LoadKind
from vllm_sparse_refit.checksum import checksum_hex
from vllm_sparse_refit.codec.delta import TensorDelta
from vllm_sparse_refit.codec.payload import DecodeLimits, decode_payload
from vllm_sparse_refit.config import WorkerConfig
from vllm_sparse_refit.errors import (
    PayloadError,
    TransactionError,
    VersionMismatchError,
)
from vllm_sparse_refit.transport.server import ZmqSparseRefitServer
from vllm_sparse_refit.weight_version import WeightVersion

# Below vLLM's own logger, so that lines come out in its format and with its worker prefix.
logger = logging.getLogger("vllm.sparse_refit")


class State(enum.StrEnum):
    """Where a worker is in a transfer.

                   begin          prepare            commit             release
        IDLE ------------> OPEN -----------> PREPARED ---------> COMMITTED --------> IDLE
          ^                  |                   |                   |           (new version)
          +------ abort -----+------ abort ------+----- rollback ----+
        (old version, same bits)

    Payloads handed over by an RPC instead of the server make it UPDATING until they are finished.

    Only a rollback that fails leads to BROKEN, from which nothing leads away but a restart or
    reload of the engine.
    """

    IDLE = "idle"
    OPEN = "open"
    PREPARED = "prepared"
    COMMITTED = "committed"
    UPDATING = "updating"
    BROKEN = "broken"


@dataclass(eq=False)
class _Transfer:
    """The one transfer a worker may have open."""

    transfer_id: str
    base: WeightVersion
    target_label: str
    checksums: dict[tuple[int, int], str] = field(default_factory=dict)
    deltas: dict[str, list[TensorDelta]] = field(default_factory=dict)
    staged_bytes: int = 0
    changed_elements: int = 0


class Receiver:
    """Owns the state of transfers of one worker.

    :meth:`stage` is called by the server's threads; everything else by the worker's main thread,
    inside an RPC. ``_lock`` guards ``_state`` and ``_transfer``; it is never held while payloads
    are decoded or weights are written.
    """

    def __init__(
        self,
        applier: VllmSparseDeltaApplier,
        config: WorkerConfig,
        limits: DecodeLimits,
        api_key: bytes | None,
    ) -> None:
        self._applier = applier
        self._config = config
        self._limits = limits
        self._lock = threading.Lock()
        self._state = State.IDLE
        self._transfer: _Transfer | None = None
        self._version = WeightVersion.initial()
        self._last_error = ""
        self._server = ZmqSparseRefitServer(self.stage, config=config, api_key=api_key)
        self.address = ""

    def start(self) -> None:
        """Open the server. Called once, when the model is loaded."""
        self.address = self._server.start()
        logger.info("this worker receives weight updates at %s", self.address)
        if (kept := self._applier.status())["packed_layers"]:
            logger.info(
                "%d packed layers are kept as they were loaded, in %.1f MiB of host memory, so that they can "
                "be updated; shadow_packed_layers and max_shadow_bytes limit this",
                kept["packed_layers"],
                kept["shadow_bytes"] / (1 << 20),
            )

    def close(self) -> None:
        """End the server thread; harmless when repeated."""
        self._server.close()

    # --- server threads ---------------------------------------------------------------------------

    def stage(self, body: bytes, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Decode, check and hold one payload; touches no weight. Safe from several threads at once.

        Raises:
            RefitError: the payload is refused, with the reason; nothing of it is kept.
        """
        transfer = self._open_transfer(str(metadata["transfer_id"]))
        deltas = [d for d in decode_payload(body, self._limits) if self._applier.check_delta(d)]
        staged_bytes = sum(_held_bytes(delta) for delta in deltas)
        key = (int(metadata["producer_id"]), int(metadata["payload_id"]))
        with self._lock:
            if self._transfer is not transfer or self._state is not State.OPEN:
                raise TransactionError(f"transfer {transfer.transfer_id} ended meanwhile")
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

    def _open_transfer(self, transfer_id: str) -> _Transfer:
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
        with self._lock:
            transfer = self._transfer
            return {
                "address": self.address,
                "state": str(self._state),
                "version": {"label": self._version.label, "digest": self._version.digest},
                "transfer_id": transfer.transfer_id if transfer else None,
                "staged_bytes": transfer.staged_bytes if transfer else 0,
                "last_error": self._last_error,
                **self._applier.status(),
                "server": self._server.status(),
            }

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

    def digests(self) -> dict[str, Any]:
        """See :meth:`VllmSparseDeltaApplier.digests`."""
        self._require(State.IDLE)
        return self._applier.digests()

    def adopt(self, label: str, digest: str) -> dict[str, Any]:
        """Take a version that the trainer gives to all workers, which it found to hold equal weights."""
        self._require(State.IDLE)
        if not isinstance(label, str) or not isinstance(digest, str):
            raise TransactionError(f"a version is two strings, not {label!r} and {digest!r}")
        with self._lock:
            self._version = WeightVersion(label, digest)
        return {}

    def begin(
        self, transfer_id: str, base_digest: str, target_label: str, verification_samples: int
    ) -> dict[str, Any]:
        """Open a transfer that starts from the version this worker holds.

        One that is still open, because its trainer died or was interrupted, ends first.
        """
        texts = (transfer_id, base_digest, target_label)
        if not all(isinstance(text, str) for text in texts):
            raise TransactionError(
                f"transfer_id, base_digest and target_label must be strings, not {texts!r}"
            )
        if type(verification_samples) is not int or verification_samples < 0:
            raise TransactionError(
                f"verification_samples must be a whole number of 0 or more, not "
                f"{verification_samples!r}"
            )
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
            self._applier.release()  # left over if the last release was interrupted
            self._applier.sample_limit = verification_samples
            self._transfer = _Transfer(transfer_id, self._version, target_label)
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
            self.release(transfer.transfer_id)
        else:
            self.abort(transfer.transfer_id)

    def prepare(self, transfer_id: str, expected_payloads: Mapping[str, int]) -> dict[str, Any]:
        """Wait for all payloads, then check the whole transfer; then only the commit is missing."""
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
        with self._lock:
            self._state = State.PREPARED
        return {
            "staged_bytes": transfer.staged_bytes,
            "changed_elements": transfer.changed_elements,
            "target_digest": self._target(transfer).digest,
        }

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
            self._end(transfer, transfer.base)
            raise
        self._applier.release()
        self._end(transfer, self._target(transfer))
        return result

    def release(self, transfer_id: str) -> dict[str, Any]:
        """Make a committed transfer final: the undo log goes, the version moves."""
        transfer = self._current(transfer_id, State.COMMITTED)
        version = self._target(transfer)
        self._end(transfer, version)
        self._applier.release()
        logger.info(
            "transfer %s committed: %d changed elements in %d payloads, now at version %s",
            transfer_id,
            transfer.changed_elements,
            len(transfer.checksums),
            version,
        )
        return {"version": {"label": version.label, "digest": version.digest}}

    def abort(self, transfer_id: str) -> dict[str, Any]:
        """Give an uncommitted transfer up, or take a committed one back; the old version stays.

        Does nothing for a transfer that this worker does not have, so that it can be sent to all.
        """
        with self._lock:
            transfer, state = self._transfer, self._state
        if transfer is None or transfer.transfer_id != transfer_id:
            return {"aborted": False}
        if state is State.BROKEN:
            raise TransactionError(self._busy())
        self._roll_back()  # whatever was written, also by a commit that was interrupted
        self._end(transfer, transfer.base)
        level = logging.WARNING if transfer.checksums else logging.DEBUG
        logger.log(level, "transfer %s was given up, still at %s", transfer_id, transfer.base)
        return {"aborted": True}

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
                self._transfer = _Transfer("direct", self._version, "direct")
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
        self._give_up_undo()
        try:
            with self._applier.weights_replaced(by):
                yield
        finally:
            self._note_replaced(by)

    def _give_up_undo(self) -> None:
        """Forget how to take a transfer back, before the weights that it changed are replaced."""
        with self._lock:
            transfer = self._transfer
        if transfer is not None:
            self._applier.release()

    def _note_replaced(self, by: str) -> None:
        with self._lock:
            transfer, version = self._transfer, self._version.following(by, [by])
            if transfer is None:
                self._version = version
        if transfer is not None:
            self._end(transfer, version)
        logger.info("%s replaced the weights, now at version %s", by, version)

    # --- helpers ----------------------------------------------------------------------------------

    def remember_error(self, message: str) -> None:
        """Keep the latest error for :meth:`status`."""
        self._last_error = message

    def _roll_back(self) -> None:
        try:
            self._applier.roll_back()
        except BaseException as error:
            with self._lock:
                self._state = State.BROKEN
            raise TransactionError(
                f"the rollback failed ({type(error).__name__}: {error}); this worker's weights are "
                "mixed: restart or reload the engine"
            ) from error

    def _end(self, transfer: _Transfer, version: WeightVersion) -> None:
        with self._lock:
            self._version = version
            self._transfer = None
            self._state = State.IDLE
        self._server.forget(transfer.transfer_id)

    def _target(self, transfer: _Transfer) -> WeightVersion:
        return transfer.base.following(transfer.target_label, transfer.checksums.values())

    def _current(self, transfer_id: str, state: State) -> _Transfer:
        with self._lock:
            if self._transfer is None or self._transfer.transfer_id != transfer_id:
                raise TransactionError(f"transfer {transfer_id} is not open on this worker")
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


# What a decoded delta costs beside its tensors' data.
_DELTA_BYTES = 1024


def _held_bytes(delta: TensorDelta) -> int:
    locations = 0 if isinstance(delta.locations, range) else delta.locations.nbytes
    return locations + delta.values.nbytes + _DELTA_BYTES
