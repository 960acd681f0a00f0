"""Which elements a tensor views, and what bits they hold."""

from typing import Any

import torch
import xxhash

from vllm_sparse_refit.codec.dtypes import bits_view

_CHUNK = 1 << 24

ViewKey = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]


def storage_key(tensor: torch.Tensor) -> int:
    """Identifies the storage that ``tensor`` views, as long as that storage lives."""
    return tensor.untyped_storage().data_ptr()


def storage_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of ``tensor`` as a flat integer view, elements of the tensor's width."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return bits_view(tensor.detach()).as_strided((elements,), (1,), 0)


def view_key(tensor: torch.Tensor) -> ViewKey:
    """Identifies exactly the elements that ``tensor`` views, as long as its storage lives."""
    return (
        storage_key(tensor),
        int(tensor.storage_offset()),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.dtype,
    )


def tensor_digest(tensor: torch.Tensor) -> bytes:
    """xxh3-128 over the bits of ``tensor`` in row-major order, read chunk by chunk."""
    digest = xxhash.xxh3_128()
    if tensor.is_meta or tensor.numel() == 0:
        return digest.digest()
    flat = bits_view(tensor.detach()).reshape(-1)
    for start in range(0, flat.numel(), _CHUNK):
        chunk: Any = flat[start : start + _CHUNK].cpu().numpy()
        digest.update(chunk)
    return digest.digest()
