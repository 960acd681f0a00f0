"""Memory-mapped files for the tensors of a baseline."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from vllm_sparse_refit.errors import BaselineError


class MappedFiles:
    """Baseline tensors in files of a folder of its own, one a tensor; ``close`` removes them."""

    def __init__(self, parent: str | os.PathLike[str]) -> None:
        self._parent = Path(parent)
        self._files = 0
        with self._naming_the_folder():
            self._parent.mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(prefix="baseline-", dir=parent))

    @contextlib.contextmanager
    def _naming_the_folder(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise BaselineError(
                f"the baseline in {str(self._parent)!r} cannot be written ({error}); free space or "
                "change SyncConfig.baseline_dir, then snapshot again"
            ) from error

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialized bits, ``[numel]``, whose disk space is reserved."""
        if not numel:
            return torch.empty(0, dtype=dtype)
        # Numbered: a tensor's name may hold anything, a file's may not.
        path = self._folder / f"{self._files:06d}.bits"
        partial = path.with_suffix(".partial")
        self._files += 1
        size = numel * dtype.itemsize
        with self._naming_the_folder():
            with partial.open("w+b") as file:
                # A full disk must fail here: later it would be a bus error amid a write.
                os.posix_fallocate(file.fileno(), 0, size)
            partial.rename(path)
            mapped = np.memmap(path, dtype=np.uint8, mode="r+", shape=(size,))
        return torch.from_numpy(mapped).view(dtype)

    def close(self) -> None:
        """Remove the files. A mapping still in use stays readable until it is dropped."""
        shutil.rmtree(self._folder, ignore_errors=True)
