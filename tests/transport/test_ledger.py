"""Exactly-once bookkeeping, without sockets."""

import pytest

from vllm_sparse_refit.errors import TransactionError, TransportError
from vllm_sparse_refit.transport.ledger import Repeat, ReplyTo, Ticket, TransferLedger
from vllm_sparse_refit.transport.protocol import PayloadMetadata

ME = ReplyTo(b"peer", b"1")


def payload(
    transfer_id: str = "t", payload_id: int = 0, checksum: str = "0" * 32
) -> PayloadMetadata:
    return PayloadMetadata(
        transfer_id=transfer_id,
        producer_id=0,
        payload_id=payload_id,
        checksum=checksum,
        verification_candidates=0,
    )


def stage(ledger: TransferLedger, metadata: PayloadMetadata, *, staged: bool = True) -> None:
    ledger.arrive(metadata.transfer_id)
    ticket = ledger.admit(metadata, ME)
    assert isinstance(ticket, Ticket)
    assert ledger.settle(ticket, staged=staged) == [ME]


def test_a_failed_staging_leaves_no_trace() -> None:
    ledger = TransferLedger(max_transfers=1)
    stage(ledger, payload("a"), staged=False)
    stage(ledger, payload("b"))
    stage(ledger, payload("b", 1), staged=False)
    stage(ledger, payload("b", 1))
    assert ledger.flush("b", 2, 0) == {"payloads": 2, "producers": {"0": 2}}


def test_open_transfers_are_limited_and_sealed_ones_make_room() -> None:
    ledger = TransferLedger(max_transfers=2)
    stage(ledger, payload("a"))
    stage(ledger, payload("b"))
    with pytest.raises(TransactionError, match="2 transfers are open"):
        ledger.admit(payload("c"), ME)
    ledger.flush("b", 1, 0)
    stage(ledger, payload("c"))
    assert ledger.admit(payload("a"), ME) is Repeat.STAGED


def test_forgetting_during_staging_keeps_the_answer() -> None:
    ledger = TransferLedger()
    ledger.arrive("t")
    ticket = ledger.admit(payload(), ME)
    assert isinstance(ticket, Ticket)
    ledger.forget("t")
    assert ledger.settle(ticket, staged=True) == [ME]
    assert ledger.flush("t", 0, 0)["payloads"] == 0


def test_a_forgotten_transfer_starts_anew() -> None:
    ledger = TransferLedger()
    stage(ledger, payload())
    ledger.flush("t", 1, 0)
    ledger.forget("t")
    stage(ledger, payload(checksum="1" * 32))


def test_flush_of_a_sealed_transfer() -> None:
    ledger = TransferLedger()
    stage(ledger, payload())
    assert ledger.flush("t", 1, 0) == ledger.flush("t", 1, 0)
    with pytest.raises(TransportError, match=r"sealed with 1 payloads and 2 are expected"):
        ledger.flush("t", 2, 0)
