"""Reader groups in the tables: what a check finds wrong with them, and what is held of their streams."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from tests.store.storing import KEYED, STREAM, database_of, keyed

from headgate.codec.chunk import PartEntry
from headgate.errors import CorruptionError, UsageError
from headgate.protocol.store.reader_group import Committed, GroupSegment
from headgate.protocol.store.truncation import Hold
from headgate.store.catalogue import group_rows
from headgate.store.catalogue import tables as t
from headgate.store.catalogue.records import ChunkRecord, GroupStart
from headgate.store.catalogue.sql import memory_catalogue
from headgate.store.reader_groups import GroupEvents, GroupReader
from headgate.store.store import Store
from headgate.store.streams import Retention, StreamDefinition


def stored(place: Path) -> Iterator[Store]:
    """A store with a group that has read everything, and one that has a checkpoint and has not begun."""
    with Store.open(place) as opened:
        opened.create_stream(STREAM, KEYED, segments=2, routing_key="key")
        with opened.writer(STREAM) as writer:
            writer.append(keyed(*((f"k{n % 8}", n) for n in range(40))))
        with opened.reader_group("g", STREAM).join("a") as reader:
            while reader.read() is not None:
                pass
        opened.reader_group("h", STREAM).checkpoint("c")
        assert opened.fsck() == []
        yield opened


store = pytest.fixture(name="store")(lambda tmp_path: (yield from stored(tmp_path / "store")))


def change(store: Store, statement: sa.Executable) -> None:
    with database_of(store).write() as connection:
        connection.execute(statement)


def problems(store: Store) -> list[str]:
    return [f"{problem.where}: {problem.what}" for problem in store.fsck() if not problem.is_harmless]


def state(store: Store, name: str) -> bytes:
    with database_of(store).read() as connection:
        return bytes(connection.scalar(sa.select(t.reader_groups.c.state).where(t.reader_groups.c.name == name)))


def damage(store: Store, name: str, old: bytes, new: bytes) -> None:
    before = state(store, name)
    assert old in before
    mine = t.reader_groups.c.name == name
    change(store, t.reader_groups.update().where(mine).values(state=before.replace(old, new)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"format":1', b'"format":9'),
        (b'"owners":[]', b'"owners":[["app/events",0,"nobody"]]'),
        (b'"progress":{"app/events"', b'"progress":{"other"'),
        (b'"kept":', b'"kept";'),
    ],
    ids=["format", "owner", "stream", "JSON"],
)
def test_a_group_that_cannot_be_read_is_a_problem_and_can_be_deleted(store: Store, old: bytes, new: bytes) -> None:
    # RG24
    damage(store, "g", old, new)
    (problem,) = problems(store)
    assert "reader group 'g'" in problem
    assert "headgate streams groups delete" in problem
    assert store.reader_groups() == ["g", "h"]
    with pytest.raises(CorruptionError, match="reader group 'g'"):
        store.reader_group("g").readers()
    assert store.repair() == []
    assert store.delete_reader_group("g")
    assert problems(store) == []
    assert list(store.holds(STREAM)) == ["reader group h"]


def test_a_position_that_the_stream_does_not_have_is_a_problem(store: Store) -> None:  # RG24
    group = store.reader_group("h")
    reader = group.join("a")
    end = store.describe(STREAM).ends[0]
    token = store._core.catalogue.find_group("h").group.readers["a"].token
    segment = GroupSegment(STREAM, 0)
    store._core.catalogue.change_group("h", Committed("a", token, {segment: end + 5}))
    assert problems(store) == [
        f"reader group 'h': it is at position {end + 5} of segment 0 of stream '{STREAM}', which ends at {end}; "
        "'headgate streams groups reset' gives it another place"
    ]
    reader.leave(commits=False)
    group.reset()
    assert problems(store) == []
    damage(store, "h", b"[[0,0]", b"[[7,0]")
    assert f"segment 7 of stream '{STREAM}', which ends at None" in "\n".join(problems(store))


def test_what_a_group_holds_is_checked_and_mended(store: Store) -> None:  # RG17, RG24
    before = store.holds(STREAM)
    store.release(STREAM, holder="reader group h")
    stream = store._core.catalogue.find_stream(STREAM)
    store._core.catalogue.hold(stream, Hold("reader group gone", store.tail(STREAM).positions))
    assert problems(store) == [
        f"reader group 'h': stream '{STREAM}' is not held from where it reads on, and may be truncated; "
        "--repair holds it",
        f"reader group 'gone': there is none, and stream '{STREAM}' is held for it; --repair lets go of it",
    ]
    assert store.repair() == [
        f"stream '{STREAM}' is not held any more for reader group 'gone', which there is not",
        f"what reader group 'h' needs of stream '{STREAM}' is held again",
    ]
    assert (store.holds(STREAM), problems(store), store.repair()) == (before, [], [])
    store._core.catalogue.hold(stream, Hold("reader group h", {0: 3, 1: 0}))
    assert len(problems(store)) == 1
    store.repair()
    assert store.holds(STREAM) == before


def test_a_group_is_repaired_although_one_before_it_cannot_be_read(store: Store) -> None:
    before = store.holds(STREAM)
    damage(store, "g", b'"format":1', b'"format":9')
    store.release(STREAM, holder="reader group h")
    assert store.repair() == [f"what reader group 'h' needs of stream '{STREAM}' is held again"]
    assert store.holds(STREAM) == before


def test_a_repair_leaves_alone_what_it_cannot_know(store: Store) -> None:
    damage(store, "g", b'"format":1', b'"format":9')
    damage(store, "h", b"[[0,0]", b"[[7,0]")
    store.release(STREAM, holder="reader group h")
    store.hold(store.tail(STREAM), holder="somebody else")
    before = store.holds(STREAM)
    assert store.repair() == []
    assert store.holds(STREAM) == before
    assert sorted(before) == ["reader group g", "somebody else"]
    assert len(problems(store)) >= 2


def test_a_group_whose_stream_was_deleted_or_scaled_is_no_problem(store: Store) -> None:  # RG24
    store.split(STREAM, 0)
    with store.writer(STREAM) as writer:
        writer.append(keyed(*((f"k{n % 8}", n) for n in range(40, 60))))
    assert problems(store) == []
    with store.reader_group("h").join("a", commit_every="0ms") as reader:
        for _ in range(10):
            reader.read()
    store.reader_group("h").forget_checkpoint("c")
    store.truncate(store.tail(STREAM), force=True)
    assert problems(store) == []
    store.delete(STREAM, force=True)
    assert (problems(store), store.repair()) == ([], [])


HOLDER = "reader group g"


def held(place: Path) -> Iterator[Store]:
    with Store.open(place) as opened:
        opened.create_stream(STREAM, KEYED, segments=2, routing_key="key")
        yield opened


holding = pytest.fixture(name="holding")(lambda tmp_path: (yield from held(tmp_path / "store")))


def write(holding: Store, count: int = 20) -> None:
    with holding.writer(STREAM) as writer:
        writer.append(keyed(*((f"k{n % 8}", n) for n in range(count))))


def drain(reader: GroupReader) -> None:
    while reader.read() is not None:
        pass
    reader.commit()


def test_what_somebody_let_go_of_is_held_again_when_the_group_moves(holding: Store) -> None:  # RG28
    write(holding)
    with holding.reader_group("g", STREAM).join("a") as reader:
        drain(reader)
        held = holding.holds(STREAM)[HOLDER]
        holding.release(STREAM, holder=HOLDER)
        assert holding.holds(STREAM) == {}
        write(holding)
        drain(reader)
    assert holding.holds(STREAM)[HOLDER] == holding.tail(STREAM)
    assert holding.holds(STREAM)[HOLDER] != held


def test_a_group_holds_a_stream_that_was_made_anew_from_its_reset_on(holding: Store) -> None:  # RG28
    group = holding.reader_group("g", STREAM)
    holding.delete(STREAM, force=True)
    holding.create_stream(STREAM, KEYED, segments=2, routing_key="key")
    group.reset()
    assert holding.holds(STREAM)[HOLDER] == holding.head(STREAM)


def test_nothing_is_held_of_closed_segments_whose_events_are_gone(holding: Store) -> None:  # RG28
    group = holding.reader_group("g", STREAM)
    with group.join("a", commit_every="0ms") as reader:
        for _ in range(3):
            write(holding)
            holding.resize(STREAM, 5 - len(holding.layout(STREAM).present))
            drain(reader)
            drain(reader)
            assert len(holding.holds(STREAM)[HOLDER].positions) > 2
            holding.truncate(holding.tail(STREAM))
        write(holding)
        holding.resize(STREAM, 4)
        drain(reader)
    held = holding.holds(STREAM)[HOLDER].positions
    closed = {x.segment_id for x in holding.layout(STREAM).segments if x.closed_epoch is not None}
    info = holding.describe(STREAM)
    empty = {x for x in closed if info.heads[x] == info.ends[x]}
    assert len(empty) >= 6
    assert not empty & set(held)
    assert [problem for problem in holding.fsck() if not problem.is_harmless] == []


def test_a_group_that_names_only_closed_segments_without_events_holds_all_that_follows(holding: Store) -> None:  # RG17
    # RG28
    """Its checkpoint lies where nothing was written: who named none of these segments would hold nothing at all."""
    group = holding.reader_group("g", STREAM)
    assert group.checkpoint("empty")
    holding.resize(STREAM, 3)
    write(holding)
    with group.join("a") as reader:
        drain(reader)
        write(holding)
        drain(reader)
    assert list(holding.holds(STREAM)) == [HOLDER]
    assert holding.events_between(holding.holds(STREAM)[HOLDER]) == 40
    assert holding.fsck() == []
    with pytest.raises(UsageError, match=f"'{HOLDER}' needs the events of segment 2"):
        holding.truncate(holding.tail(STREAM))
    holding.set_retention(STREAM, Retention(size="1 B"))
    assert holding.retain(STREAM) == holding.head(STREAM)
    assert holding.events_between(holding.head(STREAM)) == 40
    group.reset(checkpoint="empty")
    with group.join("a") as reader:
        found = [reader.read() for _ in range(3)]
    assert sum(len(each.batch) for each in found if isinstance(each, GroupEvents)) == 40


@pytest.mark.parametrize("segments", [7, 250])
def test_what_is_unread_in_many_segments_is_guessed_from_some(segments: int, monkeypatch: pytest.MonkeyPatch) -> None:
    catalogue = memory_catalogue("store")
    catalogue.create_stream(StreamDefinition(STREAM, KEYED, segments, "key"), 1, if_not_exists=False)
    group = catalogue.create_group("g", [STREAM], GroupStart(), 1).group
    unread = range(1, segments)  # nothing in the first one
    parts = tuple(PartEntry(number, 2, 0, 40, 1) for number in unread)
    catalogue.append(catalogue.find_stream(STREAM), ChunkRecord("1/a", 100, parts), None, 1)
    asked: list[int] = []
    real = group_rows._unread

    def counted(connection: object, stream_id: int, number: int, *rest: object) -> int:
        asked.append(number)
        return real(connection, stream_id, number, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(group_rows, "_unread", counted)
    with catalogue._database.read() as connection:
        assert group_rows._sampled(connection, group) == {GroupSegment(STREAM, number): 40 for number in unread}
    assert len(asked) <= 32
    assert set(asked) <= set(unread)
    assert segments > 32 or asked == list(unread)
