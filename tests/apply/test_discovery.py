"""What discovery says about loaders of every kind, and that it changes nothing."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from tests.apply.toys import (
    CASES,
    TOYS,
    Loader,
    Toy,
    ToyApplier,
    ToyModel,
    Weights,
    assert_same_bits,
    identities,
    random_bits,
    random_weights,
    state_bits,
    toy_applier,
)
from vllm_sparse_refit.apply.discovery import Discovery, discover
from vllm_sparse_refit.apply.live_model import LiveModel
from vllm_sparse_refit.apply.load_mode import LoadKind
from vllm_sparse_refit.apply.processing import PackedLayer
from vllm_sparse_refit.errors import TransactionError, UnsupportedModelError

BF16 = torch.bfloat16
VIEW, TRANSFORM, DENSE = LoadKind.VIEW, LoadKind.TRANSFORM, LoadKind.DENSE
SKIP, UNSUPPORTED = LoadKind.SKIP, LoadKind.UNSUPPORTED


def _discover(
    loader: Loader,
    parameters: dict[str, tuple[int, ...]],
    shapes: dict[str, tuple[int, ...]],
    dtype: torch.dtype = BF16,
    packed: tuple[PackedLayer, ...] = (),
) -> Discovery:
    """Discover with a toy loader; the model must be bit for bit what it was, object by object."""
    generator = torch.Generator().manual_seed(1)
    tensors = {n: random_bits(s, dtype, generator) for n, s in parameters.items()}
    model = ToyModel(tensors, loader)
    before, were = state_bits(model), identities(model)
    info = {name: (shape, dtype) for name, shape in shapes.items()}
    found = discover(LiveModel(model), info, packed)
    assert_same_bits(model, before)
    assert identities(model) == were
    return found


def _kinds(found: Discovery) -> dict[str, LoadKind]:
    return {name: weight.kind for name, weight in found.weights.items()}


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_supported_loaders(name: str, dtype: torch.dtype) -> None:
    toy = TOYS[name]
    model = toy.model(dtype, random_weights(toy, dtype, 0))
    before, were = state_bits(model), identities(model)
    applier = toy_applier(model)

    skips = applier.discover_native_skips(toy.info(dtype))

    assert _kinds(applier.discovery) == toy.kinds
    assert skips == {n for n, kind in toy.kinds.items() if kind is SKIP}
    assert applier.discovery.unsupported == {}
    assert applier.discovery.uncovered == ()
    assert_same_bits(model, before)
    assert identities(model) == were


@pytest.mark.parametrize(
    ("name", "streaming"),
    [("fused_qkv", True), ("skipping", True), ("collecting", False)],
)
def test_streaming_loaders_are_told_from_collecting_ones(name: str, streaming: bool) -> None:
    toy = TOYS[name]
    applier = toy_applier(toy.model(BF16, random_weights(toy, BF16, 0)), toy.info(BF16))
    assert applier.discovery.streaming is streaming


def test_an_expert_lands_in_its_own_box() -> None:
    toy = TOYS["experts"]
    applier = toy_applier(toy.model(BF16, random_weights(toy, BF16, 0)), toy.info(BF16))
    (copy,) = applier.discovery.weights["2.up"].copies
    assert copy.boxes is not None
    assert copy.boxes.target.offset == 2 * 30 + 3 * 5


def test_names_on_one_parameter_are_aliases() -> None:
    toy = TOYS["aliasing"]
    applier = toy_applier(toy.model(BF16, random_weights(toy, BF16, 0)), toy.info(BF16))
    assert applier.discovery.aliases == (("embed", "lm_head"),)


# --- loaders that combine tensors ----------------------------------------------------------------

QKV = {"q": (4, 6), "k": (2, 6), "v": (2, 6)}


def _buffer_then_concatenate(model: ToyModel, weights: Weights) -> set[str]:
    parts: dict[str, torch.Tensor] = {}
    for name, weight in weights:
        parts[name] = weight
        if len(parts) == 3:
            model.qkv.data.copy_(torch.cat([parts["q"], parts["k"], parts["v"]]))
            return {"qkv"}
    return set()


def _buffer_then_copy(model: ToyModel, weights: Weights) -> set[str]:
    parts: dict[str, torch.Tensor] = {}
    for name, weight in weights:
        parts[name] = weight
        if len(parts) == 3:
            for start, part in ((0, "q"), (4, "k"), (6, "v")):
                model.qkv.data.narrow(0, start, parts[part].shape[0]).copy_(parts[part])
    return set()


def _buffer_casts(model: ToyModel, weights: Weights) -> set[str]:
    parts = []
    for _, weight in weights:
        parts.append(weight.float())
        if len(parts) == 3:
            model.qkv.data.copy_(torch.cat(parts))
    return set()


@pytest.mark.parametrize("loader", [_buffer_then_concatenate, _buffer_then_copy, _buffer_casts])
def test_tensors_that_a_loader_needs_together_are_refused_and_not_taken_for_skipped(
    loader: Loader,
) -> None:
    found = _discover(loader, {"qkv": (8, 6)}, QKV)
    assert _kinds(found) == dict.fromkeys(QKV, UNSUPPORTED)
    assert all("other" in reason for reason in found.unsupported.values())


def _collect_casts(model: ToyModel, weights: Weights) -> None:
    for name, weight in [(n, w.float()) for n, w in weights]:
        getattr(model, name).data.copy_(weight * 2)


def test_a_loader_that_collects_what_it_transformed_is_probed_one_by_one() -> None:
    shapes = {"a": (4, 8), "b": (5, 8)}
    found = _discover(_collect_casts, shapes, shapes)
    assert _kinds(found) == {"a": TRANSFORM, "b": TRANSFORM}
    assert not found.streaming


def _one_behind(model: ToyModel, weights: Weights) -> None:
    waiting: tuple[str, torch.Tensor] | None = None
    for item in weights:
        if waiting is not None:
            getattr(model, waiting[0]).data.copy_(waiting[1] * 2)
        waiting = item
    if waiting is not None:
        getattr(model, waiting[0]).data.copy_(waiting[1] * 2)


def test_a_loader_that_lags_behind_is_probed_one_by_one() -> None:
    shapes = {"a": (4, 8), "b": (5, 8), "c": (6, 8)}
    found = _discover(_one_behind, shapes, shapes)
    assert _kinds(found) == dict.fromkeys(shapes, TRANSFORM)
    assert not found.streaming


# --- loaders that are refused --------------------------------------------------------------------


def _other_stages(model: ToyModel, weights: Weights) -> set[str]:
    """Reports tensors of layers that this rank does not have, as DeepSeek's loader does."""
    loaded = set()
    for name, weight in weights:
        if name == "a":
            model.a.data.copy_(weight)
        loaded.add(name)
    return loaded


