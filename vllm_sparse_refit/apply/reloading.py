"""Keep packed layers' shadows right while vLLM itself reloads a model.

vLLM's reload gives each layer parameters in the layout that its loader writes, loads them, and calls the
quant method's processing. Just before that call is the moment to take them over into the shadow.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from vllm_sparse_refit.apply.slots import SlotId
from vllm_sparse_refit.apply.steps import HOOK, LayerGroup


@contextmanager
def taking_over(groups: Iterable[LayerGroup]) -> Iterator[set[SlotId]]:
    """While active, processing a module of ``groups`` first copies its parameters into the shadow.

    Yields:
        The slots taken over so far.
    """
    taken: set[SlotId] = set()
    with ExitStack() as stack:
        methods: dict[int, Any] = {}
        shadows: dict[int, dict[SlotId, torch.Tensor]] = {}
        for group in groups:
            for name, module in group.territory:
                if kept := {slot: t for slot, t in shadow_parameters(group) if slot.module == name}:
                    shadows[id(module)] = kept
                    method = getattr(module, "quant_method", None)
                    methods[id(method)] = method
        for method in methods.values():
            if hasattr(method, HOOK):
                stack.enter_context(_taking_over_first(method, shadows, taken))
        yield taken


def shadow_parameters(group: LayerGroup) -> Iterator[tuple[SlotId, torch.Tensor]]:
    """The tensors of the shadow, by slot."""
    for slot, state in group.before.items():
        if state is not None and state.data is not None and state.data.numel():
            yield slot, state.data


def _taking_over_first(
    method: Any, shadows: dict[int, dict[SlotId, torch.Tensor]], taken: set[SlotId]
) -> Any:
    process = getattr(method, HOOK)

    def take_over_and_process(layer: torch.nn.Module) -> Any:
        for slot, shadow in shadows.get(id(layer), {}).items():
            loaded = layer._parameters.get(slot.name)
            unlike = loaded is None or loaded.shape != shadow.shape or loaded.dtype != shadow.dtype
            if slot.registry == "parameter" and loaded is not None and not unlike:
                shadow.copy_(loaded.detach())
                taken.add(slot)
        return process(layer)

    return mock.patch.object(method, HOOK, take_over_and_process)
