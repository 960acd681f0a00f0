import dataclasses
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codec import crafted
from vllm_sparse_refit.codec import wire
from vllm_sparse_refit.codec.delta import (
    SparseOperation,
    TensorDelta,
    apply_delta,
    location_dtype,
    make_delta,
)
from vllm_sparse_refit.codec.dtypes import SUPPORTED, bits_dtype
from vllm_sparse_refit.codec.payload import (
    DecodeLimits,
    batch_deltas,
    decode_payload,
    encode_payload,
    payload_decoded_bytes,
)
from vllm_sparse_refit.errors import PayloadError

XOR, OVERWRITE = SparseOperation.XOR, SparseOperation.OVERWRITE
LIMITS = DecodeLimits(max_payload_bytes=1 << 26, max_decoded_bytes=1 << 26)

# Head, checksum, sizes; a row and its name; another; location planes; value planes. Two deltas:
# bf16 xor with four-byte gaps, and an fp32 scalar overwritten by -0.0.
GOLDEN_PLAIN = """
5653525001000000
faea5df2c8dbfd703e68457785e0e0f5
02000000690000000c000000000000000c0000000000000085000000000000008100000000000000
7011010000000000e022020000000000711101000000000004000000000000000c000b0104020300
00000000000070110100000000006c617965722e776569676874
000000000000000001000000000000000000000000000000010000000000000001000c02000062
022943000110000001000000
010200020000800100000080
"""
# The same, its body compressed.
GOLDEN_ZSTD = """
5653525001000100
9d7257a20b350eed7a5680b1ace9ef61
02000000690000000c000000000000000c0000000000000085000000000000006000000000000000
28b52ffd2081bd020012c40e1aa0291dffffff3f6a9a1bbff3afcd0384e0f00911f328b79b9429ed
67fb5e0afc289a7cd5fca1456156643c4b421af6408fc1eacf2931fdcf81050a004a8d9f4922b741
cf19346f0a2ac74bbb14713393ad2d73
"""


def random_bits(rng: random.Random, count: int, dtype: torch.dtype) -> torch.Tensor:
    raw = bytearray(rng.randbytes(count * dtype.itemsize))
    if not count:
        return torch.empty(0, dtype=bits_dtype(dtype))
    return torch.frombuffer(raw, dtype=torch.uint8).view(bits_dtype(dtype))


def location_list(delta: TensorDelta) -> list[int]:
    if isinstance(delta.locations, range):
        return list(delta.locations)
    return [int(location) for location in delta.locations]


