"""Updates through toy loaders: bit-equal to a fresh model, undoable, verified, refused by name."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.apply.toys import (
    CASES,
    DTYPES,
    TOYS,
    Toy,
    ToyApplier,
    ToyModel,
    Weights,
    assert_same_bits,
    deltas_between,
    grouped,
    identities,
    mixed,
    payloads_of,
    random_bits,
    random_weights,
    state_bits,
    toy_applier,
)
from vllm_sparse_refit.apply.processing import PackedLayer
from vllm_sparse_refit.codec.delta import SparseOperation, TensorDelta
from vllm_sparse_refit.codec.dtypes import bits_dtype, bits_view
from vllm_sparse_refit.errors import (
    PayloadError,
    RefitError,
    TensorMismatchError,
    TransactionError,
    UnsupportedModelError,
    VerificationError,
)

BF16 = torch.bfloat16
XOR, OVERWRITE = SparseOperation.XOR, SparseOperation.OVERWRITE
Tensors = dict[str, torch.Tensor]


def _update(toy: Toy, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    old = random_weights(toy, dtype, 1)
    return old, mixed(old, random_weights(toy, dtype, 2), seed=3)


def _started(toy: Toy, dtype: torch.dtype, old: Tensors) -> tuple[ToyModel, ToyApplier]:
    model = toy.model(dtype, old)
    return model, toy_applier(model, toy.info(dtype))


def _sparse(
    name: str, tensor: torch.Tensor, locations: list[int], operation: SparseOperation = OVERWRITE
) -> TensorDelta:
    """A delta with the bits of ``tensor``, flat, at ``locations``."""
    index = torch.tensor(locations, dtype=torch.int32)
    values = bits_view(tensor).reshape(-1)[index.to(torch.int64)].clone()
    shape = tuple(tensor.shape)
    return TensorDelta(name, shape, tensor.dtype, operation, 0, tensor.numel(), index, values)


def _apply(applier: ToyApplier, deltas: Iterable[TensorDelta]) -> None:
    staged = grouped(d for d in deltas if applier.check_delta(d))
    applier.check_transfer(staged)
    applier.apply(staged)


# --- exactness -----------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", [XOR, OVERWRITE])
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_an_update_equals_a_fresh_model_and_can_be_taken_back(
    name: str, dtype: torch.dtype, operation: SparseOperation
) -> None:
    toy = TOYS[name]
    old, new = _update(toy, dtype)
    model, applier = _started(toy, dtype, old)
    before, were = state_bits(model), identities(model)
    payloads = payloads_of(deltas_between(old, new, applier.discovery, operation))
    assert payloads

    counts = applier.update_weights_from_decoded_sparse_payload(*payloads)

    after = state_bits(toy.model(dtype, new))
    assert_same_bits(model, after)
    assert counts["changed_elements"] > 0
    finished = applier.finish_sparse_delta_refit()
    assert finished["samples_compared"] > 0
    assert finished["undo_bytes"] > 0

    applier.roll_back()
    assert_same_bits(model, before)

    applier.update_weights_from_decoded_sparse_payload(*payloads)
    applier.release()
    applier.roll_back()  # nothing is left to take back
    assert_same_bits(model, after)
    assert identities(model) == were


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.is_floating_point])
def test_special_bits_arrive_unchanged(dtype: torch.dtype) -> None:
    """Minus zero, infinities, subnormals and NaN with a payload: xor and overwrite move bits."""
    width = 8 * dtype.itemsize
    ones = (1 << width) - 1
    sign = 1 << (width - 1)
    patterns = [0, sign, 1, sign | 1, ones, ones >> 1, ones ^ 1, ones >> 1 ^ 2]
    signed = [p - (1 << width) if width > 8 and p >= sign else p for p in patterns]
    toy = TOYS["transposed"]
    old = random_weights(toy, dtype, 4)
    bits = bits_view(old["weight"]).clone()
    bits.reshape(-1)[: len(signed)] = torch.tensor(signed, dtype=bits_dtype(dtype))
    new = {"weight": bits.view(dtype)}
    for operation in (XOR, OVERWRITE):
        model, applier = _started(toy, dtype, old)
        _apply(applier, deltas_between(old, new, applier.discovery, operation))
        assert torch.equal(bits_view(model.weight.detach()), bits.t())


def test_minus_zero_survives_a_sparse_transform() -> None:
    toy = TOYS["cast"]
    old, _ = _update(toy, BF16)
    tiny = torch.finfo(BF16).tiny
    values = [-0.0, 0.0, float("inf"), -float("inf"), tiny / 2]
    new = {"weight": old["weight"].clone()}
    new["weight"].reshape(-1)[:5] = torch.tensor(values, dtype=BF16)
    model, applier = _started(toy, BF16, old)
    _apply(applier, [_sparse("weight", new["weight"], [0, 1, 2, 3, 4])])
    assert_same_bits(model, state_bits(toy.model(BF16, new)))


def test_updates_of_different_elements_may_follow_each_other() -> None:
    toy = TOYS["fused_qkv"]
    old, new = _update(toy, BF16)
    model, applier = _started(toy, BF16, old)
    before = state_bits(model)
    for payload in payloads_of(deltas_between(old, new, applier.discovery, XOR), per_payload=1):
        applier.update_weights_from_decoded_sparse_payload(payload)
    assert applier.finish_sparse_delta_refit()["elements_written"] > 0
    assert_same_bits(model, state_bits(toy.model(BF16, new)))
    applier.roll_back()
    assert_same_bits(model, before)


def test_payloads_may_be_files(tmp_path: Path) -> None:
    toy = TOYS["fused_qkv"]
    old, new = _update(toy, BF16)
    model, applier = _started(toy, BF16, old)
    paths = []
    for i, body in enumerate(payloads_of(deltas_between(old, new, applier.discovery, XOR))):
        path = tmp_path / f"{i}.payload"
        path.write_bytes(body)
        paths.append(path)
    applier.update_weights_from_decoded_sparse_payload(*paths[:1], *map(str, paths[1:]))
    assert_same_bits(model, state_bits(toy.model(BF16, new)))


def test_arrival_order_does_not_matter() -> None:
    toy = TOYS["experts"]
    old, new = _update(toy, BF16)
    model, applier = _started(toy, BF16, old)
    deltas = list(deltas_between(old, new, applier.discovery, XOR))
    _apply(applier, reversed(deltas))
    assert_same_bits(model, state_bits(toy.model(BF16, new)))


# --- failures half way ---------------------------------------------------------------------------


class _Failing:
    """The mixed loader, until told to fail after its first tensor.

    By then the plain copies are written, and the first of the transformed tensors.
    """

    def __init__(self) -> None:
        self.fails: Exception | None = None
        self.extra: Callable[[ToyModel], None] | None = None

    def __call__(self, model: ToyModel, weights: Weights) -> set[str]:
        for number, item in enumerate(weights):
            if self.fails is not None and number:
                raise self.fails
            TOYS["mixed"].loader(model, [item])
            if self.extra is not None:
                self.extra(model)
        return {"qkv", "first", "second"}


def _failing() -> tuple[_Failing, ToyModel, ToyApplier, list[bytes]]:
    loader = _Failing()
    toy = replace(TOYS["mixed"], loader=loader)
    old, new = _update(toy, BF16)
    model, applier = _started(toy, BF16, old)
    return loader, model, applier, payloads_of(deltas_between(old, new, applier.discovery, XOR))


@pytest.mark.parametrize("error", [KeyError("layer"), RefitError("layer")])
def test_a_loader_that_raises_half_way_leaves_every_bit(error: Exception) -> None:
    loader, model, applier, payloads = _failing()
    before = state_bits(model)
    loader.fails = error
    with pytest.raises(RefitError, match="layer"):
        applier.update_weights_from_decoded_sparse_payload(*payloads)
    assert_same_bits(model, before)
    loader.fails = None
    applier.update_weights_from_decoded_sparse_payload(*payloads)
    applier.roll_back()
    assert_same_bits(model, before)


def test_a_later_update_that_fails_leaves_the_earlier_ones() -> None:
    loader, model, applier, payloads = _failing()
    before = state_bits(model)
    applier.update_weights_from_decoded_sparse_payload(payloads[0])
    between = state_bits(model)
    loader.fails = KeyError("layer")
    with pytest.raises(TransactionError, match="KeyError"):
        applier.update_weights_from_decoded_sparse_payload(*payloads[1:])
    assert_same_bits(model, between)
    applier.finish_sparse_delta_refit()
    applier.roll_back()
    assert_same_bits(model, before)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (lambda m: setattr(m.qkv, "data", m.qkv.data.clone()), "replaced"),
        (lambda m: m.qkv.data[0].copy_(torch.zeros(6, dtype=BF16)), "at discovery"),
        (lambda m: m.qkv.data.mul_(2), "mul_"),
    ],
)
def test_a_loader_that_behaves_unlike_at_discovery_is_refused(
    extra: Callable[[ToyModel], None], message: str
) -> None:
    loader, model, applier, payloads = _failing()
    before, were = state_bits(model), identities(model)
    loader.extra = extra
    with pytest.raises(RefitError, match=message):
        applier.update_weights_from_decoded_sparse_payload(*payloads)
    assert_same_bits(model, before)
    assert identities(model) == were


def test_discovery_waits_for_an_unfinished_update() -> None:
    _, _, applier, payloads = _failing()
    applier.update_weights_from_decoded_sparse_payload(*payloads)
    with pytest.raises(TransactionError, match="finish"):
        applier.discover_native_skips({})


# --- verification --------------------------------------------------------------------------------


def test_a_tampered_element_is_noticed_and_can_be_rolled_back() -> None:
    toy = TOYS["fused_qkv"]
    old, new = _update(toy, BF16)
    model, applier = _started(toy, BF16, old)
    before = state_bits(model)
    _apply(applier, deltas_between(old, new, applier.discovery, XOR))
    changed = torch.nonzero(before["qkv"] != state_bits(model)["qkv"])[0]
    bits_view(model.qkv.data)[tuple(changed)] ^= 1
    with pytest.raises(VerificationError, match="1 of"):
        applier.finish_sparse_delta_refit()
    applier.roll_back()
    assert_same_bits(model, before)


def test_samples_are_bounded_and_may_be_none() -> None:
    toy = TOYS["transposed"]
    old, new = _update(toy, BF16)
    for limit, compared in ((0, 0), (2, 2)):
        _, applier = _started(toy, BF16, old)
        applier.sample_limit = limit
        _apply(applier, deltas_between(old, new, applier.discovery, XOR, chunk=100))
        assert applier.finish_sparse_delta_refit()["samples_compared"] == compared


def test_finishing_without_an_update_is_harmless() -> None:
    toy = TOYS["transposed"]
    _, applier = _started(toy, BF16, random_weights(toy, BF16, 0))
    assert applier.finish_sparse_delta_refit() == {
        "elements_written": 0,
        "samples_compared": 0,
        "undo_bytes": 0,
    }


# --- aliases -------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", [XOR, OVERWRITE])
def test_agreeing_aliases_are_applied_once(operation: SparseOperation) -> None:
    toy = TOYS["aliasing"]
    old, new = _update(toy, BF16)
    model, applier = _started(toy, BF16, old)
    _apply(applier, deltas_between(old, new, applier.discovery, operation))
    assert_same_bits(model, state_bits(toy.model(BF16, new)))
    changed = int((bits_view(old["embed"]) != bits_view(new["embed"])).sum())
    assert applier.finish_sparse_delta_refit()["elements_written"] == changed


@pytest.mark.parametrize(
    "deltas",
    [
        lambda t: [_sparse("embed", t, [1, 2])],
        lambda t: [_sparse("lm_head", t, [1, 2])],
        lambda t: [_sparse("embed", t, [1, 2]), _sparse("lm_head", t, [1, 3])],
        lambda t: [_sparse("embed", t, [1, 2]), _sparse("lm_head", t + 1, [1, 2])],
        lambda t: [_sparse("embed", t, [1, 2]), _sparse("lm_head", t, [1, 2], XOR)],
    ],
)
def test_disagreeing_aliases_are_refused_by_name(
    deltas: Callable[[torch.Tensor], list[TensorDelta]],
) -> None:
    toy = TOYS["aliasing"]
    old = random_weights(toy, BF16, 1)
    model, applier = _started(toy, BF16, old)
    before = state_bits(model)
    with pytest.raises(UnsupportedModelError, match="embed and lm_head"):
        _apply(applier, deltas(torch.ones(5, 4, dtype=BF16)))
    assert_same_bits(model, before)


# --- transforms and completeness -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["cast", "negative_exp", "permuted"])
def test_a_nan_in_a_sparse_transform_is_refused_but_a_complete_one_arrives(name: str) -> None:
    toy = TOYS[name]
    (tensor_name,) = toy.shapes
    old = random_weights(toy, BF16, 1)
    new = {tensor_name: old[tensor_name].clone()}
    new[tensor_name].reshape(-1)[3] = float("nan")
    model, applier = _started(toy, BF16, old)
    before = state_bits(model)
    with pytest.raises(UnsupportedModelError, match=rf"{tensor_name}.*NaN"):
        _apply(applier, [_sparse(tensor_name, new[tensor_name], [2, 3])])
    assert_same_bits(model, before)
    everything = list(range(old[tensor_name].numel()))
    _apply(applier, [_sparse(tensor_name, new[tensor_name], everything)])
    assert_same_bits(model, state_bits(toy.model(BF16, new)))


@pytest.mark.parametrize("name", ["normalized", "overlapping"])
def test_an_incomplete_dense_tensor_is_refused_by_name(name: str) -> None:
    toy = TOYS[name]
    old = random_weights(toy, BF16, 1)
    model, applier = _started(toy, BF16, old)
    before = state_bits(model)
    with pytest.raises(UnsupportedModelError, match=r"weight.*sent together"):
        _apply(applier, [_sparse("weight", old["weight"], [0, 1])])
    assert_same_bits(model, before)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_one_byte_with_all_codes_in_use_is_refused_sparse_and_exact_complete(
    dtype: torch.dtype,
) -> None:
    toy = TOYS["permuted"]
    old = random_weights(toy, dtype, 1)
    codes = torch.arange(96 * 8).to(torch.uint8).reshape(96, 8)
    new = {"weight": codes.view(dtype)}
    model, applier = _started(toy, dtype, old)
    before = state_bits(model)
    with pytest.raises(UnsupportedModelError, match=r"weight.*all bit patterns"):
        _apply(applier, [_sparse("weight", new["weight"], list(range(256)))])
    assert_same_bits(model, before)
    # With one code spared it is the mark.
    _apply(applier, [_sparse("weight", new["weight"], list(range(255)))])
    applier.roll_back()
    assert_same_bits(model, before)
    _apply(applier, [_sparse("weight", new["weight"], list(range(96 * 8)))])
    assert_same_bits(model, state_bits(toy.model(dtype, new)))


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("toy_name", "delta", "error", "message"),
    [
        ("transposed", ("weight", (7, 5), BF16, XOR), TensorMismatchError, "weight.*announced"),
        (
            "transposed",
            ("weight", (5, 7), torch.float16, XOR),
            TensorMismatchError,
            "weight.*announced",
        ),
        ("transposed", ("other", (5, 7), BF16, XOR), TensorMismatchError, "other"),
        ("negative_exp", ("A_log", (24,), BF16, XOR), UnsupportedModelError, "A_log.*xor"),
        ("normalized", ("weight", (6, 8), BF16, XOR), UnsupportedModelError, "weight.*xor"),
    ],
)
def test_a_delta_that_does_not_fit_is_refused_by_name(
    toy_name: str,
    delta: tuple[str, tuple[int, ...], torch.dtype, SparseOperation],
    error: type[Exception],
    message: str,
) -> None:
    toy = TOYS[toy_name]
    model, applier = _started(toy, BF16, random_weights(toy, BF16, 1))
    before = state_bits(model)
    name, shape, dtype, operation = delta
    tensor = random_bits(shape, dtype, torch.Generator().manual_seed(0))
    payload = payloads_of([_sparse(name, tensor, [0, 5], operation)])
    with pytest.raises(error, match=message):
        applier.update_weights_from_decoded_sparse_payload(*payload)
    assert_same_bits(model, before)


def test_an_unsupported_tensor_is_refused_with_its_reason() -> None:
    def adding(model: ToyModel, weights: Weights) -> None:
        for _, weight in weights:
            model.weight.data.add_(weight)

    model = ToyModel({"weight": torch.zeros(4, 6, dtype=BF16)}, adding)
    applier = toy_applier(model, {"weight": ((4, 6), BF16)})
    with pytest.raises(UnsupportedModelError, match=r"weight: .*add_"):
        applier.check_delta(_sparse("weight", torch.ones(4, 6, dtype=BF16), [0]))


def test_a_skipped_tensor_is_of_no_use_here() -> None:
    toy = TOYS["skipping"]
    model, applier = _started(toy, BF16, random_weights(toy, BF16, 1))
    before = state_bits(model)
    delta = _sparse("rotary.inv_freq", torch.ones(8, dtype=BF16), [0])
    assert not applier.check_delta(delta)
    counts = applier.update_weights_from_decoded_sparse_payload(*payloads_of([delta]))
    assert counts == {"tensors": 0, "changed_elements": 0}
    assert_same_bits(model, before)


def test_a_model_with_packed_layers_takes_no_update() -> None:
    """The packed copy may be of a tensor that lands in another layer."""
    toy = TOYS["transposed"]
    packed = (PackedLayer("attention", "attribute 'absorbed' may hold a copy"),)
    model = toy.model(BF16, random_weights(toy, BF16, 1))
    before = state_bits(model)
    applier = toy_applier(model, toy.info(BF16), refused=packed)
    payload = payloads_of([_sparse("weight", torch.ones(5, 7, dtype=BF16), [0])])
    with pytest.raises(UnsupportedModelError, match="attention is packed"):
        applier.update_weights_from_decoded_sparse_payload(*payload)
    assert_same_bits(model, before)


def test_elements_sent_twice_are_refused_across_payloads() -> None:
    toy = TOYS["transposed"]
    old = random_weights(toy, BF16, 1)
    model, applier = _started(toy, BF16, old)
    before = state_bits(model)
    one = payloads_of([_sparse("weight", old["weight"], [0], XOR)])
    with pytest.raises(PayloadError, match=r"weight.*twice"):
        applier.update_weights_from_decoded_sparse_payload(*one, *one)
    assert_same_bits(model, before)


def test_mixed_operations_on_one_tensor_are_refused() -> None:
    toy = TOYS["transposed"]
    _, applier = _started(toy, BF16, random_weights(toy, BF16, 1))
    parts = [
        TensorDelta(
            "weight", (5, 7), BF16, operation, begin, begin + 5, range(begin, begin + 1), bits
        )
        for operation, begin in ((XOR, 0), (OVERWRITE, 5))
        for bits in [torch.ones(1, dtype=torch.int16)]
    ]
    with pytest.raises(PayloadError, match="mixes operations"):
        applier.check_transfer({"weight": parts})


def test_adapters_are_reset_when_the_runner_has_any() -> None:
    toy = TOYS["transposed"]
    _, applier = _started(toy, BF16, random_weights(toy, BF16, 1))
    applier.reset_adapters()
    calls: list[str] = []
    applier._model_runner.reset_lora_state = lambda: calls.append("reset")
    applier.reset_adapters()
    assert calls == ["reset"]
