"""Placement arithmetic against what torch itself does with the same views."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_sparse_refit.apply.placement import Box, BoxCopy, boxes_overlap, place

UNCHANGED = -1


@st.composite
def source_views(draw: st.DrawFn) -> torch.Tensor:
    """A chain of views of a contiguous canonical tensor."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    view = torch.full((math.prod(shape),), UNCHANGED, dtype=torch.int64).reshape(shape)
    for _ in range(draw(st.integers(0, 4))):
        view = draw(_one_view(view))
    return view


@st.composite
def _one_view(draw: st.DrawFn, view: torch.Tensor) -> torch.Tensor:
    if view.ndim == 0:
        return view.reshape(1)
    axis = draw(st.integers(0, view.ndim - 1))
    size = view.shape[axis]
    match draw(st.sampled_from(["narrow", "transpose", "flatten", "unflatten", "select", "step"])):
        case "narrow":
            start = draw(st.integers(0, size))
            return view.narrow(axis, start, draw(st.integers(0, size - start)))
        case "transpose":
            return view.transpose(axis, draw(st.integers(0, view.ndim - 1)))
        case "flatten":
            try:
                return view.view(-1)
            except RuntimeError:  # no view has this shape
                return view
        case "unflatten" if size:
            parts = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
            return view.unflatten(axis, (parts, size // parts))
        case "select" if size:
            return view.select(axis, draw(st.integers(0, size - 1)))
        case _:
            index = [slice(None)] * view.ndim
            index[axis] = slice(draw(st.integers(0, 2)), None, draw(st.integers(1, 3)))
            return view[tuple(index)]


@st.composite
def target_views(draw: st.DrawFn, shape: tuple[int, ...]) -> torch.Tensor:
    """A view of ``shape`` somewhere in a larger storage: axes permuted, strides padded."""
    order = draw(st.permutations(range(len(shape))))
    strides = [0] * len(shape)
    reach = 1
    for axis in order:
        strides[axis] = reach * draw(st.integers(1, 2))
        reach = strides[axis] * max(shape[axis], 1)
    offset = draw(st.integers(0, 5))
    storage = torch.full((offset + reach + 3,), UNCHANGED, dtype=torch.int64)
    return storage.as_strided(shape, strides, offset)


@st.composite
def copies(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    source = draw(source_views())
    return source, draw(target_views(tuple(source.shape)))


def _storage(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)


@settings(max_examples=400, deadline=None)
@given(copy=copies(), data=st.data())
def test_place_writes_what_torch_copies(
    copy: tuple[torch.Tensor, torch.Tensor], data: st.DataObject
) -> None:
    source, target = copy
    canonical = _storage(source)
    if data.draw(st.booleans(), label="contiguous"):
        begin = data.draw(st.integers(0, canonical.numel() - 1))
        locations = range(begin, data.draw(st.integers(begin + 1, canonical.numel())))
        index = torch.arange(locations.start, locations.stop)
    else:
        chosen = data.draw(st.sets(st.integers(0, canonical.numel() - 1)))
        dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
        locations = torch.tensor(sorted(chosen), dtype=dtype)
        index = locations.to(torch.int64)
    boxes = BoxCopy(Box.of(source), Box.of(target))
    found = _storage(target).clone()

    selected, positions = place(boxes, locations)
    found[positions] = index[selected] + 100

    canonical[index] = index + 100
    target.copy_(source)
    assert torch.equal(found, _storage(target))
    assert positions.dtype == torch.int64
    if isinstance(selected, torch.Tensor):
        assert selected.dtype == torch.int64
        assert bool((selected[1:] > selected[:-1]).all())


@settings(deadline=None)
@given(source=source_views())
def test_a_chain_of_views_is_injective_and_has_the_extent_it_touches(source: torch.Tensor) -> None:
    box = Box.of(source)
    assert box.is_injective
    touched = _positions(box)
    assert box.numel == len(touched)
    if touched:
        assert (box.offset, box.end) == (min(touched), max(touched) + 1)
    else:
        assert box.end == box.offset


@pytest.mark.parametrize(
    "view",
    [
        torch.zeros(3, 1).expand(3, 4),
        torch.zeros(1).expand(5),
        torch.zeros(8).as_strided((3, 4), (2, 1)),
        torch.zeros(8).as_strided((2, 2), (3, 3)),
    ],
)
def test_expanded_and_overlapping_boxes_are_not_injective(view: torch.Tensor) -> None:
    assert not Box.of(view).is_injective


def test_locations_beyond_int32_are_narrowed_by_value() -> None:
    """A box may start where int32 ends; the positions are arithmetic, nothing is allocated."""
    start = (1 << 31) + 10
    copy = BoxCopy(Box(start, (4,), (1,)), Box(0, (4,), (1,)))
    wide = torch.tensor([5, start - 1, start, start + 3, start + 4], dtype=torch.int64)
    selected, positions = place(copy, wide)
    assert wide[selected].tolist() == [start, start + 3]
    assert positions.tolist() == [0, 3]
    narrow = torch.tensor([5, (1 << 31) - 1], dtype=torch.int32)
    assert place(copy, narrow)[1].numel() == 0
    assert place(copy, range(start + 2, start + 9))[1].tolist() == [2, 3]


def _positions(box: Box) -> set[int]:
    return {
        box.offset + sum(i * s for i, s in zip(index, box.strides, strict=True))
        for index in itertools.product(*(range(size) for size in box.shape))
    }


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    axes = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 7)), max_size=3))
    return Box(
        draw(st.integers(0, 20)), tuple(size for size, _ in axes), tuple(step for _, step in axes)
    )


@settings(max_examples=400, deadline=None)
@given(one=boxes(), other=boxes())
def test_boxes_overlap_exactly_when_they_share_a_position(one: Box, other: Box) -> None:
    assert boxes_overlap(one, other) == bool(_positions(one) & _positions(other))


def test_a_box_is_normalized_to_one_form() -> None:
    for tensor in (
        torch.empty(4, 5),
        torch.empty(1, 4, 5),
        torch.empty(2, 2, 5),
        torch.empty(5, 4).t(),
    ):
        whole = Box.of(tensor).normalized
        assert whole == Box(0, (20,), (1,)), tensor.shape
    columns = torch.empty(6, 8)[1:5, 2:5]
    assert Box.of(columns).normalized == Box(10, (4, 3), (8, 1))
    assert Box.of(columns.t()).normalized == Box.of(columns).normalized
    assert Box.of(torch.empty(3)[1:2]).normalized == Box(1, (), ())
    assert Box.of(torch.empty(6, 8)[:, ::2]).normalized == Box(0, (24,), (2,))
