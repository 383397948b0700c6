"""A database outside: transactions that can be prepared, a ledger, and who owns which rows. Not a part of any process.

What is prepared or committed survives everything; an open transaction is dropped when its process is gone, when the
database starts again, or when it waits too long; some databases do not keep what is prepared for ever, either. A call
may fail before its effect and after it, and one that timed out may take effect later. Processes die right before and
right after calls. Never judges: watchers do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, Generic, TypeAlias, TypeVar

from headgate.connectors.fenced_sink import Fence
from headgate.dataclass import dataclass
from headgate.errors import FencedError, UsageError
from headgate.sim.machine.tasks import SimProcess, Tasks
from headgate.sim.machine.world import Fault, Faults

STEP_MS = 4
"""Usual time of one call, at most."""

LATE_MS = 400
"""A call that timed out takes effect within so much time, if at all."""

IN_WORK_RATE = 0.2
"""What fails in the middle of a transaction ends a generation: of such opportunities so many count."""

DEATH_RATE = 0.03
"""How often a process dies right before or after a call, as long as the budget lasts."""

Row: TypeAlias = dict[str, Any]
T = TypeVar("T")


class Unreachable(Exception):  # noqa: N818 - what a driver of a database calls it
    """The database did not answer: whether the call took effect is not known."""


class Gone(Exception):  # noqa: N818
    """The open transaction is none any more."""


@dataclass(eq=False)
class Session:
    """An open transaction."""

    name: str
    process: SimProcess
    rows: list[Row] = field(default_factory=list)
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class Committed:
    """Rows that became visible under one name."""

    name: str
    rows: tuple[Row, ...]


Watcher: TypeAlias = Callable[[str, Sequence[str], int], None]
"""Hears of each owner's names that become visible in one step, and of the generation that made them so."""


