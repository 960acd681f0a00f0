"""Every error this package raises. All derive from :class:`RefitError`.

A message names the thing that is wrong (tensor, worker, address, version) and says what to do next.
"""


class RefitError(Exception):
    """Base of every error raised by vllm-sparse-refit."""


class ConfigError(RefitError):
    """A setting is invalid or two settings contradict each other."""


class PluginNotEnabledError(RefitError):
    """The engine runs without this plugin, so it has none of the RPC methods."""


class UnsupportedModelError(RefitError):
    """A layer, dtype or loader cannot be updated exactly; nothing was sent or written."""


class TensorMismatchError(RefitError):
    """A tensor's name, shape or dtype is not what the other side holds."""


class CheckpointError(RefitError):
    """A checkpoint folder is missing, incomplete or in a format that is not read."""


class PayloadError(RefitError):
    """A payload is malformed: truncated, inconsistent, of an unknown version or over a limit."""


class ChecksumError(PayloadError):
    """A payload's bytes are not those its checksum was computed from."""


class BaselineError(RefitError):
    """The baseline is missing, incomplete or damaged."""


class TransportError(RefitError):
    """Bytes could not be exchanged with a worker."""


class TransportTimeoutError(TransportError):
    """A worker did not answer within the time limit."""


class TransportStoppedError(TransportError):
    """Sending was stopped by another thread, which has the reason."""


class PayloadRejectedError(TransportError):
    """A worker refused a payload and said why."""


class AuthenticationError(PayloadRejectedError):
    """A worker refused a payload because its key was missing or wrong."""


class EngineStateError(RefitError):
    """The engine cannot take this control call now: wrong thread, unfinished requests, or broken."""


class TransactionError(RefitError):
    """A transfer could not begin, be prepared, be committed or be undone."""


class VersionMismatchError(TransactionError):
    """A worker holds another weight version than the transfer starts from."""


class VerificationError(RefitError):
    """Bits read back after a commit are not the bits that were sent."""
