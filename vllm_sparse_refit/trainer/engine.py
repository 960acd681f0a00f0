"""Control calls to one vLLM engine: the plugin's RPCs, pausing, and the caches that hold old weights."""

import contextlib
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vllm_sparse_refit import errors
from vllm_sparse_refit.errors import (
    ConfigError,
    EngineStateError,
    PluginNotEnabledError,
    RefitError,
    TransactionError,
)

Reply = dict[str, Any]


@dataclass(frozen=True)
class WorkerAddress:
    """Where one worker of one engine receives payloads."""

    engine: str
    rank: int
    address: str


class LocalEngine:
    """An :class:`vllm.LLM` of this process, with its workers in process or in processes of their own.

    Belongs to the thread that made it: vLLM's engine takes control calls from one thread only, and a
    call from a second one can abort the process. Every method checks that and raises
    :class:`EngineStateError`.

    An engine with worker processes is never called again after a call that raised or was interrupted: it
    could answer with replies to earlier calls, or not at all.

    Args:
        llm: the engine.
        name: how to call it in messages.

    Raises:
        ConfigError: ``llm`` is no engine, or one that is not supported.
        PluginNotEnabledError: the engine has none of the plugin's RPC methods.
    """

    def __init__(self, llm: Any, name: str) -> None:
        self.name = name
        self._llm = llm
        self._thread = threading.get_ident()
        self._broken: str | None = None
        if not hasattr(llm, "collective_rpc") or not hasattr(llm, "llm_engine"):
            raise ConfigError(
                f"{name}: expected a vllm.LLM, not {type(llm).__name__}; servers are not supported yet"
            )
        from vllm.v1.engine.core_client import InprocClient

        parallel = llm.llm_engine.vllm_config.parallel_config
        if parallel.data_parallel_size > 1:
            raise ConfigError(
                f"{name}: data_parallel_size={parallel.data_parallel_size} inside one LLM is not supported, "
                "since vLLM returns the results of its first replica only; make one LLM per replica and "
                "pass them as a list"
            )
        self._in_process = isinstance(llm.llm_engine.engine_core, InprocClient)
        self._world_size = int(parallel.world_size)
        self._require_plugin()

    def _require_plugin(self) -> None:
        # A method that the workers lack must never be called to find out: that alone corrupts the engine.
        from vllm import envs

        from vllm_sparse_refit import config, plugin

        allowed = envs.VLLM_PLUGINS
        if not plugin.is_registered() or (
            allowed is not None and config.PLUGIN_NAME not in allowed
        ):
            raise PluginNotEnabledError(
                f"{self.name} runs without the sparse_refit plugin: set VLLM_PLUGINS=sparse_refit (add it to "
                "the list if there are others) before the engine starts"
            )

    # --- RPCs ----------------------------------------------------------------------------------------

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Reply]:
        """Call one of the plugin's RPC methods on every worker.

        Returns:
            One reply for each rank, in rank order, all of them ``ok``.

        Raises:
            EngineStateError: wrong thread, or the engine is broken or answers for another call.
            RefitError: a worker refused; of the class that the worker raised, with its message.
        """
        self._check_usable()
        nonce = secrets.token_hex(8)
        try:
            replies = self._llm.collective_rpc(method, args=args, kwargs={**kwargs, "nonce": nonce})
        except BaseException as error:
            if not self._in_process:
                # The reply may still be under way, and would be taken for that of a later call.
                self._broken = f"{method} ended with {type(error).__name__}: {error}"
            if not isinstance(error, Exception):
                raise
            raise EngineStateError(
                f"{self.name} failed in {method} ({type(error).__name__}: {error}); restart the engine"
            ) from error
        self._check_replies(method, nonce, replies)
        replies = sorted(replies, key=lambda reply: int(reply["rank"]))
        for reply in replies:
            if not reply["ok"]:
                raise _error_of(self.name, reply)
        return replies

    def _check_replies(self, method: str, nonce: str, replies: list[Reply]) -> None:
        valid = len(replies) == self._world_size and all(
            isinstance(reply, dict) and reply.get("nonce") == nonce for reply in replies
        )
        if not valid:
            self._broken = f"it answered {method} with replies to another call"
            raise EngineStateError(f"{self.name}: {self._broken}; restart the engine")

    def workers(self) -> list[WorkerAddress]:
        """Every worker's address, in rank order."""
        return [
            WorkerAddress(self.name, int(reply["rank"]), str(reply["address"]))
            for reply in self.call("sparse_refit_status")
        ]

    def abort(self, transfer_id: str) -> str | None:
        """Give a transfer up on every worker, as far as that can be done. Never raises a RefitError.

        Returns:
            What went wrong, or None.
        """
        try:
            self.call("sparse_refit_abort", transfer_id)
        except RefitError as error:
            return str(error)
        return None

    # --- generation ----------------------------------------------------------------------------------

    def check_idle(self, pause: bool) -> None:
        """Refuse while requests are unfinished, unless generation is paused or ``pause`` allows to.

        Raises:
            EngineStateError: see above, or wrong thread, or the engine is broken.
        """
        self._check_usable()
        engine = self._llm.llm_engine
        if not pause and engine.has_unfinished_requests() and not engine.is_sleeping():
            raise EngineStateError(
                f"{self.name} has unfinished requests, whose later tokens would come from other "
                "weights than their earlier ones; finish or abort them first, or call "
                "sync(..., pause=True) to let them go on with the new weights"
            )

    @contextlib.contextmanager
    def paused(self, pause: bool) -> Iterator[None]:
        """Hold generation while the context is open; an engine that was paused before stays so.

        Requests are kept. They are computed again from their tokens afterwards, since the caches that
        :meth:`reset_caches` drops hold results of the old weights.
        """
        self._check_usable()
        if not pause or self._llm.llm_engine.is_sleeping():
            yield
            return
        self._llm.sleep(level=0, mode="keep")
        try:
            yield
        finally:
            self._llm.wake_up(tags=["scheduling"])

    def reset_caches(self) -> None:
        """Drop what was computed with the old weights: prefix, multimodal and encoder caches.

        LoRA state is reset by the workers themselves when they commit.

        Raises:
            EngineStateError: a cache could not be dropped.
        """
        self._check_usable()
        try:
            dropped = self._llm.reset_prefix_cache(
                reset_running_requests=True, reset_connector=True
            )
            self._llm.reset_mm_cache()
            self._llm.llm_engine.reset_encoder_cache()
        except Exception as error:
            raise EngineStateError(
                f"{self.name} could not drop its caches ({type(error).__name__}: {error})"
            ) from error
        if not dropped:
            raise EngineStateError(
                f"{self.name} could not drop its prefix cache, which holds results of the old weights; "
                "finish or abort its requests and sync again"
            )

    def _check_usable(self) -> None:
        if threading.get_ident() != self._thread:
            raise EngineStateError(
                f"{self.name} belongs to the thread that connected to it; call sync() there, between "
                "generate() calls"
            )
        if self._broken:
            raise EngineStateError(f"{self.name} is broken ({self._broken}); restart the engine")


def _error_of(engine: str, reply: Reply) -> RefitError:
    """The worker's error as an exception of the class it had there."""
    kind = getattr(errors, str(reply.get("error_type")), None)
    if not (isinstance(kind, type) and issubclass(kind, RefitError)):
        kind = TransactionError
    return kind(f"{engine}, rank {reply['rank']}: {reply['error']}")
