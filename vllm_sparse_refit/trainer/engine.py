"""Control calls to one vLLM engine: the plugin's RPCs, pausing, and the caches that hold old weights."""

import concurrent.futures
import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from vllm_sparse_refit import errors
from vllm_sparse_refit.errors import (
    ConfigError,
    EngineStateError,
    PluginNotEnabledError,
    RefitError,
    TransactionError,
)

# How soon an owner that waits for a control call notices that the engine died.
_DEATH_CHECK_S = 0.25

Reply = dict[str, Any]
# What the workers of one engine reported of themselves.
Workers = Sequence[Mapping[str, Any]]
T = TypeVar("T")


class LocalEngine:
    """An :class:`vllm.LLM` of this process, with its workers in process or in processes of their own.

    Belongs to the thread that made it: vLLM's engine takes control calls from one thread only, and a
    call from a second one can abort the process. Every method checks that and raises
    :class:`EngineStateError`.

    An engine with worker processes is never called again after a call that raised, was interrupted or took
    too long: it could answer with replies to earlier calls, or not at all. Such an engine is called in a
    thread of its own while the owner waits, so that the wait ends at a limit, or when vLLM notices that a
    process of the engine has died; vLLM's own time limit would corrupt it, and a call that waits while the
    engine dies is never answered. An engine in this process is called directly: nothing of it can die by
    itself.

    Args:
        llm: the engine.
        name: how to call it in messages.
        timeout_s: longest wait for one control call, in seconds.

    Raises:
        ConfigError: ``llm`` is no engine, or one that is not supported.
        PluginNotEnabledError: the engine has none of the plugin's RPC methods.
    """

    def __init__(self, llm: Any, name: str, *, timeout_s: float) -> None:
        self.name = name
        self._llm = llm
        self._timeout_s = timeout_s
        self._thread = threading.get_ident()
        self._broken: str | None = None
        if not hasattr(llm, "collective_rpc") or not hasattr(llm, "llm_engine"):
            raise ConfigError(
                f"{name}: expected a vllm.LLM, not {type(llm).__name__}; servers are not supported yet"
            )
        self._in_process, self._world_size = self._inspect(llm)

    def _inspect(self, llm: Any) -> tuple[bool, int]:
        """Check that the engine can be driven; whether it runs in this process, and how many workers."""
        from vllm.v1.engine.core_client import InprocClient

        parallel = llm.llm_engine.vllm_config.parallel_config
        if parallel.data_parallel_size > 1:
            raise ConfigError(
                f"{self.name}: data_parallel_size={parallel.data_parallel_size} inside one LLM is not "
                "supported, since vLLM returns the results of its first replica only; make one LLM per "
                "replica and pass them as a list"
            )
        self._require_plugin()
        return isinstance(llm.llm_engine.engine_core, InprocClient), int(parallel.world_size)

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
                f"the list if there are others) before the engine starts; {plugin.setting_now()}"
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
        nonce = secrets.token_hex(8)
        replies = self._control(
            method,
            lambda: self._llm.collective_rpc(method, args=args, kwargs={**kwargs, "nonce": nonce}),
        )
        self._check_replies(method, nonce, replies)
        replies = sorted(replies, key=lambda reply: int(reply["rank"]))
        for reply in replies:
            if not reply["ok"]:
                raise _error_of(self.name, reply)
        return replies

    def _control(self, what: str, call: Callable[[], T]) -> T:
        """Make one control call, within the time limit; an engine that fails it is broken."""
        self._check_usable()
        self.check_alive()
        try:
            return call() if self._in_process else self._within_limit(call)
        except BaseException as error:
            if not self._in_process:
                # The reply may still be under way, and would be taken for that of a later call.
                self._broken = f"{what} ended with {_in_words(error)}"
            if not isinstance(error, Exception):
                raise
            self.check_alive()  # a death says more than what it did to the call
            raise EngineStateError(
                f"{self.name} failed in {what} ({_in_words(error)}); restart the engine and give the new one "
                "to replace_engine()"
            ) from error

    def _within_limit(self, call: Callable[[], T]) -> T:
        outcome: list[T] = []
        failure: list[BaseException] = []

        def run() -> None:
            try:
                outcome.append(call())
            except BaseException as error:
                failure.append(error)

        thread = threading.Thread(target=run, name="sparse-refit-control", daemon=True)
        deadline = time.monotonic() + self._timeout_s
        thread.start()
        while thread.is_alive() and (left := deadline - time.monotonic()) > 0:
            thread.join(min(left, _DEATH_CHECK_S))
            if thread.is_alive():
                self.check_alive()  # without this it would wait for a dead process's answer
        if failure:
            raise failure[0]
        if not outcome:
            raise TimeoutError(f"no answer within {self._timeout_s:g} s (SyncConfig.rpc_timeout_s)")
        return outcome[0]

    def _check_replies(self, method: str, nonce: str, replies: list[Reply]) -> None:
        valid = len(replies) == self._world_size and all(
            isinstance(reply, dict) and reply.get("nonce") == nonce for reply in replies
        )
        if not valid:
            self._broken = f"it answered {method} with replies to another call"
            raise EngineStateError(f"{self.name}: {self._broken}; restart the engine")

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
        if not pause and self._control("is_idle", self._has_running_requests):
            raise EngineStateError(
                f"{self.name} has unfinished requests, whose later tokens would come from other "
                "weights than their earlier ones; finish or abort them first, or call "
                "sync(..., pause=True) to let them go on with the new weights"
            )

    def _has_running_requests(self) -> bool:
        engine = self._llm.llm_engine
        return bool(engine.has_unfinished_requests()) and not engine.is_sleeping()

    @contextlib.contextmanager
    def paused(self, pause: bool) -> Iterator[None]:
        """Hold generation while the context is open; an engine that was paused before stays so.

        Requests are kept. They are computed again from their tokens afterwards, since the caches that
        :meth:`reset_caches` drops hold results of the old weights.
        """
        if not pause or self._control("is_sleeping", self._llm.llm_engine.is_sleeping):
            yield
            return
        self._control("sleep", lambda: self._llm.sleep(level=0, mode="keep"))
        try:
            yield
        except BaseException as error:
            try:
                self._wake_up()
            except RefitError as problem:
                error.add_note(str(problem))
            raise
        self._wake_up()

    def _wake_up(self) -> None:
        if self._broken is None:
            self._control("wake_up", lambda: self._llm.wake_up(tags=["scheduling"]))

    def reset_caches(self) -> None:
        """Drop what was computed with the old weights: prefix, multimodal and encoder caches.

        LoRA state is reset by the workers themselves when they commit.

        Raises:
            EngineStateError: a cache could not be dropped.
        """
        if not self._control("resetting caches", self._reset_caches):
            raise EngineStateError(
                f"{self.name} could not drop its prefix cache, which holds results of the old weights; "
                "finish or abort its requests and sync again"
            )

    def _reset_caches(self) -> bool:
        dropped = self._llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        self._llm.reset_mm_cache()
        self._llm.llm_engine.reset_encoder_cache()
        return bool(dropped)

    def tell_version(self, label: str) -> None:
        """Have vLLM report ``label`` as its weight version, where the engine offers that."""
        tell = getattr(self._llm.llm_engine, "set_weight_version", None)
        if tell is not None:
            self._control("set_weight_version", lambda: tell(label))

    def check_alive(self) -> None:
        """See, without a call to it, whether vLLM noticed that a process of the engine has died.

        Raises:
            EngineStateError: it has.
        """
        core = getattr(self._llm.llm_engine, "engine_core", None)
        ensure_alive = getattr(core, "ensure_alive", None)
        if self._in_process or ensure_alive is None:
            return
        try:
            ensure_alive()
        except Exception as error:
            _end_unanswered(core, error)
            self._broken = _in_words(error)
            raise EngineStateError(
                f"{self.name} died ({self._broken}); start another one and give it to replace_engine()"
            ) from error

    def is_engine_of(self, llm: Any) -> bool:
        """Whether this is the engine of ``llm``."""
        return self._llm is llm

    def _check_usable(self) -> None:
        if threading.get_ident() != self._thread:
            raise EngineStateError(
                f"{self.name} belongs to the thread that connected to it; call sync() there, between "
                "generate() calls"
            )
        if self._broken:
            raise EngineStateError(
                f"{self.name} is broken ({self._broken}); restart the engine and give the new one to "
                "replace_engine(), or take it out with remove_engine()"
            )


def _end_unanswered(core: Any, error: Exception) -> None:
    """Give the calls that a dead engine will not answer that error: their threads would wait for ever."""
    for answer in list(getattr(core, "utility_results", {}).values()):
        # Unless one was answered just before.
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            answer.set_exception(error)


def _in_words(error: BaseException) -> str:
    """Its class and what it says; Ctrl-C says nothing."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _error_of(engine: str, reply: Reply) -> RefitError:
    """The worker's error as an exception of the class it had there."""
    kind = getattr(errors, str(reply.get("error_type")), None)
    if not (isinstance(kind, type) and issubclass(kind, RefitError)):
        kind = TransactionError
    return kind(f"{engine}, rank {reply['rank']}: {reply['error']}")
