"""Exactly-once bookkeeping, without sockets."""

import pytest

from vllm_sparse_refit.errors import TransactionError, TransportError
from vllm_sparse_refit.transport.ledger import MAX_ENDED, Repeat, ReplyTo, Ticket, TransferLedger
from vllm_sparse_refit.transport.protocol import PayloadMetadata

ME = ReplyTo(b"peer", b"1")


def payload(
    transfer_id: str = "t", payload_id: int = 0, checksum: str = "0" * 32, sequence: int = 1
) -> PayloadMetadata:
    return PayloadMetadata(
        transfer_id=transfer_id,
        sequence=sequence,
        producer_id=0,
        payload_id=payload_id,
        checksum=checksum,
        verification_candidates=0,
    )


def ledger_with_t(**options: int) -> TransferLedger:
    ledger = TransferLedger(**options)
    ledger.open("t", 1)
    return ledger


def admitted(ledger: TransferLedger, metadata: PayloadMetadata) -> Ticket:
    ledger.arrive(metadata.transfer_id)
    ticket = ledger.admit(metadata, ME)
    assert isinstance(ticket, Ticket)
    return ticket


def stage(ledger: TransferLedger, metadata: PayloadMetadata, *, staged: bool = True) -> None:
    assert ledger.settle(admitted(ledger, metadata), staged=staged) == [ME]


def test_a_failed_staging_leaves_no_trace() -> None:
    ledger = ledger_with_t()
    stage(ledger, payload(), staged=False)
    stage(ledger, payload(checksum="1" * 32))
    stage(ledger, payload("t", 1), staged=False)
    stage(ledger, payload("t", 1))
    assert ledger.flush("t", 2, 0) == {"payloads": 2, "producers": {"0": 2}}


def test_ending_during_staging_keeps_the_answer() -> None:
    ledger = ledger_with_t()
    ticket = admitted(ledger, payload())
    ledger.end("t")
    assert ledger.settle(ticket, staged=True) == [ME]
    assert ledger.admit(payload(), ME) is Repeat.STAGED
    assert ledger.progress("t") is None


def test_what_is_forgotten_is_refused_and_never_staged_again() -> None:
    ledger = ledger_with_t(max_remembered=2)
    for payload_id in range(2):
        stage(ledger, payload(payload_id=payload_id))
    ledger.end("t")
    assert ledger.admit(payload(), ME) is Repeat.STAGED
    ledger.open("u", 2)
    stage(ledger, payload("u", sequence=2))
    ledger.end("u")  # three payloads: those of "t" are forgotten
    with pytest.raises(TransactionError, match="not above 2"):
        ledger.admit(payload(), ME)
    assert ledger.admit(payload("u", sequence=2), ME) is Repeat.STAGED


def test_many_small_transfers_are_forgotten_too() -> None:
    ledger = TransferLedger()
    for sequence in range(1, 3 * MAX_ENDED):
        ledger.open("t", sequence)
        stage(ledger, payload(sequence=sequence))
        ledger.end("t")
    assert len(ledger._ended) == MAX_ENDED
    with pytest.raises(TransactionError, match="has ended"):
        ledger.admit(payload(sequence=1), ME)


def test_flush_of_a_sealed_transfer() -> None:
    ledger = ledger_with_t()
    stage(ledger, payload())
    assert ledger.flush("t", 1, 0) == ledger.flush("t", 1, 0)
    with pytest.raises(TransportError, match=r"sealed with 1 payloads and 2 are expected"):
        ledger.flush("t", 2, 0)


def test_flush_waits_for_fan_outs() -> None:
    ledger = ledger_with_t()
    ticket = admitted(ledger, payload())
    ledger.forwarding(ticket, 2)
    ledger.settle(ticket, staged=True)
    with pytest.raises(TransportError, match="2 being forwarded"):
        ledger.flush("t", 1, 0)
    ledger.forwarding(ticket, -1)
    with pytest.raises(TransportError, match="1 being forwarded"):
        ledger.flush("t", 1, 0)
    ledger.forwarding(ticket, -1)
    assert ledger.flush("t", 1, 0)["payloads"] == 1


def test_a_failure_ends_every_wait_at_once() -> None:
    ledger = ledger_with_t()
    ticket = admitted(ledger, payload())
    ledger.forwarding(ticket, 1)
    ledger.settle(ticket, staged=True)
    ledger.fail(ticket, "worker a could not reach worker b")
    ledger.fail(ticket, "a later reason")
    with pytest.raises(TransportError, match="worker a could not"):
        ledger.flush("t", 1, 60)
    for metadata in (payload(), payload(payload_id=1)):
        with pytest.raises(TransportError, match="worker a could not"):
            ledger.admit(metadata, ME)
    progress = ledger.progress("t")
    assert progress is not None
    assert progress["failure"] == "worker a could not reach worker b"
    ledger.end("t")
    ledger.open("t", 2)
    stage(ledger, payload(sequence=2))


def test_another_transfer_is_not_flushed() -> None:
    ledger = ledger_with_t()
    with pytest.raises(TransactionError, match="'u' is not open"):
        ledger.flush("u", 0, 0)
