"""Sockets to workers' servers, bounded on every side."""

from typing import TYPE_CHECKING

import zmq

from vllm_sparse_refit.errors import TransportError
from vllm_sparse_refit.transport.curve import CurveClientKeys
from vllm_sparse_refit.transport.endpoint import needs_ipv6
from vllm_sparse_refit.transport.protocol import MAX_REPLY_BYTES

if TYPE_CHECKING:
    Context = zmq.Context[zmq.Socket[bytes]]
    Socket = zmq.Socket[bytes]


def connect_dealer(
    context: "Context", address: str, curve: CurveClientKeys | None = None
) -> "Socket":
    """A DEALER connected to a worker's server, encrypted if there are keys.

    Raises:
        TransportError: ``address`` is no endpoint.
    """
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 1)
    socket.setsockopt(zmq.RCVHWM, 16)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY_BYTES)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.IPV6, int(needs_ipv6(address)))
    if curve is not None:
        curve.apply(socket)
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        socket.close()
        raise TransportError(
            f"cannot connect to {address!r}: {error.strerror}; "
            "an address looks like tcp://10.0.0.5:43121"
        ) from error
    return socket
