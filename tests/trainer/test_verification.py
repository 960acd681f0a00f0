"""A comparison by digests names tensor and worker, and counts what cannot be compared."""

from typing import Any

import torch

from tests.apply.toys import TOYS, random_weights, toy_applier
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
        assert report.unverified == ()
        assert "all equal" in str(report)


def test_one_changed_bit_is_named() -> None:
    def change(model: Any) -> None:
        model.qkv.data.view(torch.int16)[5, 3] ^= 1

    report = _verified("fused_qkv", change)
    assert report.different == {"k": ("two",)}
    assert "k (two)" in str(report)


def test_what_is_transformed_is_listed_as_not_compared() -> None:
    report = _verified("mixed")
    assert report.unverified == ("first", "second")
    assert report.ok
    assert report.elements == 2 * 8 * 6
