"""Canonical sparse updates through vLLM's own weight loaders."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_sparse_refit.apply.delta_checks import (
    DeltasByName,
    check_aliases,
    check_spans,
    has_nan,
    is_complete,
)
from vllm_sparse_refit.apply.discovery import Discovery, TensorInfo, discover
from vllm_sparse_refit.apply.elementwise import (
    is_nan_marked,
)
from vllm_sparse_refit.apply.engine_settings import check_engine, load_context, ties_output
from vllm_sparse_refit.apply.live_model import LiveModel, OwnedTensor
from vllm_sparse_refit.apply.load_mode import LoadKind
from vllm_sparse_refit.apply.loading import LoadedModel
from vllm_sparse_refit.apply.placement import place
from vllm_sparse_refit.apply.prior import check_prior_bits
from vllm_sparse_refit.apply.processing import PackedLayer
from vllm_sparse_refit.apply.shadow import PackedLayers
from vllm_sparse_refit.apply.sparse_writes import LoaderWriter, PlacedDelta, loader_weight
from vllm_sparse_refit.apply.storage_digests import StorageDigests
from vllm_sparse_refit.apply.writer import WeightWriter, Write
from vllm_sparse_refit.codec.delta import SparseOperation, TensorDelta
from vllm_sparse_refit.codec.digest import box_digest
from vllm_sparse_refit.codec.dtypes import bits_dtype, bits_view, dtype_name
from vllm_sparse_refit.codec.payload import DecodeLimits, decode_payload
from vllm_sparse_refit.errors import (
    RefitError,
    TensorMismatchError,
    TransactionError,
    UnsupportedModelError,
    VerificationError,
)

DEFAULT_SAMPLES = 64

Samples = Mapping[str, tuple[Sequence[int], Sequence[int]]]


class VllmSparseDeltaApplier:
    """Apply canonical sparse updates to the model of one worker; all placement is vLLM's.

    Owned by the worker's main thread. :meth:`check_delta` and :meth:`placed` alone may be called from other
    threads, after :meth:`discover_native_skips`; they read only what discovery left.

    Args:
        model_runner: vLLM's model runner; the model is reached through its ``get_model()``.
        device: where the model's parameters are.
        limits: bounds of payloads handed to :meth:`update_weights_from_decoded_sparse_payload`.
        loaded: what was observed while the model loaded, or None when it was not observed.
        sample_limit: changed elements read back per write by :meth:`finish_sparse_delta_refit`.
    """

    def __init__(
        self,
        model_runner: Any,
        device: torch.device,
        *,
        limits: DecodeLimits,
        loaded: LoadedModel | None,
        sample_limit: int = DEFAULT_SAMPLES,
    ) -> None:
        self._model_runner = model_runner
        self._device = device
        self._loaded = loaded
        self.sample_limit = sample_limit
        self._limits = limits
        self._discovery: Discovery | None = None
        self._holders: dict[int, list[OwnedTensor]] = {}
        self._digests = self._digests_before = StorageDigests({})
        self._writer: WeightWriter | None = None
        if loaded is not None:
            loaded.layers.context = self._live_model().load_context

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
        if self._loaded is None:
            raise UnsupportedModelError(
                "the loading of this model was not observed, so packed layers cannot be told from "
                "plain ones; load it with a load_format that goes through vLLM's base loader "
                "(auto, safetensors, dummy)"
            )
        check_engine(self._model_runner)
        live, layers = self._live_model(), self._layers
        layers.check_usable()
        layers.numbers_may_change = self._model_runner.vllm_config.model_config.enforce_eager
        refused = [*self._loaded.refused, *(PackedLayer(*item) for item in layers.check().items())]
        with layers.loader_state():
            self._discovery = discover(
                live, state_dict_info, refused, tied_output=ties_output(self._model_runner)
            )
            self._holders = live.watched_storages()
            self._digests = self._digests_before = StorageDigests.of(self._discovery)
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
                found = copy.storage.index_select(0, positions.to(copy.storage.device)).cpu()
                compared += positions.numel()
                if wrong := int((found != expected[selected]).sum()):
                    different[name] = different.get(name, 0) + wrong
        return compared, different

    def digests(self) -> dict[str, Any]:
        """Digests of what this rank holds of every canonical tensor, for a comparison with the trainer's.

        Returns:
            ``{"boxes", "unlike", "transformed"}``: by canonical name, ``[offset, shape, strides, digest]`` of
            each box of it (:func:`box_digest`); by module or tensor, why what is in use is not what it
            should be; and the names of tensors that the loader casts or transforms, whose canonical bits are
            not here, and which are compared with what the last update left.
        """
        boxes: dict[str, list[list[Any]]] = {}
        for name in self.discovery.names(LoadKind.VIEW):
            for copy in self.discovery.weights[name].copies:
                assert copy.boxes is not None
                box = copy.boxes.source
                bits = bits_view(copy.target)
                digest = box_digest(bits, box.offset, box.shape, box.strides).hex
                entry = [box.offset, list(box.shape), list(box.strides), digest]
                boxes.setdefault(name, []).append(entry)
        changed = dict.fromkeys(self._digests.different(), "not what the last update left")
        transformed = self.discovery.names(LoadKind.TRANSFORM, LoadKind.DENSE)
        return {
            "boxes": boxes,
            "unlike": {**changed, **self._layers.unlike()},
            "transformed": transformed,
        }

    @property
    def _layers(self) -> PackedLayers:
        assert self._loaded is not None
        return self._loaded.layers

    def _live_model(self) -> LiveModel:
        return LiveModel(self._model_runner.get_model(), lambda: load_context(self._model_runner))

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
        if weight.kind is not LoadKind.VIEW and delta.operation is not SparseOperation.OVERWRITE:
            raise UnsupportedModelError(
                f"{delta.name}: the model's loader transforms it, so changes of its bits "
                f"({delta.operation}) mean nothing here; send it as overwrite"
            )
        return True

    def placed(self, delta: TensorDelta) -> TensorDelta:
        """The same delta, and where it will be written if that is known; touches no weight.

        Saves :meth:`apply` the time for it. As :meth:`check_delta`, which must have accepted it, from any
        thread.
        """
        weight = self.discovery.weights[delta.name]
        if weight.kind is not LoadKind.VIEW or isinstance(delta, PlacedDelta):
            return delta
        return PlacedDelta.of(delta, weight.copies)

    def check_transfer(self, deltas: DeltasByName) -> None:
        """Check all deltas of one update against each other.

        Raises:
            PayloadError: two deltas of one tensor speak for the same elements, or disagree on the
                operation.
            UnsupportedModelError: the model has packed layers, aliased tensors would get different
                bits, or a tensor that must be complete is not.
            TransactionError: a parameter has moved since discovery.
        """
        self.check_model()
        with self._layers.loader_state():
            self._check_not_moved()
        for name, parts in deltas.items():
            check_spans(name, parts)
            if self.discovery.weights[name].kind in (LoadKind.DENSE, LoadKind.TRANSFORM):
                self._check_overwrite(name, parts)
        for group in self.discovery.aliases:
            check_aliases(group, deltas)

    def check_prior_bits(self, deltas: DeltasByName) -> dict[str, Any]:
        """Check that what a checked transfer builds on is what is here; see :func:`check_prior_bits`.

        Not checked is what goes through the loader: the canonical bits are not here.
        """
        placed = {
            name: [part for part in map(self.placed, parts) if isinstance(part, PlacedDelta)]
            for name, parts in deltas.items()
            if self.discovery.weights[name].kind is LoadKind.VIEW
        }
        return check_prior_bits(self.discovery.weights, placed)

    def _check_overwrite(self, name: str, parts: Sequence[TensorDelta]) -> None:
        if is_complete(parts):
            return
        if self.discovery.weights[name].kind is LoadKind.DENSE:
            raise UnsupportedModelError(
                f"{name}: the model's loader mixes its elements, so all of them must be sent "
                "together"
            )
        if is_nan_marked(parts[0].dtype) and any(has_nan(part) for part in parts):
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
        mark, swaps = writer.mark(), self._layers.mark()
        # Before anything is written, so that an interrupt cannot lose the way back.
        self._writer = writer
        try:
            with self._layers.loader_state():
                self._load(names, deltas, writer)
            self._layers.reprocess(self._written(names), writer)
            self._digests = self._digests.after(writer.written_since(mark))
        except BaseException as error:
            writer.roll_back(mark)
            self._layers.undo(swaps)
            self.synchronize_device()
            self._writer = earlier
            if isinstance(error, RefitError) or not isinstance(error, Exception):
                raise
            raise TransactionError(
                f"the model's loader or its post-load processing raised {type(error).__name__}: {error}; "
                "nothing was changed"
            ) from error

    def _written(self, names: Sequence[str]) -> set[int]:
        """The storages that the tensors ``names`` go to."""
        return {c.storage_key for n in names for c in self.discovery.weights[n].copies}

    def _load(self, names: Sequence[str], deltas: DeltasByName, writer: WeightWriter) -> None:
        """Write plain copies where discovery saw them go, and everything else through the loader."""
        live = self._live_model()
        transformed, writes = [], list[Write]()
        for name in names:
            weight = self.discovery.weights[name]
            if weight.kind is LoadKind.VIEW:
                writes += (write for delta in deltas[name] for write in self._writes_of(delta))
            else:
                transformed.append(name)
        writer.write(writes)
        if transformed:
            self._load_natively(live, transformed, deltas, LoaderWriter(writer))

    def _writes_of(self, delta: TensorDelta) -> Sequence[Write]:
        placed = self.placed(delta)
        return placed.writes if isinstance(placed, PlacedDelta) else ()

    def _check_not_moved(self) -> None:
        """Check that the model still uses the storages that discovery saw the loader write to.

        Looks at what held them then, which costs far less than to walk through all modules.
        """
        for name, weight in self.discovery.weights.items():
            for copy in weight.copies:
                key = copy.storage_key
                moved = not any(owned.is_still_at(key) for owned in self._holders.get(key, ()))
                if moved and copy.target.numel():
                    raise TransactionError(
                        f"the parameter that {name} goes to has moved since discovery (a reload, or sleep); "
                        "call snapshot() again with the weights that the engines hold"
                    )

    def _load_natively(
        self, live: LiveModel, names: Sequence[str], deltas: DeltasByName, sink: "LoaderWriter"
    ) -> None:
        changed: list[str] = []
        with live.guarded(changed):
            if self.discovery.streaming:
                live.load((loader_weight(self.discovery, n, deltas[n]) for n in names), sink)
            else:
                for name in names:
                    live.load([loader_weight(self.discovery, name, deltas[name])], sink)
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

    @contextlib.contextmanager
    def weights_replaced(self, by: str) -> Iterator[None]:
        """Follow ``by``, by which vLLM replaces the model's weights while the context is open.

        What this worker keeps of packed layers follows, or they are refused at the next discovery.
        """
        if self._loaded is None:
            yield
            return
        with self._layers.replaced(by):
            yield

    def status(self) -> dict[str, Any]:
        """The packed layers that are kept as they were loaded, and the routes of the latest discovery.

        Returns:
            ``{"packed_layers", "shadow_bytes", "routes"}``: how many layers, the host memory that they
            take, and :meth:`routes`, None before discovery.
        """
        layers = None if self._loaded is None else self._layers
        return {
            "packed_layers": 0 if layers is None else len(layers),
            "shadow_bytes": 0 if layers is None else layers.nbytes,
            "routes": None if self._discovery is None else self.routes(),
        }

    def routes(self) -> dict[str, int]:
        """How many canonical tensors go which way into this rank's model, as discovery found.

        Returns:
            ``{"placement", "native", "shadow", "skipped", "unsupported"}``: written where they were seen to
            go, through the model's loader, either of these into layers that are processed again
            afterwards, not at all, and refused.
        """
        names = {LoadKind.VIEW: "placement", LoadKind.SKIP: "skipped"}
        names[LoadKind.UNSUPPORTED] = "unsupported"
        counts = dict.fromkeys(("placement", "native", "shadow", "skipped", "unsupported"), 0)
        sources = self._layers.sources()
        for weight in self.discovery.weights.values():
            route = names.get(weight.kind, "native")
            if any(copy.storage_key in sources for copy in weight.copies):
                route = "shadow"
            counts[route] += 1
        return counts

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
            self._layers.release()
            self._digests_before = self._digests
            self._writer = None

    def roll_back(self) -> None:
        """Take all applied, unreleased updates back, bit for bit; harmless when there is none."""
        if self._writer is not None:
            self._writer.roll_back()
            self._layers.undo()
            self._digests = self._digests_before
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
                    staged.setdefault(delta.name, []).append(self.placed(delta))
                    changed += len(delta.locations)
        self.check_transfer(staged)
        self.check_prior_bits(staged)
        self.apply(staged)
        return {"tensors": len(staged), "changed_elements": changed}
