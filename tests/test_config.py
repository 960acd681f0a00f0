"""Settings check themselves, and keys stay out of messages."""

from typing import Any

import pytest

from vllm_sparse_refit.config import SyncConfig, WorkerConfig, read_api_key
from vllm_sparse_refit.errors import ConfigError


@pytest.mark.parametrize(
    "settings",
    [
        {"max_payload_bytes": 0},
        {"max_payload_bytes": 1.5},
        {"queue_depth": True},
        {"staging_threads": "2"},
        {"timeout_s": -1},
        {"timeout_s": float("nan")},
        {"enabled": "yes"},
        {"shadow_packed_layers": 1},
        {"max_shadow_bytes": -1},
        {"max_shadow_bytes": 1.5},
        {"max_shadow_bytes": True},
    ],
)
def test_a_bad_worker_setting_is_named(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        WorkerConfig(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"chunk_elements": 0.5},
        {"payload_bytes": -1},
        {"retries": -1},
        {"retries": 1.0},
        {"verification_samples": None},
        {"timeout_s": 0},
        {"dtype": "int8"},
        {"ignore": "*.inv_freq"},
        {"dtype": "bf16"},
        {"dtype": "float8_e4m3fn"},
    ],
)
def test_a_bad_sync_setting_is_named(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        SyncConfig(**settings)


def test_seconds_may_be_whole_numbers() -> None:
    assert WorkerConfig(timeout_s=5).timeout_s == 5
    assert SyncConfig(timeout_s=5).timeout_s == 5


def test_additional_config() -> None:
    read = WorkerConfig.from_additional_config
    assert read({}) == read(None) == WorkerConfig()
    assert read({"sparse_refit": {}}).enabled is True
    assert read({"sparse_refit": {"enabled": False, "queue_depth": 3}}) == WorkerConfig(
        enabled=False, queue_depth=3
    )
    with pytest.raises(ConfigError, match="no_such"):
        read({"sparse_refit": {"no_such": 1}})
    with pytest.raises(ConfigError, match="mapping"):
        read({"sparse_refit": True})


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_api_key(None) is None
    monkeypatch.setenv("A_KEY", "secret")
    assert read_api_key("A_KEY") == b"secret"
    for value in ("", None):
        if value is None:
            monkeypatch.delenv("A_KEY")
        else:
            monkeypatch.setenv("A_KEY", value)
        with pytest.raises(ConfigError, match="A_KEY"):
            read_api_key("A_KEY")
