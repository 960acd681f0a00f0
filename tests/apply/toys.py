"""Small models with native loaders of every kind, and helpers that compare them bit by bit.

No vLLM: an applier needs of an engine only its model and a few configuration fields.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch

from vllm_sparse_refit.apply.applier import VllmSparseDeltaApplier
from vllm_sparse_refit.apply.discovery import Discovery, TensorInfo
from vllm_sparse_refit.apply.live_model import LiveModel
from vllm_sparse_refit.apply.load_mode import LoadKind
from vllm_sparse_refit.apply.loading import LoadedModel
from vllm_sparse_refit.apply.shadow import PackedLayers
from vllm_sparse_refit.codec.delta import Chunk, SparseOperation, TensorDelta, make_delta
from vllm_sparse_refit.codec.dtypes import bits_dtype, bits_view
from vllm_sparse_refit.codec.payload import DecodeLimits, encode_payload

Weights = Iterable[tuple[str, torch.Tensor]]
Loader = Callable[["ToyModel", Weights], set[str] | None]
Shapes = Mapping[str, tuple[int, ...]]

LIMITS = DecodeLimits(max_payload_bytes=1 << 24, max_decoded_bytes=1 << 26)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
DTYPES = (*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.int64)


class ToyModel(torch.nn.Module):
    """Parameters by (undotted) name, a buffer, and a loader."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], loader: Loader) -> None:
        super().__init__()
        for name, tensor in parameters.items():
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        self.register_buffer("table", torch.arange(4.0))
        self._loader = loader

    def load_weights(self, weights: Weights) -> set[str] | None:
        return self._loader(self, weights)


@dataclass(frozen=True)
class Toy:
    """A kind of model: its canonical tensors, its parameters and its loader, for any dtype."""

    shapes: Shapes
    parameters: Shapes
    loader: Loader
    kinds: Mapping[str, LoadKind] = field(default_factory=dict)
    parameter_dtype: torch.dtype | None = None
    dtypes: tuple[torch.dtype, ...] = DTYPES

    def info(self, dtype: torch.dtype) -> dict[str, TensorInfo]:
        return {name: (shape, dtype) for name, shape in self.shapes.items()}

    def model(self, dtype: torch.dtype, weights: Mapping[str, torch.Tensor]) -> ToyModel:
        """A model started from ``weights``."""
        parameter_dtype = self.parameter_dtype or dtype
        parameters = {n: torch.zeros(s, dtype=parameter_dtype) for n, s in self.parameters.items()}
        model = ToyModel(parameters, self.loader)
        with torch.no_grad():
            model.load_weights(weights.items())
        return model


# --- loaders that can be updated -----------------------------------------------------------------


def _fused_qkv(model: ToyModel, weights: Weights) -> set[str]:
    for name, weight in weights:
        start = {"q": 0, "k": 4, "v": 6}[name]
        model.qkv.data.narrow(0, start, weight.shape[0]).copy_(weight)
    return {"qkv"}


def _mixed(model: ToyModel, weights: Weights) -> set[str]:
    """The fused q/k/v, and two tensors that are transformed."""
    for name, weight in weights:
        if name in "qkv":
            _fused_qkv(model, [(name, weight)])
        else:
            getattr(model, name).data.copy_(-torch.exp(weight.float()))
    return {"qkv", "first", "second"}


def _second_shard(model: ToyModel, weights: Weights) -> None:
    for name, weight in weights:
        if name == "embed":  # 10 rows on two ranks of 6, so this one has 4 and two of padding
            model.embed.data[:4].copy_(weight.narrow(0, 6, 4))
            model.embed.data[4:].fill_(0)
        elif name == "up":
            model.up.data.copy_(weight.narrow(0, 4, 4))
        else:
            model.down.data.copy_(weight.narrow(1, 4, 4))


def _transposed(model: ToyModel, weights: Weights) -> None:
    for _, weight in weights:
        model.weight.data.copy_(weight.t())


def _experts(model: ToyModel, weights: Weights) -> None:
    for name, weight in weights:
        expert, projection = name.split(".")
        start = 0 if projection == "gate" else 3
        model.w13.data[int(expert)].narrow(0, start, 3).copy_(weight)


def _stacked_experts(model: ToyModel, weights: Weights) -> None:
    for _, weight in weights:  # [expert, hidden, gate and up interleaved]
        for expert in range(weight.shape[0]):
            model.w13.data[expert, :3].copy_(weight[expert, :, ::2].t())
            model.w13.data[expert, 3:].copy_(weight[expert, :, 1::2].t())


