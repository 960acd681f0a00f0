"""Packed layers: their weights as the native loader writes them, and how to process these again.

A packed layer's parameters no longer have the layout that the native loader writes. Its *shadow* is what the
layer held before its post-load processing, in host memory. A commit writes deltas into the shadow, has vLLM
process the touched layers again as if for the first time, and writes the results into the tensors in use,
whose addresses stay. Only elements that differ are written, through the same undo log as everything else.
"""

import logging
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from vllm_sparse_refit.apply.exchange import Backups, Swaps, TensorData, WorkingCopies
from vllm_sparse_refit.apply.reloading import shadow_parameters, taking_over
from vllm_sparse_refit.apply.slots import (
    Equivalence,
    Held,
    SlotId,
    SlotStates,
    capture,
    held,
    is_changed,
    is_of_new_helper,
    same_bits,
    storages,
)
from vllm_sparse_refit.apply.steps import LayerGroup, Process, WalkedModel
from vllm_sparse_refit.apply.storage import storage_key, view_key
from vllm_sparse_refit.apply.writer import WeightWriter
from vllm_sparse_refit.codec.dtypes import bits_view
from vllm_sparse_refit.errors import TransactionError, UnsupportedModelError

logger = logging.getLogger(__name__)

Context = Callable[[], AbstractContextManager[object]]

Pair = tuple[torch.Tensor, torch.Tensor]


