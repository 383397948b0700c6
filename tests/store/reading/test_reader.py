"""Reading: from any position, verified, merged, cheap at the tail; damage is named."""

from __future__ import annotations

import contextlib
import datetime as dt
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection
from tests.storage.faulty import Fault, FaultKind, FaultyStorage
from tests.store.storing import KEYED, chunks_of, database_of, keyed

from headgate.codec.chunk import ALIGNMENT, PART_BYTES_MAX
from headgate.errors import CorruptionError, StorageError, UsageError
from headgate.protocol.watermarks import WATERMARK_MIN_MS
from headgate.storage.memory import MemoryStorage
from headgate.store import reader as reader_module
from headgate.store import reader as readers
from headgate.store.catalogue import tables as t
from headgate.store.reader import SegmentReader
from headgate.store.store import Store

ONE = "one"


@pytest.fixture
def ten(tmp_path: Path) -> Store:
    """Ten flushes of three events each in one segment."""
    store = Store.open(tmp_path / "store")
    store.create_stream(ONE, KEYED, segments=1)
    writer = store.writer(ONE)
    for n in range(10):
        writer.append(keyed(*(("k", n * 3 + i) for i in range(3))))
        writer.flush()
    return store


def values(reader: SegmentReader, rows_max: int = 1_000) -> list[int]:
    batch = reader.read(rows_max)
    return [] if batch is None else batch.column(1).to_pylist()


def chunk_files(store: Store) -> list[Path]:
    """In the order written."""
    with database_of(store).read() as connection:
        paths = connection.scalars(sa.select(t.chunks.c.file).order_by(t.chunks.c.id)).all()
    return [chunks_of(store) / path for path in paths]


def test_small_appends_are_merged_into_one_batch(ten: Store) -> None:
    reader = ten.reader(ONE, 0)
    assert values(reader) == list(range(30))
    assert (reader.position, values(reader)) == (30, [])


@pytest.mark.parametrize("position", [0, 1, 2, 3, 14, 29, 30])
@pytest.mark.parametrize("rows_max", [1, 2, 3, 7])
def test_reading_from_any_position_in_any_size_gives_what_follows(
    ten: Store, position: int, rows_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "PARTS_AT_A_TIME", 4)
    reader = ten.reader(ONE, 0, position)
    found: list[int] = []
    while batch := values(reader, rows_max):
        assert len(batch) <= rows_max
        found += batch
        assert reader.position == position + len(found)
    assert found == list(range(position, 30))


def test_reading_stops_before_an_end(ten: Store) -> None:
    reader = ten.reader(ONE, 0, 5)
    assert reader.read(end=5) is None
    batch = reader.read(end=11)
    assert batch is not None
    assert batch.column(1).to_pylist() == list(range(5, 11))


def test_the_tail_is_asked_for_only_when_something_changed(
    ten: Store, monkeypatch: pytest.MonkeyPatch, hearing_s: float
) -> None:
    reader = ten.reader(ONE, 0, 30)
    assert reader.read() is None
    queries: list[int] = []
    real = database_of(ten).read
    monkeypatch.setattr(database_of(ten), "read", lambda: (queries.append(1), real())[1])
    for _ in range(100):
        assert reader.read() is None
    assert queries == []
    with Store.open(ten.root) as other, other.writer(ONE) as writer:
        writer.append(keyed(("k", 30)))
    until_s = time.monotonic() + hearing_s
    while not (found := values(reader)) and time.monotonic() < until_s:
        time.sleep(0.001)
    assert found == [30]


