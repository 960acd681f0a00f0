"""When a sync may run, what it leaves behind, and several engines at once."""

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import build_checkpoint, build_model, perturb_checkpoint
from tests.engine.engines import PROMPTS, checksums, engine, fresh_state, generate, state, worker
from vllm_sparse_refit import SyncConfig, WeightSynchronizer
from vllm_sparse_refit.errors import (
    BaselineError,
    EngineStateError,
    TensorMismatchError,
    TransactionError,
    VerificationError,
)
from vllm_sparse_refit.trainer.weights import named_weights

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("rules") / "before", "qwen3")


@pytest.fixture(scope="module")
def after(before: Path) -> Path:
    perturb_checkpoint(before, before.parent / "after", fraction=0.1, change="values")
    return before.parent / "after"


@pytest.fixture(scope="module")
def fresh(after: Path) -> Any:
    return fresh_state(after)


@pytest.fixture
def llm(before: Path) -> Iterator[Any]:
    with engine(before) as running:
        yield running
    gc.collect()


def _connected(llm: Any, before: Path) -> WeightSynchronizer:
    sync = WeightSynchronizer.connect(llm)
    sync.snapshot(before)
    return sync


def test_another_thread_is_refused(llm: Any, before: Path, after: Path, fresh: Any) -> None:
    sync = _connected(llm, before)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            sync.sync(after)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    (error,) = errors
    assert isinstance(error, EngineStateError)
    assert "thread" in str(error)
    sync.sync(after)
    assert state(llm) == fresh


def _enqueue(llm: Any) -> None:
    from vllm import SamplingParams

    llm.enqueue(
        PROMPTS, SamplingParams(temperature=0, max_tokens=8, detokenize=False), use_tqdm=False
    )
    for _ in range(3):
        llm.llm_engine.step()
    assert llm.llm_engine.has_unfinished_requests()


def test_unfinished_requests_are_refused_without_a_pause(
    llm: Any, before: Path, after: Path, fresh: Any
) -> None:
    sync = _connected(llm, before)
    unchanged = checksums(llm)
    _enqueue(llm)
    with pytest.raises(EngineStateError, match="pause=True"):
        sync.sync(after)
    assert checksums(llm) == unchanged
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [8] * len(PROMPTS)
    sync.sync(after)
    assert state(llm) == fresh


def test_kept_requests_go_on_with_the_new_weights(
    llm: Any, before: Path, after: Path, fresh: Any
) -> None:
    sync = _connected(llm, before)
    _enqueue(llm)
    report = sync.sync(after, pause=True)
    assert report.pause_s > 0
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [8] * len(PROMPTS)
    assert not llm.llm_engine.is_sleeping()
    assert state(llm) == fresh


def test_an_engine_that_the_user_paused_stays_paused(
    llm: Any, before: Path, after: Path, fresh: Any
) -> None:
    sync = _connected(llm, before)
    _enqueue(llm)
    llm.sleep(level=0, mode="keep")
    sync.sync(after)
    assert llm.llm_engine.is_sleeping()
    llm.wake_up(tags=["scheduling"])
    llm.wait_for_completion(use_tqdm=False)
    assert state(llm) == fresh


def test_cached_prefixes_are_dropped(llm: Any, before: Path, after: Path, fresh: Any) -> None:
    # The prompts are cached before the sync; with stale blocks their continuations would differ.
    sync = _connected(llm, before)
    generate(llm)
    generate(llm)
    sync.sync(after)
    assert state(llm) == fresh