def assert_same(left: list[TensorDelta], right: list[TensorDelta]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        for field in dataclasses.fields(TensorDelta):
            if field.name not in {"locations", "values"}:
                assert getattr(a, field.name) == getattr(b, field.name)
        assert location_list(a) == location_list(b)
        assert a.values.dtype == b.values.dtype == bits_dtype(a.dtype)
        assert torch.equal(a.values, b.values)


@st.composite
def delta_of(draw: st.DrawFn, name: str) -> TensorDelta:
    shape = draw(
        st.sampled_from(
            [(), (1,), (7,), (3, 5, 2), (300, 1000), (2**16, 2**15), (2**33, 3), (2**63 - 1,)]
        )
    )
    numel = math.prod(shape)
    begin = draw(st.sampled_from([0, numel // 2]))
    dtype = draw(st.sampled_from(SUPPORTED))
    if draw(st.booleans()):
        count = draw(st.integers(1, min(numel - begin, 300)))
        start = draw(st.integers(begin, numel - count))
        locations: torch.Tensor | range = range(start, start + count)
    else:
        span = draw(st.sampled_from([40, 400, 10**6, numel]))
        chosen = draw(st.sets(st.integers(begin, min(begin + span, numel) - 1), min_size=1))
        locations = torch.tensor(sorted(chosen), dtype=location_dtype(numel))
    return TensorDelta(
        name=name,
        shape=shape,
        dtype=dtype,
        operation=draw(st.sampled_from(SparseOperation)),
        begin=begin,
        end=numel,
        locations=locations,
        values=random_bits(random.Random(draw(st.integers())), len(locations), dtype),
    )


NAMES = st.lists(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=20), unique=True, max_size=4
)


@settings(deadline=None)
@given(names=NAMES, data=st.data(), level=st.sampled_from([1, 3, 19]))
def test_decoding_returns_what_was_encoded(
    names: list[str], data: st.DataObject, level: int
) -> None:
    deltas = [data.draw(delta_of(name)) for name in names]
    encoded = encode_payload(deltas, compression_level=level)
    decoded = decode_payload(encoded, LIMITS)
    assert_same(decoded, deltas)
    for delta in decoded:
        if isinstance(delta.locations, torch.Tensor):
            assert delta.locations.dtype == location_dtype(math.prod(delta.shape))


@settings(deadline=None)
@given(
    dtype=st.sampled_from(SUPPORTED),
    shape=st.sampled_from([(), (1,), (0, 3), (64,), (33, 17)]),
    density=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    operation=st.sampled_from(SparseOperation),
    seed=st.integers(0, 2**32),
)
def test_old_bits_become_new_bits(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    density: float,
    operation: SparseOperation,
    seed: int,
) -> None:
    rng = random.Random(seed)
    numel = math.prod(shape)
    old, other = random_bits(rng, numel, dtype), random_bits(rng, numel, dtype)
    touched = torch.tensor([rng.random() < density for _ in range(numel)], dtype=torch.bool)
    new = torch.where(touched, other, old)
    delta = make_delta("w", shape, dtype, operation, 0, old, new)
    if delta is None:
        assert torch.equal(old, new)
        return
    [decoded] = decode_payload(encode_payload([delta]), LIMITS)
    apply_delta(decoded, old)
    assert torch.equal(old, new)


@pytest.mark.parametrize(("largest", "width"), [(255, 1), (256, 2), (2**16, 4), (2**32, 8)])
def test_gaps_take_the_narrowest_width_that_fits(largest: int, width: int) -> None:
    delta = TensorDelta(
        name="w",
        shape=(2**34,),
        dtype=torch.uint8,
        operation=XOR,
        begin=0,
        end=2**34,
        locations=torch.tensor([2**33, 2**33 + 1, 2**33 + 1 + largest]),
        values=torch.tensor([1, 2, 3], dtype=torch.uint8),
    )
    encoded = encode_payload([delta])
    assert wire.Prelude.read(encoded).location_bytes == 2 * width
    assert_same(decode_payload(encoded, LIMITS), [delta])


def test_decoded_tensors_are_writable_and_their_own() -> None:
    [delta] = decode_payload(bytearray(crafted.payload()), LIMITS)
    assert isinstance(delta.locations, torch.Tensor)
    delta.values[0] += 1
    delta.locations[0] += 1


def test_any_buffer_can_be_decoded() -> None:
    encoded = crafted.payload(encoding=1)
    for buffer in (encoded, bytearray(encoded), memoryview(encoded)):
        assert decode_payload(buffer, LIMITS)[0].name == "w"


def test_declared_size_is_that_of_the_tensors_and_the_table() -> None:
    [delta] = decode_payload(crafted.payload(), LIMITS)
    assert isinstance(delta.locations, torch.Tensor)
    tensors = delta.locations.nbytes + delta.values.nbytes
    assert payload_decoded_bytes(crafted.payload()) == tensors + len(crafted.row())


def test_incompressible_bodies_are_stored_raw() -> None:
    rng = random.Random(0)
    values = random_bits(rng, 4096, torch.uint8)
    delta = TensorDelta("w", (4096,), torch.uint8, XOR, 0, 4096, range(4096), values)
    encoded = encode_payload([delta])
    assert wire.Prelude.read(encoded).encoding == wire.BODY_RAW
    assert_same(decode_payload(encoded, LIMITS), [delta])


def test_planes_compress() -> None:
    count = 20_000
    delta = TensorDelta(
        name="w",
        shape=(10**7,),
        dtype=torch.bfloat16,
        operation=XOR,
        begin=0,
        end=10**7,
        locations=torch.arange(0, 300 * count, 300, dtype=torch.int32),
        values=torch.ones(count, dtype=torch.int16),
    )
    assert len(encode_payload([delta])) < count // 20


def valid_delta() -> TensorDelta:
    return TensorDelta(
        name="w",
        shape=(8,),
        dtype=torch.bfloat16,
        operation=XOR,
        begin=0,
        end=8,
        locations=torch.tensor([1, 3, 6], dtype=torch.int32),
        values=torch.tensor([0x0201, 3, -0x8000], dtype=torch.int16),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": ""}, "name has 1 to"),
        ({"name": "é" * 513}, "name has 1 to"),
        ({"name": "\ud800"}, "UTF-8"),
        ({"begin": 2}, "'w' has a location outside"),
        ({"end": 6}, "'w'.*span"),
        ({"end": 9}, "'w' speaks for"),
        ({"shape": (2**32, 2**32)}, "'w' has a shape"),
        ({"shape": (1,) * 33}, "'w' has 33 dimensions"),
        ({"locations": torch.tensor([1, 3, 3], dtype=torch.int32)}, "'w' are not strictly asc"),
        ({"locations": torch.tensor([3, 1, 6], dtype=torch.int32)}, "'w' are not strictly asc"),
        ({"locations": torch.tensor([-1, 1, 6], dtype=torch.int32)}, "'w' has a location outside"),
        ({"locations": range(0)}, "'w' has 0 elements"),
        ({"locations": range(0, 6, 2)}, "'w' must have step 1"),
        ({"locations": range(3, 7)}, "values of 'w' must be 4"),
        ({"values": torch.zeros(3, dtype=torch.int32)}, "values of 'w' must be 3"),
    ],
)
def test_the_encoder_refuses_what_the_decoder_would(
    change: dict[str, object], message: str
) -> None:
    delta = dataclasses.replace(valid_delta(), **change)  # type: ignore[arg-type]
    with pytest.raises(PayloadError, match=message):
        encode_payload([delta])


def test_the_encoder_refuses_overlapping_deltas() -> None:
    with pytest.raises(PayloadError, match="'w' both speak for element 0"):
        encode_payload([valid_delta(), valid_delta()])


def test_the_encoder_refuses_too_many_deltas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_DELTAS", 1)
    with pytest.raises(PayloadError, match="2 deltas"):
        encode_payload([valid_delta(), dataclasses.replace(valid_delta(), name="v")])


def test_batches_keep_order_and_close_at_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    deltas = [dataclasses.replace(valid_delta(), name=f"w{i}") for i in range(7)]
    batches = list(batch_deltas(iter(deltas), 24))  # 12 bytes of planes in each
    assert [[delta.name for delta in batch] for batch in batches] == [
        ["w0", "w1"],
        ["w2", "w3"],
        ["w4", "w5"],
        ["w6"],
    ]
    monkeypatch.setattr(wire, "MAX_DELTAS", 3)
    assert [len(batch) for batch in batch_deltas(deltas, 1 << 20)] == [3, 3, 1]
    assert list(batch_deltas([], 24)) == []


def test_the_bytes_of_version_1_stay() -> None:
    deltas = golden_deltas()
    golden = bytes.fromhex(GOLDEN_PLAIN)
    assert_same(decode_payload(golden, LIMITS), deltas)
    assert crafted.plain(encode_payload(deltas)).hex() == golden.hex()


def golden_deltas() -> list[TensorDelta]:
    return [
        TensorDelta(
            name="layer.weight",
            shape=(3, 70000),
            dtype=torch.bfloat16,
            operation=XOR,
            begin=70000,
            end=140000,
            locations=torch.tensor([70001, 70003, 70300, 139999], dtype=torch.int32),
            values=torch.tensor([1, 2, -0x8000, 0x0102], dtype=torch.int16),
        ),
        TensorDelta(
            name="b",
            shape=(),
            dtype=torch.float32,
            operation=OVERWRITE,
            begin=0,
            end=1,
            locations=range(0, 1),
            values=torch.tensor([-0x80000000], dtype=torch.int32),
        ),
    ]


def test_a_compressed_payload_of_version_1_can_be_read() -> None:
    assert_same(decode_payload(bytes.fromhex(GOLDEN_ZSTD), LIMITS), golden_deltas())
