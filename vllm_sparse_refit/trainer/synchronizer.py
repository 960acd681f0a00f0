"""The one class that a training loop needs."""

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from vllm_sparse_refit.codec.dtypes import dtype_name
from vllm_sparse_refit.config import SyncConfig
from vllm_sparse_refit.errors import (
    BaselineError,
    ConfigError,
    TransactionError,
    UnsupportedModelError,
)
from vllm_sparse_refit.trainer.baseline import DeltaCompressionTracker
from vllm_sparse_refit.trainer.baseline_files import is_mapped_baseline
from vllm_sparse_refit.trainer.decisions import DecisionLog
from vllm_sparse_refit.trainer.engine import LocalEngine, Workers
from vllm_sparse_refit.trainer.exported import NamedTensor
from vllm_sparse_refit.trainer.fleet import Fleet
from vllm_sparse_refit.trainer.history import RecordingSource, RetainedTransfer, TransferHistory
from vllm_sparse_refit.trainer.keys import TrainerKeys
from vllm_sparse_refit.trainer.producers import (
    Coordinator,
    ProducerGroup,
    SingleProducer,
    pulled_to_the_end,
)
from vllm_sparse_refit.trainer.report import SyncReport, VerificationReport
from vllm_sparse_refit.trainer.resync import Lineage, Resync
from vllm_sparse_refit.trainer.routing import Routing
from vllm_sparse_refit.trainer.saved import describe, load_baseline, read_note, save_baseline
from vllm_sparse_refit.trainer.transaction import Transaction
from vllm_sparse_refit.trainer.verification import compare_digests
from vllm_sparse_refit.trainer.weights import selected_weights
from vllm_sparse_refit.weight_version import WeightVersion

logger = logging.getLogger(__name__)

_DEFAULTS = SyncConfig()

