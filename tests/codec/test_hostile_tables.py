"""Payloads whose table contradicts itself, the sections or the limits: each is refused, and cheaply."""

import pytest
import torch

from tests.codec.crafted import CODES, GAPS, TABLE, WIDE, Entry, assemble, entries, payload, row
from tests.codec.refusals import MIB, accepted, refused
from vllm_sparse_refit.codec import wire
from vllm_sparse_refit.codec.digest import BitsDigest


@pytest.mark.parametrize("deltas", [0, 2, 3, wire.MAX_DELTAS])
def test_a_wrong_number_of_deltas_is_refused(deltas: int) -> None:
    refused(payload(deltas=deltas), "bytes after its last delta|ends within delta 1")


def test_too_many_deltas_are_refused() -> None:
    refused(payload(deltas=wire.MAX_DELTAS + 1), "65537 deltas")


def test_a_table_that_is_left_out_is_refused() -> None:
    without = entries()[1:]
    refused(assemble(without, deltas=1, decoded=18), "ends within delta 0")
    refused(assemble(without, deltas=0, decoded=0), "counts of its deltas need")
    assert accepted(assemble([], deltas=0, decoded=0)) == []


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
        (row(operation=4), "'w' has the unknown operation code 4"),
        (row(flags=8), "'w' has the unknown flags 0x8"),
        (row(flags=9, prior=(0, 0)), "'w' has the unknown flags 0xd"),
        (row(flags=4), "ends within delta 0"),
        (row(prior=(1, 2))[:50], "ends within delta 0"),
        (row(flags=1) + bytes(16), "16 bytes after"),
        (row(operation=2, prior=(1, 2)), "'w' has a digest of bits that it overwrites"),
        (row(operation=2, prior=(0, 0)), "'w' has a digest of bits that it overwrites"),
        (row(operation=2, flags=3), "'w' has nibbles, which an overwrite"),
        (row(flags=0x81), "'w' has the unknown flags 0x81"),
        (row(shape=(1,) * 33), "delta 0 has 33 dimensions"),
        (row(shape=(2**64 - 1,) * 32), "'w' has a shape of 2\\*\\*63"),
        (row(shape=(2**32, 2**31)), "'w' has a shape of 2\\*\\*63"),
        (row(shape=(2**64 - 1, 0)), "'w' has a shape of 2\\*\\*63"),
        (row(shape=(2, 0)), "'w' speaks for \\[0, 8\\) of 0"),
        (row(shape=(7,)), "'w' speaks for \\[0, 8\\) of 7"),
        (row(begin=8), "'w' speaks for \\[8, 8\\)"),
        (row(begin=9), "'w' speaks for \\[9, 8\\)"),
        (row(end=2**64 - 1), "'w' speaks for"),
        (row(begin=2), "'w' has a location outside"),
        (row(first=8), "'w' has a location outside"),
        (row(first=2**64 - 1), "'w' has a location outside"),
        (row(first=6, flags=0), "'w' has a location outside"),
        (row(first=2**64 - 1, flags=0), "'w' has a location outside"),
        (row(count=0), "'w' has 0 elements"),
        (row(count=0, flags=0), "'w' has 0 elements"),
        (row(count=9), "'w' has 9 elements in a span of 8"),
        (row(count=2**64 - 1), "'w' has 18446744073709551615 elements"),
    ],
)
def test_a_hostile_row_is_refused(table: bytes, message: str) -> None:
    refused(payload(table), message)


def test_counts_that_do_not_match_the_sizes_are_refused() -> None:
    refused(payload(row(count=2)), "counts of its deltas need")
    refused(payload(row(count=4)), "counts of its deltas need")
    refused(payload(row(flags=0)), "counts of its deltas need")
    refused(payload(row(flags=0), tensors=6), "counts of its deltas need")
    refused(payload(row(flags=0), b"", tensors=18), "counts of its deltas need")
    refused(payload(row(dtype=12)), "counts of its deltas need")
    refused(payload(gaps=b"\1\1\1"), "counts of its deltas need")
    refused(payload(gaps=b"\1"), "counts of its deltas need")
    refused(payload(gaps=b""), "counts of its deltas need")
    refused(payload(tensors=17), "counts of its deltas need")
    refused(payload(tensors=19), "counts of its deltas need")


def test_nibbles_that_do_not_match_the_counts_are_refused() -> None:
    escaping = (b"\x64", b"\x01")
    packed = row(flags=3)
    [delta] = accepted(payload(packed, nibbles=b"\xf3\x07", codes=escaping))
    assert delta.values.tolist() == [3, 0x164, 7]
    refused(payload(packed, nibbles=b"\xf3", codes=escaping), "counts of its deltas need")
    refused(payload(packed, nibbles=b"\xf3\7\0", codes=escaping), "counts of its deltas need")
    refused(payload(packed, nibbles=b"", codes=escaping), "counts of its deltas need")
    refused(payload(nibbles=b"\xf3\x07"), "counts of its deltas need")


