"""A network that loses, delays, repeats, reorders and spoils messages."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fleet.fleets import Fleet, send_part, toy_fleet
from tests.fleet.proxy import FAULTS, Proxy
from tests.fleet.toy_worker import toy_weights
from vllm_sparse_refit.errors import RefitError
from vllm_sparse_refit.transport import monitor

SEEDS = 1, 2, 3, 4


@contextlib.contextmanager
def behind_proxies(
    fleet: Fleet, faults: tuple[str, ...], rate: float, seed: int
) -> Iterator[list[Proxy]]:
    """Have the trainer and the relays reach every worker through a proxy of its own."""
    proxies = []
    for number, llm in enumerate(fleet.llms):
        receiver = llm.workers[0].receiver
        proxy = Proxy(receiver.address, faults, rate, 100 * seed + number)
        receiver.address = receiver._server._address = proxy.address
        proxies.append(proxy)
    try:
        yield proxies
    finally:
        for proxy in proxies:
            proxy.close()


CASES = [(1, FAULTS), *((3, (fault,)) for fault in FAULTS), (3, FAULTS), (7, FAULTS)]


@pytest.mark.parametrize(("engines", "faults"), CASES)
def test_every_sync_ends_old_or_new_everywhere(
    engines: int, faults: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A lost answer to a status query is asked for again sooner: waiting for it tests nothing.
    monkeypatch.setattr(monitor, "_ROUND_S", 0.2)
    limits: dict[str, Any] = {"timeout_s": 0.3, "retries": 4}
    relays: dict[str, Any] = {"relay_timeout_s": 0.3, "relay_retries": 4}
    old, struck, done = 1, 0, 0
    with toy_fleet(engines, **relays) as fleet:
        for seed in SEEDS:
            if seed == 1:
                stack = contextlib.ExitStack()
                proxies = stack.enter_context(behind_proxies(fleet, faults, 0.1, seed))
                sync = fleet.connect(**limits)
            before, after = toy_weights(old), toy_weights(seed + 1)
            try:
                sync.sync(after.items())
            except RefitError:
                fleet.assert_holds(before)
            else:
                fleet.assert_holds(after)
                old, done = seed + 1, done + 1
        struck = sum(sum(proxy.counts.values()) for proxy in proxies)
        for proxy in proxies:
            proxy.enabled = False
        sync.sync(toy_weights(9).items())
        fleet.assert_holds(toy_weights(9))
        stack.close()
    assert struck
    if "corrupt" not in faults:
        assert done == len(SEEDS)  # what is lost or repeated is made good


def test_the_count_of_each_producer_is_checked() -> None:
    with toy_fleet(3) as fleet:
        fleet.connect()  # has the workers discover their tensors
        addresses = fleet.begin_by_hand("t")
        counts = {
            str(rank): send_part(toy_weights(2).items(), addresses, "t", rank=rank, size=2)
            for rank in range(2)
        }
        assert len(set(counts.values())) == 2  # so that swapping them is a difference
        for llm in fleet.llms:
            swapped = {"0": counts["1"], "1": counts["0"]}
            (reply,) = llm.collective_rpc("sparse_refit_prepare", args=("t", swapped))
            assert "by producer" in reply["error"]
            (reply,) = llm.collective_rpc("sparse_refit_prepare", args=("t", counts))
            assert reply["ok"], reply
            assert llm.collective_rpc("sparse_refit_commit", args=("t",))[0]["ok"]
        fleet.assert_holds(toy_weights(2))
