"""Transactions of the stream store, of one writer and of several: what a verb may do to a recorded one.

Pure decisions.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias, assert_never

from headgate.dataclass import dataclass


class Status(Enum):
    """What is recorded about a transaction."""

    OPEN = "open"
    """Several processes write it (TX1); one that a single process writes has no record."""
    PREPARED = "prepared"
    """Immutable, durable, invisible; waits for its owner's verdict however long that takes."""
    COMMITTED = "committed"
    ABORTED = "aborted"

    @property
    def is_terminal(self) -> bool:
        """Whether no verb changes it any more."""
        return self in (Status.COMMITTED, Status.ABORTED)


LEGAL_CHANGES: frozenset[tuple[Status | None, Status]] = frozenset(
    {
        (None, Status.PREPARED),
        (None, Status.ABORTED),
        (Status.OPEN, Status.ABORTED),
        (Status.PREPARED, Status.COMMITTED),
        (Status.PREPARED, Status.ABORTED),
    }
)
"""From the recorded status (None: no record) to the next one."""


class Verb(Enum):
    """What a caller wants."""

    BEGIN = "begin"
    PREPARE = "prepare"
    COMMIT = "commit"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class TransactionRecord:
    """A recorded transaction. ``content`` identifies what was prepared; ``epoch`` is the one that prepared it."""

    name: str
    owner: str
    epoch: int
    status: Status
    content: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """One verb of one caller. ``content`` matters to PREPARE only."""

    verb: Verb
    name: str
    owner: str
    epoch: int
    content: str = ""


@dataclass(frozen=True, slots=True)
class Proceed:
    """Nothing stands in the way and nothing is to be recorded (BEGIN)."""


@dataclass(frozen=True, slots=True)
class Record:
    """Record ``status`` now, durably, together with its consequences."""

    status: Status


@dataclass(frozen=True, slots=True)
class AlreadyDone:
    """It was done before: succeed and change nothing (S13)."""

    reason: str


@dataclass(frozen=True, slots=True)
class RefuseFenced:
    """A newer epoch of the owner exists (S18)."""

    newest: int


@dataclass(frozen=True, slots=True)
class RefuseUnknown:
    """COMMIT of a transaction that was never prepared, or with an outcome that was removed (S13)."""


@dataclass(frozen=True, slots=True)
class RefuseContradiction:
    """The recorded outcome contradicts the verb (S13)."""

    recorded: Status
    problem: str


Decision: TypeAlias = Proceed | Record | AlreadyDone | RefuseFenced | RefuseUnknown | RefuseContradiction


def decide(request: Request, record: TransactionRecord | None, fence: int) -> Decision:
    """Return what ``request`` does to ``record``.

    Args:
        request: verb, name, and the caller's owner and epoch.
        record: what is recorded under the name, or None.
        fence: the newest epoch known of the request's owner.
    """
    assert record is None or record.name == request.name, "a verb is about the transaction that was read"
    if request.epoch < fence:  # S18: before anything else, so that a zombie never sees "already done"
        return RefuseFenced(fence)
    if record is not None and record.owner != request.owner:
        return RefuseContradiction(record.status, f"it belongs to '{record.owner}'")
    decision = _on_verb(request, record)
    if isinstance(decision, Record):
        assert (None if record is None else record.status, decision.status) in LEGAL_CHANGES, (
            "a status changes as the table says"
        )
    return decision


def _on_verb(request: Request, record: TransactionRecord | None) -> Decision:
    match request.verb:
        case Verb.BEGIN:
            return _on_begin(record)
        case Verb.PREPARE:
            return _on_prepare(request, record)
        case Verb.COMMIT:
            return _on_commit(record)
        case Verb.ABORT:
            return _on_abort(record)


def _on_begin(record: TransactionRecord | None) -> Decision:
    if record is None:
        return Proceed()
    return RefuseContradiction(record.status, "its name is taken")


def _on_prepare(request: Request, record: TransactionRecord | None) -> Decision:
    if record is None:
        return Record(Status.PREPARED)
    if record.status is Status.PREPARED and record.content == request.content:
        return AlreadyDone("already prepared")
    return RefuseContradiction(record.status, "it cannot be prepared with other content")  # S12


def _on_commit(record: TransactionRecord | None) -> Decision:
    if record is None:
        return RefuseUnknown()
    match record.status:
        case Status.OPEN:
            return RefuseContradiction(record.status, "it was not prepared, and others may be writing to it")
        case Status.PREPARED:
            return Record(Status.COMMITTED)
        case Status.COMMITTED:
            return AlreadyDone("already committed")
        case Status.ABORTED:
            return RefuseContradiction(record.status, "it was aborted, so its events are gone")


def _on_abort(record: TransactionRecord | None) -> Decision:
    if record is None:
        return Record(Status.ABORTED)  # remembered, so that a late prepare of the same name is refused
    match record.status:
        case Status.OPEN | Status.PREPARED:
            return Record(Status.ABORTED)
        case Status.ABORTED:
            return AlreadyDone("already aborted")
        case Status.COMMITTED:
            return RefuseContradiction(record.status, "it was committed and readers may have seen it")


def next_fence(fence: int, epoch: int) -> int:
    """Return the fence after a verb of ``epoch`` was accepted: a newer epoch fences all older ones (S9, S18)."""
    return max(fence, epoch)


LEASE_MS_MIN = 100
LEASE_MS_MAX = 24 * 60 * 60 * 1_000
"""How long an open transaction may go without a sign of life, at most."""

PINGS_PER_LEASE = 4
"""Who writes gives a sign of life when a quarter of the lease has passed since the last one."""

_ENDED = {
    Status.OPEN: "is open",
    Status.PREPARED: "is prepared, so it takes no more events",
    Status.COMMITTED: "is committed",
    Status.ABORTED: "was aborted, so its events are gone",
}


