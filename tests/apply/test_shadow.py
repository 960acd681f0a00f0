"""Packed and derived weights: updated as if loaded anew, taken back bit by bit, or refused by name."""

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.apply.toys import (
    ToyApplier,
    Weights,
    deltas_between,
    grouped,
    identities,
    mixed,
    random_numbers,
    state_bits,
    toy_applier,
)
from vllm_sparse_refit.apply.loading import LoadedModel, PostLoadObserver
from vllm_sparse_refit.codec.delta import SparseOperation
from vllm_sparse_refit.codec.dtypes import bits_view
from vllm_sparse_refit.errors import RefitError, TransactionError, UnsupportedModelError

BF16 = torch.bfloat16
Tensors = dict[str, torch.Tensor]
Run = Callable[[torch.nn.Module], torch.Tensor]


class Layer(torch.nn.Module):
    """Parameters as a loader writes them, and a quant method that packs them."""

    def __init__(self, pack: Callable[[Any], None] | None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 6, dtype=BF16), requires_grad=False)
        self.bias = torch.nn.Parameter(torch.zeros(4, dtype=BF16), requires_grad=False)
        self.run: Any = lambda: [self.weight, self.bias]
        if pack is not None:
            self.quant_method = SimpleNamespace(pack=pack, kernel=None, made=[])
            self.scheme = SimpleNamespace(kernel=SimpleNamespace(handler=None))


class Deferred(torch.nn.Module):
    """What attention layers do: derive something from another layer when all others are done."""

    def __init__(self, source: Layer, derive: Callable[[Any, Layer], None]) -> None:
        super().__init__()
        self.source = [source]  # no submodule
        self.derive = derive
        self.run: Any = lambda: [self.derived]

    def process_weights_after_loading(self) -> None:
        self.derive(self, self.source[0])


class Model(torch.nn.Module):
    """Two layers that are packed, one that is not, perhaps one that derives."""

    def __init__(self, toy: "PackedToy") -> None:
        super().__init__()
        self.first = Layer(toy.pack)
        self.second = Layer(toy.pack)
        self.plain = Layer(None)
        if toy.tied:
            self.second.weight = self.first.weight
        if toy.derive is not None:
            self.deferred = Deferred(self.second, toy.derive)

    def load_weights(self, weights: Weights) -> None:
        parameters = dict(self.named_parameters(remove_duplicate=False))
        for name, weight in weights:
            parameters[name].data.copy_(weight)

    def computed(self) -> list[torch.Tensor]:
        """What the kernels would read."""
        return [
            tensor.detach().float().clone()
            for module in self.children()
            for tensor in (module.run() if hasattr(module, "run") else [])
        ]


class HookedModel(Model):
    def process_weights_after_loading(self) -> None:
        self.total = self.first.weight.float().sum() + self.plain.weight.float().sum()

    def computed(self) -> list[torch.Tensor]:
        return [*super().computed(), self.total.clone()]


def _process(model: Any) -> None:
    """The walks of vLLM's processing."""
    for _, module in model.named_modules():
        if (method := getattr(module, "quant_method", None)) is not None:
            method.pack(module)
    for _, module in model.named_modules():
        if isinstance(module, Deferred):
            module.process_weights_after_loading()
    if hasattr(model, "process_weights_after_loading"):
        model.process_weights_after_loading()


class PackedToy:
    def __init__(
        self,
        pack: Callable[[Any], None] | None = None,
        *,
        derive: Callable[[Any, Layer], None] | None = None,
        tied: bool = False,
        model: type[Model] = Model,
    ) -> None:
        self.pack, self.derive, self.tied, self.model = pack, derive, tied, model

    def loaded(self, weights: Tensors, **options: Any) -> tuple[Model, LoadedModel]:
        model = self.model(self)
        model.load_weights(weights.items())
        return model, PostLoadObserver(**options).observe(model, _process)


# --- kinds of processing ---------------------------------------------------------------------------


def _repacked_same_shape(layer: Any) -> None:
    layer.weight = torch.nn.Parameter(layer.weight.data.flip(0), requires_grad=False)


def _rewritten_in_place(layer: Any) -> None:
    layer.weight.data.copy_(layer.weight.data.flip(1))


def _data_swapped(layer: Any) -> None:
    layer.weight.data = layer.weight.data.t().contiguous()


def _not_contiguous(layer: Any) -> None:
    layer.weight.data = layer.weight.data.flip(0).t().contiguous().t()


def _emptied_into_closure(layer: Any) -> None:
    packed = layer.weight.data.flip(0) * 2
    layer.run = lambda: [packed, layer.bias]
    layer.weight = torch.nn.Parameter(torch.empty(0, dtype=BF16), requires_grad=False)


