"""The ``vllm.general_plugins`` entry point: what enabling the plugin does to vLLM's workers.

vLLM calls :func:`register` in the front end, the engine core and every worker process, in a worker from
inside ``WorkerWrapperBase.init_worker``. The one slot for extensions (``worker_extension_cls``) stays the
user's: the RPC methods are attached to the wrapper around the worker, which vLLM looks up first, and act on
the worker inside it.
"""

import functools
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_sparse_refit.config import PLUGIN_NAME, WorkerConfig, read_api_key

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

_REGISTERED = "_sparse_refit_registered"


def register() -> None:
    """Attach the RPC methods and the server's life cycle to vLLM's worker wrapper. Idempotent.

    By itself this opens no port and changes no behaviour: whether the plugin is enabled is decided when a
    worker loads its model, by :func:`enabled_config`.
    """
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    from vllm_sparse_refit.worker.extension import RPC_METHODS

    if getattr(WorkerWrapperBase, _REGISTERED, False):
        return
    for name in RPC_METHODS:
        setattr(WorkerWrapperBase, name, _forwarder(name))
    wrapper: Any = WorkerWrapperBase
    wrapper.load_model = _load_model
    # Whatever else writes weights behind this plugin's back; the last two are vLLM's weight transfer.
    for name in ("reload_weights", "reset_weights", "start_weight_update", "update_weights"):
        setattr(WorkerWrapperBase, name, _replacing(name))
    wrapper.sleep = _sleep
    wrapper.shutdown = _closing(wrapper.shutdown)
    setattr(WorkerWrapperBase, _REGISTERED, True)


def is_registered() -> bool:
    """Whether :func:`register` has run in this process, as it has in the workers that it starts."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    return getattr(WorkerWrapperBase, _REGISTERED, False)


def setting_now() -> str:
    """The value of ``VLLM_PLUGINS`` in this process, as the end of a message that says to set it."""
    value = os.environ.get("VLLM_PLUGINS")
    found = "not set" if value is None else repr(value)
    return f"VLLM_PLUGINS is {found} now; names are separated by commas without spaces"


def enabled_config(vllm_config: "VllmConfig") -> WorkerConfig | None:
    """The worker settings if the plugin is enabled for an engine, else None.

    Enabled means: ``additional_config["sparse_refit"]`` says so, or ``VLLM_PLUGINS`` names the plugin, or
    ``worker_extension_cls`` is its extension or a subclass. That vLLM loads every installed plugin when
    ``VLLM_PLUGINS`` is unset does not count.

    Raises:
        ConfigError: the settings are invalid.
    """
    from vllm import envs

    config = WorkerConfig.from_additional_config(vllm_config.additional_config)
    if config.enabled is not None:
        return config if config.enabled else None
    if PLUGIN_NAME in (envs.VLLM_PLUGINS or ()):
        return config
    return config if _names_our_extension(vllm_config) else None


def _names_our_extension(vllm_config: "VllmConfig") -> bool:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from vllm_sparse_refit.worker.extension import SparseRefitWorkerExtension

    qualified_name = vllm_config.parallel_config.worker_extension_cls
    if not qualified_name:
        return False
    return issubclass(resolve_obj_by_qualname(qualified_name), SparseRefitWorkerExtension)


def _forwarder(name: str) -> Callable[..., Any]:
    from vllm_sparse_refit.worker.extension import SparseRefitWorkerExtension

    method = getattr(SparseRefitWorkerExtension, name)

    @functools.wraps(method)
    def forward(wrapper: Any, /, *args: Any, **kwargs: Any) -> Any:
        # A subclass in the user's slot may override the method; then that one counts.
        own = getattr(wrapper.worker, name, None)
        if own is not None:
            return own(*args, **kwargs)
        return method(wrapper.worker, *args, **kwargs)

    return forward


def _load_model(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    """Load the worker's model; when enabled, watch how its weights are processed and start the server."""
    worker = wrapper.worker
    config = enabled_config(worker.vllm_config)
    if config is None:
        return worker.load_model(*args, **kwargs)
    from vllm_sparse_refit.apply.loading import PostLoadObserver

    observer = PostLoadObserver(
        shadow=config.shadow_packed_layers, max_shadow_bytes=config.max_shadow_bytes
    )
    with observer.watch():
        result = worker.load_model(*args, **kwargs)
    _start_receiver(worker, config, observer)
    return result


def _replacing(name: str) -> Callable[..., Any]:
    """A worker's method that writes weights, after which they are of another version."""

    def replace(wrapper: Any, /, *args: Any, **kwargs: Any) -> Any:
        from vllm_sparse_refit.worker.extension import live_receiver

        method = getattr(wrapper.worker, name)
        receiver = live_receiver(wrapper.worker)
        if receiver is None:
            return method(*args, **kwargs)
        with receiver.weights_replaced(name):
            return method(*args, **kwargs)

    return replace


def _sleep(wrapper: Any, /, level: int = 1) -> Any:
    """vLLM's sleep, which at level 2 drops the weights."""
    if level < 2:
        return wrapper.worker.sleep(level)
    return _replacing("sleep")(wrapper, level)


def _start_receiver(worker: Any, config: WorkerConfig, observer: Any) -> None:
    from vllm_sparse_refit.apply.applier import VllmSparseDeltaApplier
    from vllm_sparse_refit.codec.payload import DecodeLimits
    from vllm_sparse_refit.transport.curve import read_server_keys
    from vllm_sparse_refit.worker.extension import RECEIVER_ATTRIBUTE
    from vllm_sparse_refit.worker.receiver import Receiver

    limits = DecodeLimits(
        max_payload_bytes=config.max_payload_bytes, max_decoded_bytes=config.max_decoded_bytes
    )
    applier = VllmSparseDeltaApplier(
        worker.model_runner,
        worker.device,
        limits=limits,
        loaded=observer.report(worker.model_runner.get_model()),
    )
    receiver = Receiver(
        applier,
        config,
        limits,
        read_api_key(config.api_key_env_var),
        read_server_keys(config.curve_key_file, config.curve_clients_dir),
    )
    receiver.start()
    # A second load (elastic scaling) replaces the first one's server.
    _close_receiver(worker)
    setattr(worker, RECEIVER_ATTRIBUTE, receiver)


def _close_receiver(worker: Any) -> None:
    from vllm_sparse_refit.worker.extension import CLOSED, RECEIVER_ATTRIBUTE, live_receiver

    if (receiver := live_receiver(worker)) is not None:
        receiver.close()
        setattr(worker, RECEIVER_ATTRIBUTE, CLOSED)


def _closing(shutdown: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(shutdown)
    def close_and_shutdown(wrapper: Any) -> None:
        # Before init_worker the wrapper has no worker, and looking for one would never end.
        if (worker := wrapper.__dict__.get("worker")) is not None:
            _close_receiver(worker)
        shutdown(wrapper)

    return close_and_shutdown
