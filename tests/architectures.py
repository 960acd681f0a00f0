"""Tiny configurations of real architectures, by name: random weights, nothing downloaded."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from transformers.models.auto import CONFIG_MAPPING

VOCABULARY = 512  # token ids are 0 .. VOCABULARY - 1
IMAGE_TOKEN = 505  # of models that take images

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
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_GPT2_SIZES = {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 256}
_DEEPSEEK: dict[str, Any] = {
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
}
_GEMMA: dict[str, Any] = {
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 32,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"],
}
_LINEAR_ATTENTION: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": ["linear_attention", "full_attention"],
}
_NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
# Of families that take more than text: they name their sizes otherwise, and a processor needs the tokenizer.
_PROCESSED: dict[str, Any] = {"without": tuple(_COMMON), "engine": {"skip_tokenizer_init": False}}


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        model_type: of transformers.
        settings: of its configuration, beside the common ones.
        without: common settings that it does not have.
        auto_class: the transformers class that builds it.
        engine: what its engines need beside the usual settings.
        runs: how its engines are asked: ``"generate"``, ``"embed"``, ``"image"`` and ``"audio"`` (prompts
            with one), ``"adapter"`` (without and with a LoRA adapter), or ``"load"`` where they cannot be.
        files: what its engines need beside the weights: a function of :mod:`tests.processors`.
        ignore: checkpoint names that its engines need not get.
        int8: store linear layers in int8 with a scale for each row, as compressed-tensors does.
    """

    model_type: str
    settings: Mapping[str, Any]
    without: tuple[str, ...] = ()
    auto_class: str = "AutoModelForCausalLM"
    engine: Mapping[str, Any] = field(default_factory=dict)
    runs: str = "generate"
    files: str = ""
    ignore: tuple[str, ...] = ()
    int8: bool = False

    def config(self, overrides: Mapping[str, Any]) -> Any:
        settings = {k: v for k, v in _COMMON.items() if k not in self.without}
        return CONFIG_MAPPING[self.model_type](**{**settings, **self.settings, **overrides})


