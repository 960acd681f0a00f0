"""A second encoder, written from the format's description: slow, plain, and without compression."""

import itertools
import math
import struct
from collections.abc import Sequence

import torch

from tests.codec import crafted
from vllm_sparse_refit.codec.delta import TensorDelta

DTYPES = [
    "",  # codes begin at 1
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
]
OPERATIONS = ["", "xor", "overwrite", "add"]


def encode(deltas: Sequence[TensorDelta]) -> bytes:
    """The payload of these deltas, every section stored as it is."""
    rows, gaps, nibbles = b"", b"", b""
    wide: list[tuple[int, int]] = []
    codes: list[tuple[int, int]] = []  # code and width
    tensors = 0
    for delta in deltas:
        width = delta.values.element_size()
        locations = [int(location) for location in delta.locations]
        steps = _steps(delta, locations)
        gaps += bytes(min(step, 255) for step in steps)
        wide += [(step - 255, 8) for step in steps if step >= 255]
        of_delta = [_code(int(value), delta.operation, 256**width) for value in delta.values]
        escaped = [code for code in of_delta if code >= 15]
        has_nibbles = delta.operation != "overwrite" and 4 * len(escaped) <= len(of_delta)
        if has_nibbles:
            nibbles += _nibbles(of_delta)
        codes += [(code, width) for code in (escaped if has_nibbles else of_delta)]
        rows += crafted.row(
            delta.name.encode(),
            delta.shape,
            dtype=DTYPES.index(str(delta.dtype).removeprefix("torch.")),
            operation=OPERATIONS.index(delta.operation),
            begin=delta.begin,
            end=delta.end,
            first=locations[0],
            count=len(locations),
            flags=bool(steps) + 2 * has_nibbles,
            prior=None if delta.prior is None else (delta.prior.low, delta.prior.high),
        )
        location_bytes = (4 if math.prod(delta.shape) <= 2**31 else 8) if steps else 0
        tensors += len(locations) * (location_bytes + width)
    return crafted.payload(
        rows, gaps, nibbles, _planes(wide), _planes(codes), deltas=len(deltas), tensors=tensors
    )


def _steps(delta: TensorDelta, locations: list[int]) -> list[int]:
    if not isinstance(delta.locations, torch.Tensor):
        return []
    return [after - before - 1 for before, after in itertools.pairwise(locations)]


def _code(value: int, operation: str, modulus: int) -> int:
    """Of a signed or unsigned value, whose bits are those of its remainder."""
    unsigned = value % modulus
    if operation != "add":
        return unsigned
    signed = unsigned - modulus if unsigned >= modulus // 2 else unsigned
    return 2 * signed if signed >= 0 else -2 * signed - 1


def _nibbles(codes: list[int]) -> bytes:
    four_bits = [min(code, 15) for code in codes] + [0]
    return bytes(four_bits[i] | four_bits[i + 1] << 4 for i in range(0, len(codes), 2))


def _planes(numbers: list[tuple[int, int]]) -> tuple[bytes, ...]:
    packed = [struct.pack("<Q", number)[:width] for number, width in numbers]
    planes = [bytes(n[plane] for n in packed if len(n) > plane) for plane in range(8)]
    # One that is left out is empty here.
    return (planes[0], *(plane if any(plane) else b"" for plane in planes[1:]))