def test_what_is_written_while_the_tail_is_asked_for_is_not_overlooked(
    ten: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = ten.reader(ONE, 0, 30)
    real = database_of(ten).read
    other = Store.open(ten.root)

    @contextlib.contextmanager
    def read_then_write() -> Iterator[Connection]:
        with real() as connection:
            yield connection
        with other.writer(ONE) as writer:
            writer.append(keyed(("k", 30)))

    monkeypatch.setattr(database_of(ten), "read", read_then_write)
    assert reader.read() is None
    monkeypatch.undo()
    assert values(reader) == [30]


def test_positions_that_cannot_be_are_refused(ten: Store) -> None:
    with pytest.raises(UsageError, match="positions 0 to 30, not 31"):
        ten.reader(ONE, 0, 31)
    with pytest.raises(UsageError, match="positions"):
        ten.reader(ONE, 0, -1)
    with pytest.raises(UsageError, match="segments 0 to 0, not 1"):
        ten.reader(ONE, 1)


def damage(ten: Store, number: int, how: str) -> Path:
    path = chunk_files(ten)[number]
    data = bytearray(path.read_bytes())
    match how:
        case "flip":
            data[ALIGNMENT + 40] ^= 1
        case "cut":
            del data[ALIGNMENT + 40 :]
        case "zero":
            data[ALIGNMENT + 8 :] = bytes(len(data) - ALIGNMENT - 8)
    path.write_bytes(data)
    if how == "delete":
        path.unlink()
    return path


@pytest.mark.parametrize("how", ["flip", "cut", "zero", "delete"])
@pytest.mark.parametrize("number", [0, 4, 9])
def test_damage_is_named_with_file_and_offset_after_everything_before_it(ten: Store, how: str, number: int) -> None:
    path = damage(ten, number, how)
    reader = ten.reader(ONE, 0)
    if number:
        assert values(reader) == list(range(number * 3))  # F10: nothing before the damage is lost
    for _ in range(2):
        with pytest.raises(CorruptionError) as caught:
            reader.read()
        assert caught.value.path.endswith(path.name)
        assert caught.value.offset == (0 if how == "delete" else ALIGNMENT)
    assert reader.position == number * 3
    problems = [p for p in ten.fsck() if not p.is_harmless]
    assert any(path.name in p.what or path.name in p.where for p in problems)


def test_a_part_size_over_the_limit_is_refused_before_reading(ten: Store) -> None:
    with database_of(ten).write() as connection:
        connection.execute(t.parts.update().values(size_bytes=PART_BYTES_MAX + 1))
    with pytest.raises(CorruptionError, match=f"at most {PART_BYTES_MAX}"):
        ten.reader(ONE, 0).read()


def test_a_gap_in_the_catalogue_is_an_error_not_a_skip(ten: Store) -> None:
    with database_of(ten).write() as connection:
        connection.execute(t.parts.delete().where(t.parts.c.start == 12))
    with pytest.raises(CorruptionError, match="events from position 12, found from 15"):
        ten.reader(ONE, 0).read()
    assert any("position 15 where 12" in p.what for p in ten.fsck())


@pytest.mark.parametrize("rows_max", [6, 100])
def test_what_the_catalogue_has_lost_at_the_end_of_a_segment_is_an_error(ten: Store, rows_max: int) -> None:
    """A reader that took the last one that is left for the end would never know what it missed."""
    with database_of(ten).write() as connection:
        connection.execute(t.parts.delete().where(t.parts.c.start >= 24))
    ten.seal(ONE)
    reader = ten.reader(ONE, 0)
    found: list[int] = []

    def read_on() -> None:
        while (batch := reader.read(rows_max)) is not None:
            found.extend(batch.column(1).to_pylist())

    with pytest.raises(CorruptionError, match="events from position 24 to 30, found none") as caught:
        read_on()
    assert found == list(range(24)), "nothing before the damage is lost"
    assert caught.value.path.endswith(f" ({ONE}/0)")
    assert not reader.has_ended()
    with pytest.raises(CorruptionError):
        reader.read()
    assert any("ends at 24 instead of 30" in problem.what for problem in ten.fsck())


def test_a_row_of_the_catalogue_that_makes_no_sense_is_damage_after_everything_before_it(ten: Store) -> None:
    with database_of(ten).write() as connection:
        connection.execute(sa.text("UPDATE parts SET offset = 'nowhere' WHERE start = 12"))
    reader = ten.reader(ONE, 0)
    assert values(reader) == list(range(12))
    for _ in range(2):
        with pytest.raises(CorruptionError, match="from position 12 on"):
            reader.read()


def test_a_segment_that_the_catalogue_has_lost_is_damage_and_a_stream_that_was_deleted_is_not(ten: Store) -> None:
    ten.create_stream("other", KEYED, segments=1)
    deleted, lost = ten.reader("other", 0), ten.reader(ONE, 0, 30)
    ten.delete("other", force=True)
    with pytest.raises(UsageError, match="stream 'other' was deleted while it was read"):
        deleted.read()
    with database_of(ten).write() as connection:
        connection.execute(t.segments.delete())
    with pytest.raises(CorruptionError, match="segment 0"):
        lost.read()


def test_a_storage_that_fails_for_a_while_loses_and_repeats_nothing(tmp_path: Path) -> None:
    storage = FaultyStorage(MemoryStorage())
    with Store.open(tmp_path, storage=storage) as store:
        store.create_stream(ONE, KEYED, segments=1)
        writer = store.writer(ONE)
        for n in range(4):
            writer.append(keyed(("k", n)))
            writer.flush()
        storage.inject(Fault(FaultKind.IO_ERROR, "get_range", first=3, times=2))
        reader = store.reader(ONE, 0)
        assert values(reader) == [0, 1]
        with pytest.raises(StorageError):
            reader.read()
        assert values(reader) == [2, 3]


def test_a_read_is_bounded_in_bytes(ten: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "READ_BYTES_MAX", 1)
    assert values(ten.reader(ONE, 0)) == [0, 1, 2]


def test_all_kinds_of_columns_come_back_as_they_were(tmp_path: Path) -> None:
    rows = [
        {"i": 1, "f": float("inf"), "s": "é", "b": b"\0", "t": True, "l": [1, None], "n": {"x": None, "y": "z"}},
        dict.fromkeys("ifsbtln"),
    ]
    types = {
        "i": pa.uint8(),
        "f": pa.float64(),
        "s": pa.large_string(),
        "b": pa.large_binary(),
        "t": pa.bool_(),
        "l": pa.large_list(pa.int64()),
        "n": pa.struct([("x", pa.int64()), ("y", pa.large_string())]),
    }
    batch = pa.RecordBatch.from_pylist(rows, schema=pa.schema(types.items()))
    with Store.open(tmp_path) as store:
        store.create_stream(ONE, batch.schema, segments=2, routing_key="s")
        with store.writer(ONE) as writer:
            writer.append(batch.slice(0, 1))
            writer.append(batch.slice(1, 1))
        found = [batch for s in range(2) if (batch := store.reader(ONE, s).read()) is not None]
    assert sorted((r for b in found for r in b.to_pylist()), key=lambda r: r["i"] is None) == rows


def test_a_read_that_was_interrupted_is_repeated_from_where_it_began(
    ten: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was taken out of a part before was not returned, so the next read returns it."""
    reader = ten.reader(ONE, 0)
    assert values(reader, 2) == [0, 1]

    def interrupted(*_: object) -> pa.RecordBatch:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(readers, "read_part", interrupted)
        with pytest.raises(KeyboardInterrupt):
            reader.read()
    assert reader.position == 2
    assert values(reader) == list(range(2, 30))


@pytest.fixture
def timed(ten: Store) -> Store:
    """Parts of two events each: after the first one event time is 1 s, after the second one 2 s, and so on."""
    ten.create_stream("timed", KEYED, segments=1)
    with ten.writer("timed", linger=None) as writer:
        for number in range(4):
            writer.note_time(dt.datetime.fromtimestamp(number, dt.UTC))
            writer.append(keyed(("k", number), ("k", number)))
            writer.flush()
    return ten


def test_a_read_that_was_interrupted_leaves_event_time_where_it_began(
    timed: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events that were taken out of parts were not returned: by their event time they would be late when they are."""
    reader = timed.reader("timed", 0)
    assert (values(reader, 2), reader.event_ms) == ([0, 0], 1_000)
    real, loaded = readers.read_part, list[str]()

    def interrupted(*arguments: Any) -> pa.RecordBatch:
        loaded.append("")
        if len(loaded) == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(readers, "read_part", interrupted)
        with pytest.raises(KeyboardInterrupt):
            reader.read()
    assert reader.event_ms == 1_000
    assert [(values(reader, 1), reader.event_ms) for _ in range(3)] == [([1], 1_000), ([1], 2_000), ([2], 2_000)]


def test_event_time_is_unknown_where_writers_say_nothing_and_the_lowest_within_the_first_part(timed: Store) -> None:
    reader = timed.reader(ONE, 0)
    assert (values(reader, 1), reader.event_ms) == ([0], None)
    reader = timed.reader("timed", 0)
    assert (values(reader, 1), reader.event_ms) == ([0], WATERMARK_MIN_MS)


def test_event_time_goes_back_with_a_reader(timed: Store) -> None:
    reader = timed.reader("timed", 0)
    assert (values(reader, 2), reader.event_ms) == ([0, 0], 1_000)
    assert (values(reader, 3), reader.event_ms) == ([1, 1, 2], 2_000)
    reader.back_to(2)
    assert reader.event_ms == 1_000
    assert (values(reader, 1), reader.event_ms) == ([1], 1_000)


def test_a_reader_that_goes_back_reads_the_same_again(ten: Store) -> None:
    reader = ten.reader(ONE, 0, 2)
    assert values(reader, 5) == [2, 3, 4, 5, 6]
    reader.back_to(4)
    assert reader.position == 4
    assert values(reader, 4) == [4, 5, 6, 7]
    assert values(reader) == list(range(8, 30))
    assert values(reader) == []
    reader.back_to(29)
    assert values(reader) == [29], "also where it had found the end"


def test_a_reader_that_went_back_from_the_end_has_not_ended_until_it_has_read_all_of_it_again(
    ten: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ten.seal(ONE)
    monkeypatch.setattr(reader_module, "PARTS_AT_A_TIME", 4)
    reader = ten.reader(ONE, 0)
    assert (len(values(reader)), values(reader), reader.has_ended()) == (30, [], True)
    reader.back_to(0)
    assert not reader.has_ended()
    assert values(reader, 12) == list(range(12))
    assert not reader.has_ended(), "of the parts that the catalogue was asked for none is left, and others follow"
    assert (values(reader), values(reader), reader.has_ended()) == (list(range(12, 30)), [], True)


def test_a_reader_knows_where_its_segment_ended_when_it_looked(ten: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "PARTS_AT_A_TIME", 4)
    reader = ten.reader(ONE, 0)
    assert reader.known_end is None
    assert values(reader, 1) == [0]
    assert reader.known_end == 30, "all of it, not only the parts that were asked for"
    assert values(reader, 100) == list(range(1, 30))
    assert (values(reader), reader.known_end) == ([], 30)
