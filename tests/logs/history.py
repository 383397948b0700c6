"""What clients of a log have done and seen: operations with their steps, and what came of each; and histories in files.

Each life of a client appends lines to a file of its own, and a kill cuts the last one. A line is written before its
step is made and another one behind it, so what was under way when its process died is known to be unknown. A later life
of the same client may say what became of it.

Counterpart: ``clients`` write files, ``checks`` judges histories. Source: docs/spec/log-histories.md. Knows nothing of
the store: a segment is a number, a position is a number within it, a value is there once.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias


class Place(NamedTuple):
    """Where an event is. Of the events of one key, those that came first are at smaller places."""

    segment: int
    position: int


class Outcome(StrEnum):
    """What became of an operation."""

    OK = "ok"
    """It was acknowledged: it took effect before that."""
    FAILED = "failed"
    """It certainly took no effect, and never will."""
    UNKNOWN = "unknown"
    """Nobody was told: it may have taken effect, then or later."""


@dataclass(frozen=True, slots=True)
class Send:
    """An event that somebody wants in the log.

    Attributes:
        key: events of one key stay in the order in which a process sent them.
        value: no other event has it.
        place: where it is, as its writer was told; None: it was not told.
        author: who sent it, of those that share one operation: its order counts within its author.
    """

    key: str
    value: str
    place: Place | None = None
    author: str = ""


@dataclass(frozen=True, slots=True)
class Poll:
    """What a read of one segment returned, at one moment.

    Attributes:
        segment: the one that was read.
        events: (position, value), in order.
        end: a position where nothing followed at that moment; None: it did not look so far.
    """

    segment: int
    events: tuple[tuple[int, str], ...] = ()
    end: int | None = None


@dataclass(frozen=True, slots=True)
class Seek:
    """From here on the process reads this segment from somewhere else."""

    segment: int


Step: TypeAlias = Send | Poll | Seek


@dataclass(frozen=True, slots=True)
class Operation:
    """Something that one process did; all its sends take effect together or not at all.

    Attributes:
        process: who did it; its operations follow each other. A new life is another process.
        begun_ns: before the first step.
        ended_ns: behind the last one, by a clock that all processes share; None: it was never told.
        shown_ns: from here on its sends may be seen: when a transaction was asked to commit; None: from its begin on.
        group: a group of readers whose members share the events; "": nobody shares them.
        read_ns: when a member had in its hands what it read; None: it read nothing.
    """

    process: str
    begun_ns: int
    ended_ns: int | None
    outcome: Outcome
    steps: tuple[Step, ...] = ()
    shown_ns: int | None = None
    group: str = ""
    read_ns: int | None = None

    @property
    def sends(self) -> tuple[Send, ...]:
        """The events that it wants in the log, in order."""
        return tuple(step for step in self.steps if isinstance(step, Send))

    @property
    def polls(self) -> tuple[Poll, ...]:
        """What it read, in order."""
        return tuple(step for step in self.steps if isinstance(step, Poll))

    @property
    def effect_ns(self) -> int:
        """It took no effect before."""
        return self.begun_ns if self.shown_ns is None else self.shown_ns

    def __str__(self) -> str:
        what = [f"{len(self.sends)} sends"] * bool(self.sends) + [f"{len(self.polls)} polls"] * bool(self.polls)
        return f"{self.process}@{self.begun_ns} ({', '.join(what) or 'nothing'}, {self.outcome})"


@dataclass(frozen=True, slots=True)
class Index:
    """A history by values, places and processes."""

    operations: Sequence[Operation]
    writer_of: dict[str, Operation] = field(default_factory=dict)
    key_of: dict[str, str] = field(default_factory=dict)
    places_of: dict[str, set[Place]] = field(default_factory=lambda: defaultdict(set))
    values_at: dict[Place, set[str]] = field(default_factory=lambda: defaultdict(set))
    readers_of: dict[str, list[Operation]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, operations: Iterable[Operation]) -> Index:
        """Return the index of a history."""
        found = cls(sorted(operations, key=lambda operation: operation.begun_ns))
        for operation in found.operations:
            for send in operation.sends:
                assert send.value not in found.writer_of, f"{send.value} was sent twice: the history says nothing"
                found.writer_of[send.value], found.key_of[send.value] = operation, send.key
                if send.place is not None:
                    found._see(send.value, send.place)
            for poll in operation.polls:
                for position, value in poll.events:
                    found._see(value, Place(poll.segment, position))
                    found.readers_of[value].append(operation)
        return found

    def _see(self, value: str, place: Place) -> None:
        self.places_of[value].add(place)
        self.values_at[place].add(value)

    def place_of(self, value: str) -> Place | None:
        """Return where a value is, if anybody knows; the first of several."""
        return min(self.places_of[value], default=None) if value in self.places_of else None

    def by_process(self) -> dict[str, list[Operation]]:
        """Return the operations of each process, in its order."""
        found: dict[str, list[Operation]] = defaultdict(list)
        for operation in self.operations:
            found[operation.process].append(operation)
        return dict(found)

    def writers(self) -> Iterator[Operation]:
        """Iterate over the operations that send."""
        return (operation for operation in self.operations if operation.sends)

    def highest_read(self) -> dict[int, int]:
        """Return, by segment, the highest position that anybody read."""
        found: dict[int, int] = {}
        for operation in self.operations:
            for poll in operation.polls:
                for position, _ in poll.events:
                    found[poll.segment] = max(position, found.get(poll.segment, position))
        return found


Line = dict[str, Any]


class Recorder:
    """Writes what one life of a client does."""

    def __init__(self, logs: Path, client: str, life: int) -> None:
        self.process = f"{client}.{life}"
        self._logs, self._client = logs, client
        self._file = (logs / f"{self.process}.jsonl").open("a", encoding="utf-8")
        self._count = 0

    def begin(self, sends: Sequence[Send] = (), **more: Any) -> int:
        """Say that an operation begins, with what it sends; return its number. ``more`` is for later lives."""
        self._count += 1
        self._write(n=self._count, begin=time.monotonic_ns(), sends=[(x.key, x.value) for x in sends], **more)
        return self._count

    def shows(self, number: int) -> None:
        """Say that its sends are about to be asked to be visible."""
        self._write(n=number, shown=time.monotonic_ns())

    def has_read(self, number: int, steps: Sequence[Poll | Seek]) -> None:
        """Say what it has read, before anybody acts on that."""
        self._write(n=number, read=time.monotonic_ns(), steps=[_told(step) for step in steps])

    def end(self, number: int, outcome: Outcome = Outcome.OK, places: Sequence[Place] | None = None) -> None:
        """Say what came of it, and where its sends are."""
        self._write(n=number, end=time.monotonic_ns(), outcome=outcome, places=places)

    def resolve(self, process: str, number: int, outcome: Outcome) -> None:
        """Say what became of an operation of a former life."""
        self._write(of=process, number=number, outcome=outcome)

    def shows_of(self, process: str, number: int) -> None:
        """As ``shows``, for an operation of a former life."""
        self._write(of=process, number=number, shown=time.monotonic_ns())

    def of_transaction(self, transaction: str, what: str) -> None:
        """Say that a transaction of several processes is about to be committed, or was ("asked", "committed")."""
        self._write(transaction=transaction, what=what, at=time.monotonic_ns())

    def opens(self, sequence: int) -> None:
        """Say with which number this life begins to append."""
        self._write(opened=sequence)

    def next_began_with(self, process: str) -> int:
        """Return the number with which the next life behind ``process`` began: what that had not reached is refused.

        Numbers that came later are those of that life.
        """
        life = int(process.rpartition(".")[2])
        while True:
            life += 1
            file = self._logs / f"{self._client}.{life}.jsonl"
            found = [line["opened"] for line in lines(file) if "opened" in line] if file.exists() else []
            if found:
                return int(found[0])

    def unanswered(self) -> list[tuple[str, int, Line]]:
        """Return (process, number, first line) of what former lives of this client were not told."""
        own = [x for x in records(self._logs).values() if x.client == self._client and x.process != self.process]
        return [(x.process, x.number, x.begin) for x in own if x.outcome is Outcome.UNKNOWN]

    def _write(self, **line: Any) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


@dataclass(slots=True)
class Record:
    """What the lines say of one operation."""

    process: str
    number: int
    begin: Line
    outcome: Outcome = Outcome.UNKNOWN
    ended_ns: int | None = None
    shown_ns: int | None = None
    read_ns: int | None = None
    places: list[Place] | None = None
    read: list[Step] = field(default_factory=list)

    @property
    def client(self) -> str:
        """Whose life it was."""
        return self.process.rpartition(".")[0]

    def sends(self, author: str = "") -> tuple[Send, ...]:
        """What it sends, with the places that it was told."""
        places = self.places or [None] * len(self.begin["sends"])
        return tuple(
            Send(key, value, place, author) for (key, value), place in zip(self.begin["sends"], places, strict=True)
        )

    def operation(self) -> Operation:
        """Return it as the checks take it."""
        return Operation(
            self.process,
            self.begin["begin"],
            self.ended_ns,
            self.outcome,
            (*self.sends(), *self.read),
            self.shown_ns,
            self.begin.get("group", ""),
            self.read_ns,
        )


def _told(step: Poll | Seek) -> list[Any]:
    return [step.segment, step.events, step.end] if isinstance(step, Poll) else [step.segment]


def _step(told: list[Any]) -> Step:
    if len(told) == 1:
        return Seek(told[0])
    return Poll(told[0], tuple((at, value) for at, value in told[1]), told[2])


def lines(file: Path) -> list[Line]:
    """Return the whole lines of a file; one that a kill cut is none."""
    found = file.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in found if line.endswith("\n")]


def records(logs: Path) -> dict[tuple[str, int], Record]:
    """Return what all lives have said, by process and number."""
    found: dict[tuple[str, int], Record] = {}
    later: list[Line] = []
    for file in sorted(logs.glob("*.jsonl")):
        for line in lines(file):
            if "begin" in line:
                found[file.stem, line["n"]] = Record(file.stem, line["n"], line)
            elif "n" in line:
                _add(found[file.stem, line["n"]], line)
            elif "of" in line:
                later.append(line)
    for line in later:  # whoever had an answer of his own knows better when it came
        record = found[line["of"], line["number"]]
        if "shown" in line:
            record.shown_ns = record.shown_ns or line["shown"]
        elif record.outcome is Outcome.UNKNOWN:
            record.outcome = Outcome(line["outcome"])
    return found


def _add(record: Record, line: Line) -> None:
    if "shown" in line:
        record.shown_ns = line["shown"]
    if "read" in line:
        record.read_ns, record.read = line["read"], [_step(step) for step in line["steps"]]
    if "end" in line:
        record.ended_ns, record.outcome = line["end"], Outcome(line["outcome"])
        record.places = [Place(*place) for place in line["places"]] if line["places"] else None


def history(logs: Path, outcomes: dict[str, Outcome]) -> list[Operation]:
    """Return the history that the files tell; ``outcomes`` are those of transactions that several processes wrote."""
    known = records(logs)
    shared = defaultdict(list)
    for record in known.values():
        if "transaction" in record.begin:
            shared[record.begin["transaction"]].append(record)
    found = [record.operation() for record in known.values() if "transaction" not in record.begin]
    seen = {value for operation in found for poll in operation.polls for _, value in poll.events}
    times = _times_of_transactions(logs)
    for name, flushes in shared.items():
        found.append(_transaction(name, flushes, outcomes.get(name, Outcome.UNKNOWN), times[name], seen))
    return found


def _times_of_transactions(logs: Path) -> dict[str, dict[str, int]]:
    """Return when each was first asked to commit, and when somebody was first told that it has."""
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for line in (line for file in sorted(logs.glob("*.jsonl")) for line in lines(file) if "what" in line):
        times = found[line["transaction"]]
        times[line["what"]] = min(line["at"], times.get(line["what"], line["at"]))
    return found


def _transaction(
    name: str, flushes: Iterable[Record], outcome: Outcome, times: dict[str, int], seen: set[str]
) -> Operation:
    """Put the flushes of its participants together.

    One that was not answered is a part of it if anybody has seen it: of the others nobody knows.
    """
    ordered = sorted(flushes, key=lambda record: record.begin["begin"])
    sends = [send for record in ordered if _is_part(record, outcome, seen) for send in record.sends(record.client)]
    began_ns = min(record.begin["begin"] for record in ordered)
    shown_ns = times.get("asked") if outcome is not Outcome.FAILED else None
    done = Operation(f"transaction {name}", began_ns, times.get("committed"), outcome, tuple(sends), shown_ns)
    return done if outcome is not Outcome.FAILED else replace(done, ended_ns=None)


def _is_part(record: Record, outcome: Outcome, seen: set[str]) -> bool:
    answered = record.outcome is Outcome.OK
    return answered or outcome is Outcome.FAILED or any(value in seen for _, value in record.begin["sends"])
