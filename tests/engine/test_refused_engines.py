"""Engines that a synchronizer must not touch: layers it cannot update, and keys that do not match."""

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import build_checkpoint, perturb_checkpoint
from tests.engine.engines import checksums, engine
from vllm_sparse_refit import SyncConfig, WeightSynchronizer
from vllm_sparse_refit.errors import (
    AuthenticationError,
    BaselineError,
    ConfigError,
    UnsupportedModelError,
)

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"shadow_packed_layers": False}, "w13_weight"),
        ({"max_shadow_bytes": 1000}, r"\d{6} bytes.*max_shadow_bytes=1000"),
    ],
)
def test_packed_layers_that_are_not_kept_are_refused_by_name(
    settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    folder = build_checkpoint(tmp_path / "moe", "mixtral")
    with engine(folder, additional_config={"sparse_refit": settings}) as running:
        unchanged = checksums(running)
        synchronizer = WeightSynchronizer.connect(running)
        with pytest.raises(
            UnsupportedModelError, match=r"model\.layers\.\d\.\S*experts.*" + reason
        ):
            synchronizer.snapshot(folder)
        with pytest.raises(BaselineError):
            synchronizer.sync(folder)
        (status,) = synchronizer.status()
        assert (status["packed_layers"], status["shadow_bytes"]) == (0, 0)
        assert checksums(running) == unchanged


def test_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = build_checkpoint(tmp_path / "before", "llama"), tmp_path / "after"
    perturb_checkpoint(before, after, fraction=0.1)
    monkeypatch.setenv("REFIT_TEST_KEY", "the right key")
    monkeypatch.setenv("REFIT_WRONG_KEY", "another key")
    config = {"sparse_refit": {"api_key_env_var": "REFIT_TEST_KEY"}}
    with engine(before, additional_config=config) as running:
        unchanged = checksums(running)
        for variable in (None, "REFIT_WRONG_KEY"):
            synchronizer = WeightSynchronizer.connect(
                running, config=SyncConfig(api_key_env_var=variable)
            )
            synchronizer.snapshot(before)
            with pytest.raises(AuthenticationError, match="key") as caught:
                synchronizer.sync(after)
            assert "the right key" not in str(caught.value)
            assert "another key" not in str(caught.value)
            assert checksums(running) == unchanged
        with pytest.raises(ConfigError, match="REFIT_NO_KEY"):
            WeightSynchronizer.connect(
                running, config=SyncConfig(api_key_env_var="REFIT_NO_KEY")
            ).snapshot(before)
        right = WeightSynchronizer.connect(
            running, config=SyncConfig(api_key_env_var="REFIT_TEST_KEY")
        )
        right.snapshot(before)
        right.sync(after)
        assert checksums(running) != unchanged
