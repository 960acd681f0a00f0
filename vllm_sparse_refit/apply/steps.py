"""Post-load processing taken apart: which module's processing changed and read what.

vLLM's processing walks ``model.named_modules()`` and turns one module after the other into the form that
its kernel wants. Given a stand-in for the model that lists the modules one by one, it shows by itself what
belongs to which module, and, given one that lists only some modules, it does only those again.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_sparse_refit.apply.load_mode import tensors_in
from vllm_sparse_refit.apply.slots import (
    Copies,
    Held,
    NamedModules,
    SlotId,
    SlotStates,
    capture,
    is_changed,
    is_of_new_helper,
    storages,
)
from vllm_sparse_refit.apply.storage import storage_key

# vLLM's process_weights_after_loading for one model, given the model or a stand-in for it.
Process = Callable[[Any], object]

HOOK = "process_weights_after_loading"


@dataclass(frozen=True, eq=False)
class Step:
    """What the processing of one module did.

    Attributes:
        name: of the module; empty for the model's own hook.
        changed: the slots that it changed and what they held before, tensors with the elements they
            had; None for a slot that it added.
        territory: the module and all below it, where changes were looked for.
        after: what the territory held afterwards.
        reads: keys of the model's storages that it read.
    """

    name: str
    module: torch.nn.Module
    changed: dict[SlotId, Held | None]
    territory: NamedModules
    after: SlotStates
    reads: frozenset[int]


class WalkedModel:
    """Stands for a model in vLLM's processing.

    Args:
        modules: what ``named_modules()`` yields.
        hook: whether the model's own post-load hook is there to be called.
        observer: told about each module before it is processed, and at the end of each walk.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        modules: Iterable[tuple[str, torch.nn.Module]],
        *,
        hook: bool,
        observer: "StepRecorder | None" = None,
    ) -> None:
        self._model = model
        self._modules = tuple(modules)
        self._hook = hook
        self._observer = observer

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        for name, module in self._modules:
            if self._observer is not None:
                self._observer.start(name, module)
            yield name, module
        if self._observer is not None:
            self._observer.finish()

    def modules(self) -> Iterator[torch.nn.Module]:
        return (module for _, module in self._modules)

    def __getattr__(self, name: str) -> Any:
        if name != HOOK:
            return getattr(self._model, name)
        if not self._hook:
            raise AttributeError(name)
        hook: Callable[[], object] = getattr(self._model, HOOK)
        return hook if self._observer is None else lambda: self._observed(hook)

    def _observed(self, hook: Callable[[], object]) -> None:
        assert self._observer is not None
        self._observer.start("", self._model, hook=True)
        hook()
        self._observer.finish()


