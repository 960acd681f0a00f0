"""What this package relies on in vLLM. A new vLLM that breaks one of these breaks the plugin."""

import inspect
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import build_checkpoint, perturb_checkpoint
from tests.engine.engines import engine, fresh_state, state
from vllm_sparse_refit import WeightSynchronizer
from vllm_sparse_refit.config import SyncConfig
from vllm_sparse_refit.trainer.baseline import DeltaCompressionTracker
from vllm_sparse_refit.trainer.weights import named_weights
from vllm_sparse_refit.worker.extension import RPC_METHODS

pytestmark = pytest.mark.engine


def test_workers_are_called_through_their_wrapper() -> None:
    from vllm.v1.worker import worker_base

    wrapper = worker_base.WorkerWrapperBase
    # The methods are attached to the wrapper; vLLM's executors look a method up there first, and load
    # the model through it.
    assert "load_general_plugins()" in inspect.getsource(wrapper.init_worker)
    assert "worker_extension_cls" in inspect.getsource(wrapper.init_worker)
    assert inspect.signature(wrapper.shutdown).parameters.keys() == {"self"}
    from vllm.v1.executor import multiproc_executor, uniproc_executor

    assert "driver_worker.load_model()" in inspect.getsource(uniproc_executor)
    assert "self.worker.load_model()" in inspect.getsource(multiproc_executor)


def test_no_rpc_method_clashes_with_a_worker() -> None:
    from vllm.v1.worker.gpu_worker import Worker
    from vllm.v1.worker.worker_base import WorkerBase

    for name in RPC_METHODS:
        assert not hasattr(Worker, name)
        assert not hasattr(WorkerBase, name)
    # This one the worker has itself, so ours must not be an RPC.
    assert hasattr(WorkerBase, "synchronize_device")


def test_processing_is_called_by_name_in_the_base_loader() -> None:
    from vllm.model_executor.model_loader import base_loader

    assert callable(base_loader.process_weights_after_loading)
    source = inspect.getsource(base_loader.BaseModelLoader.load_model)
    assert "process_weights_after_loading(model, model_config, target_device)" in source


def test_processing_walks_the_named_modules() -> None:
    from vllm.model_executor.model_loader import utils, weight_tying

    source = inspect.getsource(utils.process_weights_after_loading)
    # Two walks, quantization methods and attention; then the model's own hook. Nothing else of the model is
    # used, so that a stand-in that lists some modules has only those processed.
    assert source.count("in model.named_modules():") == 2
    assert 'if hasattr(model, "process_weights_after_loading"):' in source
    assert "word_embeddings_untied_by_checkpoint" in inspect.getsource(
        weight_tying.maybe_retie_word_embeddings
    )


def test_lora_state_can_be_reset() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert callable(GPUModelRunner.reset_lora_state)


def test_a_call_waits_for_ever_for_an_engine_that_died_but_vllm_knows() -> None:
    from vllm.v1.engine import core_client

    client = core_client.SyncMPClient
    # Nothing but an answer ends the wait.
    call = inspect.getsource(client.call_utility)
    assert "return future.result()" in call
    # Which can be given by whoever knows that none will come.
    assert "future: Future[Any] = Future()" in call
    assert "self.utility_results[call_id] = future" in call
    # A thread of vLLM's own notices a death, so that asking costs nothing and waits for nothing.
    assert "if self.resources.engine_dead:" in inspect.getsource(client.ensure_alive)
    monitor = inspect.getsource(client.start_engine_core_monitor)
    assert "_self.resources.engine_dead = True" in monitor
    assert "Thread(" in monitor
    # An engine in this process cannot die by itself.
    assert not hasattr(core_client.InprocClient, "ensure_alive")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("facts")
    before = build_checkpoint(folder / "before", "qwen2")
    perturb_checkpoint(before, folder / "after", fraction=0.05, change="values")
    return before, folder / "after"


def test_pausing_is_seen_as_sleeping_and_undone_by_waking(checkpoints: tuple[Path, Path]) -> None:
    with engine(checkpoints[0]) as llm:
        assert not llm.llm_engine.is_sleeping()
        llm.sleep(level=0, mode="keep")
        assert llm.llm_engine.is_sleeping()
        llm.wake_up(tags=["scheduling"])
        assert not llm.llm_engine.is_sleeping()
        assert llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)


