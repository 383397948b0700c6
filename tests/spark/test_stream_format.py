"""``format("headgate")`` without a JVM: its classes are driven as Spark drives them, and pickled in between."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext, cloudpickle
from pyspark.sql.datasource import InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import NullType, StructField, StructType

from headgate.errors import FencedError, StorageError, TruncatedError, UsageError
from headgate.protocol.store.transactions import Status
from headgate.spark import dataframes, stream_reader, stream_writer
from headgate.spark.stream_format import StreamDataSource, register_streams
from headgate.spark.stream_reader import MicroBatchReader, PiecesPartition, StreamReader
from headgate.spark.stream_writer import MicroBatchWriter, Prepared, StreamWriter
from headgate.store.store import Store
from headgate.store.streams import OtherSchemaError, Retention
from headgate.store.transactions import Transactions

SCHEMA = pa.schema([("key", pa.string()), ("value", pa.int64())])
SPARK_SCHEMA = from_arrow_schema(SCHEMA)
KEYS = 16


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def stream(store: Store) -> Store:
    store.create_stream("in", SCHEMA, segments=2, routing_key="key")
    append(store, range(10))
    return store


def batch_of(rows: Iterable[tuple[str, int]]) -> pa.RecordBatch:
    keys, values = zip(*rows, strict=True)
    return pa.record_batch([pa.array(keys, pa.string()), pa.array(values, pa.int64())], schema=SCHEMA)


def append(store: Store, rounds: range, stream: str = "in") -> None:
    """Add a round of all keys for each number."""
    with store.writer(stream) as writer:
        for number in rounds:
            writer.append(batch_of((f"k{key}", number) for key in range(KEYS)))


def travelled(thing: Any) -> Any:
    """Return what arrives in another process."""
    return cloudpickle.loads(cloudpickle.dumps(thing))


def source(store: Store, stream: str = "in", **options: str) -> StreamDataSource:
    return StreamDataSource({"path": stream, "store": store.root, **options})


def reader_of(store: Store, **options: str) -> StreamReader:
    made = source(store, **options)
    schema = made.schema()
    reader = travelled(made).reader(schema)
    assert isinstance(reader, StreamReader)
    return reader


def micro_batches(store: Store, **options: str) -> MicroBatchReader:
    made = source(store, **options)
    reader = travelled(made).streamReader(made.schema())
    assert isinstance(reader, MicroBatchReader)
    return reader


def rows_of(reader: StreamReader | MicroBatchReader, partitions: Iterable[InputPartition]) -> list[dict[str, Any]]:
    partitions = travelled(list(partitions))
    return [row for x in partitions for batch in travelled(reader).read(x) for row in batch.to_pylist()]


def values_by_key(rows: Iterable[dict[str, Any]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for row in rows:
        found.setdefault(row["key"], []).append(row["value"])
    return found


def rounds(count: int, first: int = 0) -> dict[str, list[int]]:
    return {f"k{key}": list(range(first, count)) for key in range(KEYS)}


def everything(store: Store, stream: str) -> dict[str, list[int]]:
    reader = source(store, stream).reader(SPARK_SCHEMA)
    assert isinstance(reader, StreamReader)
    return {key: sorted(found) for key, found in values_by_key(rows_of(reader, reader.partitions())).items()}


# -- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"path": ""}, "the name of a stream is needed; the options are path, store, start, end"),
        ({"strat": "latest"}, "there is no option strat here"),
        ({"place": "yes"}, "place must be true or false, not 'yes'"),
        ({"start": "newest"}, "start must be earliest, latest, a stream cut such as .* or a date and time such as"),
        ({"end": "in#77@0:1"}, "is of a former stream 'in'"),
        ({"columns": "key, vaule"}, "stream 'in' has no column 'vaule'; it has key, value"),
        ({"path": "im"}, "stream 'im' does not exist in the store at .* \\(streams there: in\\)"),
    ],
)
def test_wrong_options_of_a_stream_are_one_sentence(stream: Store, options: dict[str, str], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        StreamDataSource({"path": "in", "store": stream.root, **options}).schema()


@pytest.mark.parametrize(
    ("options", "method"), [({"rows_per_partition": "0"}, "reader"), ({"rows_per_batch": "many"}, "streamReader")]
)
def test_numbers_are_checked(stream: Store, options: dict[str, str], method: str) -> None:
    with pytest.raises(UsageError, match="must be a number of at least 1, not"):
        getattr(source(stream, **options), method)(SPARK_SCHEMA)


def test_a_store_that_is_not_there_is_not_made_by_a_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="stream 'in' does not exist in the store at"):
        StreamDataSource({"path": "in", "store": str(tmp_path / "nowhere")}).schema()
    assert not (tmp_path / "nowhere").exists()


def test_the_source_knows_how_many_tasks_run_at_one_time() -> None:  # SP3
    class Session:
        def __init__(self, context: object = None) -> None:
            self.registered: list[type[StreamDataSource]] = []
            self.conf = SimpleNamespace(set=lambda name, value: None)
            self.dataSource = SimpleNamespace(register=self.registered.append)
            if context is not None:
                self.sparkContext = context

    here, connected = Session(SimpleNamespace(defaultParallelism=3)), Session()
    for session in (here, connected):
        register_streams(session)
    (mine,), (theirs,) = here.registered, connected.registered
    assert (travelled(mine).at_once, travelled(theirs).at_once) == (3, 8)
    assert travelled(mine).name() == "headgate"


@pytest.mark.parametrize("session", [None, "local[2]"])
def test_what_is_no_session_cannot_have_streams(session: Any) -> None:
    with pytest.raises(UsageError, match="register_streams needs the SparkSession that shall read or write, not"):
        register_streams(session)


# -- reading once ----------------------------------------------------------------------------------------------------


def test_all_tasks_read_between_the_cuts_of_the_load(stream: Store) -> None:
    made = source(stream)
    schema = made.schema()
    append(stream, range(10, 20))
    stream.split("in", 0)
    append(stream, range(20, 30))
    for _ in range(2):
        reader = travelled(made).reader(schema)
        assert values_by_key(rows_of(reader, reader.partitions())) == rounds(10)
    again = values_by_key(rows_of(reader_of(stream), reader_of(stream).partitions()))
    assert {key: sorted(found) for key, found in again.items()} == rounds(30)


def test_a_read_begins_and_ends_where_it_is_told(stream: Store) -> None:
    before = stream.tail("in")
    append(stream, range(10, 20))
    later = dt.datetime(2200, 1, 1, tzinfo=dt.UTC)
    assert values_by_key(rows_of(*with_partitions(reader_of(stream, start=str(before))))) == rounds(20, 10)
    assert values_by_key(rows_of(*with_partitions(reader_of(stream, end=str(before))))) == rounds(10)
    assert rows_of(*with_partitions(reader_of(stream, start="latest"))) == []
    assert rows_of(*with_partitions(reader_of(stream, start=later.isoformat()))) == []
    assert values_by_key(rows_of(*with_partitions(reader_of(stream, end=later.isoformat())))) == rounds(20)


def with_partitions(reader: StreamReader) -> tuple[StreamReader, list[InputPartition]]:
    return reader, list(reader.partitions())


def test_large_segments_are_read_by_several_tasks(stream: Store, monkeypatch: pytest.MonkeyPatch) -> None:  # SP3
    monkeypatch.setattr(dataframes, "BATCH_ROWS_MAX", 7)
    reader = reader_of(stream, rows_per_partition="30")
    partitions = list(reader.partitions())
    assert len(partitions) == 6, "160 events in two segments"
    assert all(len(rows_of(reader, [partition])) <= 30 for partition in partitions)
    assert values_by_key(rows_of(reader, partitions)) == rounds(10)
    assert all(batch.num_rows <= 7 for partition in partitions for batch in reader.read(partition))
    assert list(reader.read(InputPartition(None))) == []


def test_a_task_reads_so_many_bytes_unless_it_is_told(stream: Store, monkeypatch: pytest.MonkeyPatch) -> None:  # SP3
    assert len(list(reader_of(stream).partitions())) == 1, "less is not worth a task"
    info = stream.describe("in")
    monkeypatch.setattr(stream_reader, "PARTITION_BYTES", info.size_bytes // 8)
    monkeypatch.setattr(stream_reader, "TASK_BYTES_MIN", 1)
    partitions = list(reader_of(stream).partitions())
    assert all(sum(piece.end - piece.begin for piece in one.pieces) <= info.events_count // 8 for one in partitions)
    assert len(partitions) == 16, "nine would be needed, and eight run at one time"
    assert values_by_key(rows_of(reader_of(stream), partitions)) == rounds(10)
    assert len(list(reader_of(stream, rows_per_partition="1000").partitions())) == 2
    monkeypatch.setattr(stream_reader, "PARTITION_BYTES", 1)
    assert len(list(reader_of(stream).partitions())) == info.events_count, "at least one event each"


def test_the_place_of_each_event_can_be_read(stream: Store) -> None:  # SP3
    reader = reader_of(stream, place="true", columns="_position, value, _segment")
    rows = rows_of(*with_partitions(reader))
    assert list(rows[0]) == ["_position", "value", "_segment"]
    ends = stream.describe("in").ends
    assert [row["_position"] for row in rows] == [*range(ends[0]), *range(ends[1])]
    assert [row["_segment"] for row in rows] == [0] * ends[0] + [1] * ends[1]
    stream.create_stream("own", pa.schema([("_segment", pa.int64())]))
    with pytest.raises(UsageError, match="has a column _segment of its own: read it without place=true"):
        source(stream, "own", place="true").schema()


def segments_of(reader: StreamReader) -> set[int]:
    return {piece.segment for one in reader.partitions() if isinstance(one, PiecesPartition) for piece in one.pieces}


def test_keys_choose_segments_and_events(stream: Store) -> None:  # SP3
    stream.split("in", 0)
    append(stream, range(10, 20))
    whole = reader_of(stream, place="true")
    homes = {row["key"]: set[int]() for row in rows_of(*with_partitions(whole))}
    for row in rows_of(*with_partitions(whole)):
        homes[row["key"]].add(row["_segment"])
    assert {len(found) for found in homes.values()} == {1, 2}, "keys of segment 0 went on in others"
    for key, segments in homes.items():
        reader = reader_of(stream, keys=f'["{key}"]')
        assert segments_of(reader) == segments
        found = [(row["key"], row["value"]) for row in rows_of(*with_partitions(reader))]
        assert sorted(found) == [(key, number) for number in range(20)]
    two = reader_of(stream, keys='["k0", "k1", "k0"]', columns="value", place="false")
    assert segments_of(two) == homes["k0"] | homes["k1"]
    assert sorted(row["value"] for row in rows_of(*with_partitions(two))) == sorted([*range(20), *range(20)])
    assert reader_of(stream, keys="[]").partitions() == []


@pytest.mark.parametrize("dtype", [pa.uint8(), pa.int64(), pa.large_string(), pa.bool_()])
def test_keys_of_every_type_that_json_tells(store: Store, dtype: pa.DataType) -> None:  # SP3
    values = pa.array([0, 1, 1]).cast(dtype)
    store.create_stream("some", pa.schema([("key", dtype)]), routing_key="key")
    with store.writer("some") as writer:
        writer.append(pa.record_batch({"key": values}))
    reader = reader_of(store, path="some", keys=json.dumps([values[1].as_py()]))
    found = [row["key"] for row in rows_of(*with_partitions(reader))]
    assert found == [values[1].as_py()] * 2


@pytest.mark.parametrize(
    ("column", "keys", "sentence"),
    [
        (
            "key",
            "tea",
            r"a key of stream 'in' is \(key: string\): keys must be a list in JSON, such as \[\"tea\"\], not tea",
        ),
        ("key", "[1]", "keys must be a list in JSON"),
        ("key", '"k1"', "keys must be a list in JSON"),
        ("key", "[null]", "keys must be a list in JSON"),
        ("small", "[true]", r"keys must be a list in JSON, such as \[42\]"),
        ("small", "[1.0]", "keys must be a list in JSON"),
        ("small", "[256]", r"a key of stream 'in' is \(small: uint8\), not one of"),
        (
            "at",
            "[1]",
            "takes integers, text and booleans, but a key of stream 'in' is .*: filter the DataFrame instead",
        ),
        (None, "[1]", "stream 'in' has no routing key to choose events by; filter the DataFrame instead"),
    ],
)
def test_what_is_no_routing_key_is_told_at_the_load(
    store: Store, column: str | None, keys: str, sentence: str
) -> None:  # SP3
    schema = pa.schema([("key", pa.string()), ("small", pa.uint8()), ("at", pa.timestamp("us"))])
    store.create_stream("in", schema, routing_key=column)
    with pytest.raises(UsageError, match=sentence):
        source(store, keys=keys).schema()
    with pytest.raises(UsageError, match="there is no option keys here"):
        source(store, keys=keys).streamReader(SPARK_SCHEMA)


def test_a_stream_that_was_created_anew_is_another_one(stream: Store) -> None:
    reader, queried = reader_of(stream), micro_batches(stream)
    offset = queried.initialOffset()
    stream.delete("in", force=True)
    stream.create_stream("in", SCHEMA, routing_key="key")
    for call in (reader.partitions, lambda: queried.latestOffset(offset, ReadAllAvailable())):
        with pytest.raises(UsageError, match="was deleted and created again since it was loaded: load it again"):
            call()


def test_a_query_does_not_go_on_in_another_stream(stream: Store) -> None:
    """Its checkpoint is of a stream that was deleted, or of one of another name, while it did not run."""
    offset = micro_batches(stream).initialOffset()
    stream.create_stream("other", SCHEMA, segments=2, routing_key="key")
    append(stream, range(3), "other")
    renamed = source(stream, "other").streamReader(SPARK_SCHEMA)
    with pytest.raises(UsageError, match="is of another stream than 'other'"):
        renamed.latestOffset(offset, ReadAllAvailable())
    stream.delete("in", force=True)
    stream.create_stream("in", SCHEMA, segments=2, routing_key="key")
    append(stream, range(3))
    again = micro_batches(stream)
    for call in (
        lambda: again.latestOffset(offset, ReadAllAvailable()),
        lambda: again.partitions(offset, {"cut": str(stream.tail("in"))}),
    ):
        with pytest.raises(UsageError, match="is of a former stream 'in'"):
            call()


# -- micro-batches ---------------------------------------------------------------------------------------------------


def test_micro_batches_take_so_many_rows_and_all_of_them_in_the_end(stream: Store) -> None:  # SP4
    reader = micro_batches(stream, rows_per_batch="50")
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMaxRows(50)
    offset, found = reader.initialOffset(), []
    for number in range(12):
        reached = travelled(reader).latestOffset(offset, limit)
        rows = rows_of(reader, reader.partitions(offset, reached))
        assert len(rows) <= 50
        found += rows
        offset = reached
        if number < 3:
            stream.split("in", stream.layout("in").present[0].segment_id)
            append(stream, range(10 + number, 11 + number))
    assert values_by_key(found) == rounds(13)
    assert micro_batches(stream).getDefaultReadLimit() == ReadAllAvailable()


def test_without_anything_new_there_is_no_micro_batch(stream: Store) -> None:  # SP4
    reader = micro_batches(stream, start="latest")
    offset = reader.initialOffset()
    stream.split("in", 0)
    assert reader.latestOffset(offset, ReadAllAvailable()) == offset
    append(stream, range(10, 11))
    reached = reader.latestOffset(offset, ReadAllAvailable())
    assert reader.reportLatestOffset() == reached
    assert values_by_key(rows_of(reader, reader.partitions(offset, reached))) == rounds(11, 10)
    assert reader.partitions(reached, reached) == []


def test_what_is_there_now_is_where_an_available_now_query_ends(stream: Store) -> None:  # SP4
    reader = micro_batches(stream, rows_per_batch="100")
    reader.prepareForTriggerAvailableNow()
    offset, found = reader.initialOffset(), 0
    append(stream, range(10, 20))
    stream.split("in", 1)
    append(stream, range(20, 30))
    for _ in range(5):
        reached = reader.latestOffset(offset, ReadMaxRows(100))
        found += len(rows_of(reader, reader.partitions(offset, reached)))
        offset = reached
    assert found == 160


def test_what_was_truncated_is_missed_and_not_skipped(stream: Store) -> None:
    reader, queried = reader_of(stream), micro_batches(stream)
    offset = queried.initialOffset()
    stream.truncate(stream.tail("in"))
    append(stream, range(10, 11))
    for call in (reader.partitions, lambda: queried.latestOffset(offset, ReadAllAvailable())):
        with pytest.raises(TruncatedError):
            call()
    with pytest.raises(TruncatedError):
        queried.partitions(offset, {"cut": str(stream.tail("in"))})


def test_a_query_holds_what_it_has_not_processed(stream: Store) -> None:
    reader = micro_batches(stream, holder="spark/counts")
    offset = reader.initialOffset()
    with pytest.raises(UsageError, match="spark/counts"):
        stream.truncate(stream.tail("in"))
    reached = reader.latestOffset(offset, ReadAllAvailable())
    append(stream, range(10, 11))
    reader.commit(reached)
    assert str(stream.holds("in")["spark/counts"]) == reached["cut"]
    with pytest.raises(UsageError, match="spark/counts"):
        stream.truncate(stream.tail("in"))
    micro_batches(stream).commit(reached)  # without a name nothing is held
    assert list(stream.holds("in")) == ["spark/counts"]


def test_a_stream_is_read_in_the_columns_that_it_had_when_it_was_loaded(store: Store) -> None:  # S77
    narrow = pa.schema([("key", pa.string()), ("value", pa.int32())])
    store.create_stream("in", narrow, segments=1)
    reader = micro_batches(store, place="true")
    start = reader.initialOffset()
    wide = pa.schema([*SCHEMA, pa.field("_segment", pa.string())])  # named as what place=true adds
    store.update_stream("in", schema=wide)
    with store.writer("in") as writer:
        writer.append(pa.RecordBatch.from_pylist([{"key": "a", "value": 7, "_segment": "x"}], schema=wide))
    end = reader.latestOffset(start, ReadAllAvailable())
    assert rows_of(reader, reader.partitions(start, end)) == [{"key": "a", "value": 7, "_segment": 0, "_position": 0}]
    with store.writer("in") as writer:
        writer.append(pa.RecordBatch.from_pylist([{"key": "a", "value": 1 << 40, "_segment": "x"}], schema=wide))
    last = reader.latestOffset(end, ReadAllAvailable())
    with pytest.raises(OtherSchemaError, match="column 'value' has become int64"):
        rows_of(reader, reader.partitions(end, last))
    assert [field.name for field in source(store).schema()] == ["key", "value", "_segment"]


def test_rows_of_a_schema_of_before_are_written(stream: Store) -> None:
    stream.update_stream("in", columns=pa.schema([("note", pa.string())]))
    writer = writer_of(stream, "in")
    writer.commit([task_of(writer, range(10, 20))])
    assert everything(stream, "in") == rounds(20)


# -- writing ---------------------------------------------------------------------------------------------------------


def writer_of(store: Store, stream: str = "out", **options: str) -> StreamWriter:
    writer = source(store, stream, **options).writer(SPARK_SCHEMA, overwrite=False)
    assert isinstance(writer, StreamWriter)
    return writer


def task_of(writer: StreamWriter | MicroBatchWriter, rounds_: range) -> Prepared:
    batches = [batch_of((f"k{key}", number) for key in range(KEYS)) for number in rounds_]
    message = travelled(travelled(writer).write(iter(batches)))
    assert isinstance(message, Prepared)
    return message


def test_a_write_creates_the_stream(store: Store) -> None:
    writer_of(store, routing_key="key", segments="3")
    info = store.find("out")
    assert (info.routing_key, info.segments_count) == ("key", 3)
    assert info.schema == pa.schema([("key", pa.large_string()), ("value", pa.int64())])
    writer_of(store)


@pytest.mark.parametrize(
    ("schema", "options", "sentence"),
    [
        (pa.schema([("key", pa.string())]), {}, "rows do not fit stream 'in': column 'value' .* is missing"),
        (pa.schema([("key", pa.string()), ("value", pa.string())]), {}, "'value' is string instead of int64"),
        (SCHEMA, {"routing_key": "value"}, "stream 'in' has the routing key 'key', not 'value'"),
        (
            SCHEMA,
            {"start": "latest"},
            "there is no option start here; the options are path, store, routing_key, segments",
        ),
    ],
)
def test_rows_that_do_not_fit_are_refused_before_anything_is_written(
    stream: Store, schema: pa.Schema, options: dict[str, str], sentence: str
) -> None:
    for method in ("writer", "streamWriter"):
        with pytest.raises(UsageError, match=sentence):
            getattr(source(stream, **options), method)(from_arrow_schema(schema), overwrite=False)
        with pytest.raises(UsageError, match="stream 'in' is appended to: use mode"):
            getattr(source(stream), method)(SPARK_SCHEMA, overwrite=True)
    stream.seal("in")
    with pytest.raises(UsageError, match="stream 'in' is sealed"):
        source(stream).writer(SPARK_SCHEMA, overwrite=False)
    with pytest.raises(
        UsageError, match="column 'price' of the DataFrame has type void, which Headgate does not carry"
    ):
        source(stream, "new").writer(StructType([StructField("price", NullType())]), overwrite=False)


def test_columns_are_matched_by_name_and_cast(store: Store) -> None:
    store.create_stream("out", pa.schema([("count", pa.uint8()), ("key", pa.string())]), segments=1)
    schema = from_arrow_schema(pa.schema([("key", pa.string()), ("count", pa.int16())]))
    writer = source(store, "out").writer(schema, overwrite=False)
    rows = pa.record_batch({"key": pa.array(["a", None]), "count": pa.array([7, 255], pa.int16())})
    writer.commit([writer.write(iter([rows]))])
    assert store.reader("out", 0).read().to_pylist() == [{"count": 7, "key": "a"}, {"count": 255, "key": None}]
    with pytest.raises(UsageError, match=r"stream 'out': column 'count' is uint8, which cannot hold int 256"):
        source(store, "out").writer(schema, overwrite=False).write(
            iter([pa.record_batch({"key": pa.array(["a"]), "count": pa.array([256], pa.int16())})])
        )


@pytest.mark.parametrize("made_by", ["Spark", "a program"])
def test_maps_go_into_a_stream_and_come_out_as_lists_of_entries(store: Store, made_by: str) -> None:
    tags = pa.array([[("a", 1), ("b", None)], [], None], pa.map_(pa.string(), pa.int64()))
    rows = pa.record_batch({"tags": tags, "more": pa.array([[[("c", 2)], None], [], None], pa.list_(tags.type))})
    if made_by == "a program":
        store.create_stream("out", rows.schema, segments=1)
    writer = source(store, "out", segments="1").writer(from_arrow_schema(rows.schema), overwrite=False)
    writer.commit([writer.write(iter([rows.slice(0, 2), rows.slice(2)]))])
    one, two, three = {"key": "a", "value": 1}, {"key": "b", "value": None}, {"key": "c", "value": 2}
    expected = [{"tags": [one, two], "more": [[three], None]}, {"tags": [], "more": []}, {"tags": None, "more": None}]
    made = source(store, "out")
    for reader in (made.reader(made.schema()), made.streamReader(made.schema())):
        assert isinstance(reader, StreamReader | MicroBatchReader)
        begin, end = {"cut": str(store.head("out"))}, {"cut": str(store.tail("out"))}
        pieces = reader.partitions() if isinstance(reader, StreamReader) else reader.partitions(begin, end)
        assert rows_of(reader, pieces) == expected
    if made_by == "a program":
        assert store.reader("out", 0).read() == rows


def test_all_rows_of_a_write_become_visible_at_once(stream: Store) -> None:
    writer = writer_of(stream, "in")
    messages = [task_of(writer, range(10, 20)), task_of(writer, range(20, 30)), task_of(writer, range(0)), None]
    task_of(writer, range(20, 30))  # of another attempt, whose message was lost
    assert everything(stream, "in") == rounds(10)
    travelled(writer).commit(messages)
    assert everything(stream, "in") == rounds(30)
    assert stream.list_transactions() == [], "nobody will ask for them"
    assert [problem for problem in stream.fsck() if not problem.is_harmless] == []


def test_a_write_that_failed_leaves_nothing(stream: Store) -> None:
    writer = writer_of(stream, "in")

    def broken() -> Iterator[pa.RecordBatch]:
        yield batch_of([("k0", 10)])
        raise OSError("the executor's disk is full")

    with pytest.raises(OSError, match="disk is full"):
        writer.write(broken())
    task_of(writer, range(10, 20))
    travelled(writer).abort([None, None])
    assert everything(stream, "in") == rounds(10)
    stream.seal("in")  # which nothing that is prepared prevents


@pytest.mark.parametrize("verb", ["commit", "recover", "forget_outcomes"])
def test_a_write_that_is_visible_does_not_seem_to_have_failed(
    stream: Store, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # whoever is told that it has failed writes it again
    call, failed = getattr(Transactions, verb), []

    def lost(self: Transactions, *arguments: Any, **options: Any) -> Any:
        found = call(self, *arguments, **options)
        if not failed:
            failed.append(verb)
            raise StorageError(verb, "catalogue", "the answer was lost")
        return found

    writer = writer_of(stream, "in")
    message = task_of(writer, range(10, 20))
    monkeypatch.setattr(Transactions, verb, lost)
    writer.commit([message])
    assert failed == [verb]
    assert everything(stream, "in") == rounds(20)


def test_a_late_task_of_a_decided_write_can_do_nothing(stream: Store) -> None:
    writer = writer_of(stream, "in")
    writer.commit([task_of(writer, range(10, 20))])
    with pytest.raises(FencedError):
        task_of(writer, range(10, 20))
    assert everything(stream, "in") == rounds(20)


# -- writing micro-batches -------------------------------------------------------------------------------------------


class Context:
    """The part of a task's context that is asked for."""

    def __init__(self, query: str | None = None, batch: str | None = None) -> None:
        self.properties = {stream_writer.QUERY_ID: query, stream_writer.BATCH_ID: batch}

    def getLocalProperty(self, name: str) -> str | None:  # noqa: N802 - PySpark's name
        return self.properties[name]


