"""The README names what there is."""

from pathlib import Path

import pytest

from vllm_sparse_refit import ProducerShard, WeightSynchronizer

README = (Path(__file__).parent.parent / "README.md").read_text()


@pytest.mark.parametrize("kind", [WeightSynchronizer, ProducerShard])
def test_every_public_method_is_in_the_table_of_its_class(kind: type) -> None:
    _, found, rest = README.partition(f"| `{kind.__name__}")
    assert found
    table = rest.partition("\n\n")[0]
    names = [name for name in vars(kind) if not name.startswith("_")]
    assert [name for name in names if f"`{name}" not in table] == []