class Database:
    """One database, for all sinks of a run."""

    def __init__(
        self,
        tasks: Tasks,
        faults: Faults,
        rng: random.Random,
        watch: Watcher,
        on_change: Callable[[Fence, str], None],
        kills: int,
    ) -> None:
        """``on_change`` hears what was let in of whom; ``kills``: processes that may die over a call."""
        self._tasks = tasks
        self._faults = faults
        self._rng = rng
        self._watch = watch
        self._on_change = on_change
        self._kills = kills
        self._drops_after_ms = rng.choice((None, 150, 1_000))
        self.lists_open = rng.random() < 0.5
        """Whether it tells of open transactions, and aborts them when asked."""
        self.owners: dict[str, Fence] = {}
        self.sessions: list[Session] = []
        self.prepared: dict[str, tuple[Row, ...]] = {}
        self.keeps_ms: int | None = None
        """How long it keeps what is prepared and not decided; None: for ever."""
        self.expired: dict[str, tuple[Row, ...]] = {}
        """What it has not kept: in a copy that a user has."""
        self.visible: dict[str, list[Committed]] = {}
        """By owner, in the order in which it became visible."""
        self.ledger: set[str] = set()
        """Names that were published and not forgotten."""
        self.forgotten_count = 0
        self.remembered: set[str] = set()
        """Names that were committed and not forgotten."""
        self._decided: set[str] = set()
        """Names that were committed: whatever a call that timed out has prepared late is dropped."""
        self.aborted_count = 0
        """Names that were prepared and aborted."""
        self.refused_count = 0
        """Calls of generations that were replaced."""

    # -- transactions -----------------------------------------------------------------------------------------------

    def begin(self, name: str) -> Session:
        """Begin a transaction."""
        return self._call(lambda: self._begun(name), is_in_work=True)

    def write(self, session: Session, rows: Sequence[Row]) -> None:
        """Add rows."""
        self._call(lambda: self._open(session).rows.extend(rows), is_in_work=True)

    def prepare(self, session: Session, fence: Fence) -> None:
        """Have its rows survive; who asks again gets the same answer."""
        rows = None if session.is_over else tuple(session.rows)
        self._call(lambda: self._prepare(session.name, rows, fence), may_land_late=True)

    def names(self) -> list[str]:
        """Return the names of all that is prepared, and perhaps of what is open, whosever it is."""
        return self._call(lambda: sorted({*self.prepared, *self._listed()}))

    def commit(self, names: Sequence[str], fence: Fence) -> None:
        """Make prepared rows visible, all in one step; what is committed stays so.

        Raises:
            UsageError: one is neither prepared nor committed.
        """
        self._call(lambda: self._commit(names, fence), may_land_late=True)

    def committed(self) -> list[str]:
        """Return the names of all that was committed and not forgotten, whosever it is."""
        return self._call(lambda: sorted(self.remembered))

    def forget_committed(self, names: Sequence[str]) -> None:
        """Forget that these were committed."""
        self._call(lambda: self._forget_committed(names), may_land_late=True)

    def abort(self, name: str, fence: Fence) -> None:
        """Forget what is prepared or open under a name."""
        self._call(lambda: self._abort(name, fence), may_land_late=True)

    def close(self, session: Session) -> None:
        """End a connection: at once, and always."""
        self._drop(session)

    # -- owners and ledgers -----------------------------------------------------------------------------------------

    def claim(self, fence: Fence) -> None:
        """Remember a generation, unless a newer one is known."""
        self._call(lambda: self._claim(fence), may_land_late=True)

    def claimed(self, owner: str) -> Fence | None:
        """Return what is remembered."""
        return self._call(lambda: self.owners.get(owner))

    def all_claimed(self) -> list[Fence]:
        """Return all that is remembered: at once, because the process that asks has just asked for one of them."""
        return list(self.owners.values())

    def published(self, names: Sequence[str]) -> set[str]:
        """Return those that the ledger has."""
        return self._call(lambda: self.ledger & set(names))

    def publish(self, name: str, rows: Sequence[Row], fence: Fence) -> None:
        """Write rows and name in one transaction; nothing if the name is there."""
        self._call(lambda: self._publish(name, rows, fence), may_land_late=True)

    def forget(self, is_old: Callable[[str], bool]) -> None:
        """Remove names from the ledger."""
        self._call(lambda: self._forget(is_old), may_land_late=True)

    # -- what somebody else does ------------------------------------------------------------------------------------

    def restart(self) -> None:
        """Start the database again: nothing that is open survives it."""
        for session in list(self.sessions):
            self._drop(session)

    # -- effects ----------------------------------------------------------------------------------------------------

    def _begun(self, name: str) -> Session:
        process = self._tasks.current.process
        session = Session(name, process)
        self.sessions.append(session)
        process.closers.append(lambda: self._tasks.world.at(self._rng.randint(0, 300), self._drop, session))
        if self._drops_after_ms is not None:
            self._tasks.world.at(self._drops_after_ms + self._rng.randint(0, 500), self._waits_too_long, session)
        return session

    def _waits_too_long(self, session: Session) -> None:
        if not self._faults.is_healed:
            self._drop(session)

    def _prepare(self, name: str, rows: tuple[Row, ...] | None, fence: Fence) -> None:
        fence.refuse_if_replaced_by(self.owners.get(fence.owner))
        if name in self.prepared or name in self._decided:
            return
        if rows is None:
            raise Gone(f"transaction {name} is not open any more")
        self.prepared[name] = rows
        if self.keeps_ms is not None:
            self._tasks.world.at(self.keeps_ms, self._expire, name)
        self._on_change(fence, "prepare")

    def _expire(self, name: str) -> None:
        rows = None if self._faults.is_healed else self.prepared.pop(name, None)
        if rows is not None:
            self._tasks.world.tell("database", f"ends {name}, which nobody has decided")
            self.expired[name] = rows

    def _listed(self) -> list[str]:
        return [session.name for session in self.sessions] if self.lists_open else []

    def _commit(self, names: Sequence[str], fence: Fence) -> None:
        fence.refuse_if_replaced_by(self.owners.get(fence.owner))
        fresh = [name for name in dict.fromkeys(names) if name not in self.remembered]
        for name in fresh:
            if name not in self.prepared:
                raise UsageError(f"{name} is neither prepared nor committed")
        for name in fresh:
            self.visible.setdefault(fence.owner, []).append(Committed(name, self.prepared.pop(name)))
        self.remembered.update(fresh)
        self._decided.update(fresh)
        if fresh:
            self._watch(fence.owner, fresh, fence.generation)

    def _abort(self, name: str, fence: Fence) -> None:
        fence.refuse_if_replaced_by(self.owners.get(fence.owner))
        self._on_change(fence, "abort")
        self.aborted_count += self.prepared.pop(name, None) is not None
        for session in [one for one in self.sessions if one.name == name]:
            self._drop(session)

    def _claim(self, fence: Fence) -> None:
        fence.refuse_if_replaced_by(self.owners.get(fence.owner))
        self.owners[fence.owner] = fence
        self._on_change(fence, "claim")

    def _publish(self, name: str, rows: Sequence[Row], fence: Fence) -> None:
        fence.refuse_if_replaced_by(self.owners.get(fence.owner))
        if name not in self.ledger:
            self.ledger.add(name)
            self.visible.setdefault(fence.owner, []).append(Committed(name, tuple(rows)))
            self._watch(fence.owner, [name], fence.generation)

    def _forget_committed(self, names: Sequence[str]) -> None:
        self.forgotten_count += len(self.remembered & set(names))
        self.remembered -= set(names)

    def _forget(self, is_old: Callable[[str], bool]) -> None:
        old = {name for name in self.ledger if is_old(name)}
        self.forgotten_count += len(old)
        self.ledger -= old

    def _open(self, session: Session) -> Session:
        if session.is_over:
            raise Gone(f"transaction {session.name} is not open any more")
        return session

    def _drop(self, session: Session) -> None:
        session.is_over = True
        if session in self.sessions:
            self.sessions.remove(session)

    # -- the way to it ----------------------------------------------------------------------------------------------

    def _call(self, effect: Callable[[], T], *, is_in_work: bool = False, may_land_late: bool = False) -> T:
        """Have ``effect`` happen, more or less."""
        tasks, faults = self._tasks, self._faults
        share = IN_WORK_RATE if is_in_work else 1.0
        tasks.park(faults.delay_ms(STEP_MS))
        self._may_kill()
        if faults.is_storage_gone(tasks.world.now_ms) or self._strikes(Fault.PUT_FAILS, share):
            raise Unreachable("injected")
        if may_land_late and self._strikes(Fault.PUT_LANDS_LATE, share):
            tasks.world.at(self._rng.randint(0, LATE_MS), self._land, effect)
            raise Unreachable("injected time-out")
        answer = self._counted(effect)
        tasks.pass_turn()
        self._may_kill()
        if self._strikes(Fault.PUT_FAILS_AFTER, share):
            raise Unreachable("injected after its effect")
        return answer

    def _strikes(self, fault: Fault, share: float) -> bool:
        return self._faults.strikes(fault) and self._rng.random() < share

    def _land(self, effect: Callable[[], object]) -> None:
        """A call that timed out takes effect; no process hears how it ends."""
        try:
            self._counted(effect)
        except (FencedError, UsageError, Gone) as problem:
            self._tasks.world.tell("database", f"too late: {problem}")

    def _counted(self, effect: Callable[[], T]) -> T:
        try:
            return effect()
        except FencedError:
            self.refused_count += 1
            raise

    def _may_kill(self) -> None:
        is_due = self._kills and not self._faults.is_healed and self._rng.random() < DEATH_RATE
        if is_due:
            self._kills -= 1
            self._tasks.current.process.kill()


