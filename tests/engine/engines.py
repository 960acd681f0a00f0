"""Start real vLLM engines on the CPU, and read what must be equal between two of them."""

import contextlib
import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.checkpoints import save_adapter

PROMPTS = [
    {"prompt_token_ids": list(range(10, 42))},
    {"prompt_token_ids": [7, 3, 400, 11]},
    {"prompt_token_ids": [500] * 9},
]


@contextlib.contextmanager
def engine(
    folder: Path,
    *,
    plugins: str | None = "sparse_refit",
    processes: bool = False,
    environment: dict[str, str] | None = None,
    **settings: Any,
) -> Iterator[Any]:
    """A running :class:`vllm.LLM` on a checkpoint; ended, with its workers, on exit.

    Only one engine at a time can run in process: vLLM's parallel groups belong to the process.

    Args:
        plugins: value of ``VLLM_PLUGINS``; None leaves it unset.
        processes: run the engine core and the workers in processes of their own.
        environment: further environment variables.
        settings: passed to ``LLM``.
    """
    import vllm.envs
    from vllm import LLM
    from vllm.v1.worker.cpu_worker import CPUWorker

    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes)), **(environment or {})}
    with pytest.MonkeyPatch.context() as patch:
        # An in-process engine caches the environment of its process; the next one needs its own.
        vllm.envs.disable_envs_cache()
        for name, value in variables.items():
            patch.setenv(name, value)
        if plugins is None:
            patch.delenv("VLLM_PLUGINS", raising=False)
        else:
            patch.setenv("VLLM_PLUGINS", plugins)
        defaults = {
            "skip_tokenizer_init": True,
            "max_model_len": 128,
            "enforce_eager": True,
            "disable_log_stats": True,
        }
        bases = CPUWorker.__bases__
        llm = LLM(str(folder), **{**defaults, **settings})
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()
            # An extension class stays among the worker's bases for good, where the next would clash.
            CPUWorker.__bases__ = bases


def generate(llm: Any, tokens: int = 6, prompts: Any = PROMPTS, **options: Any) -> list[Any]:
    """Greedy tokens with their log-probabilities, and the prompts' log-probabilities, as plain values.

    ``options`` go to ``LLM.generate``.
    """
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0,
        max_tokens=tokens,
        logprobs=5,
        prompt_logprobs=3,
        detokenize=False,
        ignore_eos=True,
    )
    outputs = llm.generate(prompts, sampling, use_tqdm=False, **options)
    return [
        (
            list(output.outputs[0].token_ids),
            [_plain(step) for step in output.outputs[0].logprobs],
            [_plain(step) for step in output.prompt_logprobs or ()],
        )
        for output in outputs
    ]


def embed(llm: Any) -> list[list[float]]:
    """The pooled outputs of an embedding model."""
    return [
        output.outputs.data.flatten().tolist()
        for output in llm.encode(PROMPTS, pooling_task="embed", use_tqdm=False)
    ]


def load(_: Any) -> None:
    """Nothing, of engines that cannot be asked."""


def image(llm: Any) -> list[Any]:
    """As :func:`generate`, also for a prompt with an image."""
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    tokens = [7, llm.llm_engine.model_config.hf_config.image_token_id, 400, 11]
    prompt = {"prompt_token_ids": tokens, "multi_modal_data": {"image": Image.fromarray(pixels)}}
    return generate(llm, prompts=[*PROMPTS, prompt])


def audio(llm: Any) -> list[Any]:
    """As :func:`generate`, after an encoder has read two seconds of noise."""
    noise = np.random.default_rng(0).standard_normal(2 * 16000).astype(np.float32)
    encoder = {"prompt": "", "multi_modal_data": {"audio": (noise, 16000)}}
    prompt = {"encoder_prompt": encoder, "decoder_prompt": {"prompt_token_ids": [7, 3, 400]}}
    return generate(llm, prompts=[prompt])


def adapter(llm: Any) -> list[Any]:
    """As :func:`generate`, without and with a LoRA adapter."""
    from vllm.lora.request import LoRARequest

    with tempfile.TemporaryDirectory(prefix="adapter-") as folder:
        save_adapter(Path(folder), llm.llm_engine.model_config.hf_config)
        request = LoRARequest("adapter", 1, folder)
        plain, adapted = generate(llm), generate(llm, lora_request=request)
    assert plain != adapted
    return [plain, adapted]


def _plain(step: Any) -> list[tuple[int, float]]:
    return [] if step is None else sorted((token, value.logprob) for token, value in step.items())


def checksums(llm: Any) -> list[dict[str, str]]:
    """vLLM's own checksum of every parameter and buffer, one mapping for each rank."""
    found: list[dict[str, str]] = llm.collective_rpc("compute_weight_checksums")
    assert all(found)
    return found


def tensor_checksums(llm: Any) -> list[dict[str, str]]:
    """As :func:`checksums`, also of derived tensors; the engine has ``TensorChecksums`` as extension."""
    found: list[dict[str, str]] = llm.collective_rpc("tensor_checksums")
    assert all(found)
    return found


def worker(llm: Any) -> Any:
    """The worker of an engine that runs in process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def model(llm: Any) -> torch.nn.Module:
    """The model of an engine that runs in process."""
    found: torch.nn.Module = worker(llm).model_runner.get_model()
    return found


def state(llm: Any) -> tuple[list[dict[str, str]], list[Any]]:
    """All that a fresh engine of the same checkpoint must have too."""
    return checksums(llm), generate(llm)


def fresh_state(folder: Path, **settings: Any) -> tuple[list[dict[str, str]], list[Any]]:
    """The state of a plain engine, without the plugin, started from ``folder`` just for this."""
    with engine(folder, **{"plugins": None, **settings}) as llm:
        return state(llm)