class _Handle:
    """Owns something; what it holds is its address."""

    alive: list["_Handle"] = []  # noqa: RUF012

    def __init__(self, packed: torch.Tensor) -> None:
        self.packed = packed
        self.address = torch.tensor(id(packed))

    def __del__(self) -> None:
        self.packed.fill_(float("nan"))


def _owned_by_a_handle(layer: Any) -> None:
    handle = _Handle(layer.weight.data.flip(0).clone())
    layer.run = lambda: [handle.packed, layer.bias]


def _handle_as_attribute(layer: Any) -> None:
    layer.handle = _Handle(layer.weight.data.flip(0).clone())
    layer.run = lambda: [layer.handle.packed, layer.bias]


class _Pointer:
    """Points to memory that it does not own, as oneDNN's handlers point to a layer's scales."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.address, self.numel = tensor.data_ptr(), tensor.numel()

    def read(self) -> torch.Tensor:
        memory = (ctypes.c_uint16 * self.numel).from_address(self.address)
        return torch.tensor(list(memory), dtype=torch.int32)


def _pointed_to_from_deep_inside(layer: Any) -> None:
    """As vLLM's int8 kernel: the handler is an attribute of the kernel of the scheme of the layer."""
    layer.weight = torch.nn.Parameter(layer.weight.data.flip(0), requires_grad=False)
    layer.scheme.kernel.handler = [_Pointer(layer.weight), _Pointer(layer.bias)]
    layer.run = lambda: [part.read() for part in layer.scheme.kernel.handler]


def _only_the_first_time(layer: Any) -> None:
    """As vLLM's MoE method: with a kernel already there it does not pack."""
    method = layer.quant_method
    if method.kernel is None:
        method.kernel = SimpleNamespace(bias=layer.bias, scale=torch.ones(3))
        layer.weight = torch.nn.Parameter(layer.weight.data.flip(0), requires_grad=False)
    layer.run = lambda: [layer.weight, method.kernel.bias]


def _refers_to_shared_state(layer: Any) -> None:
    """As vLLM's MoE kernels: the new object leads to objects that were there before."""
    layer.weight = torch.nn.Parameter(layer.weight.data.flip(0), requires_grad=False)
    layer.quant_method.kernel = SimpleNamespace(weight=layer.weight, config=SHARED.inner)
    layer.run = lambda: [layer.quant_method.kernel.weight * layer.quant_method.kernel.config.factor]


def _padded_bias(layer: Any) -> None:
    """As vLLM's CPU MoE: the kernel has the parameter, whose data is exchanged afterwards."""
    layer.quant_method.kernel = SimpleNamespace(bias=layer.bias)
    layer.bias.data = torch.nn.functional.pad(layer.bias.data, (0, 2))
    layer.run = lambda: [layer.weight, layer.quant_method.kernel.bias]


def _appended(layer: Any) -> None:
    layer.quant_method.made.append(layer.weight.data.float())
    layer.run = lambda: list(layer.quant_method.made)


def _number(layer: Any) -> None:
    layer.limit = float(layer.weight.data.float().abs().max())
    layer.run = lambda: [layer.weight, torch.tensor(layer.limit)]


def _scaled(layer: Any) -> None:
    """Online quantization: a scale of the whole tensor, and the tensor in another dtype."""
    scale = layer.weight.data.float().abs().max()
    quantized = (layer.weight.data.float() / scale * 127).round().to(torch.int8)
    layer.weight = torch.nn.Parameter(quantized, requires_grad=False)
    layer.register_parameter("scale", torch.nn.Parameter(scale, requires_grad=False))
    layer.run = lambda: [layer.weight, layer.scale]


def _derived_copy(module: Any, source: Layer) -> None:
    module.derived = source.weight.float() * 3


def _derived_parameter(module: Any, source: Layer) -> None:
    derived = torch.nn.Parameter(source.weight.detach().t().contiguous(), requires_grad=False)
    module.register_parameter("absorbed", derived)
    module.run = lambda: [module.absorbed]


def _derived_and_emptied(module: Any, source: Layer) -> None:
    module.derived = source.weight.float() * 3
    source.run = lambda: [source.bias]


def _derived_view(module: Any, source: Layer) -> None:
    module.derived = source.weight.detach().t()


SHARED = SimpleNamespace(inner=SimpleNamespace(factor=2))

