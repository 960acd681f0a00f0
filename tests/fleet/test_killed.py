"""Faults with real processes: workers, relays and trainers killed or stopped at every step.

The workers of a case go on into the next one, but for those that were killed; a case that fails ends them.
"""

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.fleets import LIMITS, Fleet, toy_fleet
from tests.fleet.toy_trainer import BASELINE_MOVES, DECIDED_COMMIT, DECIDED_FINAL, Trainer
from tests.fleet.toy_worker import toy_bits, toy_weights
from vllm_sparse_refit.errors import BaselineError, EngineStateError, RefitError


class Standing:
    """A fleet of processes that several cases use.

    ``held`` is the seed of the weights that every worker holds between cases.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.held = 1
        self.sync = fleet.connect()
        self.names = [f"engine {position}" for position in range(len(fleet.llms))]
        self._numbers = itertools.count(len(fleet.llms))

    def snapshot(self) -> tuple[int, int, int]:
        """Make what is held the start; returns its seed and two of new weights."""
        self.sync.snapshot(toy_weights(self.held).items())
        return self.held, self.held + 1, self.held + 2

    def replace(self, position: int) -> None:
        """A new process, started from the weights of the snapshot, in the place of a worker."""
        self.sync.replace_engine(*self.fleet.restart(position, self.held))
        self.names[position] = f"engine {next(self._numbers)}"

    def assert_holds(self, seeds: list[int]) -> None:
        """Each engine, where it lives, holds exactly the weights of its seed."""
        for llm, seed in zip(self.fleet.llms, seeds, strict=True):
            if llm.is_alive:
                assert llm.bits == {toy_bits(toy_weights(seed))}


Enter = Callable[[int], contextlib.AbstractContextManager[Standing]]


@pytest.fixture(scope="module")
def standing() -> Iterator[Enter]:
    """Enter a fleet of so many engines."""
    made: dict[int, tuple[Standing, contextlib.ExitStack]] = {}

    @contextlib.contextmanager
    def enter(engines: int) -> Iterator[Standing]:
        if engines not in made:
            stack = contextlib.ExitStack()
            fleet = stack.enter_context(toy_fleet(engines, in_process=False))
            made[engines] = Standing(fleet), stack
        try:
            yield made[engines][0]
        except BaseException:
            made.pop(engines)[1].close()  # whatever it holds now
            raise

    yield enter
    for _, stack in made.values():
        stack.close()


# --- workers --------------------------------------------------------------------------------------

# Where a worker dies, and whether the survivors hold the new weights then.
STEPS = {
    "sparse_refit_begin": False,
    "stage 0": False,
    "stage 2": False,
    "sparse_refit_prepare": False,
    "after sparse_refit_prepare": False,
    "sparse_refit_commit": False,
    "apply": False,
    "after sparse_refit_commit": False,
    "finish_sparse_delta_refit": False,
    "sparse_refit_release": True,
    "after sparse_refit_release": True,
}

# The trainer's payloads enter at number 0, so that a fleet of 3 has a root and two leaves below it, and in
# one of 7 the numbers 1 and 2 are relays in between.
VICTIMS = [(1, 0), (3, 0), (3, 1), (7, 0), (7, 1), (7, 6)]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("engines", "position"), VICTIMS)
def test_a_killed_worker(standing: Enter, engines: int, position: int, step: str) -> None:
    with standing(engines) as case:
        old, new, newer = case.snapshot()
        case.fleet.llms[position].fault(step, "kill")
        started = time.monotonic()
        with pytest.raises(RefitError) as caught:
            case.sync.sync(toy_weights(new).items())
        assert time.monotonic() - started < LIMITS["rpc_timeout_s"]
        assert case.fleet.llms[position].has_died()
        case.assert_holds([new if STEPS[step] else old] * engines)
        assert f"{case.names[position]} " in str(caught.value)
        _a_following_sync_is_exact(case, position, new, newer)


def _a_following_sync_is_exact(case: Standing, position: int, new: int, newer: int) -> None:
    started = time.monotonic()
    with pytest.raises(EngineStateError, match=f"{case.names[position]} "):
        case.sync.sync(toy_weights(new).items())  # the dead one is refused and not waited for
    with pytest.raises(EngineStateError, match="is broken"):
        case.sync.sync(toy_weights(new).items())
    assert time.monotonic() - started < LIMITS["rpc_timeout_s"]
    case.replace(position)
    assert case.sync.sync(toy_weights(newer).items()).resynced == 1
    case.held = newer
    case.assert_holds([newer] * len(case.fleet.llms))


STOPPED = [(3, 1, step) for step in ("stage 1", "sparse_refit_prepare", "apply")] + [
    (7, 1, step) for step in ("stage 1", "apply", "sparse_refit_release")
]


@pytest.mark.parametrize(("engines", "position", "step"), STOPPED)
def test_a_stopped_worker_is_not_waited_for(
    standing: Enter, engines: int, position: int, step: str
) -> None:
    """A leaf of a fleet of 3, and a relay with two workers below it."""
    with standing(engines) as case:
        old, new, newer = case.snapshot()
        stopped, others = case.fleet.llms[position], list(case.fleet.llms)
        del others[position]
        stopped.fault(step, "stop")
        # Short for this engine only: the others may be slow on a busy machine.
        list(case.sync._fleet)[position]._timeout_s = 1.0
        started = time.monotonic()
        with pytest.raises(RefitError) as caught:
            case.sync.sync(toy_weights(new).items())
        assert time.monotonic() - started < LIMITS["rpc_timeout_s"]
        expected = new if step == "sparse_refit_release" else old
        for llm in others:
            assert llm.bits == {toy_bits(toy_weights(expected))}
        if step != "stage 1":
            assert f"{case.names[position]} " in str(caught.value)
            assert "1 s (SyncConfig.rpc_timeout_s)" in str(caught.value)
        stopped.signal(signal.SIGCONT)
        case.replace(position)
        case.sync.sync(toy_weights(newer).items())
        case.held = newer
        case.assert_holds([newer] * engines)


@pytest.mark.parametrize("first", [KeyboardInterrupt, RuntimeError])
def test_ctrl_c_while_a_sync_is_given_up_ends_one_wait(
    standing: Enter, first: type[BaseException]
) -> None:
    """The engines behind the one that is stopped are told all the same, and the caller gets Ctrl-C."""

    def export(seed: int) -> Iterator[Any]:
        yield from toy_weights(seed).items()
        second.start()
        raise first

    with standing(3) as case:
        old, new, newer = case.snapshot()
        stopped, *others = case.fleet.llms
        stopped.fault("sparse_refit_abort", "stop")
        second = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt) as caught:
            case.sync.sync(export(new))
        assert time.monotonic() - started < LIMITS["rpc_timeout_s"]
        assert any(f"{case.names[0]} was being told" in note for note in caught.value.__notes__)
        for llm in others:
            (status,) = llm.collective_rpc("sparse_refit_status")
            assert (status["state"], status["staged_bytes"]) == ("idle", 0)
            assert llm.bits == {toy_bits(toy_weights(old))}
        with pytest.raises(EngineStateError, match=f"{case.names[0]} is broken"):
            case.sync.sync(toy_weights(new).items())
        stopped.signal(signal.SIGCONT)
        case.replace(0)
        case.sync.sync(toy_weights(newer).items())
        case.held = newer
        case.assert_holds([newer] * 3)


# --- trainers -------------------------------------------------------------------------------------

BEFORE_COMMIT = [
    "sparse_refit_begin",
    "stage 0",
    "stage 2",
    "sparse_refit_prepare",
    "after sparse_refit_prepare",
    DECIDED_COMMIT,
]
AMID_COMMITS = ["sparse_refit_commit", "apply", "after sparse_refit_commit"]
AFTER_COMMIT = [
    "finish_sparse_delta_refit",
    DECIDED_FINAL,
    "sparse_refit_release",
    "after sparse_refit_release",
    BASELINE_MOVES,
]
MAY_MOVE = AFTER_COMMIT[2:]
OF_TRAINER = DECIDED_COMMIT, DECIDED_FINAL, BASELINE_MOVES


@pytest.mark.parametrize("step", [*BEFORE_COMMIT, *AMID_COMMITS, *AFTER_COMMIT])
@pytest.mark.parametrize("engines", [1, 3, 7])
def test_a_killed_trainer(standing: Enter, engines: int, step: str, tmp_path: Path) -> None:
    """Every worker ends, after its limit, as the protocol says; then the trainer's files are taken over."""
    with standing(engines) as case:
        new, newer = case.held + 1, case.held + 2
        folder = _killed(case, step, new, tmp_path, in_files=True)
        case.fleet.fall_silent()
        position = engines // 2
        case.assert_holds([_left_at(case, n, step, new) for n in range(engines)])
        with Trainer(case.fleet, tmp_path, in_files=True) as second:
            # It moves its files while it tells the workers, so it may have died in both.
            if (folder / "index.json").exists():
                assert step != BASELINE_MOVES
                second.does("restore", folder)
            else:
                assert step in MAY_MOVE
                with pytest.raises(BaselineError, match=r"has no index.*snapshot"):
                    second.does("restore", folder)
                second.does("snapshot", new)
            resynced = second.does("sync", newer)
        if step in BEFORE_COMMIT:
            assert resynced == 0
        if step in AMID_COMMITS:
            assert resynced == position + 1
        case.held = newer
        case.assert_holds([newer] * engines)


