"""The dispatch mode under which a native loader's copies are observed or made sparse."""

import enum
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_sparse_refit.apply.placement import Box, BoxCopy
from vllm_sparse_refit.apply.storage import storage_bits, storage_key
from vllm_sparse_refit.codec.dtypes import bits_view
from vllm_sparse_refit.errors import UnsupportedModelError

aten = torch.ops.aten
_ZEROS = (aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default)


class LoadKind(enum.StrEnum):
    """How the native loader gets one canonical tensor into this rank's parameters."""

    SKIP = "skip"
    """It copies nothing of it here (another pipeline stage's layer, a tied head)."""
    VIEW = "view"
    """Plain copies of strided boxes, bits unchanged: xor and sparse overwrite both work."""
    TRANSFORM = "transform"
    """A cast or an elementwise transform: sparse overwrite works, with a marker for "unchanged"."""
    DENSE = "dense"
    """A transform that mixes elements, or copies that overlap: all elements must be there."""
    UNSUPPORTED = "unsupported"
    """It cannot be updated exactly."""


@dataclass(frozen=True, eq=False)
class LoaderCopy:
    """One write of the native loader into a watched storage.

    Attributes:
        target: the view written to, detached; keeps its storage alive.
        boxes: source and target boxes of a plain view copy; None when the source was a temporary,
            was cast, or was broadcast.
        source: the tensor copied from; kept only when asked for.
        is_cast: whether the source was a view of the canonical tensor and ``copy_`` itself converted it
            from one floating dtype of 2 bytes or more to another.
    """

    target: torch.Tensor
    boxes: BoxCopy | None
    source: torch.Tensor | None = None
    is_cast: bool = False

    @property
    def target_box(self) -> Box:
        return Box.of(self.target)

    @functools.cached_property
    def storage(self) -> torch.Tensor:
        """The whole storage written to, as a flat integer view."""
        return storage_bits(self.target)

    @functools.cached_property
    def storage_key(self) -> int:
        """The key of that storage, which :attr:`target` keeps alive."""
        return storage_key(self.target)


@dataclass(frozen=True, eq=False)
class LoaderWeight:
    """One canonical tensor on its way through the native loader.

    Attributes:
        source: stands for the canonical tensor, contiguous, full shape; a probe's holds zeros.
        kind: what discovery found, None while it is finding out.
        sentinel: for a sparse TRANSFORM, the bits in ``source`` that mean "unchanged"; None when
            all elements of ``source`` count.
    """

    name: str
    source: torch.Tensor
    kind: LoadKind | None = None
    sentinel: int | None = None


class CopySink(Protocol):
    """Takes the loader's copies: records them, or writes the sparse part of them."""

    def copy(self, weight: LoaderWeight, copy: LoaderCopy) -> None: ...

    def zeros(self, target: torch.Tensor) -> None:
        """Take note that the loader sets ``target``, which holds zeros, to zeros again."""


