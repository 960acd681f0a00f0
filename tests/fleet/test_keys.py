"""Keys that only one side has, or of two pairs, are refused when an engine is taken in."""

from pathlib import Path
from typing import Any

import pytest

from tests.fleet.fleets import toy_fleet
from tests.fleet.toy_worker import toy_weights
from vllm_sparse_refit import SyncConfig, WeightSynchronizer
from vllm_sparse_refit.errors import AuthenticationError, ConfigError
from vllm_sparse_refit.transport.curve import generate_keys, read_server_keys

OLD, NEW = (toy_weights(seed) for seed in (1, 2))
API_KEY = {"api_key_env_var": "REFIT_TEST_KEY"}


@pytest.fixture(autouse=True)
def _api_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFIT_TEST_KEY", "the right key")
    monkeypatch.setenv("REFIT_WRONG_KEY", "another key")


@pytest.fixture
def curve(tmp_path: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Settings of the workers, of their trainer, and of one that knows other workers."""
    for name in ("workers", "others"):
        generate_keys(tmp_path, name)
    (tmp_path / "clients").mkdir()
    generate_keys(tmp_path / "clients", "trainer")
    secret = tmp_path / "clients" / "trainer.key_secret"
    workers = {
        "curve_key_file": str(tmp_path / "workers.key_secret"),
        "curve_clients_dir": str(tmp_path / "clients"),
    }
    trainers = (
        {"curve_key_file": secret, "curve_server_key_file": tmp_path / f"{name}.key"}
        for name in ("workers", "others")
    )
    return workers, *trainers


def _refusal(workers: dict[str, Any], trainer: dict[str, Any]) -> str:
    with toy_fleet(1, ranks=2, **workers) as fleet:
        with pytest.raises(ConfigError) as caught:
            WeightSynchronizer.connect(fleet.llms, config=SyncConfig(**trainer))
        return str(caught.value)


def test_an_api_key_on_one_side() -> None:
    wanted = _refusal(API_KEY, {})
    assert wanted.startswith("engine 0, rank 0 wants an API key, and this trainer has none")
    unwanted = _refusal({}, API_KEY)
    assert unwanted.startswith("this trainer has an API key, and engine 0, rank 0 wants none")
    for message in (wanted, unwanted):
        assert "set api_key_env_var in SyncConfig and api_key_env_var in the engine's" in message


def test_curve_on_one_side(curve: tuple[dict[str, Any], ...]) -> None:
    workers, trainer, _ = curve
    wanted, unwanted = _refusal(workers, {}), _refusal({}, trainer)
    assert wanted.startswith("engine 0, rank 0 uses CURVE, and this trainer does not")
    assert unwanted.startswith("this trainer uses CURVE, and engine 0, rank 0 does not")
    for message in (wanted, unwanted):
        assert "set curve_key_file and curve_server_key_file in SyncConfig" in message
        assert "curve_key_file and curve_clients_dir in the engine's" in message


def test_curve_keys_of_two_pairs(curve: tuple[dict[str, Any], ...]) -> None:
    workers, _, other = curve
    message = _refusal(workers, other)
    assert message.startswith("engine 0, rank 0 has another CURVE key than ")
    assert "others.key" in message


def test_the_same_keys_and_a_wrong_one(curve: tuple[dict[str, Any], ...]) -> None:
    workers, trainer, _ = curve
    with toy_fleet(2, **workers, **API_KEY) as fleet:
        wrong = fleet.connect(**trainer, api_key_env_var="REFIT_WRONG_KEY")
        with pytest.raises(AuthenticationError):
            wrong.sync(NEW.items())
        fleet.assert_holds(OLD)
        fleet.connect(**trainer, **API_KEY).sync(NEW.items())
        fleet.assert_holds(NEW)
        said = str(fleet.statuses())
        assert "the right key" not in said
        keys = read_server_keys(*workers.values())
        assert keys is not None
        assert keys.public.decode() in said
        assert keys.secret.decode() not in said


def test_an_engine_with_other_keys_is_not_taken_in() -> None:
    with toy_fleet(1) as fleet, toy_fleet(1, **API_KEY) as other:
        sync = fleet.connect()
        for take in (sync.add_engine, lambda llm: sync.replace_engine(fleet.llms[0], llm)):
            with pytest.raises(ConfigError, match="engine 1, rank 0 wants an API key"):
                take(other.llms[0])
        assert sync.sync(NEW.items()).engines == 1
        fleet.assert_holds(NEW)
        other.assert_holds(OLD)
