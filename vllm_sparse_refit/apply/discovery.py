"""Find out, without writing anything, how a model's native loader treats each canonical tensor."""

import bisect
import fnmatch
import functools
import itertools
import logging
import math
import mmap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from vllm_sparse_refit.apply.elementwise import is_elementwise, load_test_values
from vllm_sparse_refit.apply.live_model import LiveModel
from vllm_sparse_refit.apply.load_mode import LoaderCopy, LoaderWeight, LoadKind
from vllm_sparse_refit.apply.placement import Box, boxes_overlap
from vllm_sparse_refit.apply.processing import PackedLayer
from vllm_sparse_refit.apply.storage import storage_key
from vllm_sparse_refit.codec.dtypes import bits_view
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

    @property
    def numel(self) -> int:
        """Elements of the whole canonical tensor."""
        return math.prod(self.shape)

    @functools.cached_property
    def sources(self) -> tuple[Box, ...]:
        """Where in the canonical tensor each of its plain copies takes its elements from."""
        return tuple(copy.boxes.source.normalized for copy in self.copies if copy.boxes is not None)

    @functools.cached_property
    def is_whole(self) -> bool:
        """Whether plain copies bring all elements here, each from one box of the canonical tensor."""
        boxes = set(self.sources)
        return sum(box.numel for box in boxes) == self.numel and not any(
            boxes_overlap(*pair) for pair in itertools.combinations(boxes, 2)
        )


@dataclass(frozen=True, eq=False)
class Discovery:
    """What one rank found out about the canonical tensors that the trainer announced.

    Attributes:
        weights: by canonical name, in the trainer's order.
        tied: names that the loader skips because they share a parameter with another name whose values
            it takes (tied embeddings), and that name; empty where the engine has no such parameter at
            all.
        aliases: groups of names that are one parameter here, the one that is written first: claimed
            names that land on exactly the same elements, and names tied to one of them.
        streaming: whether the loader uses each tensor before it asks for the next one, so that many
            can go through one call.
        uncovered: this rank's parameters that no canonical tensor reaches.
        packed: the layers whose processed weights an update would not reach; with any, the whole
            model is refused.
    """

    weights: Mapping[str, DiscoveredWeight]
    tied: Mapping[str, str]
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

    @property
    def narrowed(self) -> dict[str, torch.dtype]:
        """The dtype of this rank's parameters by name, of tensors that only lose bits in a cast to it."""
        return {
            name: weight.copies[0].target.dtype
            for name, weight in self.weights.items()
            if weight.copies
            and all(c.is_cast for c in weight.copies)
            and weight.copies[0].target.dtype.itemsize < weight.dtype.itemsize
        }


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
    _refuse_unlike_aliases(live, weights, aliases)
    _mark_packed(live, weights, packed)
    tied = dict(_tied_names(live, weights, tied_output))
    return Discovery(
        weights=weights,
        tied=tied,
        aliases=_joined_groups(aliases, tied),
        streaming=probes.streaming,
        uncovered=tuple(_uncovered(live, weights)),
        packed=tuple(packed),
    )


# --- observing ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Probe:
    """What the loader did with one stand-in."""

    copies: tuple[LoaderCopy, ...] = ()
    error: str = ""


_ERASED = "the model's loader sets what it copied of it to zero afterwards"


@dataclass(frozen=True, eq=False)
class _Probes:
    results: Mapping[str, _Probe]
    streaming: bool


class _Recorder:
    """Collects the loader's copies by canonical name, and notices when they come out of turn.

    ``used`` collects the keys of the storages that the loader reads, ``erased`` the names of which it sets
    to zero what it has just copied.
    """

    def __init__(self) -> None:
        self.copies: dict[str, list[LoaderCopy]] = {}
        self.erased: set[str] = set()
        self._copied: dict[int, list[tuple[str, Box]]] = {}
        self.used: set[int] = set()
        self._owner: dict[int, str] = {}
        self.in_turn = True

    def announce(self, weight: LoaderWeight) -> None:
        self._owner[storage_key(weight.source)] = weight.name

    def used_names(self) -> set[str]:
        return {name for key, name in self._owner.items() if key in self.used}

    def copy(self, weight: LoaderWeight, copy: LoaderCopy) -> None:
        assert copy.source is not None
        # A copy straight from another stand-in means that the loader collected before it copied.
        owner = self._owner.get(storage_key(copy.source), weight.name)
        self.in_turn &= owner == weight.name
        self.copies.setdefault(weight.name, []).append(replace(copy, source=None))
        entry = (weight.name, copy.target_box)
        self._copied.setdefault(copy.storage_key, []).append(entry)

    def zeros(self, target: torch.Tensor) -> None:
        copied = self._copied.get(storage_key(target), ())
        box = Box.of(target)
        self.erased.update(name for name, other in copied if boxes_overlap(other, box))


def stand_in(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A zero tensor that takes no memory until something is written to it."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < mmap.PAGESIZE:
        return torch.zeros(shape, dtype=dtype)
    # Private anonymous pages read as zeros and become resident only when written.
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).reshape(shape)