def test_a_prefix_cache_that_cannot_be_dropped_undoes_the_sync(
    llm: Any, before: Path, after: Path, fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = _connected(llm, before)
    unchanged = state(llm)
    with monkeypatch.context() as patch:
        patch.setattr(llm, "reset_prefix_cache", lambda **_: False)
        with pytest.raises(EngineStateError, match="prefix cache"):
            sync.sync(after)
    assert state(llm) == unchanged
    sync.sync(after)
    assert state(llm) == fresh


def test_weights_are_taken_back_before_held_requests_go_on(
    llm: Any, before: Path, after: Path, fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_sparse_refit.apply.applier import VllmSparseDeltaApplier

    sync = _connected(llm, before)
    unchanged = checksums(llm)
    _enqueue(llm)
    wake_up, at_wake_up = llm.wake_up, []

    def watched(**arguments: Any) -> Any:
        at_wake_up.append(checksums(llm))
        return wake_up(**arguments)

    def broken(_: Any) -> Any:
        raise VerificationError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(llm, "wake_up", watched)
        patch.setattr(VllmSparseDeltaApplier, "finish_sparse_delta_refit", broken)
        with pytest.raises(VerificationError):
            sync.sync(after, pause=True)
    assert at_wake_up == [unchanged]
    llm.wait_for_completion(use_tqdm=False)
    sync.sync(after)
    assert state(llm) == fresh


def test_an_error_after_the_commit_does_not_hide_it(
    llm: Any, before: Path, after: Path, fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = _connected(llm, before)

    def failing(**_: Any) -> Any:
        raise RuntimeError("no waking")

    with monkeypatch.context() as patch:
        patch.setattr(llm, "wake_up", failing)
        with pytest.raises(EngineStateError, match="no waking"):
            sync.sync(after, pause=True)
    llm.wake_up(tags=["scheduling"])
    assert state(llm) == fresh
    assert sync.sync(after).payloads == 0
    assert sync.sync(before).changed_elements > 0


def test_a_buffer_that_is_filled_again_is_noticed(llm: Any, before: Path, after: Path) -> None:
    sync = _connected(llm, before)
    unchanged = state(llm)
    weights = dict(named_weights(after))
    buffer = torch.empty(max(w.numel() for w in weights.values()), dtype=torch.bfloat16)

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in weights.items():
            view = buffer[: weight.numel()].view(weight.shape)
            yield name, view.copy_(weight)

    with pytest.raises(TensorMismatchError, match="fills again"):
        sync.sync(export())
    assert state(llm) == unchanged


def test_bits_that_do_not_stay_written_undo_the_sync(
    llm: Any, before: Path, after: Path, fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_sparse_refit.apply.applier import VllmSparseDeltaApplier

    sync = _connected(llm, before)
    unchanged = state(llm)
    apply = VllmSparseDeltaApplier.apply

    def apply_and_tamper(self: Any, deltas: Any) -> None:
        apply(self, deltas)
        # The first element of a write is always among its samples.
        write = next(write for parts in deltas.values() for write in parts[0].writes)
        write.storage[write.positions()[0]] ^= 1

    with monkeypatch.context() as patch:
        patch.setattr(VllmSparseDeltaApplier, "apply", apply_and_tamper)
        with pytest.raises(VerificationError, match="sampled"):
            sync.sync(after)
    assert state(llm) == unchanged
    sync.sync(after)
    assert state(llm) == fresh


@pytest.mark.parametrize("where", ["export", "commit"])
def test_an_interrupted_sync_leaves_everything_as_it_was(
    where: str, llm: Any, before: Path, after: Path, fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_sparse_refit.apply.applier import VllmSparseDeltaApplier
    from vllm_sparse_refit.trainer import synchronizer

    def interrupted(*_args: Any, **_settings: Any) -> Any:
        raise KeyboardInterrupt

    sync = _connected(llm, before)
    unchanged = state(llm)
    with monkeypatch.context() as patch:
        if where == "export":
            patch.setattr(synchronizer, "selected_weights", interrupted)
        else:
            patch.setattr(VllmSparseDeltaApplier, "apply", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sync.sync(after)
    assert state(llm) == unchanged
    sync.sync(after)
    assert state(llm) == fresh


@pytest.mark.parametrize("committed", [False, True])
def test_a_trainer_that_vanished_in_a_sync_does_not_block_the_next(
    committed: bool,
    llm: Any,
    before: Path,
    after: Path,
    fresh: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm_sparse_refit.trainer.engine import LocalEngine

    class VanishedError(BaseException):
        pass

    def vanish(*_: Any) -> Any:
        raise VanishedError

    gone = _connected(llm, before)
    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "reset_caches" if committed else "paused", vanish)
        patch.setattr(LocalEngine, "abort", vanish)
        with pytest.raises(VanishedError):
            gone.sync(after)
    (status,) = gone.status()
    assert status["state"] == ("committed" if committed else "prepared")
    sync = _connected(llm, before)
    sync.sync(after)
    assert state(llm) == fresh


def test_a_pretrained_model_as_the_source(tmp_path: Path) -> None:
    model = build_model("qwen3", seed=3)
    model.save_pretrained(tmp_path / "before")
    with engine(tmp_path / "before") as llm:
        sync = WeightSynchronizer.connect(llm)
        sync.snapshot(model)
        for parameter in model.parameters():
            parameter.data.mul_(1.25)
        sync.sync(model)
        synced = state(llm)
    model.save_pretrained(tmp_path / "after")
    assert synced == fresh_state(tmp_path / "after")


def test_a_master_model_in_fp32_is_sent_in_the_dtype_of_the_engine(tmp_path: Path) -> None:
    model = build_model("llama", seed=3).float()
    build = build_model("llama", seed=3)
    build.save_pretrained(tmp_path / "before")
    with engine(tmp_path / "before") as llm:
        sync = WeightSynchronizer.connect(llm, config=SyncConfig(dtype="bfloat16"))
        sync.snapshot(model)
        for parameter in model.parameters():
            parameter.data.mul_(1.0 + 2**-8)
        report = sync.sync(model)
        synced = state(llm)
    assert report.dense_bytes == 2 * report.total_elements
    assert 0 < report.changed_fraction < 1
    model.bfloat16().save_pretrained(tmp_path / "after")
    assert synced == fresh_state(tmp_path / "after")


def test_two_engines_move_together(before: Path, after: Path, fresh: Any) -> None:
    with engine(before, processes=True) as remote, engine(before) as local:
        sync = WeightSynchronizer.connect([remote, local])
        sync.snapshot(before)
        old = state(remote)
        assert old == state(local)

        applier = worker(local)._sparse_refit_receiver._applier
        apply = applier.apply

        def failing(deltas: Any) -> None:
            raise TransactionError("this worker cannot")

        applier.apply = failing
        with pytest.raises(TransactionError, match="engine 1, rank 0: this worker cannot"):
            sync.sync(after)
        # The first engine had committed already, and was taken back.
        assert state(remote) == old
        assert state(local) == old

        applier.apply = apply
        report = sync.sync(after, label="after the fault")
        assert (report.engines, report.workers) == (2, 2)
        assert state(remote) == fresh
        assert state(local) == fresh
        assert {s["version"]["label"] for s in sync.status()} == {"after the fault"}


def test_a_replaced_engine_rejoins(before: Path, after: Path, fresh: Any) -> None:
    """One engine came to the weights by a sync, the other was started from them."""
    with engine(before) as old:
        with engine(after, processes=True) as replacement:
            alone = _connected(old, before)
            alone.sync(after)
            fleet = WeightSynchronizer.connect([old, replacement])
            fleet.snapshot(after)
            assert fleet.sync(before).changed_elements > 0
            assert fleet.sync(after).changed_elements > 0
            assert state(replacement) == fresh
        assert state(old) == fresh


def test_a_snapshot_of_other_weights_is_refused(
    llm: Any, before: Path, after: Path, fresh: Any
) -> None:
    sync = _connected(llm, before)
    unchanged = state(llm)
    with pytest.raises(BaselineError, match="sampled elements differ"):
        sync.snapshot(after)
    with pytest.raises(BaselineError, match=r"snapshot\(\)"):
        sync.sync(after)
    assert state(llm) == unchanged
    sync.snapshot(before)
    sync.sync(after)
    assert state(llm) == fresh


def test_an_engine_at_another_version_is_brought_back(
    llm: Any, before: Path, after: Path, fresh: Any
) -> None:
    first = _connected(llm, before)
    second = _connected(llm, before)
    first.sync(after)
    assert second.sync(after).resynced == 1
    assert state(llm) == fresh
    told = llm.llm_engine.engine_core.get_weight_version
    assert second.sync(before, label="elsewhere").resynced == 0
    assert told() == "elsewhere"
    assert first.sync(after).resynced == 1
    assert state(llm) == fresh
    assert told() == "step-1"
    (reply,) = llm.collective_rpc(
        "sparse_refit_begin", args=("other", "f" * 32, "label"), kwargs={"sequence": 99}
    )
    assert reply["error_type"] == "VersionMismatchError"
