"""The worker extension: the RPC methods that every worker gets.

No method raises. A raising RPC can leave an engine with worker processes answering every later call
with the wrong reply, so each returns ``{"ok", "error", "error_type", "rank", "nonce", ...}`` with
JSON types only, and the caller checks ``ok`` and ``nonce`` of every rank.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_sparse_refit.apply.applier import DEFAULT_SAMPLES
from vllm_sparse_refit.checksum import checksum_hex
from vllm_sparse_refit.codec.dtypes import dtype_from_name
from vllm_sparse_refit.errors import EngineStateError, PluginNotEnabledError, RefitError
from vllm_sparse_refit.plugin import setting_now
from vllm_sparse_refit.transport.tree import DEFAULT_FANOUT
from vllm_sparse_refit.worker.receiver import Receiver

# Below vLLM's own logger, so that lines come out in its format and with its worker prefix.
logger = logging.getLogger("vllm.sparse_refit")

Reply = dict[str, Any]

RECEIVER_ATTRIBUTE = "_sparse_refit_receiver"
# What is there after the worker was shut down.
CLOSED = "closed"


def live_receiver(worker: Any) -> Receiver | None:
    """The worker's receiver; None where the plugin is not enabled or the worker was shut down."""
    receiver = getattr(worker, RECEIVER_ATTRIBUTE, None)
    return receiver if isinstance(receiver, Receiver) else None


def _receiver(worker: Any) -> Receiver:
    if (receiver := live_receiver(worker)) is not None:
        return receiver
    if getattr(worker, RECEIVER_ATTRIBUTE, None) is CLOSED:
        raise EngineStateError("this engine was shut down; start another one and connect to it")
    raise PluginNotEnabledError(
        "sparse_refit is installed but not enabled in this engine: name it in VLLM_PLUGINS "
        '(VLLM_PLUGINS=sparse_refit) or set additional_config={"sparse_refit": {}}, and start '
        f"the engine again; {setting_now()}"
    )


def _rpc(method: Callable[..., Reply]) -> Callable[..., Reply]:
    """Make an RPC method out of one that may raise: every error becomes a reply."""

    @functools.wraps(method)
    def call(worker: Any, /, *args: Any, nonce: str | None = None, **kwargs: Any) -> Reply:
        reply: Reply = {"ok": True, "error": None, "error_type": None}
        try:
            reply |= method(worker, *args, **kwargs)
        except Exception as error:
            text = (
                str(error) if isinstance(error, RefitError) else f"{type(error).__name__}: {error}"
            )
            if not isinstance(error, RefitError):
                logger.exception("%s failed", method.__name__)
            reply = {"ok": False, "error": text, "error_type": type(error).__name__}
            if (receiver := live_receiver(worker)) is not None:
                receiver.remember_error(text)
        return reply | {"rank": int(getattr(worker, "rank", -1)), "nonce": nonce}

    return call


class SparseRefitWorkerExtension:
    """RPC methods for vLLM workers, called through ``collective_rpc`` by name.

    Usable as ``worker_extension_cls`` or as the base of a class named there; without that, the
    plugin gives the same methods to every worker. All take an optional ``nonce`` that the reply
    repeats.
    """

    @_rpc
    def sparse_refit_status(self) -> Reply:
        """Address, state, weight version and queue figures of this worker."""
        return _receiver(self).status()

    @_rpc
    def sparse_refit_recover(self, base_digest: str) -> Reply:
        """End what an earlier transfer left open, then the same as ``sparse_refit_status``."""
        return _receiver(self).recover(base_digest)

    @_rpc
    def discover_native_skips(self, state_dict_info: Mapping[str, Sequence[Any]]) -> Reply:
        """Classify the trainer's tensors; writes nothing.

        Args:
            state_dict_info: ``{checkpoint name: [shape, dtype name]}``, full and unsharded.
        """
        info = {
            name: (tuple(int(size) for size in shape), dtype_from_name(dtype))
            for name, (shape, dtype) in state_dict_info.items()
        }
        return _receiver(self).discover(info)

    @_rpc
    def sparse_refit_compare(self, samples: Mapping[str, Any]) -> Reply:
        """Compare sampled elements, ``{name: [positions, bits]}``, with what the model holds."""
        return _receiver(self).compare(samples)

    @_rpc
    def sparse_refit_digests(self) -> Reply:
        """Digests of what this rank holds of every canonical tensor."""
        return _receiver(self).digests()

    @_rpc
    def sparse_refit_fingerprint(self) -> Reply:
        """A digest of all weights of this worker; None where vLLM offers no checksums of them."""
        _receiver(self)
        compute = getattr(self, "compute_weight_checksums", None)
        found = None if compute is None else checksum_hex(repr(sorted(compute().items())).encode())
        return {"fingerprint": found}

    @_rpc
    def sparse_refit_adopt(self, label: str, digest: str) -> Reply:
        """Take this weight version; for workers that were found to hold equal weights."""
        return _receiver(self).adopt(label, digest)

    @_rpc
    def update_weights_from_decoded_sparse_payload(self, *payloads: bytes | str) -> Reply:
        """Apply payloads, bytes or paths of files this worker can read, all or nothing."""
        return _receiver(self).update_directly(*payloads)

    @_rpc
    def finish_sparse_delta_refit(self) -> Reply:
        """Compare samples of the elements just written with what was sent; ends direct updates."""
        return _receiver(self).finish()

    @_rpc
    def sparse_refit_begin(
        self,
        transfer_id: str,
        base_digest: str,
        target_label: str,
        *,
        sequence: int,
        verification_samples: int = DEFAULT_SAMPLES,
        addresses: Sequence[str] = (),
        fanout: int = DEFAULT_FANOUT,
    ) -> Reply:
        """Open a transfer from the version with ``base_digest``, relayed among ``addresses``.

        ``sequence`` must be above that of every earlier transfer on this worker, which its status
        tells as ``server.sequence``.
        """
        return _receiver(self).begin(
            transfer_id,
            base_digest,
            target_label,
            sequence=sequence,
            verification_samples=verification_samples,
            addresses=addresses,
            fanout=fanout,
        )

    @_rpc
    def sparse_refit_prepare(self, transfer_id: str, expected_payloads: Mapping[str, int]) -> Reply:
        """Check that all payloads (count by producer id) are here and can be applied."""
        return _receiver(self).prepare(transfer_id, expected_payloads)

    @_rpc
    def sparse_refit_commit(self, transfer_id: str) -> Reply:
        """Write a prepared transfer into the model; undoable until released."""
        return _receiver(self).commit(transfer_id)

    @_rpc
    def sparse_refit_release(self, transfer_id: str) -> Reply:
        """Make a committed transfer final."""
        return _receiver(self).release(transfer_id)

    @_rpc
    def sparse_refit_abort(self, transfer_id: str) -> Reply:
        """Give a transfer up; if committed, roll it back bit for bit."""
        return _receiver(self).abort(transfer_id)


RPC_METHODS = tuple(name for name in vars(SparseRefitWorkerExtension) if not name.startswith("_"))
