"""Payloads that an attacker or a broken machine may send: each is refused, and cheaply.

Here: damage, prelude, directory and zstd frames. Every payload goes to each implementation of the
codec's loops, which must agree in all they do.
"""

import struct
from dataclasses import replace

import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codec.crafted import (
    CODES,
    ENTRY_BYTES,
    GAPS,
    HEAD_BYTES,
    NIBBLES,
    TABLE,
    Entry,
    assemble,
    entries,
    payload,
    rich,
    row,
    seal,
)
from tests.codec.refusals import LIMITS, MIB, accepted, decode, refused
from vllm_sparse_refit.codec.digest import BitsDigest
from vllm_sparse_refit.codec.payload import (
    DecodeLimits,
    decode_payload,
    encode_payload,
    payload_decoded_bytes,
)
from vllm_sparse_refit.errors import ChecksumError, PayloadError

VALID = [
    pytest.param(payload(), id="small"),
    pytest.param(payload(encoding=1), id="small, zstd"),
    pytest.param(rich(), id="rich"),
    pytest.param(rich(1), id="rich, zstd"),
]
DECODED = len(row()) + 18


def test_the_small_payload_these_tests_break_is_valid() -> None:
    for encoding in (0, 1):
        [delta] = accepted(payload(encoding=encoding))
        assert isinstance(delta.locations, torch.Tensor)
        assert delta.locations.tolist() == [1, 3, 6]
        assert delta.values.tolist() == [1, 2, -0x8000 | 3]


def test_the_rich_payload_these_tests_break_is_valid() -> None:
    for encoding in (0, 1):
        a, b, c = accepted(rich(encoding))
        assert [delta.operation for delta in (a, b, c)] == ["add", "xor", "overwrite"]
        assert isinstance(a.locations, torch.Tensor)
        assert a.locations.tolist() == [5, 306, 307, 2**40 + 401]
        assert a.values.tolist() == [1, -1, 0, 100]
        assert [delta.prior for delta in (a, b, c)] == [BitsDigest(2**64 - 2, 3), None, None]
        assert (b.locations, b.values.tolist()) == (range(2, 4), [0x01020304, 5])
        assert (c.locations, c.values.tolist()) == (range(0, 1), [1])


# --- damage


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
    # Magic, version, the number and the size of sections and the directory are read before the
    # checksum is.
    sections_at = HEAD_BYTES + ENTRY_BYTES * struct.unpack_from("<I", body, 28)[0]
    early = {*range(8), *range(28, 32), *range(40, sections_at)}
    for bit in range(8 * len(body)):
        flipped = bytearray(body)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PayloadError if bit // 8 in early else ChecksumError):
            decode_payload(flipped, LIMITS)


def decodes_or_is_refused(body: bytes) -> None:
    outcome = decode(body)
    if isinstance(outcome, PayloadError):
        return
    for delta in outcome:
        where = torch.as_tensor(list(delta.locations), dtype=torch.int64)
        assert delta.begin <= int(where.min())
        assert int(where.max()) < delta.end
        assert (where.diff() > 0).all()
        assert delta.values.shape == where.shape
        assert delta.prior is None or delta.operation != "overwrite"
    # Whatever is accepted is as good as any other delta.
    again = accepted(encode_payload(outcome))
    assert [delta.values.tolist() for delta in again] == [d.values.tolist() for d in outcome]
    assert [list(delta.locations) for delta in again] == [list(d.locations) for d in outcome]
    assert [delta.prior for delta in again] == [delta.prior for delta in outcome]


