"""A bounded share of the fuzzing in every run: hypothesis over the same targets."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz import targets
from vllm_sparse_refit.codec.payload import decode_payload
from vllm_sparse_refit.errors import PayloadError
from vllm_sparse_refit.transport.protocol import DATA

CORPUS = targets.corpus()
_MORE = settings(
    max_examples=500,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A good payload with some bytes replaced, cut out or put in."""
    data = bytearray(draw(st.sampled_from(CORPUS)))
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        # Mostly in the prelude and the table, where the numbers are.
        at = at % 160 if draw(st.booleans()) else at
        match draw(st.sampled_from(["set", "cut", "put"])):
            case "set":
                data[at : at + 1] = draw(st.binary(min_size=1, max_size=8))
            case "cut":
                del data[at : at + draw(st.integers(1, 40))]
            case _:
                data[at:at] = draw(st.binary(max_size=40))
    return bytes(data)


@_MORE
@given(mutated() | st.binary(max_size=300))
def test_the_decoder_raises_only_payload_errors(data: bytes) -> None:
    targets.decode(data)
    targets.decode_checksummed(data)


GOOD = targets.GOOD_METADATA


@_MORE
@given(
    st.binary(max_size=300) | st.text().map(str.encode), st.integers(0, 200), st.binary(max_size=5)
)
def test_metadata_raises_only_payload_errors(data: bytes, at: int, put: bytes) -> None:
    targets.metadata(data)
    targets.metadata(GOOD[:at] + put + GOOD[at + len(put) :])


@pytest.fixture(scope="module")
def live() -> Iterator[targets.LiveServer]:
    server = targets.LiveServer()
    yield server
    assert server.staged == 0
    server.close()


@_MORE
@given(
    frames=st.lists(
        st.sampled_from([DATA, b"STAT", b"12345678", GOOD, b"", *CORPUS])
        | st.binary(max_size=40)
        | mutated(),
        max_size=8,
    )
)
def test_a_live_server_goes_on_answering(live: targets.LiveServer, frames: list[bytes]) -> None:
    live.message(targets.framed(*(frame[:1000] for frame in frames)))


def test_the_good_payloads_are_good() -> None:
    """So that what is mutated reaches the decoder's depths."""
    for payload in CORPUS:
        assert len(decode_payload(payload, targets.LIMITS)) == 1


@pytest.mark.parametrize("payload", CORPUS)
def test_what_is_put_right_is_decoded(payload: bytes) -> None:
    """Otherwise nothing behind the checks of sizes and checksum would be fuzzed."""
    assert targets.repaired(payload) == payload
    spoiled = payload[:8] + bytes(16) + payload[24:40] + bytes(8) + payload[48:]
    with pytest.raises(PayloadError):
        decode_payload(spoiled, targets.LIMITS)
    assert targets.repaired(spoiled) == payload
