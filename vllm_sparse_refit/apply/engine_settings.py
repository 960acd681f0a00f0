"""What an engine's configuration means for updates of its model."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from vllm_sparse_refit.errors import UnsupportedModelError


def check_engine(model_runner: Any) -> None:
    """Check that the engine runs in a mode in which its weights can be updated.

    Raises:
        UnsupportedModelError: it does not; says which setting is in the way.
    """
    if model_runner.vllm_config.parallel_config.enable_eplb:
        raise UnsupportedModelError(
            "the engine moves experts between ranks (enable_eplb), so their weights do not stay where "
            "they were loaded; start it without expert load balancing"
        )
    for name, module in model_runner.get_model().named_modules():
        if getattr(getattr(module, "quant_method", None), "uses_meta_device", False):
            raise UnsupportedModelError(
                f"layer {name} is quantized while it loads (online quantization), and what it is made of is "
                "not kept; start the engine from a quantized checkpoint, or unquantized"
            )
    if draft := draft_model(model_runner):
        raise UnsupportedModelError(
            f"the engine runs a draft model ({draft}), whose weights would go stale; "
            "start it without speculative decoding"
        )


@contextlib.contextmanager
def load_context(model_runner: Any) -> Iterator[None]:
    """The context in which vLLM loads a checkpoint: current config and default dtype."""
    from vllm.config import set_current_vllm_config
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = model_runner.vllm_config
    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
        yield


def ties_output(model_runner: Any) -> bool:
    config = model_runner.vllm_config.model_config.hf_config.get_text_config()
    return bool(getattr(config, "tie_word_embeddings", False))


def draft_model(model_runner: Any) -> str | None:
    """The draft model's name if the worker has one with weights of its own."""
    config = model_runner.vllm_config.speculative_config
    if config is None or getattr(config, "draft_model_config", None) is None:
        return None
    # For n-gram speculation vLLM gives the target model's configuration, and a drafter without a model.
    drafter = getattr(model_runner, "drafter", None)
    if drafter is not None and not _holds_module(drafter):
        return None
    return str(config.draft_model_config.model)


def _holds_module(drafter: Any) -> bool:
    return any(isinstance(value, torch.nn.Module) for value in vars(drafter).values())
