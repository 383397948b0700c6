"""``headgate streams check`` and reader groups: what is damaged is told, and what is held is mended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from tests.store.storing import KEYED, STREAM, database_of, keyed

from headgate.errors import CorruptionError
from headgate.protocol.store.reader_group import Committed, GroupSegment
from headgate.protocol.store.truncation import Hold
from headgate.store.catalogue import tables as t
from headgate.store.store import Store


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
