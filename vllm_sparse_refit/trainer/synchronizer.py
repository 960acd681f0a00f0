"""The one class that a training loop needs."""

import contextlib
import fnmatch
import logging
import math
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Self

from vllm_sparse_refit.codec.dtypes import dtype_from_name, dtype_name
from vllm_sparse_refit.config import SyncConfig, read_api_key
from vllm_sparse_refit.errors import (
    BaselineError,
    ConfigError,
    RefitError,
    TransactionError,
    UnsupportedModelError,
)
from vllm_sparse_refit.trainer.baseline import DeltaCompressionTracker
from vllm_sparse_refit.trainer.engine import LocalEngine
from vllm_sparse_refit.trainer.exported import NamedTensor
from vllm_sparse_refit.trainer.report import SyncReport, VerificationReport
from vllm_sparse_refit.trainer.routing import join_discoveries
from vllm_sparse_refit.trainer.stream import stream_sparse_delta_payloads_via_zmq
from vllm_sparse_refit.trainer.verification import compare_digests
from vllm_sparse_refit.trainer.weights import named_weights
from vllm_sparse_refit.weight_version import WeightVersion

logger = logging.getLogger(__name__)

_DEFAULTS = SyncConfig()

# Elements compared with the engines at a snapshot: in all, and of each tensor at least.
_SAMPLES = 1 << 16
_LEAST_SAMPLES = 4


