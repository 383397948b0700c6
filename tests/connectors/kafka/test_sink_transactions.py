"""What answers of Kafka say about a prepared transaction: a pure decision."""

from __future__ import annotations

import pytest

from headgate.codec.kafka.wire import ErrorCode
from headgate.connectors.fenced_sink import owner_of
from headgate.connectors.kafka.transactions import (
    UNCERTAIN,
    Outcome,
    SinkIds,
    outcome_in_state,
    outcome_of_commit,
    prepared,
    prepared_in,
    why_not_committed,
)
from headgate.errors import CorruptionError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable

USE = 3


@pytest.mark.parametrize("proof", [None, 0, USE - 1, USE, USE + 1])
def test_a_commit_that_kafka_confirms_is_done(proof: int | None) -> None:
    assert outcome_of_commit(ErrorCode.NONE, USE, proof) is Outcome.COMMITTED


@pytest.mark.parametrize("code", sorted(UNCERTAIN))
def test_any_other_answer_needs_the_proof(code: ErrorCode) -> None:
    for proof in (USE, USE + 1):  # the id was used again, which it is after a commit only
        assert outcome_of_commit(code, USE, proof) is Outcome.COMMITTED
    for proof in (None, USE - 1):
        is_unknown = code is ErrorCode.INVALID_PRODUCER_ID_MAPPING
        assert outcome_of_commit(code, USE, proof) is (Outcome.UNKNOWN if is_unknown else Outcome.ABORTED)


@pytest.mark.parametrize(
    ("state", "is_same", "is_next", "expected"),
    [
        ("Ongoing", True, False, Outcome.NOT_DECIDED),
        ("Ongoing", False, True, Outcome.ABORTED),  # of the next transaction, and there is no proof
        ("PrepareCommit", False, True, Outcome.COMMITTED),
        ("CompleteCommit", False, True, Outcome.COMMITTED),
        ("CompleteCommit", False, False, Outcome.ABORTED),
        ("PrepareAbort", False, True, Outcome.ABORTED),
        ("CompleteAbort", False, True, Outcome.ABORTED),
        ("Empty", False, False, Outcome.ABORTED),
        (None, False, False, Outcome.UNKNOWN),
    ],
)
def test_the_state_of_an_id_tells_how_it_ended(
    state: str | None, is_same: bool, is_next: bool, expected: Outcome
) -> None:
    assert outcome_in_state(state, is_same, is_next, USE, USE - 1) is expected
    assert outcome_in_state(state, is_same, is_next, USE, USE) is Outcome.COMMITTED


def test_ids_tell_sinks_and_generations_apart() -> None:
    mine = SinkIds("headgate", owner_of("p", "out"))
    name = mine.id_of(7, 2, 11)
    assert mine.generation_of(name) == 7
    others = [owner_of("p", "out2"), owner_of("p2", "out"), owner_of("out", "p")]
    assert [SinkIds("headgate", other).generation_of(name) for other in others] == [None] * 3
    assert SinkIds("other", mine.owner).generation_of(name) is None
    assert mine.generation_of(mine.beginning + "7:2") is None


def of(payload: bytes) -> Committable:
    return Committable("out", CheckpointId(4), 0, Generation(1), payload)


def test_a_prepared_transaction_is_stored_and_read() -> None:
    what = prepared("orders", "headgate:p:out:1:0:1", 42, 5, USE, 1_200, {"orders": {0: 70, 3: 0}})
    assert prepared_in(of(what.encode())) == what
    with pytest.raises(CorruptionError, match="a transaction of Kafka"):
        prepared_in(of(b"\xff"))
    later = type(what)(9, *(getattr(what, name) for name in what.__struct_fields__[1:]))
    with pytest.raises(CorruptionError, match="version 1"):
        prepared_in(of(later.encode()))


def test_what_is_lost_is_named() -> None:
    what = prepared("orders", "headgate:p:out:1:0:1", 42, 5, USE, 1_200, {"orders": {0: 70, 3: 0}})
    aborted = why_not_committed(Outcome.ABORTED, what, "15m")
    assert aborted.startswith("1,200 records for topic 'orders' are lost: Kafka aborted transaction")
    assert "longer than 15m" in aborted
    kept = why_not_committed(Outcome.ABORTED, what, "")
    assert kept.endswith(
        "aborted transaction 'headgate:p:out:1:0:1', by hand or by another program, or after its timeout, if the sink "
        "had one when it was prepared"
    )
    several = why_not_committed(Outcome.ABORTED, what, "15m", [what, what])
    assert several.startswith(
        "3,600 records for topic 'orders' are lost: Kafka aborted transaction 'headgate:p:out:1:0:1'"
    )
    assert "and 2 more, most likely" in several
    assert "does not know any more whether 1,200 records" in why_not_committed(Outcome.UNKNOWN, what, "15m")
