"""What an update builds on is compared with what is there, at the elements that it changes."""

from typing import Any

import pytest
import torch

from tests.apply.toys import (
    CASES,
    TOYS,
    ToyApplier,
    ToyModel,
    assert_same_bits,
    deltas_between,
    grouped,
    mixed,
    payloads_of,
    random_weights,
    state_bits,
    toy_applier,
)
from vllm_sparse_refit.apply import sparse_writes
from vllm_sparse_refit.apply.load_mode import LoadKind
from vllm_sparse_refit.codec.delta import SparseOperation, TensorDelta
from vllm_sparse_refit.errors import VersionMismatchError
from vllm_sparse_refit.trainer.verification import differing_parts

BF16 = torch.bfloat16
XOR, ADD = SparseOperation.XOR, SparseOperation.ADD


def _started(
    name: str, dtype: torch.dtype, operation: SparseOperation = ADD
) -> tuple[ToyModel, ToyApplier, dict[str, list[TensorDelta]]]:
    """A model with old weights, and an update of a third of them that is staged."""
    toy = TOYS[name]
    old = random_weights(toy, dtype, 1)
    new = mixed(old, random_weights(toy, dtype, 2), seed=3)
    model = toy.model(dtype, old)
    applier = toy_applier(model, toy.info(dtype))
    deltas = deltas_between(old, new, applier.discovery, operation)
    return model, applier, grouped(map(applier.placed, filter(applier.check_delta, deltas)))


@pytest.mark.parametrize("operation", [XOR, ADD])
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_right_weights_pass(name: str, dtype: torch.dtype, operation: SparseOperation) -> None:
    model, applier, staged = _started(name, dtype, operation)
    before = state_bits(model)
    partial = applier.check_prior_bits(staged)
    assert_same_bits(model, before)
    # Of a shard no rank can tell alone; anything else that is not transformed was compared here.
    assert set(partial) == (set(staged) if name == "shard" else set())
    views = set(applier.discovery.names(LoadKind.VIEW)) & set(staged)
    assert all(part.prior is not None for view in views for part in staged[view])


@pytest.mark.parametrize(
    ("name", "tensor", "parameter"),
    [
        ("fused_qkv", "k", "qkv"),
        ("transposed", "weight", "weight"),
        ("experts", "2.up", "w13"),
        ("stacked_experts", "gate_up", "w13"),
        ("loaded_twice", "weight", "second"),
    ],
)
def test_another_bit_where_something_changes_is_named(
    name: str, tensor: str, parameter: str
) -> None:
    model, applier, staged = _started(name, BF16)
    bits = getattr(model, parameter).data.view(torch.int16).view(-1)
    part = staged[tensor][0]
    assert isinstance(part, sparse_writes.PlacedDelta)
    changed = [int(write.positions()[0]) for write in part.writes if len(write.locations)][-1]
    bits[changed] ^= 1
    before = state_bits(model)
    with pytest.raises(VersionMismatchError, match=f"1 tensors, first {tensor}, .*next sync"):
        applier.check_prior_bits(staged)
    assert_same_bits(model, before)
    bits[changed] ^= 1
    assert applier.check_prior_bits(staged) == {}


def test_another_bit_where_nothing_changes_costs_nothing_to_overlook() -> None:
    model, applier, staged = _started("transposed", BF16)
    changed = {
        int(at)
        for part in staged["weight"]
        for write in part.writes
        for at in write.positions()  # type: ignore[attr-defined]
    }
    other = next(at for at in range(35) if at not in changed)
    model.weight.data.view(torch.int16).view(-1)[other] ^= 1
    assert applier.check_prior_bits(staged) == {}


def test_payloads_handed_over_directly_are_compared_too() -> None:
    toy = TOYS["fused_qkv"]
    old, other = random_weights(toy, BF16, 1), random_weights(toy, BF16, 2)
    model = toy.model(BF16, other)
    applier = toy_applier(model, toy.info(BF16))
    before = state_bits(model)
    payloads = payloads_of(deltas_between(old, mixed(old, other, seed=3), applier.discovery, XOR))
    with pytest.raises(VersionMismatchError, match="3 tensors"):
        applier.update_weights_from_decoded_sparse_payload(*payloads)
    assert_same_bits(model, before)


# --- several ranks -------------------------------------------------------------------------------


def _ranks(*parts: tuple[str, int, str]) -> list[dict[str, Any]]:
    """Replies of ranks that each hold four of eight elements: expected digest, offset, digest."""
    return [
        {"partial": {"w": {"expected": all_, "elements": 8, "boxes": [[offset, [4], [1], own]]}}}
        for all_, offset, own in parts
    ]


def _hex(number: int) -> str:
    return f"{number:032x}"


def test_parts_add_up() -> None:
    total, one, two = _hex(7), _hex(3), _hex(4)
    assert differing_parts(_ranks((total, 0, one), (total, 4, two))) == []
    assert differing_parts(_ranks((total, 0, one), (total, 4, one))) == ["w"]
    # The same part on two ranks counts once, and must be the same.
    assert differing_parts(_ranks((total, 0, one), (total, 4, two), (total, 4, two))) == []
    assert differing_parts(_ranks((total, 0, one), (total, 4, two), (total, 4, one))) == ["w"]
    # What nobody holds cannot be added up.
    assert differing_parts(_ranks((total, 0, one))) == []
    assert differing_parts([]) == []


def test_the_other_shard_completes_a_shard() -> None:
    _, applier, staged = _started("shard", BF16)
    partial = applier.check_prior_bits(staged)
    for name, part in partial.items():
        ((offset, shape, strides, digest),) = part["boxes"]
        everything = applier.discovery.weights[name]
        missing = everything.numel - torch.Size(shape).numel()
        assert missing > 0
        low = (int(part["expected"][16:], 16) - int(digest[16:], 16)) % (1 << 64)
        high = (int(part["expected"][:16], 16) - int(digest[:16], 16)) % (1 << 64)
        other = {**part, "boxes": [[1 << 40, [missing], [1], f"{high:016x}{low:016x}"]]}
        replies = [{"partial": {name: part}}, {"partial": {name: other}}]
        assert differing_parts(replies) == []
        wrong = {**part, "boxes": [[offset, shape, strides, _hex(int(digest, 16) ^ 1)]]}
        assert differing_parts([{"partial": {name: wrong}}, replies[1]]) == [name]
