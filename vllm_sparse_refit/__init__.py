"""Ship only the changed bits of a model from a trainer into running vLLM engines."""

from typing import TYPE_CHECKING, Any

from vllm_sparse_refit.config import SyncConfig, WorkerConfig
from vllm_sparse_refit.errors import RefitError

if TYPE_CHECKING:
    from vllm_sparse_refit.trainer.report import SyncReport
    from vllm_sparse_refit.trainer.synchronizer import WeightSynchronizer

__version__ = "0.1.0"

__all__ = ["RefitError", "SyncConfig", "SyncReport", "WeightSynchronizer", "WorkerConfig"]


def __getattr__(name: str) -> Any:
    # vLLM imports this package in every process to find the plugin; torch and ZeroMQ can wait until then.
    if name == "WeightSynchronizer":
        from vllm_sparse_refit.trainer.synchronizer import WeightSynchronizer

        return WeightSynchronizer
    if name == "SyncReport":
        from vllm_sparse_refit.trainer.report import SyncReport

        return SyncReport
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
