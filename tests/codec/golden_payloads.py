"""The deltas of the golden files, which pin the bytes of format version 1.

``NAME.raw.bin`` has every section stored as it is; ``NAME.zstd.bin`` is what the encoder made of the
same deltas, with the zstd of its day. To add files for new cases (existing ones are never touched):

    python -m tests.codec.golden_payloads
"""

from pathlib import Path

import torch

from tests.codec import reference
from vllm_sparse_refit.codec.delta import SparseOperation, TensorDelta
from vllm_sparse_refit.codec.digest import BitsDigest
from vllm_sparse_refit.codec.dtypes import SUPPORTED, bits_dtype
from vllm_sparse_refit.codec.payload import encode_payload

FOLDER = Path(__file__).parent / "golden"
XOR, OVERWRITE, ADD = SparseOperation.XOR, SparseOperation.OVERWRITE, SparseOperation.ADD


def _delta(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    operation: SparseOperation,
    span: tuple[int, int],
    locations: list[int] | range,
    values: list[int],
    prior: BitsDigest | None = None,
) -> TensorDelta:
    large = torch.Size(shape).numel() > 2**31
    return TensorDelta(
        name=name,
        shape=shape,
        dtype=dtype,
        operation=operation,
        begin=span[0],
        end=span[1],
        locations=locations
        if isinstance(locations, range)
        else torch.tensor(locations, dtype=torch.int64 if large else torch.int32),
        values=torch.tensor(values, dtype=bits_dtype(dtype)),
        prior=prior,
    )


def _operations() -> list[TensorDelta]:
    """Each operation, with gaps and without, in several deltas of two tensors."""
    where = [70001, 70003, 70300, 139999]
    bits = [1, 2, -0x8000, 0x0102]
    deltas = [
        _delta(
            f"{operation}.weight",
            (3, 70000),
            torch.bfloat16,
            operation,
            (70000, 140000),
            where,
            bits,
        )
        for operation in (XOR, OVERWRITE, ADD)
    ]
    rest = range(140000, 140004)
    deltas += [
        _delta(
            f"{operation}.weight",
            (3, 70000),
            torch.bfloat16,
            operation,
            (140000, 210000),
            rest,
            bits,
        )
        for operation in (XOR, OVERWRITE, ADD)
    ]
    return [
        *deltas,
        _delta("b", (), torch.float32, OVERWRITE, (0, 1), range(1), [-0x80000000]),
        _delta("c", (1,), torch.float64, ADD, (0, 1), range(1), [0x3FF123456789ABCD]),
    ]


def _wide_gaps() -> list[TensorDelta]:
    """Gaps of 254, 255 and 256, gaps of up to 2**62, and tensors at the ends of both widths."""
    near = [3, 258, 514, 771, 772, 2**31 - 1]
    far = [5, 2**32 + 5, 2**32 + 6, 2**32 + 262, 2**40, 2**62 + 2**40 + 1, 2**63 - 3, 2**63 - 2]
    ones = [1] * 8
    return [
        _delta("near", (2**16, 2**15), torch.uint8, XOR, (0, 2**31), near, ones[:6]),
        _delta("far", (2**63 - 1,), torch.float16, ADD, (5, 2**63 - 1), far, ones),
        _delta("none", (2**63 - 1,), torch.int8, XOR, (2**62, 2**62 + 9), [2**62], [7]),
    ]


def _nibbles() -> list[TensorDelta]:
    """An odd and an even number of them, with and without escapes, and one escape too many."""
    steps = [0, -1, 1, -2, 2, 7, -7, -8, 8, 127, -128, 1, 1, 1, 1, 1, 1, 1, 1]
    bits = [0, 14, 15, 16, 255, 0x4000, -0x8000, *range(1, 15), *range(1, 8)]
    at = [7 * i for i in range(300)]
    return [
        _delta(
            "add", (500,), torch.float8_e4m3fn, ADD, (0, 500), at[:19], [s & 255 for s in steps]
        ),
        _delta("xor", (40, 50), torch.bfloat16, XOR, (0, 2000), at[:28], bits),
        _delta("steps", (300, 7), torch.bfloat16, ADD, (0, 2100), at, [1, -1, 2] * 100),
        _delta("escapes", (9,), torch.float32, XOR, (0, 9), range(9), [2**31 - 1] * 3 + [1] * 6),
    ]


def _planes() -> list[TensorDelta]:
    """Every dtype, so that numbers of all widths share the planes, and some planes are zeros."""
    return [
        _delta(
            f"{number}.{dtype}",
            (4, 9),
            dtype,
            OVERWRITE,
            (0, 36),
            range(number, number + 9),
            [(number << 8 * dtype.itemsize - 8) + i * 17 for i in range(9)],
        )
        for number, dtype in enumerate(SUPPORTED)
    ]


def _priors() -> list[TensorDelta]:
    """Digests of the old bits, with and without gaps and nibbles, and one delta without a digest."""
    digest = BitsDigest(0x0123456789ABCDEF, 0xFEDCBA9876543210)
    large = [0x1234, -0x8000, 0x0FED]
    return [
        _delta("gaps", (2, 50), torch.bfloat16, XOR, (0, 100), [1, 9, 99], large, digest),
        _delta("run", (50, 2), torch.bfloat16, ADD, (50, 100), range(51, 54), large, digest),
        _delta("both", (100,), torch.float32, ADD, (0, 100), [1, 9, 99], [1, -1, 2], digest),
        _delta("nibbles", (), torch.uint8, XOR, (0, 1), range(1), [1], BitsDigest(2**64 - 1, 0)),
        _delta("zero", (4,), torch.float64, ADD, (0, 4), [0, 3], [1, 1], BitsDigest()),
        _delta("none", (4,), torch.float64, ADD, (0, 4), [0, 3], [1, 1]),
    ]


CASES = {
    "operations": _operations(),
    "wide_gaps": _wide_gaps(),
    "nibbles": _nibbles(),
    "planes": _planes(),
    "priors": _priors(),
    "empty": [],
}


def path(case: str, encoding: str) -> Path:
    return FOLDER / f"{case}.{encoding}.bin"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for case, deltas in CASES.items():
        for encoding, content in (
            ("raw", reference.encode(deltas)),
            ("zstd", encode_payload(deltas)),
        ):
            try:
                with path(case, encoding).open("xb") as file:
                    file.write(content)
            except FileExistsError:
                print(f"{path(case, encoding)} stays as it is")


if __name__ == "__main__":
    main()
