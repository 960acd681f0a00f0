"""How the plugin gets into engines, and that it stays out of those that did not ask for it."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from tests.checkpoints import build_checkpoint, perturb_checkpoint
from tests.engine.engines import engine, fresh_state, generate, model, state, worker
from vllm_sparse_refit import WeightSynchronizer
from vllm_sparse_refit.errors import ConfigError, PluginNotEnabledError
from vllm_sparse_refit.worker.extension import RECEIVER_ATTRIBUTE

pytestmark = pytest.mark.engine

EXTENSIONS = "tests.engine.extensions"
OURS = "vllm_sparse_refit.worker.extension.SparseRefitWorkerExtension"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("plugin")
    before = build_checkpoint(folder / "before", "llama")
    perturb_checkpoint(before, folder / "after", fraction=0.05, change="values")
    return before, folder / "after"


@pytest.fixture(scope="module")
def expected(checkpoints: tuple[Path, Path]) -> Any:
    return fresh_state(checkpoints[1])


def _refit(llm: Any, checkpoints: tuple[Path, Path]) -> Any:
    sync = WeightSynchronizer.connect(llm)
    sync.snapshot(checkpoints[0])
    assert sync.sync(checkpoints[1]).changed_elements > 0
    return state(llm)


def _server_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("sparse-refit")]


def _accepts(address: str) -> bool:
    parts = urlsplit(address)
    with socket.socket() as probe:
        probe.settimeout(5)
        return probe.connect_ex((parts.hostname, parts.port)) == 0


@pytest.mark.parametrize("processes", [False, True], ids=["in-process", "worker-processes"])
def test_the_server_lives_as_long_as_the_worker(
    processes: bool, checkpoints: tuple[Path, Path]
) -> None:
    threads_before = _server_threads()
    with engine(checkpoints[0], processes=processes) as llm:
        (status,) = WeightSynchronizer.connect(llm).status()
        assert _accepts(status["address"])
        assert status["address"].startswith("tcp://127.0.0.1:")
        assert len(_server_threads()) > len(threads_before) or processes
    assert not _accepts(status["address"])
    assert _server_threads() == threads_before


@pytest.mark.parametrize(
    "slot",
    [f"{EXTENSIONS}.UserExtension", OURS, f"{EXTENSIONS}.RefitSubclass"],
    ids=["user-class", "our-class", "subclass"],
)
@pytest.mark.parametrize("processes", [False, True], ids=["in-process", "worker-processes"])
def test_with_the_extension_slot_taken(
    slot: str, processes: bool, checkpoints: tuple[Path, Path], expected: Any
) -> None:
    with engine(checkpoints[0], processes=processes, worker_extension_cls=slot) as llm:
        assert _refit(llm, checkpoints) == expected
        if slot != OURS:
            assert llm.collective_rpc("user_rank") == [{"user_rank": 0}]
        (status,) = llm.collective_rpc("sparse_refit_status")
    assert status.get("from_subclass", False) is slot.endswith("RefitSubclass")
    assert status["ok"]


def test_our_class_in_the_slot_enables_the_plugin(
    checkpoints: tuple[Path, Path], expected: Any
) -> None:
    with engine(checkpoints[0], plugins=None, worker_extension_cls=OURS) as llm:
        assert _refit(llm, checkpoints) == expected


def test_additional_config_enables_and_configures(
    checkpoints: tuple[Path, Path], expected: Any
) -> None:
    config = {"sparse_refit": {"bind_address": "tcp://127.0.0.2:*"}}
    with engine(checkpoints[0], plugins=None, additional_config=config) as llm:
        assert _refit(llm, checkpoints) == expected
        (status,) = WeightSynchronizer.connect(llm).status()
    assert status["address"].startswith("tcp://127.0.0.2:")


@pytest.mark.parametrize(
    "section",
    [{"no_such_setting": 1}, {"timeout_s": -1}, {"bind_address": "tcp://0.0.0.0:*"}],
    ids=["unknown", "invalid", "off-loopback-without-key"],
)
def test_bad_settings_stop_the_engine_with_a_clear_error(
    section: dict[str, Any], checkpoints: tuple[Path, Path]
) -> None:
    with (
        pytest.raises(ConfigError, match=next(iter(section)) + "|key"),
        engine(checkpoints[0], additional_config={"sparse_refit": section}),
    ):
        pytest.fail("the engine started")
    assert _server_threads() == []


@pytest.mark.parametrize(
    ("plugins", "additional_config"),
    [(None, {}), ("", {}), ("sparse_refit", {"sparse_refit": {"enabled": False}})],
    ids=["installed", "excluded", "disabled"],
)
def test_not_enabled_changes_nothing(
    plugins: str | None, additional_config: dict[str, Any], checkpoints: tuple[Path, Path]
) -> None:
    settings = {"plugins": plugins, "additional_config": additional_config, "dtype": "float32"}
    with engine(checkpoints[0], **settings) as llm:
        # Ports cannot be counted, since vLLM opens some itself; a server of ours has its thread.
        assert _server_threads() == []
        assert not hasattr(worker(llm), RECEIVER_ATTRIBUTE)
        # fp32 linear layers are packed on every CPU where vLLM finds oneDNN: its own path, untouched.
        linear = model(llm).get_submodule("model.layers.0.self_attn.qkv_proj")
        assert linear.cpu_linear is not torch.nn.functional.linear
        before = generate(llm)
        with pytest.raises(PluginNotEnabledError, match="VLLM_PLUGINS"):
            WeightSynchronizer.connect(llm)
        assert generate(llm) == before


_WITHOUT_PLUGIN = """
import sys
from pathlib import Path
import pytest
from tests.engine.engines import engine, generate
from vllm_sparse_refit import WeightSynchronizer, plugin
from vllm_sparse_refit.errors import PluginNotEnabledError

if __name__ == "__main__":
    with engine(Path(sys.argv[1]), plugins="another", processes=True) as llm:
        assert not plugin.is_registered()
        before = generate(llm)
        with pytest.raises(PluginNotEnabledError, match="VLLM_PLUGINS is 'another' now"):
            WeightSynchronizer.connect(llm)
        assert generate(llm) == before
    print("refused and still right")
"""


def test_an_engine_without_the_plugin_is_found_out_without_a_call(
    checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    script = tmp_path / "without_plugin.py"
    script.write_text(_WITHOUT_PLUGIN)
    done = subprocess.run(
        [sys.executable, str(script), str(checkpoints[0])],
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "refused and still right" in done.stdout, done.stderr[-3000:]


def test_an_rpc_with_wrong_arguments_does_not_raise(checkpoints: tuple[Path, Path]) -> None:
    with engine(checkpoints[0], processes=True) as llm:
        (reply,) = llm.collective_rpc("sparse_refit_begin", args=(1, 2, 3, 4, 5, 6))
        assert not reply["ok"]
        assert reply["error_type"] == "TypeError"
        (reply,) = llm.collective_rpc("discover_native_skips", args=({"x": "not a shape"},))
        assert not reply["ok"]
        (reply,) = llm.collective_rpc(
            "update_weights_from_decoded_sparse_payload", args=("/no/such/file",)
        )
        assert reply["error_type"] == "FileNotFoundError"
        (reply,) = llm.collective_rpc("sparse_refit_status", kwargs={"nonce": "n"})
        assert (reply["ok"], reply["nonce"], reply["rank"]) == (True, "n", 0)
