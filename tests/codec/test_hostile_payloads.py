"""Payloads that an attacker or a broken machine may send: each is refused, and cheaply."""

import struct
import tracemalloc

import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codec.crafted import payload, row, seal
from vllm_sparse_refit.codec import wire
from vllm_sparse_refit.codec.payload import DecodeLimits, decode_payload, payload_decoded_bytes
from vllm_sparse_refit.errors import ChecksumError, PayloadError

MIB = 1 << 20
LIMITS = DecodeLimits(max_payload_bytes=MIB, max_decoded_bytes=MIB)
VALID = [pytest.param(payload(), id="raw"), pytest.param(payload(encoding=1), id="zstd")]


def refused(body: bytes, message: str, limits: DecodeLimits = LIMITS) -> None:
    with pytest.raises(PayloadError, match=message):
        decode_payload(body, limits)


def refused_cheaply(body: bytes, message: str) -> None:
    tracemalloc.start()
    try:
        refused(body, message)
        assert tracemalloc.get_traced_memory()[1] < 2 * MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("body", VALID)
def test_the_payload_these_tests_break_is_valid(body: bytes) -> None:
    [delta] = decode_payload(body, LIMITS)
    assert isinstance(delta.locations, torch.Tensor)
    assert delta.locations.tolist() == [1, 3, 6]
    assert delta.values.tolist() == [1, 2, -0x8000 | 3]


@pytest.mark.parametrize("body", VALID)
def test_every_truncation_is_refused(body: bytes) -> None:
    for size in range(len(body)):
        refused(body[:size], "cut short")


@pytest.mark.parametrize("body", VALID)
def test_appended_bytes_are_refused(body: bytes) -> None:
    refused(body + b"\x00", "run together")
    refused(body + body, "run together")