class StepRecorder:
    """Records the steps of the processing of one model. One thread; not reusable."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.steps: list[Step] = []
        self._open: tuple[str, torch.nn.Module, SlotStates, Copies] | None = None
        self._reads: set[int] = set()
        self._known = storages(capture(model.named_modules()).values())

    def run(self, process: Process) -> None:
        """Process the model and record every step that changed something."""
        walked = WalkedModel(
            self._model,
            self._model.named_modules(),
            hook=hasattr(self._model, HOOK),
            observer=self,
        )
        with _ReadMode(self._note_reads):
            process(walked)

    def _note_reads(self, keys: Iterable[int]) -> None:
        # Only storages that live on: a temporary's address is soon another tensor's.
        self._reads.update(self._known.intersection(keys))

    def start(self, name: str, module: torch.nn.Module, *, hook: bool = False) -> None:
        self.finish()
        has_step = hasattr(module, "quant_method") or (
            name and callable(getattr(module, HOOK, None))
        )
        if hook or has_step:
            before = capture(_territory(name, module))
            self._open = (name, module, before, Copies(before))
            self._reads.clear()

    def finish(self) -> None:
        if self._open is None:
            return
        (name, module, before, copies), self._open = self._open, None
        reads = frozenset(self._reads)
        territory = _territory(name, module)
        after = capture(territory, like=before)
        changed = _changes(before, after, copies)
        if changed:
            self.steps.append(Step(name, module, changed, territory, after, reads))
            self._known |= storages(after.values())


def _territory(name: str, module: torch.nn.Module) -> NamedModules:
    return tuple(module.named_modules(prefix=name))


def _changes(before: SlotStates, after: SlotStates, copies: Copies) -> dict[SlotId, Held | None]:
    changed: dict[SlotId, Held | None] = {}
    for slot in before.keys() | after.keys():
        old = before.get(slot)
        rewritten = copies.rewritten(old) if old is not None else None
        if old is not None and rewritten is not None:
            changed[slot] = Held(old.registry, old.value, rewritten, old.contents)
        elif is_changed(old, after.get(slot)) and not is_of_new_helper(slot, before, after):
            changed[slot] = old
    return changed


class _ReadMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Reports the storages that operators read; making a view reads nothing."""

    def __init__(self, note: Callable[[Iterable[int]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._note = note

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not func.is_view:
            read = tensors_in([*args, *kwargs.values()])
            self._note([storage_key(tensor) for tensor in read if not tensor.is_meta])
        return func(*args, **kwargs)


# --- steps that belong together -------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LayerGroup:
    """Modules that can only be processed again together, because one's processing uses the other's.

    Attributes:
        modules: the processed modules, in the order of their processing.
        has_hook: whether the model's own post-load hook belongs to the group.
        territory: these modules and all below them.
        before: the slots that processing changed, as it found them; None for those that it added.
        after: what the territory held when processing was done.
        reads: keys of storages that the processing read.
    """

    modules: NamedModules
    has_hook: bool
    territory: NamedModules
    before: dict[SlotId, Held | None]
    after: SlotStates
    reads: frozenset[int]

    @property
    def name(self) -> str:
        """The module whose processing came first."""
        return self.modules[0][0] if self.modules else "the model"


def grouped(steps: Iterable[Step], packed: Iterable[str]) -> list[LayerGroup]:
    """Join the steps that changed one of the modules ``packed`` with the steps they depend on."""
    names = set(packed)
    relevant = [s for s in steps if any(slot.module in names for slot in s.changed)]
    changed_modules = {slot.module for step in relevant for slot in step.changed}
    changed_storages = {key for step in relevant for key in _changed_storages(step)}
    joined = _Joined()
    for step in relevant:
        own: list[object] = [step]
        own += changed_modules.intersection(name for name, _ in step.territory)
        own += changed_storages & (step.reads | _changed_storages(step))
        joined.join(own)
    return [_group(members) for members in joined.sets(relevant)]


def _changed_storages(step: Step) -> set[int]:
    before = (state for state in step.changed.values() if state is not None)
    after = (step.after[slot] for slot in step.changed if slot in step.after)
    return storages([*before, *after])


def _group(steps: list[Step]) -> LayerGroup:
    before: dict[SlotId, Held | None] = {}
    after: SlotStates = {}
    first_data: dict[int, torch.Tensor | None] = {}
    for step in steps:
        for slot, state in step.changed.items():
            if slot not in before:
                before[slot] = _as_first_seen(state, first_data)
        after |= step.after
    return LayerGroup(
        modules=tuple({step.name: step.module for step in steps if step.name}.items()),
        has_hook=any(not step.name for step in steps),
        territory=tuple({name: m for step in steps for name, m in step.territory}.items()),
        before=before,
        after=after,
        reads=frozenset().union(*(step.reads for step in steps)),
    )


def _as_first_seen(state: Held | None, seen: dict[int, torch.Tensor | None]) -> Held | None:
    """A tensor that two slots hold goes back to what it was before the first step that changed it."""
    if state is None or state.data is None:
        return state
    data = seen.setdefault(id(state.value), state.data)
    return Held(state.registry, state.value, data, state.contents)


class _Joined:
    """Disjoint sets of hashable things."""

    def __init__(self) -> None:
        self._parent: dict[object, object] = {}

    def _root(self, thing: object) -> object:
        while (parent := self._parent.setdefault(thing, thing)) != thing:
            thing = parent
        return thing

    def join(self, things: Iterable[object]) -> None:
        first, *others = things
        for other in others:
            self._parent[self._root(other)] = self._root(first)

    def sets(self, things: Iterable[Step]) -> list[list[Step]]:
        found: dict[object, list[Step]] = {}
        for thing in things:
            found.setdefault(self._root(thing), []).append(thing)
        return list(found.values())