TOYS = {
    "refers-to-shared-state": PackedToy(_refers_to_shared_state),
    "repacked-same-shape": PackedToy(_repacked_same_shape),
    "rewritten-in-place": PackedToy(_rewritten_in_place),
    "data-swapped": PackedToy(_data_swapped),
    "not-contiguous": PackedToy(_not_contiguous),
    "emptied-into-closure": PackedToy(_emptied_into_closure),
    "owned-by-a-handle": PackedToy(_owned_by_a_handle),
    "handle-as-attribute": PackedToy(_handle_as_attribute),
    "pointed-to": PackedToy(_pointed_to_from_deep_inside),
    "only-the-first-time": PackedToy(_only_the_first_time),
    "padded-bias": PackedToy(_padded_bias),
    "appended": PackedToy(_appended),
    "number": PackedToy(_number),
    "scaled": PackedToy(_scaled),
    "derived-copy": PackedToy(derive=_derived_copy),
    "derived-parameter": PackedToy(derive=_derived_parameter),
    "derived-and-emptied": PackedToy(derive=_derived_and_emptied),
    "derived-view": PackedToy(derive=_derived_view),
    "derived-from-packed": PackedToy(_repacked_same_shape, derive=_derived_copy),
    "derived-from-rewritten": PackedToy(_rewritten_in_place, derive=_derived_parameter),
    "view-of-rewritten": PackedToy(_rewritten_in_place, derive=_derived_view),
    "tied-handles": PackedToy(_owned_by_a_handle, tied=True),
    "hook": PackedToy(model=HookedModel),
    "hook-and-packed": PackedToy(_rewritten_in_place, model=HookedModel),
}

NAMES = tuple(f"{layer}.{p}" for layer in ("first", "second", "plain") for p in ("weight", "bias"))


def _weights(toy: PackedToy, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"weight": (4, 6), "bias": (4,)}
    return {
        name: random_numbers(shapes[name.split(".")[1]], BF16, generator)
        for name in NAMES
        if not (toy.tied and name == "second.weight")
    }


def _info(weights: Mapping[str, torch.Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(t.shape), t.dtype) for name, t in weights.items()}


def _started(toy: PackedToy, old: Tensors) -> tuple[Model, ToyApplier]:
    model, loaded = toy.loaded(old)
    assert loaded.refused == ()
    return model, toy_applier(model, _info(old), loaded=loaded)


def _apply(applier: Any, old: Tensors, new: Tensors) -> None:
    staged = grouped(deltas_between(old, new, applier.discovery, SparseOperation.XOR))
    applier.check_transfer(staged)
    applier.apply(staged)


def _state(model: Model) -> list[torch.Tensor]:
    return [*state_bits(model).values(), *map(bits_view, model.computed())]


def _same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def _only(old: Tensors, new: Tensors, *names: str) -> Tensors:
    return {name: new[name] if name in names else tensor for name, tensor in old.items()}


def _updates(toy: PackedToy) -> Iterator[tuple[Tensors, Tensors]]:
    """Of everything, then of single tensors, each on top of the one before."""
    old = _weights(toy, 1)
    everything = mixed(old, _weights(toy, 2), seed=3)
    yield old, everything
    other = mixed(everything, _weights(toy, 4), seed=5)
    for name in old:
        after = _only(everything, other, name)
        yield everything, after
        everything = after


@pytest.mark.parametrize("name", TOYS)
def test_an_update_equals_a_fresh_model(name: str) -> None:
    toy = TOYS[name]
    first = next(_updates(toy))[0]
    model, applier = _started(toy, first)
    assert applier.discovery.packed == ()
    unchanged, places = _state(model), identities(model)
    applier.discover_native_skips(_info(first))
    assert _same(_state(model), unchanged)
    for old, new in _updates(toy):
        _apply(applier, old, new)
        assert applier.finish_sparse_delta_refit()["samples_compared"] > 0
        applier.release()
        assert _same(_state(model), _state(toy.loaded(new)[0]))
        assert identities(model) == places
    assert not _same(_state(model), unchanged)


@pytest.mark.parametrize("name", TOYS)
def test_an_update_can_be_taken_back_and_repeated(name: str) -> None:
    toy = TOYS[name]
    old, new = next(_updates(toy))
    model, applier = _started(toy, old)
    unchanged, places = _state(model), identities(model)
    for _ in range(2):
        _apply(applier, old, new)
        assert not _same(_state(model), unchanged)
        applier.roll_back()
        assert _same(_state(model), unchanged)
        assert identities(model) == places
    _apply(applier, old, new)
    applier.release()
    assert _same(_state(model), _state(toy.loaded(new)[0]))