@pytest.mark.parametrize("body", VALID)
def test_every_flipped_bit_is_refused(body: bytes) -> None:
    for bit in range(8 * len(body)):
        flipped = bytearray(body)
        flipped[bit // 8] ^= 1 << bit % 8
        # Magic, version, encoding and stored size are read before the checksum is.
        early = bit // 8 < 8 or 56 <= bit // 8 < 64
        with pytest.raises(PayloadError if early else ChecksumError):
            decode_payload(flipped, LIMITS)


def decodes_or_is_refused(body: bytes) -> None:
    try:
        deltas = decode_payload(body, LIMITS)
    except PayloadError:
        return
    for delta in deltas:
        where = torch.as_tensor(list(delta.locations), dtype=torch.int64)
        assert delta.begin <= int(where.min())
        assert int(where.max()) < delta.end
        assert (where.diff() > 0).all()
        assert delta.values.shape == where.shape


@pytest.mark.parametrize("body", VALID)
def test_flipped_bits_under_a_good_checksum_do_no_harm(body: bytes) -> None:
    for bit in range(8 * len(body)):
        flipped = bytearray(body)
        flipped[bit // 8] ^= 1 << bit % 8
        decodes_or_is_refused(seal(bytes(flipped)))


@settings(deadline=None, max_examples=300)
@given(
    changes=st.lists(
        st.tuples(st.integers(24, 200), st.binary(min_size=1, max_size=8)), min_size=1
    ),
    encoding=st.sampled_from([0, 1]),
)
def test_rewritten_bytes_under_a_good_checksum_do_no_harm(
    changes: list[tuple[int, bytes]], encoding: int
) -> None:
    body = bytearray(payload(row() + row(b"v"), b"\2\3\2\3", bytes(12), deltas=2, decoded=36))
    if encoding:
        body = bytearray(payload(encoding=1))
    for anywhere, new in changes:
        at = anywhere % len(body)
        body[at : at + len(new)] = new[: len(body) - at]
    decodes_or_is_refused(seal(bytes(body)))


@given(st.binary(max_size=200))
def test_noise_is_refused(body: bytes) -> None:
    refused(body, "payload")


def test_an_unknown_version_is_named() -> None:
    refused(payload(version=2), "version 2 .* reads 1")
    with pytest.raises(PayloadError, match="version 2"):
        payload_decoded_bytes(payload(version=2))


def test_another_kind_of_file_is_named() -> None:
    refused(seal(b"PK\x03\x04" + payload()[4:]), "begins with b'PK")


def test_an_unknown_body_encoding_is_named() -> None:
    body = payload()
    refused(seal(body[:6] + b"\x02" + body[7:]), "body encoding 2")
    refused(seal(body[:7] + b"\x01" + body[8:]), "reserved byte 1")


def test_sizes_over_the_limits_are_refused() -> None:
    body = payload()
    refused(body, "limit is 10;", DecodeLimits(10, MIB))
    held = payload_decoded_bytes(body)
    refused(body, f"limit is {held - 1};", DecodeLimits(MIB, held - 1))
    assert decode_payload(body, DecodeLimits(len(body), held))


def test_a_huge_declared_size_allocates_nothing() -> None:
    for huge in (2 * MIB, 1 << 40, 2**64 - 100):
        refused_cheaply(payload(decoded=huge), "raise max_decoded_bytes")
        refused_cheaply(seal_sizes(locations=huge), "decodes to no more than")
        refused_cheaply(seal_sizes(values=huge), "decodes to no more than")


def seal_sizes(**sizes: int) -> bytes:
    body = bytearray(payload())
    at = {"locations": 32, "values": 40}
    for name, size in sizes.items():
        struct.pack_into("<Q", body, at[name], size)
    return seal(bytes(body))


def bomb(**options: bool) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(bytes(64 * MIB))  # type: ignore[arg-type]


def test_a_zip_bomb_is_not_inflated() -> None:
    refused_cheaply(payload(encoding=1, stored=bomb()), "frame declares 67108864 bytes")


def test_a_zip_bomb_that_hides_its_size_is_not_inflated() -> None:
    body = payload(encoding=1, stored=bomb(write_content_size=False))
    refused_cheaply(body, "frame declares")


def test_a_zip_bomb_that_lies_about_its_size_is_not_inflated() -> None:
    size = len(row()) + 2 + 6
    frame = bytearray(bomb())
    assert struct.unpack_from("<I", frame, 6) == (64 * MIB,)
    struct.pack_into("<I", frame, 6, size)
    assert zstandard.get_frame_parameters(bytes(frame)).content_size == size
    refused_cheaply(payload(encoding=1, stored=bytes(frame)), "cannot be decompressed")


def framed(body: bytes, window_log: int) -> bytes:
    """A zstd frame of one raw block that declares its content's size and a window."""
    header = struct.pack("<IBBI", 0xFD2FB528, 0x80, (window_log - 10) << 3, len(body))
    return header + struct.pack("<I", len(body) << 3 | 1)[:3] + body


def test_a_huge_zstd_window_is_refused() -> None:
    body = row() + b"\2\3" + bytes(6)
    assert decode_payload(payload(encoding=1, stored=framed(body, 27)), LIMITS)
    refused_cheaply(payload(encoding=1, stored=framed(body, 28)), r"\(window 268435456\)")


def test_a_truncated_or_continued_zstd_frame_is_refused() -> None:
    frame = payload(encoding=1)[64:]
    refused(payload(encoding=1, stored=frame[:-1]), "cannot be decompressed")
    refused(payload(encoding=1, stored=frame + b"\0"), "cannot be decompressed")
    refused(payload(encoding=1, stored=frame + frame), "cannot be decompressed")
    refused(payload(encoding=1, stored=b""), "cannot be decompressed")
    skippable = struct.pack("<II", 0x184D2A50, len(row()) + 8) + bytes(len(row()) + 8)
    refused(payload(encoding=1, stored=skippable), "decompress|the body has|frame declares")


def test_a_raw_body_of_another_size_is_refused() -> None:
    refused(payload(stored=row() + b"\2\3" + bytes(7)), "body has .* should have")


@pytest.mark.parametrize("deltas", [0, 2, 3, wire.MAX_DELTAS])
def test_a_wrong_number_of_deltas_is_refused(deltas: int) -> None:
    refused(payload(deltas=deltas), "bytes after its last delta|ends within delta 1")


def test_too_many_deltas_are_refused() -> None:
    refused(payload(deltas=wire.MAX_DELTAS + 1), "65537 deltas")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (row(b"x" * 1025), "delta 0 has a name of 1025 bytes"),
        (row(b""), "delta 0 has a name of 0 bytes"),
        (row(name_bytes=2), "ends within delta 0"),
        (row()[:-1], "ends within delta 0"),
        (row()[:20], "ends within delta 0"),
        (row() + b"\0", "1 bytes after"),
        (row(b"\xff"), "name of delta 0 is not UTF-8"),
        (row(b"\xed\xa0\x80"), "name of delta 0 is not UTF-8"),
        (row(dtype=0), "'w' has the unknown dtype code 0"),
        (row(dtype=18), "'w' has the unknown dtype code 18"),
        (row(operation=0), "'w' has the unknown operation code 0"),
        (row(operation=3), "'w' has the unknown operation code 3"),
        (row(shape=(1,) * 33), "delta 0 has 33 dimensions"),
        (row(shape=(2**64 - 1,) * 32), "'w' has a shape of 2\\*\\*63"),
        (row(shape=(2**32, 2**31)), "'w' has a shape of 2\\*\\*63"),
        (row(shape=(2**64 - 1, 0)), "'w' has a shape of 2\\*\\*63"),
        (row(shape=(2, 0)), "'w' speaks for \\[0, 8\\) of 0"),
        (row(shape=(7,)), "'w' speaks for \\[0, 8\\) of 7"),
        (row(begin=8), "'w' speaks for \\[8, 8\\)"),
        (row(end=2**64 - 1), "'w' speaks for"),
        (row(begin=2), "'w' has a location outside"),
        (row(first=8), "'w' has a location outside"),
        (row(first=2**64 - 1), "'w' has a location outside"),
        (row(first=6, width=0), "'w' has a location outside"),
        (row(count=0), "'w' has 0 elements"),
        (row(count=9), "'w' has 9 elements in a span of 8"),
        (row(count=2**64 - 1), "'w' has 18446744073709551615 elements"),
        (row(width=3), "'w' has gaps of 3 bytes"),
        (row(width=255), "'w' has gaps of 255 bytes"),
        (row(width=8), "'w' has gaps of 8 bytes, wider"),
    ],
)
def test_a_hostile_row_is_refused(table: bytes, message: str) -> None:
    refused_cheaply(payload(table), message)


