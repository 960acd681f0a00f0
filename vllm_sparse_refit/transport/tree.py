"""Which workers a worker forwards a payload to. Knows no sockets."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from vllm_sparse_refit.errors import ConfigError, PayloadError
from vllm_sparse_refit.transport.endpoint import is_wildcard

DEFAULT_FANOUT = 2

# How much longer a sender waits for each level of workers below the one that it sends to. Those below
# must run out of patience first, so that the worker which stands beside the fault is the one to name it.
_PATIENCE = 0.25


def patience(limit_s: float, levels_below: int) -> float:
    """The limit, in seconds, for an acknowledgement of a worker with that many levels below it."""
    return limit_s * (1 + _PATIENCE * levels_below)


def height(workers: int, fanout: int) -> int:
    """Levels below the root of a tree of that many workers."""
    levels, position = 0, workers - 1
    while position > 0:
        position, levels = (position - 1) // fanout, levels + 1
    return levels


@dataclass(frozen=True)
class RelayTree:
    """A complete tree over all workers for each root, as one of the workers sees it.

    The addresses, rotated so that a payload's root comes first, are the tree in level order: the
    children of number *p* are *fanout p* + 1 to *fanout p* + *fanout*. So every worker can be the
    root, and nobody needs to be told who is whose child.

    Attributes:
        addresses: Every worker, in the same order on all of them.
        own_address: The one that this worker is reached at.
        fanout: Most workers that one forwards a payload to.
    """

    addresses: tuple[str, ...]
    own_address: str
    fanout: int = DEFAULT_FANOUT

    @classmethod
    def of(cls, addresses: Sequence[str], own_address: str, fanout: int) -> Self:
        """A checked tree.

        Raises:
            ConfigError: an address comes twice, this worker's is missing, or the fan-out is below 1.
        """
        if type(fanout) is not int or fanout < 1:
            raise ConfigError(
                f"a relay tree's fan-out is a whole number of 1 or more, not {fanout!r}"
            )
        if len(set(addresses)) != len(addresses):
            raise ConfigError(f"an address comes twice in the relay tree {list(addresses)}")
        if own_address not in addresses:
            raise ConfigError(
                f"this worker's address {own_address!r} is not in the relay tree {list(addresses)}"
            )
        if len(addresses) > 1 and (unreachable := [a for a in addresses if is_wildcard(a)]):
            raise ConfigError(
                f"other workers cannot connect to {unreachable[0]!r}; set sparse_refit.advertised_host "
                "of that worker to a name or address of its machine"
            )
        return cls(tuple(addresses), own_address, fanout)

    def children(self, root: str) -> tuple[str, ...]:
        """The workers to which this one forwards a payload that entered at ``root``.

        Raises:
            PayloadError: ``root`` is no worker of this tree.
        """
        if root not in self.addresses:
            raise PayloadError(
                f"the relay root {root!r} is no worker of the tree of this transfer; send payloads to "
                "the workers for which the transfer was begun"
            )
        count, first = len(self.addresses), self.addresses.index(root)
        position = (self.addresses.index(self.own_address) - first) % count
        below = range(self.fanout * position + 1, self.fanout * (position + 1) + 1)
        return tuple(self.addresses[(first + number) % count] for number in below if number < count)

    def levels_below(self, root: str, child: str) -> int:
        """How many levels of workers are below ``child`` in the tree of ``root``."""
        count = len(self.addresses)
        position = (self.addresses.index(child) - self.addresses.index(root)) % count
        levels = 0
        while (position := self.fanout * position + 1) < count:
            levels += 1
        return levels
