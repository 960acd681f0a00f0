"""CURVE, ZeroMQ's own encryption: key pairs in files, and who may talk to whom."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from vllm_sparse_refit.errors import ConfigError

if TYPE_CHECKING:
    Context = zmq.Context[zmq.Socket[bytes]]
    Socket = zmq.Socket[bytes]

PUBLIC_SUFFIX = ".key"
SECRET_SUFFIX = ".key_secret"

_StrPath = str | os.PathLike[str]


@dataclass(frozen=True)
class CurveClientKeys:
    """A client's own pair, and the public key of the server that it means to reach. Keys are Z85."""

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes

    def apply(self, socket: "Socket") -> None:
        """Make a socket speak CURVE, before it connects."""
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret
        socket.curve_serverkey = self.server


@dataclass(frozen=True)
class CurveServerKeys:
    """A worker's pair, and the public keys of the clients that may connect."""

    public: bytes
    secret: bytes = field(repr=False)
    allowed: frozenset[bytes]

    @property
    def as_relay(self) -> CurveClientKeys:
        """How this worker connects to the others, which have the same pair."""
        return CurveClientKeys(self.public, self.secret, self.public)

    @contextmanager
    def guarding(self, context: "Context", socket: "Socket") -> Iterator[None]:
        """Let only the allow-list and other workers connect to a socket that is not bound yet."""
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        try:
            authenticator.configure_curve_callback("*", _AllowList(self.allowed | {self.public}))
            socket.curve_secretkey = self.secret
            socket.curve_publickey = self.public
            socket.curve_server = True
            yield
        finally:
            authenticator.stop()


class _AllowList:
    def __init__(self, keys: frozenset[bytes]) -> None:
        self._keys = keys

    def callback(self, _domain: str, key: bytes) -> bool:
        return key in self._keys


def generate_keys(folder: _StrPath, name: str) -> tuple[Path, Path]:
    """Make a key pair: ``NAME.key``, to be given to others, and ``NAME.key_secret``, for its owner only.

    Raises:
        ConfigError: one of the files exists, or they cannot be written.
    """
    directory = Path(folder)
    public, secret = directory / f"{name}{PUBLIC_SUFFIX}", directory / f"{name}{SECRET_SUFFIX}"
    for path in (public, secret):
        if path.exists():
            raise ConfigError(f"{str(path)!r} exists already; choose another name or remove it")
    if not name or Path(name).name != name:
        raise ConfigError(f"the name of a key pair is a plain file name, not {name!r}")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        mask = os.umask(0o077)  # the secret must never be readable, not even for a moment
        try:
            zmq.auth.create_certificates(directory, name)
        finally:
            os.umask(mask)
        public.chmod(0o644)
    except OSError as error:
        raise ConfigError(f"the keys cannot be written to {str(directory)!r}: {error}") from error
    return public, secret


def read_client_keys(
    key_file: _StrPath | None, server_key_file: _StrPath | None
) -> CurveClientKeys | None:
    """The keys in a client's files; None when neither is named.

    Raises:
        ConfigError: only one is named, or a file holds no such key. Keys are never in a message.
    """
    if key_file is None and server_key_file is None:
        return None
    if key_file is None or server_key_file is None:
        raise ConfigError("CURVE needs both curve_key_file and curve_server_key_file")
    public, secret = _read_pair(key_file)
    return CurveClientKeys(public, secret, _read(server_key_file)[0])


def read_server_keys(
    key_file: _StrPath | None, clients_dir: _StrPath | None
) -> CurveServerKeys | None:
    """The keys in a worker's files; None when neither is named.

    Args:
        key_file: the workers' secret file; all workers of a fleet have the same.
        clients_dir: a folder of the public files of the clients that may connect.

    Raises:
        ConfigError: only one is named, a file holds no such key, or the folder has none.
    """
    if key_file is None and clients_dir is None:
        return None
    if key_file is None or clients_dir is None:
        raise ConfigError("CURVE needs both curve_key_file and curve_clients_dir")
    public, secret = _read_pair(key_file)
    files = sorted(Path(clients_dir).glob(f"*{PUBLIC_SUFFIX}"))
    if not files:
        raise ConfigError(
            f"curve_clients_dir {str(clients_dir)!r} has no {PUBLIC_SUFFIX} file, so that nobody could "
            "connect; put the trainer's public key there"
        )
    return CurveServerKeys(public, secret, frozenset(_read(file)[0] for file in files))


def _read_pair(path: _StrPath) -> tuple[bytes, bytes]:
    public, secret = _read(path)
    if secret is None:
        raise ConfigError(
            f"{str(path)!r} holds no secret key; name the file that ends in {SECRET_SUFFIX}"
        )
    return public, secret


def _read(path: _StrPath) -> tuple[bytes, bytes | None]:
    try:
        return zmq.auth.load_certificate(path)
    except (OSError, ValueError):
        # Its own message could show a part of a key.
        raise ConfigError(
            f"{str(path)!r} is no key file; make one with 'vllm-sparse-refit keygen'"
        ) from None
