"""Find out, without writing anything, how a model's native loader treats each canonical tensor."""

import fnmatch
import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from vllm_sparse_refit.apply.elementwise import is_elementwise
from vllm_sparse_refit.apply.live_model import LiveModel
from vllm_sparse_refit.apply.load_mode import LoaderCopy, LoaderWeight, LoadKind
from vllm_sparse_refit.apply.placement import Box, boxes_overlap
from vllm_sparse_refit.apply.processing import PackedLayer, storage_key
from vllm_sparse_refit.errors import RefitError

logger = logging.getLogger(__name__)

TensorInfo = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True, eq=False)
class DiscoveredWeight:
    """What this rank's native loader does with one canonical tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: LoadKind
    copies: tuple[LoaderCopy, ...] = ()
    reason: str = ""


@dataclass(frozen=True, eq=False)
class Discovery:
    """What one rank found out about the canonical tensors that the trainer announced.

    Attributes:
        weights: by canonical name, in the trainer's order.
        tied: names that the loader skips because a parameter they share with a claimed name gets
            that name's values (tied embeddings).
        aliases: groups of claimed names that land on exactly the same elements.
        streaming: whether the loader uses each tensor before it asks for the next one, so that many
            can go through one call.
        uncovered: this rank's parameters that no canonical tensor reaches.
        packed: the layers whose processed weights an update would not reach; with any, the whole
            model is refused.
    """

    weights: Mapping[str, DiscoveredWeight]
    tied: tuple[str, ...]
    aliases: tuple[tuple[str, ...], ...]
    streaming: bool
    uncovered: tuple[str, ...]
    packed: tuple[PackedLayer, ...] = ()

    def names(self, *kinds: LoadKind) -> list[str]:
        return [name for name, weight in self.weights.items() if weight.kind in kinds]

    @property
    def unsupported(self) -> dict[str, str]:
        """Reasons by name."""
        return {n: w.reason for n, w in self.weights.items() if w.kind is LoadKind.UNSUPPORTED}


def discover(
    live: LiveModel,
    state_dict_info: Mapping[str, TensorInfo],
    packed: Sequence[PackedLayer],
    *,
    tied_output: bool = False,
) -> Discovery:
    """Send stand-ins for all canonical tensors through the native loader and classify what it does.

    Afterwards every parameter and buffer has the storage and the bits it had.

    Args:
        packed: layers that post-load processing packed; tensors that land there are unsupported.
        tied_output: the model's configuration ties ``lm_head`` to the input embeddings.
    """
    probes = _observe(live, state_dict_info)
    weights = {
        name: _classify(live, name, info, probes.results[name])
        for name, info in state_dict_info.items()
    }
    aliases = _mark_shared_targets(weights)
    _mark_packed(live, weights, packed)
    return Discovery(
        weights=weights,
        tied=tuple(_tied_names(live, weights, tied_output)),
        aliases=aliases,
        streaming=probes.streaming,
        uncovered=tuple(_uncovered(live, weights)),
        packed=tuple(packed),
    )


# --- observing ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Probe:
    """What the loader did with one stand-in."""

    copies: tuple[LoaderCopy, ...] = ()
    claimed: bool = False
    error: str = ""


@dataclass(frozen=True, eq=False)
class _Probes:
    results: Mapping[str, _Probe]
    streaming: bool


class _Recorder:
    """Collects the loader's copies by canonical name, and notices when they come out of turn."""

    def __init__(self) -> None:
        self.copies: dict[str, list[LoaderCopy]] = {}
        self._owner: dict[int, str] = {}
        self.in_turn = True

    def announce(self, weight: LoaderWeight) -> None:
        self._owner[storage_key(weight.source)] = weight.name

    def copy(self, weight: LoaderWeight, copy: LoaderCopy) -> None:
        assert copy.source is not None
        # A copy straight from another stand-in means that the loader collected before it copied.
        owner = self._owner.get(storage_key(copy.source), weight.name)
        self.in_turn &= owner == weight.name
        self.copies.setdefault(weight.name, []).append(replace(copy, source=None))


