"""Where a layer keeps state: the registry entries and attributes that post-load processing may change.

A slot is one entry of one mapping: a parameter, buffer, submodule or plain attribute of a module, or an
attribute of one of its helper objects (a quant method, its scheme, the scheme's kernel, an attention
backend). Slots are read and set in those mappings directly, so that neither ``nn.Module`` nor a property
interferes.
"""

import functools
import types
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from vllm_sparse_refit.apply.storage import ViewKey, storage_key, view_key
from vllm_sparse_refit.codec.dtypes import bits_view

NamedModules = tuple[tuple[str, torch.nn.Module], ...]


@dataclass(frozen=True)
class SlotId:
    """Names a slot: the module, the registry (or the helper object, as ``a.b``) and the entry."""

    module: str
    registry: str
    name: str

    def __str__(self) -> str:
        owner = "" if self.registry in _REGISTRIES else f"{self.registry}."
        return f"{self.module}.{owner}{self.name}" if self.module else f"{owner}{self.name}"

    def holders(self) -> Iterator["SlotId"]:
        """The slots that hold the helper object, and those that hold its holders."""
        path = [] if self.registry in _REGISTRIES else self.registry.split(".")
        for depth, name in enumerate(path):
            yield SlotId(self.module, ".".join(path[:depth]) or "attribute", name)


@dataclass(frozen=True, eq=False)
class Held:
    """What a slot holds at one moment.

    Attributes:
        registry: the mapping itself.
        value: the object.
        data: for a tensor, an alias of its elements that outlives an assignment to ``.data``.
        contents: for a list, dict or set, a shallow copy.
    """

    registry: MutableMapping[str, Any]
    value: Any
    data: torch.Tensor | None
    contents: Any

    @property
    def original(self) -> Any:
        """What to put into the slot to have it as it was: a container is given back as a copy."""
        return self.value if self.contents is None else _shallow(self.contents)


SlotStates = dict[SlotId, Held]

_REGISTRIES = ("parameter", "buffer", "submodule", "attribute")
_MODULE_INTERNALS = frozenset(torch.nn.Module().__dict__) - {"training"}
_MUTABLE = (dict, list, set)
# A quant method, its scheme, the scheme's kernel.
_HELPER_DEPTH = 3
# Compared with ==, and never a holder of weights.
PLAIN = (
    bool
    | int
    | float
    | complex
    | str
    | bytes
    | type
    | torch.dtype
    | torch.device
    | torch.Size
    | types.ModuleType
    | torch._ops.OpOverload
    | torch._ops.OpOverloadPacket
)


def capture(
    modules: Iterable[tuple[str, torch.nn.Module]], like: SlotStates | None = None
) -> SlotStates:
    """What all slots of ``modules`` hold now. Copies no tensor.

    Args:
        like: an earlier capture, whose names are kept for helper objects that can be reached in another
            way now.
    """
    names = {(slot.module, id(s.registry)): slot.registry for slot, s in (like or {}).items()}
    return {
        SlotId(module_name, names.get((module_name, id(registry)), label), name): held(
            registry, name
        )
        for module_name, module in modules
        for label, registry in _registries(module)
        for name in registry
        if label != "attribute" or name not in _MODULE_INTERNALS
    }


def held(registry: MutableMapping[str, Any], name: str) -> Held:
    value = registry[name]
    data = value.detach() if isinstance(value, torch.Tensor) and not value.is_meta else None
    return Held(registry, value, data, _shallow(value) if isinstance(value, _MUTABLE) else None)


def _shallow(value: Any) -> Any:
    return value.copy()


def _registries(module: torch.nn.Module) -> Iterator[tuple[str, MutableMapping[str, Any]]]:
    internals: tuple[Any, ...] = (
        module._parameters,
        module._buffers,
        module._modules,
        module.__dict__,
    )
    yield from zip(_REGISTRIES, internals, strict=True)
    for path, helper in helpers(module):
        yield path, vars(helper)


