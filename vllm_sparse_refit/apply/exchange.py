"""What has to be put right again after a layer was processed on the side, and what can be undone later."""

from collections.abc import MutableMapping
from typing import Any

import torch

from vllm_sparse_refit.apply.slots import SlotId, SlotStates, same_bits
from vllm_sparse_refit.apply.storage import ViewKey, storage_key, view_key


class TensorData:
    """Tensor objects whose ``.data`` was exchanged for a while."""

    def __init__(self) -> None:
        self._saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def set(self, tensor: torch.Tensor, data: torch.Tensor) -> None:
        self._saved.setdefault(id(tensor), (tensor, tensor.detach()))
        tensor.data = data

    def restore(self) -> None:
        for tensor, data in self._saved.values():
            tensor.data = data


class WorkingCopies:
    """Copies of tensors, one of each storage, so that views of one storage stay views of one."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.Tensor] = {}

    def of(self, data: torch.Tensor, device: torch.device) -> torch.Tensor:
        if data.numel() == 0:
            return data.clone().to(device)
        key = storage_key(data)
        if key not in self._storages:
            elements = data.untyped_storage().nbytes() // data.element_size()
            self._storages[key] = data.as_strided((elements,), (1,), 0).to(device, copy=True)
        flat = self._storages[key]
        if flat.dtype != data.dtype:
            flat = flat.view(torch.uint8).view(data.dtype)
        return flat.as_strided(data.shape, data.stride(), data.storage_offset())


class Backups:
    """Copies of tensors that are about to be used as they are."""

    def __init__(self) -> None:
        self._saved: dict[SlotId, tuple[torch.Tensor, torch.Tensor]] = {}
        self._copies: dict[ViewKey, torch.Tensor] = {}

    def add(self, slot: SlotId, data: torch.Tensor) -> None:
        key = view_key(data)
        if key not in self._copies:
            self._copies[key] = data.clone()
        self._saved[slot] = (data, self._copies[key])

    def restore(self, now: SlotStates) -> tuple[SlotId, ...]:
        """Give changed tensors their elements back; returns the slots of those, and of moved ones."""
        changed: list[SlotId] = []
        for slot, (data, copy) in self._saved.items():
            state = now.get(slot)
            moved = (
                state is not None
                and state.data is not None
                and view_key(state.data) != view_key(data)
            )
            if not same_bits(data, copy):
                data.copy_(copy)
                moved = True
            if moved:
                changed.append(slot)
        return tuple(changed)


class Swaps:
    """A log of objects put into slots, that can be undone."""

    def __init__(self) -> None:
        self._log: list[tuple[MutableMapping[str, Any], str, Any, Any]] = []
        self._owned: dict[tuple[int, str], Any] = {}

    def __len__(self) -> int:
        return len(self._log)

    def set(self, registry: MutableMapping[str, Any], name: str, value: Any, owned: Any) -> None:
        """Put ``value`` into a slot; ``owned`` is kept as long as it stays there."""
        key = id(registry), name
        self._log.append((registry, name, registry[name], self._owned.get(key)))
        registry[name] = value
        self._owned[key] = owned

    def undo(self, mark: int) -> None:
        while len(self._log) > mark:
            registry, name, value, owned = self._log[-1]
            registry[name] = value
            self._owned[id(registry), name] = owned
            self._log.pop()

    def release(self) -> None:
        self._log.clear()
