"""Small random checkpoints of real architectures that vLLM loads on a CPU, and changed copies."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto import CONFIG_MAPPING

VOCABULARY = 512  # token ids are 0 .. VOCABULARY - 1

# Attention on the CPU needs heads of 32 or more. No end token, so generation never stops early.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}


@dataclass(frozen=True)
class _Family:
    model_type: str
    settings: Mapping[str, Any]
    without: tuple[str, ...] = ()

    def config(self, overrides: Mapping[str, Any]) -> Any:
        settings = {k: v for k, v in _COMMON.items() if k not in self.without}
        return CONFIG_MAPPING[self.model_type](**{**settings, **self.settings, **overrides})


_FAMILIES: dict[str, _Family] = {
    "llama": _Family("llama", {}),
    "qwen2": _Family("qwen2", {}),
    "qwen3": _Family("qwen3", {"tie_word_embeddings": True}),
    "phi3": _Family("phi3", {}),
    "gemma3": _Family(
        "gemma3_text",
        {
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 32,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gpt2": _Family(
        "gpt2",
        {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 256, "tie_word_embeddings": True},
        without=(
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ),
    ),
    "mixtral": _Family("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": _Family("qwen3_moe", _EXPERTS),
    "deepseek_v2": _Family(
        "deepseek_v2",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 512,  # with the next one, the only sizes MLA has on the CPU
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
        },
        without=("head_dim",),
    ),
}
_FAMILIES["deepseek_v3"] = _Family(
    "deepseek_v3",
    {
        **_FAMILIES["deepseek_v2"].settings,
        "q_lora_rank": 64,
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
    },
    without=("head_dim",),
)
_FAMILIES["gpt_oss"] = _Family(
    "gpt_oss",
    {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"],
    },
)
FAMILIES = tuple(_FAMILIES)


def build_model(
    family: str, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """A random model of ``family``; ``overrides`` go to its configuration. Same seed, same bits."""
    config = _FAMILIES[family].config(overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
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
    return folder


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
