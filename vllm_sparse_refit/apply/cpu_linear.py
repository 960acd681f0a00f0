"""Keep vLLM's linear layers unpacked on the CPU backend.

vLLM's CPU backend hands a linear layer's weight to oneDNN or to its own kernels, which pack a copy
of it into an opaque object and may leave ``layer.weight`` empty. Which layers are packed depends on
the dtype and on the CPU. New values written into ``layer.weight`` never reach such a copy, so while
the plugin is enabled every layer keeps ``torch.nn.functional.linear``, the path vLLM itself falls
back to.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch


@contextmanager
def unpacked_cpu_linear() -> Iterator[None]:
    """While active, linear layers, embeddings and ``lm_head`` loaded on the CPU stay unpacked.

    Does nothing on other platforms. Not thread-safe: it replaces a function of a vLLM module, so
    one model loads at a time, as vLLM does.
    """
    from vllm.logger import init_logger
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        yield
        return
    init_logger(__name__).info_once(
        "sparse_refit keeps linear layers, embeddings and lm_head unpacked on the CPU, "
        "so that updated weights take effect"
    )
    from vllm.model_executor.layers import utils as layer_utils

    dispatch = layer_utils.dispatch_cpu_unquantized_gemm

    def keep_unpacked(layer: torch.nn.Module, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            # A function, which nn.Module's own type for attributes does not know.
            setattr(layer, "cpu_linear", torch.nn.functional.linear)  # noqa: B010
        else:
            # No linear layer: a convolution whose kernel may insist on the packed form.
            dispatch(layer, remove_weight)

    # Both users of the function import it by name when they run, so replacing it in its module
    # suffices.
    with mock.patch.object(layer_utils, "dispatch_cpu_unquantized_gemm", keep_unpacked):
        yield