class PackedLayers:
    """The packed layers of one model that can be processed again. One owner; not thread-safe.

    Args:
        model: the observed model.
        groups: what has to be processed together.
        process: vLLM's processing, for the model or a stand-in that lists some of its modules.

    Attributes:
        context: makes the context in which processing runs.
        numbers_may_change: whether a plain number that processing derives may be replaced; not where
            compiled code may have it as a constant.
    """

    def __init__(
        self, model: torch.nn.Module, groups: Sequence[LayerGroup], process: Process
    ) -> None:
        self._model = model
        self._groups = list(groups)
        self._process = process
        self._swaps = Swaps()
        self._checked: dict[str, str] | None = None
        self._stale = ""
        self.context: Context = nullcontext
        self.numbers_may_change = True
        self._devices: dict[SlotId, torch.device] = {}
        for group in groups:
            self._devices |= _move_to_host(group)

    @property
    def nbytes(self) -> int:
        """Host memory that the shadows take beyond what the model uses, in bytes."""
        live = storages(s for group in self._groups for s in group.after.values())
        kept: dict[int, int] = {}
        for group in self._groups:
            for state in group.before.values():
                if state is not None and state.data is not None and state.data.numel():
                    kept[storage_key(state.data)] = state.data.untyped_storage().nbytes()
        return sum(size for key, size in kept.items() if key not in live)

    def __len__(self) -> int:
        return sum(len(group.modules) for group in self._groups)

    def sources(self) -> set[int]:
        """The keys of the storages that make a layer be processed again when they are written."""
        return set().union(*(_sources(group) for group in self._groups))

    @contextmanager
    def replaced(self, by: str) -> Iterator[None]:
        """Follow ``by``, by which vLLM replaces the model's weights while the context is open.

        What passes through vLLM's layer-wise reload is taken over, and the layers are then processed from
        it, as they would be in a fresh engine; vLLM's own second pass leaves some of them unpacked. The
        layers count as stale from then on if something went another way.
        """
        self._stale = by
        with taking_over(self._groups) as taken:
            yield
        kept = {slot for group in self._groups for slot, _ in shadow_parameters(group)}
        if kept != taken:
            return
        try:
            for group in self._groups:
                self._check_unmoved(group)
                self._update(group, self._run(group), WeightWriter(0))
        except Exception as error:  # an RPC of vLLM's must not raise for this
            logger.warning("packed layers could not follow %s", by, exc_info=error)
            return
        self._swaps.release()
        self._stale = ""

    def check_usable(self) -> None:
        """Check that the shadows are the weights that the layers were made of.

        Raises:
            UnsupportedModelError: they are not; says which layers.
        """
        if self._groups and self._stale:
            raise UnsupportedModelError(
                f"{self._stale} replaced the weights of packed layers ({self._groups[0].name} and others), "
                "of which this worker keeps the earlier ones as they were loaded; start the engine again "
                "from the weights that it should hold"
            )

    def drop(self) -> None:
        """Give the shadows up."""
        self._groups.clear()
        self._swaps.release()

    # --- the layout that the native loader writes -------------------------------------------------

    @contextmanager
    def loader_state(self) -> Iterator[None]:
        """Have every packed layer as it was before its processing, its parameters the shadow.

        Writes to a parameter go to the shadow meanwhile. Nothing may run the model.
        """
        live = [
            (slot, registry, registry.get(slot.name, _ABSENT))
            for group in self._groups
            for slot in group.before
            for registry in (_registry(slot, group),)
        ]
        tensors = TensorData()
        try:
            for group in self._groups:
                for slot, state in group.before.items():
                    if state is not None and state.data is not None:
                        tensors.set(state.value, state.data)
                    _put(slot, state, group)
            yield
        finally:
            tensors.restore()
            for slot, registry, value in live:
                if value is _ABSENT:
                    registry.pop(slot.name, None)
                else:
                    registry[slot.name] = value

    # --- processing again -------------------------------------------------------------------------

    def reprocess(self, written: Collection[int], writer: WeightWriter) -> None:
        """Bring the layers up to date that depend on the storages with the keys ``written``.

        Raises:
            UnsupportedModelError: processing does something else than it did at loading. The caller
                rolls ``writer`` back and calls :meth:`undo`.
        """
        for group in self._groups:
            if not _sources(group).isdisjoint(written):
                self._check_unmoved(group)
                self._update(group, self._run(group), writer)

    def check(self) -> dict[str, str]:
        """Process every layer again without a change, and compare with what is in use.

        Returns:
            Why not, by module, for the layers for which this does not give the same bits; they are
            given up. The result is remembered.
        """
        if self._checked is None:
            self._checked = {}
            for group in self._groups:
                if reason := self._why_unlike(group):
                    self._checked |= dict.fromkeys((n for n, _ in group.modules), reason)
        return self._checked

    def unlike(self) -> dict[str, str]:
        """As :meth:`check`, for what is in use now; nothing is given up, and nothing remembered."""
        return {g.name: reason for g in self._groups if (reason := self._why_unlike(g))}

    def _why_unlike(self, group: LayerGroup) -> str:
        try:
            self._check_unmoved(group)
            outcome = self._run(group)
        except Exception as error:  # vLLM's own
            return f"processing it again raised {type(error).__name__}: {error}"
        if outcome.changed_inputs:
            return f"processing it again changes {outcome.changed_inputs[0]}"
        for slot, (live, fresh) in outcome.pairs.items():
            if live.shape != fresh.shape or live.dtype != fresh.dtype or not same_bits(live, fresh):
                return f"processing it again does not give the same {slot}"
        return next((why for s in outcome.others if (why := self._why_fixed(outcome, s))), "")

    def _run(self, group: LayerGroup) -> "_Outcome":
        """Process ``group`` as if for the first time, and put everything back.

        The shadow is processed in a copy. Tensors that processing left alone at loading are used as they
        are, since what it makes may point to them; should it change one now, it is put right again.
        """
        territory = group.territory
        live = capture(territory, like=group.after)
        tensors, working, inputs = TensorData(), WorkingCopies(), Backups()
        fresh: SlotStates = {}
        try:
            for slot, state in live.items():
                if _is_input(slot, state, group):
                    assert state.data is not None
                    tensors.set(state.value, state.data)
                    inputs.add(slot, state.data)
            for slot, before in group.before.items():
                if before is not None and before.data is not None:
                    tensors.set(before.value, working.of(before.data, self._devices[slot]))
                _put(slot, before, group)
            with self.context(), torch.no_grad():
                self._process(WalkedModel(self._model, group.modules, hook=group.has_hook))
            fresh = capture(territory, like=live)
        finally:
            now = fresh or capture(territory, like=live)
            changed = inputs.restore(now)
            tensors.restore()
            _restore(live, now)
        return _outcome(live, fresh, group, changed)

    def _update(self, group: LayerGroup, outcome: "_Outcome", writer: WeightWriter) -> None:
        if outcome.changed_inputs:
            raise UnsupportedModelError(
                f"processing {group.name} again changes {outcome.changed_inputs[0]}, which it left alone at "
                "loading; nothing was changed"
            )
        for slot, (live, fresh) in outcome.pairs.items():
            if live.shape != fresh.shape or live.dtype != fresh.dtype:
                raise UnsupportedModelError(
                    f"processing {group.name} again gives {slot} another shape or dtype than at loading; "
                    "nothing was changed"
                )
            positions, bits = _differences(live, fresh)
            if positions.numel():
                # Derived elements may have been written by an earlier update of the same transfer.
                writer.supersede(live, positions)
                writer.overwrite(live, positions, bits)
        # What an object made anew points to, without owning it, must stay as long as the object.
        owned = [fresh for _, fresh in outcome.pairs.values()]
        for slot in outcome.others:
            if outcome.can_stay(slot):
                continue
            if reason := self._why_fixed(outcome, slot):
                raise UnsupportedModelError(f"{group.name}: {reason}; nothing was changed")
            registry, value = outcome.replacement(slot)
            self._swaps.set(registry, slot.name, value, owned)

    def _why_fixed(self, outcome: "_Outcome", slot: SlotId) -> str:
        """Why a slot cannot get what processing made; empty when it can."""
        if outcome.can_stay(slot):
            return ""
        if slot not in outcome.fresh or slot not in outcome.live:
            return f"processing it again does not leave the same {slot} as loading did"
        values = outcome.live[slot].value, outcome.fresh[slot].value
        if not self.numbers_may_change and all(isinstance(v, int | float) for v in values):
            return (
                f"{slot} is a number made from weights, which compiled code may have as a constant"
            )
        devices = {pair[0].device.type for pair in outcome.pairs.values()}
        if devices - {"cpu"}:
            return (
                f"{slot} is made anew by its processing, where captured graphs may use the old one"
            )
        return ""

    def _check_unmoved(self, group: LayerGroup) -> None:
        live = capture(group.territory)
        for slot in group.before:
            expected, found = group.after.get(slot), live.get(slot)
            if expected is None or expected.data is None:
                continue
            if (
                found is None
                or found.data is None
                or view_key(found.data) != view_key(expected.data)
            ):
                raise TransactionError(
                    f"{slot} has moved since the model was loaded (a reload, or sleep); start the engine "
                    "again with the weights that it should hold"
                )

    # --- taking swapped objects back --------------------------------------------------------------

    def mark(self) -> int:
        """Where the log of swapped objects stands now, for :meth:`undo`."""
        return len(self._swaps)

    def undo(self, mark: int = 0) -> None:
        """Put the objects back that were swapped since ``mark``, newest first."""
        self._swaps.undo(mark)

    def release(self) -> None:
        """Forget how to undo."""
        self._swaps.release()


