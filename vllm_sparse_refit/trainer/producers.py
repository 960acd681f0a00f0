"""Several trainer processes that send one transfer together: what they tell each other, and how.

Rank 0 drives the engines; it tells the others where a transfer begins and how it ended, and they tell
it what they sent. Every step is collective, also where something failed, so that no process waits for one
that is somewhere else.
"""

import contextlib
import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from vllm_sparse_refit.checksum import checksum_hex
from vllm_sparse_refit.errors import RefitError, TransactionError
from vllm_sparse_refit.trainer.baseline import SparsePayload
from vllm_sparse_refit.trainer.exported import NamedTensor
from vllm_sparse_refit.weight_version import WeightVersion

_HEAD = struct.Struct("<Q")


class ProducerGroup(Protocol):
    """The processes of a trainer, as one of them sees them. Both methods are collective.

    Attributes:
        rank: This process, from 0.
        size: How many there are.
    """

    rank: int
    size: int

    def broadcast(self, data: bytes) -> bytes:
        """What rank 0 gave, on every rank."""

    def gather(self, data: bytes) -> Sequence[bytes]:
        """What every rank gave, by rank, on rank 0; elsewhere nothing."""


class SingleProducer:
    """A trainer of one process."""

    rank = 0
    size = 1

    def broadcast(self, data: bytes) -> bytes:
        """The same."""
        return data

    def gather(self, data: bytes) -> Sequence[bytes]:
        """The same, alone."""
        return [data]


class TorchProducerGroup:
    """The processes of a ``torch.distributed`` group whose backend takes CPU tensors, such as gloo.

    Args:
        group: as ``torch.distributed.new_group(backend="gloo")`` makes it; None takes the default group.
    """

    def __init__(self, group: Any = None) -> None:
        self._dist: Any = torch.distributed
        self._group = group
        self.rank: int = self._dist.get_rank(group)
        self.size: int = self._dist.get_world_size(group)

    def broadcast(self, data: bytes) -> bytes:
        """See :class:`ProducerGroup`. Bytes travel as bytes: nothing is pickled."""
        size = torch.tensor([len(data)])
        self._dist.broadcast(size, group=self._group, group_src=0)
        content = _tensor(data, int(size)) if self.rank == 0 else _tensor(b"", int(size))
        self._dist.broadcast(content, group=self._group, group_src=0)
        return _bytes(content, int(size))

    def gather(self, data: bytes) -> Sequence[bytes]:
        """See :class:`ProducerGroup`."""
        sizes = [torch.tensor([0]) for _ in range(self.size)]
        self._dist.all_gather(sizes, torch.tensor([len(data)]), group=self._group)
        most = max(int(size) for size in sizes)
        found = [_tensor(b"", most) for _ in sizes] if self.rank == 0 else None
        self._dist.gather(_tensor(data, most), found, group=self._group, group_dst=0)
        return [_bytes(*each) for each in zip(found or [], map(int, sizes), strict=False)]