def stand_in(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A zero tensor that takes no memory until something is written to it (calloc pages)."""
    element = torch.empty((), dtype=dtype).element_size()
    count = int(np.prod(shape, dtype=object)) if shape else 1
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(np.zeros(count * element, np.uint8)).view(dtype).reshape(shape)


def _observe(live: LiveModel, state_dict_info: Mapping[str, TensorInfo]) -> _Probes:
    """Probe everything in one loader call; fall back to one call per tensor where that is not
    exact."""
    recorder, changed = _Recorder(), list[str]()
    weights = [LoaderWeight(n, stand_in(*info)) for n, info in state_dict_info.items()]
    for weight in weights:
        recorder.announce(weight)
    try:
        with live.guarded(changed):
            live.load(weights, recorder)
    except (
        Exception
    ) as error:  # a loader may raise anything; the single calls tell for which tensor
        logger.debug("the loader raised during discovery, probing tensor by tensor", exc_info=error)
        return _observe_each(live, state_dict_info)
    results = {n: _Probe(tuple(recorder.copies.get(n, ()))) for n in state_dict_info}
    silent = {n: state_dict_info[n] for n, probe in results.items() if not probe.copies}
    singly = _observe_each(live, silent).results
    if changed or not recorder.in_turn or any(probe.copies for probe in singly.values()):
        return _observe_each(live, state_dict_info)
    return _Probes({**results, **singly}, streaming=True)


def _observe_each(live: LiveModel, state_dict_info: Mapping[str, TensorInfo]) -> _Probes:
    results = {n: _observe_one(live, n, info) for n, info in state_dict_info.items()}
    return _Probes(results, streaming=False)


def _observe_one(live: LiveModel, name: str, info: TensorInfo) -> _Probe:
    recorder, changed = _Recorder(), list[str]()
    loaded: set[str] | None = None
    error = ""
    try:
        with live.guarded(changed):
            loaded = live.load([LoaderWeight(name, stand_in(*info))], recorder)
    except RefitError as refused:
        error = str(refused)
    except Exception as raised:  # the loader's own
        error = f"the model's loader raised {type(raised).__name__}: {raised}"
    if changed and not error:
        error = f"the model's loader replaces {', '.join(changed[:3])} instead of copying into it"
    return _Probe(tuple(recorder.copies.get(name, ())), bool(loaded), error)


# --- classifying ----------------------------------------------------------------------------------


def _classify(live: LiveModel, name: str, info: TensorInfo, probe: _Probe) -> DiscoveredWeight:
    shape, dtype = info
    kind, reason = _kind(live, name, info, probe)
    return DiscoveredWeight(name, shape, dtype, kind, probe.copies, reason)


def _kind(live: LiveModel, name: str, info: TensorInfo, probe: _Probe) -> tuple[LoadKind, str]:
    if probe.error:
        return LoadKind.UNSUPPORTED, probe.error
    if not probe.copies:
        if probe.claimed:
            return LoadKind.UNSUPPORTED, (
                "the model's loader reports it as loaded but copies nothing of it into a parameter"
            )
        return LoadKind.SKIP, ""
    if _overlapping(probe.copies):
        return LoadKind.DENSE, ""
    if all(copy.boxes is not None and copy.boxes.source.is_injective for copy in probe.copies):
        return LoadKind.VIEW, ""
    if is_elementwise(live, name, *info):
        return LoadKind.TRANSFORM, ""
    return LoadKind.DENSE, ""


def _overlapping(copies: Iterable[LoaderCopy]) -> bool:
    """Whether one element of a parameter is written twice."""
    by_storage: dict[int, list[Box]] = {}
    for copy in copies:
        by_storage.setdefault(storage_key(copy.target), []).append(copy.target_box)
    return any(
        not box.is_injective or any(boxes_overlap(box, other) for other in boxes[i + 1 :])
        for boxes in by_storage.values()
        for i, box in enumerate(boxes)
    )


def _mark_shared_targets(weights: dict[str, DiscoveredWeight]) -> tuple[tuple[str, ...], ...]:
    """Group names with identical targets; names that share only some elements become
    unsupported."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, weight in weights.items():
        if weight.copies and weight.kind is not LoadKind.UNSUPPORTED:
            groups.setdefault(_target_identity(weight), []).append(name)
    for first, second in _partial_overlaps([names[0] for names in groups.values()], weights):
        for one, other in ((first, second), (second, first)):
            weights[one] = replace(
                weights[one],
                kind=LoadKind.UNSUPPORTED,
                reason=f"it shares only a part of its elements with {other}",
            )
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def _target_identity(weight: DiscoveredWeight) -> tuple[object, ...]:
    """Equal for two names exactly when the same source elements land on the same target
    elements."""
    return (
        weight.shape,
        weight.dtype,
        weight.kind,
        *((storage_key(copy.target), copy.target_box, copy.boxes) for copy in weight.copies),
    )


def _partial_overlaps(
    names: Iterable[str], weights: Mapping[str, DiscoveredWeight]
) -> list[tuple[str, str]]:
    by_storage: dict[int, list[tuple[Box, str]]] = {}
    for name in names:
        for copy in weights[name].copies:
            by_storage.setdefault(storage_key(copy.target), []).append((copy.target_box, name))
    found: list[tuple[str, str]] = []
    for boxes in by_storage.values():
        boxes.sort(key=lambda entry: entry[0].offset)
        for i, (box, name) in enumerate(boxes):
            nearby = itertools.takewhile(lambda entry: entry[0].offset < box.end, boxes[i + 1 :])
            found += [(name, o) for other, o in nearby if o != name and boxes_overlap(box, other)]
    return found


def _mark_packed(
    live: LiveModel, weights: dict[str, DiscoveredWeight], packed: Sequence[PackedLayer]
) -> None:
    """Refuse every tensor that lands in a packed layer."""
    reasons = {layer.module: layer.reason for layer in packed}
    holders = live.watched_storages()
    for name, weight in weights.items():
        for copy in weight.copies:
            for owned in holders.get(storage_key(copy.target), []):
                if owned.module in reasons:
                    weights[name] = replace(
                        weight,
                        kind=LoadKind.UNSUPPORTED,
                        reason=f"layer {owned.module} is packed: {reasons[owned.module]}",
                    )


def _tied_names(
    live: LiveModel, weights: Mapping[str, DiscoveredWeight], tied_output: bool
) -> Iterable[str]:
    claimed = {storage_key(copy.target) for weight in weights.values() for copy in weight.copies}
    parameters = dict(live.model.named_parameters(remove_duplicate=False))
    for name, weight in weights.items():
        if weight.kind is not LoadKind.SKIP:
            continue
        parameter = parameters.get(name)
        if (parameter is not None and storage_key(parameter) in claimed) or (
            tied_output and fnmatch.fnmatch(name, "*lm_head.weight")
        ):
            yield name


def _uncovered(live: LiveModel, weights: Mapping[str, DiscoveredWeight]) -> Iterable[str]:
    reached = {storage_key(copy.target) for weight in weights.values() for copy in weight.copies}
    for name, parameter in live.model.named_parameters():
        if parameter.numel() and storage_key(parameter) not in reached:
            yield name
