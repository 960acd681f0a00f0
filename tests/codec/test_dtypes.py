import pytest
import torch

from vllm_sparse_refit.codec.dtypes import (
    SUPPORTED,
    bits_dtype,
    bits_view,
    dtype_from_name,
    dtype_name,
)
from vllm_sparse_refit.errors import PayloadError


@pytest.mark.parametrize("dtype", SUPPORTED)
def test_a_name_leads_back_to_its_dtype(dtype: torch.dtype) -> None:
    assert dtype_from_name(dtype_name(dtype)) is dtype


def test_names_are_torchs() -> None:
    assert dtype_name(torch.bfloat16) == "bfloat16"
    assert dtype_name(torch.float8_e4m3fn) == "float8_e4m3fn"


@pytest.mark.parametrize("name", ["", "complex64", "torch.bfloat16", "float", "__class__"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(PayloadError, match="not supported"):
        dtype_from_name(name)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(PayloadError, match="complex64"):
        bits_view(torch.zeros(2, dtype=torch.complex64))


@pytest.mark.parametrize("dtype", SUPPORTED)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 4)])
def test_the_view_shares_storage_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape, dtype=dtype)
    bits = bits_view(tensor)
    assert bits.shape == tensor.shape
    assert bits.dtype == bits_dtype(dtype)
    assert bits.element_size() == tensor.element_size()
    assert bits.data_ptr() == tensor.data_ptr()


def test_the_view_keeps_strides_and_leaves_autograd() -> None:
    parameter = torch.nn.Parameter(torch.ones(3, 4))
    bits = bits_view(parameter.t())
    assert bits.stride() == (1, 4)
    assert not bits.requires_grad
