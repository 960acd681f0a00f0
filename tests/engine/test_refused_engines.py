"""Engines that a synchronizer must not touch: layers it cannot update, and keys that do not match."""

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import build_checkpoint, perturb_checkpoint
from tests.engine.engines import checksums, engine, fresh_state, state
from vllm_sparse_refit import SyncConfig, WeightSynchronizer
from vllm_sparse_refit.errors import (
    AuthenticationError,
    BaselineError,
    ConfigError,
    TransportTimeoutError,
    UnsupportedModelError,
)
from vllm_sparse_refit.transport.curve import generate_keys

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
        with pytest.raises(ConfigError, match="engine 0, rank 0 wants an API key"):
            WeightSynchronizer.connect(running)
        synchronizer = WeightSynchronizer.connect(
            running, config=SyncConfig(api_key_env_var="REFIT_WRONG_KEY")
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


def test_curve_keys(tmp_path: Path) -> None:
    before = build_checkpoint(tmp_path / "before", "llama")
    perturb_checkpoint(before, tmp_path / "after", fraction=0.05, change="values")
    for name in ("workers", "trainer", "stranger"):
        generate_keys(tmp_path / "keys", name)
    clients = tmp_path / "clients"
    clients.mkdir()
    (clients / "trainer.key").write_bytes((tmp_path / "keys" / "trainer.key").read_bytes())

    def keys(name: str) -> dict[str, Path]:
        return {
            "curve_key_file": tmp_path / "keys" / f"{name}.key_secret",
            "curve_server_key_file": tmp_path / "keys" / "workers.key",
        }

    workers = {
        "curve_key_file": str(tmp_path / "keys" / "workers.key_secret"),
        "curve_clients_dir": str(clients),
    }
    with engine(before, additional_config={"sparse_refit": workers}) as llm:
        unchanged = checksums(llm)
        with pytest.raises(ConfigError, match="engine 0, rank 0 uses CURVE"):
            WeightSynchronizer.connect(llm)
        sync = WeightSynchronizer.connect(
            llm, config=SyncConfig(timeout_s=0.5, retries=0, **keys("stranger"))
        )
        sync.snapshot(before)
        with pytest.raises(TransportTimeoutError, match="CURVE"):
            sync.sync(tmp_path / "after")
        assert checksums(llm) == unchanged
        sync = WeightSynchronizer.connect(llm, config=SyncConfig(**keys("trainer")))
        sync.snapshot(before)
        assert sync.sync(tmp_path / "after").changed_elements > 0
        synced = state(llm)
    assert synced == fresh_state(tmp_path / "after")
