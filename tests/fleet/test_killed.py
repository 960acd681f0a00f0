"""Faults with real processes: workers and trainers killed or stopped at every step."""

import signal
import time
from typing import Any

import pytest

from tests.fleet.fleets import Fleet, toy_fleet
from tests.fleet.toy_worker import toy_weights
from vllm_sparse_refit.errors import EngineStateError, RefitError

OLD, NEW, NEWER = (toy_weights(seed) for seed in (1, 2, 3))

# Where a worker dies, and what the survivors hold then.
STEPS = {
    "sparse_refit_begin": OLD,
    "stage 0": OLD,
    "stage 2": OLD,
    "sparse_refit_prepare": OLD,
    "after sparse_refit_prepare": OLD,
    "sparse_refit_commit": OLD,
    "apply": OLD,
    "after sparse_refit_commit": OLD,
    "finish_sparse_delta_refit": OLD,
    "sparse_refit_release": NEW,
    "after sparse_refit_release": NEW,
}


CASES = [
    *((engines, step) for engines in (1, 3) for step in STEPS),
    *((7, step) for step in ("stage 2", "apply", "sparse_refit_release")),
]


@pytest.mark.parametrize(("engines", "step"), CASES)
def test_a_killed_worker(engines: int, step: str) -> None:
    with toy_fleet(engines, in_process=False) as fleet:
        position = engines // 2  # with 3 and 7: a relay that has workers below it from some roots
        sync = fleet.connect()
        fleet.llms[position].fault(step, "kill")
        started = time.monotonic()
        with pytest.raises(RefitError) as caught:
            sync.sync(NEW.items())
        assert time.monotonic() - started < 12
        assert fleet.llms[position].has_died()
        fleet.assert_holds(STEPS[step])
        assert f"engine {position}" in str(caught.value)
        _a_following_sync_is_exact(fleet, sync, position)


def _a_following_sync_is_exact(fleet: Fleet, sync: Any, position: int) -> None:
    dead = fleet.llms[position]
    started = time.monotonic()
    with pytest.raises(EngineStateError, match=f"engine {position}"):
        sync.sync(NEW.items())  # the dead one is still there: refused, and it is not waited for
    with pytest.raises(EngineStateError, match="is broken"):
        sync.sync(NEW.items())
    assert time.monotonic() - started < 10
    sync.replace_engine(dead, fleet.restart(position)[1])
    assert sync.sync(NEWER.items()).resynced == 1
    fleet.assert_holds(NEWER)


def test_a_killed_root_of_the_tree() -> None:
    with toy_fleet(3, in_process=False) as fleet:
        sync = fleet.connect()
        fleet.llms[0].fault("stage 1", "kill")
        with pytest.raises(RefitError):
            sync.sync(NEW.items())
        assert fleet.llms[0].has_died()
        fleet.assert_holds(OLD)
        _a_following_sync_is_exact(fleet, sync, 0)


@pytest.mark.parametrize("step", ["stage 1", "sparse_refit_prepare", "apply"])
def test_a_stopped_worker_is_not_waited_for(step: str) -> None:
    with toy_fleet(3, in_process=False) as fleet:
        sync = fleet.connect(rpc_timeout_s=2.0)
        fleet.llms[1].fault(step, "stop")
        started = time.monotonic()
        with pytest.raises(RefitError) as caught:
            sync.sync(NEW.items())
        assert time.monotonic() - started < 15
        stopped, *others = fleet.llms[1], fleet.llms[0], fleet.llms[2]
        for llm in others:
            assert llm.bits == _bits(OLD)
        if step != "stage 1":
            assert "engine 1" in str(caught.value)
            assert "2 s (SyncConfig.rpc_timeout_s)" in str(caught.value)
        stopped.signal(signal.SIGCONT)
        sync.replace_engine(stopped, fleet.restart(1)[1])
        sync.sync(NEW.items())
        for llm in fleet.llms:
            assert llm.bits == _bits(NEW)


def _bits(weights: Any) -> set[str]:
    from tests.fleet.toy_worker import toy_bits

    return {toy_bits(weights)}