def test_tensors_of_another_stage_are_skipped_though_they_are_reported() -> None:
    found = _discover(_other_stages, {"a": (2, 3)}, {"a": (2, 3), "b": (2, 3)})
    assert _kinds(found) == {"a": LoadKind.VIEW, "b": LoadKind.SKIP}


def _claims(model: ToyModel, weights: Weights) -> set[str]:
    del model
    return {name for name, _ in weights}


def _assigns_data(model: ToyModel, weights: Weights) -> None:
    for name, weight in weights:
        getattr(model, name).data = weight


def _assigns_parameter(model: ToyModel, weights: Weights) -> None:
    for name, weight in weights:
        setattr(model, name, torch.nn.Parameter(weight, requires_grad=False))


def _registers(model: ToyModel, weights: Weights) -> None:
    for name, weight in weights:
        parameter = torch.nn.Parameter(weight.clone(), requires_grad=False)
        model.register_parameter(f"{name}_loaded", parameter)


def _deletes(model: ToyModel, weights: Weights) -> None:
    for name, _ in weights:
        delattr(model, name)


def _adds(model: ToyModel, weights: Weights) -> None:
    for name, weight in weights:
        getattr(model, name).data.add_(weight)


def _index_puts(model: ToyModel, weights: Weights) -> None:
    for name, weight in weights:
        getattr(model, name).data[torch.arange(4)] = weight


def _writes_out(model: ToyModel, weights: Weights) -> None:
    for name, weight in weights:
        torch.mul(weight, 2, out=getattr(model, name).data)


def _foreach_copies(model: ToyModel, weights: Weights) -> None:
    for name, weight in weights:
        torch._foreach_copy_([getattr(model, name).data], [weight])


def _raises(model: ToyModel, weights: Weights) -> None:
    for name, weight in weights:
        getattr(model, name).data[:2].copy_(weight[:2])
        raise KeyError(name)


def _fills_with_the_weight(model: ToyModel, weights: Weights) -> None:
    for name, weight in weights:
        getattr(model, name).data.fill_(weight[0, 0].item())


def _erases_with_a_copy(model: ToyModel, weights: Weights) -> None:
    for _, weight in weights:
        model.weight.data.copy_(weight)
        model.weight.data[0].copy_(torch.zeros(weight.shape[1], dtype=weight.dtype))


