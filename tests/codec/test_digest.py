"""The digest: sums of parts, changes, and one result for all implementations."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_sparse_refit.codec import digest as digest_module
from vllm_sparse_refit.codec.digest import BitsDigest, digest_on_device

DTYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)
MASK = (1 << 64) - 1


def mixed(x: int) -> int:
    for _ in range(2):
        x = (x ^ x >> 32) * 0xD6E8FEB86659FD93 & MASK
    return x ^ x >> 32


def by_hand(bits: torch.Tensor, locations: list[int]) -> BitsDigest:
    low = high = 0
    for where, signed in zip(locations, bits.tolist(), strict=True):
        what = signed % (1 << 8 * bits.itemsize)
        a = where * 0x9E3779B97F4A7C15 + what * 0xC2B2AE3D27D4EB4F + 0x165667B19E3779F9
        b = where * 0x85EBCA77C2B2AE63 + what * 0xFF51AFD7ED558CCD + 0x27D4EB2F165667C5
        low, high = low + mixed(a & MASK), high + mixed(b & MASK)
    return BitsDigest(low & MASK, high & MASK)


def random_bits(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype)


@pytest.mark.usefixtures("both_implementations")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("begin", [0, 5, (1 << 40) + 3])
def test_a_run_is_what_a_loop_finds(dtype: torch.dtype, begin: int) -> None:
    bits = random_bits(301, dtype)
    run = range(begin, begin + 301)
    expected = by_hand(bits, list(run))
    assert BitsDigest.of(bits, run) == expected
    assert BitsDigest.of(bits, torch.arange(run.start, run.stop)) == expected


@pytest.mark.usefixtures("both_implementations")
def test_a_run_longer_than_a_block() -> None:
    bits = random_bits((1 << 18) + 77, torch.uint8)
    halves = [BitsDigest.of(bits[a:b], range(a, b)) for a, b in itertools.pairwise([0, 9, 262221])]
    assert BitsDigest.of(bits, range(262221)) == halves[0] + halves[1]


@given(count=st.integers(0, 40), seed=st.integers(0, 9), data=st.data())
def test_a_change_takes_the_old_away_and_adds_the_new(
    count: int, seed: int, data: st.DataObject
) -> None:
    old = random_bits(count, torch.int16, seed)
    where = data.draw(st.lists(st.integers(0, max(count - 1, 0)), unique=True, max_size=count))
    locations = torch.tensor(sorted(where), dtype=torch.int32)
    new = old.clone()
    new[locations.long()] ^= 9
    moved = (
        BitsDigest.of(old, range(count))
        - BitsDigest.of(old[locations.long()], locations)
        + BitsDigest.of(new[locations.long()], locations)
    )
    assert moved == BitsDigest.of(new, range(count))
    assert (moved == BitsDigest.of(old, range(count))) == (not where)


@pytest.mark.parametrize("bits_dtype", [*DTYPES, torch.int8, torch.uint16, torch.uint64])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("begin", [0, (1 << 31) - 301, (1 << 40) + 3, (1 << 63) - 301])
@pytest.mark.parametrize("count", [0, 1, 300])
def test_what_devices_run_is_what_a_loop_finds(
    bits_dtype: torch.dtype, dtype: torch.dtype, begin: int, count: int
) -> None:
    """Here on the CPU: the same operations, with signs that must not be carried along."""
    if dtype is torch.int32 and begin >= 1 << 31:
        return
    bits = random_bits(count, bits_dtype)
    locations = torch.arange(begin, begin + count, dtype=dtype)
    halves = digest_on_device(bits, locations)
    assert halves.dtype == torch.int64
    assert halves.shape == (2,)
    digest = BitsDigest.of_halves(halves)
    # torch has no arithmetic for all of these; bits are bits.
    signed = bits.view(
        {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[bits.itemsize]
    )
    assert digest == by_hand(signed, locations.tolist())
    assert digest == BitsDigest.of(bits, locations)


def test_what_devices_run_in_pieces_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    bits, locations = random_bits(100, torch.int16), torch.arange(7, 107)
    whole = digest_on_device(bits, locations)
    monkeypatch.setattr(digest_module, "_CHUNK", 9)
    assert torch.equal(digest_on_device(bits, locations), whole)
    parts = [digest_on_device(bits[a:b], locations[a:b]) for a, b in ((0, 40), (40, 100))]
    assert torch.equal(parts[0] + parts[1], whole)
    assert BitsDigest.of_halves(whole) == BitsDigest.of(bits, range(7, 107))


def test_values_that_change_places_show() -> None:
    assert BitsDigest.of(torch.tensor([1, 2]), range(2)) != BitsDigest.of(
        torch.tensor([2, 1]), range(2)
    )


def test_hex_leads_back() -> None:
    digest = BitsDigest.of(random_bits(10, torch.int16), range(10))
    assert BitsDigest.from_hex(digest.hex) == digest
    assert len(digest.hex) == len(BitsDigest().hex) == 32
    with pytest.raises(ValueError, match="32 hex digits"):
        BitsDigest.from_hex("12")
