"""Canonical sparse updates through vLLM's own weight loaders."""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_sparse_refit.apply.discovery import Discovery, TensorInfo, discover
from vllm_sparse_refit.apply.elementwise import (
    is_nan_marked,
    loaded_value,
    sentinel_bits,
    unchanged_mask,
)
from vllm_sparse_refit.apply.live_model import LiveModel
from vllm_sparse_refit.apply.load_mode import LoaderCopy, LoaderWeight, LoadKind
from vllm_sparse_refit.apply.placement import place
from vllm_sparse_refit.apply.processing import PackedLayer, storage_key
from vllm_sparse_refit.apply.writer import WeightWriter, storage_bits
from vllm_sparse_refit.codec.delta import SparseOperation, TensorDelta
from vllm_sparse_refit.codec.dtypes import bits_dtype, bits_view, dtype_name
from vllm_sparse_refit.codec.payload import DecodeLimits, decode_payload
from vllm_sparse_refit.errors import (
    PayloadError,
    RefitError,
    TensorMismatchError,
    TransactionError,
    UnsupportedModelError,
    VerificationError,
)

DEFAULT_SAMPLES = 64

Samples = Mapping[str, tuple[Sequence[int], Sequence[int]]]

DeltasByName = Mapping[str, Sequence[TensorDelta]]