def test_only_touched_layers_are_processed_again() -> None:
    processed: list[Any] = []

    def pack(layer: Any) -> None:
        processed.append(layer)
        _repacked_same_shape(layer)

    toy = PackedToy(pack)
    old, new = next(_updates(toy))
    model, applier = _started(toy, old)
    processed.clear()
    _apply(applier, old, _only(old, new, "second.bias", "plain.weight"))
    assert processed == [model.second]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_processing_that_raises_half_way_changes_nothing(error: type[BaseException]) -> None:
    fail = False

    def pack(layer: Any) -> None:
        _rewritten_in_place(layer)
        _emptied_into_closure(layer)
        if fail and layer is model.second:
            raise error("out of memory")

    toy = PackedToy(pack, derive=None)
    old, new = next(_updates(toy))
    model, applier = _started(toy, old)
    unchanged, places = _state(model), identities(model)
    fail = True
    expected = TransactionError if error is ValueError else KeyboardInterrupt
    with pytest.raises(expected, match="out of memory"):
        _apply(applier, old, new)
    assert _same(_state(model), unchanged)
    assert identities(model) == places
    fail = False
    _apply(applier, old, new)
    assert _same(_state(model), _state(toy.loaded(new)[0]))


def test_two_updates_before_a_release_are_both_taken_back() -> None:
    toy = TOYS["scaled"]
    old, new = next(_updates(toy))
    model, applier = _started(toy, old)
    unchanged = _state(model)
    half = _only(old, new, "first.weight", "second.weight")
    _apply(applier, old, half)
    _apply(applier, half, new)
    assert applier.finish_sparse_delta_refit()["samples_compared"] > 0
    assert _same(_state(model), _state(toy.loaded(new)[0]))
    applier.roll_back()
    assert _same(_state(model), unchanged)


# --- refused ---------------------------------------------------------------------------------------


_calls = 0


def _differs_each_time(layer: Any) -> None:
    global _calls  # noqa: PLW0603
    _calls += 1
    layer.weight.data = layer.weight.data + _calls


def _remembers_outside(layer: Any) -> None:
    if not hasattr(layer.weight, "is_packed"):
        layer.weight.data = layer.weight.data.flip(0)
    layer.weight.is_packed = True


def _raises_again(layer: Any) -> None:
    if layer in _SEEN:
        raise ValueError("packed twice")
    _SEEN.append(layer)
    _repacked_same_shape(layer)


_SEEN: list[Any] = []


@pytest.mark.parametrize(
    ("pack", "reason"),
    [
        (_differs_each_time, "weight"),
        (_remembers_outside, "weight"),
        (_raises_again, "packed twice"),
    ],
)
def test_processing_that_cannot_be_repeated_is_refused_by_name(
    pack: Callable[[Any], None], reason: str
) -> None:
    toy = PackedToy(pack)
    old = _weights(toy, 1)
    model, loaded = toy.loaded(old)
    unchanged = _state(model)
    applier = toy_applier(model, _info(old), loaded=loaded)
    assert {layer.module for layer in applier.discovery.packed} == {"first", "second"}
    assert all(reason in layer.reason for layer in applier.discovery.packed)
    with pytest.raises(UnsupportedModelError, match="first is packed"):
        applier.check_model()
    assert _same(_state(model), unchanged)


def _negated(model: Any) -> None:
    model.plain.weight.data.neg_()


def _negated_beside_a_packed_one(model: Any) -> None:
    model.first.bias.data.neg_()


def _copied(model: Any) -> None:
    model.first.copied = model.first.bias.clone()


@pytest.mark.parametrize(
    ("after", "module"),
    [(_negated, "plain"), (_negated_beside_a_packed_one, "first"), (_copied, "first")],
)
def test_changes_outside_of_any_modules_processing_are_refused_by_name(
    after: Callable[[Any], None], module: str
) -> None:
    toy = PackedToy(_repacked_same_shape)
    model = toy.model(toy)
    model.load_weights(_weights(toy, 1).items())

    def process(walked: Any) -> None:
        _process(walked)
        after(model)

    loaded = PostLoadObserver().observe(model, process)
    assert [layer.module for layer in loaded.refused] == [module]


def test_processing_that_changes_what_it_left_alone_at_loading_is_refused_and_undone() -> None:
    def clamp(layer: Any) -> None:
        layer.weight.data.clamp_(max=2)
        layer.packed = layer.weight.data.flip(0)

    toy = PackedToy(clamp)
    old = {name: tensor.clamp(max=1) for name, tensor in _weights(toy, 1).items()}
    model, applier = _started(toy, old)
    unchanged = _state(model)
    new = {name: tensor + 2 for name, tensor in old.items()}
    with pytest.raises(UnsupportedModelError, match=r"first\.weight, which it left alone"):
        _apply(applier, old, new)
    assert _same(_state(model), unchanged)


