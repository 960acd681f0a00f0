"""A transformers model's tensors as ``save_pretrained`` writes them, without writing.

A model's ``state_dict()`` is not its checkpoint: names differ, experts are fused, tied weights
appear twice.
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from vllm_sparse_refit.errors import RefitError, TensorMismatchError, UnsupportedModelError

if TYPE_CHECKING:
    from vllm_sparse_refit.trainer.exported import NamedTensor

_PASS_NAMED_TENSORS = "pass an iterable of (checkpoint name, tensor) instead"

_StateDict = dict[str, torch.Tensor]
_Revert = Callable[[_StateDict], _StateDict]


def export_model(module: torch.nn.Module) -> "Iterator[NamedTensor]":
    """Yield (checkpoint name, contiguous tensor) of a ``PreTrainedModel``, possibly wrapped.

    Tensors are views of the parameters where names only change. Those that the checkpoint splits or
    fuses are converted one layer at a time.

    Raises:
        TensorMismatchError: the module is no transformers model.
        UnsupportedModelError: its parameters are not the checkpoint's numbers.
    """
    return _exported(_checked_model(module))


def whole_tensor(name: str, tensor: object) -> torch.Tensor:
    """``tensor`` detached and, if it is a ``DTensor``, gathered (a collective call).

    Raises:
        TensorMismatchError: it is no tensor, has no data, or is not strided.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TensorMismatchError(f"{name} is {type(tensor).__name__}; pass a tensor")
    if tensor.device.type == "meta":
        raise TensorMismatchError(f"{name} is on the meta device and has no data; load it first")
    if tensor.layout is not torch.strided:
        raise TensorMismatchError(f"{name} has layout {tensor.layout}; call to_dense() on it first")
    detached = tensor.detach()
    gather: Callable[[], torch.Tensor] | None = getattr(detached, "full_tensor", None)
    return detached if gather is None else gather()


def _checked_model(module: torch.nn.Module) -> Any:
    model: Any = _unwrapped(module)
    kind = type(model).__name__
    if hasattr(model, "merge_and_unload") or getattr(model, "_hf_peft_config_loaded", False):
        raise UnsupportedModelError(
            f"{kind} has adapters; merge them (merge_and_unload) and pass the merged model"
        )
    # An instance can only exist once its module was imported: no need to import it to look.
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or not isinstance(model, modeling.PreTrainedModel):
        raise TensorMismatchError(
            f"{kind} is no transformers model, and a module's state_dict is not its checkpoint; "
            f"{_PASS_NAMED_TENSORS}"
        )
    if getattr(model, "hf_quantizer", None) is not None:
        raise UnsupportedModelError(f"{kind} is quantized; {_PASS_NAMED_TENSORS}")
    if (getattr(model, "_tp_size", None) or 1) > 1:
        raise UnsupportedModelError(
            f"{kind} is tensor-parallel, its parameters are shards; {_PASS_NAMED_TENSORS}"
        )
    return model


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    while True:
        if isinstance(module, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel):
            inner: object = module.module
        else:
            inner = getattr(module, "_orig_mod", None)  # what torch.compile wraps
        if not isinstance(inner, torch.nn.Module):
            return module
        module = inner


def _exported(model: Any) -> "Iterator[NamedTensor]":
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError as error:
        raise RefitError(
            "this transformers cannot convert a model's tensors to those of its checkpoint: "
            "pip install 'vllm-sparse-refit[hf]'"
        ) from error
    revert: _Revert = partial(revert_weight_conversion, model)
    state = _saved_state(model)
    for step in _plan(revert, state):
        tensors = {name: whole_tensor(name, state.pop(name)) for name in step.sources}
        if step.target is not None:
            yield step.target, tensors.pop(step.sources[0]).contiguous()
            continue
        converted = revert(tensors)
        del tensors
        for name in list(converted):  # popped, so that a copy can be freed once it was used
            yield name, converted.pop(name).contiguous()


def _saved_state(model: Any) -> _StateDict:
    """The state-dict entries that ``save_pretrained`` keeps, under the model's own names."""
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    kind = type(model).__name__
    state: dict[str, Any] = model.state_dict()
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedModelError(
                f"{name} of {kind} is {type(tensor).__name__}, not a tensor; {_PASS_NAMED_TENSORS}"
            )
        if tensor.device.type == "meta":
            raise UnsupportedModelError(
                f"{name} of {kind} is offloaded or was never loaded; load the whole model"
            )
    try:
        kept: _StateDict = remove_tied_weights_from_state_dict(state, model)
    except RuntimeError as error:
        raise UnsupportedModelError(
            f"{kind} shares tensors in a way that save_pretrained refuses as well: {error}"
        ) from error
    return kept


@dataclass(frozen=True)
class _Step:
    """State-dict tensors that leave together: one under a new name, or a group to convert."""

    sources: tuple[str, ...]
    target: str | None = None


def _plan(revert: _Revert, state: Mapping[str, torch.Tensor]) -> list[_Step]:
    """Find out on the meta device, where it costs nothing, what the conversion does.

    A tensor that comes back as the same object is only renamed. The others are grouped by layer,
    and the grouping is checked against a conversion of everything at once.
    """
    metas = {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in state.items()}
    expected = revert(dict(metas))
    name_of = {id(meta): name for name, meta in metas.items()}
    renamed = {new: name_of[id(meta)] for new, meta in expected.items() if id(meta) in name_of}

    layers: dict[str, list[str]] = {}
    for name in sorted(metas.keys() - set(renamed.values())):
        layers.setdefault(_layer_of(name), []).append(name)
    converted = _convert_by_group(revert, metas, map(tuple, layers.values()))
    if {name: form for name, (form, _) in converted.items()} != {
        name: _form(meta) for name, meta in expected.items() if name not in renamed
    }:
        return [_Step(tuple(metas))]

    # In the order of the whole conversion: loaders expect a layer's tensors side by side.
    steps = (
        _Step((renamed[name],), name) if name in renamed else _Step(converted[name][1])
        for name in expected
    )
    return list(dict.fromkeys(steps))


_Form = tuple[torch.Size, torch.dtype]


def _convert_by_group(
    revert: _Revert, metas: Mapping[str, torch.Tensor], groups: Iterable[tuple[str, ...]]
) -> dict[str, tuple[_Form, tuple[str, ...]]]:
    """Form and group of each name that converting group by group gives; {} if that cannot be."""
    outputs: dict[str, tuple[_Form, tuple[str, ...]]] = {}
    for group in groups:
        try:
            converted = revert({name: metas[name] for name in group})
        except Exception:  # an operation that lacks tensors of another group fails in its own way
            return {}
        if outputs.keys() & converted.keys():
            return {}
        outputs |= {name: (_form(tensor), group) for name, tensor in converted.items()}
    return outputs


def _form(tensor: torch.Tensor) -> _Form:
    return tensor.shape, tensor.dtype


def _layer_of(name: str) -> str:
    """The name up to its first number: ``model.layers.3`` for all that is inside layer 3."""
    found = re.match(r".*?\.\d+(?=\.)", name)
    return found[0] if found else ""
