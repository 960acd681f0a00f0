"""Layers that vLLM packs after loading: after a sync they equal those of a plain, fresh engine."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import checkpoint_steps
from tests.engine.engines import engine, fresh_state, model, state
from vllm_sparse_refit import SyncConfig, WeightSynchronizer
from vllm_sparse_refit.apply.shadow import PackedLayers
from vllm_sparse_refit.errors import BaselineError, EngineStateError, TransactionError

pytestmark = pytest.mark.engine

# Small chunks and payloads, so that even a small model takes several of each.
SMALL = SyncConfig(chunk_elements=5_000, payload_bytes=4_096)


# What the loaders of these families cast or transform also in bf16.
TRANSFORMED = {"gpt_oss": ".mlp.experts.", "deepseek_v3": ".e_score_correction_bias"}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("mixtral", {}),
        ("qwen3_moe", {}),
        ("gpt_oss", {}),
        ("deepseek_v2", {"dtype": "float32"}),
        ("deepseek_v3", {}),
        ("qwen3", {"dtype": "float32"}),
        ("llama", {"dtype": "float32", "enforce_eager": False}),
        ("mixtral", {"processes": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_three_syncs_equal_a_plain_engine(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    steps = checkpoint_steps(tmp_path, family)
    with engine(steps[0], **settings) as llm:
        start = state(llm)
        sync = WeightSynchronizer.connect(llm, config=SMALL)
        sync.snapshot(steps[0])
        (status,) = sync.status()
        assert status["packed_layers"] > 0
        assert status["shadow_bytes"] > 0
        for step in steps[1:]:
            sync.sync(step)
        verified = sync.verify()
        synced = state(llm)
    assert verified.ok
    if settings.get("dtype") == "float32":  # every tensor of these bf16 checkpoints is cast
        assert (verified.elements, bool(verified.transformed)) == (0, True)
    else:
        assert verified.elements > 0
        named = TRANSFORMED.get(family)
        assert bool(verified.transformed) == (named is not None)
        assert all(named and named in name for name in verified.transformed)
    assert start[0] != synced[0]
    assert start[1] != synced[1]
    assert synced == fresh_state(steps[-1], **settings)


def test_projections_that_mla_keeps_as_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU they are views of ``kv_b_proj``; other backends and quantized layers make copies."""
    from vllm.model_executor.layers.attention import mla_attention

    split = mla_attention.split_kv_b_proj
    monkeypatch.setattr(
        mla_attention, "split_kv_b_proj", lambda *args: [part.clone() for part in split(*args)]
    )
    steps = checkpoint_steps(tmp_path, "deepseek_v2", first_k_dense_replace=2)
    with engine(steps[0]) as llm:
        sync = WeightSynchronizer.connect(llm, config=SMALL)
        sync.snapshot(steps[0])
        (status,) = sync.status()
        assert status["packed_layers"] == 2
        for step in steps[1:]:
            sync.sync(step)
        synced = state(llm)
    assert synced == fresh_state(steps[-1])


def test_a_commit_that_fails_between_two_layers_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = checkpoint_steps(tmp_path, "mixtral")
    # fp32, where experts are packed into tensors and linear layers into closures.
    with engine(steps[0], dtype="float32") as llm:
        unchanged = state(llm)
        sync = WeightSynchronizer.connect(llm)
        sync.snapshot(steps[0])
        run, runs = PackedLayers._run, 0

        def fail_later(layers: PackedLayers, group: Any) -> Any:
            nonlocal runs
            runs += 1
            if runs == 6:
                raise MemoryError("no memory for another copy")
            return run(layers, group)

        with monkeypatch.context() as patch:
            patch.setattr(PackedLayers, "_run", fail_later)
            with pytest.raises(TransactionError, match="no memory for another copy"):
                sync.sync(steps[1])
        assert state(llm) == unchanged
        sync.sync(steps[1])
        # After all has been written, too.
        with monkeypatch.context() as patch:
            patch.setattr(type(llm), "reset_prefix_cache", lambda *_, **__: False)
            with pytest.raises(EngineStateError, match="could not drop its prefix cache"):
                sync.sync(steps[2])
        first = state(llm)
        sync.sync(steps[2])
        second = state(llm)
    assert first == fresh_state(steps[1], dtype="float32")
    assert second == fresh_state(steps[2], dtype="float32")


def test_verification_names_what_something_else_wrote(tmp_path: Path) -> None:
    steps = checkpoint_steps(tmp_path, "mixtral")
    with engine(steps[0]) as llm:
        sync = WeightSynchronizer.connect(llm)
        with pytest.raises(BaselineError, match="snapshot"):
            sync.verify()
        sync.snapshot(steps[0])
        sync.sync(steps[1])
        assert sync.verify().ok
        experts = "model.layers.1.block_sparse_moe.experts.routed_experts"
        for name, tensor in (
            ("model.layers.0.self_attn.k_proj.weight", _fused(llm, "model.layers.0")[130:]),
            (experts, model(llm).get_submodule(experts).w2_weight),
        ):
            element = tensor.data.view(torch.int16).view(-1)[5:6]
            element ^= 1
            report = sync.verify()
            assert report.different.keys() == {name}
            assert "engine 0, rank 0" in report.different[name][0]
            element ^= 1
        assert sync.verify().ok


def _fused(llm: Any, layer: str) -> torch.Tensor:
    weight: torch.Tensor = model(llm).get_submodule(f"{layer}.self_attn.qkv_proj").weight
    return weight


@pytest.mark.parametrize(("family", "dtype"), [("llama", "float32"), ("mixtral", "bfloat16")])
def test_vllms_own_reload_is_followed(family: str, dtype: str, tmp_path: Path) -> None:
    """vLLM leaves the experts of a plain engine unpacked there; with the plugin they come out right."""
    steps = checkpoint_steps(tmp_path, family)
    with engine(steps[0], dtype=dtype) as llm:
        sync = WeightSynchronizer.connect(llm)
        sync.snapshot(steps[0])
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(steps[1])})
        assert llm.reset_prefix_cache()
        reloaded = state(llm)
        assert sync.sync(steps[2]).resynced == 1
        synced = state(llm)
    assert reloaded == fresh_state(steps[1], dtype=dtype)
    assert synced == fresh_state(steps[2], dtype=dtype)