def test_bits_in_the_unused_half_of_a_last_nibble_are_refused() -> None:
    packed = row(flags=3)
    assert accepted(payload(packed, nibbles=b"\x13\x07", codes=()))[0].values.tolist() == [3, 1, 7]
    for last in (b"\x17", b"\x87", b"\xf7"):
        refused(payload(packed, nibbles=b"\x13" + last, codes=()), "'w' has bits in a half byte")
    # Of an even number of them all halves are used.
    even = row(flags=3, count=4)
    [delta] = accepted(payload(even, b"\0\0\0", nibbles=b"\x13\x27", codes=(), tensors=24))
    assert delta.values.tolist() == [3, 1, 7, 2]
    # The last byte of the first of two deltas is not the last of the section.
    table = packed + row(b"v", flags=3)
    for nibbles, wrong in ((b"\x13\x17\x13\x07", "w"), (b"\x13\x07\x13\x17", "v")):
        body = payload(table, b"\1\2\1\2", nibbles=nibbles, codes=(), deltas=2, tensors=36)
        refused(body, f"'{wrong}' has bits in a half byte")


def test_a_digest_of_old_bits_is_read() -> None:
    for operation in (1, 3):
        [delta] = accepted(payload(row(operation=operation, prior=(2**64 - 1, 1))))
        assert delta.prior == BitsDigest(2**64 - 1, 1)
    assert accepted(payload())[0].prior is None


def test_a_count_of_billions_allocates_nothing() -> None:
    many = row(shape=(2**40,), end=2**40, count=2**39)
    refused(payload(many), "counts of its deltas need")
    fewer = row(shape=(2**40,), end=2**40, count=2**39, flags=0)
    refused(payload(fewer), "counts of its deltas need")