class _SparseWeightLoadMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Turn native loader copies into sparse XOR or overwrite.

    While active, no operator writes to a watched storage. ``copy_`` is handed to the sink with the
    weight that is being loaded; filling vocabulary padding with zeros is dropped, since the padding
    holds zeros already, and so are copies of zeros that the loader made itself (biases that a
    checkpoint lacks); every other write raises :class:`UnsupportedModelError`, naming operator and
    weight. Assigning ``.data`` is no operator and is not seen here: the caller compares storages.

    Args:
        targets: the watched storages by :func:`storage_key`: all that belongs to the live model.
        sink: see :class:`CopySink`.
        used: collects the keys of all storages that operators read, views aside; None does not.
    """

    def __init__(
        self, targets: Mapping[int, object], sink: CopySink, used: set[int] | None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._targets = targets
        self._sink = sink
        self._used = used
        self._weight: LoaderWeight | None = None
        self._source_modified = False
        self._own_zeros: dict[int, StorageWeakRef] = {}

    def start(self, weight: LoaderWeight) -> None:
        """Say which canonical tensor the loader is about to get."""
        self._weight = weight
        self._source_modified = False

    def finish(self) -> None:
        """Say that the loader is done."""
        self._weight = None

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._used is not None and not func.is_view:
            self._used.update(storage_key(t) for t in tensors_in([*args, *kwargs.values()]))
        if func is aten.copy_.default and storage_key(args[0]) in self._targets:
            self._copy(args[0], args[1])
            return args[0]
        for written in _written_tensors(func, args, kwargs):
            if storage_key(written) in self._targets:
                self._other_write(func, written, args)
                return args[0]
            self._own_zeros.pop(storage_key(written), None)
            if self._weight is not None and _same_storage(written, self._weight.source):
                self._source_modified = True
        result = func(*args, **kwargs)
        if func in _ZEROS and result.numel():
            made = StorageWeakRef(result.untyped_storage())  # type: ignore[no-untyped-call]  # torch's own
            self._own_zeros[storage_key(result)] = made
        return result

    def _current(self) -> LoaderWeight:
        if self._weight is None:
            raise UnsupportedModelError(
                "the model's load_weights() writes a parameter before it takes the first weight"
            )
        return self._weight

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        weight = self._current()
        if self._is_own_zeros(source) and not bool(bits_view(target).any()):
            self._sink.zeros(target.detach())
            return
        # A source that the loader changed in place no longer holds the canonical bits.
        plain = not self._source_modified
        boxes = _plain_boxes(weight.source, target, source) if plain else None
        cast = plain and _is_cast(weight.source, target, source)
        self._sink.copy(weight, LoaderCopy(target.detach(), boxes, source.detach(), cast))

    def _is_own_zeros(self, source: torch.Tensor) -> bool:
        """Whether the loader made ``source`` as zeros, of no weight, and left it so."""
        made = self._own_zeros.get(storage_key(source))
        # A storage made since then may have the address of one that is gone.
        if made is None or made.expired():  # type: ignore[no-untyped-call]  # torch's own
            return False
        return not bool(bits_view(source).any())

    def _other_write(self, func: Any, target: torch.Tensor, args: tuple[Any, ...]) -> None:
        weight = self._current()
        fill = {aten.fill_.Scalar, aten.fill_.Tensor}
        if func in fill and target.numel() == 1 and weight.source.numel() == 1:
            # vLLM's default loader fills one-element parameters instead of copying into them.
            source = torch.empty((), dtype=target.dtype).fill_(args[1])
            self._sink.copy(weight, LoaderCopy(target.detach(), None, source))
        elif func is aten.zero_.default or (func in fill and float(args[1]) == 0.0):
            self._sink.zeros(target.detach())
        else:
            raise UnsupportedModelError(
                f"{weight.name}: the model's loader writes to a parameter with {func}, "
                "which cannot be made sparse"
            )


def tensors_in(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """The tensors among arguments of an operator, those in lists included."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def _written_tensors(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[torch.Tensor]:
    """The tensors that ``func`` writes to, by its schema."""
    if not func._schema.is_mutable:
        return
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in([args[index] if index < len(args) else kwargs.get(argument.name)])


def _same_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    return storage_key(one) == storage_key(other)


def _plain_boxes(
    canonical: torch.Tensor, target: torch.Tensor, source: torch.Tensor
) -> BoxCopy | None:
    """The boxes of a copy that moves bits of the canonical tensor unchanged, else None."""
    same_bits = source.dtype == target.dtype and source.element_size() == canonical.element_size()
    if (
        not _same_storage(source, canonical)
        or not same_bits
        or source.shape != target.shape
        or source.is_neg()
        or source.is_conj()
    ):
        return None
    return BoxCopy(Box.of(source), Box.of(target))


def _is_cast(canonical: torch.Tensor, target: torch.Tensor, source: torch.Tensor) -> bool:
    floating = [t.dtype.is_floating_point and t.element_size() > 1 for t in (source, target)]
    return (
        _same_storage(source, canonical)
        and source.dtype == canonical.dtype
        and source.shape == target.shape
        and all(floating)
    )
