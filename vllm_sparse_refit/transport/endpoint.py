"""What an endpoint's text says: is it this machine only, and does it need IPv6."""

import ipaddress

from vllm_sparse_refit.errors import ConfigError


def is_loopback(address: str) -> bool:
    """Whether nothing outside this machine can reach a socket bound to ``address``.

    Raises:
        ConfigError: ``address`` is no tcp, ipc or inproc endpoint.
    """
    scheme, separator, rest = address.partition("://")
    if scheme in ("ipc", "inproc") and separator and rest:
        return True
    host, colon, port = rest.rpartition(":")
    if scheme != "tcp" or not colon or not host or not port:
        raise ConfigError(
            f"{address!r} is no ZeroMQ endpoint; write it like 'tcp://127.0.0.1:*' or 'ipc:///path'"
        )
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False  # a wildcard, an interface or another host name


def needs_ipv6(address: str) -> bool:
    """Whether ``address`` is written with a literal IPv6 host."""
    return "[" in address


def advertised(address: str, host: str | None) -> str:
    """``address``, a bound endpoint, as others reach it: with ``host`` in place of its own host.

    Raises:
        ConfigError: ``host`` is given for an endpoint that has none.
    """
    if host is None:
        return address
    scheme, _, rest = address.partition("://")
    if scheme != "tcp":
        raise ConfigError(f"sparse_refit.advertised_host={host!r} makes no sense for {address!r}")
    return f"tcp://{host}:{rest.rpartition(':')[2]}"


def is_wildcard(address: str) -> bool:
    """Whether ``address`` stands for all interfaces, so that nobody can connect to it from elsewhere."""
    host = address.partition("://")[2].rpartition(":")[0]
    return host in ("0.0.0.0", "[::]", "*")
