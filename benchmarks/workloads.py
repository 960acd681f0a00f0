"""Pairs of weights that differ by one step, for the benchmarks of the codec.

Each workload is the tensors of a Llama in bf16, before and after a change of one kind.
"""

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

ELEMENTS = 1 << 26
_LAYERS = 6

U16 = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Pair:
    """One tensor before and after, both bf16, contiguous, on the CPU."""

    name: str
    old: torch.Tensor
    new: torch.Tensor


@dataclass(frozen=True)
class Changes:
    """The changed elements of all tensors of a workload, one after another.

    Attributes:
        gaps: distance of each from the one before it in its tensor, from 1, uint32, ``[k]``.
        old: bits before, uint16, ``[k]``.
        new: bits after, uint16, ``[k]``.
    """

    gaps: npt.NDArray[np.uint32]
    old: U16
    new: U16

    @property
    def count(self) -> int:
        return int(self.gaps.size)

    @property
    def xor(self) -> U16:
        return self.old ^ self.new

    @property
    def zigzag(self) -> U16:
        """The signed differences as 0, -1, 1, -2, ... -> 0, 1, 2, 3, ...; so never 0 here."""
        difference = (self.new - self.old).view(np.int16)
        return ((difference << 1) ^ (difference >> 15)).view(np.uint16)


def bits(tensor: torch.Tensor) -> U16:
    """The bits of a bf16 tensor, 1-D, not copied."""
    return tensor.view(torch.int16).view(-1).numpy().view(np.uint16)


def changes(pairs: list[Pair]) -> Changes:
    """Every changed element of a workload."""
    gaps, olds, news = [], [], []
    for pair in pairs:
        old, new = bits(pair.old), bits(pair.new)
        found = np.flatnonzero(old != new)
        gaps.append(np.diff(found, prepend=-1).astype(np.uint32))
        olds.append(old[found])
        news.append(new[found])
    return Changes(np.concatenate(gaps), np.concatenate(olds), np.concatenate(news))


def rl_like(lr: float, elements: int) -> list[Pair]:
    """Masters in fp32, normal(0, 0.02), norms around 1; ``lr`` times a normal(0, 0.5) clipped to 1.

    The clipped normal stands for Adam's ratio of moments.
    """
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for name, shape in llama_shapes(elements):
        master = _weights(shape, generator)
        update = torch.randn(shape, generator=generator).mul_(0.5).clamp_(-1, 1)
        old = master.to(torch.bfloat16)
        pairs.append(Pair(name, old, master.add_(update, alpha=lr).to(torch.bfloat16)))
    return pairs


def uniform(density: float, elements: int) -> list[Pair]:
    """Each element changes with probability ``density``, to any other bits."""
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for name, shape in llama_shapes(elements):
        old = _weights(shape, generator).to(torch.bfloat16)
        flips = torch.randint(1, 1 << 16, shape, generator=generator, dtype=torch.int32)
        if density < 1:
            flips *= torch.rand(shape, generator=generator) < density
        new = old.view(torch.int16) ^ flips.to(torch.int16)
        pairs.append(Pair(name, old, new.view(torch.bfloat16)))
    return pairs


def unchanged(elements: int) -> list[Pair]:
    """Equal bits in two copies."""
    generator = torch.Generator().manual_seed(0)
    shapes = llama_shapes(elements)
    olds = [(name, _weights(shape, generator).to(torch.bfloat16)) for name, shape in shapes]
    return [Pair(name, old, old.clone()) for name, old in olds]


def adamw(elements: int) -> list[Pair]:
    """A Llama of that size really trained with AdamW on fp32 masters; the last step's change."""
    from benchmarks.checkpoints import LlamaShape, train_pair
    from vllm_sparse_refit.trainer.weights import named_weights

    size = _llama_size(elements)
    shape = LlamaShape(size.hidden, size.feed_forward, _LAYERS, size.vocabulary)
    with tempfile.TemporaryDirectory(prefix="codec-benchmark-") as folder:
        before, after = Path(folder, "before"), Path(folder, "after")
        with _one_thread():
            train_pair(before, after, shape=shape, batch=2, warmup_steps=8)
        both = zip(named_weights(before), named_weights(after), strict=True)
        # Cloned: the files go.
        return [Pair(name, old.clone(), new.clone()) for (name, old), (_, new) in both]


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Hardly slower on two cores, and many times faster where another process takes one of them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _weights(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    weights = torch.randn(shape, generator=generator).mul_(0.02)
    return weights.add_(1) if len(shape) == 1 else weights


@dataclass(frozen=True)
class _Size:
    hidden: int
    feed_forward: int
    vocabulary: int

    @property
    def elements(self) -> int:
        layer = 4 * self.hidden**2 + 3 * self.hidden * self.feed_forward + 2 * self.hidden
        return 2 * self.vocabulary * self.hidden + _LAYERS * layer + self.hidden


def _llama_size(elements: int) -> _Size:
    """The narrowest of full heads, and of usual proportions, that reaches ``elements``."""
    vocabulary = max(256, elements >> 12)
    for hidden in itertools.count(64, 64):
        size = _Size(hidden, -(-hidden * 8 // 3 // 64) * 64, vocabulary)
        if size.elements >= elements:
            return size
    raise AssertionError("unreachable")


def llama_shapes(elements: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a Llama of at least ``elements`` elements."""
    size = _llama_size(elements)
    hidden, feed_forward = size.hidden, size.feed_forward
    yield "model.embed_tokens.weight", (size.vocabulary, hidden)
    for number in range(_LAYERS):
        layer = f"model.layers.{number}"
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"{layer}.self_attn.{part}.weight", (hidden, hidden)
        yield f"{layer}.mlp.gate_proj.weight", (feed_forward, hidden)
        yield f"{layer}.mlp.up_proj.weight", (feed_forward, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, feed_forward)
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (size.vocabulary, hidden)


WORKLOADS: dict[str, Callable[[int], list[Pair]]] = {
    "rl-1e-6": lambda elements: rl_like(1e-6, elements),
    "rl-3e-6": lambda elements: rl_like(3e-6, elements),
    "rl-1e-5": lambda elements: rl_like(1e-5, elements),
    "uniform-0.001": lambda elements: uniform(0.001, elements),
    "uniform-0.01": lambda elements: uniform(0.01, elements),
    "uniform-0.1": lambda elements: uniform(0.1, elements),
    "dense": lambda elements: uniform(1, elements),
    "none": unchanged,
    "adamw": adamw,
}
