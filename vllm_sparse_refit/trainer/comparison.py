"""Comparing exported tensors with the bits of the baseline, in chunks that any thread can take."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from vllm_sparse_refit.codec.coding import CodedDelta, code_changes
from vllm_sparse_refit.codec.delta import Chunk, SparseOperation, find_changes
from vllm_sparse_refit.trainer.exported import ExportedTensor, HostCopier, PendingCopy, chunks


@dataclass(frozen=True, eq=False)
class Comparison:
    """A chunk of a tensor that waits to be compared, by any thread (:func:`run_all`).

    Attributes:
        exported: The tensor.
        operation: What the delta's values shall do.
        begin: Flat position of the chunk's first element.
        old: The baseline's bits, 1-D.
        new: The tensor's bits, as many, on the same device or on their way there.
        whole: Ship every element, changed or not.
        stream: Where the work on a device is done; None on the CPU.
    """

    exported: ExportedTensor
    operation: SparseOperation
    begin: int
    old: torch.Tensor
    new: torch.Tensor | PendingCopy
    whole: bool
    stream: torch.Stream | None

    @property
    def new_bits(self) -> torch.Tensor:
        """The new bits, once they are where the old ones are."""
        return self.new.wait() if isinstance(self.new, PendingCopy) else self.new

    @property
    def is_view(self) -> bool:
        """Whether the new bits are those of the exported tensor itself, and no copy."""
        return isinstance(self.new, torch.Tensor) and self.exported.tensor.is_contiguous()

    @property
    def chunk(self) -> Chunk:
        """What is compared; waits for bits that are on their way to the host."""
        return Chunk(
            self.exported.name,
            tuple(self.exported.tensor.shape),
            self.exported.tensor.dtype,
            self.operation,
            self.begin,
            self.old,
            self.new_bits,
            self.whole,
        )

    def changed_values(self) -> torch.Tensor:
        """The new values at the changed elements, 1-D on the CPU, of the tensor's dtype."""
        with _current(self.stream):
            _, bits = find_changes(self.old, self.new_bits, SparseOperation.OVERWRITE, wide=True)
        return bits.view(self.exported.tensor.dtype)


def _current(stream: torch.Stream | None) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if stream is None else stream


def comparisons(
    exported: ExportedTensor,
    baseline: torch.Tensor,
    operation: SparseOperation,
    *,
    chunk_elements: int,
    copier: HostCopier,
    whole: bool = False,
) -> Iterator[Comparison]:
    """Cut a tensor into chunks that can be compared side by side.

    A chunk that is not contiguous, or not on the baseline's device, is copied when it is yielded; at
    most as many copies exist as the caller keeps comparisons.

    Args:
        exported: The tensor.
        baseline: Its old bits, 1-D; on the CPU or on the tensor's device.
        operation: What the deltas' values shall do.
        chunk_elements: Largest chunk.
        copier: Brings chunks from a device to the host.
        whole: Ship every element, changed or not.
    """
    device = exported.tensor.device
    pieces = chunks(exported.tensor, chunk_elements)
    begin = 0
    if device.type == "cpu" == baseline.device.type:
        for chunk in pieces:
            size = chunk.numel()
            # torch lets other threads in at each slice, and then waits for them.
            old = baseline if size == baseline.numel() else baseline[begin : begin + size]
            yield Comparison(exported, operation, begin, old, chunk, whole, None)
            begin += size
        return
    stream = None if device.type == "cpu" else copier.stream(exported)
    while True:
        # Entered anew for each piece: what runs between two of them is the caller's.
        with _current(stream):
            if (piece := next(pieces, None)) is None:
                return
            new = piece if device == baseline.device else copier.copy(piece)
        old = baseline[begin : begin + piece.numel()]
        yield Comparison(exported, operation, begin, old, new, whole, stream)
        begin += piece.numel()


def goes_whole(chunked: Iterable[Comparison], *, any_change: bool) -> bool:
    """Whether an overwritten tensor must be shipped whole, or costs less that way.

    Args:
        chunked: The tensor's comparisons.
        any_change: One changed element is enough. Otherwise it takes a NaN among the changed values,
            which a receiver may use as the mark of an unchanged element, or changes nearly everywhere.
    """
    changed = total = 0
    for comparison in chunked:
        values = comparison.changed_values()
        if values.numel() and (any_change or _has_nan(values)):
            return True
        changed += values.numel()
        total += comparison.old.numel()
    return changed > 0.8 * total


def _has_nan(values: torch.Tensor) -> bool:
    return values.is_floating_point() and bool(values.to(torch.float32).isnan().any())


def run_all(group: Sequence[Comparison]) -> list[CodedDelta]:
    """The deltas of comparisons, in order, less those of chunks in which nothing changed.

    Raises:
        TensorMismatchError: a tensor was written to since it was exported.
    """
    on_host = iter(code_changes([item.chunk for item in group if item.old.is_cpu]))
    deltas = [next(on_host) if item.old.is_cpu else _run_on_device(item) for item in group]
    for item in group:
        item.exported.check_unmodified()
    return [delta for delta in deltas if delta is not None]


def _run_on_device(comparison: Comparison) -> CodedDelta | None:
    with _current(comparison.stream):
        return code_changes([comparison.chunk])[0]
