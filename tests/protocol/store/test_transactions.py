"""Every cell of the transaction table, and one random history against the promises."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.protocol.store import transactions as machine
from headgate.protocol.store.transactions import (
    LEGAL_CHANGES,
    Abort,
    AlreadyDone,
    Apply,
    BeginShared,
    Commit,
    Decision,
    Done,
    Expire,
    Join,
    Leave,
    Participant,
    Ping,
    Prepare,
    Proceed,
    Record,
    RefuseContradiction,
    RefuseEnded,
    RefuseFenced,
    RefuseGap,
    RefuseReplaced,
    RefuseUnknown,
    Request,
    SharedAnswer,
    SharedRecord,
    SharedRequest,
    Status,
    Suspect,
    TransactionRecord,
    Verb,
    Write,
    decide,
    decide_shared,
    look,
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


LEASE_MS = 1_000
OPEN, PREPARED, COMMITTED, ABORTED = Status.OPEN, Status.PREPARED, Status.COMMITTED, Status.ABORTED
REQUESTS: tuple[SharedRequest, ...] = (BeginShared(), Join("b"), Write("a", 4, 5), Ping(), Prepare(), Commit(), Abort())


def shared_record(status: Status, participant: Participant | None = None, **more: object) -> SharedRecord:
    known = participant or Participant("a", 3)
    return SharedRecord(status, LEASE_MS, 10_000 if status is OPEN else None, participant=known, **more)  # type: ignore[arg-type]


ENDED = "ended"
TABLE: dict[Status | None, tuple[object, ...]] = {
    #          begin  join   write  ping   prepare commit abort
    None: (Apply(), *(RefuseUnknown(),) * 6),
    OPEN: (Done(), Apply(), Apply(), Apply(), Apply(), Apply(), Apply()),
    PREPARED: (Done(), ENDED, ENDED, Done(), Done(), Apply(), Apply()),
    COMMITTED: (Done(), ENDED, ENDED, Done(), Done(), Done(), ENDED),
    ABORTED: (Done(), ENDED, ENDED, ENDED, ENDED, ENDED, Done()),
}


@pytest.mark.parametrize("status", TABLE)
@pytest.mark.parametrize("number", range(len(REQUESTS)))
def test_every_verb_in_every_status(status: Status | None, number: int) -> None:  # TX11
    answer = decide_shared(REQUESTS[number], None if status is None else shared_record(status), 1, 1)
    expected = TABLE[status][number]
    assert isinstance(answer, RefuseEnded) if expected == ENDED else answer == expected


@pytest.mark.parametrize("status", [None, *Status])
@pytest.mark.parametrize("request_", REQUESTS)
def test_an_older_epoch_of_a_shared_transaction_is_refused(status: Status | None, request_: SharedRequest) -> None:
    found = None if status is None else shared_record(status)
    assert decide_shared(request_, found, 1, 2) == RefuseFenced(2)


@pytest.mark.parametrize(
    ("status", "write", "expected"),
    [
        (OPEN, Write("a", 4, 4), Apply()),
        (OPEN, Write("a", 2, 3), Done()),  # its answer was lost
        (PREPARED, Write("a", 2, 3), Done()),
        (COMMITTED, Write("a", 3, 3), Done()),
        (OPEN, Write("a", 5, 6), RefuseGap(4)),
        (OPEN, Write("a", 3, 4), RefuseGap(4)),
        (OPEN, Write("b", 4, 4), RefuseReplaced()),  # TX4
        (OPEN, Write("b", 1, 3), RefuseReplaced()),
        (COMMITTED, Write("b", 1, 3), RefuseReplaced()),
    ],
)
def test_writes_are_recorded_once_and_by_one_life(
    status: Status, write: Write, expected: SharedAnswer
) -> None:  # TX3, TX4
    assert decide_shared(write, shared_record(status), 1, 1) == expected


def test_a_participant_that_nobody_knows_writes_nothing() -> None:  # TX4
    assert decide_shared(Write("a", 1, 1), SharedRecord(OPEN, LEASE_MS, 10_000), 1, 1) == RefuseReplaced()


def test_what_was_written_before_an_abort_is_no_success() -> None:
    assert isinstance(decide_shared(Write("a", 2, 3), shared_record(ABORTED), 1, 1), RefuseEnded)


def test_who_comes_late_hears_why() -> None:
    expired = decide_shared(Ping(), shared_record(ABORTED, is_expired=True), 1, 1)
    assert expired == RefuseEnded(
        "was aborted, because no process wrote to it or pinged it for longer than its lease of 1,000 ms, so its events "
        "are gone; begin another one"
    )
    assert decide_shared(Ping(), shared_record(ABORTED), 1, 1) == RefuseEnded("was aborted, so its events are gone")


def looks(due_ms: int, dates: list[int]) -> list[str]:
    """What somebody finds who looks at these dates; what it notes stays."""
    suspected: int | None = None
    found = []
    for now_ms in dates:
        answer = look(SharedRecord(OPEN, LEASE_MS, due_ms, suspected), now_ms)
        suspected = now_ms if isinstance(answer, Suspect) else suspected
        found.append(type(answer).__name__)
    return found


def test_a_lease_ends_with_two_looks() -> None:  # TX8
    assert looks(5_000, [4_999, 5_000, 5_499, 5_500]) == ["Leave", "Suspect", "Leave", "Expire"]
    assert looks(5_000, [90_000_000, 90_000_499, 90_000_500]) == ["Suspect", "Leave", "Expire"]


def test_a_date_that_is_set_back_ends_nothing() -> None:  # TX8
    assert looks(5_000, [90_000, 6_000, 6_400, 6_500]) == ["Suspect", "Suspect", "Leave", "Expire"]
    assert looks(5_000, [90_000, 1_000]) == ["Suspect", "Leave"]
    assert looks(5_000, [90_000, 90_000, 90_500]) == ["Suspect", "Leave", "Expire"], "the same moment tells nothing"


@pytest.mark.parametrize("status", [PREPARED, COMMITTED, ABORTED])
def test_what_is_prepared_never_expires(status: Status) -> None:
    assert look(shared_record(status, suspected_ms=5), 1 << 60) == Leave()


@given(
    st.lists(st.tuples(st.integers(0, 40_000), st.integers(-90_000_000, 90_000_000)), max_size=30),
    st.lists(st.integers(0, 40_000), max_size=60),
)
def test_a_date_that_is_set_forward_ends_nothing_that_lives(
    jumps: list[tuple[int, int]], seen_at: list[int]
) -> None:  # TX8
    """Whoever gives a sign of life each quarter of a lease stays, if dates jump less often than that, wherever to."""
    far_apart: list[tuple[int, int]] = []
    for at, by in sorted(jumps):
        if not far_apart or at - far_apart[-1][0] > LEASE_MS:
            far_apart.append((at, by))

    def date(at: int) -> int:
        return (1 << 40) + at + sum(by for since, by in far_apart if since <= at)

    due_ms, suspected = date(0) + LEASE_MS, None
    for at, what in sorted([(at, 0) for at in range(0, 40_000, LEASE_MS // 4)] + [(at, 1) for at in seen_at]):
        if what == 0:
            due_ms, suspected = date(at) + LEASE_MS, None
            continue
        answer = look(SharedRecord(OPEN, LEASE_MS, due_ms, suspected), date(at))
        assert not isinstance(answer, Expire)
        suspected = date(at) if isinstance(answer, Suspect) else suspected


def test_half_a_lease_is_longer_than_who_lives_is_silent() -> None:  # TX8
    assert machine.PINGS_PER_LEASE > 2
