"""After a sync an engine equals one that was started from the new checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import build_checkpoint, checkpoint_steps, perturb_checkpoint
from tests.engine.engines import checksums, engine, fresh_state, generate, state
from vllm_sparse_refit import SyncConfig, WeightSynchronizer

pytestmark = pytest.mark.engine

# Small chunks and payloads, so that even a small model takes several of each.
SMALL = SyncConfig(chunk_elements=5_000, payload_bytes=4_096)


def _synced(steps: list[Path], **settings: Any) -> Any:
    """The state of an engine that was started from the first step and synced to each further one."""
    with engine(steps[0], **settings) as llm:
        sync = WeightSynchronizer.connect(llm, config=SMALL)
        sync.snapshot(steps[0])
        for step in steps[1:]:
            sync.sync(step)
        return state(llm)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3", "gemma3", "gpt2"])
def test_three_syncs_equal_a_fresh_engine(family: str, tmp_path: Path) -> None:
    steps = checkpoint_steps(tmp_path, family)
    with engine(steps[0]) as llm:
        start = state(llm)
        sync = WeightSynchronizer.connect(llm, config=SMALL)
        sync.snapshot(steps[0])
        reports = [sync.sync(step) for step in steps[1:]]
        synced = state(llm)
    assert [report.version.label for report in reports] == ["step-1", "step-2", "step-3"]
    assert 0.015 < reports[0].changed_fraction < 0.025
    assert all(report.payloads > 1 for report in reports)
    assert start != synced
    assert synced == fresh_state(steps[-1])


@pytest.mark.parametrize(
    ("checkpoint_dtype", "engine_dtype"),
    [
        (torch.float16, "float16"),
        (torch.float32, "float32"),
        (torch.bfloat16, "float32"),
        (torch.float32, "bfloat16"),
    ],
)
def test_other_dtypes_equal_a_fresh_engine(
    checkpoint_dtype: torch.dtype, engine_dtype: str, tmp_path: Path
) -> None:
    steps = checkpoint_steps(tmp_path, "llama", dtype=checkpoint_dtype)
    synced = _synced(steps, dtype=engine_dtype)
    assert synced == fresh_state(steps[-1], dtype=engine_dtype)


def test_dense_mla_equals_a_fresh_engine(tmp_path: Path) -> None:
    steps = checkpoint_steps(tmp_path, "deepseek_v2", first_k_dense_replace=2)
    assert _synced(steps) == fresh_state(steps[-1])


def test_nothing_changed_sends_nothing_and_every_element_changed_works(tmp_path: Path) -> None:
    before = build_checkpoint(tmp_path / "before", "llama")
    perturb_checkpoint(before, tmp_path / "after", fraction=1.0, change="values")
    with engine(before) as llm:
        start = state(llm)
        sync = WeightSynchronizer.connect(llm)
        sync.snapshot(before)
        unchanged = sync.sync(before)
        assert (unchanged.payloads, unchanged.wire_bytes, unchanged.changed_elements) == (0, 0, 0)
        assert sync.status()[0]["server"]["payloads_received"] == 0
        assert state(llm) == start
        everything = sync.sync(tmp_path / "after")
        assert everything.changed_fraction == 1.0
        synced = state(llm)
    assert synced == fresh_state(tmp_path / "after")


def test_compiled_engine_sees_new_weights(tmp_path: Path) -> None:
    steps = checkpoint_steps(tmp_path, "llama")
    with engine(steps[0], enforce_eager=False) as llm:
        sync = WeightSynchronizer.connect(llm)
        sync.snapshot(steps[0])
        before = generate(llm)
        sync.sync(steps[1])
        synced = state(llm)
    assert synced[1] != before
    assert synced == fresh_state(steps[1], enforce_eager=False)


def test_worker_processes(tmp_path: Path) -> None:
    steps = checkpoint_steps(tmp_path, "qwen3")
    assert _synced(steps, processes=True) == fresh_state(steps[-1])


def test_tensor_parallel_two(tmp_path: Path) -> None:
    steps = checkpoint_steps(tmp_path, "qwen2", vocab_size=509)  # a vocabulary that needs padding
    two = {
        "tensor_parallel_size": 2,
        "processes": True,
        "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    }
    prompts_fit = {"max_model_len": 64}
    with engine(steps[0], **two, **prompts_fit) as llm:
        sync = WeightSynchronizer.connect(llm, config=SMALL)
        assert len(sync.status()) == 2
        sync.snapshot(steps[0])
        for step in steps[1:]:
            sync.sync(step)
        synced = checksums(llm), generate(llm, tokens=2)
    with engine(steps[-1], **two, **prompts_fit) as llm:
        fresh = checksums(llm), generate(llm, tokens=2)
    assert len(fresh[0]) == 2
    assert synced == fresh