def _erases_with_a_fill(model: ToyModel, weights: Weights) -> None:
    for _, weight in weights:
        model.weight.data.copy_(weight)
        model.weight.data[0].fill_(0)


def _writes_the_buffer(model: ToyModel, weights: Weights) -> None:
    for _, weight in weights:
        model.table.mul_(weight.sum().float())


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (_claims, "copies nothing"),
        (_assigns_data, "replaces"),
        (_assigns_parameter, "replaces"),
        (_registers, "replaces"),
        (_deletes, "replaces"),
        (_adds, "add_"),
        (_index_puts, "index_put_"),
        (_writes_out, "mul.out"),
        (_foreach_copies, "_foreach_copy_"),
        (_raises, "KeyError"),
        (_fills_with_the_weight, "reads it"),
        (_writes_the_buffer, "mul_"),
    ],
)
def test_a_loader_that_cannot_be_followed_is_refused_with_a_reason(
    loader: Loader, reason: str
) -> None:
    found = _discover(loader, {"weight": (4, 6)}, {"weight": (4, 6)})
    assert list(found.unsupported) == ["weight"]
    assert reason in found.unsupported["weight"]


@pytest.mark.parametrize("loader", [_erases_with_a_copy, _erases_with_a_fill])
def test_a_loader_that_erases_what_it_copied_is_refused(loader: Loader) -> None:
    toy = Toy({"weight": (4, 6)}, {"weight": (4, 6)}, loader)
    model = toy.model(BF16, random_weights(toy, BF16, 0))  # its first row holds zeros
    applier = toy_applier(model, toy.info(BF16))
    assert "to zero afterwards" in applier.discovery.unsupported["weight"]


def _raises_for_one(model: ToyModel, weights: Weights) -> None:
    for name, weight in weights:
        if name == "b":
            raise ValueError("no such layer")
        getattr(model, name).data.copy_(weight)


def test_one_refused_tensor_leaves_the_others_supported() -> None:
    shapes = {"a": (3, 4), "b": (3, 4), "c": (3, 4)}
    found = _discover(_raises_for_one, shapes, shapes)
    assert _kinds(found) == {"a": VIEW, "b": UNSUPPORTED, "c": VIEW}
    assert found.uncovered == ("b",)


def _refuses_numbers(model: ToyModel, weights: Weights) -> None:
    for name, weight in weights:
        if bool((weight != 0).any()):
            raise ValueError("only zeros")
        getattr(model, name).data.copy_(weight + 0)


def test_a_loader_that_raises_only_for_real_values_is_refused() -> None:
    found = _discover(_refuses_numbers, {"weight": (4, 6)}, {"weight": (4, 6)})
    assert "only zeros" in found.unsupported["weight"]


def _writes_first(model: ToyModel, weights: Weights) -> None:
    model.weight.data.zero_()
    for _, weight in weights:
        model.weight.data.copy_(weight)


def test_a_write_before_the_first_weight_is_refused() -> None:
    found = _discover(_writes_first, {"weight": (4, 6)}, {"weight": (4, 6)})
    assert "before it takes the first weight" in found.unsupported["weight"]


def _shared_rows(model: ToyModel, weights: Weights) -> None:
    for name, weight in weights:
        start = {"a": 0, "b": 2, "c": 6}[name]
        model.weight.data[start : start + 4].copy_(weight)


def test_targets_that_are_shared_in_part_are_refused_on_both_sides() -> None:
    found = _discover(_shared_rows, {"weight": (10, 3)}, dict.fromkeys("abc", (4, 3)))
    assert _kinds(found) == {"a": UNSUPPORTED, "b": UNSUPPORTED, "c": VIEW}
    assert "with b" in found.unsupported["a"]
    assert "with a" in found.unsupported["b"]


def _column_blocks(model: ToyModel, weights: Weights) -> None:
    for name, weight in weights:
        start = {"a": 0, "b": 2, "c": 4}[name]
        model.weight.data[:, start : start + 2].copy_(weight)


def test_interleaved_blocks_share_nothing() -> None:
    found = _discover(_column_blocks, {"weight": (5, 6)}, dict.fromkeys("abc", (5, 2)))
    assert _kinds(found) == dict.fromkeys("abc", VIEW)
    assert found.aliases == ()


def _logarithm(model: ToyModel, weights: Weights) -> None:
    for name, weight in weights:
        getattr(model, name).data.copy_(weight.log())


def _difference(model: ToyModel, weights: Weights) -> None:
    for name, weight in weights:
        getattr(model, name).data.copy_(weight + 1 - weight)  # inf - inf