FAMILIES: dict[str, Family] = {
    "llama": Family("llama", {}),
    "qwen2": Family("qwen2", {}),
    "qwen3": Family("qwen3", {"tie_word_embeddings": True}),
    "phi3": Family("phi3", {}),
    "gemma3": Family("gemma3_text", _GEMMA),
    "gpt2": Family("gpt2", {**_GPT2_SIZES, "tie_word_embeddings": True}, without=_SIZES),
    "mixtral": Family("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": Family("qwen3_moe", _EXPERTS),
    "deepseek_v2": Family("deepseek_v2", _DEEPSEEK, without=("head_dim",)),
    "deepseek_v3": Family(
        "deepseek_v3",
        {**_DEEPSEEK, "q_lora_rank": 64, "topk_method": "noaux_tc", "num_nextn_predict_layers": 0},
        without=("head_dim",),
    ),
    "gpt_oss": Family(
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 64,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gemma2": Family("gemma2", _GEMMA),
    "opt": Family(
        "opt",
        {"ffn_dim": 256, "word_embed_proj_dim": 128, "tie_word_embeddings": True},
        without=("intermediate_size", "num_key_value_heads", "head_dim"),
    ),
    "gpt_neox": Family("gpt_neox", {}, without=("num_key_value_heads", "head_dim")),
    "falcon": Family(
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False, "bias": False},
        without=("intermediate_size", "num_key_value_heads", "head_dim"),
    ),
    "bloom": Family(
        "bloom",
        {"hidden_size": 128, "n_layer": 2, "n_head": 4, "tie_word_embeddings": True},
        without=_SIZES,
    ),
    "starcoder2": Family("starcoder2", {"tie_word_embeddings": True}, without=("head_dim",)),
    "mamba": Family(
        "mamba",
        {"state_size": 16, "num_hidden_layers": 2, "hidden_size": 128},
        without=_SIZES,
        runs="load",  # the CPU build of vLLM lacks its kernel
    ),
    "mamba2": Family(
        "mamba2",
        {
            "state_size": 16,
            "num_heads": 8,
            "head_dim": 32,
            "n_groups": 1,
            "chunk_size": 64,
            "hidden_size": 128,
            "num_hidden_layers": 2,
        },
        without=_SIZES,
    ),
    "nemotron_h": Family(
        "nemotron_h",
        {
            "num_hidden_layers": 3,
            "hybrid_override_pattern": "M*-",
            "ssm_state_size": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "mamba_n_groups": 1,
            "n_groups": 1,
            "chunk_size": 64,
        },
    ),
    "qwen3_next": Family(
        "qwen3_next",
        {
            **_EXPERTS,
            **_LINEAR_ATTENTION,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "lfm2": Family(
        "lfm2",
        {
            "layer_types": ["conv", "full_attention"],
            "tie_word_embeddings": True,
            "conv_dim": 128,
            "block_dim": 128,
        },
        without=("head_dim",),
    ),
    "glm4": Family("glm4", {}),
    "cohere": Family("cohere", {"tie_word_embeddings": True}, without=("head_dim",)),
    "olmo2": Family("olmo2", {}, without=("head_dim",)),
    "olmoe": Family("olmoe", _EXPERTS, without=("head_dim",)),
    "granitemoe": Family(
        "granitemoe",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        without=("head_dim",),
    ),
    "stablelm": Family("stablelm", {}, without=("head_dim",)),
    "qwen2_moe": Family(
        "qwen2_moe",
        {**_EXPERTS, "shared_expert_intermediate_size": 64},
        without=("head_dim",),
    ),
    "phi": Family("phi", {}, without=("head_dim",)),
    "gptj": Family("gptj", {**_GPT2_SIZES, "rotary_dim": 32}, without=_SIZES),
    "gpt_bigcode": Family(
        "gpt_bigcode", {**_GPT2_SIZES, "tie_word_embeddings": True}, without=_SIZES
    ),
    "minicpm3": Family(
        "minicpm3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 64,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 32,
            "v_head_dim": 32,
            "tie_word_embeddings": True,
        },
        without=("head_dim",),
    ),
    "jamba": Family(
        "jamba",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 16,
        },
        without=("head_dim",),
        runs="load",  # as mamba
    ),
    "falcon_h1": Family(
        "falcon_h1",
        {
            "mamba_d_ssm": 256,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_n_groups": 1,
            "mamba_d_state": 16,
            "mamba_chunk_size": 64,
        },
    ),
    "granitemoehybrid": Family(
        "granitemoehybrid",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_chunk_size": 64,
        },
        without=("head_dim",),
    ),
    "zamba2": Family(
        "zamba2",
        {
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "layers_block_type": ["mamba", "hybrid", "hybrid"],
            "num_mem_blocks": 1,
            "n_mamba_heads": 8,
            "mamba_d_state": 16,
            "mamba_ngroups": 1,
            "chunk_size": 64,
            "adapter_rank": 8,
            "tie_word_embeddings": True,
        },
        without=("head_dim", "num_hidden_layers"),
    ),
    "llama4": Family(
        "llama4_text",
        {
            "intermediate_size": 64,
            "intermediate_size_mlp": 256,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
        },
    ),
    "lfm2_moe": Family(
        "lfm2_moe",
        {
            **_EXPERTS,
            "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention"],
            "tie_word_embeddings": True,
        },
        without=("head_dim",),
    ),
    "glm4_moe": Family(
        "glm4_moe",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "use_qk_norm": True,
        },
    ),
    "whisper": Family(
        "whisper",
        {
            "vocab_size": VOCABULARY,
            "num_mel_bins": 80,
            "d_model": 128,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 256,
            "decoder_ffn_dim": 256,
            "max_source_positions": 100,
            "max_target_positions": 128,
            "init_std": 0.1,
            "decoder_start_token_id": 1,
            "begin_suppress_tokens": None,
            **_NO_SPECIAL_TOKENS,
        },
        **_PROCESSED,
        auto_class="AutoModelForSpeechSeq2Seq",
        runs="audio",
        files="save_whisper_processor",
    ),
    "idefics3": Family(
        "idefics3",
        {
            "text_config": {**_COMMON, "model_type": "llama", "tie_word_embeddings": True},
            "vision_config": {
                "hidden_size": 128,
                "intermediate_size": 256,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": 32,
                "patch_size": 8,
                "initializer_range": 0.1,
            },
            "image_token_id": IMAGE_TOKEN,
            "scale_factor": 2,
            "tie_word_embeddings": True,
            **_NO_SPECIAL_TOKENS,
        },
        **_PROCESSED,
        auto_class="AutoModelForImageTextToText",
        runs="image",
        files="save_idefics3_processor",
    ),
    "bert": Family(
        "bert",
        {"pad_token_id": 0},
        without=("num_key_value_heads", "head_dim"),
        auto_class="AutoModel",
        engine={"runner": "pooling", "skip_tokenizer_init": False},
        runs="embed",
        files="save_tokenizer",
        ignore=("pooler.*",),
    ),
}