@dataclass(frozen=True, eq=False)
class _Outcome:
    """What processing again made, and what is in use.

    Attributes:
        pairs: tensors in use and fresh ones, by slot.
        others: slots that hold another object, or nothing, afterwards.
        changed_inputs: tensors that were no results at loading and that processing changed.
    """

    live: SlotStates
    fresh: SlotStates
    pairs: dict[SlotId, Pair]
    others: tuple[SlotId, ...]
    changed_inputs: tuple[SlotId, ...]

    def can_stay(self, slot: SlotId) -> bool:
        """Whether the object in use is as good as the fresh one once the pairs are written."""
        live, fresh = self.live.get(slot), self.fresh.get(slot)
        if live is None or fresh is None:
            return False
        return Equivalence(self.pairs.values()).holds(live.value, fresh.value)

    def replacement(self, slot: SlotId) -> tuple[MutableMapping[str, Any], Any]:
        return self.live[slot].registry, self.fresh[slot].value


def _outcome(
    live: SlotStates, fresh: SlotStates, group: LayerGroup, changed_inputs: tuple[SlotId, ...]
) -> _Outcome:
    pairs: dict[SlotId, Pair] = {}
    others: list[SlotId] = []
    for slot in live.keys() | fresh.keys():
        old, new = live.get(slot), fresh.get(slot)
        if old is not None and new is not None:
            if old.registry is not new.registry:
                continue  # of a helper object that was itself made anew
            if _is_input(slot, old, group) and old.value is new.value:
                continue
            if slot in group.before and old.data is not None and new.data is not None:
                pairs[slot] = (old.data, new.data)
                continue
        elif is_of_new_helper(slot, live, fresh):
            continue
        if is_changed(old, new):
            others.append(slot)
    return _Outcome(live, fresh, pairs, tuple(others), changed_inputs)