@dataclass(frozen=True, slots=True)
class Participant:
    """One that writes: ``token`` is of its present life, ``sequence`` the number of its last recorded write."""

    token: str
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class SharedRecord:
    """What is recorded of a transaction.

    Attributes:
        due_ms: when the lease of an open one is over; None: it has none.
        suspected_ms: when a client first saw that it was over; None since the last sign of life.
        is_expired: it was aborted because its lease was over.
        participant: the one that asks, if it is known.
    """

    status: Status
    lease_ms: int
    due_ms: int | None = None
    suspected_ms: int | None = None
    is_expired: bool = False
    participant: Participant | None = None


@dataclass(frozen=True, slots=True)
class BeginShared:
    """Have a transaction of a name that is new."""


@dataclass(frozen=True, slots=True)
class Join:
    """Let the participant have a new life: that with ``token``."""

    token: str


@dataclass(frozen=True, slots=True)
class Write:
    """Record the participant's writes ``first`` to ``last``; their events are durable."""

    token: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Ping:
    """Renew the lease."""


@dataclass(frozen=True, slots=True)
class Prepare:
    """Take no more events, and let nothing but a verdict end it."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Make its events visible."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Drop its events."""


SharedRequest: TypeAlias = BeginShared | Join | Write | Ping | Prepare | Commit | Abort
Verdict: TypeAlias = Prepare | Commit | Abort


@dataclass(frozen=True, slots=True)
class Apply:
    """Record what was asked for; a sign of life renews the lease."""


@dataclass(frozen=True, slots=True)
class Done:
    """It was done before: succeed and change nothing."""


@dataclass(frozen=True, slots=True)
class RefuseEnded:
    """It has ended otherwise; ``problem`` completes a sentence that begins with its name."""

    problem: str


@dataclass(frozen=True, slots=True)
class RefuseReplaced:
    """The participant lives elsewhere, in a later life."""


@dataclass(frozen=True, slots=True)
class RefuseGap:
    """Numbers do not follow those that are recorded."""

    expected: int


SharedAnswer: TypeAlias = Apply | Done | RefuseFenced | RefuseUnknown | RefuseEnded | RefuseReplaced | RefuseGap


def decide_shared(request: SharedRequest, record: SharedRecord | None, epoch: int, fence: int) -> SharedAnswer:
    """Return what ``request`` does.

    Args:
        request: what is asked for.
        record: what is recorded of the transaction, and of the participant that asks.
        epoch: that of the transaction.
        fence: the newest epoch known of its owner.
    """
    if epoch < fence:  # first, so that a replaced participant never gets "done" (S18)
        return RefuseFenced(fence)
    if record is None:
        return (
            Apply() if isinstance(request, BeginShared) else RefuseUnknown()
        )  # TX11: nothing is concluded from nothing
    match request:
        case BeginShared():
            return Done()  # names are unique, so this is the same begin after a lost answer
        case Join():
            return Apply() if record.status is Status.OPEN else _ended(record)
        case Write():
            return _on_write(request, record)
        case Ping():
            return _on_ping(record)
        case Prepare() | Commit() | Abort():
            return _on_verdict(request, record)
        case _:
            assert_never(request)


def _on_write(request: Write, record: SharedRecord) -> SharedAnswer:
    assert 1 <= request.first <= request.last, "writes are numbered from 1, in order"
    if record.status is Status.ABORTED:
        return _ended(record)
    if record.participant is None or record.participant.token != request.token:
        return RefuseReplaced()  # TX4
    if request.last <= record.participant.sequence:
        return Done()  # TX3: only this life can have recorded it
    if record.status is not Status.OPEN:
        return _ended(record)
    if request.first != record.participant.sequence + 1:
        return RefuseGap(record.participant.sequence + 1)
    return Apply()


def _on_ping(record: SharedRecord) -> SharedAnswer:
    match record.status:
        case Status.OPEN:
            return Apply()
        case Status.PREPARED | Status.COMMITTED:
            return Done()  # it has no lease any more: the ping succeeds all the same
        case Status.ABORTED:
            return _ended(record)


def _on_verdict(request: Verdict, record: SharedRecord) -> SharedAnswer:
    match record.status, request:
        case (Status.OPEN, _) | (Status.PREPARED, Commit() | Abort()):
            return Apply()
        case (Status.PREPARED | Status.COMMITTED, Prepare()) | (Status.COMMITTED, Commit()):
            return Done()
        case (Status.ABORTED, Abort()):
            return Done()
        case _:
            return _ended(record)


def _ended(record: SharedRecord) -> RefuseEnded:
    if record.is_expired:
        return RefuseEnded(
            "was aborted, because no process wrote to it or pinged it for longer than its lease of "
            f"{record.lease_ms:,} ms, so its events are gone; begin another one"
        )
    return RefuseEnded(_ENDED[record.status])


# -- the lease -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leave:
    """Nothing is to be done now."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """Note that the lease is over, for the next look."""


@dataclass(frozen=True, slots=True)
class Expire:
    """Abort it."""


def look(record: SharedRecord, now_ms: int) -> Leave | Suspect | Expire:
    """Return what a client that looks at a transaction at ``now_ms``, a date of the store, has to do (TX8).

    It takes two looks, half a lease apart, with no sign of life in between: a date that was set forward ends
    no live transaction, because its participant gives a sign of life every quarter of the lease.
    """
    if record.status is not Status.OPEN or record.due_ms is None or now_ms < record.due_ms:
        return Leave()
    if record.suspected_ms is None or now_ms < record.suspected_ms:  # or the date was set back since
        return Suspect()
    return Expire() if now_ms - record.suspected_ms >= record.lease_ms // 2 else Leave()
