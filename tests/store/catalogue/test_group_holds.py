"""What reader groups hold of their streams, in the tables: it moves with them, and nothing is held of what is gone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.store.storing import KEYED, STREAM, keyed

from headgate.codec.chunk import PartEntry
from headgate.errors import UsageError
from headgate.protocol.store.reader_group import GroupSegment
from headgate.store.catalogue import group_rows
from headgate.store.catalogue.records import ChunkRecord, GroupStart
from headgate.store.catalogue.sql import memory_catalogue
from headgate.store.policies import Retention
from headgate.store.reader_groups import GroupEvents, GroupReader
from headgate.store.store import Store
from headgate.store.streams import StreamDefinition

HOLDER = "reader group g"


def stored(place: Path) -> Iterator[Store]:
    with Store.open(place) as opened:
        opened.create_stream(STREAM, KEYED, segments=2, routing_key="key")
        yield opened


store = pytest.fixture(name="store")(lambda tmp_path: (yield from stored(tmp_path / "store")))


def write(store: Store, count: int = 20) -> None:
    with store.writer(STREAM) as writer:
        writer.append(keyed(*((f"k{n % 8}", n) for n in range(count))))


def drain(reader: GroupReader) -> None:
    while reader.read() is not None:
        pass
    reader.commit()


def test_what_somebody_let_go_of_is_held_again_when_the_group_moves(store: Store) -> None:  # RG28
    write(store)
    with store.reader_group("g", STREAM).join("a") as reader:
        drain(reader)
        held = store.holds(STREAM)[HOLDER]
        store.release(STREAM, holder=HOLDER)
        assert store.holds(STREAM) == {}
        write(store)
        drain(reader)
    assert store.holds(STREAM)[HOLDER] == store.tail(STREAM)
    assert store.holds(STREAM)[HOLDER] != held


def test_a_group_holds_a_stream_that_was_made_anew_from_its_reset_on(store: Store) -> None:  # RG28
    group = store.reader_group("g", STREAM)
    store.delete(STREAM, force=True)
    store.create_stream(STREAM, KEYED, segments=2, routing_key="key")
    group.reset()
    assert store.holds(STREAM)[HOLDER] == store.head(STREAM)


def test_nothing_is_held_of_closed_segments_whose_events_are_gone(store: Store) -> None:  # RG28
    group = store.reader_group("g", STREAM)
    with group.join("a", commit_every="0ms") as reader:
        for _ in range(3):
            write(store)
            store.resize(STREAM, 5 - len(store.layout(STREAM).present))
            drain(reader)
            drain(reader)
            assert len(store.holds(STREAM)[HOLDER].positions) > 2
            store.truncate(store.tail(STREAM))
        write(store)
        store.resize(STREAM, 4)
        drain(reader)
    held = store.holds(STREAM)[HOLDER].positions
    closed = {x.segment_id for x in store.layout(STREAM).segments if x.closed_epoch is not None}
    info = store.describe(STREAM)
    empty = {x for x in closed if info.heads[x] == info.ends[x]}
    assert len(empty) >= 6
    assert not empty & set(held)
    assert [problem for problem in store.fsck() if not problem.is_harmless] == []


def test_a_group_that_names_only_closed_segments_without_events_holds_all_that_follows(store: Store) -> None:  # RG17
    # RG28
    """Its checkpoint lies where nothing was written: who named none of these segments would hold nothing at all."""
    group = store.reader_group("g", STREAM)
    assert group.checkpoint("empty")
    store.resize(STREAM, 3)
    write(store)
    with group.join("a") as reader:
        drain(reader)
        write(store)
        drain(reader)
    assert list(store.holds(STREAM)) == [HOLDER]
    assert store.events_between(store.holds(STREAM)[HOLDER]) == 40
    assert store.fsck() == []
    with pytest.raises(UsageError, match=f"'{HOLDER}' needs the events of segment 2"):
        store.truncate(store.tail(STREAM))
    store.set_retention(STREAM, Retention(size="1 B"))
    assert store.retain(STREAM) == store.head(STREAM)
    assert store.events_between(store.head(STREAM)) == 40
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
