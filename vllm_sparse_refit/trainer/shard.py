"""What the other processes of a trainer run, beside the synchronizer on rank 0."""

import itertools
import os
from collections.abc import Iterable, Mapping
from typing import Any

from vllm_sparse_refit.config import SyncConfig
from vllm_sparse_refit.errors import BaselineError, ConfigError, RefitError
from vllm_sparse_refit.trainer.baseline import DeltaCompressionTracker
from vllm_sparse_refit.trainer.exported import NamedTensor
from vllm_sparse_refit.trainer.history import RecordingSource
from vllm_sparse_refit.trainer.producers import (
    ProducerGroup,
    ShardReport,
    pulled_to_the_end,
    report,
    told,
)
from vllm_sparse_refit.trainer.saved import load_baseline
from vllm_sparse_refit.trainer.stream import stream_sparse_delta_payloads_via_zmq
from vllm_sparse_refit.trainer.weights import selected_weights
from vllm_sparse_refit.weight_version import WeightVersion

_DEFAULTS = SyncConfig()


class ProducerShard:
    """Rank 1 and above of a trainer with several processes; rank 0 has the ``WeightSynchronizer``.

    Holds, compares and sends tensor number *i* of the snapshot where *i* modulo the number of processes is
    its rank; later exports may come in another order. Calls are collective: each has its counterpart on
    rank 0, in the same order.

    Args:
        group: the same as on rank 0.
        config: should equal rank 0's; ``baseline_dir`` may be another folder.

    Raises:
        ConfigError: this is rank 0.
    """

    def __init__(self, group: ProducerGroup, *, config: SyncConfig = _DEFAULTS) -> None:
        if not 0 < group.rank < group.size:
            raise ConfigError(
                f"rank {group.rank} of {group.size} is no further producer; rank 0 makes a "
                "WeightSynchronizer with connect(..., producers=group)"
            )
        self._group = group
        self._config = config
        self._tracker = DeltaCompressionTracker(config=config)
        self._version: WeightVersion | None = None

    @property
    def version(self) -> WeightVersion | None:
        """The version that the engines hold, None before the first :meth:`snapshot`."""
        return self._version

    def snapshot(self, model: Any) -> None:
        """Counterpart of :meth:`WeightSynchronizer.snapshot`.

        Raises:
            RefitError: it failed, here or on another rank.
        """
        weights = selected_weights(model, self._config)
        self._version = self._take(weights)

    def restore(self, folder: str | os.PathLike[str]) -> None:
        """Counterpart of :meth:`WeightSynchronizer.restore`.

        Args:
            folder: what rank 0 saved with ``save``.

        Raises:
            RefitError: it failed, here or on another rank.
        """
        saved = load_baseline(folder)
        self._take(saved.tensors)
        self._version = saved.version  # if it is not rank 0's, the next sync says so

    def _take(self, weights: Iterable[NamedTensor]) -> WeightVersion:
        """Make this rank's share of the weights the baseline; returns the version that rank 0 tells."""
        self._version = None
        told(self._group)
        done, failure = ShardReport(), None
        try:
            with pulled_to_the_end(weights, self._group) as pulled:
                share = itertools.islice(pulled, self._group.rank, None, self._group.size)
                self._tracker.snapshot_baseline(share)
            done = ShardReport(names=list(self._tracker.state_dict_info))
        except Exception as error:
            failure = error
        return self._conclude(done, failure)

    def sync(self, model: Any) -> None:
        """Counterpart of :meth:`WeightSynchronizer.sync`.

        Raises:
            BaselineError: this rank has no baseline of the version that the engines hold.
            RefitError: it failed, here or on another rank; the engines and this baseline are as before,
                unless the message says otherwise.
        """
        ticket = told(self._group)
        done, failure = ShardReport(), None
        try:
            selected = selected_weights(model, self._config)
            with pulled_to_the_end(selected, self._group) as weights:
                done = self._send(ticket, weights)
        except Exception as error:
            failure = error
        try:
            self._version = self._conclude(done, failure)
        except BaseException:
            self._tracker.on_sync_failed()
            raise
        self._tracker.on_sync_succeeded()

    def _send(self, ticket: Mapping[str, Any], weights: Iterable[NamedTensor]) -> ShardReport:
        if self._version is None or self._version.digest != ticket["base"]:
            raise BaselineError(
                f"rank {self._group.rank} has a baseline of version {self._version}, and the engines hold "
                f"{ticket['base'][:12]}; snapshot() or restore() on every rank"
            )
        self._tracker.settle()
        self._tracker.set_routing(
            **{name: frozenset(ticket[name]) for name in ("skip", "overwrite", "dense")}
        )
        source, own = RecordingSource(self._tracker), self._tracker.state_dict_info
        counts = stream_sparse_delta_payloads_via_zmq(
            weights,
            delta_tracker=source,
            refit_targets=ticket["addresses"],
            transfer_id=ticket["transfer_id"],
            sequence=ticket["sequence"],
            timeout_s=self._config.timeout_s,
            shard_rank=self._group.rank,
            shard_count=self._group.size,
            sends=own.__contains__,
            config=self._config,
        )
        self._tracker.finish_export()
        return ShardReport("", list(own), counts, source.payloads)

    def _conclude(self, done: ShardReport, failure: Exception | None) -> WeightVersion:
        """Tell rank 0 what became of this rank's part, and hear how all of it ended."""
        if failure is not None:
            done = ShardReport(error=f"{type(failure).__name__}: {failure}")
        report(self._group, done)
        try:
            return WeightVersion(**told(self._group)["version"])
        except RefitError:
            if failure is not None:
                raise failure from None  # rather than what rank 0 makes of it
            raise

    def close(self) -> None:
        """Give the baseline's memory or files back."""
        self._version = None
        self._tracker.close()