@pytest.mark.parametrize("loader", [_logarithm, _difference])
def test_a_transform_that_makes_nan_of_numbers_needs_all_elements(loader: Loader) -> None:
    """A NaN that comes out would be taken for the mark of an unchanged element."""
    found = _discover(loader, {"weight": (4, 6)}, {"weight": (4, 6)})
    assert _kinds(found) == {"weight": DENSE}


def _doubled_or_not(model: ToyModel, weights: Weights) -> None:
    for name, weight in weights:
        model.weight.data.copy_(weight * {"a": 2, "b": 2, "c": 3}[name])


def test_transformed_aliases_must_be_transformed_alike() -> None:
    found = _discover(_doubled_or_not, {"weight": (4, 6)}, dict.fromkeys("ab", (4, 6)))
    assert _kinds(found) == {"a": TRANSFORM, "b": TRANSFORM}
    assert found.aliases == (("a", "b"),)
    found = _discover(_doubled_or_not, {"weight": (4, 6)}, dict.fromkeys("abc", (4, 6)))
    assert _kinds(found) == {"a": UNSUPPORTED, "b": TRANSFORM, "c": UNSUPPORTED}
    assert "with a" in found.unsupported["c"]


# --- ties, packed layers, engines ----------------------------------------------------------------


def test_a_skipped_name_whose_parameter_is_shared_is_tied() -> None:
    toy = TOYS["skipping"]
    model = toy.model(BF16, random_weights(toy, BF16, 0))
    model.register_parameter("rotary", model.weight)
    info = {"weight": ((4, 6), BF16), "rotary": ((4, 6), BF16), "lm_head.weight": ((4, 6), BF16)}

    def loader(model: ToyModel, weights: Weights) -> None:
        for name, weight in weights:
            if name == "weight":
                model.weight.data.copy_(weight)

    model._loader = loader
    found = discover(LiveModel(model), info, ())
    assert found.tied == {"rotary": "weight"}
    assert found.aliases == (("weight", "rotary"),)
    found = discover(LiveModel(model), info, (), tied_output=True)
    assert found.tied == {"rotary": "weight", "lm_head.weight": ""}


def test_a_tensor_that_lands_in_a_packed_layer_is_refused() -> None:
    packed = (PackedLayer("", "parameter 'a' was replaced"),)

    def loader(model: ToyModel, weights: Weights) -> None:
        for name, weight in weights:
            getattr(model, name).data.copy_(weight)

    found = _discover(loader, {"a": (2, 3)}, {"a": (2, 3)}, packed=packed)
    assert "packed" in found.unsupported["a"]
    assert found.packed == packed


def _applier(**options: object) -> ToyApplier:
    toy = TOYS["fused_qkv"]
    return toy_applier(toy.model(BF16, random_weights(toy, BF16, 0)), **options)


def test_a_model_whose_loading_was_not_observed_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="not observed"):
        _applier(loaded=None).discover_native_skips({})


def test_expert_load_balancing_is_refused() -> None:
    applier = _applier()
    applier._model_runner.vllm_config.parallel_config.enable_eplb = True
    with pytest.raises(UnsupportedModelError, match="enable_eplb"):
        applier.discover_native_skips({})


def test_online_quantization_is_refused_by_name() -> None:
    applier = _applier()
    layer = torch.nn.Module()
    layer.quant_method = SimpleNamespace(uses_meta_device=True)
    applier._model_runner.get_model().add_module("projection", layer)
    with pytest.raises(UnsupportedModelError, match="layer projection is quantized while it loads"):
        applier.discover_native_skips({})


@pytest.mark.parametrize("model", [None, torch.nn.Linear(1, 1)])
def test_a_drafter_without_a_model_is_no_draft_model(model: torch.nn.Module | None) -> None:
    draft = SimpleNamespace(draft_model_config=SimpleNamespace(model="the-target"))
    applier = _applier(draft=draft)
    applier._model_runner.drafter = SimpleNamespace(model=model)
    if model is None:
        assert applier.discover_native_skips({}) == set()
        return
    with pytest.raises(UnsupportedModelError, match="the-target"):
        applier.discover_native_skips({})


def test_a_draft_model_is_refused() -> None:
    class Draft:
        class draft_model_config:
            model = "tiny-draft"

    with pytest.raises(UnsupportedModelError, match="tiny-draft"):
        _applier(draft=Draft()).discover_native_skips({})


@pytest.mark.parametrize(
    "use", [lambda a: a.discovery, lambda a: a.apply({}), lambda a: a.check_transfer({})]
)
def test_nothing_works_before_discovery(use: Callable[[ToyApplier], object]) -> None:
    with pytest.raises(TransactionError, match="discover"):
        use(_applier())