def test_fewer_values_than_counts_allocate_nothing() -> None:
    many = row(dtype=2, shape=(MIB,), end=MIB, first=0, count=MIB // 2, flags=0)
    body = payload(many, b"", codes=(b"\1\2\3",), tensors=MIB // 2)
    refused(body, "has 3 values beside its nibbles, but the counts of its deltas need 524288")


# --- locations


def test_a_location_out_of_its_span_is_refused() -> None:
    refused(payload(gaps=b"\1\4"), "'w': a location is outside its span \\[0, 8\\)")
    refused(payload(gaps=b"\6\0"), "'w': a location is outside its span \\[0, 8\\)")
    refused(payload(row(end=6)), "'w': a location is outside its span \\[0, 6\\)")
    assert accepted(payload(gaps=b"\1\3"))


def wide_payload(elements: int, first: int, gaps: bytes, wide: list[int]) -> bytes:
    planes = [bytes(number >> 8 * plane & 255 for number in wide) for plane in range(8)]
    count = len(gaps) + 1
    table = row(shape=(elements,), end=elements, first=first, count=count, dtype=2)
    tensors = count * (9 if elements > 2**31 else 5)
    return payload(table, gaps, wide=tuple(planes), codes=(bytes(count),), tensors=tensors)


def test_wide_gaps_are_read() -> None:
    [delta] = accepted(wide_payload(2**31, 0, b"\xff\xff", [0, 2**31 - 514]))
    assert isinstance(delta.locations, torch.Tensor)
    assert delta.locations.dtype == torch.int32
    assert delta.locations.tolist() == [0, 256, 2**31 - 2]
    [delta] = accepted(wide_payload(2**63 - 1, 2**62, b"\xff\0", [2**62 - 259]))
    assert list(delta.locations) == [2**62, 2**63 - 3, 2**63 - 2]


@pytest.mark.parametrize("elements", [1000, 2**31, 2**40, 2**63 - 1])
@pytest.mark.parametrize("back", [1, 2, 3, 255, 256, 257, 300, 511, 512])
def test_gaps_whose_sum_wraps_around_are_refused(elements: int, back: int) -> None:
    message = "'w': a location is outside its span"
    first = min(elements - 1, 2**62)
    refused(wide_payload(elements, first, b"\xff", [2**64 - back]), message)
    refused(wide_payload(elements, 300, b"\0\xff", [2**64 - back]), message)
    # Neither the gap nor the step wraps around, but their sum with the location before does.
    refused(wide_payload(elements, elements - 1, b"\xff", [elements - 1]), message)
    refused(wide_payload(elements, elements - 1, b"\xff", [2**64 - elements - back]), message)
    refused(wide_payload(elements, 0, b"\xff\xff\xff", [2**63 - back, 2**63 - back, 3]), message)
    refused(wide_payload(elements, 0, b"\xff\xff\xff\xff", [2**62 - 256] * 4), message)


# --- planes


def test_a_plane_of_another_length_is_refused() -> None:
    for codes in [
        (b"\1\2\3\4",),
        (b"\1\2\3", b"\0\0\x80\0"),
        (b"\1\2\3", b"\0\0\x80", b"\1"),
    ]:
        refused(payload(codes=codes), "byte plane . has . bytes and the deltas use .")
    refused(payload(codes=(b"\1\2\3", b"\0\0")), "byte plane 1 ends too early")
    refused(payload(codes=(b"\1\2",)), "has 2 values beside its nibbles")
    refused(payload(codes=()), "has 0 values beside its nibbles")
    refused(payload(codes=(b"", b"\0\0\x80")), "has 0 values beside its nibbles")
    assert accepted(payload(codes=(b"\1\2\3",)))[0].values.tolist() == [1, 2, 3]


def test_more_or_fewer_escaped_codes_than_their_marks_are_refused() -> None:
    packed = row(flags=3)
    refused(payload(packed, nibbles=b"\xff\x07", codes=(b"\x64",)), "plane 0 ends too early")
    refused(
        payload(packed, nibbles=b"\xff\x07", codes=(b"\x64\1", b"\1")), "plane 1 ends too early"
    )
    refused(payload(packed, nibbles=b"\xf3\x07", codes=(b"\x64\1",)), "plane 0 has 2 bytes")
    refused(payload(packed, nibbles=b"\xf3\x07", codes=(b"", b"\1")), "plane 0 ends too early")
    refused(payload(packed, nibbles=b"\xf3\x07", codes=()), "plane 0 ends too early")
    refused(payload(packed, nibbles=b"\x13\x07", codes=(b"\1",)), "plane 0 has 1 bytes")


def test_more_or_fewer_wide_gaps_than_their_marks_are_refused() -> None:
    table = row(shape=(999,), end=999)
    [delta] = accepted(payload(table, b"\xff\2", wide=(b"\3",)))
    assert list(delta.locations) == [1, 260, 263]
    refused(payload(table, b"\xff\xff", wide=(b"\3",)), "plane 0 ends too early")
    refused(payload(table, b"\xff\2"), "plane 0 ends too early")
    refused(payload(table, b"\xff\2", wide=(b"\3\4",)), "plane 0 has 2 bytes and the deltas use 1")
    refused(payload(table, b"\1\2", wide=(b"\3",)), "plane 0 has 1 bytes and the deltas use 0")
    refused(payload(table, b"\xff\2", wide=(b"\3", b"\0\0")), "plane 1 has 2 bytes")
    refused(payload(table, b"\xff\2", wide=(b"", b"\1")), "plane 0 ends too early")


def test_marks_without_wide_gaps_allocate_little() -> None:
    """Every mark stands for eight bytes, and a byte of gaps for a location and a value."""
    count = MIB // 6
    table = row(dtype=2, shape=(2**31,), end=2**31, first=0, count=count)
    body = assemble(
        [
            Entry(TABLE, table),
            Entry(GAPS, b"\xff" * (count - 1), 1),
            Entry(WIDE, b"\1"),
            Entry(CODES, bytes(count), 1),
        ],
        deltas=1,
        decoded=len(table) + 5 * count,
    )
    refused(body, "plane 0 ends too early")


# --- several deltas


def two(second: bytes) -> bytes:
    codes = (b"\1\2\3" * 2, b"\0\0\x80" * 2)
    return payload(row() + second, b"\1\2\1\2", codes=codes, deltas=2, tensors=36)


def test_deltas_that_overlap_are_refused() -> None:
    refused(two(row()), "two deltas of 'w' both speak for element 0")
    assert len(accepted(two(row(b"v")))) == 2


def test_deltas_of_one_tensor_that_disagree_are_refused() -> None:
    refused(two(row(dtype=10)), "'w' differ in shape or dtype")
    refused(two(row(shape=(2, 4))), "'w' differ in shape or dtype")


def test_deltas_of_one_tensor_may_share_a_payload() -> None:
    table = row(shape=(16,)) + row(shape=(16,), begin=8, end=16, first=9)
    codes = (b"\1\2\3" * 2,)
    body = payload(table, b"\1\2\1\2", codes=codes, deltas=2, tensors=36)
    assert [delta.begin for delta in accepted(body)] == [0, 8]
    # One that reaches into the other's span, with all else as it was.
    body = payload(table, b"\1\4\1\2", codes=codes, deltas=2, tensors=36)
    refused(body, "'w': a location is outside its span \\[0, 8\\)")
