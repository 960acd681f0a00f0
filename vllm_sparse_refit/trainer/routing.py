"""From what every worker discovered to how each tensor is shipped."""

import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_sparse_refit.errors import UnsupportedModelError

_SHOWN = 5
# Characters of a reason; a loader's own error may list every parameter of the model.
_REASON = 300


@dataclass(frozen=True)
class Routing:
    """How the trainer ships its tensors; all are names.

    Attributes:
        skip: no worker of any engine needs them.
        overwrite: some worker's loader transforms them, so they go as new bits.
        dense: of those, the ones that some worker needs whole.
        tied: names that some engine takes from another tensor, and that tensor. They are sent like it,
            so that the workers can see that both change alike.
        uncovered: parameters of some worker that no tensor reaches.
        narrowed: tensors that some worker casts to a dtype of fewer bits, and the name of that dtype.
    """

    skip: frozenset[str]
    overwrite: frozenset[str]
    dense: frozenset[str]
    tied: tuple[tuple[str, str], ...]
    uncovered: frozenset[str]
    narrowed: Mapping[str, str]


def join_discoveries(
    names: Collection[str], discoveries: dict[str, Sequence[dict[str, Any]]]
) -> Routing:
    """Join the discoveries of all ranks of all engines.

    Args:
        names: what the trainer announced.
        discoveries: replies of ``discover_native_skips`` by engine, one for each rank.

    Raises:
        UnsupportedModelError: something cannot be updated exactly, or a tensor has no place in an engine.
    """
    skip = set(names)
    for engine, replies in discoveries.items():
        _refuse_unsupported(engine, replies)
        skipped = set(names).intersection(*(reply["skips"] for reply in replies))
        _refuse_unclaimed(engine, skipped.difference(*(reply["tied"] for reply in replies)))
        skip &= skipped
    replies = [reply for of_engine in discoveries.values() for reply in of_engine]
    tied = {pair for reply in replies for pair in reply["tied"].items() if pair[1]}
    overwrite = _with_tied(set().union(*(reply["overwrite"] for reply in replies)), tied)
    dense = _with_tied(set().union(*(reply["dense"] for reply in replies)), tied)
    return Routing(
        skip=frozenset(skip.difference(name for name, _ in tied)),
        overwrite=overwrite,
        dense=dense,
        tied=tuple(sorted(tied)),
        uncovered=frozenset().union(*(reply["uncovered"] for reply in replies)),
        narrowed={name: kept for reply in replies for name, kept in reply["narrowed"].items()},
    )


def _with_tied(names: set[str], tied: set[tuple[str, str]]) -> frozenset[str]:
    return frozenset(names | {name for name, partner in tied if partner in names})


def _refuse_unsupported(engine: str, replies: Sequence[dict[str, Any]]) -> None:
    packed = {name: why for reply in replies for name, why in reply["packed"].items()}
    if packed:
        raise UnsupportedModelError(
            f"{engine} packs or derives the weights of {len(packed)} layers after loading, and an update "
            f"would not reach what its kernels read: {_listed(packed)}"
        )
    unsupported = {name: why for reply in replies for name, why in reply["unsupported"].items()}
    if unsupported:
        raise UnsupportedModelError(
            f"{engine} cannot update {len(unsupported)} tensors exactly (is this the checkpoint that it "
            f"was started from?): {_listed(unsupported)}"
        )


def _refuse_unclaimed(engine: str, names: set[str]) -> None:
    if names:
        raise UnsupportedModelError(
            f"no worker of {engine} loads {len(names)} of the tensors: "
            f"{', '.join(sorted(names)[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}; check "
            "that this is the engine's checkpoint, or name what nobody needs in SyncConfig.ignore"
        )


def _listed(reasons: dict[str, str]) -> str:
    shown = "; ".join(
        f"{name}: {textwrap.shorten(why, _REASON, placeholder=' ...')}"
        for name, why in list(reasons.items())[:_SHOWN]
    )
    return shown + (f"; and {len(reasons) - _SHOWN} more" if len(reasons) > _SHOWN else "")
