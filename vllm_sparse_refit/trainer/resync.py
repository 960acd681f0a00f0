"""Bring engines to the version of the others: by the transfers that they missed, or by every element."""

import logging
from collections.abc import Callable, Mapping

from vllm_sparse_refit.config import SyncConfig
from vllm_sparse_refit.trainer.baseline import DeltaCompressionTracker
from vllm_sparse_refit.trainer.engine import LocalEngine, Workers
from vllm_sparse_refit.trainer.history import OverwriteSource, RetainedTransfer, TransferHistory
from vllm_sparse_refit.trainer.transaction import Transaction
from vllm_sparse_refit.weight_version import WeightVersion

logger = logging.getLogger(__name__)


class Lineage:
    """Which workers are known to hold what their version says.

    A version digest is chained over transfers, so it proves something only of a worker whose start of the
    chain was compared with the trainer's weights. A worker that was started anew is known again by the
    fingerprint of all its weights, or after an overwrite of every element.
    """

    def __init__(self) -> None:
        self.incarnations: set[str] = set()
        self.fingerprints: set[tuple[str, ...]] = set()
        self.start: WeightVersion | None = None  # the version of weights with those fingerprints

    def trust(self, workers: Workers) -> None:
        """These workers hold what their version says."""
        self.incarnations.update(str(worker["incarnation"]) for worker in workers)

    def trusts(self, workers: Workers) -> bool:
        """Whether all these workers are known."""
        return all(worker["incarnation"] in self.incarnations for worker in workers)

    def remember(self, engine: LocalEngine, version: WeightVersion) -> None:
        """Take the fingerprint of an engine that holds ``version``."""
        if self.start != version:
            self.fingerprints, self.start = set(), version
        if (found := fingerprint(engine)) is not None:
            self.fingerprints.add(found)

    def recognizes(self, engine: LocalEngine) -> bool:
        """Whether an engine holds, bit for bit, the weights of :attr:`start`."""
        return bool(self.fingerprints) and fingerprint(engine) in self.fingerprints


def fingerprint(engine: LocalEngine) -> tuple[str, ...] | None:
    """The fingerprints of all weights of an engine's workers; None where they cannot be had."""
    found = [reply["fingerprint"] for reply in engine.call("sparse_refit_fingerprint")]
    return None if None in found else tuple(str(each) for each in found)


class Resync:
    """One engine after the other, or all at once where all need the same."""

    def __init__(
        self,
        config: SyncConfig,
        tracker: DeltaCompressionTracker,
        history: TransferHistory,
        lineage: Lineage,
        *,
        next_sequence: Callable[[], int],
    ) -> None:
        self._config = config
        self._tracker = tracker
        self._history = history
        self._lineage = lineage
        self._next_sequence = next_sequence

    def bring_up(
        self,
        behind: Mapping[LocalEngine, Workers],
        base: WeightVersion,
        *,
        skip: frozenset[str],
        pause: bool,
    ) -> None:
        """Bring engines to ``base``, the version of the baseline. Their discovery must be done.

        Raises:
            RefitError: an engine could not be brought up; it holds what it held before, and nothing else
                was touched.
        """
        to_overwrite = {}
        for engine, workers in behind.items():
            path = self._missed(engine, workers, base)
            if path is None:
                to_overwrite[engine] = workers
                continue
            for transfer in path:
                self._replay({engine: workers}, transfer, pause)
            self._lineage.trust(workers)
            logger.info(
                "sparse_refit: %s was brought to %s by %d transfers", engine.name, base, len(path)
            )
        if to_overwrite:
            self._overwrite(to_overwrite, base, skip, pause)

    def _missed(
        self, engine: LocalEngine, workers: Workers, base: WeightVersion
    ) -> list[RetainedTransfer] | None:
        """The transfers that lead this engine to ``base``, if it is known where it is."""
        digests = {str(worker["version"]["digest"]) for worker in workers}
        if not self._lineage.trusts(workers):
            start = self._lineage.start
            if start is None or not self._reaches(start.digest, base):
                return None
            if not self._lineage.recognizes(engine):
                return None
            engine.call("sparse_refit_adopt", start.label, start.digest)
            self._lineage.trust(workers)
            digests = {start.digest}
        if len(digests) != 1:
            return None
        digest = digests.pop()
        return [] if digest == base.digest else self._history.path(digest, base.digest)

    def _reaches(self, digest: str, base: WeightVersion) -> bool:
        return digest == base.digest or self._history.path(digest, base.digest) is not None

    def _replay(
        self, engines: Mapping[LocalEngine, Workers], transfer: RetainedTransfer, pause: bool
    ) -> None:
        transaction = self._transaction(engines, transfer.target.label)
        try:
            transaction.begin(dict.fromkeys(engines, transfer.base.digest))
            transaction.resend(transfer.payloads)
            self._finish(transaction, len(transfer.payloads), pause)
        except BaseException as error:
            transaction.give_up(error)
            raise

    def _overwrite(
        self,
        engines: Mapping[LocalEngine, Workers],
        base: WeightVersion,
        skip: frozenset[str],
        pause: bool,
    ) -> None:
        transaction = self._transaction(engines, base.label)
        try:
            # Ranks that came to different versions take one, so that a transfer can begin from it.
            bases = dict.fromkeys(engines, transaction.transfer_id)
            for engine, digest in bases.items():
                engine.call("sparse_refit_adopt", "unknown", digest)
            transaction.begin(bases)
            source = OverwriteSource(self._config, skip)
            counts = transaction.stream(self._tracker.tensors(), source)
            self._finish(transaction, counts["payloads"], pause)
        except BaseException as error:
            transaction.give_up(error)
            raise
        for engine, workers in engines.items():
            engine.call("sparse_refit_adopt", base.label, base.digest)
            self._lineage.trust(workers)
            logger.info(
                "sparse_refit: every element of %s was overwritten to bring it to %s",
                engine.name,
                base,
            )

    def _finish(self, transaction: Transaction, payloads: int, pause: bool) -> None:
        transaction.prepare({"0": payloads})
        with transaction.paused(pause):
            try:
                transaction.write()
            except BaseException as error:
                # Still paused: no token may come from weights that are about to be taken back.
                transaction.give_up(error)
                raise
            transaction.release_all()

    def _transaction(self, engines: Mapping[LocalEngine, Workers], label: str) -> Transaction:
        return Transaction(engines, self._config, sequence=self._next_sequence(), label=label)