def _plain(model: ToyModel, weights: Weights) -> None:
    for name, weight in weights:
        getattr(model, name).data.copy_(weight)


def _negative_exp(model: ToyModel, weights: Weights) -> None:
    for _, weight in weights:
        model.decay.data.copy_(-torch.exp(weight.float()))


def _permuted(model: ToyModel, weights: Weights) -> None:
    for _, weight in weights:
        moved = weight.view(2, 3, 16, 8).transpose(0, 1).contiguous().view(96, 8)
        model.weight.data.copy_(moved)


def _changed_in_place(model: ToyModel, weights: Weights) -> None:
    for _, weight in weights:
        weight.neg_()
        model.weight.data.copy_(weight)


def _expanded(model: ToyModel, weights: Weights) -> None:
    for _, weight in weights:
        model.weight.data.copy_(weight)  # broadcast over the rows


def _normalized(model: ToyModel, weights: Weights) -> None:
    for _, weight in weights:
        model.weight.data.copy_(weight / weight.abs().sum())


def _overlapping(model: ToyModel, weights: Weights) -> None:
    for _, weight in weights:
        model.weight.data.copy_(weight)
        model.weight.data[1:3].copy_(weight[2:4])


def _one_element(model: ToyModel, weights: Weights) -> None:
    for name, weight in weights:
        getattr(model, name).data.fill_(weight.item())


def _chunked(model: ToyModel, weights: Weights) -> None:
    for _, weight in weights:  # up and gate in one, the other way round in the parameter
        up, gate = weight.chunk(2, dim=0)
        model.gate_up.data[:3].copy_(gate)
        model.gate_up.data[3:].copy_(up)


def _padded_by_cat(model: ToyModel, weights: Weights) -> None:
    for _, weight in weights:
        padding = torch.zeros(2, *weight.shape[1:], dtype=weight.dtype)
        model.weight.data.copy_(torch.cat([weight, padding]))


def _makes_biases(model: ToyModel, weights: Weights) -> None:
    """As loaders do for fused layers a part of whose bias the checkpoint lacks: zeros, at the end."""
    made = list[torch.Tensor]()
    for name, weight in weights:
        if name == "q_bias":
            model.qk_bias.data[:4].copy_(weight)
        else:
            model.weight.data.copy_(weight)
            made += [torch.zeros(4, dtype=weight.dtype), weight.new_zeros(4)]
    for start, bias in zip((4, 6), made, strict=True):
        model.qk_bias.data[start : start + 2].copy_(bias.narrow(0, 2, 2))


def _loaded_twice(model: ToyModel, weights: Weights) -> None:
    for _, weight in weights:
        model.first.data.copy_(weight)
        model.second.data.copy_(weight.t())


def _collecting(model: ToyModel, weights: Weights) -> None:
    collected = dict(weights)
    for name in sorted(collected, reverse=True):
        getattr(model, name).data.copy_(collected[name])


def _collecting_transposed(model: ToyModel, weights: Weights) -> None:
    for name, weight in list(weights):
        getattr(model, name).data.copy_(weight.flip(0))


def _skipping(model: ToyModel, weights: Weights) -> None:
    for name, weight in weights:
        if not name.startswith("rotary"):
            getattr(model, name).data.copy_(weight)


def _aliasing(model: ToyModel, weights: Weights) -> None:
    for _, weight in weights:
        model.embed.data.copy_(weight)


_VIEW, _TRANSFORM, _DENSE, _SKIP = LoadKind.VIEW, LoadKind.TRANSFORM, LoadKind.DENSE, LoadKind.SKIP

