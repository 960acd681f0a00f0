"""Worker extension classes as users have them, named by their import path in ``worker_extension_cls``."""

from typing import Any

import torch

from vllm_sparse_refit.apply.storage import tensor_digest
from vllm_sparse_refit.worker.extension import SparseRefitWorkerExtension


class UserExtension:
    """A user's own class that knows nothing of this plugin."""

    rank: int

    def user_rank(self) -> dict[str, int]:
        return {"user_rank": self.rank}


class RefitSubclass(SparseRefitWorkerExtension):
    """A user's own class on top of ours, which adds a method and overrides one."""

    rank: int

    def user_rank(self) -> dict[str, int]:
        return {"user_rank": self.rank}

    def sparse_refit_status(self, **kwargs: Any) -> dict[str, Any]:
        return super().sparse_refit_status(**kwargs) | {"from_subclass": True}


class TensorChecksums:
    """Sees what vLLM's own checksums do not: tensors that were derived and are plain attributes."""

    model_runner: Any

    def tensor_checksums(self) -> dict[str, str]:
        return {
            f"{module_name}.{name}": tensor_digest(value).hex()
            for module_name, module in self.model_runner.get_model().named_modules()
            for registry in (module._parameters, module._buffers, vars(module))
            for name, value in registry.items()
            if isinstance(value, torch.Tensor) and name != "kv_cache"
        }