@pytest.fixture
def micro_batch(monkeypatch: pytest.MonkeyPatch) -> Context:
    context = Context("q", "0")
    monkeypatch.setattr(TaskContext, "get", lambda: context)
    return context


def query(store: Store, stream: str = "in") -> MicroBatchWriter:
    """Return a writer as Spark makes it for each task and each commit."""
    writer = source(store, stream, checkpointLocation="/checkpoints").streamWriter(SPARK_SCHEMA, overwrite=False)
    assert isinstance(writer, MicroBatchWriter)
    return writer


def number(context: Context, batch: int) -> None:
    context.properties[stream_writer.BATCH_ID] = str(batch)


def test_a_micro_batch_that_is_repeated_is_written_once(stream: Store, micro_batch: Context) -> None:  # SP9
    for batch in range(3):
        number(micro_batch, batch)
        for _ in range(2):  # the driver died before it had recorded the commit
            messages = [task_of(query(stream), range(10 + batch, 11 + batch)), None]
            query(stream).commit(messages, batch)
            assert everything(stream, "in") == rounds(11 + batch)
    query(stream).commit([None], 3)
    assert everything(stream, "in") == rounds(13)
    stream.seal("in")  # nothing is prepared any more


def test_a_micro_batch_that_failed_is_tried_again(stream: Store, micro_batch: Context) -> None:  # SP9
    query(stream).abort([task_of(query(stream), range(10, 20)), None], 0)
    assert everything(stream, "in") == rounds(10)
    task_of(query(stream), range(10, 20))  # the driver died behind this one
    query(stream).commit([task_of(query(stream), range(10, 20))], 0)
    assert everything(stream, "in") == rounds(20)
    assert [x.status for x in stream.list_transactions() if x.status is Status.PREPARED] == []


