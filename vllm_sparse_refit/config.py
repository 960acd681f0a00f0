"""Every setting, as frozen dataclasses that check themselves.

:class:`WorkerConfig` reaches the workers through vLLM's ``additional_config={"sparse_refit": {...}}``;
:class:`SyncConfig` is the trainer's.
"""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from vllm_sparse_refit.errors import ConfigError

PLUGIN_NAME = "sparse_refit"

CAST_DTYPES = ("bfloat16", "float16", "float32")

MIB = 1 << 20
GIB = 1 << 30


def _require_positive(owner: object, *names: str) -> None:
    """Check numbers against 0 and against the type that the field is declared with."""
    for field in dataclasses.fields(owner):  # type: ignore[arg-type]
        if field.name not in names:
            continue
        value: Any = getattr(owner, field.name)
        accepted: tuple[type, ...] = (int,) if field.type is int else (int, float)
        number = isinstance(value, accepted) and not isinstance(value, bool)
        if not number or not value > 0:
            kind = "whole number" if field.type is int else "number"
            raise ConfigError(
                f"{type(owner).__name__}.{field.name} must be a positive {kind}, not {value!r}"
            )


def _require_counts(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ConfigError(
                f"{type(owner).__name__}.{name} must be a whole number of 0 or more, not {value!r}"
            )


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """Settings of a worker's server and receiver.

    Attributes:
        enabled: True or False decides; None leaves it to ``VLLM_PLUGINS`` naming the plugin.
        bind_address: ZeroMQ endpoint of the server; a port of ``*`` takes a free one.
        api_key_env_var: Name of the environment variable that holds the key shared with the trainer.
            This or CURVE is needed for any ``bind_address`` that is not loopback.
        curve_key_file: Secret file of the workers' CURVE key pair, the same on all workers, as made by
            ``vllm-sparse-refit keygen``. Connections are encrypted then.
        curve_clients_dir: Folder with the public files of those who may connect: the trainer's.
        allow_unauthenticated: Bind off loopback without any key: everybody who reaches it can change the
            weights.
        max_payload_bytes: Largest payload accepted from the wire, encoded.
        max_decoded_bytes: Largest payload accepted, decoded; checked before anything is decompressed.
        max_staged_bytes: Most decoded bytes held for one transfer.
        queue_depth: Payloads received and not yet staged, at most.
        staging_threads: Threads that verify and decode payloads.
        timeout_s: Longest wait for payloads still under way when a transfer is prepared, in seconds.
        shadow_packed_layers: Keep, in host memory, the weights of layers that vLLM packs after loading as
            they were loaded, so that these layers can be updated. Without it such a model is refused.
        max_shadow_bytes: Most host memory that this may take in one worker; a model that needs more is
            refused. None sets no limit.
        transfer_timeout_s: Seconds without a payload or a call after which an open or prepared transfer is
            given up, and a committed one that was not released becomes final.
        advertised_host: Host by which the trainer and the other workers reach this one; None takes the one
            in ``bind_address``, which for all interfaces (``0.0.0.0``) is no host to connect to.
        relay_queue_depth: Payloads that wait for one child, the one being sent included, before senders
            are made to wait.
        relay_timeout_s: Longest wait for a child to acknowledge one payload, in seconds, per try; a quarter
            more for each level of workers below the child.
        relay_retries: Further tries after a child did not acknowledge in time.
        max_relay_bytes: Most bytes of payloads that wait to be forwarded.
        peer_queue_depth: Unanswered payloads of one peer, at most.
        max_peers: Peers that have unanswered payloads at one time, at most.
    """

    enabled: bool | None = None
    bind_address: str = "tcp://127.0.0.1:*"
    api_key_env_var: str | None = None
    curve_key_file: str | None = None
    curve_clients_dir: str | None = None
    allow_unauthenticated: bool = False
    max_payload_bytes: int = 256 * MIB
    max_decoded_bytes: int = 1 * GIB
    max_staged_bytes: int = 16 * GIB
    queue_depth: int = 8
    staging_threads: int = 2
    timeout_s: float = 300.0
    shadow_packed_layers: bool = True
    max_shadow_bytes: int | None = None
    transfer_timeout_s: float = 600.0
    advertised_host: str | None = None
    relay_queue_depth: int = 2
    relay_timeout_s: float = 30.0
    relay_retries: int = 1
    max_relay_bytes: int = 1 * GIB
    peer_queue_depth: int = 16
    max_peers: int = 1024

    def __post_init__(self) -> None:
        _require_positive(
            self,
            "max_payload_bytes",
            "max_decoded_bytes",
            "max_staged_bytes",
            "queue_depth",
            "staging_threads",
            "timeout_s",
            "transfer_timeout_s",
            "relay_queue_depth",
            "relay_timeout_s",
            "max_relay_bytes",
            "peer_queue_depth",
            "max_peers",
        )
        _require_counts(self, "relay_retries")
        if self.enabled is not None and not isinstance(self.enabled, bool):
            raise ConfigError(f"sparse_refit.enabled must be true or false, not {self.enabled!r}")
        if not isinstance(self.shadow_packed_layers, bool):
            raise ConfigError(
                "sparse_refit.shadow_packed_layers must be true or false, not "
                f"{self.shadow_packed_layers!r}"
            )
        limit = self.max_shadow_bytes
        if limit is not None and (type(limit) is not int or limit < 0):
            raise ConfigError(
                "sparse_refit.max_shadow_bytes must be a whole number of 0 or more, or None, not "
                f"{limit!r}"
            )
        if not isinstance(self.allow_unauthenticated, bool):
            raise ConfigError(
                "sparse_refit.allow_unauthenticated must be true or false, not "
                f"{self.allow_unauthenticated!r}"
            )

    @classmethod
    def from_additional_config(cls, additional_config: object) -> Self:
        """Read ``additional_config["sparse_refit"]``; absent means all defaults.

        Raises:
            ConfigError: the section is no mapping, or has a setting that does not exist.
        """
        if not isinstance(additional_config, Mapping) or PLUGIN_NAME not in additional_config:
            return cls()
        section: Any = additional_config[PLUGIN_NAME]
        if not isinstance(section, Mapping):
            raise ConfigError(
                f'additional_config["{PLUGIN_NAME}"] must be a mapping of settings, not {section!r}'
            )
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(section) - known):
            raise ConfigError(
                f'additional_config["{PLUGIN_NAME}"] has unknown settings {unknown}; '
                f"the settings are {sorted(known)}"
            )
        # Naming the section is asking for the plugin, unless it says otherwise.
        return cls(**{"enabled": True, **section})


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """Settings of the trainer's side.

    Attributes:
        api_key_env_var: Name of the environment variable that holds the key shared with the workers.
        curve_key_file: Secret file of the trainer's own CURVE key pair, as made by
            ``vllm-sparse-refit keygen``, where the workers use CURVE.
        curve_server_key_file: Public file of the workers' key pair.
        timeout_s: Longest wait for a worker to acknowledge one payload, in seconds, per try.
        retries: Further tries after a payload was not acknowledged in time.
        fanout: Most workers that one worker forwards a payload to; the trainer sends it once.
        chunk_elements: Elements compared at a time; bounds the trainer's temporary memory.
        payload_bytes: Size at which a payload is closed and sent, before compression.
        threads: Threads that compare and encode; None takes as many as the process may use, at most 8.
        queue_depth: Items that wait between two stages of the pipeline, at most.
        verification_samples: Changed elements read back per tensor after a commit.
        baseline_dir: Folder for a memory-mapped baseline; None keeps it in RAM.
        baseline_on_device: Keep each tensor's baseline on the device where the tensor is: twice the
            memory there, but only what changed crosses to the host.
        rpc_timeout_s: Longest wait for one control call to an engine that has processes of its own, in
            seconds. An engine that takes longer is not called again.
        retained_bytes: Encoded bytes of past transfers that are kept to bring engines up that missed them;
            an engine that needs an older one is sent every element. With 0 a snapshot also does without
            the fingerprints of the engines' weights, which take a pass over them.
        state_dir: Folder in which each sync writes down its decision before the first engine commits; None
            keeps it in memory only.
        dtype: Cast floating tensors to this dtype before they are compared, as if the checkpoint were
            saved in it, for a trainer that keeps fp32 master weights: ``"bfloat16"``, ``"float16"`` or
            ``"float32"``. None sends them as they are.
        ignore: ``fnmatch`` patterns of checkpoint names that the model's loader skips on purpose and
            that nobody needs in the engine (``*.rotary_emb.inv_freq``).
    """

    api_key_env_var: str | None = None
    curve_key_file: str | os.PathLike[str] | None = None
    curve_server_key_file: str | os.PathLike[str] | None = None
    timeout_s: float = 30.0
    retries: int = 2
    fanout: int = 2
    chunk_elements: int = 2 * MIB
    payload_bytes: int = MIB // 2
    threads: int | None = None
    queue_depth: int = 2
    verification_samples: int = 64
    baseline_dir: str | os.PathLike[str] | None = None
    baseline_on_device: bool = False
    rpc_timeout_s: float = 600.0
    retained_bytes: int = 256 * MIB
    state_dir: str | os.PathLike[str] | None = None
    dtype: str | None = None
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _require_positive(
            self,
            "timeout_s",
            "fanout",
            "chunk_elements",
            "payload_bytes",
            "queue_depth",
            "rpc_timeout_s",
        )
        if self.threads is not None and (type(self.threads) is not int or self.threads < 1):
            raise ConfigError(
                f"SyncConfig.threads must be 1 or more, or None, not {self.threads!r}"
            )
        if self.baseline_on_device and self.baseline_dir is not None:
            raise ConfigError("a baseline lives on the device or in baseline_dir, not in both")
        if self.dtype is not None and self.dtype not in CAST_DTYPES:
            raise ConfigError(
                f"SyncConfig.dtype must be one of {list(CAST_DTYPES)} (a string), not {self.dtype!r}"
            )
        if isinstance(self.ignore, str):
            raise ConfigError(f"SyncConfig.ignore must be a tuple of patterns, not {self.ignore!r}")
        _require_counts(self, "retries", "verification_samples", "retained_bytes")


def read_api_key(env_var: str | None) -> bytes | None:
    """The key held by an environment variable, or None when no variable is named.

    Raises:
        ConfigError: the variable is named but unset or empty. The key itself is never in a message.
    """
    if env_var is None:
        return None
    key = os.environ.get(env_var, "")
    if not key:
        raise ConfigError(
            f"the environment variable {env_var} should hold the API key but is unset or empty; "
            "export it in this process, or leave api_key_env_var unset to run without a key"
        )
    return key.encode()