TOYS = {
    "mixed": Toy(
        {"q": (4, 6), "k": (2, 6), "v": (2, 6), "first": (5,), "second": (5,)},
        {"qkv": (8, 6), "first": (5,), "second": (5,)},
        _mixed,
        {**dict.fromkeys("qkv", _VIEW), "first": _TRANSFORM, "second": _TRANSFORM},
        dtypes=FLOATS,
    ),
    "fused_qkv": Toy(
        {"q": (4, 6), "k": (2, 6), "v": (2, 6)},
        {"qkv": (8, 6)},
        _fused_qkv,
        {"q": _VIEW, "k": _VIEW, "v": _VIEW},
    ),
    "shard": Toy(
        {"embed": (10, 4), "up": (8, 4), "down": (4, 8)},
        {"embed": (6, 4), "up": (4, 4), "down": (4, 4)},
        _second_shard,
        {"embed": _VIEW, "up": _VIEW, "down": _VIEW},
    ),
    "transposed": Toy({"weight": (5, 7)}, {"weight": (7, 5)}, _transposed, {"weight": _VIEW}),
    "experts": Toy(
        {f"{e}.{p}": (3, 5) for e in range(4) for p in ("gate", "up")},
        {"w13": (4, 6, 5)},
        _experts,
        {f"{e}.{p}": _VIEW for e in range(4) for p in ("gate", "up")},
    ),
    "stacked_experts": Toy(
        {"gate_up": (4, 5, 6)}, {"w13": (4, 6, 5)}, _stacked_experts, {"gate_up": _VIEW}
    ),
    "cast": Toy(
        {"weight": (6, 8)},
        {"weight": (6, 8)},
        _plain,
        {"weight": _TRANSFORM},
        torch.float32,
        (torch.bfloat16, torch.float16),
    ),
    "cast_one_byte": Toy(
        {"weight": (6, 8)},
        {"weight": (6, 8)},
        _plain,
        {"weight": _DENSE},
        torch.bfloat16,
        (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8),
    ),
    "negative_exp": Toy(
        {"A_log": (24,)},
        {"decay": (24,)},
        _negative_exp,
        {"A_log": _TRANSFORM},
        torch.float32,
        FLOATS,
    ),
    "permuted": Toy({"weight": (96, 8)}, {"weight": (96, 8)}, _permuted, {"weight": _TRANSFORM}),
    "changed_in_place": Toy(
        {"weight": (6, 8)},
        {"weight": (6, 8)},
        _changed_in_place,
        {"weight": _TRANSFORM},
        dtypes=FLOATS,
    ),
    "expanded": Toy({"weight": (16,)}, {"weight": (3, 16)}, _expanded, {"weight": _TRANSFORM}),
    "normalized": Toy(
        {"weight": (6, 8)}, {"weight": (6, 8)}, _normalized, {"weight": _DENSE}, dtypes=FLOATS
    ),
    "overlapping": Toy({"weight": (4, 8)}, {"weight": (4, 8)}, _overlapping, {"weight": _DENSE}),
    "one_element": Toy(
        {"scale": (), "bias": (1,)},
        {"scale": (1,), "bias": ()},
        _one_element,
        {"scale": _DENSE, "bias": _DENSE},
    ),
    "chunked": Toy({"up_gate": (6, 5)}, {"gate_up": (6, 5)}, _chunked, {"up_gate": _VIEW}),
    "padded_by_cat": Toy(
        {"weight": (4, 5)}, {"weight": (6, 5)}, _padded_by_cat, {"weight": _DENSE}
    ),
    "makes_biases": Toy(
        {"weight": (4, 5), "q_bias": (4,)},
        {"weight": (4, 5), "qk_bias": (8,)},
        _makes_biases,
        {"weight": _VIEW, "q_bias": _VIEW},
    ),
    "loaded_twice": Toy(
        {"weight": (4, 5)}, {"first": (4, 5), "second": (5, 4)}, _loaded_twice, {"weight": _VIEW}
    ),
    "collecting": Toy(
        {"a": (4, 6), "b": (3, 5)},
        {"a": (4, 6), "b": (3, 5)},
        _collecting,
        {"a": _VIEW, "b": _VIEW},
    ),
    "collecting_transposed": Toy(
        {"a": (8, 6), "b": (9, 5)},
        {"a": (8, 6), "b": (9, 5)},
        _collecting_transposed,
        {"a": _TRANSFORM, "b": _TRANSFORM},
    ),
    "skipping": Toy(
        {"weight": (4, 6), "rotary.inv_freq": (8,)},
        {"weight": (4, 6)},
        _skipping,
        {"weight": _VIEW, "rotary.inv_freq": _SKIP},
    ),
    "aliasing": Toy(
        {"embed": (5, 4), "lm_head": (5, 4)},
        {"embed": (5, 4)},
        _aliasing,
        {"embed": _VIEW, "lm_head": _VIEW},
    ),
}

CASES = [(name, dtype) for name, toy in TOYS.items() for dtype in toy.dtypes]


# --- weights -------------------------------------------------------------------------------------


def random_bits(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Any bit pattern: NaN with payloads, infinities, subnormals, minus zero."""
    info = torch.iinfo(bits_dtype(dtype))
    bits = torch.randint(info.min, info.max, shape, dtype=bits_dtype(dtype), generator=generator)
    return bits.view(dtype) if shape else bits.reshape(1).view(dtype).reshape(())


def random_numbers(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Numbers as weights have them, for loaders that calculate."""
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)


