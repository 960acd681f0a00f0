"""The shape of relay trees, without sockets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_sparse_refit.errors import ConfigError, PayloadError
from vllm_sparse_refit.transport.tree import RelayTree, height


def addresses_of(count: int) -> list[str]:
    return [f"tcp://10.0.0.{number}:5000" for number in range(count)]


@given(count=st.integers(1, 70), fanout=st.integers(1, 9), data=st.data())
def test_every_worker_is_reached_once_from_every_root(
    count: int, fanout: int, data: st.DataObject
) -> None:
    addresses = addresses_of(count)
    trees = {own: RelayTree.of(addresses, own, fanout) for own in addresses}
    root = data.draw(st.sampled_from(addresses))
    for own in addresses:
        below = [trees[own].levels_below(root, child) for child in trees[own].children(root)]
        assert trees[own].levels_below(root, own) == max(below, default=-1) + 1
    reached, level, levels = [root], [root], 0
    while level:
        assert all(len(trees[parent].children(root)) <= fanout for parent in level)
        level = [child for parent in level for child in trees[parent].children(root)]
        reached += level
        levels += bool(level)
    assert sorted(reached) == sorted(addresses)
    assert levels == height(count, fanout) == trees[root].levels_below(root, root)
    # Of the least height: a complete tree one level lower would not hold all of them.
    assert sum(fanout**height for height in range(levels)) < count or count == 1


def test_a_tree_is_checked() -> None:
    one, two = addresses_of(2)
    for addresses, own, fanout, reason in (
        ([one, one], one, 2, "twice"),
        ([one], two, 2, "not in the relay tree"),
        ([one], one, 0, "fan-out"),
        ([one], one, True, "fan-out"),
        ([one, "tcp://0.0.0.0:5000"], one, 2, "advertised_host"),
    ):
        with pytest.raises(ConfigError, match=reason):
            RelayTree.of(addresses, own, fanout)
    with pytest.raises(PayloadError, match="no worker of the tree"):
        RelayTree.of([one], one, 2).children(two)