@pytest.mark.parametrize("body", VALID)
def test_flipped_bits_under_a_good_checksum_do_no_harm(body: bytes) -> None:
    # In each byte of the small ones every bit, of the others every third.
    for bit in range(0, 8 * len(body), 1 if len(body) < 300 else 3):
        flipped = bytearray(body)
        flipped[bit // 8] ^= 1 << bit % 8
        decodes_or_is_refused(seal(bytes(flipped)))


@settings(deadline=None, max_examples=300)
@given(
    changes=st.lists(
        st.tuples(st.integers(24, 1000), st.binary(min_size=1, max_size=8)), min_size=1
    ),
    body=st.sampled_from([payload(), payload(encoding=1), rich(), rich(1)]),
)
def test_rewritten_bytes_under_a_good_checksum_do_no_harm(
    changes: list[tuple[int, bytes]], body: bytes
) -> None:
    rewritten = bytearray(body)
    for anywhere, new in changes:
        at = anywhere % len(rewritten)
        rewritten[at : at + len(new)] = new[: len(rewritten) - at]
    decodes_or_is_refused(seal(bytes(rewritten)))


@settings(deadline=None, max_examples=400)
@given(
    gaps=st.binary(max_size=12),
    nibbles=st.binary(max_size=7),
    wide=st.lists(st.binary(max_size=4), max_size=8),
    codes=st.lists(st.binary(max_size=14), max_size=5),
    counts=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    flags=st.tuples(st.integers(0, 7), st.integers(0, 7)),
    operations=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    fitting=st.booleans(),
)
def test_sections_of_noise_do_no_harm(
    gaps: bytes,
    nibbles: bytes,
    wide: list[bytes],
    codes: list[bytes],
    counts: tuple[int, int],
    flags: tuple[int, int],
    operations: tuple[int, int],
    fitting: bool,
) -> None:
    table, tensors, gap_bytes, fitting_nibbles = b"", 0, 0, b""
    for name, count, any_flag, operation in zip(
        (b"v", b"w"), counts, flags, operations, strict=True
    ):
        flag = any_flag & 1 if fitting and operation == 2 else any_flag
        prior = (7, 2**63) if flag & 4 else None
        table += row(
            name,
            (3000,),
            end=3000,
            count=count,
            flags=flag,
            operation=operation,
            first=2,
            prior=prior,
        )
        tensors += count * (2 + 4 * (flag & 1))
        gap_bytes += (count - 1) * (flag & 1)
        if flag & 2:
            of_delta = (nibbles * 8)[: (count + 1) // 2].ljust((count + 1) // 2, b"\x5f")
            last = of_delta[-1] & 15 if count % 2 else of_delta[-1]
            fitting_nibbles += of_delta[:-1] + bytes([last])
    if fitting:  # as far as the table tells
        gaps, nibbles = (gaps * 12)[:gap_bytes].ljust(gap_bytes), fitting_nibbles
    decodes_or_is_refused(
        payload(table, gaps, nibbles, tuple(wide), tuple(codes), deltas=2, tensors=tensors)
    )


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_noise_is_refused(body: bytes) -> None:
    refused(body, "payload")


# --- prelude


def test_an_unknown_version_is_named() -> None:
    refused(payload(version=2), "version 2 .* reads 1")
    with pytest.raises(PayloadError, match="version 2"):
        payload_decoded_bytes(payload(version=2))


def test_another_kind_of_file_is_named() -> None:
    refused(seal(b"PK\x03\x04" + payload()[4:]), "begins with b'PK")


def test_reserved_fields_are_refused() -> None:
    refused(payload(reserved=1), "reserved field 1")
    refused(payload(reserved=256), "reserved field 256")


@pytest.mark.parametrize("sections", [0, 3, 5, 2**32 - 1])
def test_a_wrong_number_of_sections_is_refused(sections: int) -> None:
    refused(payload(sections=sections), r"sections")


@pytest.mark.parametrize("stored_bytes", [0, 62, 64, 2**64 - 1])
def test_a_wrong_size_of_the_whole_is_refused(stored_bytes: int) -> None:
    assert sum(len(entry.content) for entry in entries()) not in {0, 62, 64}
    refused(payload(stored_bytes=stored_bytes), "cut short or run together")


def test_sizes_over_the_limits_are_refused() -> None:
    body = payload()
    refused(body, "limit is 10;", DecodeLimits(10, MIB))
    held = payload_decoded_bytes(body)
    assert held == DECODED
    refused(body, f"limit is {held - 1};", DecodeLimits(MIB, held - 1))
    assert accepted(body, DecodeLimits(len(body), held))
    refused(body, "limit is", DecodeLimits(len(body) - 1, held))


def test_plain_sections_over_the_limit_are_refused() -> None:
    # Each of them alone is below.
    body = assembled([Entry(GAPS, bytes(MIB // 2), 1), Entry(CODES, bytes(MIB // 2), 1)])
    refused(body, f"decodes to {MIB + len(row()) + 3} bytes")


def test_a_huge_declared_size_allocates_nothing() -> None:
    for huge in (2 * MIB, 1 << 40, 2**64 - 100):
        refused(payload(tensors=huge), "raise max_decoded_bytes")
        for kind in (TABLE, GAPS, CODES):
            changed = [
                replace(entry, plain_bytes=huge) if entry.kind == kind else entry
                for entry in entries(encoding=1)
            ]
            refused(assemble(changed, deltas=1, decoded=DECODED), "raise max_decoded_bytes")


def test_checks_come_in_the_order_of_the_format() -> None:
    """A payload with all of these faults is refused for the first; then for the next."""
    bad = Entry(3, b"", encoding=1, plain_bytes=2 * MIB)
    worst = assemble([bad], deltas=1 << 17, decoded=2 * MIB, version=2, reserved=1)
    worst = b"PK" + worst[2:-1] + b"xx"
    no_magic, no_version, no_reserved, no_size, no_directory, no_sum, no_checksum, no_limit = (
        bytearray(worst) for _ in range(8)
    )
    later = (no_version, no_reserved, no_size, no_directory, no_sum, no_checksum, no_limit)
    for body in later:
        body[:2] = b"VS"
    for body in later[1:]:
        body[4:6] = b"\1\0"
    for body in later[2:]:
        body[6:8] = b"\0\0"
    for body in later[3:]:
        body[40:48] = struct.pack("<Q", len(worst) - HEAD_BYTES - ENTRY_BYTES)
    for body in later[4:]:
        body[HEAD_BYTES] = GAPS
    for body in later[5:]:
        body[64:72] = body[40:48]
    sealed = seal(bytes(no_limit))
    refused(bytes(no_magic), "limit is 10;", DecodeLimits(10, MIB))
    refused(bytes(no_magic), "begins with")
    refused(bytes(no_version), "version 2")
    refused(bytes(no_reserved), "reserved field 1")
    refused(bytes(no_size), "in all; it was cut short")
    refused(bytes(no_directory), "unknown kind 3")
    refused(bytes(no_sum), "bytes together, not the declared")
    refused(bytes(no_checksum), "was damaged")
    refused(sealed, "decodes to 2097152 bytes")
    many = assemble(
        [replace(bad, kind=GAPS, plain_bytes=1, stored=b"x")], deltas=1 << 17, decoded=1
    )
    refused(many, "131072 deltas")


# --- directory


def assembled(changed: list[Entry], *, decoded: int = DECODED) -> bytes:
    """The small payload with these sections in the place of its own, or added, by kind."""
    kept = {entry.kind: entry for entry in entries()} | {entry.kind: entry for entry in changed}
    return assemble([kept[kind] for kind in sorted(kept)], deltas=1, decoded=decoded)


@pytest.mark.parametrize("kind", [3, 7, 24, 255])
def test_a_section_of_an_unknown_kind_is_refused(kind: int) -> None:
    refused(assembled([Entry(kind, b"x")]), f"unknown kind {kind}")


def test_an_unknown_encoding_is_refused() -> None:
    refused(assembled([Entry(GAPS, b"\1\2", encoding=2, stored=b"\1\2")]), "unknown encoding 2")


@pytest.mark.parametrize("at", range(6))
def test_reserved_fields_of_a_section_are_refused(at: int) -> None:
    reserved = bytes(6)[:at] + b"\1" + bytes(5 - at)
    refused(assembled([Entry(GAPS, b"\1\2", reserved=reserved)]), "section 1 uses reserved")


def test_a_stored_section_of_another_size_is_refused() -> None:
    for plain_bytes in (0, 1, 3, 2**64 - 1):
        body = assembled([Entry(GAPS, b"\1\2", plain_bytes=plain_bytes)])
        refused(body, f"section 1 is stored as it is, but declares {plain_bytes} bytes")


def test_an_empty_section_is_refused() -> None:
    refused(assembled([Entry(NIBBLES, b"")]), "section 2 is empty")
    refused(assembled([Entry(NIBBLES, b"", encoding=1)]), "section 2 is empty")


def test_sections_out_of_order_are_refused() -> None:
    small = entries()
    swapped = [small[1], small[0], *small[2:]]
    refused(assemble(swapped, deltas=1, decoded=DECODED), "section 0 comes twice or too late")
    twice = [*small, small[-1]]
    refused(assemble(twice, deltas=1, decoded=DECODED), "section 17 comes twice or too late")


def test_sections_that_are_more_than_their_sum_are_refused() -> None:
    for stored_bytes in (0, 2**63, 2**64 - 1):
        body = assembled([Entry(GAPS, b"\1\2", encoding=1, stored_bytes=stored_bytes)])
        refused(body, "bytes together, not the declared")


def test_more_sections_than_there_are_kinds_are_refused() -> None:
    refused(assemble([Entry(GAPS, b"x")] * 20, deltas=1, decoded=DECODED), "has 20 sections")


def test_a_section_that_reaches_into_its_neighbour_is_refused() -> None:
    """The sum is right, but one section took a byte of the other."""
    table = Entry(TABLE, row(), plain_bytes=len(row()) + 1, stored_bytes=len(row()) + 1)
    gaps = Entry(GAPS, b"\1\2", plain_bytes=1, stored_bytes=1)
    refused(assembled([table, gaps]), "1 bytes after its last delta")


# --- zstd


def bomb(**options: bool) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(bytes(64 * MIB))  # type: ignore[arg-type]


def with_frame(kind: int, frame: bytes, plain: bytes) -> bytes:
    return assembled([Entry(kind, plain, encoding=1, stored=frame)])


FRAMED = [(TABLE, row()), (GAPS, b"\1\2"), (CODES, b"\1\2\3")]


@pytest.mark.parametrize(("kind", "plain"), FRAMED)
def test_a_zip_bomb_is_not_inflated(kind: int, plain: bytes) -> None:
    refused(with_frame(kind, bomb(), plain), "frame of section .* declares 67108864 bytes")


@pytest.mark.parametrize(("kind", "plain"), FRAMED)
def test_a_zip_bomb_that_hides_its_size_is_not_inflated(kind: int, plain: bytes) -> None:
    body = with_frame(kind, bomb(write_content_size=False), plain)
    refused(body, f"frame of section {kind} declares")


@pytest.mark.parametrize(("kind", "plain"), FRAMED)
def test_a_zip_bomb_that_lies_about_its_size_is_not_inflated(kind: int, plain: bytes) -> None:
    frame = bytearray(bomb())
    assert struct.unpack_from("<I", frame, 6) == (64 * MIB,)
    struct.pack_into("<I", frame, 6, len(plain))
    assert zstandard.get_frame_parameters(bytes(frame)).content_size == len(plain)
    refused(with_frame(kind, bytes(frame), plain), f"section {kind} cannot be decompressed")


def test_a_frame_of_less_than_it_declares_is_refused() -> None:
    frame = bytearray(framed(b"\1\2", 20))
    struct.pack_into("<I", frame, 6, 3)
    body = with_frame(CODES, bytes(frame), b"\1\2\3")
    refused(body, "section 16 (cannot be decompressed|has 2 bytes)")


def framed(body: bytes, window_log: int) -> bytes:
    """A zstd frame of one raw block that declares its content's size and a window."""
    header = struct.pack("<IBBI", 0xFD2FB528, 0x80, (window_log - 10) << 3, len(body))
    return header + struct.pack("<I", len(body) << 3 | 1)[:3] + body


def test_a_huge_zstd_window_is_refused() -> None:
    for kind, plain in FRAMED:
        assert accepted(with_frame(kind, framed(plain, 27), plain))
        refused(with_frame(kind, framed(plain, 28), plain), r"\(window 268435456\)")


def test_a_truncated_or_continued_zstd_frame_is_refused() -> None:
    for kind, plain in FRAMED:
        frame = zstandard.ZstdCompressor().compress(plain)
        assert accepted(with_frame(kind, frame, plain))
        message = f"section {kind} cannot be decompressed"
        refused(with_frame(kind, frame[:-1], plain), message)
        refused(with_frame(kind, frame + b"\0", plain), message)
        refused(with_frame(kind, frame + frame, plain), message)
        refused(with_frame(kind, b"", plain), message)
        skippable = struct.pack("<II", 0x184D2A50, len(plain)) + plain
        refused(with_frame(kind, skippable, plain), f"section {kind} .*(decompress|declares)")
