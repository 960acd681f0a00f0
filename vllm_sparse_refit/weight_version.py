"""Weight versions: what a worker holds, as a label for people and a chained digest for machines."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from vllm_sparse_refit.checksum import checksum_hex


@dataclass(frozen=True)
class WeightVersion:
    """A label and the digest of everything that led to it.

    Two workers started from one checkpoint hold equal weights when their digests are equal: the digest
    is chained over the payloads of every committed transfer.
    """

    label: str
    digest: str

    @classmethod
    def initial(cls) -> Self:
        """The version of an engine as it was started."""
        return cls("initial", "0" * 32)

    def following(self, label: str, checksums: Iterable[str]) -> "WeightVersion":
        """The version after a transfer with payloads of these checksums, in whatever order."""
        chain = "\n".join([self.digest, *sorted(checksums)])
        return WeightVersion(label, checksum_hex(chain.encode()))

    def __str__(self) -> str:
        return f"{self.label} ({self.digest[:12]})"
