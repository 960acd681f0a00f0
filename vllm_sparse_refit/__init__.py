"""Ship only the changed bits of a model from a trainer into running vLLM engines."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vllm_sparse_refit.config import SyncConfig, WorkerConfig
from vllm_sparse_refit.errors import RefitError

if TYPE_CHECKING:
    from vllm_sparse_refit.trainer.producers import TorchProducerGroup
    from vllm_sparse_refit.trainer.report import SyncReport
    from vllm_sparse_refit.trainer.shard import ProducerShard
    from vllm_sparse_refit.trainer.synchronizer import WeightSynchronizer

__version__ = "0.1.0"

__all__ = [
    "ProducerShard",
    "RefitError",
    "SyncConfig",
    "SyncReport",
    "TorchProducerGroup",
    "WeightSynchronizer",
    "WorkerConfig",
]

# vLLM imports this package in every process to find the plugin; torch and ZeroMQ can wait until then.
_LATER = {
    "ProducerShard": "shard",
    "SyncReport": "report",
    "TorchProducerGroup": "producers",
    "WeightSynchronizer": "synchronizer",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(f"vllm_sparse_refit.trainer.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
