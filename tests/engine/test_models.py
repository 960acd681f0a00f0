"""A sample of ``make models``: after two syncs each equals a plain, fresh engine, or is refused by name."""

import pytest

from tests.models_table import compare

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    "name",
    [
        "falcon",
        "gemma2",
        "lfm2",
        "mamba",
        "nemotron_h",
        "qwen3_next",
        "bert",
        "llama, LoRA enabled",
        "llama, n-gram speculation",
        "mixtral, TP 2",
        "deepseek_v2, PP 2",
    ],
)
def test_exact(name: str) -> None:
    result = compare(name)
    assert result["weights"]
    assert result["outputs"]
    assert all(sum(routes.values()) > 0 for routes in result["routes"])


@pytest.mark.parametrize(
    ("name", "reason"),
    [("llama, draft model", "draft model"), ("llama, online fp8", "quantiz")],
)
def test_refused_by_name_and_unchanged(name: str, reason: str) -> None:
    result = compare(name)
    assert reason in result["refused"]
    assert result["unchanged"]
