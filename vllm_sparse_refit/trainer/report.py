"""What one sync did, for people and for logs."""

from dataclasses import asdict, dataclass
from typing import Any, Final

from vllm_sparse_refit.weight_version import WeightVersion

_SHOWN: Final = 5


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """Figures of one successful sync.

    Attributes:
        version: the version that every worker holds now.
        engines, workers: how many were brought there.
        changed_elements, total_elements: of the canonical tensors, each counted once.
        payloads: sent, each once; the workers forward them to each other.
        resynced: engines that were first brought up to the version of the others.
        wire_bytes: of one copy of all payloads.
        dense_bytes: of all weights, for comparison.
        stream_s: seconds for exporting, comparing, encoding, sending and staging, overlapped.
        pause_s: seconds during which the engines could not generate.
        sync_s: seconds for everything.
    """

    version: WeightVersion
    engines: int
    workers: int
    changed_elements: int
    total_elements: int
    payloads: int
    wire_bytes: int
    dense_bytes: int
    stream_s: float
    pause_s: float
    sync_s: float
    resynced: int = 0

    @property
    def changed_fraction(self) -> float:
        """Changed elements per element."""
        return self.changed_elements / self.total_elements if self.total_elements else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All figures as JSON types."""
        return {**asdict(self), "changed_fraction": self.changed_fraction}

    def __str__(self) -> str:
        share = self.wire_bytes / self.dense_bytes if self.dense_bytes else 0.0
        return (
            f"version {self.version}: "
            f"{self.changed_fraction:.2%} of {self.total_elements:,} elements changed, "
            f"{_size(self.wire_bytes)} sent for {self.workers} workers "
            f"({share:.2%} of {_size(self.dense_bytes)}), {self.sync_s:.2f} s in all, "
            f"generation paused {self.pause_s * 1e3:.0f} ms"
            + (f", {self.resynced} engines brought up first" if self.resynced else "")
        )


@dataclass(frozen=True, kw_only=True)
class VerificationReport:
    """What a comparison of every element with the engines found.

    Attributes:
        elements: compared; those that several workers hold count for each.
        different: by canonical tensor or packed layer, which workers hold something else.
        transformed: tensors that an engine's loader casts or transforms, so that no worker holds their bits;
            what the workers have of them was compared with what the last update left there.
    """

    elements: int
    different: dict[str, tuple[str, ...]]
    transformed: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return not self.different

    def __str__(self) -> str:
        other = len(self.transformed)
        left_out = f"; {other} transformed tensors compared with the last update" if other else ""
        if self.ok:
            return f"{self.elements:,} elements compared, all equal{left_out}"
        count = len(self.different)
        named = [f"{n} ({', '.join(w)})" for n, w in self.different.items()][:_SHOWN]
        more = f" and {count - _SHOWN} more" if count > _SHOWN else ""
        return (
            f"{self.elements:,} elements compared, {count} tensor{'s differ' if count > 1 else ' differs'}: "
            f"{', '.join(named)}{more}{left_out}"
        )


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