def test_counts_that_do_not_match_the_sizes_are_refused() -> None:
    refused(payload(row(count=2)), "counts of its deltas need")
    refused(payload(row(count=4)), "counts of its deltas need")
    refused(payload(row(width=2)), "counts of its deltas need")
    refused(payload(row(dtype=12)), "counts of its deltas need")
    refused(payload(locations=b"\1\1\1"), "counts of its deltas need")
    refused(payload(decoded=17), "counts of its deltas need")
    refused(payload(decoded=19), "counts of its deltas need")


def test_a_count_of_billions_allocates_nothing() -> None:
    many = row(shape=(2**40,), end=2**40, count=2**39)
    refused_cheaply(payload(many), "counts of its deltas need")


def test_a_location_that_comes_twice_is_refused() -> None:
    refused(payload(locations=b"\0\3"), "'w' are not strictly ascending")
    refused(payload(locations=b"\3\0"), "'w' are not strictly ascending")


def test_a_location_out_of_its_span_is_refused() -> None:
    refused(payload(locations=b"\2\5"), "location 8 of 'w' is outside its span \\[0, 8\\)")
    refused(payload(row(end=6), b"\2\3"), "location 6 of 'w' is outside its span \\[0, 6\\)")


@pytest.mark.parametrize(("width", "elements"), [(4, 8), (8, 2**40)])
def test_gaps_whose_sum_wraps_around_are_refused(width: int, elements: int) -> None:
    back = struct.pack("<Q", 2**64 - 1)[:width]  # One step back, when the sum wraps.
    gaps = (3).to_bytes(width, "little"), back
    planes = bytes(gap[plane] for plane in range(width) for gap in gaps)
    table = row(shape=(elements,), width=width)
    decoded = 3 * (2 + (4 if elements == 8 else 8))
    refused(payload(table, planes, decoded=decoded), "'w' are not strictly ascending")


def two(second: bytes) -> bytes:
    return payload(row() + second, b"\2\3\2\3", bytes(12), deltas=2, decoded=36)


def test_deltas_that_overlap_are_refused() -> None:
    refused(two(row()), "two deltas of 'w' both speak for element 0")
    assert len(decode_payload(two(row(b"v")), LIMITS)) == 2


def test_deltas_of_one_tensor_that_disagree_are_refused() -> None:
    refused(two(row(dtype=10)), "'w' differ in shape or dtype")
    refused(two(row(shape=(2, 4))), "'w' differ in shape or dtype")


def test_deltas_of_one_tensor_may_share_a_payload() -> None:
    table = row(shape=(16,)) + row(shape=(16,), begin=8, end=16, first=9)
    body = payload(table, b"\2\3\2\3", bytes(12), deltas=2, decoded=36)
    assert [delta.begin for delta in decode_payload(body, LIMITS)] == [0, 8]
