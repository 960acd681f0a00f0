"""The benchmark measures what it says: every payload at every server, by both ways."""

from benchmarks import transport
from vllm_sparse_refit.config import MIB


def test_both_ways_deliver_and_the_ratio_is_theirs() -> None:
    figures = transport.throughput(3, 2, 8 * MIB, 1)
    assert figures["payload_bytes"] == 8 * MIB
    assert figures["tree_s"] > 0
    assert abs(figures["throughput_ratio"] - figures["raw_s"] / figures["tree_s"]) < 0.05
    table = transport.scaling((1, 3), (2, 4), 4 * MIB)
    assert [(row["servers"], row["fanout"]) for row in table] == [(1, 2), (1, 4), (3, 2), (3, 4)]
