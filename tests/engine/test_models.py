"""A sample of ``make models``: after two syncs each equals a plain, fresh engine, or is refused by name."""

import pytest

from tests.models_table import compare

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    "name",
    [
        "falcon",
        "gemma2",
        "mamba2",
        "nemotron_h",
        "olmoe",
        "bert",
        "qwen3_next",
        "whisper",
        "idefics3",
        "llama, LoRA adapter",
        "llama, int8 checkpoint",
        "mixtral, EP 2",
        "deepseek_v2, PP 2",
    ],
)
def test_exact(name: str) -> None:
    result = compare(name)
    assert result["weights"]
    assert result["outputs"]
    assert all(sum(routes.values()) > 0 for routes in result["routes"])


def test_a_draft_model_is_refused_and_nothing_changed() -> None:
    result = compare("llama, draft model")
    assert "draft model" in result["refused"]
    assert result["unchanged"]
