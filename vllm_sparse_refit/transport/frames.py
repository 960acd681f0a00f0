"""Messages off a ROUTER socket: read within bounds, and parsed as far as the body."""

from collections.abc import Sequence
from typing import Final

import zmq

from vllm_sparse_refit.errors import PayloadError
from vllm_sparse_refit.transport.protocol import (
    MAC_BYTES,
    MAX_KIND_BYTES,
    MAX_METADATA_BYTES,
    MAX_REQUEST_ID_BYTES,
    REQUEST_FRAMES,
    RequestHead,
    parse_request_head,
)

_HEAD_LIMITS: Final = (MAX_KIND_BYTES, MAX_REQUEST_ID_BYTES, MAX_METADATA_BYTES, MAC_BYTES)


def receive_frames(router: "zmq.Socket[bytes]") -> tuple[bytes, list[zmq.Frame]]:
    """One message: its sender and its frames, of which at most one too many is kept."""
    identity = router.recv()
    frames: list[zmq.Frame] = []
    while router.getsockopt(zmq.RCVMORE):
        frame = router.recv(copy=False)
        if len(frames) <= REQUEST_FRAMES:
            frames.append(frame)
    return identity, frames


def is_answerable(frames: Sequence[zmq.Frame]) -> bool:
    """Whether a refusal of the message can say which request it refuses."""
    return len(frames) > 1 and len(frames[1]) <= MAX_REQUEST_ID_BYTES


def parse_head(frames: Sequence[zmq.Frame]) -> RequestHead:
    """Check the frames' number and sizes, and validate all but the body.

    Raises:
        PayloadError: these are no frames of a request.
    """
    if len(frames) != REQUEST_FRAMES:
        raise PayloadError(
            f"a message has {REQUEST_FRAMES} frames, this one has {len(frames)} or more; check "
            "that the sender is a ZmqSparseRefitClient of this version"
        )
    for index, (frame, limit) in enumerate(zip(frames, _HEAD_LIMITS, strict=False)):
        if len(frame) > limit:
            raise PayloadError(f"frame {index} has {len(frame)} bytes; its limit is {limit}")
    return parse_request_head([frame.bytes for frame in frames[:-1]])