def _killed(case: Standing, step: str, new: int, path: Path, *, in_files: bool) -> Path:
    """Kill a trainer at a step of its sync; returns where to restore from."""
    with Trainer(case.fleet, path, in_files=in_files) as first:
        first.does("snapshot", case.held)
        folder: Path = first.does("folder") if in_files else path / "saved"
        if not in_files:
            first.does("save", folder)
        if step in OF_TRAINER:
            first.does("die at", step)
        else:
            victim = case.fleet.llms[len(case.fleet.llms) // 2]
            victim.fault(step, f"kill {first.process.pid}")
        first.start("sync", new)
        assert first.is_killed()
        return folder


def _left_at(case: Standing, number: int, step: str, new: int) -> int:
    if step in AMID_COMMITS:  # the call that the trainer died in is carried out
        return new if number <= len(case.fleet.llms) // 2 else case.held
    return new if step in AFTER_COMMIT else case.held


@pytest.mark.parametrize("step", [*BEFORE_COMMIT, *AMID_COMMITS, *AFTER_COMMIT])
def test_a_trainer_that_restarts_at_once(standing: Enter, step: str, tmp_path: Path) -> None:
    """Without waiting for the workers' limit; from a folder, or from a snapshot if it had decided."""
    with standing(3) as case:
        new, newer = case.held + 1, case.held + 2
        in_files = step == BASELINE_MOVES
        folder = _killed(case, step, new, tmp_path, in_files=in_files)
        with Trainer(case.fleet, tmp_path, in_files=in_files) as second:
            if step in (DECIDED_FINAL, "after sparse_refit_release", BASELINE_MOVES):
                second.does("snapshot", new)
                resynced = second.does("sync", newer)
                assert resynced == 0
            else:
                second.does("restore", folder)
                second.does("sync", newer)
        case.held = newer
        case.assert_holds([newer] * 3)
        assert len({str(reply["version"]) for reply in case.fleet.statuses()}) == 1
