"""Appends: durable when acknowledged, in order per key, never twice."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from tests.mutants.harness import patched
from tests.storage.faulty import Fault, FaultKind, FaultyStorage
from tests.store.storing import KEYED, STREAM, database_of, drain, drained, keyed

from headgate.environment import SYSTEM_CLOCK
from headgate.errors import FencedError, StorageError, UsageError
from headgate.storage.memory import MemoryStorage
from headgate.store import chunks
from headgate.store import writer as writer_module
from headgate.store.chunks import EVENT_BYTES_MAX, PART_ROWS_MAX, value_sizes
from headgate.store.store import Store
from headgate.store.streams import TEXT_SCHEMA
from headgate.store.writer import Appended, StreamWriter


def test_an_append_is_invisible_before_and_visible_after_its_flush(store: Store) -> None:
    writer = store.writer(STREAM, linger=None)
    future = writer.append(keyed(("a", 1), ("b", 2)))
    assert not future.done()
    assert drained(store) == []
    writer.flush()
    assert sum(r.events_count for r in future.result(0).ranges) == 2
    assert drained(store) == [("a", 1), ("b", 2)]


def test_an_append_is_durable_at_once_where_no_thread_can_flush_it_later(store: Store) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    writer = store.writer(STREAM)
    with patched(threading.Thread, "start", refused):
        assert writer.append(keyed(("a", 1))).done()
    writer.close()
    assert drained(store) == [("a", 1)]


def test_events_of_one_key_stay_in_one_segment_in_order(store: Store) -> None:
    keys = [f"k{i}" for i in range(20)]
    for turn in range(5):
        writer = store.writer(STREAM)
        for at in range(3):
            writer.append(keyed(*((key, turn * 3 + at) for key in keys)))
        writer.flush()
    segments = drain(store)
    assert len([s for s in segments if s]) == 3
    for key in keys:
        homes = [s for s in segments if any(k == key for k, _ in s)]
        assert [[v for k, v in home if k == key] for home in homes] == [list(range(15))]


def test_futures_tell_where_the_events_are(store: Store) -> None:
    writer = store.writer(STREAM)
    futures = [writer.append(keyed(("x", n), ("y", n), ("x", n + 10))) for n in range(3)]
    writer.flush()
    for n, future in enumerate(futures):
        found = []
        for part in future.result(0).ranges:
            batch = store.reader(STREAM, part.segment, part.start).read(part.events_count)
            assert batch is not None
            found += batch.to_pydict()["value"]
        assert sorted(found) == [n, n, n + 10]


def test_without_routing_key_a_flush_goes_to_one_segment_and_flushes_take_turns(store: Store) -> None:
    store.create_stream("lines", TEXT_SCHEMA, segments=3)
    writer = store.writer("lines")
    segments = []
    for n in range(6):
        future = writer.append(pa.record_batch([[f"{n}-1", f"{n}-2"]], schema=TEXT_SCHEMA))
        writer.flush()
        (part,) = future.result(0).ranges
        segments.append(part.segment)
    assert sorted(segments[:3]) == [0, 1, 2]
    assert segments[:3] == segments[3:]


def test_the_number_of_syncs_follows_flushes_not_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = os.fsync
    with Store.open(tmp_path) as store:
        for segments in (1, 64):
            store.create_stream(f"s{segments}", KEYED, segments=segments, routing_key="key")
            writer = store.writer(f"s{segments}")
            writer.append(keyed(("a", 1)))
            writer.flush()  # makes the directories
            calls.clear()
            monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(fd), real(fd))[1])
            writer.append(keyed(*((f"k{i}", i) for i in range(500))))
            writer.flush()
            monkeypatch.undo()
            assert len(calls) == 2  # the chunk and its directory
            assert store.describe(f"s{segments}").chunks_count == 2


def test_large_appends_are_cut_into_parts_and_come_back_whole(store: Store) -> None:
    rows = PART_ROWS_MAX * 2 + 17
    store.create_stream("big", KEYED, segments=1)
    with store.writer("big") as writer:
        writer.append(pa.record_batch([pa.array(["k"] * rows, pa.large_string()), range(rows)], schema=KEYED))
    reader = store.reader("big", 0)
    found: list[int] = []
    while (batch := reader.read(50_000)) is not None:
        assert batch.num_rows <= 50_000
        found += batch.column(1).to_pylist()
    assert found == list(range(rows))
    assert store.fsck() == []


def test_nothing_is_acknowledged_while_the_disk_is_full_and_all_is_once_it_is_not(tmp_path: Path) -> None:
    storage = FaultyStorage(MemoryStorage())
    with Store.open(tmp_path, storage=storage) as store:
        store.create_stream(STREAM, KEYED, segments=2, routing_key="key")
        writer = store.writer(STREAM, linger=None)
        first = writer.append(keyed(("a", 1)))
        storage.inject(Fault(FaultKind.NO_SPACE, "put", times=2))
        for _ in range(2):
            with pytest.raises(StorageError, match="No space"):
                writer.flush()
        assert not first.done()
        assert drained(store) == []
        second = writer.append(keyed(("a", 2)))
        writer.flush()  # nothing to repair
        assert first.done()
        assert second.done()
        assert drained(store) == [("a", 1), ("a", 2)]


def test_an_append_that_took_effect_although_it_failed_is_not_repeated(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = store.writer(STREAM, linger=None)
    future = writer.append(keyed(("a", 1)))
    real = database_of(store).write

    class Lost:
        def __enter__(self) -> object:
            self.inner = real()
            return self.inner.__enter__()

        def __exit__(self, *args: object) -> None:
            self.inner.__exit__(*args)  # type: ignore[arg-type]
            raise StorageError("write", "catalogue", "disk I/O error")

    monkeypatch.setattr(database_of(store), "write", Lost)
    with pytest.raises(StorageError):
        writer.flush()
    monkeypatch.undo()
    assert not future.done()
    writer.flush()
    (part,) = future.result(0).ranges
    assert (part.start, part.events_count) == (0, 1)
    assert drained(store) == [("a", 1)]
    assert store.fsck() == []


def test_a_stable_writer_drops_what_the_store_has_already(store: Store) -> None:
    writer = store.writer(STREAM, writer_id="importer", epoch=1)
    for n in (1, 2):
        writer.append(keyed(("a", n)), sequence=n)
    writer.flush()
    again = store.writer(STREAM, writer_id="importer", epoch=2)
    assert again.next_sequence == 3
    assert again.append(keyed(("a", 2)), sequence=2).result(0) == Appended(is_duplicate=True)
    again.append(keyed(("a", 3)), sequence=3)
    again.flush()
    assert drained(store) == [("a", 1), ("a", 2), ("a", 3)]
    with pytest.raises(UsageError, match="append 9 came where 4 was expected"):
        again.append(keyed(("a", 9)), sequence=9)


def test_a_newer_epoch_of_a_writer_fences_the_older_one(store: Store) -> None:
    old = store.writer(STREAM, writer_id="importer", epoch=1, linger=None)
    future = old.append(keyed(("a", 1)))
    new = store.writer(STREAM, writer_id="importer", epoch=2)
    with pytest.raises(FencedError, match="generation 1 was replaced by generation 2"):
        old.flush()  # S9
    with pytest.raises(FencedError):
        future.result(0)
    with pytest.raises(FencedError):
        store.writer(STREAM, writer_id="importer", epoch=1)
    new.append(keyed(("b", 1)))
    new.flush()
    assert drained(store) == [("b", 1)]
    assert store.fsck() == []


def test_two_writers_of_one_id_and_epoch_are_told_apart(store: Store) -> None:
    one = store.writer(STREAM, writer_id="importer", epoch=1)
    two = store.writer(STREAM, writer_id="importer", epoch=1, linger=None)
    one.append(keyed(("a", 1)))
    one.flush()
    two.append(keyed(("a", 2)))
    with pytest.raises(UsageError, match="used twice"):
        two.flush()
    assert drained(store) == [("a", 1)]


def test_threads_share_a_writer(store: Store) -> None:
    writer = store.writer(STREAM)

    def work(thread: int) -> None:
        for n in range(10):
            future = writer.append(keyed((f"t{thread}", n)))
            writer.flush()
            assert future.done()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert drained(store) == sorted((f"t{i}", n) for i in range(4) for n in range(10))
    for segment in drain(store):
        for i in range(4):
            values = [v for k, v in segment if k == f"t{i}"]
            assert values == sorted(values)


def test_other_columns_are_refused_by_name(store: Store) -> None:
    writer = store.writer(STREAM)
    wrong = pa.record_batch({"key": pa.array(["a"], pa.large_string()), "val": pa.array([1])})
    with pytest.raises(UsageError, match=r"'value' \(int64\) is missing; 'val' \(int64\) is unknown"):
        writer.append(wrong)
    with pytest.raises(UsageError, match="order"):
        writer.append(keyed(("a", 1)).select(["value", "key"]))


def test_an_event_over_the_limit_is_refused_and_one_below_is_not(store: Store) -> None:
    writer = store.writer(STREAM)
    with pytest.raises(UsageError, match=r"event 1 .*the limit is 8388608"):
        writer.append(keyed(("a", 1), ("b" * EVENT_BYTES_MAX, 2)))
    writer.append(keyed(("c" * (EVENT_BYTES_MAX - 8), 3), ("d" * 1_000_000, 4)))
    writer.flush()
    assert sorted(v for _, v in drained(store)) == [3, 4]


def test_sizes_of_nested_values() -> None:
    assert value_sizes(pa.array(["ab", None, ""])).tolist() == [2, 0, 0]
    assert value_sizes(pa.array([[1, 2], None, [3]], pa.large_list(pa.int32()))).tolist() == [8, 0, 4]
    nested = pa.array([["ab", "c"], [], ["def"]], pa.large_list(pa.large_string()))
    assert value_sizes(nested).tolist() == [3, 0, 3]
    assert value_sizes(nested.slice(1)).tolist() == [0, 3]
    assert value_sizes(pa.array([{"a": 1, "b": "xy"}])).tolist() == [10]


@pytest.mark.parametrize(
    ("values", "dtype", "sizes"),
    [
        ([[("a", "bb")], None, [], [("c", "d"), ("e", "f")]], pa.map_(pa.string(), pa.string()), [3, 0, 0, 4]),
        ([["a", "b"], None, ["c", "dd"]], pa.list_(pa.string(), 2), [2, 0, 3]),
        ([["a", "b"], None, ["c", "dd"]], pa.list_view(pa.string()), [2, 0, 3]),
        (["a", None, "b" * 30], pa.string_view(), [1, 0, 30]),
        ([b"a", None, b"b" * 30], pa.binary_view(), [1, 0, 30]),
        (["{}", '{"a": 1}'], pa.json_(), [2, 8]),
        ([None, None], pa.null(), [0, 0]),
        ([{"a": [("x", "yz")]}, None], pa.struct([("a", pa.map_(pa.string(), pa.string()))]), [3, 0]),
    ],
    ids=str,
)
def test_sizes_of_every_type_that_streams_store(values: list[object], dtype: pa.DataType, sizes: list[int]) -> None:
    column = pa.array(values, dtype)
    assert value_sizes(column).tolist() == sizes
    assert value_sizes(column.slice(1)).tolist() == sizes[1:]


def test_sizes_of_values_that_are_encoded_as_runs() -> None:
    runs = pc.run_end_encode(pa.array(["ab", "ab", None, "c"]))
    assert value_sizes(runs).tolist() == [2, 2, 0, 1]
    assert value_sizes(runs.slice(1)).tolist() == [2, 0, 1]


def test_parts_have_a_size_that_a_reader_can_hold(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "PART_BYTES_TARGET", 10_000)
    store.create_stream("large", KEYED, segments=1)
    with store.writer("large") as writer:
        writer.append(keyed(*(("x" * 1_000, number) for number in range(24))))
        writer.append(keyed(("y" * 30_000, 24)))
    with database_of(store).read() as connection:
        counts = connection.exec_driver_sql("SELECT events_count FROM parts ORDER BY start").scalars().all()
    assert counts == [5, 5, 5, 5, 2, 2, 1], "and an event is never cut"
    assert drained(store, "large") == sorted([("x" * 1_000, number) for number in range(24)] + [("y" * 30_000, 24)])


def test_large_batches_of_maps_and_views_are_appended(store: Store) -> None:
    """None of the events is over the limit, all of them together are."""
    schema = pa.schema([("tags", pa.map_(pa.string(), pa.string())), ("text", pa.string_view())])
    store.create_stream("app/tagged", schema, segments=1)
    count, text = 5, "x" * (EVENT_BYTES_MAX // 4)
    arrays = [pa.array([[("a", "b")]] * count, schema.field(0).type), pa.array([text] * count, schema.field(1).type)]
    with store.writer("app/tagged") as writer:
        writer.append(pa.RecordBatch.from_arrays(arrays, schema=schema))
    assert store.describe("app/tagged").events_count == count


def test_an_empty_append_is_done_at_once(store: Store) -> None:
    writer = store.writer(STREAM)
    assert writer.append(keyed()).result(0) == Appended()
    writer.flush()
    assert store.describe(STREAM).chunks_count == 0


def test_an_empty_numbered_append_counts(store: Store) -> None:
    writer = store.writer(STREAM, writer_id="w", epoch=1)
    writer.append(keyed())
    writer.append(keyed(("a", 1)))
    writer.flush()
    assert store.writer(STREAM, writer_id="w", epoch=2).next_sequence == 3
    assert drained(store) == [("a", 1)]


PATIENCE_S = 120


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, "it never became so"
        time.sleep(0.005)


def lingering() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "headgate-linger"}


def hurry(writer: StreamWriter) -> None:
    """What waits has waited long enough."""
    assert writer._linger is not None
    with writer._linger._changed:
        assert writer._linger._due_ms is not None
        writer._linger._due_ms = SYSTEM_CLOCK.monotonic_ms()
        writer._linger._changed.notify_all()


def test_an_append_completes_although_nobody_flushes(store: Store) -> None:
    writer = store.writer(STREAM)
    for n in range(3):
        assert writer.append(keyed(("a", n))).result(PATIENCE_S).ranges
    assert drained(store) == [("a", 0), ("a", 1), ("a", 2)]
    writer.close()


def test_what_is_appended_within_the_linger_shares_one_flush(store: Store) -> None:
    writer = store.writer(STREAM, linger="1h")
    futures = [writer.append(keyed(("a", n))) for n in range(50)]
    assert not any(future.done() for future in futures)
    hurry(writer)
    for future in futures:
        future.result(PATIENCE_S)
    assert store.describe(STREAM).chunks_count == 1
    writer.close()


def test_threads_that_wait_for_their_appends_share_flushes(store: Store) -> None:
    writer = store.writer(STREAM, linger="1h")
    all_wait = threading.Barrier(8, lambda: hurry(writer))

    def work(thread: int) -> None:
        for n in range(5):
            future = writer.append(keyed((f"t{thread}", n)))
            all_wait.wait(PATIENCE_S)
            future.result(PATIENCE_S)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    assert drained(store) == sorted((f"t{i}", n) for i in range(8) for n in range(5))
    assert store.describe(STREAM).chunks_count == 5


def test_a_full_disk_delays_what_waits_and_loses_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = FaultyStorage(MemoryStorage())
    with Store.open(tmp_path, storage=disk) as store:
        store.create_stream(STREAM, KEYED, segments=2, routing_key="key")
        writer = store.writer(STREAM)
        disk.inject(Fault(FaultKind.NO_SPACE, "put", times=3))
        future = writer.append(keyed(("a", 1)))
        assert future.result(PATIENCE_S).ranges
        assert len([call for call in disk.calls if call[0] == "put"]) == 4
        assert drained(store) == [("a", 1)]
        assert len([r for r in caplog.records if "not durable yet" in r.message]) == 1
        writer.close()


def test_a_flush_that_failed_in_the_foreground_is_repeated_in_time(tmp_path: Path) -> None:
    disk = FaultyStorage(MemoryStorage())
    with Store.open(tmp_path, storage=disk) as store:
        store.create_stream(STREAM, KEYED, segments=2, routing_key="key")
        writer = store.writer(STREAM, linger="1h")
        disk.inject(Fault(FaultKind.NO_SPACE, "put"))
        future = writer.append(keyed(("a", 1)))
        with pytest.raises(StorageError):
            writer.flush()
        hurry(writer)
        assert future.result(PATIENCE_S).ranges
        writer.close()


def test_what_ends_the_writer_is_told_to_those_who_wait(store: Store) -> None:
    before = lingering()
    old = store.writer(STREAM, writer_id="importer", epoch=1, linger="20ms")
    store.writer(STREAM, writer_id="importer", epoch=2)
    with pytest.raises(FencedError):
        old.append(keyed(("a", 1))).result(PATIENCE_S)
    with pytest.raises(FencedError):
        old.append(keyed(("a", 1)), sequence=1)
    wait_for(lambda: lingering() <= before)


def test_no_thread_stays_behind(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    before = lingering()
    writers = [store.writer(STREAM) for _ in range(3)]
    assert lingering() <= before  # nothing waits yet
    for writer in writers:
        writer.append(keyed(("a", 1))).result(PATIENCE_S)
        writer.close()
        writer.close()
    assert lingering() <= before
    left = store.writer(STREAM)
    left.append(keyed(("a", 1)))
    with pytest.raises(KeyError), left:
        raise KeyError
    assert lingering() <= before
    monkeypatch.setattr(writer_module, "IDLE_S", 0.01)
    idle = store.writer(STREAM)
    for _ in range(2):  # and comes back when it is needed
        idle.append(keyed(("a", 1))).result(PATIENCE_S)
        wait_for(lambda: lingering() <= before)
    idle.close()


def test_a_linger_is_a_duration(store: Store) -> None:
    with pytest.raises(UsageError, match="linger"):
        store.writer(STREAM, linger="soon")
    with pytest.raises(UsageError, match="linger"):
        store.writer(STREAM, linger=-1)
    writer = store.writer(STREAM, linger=0)
    assert writer.append(keyed(("a", 1))).result(PATIENCE_S).ranges
    writer.close()
