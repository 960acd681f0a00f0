"""Reading the tensors of a checkpoint folder: safetensors only, one tensor at a time."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_sparse_refit.errors import CheckpointError

if TYPE_CHECKING:
    from vllm_sparse_refit.trainer.exported import NamedTensor

_INDEX_FILE = "model.safetensors.index.json"
_SINGLE_FILE = "model.safetensors"

# A folder's files in reading order, each with the names its index promises (None: no index).
_Files = Mapping[Path, frozenset[str] | None]


def read_folder(folder: Path) -> "Iterator[NamedTensor]":
    """Yield the tensors of a checkpoint as views of its memory-mapped files, on the CPU.

    Raises:
        CheckpointError: at the call, the folder is missing, has no safetensors, or its index is
            damaged or names a missing file; during the iteration, a file is damaged or is not what
            the index says.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder; pass the path of a local checkpoint folder "
            "(a model id has to be downloaded first)"
        )
    # vLLM lets the index decide where both are there, so it decides here.
    if (folder / _INDEX_FILE).is_file():
        return _read_files(_indexed_files(folder))
    if (folder / _SINGLE_FILE).is_file():
        return _read_files({folder / _SINGLE_FILE: None})
    hint = "save the model with save_pretrained"
    if any(folder.glob("*.bin")):
        hint = "its .bin files are pickles and are not read: convert them with save_pretrained"
    raise CheckpointError(f"{folder} has neither {_SINGLE_FILE} nor {_INDEX_FILE}; {hint}")


def _indexed_files(folder: Path) -> _Files:
    index = folder / _INDEX_FILE
    names_of: dict[str, set[str]] = {}
    try:
        for name, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
            names_of.setdefault(file, set()).add(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index} is no index of a sharded checkpoint ({error!r}); save the checkpoint again"
        ) from error
    for file in names_of:
        if not isinstance(file, str) or Path(file).name != file or not (folder / file).is_file():
            raise CheckpointError(
                f"{index} names the file {file!r}, which the folder does not have; "
                "copy it there or save the checkpoint again"
            )
    return {folder / file: frozenset(names_of[file]) for file in sorted(names_of)}


def _read_files(files: _Files) -> "Iterator[NamedTensor]":
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise CheckpointError(
            "reading a checkpoint folder needs safetensors: pip install 'vllm-sparse-refit[hf]'"
        ) from error
    for path, promised in files.items():
        try:
            with safe_open(path, framework="pt") as reader:
                names = list(reader.keys())
                _check_promise(path, promised, names)
                for name in names:
                    yield name, reader.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); copy it again") from error


def _check_promise(path: Path, promised: frozenset[str] | None, names: list[str]) -> None:
    if promised is not None and promised != set(names):
        odd = sorted(promised.symmetric_difference(names))
        raise CheckpointError(
            f"{path} and the index of its folder disagree about {len(odd)} tensors, "
            f"{odd[0]} among them; save the checkpoint again"
        )
