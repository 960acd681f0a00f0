import dataclasses
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codec import crafted, reference
from tests.codec.test_digest import by_hand
from vllm_sparse_refit.codec import wire
from vllm_sparse_refit.codec.coding import CodedDelta
from vllm_sparse_refit.codec.delta import (
    Chunk,
    SparseOperation,
    TensorDelta,
    apply_delta,
    location_dtype,
    make_delta,
)
from vllm_sparse_refit.codec.digest import BitsDigest
from vllm_sparse_refit.codec.dtypes import SUPPORTED, bits_dtype
from vllm_sparse_refit.codec.payload import (
    DecodeLimits,
    batch_deltas,
    decode_payload,
    encode_payload,
    payload_decoded_bytes,
)
from vllm_sparse_refit.errors import PayloadError

XOR, OVERWRITE, ADD = SparseOperation.XOR, SparseOperation.OVERWRITE, SparseOperation.ADD
LIMITS = DecodeLimits(max_payload_bytes=1 << 26, max_decoded_bytes=1 << 26)

pytestmark = pytest.mark.usefixtures("both_implementations")


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


def small_codes(rng: random.Random, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of which few need more than a nibble, as steps or as bits."""
    steps = [rng.choice([1, 1, 1, 2, 3, -1, -1, -2]) for _ in range(count)]
    for at in range(0, count, 7):
        steps[at] = rng.randrange(-128, 128)
    bits = bits_dtype(dtype)
    return torch.tensor(steps, dtype=torch.int64).to(bits)


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
    values = draw(st.sampled_from([random_bits, small_codes]))
    operation = draw(st.sampled_from(SparseOperation))
    halves = st.integers(0, 2**64 - 1)
    priors = (
        st.none() if operation is OVERWRITE else st.none() | st.builds(BitsDigest, halves, halves)
    )
    return TensorDelta(
        name=name,
        shape=shape,
        dtype=dtype,
        operation=operation,
        begin=begin,
        end=numel,
        locations=locations,
        values=values(random.Random(draw(st.integers())), len(locations), dtype),
        prior=draw(priors),
    )


NAMES = st.lists(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=20), unique=True, max_size=4
)


@settings(deadline=None, max_examples=120)
@given(names=NAMES, data=st.data())
def test_decoding_returns_what_was_encoded(names: list[str], data: st.DataObject) -> None:
    deltas = [data.draw(delta_of(name)) for name in names]
    encoded = encode_payload(deltas)
    decoded = decode_payload(encoded, LIMITS)
    assert_same(decoded, deltas)
    for delta in decoded:
        if isinstance(delta.locations, torch.Tensor):
            assert delta.locations.dtype == location_dtype(math.prod(delta.shape))
    # Under the compression are the bytes that the format's description asks for.
    assert crafted.plain(encoded) == reference.encode(deltas)


@settings(deadline=None)
@given(
    dtype=st.sampled_from(SUPPORTED),
    shape=st.sampled_from([(), (1,), (0, 3), (64,), (33, 17)]),
    density=st.sampled_from([0.0, 0.01, 0.2, 0.9, 0.99, 1.0]),
    small=st.booleans(),
    operation=st.sampled_from(SparseOperation),
    seed=st.integers(0, 2**32),
)
def test_old_bits_become_new_bits(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    density: float,
    small: bool,
    operation: SparseOperation,
    seed: int,
) -> None:
    rng = random.Random(seed)
    numel = math.prod(shape)
    old, other = random_bits(rng, numel, dtype), random_bits(rng, numel, dtype)
    if small:
        other = old + small_codes(rng, numel, dtype)
    touched = torch.tensor([rng.random() < density for _ in range(numel)], dtype=torch.bool)
    new = torch.where(touched, other, old)
    delta = make_delta(Chunk("w", shape, dtype, operation, 0, old, new))
    if delta is None:
        assert torch.equal(old, new)
        return
    [decoded] = decode_payload(encode_payload([delta]), LIMITS)
    if operation is not OVERWRITE:
        where = [int(location) for location in decoded.locations]
        assert decoded.prior == by_hand(old[where], where)
    apply_delta(decoded, old)
    assert torch.equal(old, new)


@settings(deadline=None)
@given(
    codes=st.lists(st.integers(0, 40), min_size=1, max_size=60),
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64]),
    operation=st.sampled_from(SparseOperation),
)
def test_nibbles_are_used_while_at_most_a_quarter_escapes(
    codes: list[int], dtype: torch.dtype, operation: SparseOperation
) -> None:
    values = [(code >> 1) ^ -(code & 1) for code in codes] if operation is ADD else codes
    delta = TensorDelta(
        name="w",
        shape=(len(codes),),
        dtype=dtype,
        operation=operation,
        begin=0,
        end=len(codes),
        locations=range(len(codes)),
        values=torch.tensor(values, dtype=torch.int64).to(bits_dtype(dtype)),
    )
    encoded = encode_payload([delta])
    escaped = sum(code >= 15 for code in codes)
    fits = operation is not OVERWRITE and 4 * escaped <= len(codes)
    sections = crafted.sections(encoded)
    assert len(sections.get(crafted.NIBBLES, b"")) == ((len(codes) + 1) // 2 if fits else 0)
    assert len(sections.get(crafted.CODES, b"")) == (escaped if fits else len(codes))
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


def test_incompressible_sections_are_stored_as_they_are() -> None:
    rng = random.Random(0)
    values = random_bits(rng, 4096, torch.uint8)
    delta = TensorDelta("w", (4096,), torch.uint8, XOR, 0, 4096, range(4096), values)
    encoded = encode_payload([delta])
    encodings = {entry.kind: entry.encoding for entry in wire.Prelude.read(encoded).sections}
    assert encodings[crafted.CODES] == wire.RAW
    assert_same(decode_payload(encoded, LIMITS), [delta])


def test_sparse_steps_compress() -> None:
    count = 20_000
    delta = TensorDelta(
        name="w",
        shape=(10**7,),
        dtype=torch.bfloat16,
        operation=ADD,
        begin=0,
        end=10**7,
        locations=torch.arange(0, 200 * count, 200, dtype=torch.int32),
        values=torch.ones(count, dtype=torch.int16),
    )
    assert len(encode_payload([delta])) < count // 20


@pytest.mark.parametrize("operation", [XOR, ADD])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_dense_changes_cost_little_more_than_the_tensor(
    dtype: torch.dtype, operation: SparseOperation
) -> None:
    """However many elements took random bits, the payload is at most 1 % larger than the tensor."""
    elements = 1 << 20
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(
        0, 256, (2, elements * dtype.itemsize), generator=generator, dtype=torch.uint8
    )
    old, other = raw[0].view(bits_dtype(dtype)), raw[1].view(bits_dtype(dtype))
    chance = torch.rand(elements, generator=generator)
    costs = {}
    # Closest where locations are given up: 0.8 for one byte, 0.89 for two, 0.94 for four.
    for fraction in (300, 500, 700, 790, 805, 850, 885, 895, 935, 945, 970, 990, 1000):
        new = torch.where(chance < fraction / 1000, other, old)
        delta = make_delta(Chunk("w", (elements,), dtype, operation, 0, old, new))
        assert delta is not None
        encoded = encode_payload([delta])
        costs[fraction] = len(encoded) / (elements * dtype.itemsize)
    assert max(costs.values()) < 1.01, costs
    limits = DecodeLimits(max_payload_bytes=1 << 24, max_decoded_bytes=1 << 24)
    apply_delta(decode_payload(encoded, limits)[0], old)
    assert torch.equal(old, new)


@pytest.mark.parametrize("density", [0.02, 0.3])
def test_small_tensors_share_their_sections(density: float) -> None:
    tensors, elements = 100, 1000
    size = tensors * elements
    generator = torch.Generator().manual_seed(0)
    old = torch.randint(-(2**15), 2**15, (size,), generator=generator, dtype=torch.int16)
    steps = torch.randint(0, 2, (size,), generator=generator, dtype=torch.int16) * 2 - 1
    new = torch.where(torch.rand(size, generator=generator) < density, old + steps, old)
    one = make_delta(Chunk("w", (size,), torch.bfloat16, ADD, 0, old, new))
    many = [
        make_delta(
            Chunk(
                f"model.layers.{number}.input_layernorm.weight",
                (elements,),
                torch.bfloat16,
                ADD,
                0,
                old[number * elements : (number + 1) * elements],
                new[number * elements : (number + 1) * elements],
            )
        )
        for number in range(tensors)
    ]
    assert one is not None
    deltas = [delta for delta in many if delta is not None]
    assert len(deltas) == tensors
    encoded = encode_payload(deltas)
    assert_same(decode_payload(encoded, LIMITS), deltas)
    # A row of the table has about 106 bytes: 16 of a digest, and few others that differ from the last
    # one's.
    assert len(encoded) < len(encode_payload([one])) + tensors * (16 + 12)


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
        (
            {"locations": torch.tensor([1, 3, 3], dtype=torch.int32)},
            "'w': the locations are not strictly",
        ),
        (
            {"locations": torch.tensor([3, 1, 6], dtype=torch.int32)},
            "'w': the locations are not strictly",
        ),
        ({"locations": torch.tensor([-1, 1, 6], dtype=torch.int32)}, "'w' has a location outside"),
        (
            {"locations": range(0), "values": torch.empty(0, dtype=torch.int16)},
            "'w' has 0 elements",
        ),
        (
            {
                "locations": torch.empty(0, dtype=torch.int32),
                "values": torch.empty(0, dtype=torch.int16),
            },
            "'w' has 0 elements",
        ),
        (
            {
                "locations": torch.tensor([8], dtype=torch.int32),
                "values": torch.zeros(1, dtype=torch.int16),
            },
            "'w' has a location outside",
        ),
        ({"locations": range(0, 6, 2)}, "'w' must have step 1"),
        ({"locations": range(3, 7)}, "values of 'w' must be 4"),
        ({"values": torch.zeros(3, dtype=torch.int32)}, "values of 'w' must be 3"),
        (
            {"operation": OVERWRITE, "prior": BitsDigest(1, 2)},
            "'w' has a digest of bits that it overwrites",
        ),
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
    deltas = [CodedDelta.of(dataclasses.replace(valid_delta(), name=f"w{i}")) for i in range(7)]
    batches = list(batch_deltas(iter(deltas), 16))  # 2 gaps and 6 bytes of values in each
    assert [[delta.row.name for delta in batch] for batch in batches] == [
        ["w0", "w1"],
        ["w2", "w3"],
        ["w4", "w5"],
        ["w6"],
    ]
    monkeypatch.setattr(wire, "MAX_DELTAS", 3)
    assert [len(batch) for batch in batch_deltas(deltas, 1 << 20)] == [3, 3, 1]
    assert list(batch_deltas([], 16)) == []