def helpers(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """The helper objects of ``module``, each once, with the attributes that lead to it (``a.b``)."""
    found: set[int] = set()
    attributes = {n: v for n, v in module.__dict__.items() if n not in _MODULE_INTERNALS}
    level = [(name, value) for name, value in attributes.items() if _is_helper(value)]
    for _ in range(_HELPER_DEPTH):
        deeper: list[tuple[str, Any]] = []
        for path, helper in level:
            if id(helper) in found:
                continue
            found.add(id(helper))
            yield path, helper
            # What a configuration refers to belongs to the whole engine.
            if not type(helper).__name__.endswith("Config"):
                inner = vars(helper).items()
                deeper += [(f"{path}.{n}", v) for n, v in inner if _is_helper(v)]
        level = deeper


def _is_helper(value: object) -> bool:
    """Whether the attributes of ``value`` are slots of the module that has it.

    Not those of an object that frees something when it goes: what it holds may be an address.
    """
    if not hasattr(value, "__dict__") or hasattr(value, "__del__"):
        return False
    return not isinstance(value, PLAIN | types.FunctionType | types.MethodType) and not isinstance(
        value, (torch.nn.Module, torch.Tensor, functools.partial)
    )


class Copies:
    """Copies of tensors by what they view, to tell afterwards whether their bits changed."""

    def __init__(self, states: SlotStates) -> None:
        self._copies: dict[ViewKey, torch.Tensor] = {}
        for state in states.values():
            if state.data is not None and state.data.numel():
                key = view_key(state.data)
                if key not in self._copies:
                    self._copies[key] = state.data.clone()

    def rewritten(self, state: Held) -> torch.Tensor | None:
        """The old elements if those that ``state`` views have been written to since, else None."""
        if state.data is None or (copy := self._copies.get(view_key(state.data))) is None:
            return None
        return None if same_bits(copy, state.data) else copy


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype are equal bit by bit."""
    return torch.equal(bits_view(one), bits_view(other))


def is_changed(before: Held | None, after: Held | None) -> bool:
    """Whether a slot holds something else now; bits that were written in place are not looked at."""
    if before is None or after is None:
        return before is not after
    if before.registry is not after.registry:
        # Another helper object: that is a change of the slot that holds the object, not of this one.
        return False
    if before.data is not None and after.data is not None:
        return before.value is not after.value or view_key(before.data) != view_key(after.data)
    if before.contents is not None and after.contents is not None:
        return not _same_parts(before.contents, after.contents)
    return not same_value(before.value, after.value)


def is_of_new_helper(slot: SlotId, before: SlotStates, after: SlotStates) -> bool:
    """Whether a slot of a helper object belongs to another object now: then the object changed, not it."""
    return any(
        (holder in before) != (holder in after)
        or (holder in before and before[holder].value is not after[holder].value)
        for holder in slot.holders()
    )


def same_value(one: Any, other: Any) -> bool:
    """Whether two plain values are equal, or two names of one object."""
    if one is other:
        return True
    return type(one) is type(other) and isinstance(one, PLAIN) and bool(one == other)


def _same_parts(one: Any, other: Any) -> bool:
    if type(one) is not type(other) or len(one) != len(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same_value(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return all(map(same_value, one, other))
    return {id(part) for part in one} == {id(part) for part in other}


def storages(states: Iterable[Held]) -> set[int]:
    """The keys of the storages that the tensors among ``states`` view."""
    return {storage_key(s.data) for s in states if s.data is not None and s.data.numel()}


# --- comparing what processing made with what is in use -------------------------------------------


class Equivalence:
    """Whether an object that processing made anew could be left away for the one in use.

    Args:
        pairs: tensors in use and the fresh tensors whose bits they are given.
    """

    def __init__(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._storages = {storage_key(fresh): storage_key(live) for live, fresh in pairs}
        self._seen: set[tuple[int, int]] = set()

    def holds(self, live: Any, fresh: Any) -> bool:
        """Compare two objects part by part. What cannot be looked into counts as different."""
        if same_value(live, fresh) or (id(live), id(fresh)) in self._seen:
            return True
        if type(live) is not type(fresh):
            return False
        self._seen.add((id(live), id(fresh)))
        if isinstance(live, torch.Tensor):
            return self._tensors(live, fresh)
        if isinstance(live, types.FunctionType) and live.__code__ is not fresh.__code__:
            return False
        parts, other_parts = _named_parts(live), _named_parts(fresh)
        if parts is None or other_parts is None or parts.keys() != other_parts.keys():
            return False
        return all(self.holds(part, other_parts[name]) for name, part in parts.items())

    def _tensors(self, live: torch.Tensor, fresh: torch.Tensor) -> bool:
        if live.is_meta or fresh.is_meta or view_key(live)[1:] != view_key(fresh)[1:]:
            return False
        if storage_key(live) in (storage_key(fresh), self._storages.get(storage_key(fresh))):
            return True
        return live.device == fresh.device and same_bits(live, fresh)


def _named_parts(value: Any) -> dict[Any, Any] | None:
    """What a container, callable or plain object refers to, by name; None when that cannot be seen."""
    parts: dict[Any, Any] | None = None
    if isinstance(value, Mapping):
        parts = dict(value)
    elif isinstance(value, list | tuple):
        parts = dict(enumerate(value))
    elif isinstance(value, types.FunctionType) and all(map(_is_filled, value.__closure__ or ())):
        parts = captured(value)
    elif isinstance(value, functools.partial):
        keywords = {("keyword", name): part for name, part in value.keywords.items()}
        parts = {"function": value.func, **dict(enumerate(value.args)), **keywords}
    elif isinstance(value, types.MethodType):
        parts = {"self": value.__self__, "function": value.__func__}
    elif _is_helper(value):
        parts = dict(vars(value))
    return parts


def captured(function: types.FunctionType) -> dict[Any, Any]:
    """What a function has by closure or as a default, by name; nothing for a cell that was never filled."""
    cells = function.__closure__ or ()
    return {
        **{("closure", i): cell.cell_contents for i, cell in enumerate(cells) if _is_filled(cell)},
        **{("default", i): part for i, part in enumerate(function.__defaults__ or ())},
        **{("default", name): part for name, part in (function.__kwdefaults__ or {}).items()},
    }


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
