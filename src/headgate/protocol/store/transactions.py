"""Transactions of the stream store: what a verb may do to a recorded transaction.

One pure decision per verb, taken inside the database transaction that applies it::

    (open: nothing recorded) ──prepare──> PREPARED ──commit──> COMMITTED   terminal, remembered
                    └──abort──> ABORTED <──abort──┘                        terminal, remembered

Counterpart: ``headgate.store.catalogue`` records what is decided here; ``shared_transactions`` decides about those that
several processes write, which are recorded while they are open, too. Source: rules S12 to S18 of
docs/spec/stream-store.md. Never looks at events, clocks or files: an open transaction of one process leaves no record,
a prepared one has no expiry (S12).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias


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
    """COMMIT of something that was never prepared or whose outcome was forgotten (S13)."""


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
    assert record is None or record.name == request.name
    if request.epoch < fence:  # S18: before anything else, so that a zombie never sees "already done"
        return RefuseFenced(fence)
    if record is not None and record.owner != request.owner:
        return RefuseContradiction(record.status, f"it belongs to '{record.owner}'")
    decision = _on_verb(request, record)
    if isinstance(decision, Record):
        assert (None if record is None else record.status, decision.status) in LEGAL_CHANGES
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
