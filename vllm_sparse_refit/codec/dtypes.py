"""The dtypes a delta may have, their names, and integer views of their bits.

Everything downstream compares, moves and writes bits, never numbers: ``-0.0 == 0.0`` and
``nan != nan`` would both make a delta wrong.
"""

from typing import Final

import torch

from vllm_sparse_refit.errors import PayloadError

SUPPORTED: Final[tuple[torch.dtype, ...]] = (
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
)

_NAMES: Final = {dtype: str(dtype).removeprefix("torch.") for dtype in SUPPORTED}
_DTYPES: Final = {name: dtype for dtype, name in _NAMES.items()}
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def dtype_name(dtype: torch.dtype) -> str:
    """The name used between processes, such as ``"bfloat16"``.

    Raises:
        PayloadError: the dtype is not supported.
    """
    if (name := _NAMES.get(dtype)) is None:
        raise PayloadError(f"dtype {dtype} is not supported; supported are {sorted(_DTYPES)}")
    return name


def dtype_from_name(name: str) -> torch.dtype:
    """The dtype of that name.

    Raises:
        PayloadError: the name is not that of a supported dtype.
    """
    if (dtype := _DTYPES.get(name)) is None:
        raise PayloadError(f"dtype {name!r} is not supported; supported are {sorted(_DTYPES)}")
    return dtype


def bits_dtype(dtype: torch.dtype) -> torch.dtype:
    """The integer dtype of the same width: uint8, int16, int32 or int64.

    Raises:
        PayloadError: the dtype is not supported.
    """
    dtype_name(dtype)
    return _BITS[dtype.itemsize]


def bits_view(tensor: torch.Tensor) -> torch.Tensor:
    """An integer view of a tensor's bits: same storage, same shape, any strides, outside autograd.

    Raises:
        PayloadError: the tensor's dtype is not supported.
    """
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor.view(bits_dtype(tensor.dtype))