def test_a_number_is_refused_where_code_is_compiled() -> None:
    toy = TOYS["number"]
    old, new = next(_updates(toy))
    model, loaded = toy.loaded(old)
    applier = toy_applier(model, loaded=loaded)
    applier._model_runner.vllm_config.model_config.enforce_eager = False
    applier.discover_native_skips(_info(old))
    unchanged = _state(model)
    with pytest.raises(UnsupportedModelError, match=r"first\.limit is a number"):
        _apply(applier, old, new)
    assert _same(_state(model), unchanged)


def test_without_shadows_packed_layers_are_refused_by_name() -> None:
    toy = TOYS["repacked-same-shape"]
    old = _weights(toy, 1)
    _, loaded = toy.loaded(old, shadow=False)
    assert [layer.module for layer in loaded.refused] == ["first", "second"]
    assert (len(loaded.layers), loaded.layers.nbytes) == (0, 0)


def test_shadows_have_a_size_and_a_limit() -> None:
    toy = TOYS["repacked-same-shape"]
    old = _weights(toy, 1)
    needed = 2 * 4 * 6 * 2
    _, loaded = toy.loaded(old, max_shadow_bytes=needed)
    assert (loaded.refused, len(loaded.layers), loaded.layers.nbytes) == ((), 2, needed)
    _, loaded = toy.loaded(old, max_shadow_bytes=needed - 1)
    assert (len(loaded.layers), loaded.layers.nbytes) == (0, 0)
    assert all(f"{needed} bytes" in layer.reason for layer in loaded.refused)
    # What is unchanged in the model itself is not kept a second time.
    _, loaded = TOYS["owned-by-a-handle"].loaded(old)
    assert (len(loaded.layers), loaded.layers.nbytes) == (2, 0)


def _reload(model: Model, weights: Tensors, *, process: bool = True) -> None:
    """As vLLM's layer-wise reload: fresh parameters, processed, copied into those that were there."""
    for name in ("first", "second"):
        layer = model.get_submodule(name)
        in_use = dict(layer._parameters)
        for parameter in list(layer._parameters):
            fresh = weights[f"{name}.{parameter}"].clone()
            layer._parameters[parameter] = torch.nn.Parameter(fresh, requires_grad=False)
        if process:
            layer.quant_method.process_weights_after_loading(layer)
        for parameter, tensor in in_use.items():
            tensor.data.copy_(layer._parameters[parameter])
            layer._parameters[parameter] = tensor
    model.plain.load_state_dict({n: weights[f"plain.{n}"] for n in ("weight", "bias")})


class _Method(SimpleNamespace):
    def process_weights_after_loading(self, layer: Any) -> None:
        self.pack(layer)


@pytest.mark.parametrize("name", ["repacked-same-shape", "only-the-first-time"])
def test_a_reload_is_followed_and_put_right(name: str) -> None:
    toy = TOYS[name]
    updates = _updates(toy)
    old, new = next(updates)
    model = toy.model(toy)
    for layer in (model.first, model.second):
        layer.quant_method = _Method(**vars(layer.quant_method))
    model.load_weights(old.items())
    loaded = PostLoadObserver().observe(model, _process)
    applier = toy_applier(model, _info(old), loaded=loaded)
    with applier.weights_replaced("reload_weights"):
        _reload(model, new)
    # Also where the second pass does not pack, as vLLM's MoE method does not.
    assert _same(_state(model), _state(toy.loaded(new)[0]))
    applier.discover_native_skips(_info(old))
    _apply(applier, new, old)
    assert _same(_state(model), _state(toy.loaded(old)[0]))


@pytest.mark.parametrize("raises", [False, True])
def test_weights_replaced_in_another_way_make_shadows_unusable(raises: bool) -> None:
    toy = TOYS["repacked-same-shape"]
    old = _weights(toy, 1)
    model, applier = _started(toy, old)
    with contextlib.suppress(ValueError), applier.weights_replaced("reload_weights"):
        if raises:
            raise ValueError
        _reload(model, old, process=False)
    with pytest.raises(UnsupportedModelError, match=r"reload_weights.*first"):
        applier.discover_native_skips(_info(old))


def test_a_packed_parameter_that_moved_is_refused() -> None:
    toy = TOYS["repacked-same-shape"]
    old, new = next(_updates(toy))
    model, applier = _started(toy, old)
    unchanged = _state(model)
    model.second.weight.data = model.second.weight.data.clone()
    with pytest.raises(RefitError, match=r"second\.weight has moved"):
        _apply(applier, old, new)
    assert _same(_state(model), unchanged)
