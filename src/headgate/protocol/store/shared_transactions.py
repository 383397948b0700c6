"""Transactions that several processes write: what a verb may do to one, and when its lease is over. Pure decisions.

One transaction has any number of *participants*, each with a name, a token that is new with each life of it, and the
number of its last write that is recorded::

    OPEN ──prepare──> PREPARED ──commit──> COMMITTED   terminal, remembered
      ├──────────────commit──────────────────^
      └──abort, or its lease is over──> ABORTED <──abort── PREPARED

Counterpart: ``store.catalogue.shared`` asks inside the database transaction that records the answer;
``protocol.store.transactions`` decides about transactions of one process, whose open ones leave no record. Source:
rules TX1 to TX13 of docs/spec/shared-transactions.md. Never reads a clock: dates are those of the store.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, assert_never

from headgate.protocol.store.transactions import RefuseFenced, RefuseUnknown, Status

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
        suspected_ms: when somebody saw that it was over; None since the last sign of life.
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
    """Record the participant's writes ``first`` to ``last``, whose events are durable."""

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


Request: TypeAlias = BeginShared | Join | Write | Ping | Prepare | Commit | Abort
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


Answer: TypeAlias = Apply | Done | RefuseFenced | RefuseUnknown | RefuseEnded | RefuseReplaced | RefuseGap


def decide(request: Request, record: SharedRecord | None, epoch: int, fence: int) -> Answer:
    """Return what ``request`` does.

    Args:
        request: what is asked for.
        record: what is recorded of the transaction, and of the participant that asks.
        epoch: that of the transaction.
        fence: the newest epoch known of its owner.
    """
    if epoch < fence:  # first, so that whoever was replaced never hears "done" (S18)
        return RefuseFenced(fence)
    if record is None:
        return (
            Apply() if isinstance(request, BeginShared) else RefuseUnknown()
        )  # TX11: nothing is concluded from nothing
    match request:
        case BeginShared():
            return Done()  # names are new, so this is the same begin, whose answer was lost
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


def _on_write(request: Write, record: SharedRecord) -> Answer:
    assert 1 <= request.first <= request.last
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


def _on_ping(record: SharedRecord) -> Answer:
    match record.status:
        case Status.OPEN:
            return Apply()
        case Status.PREPARED | Status.COMMITTED:
            return Done()  # it has no lease any more, which is no trouble of whoever pings
        case Status.ABORTED:
            return _ended(record)


def _on_verdict(request: Verdict, record: SharedRecord) -> Answer:
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
    """Return what whoever looks at a transaction at ``now_ms``, a date of the store, is to do (TX8).

    It takes two looks, half a lease apart, with no sign of life in between: a date that was set forward ends nothing
    that lives, because that gives one every quarter.
    """
    if record.status is not Status.OPEN or record.due_ms is None or now_ms < record.due_ms:
        return Leave()
    if record.suspected_ms is None or now_ms < record.suspected_ms:  # or the date was set back since
        return Suspect()
    return Expire() if now_ms - record.suspected_ms >= record.lease_ms // 2 else Leave()
