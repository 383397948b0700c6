"""A database and a feed of the machine room keep what they promise, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from tests.sim.machine.test_storage import Room

from headgate.connectors.fenced_sink import Fence
from headgate.errors import FencedError, UsageError
from headgate.sim.machine import database as machine
from headgate.sim.machine.database import Database, Feed, Gone, Unreachable
from headgate.sim.machine.world import Fault

FENCE = Fence("p:out", 1)


class Watched:
    """A database, and what became visible of it."""

    def __init__(self, room: Room) -> None:
        self.seen: list[tuple[str, list[str], int]] = []
        self.changes: list[str] = []
        self.database = Database(room.tasks, room.faults, random.Random(0), self._see, self._change, 0)
        self.database.lists_open = False

    def _see(self, owner: str, names: Sequence[str], generation: int) -> None:
        self.seen.append((owner, list(names), generation))

    def _change(self, fence: Fence, what: str) -> None:
        self.changes.append(f"{what} of {fence.generation}")


def test_what_is_prepared_survives_a_restart_and_what_is_open_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(monkeypatch)
    watched = Watched(room)
    database = watched.database

    def use() -> None:
        sessions = [database.begin(name) for name in "ab"]
        for number, session in enumerate(sessions):
            database.write(session, [{"n": number}])
        database.prepare(sessions[0], FENCE)
        database.restart()
        with pytest.raises(Gone):
            database.write(sessions[1], [{"n": 2}])
        with pytest.raises(Gone):
            database.prepare(sessions[1], FENCE)
        database.prepare(sessions[0], FENCE)  # its answer was lost
        assert database.names() == ["a"]
        database.commit(["a"], FENCE)
        database.commit(["a"], FENCE)
        with pytest.raises(UsageError, match="neither prepared nor committed"):
            database.commit(["b"], FENCE)

    room.run(use)
    assert [one.rows for one in database.visible["p:out"]] == [({"n": 0},)]
    assert watched.seen == [("p:out", ["a"], 1)]
    assert watched.changes == ["prepare of 1"]
    assert not database.prepared
    assert not database.sessions


def test_who_was_replaced_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(monkeypatch)
    database = Watched(room).database
    heir = Fence("p:out", 2)

    def use() -> None:
        session = database.begin("a")
        database.prepare(session, FENCE)
        database.claim(heir)
        calls: list[Callable[[], None]] = [
            lambda: database.claim(FENCE),
            lambda: database.commit(["a"], FENCE),
            lambda: database.abort("a", FENCE),
            lambda: database.publish("l", [], FENCE),
            lambda: database.prepare(session, FENCE),
        ]
        for call in calls:
            with pytest.raises(FencedError):
                call()
        database.abort("a", heir)

    room.run(use)
    assert (database.refused_count, database.aborted_count) == (5, 1)
    assert not database.visible


def test_a_ledger_has_a_name_once_until_it_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(monkeypatch)
    database = Watched(room).database

    def use() -> None:
        for _ in range(2):
            database.publish("a", [{"n": 1}], FENCE)
        assert database.published(["a", "b"]) == {"a"}
        database.forget(lambda name: name == "a")
        assert database.published(["a"]) == set()

    room.run(use)
    assert len(database.visible["p:out"]) == 1


def test_a_call_that_timed_out_may_take_effect_later(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(monkeypatch, Fault.PUT_LANDS_LATE)
    database = Watched(room).database

    def use() -> None:
        with pytest.raises(Unreachable):
            database.claim(FENCE)
        assert not database.owners
        room.tasks.park(machine.LATE_MS + 1)

    room.run(use)
    assert database.owners == {"p:out": FENCE}


def test_a_feed_forgets_what_nobody_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(monkeypatch)
    feed = Feed(room.tasks, room.faults, random.Random(0), {"a": range(10)})
    feed.begin(1)

    def use() -> None:
        room.tasks.park(1_000)
        assert feed.read("a", 2, 4) == (range(2, 6), False)
        assert feed.read("a", 6, 9) == (range(6, 10), True)
        feed.forget("a", 6)
        feed.forget("a", 3)
        assert feed.read("a", 6, 1) == (range(6, 7), False)
        with pytest.raises(OSError, match="has forgotten what was before 6 of a, 5 is asked for"):
            feed.read("a", 5, 1)

    room.run(use)
