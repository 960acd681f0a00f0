"""Whole syncs over real sockets with toy workers in this process: what every rule promises."""

import contextlib
import errno
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.apply.toys import TOYS
from tests.fleet import toy_worker
from tests.fleet.fleets import Fleet, toy_fleet
from tests.fleet.toy_worker import BF16, toy_weights
from vllm_sparse_refit import SyncConfig, WeightSynchronizer, plugin
from vllm_sparse_refit.apply.load_mode import LoadKind
from vllm_sparse_refit.errors import (
    BaselineError,
    ConfigError,
    PayloadRejectedError,
    PluginNotEnabledError,
    TransactionError,
    TransportTimeoutError,
)
from vllm_sparse_refit.trainer.decisions import DecisionLog
from vllm_sparse_refit.trainer.engine import LocalEngine
from vllm_sparse_refit.trainer.resync import Resync
from vllm_sparse_refit.trainer.transaction import Transaction

OLD, NEW, NEWER = (toy_weights(seed) for seed in (1, 2, 3))


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with toy_fleet(3) as made:
        yield made


@pytest.mark.parametrize("engines", [1, 3, 7])
@pytest.mark.parametrize("ranks", [1, 2])
def test_all_workers_come_to_the_new_weights(engines: int, ranks: int) -> None:
    with toy_fleet(engines, ranks=ranks) as fleet:
        sync = fleet.connect()
        fleet.assert_holds(OLD)
        report = sync.sync(NEW.items(), label="first")
        assert report.workers == engines * ranks
        assert report.payloads > 1
        fleet.assert_holds(NEW)
        assert {llm.label for llm in fleet.llms} == {"first"}
        received = [w["server"]["payloads_received"] for w in sync.status()]
        assert received == [report.payloads] * engines * ranks
        sync.sync(NEWER.items())
        fleet.assert_holds(NEWER)


# --- failures: everybody old, and the next sync works ---------------------------------------------


@pytest.mark.parametrize(
    "point",
    [
        "stage 2",
        "apply",
    ],
)
@pytest.mark.parametrize("position", [0, 2])
def test_a_worker_that_fails_before_the_decision_leaves_all_at_the_old_weights(
    fleet: Fleet, point: str, position: int
) -> None:
    sync = fleet.connect()
    version = sync.version
    fleet.llms[position].fault(point, "raise")
    with pytest.raises((TransactionError, PayloadRejectedError), match="told to fail"):
        sync.sync(NEW.items())
    fleet.assert_holds(OLD)
    assert sync.version == version
    sync.sync(NEW.items())
    fleet.assert_holds(NEW)


