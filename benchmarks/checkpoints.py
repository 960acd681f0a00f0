"""Pairs of checkpoints that are one optimizer step apart, as a trainer under RL would leave them.

``train_pair`` really trains a small Llama; ``rl_pair`` draws weights and updates that behave like
an RL step, at any size, in seconds.
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_sparse_refit.trainer.weights import named_weights

HEAD_SIZE = 64


@dataclass(frozen=True)
class LlamaShape:
    """Size of a Llama. The default has 20 million parameters."""

    hidden: int = 384
    intermediate: int = 1024
    layers: int = 8
    vocabulary: int = 8192

    @property
    def parameters(self) -> int:
        layer = 4 * self.hidden**2 + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return 2 * self.vocabulary * self.hidden + self.layers * layer + self.hidden

    def config(self) -> LlamaConfig:
        """No end token, so that generation always runs to its limit."""
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // HEAD_SIZE,
            head_dim=HEAD_SIZE,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
            dtype="bfloat16",
        )


def shape_for(parameters: int, *, vocabulary: int = 8192) -> LlamaShape:
    """The Llama of usual proportions whose size is nearest to ``parameters``."""

    def shape(width: int, layers: int) -> LlamaShape:
        # Feed-forward layers of about 8/3 the hidden size, as in Llama.
        return LlamaShape(
            width * HEAD_SIZE, math.ceil(width * 8 / 3) * HEAD_SIZE, layers, vocabulary
        )

    def distance(candidate: LlamaShape) -> int:
        return abs(candidate.parameters - parameters)

    width = min(range(1, 129), key=lambda w: distance(shape(w, max(2, w))))
    return min((shape(width, layers) for layers in range(1, 2 * width + 2)), key=distance)


@dataclass(frozen=True)
class Change:
    """How many elements of a checkpoint have other bits than in another one."""

    changed: int
    total: int

    @property
    def fraction(self) -> float:
        return self.changed / self.total


def count_changes(before: Path, after: Path) -> Change:
    """Compare two checkpoints of the same tensors bit by bit."""
    changed = total = 0
    for (name, old), (other, new) in zip(named_weights(before), named_weights(after), strict=True):
        if name != other or old.shape != new.shape or old.dtype != new.dtype:
            raise ValueError(f"the checkpoints differ in their tensors: {name} and {other}")
        changed += int((_bits(old) != _bits(new)).sum())
        total += old.numel()
    return Change(changed, total)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize])


def train_pair(
    before: Path,
    after: Path,
    *,
    shape: LlamaShape | None = None,
    steps: int = 1,
    warmup_steps: int = 12,
    lr: float = 2e-6,
    batch: int = 4,
    length: int = 64,
    seed: int = 0,
) -> Change:
    """Train a small Llama with AdamW in fp32 and save it in bf16 around the last ``steps`` steps.

    The ``warmup_steps`` before, with the same learning rate, give Adam the moments of a run under
    way. The data are noisy repeating patterns, which the model can learn.
    """
    torch.manual_seed(seed)
    model = LlamaForCausalLM((shape or LlamaShape()).config()).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))
    data = _patterns(model.config.vocab_size, batch, length, seed)
    _train(model, optimizer, data, warmup_steps)
    _save_bf16(model, before)
    _train(model, optimizer, data, steps)
    _save_bf16(model, after)
    return count_changes(before, after)


def _patterns(vocabulary: int, batch: int, length: int, seed: int) -> Iterator[torch.Tensor]:
    """Batches [batch, length] of token ids: 8 random tokens repeated, one in ten replaced."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        pattern = torch.randint(vocabulary, (batch, 8), generator=generator)
        tokens = pattern.repeat(1, -(-length // 8))[:, :length]
        noise = torch.randint(vocabulary, tokens.shape, generator=generator)
        noisy = torch.rand(tokens.shape, generator=generator) < 0.1
        yield torch.where(noisy, noise, tokens)


def _train(
    model: LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
    data: Iterator[torch.Tensor],
    steps: int,
) -> None:
    model.train()
    for _ in range(steps):
        tokens = next(data)
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def _save_bf16(model: LlamaForCausalLM, folder: Path) -> None:
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)


def rl_pair(
    before: Path,
    after: Path,
    *,
    parameters: int = 100_000_000,
    lr: float = 1e-6,
    seed: int = 0,
) -> Change:
    """Write two bf16 Llama checkpoints whose difference is statistically that of one RL step.

    Masters are fp32 and normal(0, 0.02), norms around 1. The update is ``lr`` times a
    normal(0, 0.5) clipped to [-1, 1], which stands for Adam's ratio of moments.
    """
    config = shape_for(parameters).config()
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in LlamaForCausalLM(config).named_parameters()}
    generator = torch.Generator().manual_seed(seed)
    old: dict[str, torch.Tensor] = {}
    new: dict[str, torch.Tensor] = {}
    for name, size in shapes.items():
        master = torch.randn(size, generator=generator).mul_(0.02)
        if len(size) == 1:
            master += 1
        update = torch.randn(size, generator=generator).mul_(0.5).clamp_(-1, 1)
        old[name] = master.to(torch.bfloat16)
        new[name] = master.add_(update, alpha=lr).to(torch.bfloat16)
    for folder, tensors in ((before, old), (after, new)):
        folder.mkdir(parents=True, exist_ok=True)
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(folder)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return count_changes(before, after)