class WeightSynchronizer:
    """Keeps vLLM engines on the trainer's weights by sending what changed.

    ::

        sync = WeightSynchronizer.connect(llm)
        sync.snapshot(model)          # what the engines hold now
        ...                           # train
        report = sync.sync(model)     # every engine is now as if started from the new checkpoint

    ``model`` is a Hugging Face ``PreTrainedModel``, the folder of a safetensors checkpoint, or an iterable of
    ``(checkpoint name, tensor)``.

    Belongs to the thread that called :meth:`connect`, which must be the one that calls ``generate``.
    """

    def __init__(self, engines: Sequence[LocalEngine], config: SyncConfig) -> None:
        # A key that is missing should not wait for the first sync to be noticed.
        read_api_key(config.api_key_env_var)
        self._engines = list(engines)
        self._config = config
        self._dtype = None if config.dtype is None else dtype_from_name(config.dtype)
        self._tracker = DeltaCompressionTracker(config=config)
        self._version: WeightVersion | None = None
        self._dense_bytes = 0
        self._workers = [worker for engine in self._engines for worker in engine.workers()]

    @classmethod
    def connect(cls, engines: Any, *, config: SyncConfig = _DEFAULTS) -> Self:
        """Connect to running engines.

        Args:
            engines: a :class:`vllm.LLM` or a list of them, each started with the plugin enabled.
            config: see :class:`SyncConfig`.

        Raises:
            ConfigError: there are none, one is given twice, or one is of a kind that is not supported.
            PluginNotEnabledError: an engine runs without the plugin.
        """
        llms = list(engines) if isinstance(engines, list | tuple) else [engines]
        if not llms:
            raise ConfigError("connect() needs at least one engine")
        if len({id(llm) for llm in llms}) != len(llms):
            raise ConfigError("connect() was given the same engine twice")
        return cls([LocalEngine(llm, f"engine {index}") for index, llm in enumerate(llms)], config)

    @property
    def version(self) -> WeightVersion | None:
        """The version that the engines hold, None before the first :meth:`snapshot`."""
        return self._version

    def status(self) -> list[dict[str, Any]]:
        """What every worker of every engine reports about itself."""
        return [
            {"engine": engine.name, **reply}
            for engine in self._engines
            for reply in engine.call("sparse_refit_status")
        ]

    # --- snapshot ------------------------------------------------------------------------------------

    def snapshot(self, model: Any) -> None:
        """Remember the weights that the engines hold now, and find out how each engine loads them.

        Takes as much memory as the weights (or files, with ``SyncConfig.baseline_dir``).

        Args:
            model: the very weights that the engines were started from or brought to.

        Raises:
            UnsupportedModelError: an engine cannot be updated exactly; says what and why.
            BaselineError: sampled elements show that an engine holds other weights.
            RefitError: the weights cannot be read.
        """
        self._version = None
        self._tracker.snapshot_baseline(self._weights(model))
        self._workers = [worker for engine in self._engines for worker in engine.workers()]
        info = {
            name: [list(shape), dtype_name(dtype)]
            for name, (shape, dtype) in self._tracker.state_dict_info.items()
        }
        routing = join_discoveries(
            info, {e.name: e.call("discover_native_skips", info) for e in self._engines}
        )
        for name, partner in routing.tied:
            if not self._tracker.holds_same_bits(name, partner):
                raise UnsupportedModelError(
                    f"{name} and {partner} are one parameter in an engine, but they differ in the "
                    "trainer; start the engine from a checkpoint in which they differ"
                )
        if routing.uncovered:
            logger.warning(
                "sparse_refit: %d parameters of the engines are in none of the trainer's tensors and will "
                "stay as they are: %s",
                len(routing.uncovered),
                ", ".join(sorted(routing.uncovered)[:5]),
            )
        self._tracker.set_routing(
            skip=routing.skip, overwrite=routing.overwrite, dense=routing.dense
        )
        self._dense_bytes = sum(
            math.prod(shape) * dtype.itemsize
            for shape, dtype in self._tracker.state_dict_info.values()
        )
        self._compare_samples()
        self._version = self._common_version()

    def _compare_samples(self) -> None:
        """Refuse a snapshot of other weights than the engines hold: every later xor would be wrong."""
        per_tensor = max(_SAMPLES // max(len(self._tracker.state_dict_info), 1), _LEAST_SAMPLES)
        samples = {
            name: [positions, bits]
            for name, (positions, bits) in self._tracker.samples(min(per_tensor, 256)).items()
        }
        for engine in self._engines:
            for reply in engine.call("sparse_refit_compare", samples):
                if different := reply["different"]:
                    name = next(iter(different))
                    raise BaselineError(
                        f"{engine.name}, rank {reply['rank']} does not hold these weights: "
                        f"{sum(different.values())} of {reply['compared']} sampled elements differ, in "
                        f"{len(different)} tensors, first {name}; call snapshot() with the weights that "
                        "the engines were started from or last brought to"
                    )

    def _common_version(self) -> WeightVersion:
        """The version of all workers; a new one for all if they came to these weights by other ways."""
        found = {
            WeightVersion(reply["version"]["label"], reply["version"]["digest"])
            for reply in self.status()
        }
        if len(found) == 1:
            return found.pop()
        version = WeightVersion("snapshot", uuid.uuid4().hex)
        for engine in self._engines:
            engine.call("sparse_refit_adopt", version.label, version.digest)
        return version

    def _weights(self, model: Any) -> Iterator[NamedTensor]:
        for name, tensor in named_weights(model):
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in self._config.ignore):
                continue
            cast = self._dtype is not None and tensor.is_floating_point()
            yield name, tensor.to(self._dtype) if cast else tensor

    def verify(self) -> VerificationReport:
        """Compare every element that the engines should hold with what they hold, by digests.

        Reads all weights, here and in the engines, and changes nothing. Packed layers are processed again
        and compared with what is in use.

        Raises:
            BaselineError: there was no snapshot.
            EngineStateError: wrong thread, or an engine is broken.
        """
        if self._version is None:
            raise BaselineError(
                "nothing is known about the weights that the engines hold; call snapshot() before verify()"
            )
        replies = (
            (f"{engine.name}, rank {reply['rank']}", reply)
            for engine in self._engines
            for reply in engine.call("sparse_refit_digests")
        )
        return compare_digests(self._tracker, replies)

    # --- sync ----------------------------------------------------------------------------------------

    def sync(self, model: Any, *, label: str | None = None, pause: bool = False) -> SyncReport:
        """Bring every engine to the bits of ``model``, or leave all of them as they are.

        Args:
            model: the new weights, with the names, shapes and dtypes of the snapshot. An iterable must
                yield tensors that keep their values until this returns, no buffer that it refills.
            label: name of the new version, default ``step-N``; when nothing changed, the version stays.
            pause: hold unfinished requests during the commit and let them go on with the new weights;
                without it a sync is refused while there are any.

        Raises:
            BaselineError: there was no snapshot.
            EngineStateError: wrong thread, or unfinished requests and no pause.
            VersionMismatchError: a worker holds another version than the last sync left.
            RefitError: anything else that went wrong; every worker still holds the old version, unless the
                message says otherwise, and the next sync can be tried.
        """
        started = time.perf_counter()
        base = self._checked_base(label, pause)
        transfer_id = uuid.uuid4().hex
        label = label if label is not None else _next_label(base)
        try:
            self._begin(transfer_id, base, label)
            counts = self._stream(model, transfer_id)
            streamed = time.perf_counter()
            if counts["payloads"]:
                version = self._prepare(transfer_id, label, counts["payloads"])
        except BaseException as error:
            self._give_up(transfer_id, error)
            raise
        if counts["payloads"]:
            pause_s = self._commit(transfer_id, version, pause)
        else:
            version, pause_s = base, 0.0
            self._end_empty(transfer_id)
        report = SyncReport(
            version=version,
            engines=len(self._engines),
            workers=len(self._workers),
            changed_elements=counts["changed_elements"],
            total_elements=counts["total_elements"],
            payloads=counts["payloads"],
            wire_bytes=counts["wire_bytes"],
            dense_bytes=self._dense_bytes,
            stream_s=streamed - started,
            pause_s=pause_s,
            sync_s=time.perf_counter() - started,
        )
        logger.info("sparse_refit: %s", report)
        return report

    def _give_up(self, transfer_id: str, error: BaseException) -> None:
        """Leave everything as it was before the sync; what goes wrong with that is noted on ``error``."""
        self._tracker.on_sync_failed()
        for problem in self._abort(transfer_id):
            error.add_note(problem)

    def _checked_base(self, label: object, pause: bool) -> WeightVersion:
        if label is not None and not isinstance(label, str):
            raise ConfigError(f"the label of a version must be a string, not {label!r}")
        if self._version is None:
            raise BaselineError(
                "nothing is known about the weights that the engines hold; call snapshot() before sync()"
            )
        for engine in self._engines:
            engine.check_idle(pause)
        return self._version

    def _begin(self, transfer_id: str, base: WeightVersion, label: str) -> None:
        for engine in self._engines:
            engine.call(
                "sparse_refit_begin",
                transfer_id,
                base.digest,
                label,
                verification_samples=self._config.verification_samples,
            )

    def _stream(self, model: Any, transfer_id: str) -> dict[str, int]:
        counts = stream_sparse_delta_payloads_via_zmq(
            self._weights(model),
            delta_tracker=self._tracker,
            refit_targets=[worker.address for worker in self._workers],
            transfer_id=transfer_id,
            timeout_s=self._config.timeout_s,
            config=self._config,
        )
        self._tracker.finish_export()
        return counts

    def _end_empty(self, transfer_id: str) -> None:
        problems = self._abort(transfer_id)
        self._tracker.on_sync_succeeded()
        if problems:
            raise TransactionError(f"an empty transfer could not be closed: {problems[0]}")

    def _prepare(self, transfer_id: str, label: str, payloads: int) -> WeightVersion:
        """Have every worker check that it can commit; after this only a fault can stop it."""
        digests = {
            str(reply["target_digest"])
            for engine in self._engines
            for reply in engine.call("sparse_refit_prepare", transfer_id, {"0": payloads})
        }
        if len(digests) != 1:
            raise TransactionError(
                f"the workers staged different payloads for transfer {transfer_id}; sync again"
            )
        return WeightVersion(label, digests.pop())

    def _commit(self, transfer_id: str, version: WeightVersion, pause: bool) -> float:
        """Write, verify and drop stale caches everywhere, then make it final; returns seconds paused."""
        started = time.perf_counter()
        with contextlib.ExitStack() as stack:
            try:
                for engine in self._engines:
                    engine.check_idle(pause)
                    stack.enter_context(engine.paused(pause))
                self._write(transfer_id)
            except BaseException as error:
                # Still paused: no token may come from weights that are about to be taken back.
                self._give_up(transfer_id, error)
                raise
            self._make_final(transfer_id, version)
        return time.perf_counter() - started

    def _write(self, transfer_id: str) -> None:
        for engine in self._engines:
            engine.call("sparse_refit_commit", transfer_id)
        for engine in self._engines:
            engine.call("finish_sparse_delta_refit")
        for engine in self._engines:
            engine.reset_caches()

    def _make_final(self, transfer_id: str, version: WeightVersion) -> None:
        """Every worker holds verified new weights: from here on the sync has happened.

        Until all of it is done the version counts as unknown, so that an interrupt in between asks for a
        snapshot instead of comparing with a baseline that may be behind.
        """
        self._version = None
        problems = []
        for engine in self._engines:
            try:
                engine.call("sparse_refit_release", transfer_id)
            except RefitError as error:
                problems.append(str(error))
        self._tracker.on_sync_succeeded()
        if problems:
            raise TransactionError(
                f"the new weights are in every engine, but {len(problems)} could not make them final "
                f"({problems[0]}); restart those engines from the new checkpoint and call snapshot()"
            )
        self._version = version

    def _abort(self, transfer_id: str) -> list[str]:
        """Give the transfer up on every engine; returns what went wrong with that."""
        problems = [engine.abort(transfer_id) for engine in self._engines]
        return [problem for problem in problems if problem is not None]

    def settle(self) -> None:
        """Wait until the baseline has followed the last sync, as the next sync would do.

        Raises:
            BaselineError: there is no baseline.
        """
        self._tracker.settle()

    def close(self) -> None:
        """Give the baseline's memory or files back. The engines go on as they are."""
        self._version = None
        self._tracker.close()


def _next_label(base: WeightVersion) -> str:
    prefix, _, number = base.label.rpartition("-")
    return f"step-{int(number) + 1}" if prefix == "step" and number.isdigit() else "step-1"