def _tensor(data: bytes, size: int) -> torch.Tensor:
    found = torch.zeros(max(size, 1), dtype=torch.uint8)
    if data:
        found[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return found


def _bytes(content: torch.Tensor, size: int) -> bytes:
    return content[:size].numpy().tobytes()


@contextlib.contextmanager
def pulled_to_the_end(
    weights: Iterable[NamedTensor], group: ProducerGroup
) -> Iterator[Iterator[NamedTensor]]:
    """Weights that every process pulls alike: on an error the rest is pulled as well, and dropped.

    Each may be gathered from all processes, and the others would wait for ever for one that stopped.
    """
    iterator = iter(weights)
    try:
        yield iterator
    except Exception:
        if group.size > 1:
            for _ in iterator:
                pass
        raise


@dataclass(frozen=True)
class ShardReport:
    """What one rank sent in a transfer, or why it could not.

    Attributes:
        error: Empty if it could.
        names: Of the tensors that it compared.
        counts: As :func:`stream_sparse_delta_payloads_via_zmq` returns them.
        payloads: In the order of their ids.
    """

    error: str = ""
    names: Sequence[str] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    payloads: Sequence[SparsePayload] = ()

    def to_bytes(self) -> bytes:
        """For rank 0."""
        head = {
            "error": self.error,
            "names": list(self.names),
            "counts": dict(self.counts),
            "payloads": [[len(p.body), p.deltas, p.changed_elements] for p in self.payloads],
        }
        text = json.dumps(head).encode()
        return b"".join([_HEAD.pack(len(text)), text, *(p.body for p in self.payloads)])

    @classmethod
    def from_bytes(cls, data: bytes) -> "ShardReport":
        """The reverse of :meth:`to_bytes`."""
        at = _HEAD.size + _HEAD.unpack_from(data)[0]
        head = json.loads(data[_HEAD.size : at])
        payloads = []
        for size, deltas, changed in head["payloads"]:
            body = data[at : at + size]
            payloads.append(SparsePayload(body, checksum_hex(body), deltas, changed))
            at += size
        return cls(head["error"], head["names"], head["counts"], payloads)


class Coordinator:
    """Rank 0's side of one collective call, a snapshot or a sync: ``start``, ``collect``, ``end``.

    :meth:`fail` does what is left of these, so that the others are where this one is.
    """

    def __init__(self, group: ProducerGroup) -> None:
        self._group = group
        self._left = ["start", "collect", "end"]

    def start(self, ticket: Mapping[str, Any]) -> None:
        """Tell the others what they need to take part."""
        self._tell("start", ticket)

    def collect(self) -> list[ShardReport]:
        """What the other ranks did, in order.

        Raises:
            TransactionError: one of them could not do its part; says which and why.
        """
        with self._step("collect"):
            gathered = self._group.gather(b"")[1:]
        reports = [ShardReport.from_bytes(data) for data in gathered]
        for rank, each in enumerate(reports, 1):
            if each.error:
                raise TransactionError(
                    f"trainer process {rank} could not do its part: {each.error}"
                )
        return reports

    def end(self, version: WeightVersion) -> None:
        """Tell the others that it succeeded, and at which version the engines are."""
        self._tell("end", _success(version))

    def fail(self, error: BaseException, happened: WeightVersion | None) -> None:
        """Tell the others that it failed, if they do not know how it ended. Raises no RefitError.

        Args:
            happened: the version that the engines came to all the same; None if they did not.
        """
        failure = {"error": f"{type(error).__name__}: {error}"}
        with contextlib.suppress(RefitError):
            if "start" in self._left:
                self._tell("end", failure)  # in the place of the start: they go no further
                return
            if "collect" in self._left:
                with contextlib.suppress(RefitError):
                    self.collect()
            if "end" in self._left:
                self._tell("end", failure if happened is None else _success(happened))

    def _tell(self, step: str, message: Mapping[str, Any]) -> None:
        with self._step(step):
            self._group.broadcast(json.dumps(message).encode())

    @contextlib.contextmanager
    def _step(self, step: str) -> Iterator[None]:
        del self._left[: self._left.index(step) + 1]
        try:
            with _lost_processes():
                yield
        except BaseException:
            self._left.clear()  # whoever is lost cannot be told
            raise


def _success(version: WeightVersion) -> dict[str, Any]:
    return {"version": {"label": version.label, "digest": version.digest}}


@contextlib.contextmanager
def _lost_processes() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise TransactionError(
            f"the trainer's processes lost each other ({type(error).__name__}: {error}); start them again, "
            "and snapshot() or restore() on every rank"
        ) from error


def told(group: ProducerGroup) -> dict[str, Any]:
    """What rank 0 tells, on another rank.

    Raises:
        TransactionError: the processes lost each other, or rank 0 tells of a failure.
    """
    with _lost_processes():
        message: dict[str, Any] = json.loads(group.broadcast(b""))
    if "error" in message:
        raise TransactionError(f"rank 0 tells that this failed: {message['error']}")
    return message


def report(group: ProducerGroup, done: ShardReport) -> None:
    """Tell rank 0 what this rank did.

    Raises:
        TransactionError: the processes lost each other.
    """
    with _lost_processes():
        group.gather(done.to_bytes())
