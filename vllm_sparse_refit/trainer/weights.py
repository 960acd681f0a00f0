"""What a user calls a model, as (checkpoint name, tensor) pairs."""

import fnmatch
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vllm_sparse_refit.codec.dtypes import dtype_from_name
from vllm_sparse_refit.config import SyncConfig
from vllm_sparse_refit.errors import TensorMismatchError
from vllm_sparse_refit.trainer.checkpoint_folder import read_folder
from vllm_sparse_refit.trainer.model_export import export_model, whole_tensor

if TYPE_CHECKING:
    from vllm_sparse_refit.trainer.exported import NamedTensor


def named_weights(model: object) -> "Iterator[NamedTensor]":
    """Yield every checkpoint tensor of ``model`` once: full shape, detached, contiguous.

    Args:
        model: One of

            * a transformers ``PreTrainedModel`` (plain, compiled, or inside a data-parallel
              wrapper): names and layouts are those ``save_pretrained`` writes, dtypes the model's;
            * a checkpoint folder with ``model.safetensors`` or a sharded checkpoint with its index;
              files are memory-mapped and read one tensor at a time;
            * a mapping from checkpoint name to tensor, or any iterable of such pairs.

    A tensor may be a view of the model's or the file's memory: do not write to it, and do not train
    while iterating. A ``DTensor`` is gathered when its turn comes, so all ranks must iterate alike.
    What the checkpoint splits or fuses is converted one layer at a time, and these copies are the
    only ones made.

    Raises:
        TensorMismatchError: ``model`` or an item of it is none of these.
        UnsupportedModelError: a model with adapters, quantized, offloaded or tensor-parallel.
        CheckpointError: a folder that is missing, incomplete or holds no safetensors.

    What can be seen without iterating is raised by this call, the rest by the iteration.
    """
    if isinstance(model, str | os.PathLike):
        return read_folder(Path(model))
    if isinstance(model, torch.nn.Module):
        return export_model(model)
    if isinstance(model, Mapping):
        return _checked_pairs(model.items())
    if isinstance(model, Iterable) and not isinstance(model, torch.Tensor | bytes):
        return _checked_pairs(model)
    raise TensorMismatchError(
        f"{type(model).__name__} is no model: pass a transformers model, a checkpoint folder or an "
        "iterable of (checkpoint name, tensor)"
    )


def selected_weights(model: object, config: SyncConfig) -> "Iterator[NamedTensor]":
    """:func:`named_weights` less what ``config.ignore`` names, cast as ``config.dtype`` says."""
    dtype = None if config.dtype is None else dtype_from_name(config.dtype)
    for name, tensor in named_weights(model):
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in config.ignore):
            continue
        cast = dtype is not None and tensor.is_floating_point()
        yield name, tensor.to(dtype) if cast else tensor


def _checked_pairs(pairs: Iterable[Any]) -> "Iterator[NamedTensor]":
    for position, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TensorMismatchError(
                f"item {position} of the weights is {type(pair).__name__}; "
                "every item must be a pair (checkpoint name, tensor)"
            )
        name, tensor = pair
        if not isinstance(name, str) or not name:
            raise TensorMismatchError(
                f"item {position} of the weights is named {name!r}; a name is a non-empty string"
            )
        yield name, whole_tensor(name, tensor).contiguous()
