"""Faults of a real engine with two ranks: raised inside one of them, and a rank killed."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import build_checkpoint, perturb_checkpoint
from tests.engine.engines import checksums, engine, fresh_state, state, worker
from tests.transport.helpers import eventually, threads_named
from vllm_sparse_refit import SyncConfig, WeightSynchronizer
from vllm_sparse_refit.errors import EngineStateError, TransactionError, VersionMismatchError
from vllm_sparse_refit.trainer.weights import named_weights

pytestmark = pytest.mark.engine

TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}


def _fail_once_on_rank_one(worker: Any) -> None:
    if worker.rank != 1:
        return
    applier = worker._sparse_refit_receiver._applier
    apply = applier.apply

    def failing(deltas: Any) -> None:
        applier.apply = apply
        apply(deltas)
        applier.roll_back()
        raise TransactionError("this rank cannot")

    applier.apply = failing


def _write_on_rank_one(worker: Any) -> None:
    """As a user's own code might: no hook of the plugin sees it."""
    if worker.rank == 1:
        layer = worker.model_runner.get_model().model.layers[1]
        layer.mlp.down_proj.weight.data.view(torch.int16).bitwise_not_()


def _process_id(_worker: Any) -> int:
    return os.getpid()


def test_a_rank_that_fails_and_a_rank_that_is_killed(tmp_path: Path) -> None:
    before = build_checkpoint(tmp_path / "before", "llama")
    after = tmp_path / "after"
    perturb_checkpoint(before, after, fraction=0.1, change="values")
    with engine(before) as local:
        with engine(
            before, processes=True, tensor_parallel_size=2, environment=TWO_RANKS
        ) as remote:
            sync = WeightSynchronizer.connect([remote, local], config=SyncConfig(rpc_timeout_s=60))
            sync.snapshot(before)
            old = checksums(remote), state(local)

            remote.collective_rpc(_fail_once_on_rank_one)
            with pytest.raises(TransactionError, match="engine 0, rank 1: this rank cannot"):
                sync.sync(after)
            assert (checksums(remote), state(local)) == old
            sync.sync(after)
            sync.sync(before)
            assert (checksums(remote), state(local)) == old

            # A shard: only both ranks together can tell.
            remote.collective_rpc(_write_on_rank_one)
            with pytest.raises(VersionMismatchError, match=r"engine 0.*layers\.1\.mlp\.down_proj"):
                sync.sync(after)
            assert state(local) == old[1]
            assert sync.sync(after).resynced == 1
            # A whole tensor: the rank itself can.
            norm = worker(local).model_runner.get_model().model.norm.weight
            norm.data.view(torch.int16).bitwise_not_()
            with pytest.raises(VersionMismatchError, match=r"engine 1.*first model\.norm\.weight"):
                sync.sync(before)
            assert sync.sync(before).resynced == 1
            assert (checksums(remote), state(local)) == old

            os.kill(remote.collective_rpc(_process_id)[1], signal.SIGKILL)
            started = time.monotonic()
            with pytest.raises(EngineStateError, match="engine 0"):
                sync.sync(after)
            assert time.monotonic() - started < 60
            assert state(local) == old[1]
            started = time.monotonic()
            with pytest.raises(EngineStateError, match="is broken"):
                sync.sync(after)
            assert time.monotonic() - started < 5  # it is not called again
        with engine(before, processes=True) as replacement:
            sync.replace_engine(remote, replacement)
            assert sync.sync(after).resynced == 1
            synced = state(replacement)
            assert state(local) == synced
    assert synced == fresh_state(after)
    _assert_nothing_waits()


def _assert_nothing_waits() -> None:
    """The threads of calls that were never answered have ended, and hold no dead engine."""
    assert eventually(lambda: not threads_named("sparse-refit-control"))


def test_ctrl_c_in_a_terminal(tmp_path: Path) -> None:
    """It goes to every process of the group: the engine's ends while the trainer waits for its answer."""
    before = build_checkpoint(tmp_path / "before", "llama")
    after = tmp_path / "after"
    perturb_checkpoint(before, after, fraction=0.1, change="values")
    with (
        engine(before) as local,
        engine(before, processes=True, environment=TWO_RANKS) as remote,
    ):
        sync = WeightSynchronizer.connect([remote, local])
        sync.snapshot(before)
        old = state(local)
        core = remote.llm_engine.engine_core.resources.engine_manager.processes[0]
        group = [*remote.collective_rpc(_process_id), core.pid, os.getpid()]

        def export() -> Iterator[Any]:
            yield from named_weights(after)
            for process in group:
                os.kill(process, signal.SIGINT)
            time.sleep(5)

        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt) as caught:
            sync.sync(export())
        assert time.monotonic() - started < 60  # vLLM itself takes seconds to end
        assert any("engine 0 died" in note for note in caught.value.__notes__)
        assert not core.is_alive()
        with pytest.raises(EngineStateError, match=r"engine 0 is broken.*replace_engine"):
            sync.sync(after)
        assert state(local) == old
        sync.remove_engine(remote)
        assert sync.sync(after).resynced == 0
        synced = state(local)
    assert synced == fresh_state(after)
    _assert_nothing_waits()


def test_an_engine_core_that_is_killed_while_a_call_waits(tmp_path: Path) -> None:
    before = build_checkpoint(tmp_path / "before", "llama")
    with engine(before, processes=True) as llm:
        sync = WeightSynchronizer.connect(llm)
        core = llm.llm_engine.engine_core.resources.engine_manager.processes[0]
        os.kill(core.pid, signal.SIGSTOP)  # so that the call is not answered
        killer = threading.Timer(1, core.kill)
        killer.start()
        started = time.monotonic()
        with pytest.raises(EngineStateError, match=r"engine 0 died.*replace_engine"):
            sync.status()
        assert killer.finished.is_set()
        assert time.monotonic() - started < 10
        with pytest.raises(EngineStateError, match="engine 0 is broken"):
            sync.status()
        with pytest.raises(EngineStateError, match=r"engine 0 died.*replace_engine"):
            WeightSynchronizer.connect(llm)  # a call to one that is dead already
    _assert_nothing_waits()
