"""The engines that a synchronizer drives: which there are, and what is asked of all of them."""

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from vllm_sparse_refit.errors import BaselineError, ConfigError
from vllm_sparse_refit.trainer.engine import LocalEngine, Reply, Workers
from vllm_sparse_refit.trainer.keys import TrainerKeys
from vllm_sparse_refit.trainer.routing import Routing, join_discoveries
from vllm_sparse_refit.weight_version import WeightVersion


class Fleet:
    """Connected engines, in the order in which they were taken in.

    Belongs to the thread that made it, as each :class:`LocalEngine` does. A call to the engines raises what
    :meth:`LocalEngine.call` does.

    Args:
        llms: the engines, each a :class:`vllm.LLM`.
        keys: of the trainer; every worker of an engine that is taken in must use the same kinds.
        timeout_s: longest wait for one control call, in seconds.

    Raises:
        ConfigError: one is given twice, is of a kind that is not supported or uses other keys.
        PluginNotEnabledError: one runs without the plugin.
    """

    def __init__(self, llms: Iterable[Any], *, keys: TrainerKeys, timeout_s: float) -> None:
        self._keys = keys
        self._timeout_s = timeout_s
        self._engines: list[LocalEngine] = []
        self._named = 0
        self._discoveries: dict[LocalEngine, Sequence[Reply]] = {}
        self._sequence = 0
        for llm in llms:
            self.add(llm)

    def __iter__(self) -> Iterator[LocalEngine]:
        return iter(self._engines)

    def __len__(self) -> int:
        return len(self._engines)

    # --- which there are -----------------------------------------------------------------------------

    def add(self, llm: Any) -> None:
        """See :meth:`WeightSynchronizer.add_engine`."""
        self._engines.append(self._connected(llm))

    def remove(self, llm: Any) -> None:
        """See :meth:`WeightSynchronizer.remove_engine`."""
        position = self._position(llm)
        if len(self._engines) == 1:
            raise ConfigError("this is the only engine; replace it with replace_engine()")
        self._discoveries.pop(self._engines.pop(position), None)

    def replace(self, old: Any, new: Any) -> None:
        """See :meth:`WeightSynchronizer.replace_engine`."""
        position = self._position(old)
        replacement = self._connected(new)
        self._discoveries.pop(self._engines[position], None)
        self._engines[position] = replacement

    def _connected(self, llm: Any) -> LocalEngine:
        if any(engine.is_engine_of(llm) for engine in self._engines):
            raise ConfigError("the new engine is connected already")
        engine = LocalEngine(llm, f"engine {self._named}", timeout_s=self._timeout_s)
        for reply in engine.call("sparse_refit_status"):
            self._keys.check(f"{engine.name}, rank {reply['rank']}", reply)
        self._named += 1  # also over replacements, so that no two engines ever have one name
        return engine

    def _position(self, llm: Any) -> int:
        for position, engine in enumerate(self._engines):
            if engine.is_engine_of(llm):
                return position
        raise ConfigError(
            "this engine is not connected; connect() and add_engine() take engines in"
        )

    # --- what is asked of all of them ----------------------------------------------------------------

    def status(self) -> list[Reply]:
        """What every worker reports about itself, with the name of its engine."""
        return [
            {"engine": engine.name, **reply}
            for engine in self._engines
            for reply in engine.call("sparse_refit_status")
        ]

    def replies(self, method: str, *args: Any) -> Iterator[tuple[str, Reply]]:
        """Call one engine after the other; yields the name of each worker and its reply."""
        for engine in self._engines:
            for reply in engine.call(method, *args):
                yield f"{engine.name}, rank {reply['rank']}", reply

    def recover(self, version: WeightVersion) -> dict[LocalEngine, Workers]:
        """End what an earlier transfer left open, and see what every worker holds.

        Args:
            version: what was written but not made final is kept if it led there, and taken back otherwise.
        """
        workers: dict[LocalEngine, Workers] = {
            engine: engine.call("sparse_refit_recover", version.digest) for engine in self._engines
        }
        for replies in workers.values():
            for reply in replies:
                self._sequence = max(self._sequence, int(reply["server"]["sequence"]))
        return workers

    def next_sequence(self) -> int:
        """A number above that of every transfer that a worker had seen at the last :meth:`recover`."""
        self._sequence += 1
        return self._sequence

    def knows(self, engine: LocalEngine) -> bool:
        """Whether :meth:`discover` asked this engine since it was taken in."""
        return engine in self._discoveries

    def discover(
        self, tensors: Mapping[str, Sequence[Any]], engines: Iterable[LocalEngine]
    ) -> Routing:
        """Have some of the engines classify tensors; returns how all need them shipped.

        Args:
            tensors: shape and name of the dtype by name.
            engines: at least those that were not asked yet.

        Raises:
            UnsupportedModelError: as :func:`join_discoveries`.
        """
        for engine in engines:
            self._discoveries[engine] = engine.call("discover_native_skips", tensors)
        found = {engine.name: self._discoveries[engine] for engine in self._engines}
        return join_discoveries(tensors, found)

    def check_samples(self, samples: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """Refuse other weights than the engines hold, as far as samples show it.

        Args:
            samples: flat positions and the bits there, by tensor.

        Raises:
            BaselineError: some worker holds other bits; says which and how many.
        """
        for worker, reply in self.replies("sparse_refit_compare", samples):
            if different := reply["different"]:
                name = next(iter(different))
                raise BaselineError(
                    f"{worker} does not hold these weights: {sum(different.values())} of "
                    f"{reply['compared']} sampled elements differ, in {len(different)} tensors, first "
                    f"{name}; call snapshot() with the weights that the engines were started from or last "
                    "brought to"
                )

    def common_version(self) -> WeightVersion:
        """The version of all workers; a new one for all if they came to their weights by other ways."""
        found = {
            WeightVersion(reply["version"]["label"], reply["version"]["digest"])
            for reply in self.status()
        }
        if len(found) == 1:
            return found.pop()
        version = WeightVersion("snapshot", uuid.uuid4().hex)
        for engine in self._engines:
            engine.call("sparse_refit_adopt", version.label, version.digest)
        return version
