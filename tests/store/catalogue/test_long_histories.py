"""What is asked again and again takes no longer with a long history: SQLite's own steps are counted, not the time."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest
import sqlalchemy as sa
from tests.store.storing import KEYED

from headgate.codec.chunk import PartEntry
from headgate.model.pipeline_identity import PipelineIdentity
from headgate.protocol.store.layouts import Plan, ScalingPolicy, Unit, equal_ranges
from headgate.protocol.store.reader_group import (
    CheckpointAsked,
    CheckpointForgotten,
    Committed,
    Event,
    GroupSegment,
    Joined,
    Lived,
    Passed,
)
from headgate.protocol.store.transactions import Commit
from headgate.protocol.store.truncation import Hold
from headgate.store.catalogue.records import ChunkRecord, GroupStart, Numbers, Reading, Shared
from headgate.store.catalogue.sql import SqlCatalogue
from headgate.store.catalogue.sqlite import MemoryDatabase
from headgate.store.catalogue.tables import make_tables
from headgate.store.streams import RetentionPolicy, StreamDefinition, StreamInfo

SHORT, LONG = 3, 15
STEPS_MORE_MAX = 10
"""By so many steps a call may take longer with the longer history; each step of that history would add more."""

ALL_KEYS = (0, 1 << 32)
OWNER = "p/sink"
POLICY = ScalingPolicy(Unit.EVENTS, 1, 1, 8, 0)
READING = Reading("q/source", "life", 3)
LIFE = PipelineIdentity("a", "/a", "h", 1)
LEASE_MS = 10_000


Call: TypeAlias = "Callable[[SqlCatalogue, StreamInfo, History], object]"


@dataclass
class History:
    """A stream that was scaled, written to, committed to and read so many times."""

    length: int

    def __post_init__(self) -> None:
        self._now = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self.catalogue = SqlCatalogue(MemoryDatabase("store", self._now, "store"))
        with self.catalogue._database.write() as connection:
            make_tables(connection)
        self._fill()
        self.stream = self.catalogue.find_stream("s")
        self.read = read_so_far(self.catalogue.describe_stream("s"))
        self.new = self.chunk("new")
        self._whole = sqlite3.connect(":memory:", check_same_thread=False)
        self._now.backup(self._whole)
        self._mend()

    def _mend(self) -> None:
        """Have all as it was, and SQLite know the tables again: it counts as steps how it reads what they are."""
        self._whole.backup(self._now)
        self._now.execute("SELECT count(*) FROM meta").fetchone()

    def chunk(self, name: str) -> ChunkRecord:
        """Two parts, in the segments that take events."""
        first, second = (segment.segment_id for segment in self.catalogue.find_stream("s").segments)
        return ChunkRecord(f"1/{name}", 100, (PartEntry(first, 2, 0, 40, 1), PartEntry(second, 3, 64, 40, 2)))

    def steps(self, call: Call) -> int:
        """Return how many steps SQLite takes for a call, each time with the same history."""
        counted = 0

        def count() -> None:
            nonlocal counted
            counted += 1

        self._now.set_progress_handler(count, 1)
        try:
            call(self.catalogue, self.stream, self)
        finally:
            self._now.set_progress_handler(None, 1)
            self._mend()
        return counted

    def scans(self, call: Call) -> list[str]:
        """Return the statements of a call for which SQLite reads a whole table, with its plan."""
        found: list[str] = []
        engine = self.catalogue._database._engine  # type: ignore[attr-defined]

        def explain(connection: Any, cursor: Any, statement: str, values: Any, context: Any, many: bool) -> None:
            if statement.startswith(("SELECT", "UPDATE", "DELETE")):
                plan = self._now.execute(f"EXPLAIN QUERY PLAN {statement}", values[0] if many else values).fetchall()
                found.extend(f"{row[3]}: {statement}" for row in plan if row[3].startswith("SCAN"))

        sa.event.listen(engine, "before_cursor_execute", explain)
        try:
            call(self.catalogue, self.stream, self)
        finally:
            sa.event.remove(engine, "before_cursor_execute", explain)
            self._mend()
        return found

    def _fill(self) -> None:
        made = self.catalogue
        made.create_stream(StreamDefinition("s", KEYED, 2, "key"), 1, if_not_exists=False)
        made.create_group("g", ["s"], GroupStart(), 1)
        made.own(OWNER, LIFE)
        for number in range(self.length):
            self._live(made, number)
        stream = made.find_stream("s")
        made.register_writer(stream, "w", 1)
        made.set_scaling("s", POLICY)
        made.set_retention("s", RetentionPolicy(age_ms=1_000_000_000))
        made.create_group("tail", ["s"], GroupStart(from_latest=True), 1)
        made.append(stream, self.chunk("last"), None, self.length)
        for group, reader in (("g", "a"), ("tail", "a"), ("tail", "b")):
            made.change_group(group, Joined(reader, reader, 1_000))
        made.change_group("tail", CheckpointAsked("open"))
        made.mark("s", "tail/source", 1, 1)
        made.prepare(stream, "prepared", OWNER, self.length, [self.chunk("prepared")], 5)
        begun = made.begin_shared("s", "open", "writers", 0, LEASE_MS, 5)
        made.join_shared(begun, "w", "t", 5)
        made.write_shared(begun, "w", "t", (1, 2), self.chunk("shared"), 5)

    def _live(self, made: SqlCatalogue, number: int) -> None:
        """One more of everything that stays behind."""
        for into in (1, 2):
            stream = made.find_stream("s")
            close = tuple(segment.segment_id for segment in stream.segments)
            made.scale_stream("s", Plan(stream.layout_epoch, close, tuple(equal_ranges(ALL_KEYS, into))), number)
        stream = made.find_stream("s")
        made.append(stream, self.chunk(f"a{number}"), None, number)
        made.prepare(stream, f"t{number}", OWNER, number, [self.chunk(f"t{number}")], number)
        made.commit([("s", f"t{number}")], OWNER, number, number, {"s": number})
        begun = made.begin_shared("s", f"s{number}", f"writers{number}", 0, LEASE_MS, number)
        made.join_shared(begun, "w", "t", number)
        made.write_shared(begun, "w", "t", (1, 2), self.chunk(f"s{number}"), number)
        made.decide_shared(begun, Commit(), number)
        made.register_writer(stream, f"w{number}", 1)
        made.mark("s", f"r{number}/source", 1, 1)
        made.own(f"o{number}/sink", LIFE)
        made.pass_segments(stream, Reading(f"q{number}/source", "life", 1), [0, 1])
        made.hold(stream, Hold(f"holder{number}", {0: 0}))


def shared(stream: StreamInfo) -> Shared:
    return Shared(stream, "open", "writers", 0, LEASE_MS)


def tail(stream: StreamInfo) -> int:
    return stream.segments[0].segment_id


def append_with_numbers(c: SqlCatalogue, s: StreamInfo, h: History) -> object:
    return c.append(s, h.new, Numbers("w", 1, 1, 1), 900)


def read_so_far(stream: StreamInfo) -> dict[GroupSegment, int]:
    """Everything that came since the group at the tail began."""
    return {GroupSegment("s", x.segment_id): stream.ends[x.segment_id] for x in stream.segments}


def changes_group(event: Callable[[dict[GroupSegment, int]], Event]) -> Call:
    """Ask for a change of the group at the tail; ``event`` is given how far its readers can have read."""
    return lambda c, s, h: c.change_group("tail", event(h.read))


OFTEN: dict[str, Call] = {
    "append": lambda c, s, h: c.append(s, h.new, None, 900),
    "append_with_numbers": append_with_numbers,
    "register_writer": lambda c, s, h: c.register_writer(s, "w", 2),
    "find_append": lambda c, s, h: c.find_append("1/a1"),
    "find_stream": lambda c, s, h: c.find_stream("s"),
    "look": lambda c, s, h: c.look(s),
    "find_shared": lambda c, s, h: c.find_shared("s", "open"),
    "schemas": lambda c, s, h: c.schemas(s),
    "parts_at_the_tail": lambda c, s, h: c.parts(s, tail(s), 1_000_000, 100),
    "parts_of_one": lambda c, s, h: c.parts(s, tail(s), 0, 1),
    "begin": lambda c, s, h: c.begin("s", "new", OWNER, 900),
    "prepare": lambda c, s, h: c.prepare(s, "new", OWNER, 900, [h.new], 900),
    "commit": lambda c, s, h: c.commit([("s", "prepared")], OWNER, 900, 900, {"s": 900}),
    "abort": lambda c, s, h: c.abort("s", "prepared", OWNER, 900, 900),
    "fence": lambda c, s, h: c.fence(OWNER, 900),
    "forget_outcomes": lambda c, s, h: c.forget_outcomes(["s1"], "writers1", 900),
    "begin_shared": lambda c, s, h: c.begin_shared("s", "newly", "writers", 0, LEASE_MS, 900),
    "join_shared": lambda c, s, h: c.join_shared(shared(s), "v", "t2", 900),
    "write_shared": lambda c, s, h: c.write_shared(shared(s), "w", "t", (3, 3), h.new, 900),
    "ping_shared": lambda c, s, h: c.ping_shared(shared(s), 900),
    "decide_shared": lambda c, s, h: c.decide_shared(shared(s), Commit(), 900),
    "expire_shared": lambda c, s, h: c.expire_shared(s, 900),
    "owner": lambda c, s, h: c.owner(OWNER),
    "passed": lambda c, s, h: c.passed(s, READING),
    "pass_segments": lambda c, s, h: c.pass_segments(s, READING, [0, 1]),
    "mark": lambda c, s, h: c.mark("s", "new/source", 1, 6),
    "frontier": lambda c, s, h: c.frontier("s", "tail/source", 1, [0, tail(s)]),
    "unmark": lambda c, s, h: c.unmark("r1/source", 1, 0, 5),
    "unmark_others": lambda c, s, h: c.unmark_others("r1/source", 2),
    "hold": lambda c, s, h: c.hold(s, Hold("reader", {0: 0})),
    "release": lambda c, s, h: c.release(s, "holder1"),
    "known_chunks": lambda c, s, h: c.known_chunks(["1/a1", "unknown"]),
    "condemn": lambda c, s, h: c.condemn(["1/a1", "unknown"]),
    "swept": lambda c, s, h: c.swept(["unknown"]),
    "find_group": lambda c, s, h: c.find_group("g"),
    "commit_far_back": lambda c, s, h: c.change_group("g", Committed("a", "a", {GroupSegment("s", 0): 1})),
    "commit_at_the_tail": changes_group(lambda read: Committed("a", "a", read)),
    "reader_lives": changes_group(lambda read: Lived("a", "a", 1)),
    "ask_for_checkpoint": changes_group(lambda read: CheckpointAsked("new")),
    "pass_marker": changes_group(lambda read: Passed("a", "a", "open", read)),
    "forget_checkpoint": changes_group(lambda read: CheckpointForgotten("open")),
}
"""What is asked with each append, commit, checkpoint or look: it must not know of what was."""
SOMETIMES: dict[str, Call] = {
    "frontier_of_all": lambda c, s, h: c.frontier("s", "tail/source", 1),
    "layout": lambda c, s, h: c.layout("s"),
    "layout_and_extents": lambda c, s, h: c.layout_and_extents(s),
    "extents": lambda c, s, h: c.extents(s),
    "holds": lambda c, s, h: c.holds(s),
    "observe": lambda c, s, h: c.observe(s, 900),
    "sweep": lambda c, s, h: c.sweep(s, 10),
    "end_of_segments": changes_group(lambda read: Committed("a", "a", read, ("s",))),
    "describe_stream": lambda c, s, h: c.describe_stream("s"),
    "recover": lambda c, s, h: c.recover("s", OWNER, 900, {"prepared"}, 900),
    "retention_cut": lambda c, s, h: c.retention_cut(s, 900),
    "cut_at": lambda c, s, h: c.cut_at(s, 3),
    "truncate": lambda c, s, h: c.truncate(s, {0: 0}, anyway=True),
    "transactions": lambda c, s, h: c.transactions(OWNER, "", None),
    "transactions_named": lambda c, s, h: c.transactions(OWNER, "prepared", "s"),
    "list_streams": lambda c, s, h: c.list_streams(""),
}
"""What needs all segments of a stream, or everything in it; whoever asks often for that would notice."""


@pytest.fixture(scope="module")
def histories() -> tuple[History, History]:
    return History(SHORT), History(LONG)


def test_what_is_asked_often_takes_as_long_whatever_was_before(histories: tuple[History, History]) -> None:
    # RG28
    check_often(*histories)


def check_often(short: History, long: History) -> None:
    found = {name: (short.steps(call), long.steps(call)) for name, call in OFTEN.items()}
    slower = {name: steps for name, steps in found.items() if steps[1] > steps[0] + STEPS_MORE_MAX}
    assert slower == {}


def test_no_table_is_read_as_a_whole_but_that_of_streams(histories: tuple[History, History]) -> None:
    _, history = histories
    scans = {name: history.scans(call) for name, call in (OFTEN | SOMETIMES).items()}
    assert {name: found for name, found in scans.items() if found and name != "list_streams"} == {}
    assert [found.partition(" ")[2].split()[0] for found in scans["list_streams"]] == ["streams"]


def test_a_longer_history_is_longer(histories: tuple[History, History]) -> None:
    """Else nothing above says anything."""
    short, long = histories
    assert all(long.steps(SOMETIMES[name]) > short.steps(SOMETIMES[name]) + 100 for name in ("extents", "cut_at"))