def _observe(live: LiveModel, state_dict_info: Mapping[str, TensorInfo]) -> _Probes:
    """Probe everything in one loader call, or one call per tensor where that is not exact."""
    recorder, changed = _Recorder(), list[str]()
    weights = [LoaderWeight(n, stand_in(*info)) for n, info in state_dict_info.items()]
    for weight in weights:
        recorder.announce(weight)
    try:
        with live.guarded(changed):
            loaded = live.load(weights, recorder, recorder.used)
    except Exception as error:  # a loader may raise anything; the single calls tell for what
        logger.debug("the loader raised during discovery, probing tensor by tensor", exc_info=error)
        return _observe_each(live, state_dict_info, recorder.used_names())
    results = {
        n: _Probe(tuple(recorder.copies.get(n, ())), _ERASED if n in recorder.erased else "")
        for n in state_dict_info
    }
    silent = {n: state_dict_info[n] for n, probe in results.items() if not probe.copies}
    used = recorder.used_names()
    # A tensor that is neither read nor claimed is skipped. That is not asked of the loader with the
    # tensor alone: it may insist on what it skips being given together with what it is tied to.
    suspicious = bool(used & silent.keys()) or _claims_too_much(live, loaded, results)
    singly = _observe_each(live, silent, used).results if suspicious else {}
    if changed or not recorder.in_turn or any(probe.copies for probe in singly.values()):
        return _observe_each(live, state_dict_info, used)
    return _Probes({**results, **singly}, streaming=True)


def _claims_too_much(
    live: LiveModel, loaded: set[str] | None, results: Mapping[str, _Probe]
) -> bool:
    """Whether the loader reports a parameter as loaded that it copied nothing into."""
    reached = {copy.storage_key for probe in results.values() for copy in probe.copies}
    holders = {owned.full_name: owned.tensor for owned in live.tensors()}
    return any(
        name not in holders or (holders[name].numel() and storage_key(holders[name]) not in reached)
        for name in loaded or ()
    )


def _observe_each(
    live: LiveModel, state_dict_info: Mapping[str, TensorInfo], used: Collection[str]
) -> _Probes:
    """Probe tensor by tensor; ``used`` are the names that the loader read among others."""
    results = {n: _observe_one(live, n, i, n in used) for n, i in state_dict_info.items()}
    return _Probes(results, streaming=False)


def _observe_one(live: LiveModel, name: str, info: TensorInfo, used: bool = False) -> _Probe:
    recorder, changed = _Recorder(), list[str]()
    weight = LoaderWeight(name, stand_in(*info))
    recorder.announce(weight)
    loaded: set[str] | None = None
    error = ""
    try:
        with live.guarded(changed):
            loaded = live.load([weight], recorder, recorder.used)
    except RefitError as refused:
        error = str(refused)
    except Exception as raised:  # the loader's own
        error = f"the model's loader raised {type(raised).__name__}: {raised}"
    if changed and not error:
        error = f"the model's loader replaces {', '.join(changed[:3])} instead of copying into it"
    copies = tuple(recorder.copies.get(name, ()))
    if name in recorder.erased and not error:
        error = _ERASED
    if not copies and not error:
        # A loader may report parameters of another pipeline stage, which this rank does not have.
        claimed = any(owned.full_name in (loaded or ()) for owned in live.tensors())
        error = _why_no_skip(claimed, used or name in recorder.used_names())
    return _Probe(copies, error)


def _why_no_skip(claimed: bool, used: bool) -> str:
    """Why a tensor of which nothing is copied cannot count as skipped; empty when it can."""
    if claimed:
        return "the model's loader reports it as loaded but copies nothing of it into a parameter"
    if used:
        return (
            "the model's loader reads it but, given it alone, copies nothing of it into a "
            "parameter; it may combine it with other tensors"
        )
    return ""


# --- classifying ----------------------------------------------------------------------------------


def _classify(live: LiveModel, name: str, info: TensorInfo, probe: _Probe) -> DiscoveredWeight:
    shape, dtype = info
    kind, reason = _kind(live, name, info, probe)
    return DiscoveredWeight(name, shape, dtype, kind, probe.copies, reason)


def _kind(live: LiveModel, name: str, info: TensorInfo, probe: _Probe) -> tuple[LoadKind, str]:
    if probe.error or not probe.copies:
        return LoadKind.UNSUPPORTED if probe.error else LoadKind.SKIP, probe.error
    overlapping = _overlapping(probe.copies)
    plain = all(c.boxes is not None and c.boxes.source.is_injective for c in probe.copies)
    if plain and not overlapping:
        return LoadKind.VIEW, ""
    if not overlapping and all(copy.is_cast for copy in probe.copies):
        # torch converts each element by itself, and NaN to NaN.
        return LoadKind.TRANSFORM, ""
    alone = _observe_one(live, name, info)
    if alone.error or _targets(alone.copies) != _targets(probe.copies):
        reason = "given it alone, the model's loader does not write what it writes among others"
        return LoadKind.UNSUPPORTED, alone.error or reason
    try:
        elementwise = not overlapping and is_elementwise(live, name, *info)
    except Exception as raised:  # the loader's own, for values other than zeros
        return LoadKind.UNSUPPORTED, f"the model's loader raised {type(raised).__name__}: {raised}"
    return LoadKind.TRANSFORM if elementwise else LoadKind.DENSE, ""


