"""A file system that fills up under a running trainer, in a process that a bus error would end."""

import contextlib
import ctypes
import os
import resource
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.fleet.fleets import CONTEXT, Fleet, toy_fleet
from tests.fleet.toy_worker import toy_weights
from vllm_sparse_refit import SyncConfig, WeightSynchronizer
from vllm_sparse_refit.errors import BaselineError, TransactionError

OLD, NEW, NEWER, NEWEST = (toy_weights(seed) for seed in (1, 2, 3, 4))

_PAGE = 4096
_NEW_MOUNTS, _NEW_USER = 0x0002_0000, 0x1000_0000  # CLONE_NEWNS, CLONE_NEWUSER
_PRIVATE = 1 << 18 | 1 << 14  # MS_PRIVATE | MS_REC


class Disk(Protocol):
    """A file system that can be made full."""

    folder: Path

    def fill(self, pages_left: int = 0) -> None: ...

    def free(self) -> None: ...


class SmallDisk:
    """A file system of its own, which only this process sees and which ends with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"
        libc = ctypes.CDLL(None, use_errno=True)
        flags = _NEW_MOUNTS if os.geteuid() == 0 else _NEW_MOUNTS | _NEW_USER
        done = (
            libc.unshare(flags) == 0
            and libc.mount(b"none", b"/", None, _PRIVATE, None) == 0
            and libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"size=256k") == 0
        )
        if not done:
            raise PermissionError(ctypes.get_errno(), "no file system can be mounted here")

    def fill(self, pages_left: int = 0) -> None:
        with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(_PAGE))
        os.truncate(self._filler, self._filler.stat().st_size - pages_left * _PAGE)

    def free(self) -> None:
        self._filler.unlink()


class LimitedFiles:
    """No file of this process may grow: the same calls fail, with another number."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self, pages_left: int = 0) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (pages_left, self._limits[1]))

    def free(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)


Scenario = Callable[[Disk], None]


def _run(report: Connection, scenario: Scenario, kind: type[Any], folder: Path) -> None:
    try:
        disk = kind(folder)
    except PermissionError as error:
        report.send(("skip", str(error)))
        return
    try:
        scenario(disk)
    except BaseException:
        report.send(("failed", traceback.format_exc()))
    else:
        report.send(("passed", ""))


def a_baseline_is_not_lost(disk: Disk) -> None:
    with toy_fleet(3) as fleet:
        sync = fleet.connect(baseline_dir=disk.folder)
        folder = sync.baseline_folder
        assert folder is not None
        disk.fill()
        # The bits need no more space. The index does: it has room where the last one was, and this is longer.
        sync.sync(NEW.items(), label="long " * _PAGE)
        fleet.assert_holds(NEW)
        for _ in range(2):
            for call in (sync.settle, lambda: sync.sync(NEWER.items())):
                with pytest.raises(BaselineError, match=f"{folder}.*cannot be written.*free space"):
                    call()
            with pytest.raises(BaselineError, match="cannot be written"):
                sync.close(keep=True)
        fleet.assert_holds(NEW)
        assert {reply["state"] for reply in sync.status()} == {"idle"}
        assert not (folder / "index.json").exists()  # nobody takes it for one that is whole
        disk.free()
        assert sync.sync(NEWER.items()).resynced == 0
        fleet.assert_holds(NEWER)
        assert sync.verify().ok
        sync.close(keep=True)
        _taken_over_and_exact(fleet, folder)


def _taken_over_and_exact(fleet: Fleet, folder: Path) -> None:
    second = WeightSynchronizer.connect(fleet.llms, config=SyncConfig(payload_bytes=1))
    second.restore(folder)
    assert second.sync(NEWEST.items()).resynced == 0
    fleet.assert_holds(NEWEST)


def a_snapshot_is_refused(disk: Disk) -> None:
    """However far it gets: the files of the tensors, the index, the index with its version."""
    with toy_fleet(1) as fleet:
        sync = fleet.connect(baseline_dir=disk.folder)
        for pages_left in range(len(OLD) + 1):
            sync.close()
            disk.fill(pages_left)
            with pytest.raises(BaselineError, match=rf"{disk.folder}.*free space"):
                sync.snapshot(OLD.items())
            disk.free()
            with pytest.raises(BaselineError, match="snapshot"):
                sync.sync(NEW.items())
            assert list(disk.folder.iterdir()) == []
        sync.snapshot(OLD.items())
        sync.sync(NEW.items())
        fleet.assert_holds(NEW)


def a_decision_or_a_save_is_refused(disk: Disk) -> None:
    with toy_fleet(3) as fleet:
        sync = fleet.connect(state_dir=disk.folder / "state")
        disk.fill()
        with pytest.raises(TransactionError, match=rf"could not be written to '{disk.folder}"):
            sync.sync(NEW.items())
        fleet.assert_holds(OLD)
        with pytest.raises(BaselineError, match=rf"{disk.folder}/saved.*free space"):
            sync.save(disk.folder / "saved")
        disk.free()
        sync.sync(NEW.items())
        fleet.assert_holds(NEW)
        sync.save(disk.folder / "saved")
        sync.restore(disk.folder / "saved")
        sync.sync(NEWER.items())
        fleet.assert_holds(NEWER)


@pytest.mark.parametrize("kind", [SmallDisk, LimitedFiles])
@pytest.mark.parametrize(
    "scenario", [a_baseline_is_not_lost, a_snapshot_is_refused, a_decision_or_a_save_is_refused]
)
def test_when_the_disk_is_full(scenario: Scenario, kind: type[Any], tmp_path: Path) -> None:
    """Each scenario in a process of its own."""
    (folder := tmp_path / "disk").mkdir()
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_run, args=(theirs, scenario, kind, folder), daemon=True)
    process.start()
    theirs.close()
    try:
        outcome, text = ours.recv()
    except EOFError:  # a bus error, for example
        process.join(10)
        pytest.fail(f"the process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join(10)
    if outcome == "skip":
        pytest.skip(text)
    assert outcome == "passed", text
