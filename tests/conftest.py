"""Environment of every test: no network, no usage reports, a small KV cache."""

import os

from hypothesis import settings

# How long an example takes says more of the machine than of the code.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")

# Set at import: before a test module imports vLLM or transformers. Engine processes inherit it.
os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
    VLLM_CPU_KVCACHE_SPACE="1",
)