def random_weights(toy: Toy, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Canonical tensors: any bits where the loader only moves them, else numbers."""
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: (random_bits if toy.kinds.get(name) is _VIEW else random_numbers)(
            shape, dtype, generator
        )
        for name, shape in toy.shapes.items()
    }
    if toy.loader is _aliasing:
        weights["lm_head"] = weights["embed"].clone()
    return weights


def mixed(
    old: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor], seed: int
) -> dict[str, torch.Tensor]:
    """``old`` with about a third of the elements taken from ``new``."""
    result = {}
    for name, tensor in old.items():
        generator = torch.Generator().manual_seed(seed)  # equal for aliases
        chosen = torch.rand(tensor.shape, generator=generator) < 0.34
        bits = torch.where(chosen, bits_view(new[name]), bits_view(tensor))
        result[name] = bits.view(tensor.dtype)
    return result


def deltas_between(
    old: Mapping[str, torch.Tensor],
    new: Mapping[str, torch.Tensor],
    discovery: Discovery,
    operation: SparseOperation,
    chunk: int = 7,
) -> Iterator[TensorDelta]:
    """What a trainer sends, in small chunks."""
    for name, tensor in new.items():
        kind = discovery.weights[name].kind
        if kind is LoadKind.SKIP:
            continue
        dense = kind is LoadKind.DENSE
        old_bits, new_bits = (bits_view(t).reshape(-1) for t in (old[name], tensor))
        for begin in range(0, new_bits.numel(), chunk):
            delta = make_delta(
                Chunk(
                    name,
                    tuple(tensor.shape),
                    tensor.dtype,
                    operation if kind is LoadKind.VIEW else SparseOperation.OVERWRITE,
                    begin,
                    old_bits[begin : begin + chunk],
                    new_bits[begin : begin + chunk],
                    every_element=dense,
                )
            )
            if delta is not None:
                yield delta


def payloads_of(deltas: Iterable[TensorDelta], per_payload: int = 3) -> list[bytes]:
    """The deltas in several payloads."""
    deltas = list(deltas)
    return [encode_payload(deltas[i : i + per_payload]) for i in range(0, len(deltas), per_payload)]


def grouped(deltas: Iterable[TensorDelta]) -> dict[str, list[TensorDelta]]:
    groups: dict[str, list[TensorDelta]] = {}
    for delta in deltas:
        groups.setdefault(delta.name, []).append(delta)
    return groups


# --- appliers and comparisons --------------------------------------------------------------------


class ToyApplier(VllmSparseDeltaApplier):
    """An applier whose model loads outside vLLM's configuration contexts."""

    def _live_model(self) -> LiveModel:
        return LiveModel(self._model_runner.get_model())


def toy_runner(model: torch.nn.Module, *, tied: bool = False, draft: Any = None) -> Any:
    text_config = SimpleNamespace(tie_word_embeddings=tied)
    hf_config = SimpleNamespace(get_text_config=lambda: text_config)
    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=hf_config, enforce_eager=True),
        parallel_config=SimpleNamespace(enable_eplb=False),
        speculative_config=draft,
    )
    return SimpleNamespace(get_model=lambda: model, vllm_config=config)


def toy_applier(
    model: torch.nn.Module, info: Mapping[str, TensorInfo] | None = None, **options: Any
) -> ToyApplier:
    """An applier for ``model``; with ``info`` it has discovered already."""
    unpacked = LoadedModel((), PackedLayers(model, (), lambda _: None))
    loaded: LoadedModel | None = options.pop("loaded", unpacked)
    if refused := options.pop("refused", ()):
        loaded = replace(unpacked, refused=tuple(refused))
    applier = ToyApplier(
        toy_runner(model, **options), torch.device("cpu"), limits=LIMITS, loaded=loaded
    )
    if info is not None:
        applier.discover_native_skips(info)
    return applier


def state_bits(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of all bits of all parameters and buffers."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: bits_view(tensor.detach()).clone() for name, tensor in tensors}


def assert_same_bits(found: torch.nn.Module, expected: Mapping[str, torch.Tensor]) -> None:
    bits = state_bits(found)
    assert bits.keys() == expected.keys()
    different = [name for name in bits if not torch.equal(bits[name], expected[name])]
    assert not different


def identities(model: torch.nn.Module) -> dict[str, tuple[int, int, tuple[int, ...]]]:
    """Object, address and strides of all parameters and buffers."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: (id(t), t.data_ptr(), tuple(t.stride())) for name, t in tensors}


def elements(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())
