"""Worker extension classes as users have them, named by their import path in ``worker_extension_cls``."""

from typing import Any

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
