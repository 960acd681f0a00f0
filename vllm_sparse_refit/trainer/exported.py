"""Tensors as the trainer's export yields them, and their bits in chunks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch

from vllm_sparse_refit.codec.dtypes import bits_view
from vllm_sparse_refit.errors import TensorMismatchError

NamedTensor = tuple[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class ExportedTensor:
    """A tensor, and the state it was in when it was exported.

    Attributes:
        name: Its checkpoint name.
        tensor: On any device, any strides.
        version: torch's count of in-place writes to it.
        ready: On a device, marks the point of the exporting stream from which on the tensor holds its
            values; None on the CPU.
    """

    name: str
    tensor: torch.Tensor
    version: int
    ready: torch.Event | None

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Self:
        """Take a tensor over. Must run in the thread, and with the stream, that exports."""
        if tensor.requires_grad:
            tensor = tensor.detach()
        ready = None
        if tensor.device.type != "cpu":
            ready = torch.Event(tensor.device)
            ready.record(torch.accelerator.current_stream(tensor.device))
        return cls(name, tensor, _version(tensor), ready)

    def check_unmodified(self) -> None:
        """Check that nobody wrote to the tensor since it was exported.

        Raises:
            TensorMismatchError: somebody did.
        """
        if self.version != _version(self.tensor):
            raise TensorMismatchError(
                f"tensor {self.name!r} was written to before it had been compared: by an optimizer "
                "step that ran meanwhile, or by an export that fills one buffer again and again; weights "
                "must keep their values until the call returns"
            )


def _version(tensor: torch.Tensor) -> int:
    """torch's count of in-place writes; tensors made in inference mode have none."""
    return 0 if tensor.is_inference() else tensor._version


def chunks(tensor: torch.Tensor, elements: int) -> Iterator[torch.Tensor]:
    """The bits of a tensor in row-major order, as 1-D contiguous pieces of at most ``elements`` each.

    The pieces are on the tensor's device. Those of a contiguous tensor are views of it; any other is
    copied a piece at a time.
    """
    yield from _pieces(bits_view(tensor), elements)


def _pieces(bits: torch.Tensor, elements: int) -> Iterator[torch.Tensor]:
    if bits.is_contiguous():
        flat = bits.view(-1)
        if 0 < flat.numel() <= elements:
            yield flat
            return
        for begin in range(0, flat.numel(), elements):
            yield flat[begin : begin + elements]
    elif bits.numel() <= elements:
        yield bits.reshape(-1).contiguous()
    elif rows := elements // (bits.numel() // bits.shape[0]):
        for block in torch.split(bits, rows):
            yield block.reshape(-1).contiguous()
    else:
        for row in bits:
            yield from _pieces(row, elements)


class HostCopier:
    """Brings chunks from devices to the host, through pinned memory and on streams of its own.

    The exporting stream is never waited for by the host, and goes on meanwhile. One owner at a time.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}

    def stream(self, exported: ExportedTensor) -> torch.Stream:
        """The stream for work on a device's tensor; it waits until the tensor has its values."""
        device = exported.tensor.device
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        stream = self._streams[device]
        if exported.ready is not None:
            stream.wait_event(exported.ready)
        return stream

    def copy(self, chunk: torch.Tensor) -> "PendingCopy":
        """Begin to copy a chunk; must be called with its :meth:`stream` current."""
        host = torch.empty(chunk.shape, dtype=chunk.dtype, pin_memory=True)
        host.copy_(chunk, non_blocking=True)
        done = torch.Event(chunk.device)
        done.record(torch.accelerator.current_stream(chunk.device))
        return PendingCopy(host, done)


@dataclass(frozen=True, eq=False)
class PendingCopy:
    """A chunk on its way to the host."""

    host: torch.Tensor
    done: torch.Event

    def wait(self) -> torch.Tensor:
        """The chunk, 1-D on the CPU, once it is there."""
        self.done.synchronize()
        return self.host
