"""The model that a worker runs: its tensors, its native loader, and a check that neither moved."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from vllm_sparse_refit.apply.load_mode import CopySink, LoaderWeight, _SparseWeightLoadMode
from vllm_sparse_refit.apply.storage import ViewKey, storage_key, view_key


@dataclass(frozen=True, eq=False)
class OwnedTensor:
    """A parameter, buffer or plain tensor attribute, and the module that has it.

    Attributes:
        registry: The module's dictionary that it is in, by ``name``.
    """

    module: str
    name: str
    tensor: torch.Tensor
    registry: Mapping[str, Any]

    @property
    def full_name(self) -> str:
        return f"{self.module}.{self.name}" if self.module else self.name

    def is_still_at(self, key: int) -> bool:
        """Whether the module still has a tensor of this name, in the storage with this key."""
        tensor = self.registry.get(self.name)
        return isinstance(tensor, torch.Tensor) and storage_key(tensor) == key


class LiveModel:
    """A loaded vLLM model. One owner, the worker's main thread; not thread-safe.

    Args:
        model: what ``model_runner.get_model()`` returns.
        load_context: makes the context in which vLLM itself calls ``load_weights`` (current config,
            default dtype).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        load_context: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.model = model
        self.load_context = load_context

    def tensors(self) -> Iterator[OwnedTensor]:
        """Every tensor that a module holds, shared ones once for each holder."""
        for module_name, module in self.model.named_modules():
            for registry in (module._parameters, module._buffers, module.__dict__):
                for name, value in registry.items():
                    if isinstance(value, torch.Tensor):
                        yield OwnedTensor(module_name, name, value, registry)

    def watched_storages(self) -> dict[int, list[OwnedTensor]]:
        """The holders of every non-empty storage of the model, by storage key."""
        storages: dict[int, list[OwnedTensor]] = {}
        for owned in self.tensors():
            if not owned.tensor.is_meta and (key := storage_key(owned.tensor)):
                storages.setdefault(key, []).append(owned)
        return storages

    def load(
        self, weights: Iterable[LoaderWeight], sink: CopySink, used: set[int] | None = None
    ) -> set[str] | None:
        """Run the native loader over ``weights`` in one call; every copy goes to ``sink``.

        Args:
            used: collects the keys of the storages that the loader reads.

        Returns:
            The parameter names that the loader reports as loaded, or None when it reports nothing.

        Raises:
            RefitError: the loader writes in a way that cannot be made sparse.
            Exception: whatever else the loader raises.
        """
        mode = _SparseWeightLoadMode(self.watched_storages(), sink, used)

        def stream() -> Iterator[tuple[str, torch.Tensor]]:
            for weight in weights:
                mode.start(weight)
                yield weight.name, weight.source

        load_weights: Any = self.model.load_weights
        with self.load_context(), torch.no_grad(), mode:
            loaded = load_weights(stream())
        mode.finish()
        return None if loaded is None else set(loaded)

    @contextmanager
    def guarded(self, changed: list[str]) -> Iterator[None]:
        """Put back and name in ``changed`` every registered tensor replaced or moved meanwhile.

        The load mode blocks writes; this catches what is no operator: assigning ``.data`` or an
        attribute, registering or deleting a parameter.
        """
        before = _Registries.of(self.model)
        try:
            yield
        finally:
            changed.extend(before.restore(self.model))


@dataclass(frozen=True, eq=False)
class _Registries:
    """Every module's tensors as they were: objects, aliases of their data, and their views."""

    entries: dict[tuple[str, str], dict[str, tuple[torch.Tensor, torch.Tensor, ViewKey]]]

    @classmethod
    def of(cls, model: torch.nn.Module) -> "_Registries":
        return cls(
            {
                (module_name, kind): {
                    name: (tensor, tensor.detach(), view_key(tensor))
                    for name, tensor in registry.items()
                    if isinstance(tensor, torch.Tensor)
                }
                for module_name, module in model.named_modules()
                for kind, registry in _registries(module)
            }
        )

    def restore(self, model: torch.nn.Module) -> list[str]:
        changed: list[str] = []
        for module_name, module in model.named_modules():
            for kind, registry in _registries(module):
                saved = self.entries.get((module_name, kind), {})
                changed += [f"{module_name}.{name}" for name in _restore(registry, saved)]
        return changed


def _registries(module: torch.nn.Module) -> tuple[tuple[str, dict[str, Any]], ...]:
    return (
        ("parameter", module._parameters),
        ("buffer", module._buffers),
        ("attribute", module.__dict__),
    )


def _restore(
    registry: dict[str, Any], saved: dict[str, tuple[torch.Tensor, torch.Tensor, ViewKey]]
) -> list[str]:
    added = [
        n for n, value in registry.items() if isinstance(value, torch.Tensor) and n not in saved
    ]
    for name in added:
        del registry[name]
    changed = list(added)
    for name, (tensor, data, view) in saved.items():
        moved = view_key(tensor) != view
        if moved:
            tensor.data = data
        if moved or registry.get(name) is not tensor:
            registry[name] = tensor
            changed.append(name)
    return changed
