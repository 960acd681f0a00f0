"""What a worker knows of its transfer, and the states that it goes through."""

import enum
import time
from dataclasses import dataclass, field

from vllm_sparse_refit.apply.sparse_writes import PlacedDelta
from vllm_sparse_refit.codec.delta import TensorDelta
from vllm_sparse_refit.errors import TransactionError
from vllm_sparse_refit.weight_version import WeightVersion

# What a decoded delta costs beside its tensors' data.
_DELTA_BYTES = 1024


class State(enum.StrEnum):
    """Where a worker is in a transfer.

                   begin          prepare            commit             release
        IDLE ------------> OPEN -----------> PREPARED ---------> COMMITTED --------> IDLE
          ^                  |                   |                   |           (new version)
          +------ abort -----+------ abort ------+----- rollback ----+
        (old version, same bits)

    Payloads handed over by an RPC instead of the server make it UPDATING until they are finished.

    A worker that hears nothing for its limit aborts if OPEN or PREPARED, and releases if COMMITTED.

    Only a rollback that fails leads to BROKEN, from which nothing leads away but a restart or
    reload of the engine.
    """

    IDLE = "idle"
    OPEN = "open"
    PREPARED = "prepared"
    COMMITTED = "committed"
    UPDATING = "updating"
    BROKEN = "broken"


@dataclass(eq=False)
class Transfer:
    """The one transfer a worker may have open."""

    transfer_id: str
    base: WeightVersion
    target_label: str
    heard_at: float = field(default_factory=time.monotonic)  # the last payload or call
    checksums: dict[tuple[int, int], str] = field(default_factory=dict)
    deltas: dict[str, list[TensorDelta]] = field(default_factory=dict)
    staged_bytes: int = 0
    changed_elements: int = 0


def check_begin(
    transfer_id: object, base_digest: object, target_label: object, *numbers: object
) -> None:
    texts = (transfer_id, base_digest, target_label)
    if not all(isinstance(text, str) for text in texts):
        raise TransactionError(
            f"transfer_id, base_digest and target_label must be strings, not {texts!r}"
        )
    if any(type(number) is not int or number < 0 for number in numbers):
        raise TransactionError(
            f"sequence and verification_samples must be whole numbers of 0 or more, not {numbers!r}"
        )


def held_bytes(delta: TensorDelta) -> int:
    """Memory that a staged delta takes, in bytes."""
    locations = 0 if isinstance(delta.locations, range) else delta.locations.nbytes
    writes = delta.writes if isinstance(delta, PlacedDelta) else ()
    # Where a write has locations of its own; otherwise it shares those of the delta.
    placed = sum(write.nbytes for write in writes if write.canonical is not None)
    return locations + delta.values.nbytes + placed + _DELTA_BYTES