def _ok(replies: list[dict[str, Any]]) -> dict[str, Any]:
    (reply,) = replies
    assert reply["ok"], reply
    return reply


@pytest.mark.parametrize("as_files", [False, True], ids=["bytes", "files"])
def test_payloads_handed_over_by_rpc(
    as_files: bool, checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    """The update RPC alone, without a server or a synchronizer, ends at the same bits."""
    before, after = checkpoints
    tracker = DeltaCompressionTracker(config=SyncConfig(payload_bytes=8192))
    tracker.snapshot_baseline(named_weights(before))
    payloads: list[bytes | str] = [
        payload.body for payload in tracker.prepare_sparse_delta_payload(named_weights(after))
    ]
    assert len(payloads) > 2
    if as_files:
        for index, body in enumerate(list(payloads)):
            path = tmp_path / f"{index}.vsrp"
            path.write_bytes(body)  # type: ignore[arg-type]
            payloads[index] = str(path)
    info = {
        name: [list(shape), str(dtype).removeprefix("torch.")]
        for name, (shape, dtype) in tracker.state_dict_info.items()
    }
    with engine(before) as llm:
        assert _ok(llm.collective_rpc("discover_native_skips", args=(info,)))["skips"] == []
        update = "update_weights_from_decoded_sparse_payload"
        _ok(llm.collective_rpc(update, args=(payloads[0],)))
        _ok(llm.collective_rpc(update, args=tuple(payloads[1:])))
        finished = _ok(llm.collective_rpc("finish_sparse_delta_refit"))
        assert finished["samples_compared"] > 0
        assert llm.reset_prefix_cache()
        updated = state(llm)
        status = _ok(llm.collective_rpc("sparse_refit_status"))
        assert status["state"] == "idle"
        assert status["version"]["digest"] != "0" * 32
    assert updated == fresh_state(after)


def test_a_payload_applied_twice_by_rpc_is_refused(checkpoints: tuple[Path, Path]) -> None:
    """What it builds on is not there any more."""
    before, after = checkpoints
    tracker = DeltaCompressionTracker()
    tracker.snapshot_baseline(named_weights(before))
    (payload,) = tracker.prepare_sparse_delta_payload(named_weights(after))
    info = {
        name: [list(shape), str(dtype).removeprefix("torch.")]
        for name, (shape, dtype) in tracker.state_dict_info.items()
    }
    with engine(before) as llm:
        _ok(llm.collective_rpc("discover_native_skips", args=(info,)))
        update = "update_weights_from_decoded_sparse_payload"
        _ok(llm.collective_rpc(update, args=(payload.body,)))
        (reply,) = llm.collective_rpc(update, args=(payload.body,))
        assert not reply["ok"]
        assert reply["error_type"] == "VersionMismatchError"
        _ok(llm.collective_rpc("finish_sparse_delta_refit"))
        assert llm.reset_prefix_cache()
        updated = state(llm)
    assert updated == fresh_state(after)


@pytest.mark.parametrize("processes", [False, True], ids=["in-process", "worker-processes"])
def test_vllms_own_reload_works_and_is_noticed(
    processes: bool, checkpoints: tuple[Path, Path]
) -> None:
    before, after = checkpoints
    with engine(before, processes=processes) as llm:
        sync = WeightSynchronizer.connect(llm)
        sync.snapshot(before)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(after)})
        assert llm.reset_prefix_cache()
        reloaded = state(llm)
        report = sync.sync(after)
        assert report.resynced == 1  # from weights that the trainer did not know of
        assert report.changed_elements > 0
        synced = state(llm)
        for method, arguments in (("reset_weights", ()), ("sleep", (2,))):
            llm.collective_rpc(method, args=arguments)
            assert sync.sync(after).resynced == 1
            assert state(llm) == synced
        assert sync.sync(before).resynced == 0
        back = state(llm)
    assert reloaded == synced == fresh_state(after)
    assert back == fresh_state(before)