# Elements compared with the engines at a snapshot: in all, and of each tensor at least.
_SAMPLES = 1 << 16
_LEAST_SAMPLES = 4
# What the processes of a trainer must know of a Routing.
_ROUTES = "skip", "overwrite", "dense"


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

    def __init__(
        self, engines: Sequence[Any], config: SyncConfig, producers: ProducerGroup | None = None
    ) -> None:
        self._config = config
        self._group: ProducerGroup = SingleProducer() if producers is None else producers
        if self._group.rank:
            raise ConfigError(
                f"rank {self._group.rank} of the producers drives no engines; make a ProducerShard there"
            )
        self._fleet = Fleet(engines, keys=TrainerKeys(config), timeout_s=config.rpc_timeout_s)
        self._tracker = DeltaCompressionTracker(config=config)
        self._version: WeightVersion | None = None
        self._dense_bytes = 0
        self._routing: Routing | None = None
        self._sent_elsewhere: frozenset[str] = frozenset()  # by other processes of the trainer
        self._lineage = Lineage()
        self._history = TransferHistory(config.retained_bytes)
        self._decisions = DecisionLog(config.state_dir)
        self._warn_of_doubt()

    def _warn_of_doubt(self) -> None:
        latest = self._decisions.latest
        if latest is not None and latest["decision"] == "commit":
            logger.warning(
                "sparse_refit: an earlier trainer died in transfer %s from %s to %s, after it had decided to "
                "commit: an engine may hold either; the next sync after restore() brings them together",
                latest["transfer_id"],
                WeightVersion(**latest["base"]),
                WeightVersion(**latest["target"]),
            )

    @classmethod
    def connect(
        cls,
        engines: Any,
        *,
        config: SyncConfig = _DEFAULTS,
        producers: ProducerGroup | None = None,
    ) -> Self:
        """Connect to running engines.

        Args:
            engines: a :class:`vllm.LLM` or a list of them, each started with the plugin enabled.
            config: see :class:`SyncConfig`.
            producers: the processes of the trainer, where several send: this is rank 0, and each of the
                others has a :class:`ProducerShard`. :meth:`snapshot`, :meth:`restore` and :meth:`sync` are
                collective then.

        Raises:
            ConfigError: there are none, one is given twice, one is of a kind that is not supported, or its
                workers and the trainer use other keys.
            PluginNotEnabledError: an engine runs without the plugin.
        """
        llms = list(engines) if isinstance(engines, list | tuple) else [engines]
        if not llms:
            raise ConfigError("connect() needs at least one engine")
        if len({id(llm) for llm in llms}) != len(llms):
            raise ConfigError("connect() was given the same engine twice")
        return cls(llms, config, producers)

    def replace_engine(self, old: Any, new: Any) -> None:
        """Go on with another engine in the place of one, which may be dead.

        The next sync finds out what the new one holds and brings it up.

        Raises:
            ConfigError: ``old`` is not connected, or ``new`` is connected already, not supported, or uses
                other keys; ``old`` stays then.
            PluginNotEnabledError: ``new`` runs without the plugin.
        """
        self._fleet.replace(old, new)

    def remove_engine(self, llm: Any) -> None:
        """Go on without an engine, which may be dead.

        Raises:
            ConfigError: it is not connected, or the only one.
        """
        self._fleet.remove(llm)

    def add_engine(self, llm: Any) -> None:
        """Take one more engine; the next sync finds out what it holds and brings it up.

        Raises:
            ConfigError: it is connected already, not supported, or uses other keys.
            PluginNotEnabledError: it runs without the plugin.
        """
        self._fleet.add(llm)

    @property
    def version(self) -> WeightVersion | None:
        """The version that the engines hold, None before the first :meth:`snapshot`."""
        return self._version

    def status(self) -> list[dict[str, Any]]:
        """What every worker of every engine reports about itself."""
        return self._fleet.status()

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
        with self._together() as call:
            call.start({})
            with pulled_to_the_end(self._weights(model), self._group) as weights:
                self._tracker.snapshot_baseline(weights)
            self._sent_elsewhere = self._shares(call)
            if (decided := self._decisions.final) is not None:
                # By a trainer that died before it told everybody: what its engines wrote stays.
                self._fleet.recover(decided)
            self._discover(self._fleet)
            self._warn_of_casts()
            self._compare_samples()
            version = self._fleet.common_version()
            self._lineage, self._history = Lineage(), TransferHistory(self._config.retained_bytes)
            for engine, workers in self._fleet.recover(version).items():
                self._lineage.trust(workers)
                if self._config.retained_bytes:
                    self._lineage.remember(engine, version)
            self._tracker.annotate(self._note(version))
            call.end(version)
        self._version = version

    @contextlib.contextmanager
    def _together(self) -> Iterator[Coordinator]:
        """One call that the other processes of the trainer make as well; they hear how it ends."""
        before, call = self._version, Coordinator(self._group)
        try:
            yield call
        except BaseException as error:
            happened = self._version if self._version != before else None
            if happened is not None:
                error.add_note(f"the engines have come to version {happened} all the same")
            call.fail(error, happened)
            raise

    def _shares(self, call: Coordinator) -> frozenset[str]:
        """The tensors that the other processes hold and will send.

        Raises:
            BaselineError: two of them hold the same, or one that is not in this baseline.
        """
        shares = [name for shard in call.collect() for name in shard.names]
        taken = set(shares)
        if len(taken) < len(shares) or not taken <= self._tracker.state_dict_info.keys():
            raise BaselineError(
                "the processes of the trainer do not hold parts of one snapshot: give each the same tensors "
                "in the same order (later exports may come in another)"
            )
        return frozenset(taken)

    def _is_sent_here(self, name: str) -> bool:
        return name not in self._sent_elsewhere

    def _note(self, version: WeightVersion) -> str:
        """What goes with a baseline in files, for a trainer that finds them."""
        return json.dumps(describe(version, self._lineage))

    @property
    def baseline_folder(self) -> Path | None:
        """Where the baseline's files are, with ``SyncConfig.baseline_dir``; for :meth:`restore`."""
        return self._tracker.folder

    def _discover(self, engines: Iterable[LocalEngine]) -> None:
        """Have engines classify the baseline's tensors, and route them as all engines need it."""
        info = {
            name: [list(shape), dtype_name(dtype)]
            for name, (shape, dtype) in self._tracker.state_dict_info.items()
        }
        routing = self._fleet.discover(info, engines)
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
        self._routing = routing
        self._dense_bytes = sum(
            math.prod(shape) * dtype.itemsize
            for shape, dtype in self._tracker.state_dict_info.values()
        )

    def _warn_of_casts(self) -> None:
        """Say so where most tensors have more bits than the engines keep of them."""
        assert self._routing is not None
        casts, count = self._routing.narrowed, len(self._tracker.state_dict_info)
        if 2 * len(casts) > count:
            name, kept = next(iter(casts.items()))
            logger.warning(
                "sparse_refit: the engines keep %d of %d tensors in fewer bits (%s in %s, for one), and each "
                "sync compares and sends bits that they drop; SyncConfig(dtype=%r) avoids that",
                len(casts),
                count,
                name,
                kept,
                kept,
            )

    def _compare_samples(self) -> None:
        """Refuse a snapshot of other weights than the engines hold: every later xor would be wrong."""
        per_tensor = max(_SAMPLES // max(len(self._tracker.state_dict_info), 1), _LEAST_SAMPLES)
        samples = {
            name: [positions, bits]
            for name, (positions, bits) in self._tracker.samples(min(per_tensor, 256)).items()
        }
        self._fleet.check_samples(samples)

    def _weights(self, model: Any) -> Iterator[NamedTensor]:
        return selected_weights(model, self._config)

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
        return compare_digests(self._tracker, self._fleet.replies("sparse_refit_digests"))

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
            BaselineError: there was no snapshot, or the baseline's files could not follow the last sync,
                as on a full disk; nothing was sent.
            EngineStateError: wrong thread, or unfinished requests and no pause.
            VersionMismatchError: a worker holds another version than the last sync left.
            RefitError: anything else that went wrong; every worker still holds the old version, unless the
                message says otherwise, and the next sync can be tried.
        """
        with self._together() as call:
            report = self._sync(model, label, pause, call)
            call.end(report.version)
        logger.info("sparse_refit: %s", report)
        return report

    def _sync(
        self, model: Any, label: str | None, pause: bool, producers: Coordinator
    ) -> SyncReport:
        started = time.perf_counter()
        base = self._checked_base(label, pause)
        label = label if label is not None else _next_label(base)
        workers = self._fleet.recover(base)
        self._tracker.settle()
        resynced = self._bring_up(workers, base, pause)
        transaction = Transaction(
            workers, self._config, sequence=self._fleet.next_sequence(), label=label
        )
        source = RecordingSource(self._tracker)
        try:
            transaction.begin(dict.fromkeys(workers, base.digest))
            counts = self._stream(transaction, model, base, source, producers)
            self._tracker.finish_export()
            streamed = time.perf_counter()
            payloads = {str(rank): each["payloads"] for rank, each in enumerate(counts)}
            version = self._prepare(transaction, label, payloads) or base
        except BaseException as error:
            self._give_up(transaction, error)
            raise
        pause_s = 0.0
        if version == base:
            self._end_empty(transaction)
        else:
            pause_s = self._commit(transaction, base, version, source, pause)
        return SyncReport(
            version=version,
            engines=len(workers),
            workers=sum(len(replies) for replies in workers.values()),
            changed_elements=sum(each["changed_elements"] for each in counts),
            total_elements=sum(each["total_elements"] for each in counts),
            payloads=sum(payloads.values()),
            wire_bytes=sum(each["wire_bytes"] for each in counts),
            dense_bytes=self._dense_bytes,
            stream_s=streamed - started,
            pause_s=pause_s,
            sync_s=time.perf_counter() - started,
            resynced=resynced,
        )

    def _stream(
        self,
        transaction: Transaction,
        model: Any,
        base: WeightVersion,
        source: RecordingSource,
        producers: Coordinator,
    ) -> list[Mapping[str, int]]:
        """Send the weights, as far as other processes do not; returns what was sent, by producer.

        What others sent is kept here as well: this baseline is the whole one, and whoever falls behind is
        brought up from here.
        """
        assert self._routing is not None
        routing = {name: sorted(getattr(self._routing, name)) for name in _ROUTES}
        producers.start(
            {
                "base": base.digest,
                "transfer_id": transaction.transfer_id,
                "sequence": transaction.sequence,
                "addresses": transaction.addresses,
                **routing,
            }
        )
        with pulled_to_the_end(self._weights(model), self._group) as weights:
            sent = transaction.stream(weights, source, sends=self._is_sent_here)
        counts: list[Mapping[str, int]] = [sent]
        for shard in producers.collect():
            self._tracker.take_over(shard.names, (payload.body for payload in shard.payloads))
            source.payloads += shard.payloads
            counts.append(shard.counts)
        return counts

    def _bring_up(
        self, workers: Mapping[LocalEngine, Workers], base: WeightVersion, pause: bool
    ) -> int:
        """Bring engines to ``base`` that were restarted, joined late or were written by others."""
        behind = {
            engine: replies
            for engine, replies in workers.items()
            if not self._lineage.trusts(replies)
            or any(reply["version"]["digest"] != base.digest for reply in replies)
        }
        # Also one that was taken out and in again: how it loads counts once more.
        asked = [engine for engine in workers if engine in behind or not self._fleet.knows(engine)]
        if asked:
            self._discover(asked)
        if not behind:
            return 0
        assert self._routing is not None
        resync = Resync(
            self._config,
            self._tracker,
            self._history,
            self._lineage,
            next_sequence=self._fleet.next_sequence,
        )
        resync.bring_up(behind, base, skip=self._routing.skip, pause=pause)
        return len(behind)

    def _give_up(self, transaction: Transaction, error: BaseException) -> None:
        """Leave everything as it was before the sync; what goes wrong with that is noted on ``error``."""
        self._tracker.on_sync_failed()
        try:
            transaction.give_up(error)
        finally:
            self._decisions.aborted(transaction.transfer_id)

    def _checked_base(self, label: object, pause: bool) -> WeightVersion:
        if label is not None and not isinstance(label, str):
            raise ConfigError(f"the label of a version must be a string, not {label!r}")
        if self._version is None:
            raise BaselineError(
                "nothing is known about the weights that the engines hold; call snapshot() before sync()"
            )
        for engine in self._fleet:
            engine.check_idle(pause)
        return self._version

    def _prepare(
        self, transaction: Transaction, label: str, payloads: Mapping[str, int]
    ) -> WeightVersion | None:
        """The version that all workers are ready to come to; None if nothing changed."""
        if not any(payloads.values()):
            return None
        digests = set(transaction.prepare(payloads).values())
        if len(digests) != 1:
            raise TransactionError(
                f"the engines staged different payloads for transfer {transaction.transfer_id}; "
                "sync again"
            )
        return WeightVersion(label, digests.pop())

    def _end_empty(self, transaction: Transaction) -> None:
        self._tracker.on_sync_succeeded()
        if problems := transaction.abort():
            raise TransactionError(f"an empty transfer could not be closed: {problems[0]}")

    def _commit(
        self,
        transaction: Transaction,
        base: WeightVersion,
        version: WeightVersion,
        source: RecordingSource,
        pause: bool,
    ) -> float:
        """Write, verify and drop stale caches everywhere, then make it final; returns seconds paused."""
        started, decided = time.perf_counter(), False
        try:
            with transaction.paused(pause):
                try:
                    self._decisions.write("commit", transaction.transfer_id, base, version)
                    transaction.write()
                    self._decisions.write("final", transaction.transfer_id, base, version)
                except BaseException as error:
                    # Still paused: no token may come from weights that are about to be taken back.
                    decided = True
                    self._give_up(transaction, error)
                    raise
                decided = True
                retained = RetainedTransfer(base, version, tuple(source.payloads))
                self._make_final(transaction, version, retained)
        except BaseException as error:
            if not decided:
                self._give_up(transaction, error)
            raise
        return time.perf_counter() - started

    def _make_final(
        self, transaction: Transaction, version: WeightVersion, retained: RetainedTransfer
    ) -> None:
        """Every worker holds verified new weights: from here on the sync has happened.

        The trainer moves first. An engine that is not told any more keeps the new weights too: its own
        limit or the next transfer makes them final there.
        """
        # Unknown in between, so that an interrupt asks for a snapshot and compares with nothing stale.
        self._version = None
        self._tracker.on_sync_succeeded(self._note(version))
        self._history.add(retained)
        self._version = version
        if problems := transaction.release():
            raise TransactionError(
                f"the sync to version {version} has happened, but {len(problems)} of "
                f"{len(self._fleet)} engines could not be told to make it final ({problems[0]}); the "
                "next sync brings up those that still run, replace_engine() the others"
            )

    def settle(self) -> None:
        """Wait until the baseline has followed the last sync, as the next sync would do.

        Raises:
            BaselineError: there is no baseline, or its files could not follow, as on a full disk.
        """
        self._tracker.settle()

    # --- a trainer that restarts ---------------------------------------------------------------------

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the baseline and its version to a folder, for :meth:`restore` in another process.

        Takes as much disk as the weights. An earlier save in the folder is replaced when this one is
        complete.

        Raises:
            BaselineError: there is no baseline, or it cannot be written.
        """
        if self._version is None:
            raise BaselineError("there is no baseline to save; call snapshot() first")
        save_baseline(folder, self._tracker.tensors(), self._version, self._lineage)

    def restore(self, folder: str | os.PathLike[str]) -> None:
        """Go on from what another process left, in the place of :meth:`snapshot`.

        Engines that went on to other versions meanwhile are brought back to that one by the next sync.

        Args:
            folder: what :meth:`save` wrote, or the :attr:`baseline_folder` of a process that has ended,
                whichever way; that one is taken over and not copied.

        Raises:
            BaselineError: the folder holds no complete baseline, one that was damaged, or one that another
                process uses; says which.
            UnsupportedModelError: as :meth:`snapshot`.
        """
        self._version = None
        with self._together() as call:
            call.start({})
            if is_mapped_baseline(folder):
                note = self._tracker.reopen_baseline(folder)
                version, lineage = read_note(folder, note)
            else:
                saved = load_baseline(folder)
                self._tracker.snapshot_baseline(saved.tensors)
                version, lineage = saved.version, saved.lineage
            self._sent_elsewhere = self._shares(call)
            self._fleet.recover(version)
            self._discover(self._fleet)
            self._lineage, self._history = lineage, TransferHistory(self._config.retained_bytes)
            self._tracker.annotate(self._note(version))
            call.end(version)
        self._version = version

    def close(self, *, keep: bool = False) -> None:
        """Give the baseline's memory or files back. The engines go on as they are.

        Args:
            keep: Leave the files of :attr:`baseline_folder`, to :meth:`restore` from.

        Raises:
            BaselineError: they shall be kept, but could not follow the last sync, as on a full disk; this
                can be called again.
        """
        self._tracker.close(keep=keep)
        self._version = None


def _next_label(base: WeightVersion) -> str:
    prefix, _, number = base.label.rpartition("-")
    return f"step-{int(number) + 1}" if prefix == "step" and number.isdigit() else "step-1"
