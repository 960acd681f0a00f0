"""What all implementations of the decoder make of a payload; they must agree."""

import tracemalloc
from dataclasses import replace

import pytest
import torch

from tests.codec import implementations
from vllm_sparse_refit.codec.delta import TensorDelta
from vllm_sparse_refit.codec.payload import DecodeLimits, decode_payload
from vllm_sparse_refit.errors import PayloadError

MIB = 1 << 20
LIMITS = DecodeLimits(max_payload_bytes=MIB, max_decoded_bytes=MIB)


def decode(body: bytes, limits: DecodeLimits = LIMITS) -> list[TensorDelta] | PayloadError:
    """What every implementation makes of it, within the memory that the limits allow."""
    outcomes: list[list[TensorDelta] | PayloadError] = []
    for name in implementations.NUMPY_AND_COMPILED:
        with implementations.running(name):
            tracemalloc.start()
            try:
                outcomes.append(decode_payload(body, limits))
            except PayloadError as error:
                outcomes.append(error)
            finally:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
        assert peak < 2 * limits.max_decoded_bytes + MIB, f"{peak} bytes"
    first = outcomes[0]
    for other in outcomes[1:]:
        assert described(other) == described(first)
    return first


def described(outcome: list[TensorDelta] | PayloadError) -> list[object]:
    """All that there is to an outcome, for a comparison."""
    if isinstance(outcome, PayloadError):
        return [type(outcome), str(outcome)]
    return [
        replace(delta, locations=range(0), values=torch.empty(0)).__dict__
        | {
            "kind": type(delta.locations),
            "locations": list(delta.locations),
            "values": (delta.values.dtype, delta.values.tolist()),
        }
        for delta in outcome
    ]


def accepted(body: bytes, limits: DecodeLimits = LIMITS) -> list[TensorDelta]:
    outcome = decode(body, limits)
    assert isinstance(outcome, list), outcome
    return outcome


def refused(body: bytes, message: str, limits: DecodeLimits = LIMITS) -> None:
    outcome = decode(body, limits)
    assert isinstance(outcome, PayloadError)
    with pytest.raises(PayloadError, match=message):
        raise outcome
