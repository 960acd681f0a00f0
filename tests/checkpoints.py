"""Small random checkpoints of real architectures that vLLM loads on a CPU, and changed copies."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests import architectures, processors
from tests.architectures import VOCABULARY

__all__ = ["VOCABULARY"]

# Those whose conversion from a transformers model is tested.
FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "phi3",
    "gemma3",
    "gpt2",
    "mixtral",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
)


def build_model(
    family: str, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """A random model of ``family``; ``overrides`` go to its configuration. Same seed, same bits."""
    config = architectures.FAMILIES[family].config(overrides)
    auto_class = getattr(transformers, architectures.FAMILIES[family].auto_class)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = auto_class.from_config(config, dtype=torch.float32)
        # Norms start as ones and biases as zeros: a misplaced one would go unnoticed.
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.to(dtype).eval()


def build_checkpoint(
    folder: Path,
    family: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    max_shard_size: str = "50GB",
    **overrides: Any,
) -> Path:
    """Save :func:`build_model` in ``folder`` (no tokenizer) and return the folder."""
    model = build_model(family, dtype=dtype, seed=seed, **overrides)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if files := architectures.FAMILIES[family].files:
        getattr(processors, files)(folder)
    if architectures.FAMILIES[family].int8:
        _quantize(folder)
    return folder


_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
_INT8_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_INT8, "strategy": "channel", "dynamic": False},
            "input_activations": {**_INT8, "strategy": "token", "dynamic": True},
        }
    },
}


def _quantize(folder: Path) -> None:
    """Store the linear layers of a checkpoint in int8, with a scale for each row."""
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    for name in [n for n in weights if n.endswith("_proj.weight")]:
        weight = weights[name].float()
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        weights[name] = (weight / scale).round().to(torch.int8)
        weights[f"{name}_scale"] = scale.to(torch.bfloat16)
    save_file(weights, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = _INT8_CONFIG
    (folder / "config.json").write_text(json.dumps(config))


def save_adapter(folder: Path, config: Any) -> None:
    """A random LoRA adapter of the attention's queries, values and outputs, as peft writes it."""
    rank, hidden, head = 4, config.hidden_size, config.head_dim
    generator, tensors = torch.Generator().manual_seed(0), dict[str, torch.Tensor]()
    widths = {"q": config.num_attention_heads * head, "v": config.num_key_value_heads * head}
    sizes = {**{n: (hidden, width) for n, width in widths.items()}, "o": (widths["q"], hidden)}
    for layer in range(config.num_hidden_layers):
        for name, (inputs, outputs) in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}_proj.lora"
            for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                value = torch.randn(shape, generator=generator).mul(0.1).to(torch.bfloat16)
                tensors[f"{prefix}_{part}.weight"] = value
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": [f"{name}_proj" for name in sizes],
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))


Change = Literal["ulps", "values"]


def perturb_checkpoint(
    source: Path, target: Path, *, fraction: float, seed: int = 0, change: Change = "ulps"
) -> int:
    """Copy a checkpoint with about ``fraction`` of the elements of every tensor changed.

    Args:
        fraction: 1.0 changes every element, anything above 0 at least one of every tensor.
        change: ``"ulps"`` flips the one or two lowest bits, as an optimizer step does to bf16;
            ``"values"`` gives new values of the same size, which generation cannot miss.

    Returns:
        How many elements have other bits than before. Names, dtypes and files stay as they are.
    """
    shutil.copytree(source, target)
    generator = torch.Generator().manual_seed(seed)
    changed = 0
    for file in sorted(source.glob("*.safetensors")):
        tensors: dict[str, torch.Tensor] = {}
        with safe_open(file, framework="pt") as reader:
            metadata = reader.metadata()
            for name in sorted(reader.keys()):
                tensors[name], count = _changed(
                    reader.get_tensor(name), fraction, _CHANGES[change], generator
                )
                changed += count
        save_file(tensors, target / file.name, metadata=metadata)
    return changed


def checkpoint_steps(folder: Path, family: str, **settings: Any) -> list[Path]:
    """Four checkpoints, each a small change of the one before; ``settings`` as for the first."""
    steps = [build_checkpoint(folder / "0", family, **settings)]
    for number, fraction in enumerate((0.02, 0.3, 0.005), start=1):
        target = folder / str(number)
        perturb_checkpoint(steps[-1], target, fraction=fraction, seed=number, change="values")
        steps.append(target)
    return steps


# (tensor, its bits as integers, generator) -> other bits for every element
NewBits = Callable[[torch.Tensor, torch.Tensor, torch.Generator], torch.Tensor]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _changed(
    tensor: torch.Tensor,
    fraction: float,
    new_bits: NewBits,
    generator: torch.Generator,
) -> tuple[torch.Tensor, int]:
    bits = tensor.contiguous().view(_BITS[tensor.itemsize])
    chosen = torch.rand(tensor.shape, generator=generator) < fraction
    if fraction > 0 and chosen.numel() and not chosen.any():
        chosen.view(-1)[0] = True
    # Flipping a low bit makes sure that a chosen element differs whatever the change gave.
    fresh = new_bits(tensor, bits, generator)
    fresh = torch.where(fresh == bits, bits ^ 1, fresh)
    result = torch.where(chosen, fresh, bits).view(tensor.dtype)
    return result, int(chosen.sum())


def _flipped(tensor: torch.Tensor, bits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    flips = torch.randint(1, 4, tensor.shape, generator=generator)
    return bits ^ flips.to(bits.dtype)


def _rescaled(tensor: torch.Tensor, bits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    factors = 1 + 0.5 * torch.randn(tensor.shape, generator=generator)
    return (tensor.float() * factors).to(tensor.dtype).view(bits.dtype)


_CHANGES: dict[str, NewBits] = {
    "ulps": _flipped,
    "values": _rescaled,
}