def _is_input(slot: SlotId, state: Held, group: LayerGroup) -> bool:
    """Whether a tensor was there at loading and was left alone by processing."""
    if state.data is None or not _was_left_alone(slot, group):
        return False
    return group.after[slot].value is state.value


def _was_left_alone(slot: SlotId, group: LayerGroup) -> bool:
    made = slot in group.before or any(holder in group.before for holder in slot.holders())
    return slot in group.after and not made


def _sources(group: LayerGroup) -> set[int]:
    """The storages that the layers' processed state depends on."""
    before = [state for state in group.before.values() if state is not None]
    inputs = [state for slot, state in group.after.items() if _was_left_alone(slot, group)]
    return storages([*before, *inputs]) | group.reads


def _differences(live: torch.Tensor, fresh: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat positions in the storage of ``live`` (int64) where ``fresh`` has other bits, and those."""
    new_bits = bits_view(fresh.to(live.device))
    different = bits_view(live) != new_bits
    start = int(live.storage_offset())
    if live.is_contiguous():
        positions = torch.nonzero(different.reshape(-1)).squeeze(1)
        return positions + start, new_bits.reshape(-1)[positions]
    coordinates = torch.nonzero(different)
    strides = torch.tensor(live.stride(), device=coordinates.device)
    return coordinates @ strides + start, new_bits[different]


# --- putting things into slots --------------------------------------------------------------------


def _registry(slot: SlotId, group: LayerGroup) -> MutableMapping[str, Any]:
    state = group.before.get(slot) or group.after[slot]
    return state.registry


_ABSENT = object()


def _put(slot: SlotId, state: Held | None, group: LayerGroup) -> None:
    if state is None:
        _registry(slot, group).pop(slot.name, None)
    else:
        state.registry[slot.name] = state.original


def _restore(live: SlotStates, now: SlotStates) -> None:
    """Give every slot back what it held, and every container its contents."""
    for slot, state in now.items():
        if slot not in live and not is_of_new_helper(slot, live, now):
            state.registry.pop(slot.name, None)
    for slot, state in live.items():
        if state.registry.get(slot.name, state) is not state.value:
            state.registry[slot.name] = state.value
        if state.contents is not None and is_changed(state, held(state.registry, slot.name)):
            _refill(state.value, state.contents)


def _refill(container: Any, contents: Any) -> None:
    if isinstance(container, list):
        container[:] = contents
    else:
        container.clear()
        container.update(contents)


def _move_to_host(group: LayerGroup) -> dict[SlotId, torch.device]:
    """Keep the shadows in host memory and only there; returns where they were."""
    in_use = {id(state.value) for state in group.after.values()}
    devices: dict[SlotId, torch.device] = {}
    for slot, state in group.before.items():
        if state is None or state.data is None:
            continue
        devices[slot] = state.data.device
        data = state.data.cpu()
        group.before[slot] = Held(state.registry, state.value, data, state.contents)
        if id(state.value) not in in_use:
            state.value.data = data
    return devices
