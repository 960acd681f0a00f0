"""What is known of a model because its loading was observed."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from vllm_sparse_refit.apply.processing import PackedLayer, packed_layers
from vllm_sparse_refit.apply.shadow import PackedLayers
from vllm_sparse_refit.apply.slots import SlotId
from vllm_sparse_refit.apply.steps import Process, StepRecorder, grouped


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """How a model came out of loading.

    Attributes:
        refused: packed layers that cannot be updated.
        layers: packed layers that can.
    """

    refused: tuple[PackedLayer, ...]
    layers: PackedLayers


class PostLoadObserver:
    """Observes the post-load processing of every model loaded while it watches.

    One owner: the worker that loads the model. Not thread-safe.

    Args:
        shadow: keep what is needed to update packed layers; without it they are refused.
        max_shadow_bytes: most host memory that this may take; None for no limit.
    """

    def __init__(self, *, shadow: bool = True, max_shadow_bytes: int | None = None) -> None:
        self._shadow = shadow
        self._max_bytes = max_shadow_bytes
        self._models: list[tuple[torch.nn.Module, LoadedModel]] = []

    def report(self, model: torch.nn.Module) -> LoadedModel | None:
        """What was observed of ``model``, or None when its loading was not.

        ``model`` may be a wrapper put around the observed module after loading (LoRA, a graph
        wrapper); the report is found through the parameters they share.
        """
        for observed, loaded in self._models:
            if observed is model:
                return loaded
        parameters = {id(p) for p in model.parameters()}
        for observed, loaded in self._models:
            if any(id(p) in parameters for p in observed.parameters()):
                return loaded
        return None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Observe every model that vLLM's base loader processes while the context is open."""
        from vllm.model_executor.model_loader import base_loader

        # The loader calls the function as a name in its own module.
        process = base_loader.process_weights_after_loading

        def observed(model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            loaded = self.observe(model, lambda walked: process(walked, *args, **kwargs))
            self._models.append((model, loaded))

        with mock.patch.object(base_loader, "process_weights_after_loading", observed):
            yield

    def observe(self, model: torch.nn.Module, process: Process) -> LoadedModel:
        """Run ``process`` on ``model``, or on a stand-in that lists its modules, and watch it."""
        if not self._shadow:
            packed = packed_layers(model, lambda: process(model))
            return LoadedModel(packed, PackedLayers(model, (), process))
        recorder = StepRecorder(model)
        packed = packed_layers(model, lambda: recorder.run(process))
        groups = grouped(recorder.steps, (layer.module for layer in packed))
        known = {slot for group in groups for slot in group.before}
        unknown = tuple(layer for layer in packed if not _is_explained(layer, known))
        layers = PackedLayers(model, groups, process)
        if self._max_bytes is None or layers.nbytes <= self._max_bytes:
            return LoadedModel(unknown, layers)
        too_large = (
            f"the weights of all packed layers as they are loaded would take {layers.nbytes} bytes of host "
            f"memory, over max_shadow_bytes={self._max_bytes}"
        )
        layers.drop()
        return LoadedModel(tuple(PackedLayer(p.module, too_large) for p in packed), layers)


def _is_explained(layer: PackedLayer, known: Collection[SlotId]) -> bool:
    """Whether all that changed of a layer was changed by the processing of some module."""
    places = [SlotId(layer.module, registry, name) for registry, name in layer.changes]
    # What a helper object holds is explained if the object itself was made by processing.
    return bool(places) and all(p in known or any(h in known for h in p.holders()) for p in places)