def _targets(copies: Iterable[LoaderCopy]) -> list[tuple[int, Box]]:
    return [(copy.storage_key, copy.target_box) for copy in copies]


def _overlapping(copies: Iterable[LoaderCopy]) -> bool:
    """Whether one element of a parameter is written twice."""
    by_storage: dict[int, list[Box]] = {}
    for copy in copies:
        by_storage.setdefault(copy.storage_key, []).append(copy.target_box)
    return any(
        not box.is_injective or any(boxes_overlap(box, other) for other in boxes[i + 1 :])
        for boxes in by_storage.values()
        for i, box in enumerate(boxes)
    )


def _mark_shared_targets(weights: dict[str, DiscoveredWeight]) -> tuple[tuple[str, ...], ...]:
    """Group names with identical targets; those that share only some elements are unsupported."""
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


def _refuse_unlike_aliases(
    live: LiveModel, weights: dict[str, DiscoveredWeight], aliases: Iterable[tuple[str, ...]]
) -> None:
    """Refuse names that share all their targets if the loader transforms them differently."""
    for group in aliases:
        first = weights[group[0]]
        if first.kind not in (LoadKind.TRANSFORM, LoadKind.DENSE):
            continue
        expected = load_test_values(live, first.name, first.shape, first.dtype)
        for name in group[1:]:
            found = load_test_values(live, name, first.shape, first.dtype)
            if all(map(torch.equal, map(bits_view, found), map(bits_view, expected))):
                continue
            for one, other in ((name, first.name), (first.name, name)):
                weights[one] = replace(
                    weights[one],
                    kind=LoadKind.UNSUPPORTED,
                    reason=f"it shares its elements with {other} but is transformed differently",
                )


def _target_identity(weight: DiscoveredWeight) -> tuple[object, ...]:
    """Equal for two names when the same source elements land on the same target elements."""
    return (
        weight.shape,
        weight.dtype,
        weight.kind,
        *((copy.storage_key, copy.target_box, copy.boxes) for copy in weight.copies),
    )


def _partial_overlaps(
    names: Iterable[str], weights: Mapping[str, DiscoveredWeight]
) -> list[tuple[str, str]]:
    by_storage: dict[int, list[tuple[Box, str]]] = {}
    for name in names:
        for copy in weights[name].copies:
            by_storage.setdefault(copy.storage_key, []).append((copy.target_box, name))
    found: list[tuple[str, str]] = []
    for boxes in by_storage.values():
        boxes.sort(key=lambda entry: entry[0].offset)
        for i, (box, name) in enumerate(boxes):
            stop = bisect.bisect_left(boxes, box.end, key=lambda entry: entry[0].offset)
            nearby = boxes[i + 1 : stop]
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
            for owned in holders.get(copy.storage_key, []):
                if owned.module in reasons:
                    weights[name] = replace(
                        weight,
                        kind=LoadKind.UNSUPPORTED,
                        reason=f"layer {owned.module} is packed: {reasons[owned.module]}",
                    )


def _tied_names(
    live: LiveModel, weights: Mapping[str, DiscoveredWeight], tied_output: bool
) -> Iterable[tuple[str, str]]:
    """Skipped names and the claimed name whose parameter they are."""
    parameters = dict(live.model.named_parameters(remove_duplicate=False))
    claimed = {
        (copy.storage_key, weight.shape): name
        for name, weight in weights.items()
        for copy in weight.copies
    }
    for name, weight in weights.items():
        if weight.kind is not LoadKind.SKIP:
            continue
        parameter = parameters.get(name)
        key = None if parameter is None else (storage_key(parameter), weight.shape)
        if key in claimed:
            yield name, claimed[key]
        elif tied_output and fnmatch.fnmatch(name, "*lm_head.weight"):
            yield name, ""


def _joined_groups(
    aliases: Iterable[tuple[str, ...]], tied: Mapping[str, str]
) -> tuple[tuple[str, ...], ...]:
    groups = {group[0]: list(group) for group in aliases}
    first_of = {name: first for first, names in groups.items() for name in names}
    for name, partner in tied.items():
        if partner:
            first = first_of.get(partner, partner)
            groups.setdefault(first, [first]).append(name)
    return tuple(tuple(names) for names in groups.values())


def _uncovered(live: LiveModel, weights: Mapping[str, DiscoveredWeight]) -> Iterable[str]:
    reached = {copy.storage_key for weight in weights.values() for copy in weight.copies}
    for name, parameter in live.model.named_parameters():
        if parameter.numel() and storage_key(parameter) not in reached:
            yield name