class VllmSparseDeltaApplier:
    """Apply canonical sparse updates to the model of one worker; all placement is vLLM's.

    Owned by the worker's main thread. :meth:`check_delta` alone may be called from other threads,
    after :meth:`discover_native_skips`; it reads only what discovery left.

    Args:
        model_runner: vLLM's model runner; the model is reached through its ``get_model()``.
        device: where the model's parameters are.
        limits: bounds of payloads handed to :meth:`update_weights_from_decoded_sparse_payload`.
        packed: the layers that post-load processing packed, or None when the loading was not
            observed.
        sample_limit: changed elements read back per write by :meth:`finish_sparse_delta_refit`.
    """

    def __init__(
        self,
        model_runner: Any,
        device: torch.device,
        *,
        limits: DecodeLimits,
        packed: Sequence[PackedLayer] | None,
        sample_limit: int = DEFAULT_SAMPLES,
    ) -> None:
        self._model_runner = model_runner
        self._device = device
        self._packed = packed
        self.sample_limit = sample_limit
        self._limits = limits
        self._discovery: Discovery | None = None
        self._writer: WeightWriter | None = None

    # --- discovery --------------------------------------------------------------------------------

    def discover_native_skips(self, state_dict_info: Mapping[str, TensorInfo]) -> set[str]:
        """Classify every canonical tensor by what this rank's native loader does with it.

        Writes nothing. The full result is in :attr:`discovery` afterwards.

        Args:
            state_dict_info: shape and dtype by checkpoint name, full and unsharded.

        Returns:
            The names of which nothing lands on this rank.

        Raises:
            UnsupportedModelError: nothing about this model can be updated exactly.
        """
        if self._writer is not None:
            raise TransactionError(
                "discovery was asked for while an update waits to be finished or rolled back; "
                "finish it first"
            )
        if self._packed is None:
            raise UnsupportedModelError(
                "the loading of this model was not observed, so packed layers cannot be told from "
                "plain ones; load it with a load_format that goes through vLLM's base loader "
                "(auto, safetensors, dummy)"
            )
        if draft := _draft_model(self._model_runner):
            raise UnsupportedModelError(
                f"the engine runs a draft model ({draft}), whose weights would go stale; "
                "start it without speculative decoding"
            )
        live = self._live_model()
        self._discovery = discover(
            live, state_dict_info, self._packed, tied_output=_ties_output(self._model_runner)
        )
        return set(self._discovery.names(LoadKind.SKIP))

    @property
    def is_discovered(self) -> bool:
        """Whether there was a discovery."""
        return self._discovery is not None

    @property
    def discovery(self) -> Discovery:
        """The latest discovery.

        Raises:
            TransactionError: there was none yet.
        """
        if self._discovery is None:
            raise TransactionError(
                "this worker does not know the trainer's tensors yet; call snapshot() on the "
                "WeightSynchronizer (or discover_native_skips) before sending updates"
            )
        return self._discovery

    def differing_samples(self, samples: Samples) -> tuple[int, dict[str, int]]:
        """Compare elements of the trainer's tensors with what the model holds.

        Only plain copies are compared; what a loader casts or transforms is not canonical here.

        Args:
            samples: by canonical name, ascending flat positions and the bits the trainer has there.

        Returns:
            How many elements this rank compared, and how many differ by canonical name.
        """
        compared, different = 0, dict[str, int]()
        for name, (locations, bits) in samples.items():
            weight = self.discovery.weights.get(name)
            if weight is None or weight.kind is not LoadKind.VIEW:
                continue
            expected = torch.tensor(bits, dtype=bits_dtype(weight.dtype))
            for copy in weight.copies:
                assert copy.boxes is not None
                selected, positions = place(copy.boxes, torch.tensor(locations, dtype=torch.int64))
                storage = storage_bits(copy.target)
                found = storage.index_select(0, positions.to(storage.device)).cpu()
                compared += positions.numel()
                if wrong := int((found != expected[selected]).sum()):
                    different[name] = different.get(name, 0) + wrong
        return compared, different

    def _live_model(self) -> LiveModel:
        return LiveModel(
            self._model_runner.get_model(), lambda: _vllm_load_context(self._model_runner)
        )

    # --- checks, before anything is written -------------------------------------------------------

    def check_model(self) -> None:
        """Check that discovery found nothing that makes every update of this model wrong.

        Raises:
            UnsupportedModelError: the model has packed layers.
        """
        if self.discovery.packed:
            layer = self.discovery.packed[0]
            raise UnsupportedModelError(f"layer {layer.module} is packed: {layer.reason}")

    def check_delta(self, delta: TensorDelta) -> bool:
        """Check one delta against discovery.

        Returns:
            Whether this rank has any use for it.

        Raises:
            TensorMismatchError: unknown name, or another shape or dtype.
            UnsupportedModelError: the tensor, or this operation on it, cannot be applied exactly.
        """
        weight = self.discovery.weights.get(delta.name)
        if weight is None:
            raise TensorMismatchError(
                f"{delta.name}: no such tensor was announced to this worker; "
                "call snapshot() again if the checkpoint's names changed"
            )
        if delta.shape != weight.shape or delta.dtype != weight.dtype:
            raise TensorMismatchError(
                f"{delta.name}: sent as {dtype_name(delta.dtype)}{list(delta.shape)}, but "
                f"announced as {dtype_name(weight.dtype)}{list(weight.shape)}"
            )
        if weight.kind is LoadKind.UNSUPPORTED:
            raise UnsupportedModelError(f"{delta.name}: {weight.reason}")
        if weight.kind is LoadKind.SKIP:
            # A tied tensor is not written, but must get the values of the one it is tied to.
            return bool(self.discovery.tied.get(delta.name))
        if weight.kind is not LoadKind.VIEW and delta.operation is SparseOperation.XOR:
            raise UnsupportedModelError(
                f"{delta.name}: the model's loader transforms it, so xor bits mean nothing here; "
                "send it as overwrite"
            )
        return True

    def check_transfer(self, deltas: DeltasByName) -> None:
        """Check all deltas of one update against each other.

        Raises:
            PayloadError: two deltas of one tensor speak for the same elements, or disagree on the
                operation.
            UnsupportedModelError: the model has packed layers, aliased tensors would get different
                bits, or a tensor that must be complete is not.
        """
        self.check_model()
        for name, parts in deltas.items():
            _check_spans(name, parts)
            if self.discovery.weights[name].kind in (LoadKind.DENSE, LoadKind.TRANSFORM):
                self._check_overwrite(name, parts)
        for group in self.discovery.aliases:
            _check_aliases(group, deltas)

    def _check_overwrite(self, name: str, parts: Sequence[TensorDelta]) -> None:
        if _is_complete(parts):
            return
        if self.discovery.weights[name].kind is LoadKind.DENSE:
            raise UnsupportedModelError(
                f"{name}: the model's loader mixes its elements, so all of them must be sent "
                "together"
            )
        if is_nan_marked(parts[0].dtype) and any(_has_nan(part) for part in parts):
            raise UnsupportedModelError(
                f"{name}: a sparse update holds a NaN, which the model's loader could not tell "
                "from an unchanged element; send all elements of the tensor"
            )

    # --- writing ----------------------------------------------------------------------------------

    def apply(self, deltas: DeltasByName) -> None:
        """Write a checked update into the model. Undone completely if anything raises.

        Further updates may follow; each element may be written once before :meth:`release` or
        :meth:`roll_back` ends them all. Must run in the worker's main thread, between engine steps.

        Raises:
            RefitError: with the tensor's name; every element is as it was before this call.
        """
        redundant = {name for group in self.discovery.aliases for name in group[1:]}
        # In the order of discovery, not of arrival: what was seen then is what the loader does now.
        names = [n for n in self.discovery.weights if n in deltas and n not in redundant]
        earlier, writer = self._writer, self._writer or WeightWriter(self.sample_limit)
        mark = writer.mark()
        # Before anything is written, so that an interrupt cannot lose the way back.
        self._writer = writer
        try:
            self._load(names, deltas, writer)
        except BaseException as error:
            writer.roll_back(mark)
            self.synchronize_device()
            self._writer = earlier
            if isinstance(error, RefitError) or not isinstance(error, Exception):
                raise
            raise TransactionError(
                f"the model's loader raised {type(error).__name__}: {error}; nothing was changed"
            ) from error

    def _load(self, names: Sequence[str], deltas: DeltasByName, writer: WeightWriter) -> None:
        """Write plain copies where discovery saw them go, and everything else through the loader."""
        live, sink = self._live_model(), _SparseWriter(writer)
        self._check_not_moved(live)
        transformed = []
        for name in names:
            weight = self.discovery.weights[name]
            if weight.kind is not LoadKind.VIEW:
                transformed.append(name)
                continue
            for copy in weight.copies:
                sink.scatter(copy, deltas[name])
        if transformed:
            self._load_natively(live, transformed, deltas, sink)

    def _check_not_moved(self, live: LiveModel) -> None:
        storages = live.watched_storages()
        for name, weight in self.discovery.weights.items():
            targets = [copy.target for copy in weight.copies if copy.target.numel()]
            if any(storage_key(target) not in storages for target in targets):
                raise TransactionError(
                    f"the parameter that {name} goes to has moved since discovery (a reload, or sleep); "
                    "call snapshot() again with the weights that the engines hold"
                )

    def _load_natively(
        self, live: LiveModel, names: Sequence[str], deltas: DeltasByName, sink: "_SparseWriter"
    ) -> None:
        changed: list[str] = []
        with live.guarded(changed):
            if self.discovery.streaming:
                live.load((_loader_weight(self.discovery, n, deltas[n]) for n in names), sink)
            else:
                for name in names:
                    live.load([_loader_weight(self.discovery, name, deltas[name])], sink)
        if changed:
            raise UnsupportedModelError(
                f"the model's loader replaced {', '.join(changed[:3])}, which it did not do at "
                "discovery; nothing was changed"
            )
        for name in names:
            expected = len(self.discovery.weights[name].copies)
            if (seen := sink.copies.get(name, 0)) != expected:
                raise UnsupportedModelError(
                    f"{name}: the model's loader made {seen} copies, but {expected} at discovery; "
                    "nothing was changed"
                )

    def reset_adapters(self) -> None:
        """Drop LoRA state that was derived from the base weights, as vLLM's own reload does."""
        reset = getattr(self._model_runner, "reset_lora_state", None)
        if reset is not None:
            reset()

    def synchronize_device(self) -> None:
        """Wait until the device has done all writes so far."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize()

    def finish_sparse_delta_refit(self) -> dict[str, Any]:
        """Synchronize and compare bounded samples of target entries just changed.

        Returns:
            ``{"elements_written", "samples_compared", "undo_bytes"}``.

        Raises:
            VerificationError: a sample does not hold the bits that were written; roll back then.
        """
        self.synchronize_device()
        if self._writer is None:
            return {"elements_written": 0, "samples_compared": 0, "undo_bytes": 0}
        compared, different = self._writer.verify()
        if different:
            raise VerificationError(
                f"{different} of {compared} sampled elements do not hold the bits written to them; "
                "something else writes to this model's weights"
            )
        return {
            "elements_written": self._writer.elements_written,
            "samples_compared": compared,
            "undo_bytes": self._writer.undo_bytes,
        }

    def release(self) -> None:
        """Keep the applied update for good: the undo log is dropped."""
        if self._writer is not None:
            self._writer.release()
            self._writer = None

    def roll_back(self) -> None:
        """Take all applied, unreleased updates back, bit for bit; harmless when there is none."""
        if self._writer is not None:
            self._writer.roll_back()
            self.synchronize_device()
            self._writer = None

    def update_weights_from_decoded_sparse_payload(
        self, *payloads: bytes | str | Path
    ) -> dict[str, Any]:
        """Decode, check and apply payloads given as bytes or as paths of files, all or nothing.

        The update stays undoable until :meth:`release` or :meth:`roll_back`.

        Returns:
            ``{"tensors", "changed_elements"}``.

        Raises:
            RefitError: nothing was changed.
        """
        staged: dict[str, list[TensorDelta]] = {}
        changed = 0
        for payload in payloads:
            body = payload if isinstance(payload, bytes) else Path(payload).read_bytes()
            for delta in decode_payload(body, self._limits):
                if self.check_delta(delta):
                    staged.setdefault(delta.name, []).append(delta)
                    changed += len(delta.locations)
        self.check_transfer(staged)
        self.apply(staged)
        return {"tensors": len(staged), "changed_elements": changed}


# --- the sparse part of a loader's copies ---------------------------------------------------------


class _SparseWriter:
    """Writes, of every copy the native loader makes, only the elements that a delta changes."""

    def __init__(self, writer: WeightWriter) -> None:
        self._writer = writer
        self.copies: dict[str, int] = {}

    def scatter(self, copy: LoaderCopy, deltas: Sequence[TensorDelta]) -> None:
        """Write deltas through a plain copy, at a cost that grows with what they change."""
        assert copy.boxes is not None
        for delta in deltas:
            selected, positions = place(copy.boxes, delta.locations)
            bits = delta.values[selected]
            if delta.operation is SparseOperation.XOR:
                self._writer.xor(copy.target, positions, bits)
            else:
                self._writer.overwrite(copy.target, positions, bits)

    def copy(self, weight: LoaderWeight, copy: LoaderCopy) -> None:
        """Write what the loader made of a source that holds the changed elements."""
        self.copies[weight.name] = self.copies.get(weight.name, 0) + 1
        value = loaded_value(copy)
        if weight.sentinel is None:
            written = torch.ones(value.shape, dtype=torch.bool)
        else:
            written = ~unchanged_mask(value, weight.source.dtype, weight.sentinel)
        coordinates = torch.nonzero(written)
        positions = torch.full((coordinates.shape[0],), copy.target_box.offset, dtype=torch.int64)
        for axis, stride in enumerate(copy.target_box.strides):
            positions.add_(coordinates[:, axis], alpha=stride)
        if weight.kind is LoadKind.DENSE and self.copies[weight.name] > 1:
            # Copies of one tensor may overlap, and the last one counts.
            self._writer.supersede(copy.target, positions)
        self._writer.overwrite(copy.target, positions, bits_view(value)[written])


def _loader_weight(discovery: Discovery, name: str, parts: Sequence[TensorDelta]) -> LoaderWeight:
    """A source that holds the changed elements, and the mark of an unchanged one elsewhere."""
    weight = discovery.weights[name]
    source = torch.empty(weight.shape, dtype=weight.dtype)
    sentinel = None
    bits = bits_view(source).reshape(-1)
    if not _is_complete(parts):
        sentinel = sentinel_bits(weight.dtype, torch.cat([part.values for part in parts]))
        if sentinel is None:
            raise UnsupportedModelError(
                f"{name}: a sparse update uses all bit patterns of {dtype_name(weight.dtype)}, so "
                "none is left to mark unchanged elements; send all elements of the tensor"
            )
        bits.fill_(sentinel)
    for part in parts:
        bits[_index(part.locations)] = part.values
    return LoaderWeight(name, source, weight.kind, sentinel)


def _index(locations: torch.Tensor | range) -> Any:
    if isinstance(locations, range):
        return slice(locations.start, locations.stop)
    return locations.to(torch.int64)


# --- checks on deltas -----------------------------------------------------------------------------


def _check_spans(name: str, parts: Sequence[TensorDelta]) -> None:
    ordered = sorted(parts, key=lambda part: part.begin)
    for first, second in itertools.pairwise(ordered):
        if second.begin < first.end:
            raise PayloadError(
                f"{name}: elements {second.begin} to {min(first.end, second.end) - 1} are sent "
                "twice in one transfer; each producer must send its own part of a tensor"
            )
    if len({part.operation for part in parts}) > 1:
        raise PayloadError(f"{name}: one transfer mixes xor and overwrite for this tensor")


def _is_complete(parts: Sequence[TensorDelta]) -> bool:
    numel = 1
    for size in parts[0].shape:
        numel *= size
    return sum(len(part.locations) for part in parts) == numel


def _has_nan(part: TensorDelta) -> bool:
    return bool(part.values.view(part.dtype).isnan().any())


def _check_aliases(group: tuple[str, ...], deltas: DeltasByName) -> None:
    first = _joined(deltas.get(group[0], ()))
    for name in group[1:]:
        other = _joined(deltas.get(name, ()))
        if first[0] != other[0] or not all(map(torch.equal, first[1:], other[1:])):
            raise UnsupportedModelError(
                f"{group[0]} and {name} are one parameter in this engine, but the update gives "
                "them different values; start the engine from a checkpoint in which they differ"
            )


def _joined(
    parts: Sequence[TensorDelta],
) -> tuple[SparseOperation | None, torch.Tensor, torch.Tensor]:
    if not parts:
        return None, torch.empty(0), torch.empty(0)
    ordered = sorted(parts, key=lambda part: part.begin)
    locations = [
        torch.arange(p.locations.start, p.locations.stop)
        if isinstance(p.locations, range)
        else p.locations.to(torch.int64)
        for p in ordered
    ]
    return ordered[0].operation, torch.cat(locations), torch.cat([p.values for p in ordered])


# --- vLLM -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _vllm_load_context(model_runner: Any) -> Iterator[None]:
    """The context in which vLLM loads a checkpoint: current config and default dtype."""
    from vllm.config import set_current_vllm_config
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = model_runner.vllm_config
    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
        yield


def _ties_output(model_runner: Any) -> bool:
    config = model_runner.vllm_config.model_config.hf_config.get_text_config()
    return bool(getattr(config, "tie_word_embeddings", False))


def _draft_model(model_runner: Any) -> str | None:
    """The draft model's name if the worker has one with weights of its own."""
    config = model_runner.vllm_config.speculative_config
    if config is None or getattr(config, "draft_model_config", None) is None:
        return None
    return str(config.draft_model_config.model)