READ_MS = 2
"""Usual time of one call, at most."""

FAILURE_RATE = 0.2
"""Of the opportunities at which reading fails, so many do: each ends a generation."""


@dataclass
class Part(Generic[T]):
    """One part of the feed.

    Attributes:
        rows: all that it will ever have.
        written: how many of them there are.
        forgotten: how many of these it has forgotten.
    """

    rows: Sequence[T]
    written: int = 0
    forgotten: int = 0


class Feed(Generic[T]):
    """Parts by name."""

    def __init__(self, tasks: Tasks, faults: Faults, rng: random.Random, parts: Mapping[str, Sequence[T]]) -> None:
        self._tasks = tasks
        self._faults = faults
        self._rng = rng
        self.parts = {name: Part(rows) for name, rows in parts.items()}

    def begin(self, spread_ms: int) -> None:
        """Have the records come, within about ``spread_ms``."""
        for part in self.parts.values():
            pause_ms = max(1, spread_ms * 6 // max(1, len(part.rows)))
            self._tasks.world.at(self._rng.randint(0, 20), self._append, part, pause_ms)

    def read(self, name: str, at: int, count: int) -> tuple[Sequence[T], bool]:
        """Return at most ``count`` records from ``at`` on, and whether none will ever follow those.

        Raises:
            OSError: it was not reached, or has forgotten what is asked for.
        """
        part = self.parts[name]
        self._tasks.park(self._rng.randint(0, READ_MS))
        if self._faults.strikes(Fault.GET_FAILS) and self._rng.random() < FAILURE_RATE:
            raise OSError("the feed was not reached")
        if at < part.forgotten:
            raise OSError(f"the feed has forgotten what was before {part.forgotten} of {name}, {at} is asked for")
        found = part.rows[at : min(at + count, part.written)]
        return found, at + len(found) == len(part.rows)

    def forget(self, name: str, before: int) -> None:
        """No process asks for records before this one any more. Idempotent.

        Raises:
            OSError: it was not reached, or did not answer.
        """
        self._tasks.park(self._rng.randint(0, READ_MS))
        if self._faults.strikes(Fault.PUT_FAILS):
            raise OSError("the feed was not reached")
        part = self.parts[name]
        part.forgotten = max(part.forgotten, before)
        if self._faults.strikes(Fault.PUT_FAILS_AFTER):
            raise OSError("the feed did not answer")

    def _append(self, part: Part[T], pause_ms: int) -> None:
        part.written = min(part.written + self._rng.randint(1, 6), len(part.rows))
        if part.written < len(part.rows):
            self._tasks.world.at(self._rng.randint(1, 2 * pause_ms), self._append, part, pause_ms)
