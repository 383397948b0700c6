"""Every cell of the transaction table, and one random history against the promises."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.protocol.store.transactions import (
    LEGAL_CHANGES,
    AlreadyDone,
    Decision,
    Proceed,
    Record,
    RefuseContradiction,
    RefuseFenced,
    RefuseUnknown,
    Request,
    Status,
    TransactionRecord,
    Verb,
    decide,
    next_fence,
)


def request(verb: Verb, epoch: int = 3, content: str = "c", owner: str = "p/sink") -> Request:
    return Request(verb, "t", owner, epoch, content)


def record(status: Status, epoch: int = 3, content: str = "c") -> TransactionRecord:
    return TransactionRecord("t", "p/sink", epoch, status, content)


@pytest.mark.parametrize(
    ("verb", "recorded", "expected"),
    [
        (Verb.BEGIN, None, Proceed()),
        (Verb.PREPARE, None, Record(Status.PREPARED)),
        (Verb.COMMIT, None, RefuseUnknown()),  # S13
        (Verb.ABORT, None, Record(Status.ABORTED)),
        (Verb.PREPARE, Status.PREPARED, AlreadyDone("already prepared")),
        (Verb.COMMIT, Status.PREPARED, Record(Status.COMMITTED)),
        (Verb.ABORT, Status.PREPARED, Record(Status.ABORTED)),
        (Verb.COMMIT, Status.COMMITTED, AlreadyDone("already committed")),
        (Verb.ABORT, Status.ABORTED, AlreadyDone("already aborted")),
    ],
)
def test_verbs_that_succeed_or_know_nothing(verb: Verb, recorded: Status | None, expected: Decision) -> None:
    assert decide(request(verb), record(recorded) if recorded else None, 3) == expected


@pytest.mark.parametrize(
    ("verb", "recorded"),
    [
        (Verb.BEGIN, Status.PREPARED),
        (Verb.BEGIN, Status.COMMITTED),
        (Verb.BEGIN, Status.ABORTED),
        (Verb.PREPARE, Status.COMMITTED),
        (Verb.PREPARE, Status.ABORTED),
        (Verb.COMMIT, Status.ABORTED),
        (Verb.COMMIT, Status.OPEN),
        (Verb.ABORT, Status.COMMITTED),
    ],
)
def test_the_opposite_of_the_recorded_outcome_is_refused_with_that_outcome(verb: Verb, recorded: Status) -> None:
    decision = decide(request(verb), record(recorded), 3)
    assert isinstance(decision, RefuseContradiction)
    assert decision.recorded is recorded


def test_prepare_with_other_content_is_refused() -> None:
    decision = decide(request(Verb.PREPARE, content="other"), record(Status.PREPARED), 3)
    assert isinstance(decision, RefuseContradiction)  # S12


@pytest.mark.parametrize("verb", list(Verb))
@pytest.mark.parametrize("recorded", [None, *Status])
def test_an_older_epoch_is_refused_whatever_is_recorded(verb: Verb, recorded: Status | None) -> None:
    assert decide(request(verb, epoch=2), record(recorded) if recorded else None, 3) == RefuseFenced(3)  # S18


def test_a_newer_epoch_commits_what_an_older_one_prepared() -> None:
    assert decide(request(Verb.COMMIT, epoch=9), record(Status.PREPARED), 9) == Record(Status.COMMITTED)


def test_another_owner_is_refused() -> None:
    decision = decide(request(Verb.COMMIT, owner="other/sink"), record(Status.PREPARED), 0)
    assert isinstance(decision, RefuseContradiction)


def test_fences_never_go_back() -> None:
    assert (next_fence(3, 2), next_fence(3, 3), next_fence(3, 4)) == (3, 3, 4)


@given(st.lists(st.tuples(st.sampled_from(list(Verb)), st.integers(1, 4)), max_size=40))
def test_any_history_keeps_the_promises(history: list[tuple[Verb, int]]) -> None:
    recorded: TransactionRecord | None = None
    fence = 0
    outcomes: list[Status] = []
    for verb, epoch in history:
        decision = decide(request(verb, epoch), recorded, fence)
        if epoch < fence:
            assert decision == RefuseFenced(fence)
            continue
        if isinstance(decision, Record):
            assert (recorded.status if recorded else None, decision.status) in LEGAL_CHANGES
            recorded = TransactionRecord("t", "p/sink", epoch, decision.status, "c")
            outcomes += [decision.status] if decision.status.is_terminal else []
        if isinstance(decision, Record | AlreadyDone | Proceed):
            fence = next_fence(fence, epoch)
    assert len(outcomes) <= 1  # a terminal outcome is final
