"""The sparse part of a loader's copies: which elements of a parameter a delta changes, and how."""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_sparse_refit.apply.delta_checks import is_complete
from vllm_sparse_refit.apply.discovery import Discovery
from vllm_sparse_refit.apply.elementwise import loaded_value, sentinel_bits, unchanged_mask
from vllm_sparse_refit.apply.load_mode import LoaderCopy, LoaderWeight, LoadKind
from vllm_sparse_refit.apply.placement import place, place_run
from vllm_sparse_refit.apply.writer import WeightWriter, Write
from vllm_sparse_refit.codec.delta import TensorDelta
from vllm_sparse_refit.codec.dtypes import bits_view, dtype_name
from vllm_sparse_refit.errors import UnsupportedModelError


class LoaderWriter:
    """Writes, of every copy the native loader makes, only the elements that a delta changes."""

    def __init__(self, writer: WeightWriter) -> None:
        self._writer = writer
        self.copies: dict[str, int] = {}

    def copy(self, weight: LoaderWeight, copy: LoaderCopy) -> None:
        """Write what the loader made of a source that holds the changed elements."""
        self.copies[weight.name] = self.copies.get(weight.name, 0) + 1
        value = loaded_value(copy)
        if weight.sentinel is None:
            written = torch.ones(value.shape, dtype=torch.bool)
        else:
            written = ~unchanged_mask(value, weight.source.dtype, weight.sentinel)
        coordinates = torch.nonzero(written)
        positions = torch.full((coordinates.shape[0],), copy.target_box.offset, dtype=torch.int64)
        for axis, stride in enumerate(copy.target_box.strides):
            positions.add_(coordinates[:, axis], alpha=stride)
        if weight.kind is LoadKind.DENSE and self.copies[weight.name] > 1:
            # Copies of one tensor may overlap, and the last one counts.
            self._writer.supersede(copy.target, positions)
        self._writer.overwrite(copy.target, positions, bits_view(value)[written])

    def zeros(self, target: torch.Tensor) -> None:
        """They are there already."""


@dataclass(frozen=True, eq=False)
class PlacedDelta(TensorDelta):
    """A delta, and the writes that bring it to where discovery saw its elements go.

    Attributes:
        writes: One for each of the tensor's copies, in their order.
    """

    writes: tuple[Write, ...] = ()

    @classmethod
    def of(cls, delta: TensorDelta, copies: Iterable[LoaderCopy]) -> "PlacedDelta":
        """Place a delta whose loader makes only plain copies, at a cost that grows with what it changes."""
        known = {
            field.name: getattr(delta, field.name) for field in dataclasses.fields(TensorDelta)
        }
        return cls(**known, writes=tuple(_placed_write(copy, delta) for copy in copies))


def _placed_write(copy: LoaderCopy, delta: TensorDelta) -> Write:
    assert copy.boxes is not None
    run = place_run(copy.boxes, delta.locations)
    if run is None:
        selected, positions = place(copy.boxes, delta.locations)
        canonical = _at(delta.locations, selected)
        values = delta.values[selected]
        write = Write(copy.storage, delta.operation, positions, values, canonical=canonical)
    else:
        values = delta.values[run.selected]
        write = Write(copy.storage, delta.operation, run.locations, values, run.stride, run.shift)
    if write.storage.is_cpu:
        write.arrays  # noqa: B018 - made here, where time costs nothing, and not in the commit
    return write


def _at(locations: torch.Tensor | range, selected: torch.Tensor) -> torch.Tensor:
    return selected + locations.start if isinstance(locations, range) else locations[selected]


def loader_weight(discovery: Discovery, name: str, parts: Sequence[TensorDelta]) -> LoaderWeight:
    """A source that holds the changed elements, and the mark of an unchanged one elsewhere."""
    weight = discovery.weights[name]
    source = torch.empty(weight.shape, dtype=weight.dtype)
    sentinel = None
    bits = bits_view(source).reshape(-1)
    if not is_complete(parts):
        sentinel = sentinel_bits(weight.dtype, torch.cat([part.values for part in parts]))
        if sentinel is None:
            raise UnsupportedModelError(
                f"{name}: a sparse update uses all bit patterns of {dtype_name(weight.dtype)}, so "
                "none is left to mark unchanged elements; send all elements of the tensor"
            )
        bits.fill_(sentinel)
    for part in parts:
        bits[_index(part.locations)] = part.values
    return LoaderWeight(name, source, weight.kind, sentinel)


def _index(locations: torch.Tensor | range) -> Any:
    if isinstance(locations, range):
        return slice(locations.start, locations.stop)
    return locations.to(torch.int64)
