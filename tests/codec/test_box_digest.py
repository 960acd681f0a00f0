"""Digests of boxes: of position and bits, in any order, of any strides."""

import pytest
import torch

from vllm_sparse_refit.codec import digest as digest_module
from vllm_sparse_refit.codec.digest import BitsDigest, box_digest


def _digest(bits: torch.Tensor) -> BitsDigest:
    return box_digest(bits, int(bits.storage_offset()), bits.shape, bits.stride())


def _sum(*digests: BitsDigest) -> BitsDigest:
    return sum(digests, BitsDigest())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_parts_add_up_to_the_whole(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    bits = torch.randint(0, 100, (6, 10), dtype=dtype)
    whole = _digest(bits)
    parts = [bits[:, :3], bits[:2, 3:], bits[2:, 3:].t(), bits[0:0]]
    assert _sum(*map(_digest, parts)) == whole
    monkeypatch.setattr(digest_module, "_CHUNK", 7)
    assert _sum(*map(_digest, parts)) == _digest(bits) == whole


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_a_device_finds_what_the_cpu_does(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What devices run, here on the CPU."""
    signed = dtype.is_signed
    bits = torch.randint(-100 if signed else 0, 100, (6, 10), dtype=dtype)
    for size in (1 << 20, 7):
        monkeypatch.setattr(digest_module, "_CHUNK", size)
        for box in (bits, bits[:, :3], bits[2:, 3:].t(), bits[1:2], bits[0:0], bits[1, 2]):
            offset = int(box.storage_offset())
            halves = digest_module._box_on_device(box.reshape(-1), offset, box.shape, box.stride())
            assert BitsDigest.of_halves(halves) == _digest(box)


def test_position_and_bits_count() -> None:
    bits = torch.arange(24, dtype=torch.int16).reshape(4, 6)
    digest = _digest(bits)
    for change in ((0, 0), (3, 5)):
        other = bits.clone()
        other[change] ^= 1
        assert _digest(other) != digest
    swapped = bits.clone()
    swapped[0, 0], swapped[0, 1] = bits[0, 1], bits[0, 0]
    assert _digest(swapped) != digest
    assert box_digest(bits, 1, bits.shape, bits.stride()) != digest
    assert _digest(torch.tensor(5)) != _digest(torch.tensor(6))


def test_a_digest_is_pinned() -> None:
    assert _digest(torch.tensor([1, -2, 3], dtype=torch.int16)).hex == (
        "cc72ecbed7d31a8d936d76d24c22c045"
    )
