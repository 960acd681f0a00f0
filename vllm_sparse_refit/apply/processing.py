"""What a model's post-load processing does to its weights, observed while the model loads.

After vLLM has loaded a checkpoint it lets every layer turn its weights into the form its kernel
wants (``process_weights_after_loading``). A layer that does so is *packed*: its native loader would
write values in a layout that the kernel no longer reads, often without any error. Shape and dtype
do not tell, so the bits, storages and attributes of every module are compared before and after.
"""

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from vllm_sparse_refit.apply.slots import PLAIN, captured, helpers
from vllm_sparse_refit.apply.storage import ViewKey, storage_key, tensor_digest, view_key


@dataclass(frozen=True)
class PackedLayer:
    """A module whose runtime state is no longer what its native loader writes.

    Attributes:
        changes: what of it changed, as registry (``"parameter"``, ``"buffer"``, ``"attribute"``, or the
            name of a helper object) and name.
    """

    module: str
    reason: str
    changes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class _TensorState:
    identity: int
    view: ViewKey
    digest: bytes


@dataclass(frozen=True, eq=False)
class _Attribute:
    """A plain attribute: the value, the digest of a tensor, the contents of a container."""

    value: object
    digest: bytes | None
    contents: tuple[object, ...]


@dataclass(frozen=True)
class _ModuleState:
    parameters: Mapping[str, _TensorState]
    buffers: Mapping[str, _TensorState]
    attributes: Mapping[str, _Attribute]


def packed_layers(model: torch.nn.Module, process: Callable[[], object]) -> tuple[PackedLayer, ...]:
    """Run ``process`` and return the layers of ``model`` that it packed."""
    before = _snapshot(model)
    process()
    return tuple(_packed_layers(model, before))


def _snapshot(model: torch.nn.Module) -> dict[str, _ModuleState]:
    return {name: _module_state(module) for name, module in model.named_modules()}


def _module_state(module: torch.nn.Module) -> _ModuleState:
    return _ModuleState(
        parameters=_tensor_states(module._parameters),
        buffers=_tensor_states(module._buffers),
        attributes={
            name: _Attribute(
                value,
                tensor_digest(value) if isinstance(value, torch.Tensor) else None,
                tuple(_parts(value)) if isinstance(value, _CONTAINERS) else (),
            )
            for name, value in _attributes(module)
        },
    )


def _tensor_states(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, _TensorState]:
    return {
        name: _TensorState(id(tensor), view_key(tensor), tensor_digest(tensor))
        for name, tensor in tensors.items()
        if tensor is not None
    }


_MODULE_INTERNALS = frozenset(torch.nn.Module().__dict__)


_CONTAINERS = (Mapping, list, tuple, set, frozenset)


def _attributes(module: torch.nn.Module) -> Iterator[tuple[str, object]]:
    """The attributes of ``module``, and of its helper objects, that could hold weight data.

    Those of a helper object are named ``helper.attribute``.
    """
    for name, value in vars(module).items():
        if name not in _MODULE_INTERNALS and not isinstance(value, torch.nn.Module):
            yield name, value
    for path, helper in helpers(module):
        for inner, held in vars(helper).items():
            if not isinstance(held, torch.nn.Module):
                yield f"{path}.{inner}", held


def _packed_layers(
    model: torch.nn.Module, before: Mapping[str, _ModuleState]
) -> Iterator[PackedLayer]:
    # Storages that were parameters before and are unchanged: a view of one, or another module's
    # tied parameter, follows an in-place update by itself.
    after = _snapshot(model)
    kept_storages: set[int] = set()
    for name, state in after.items():
        for key, tensor in state.parameters.items():
            old = before[name].parameters.get(key) if name in before else None
            if old is not None and old.view == tensor.view and old.digest == tensor.digest:
                kept_storages.add(tensor.view[0])
    for name, module in model.named_modules():
        if name not in before:
            yield PackedLayer(name, "the module appeared during post-load processing")
        elif changes := list(_changes(before[name], after[name], module, kept_storages)):
            yield PackedLayer(name, changes[0][1], tuple(place for place, _ in changes))


def _changes(
    before: _ModuleState, after: _ModuleState, module: torch.nn.Module, kept: set[int]
) -> Iterator[tuple[tuple[str, str], str]]:
    for kind, old, new in (
        ("parameter", before.parameters, after.parameters),
        ("buffer", before.buffers, after.buffers),
    ):
        for name in sorted(old.keys() | new.keys()):
            if change := _tensor_change(old.get(name), new.get(name), kept):
                yield (kind, name), f"{kind} {name!r} was {change} by post-load processing"
    for name, value in _attributes(module):
        if _attribute_holds_copy(before.attributes.get(name, _ABSENT), value, kept):
            helper, _, inner = name.rpartition(".")
            yield (
                (helper or "attribute", inner),
                f"attribute {name!r} may hold a copy of weights made by post-load processing",
            )


def _tensor_change(
    old: _TensorState | None, new: _TensorState | None, kept: set[int]
) -> str | None:
    if new is None:
        return "removed"
    if new.view[0] in kept:
        # Also a parameter that was tied to an unchanged one while loading.
        return None if old is None or old.digest == new.digest else "rewritten"
    if old is None:
        return "added"
    if old.digest != new.digest or old.view[2:] != new.view[2:]:
        return "rewritten"
    if old.view[0] != new.view[0] or old.identity != new.identity:
        return "replaced"
    return None


_ABSENT = _Attribute(object(), None, ())


def _attribute_holds_copy(old: _Attribute, value: object, kept: set[int]) -> bool:
    if isinstance(value, torch.Tensor):
        if value.numel() == 0 or storage_key(value) in kept:
            return False
        return old.digest != tensor_digest(value)
    if isinstance(value, _CONTAINERS):
        known = {id(part) for part in old.contents}
        added = [part for part in _parts(value) if id(part) not in known]
        return any(_may_hold_tensors(part, kept, depth=3) for part in added)
    if value is old.value:
        return False
    if isinstance(value, float):
        # Also one that is new: a scale computed from weights.
        return not isinstance(old.value, float) or old.value != value
    return _may_hold_tensors(value, kept, depth=3)


_PLAIN = PLAIN | torch.nn.Module


def _may_hold_tensors(value: object, kept: set[int], depth: int) -> bool:
    """Whether ``value``, new on a module, could hold weights that are no views of parameters."""
    if value is None or isinstance(value, _PLAIN):
        return False
    if isinstance(value, torch.Tensor):
        return value.numel() > 0 and storage_key(value) not in kept
    if depth == 0:
        return True
    return any(_may_hold_tensors(part, kept, depth - 1) for part in _parts(value))


def _parts(value: object) -> list[object]:
    """What a container, a callable or an object refers to; itself when that cannot be seen."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, _CONTAINERS):
        return list(value)
    if isinstance(value, types.FunctionType):
        return list(captured(value).values())
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType | types.BuiltinFunctionType):
        # A function of an extension module has that module, or nothing, for its ``__self__``.
        return [value.__self__]
    # Nothing shows what an object of an extension type holds.
    return list(vars(value).values()) if hasattr(value, "__dict__") else [value]