def test_a_release_that_fails_somewhere_leaves_all_at_the_new_weights(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = fleet.connect()
    worker = fleet.llms[1].workers[0]
    with monkeypatch.context() as patch:
        patch.setattr(
            worker.receiver, "release", lambda _: (_ for _ in ()).throw(TransactionError("no"))
        )
        with pytest.raises(TransactionError, match=r"has happened, but 1 of 3.*no"):
            sync.sync(NEW.items(), label="told")
    assert sync.version is not None
    assert sync.version.label == "told"
    fleet.assert_holds(NEW)
    states = [reply["state"] for reply in sync.status()]
    assert states == ["idle", "committed", "idle"]
    assert sync.sync(NEWER.items()).resynced == 0
    fleet.assert_holds(NEWER)


def test_an_error_of_the_users_own_iterator_passes_through_as_it_is(fleet: Fleet) -> None:
    class OwnError(Exception):
        pass

    def weights() -> Iterator[Any]:
        yield next(iter(NEW.items()))
        raise OwnError("mine")

    sync = fleet.connect()
    with pytest.raises(OwnError, match=r"^mine$"):
        sync.sync(weights())
    fleet.assert_holds(OLD)
    sync.sync(NEW.items())
    fleet.assert_holds(NEW)


def test_one_warning_for_weights_of_more_bits_than_the_engines_keep(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    def warned() -> list[str]:
        found = [r.getMessage() for r in caplog.records if "SyncConfig" in r.getMessage()]
        caplog.clear()
        return found

    sync = fleet.connect()
    assert warned() == []
    sync.snapshot((name, weight.float()) for name, weight in OLD.items())
    (message,) = warned()
    assert "keep 3 of 5 tensors in fewer bits (q in bfloat16, for one)" in message
    assert "SyncConfig(dtype='bfloat16')" in message
    sync.sync((name, weight.float()) for name, weight in NEW.items())
    assert warned() == []
    cast = WeightSynchronizer.connect(fleet.llms, config=SyncConfig(dtype="bfloat16"))
    cast.snapshot((name, weight.float()) for name, weight in NEW.items())
    assert warned() == []


# --- engines that are not taken in ----------------------------------------------------------------


@pytest.mark.parametrize("value", ["sparse-refit", "foo, sparse_refit"])
def test_a_misspelt_list_of_plugins_is_quoted(
    fleet: Fleet, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", value)
    monkeypatch.setattr(plugin, "is_registered", lambda: False)
    monkeypatch.setattr(LocalEngine, "_inspect", lambda engine, _: engine._require_plugin())
    with pytest.raises(
        PluginNotEnabledError, match=rf"engine 0 .*VLLM_PLUGINS is {value!r} now.*without spaces"
    ):
        WeightSynchronizer.connect(fleet.llms)


# --- in doubt -------------------------------------------------------------------------------------


class Vanished(BaseException):
    pass


def _vanish(*_: Any, **__: Any) -> Any:
    raise Vanished


@pytest.mark.parametrize("step", ["stream", "prepare", "write"])
def test_a_trainer_that_vanishes_before_the_commit_is_given_up(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with toy_fleet(3) as fleet:
        gone = fleet.connect()
        with monkeypatch.context() as patch:
            patch.setattr(Transaction, step, _vanish)
            patch.setattr(Transaction, "abort", lambda _: [])
            with pytest.raises(Vanished):
                gone.sync(NEW.items())
            fleet.fall_silent()
        statuses = gone.status()
        assert all("nothing was heard" in reply["last_error"] for reply in statuses)
        assert all(reply["staged_bytes"] == 0 for reply in statuses)
        fleet.assert_holds(OLD)
        fleet.connect().sync(NEW.items())
        fleet.assert_holds(NEW)


def test_a_worker_keeps_what_was_committed_when_nothing_more_is_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with toy_fleet(3) as fleet:
        gone = fleet.connect()
        with monkeypatch.context() as patch:
            patch.setattr(Transaction, "release", _vanish)
            with pytest.raises(Vanished):
                gone.sync(NEW.items())
        assert [reply["state"] for reply in gone.status()] == ["committed"] * 3
        fleet.fall_silent()
        assert all("made final because nothing" in r["last_error"] for r in gone.status())
        fleet.assert_holds(NEW)
        transfer_id = gone._decisions.latest["transfer_id"]
        reply = fleet.llms[0].collective_rpc("sparse_refit_abort", args=(transfer_id,))[0]
        assert "cannot be taken back" in reply["error"]
        assert fleet.llms[0].collective_rpc("sparse_refit_release", args=(transfer_id,))[0]["ok"]
        # The trainer had decided, so it compares with the new weights.
        assert gone.sync(NEWER.items()).resynced == 0
        fleet.assert_holds(NEWER)


def test_workers_left_on_both_sides_of_a_commit_are_brought_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trainer died amid the commits; each worker did what it does when it hears nothing."""

    def half(self: Transaction) -> None:
        self._engines[0].call("sparse_refit_commit", self.transfer_id)
        raise Vanished

    with toy_fleet(3) as fleet:
        sync = fleet.connect()
        with monkeypatch.context() as patch:
            patch.setattr(Transaction, "write", half)
            patch.setattr(Transaction, "abort", lambda _: [])
            with pytest.raises(Vanished):
                sync.sync(NEW.items())
            fleet.fall_silent()
        assert len({frozenset(llm.bits) for llm in fleet.llms}) == 2
        assert sync.sync(NEWER.items()).resynced == 1
        fleet.assert_holds(NEWER)


def test_the_decision_is_on_the_disk_before_the_first_commit(
    fleet: Fleet, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    call = LocalEngine.call

    def watched(self: LocalEngine, method: str, *args: Any, **kwargs: Any) -> Any:
        if method in ("sparse_refit_commit", "sparse_refit_release"):
            record = json.loads((tmp_path / "state" / "decision.json").read_text())
            seen.append((method.removeprefix("sparse_refit_"), record["decision"]))
            assert record["transfer_id"] == args[0]
        return call(self, method, *args, **kwargs)

    sync = fleet.connect(state_dir=tmp_path / "state")
    monkeypatch.setattr(LocalEngine, "call", watched)
    sync.sync(NEW.items())
    assert seen == [("commit", "commit")] * 3 + [("release", "final")] * 3
    fleet.llms[2].fault("apply", "raise")
    with pytest.raises(TransactionError):
        sync.sync(NEWER.items())
    record = json.loads((tmp_path / "state" / "decision.json").read_text())
    assert record["decision"] == "abort"


def test_a_decision_that_cannot_be_written_stops_the_commit(fleet: Fleet, tmp_path: Any) -> None:
    folder = tmp_path / "state"
    sync = fleet.connect(state_dir=folder)
    folder.rmdir()
    with pytest.raises(TransactionError, match="could not be written"):
        sync.sync(NEW.items())
    fleet.assert_holds(OLD)
    folder.mkdir()
    sync.sync(NEW.items())
    fleet.assert_holds(NEW)


# --- resync ---------------------------------------------------------------------------------------


def test_a_worker_that_restarted_from_the_old_weights_is_replayed_what_it_missed(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Resync, "_overwrite")
    sync = fleet.connect()
    sync.sync(NEW.items())
    sync.sync(NEWER.items())
    sync.replace_engine(*fleet.restart(1))
    others = [w["server"]["payloads_received"] for w in sync.status()]
    report = sync.sync(OLD.items())
    assert report.resynced == 1
    fleet.assert_holds(OLD)
    received = [w["server"]["payloads_received"] for w in sync.status()]
    assert received[0] - others[0] == received[2] - others[2] == report.payloads
    assert received[1] > report.payloads  # and what it had missed
    assert len({(w["version"]["label"], w["version"]["digest"]) for w in sync.status()}) == 1


@pytest.mark.parametrize("seed", [1, 3, 9])
def test_a_worker_whose_weights_are_unknown_is_overwritten(
    fleet: Fleet, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = fleet.connect(retained_bytes=0)
    monkeypatch.delattr(Resync, "_replay")
    sync.sync(NEW.items())
    sync.replace_engine(*fleet.restart(2, seed))
    assert sync.sync(NEW.items()).resynced == 1  # even if nothing else changed
    fleet.assert_holds(NEW)
    assert sync.sync(NEWER.items()).resynced == 0
    fleet.assert_holds(NEWER)


def test_a_worker_started_from_other_weights_is_not_replayed(fleet: Fleet) -> None:
    sync = fleet.connect()
    sync.sync(NEW.items())
    sync.replace_engine(*fleet.restart(0, seed=9))
    sync.sync(NEWER.items())
    fleet.assert_holds(NEWER)


def test_an_engine_that_joins_late_is_brought_up(fleet: Fleet) -> None:
    sync = fleet.connect()
    sync.sync(NEW.items())
    late, _ = fleet.restart(0, seed=9)  # the old one goes on beside the new one
    sync.add_engine(fleet.llms[0])
    fleet.llms.append(late)
    assert sync.sync(NEWER.items()).engines == 4
    fleet.assert_holds(NEWER)


def test_weights_written_by_somebody_else_are_noticed(fleet: Fleet) -> None:
    sync = fleet.connect()
    sync.sync(NEW.items())
    fleet.llms[1].collective_rpc("toy_write")
    assert sync.sync(NEWER.items()).resynced == 1
    fleet.assert_holds(NEWER)


def test_a_resync_that_fails_leaves_the_others_and_can_be_tried_again(fleet: Fleet) -> None:
    sync = fleet.connect()
    sync.sync(NEW.items())
    sync.replace_engine(*fleet.restart(1, seed=9))
    fleet.llms[1].fault("apply", "raise")
    with pytest.raises(TransactionError, match="told to fail"):
        sync.sync(NEWER.items())
    assert fleet.llms[0].bits == fleet.llms[2].bits
    sync.sync(NEWER.items())
    fleet.assert_holds(NEWER)


def test_engines_are_taken_out_and_checked(fleet: Fleet) -> None:
    sync = fleet.connect()
    gone = fleet.llms.pop()
    sync.remove_engine(gone)
    sync.sync(NEW.items())
    fleet.assert_holds(NEW)
    with pytest.raises(ConfigError, match="not connected"):
        sync.remove_engine(gone)
    with pytest.raises(ConfigError, match="connected already"):
        sync.replace_engine(fleet.llms[0], fleet.llms[1])
    with pytest.raises(ConfigError, match="connected already"):
        sync.add_engine(fleet.llms[0])
    sync.remove_engine(fleet.llms[0])
    with pytest.raises(ConfigError, match="only engine"):
        sync.remove_engine(fleet.llms[1])


@pytest.mark.parametrize("seed", [None, 9])
def test_an_engine_that_was_taken_out_can_come_back(fleet: Fleet, seed: int | None) -> None:
    """How it loads counts again, whether or not it, or another engine, must be brought up."""
    sync = fleet.connect()
    sync.sync(NEW.items())
    for position in (2, 0):
        sync.remove_engine(fleet.llms[position])
        sync.add_engine(fleet.llms[position])
        if seed is not None:
            sync.replace_engine(*fleet.restart(1, seed))
        report = sync.sync((NEWER if position else OLD).items())
        assert report.resynced == (seed is not None)
        fleet.assert_holds(NEWER if position else OLD)


# --- a trainer that restarts ----------------------------------------------------------------------


def test_a_trainer_picks_up_what_it_saved(fleet: Fleet, tmp_path: Any) -> None:
    first = fleet.connect()
    first.sync(NEW.items(), label="saved")
    first.save(tmp_path / "saved")
    second = WeightSynchronizer.connect(fleet.llms, config=SyncConfig(payload_bytes=1))
    second.restore(tmp_path / "saved")
    assert second.version == first.version
    report = second.sync(NEWER.items())
    assert report.resynced == 0
    fleet.assert_holds(NEWER)

    # It is behind its own engines now, and brings them back before it goes on.
    third = WeightSynchronizer.connect(fleet.llms, config=SyncConfig(payload_bytes=1))
    third.restore(tmp_path / "saved")
    assert third.sync(OLD.items()).resynced == 3
    fleet.assert_holds(OLD)


def test_a_trainer_picks_up_the_files_of_one_that_died(fleet: Fleet, tmp_path: Any) -> None:
    first = fleet.connect(baseline_dir=tmp_path)
    first.sync(NEW.items(), label="kept")
    folder, version = first.baseline_folder, first.version
    assert folder is not None
    second = WeightSynchronizer.connect(fleet.llms)
    with pytest.raises(BaselineError, match=r"in use: .*close\(keep=True\)"):
        second.restore(folder)
    first.close(keep=True)
    second.restore(folder)
    assert second.version == version
    assert second.baseline_folder == folder
    assert second.sync(NEWER.items()).resynced == 0
    fleet.assert_holds(NEWER)
    second.close()
    assert not folder.exists()


def _closed(fleet: Fleet, files: Path) -> tuple[WeightSynchronizer, Path]:
    """A synchronizer that was closed at the new weights, and the folder of the files that it left."""
    sync = fleet.connect(baseline_dir=files)
    sync.sync(NEW.items())
    folder = sync.baseline_folder
    assert folder is not None
    sync.close(keep=True)
    return sync, folder


def test_a_restore_that_failed_can_be_tried_again(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files that it had taken over by then are still there."""
    sync, folder = _closed(fleet, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(sync, "_discover", lambda _: (_ for _ in ()).throw(TransactionError("no")))
        with pytest.raises(TransactionError):
            sync.restore(folder)
    sync.restore(folder)
    sync.restore(folder)  # also when there was no need
    assert sync.sync(NEWER.items()).resynced == 0
    fleet.assert_holds(NEWER)


def test_files_of_a_trainer_that_died_amid_a_change_are_refused(
    fleet: Fleet, tmp_path: Path
) -> None:
    sync, folder = _closed(fleet, tmp_path)
    (folder / "index.json").unlink()  # what a change does first
    with pytest.raises(BaselineError, match=r"has no index.*snapshot"):
        sync.restore(folder)


def test_a_damaged_save_is_refused_and_named(fleet: Fleet, tmp_path: Any) -> None:
    sync = fleet.connect()
    with pytest.raises(BaselineError, match="no saved baseline"):
        sync.restore(tmp_path / "saved")
    sync.snapshot(OLD.items())
    sync.save(tmp_path / "saved")
    (bits,) = (tmp_path / "saved").glob("*.bits")
    data = bytearray(bits.read_bytes())
    data[-1] ^= 1
    bits.write_bytes(data)
    with pytest.raises(BaselineError, match="bits of second are damaged"):
        sync.restore(tmp_path / "saved")
    with pytest.raises(BaselineError, match="snapshot"):
        sync.sync(NEW.items())
    bits.write_bytes(data[:-1])
    with pytest.raises(BaselineError, match="damaged or incomplete"):
        sync.restore(tmp_path / "saved")


def test_a_save_that_fails_leaves_the_earlier_one(
    fleet: Fleet, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    sync = fleet.connect()
    sync.save(tmp_path)
    first = sync.version
    sync.sync(NEW.items())
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(BaselineError, match="No space left"):
            sync.save(tmp_path)
    assert len(list(tmp_path.glob("*.bits"))) == 1
    sync.restore(tmp_path)
    assert sync.version == first
    sync.sync(NEWER.items())
    fleet.assert_holds(NEWER)
    sync.save(tmp_path)
    assert len(list(tmp_path.glob("*.bits"))) == 1


def test_a_trainer_that_died_in_doubt_is_told(
    fleet: Fleet, tmp_path: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = fleet.connect(state_dir=tmp_path / "state")
    gone.save(tmp_path / "saved")
    with monkeypatch.context() as patch:
        patch.setattr(Transaction, "write", _vanish)
        patch.setattr(Transaction, "abort", lambda _: [])
        patch.setattr(DecisionLog, "aborted", lambda *_: None)
        with pytest.raises(Vanished):
            gone.sync(NEW.items(), label="doubtful")
    second = fleet.connect(state_dir=tmp_path / "state")
    assert "after it had decided to commit" in caplog.text
    assert "doubtful" in caplog.text
    second.restore(tmp_path / "saved")
    second.sync(NEW.items())
    fleet.assert_holds(NEW)


# --- limits on waiting ----------------------------------------------------------------------------


def test_a_worker_that_stops_taking_payloads_is_named_with_who_waits_for_it() -> None:
    with toy_fleet(3, relay_timeout_s=30) as fleet, contextlib.ExitStack() as stack:
        sync = fleet.connect(timeout_s=0.5)
        leaf = sync.status()[2]["address"]
        over = threading.Event()
        stack.callback(over.set)  # before the fleet closes, which waits for it
        hang = {"_apply_payload": lambda *_: {"over": over.wait(60)}}
        vars(fleet.llms[2].workers[0].receiver._server._intake).update(hang)
        started = time.monotonic()
        with pytest.raises(TransportTimeoutError) as caught:
            sync.sync(NEW.items())
        assert time.monotonic() - started < 10
        notes = getattr(caught.value, "__notes__", [])
        assert any(f"for worker {leaf}" in note for note in notes), notes


@pytest.mark.parametrize("name", [n for n, toy in TOYS.items() if BF16 in toy.dtypes])
def test_every_kind_of_loader_can_be_brought_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy_worker, "TOY", TOYS[name])
    old, new, newer = (toy_weights(seed) for seed in (1, 2, 3))
    ignore = tuple(n for n, kind in TOYS[name].kinds.items() if kind is LoadKind.SKIP)
    with toy_fleet(2) as fleet:
        sync = fleet.connect(ignore=ignore)
        sync.sync(new.items())
        fleet.assert_holds(new)
        sync.replace_engine(*fleet.restart(1, seed=9))
        assert sync.sync(newer.items()).resynced == 1
        fleet.assert_holds(newer)
        sync.replace_engine(*fleet.restart(0, seed=1))
        assert sync.sync(old.items()).resynced == 1
        fleet.assert_holds(old)