def test_of_two_drivers_one_commits_a_micro_batch(stream: Store, micro_batch: Context) -> None:  # SP10
    first, second = (task_of(query(stream), range(10, 20)) for _ in range(2))
    query(stream).commit([second], 0)
    query(stream).commit([first], 0)  # sees it behind its fence
    assert everything(stream, "in") == rounds(20)
    number(micro_batch, 1)
    first, second = (task_of(query(stream), range(20, 30)) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        look = Store.list_transactions

        def other_driver(self: Store, **options: Any) -> Any:
            patch.setattr(Store, "list_transactions", look)
            found = self.list_transactions(**options)
            query(stream).commit([second], 1)  # between the look of this one and its commit
            return found

        patch.setattr(Store, "list_transactions", other_driver)
        with pytest.raises(FencedError):
            query(stream).commit([first], 1)
    assert everything(stream, "in") == rounds(30)


def test_an_answer_that_was_lost_is_no_second_commit(
    stream: Store, micro_batch: Context, monkeypatch: pytest.MonkeyPatch
) -> None:  # SP9
    commit = Store.commit_transactions

    def lost(self: Store, *names: Any, **options: Any) -> None:
        commit(self, *names, **options)
        raise StorageError("commit", "catalogue", "the answer was lost")  # again and again

    message = task_of(query(stream), range(10, 20))
    with monkeypatch.context() as patch:
        patch.setattr(Store, "commit_transactions", lost)
        with pytest.raises(StorageError):
            query(stream).commit([message], 0)
    query(stream).abort([message], 0)  # which Spark calls then
    query(stream).commit([task_of(query(stream), range(10, 20))], 0)
    assert everything(stream, "in") == rounds(20)


def test_outcomes_of_earlier_micro_batches_are_forgotten(stream: Store, micro_batch: Context) -> None:  # SP10
    for batch in range(4):
        number(micro_batch, batch)
        query(stream).commit([task_of(query(stream), range(10 + batch, 11 + batch)) for _ in range(2)], batch)
    assert {x.name.partition("/")[0] for x in stream.list_transactions()} == {"batch-000000000003"}


def test_a_driver_that_comes_late_writes_nothing_again(stream: Store, micro_batch: Context) -> None:  # SP10
    """It was frozen before its tasks began, and another one has gone on with the query meanwhile."""
    for batch in range(2):
        number(micro_batch, batch)
        query(stream).commit([task_of(query(stream), range(10 + batch, 11 + batch))], batch)
    number(micro_batch, 0)
    late = task_of(query(stream), range(10, 11))
    with pytest.raises(UsageError, match="micro-batch 0 of spark/query-q comes after 1, which is in the stream"):
        query(stream).commit([late], 0)
    query(stream).abort([late], 0)
    number(micro_batch, 1)
    query(stream).commit([task_of(query(stream), range(11, 12))], 1)
    assert everything(stream, "in") == rounds(12)
    stream.seal("in")


def test_a_micro_batch_without_rows_lets_no_late_driver_in(stream: Store, micro_batch: Context) -> None:  # SP10
    """One query runs twice, from a copy of its checkpoint directory."""
    for batch, rounds_ in enumerate([range(10, 11), range(11, 12), range(0), range(0)]):
        number(micro_batch, batch)
        query(stream).commit([task_of(query(stream), rounds_)], batch)
    number(micro_batch, 1)
    query(stream).commit([task_of(query(stream), range(11, 12))], 1)
    number(micro_batch, 0)
    with pytest.raises(UsageError, match="micro-batch 0 of spark/query-q comes after 1, which is in the stream"):
        query(stream).commit([task_of(query(stream), range(10, 11))], 0)
    assert everything(stream, "in") == rounds(12)


def test_files_of_tasks_that_died_are_swept_now_and_then(
    stream: Store, micro_batch: Context, monkeypatch: pytest.MonkeyPatch
) -> None:  # SP10: looking at all files of the query takes the longer, the more there are
    monkeypatch.setattr(stream_writer, "SWEEP_EVERY", 3)
    died = stream.transactions.begin("in", owner="spark/query-q", epoch=0, name="never")
    died._write_chunk([batch_of([("k0", 1)])])  # what a large transaction writes before it is prepared
    for batch, count in ((1, 1), (2, 1), (3, 0)):
        number(micro_batch, batch)
        query(stream).commit([task_of(query(stream), range(10 + batch, 11 + batch))], batch)
        left = [problem for problem in stream.fsck() if problem.is_harmless]
        assert len(left) == count


def test_without_the_number_of_the_micro_batch_nothing_is_written(
    stream: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"Spark does not tell its tasks sql.streaming.queryId"):  # SP9
        task_of(query(stream), range(1))
    context = Context("q")
    monkeypatch.setattr(TaskContext, "get", lambda: context)
    with pytest.raises(UsageError, match=r"Spark does not tell its tasks streaming.sql.batchId"):
        task_of(query(stream), range(1))


def test_a_write_looks_after_the_retention_of_its_stream(store: Store) -> None:
    store.create_stream("out", SCHEMA, segments=1, retention=Retention(size=1))
    for first in (0, 10):
        writer = writer_of(store)
        writer.commit([task_of(writer, range(first, first + 10))])
        Store.shared(store.root)._maintenance._due_ms.clear()
    assert store.head("out").positions[0] > 0