def _variant(family: str, runs: str | None = None, **engine: Any) -> Family:
    base = FAMILIES[family]
    return replace(base, engine={**base.engine, **engine}, runs=runs or base.runs)


_RANKS: dict[str, Any] = {
    "processes": True,
    "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    "max_model_len": 64,
}
_TP = {**_RANKS, "tensor_parallel_size": 2}
_PP = {**_RANKS, "pipeline_parallel_size": 2}
_DRAFT = {"method": "draft_model", "model": "DRAFT", "num_speculative_tokens": 2}
# In a process of its own: it imports numba, beside which no further engine starts.
_NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}

# Other ways to run some of them. Two pipeline stages, and experts on two ranks, load on the CPU and answer
# calls, but vLLM does not generate with them there: their tensors are compared.
FAMILIES |= {
    "llama fp32": _variant("llama", dtype="float32"),
    "llama fp16": _variant("llama", dtype="float16"),
    "llama fp32, compiled": _variant("llama", dtype="float32", enforce_eager=False),
    "mixtral, compiled": _variant("mixtral", enforce_eager=False),
    "mixtral fp32": _variant("mixtral", dtype="float32"),
    "deepseek_v2 fp32": _variant("deepseek_v2", dtype="float32"),
    "qwen2, TP 2": _variant("qwen2", **_TP),
    "mixtral, TP 2": _variant("mixtral", **_TP),
    "deepseek_v2, TP 2": _variant("deepseek_v2", **_TP),
    "qwen2, PP 2": _variant("qwen2", "load", **_PP),
    "mixtral, PP 2": _variant("mixtral", "load", **_PP),
    "deepseek_v2, PP 2": _variant("deepseek_v2", "load", **_PP),
    "mixtral, EP 2": _variant("mixtral", "load", **_TP, enable_expert_parallel=True),
    "deepseek_v2, EP 2": _variant("deepseek_v2", "load", **_TP, enable_expert_parallel=True),
    # One request at a time: with more, vLLM's LoRA layers raise on the CPU.
    "llama, LoRA enabled": _variant("llama", enable_lora=True, max_lora_rank=8, max_num_seqs=1),
    "llama, LoRA adapter": _variant(
        "llama", "adapter", enable_lora=True, max_lora_rank=8, max_num_seqs=1
    ),
    "llama, n-gram speculation": _variant("llama", processes=True, speculative_config=_NGRAM),
    "llama, draft model": _variant("llama", speculative_config=_DRAFT),
    "llama, int8 checkpoint": replace(FAMILIES["llama"], int8=True),
    "llama, online fp8": _variant("llama", quantization="fp8"),
    "mixtral, online fp8": _variant("mixtral", quantization="fp8"),
}
