"""The bytes of format version 1. A file that no longer fits means a new version of the format."""

import struct

import pytest
import torch

from tests.codec import crafted, golden_payloads, reference
from vllm_sparse_refit.codec import wire
from vllm_sparse_refit.codec.dtypes import SUPPORTED
from vllm_sparse_refit.codec.payload import DecodeLimits, decode_payload, encode_payload

LIMITS = DecodeLimits(max_payload_bytes=1 << 16, max_decoded_bytes=1 << 16)
CASES = list(golden_payloads.CASES)

pytestmark = pytest.mark.usefixtures("both_implementations")


def golden(case: str, encoding: str) -> bytes:
    return golden_payloads.path(case, encoding).read_bytes()


def encodings(payload: bytes) -> list[int]:
    return [entry.encoding for entry in wire.Prelude.read(payload).sections]


@pytest.mark.parametrize("encoding", ["raw", "zstd"])
@pytest.mark.parametrize("case", CASES)
def test_golden_files_can_be_read(case: str, encoding: str) -> None:
    decoded = decode_payload(golden(case, encoding), LIMITS)
    expected = golden_payloads.CASES[case]
    assert len(decoded) == len(expected)
    for got, delta in zip(decoded, expected, strict=True):
        assert (got.name, got.shape, got.dtype) == (delta.name, delta.shape, delta.dtype)
        assert (got.operation, got.begin, got.end) == (delta.operation, delta.begin, delta.end)
        assert got.prior == delta.prior
        assert list(got.locations) == list(delta.locations)
        assert got.values.dtype == delta.values.dtype
        assert torch.equal(got.values, delta.values)


@pytest.mark.parametrize("case", CASES)
def test_the_encoder_still_makes_the_golden_bytes(case: str) -> None:
    encoded = encode_payload(golden_payloads.CASES[case])
    assert crafted.plain(encoded).hex() == golden(case, "raw").hex()


@pytest.mark.parametrize("case", CASES)
def test_the_golden_bytes_are_those_of_the_format(case: str) -> None:
    assert reference.encode(golden_payloads.CASES[case]).hex() == golden(case, "raw").hex()


def test_golden_files_have_all_that_the_format_has() -> None:
    kinds: set[int] = set()
    rows: list[wire.Row] = []
    for case, deltas in golden_payloads.CASES.items():
        sections = crafted.sections(golden(case, "raw"))
        assert encodings(golden(case, "raw")) == [0] * len(sections)
        kinds |= sections.keys()
        rows += wire.read_table(memoryview(sections.get(0, b"")), len(deltas))
    assert kinds == {0, 1, 2, *range(8, 16), *range(16, 24)}
    assert {row.dtype for row in rows} == set(SUPPORTED)
    assert {str(row.operation) for row in rows} == {"xor", "overwrite", "add"}
    assert len({(row.has_gaps, row.has_nibbles, row.prior is None) for row in rows}) == 8
    assert {*encodings(golden("nibbles", "zstd")), *encodings(golden("planes", "zstd"))} == {0, 1}


def test_golden_files_are_of_version_1() -> None:
    files = sorted(golden_payloads.FOLDER.glob("*.bin"))
    assert len(files) == 2 * len(CASES)
    for file in files:
        assert struct.unpack_from("<4sH", file.read_bytes()) == (b"VSRP", 1)
