"""Checks on the deltas of one transfer against each other."""

import itertools
from collections.abc import Mapping, Sequence

import torch

from vllm_sparse_refit.codec.delta import SparseOperation, TensorDelta
from vllm_sparse_refit.errors import PayloadError, UnsupportedModelError

DeltasByName = Mapping[str, Sequence[TensorDelta]]


def check_spans(name: str, parts: Sequence[TensorDelta]) -> None:
    ordered = sorted(parts, key=lambda part: part.begin)
    for first, second in itertools.pairwise(ordered):
        if second.begin < first.end:
            raise PayloadError(
                f"{name}: elements {second.begin} to {min(first.end, second.end) - 1} are sent "
                "twice in one transfer; each producer must send its own part of a tensor"
            )
    if len({part.operation for part in parts}) > 1:
        raise PayloadError(f"{name}: one transfer mixes operations for this tensor")


def is_complete(parts: Sequence[TensorDelta]) -> bool:
    numel = 1
    for size in parts[0].shape:
        numel *= size
    return sum(len(part.locations) for part in parts) == numel


def has_nan(part: TensorDelta) -> bool:
    return bool(part.values.view(part.dtype).isnan().any())


def check_aliases(group: tuple[str, ...], deltas: DeltasByName) -> None:
    first = _joined(deltas.get(group[0], ()))
    for name in group[1:]:
        other = _joined(deltas.get(name, ()))
        if first[0] != other[0] or not all(map(torch.equal, first[1:], other[1:])):
            raise UnsupportedModelError(
                f"{group[0]} and {name} are one parameter in this engine, but the update gives "
                "them different values; start the engine from a checkpoint in which they differ"
            )


def _joined(
    parts: Sequence[TensorDelta],
) -> tuple[SparseOperation | None, torch.Tensor, torch.Tensor]:
    if not parts:
        return None, torch.empty(0), torch.empty(0)
    ordered = sorted(parts, key=lambda part: part.begin)
    locations = [
        torch.arange(p.locations.start, p.locations.stop)
        if isinstance(p.locations, range)
        else p.locations.to(torch.int64)
        for p in ordered
    ]
    return ordered[0].operation, torch.cat(locations), torch.cat([p.values for p in ordered])
