"""Whether the workers and the trainer use the same kinds of keys: asked before anything is sent."""

from collections.abc import Mapping
from typing import Any

from vllm_sparse_refit.config import SyncConfig, read_api_key
from vllm_sparse_refit.errors import ConfigError
from vllm_sparse_refit.transport.curve import read_client_keys

_API_KEY = "api_key_env_var"
_CURVE_CLIENT = "curve_key_file and curve_server_key_file"
_CURVE_SERVER = "curve_key_file and curve_clients_dir"


class TrainerKeys:
    """The keys that a trainer's settings name.

    Reads them, since one that is missing should not wait for the first sync to be noticed.

    Raises:
        ConfigError: a variable or a file does not hold what the settings say.
    """

    def __init__(self, config: SyncConfig) -> None:
        self._has_api_key = read_api_key(config.api_key_env_var) is not None
        curve = read_client_keys(config.curve_key_file, config.curve_server_key_file)
        self._server_key = None if curve is None else curve.server.decode()
        self._server_key_file = config.curve_server_key_file

    def check(self, worker: str, status: Mapping[str, Any]) -> None:
        """Compare with what a worker uses. Whether an API key is the right one cannot be seen here.

        Args:
            worker: its name in messages.
            status: what it replied to ``sparse_refit_status``.

        Raises:
            ConfigError: one side has a key that the other has not, or the CURVE keys are of two pairs; says
                what to set on which side.
        """
        wants, public = status["keys"]["api_key"], status["keys"]["curve"]
        if wants and not self._has_api_key:
            raise _one_sided(
                f"{worker} wants an API key, and this trainer has none", _API_KEY, _API_KEY
            )
        if self._has_api_key and not wants:
            raise _one_sided(
                f"this trainer has an API key, and {worker} wants none", _API_KEY, _API_KEY
            )
        if public is not None and self._server_key is None:
            raise _one_sided(
                f"{worker} uses CURVE, and this trainer does not", _CURVE_CLIENT, _CURVE_SERVER
            )
        if public is None and self._server_key is not None:
            raise _one_sided(
                f"this trainer uses CURVE, and {worker} does not", _CURVE_CLIENT, _CURVE_SERVER
            )
        if public != self._server_key:
            raise ConfigError(
                f"{worker} has another CURVE key than {str(self._server_key_file)!r}: name the public file "
                "of the workers' pair in SyncConfig's curve_server_key_file, or start the engine with the "
                'secret file of that pair as curve_key_file in additional_config["sparse_refit"]'
            )


def _one_sided(which: str, trainer: str, worker: str) -> ConfigError:
    return ConfigError(
        f"{which}: set {trainer} in SyncConfig and {worker} in the engine's "
        'additional_config["sparse_refit"], or neither'
    )
