"""Canonical tensors that are one parameter in the engine."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import build_checkpoint, perturb_checkpoint
from tests.engine.engines import engine, fresh_state, state
from vllm_sparse_refit import WeightSynchronizer
from vllm_sparse_refit.errors import UnsupportedModelError
from vllm_sparse_refit.trainer.weights import named_weights

pytestmark = pytest.mark.engine

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def _edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def _tie(weights: dict[str, torch.Tensor]) -> None:
    weights[HEAD] = weights[EMBEDDING].clone()


def test_a_head_that_vllm_ties_while_loading(tmp_path: Path) -> None:
    """A tied model's checkpoint with an explicit, equal head: vLLM unties, compares and ties again."""
    before = _edit(build_checkpoint(tmp_path / "before", "qwen3"), _tie)
    perturb_checkpoint(before, tmp_path / "differing", fraction=0.1, change="values", seed=1)
    perturb_checkpoint(before, tmp_path / "after", fraction=0.1, change="values", seed=2)
    after = _edit(tmp_path / "after", _tie)
    with engine(before) as llm:
        unchanged = state(llm)
        sync = WeightSynchronizer.connect(llm)
        sync.snapshot(before)
        with pytest.raises(UnsupportedModelError, match=f"{EMBEDDING} and {HEAD}|{HEAD} and"):
            sync.sync(tmp_path / "differing")
        assert state(llm) == unchanged
        sync.sync(after)
        synced = state(llm)
    assert synced == fresh_state(after)


def test_a_tied_head_in_the_trainers_weights_must_follow(tmp_path: Path) -> None:
    """A trainer may export the head of a tied model, which the engine's loader skips."""
    before = build_checkpoint(tmp_path / "before", "qwen3")
    perturb_checkpoint(before, tmp_path / "after", fraction=0.1, change="values")

    def export(folder: Path) -> dict[str, torch.Tensor]:
        weights = dict(named_weights(folder))
        return {**weights, HEAD: weights[EMBEDDING]}

    with engine(before) as llm:
        unchanged = state(llm)
        sync = WeightSynchronizer.connect(llm)
        weights = export(before)
        with pytest.raises(UnsupportedModelError, match=f"{HEAD} and {EMBEDDING}"):
            sync.snapshot({**weights, HEAD: weights[HEAD] + 1})
        sync.snapshot(weights)
        with pytest.raises(UnsupportedModelError, match=f"{EMBEDDING} and {HEAD}"):
            sync.sync({**weights, HEAD: weights[HEAD] + 1})
        assert state(llm) == unchanged
        sync.sync(export(tmp_path / "after"))
        synced = state(llm)
    assert synced == fresh_state(tmp_path / "after")
