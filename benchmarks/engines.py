"""Real vLLM engines on the CPU, and what must be equal between two of them.

Shared by the demo and the benchmark. vLLM is imported only when an engine starts, after
:func:`prepare_environment`.
"""

import contextlib
import gc
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# These always hold: an engine with the plugin, its workers in processes of their own as in a real
# deployment, and nothing fetched from or reported to the network.
_REQUIRED = {
    "VLLM_PLUGINS": "sparse_refit",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
# These can be set otherwise from outside.
_DEFAULTS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
}

# vLLM warns about Triton before it has set up its own logging. At the top of the module, since the
# engine's processes import it too.
if logging.lastResort is not None:
    logging.lastResort.setLevel(logging.ERROR)


def prepare_environment() -> None:
    """Set what vLLM reads from the environment. Call before vLLM or transformers is imported."""
    os.environ.update(_REQUIRED)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def engine(folder: Path, **settings: Any) -> Iterator[Any]:
    """A running :class:`vllm.LLM` on a checkpoint; it and its processes end on exit.

    Args:
        folder: the checkpoint; it needs no tokenizer, prompts are token ids.
        settings: passed to ``LLM``.
    """
    from vllm import LLM

    defaults = {
        "skip_tokenizer_init": True,
        "max_model_len": 256,
        "enforce_eager": True,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    llm = LLM(str(folder), **{**defaults, **settings})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


@dataclass(frozen=True)
class Completion:
    """What an engine generated for one prompt.

    Attributes:
        tokens: the chosen tokens.
        chosen: their log-probabilities.
        logprobs: the most likely tokens of every step with their log-probabilities, the prompt's
            own included.
    """

    tokens: list[int]
    chosen: list[float]
    logprobs: list[dict[int, float]]


def generate(llm: Any, prompts: list[list[int]], *, tokens: int) -> list[Completion]:
    """Continue every prompt greedily by ``tokens`` tokens."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0,
        max_tokens=tokens,
        logprobs=5,
        prompt_logprobs=5,
        detokenize=False,
        ignore_eos=True,
    )
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [_completion(output) for output in llm.generate(inputs, sampling, use_tqdm=False)]


def _completion(output: Any) -> Completion:
    made = output.outputs[0]
    tokens = list(made.token_ids)
    steps = [
        {token: value.logprob for token, value in step.items()}
        # The first token of a prompt follows nothing and has no probability.
        for step in [*output.prompt_logprobs[1:], *made.logprobs]
    ]
    own = steps[len(steps) - len(tokens) :]
    return Completion(tokens, [step[token] for step, token in zip(own, tokens, strict=True)], steps)


Checksums = dict[str, str]


def checksums(llm: Any) -> Checksums:
    """vLLM's own checksum of every parameter and buffer, by rank and name.

    Raises:
        RuntimeError: the engine gave none.
    """
    found: Checksums = {}
    for rank in llm.collective_rpc("compute_weight_checksums"):
        found.update(rank)
    if not found:
        raise RuntimeError("the engine returned no checksums")
    return found


def differing(one: Checksums, other: Checksums) -> list[str]:
    """Names of the tensors whose bits differ, or that only one engine has."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
