"""A comparison by digests names tensor and worker, and counts what cannot be compared."""

from typing import Any

import pytest
import torch

from tests.apply.toys import (
    TOYS,
    deltas_between,
    mixed,
    payloads_of,
    random_weights,
    toy_applier,
)
from vllm_sparse_refit.codec.delta import SparseOperation
from vllm_sparse_refit.trainer.baseline import DeltaCompressionTracker
from vllm_sparse_refit.trainer.report import VerificationReport
from vllm_sparse_refit.trainer.verification import compare_digests

BF16 = torch.bfloat16


def _verified(name: str, change: Any = None) -> VerificationReport:
    toy = TOYS[name]
    weights = random_weights(toy, BF16, 1)
    applier = toy_applier(toy.model(BF16, weights), toy.info(BF16))
    other = toy_applier(toy.model(BF16, weights), toy.info(BF16))
    tracker = DeltaCompressionTracker()
    tracker.snapshot_baseline(weights.items())
    if change is not None:
        change(other._model_runner.get_model())
    return compare_digests(tracker, [("one", applier.digests()), ("two", other.digests())])


def test_equal_weights() -> None:
    for name in ("fused_qkv", "shard", "transposed", "stacked_experts", "aliasing"):
        report = _verified(name)
        assert report.ok
        assert report.elements > 0
        assert report.transformed == ()
        assert "all equal" in str(report)


def test_one_changed_bit_is_named() -> None:
    def change(model: Any) -> None:
        model.qkv.data.view(torch.int16)[5, 3] ^= 1

    report = _verified("fused_qkv", change)
    assert report.different == {"k": ("two",)}
    assert str(report).endswith(" elements compared, 1 tensor differs: k (two)")


def test_many_tensors_are_counted_and_the_first_are_named() -> None:
    different = {f"w{number}": ("engine 0, rank 0",) for number in range(7)}
    report = VerificationReport(elements=1000, different=different, transformed=())
    assert str(report).startswith(
        "1,000 elements compared, 7 tensors differ: w0 (engine 0, rank 0), w1"
    )
    assert str(report).endswith("w4 (engine 0, rank 0) and 2 more")


def test_what_is_transformed_is_compared_with_what_was_loaded() -> None:
    report = _verified("mixed")
    assert report.transformed == ("first", "second")
    assert report.ok
    assert report.elements == 2 * 8 * 6
    assert "2 transformed tensors" in str(report)

    def change(model: Any) -> None:
        model.second.data.view(torch.int16)[2] ^= 1

    report = _verified("mixed", change)
    assert list(report.different) == ["second"]
    assert "two" in str(report)
    assert "last update" in str(report)


@pytest.mark.parametrize("name", sorted(TOYS))
def test_what_updates_left_is_known_and_what_they_took_back(name: str) -> None:
    toy = TOYS[name]
    dtype = toy.dtypes[0]
    old = random_weights(toy, dtype, 1)
    new = mixed(old, random_weights(toy, dtype, 2), seed=3)
    applier = toy_applier(toy.model(dtype, old), toy.info(dtype))
    payloads = payloads_of(deltas_between(old, new, applier.discovery, SparseOperation.ADD))
    applier.update_weights_from_decoded_sparse_payload(*payloads)
    assert applier.digests()["unlike"] == {}
    applier.roll_back()
    assert applier.digests()["unlike"] == {}
    applier.update_weights_from_decoded_sparse_payload(*payloads)
    applier.release()
    assert applier.digests()["unlike"] == {}
