"""Which layers post-load processing packed, seen from outside."""

import functools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from vllm_sparse_refit.apply.loading import PostLoadObserver
from vllm_sparse_refit.apply.processing import packed_layers

Process = Callable[[torch.nn.Module], None]


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4), requires_grad=False)
        self.register_buffer("scale", torch.ones(3))
        self.note = torch.full((2,), 5.0)
        self.cache: list[torch.Tensor] = []
        self.quant_method = SimpleNamespace(kernel=None)
        self.forward_fn: Callable[..., torch.Tensor] | None = None
        self.block_size = 16
        self.limit = 1.0


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = Layer()
        self.linear = Layer()
        self.head = Layer()


def _packed(process: Process) -> dict[str, str]:
    model = Model()
    return {p.module: p.reason for p in packed_layers(model, lambda: process(model))}


class _Slotted:
    """As opaque as an object of an extension type: it has no ``__dict__``."""

    __slots__ = ("held",)

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held


def _transpose(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().t().contiguous()


def _replace(model: Model) -> None:
    weight = model.linear.weight.data.clone()
    model.linear.weight = torch.nn.Parameter(weight, requires_grad=False)


def _reshape(model: Model) -> None:
    model.linear.weight.data = model.linear.weight.data.view(4, 3)


def _rewrite_in_place(model: Model) -> None:
    model.linear.weight.data.copy_(model.linear.weight.data.flip(0))


def _swap_data(model: Model) -> None:
    model.linear.weight.data = model.linear.weight.data.flip(0)


def _empty(model: Model) -> None:
    model.linear.weight.data = torch.empty(0)


def _delete(model: Model) -> None:
    del model.linear.weight


def _register(model: Model) -> None:
    packed = torch.nn.Parameter(_transpose(model.linear.weight), requires_grad=False)
    model.linear.register_parameter("packed", packed)


def _rewrite_buffer(model: Model) -> None:
    model.linear.scale.mul_(2)


def _attribute_copy(model: Model) -> None:
    model.linear.weight_t = _transpose(model.linear.weight)


def _attribute_rewritten(model: Model) -> None:
    model.linear.note.add_(1)


def _list_attribute(model: Model) -> None:
    model.linear.cache.append(_transpose(model.linear.weight))


def _dict_attribute(model: Model) -> None:
    model.linear.tables = {"t": [_transpose(model.linear.weight)]}


def _lambda(model: Model) -> None:
    packed = _transpose(model.linear.weight)
    model.linear.forward_fn = lambda x: x @ packed


def _default_argument(model: Model) -> None:
    packed = _transpose(model.linear.weight)

    def forward(x: torch.Tensor, weight: torch.Tensor = packed) -> torch.Tensor:
        return x @ weight

    model.linear.forward_fn = forward


def _partial(model: Model) -> None:
    model.linear.forward_fn = functools.partial(torch.mm, mat2=_transpose(model.linear.weight))


def _opaque_in_closure(model: Model) -> None:
    handler = _Slotted(_transpose(model.linear.weight))
    model.linear.forward_fn = lambda x: x @ handler.held


def _bound_builtin_method(model: Model) -> None:
    model.linear.forward_fn = _transpose(model.linear.weight).matmul


def _object_with_tensor(model: Model) -> None:
    model.linear.handler = SimpleNamespace(inner=SimpleNamespace(t=_transpose(model.linear.weight)))


def _quant_method(model: Model) -> None:
    model.linear.quant_method.kernel = SimpleNamespace(w=_transpose(model.linear.weight))


def _helper_object(model: Model) -> None:
    # What attention backends do with weights they derive.
    model.linear.quant_method.absorbed = _transpose(model.linear.weight)


def _new_module(model: Model) -> None:
    model.linear.add_module("inner", Layer())


@pytest.mark.parametrize(
    ("process", "named"),
    [
        (_replace, "replaced"),
        (_reshape, "rewritten"),
        (_rewrite_in_place, "rewritten"),
        (_swap_data, "rewritten"),
        (_empty, "rewritten"),
        (_delete, "removed"),
        (_register, "packed"),
        (_rewrite_buffer, "scale"),
        (_attribute_copy, "weight_t"),
        (_attribute_rewritten, "note"),
        (_list_attribute, "cache"),
        (_dict_attribute, "tables"),
        (_lambda, "forward_fn"),
        (_default_argument, "forward_fn"),
        (_partial, "forward_fn"),
        (_opaque_in_closure, "forward_fn"),
        (_bound_builtin_method, "forward_fn"),
        (_object_with_tensor, "handler"),
        (_quant_method, "quant_method.kernel"),
        (_helper_object, "quant_method.absorbed"),
    ],
)
def test_a_packed_layer_is_found_and_the_reason_names_what_changed(
    process: Process, named: str
) -> None:
    packed = _packed(process)
    assert list(packed) == ["linear"]
    assert named in packed["linear"]


def test_a_module_that_appears_is_named() -> None:
    assert list(_packed(_new_module)) == ["linear.inner"]


def _nothing(model: Model) -> None:
    del model


def _builtin_function(model: Model) -> None:
    model.linear.forward_fn = torch.nn.functional.linear
    model.head.forward_fn = torch.ops.aten.mm.default


def _plain_function(model: Model) -> None:
    model.linear.forward_fn = _transpose


def _bound_method_of_a_module(model: Model) -> None:
    model.linear.forward_fn = model.linear.extra_repr


def _view_of_a_parameter(model: Model) -> None:
    model.linear.gate = model.linear.weight.data[:2]
    model.linear.gates = [model.linear.weight.data[2:]]
    weight = model.linear.weight
    model.linear.forward_fn = lambda x: x @ weight.t()


def _view_of_another_layer(model: Model) -> None:
    model.head.absorbed = model.linear.weight.data.view(2, 6)


def _tie(model: Model) -> None:
    model.head.weight = model.embed.weight


def _unfilled_cell(model: Model) -> None:
    if model is None:
        packed = torch.empty(1)
    model.linear.forward_fn = lambda x: x @ packed


def _plain_values(model: Model) -> None:
    model.linear.block_size = 32
    model.linear.label = "done"
    model.linear.processed = True
    model.linear.empty = torch.empty(0)


@pytest.mark.parametrize(
    "process",
    [
        _nothing,
        _builtin_function,
        _plain_function,
        _bound_method_of_a_module,
        _view_of_a_parameter,
        _view_of_another_layer,
        _tie,
        _unfilled_cell,
        _plain_values,
    ],
)
def test_what_follows_an_update_by_itself_is_not_packed(process: Process) -> None:
    assert _packed(process) == {}


@pytest.mark.parametrize("name", ["limit", "fresh_limit"])
def test_a_changed_or_new_float_may_be_a_scale_computed_from_weights(name: str) -> None:
    def process(model: Model) -> None:
        setattr(model.linear, name, 0.5)

    assert name in _packed(process)["linear"]


def test_an_observer_watches_vllms_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    base_loader = pytest.importorskip("vllm.model_executor.model_loader.base_loader")
    processed: list[str] = []

    def process(model: Model, config: str) -> None:
        processed.append(config)
        _replace(model)

    monkeypatch.setattr(base_loader, "process_weights_after_loading", process)
    observer, model = PostLoadObserver(shadow=False), Model()
    with observer.watch():
        base_loader.process_weights_after_loading(model, "config")
    assert base_loader.process_weights_after_loading is process
    assert processed == ["config"]
    report = observer.report(model)
    assert report is not None
    assert [layer.module for layer in report.refused] == ["linear"]

    wrapper = torch.nn.Sequential(model.embed)
    assert observer.report(wrapper) is report
    assert observer.report(Model()) is None
