"""A baseline in memory-mapped files, which outlives the process that made it.

One folder holds one baseline: a file of bits for each tensor, and an index with their names and digests.
The index is there only while the files are whole: it is removed before they are changed and written
anew afterwards. A process that dies in between leaves a folder that says so.
"""

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import torch

from vllm_sparse_refit.codec.digest import BitsDigest
from vllm_sparse_refit.codec.dtypes import bits_dtype, dtype_from_name, dtype_name
from vllm_sparse_refit.errors import BaselineError, PayloadError

_FORMAT: Final = "vllm-sparse-refit-mapped-baseline/1"
_INDEX: Final = "index.json"
_LOCK: Final = "lock"


def is_mapped_baseline(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder was made by :class:`MappedFiles`, whole or not."""
    return (Path(folder) / _LOCK).is_file()


@dataclass(frozen=True, eq=False)
class MappedTensor:
    """One tensor of a mapped baseline.

    Attributes:
        name: Its checkpoint name.
        shape: Its shape.
        dtype: Its dtype.
        bits: 1-D, mapped; a change to them is a change of the file.
        digest: Of the bits, as the index says.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bits: torch.Tensor
    digest: BitsDigest


class MappedFiles:
    """The folder of one baseline, held by one object at a time. One owner; not thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = 0
        with self._naming_the_folder():
            self._lock = (folder / _LOCK).open("w")
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._lock.close()
                raise BaselineError(
                    f"the baseline in {str(folder)!r} is in use: stop the other process that holds it, or "
                    "call close(keep=True) on the synchronizer of this one that does, or snapshot the "
                    "weights that the engines hold"
                ) from None

    @classmethod
    def create(cls, parent: str | os.PathLike[str]) -> Self:
        """Make a new folder below ``parent``.

        Raises:
            BaselineError: it cannot be made.
        """
        with _naming(parent):
            Path(parent).mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix="baseline-", dir=parent))
        return cls(folder)

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return self._folder

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialized bits, ``[numel]``, in the next file; their disk space is reserved."""
        path = self._path(self._files)
        self._files += 1
        if not numel:
            return torch.empty(0, dtype=dtype)
        partial = path.with_suffix(".partial")
        size = numel * dtype.itemsize
        with self._naming_the_folder():
            with partial.open("w+b") as file:
                # A full disk must fail here: later it would be a bus error amid a write.
                os.posix_fallocate(file.fileno(), 0, size)
            partial.rename(path)
            return _map(path, size, dtype)

    def write_index(self, tensors: Sequence[MappedTensor], note: str) -> None:
        """Say that the files are whole. ``tensors`` in the order in which they were allocated.

        Args:
            tensors: All of them.
            note: Kept for whoever opens the folder again.

        Raises:
            BaselineError: it cannot be written; can be called again.
        """
        index = {
            "format": _FORMAT,
            "note": note,
            "tensors": [[t.name, t.shape, dtype_name(t.dtype), t.digest.hex] for t in tensors],
        }
        partial = self._folder / f"{_INDEX}.partial"
        with _naming(self._folder, "free space, and the next call goes on: the bits are whole"):
            partial.write_text(json.dumps(index))
            partial.rename(self._folder / _INDEX)

    def remove_index(self) -> None:
        """Say that the files are about to change."""
        with self._naming_the_folder():
            (self._folder / _INDEX).unlink(missing_ok=True)

    def read(self) -> tuple[list[MappedTensor], str]:
        """Map all tensors of a folder that another process left, and its note; nothing is verified.

        Raises:
            BaselineError: the folder is missing files, or its last change did not end.
        """
        path = self._folder / _INDEX
        if not path.exists():
            raise BaselineError(
                f"the baseline in {str(self._folder)!r} has no index: the process that held it ended "
                "while it was being changed; snapshot the weights that the engines hold"
            )
        try:
            index = json.loads(path.read_text())
            if index["format"] != _FORMAT:
                raise ValueError(f"format {index['format']!r}")
            tensors = [self._read(i, *row) for i, row in enumerate(index["tensors"])]
            note = str(index["note"])
        except (OSError, ValueError, KeyError, TypeError, PayloadError) as error:
            raise BaselineError(
                f"the baseline in {str(self._folder)!r} cannot be read ({type(error).__name__}: "
                f"{error}); snapshot the weights that the engines hold"
            ) from error
        self._files = len(tensors)
        return tensors, note

    def _read(self, number: int, name: str, shape: Any, dtype: str, digest: str) -> MappedTensor:
        found = dtype_from_name(dtype)
        numel = int(np.prod(shape, dtype=np.int64))
        bits = torch.empty(0, dtype=bits_dtype(found))
        if numel:
            path = self._path(number)
            size = numel * found.itemsize
            if path.stat().st_size != size:
                raise ValueError(f"{path.name} has {path.stat().st_size} bytes, not {size}")
            bits = _map(path, size, bits_dtype(found))
        return MappedTensor(name, tuple(shape), found, bits, BitsDigest.from_hex(digest))

    def _path(self, number: int) -> Path:
        # Numbered: a tensor's name may hold anything, a file's may not.
        return self._folder / f"{number:06d}.bits"

    def _naming_the_folder(self) -> contextlib.AbstractContextManager[None]:
        return _naming(self._folder)

    def close(self, *, keep: bool = False) -> None:
        """Let go of the folder, and remove it unless it shall be kept.

        A mapping still in use stays readable until it is dropped.
        """
        if not keep:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._lock.close()


def _map(path: Path, size: int, dtype: torch.dtype) -> torch.Tensor:
    mapped = np.memmap(path, dtype=np.uint8, mode="r+", shape=(size,))
    return torch.from_numpy(mapped).view(dtype)


_SNAPSHOT_AGAIN: Final = "free space or change SyncConfig.baseline_dir, then snapshot again"


@contextlib.contextmanager
def _naming(folder: str | os.PathLike[str], remedy: str = _SNAPSHOT_AGAIN) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BaselineError(
            f"the baseline in {str(folder)!r} cannot be written ({error}); {remedy}"
        ) from error
